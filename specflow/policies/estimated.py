"""Survival estimates for drafters that have none, and better ones for those that have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..protocols import Policy
from ..trees import fate
from ..types import Admission, ChainId, ChainView, RoundReport
from .acceptance import Calibration, Profile, conditional

_MEMORY = 256.0
_POOL_MEMORY = 1024.0
"""Claims after which an observation of a bucket, or of all, has faded to 1/e. They are shared by all chains."""
_AGE = 0.9
_AGE_ROUNDS = 32
"""Every so many rounds all that is known loses weight. What is no longer executed for its low rate would otherwise
never be tried again."""
_SPARE_CHAINS = 64
"""Chains that may be absent from a round without being forgotten, beyond as many as are present."""


def no_context(view: ChainView) -> Hashable:
    """The same for every chain."""
    del view
    return None


class Estimated:
    """Shows the policy inside estimates that are learned from what was really accepted.

    A drafter without estimates claims certainty; here each of its items is given the rate at which items at that
    position are accepted. A drafter with estimates has them corrected by what such claims were worth, items accepted
    per item claimed (:class:`~specflow.policies.acceptance.Calibration`). Either is learned online, per draft position
    and *bucket*. The bucket of a chain is how its newest executed draft fared (untried, nothing, part or all of it
    accepted: easy stretches come in runs), joined with the ``context`` that the caller can tell. Buckets are shared by
    all chains, and rare ones lean on the others.

    Nothing here looks at a drafted value: a bucket is known before the draft is made. Sampling stays exact.

    Args:
        policy: the policy inside. It sees corrected estimates in frontiers and reports, and nothing else changes.
        max_draft: longest draft.
        context: what a chain's committed items say about how it will go on, as any hashable value. It must be computed
            from committed items only; a few dozen different values at most.

    Raises:
        InvalidSettingError: ``max_draft`` is negative.
    """

    def __init__(
        self, policy: Policy, max_draft: int, *, context: Callable[[ChainView], Hashable] = no_context
    ) -> None:
        if not max_draft >= 0:
            raise InvalidSettingError("max_draft", max_draft, "an integer >= 0")
        self._policy = policy
        self._max_draft = max_draft
        self._context = context
        self._calibration = Calibration(max_draft, _MEMORY, _POOL_MEMORY)
        self._profiles: dict[Hashable, Profile] = {}
        self._fared: dict[ChainId, int] = {}
        self._round: list[Profile] = []
        self._rounds = 0

    @property
    def policy(self) -> Policy:
        """The policy inside."""
        return self._policy

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As the policy inside, at most ``max_draft``."""
        if len(self._fared) > 2 * len(chains) + _SPARE_CHAINS:
            live = {view.chain_id for view in chains}
            self._fared = {chain_id: fared for chain_id, fared in self._fared.items() if chain_id in live}
        self._round = [self._profile(view) for view in chains]
        return [min(limit, self._max_draft) for limit in self._policy.limits(chains)]

    def admit(self, frontier: Frontier) -> None:
        """As the policy inside, on corrected estimates."""
        self._policy.admit(_CorrectedFrontier(frontier, self._calibration, self._round))

    def observe(self, report: RoundReport) -> None:
        """Learn what was accepted, and hand on the report with the estimates that the policy inside could see."""
        corrected = tuple(
            [
                self._corrected(report, index, [1.0] * drafted if survival is None else survival)
                for index, (survival, drafted) in enumerate(zip(report.survival, report.drafted, strict=True))
            ]
        )
        for index, chain_id in enumerate(report.chain_ids):
            if report.admitted[index]:
                known = fate(report, index)
                self._calibration.record(self._round[index], known.survival, known.admitted, known.accepted)
                self._fared[chain_id] = 1 if known.accepted == 0 else 3 if known.accepted == known.admitted else 2
        self._rounds += 1
        if self._rounds % _AGE_ROUNDS == 0:
            self._calibration.fade(_AGE, self._profiles.values())
        self._policy.observe(replace(report, survival=corrected))

    def _corrected(self, report: RoundReport, index: int, survival: Sequence[float]) -> list[float]:
        tree = report.tree(index)
        return self._calibration.corrected(self._round[index], survival, None if tree is None else tree.parents)

    def rates(self) -> Sequence[float]:
        """Acceptance by position given all items before it were accepted, over all buckets."""
        newcomer = Profile(self._max_draft)
        return [self._calibration.rate(newcomer, position) for position in range(self._max_draft)]

    def _profile(self, view: ChainView) -> Profile:
        bucket = self._fared.get(view.chain_id, 0), self._context(view)
        profile = self._profiles.get(bucket)
        if profile is None:
            profile = self._profiles[bucket] = Profile(self._max_draft)
        return profile


class _CorrectedFrontier(Frontier):
    """Another frontier with corrected estimates: the same items become visible at the same time."""

    __slots__ = ("_calibration", "_claims", "_estimates", "_inner", "_profiles", "_scaled")

    def __init__(self, inner: Frontier, calibration: Calibration, profiles: Sequence[Profile]) -> None:
        self._inner = inner
        self._calibration = calibration
        self._profiles = profiles
        self._claims = [1.0] * len(profiles)  # made of the newest admitted item
        self._estimates = [1.0] * len(profiles)  # what became of them
        self._scaled: dict[int, Sequence[float]] = {}  # corrections by depth, for drafts that branch

    def __len__(self) -> int:
        return len(self._inner)

    def admitted(self, index: int) -> int:
        return self._inner.admitted(index)

    def available(self, index: int) -> int:
        return self._inner.available(index)

    def survival(self, index: int) -> float | None:
        claim = self._inner.survival(index)
        return None if claim is None else self._corrected(index, claim)

    def admit(self, index: int, count: int = 1) -> None:
        if not 0 <= count <= self.available(index):
            self._inner.admit(index, count)  # refuses, in its own words
        for _ in range(count):
            claim = self._inner.survival(index)
            if claim is not None:
                self._estimates[index], self._claims[index] = self._corrected(index, claim), claim
            self._inner.admit(index)

    def admit_all(self) -> None:
        self._inner.admit_all()

    def close(self, index: int) -> None:
        self._inner.close(index)

    def reveal(self, index: int) -> Sequence[float] | None:
        claims = self._inner.reveal(index)
        if claims is None:
            return None
        return self._calibration.corrected(self._profiles[index], claims, self._inner.parents(index))

    def parents(self, index: int) -> Sequence[int] | None:
        return self._inner.parents(index)

    def decision(self) -> Admission:
        return self._inner.decision()

    def _scales(self, index: int) -> Sequence[float]:
        if index not in self._scaled:
            self._scaled[index] = self._calibration.scales(self._profiles[index])
        return self._scaled[index]

    def depth(self, index: int) -> int:
        return self._inner.depth(index)

    def _place(self, index: int) -> int:
        return min(self._inner.depth(index), len(self._calibration.pool.claims) - 1)

    def _corrected(self, index: int, claim: float) -> float:
        if self._inner.parents(index) is not None:
            return min(1.0, claim * self._scales(index)[self._place(index)])
        ratio = self._calibration.ratio(self._profiles[index], self._inner.admitted(index))
        return self._estimates[index] * min(1.0, conditional(claim, self._claims[index]) * ratio)
