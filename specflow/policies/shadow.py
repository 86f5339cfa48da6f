"""Predict and score, but start nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..protocols import RunAheadPolicy
from ..speculation import Assumption, Opportunity, Resolution
from .reach import Around


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What a policy would have started, had it been let."""

    asked: int
    """Opportunities there were."""
    allowed: int
    """Those it would have started."""
    allowed_by_step: Mapping[str, int]
    """The same, by step."""
    money: float
    """Declared price of what it would have started, if every start were paid in full."""
    tokens: float
    """Declared tokens of the same."""
    hits: int
    """Guesses that turned out right."""
    misses: int
    """Guesses that turned out wrong."""

    @property
    def hit_rate(self) -> float:
        """Right guesses per guess; 0 when there was none."""
        guesses = self.hits + self.misses
        return self.hits / guesses if guesses else 0.0


_MAX_OPEN = 1024
"""Opportunities remembered at the same time. Guesses of a run that failed are never resolved, so there is a limit."""


class Shadow(Around):
    """Lets predictors guess and the policy inside learn, but never starts anything on a guess.

    The way to try a predictor or policy on real traffic at no risk: look at :meth:`report`, then use the policy
    itself. Since nothing runs on a guess, only the first step behind each guess is seen, not those that would follow.

    What is refused may be asked for again until its guess is resolved. It is counted once, as allowed if the policy
    inside allowed it at any of these times; parallel calls of one step on the same guesses count as one.

    Args:
        policy: the policy that is tried.
    """

    def __init__(self, policy: RunAheadPolicy) -> None:
        super().__init__(policy)
        self._open: dict[tuple[str, tuple[Assumption, ...]], bool] = {}
        self._asked = 0
        self._allowed: Counter[str] = Counter()
        self._money = 0.0
        self._tokens = 0.0
        self._hits = 0
        self._misses = 0

    def allows(self, opportunity: Opportunity) -> bool:
        """Never; counts what the policy inside says."""
        key = (opportunity.step, opportunity.assumptions)
        was_allowed = self._open.get(key)
        if was_allowed is None:
            self._asked += 1
            if len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
        self._open[key] = is_allowed = self._policy.allows(opportunity) or was_allowed is True
        if is_allowed and not was_allowed:
            self._allowed[opportunity.step] += 1
            self._money += opportunity.money
            self._tokens += opportunity.tokens
        return False

    def learn(self, resolution: Resolution) -> None:
        """Score the guess and pass it on."""
        if resolution.hit:
            self._hits += 1
        else:
            self._misses += 1
        for key in [key for key in self._open if resolution.assumption in key[1]]:
            del self._open[key]
        self._policy.learn(resolution)

    def report(self) -> ShadowReport:
        """What was counted so far."""
        return ShadowReport(
            asked=self._asked,
            allowed=self._allowed.total(),
            allowed_by_step=dict(self._allowed),
            money=self._money,
            tokens=self._tokens,
            hits=self._hits,
            misses=self._misses,
        )
