"""Tiny random instances for exact laws, mutants that break the rule, and rounds driven by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from specflow.admission import Frontier
from specflow.policies import CostTable, Fixed
from specflow.protocols import Policy
from specflow.testing import SpeculativeProcess
from specflow.types import Admission, ChainId, ChainView, Draft, PhaseSeconds, RoundReport
from specflow.verifiers import Law, PrefixRule

LawFunction = Callable[[tuple[int, ...]], Law]


def table(seconds: Callable[[int], float], widths: Sequence[int] = range(1, 40)) -> CostTable:
    """A confirmed cost table of a function of the width."""
    costs = CostTable()
    for width in widths:
        for _ in range(2):
            costs.observe(width, seconds(width))
    return costs


def random_table(seed: object, widths: int = 8) -> CostTable:
    """Random costs that rise steeply or not at all; often the first drafted item is dearer than those after it."""
    rng = random.Random(f"costs {seed}")
    seconds = [1.0, 1.0, 1.0 + rng.random()]
    while len(seconds) < widths:
        seconds.append(seconds[-1] + rng.choice([0.0, 0.05, 0.3]) * rng.random())
    return table(lambda width: seconds[width - 1], range(1, widths))


def random_law(seed: object, vocabulary: int = 3) -> LawFunction:
    """A law over a small vocabulary that depends on the whole prefix."""

    def law(prefix: tuple[int, ...]) -> Law:
        rng = random.Random(f"{seed} {prefix}")
        weights = [rng.random() ** 2 + 0.02 for _ in range(vocabulary)]
        return [weight / sum(weights) for weight in weights]

    return law


def random_process(seed: int, rule: PrefixRule, vocabulary: int = 3) -> SpeculativeProcess:
    """A random target and drafter with random confidences that depend on every drafted item before, never on its own.

    Revealed drafts are verified by the same rule, so that looking ahead is not excused.
    """

    def confidence(prefix: tuple[int, ...]) -> float:
        return random.Random(f"confidence {seed} {prefix}").choice([0.05, 0.5, 0.8, 0.95])

    return SpeculativeProcess(
        target=random_law(f"target {seed}", vocabulary),
        draft=random_law(f"draft {seed}", vocabulary),
        rule=rule,
        anticipated_rule=rule,
        survival=confidence,
    )


class OneRound:
    """Speculates in the first round only, so that the law of that round can be enumerated for larger instances."""

    def __init__(self, policy: Policy) -> None:
        self._policy: Policy | None = policy

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """Those of the policy, then none."""
        return [0] * len(chains) if self._policy is None else self._policy.limits(chains)

    def admit(self, frontier: Frontier) -> None:
        """As the policy."""
        if self._policy is not None:
            self._policy.admit(frontier)

    def observe(self, report: RoundReport) -> None:
        """Forget the policy."""
        self._policy = None


class Retrospective(Fixed):
    """MUTANT: takes the lengths with the most expected items per second, over all lengths, by all estimates."""

    def __init__(self, num_draft: int, costs: CostTable) -> None:
        super().__init__(num_draft)
        self._costs = costs

    def admit(self, frontier: Frontier) -> None:
        """Look at everything, then choose."""
        drafts = [frontier.reveal(index) or () for index in range(len(frontier))]

        def rate(lengths: Sequence[int]) -> float:
            expected = sum(1.0 + sum(draft[:length]) for draft, length in zip(drafts, lengths, strict=True))
            return expected / self._costs.seconds(len(drafts) + sum(lengths))

        best = max(itertools.product(*[range(len(draft) + 1) for draft in drafts]), key=rate)
        for index, length in enumerate(best):
            frontier.admit(index, length)


class BlockMean(Fixed):
    """MUTANT: executes a whole block if the mean confidence in it is above a half, and nothing of it otherwise."""

    def admit(self, frontier: Frontier) -> None:
        """Judge blocks as wholes."""
        for index in range(len(frontier)):
            survival = frontier.reveal(index) or ()
            ratios = [late / early for early, late in itertools.pairwise((1.0, *survival))]
            if ratios and sum(ratios) / len(ratios) > 0.5:
                frontier.admit(index, len(ratios))


class Rounds:
    """Drives a policy by hand: drafts and verdicts are given, lengths are returned."""

    def __init__(self, policy: Policy, num_chains: int = 1, room: int = 100) -> None:
        self.policy = policy
        self.limits: Sequence[int] = ()
        self.reports: list[RoundReport] = []
        self._views = [ChainView(ChainId(chain), 0, room) for chain in range(num_chains)]

    def admit(self, *drafts: Sequence[float] | None, lengths: Sequence[int] | None = None) -> Admission:
        """Ask for limits, cut the drafts to them, and return what is admitted.

        Args:
            drafts: survival estimates of each chain's draft; None drafts without estimates.
            lengths: items drafted where there are no estimates; as many as allowed by default.
        """
        self.limits = [
            min(limit, view.max_draft) for limit, view in zip(self.policy.limits(self._views), self._views, strict=True)
        ]
        self._drafts = []
        for chain, (draft, limit) in enumerate(zip(drafts, self.limits, strict=True)):
            if draft is None:
                self._drafts.append(Draft(range(limit if lengths is None else min(limit, lengths[chain]))))
            else:
                self._drafts.append(Draft(range(len(draft[:limit])), tuple(draft[:limit])))
        frontier = Frontier(self._drafts)
        self.policy.admit(frontier)
        self._admission = frontier.decision()
        return self._admission

    def observe(self, *accepted: int, seconds: float | None = None, predict: float = 0.0) -> RoundReport:
        """Let so many items be accepted, at most what was admitted, and report the round.

        Args:
            accepted: per chain.
            seconds: of the execution; as many as items by default.
            predict: seconds of drafting.
        """
        kept = tuple(min(count, length) for count, length in zip(accepted, self._admission.lengths, strict=True))
        width = len(kept) + self._admission.total
        report = RoundReport(
            index=len(self.reports),
            chain_ids=tuple(view.chain_id for view in self._views),
            limits=tuple(self.limits),
            drafted=tuple(len(draft.values) for draft in self._drafts),
            admitted=self._admission.lengths,
            accepted=kept,
            emitted=tuple(count + 1 for count in kept),
            survival=tuple(draft.survival for draft in self._drafts),
            seconds=PhaseSeconds(predict=predict, execute=float(width) if seconds is None else seconds),
        )
        self.reports.append(report)
        self.policy.observe(report)
        return report
