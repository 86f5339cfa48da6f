"""The same draft length for every chain, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..types import ChainView, RoundReport


class Fixed:
    """Drafts ``num_draft`` items for every chain and executes all of them.

    Args:
        num_draft: items per chain and round; 0 is plain execution.

    Raises:
        InvalidSettingError: ``num_draft`` is negative.
    """

    def __init__(self, num_draft: int) -> None:
        if num_draft < 0:
            raise InvalidSettingError("num_draft", num_draft, "an integer >= 0")
        self._num_draft = num_draft

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """``num_draft`` for every chain."""
        return [self._num_draft] * len(chains)

    def admit(self, frontier: Frontier) -> None:
        """Everything that was drafted."""
        frontier.admit_all()

    def observe(self, report: RoundReport) -> None:
        """Learns nothing."""
