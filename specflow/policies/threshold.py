"""Run ahead while the drafter or predictor believes in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..admission import Frontier
from ..effects import RUN_AHEAD, Effect
from ..errors import InvalidSettingError
from ..speculation import Budget, Opportunity, Resolution
from ..types import ChainView, RoundReport
from .reach import UNLIMITED, Reach


class Threshold(Reach):
    """Runs ahead by at most ``num_draft``, as long as the raw estimates of survival reach ``min_survival``.

    For chains: drafts ``num_draft`` items and executes the prefix whose survival estimates reach ``min_survival``. For
    workflows: starts a step while the product of the confidences of the guesses it would rest on reaches
    ``min_survival``. Estimates are taken as stated: a drafter or predictor without any counts as certain.

    Args:
        num_draft: items per chain and round, or unresolved guesses that one world may rest on; 0 is plain execution.
        min_survival: least estimated probability that an item and all before it are accepted, or that all guesses
            hold; in [0, 1].
        width: most guesses of one result that are followed at the same time (workflows).
        effects: effects that may run on a guess (workflows).
        budget: hard limits on what speculation may use up in one run (workflows).

    Raises:
        InvalidSettingError: a setting is out of its range, or ``effects`` lists IRREVERSIBLE.
    """

    def __init__(
        self,
        num_draft: int,
        min_survival: float,
        *,
        width: int = 1,
        effects: Collection[Effect] = RUN_AHEAD,
        budget: Budget = UNLIMITED,
    ) -> None:
        if num_draft < 0:
            raise InvalidSettingError("num_draft", num_draft, "an integer >= 0")
        if not 0.0 <= min_survival <= 1.0:
            raise InvalidSettingError("min_survival", min_survival, "a probability in [0, 1]")
        super().__init__(depth=num_draft, width=width, effects=effects, budget=budget)
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

    def allows(self, opportunity: Opportunity) -> bool:
        """While the product of the guesses' confidences reaches ``min_survival``."""
        return math.prod(guess.confidence for guess in opportunity.assumptions) >= self._min_survival

    def learn(self, resolution: Resolution) -> None:
        """Learns nothing."""
