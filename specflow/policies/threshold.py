"""Execute a drafted item while the drafter believes in it."""

from __future__ import annotations

from collections.abc import Sequence

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..types import ChainView, RoundReport


class Threshold:
    """Drafts ``num_draft`` items and executes the prefix whose survival estimates reach ``min_survival``.

    A drafter without estimates counts as certain, so everything it drafts is executed.

    Args:
        num_draft: items per chain and round; 0 is plain execution.
        min_survival: least estimated probability that an item and all before it are accepted; in [0, 1].

    Raises:
        InvalidSettingError: a setting is out of its range.
    """

    def __init__(self, num_draft: int, min_survival: float) -> None:
        if num_draft < 0:
            raise InvalidSettingError("num_draft", num_draft, "an integer >= 0")
        if not 0.0 <= min_survival <= 1.0:
            raise InvalidSettingError("min_survival", min_survival, "a probability in [0, 1]")
        self._num_draft = num_draft
        self._min_survival = min_survival

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """``num_draft`` for every chain."""
        return [self._num_draft] * len(chains)

    def admit(self, frontier: Frontier) -> None:
        """Each draft up to its first estimate below the threshold."""
        for index in range(len(frontier)):
            survival = frontier.survival(index)
            while survival is not None and survival >= self._min_survival:
                frontier.admit(index)
                survival = frontier.survival(index)

    def observe(self, report: RoundReport) -> None:
        """Learns nothing."""
