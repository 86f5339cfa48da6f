"""How often drafted items are really accepted, and what a drafter's own estimates are worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..trees import depths

_PRIOR_RATIO = 0.8
"""Accepted items per claimed one before anything was seen: drafters without estimates claim certainty."""
_PRIOR_WEIGHT = 2.0
_PRIOR_FADE = 4.0
"""Claims that what is assumed of an unseen position counts for, and claims seen there after which it counts half."""
_OTHERS_WEIGHT = 4.0
"""Most claims that other chains' results at the same position count for."""
_WORKING_RATIO = 0.5
"""Where at least this much of what is claimed is accepted, one more acceptance is no surprise."""
_CHAIN_MEMORY = 16.0
_POOL_MEMORY = 32.0
"""Claims after which an observation has faded to 1/e, unless asked for otherwise."""


class Profile:
    """Faded counts per draft position: claims made, trials run, items accepted.

    A trial at position k takes place when all items before k were accepted; its claim is the drafter's estimate of
    acceptance given that, ``survival[k] / survival[k - 1]``. Counts fade with the claims, not with time, so that a
    drafter that claims little is judged on as many expected acceptances as one that claims much.
    """

    __slots__ = ("accepted", "claims", "trials")

    def __init__(self, size: int) -> None:
        self.accepted = [0.0] * size
        self.claims = [0.0] * size
        self.trials = [0.0] * size

    def scale(self, factor: float) -> None:
        """Weaken everything known to ``factor`` of its weight."""
        self.accepted = [count * factor for count in self.accepted]
        self.claims = [count * factor for count in self.claims]
        self.trials = [count * factor for count in self.trials]


class Calibration:
    """Corrects survival estimates by what happened, per position, per chain and pooled over chains.

    The corrected conditional acceptance at position k is ``claim * ratio``, where ``ratio`` is items accepted per item
    claimed: below 1 for an overconfident drafter, above 1 for an underconfident one. A drafter without estimates
    claims 1.0 everywhere, and its ratio simply is its acceptance rate. A chain's own counts are joined by a bounded
    weight of what other chains saw at that position, and of what was seen at other positions (at first, of a prior),
    so that new chains and rare positions start from something sensible and soon speak for themselves. No observation
    counts twice.

    Args:
        size: number of draft positions.
        memory: claims after which an observation of one profile has faded to 1/e.
        pool_memory: the same for what is pooled over all profiles.
    """

    __slots__ = ("_claimed", "_memory", "_pool_memory", "_tried", "pool")

    def __init__(self, size: int, memory: float = _CHAIN_MEMORY, pool_memory: float = _POOL_MEMORY) -> None:
        self.pool = Profile(size)
        self._memory = memory
        self._pool_memory = pool_memory
        self._claimed: list[float] | None = None
        self._tried: list[float] | None = None

    def record(self, profile: Profile, survival: Sequence[float] | None, admitted: int, accepted: int) -> None:
        """Learn from one verified draft of the chain that ``profile`` belongs to."""
        # Written out for speed: this runs for every chain in every round, once per item tried.
        own_accepted, own_claims, own_trials = profile.accepted, profile.claims, profile.trials
        all_accepted, all_claims, all_trials = self.pool.accepted, self.pool.claims, self.pool.trials
        memory, pool_memory = self._memory, self._pool_memory
        claim = before = 1.0
        for position in range(accepted + 1 if accepted < admitted else admitted):
            if survival is not None:
                estimate = survival[position]
                claim = 1.0 if estimate >= before else estimate / before if estimate > 0.0 else 0.0
                before = estimate
            hit = 1.0 if position < accepted else 0.0
            keep = 1.0 - claim / memory
            own_accepted[position] = own_accepted[position] * keep + hit
            own_claims[position] = own_claims[position] * keep + claim
            own_trials[position] = own_trials[position] * keep + 1.0
            keep = 1.0 - claim / pool_memory
            all_accepted[position] = all_accepted[position] * keep + hit
            all_claims[position] = all_claims[position] * keep + claim
            all_trials[position] = all_trials[position] * keep + 1.0
        self._claimed = self._tried = None

    def forgive(self, profile: Profile) -> None:
        """After a successful probe: forget estimates that say it should have failed, of the chain and of the pool."""
        if self.ratio(profile, 0) >= _WORKING_RATIO:
            return
        profile.scale(0.0)
        if self.pool.accepted[0] < _WORKING_RATIO * self.pool.claims[0]:
            heaviest = max(self.pool.claims)
            if heaviest > 1.0:
                self.pool.scale(1.0 / heaviest)
        self._claimed = self._tried = None

    def fade(self, factor: float, profiles: Iterable[Profile]) -> None:
        """Weaken all that is known, of these profiles and of the pool, to ``factor`` of its weight."""
        for profile in (self.pool, *profiles):
            profile.scale(factor)
        self._claimed = self._tried = None

    def ratio(self, profile: Profile, position: int) -> float:
        """Accepted items per claimed item at ``position`` for the chain of ``profile``."""
        pool = self.pool
        if self._claimed is None:
            self._claimed = _elsewhere(pool.accepted, pool.claims)
        assumed = self._claimed[position]
        return _joined(
            assumed,
            profile.accepted[position],
            profile.claims[position],
            pool.accepted[position],
            pool.claims[position],
        )

    def corrected(
        self, profile: Profile, survival: Sequence[float], parents: Sequence[int] | None = None
    ) -> list[float]:
        """A whole draft's survival estimates in the light of what happened; later positions share the last ratio.

        Args:
            profile: of its chain.
            survival: as claimed.
            parents: of a draft that branches.
        """
        last = len(self.pool.claims) - 1
        if parents is not None:
            scales = self.scales(profile)
            return [
                min(1.0, claim * scales[min(depth, last)])
                for claim, depth in zip(survival, depths(parents), strict=True)
            ]
        result: list[float] = []
        alive = before = 1.0
        for position, claim in enumerate(survival):
            alive *= min(1.0, conditional(claim, before) * self.ratio(profile, min(position, last)))
            before = claim
            result.append(alive)
        return result

    def scales(self, profile: Profile) -> list[float]:
        """By depth, what a claim about an item of a tree is multiplied with: the ratios of all places up to there."""
        product, result = 1.0, []
        for position in range(len(self.pool.claims)):
            product *= self.ratio(profile, position)
            result.append(product)
        return result

    def rate(self, profile: Profile, position: int) -> float:
        """Acceptance at ``position`` given all items before it were accepted, whatever was claimed."""
        pool = self.pool
        if self._tried is None:
            self._tried = _elsewhere(pool.accepted, pool.trials)
        assumed = self._tried[position]
        rate = _joined(
            assumed,
            profile.accepted[position],
            profile.trials[position],
            pool.accepted[position],
            pool.trials[position],
        )
        return min(1.0, rate)


def conditional(claim: float, before: float) -> float:
    """The claim about an item given that the items before it are accepted, of which ``before`` was claimed."""
    return 1.0 if claim >= before else claim / before


def _joined(assumed: float, accepted: float, weight: float, pool_accepted: float, pool_weight: float) -> float:
    """Acceptances per unit of weight: own counts, those of the pool beyond them, and what is assumed without them."""
    others = pool_weight - weight
    if others > 0.0:
        share = _OTHERS_WEIGHT / others if others > _OTHERS_WEIGHT else 1.0
        if pool_accepted > accepted:
            accepted += share * (pool_accepted - accepted)
        weight += share * others
    # Own counts never outgrow their memory. The assumption has to give way, or it would bias the estimate for ever.
    prior = _PRIOR_WEIGHT * _PRIOR_FADE / (_PRIOR_FADE + weight)
    return (accepted + prior * assumed) / (weight + prior)


def _elsewhere(accepted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """What is assumed of each position, from the others and the prior."""
    all_accepted = _PRIOR_WEIGHT * _PRIOR_RATIO + sum(accepted)
    all_weight = _PRIOR_WEIGHT + sum(weights)
    return [(all_accepted - hits) / (all_weight - weight) for hits, weight in zip(accepted, weights, strict=True)]
