"""The same draft length for every chain, and the same reach for every workflow, whatever happens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..admission import Frontier
from ..effects import RUN_AHEAD, Effect
from ..errors import InvalidSettingError
from ..speculation import Budget, Opportunity, Resolution
from ..types import ChainView, RoundReport
from .reach import UNLIMITED, Reach


class Fixed(Reach):
    """Runs ahead by ``num_draft``, always.

    For chains: drafts ``num_draft`` items for every chain and executes all of them. For workflows: follows guesses up
    to ``num_draft`` deep and starts everything that may run on them.

    Args:
        num_draft: items per chain and round, or unresolved guesses that one world may rest on; 0 is plain execution.
        width: most guesses of one result that are followed at the same time (workflows).
        effects: effects that may run on a guess (workflows).
        budget: hard limits on what speculation may use up in one run (workflows).

    Raises:
        InvalidSettingError: ``num_draft`` is negative, ``width`` below 1, or ``effects`` lists IRREVERSIBLE.
    """

    def __init__(
        self,
        num_draft: int,
        *,
        width: int = 1,
        effects: Collection[Effect] = RUN_AHEAD,
        budget: Budget = UNLIMITED,
    ) -> None:
        if type(num_draft) is not int or num_draft < 0:
            raise InvalidSettingError("num_draft", num_draft, "an integer >= 0")
        super().__init__(depth=num_draft, width=width, effects=effects, budget=budget)
        self._num_draft = num_draft

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """``num_draft`` for every chain."""
        return [self._num_draft] * len(chains)

    def admit(self, frontier: Frontier) -> None:
        """Everything that was drafted."""
        frontier.admit_all()

    def observe(self, report: RoundReport) -> None:
        """Learns nothing."""

    def allows(self, opportunity: Opportunity) -> bool:
        """Always."""
        del opportunity
        return True

    def learn(self, resolution: Resolution) -> None:
        """Learns nothing."""
