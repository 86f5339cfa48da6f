"""How many items to ask a drafter for, where asking costs time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..types import RoundReport
from .round_costs import RoundCosts

_FREE = 0.02
"""Drafting that costs less than this fraction of a plain round is not planned: as much as allowed is asked for."""
_TRIAL = 16.0
"""Drafts that are looked at before anything is planned: one bad draft says nothing."""
_MEMORY = 512.0
"""Drafts after which an observation has faded to 1/e."""
_STALE_MEMORY = 16.0
"""The same for places that were not asked for in the round before: what is seen there seldom must count for more."""
_PROBE = 2
"""Most rounds of full drafts in a row, when lengths that are no longer asked for are looked at again; fewer where that
shows :data:`_TRIAL` drafts."""
_AS_GOOD = 0.995
"""The longest length that promises this fraction of the most is taken: a draft may turn out better than the mean."""
_MAX_WAIT = 256


class DraftPlan:
    """Chooses the common draft length, 0 included, with the most expected items per second.

    What is drafted is paid for whether or not it is executed, which no rule of admission can undo. The plan compares
    all lengths by the drafter's own estimates in recent rounds: with ``s[k]`` the mean survival of item k (0 where no
    draft was offered), a length L promises ``max over l <= L of (1 + s[0] + ... + s[l - 1]) / (drafting(L) +
    execution(l))`` items per second and chain. Estimates of items that are no longer asked for grow old, so full
    drafts are asked for (twice, or once for many chains) after ``first_wait`` rounds, and after twice as many each time
    that changes nothing.

    Args:
        max_draft: longest draft ever asked for.
        costs: of a round.
        first_wait: rounds until full drafts are asked for again.
    """

    def __init__(self, max_draft: int, costs: RoundCosts, first_wait: int = 32) -> None:
        self._max_draft = max_draft
        self._costs = costs
        self._first_wait = first_wait
        self._wait = first_wait
        self._since_full = 0
        self._asked = max_draft
        self._survival: list[float] = [1.0] * max_draft
        self._drafts = [0.0] * max_draft
        self._probing = 0

    def length(self, num_chains: int) -> int:
        """How many items to ask for, for every chain."""
        costs, most = self._costs, self._max_draft
        plain = costs.execution(num_chains, 0)[0]
        if most == 0 or self._drafts[-1] < _TRIAL or costs.drafting(num_chains, most) <= _FREE * plain:
            return most
        best = self._best(num_chains)
        if best == most:
            self._wait = self._first_wait
        elif self._probing or self._since_full >= self._wait:
            if not self._probing:
                self._probing = min(_PROBE, math.ceil(_TRIAL / num_chains))
                self._wait = min(2 * self._wait, max(_MAX_WAIT, self._first_wait))
            self._probing -= 1
            return most
        return best

    def decay(self) -> Sequence[float]:
        """By place, the mean survival there over that of the item before it, in recent rounds; at most 1."""
        before, result = 1.0, []
        for survival in self._survival:
            result.append(min(1.0, survival / before) if before > 0.0 else 0.0)
            before = survival
        return result

    def observe(self, report: RoundReport) -> None:
        """Learn the estimates of a finished round."""
        self._since_full = 0 if max(report.limits) == self._max_draft else self._since_full + 1
        for place in range(max(report.limits)):
            claims = [
                _claim(survival, drafted, place)
                for survival, drafted, limit in zip(report.survival, report.drafted, report.limits, strict=True)
                if limit > place
            ]
            memory = _MEMORY if place < self._asked else _STALE_MEMORY
            self._drafts[place] = seen = max(min(self._drafts[place] + len(claims), memory), float(len(claims)))
            self._survival[place] += (sum(claims) - len(claims) * self._survival[place]) / seen
        self._asked = max(report.limits)

    def _best(self, num_chains: int) -> int:
        costs = self._costs
        curve = costs.execution(num_chains, costs.steps(num_chains, self._max_draft))
        per_item = 1 if costs.is_padded else num_chains
        rates = [_rate(1.0, curve[0])]
        for length in range(1, self._max_draft + 1):
            drafting, expected, best = costs.drafting(num_chains, length), 1.0, 0.0
            for executed in range(length + 1):
                best = max(best, _rate(expected, drafting + curve[executed * per_item]))
                if executed < length:
                    expected += self._survival[executed]
            rates.append(best)
        enough = _AS_GOOD * max(rates)
        return max(length for length, rate in enumerate(rates) if rate >= enough)


def _rate(expected: float, seconds: float) -> float:
    return expected / seconds if seconds > 0.0 else math.inf


def _claim(survival: Sequence[float] | None, drafted: int, place: int) -> float:
    if drafted <= place:
        return 0.0
    return 1.0 if survival is None else survival[place]
