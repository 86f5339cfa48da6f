"""Exact laws of speculative sampling, by enumeration: no sampling noise, no seeds, errors near 1e-16.

Over a vocabulary of two to four items every possible draft, verdict and replacement can be listed with its
probability. Summing them gives the law of the emitted items under a given acceptance rule, drafter and policy, to be
compared with the law of plain sampling. A bias of any size shows.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..admission import Frontier
from ..errors import BackendContractError
from ..protocols import Policy
from ..types import Admission, ChainId, ChainView, Draft, PhaseSeconds, RoundReport
from ..verifiers import Law, PrefixRule, one_hot_rule

Prefix = tuple[int, ...]
"""The items of one chain so far, drafted ones included where a draft is being made."""
LawFunction = Callable[[Prefix], Law]
"""Probabilities of the next item after a prefix; of the same length for every prefix."""
JointLaw = Mapping[tuple[Prefix, ...], float]
"""Probability of every outcome, one sequence per chain. Sequences that stop early are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeProcess:
    """What is enumerated: a target, a drafter and an acceptance rule."""

    target: LawFunction
    """The law to be preserved."""
    draft: LawFunction
    """The law drafts are drawn from; one-hot laws make a deterministic drafter."""
    rule: PrefixRule
    """Verifies drafts that were admitted without looking ahead."""
    anticipated_rule: PrefixRule = one_hot_rule
    """Verifies drafts whose estimates were revealed before they were admitted."""
    declared_draft: LawFunction | None = None
    """What the rule is told the drafts were drawn from; None tells the truth."""
    survival: Callable[[Prefix], float] | None = None
    """Estimated probability that the item after a prefix is accepted; survival estimates are its running products.
    None gives none."""
    survival_looks_ahead: bool = False
    """True breaks the contract of :class:`~specflow.types.Draft`: the estimate for item k is made from items 0..k."""
    draft_ends: Callable[[Prefix], bool] | None = None
    """True where the drafter ends its draft after the last item of a prefix; None always drafts as much as is asked."""
    stop: Callable[[Prefix], bool] | None = None
    """True after the last item of a sequence; a block is cut there."""
    seconds: Callable[[int], float] = float
    """Seconds of an execution by its width, for policies that learn costs."""


@dataclass(frozen=True, slots=True)
class EnumeratedLaw:
    """The exact law of what is emitted, next to that of plain sampling."""

    law: JointLaw
    plain_law: JointLaw
    items_per_round: float
    """Expected items over expected rounds, per chain."""

    @property
    def total_variation(self) -> float:
        """Largest difference in the probability of any event; 0 is exact."""
        outcomes = {*self.law, *self.plain_law}
        return 0.5 * sum(abs(self.law.get(key, 0.0) - self.plain_law.get(key, 0.0)) for key in outcomes)


def enumerate_law(
    process: SpeculativeProcess, policy: Callable[[], Policy], num_items: int, num_chains: int = 1
) -> EnumeratedLaw:
    """Exact law of the first ``num_items`` items of each chain, over all drafts, verdicts and replacements.

    The policy is the real one: it is asked for limits, admits on a real :class:`~specflow.admission.Frontier` and
    observes a report after every round, so that state carried from round to round is part of what is checked. It must
    be picklable (states are copied and merged by their pickled bytes) and deterministic.

    The cost grows like (vocabulary ** (2 * num_items)) ** num_chains; three items of a vocabulary of three take well
    under a second with a stateless policy.

    Args:
        process: target, drafter and rule.
        policy: makes a fresh policy.
        num_items: length of the sequences.
        num_chains: how many independent chains share the rounds and the policy.
    """
    start: tuple[Prefix, ...] = ((),) * num_chains
    states: dict[tuple[tuple[Prefix, ...], bytes], float] = {(start, pickle.dumps(policy())): 1.0}
    law: dict[tuple[Prefix, ...], float] = defaultdict(float)
    rounds, items, index = 0.0, 0.0, 0
    while states:
        following: dict[tuple[tuple[Prefix, ...], bytes], float] = defaultdict(float)
        for (prefixes, memory), weight in states.items():
            live = [chain for chain, prefix in enumerate(prefixes) if not _has_ended(process, prefix, num_items)]
            if not live:
                law[prefixes] += weight
                continue
            rounds += weight * len(live)
            for step in _round(process, memory, [(chain, prefixes[chain]) for chain in live], num_items, index):
                after = list(prefixes)
                for chain, prefix in zip(live, step.prefixes, strict=True):
                    after[chain] = prefix
                    items += weight * step.probability * (len(prefix) - len(prefixes[chain]))
                following[tuple(after), step.memory] += weight * step.probability
        states, index = following, index + 1
    return EnumeratedLaw(dict(law), _plain_law(process, num_items, num_chains), items / rounds)


@dataclass(frozen=True, slots=True)
class _Step:
    """One possible round."""

    probability: float
    prefixes: tuple[Prefix, ...]
    memory: bytes


@dataclass(frozen=True, slots=True)
class _Ending:
    """One possible end of a chain's round."""

    probability: float
    num_accepted: int
    prefix: Prefix


def _round(
    process: SpeculativeProcess, memory: bytes, live: Sequence[tuple[int, Prefix]], num_items: int, index: int
) -> Iterator[_Step]:
    views = [ChainView(ChainId(chain), len(prefix), num_items - len(prefix) - 1) for chain, prefix in live]
    policy = _restore(memory)
    limits = [min(limit, view.max_draft) for limit, view in zip(policy.limits(views), views, strict=True)]
    asked = pickle.dumps(policy)
    for choice in product(*[_drafts(process, prefix, limit) for (_, prefix), limit in zip(live, limits, strict=True)]):
        drafts = [draft for draft, _ in choice]
        policy = _restore(asked)
        frontier = Frontier(drafts)
        policy.admit(frontier)
        admission = frontier.decision()
        decided = pickle.dumps(policy)
        drawn = _product([probability for _, probability in choice])
        endings = [
            _endings(process, prefix, draft.values[:length], process.anticipated_rule if anticipated else process.rule)
            for (_, prefix), draft, length, anticipated in zip(
                live, drafts, admission.lengths, admission.anticipated, strict=True
            )
        ]
        for ends in product(*endings):
            policy = _restore(decided)
            policy.observe(_report(process, index, views, limits, drafts, admission, ends))
            yield _Step(
                drawn * _product([end.probability for end in ends]),
                tuple(end.prefix for end in ends),
                pickle.dumps(policy),
            )


def _drafts(process: SpeculativeProcess, prefix: Prefix, limit: int) -> Iterator[tuple[Draft[int], float]]:
    """All drafts of up to ``limit`` items with their probabilities."""
    blocks: list[tuple[Prefix, list[float], float]] = [((), [], 1.0)]
    for _ in range(limit):
        longer: list[tuple[Prefix, list[float], float]] = []
        for values, survival, probability in blocks:
            if values and process.draft_ends is not None and process.draft_ends(prefix + values):
                longer.append((values, survival, probability))
                continue
            for item, chance in enumerate(process.draft(prefix + values)):
                if chance > 0.0:
                    estimates = _extended(process, survival, prefix + values, item)
                    longer.append(((*values, item), estimates, probability * chance))
        blocks = longer
    for values, survival, probability in blocks:
        yield Draft(values, None if process.survival is None else survival), probability


def _extended(process: SpeculativeProcess, survival: list[float], context: Prefix, item: int) -> list[float]:
    """The survival estimates with that of ``item``, drafted after ``context``."""
    if process.survival is None:
        return survival
    estimate = process.survival((*context, item) if process.survival_looks_ahead else context)
    return [*survival, (survival[-1] if survival else 1.0) * estimate]


def _endings(process: SpeculativeProcess, prefix: Prefix, values: Sequence[int], rule: PrefixRule) -> Sequence[_Ending]:
    """All verdicts on one executed block, with every replacement."""
    contexts = [prefix + tuple(values[:length]) for length in range(len(values) + 1)]
    declared = process.draft if process.declared_draft is None else process.declared_draft
    outcomes = rule(
        [process.target(context) for context in contexts], [declared(context) for context in contexts[:-1]], values
    )
    total = sum(outcome.probability for outcome in outcomes)
    if abs(total - 1.0) > 1e-9:
        raise BackendContractError("the rule", f"gave verdicts of total probability {total}", "they must sum to 1")
    return [
        _Ending(
            outcome.probability * chance,
            outcome.num_accepted,
            _cut(process, prefix, (*values[: outcome.num_accepted], item)),
        )
        for outcome in outcomes
        if outcome.probability > 0.0
        for item, chance in enumerate(outcome.replacement)
        if chance > 0.0
    ]


def _cut(process: SpeculativeProcess, prefix: Prefix, items: Prefix) -> Prefix:
    """The prefix with the items appended, up to the first one that stops."""
    for item in items:
        prefix = (*prefix, item)
        if process.stop is not None and process.stop(prefix):
            break
    return prefix


def _report(
    process: SpeculativeProcess,
    index: int,
    views: Sequence[ChainView],
    limits: Sequence[int],
    drafts: Sequence[Draft[int]],
    admission: Admission,
    ends: Sequence[_Ending],
) -> RoundReport:
    return RoundReport(
        index=index,
        chain_ids=tuple(view.chain_id for view in views),
        limits=tuple(limits),
        drafted=tuple(len(draft.values) for draft in drafts),
        admitted=admission.lengths,
        accepted=tuple(end.num_accepted for end in ends),
        emitted=tuple(len(end.prefix) - view.position for end, view in zip(ends, views, strict=True)),
        survival=tuple(draft.survival for draft in drafts),
        seconds=PhaseSeconds(execute=process.seconds(len(views) + admission.total)),
    )


def _plain_law(process: SpeculativeProcess, num_items: int, num_chains: int) -> JointLaw:
    single: dict[Prefix, float] = {}
    growing: list[tuple[Prefix, float]] = [((), 1.0)]
    while growing:
        prefix, weight = growing.pop()
        if _has_ended(process, prefix, num_items):
            single[prefix] = weight
            continue
        growing += [((*prefix, item), weight * chance) for item, chance in enumerate(process.target(prefix)) if chance]
    return {outcome: _product([single[prefix] for prefix in outcome]) for outcome in product(single, repeat=num_chains)}


def _has_ended(process: SpeculativeProcess, prefix: Prefix, num_items: int) -> bool:
    return len(prefix) == num_items or (bool(prefix) and process.stop is not None and process.stop(prefix))


def _restore(memory: bytes) -> Policy:
    policy: Policy = pickle.loads(memory)  # noqa: S301 -- bytes written by this module a moment ago
    return policy


def _product(factors: Sequence[float]) -> float:
    result = 1.0
    for factor in factors:
        result *= factor
    return result
