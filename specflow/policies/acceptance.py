"""How often drafted items are really accepted, and what a drafter's own estimates are worth."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_RATIO = 0.8
"""Accepted items per claimed one before anything was seen: drafters without estimates claim certainty."""
_PRIOR_WEIGHT = 1.0
_POSITION_WEIGHT = 4.0
_ANYWHERE_WEIGHT = 2.0
"""Most claims that the prior, other chains at the same position, and all chains at all positions count for."""
_CHAIN_MEMORY = 16.0
_POOL_MEMORY = 64.0
"""Claims after which an observation has faded to 1/e."""


class Profile:
    """Faded counts per draft position: claims made, trials run, items accepted.

    A trial at position k takes place when all items before k were accepted; its claim is the drafter's estimate of acceptance
    *given* that, ``survival[k] / survival[k - 1]``. Counts fade with the claims, not with time, so that a drafter that
    claims little is judged on as many expected acceptances as one that claims much.
    """

    __slots__ = ("accepted", "claims", "trials")

    def __init__(self, size: int) -> None:
        self.accepted = [0.0] * size
        self.claims = [0.0] * size
        self.trials = [0.0] * size

    def add(self, position: int, claim: float, hit: float, memory: float) -> None:
        """Fade the position's counts by one claim and add a trial."""
        keep = 1.0 - claim / memory
        self.accepted[position] = self.accepted[position] * keep + hit
        self.claims[position] = self.claims[position] * keep + claim
        self.trials[position] = self.trials[position] * keep + 1.0

    def scale(self, factor: float) -> None:
        """Weaken everything known to ``factor`` of its weight."""
        self.accepted = [count * factor for count in self.accepted]
        self.claims = [count * factor for count in self.claims]
        self.trials = [count * factor for count in self.trials]


class Calibration:
    """Corrects survival estimates by what happened, per position, per chain and pooled over chains.

    The corrected conditional acceptance at position k is ``claim * ratio``, where ``ratio`` is items accepted per item
    claimed: below 1 for an overconfident drafter, above 1 for an underconfident one. A drafter without estimates claims 1.0
    everywhere, and its ratio simply is its acceptance rate. A chain's own counts are joined by a bounded weight of what all
    chains saw at that position, of what was seen at any position, and of a prior (the mean of a Beta posterior whose prior is
    learned), so that new chains and rare positions start from something sensible and soon speak for themselves.

    Args:
        size: number of draft positions.
    """

    __slots__ = ("_anywhere", "_claimed", "_stale", "_tried", "pool")

    def __init__(self, size: int) -> None:
        self.pool = Profile(size)
        self._anywhere = Profile(1)
        self._claimed: list[tuple[float, float]] = []
        self._tried: list[tuple[float, float]] = []
        self._stale = True

    def record(self, profile: Profile, survival: Sequence[float] | None, admitted: int, accepted: int) -> None:
        """Learn from one verified draft of the chain that ``profile`` belongs to."""
        before = 1.0
        for position in range(min(accepted + 1, admitted)):
            claim = 1.0
            if survival is not None:
                estimate = survival[position]
                claim = 0.0 if before <= 0.0 else min(1.0, max(0.0, estimate / before))
                before = estimate
            hit = 1.0 if position < accepted else 0.0
            profile.add(position, claim, hit, _CHAIN_MEMORY)
            self.pool.add(position, claim, hit, _POOL_MEMORY)
            self._anywhere.add(0, claim, hit, _POOL_MEMORY)
        self._stale = True

    def forgive(self, profile: Profile) -> None:
        """Forget a chain's failures, and most of the pool's, after it was seen to work again."""
        profile.scale(0.0)
        for pooled in (self.pool, self._anywhere):
            heaviest = max(pooled.claims)
            if heaviest > _PRIOR_WEIGHT:
                pooled.scale(_PRIOR_WEIGHT / heaviest)
        self._stale = True

    def ratio(self, profile: Profile, position: int) -> float:
        """Accepted items per claimed item at ``position`` for the chain of ``profile``."""
        if self._stale:
            self._pool_evidence()
        accepted, claims = self._claimed[position]
        return (profile.accepted[position] + accepted) / (profile.claims[position] + claims)

    def rate(self, profile: Profile, position: int) -> float:
        """Acceptance at ``position`` given all items before it were accepted, whatever was claimed."""
        if self._stale:
            self._pool_evidence()
        accepted, trials = self._tried[position]
        return min(1.0, (profile.accepted[position] + accepted) / (profile.trials[position] + trials))

    def _pool_evidence(self) -> None:
        pool, anywhere = self.pool, self._anywhere
        self._claimed = _evidence(pool.accepted, pool.claims, anywhere.accepted[0], anywhere.claims[0])
        self._tried = _evidence(pool.accepted, pool.trials, anywhere.accepted[0], anywhere.trials[0])
        self._stale = False


def _evidence(
    accepted: Sequence[float], weights: Sequence[float], accepted_anywhere: float, weight_anywhere: float
) -> list[tuple[float, float]]:
    """(accepted, weight) by position that a chain's own counts are joined by."""
    share = min(1.0, _ANYWHERE_WEIGHT / weight_anywhere) if weight_anywhere > 0.0 else 0.0
    base_accepted = _PRIOR_WEIGHT * _PRIOR_RATIO + share * accepted_anywhere
    base_weight = _PRIOR_WEIGHT + share * weight_anywhere
    evidence: list[tuple[float, float]] = []
    for hits, weight in zip(accepted, weights, strict=True):
        share = min(1.0, _POSITION_WEIGHT / weight) if weight > 0.0 else 0.0
        evidence.append((base_accepted + share * hits, base_weight + share * weight))
    return evidence
