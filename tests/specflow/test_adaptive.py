"""The adaptive policy: as long as it pays, no longer, and never by looking ahead."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.chain import ChainLoop, run_sync
from specflow.errors import InvalidSettingError, MisuseError
from specflow.instrumentation import Recorder
from specflow.policies import Adaptive, CostTable, Fixed
from specflow.protocols import Policy
from specflow.testing import (
    WRONG,
    AdversaryBackend,
    ManualClock,
    OracleBackend,
    ScriptedBackend,
    SequenceBackend,
    Timing,
)
from specflow.types import ChainId, ChainView, Draft, PhaseSeconds, RoundReport

Cost = Callable[[int], float]
DraftFunction = Callable[[int, int, Sequence[int]], Draft[int]]


def gentle(width: int) -> float:
    """A small model on a CPU: 38 ms, and 1 ms for each item more."""
    return 0.037 + 0.001 * width


COSTS: dict[str, Cost] = {
    "gentle": gentle,
    "flat": lambda width: 0.04,
    "free": lambda width: 0.0,
    "steep": lambda width: 0.03 + 0.01 * width,
    "step": lambda width: 0.038 if width < 2 else 0.055,
}


def items(count: int) -> list[int]:
    """The true items of a chain."""
    return list(range(count))


def nothing(longest: int) -> float:
    """Drafting that costs no time."""
    del longest
    return 0.0


def played(
    make: Callable[[Timing], SequenceBackend[int]],
    policy: Policy,
    cost: Cost = gentle,
    drafting: Cost = nothing,
    *,
    padded: bool = False,
) -> tuple[RoundReport, ...]:
    """Run a backend to its end on a manual clock; the reports of all rounds."""
    clock = ManualClock()
    recorder = Recorder()
    run_sync(ChainLoop(make(Timing(clock, cost, drafting, padded)), policy, [recorder], clock).run())
    return recorder.reports


def executed(reports: Sequence[RoundReport]) -> int:
    """Drafted items executed over all rounds and chains."""
    return sum(sum(report.admitted) for report in reports)


def lengths(reports: Sequence[RoundReport]) -> list[int]:
    """Admitted length of the first chain, round by round."""
    return [report.admitted[0] for report in reports]


def known_costs(cost: Cost = gentle, widest: int = 64) -> CostTable:
    """A table that has seen every width twice."""
    costs = CostTable()
    for width in range(1, widest + 1):
        costs.observe(width, cost(width))
        costs.observe(width, cost(width))
    return costs


def drafter(draft: DraftFunction, count: int = 512) -> Callable[[Timing], SequenceBackend[int]]:
    """One chain with drafts from a function."""
    return lambda timing: SequenceBackend([items(count)], draft, timing)


# -------------------------------------------------------------------------------------------------------- never losing


@pytest.mark.parametrize("survival", [1.0, None, 0.9, 0.5, 0.3, 0.1], ids=lambda claim: f"claims {claim}")
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_drafter_that_is_always_wrong_costs_less_than_five_percent(survival: float | None, cost: Cost) -> None:
    """Over 512 items fewer than 26 drafted ones are executed, however sure the drafter claims to be."""
    reports = played(lambda timing: AdversaryBackend([items(512)], survival, timing), Adaptive(8), cost)
    assert len(reports) == 512
    assert executed(reports) < (25 if survival in {1.0, None} else 26)


def test_the_bound_above_is_one_that_a_naive_policy_breaks() -> None:
    """Drafting one item in each round, the least a policy without a switch can do, costs twenty times as much."""
    reports = played(lambda timing: AdversaryBackend([items(512)], 1.0, timing), Adaptive(8, first_wait=1, max_wait=1))
    assert executed(reports) > 250


@pytest.mark.parametrize("max_draft", [1, 2, 16])
def test_the_bound_holds_for_any_longest_draft(max_draft: int) -> None:
    """A longer draft allowance does not make a useless drafter dearer."""
    reports = played(lambda timing: AdversaryBackend([items(512)], 1.0, timing), Adaptive(max_draft))
    assert executed(reports) < 25


def test_eight_chains_at_once_keep_the_bound_per_item() -> None:
    """With eight chains the share of wasted items is no larger than with one."""
    reports = played(lambda timing: AdversaryBackend([items(512)] * 8, 1.0, timing), Adaptive(8))
    assert executed(reports) < 8 * 25


def test_short_chains_one_after_another_do_not_learn_from_scratch() -> None:
    """Sixteen chains of 32 items, served in turn by one policy, waste no more than one chain of 512."""
    policy = Adaptive(8)
    wasted = 0
    for request in range(16):
        clock = ManualClock()
        recorder = Recorder()
        backend = AdversaryBackend([items(32)], 1.0, Timing(clock, gentle))
        run_sync(ChainLoop(Renamed(backend, request), policy, [recorder], clock).run())
        wasted += executed(recorder.reports)
    assert wasted < 25


class Renamed:
    """A backend whose only chain has another id."""

    def __init__(self, backend: SequenceBackend[int], chain_id: int) -> None:
        self._chain_id = ChainId(chain_id)
        self._backend = backend
        self.predict = backend.predict
        self.execute = backend.execute
        self.verify = backend.verify
        self.commit = backend.commit
        self.discard = backend.discard

    def chains(self) -> Sequence[ChainView]:
        """The chain under its other id."""
        return [ChainView(self._chain_id, view.position, view.max_draft) for view in self._backend.chains()]


def test_waits_between_probes_double() -> None:
    """Once off, the executed drafts come in pairs of rounds with 16, 32, 64, ... rounds between the pairs."""
    reports = played(lambda timing: AdversaryBackend([items(600)], 1.0, timing), Adaptive(8))
    probes = [index for index, length in enumerate(lengths(reports)) if length][-8:]
    starts = probes[::2]
    assert [second - first for first, second in itertools.pairwise(probes)][::2] == [1, 1, 1, 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert all(abs(later / earlier - 2.0) < 0.2 for earlier, later in itertools.pairwise(gaps))


# ------------------------------------------------------------------------------------------------------------- gaining


@pytest.mark.parametrize("survival", [1.0, None, 0.9, 0.3], ids=lambda claim: f"claims {claim}")
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_perfect_drafter_reaches_full_drafts_and_stays_there(survival: float | None, cost: Cost) -> None:
    """Within six rounds every draft has the full length and is executed whole, also where the drafter is too modest."""
    reports = played(lambda timing: OracleBackend([items(512)], survival, timing), Adaptive(8), cost)
    full = lengths(reports)[6:-1]
    assert set(full) == {8}


def test_the_first_two_rounds_are_plain_and_known_costs_spare_them() -> None:
    """Without known costs the plain cost is measured first; with a saved table drafting starts at once."""

    def perfect(timing: Timing) -> OracleBackend[int]:
        return OracleBackend([items(64)], None, timing)

    assert lengths(played(perfect, Adaptive(8)))[:3] == [0, 0, 2]
    saved = CostTable.from_dict(known_costs().to_dict())
    assert lengths(played(perfect, Adaptive(8, costs=saved)))[:2] == [2, 8]


@pytest.mark.parametrize("good_from", [20, 60, 150, 400, 1000])
def test_a_drafter_that_becomes_good_is_noticed_after_one_wait(good_from: int) -> None:
    """Full drafts are back within twice the rounds that the bad time lasted, and 270 at most."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        return Draft(future if position >= good_from else [WRONG] * len(future))

    reports = played(drafter(draft, good_from + 2500), Adaptive(8))
    assert lengths(reports)[good_from:].index(8) <= min(270, 2 * good_from)
    assert set(lengths(reports)[-100:-1]) == {8}


def test_a_drafter_that_becomes_bad_is_dropped_within_a_few_drafts() -> None:
    """After a long good time at most five full drafts' worth of items is executed before the switch is off."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        return Draft(future if position < 200 else [WRONG] * len(future), [0.95] * len(future))

    reports = played(drafter(draft, 260), Adaptive(8))
    wasted = sum(sum(report.admitted) - sum(report.accepted) for report in reports)
    assert 0 < wasted <= 5 * 8
    assert set(lengths(reports)[-12:]) == {0}


# ----------------------------------------------------------------------------------------------------------- estimates


def test_drafts_of_low_survival_are_not_executed_and_the_next_good_one_is() -> None:
    """A free drafter that is honest stays on through 60 hopeless drafts, and its first good one is executed whole."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        if position % 60 == 59 or position < 20:
            return Draft(future, [0.97] * len(future))
        return Draft([WRONG] * len(future), [0.03] * len(future))

    reports = played(drafter(draft, 700), Adaptive(8))
    settled = [report for report in reports if report.index > 10]
    hopeless = [report for report in settled if report.survival[0] and report.survival[0][0] < 0.5]
    good = [report for report in settled if report.survival[0] and report.survival[0][0] > 0.5]
    assert len(hopeless) > 400
    assert executed(hopeless) == 0
    assert len(good) > 8
    assert all(report.admitted == report.drafted for report in good)


def test_an_overconfident_drafter_is_corrected() -> None:
    """Two items are right and the drafter claims eight: what is executed settles at the two that are accepted."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain, position
        return Draft([*future[:2], *[WRONG] * (len(future) - 2)][: len(future)], [0.99] * len(future))

    policy = Adaptive(8)
    reports = played(drafter(draft, 600), policy)
    assert set(lengths(reports)[-60:-1]) == {2}
    ratios = policy.explain().claim_ratio
    assert min(ratios[:2]) > 0.9
    assert ratios[2] < 0.2


def test_an_underconfident_drafter_is_corrected() -> None:
    """A drafter that claims 0.3 per item and is always right is trusted with full drafts."""
    claims = [0.3 ** (position + 1) for position in range(8)]

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain, position
        return Draft(future, claims[: len(future)])

    reports = played(drafter(draft), Adaptive(8))
    assert set(lengths(reports)[-20:-1]) == {8}


def test_items_go_to_the_chain_where_they_are_most_likely_to_survive() -> None:
    """With room for a few items, they are the most likely ones over all chains."""
    policy = Adaptive(4, costs=known_costs(lambda width: 1.0 + 0.25 * max(0, width - 3)))
    views = [ChainView(ChainId(chain), 0, 4) for chain in range(3)]
    for _ in range(30):  # claims of 1 are true, so estimates are taken as given
        policy.limits(views)
        frontier = Frontier([Draft(items(4), [1.0] * 4)] * 3)
        policy.admit(frontier)
        admitted = frontier.decision().lengths
        policy.observe(report(policy, views, admitted, admitted, [1.0] * 4, 1.0 + 0.25 * sum(admitted)))
    policy.limits(views)
    frontier = Frontier(
        [Draft(items(4), [0.9, 0.85, 0.1, 0.1]), Draft(items(4), [0.2] * 4), Draft(items(4), [0.95, 0.3, 0.1, 0.1])]
    )
    policy.admit(frontier)
    assert frontier.decision().lengths == (2, 0, 1)


def report(
    policy: Adaptive,
    views: Sequence[ChainView],
    admitted: Sequence[int],
    accepted: Sequence[int],
    survival: Sequence[float] | None,
    seconds: float,
) -> RoundReport:
    """A report as the loop would write it after a round with full drafts."""
    del policy
    drafted = tuple([max(4, length) for length in admitted])
    return RoundReport(
        index=0,
        chain_ids=tuple([view.chain_id for view in views]),
        limits=drafted,
        drafted=drafted,
        admitted=tuple(admitted),
        accepted=tuple(accepted),
        emitted=tuple([length + 1 for length in accepted]),
        survival=(survival,) * len(views),
        seconds=PhaseSeconds(execute=seconds),
    )


# --------------------------------------------------------------------------------------------------------------- costs


def test_a_step_in_the_costs_is_jumped_when_the_plateau_behind_it_pays() -> None:
    """Two items cost half as much again as one, nine no more than two; every third draft is right, throughout.

    One drafted item gains a third for a half more time. Eight gain 8 / 3 for the same.
    """

    def step(width: int) -> float:
        return 1.0 if width < 2 else 1.5

    def third(timing: Timing) -> ScriptedBackend[int]:
        return ScriptedBackend([items(2000)], [[0, 8, 0]], timing)

    eight = played(third, Adaptive(8), step)
    one = played(third, Adaptive(1), step)
    assert sum(length == 8 for length in lengths(eight)) > 0.9 * len(eight)
    assert executed(one) < 0.1 * len(one)


# ------------------------------------------------------------------------------------------------------- padded blocks


def uneven(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
    """True estimates that differ from round to round: usually one item is likely, sometimes eight are."""
    sure = random.Random(1000 * chain + position).random() < 0.25
    rates = [0.95] * 8 if sure else [0.7, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    right = list(
        itertools.takewhile(bool, [random.Random(f"{chain},{position},{k}").random() < rates[k] for k in range(8)])
    )
    survival = list(itertools.accumulate(rates, lambda left, rate: left * rate))
    kept = future[: len(right)]
    return Draft([*kept, *([WRONG] * (len(future) - len(kept)))], survival[: len(future)])


def per_second(reports: Sequence[RoundReport]) -> float:
    """Items emitted per second while all chains are there."""
    full = [report for report in reports if len(report.emitted) == len(reports[0].emitted)]
    return sum(sum(report.emitted) for report in full) / sum(report.seconds.total for report in full)


PADDED_COSTS: dict[str, Cost] = {
    "gentle": gentle,
    "steep": lambda width: 0.02 + 0.004 * width,
    "flat up to 16": lambda width: 0.04 if width <= 16 else 0.04 + 0.003 * (width - 16),
    "no gain": lambda width: 0.001 + 0.01 * width,
}


@pytest.mark.parametrize("name", PADDED_COSTS)
@pytest.mark.parametrize("num_chains", [1, 4, 16])
def test_padded_blocks_are_within_three_percent_of_the_best_fixed_length(num_chains: int, name: str) -> None:
    """Learning the costs included, over some 700 items per chain; that blocks are padded the backend says.

    The end of a plateau lies where it was not tried: costs are interpolated there, and the last depth that is free may
    be missed.
    """
    cost = PADDED_COSTS[name]

    def chains(timing: Timing) -> SequenceBackend[int]:
        return SequenceBackend([items(700)] * num_chains, uneven, timing)

    fixed = [per_second(played(chains, Fixed(length), cost, padded=True)) for length in range(9)]
    found = per_second(played(chains, Adaptive(8), cost, padded=True))
    assert found > (0.92 if name == "flat up to 16" else 0.97) * max(fixed)


def test_items_counted_without_their_padding_mislead() -> None:
    """The known-wrong variant: what one long block costs is laid at the door of a few items."""

    def chains(timing: Timing) -> SequenceBackend[int]:
        return SequenceBackend([items(700)] * 16, uneven, timing)

    right, wrong = (
        per_second(played(chains, Adaptive(8, padded=padded), gentle, padded=True)) for padded in (True, False)
    )
    assert wrong < 0.8 * right


@pytest.mark.parametrize("padded", [True, False])
def test_whether_blocks_are_padded_is_the_backends_word(*, padded: bool) -> None:
    """Every decision is that of a policy that was told, which in turn does not listen."""

    def chains(timing: Timing) -> SequenceBackend[int]:
        return SequenceBackend([items(300)] * 4, uneven, timing)

    def admitted(policy: Adaptive) -> list[tuple[int, ...]]:
        return [report.admitted for report in played(chains, policy, gentle, padded=padded)]

    assert admitted(Adaptive(8)) == admitted(Adaptive(8, padded=padded))
    assert admitted(Adaptive(8)) != admitted(Adaptive(8, padded=not padded))


def test_a_depth_that_one_chain_pays_for_is_used_by_all() -> None:
    """Every likely item at an executed depth is executed; the unlikely ones and what is deeper are not."""
    policy = Adaptive(4, costs=known_costs(lambda width: 1.0 + 0.1 * width), padded=True)
    views = [ChainView(ChainId(chain), 0, 4) for chain in range(3)]
    for _ in range(30):  # claims of 1 are true
        policy.limits(views)
        frontier = Frontier([Draft(items(4), [1.0] * 4)] * 3)
        policy.admit(frontier)
        admitted = frontier.decision().lengths
        assert len(set(admitted)) == 1
        policy.observe(report(policy, views, admitted, admitted, [1.0] * 4, 1.0 + 0.3 * (1 + admitted[0])))
    policy.limits(views)
    frontier = Frontier(
        [Draft(items(4), [0.9, 0.9, 0.1, 0.1]), Draft(items(4), [0.3, 0.07, 0.05, 0.05]), Draft(items(4), [0.05] * 4)]
    )
    policy.admit(frontier)
    assert frontier.decision().lengths == (2, 2, 0)


def test_unknown_widths_are_approached_in_steps() -> None:
    """Of sixteen chains' eight items each, no more are executed at first than what doubles the width."""
    policy = Adaptive(8, padded=True)
    reports = played(lambda timing: OracleBackend([items(400)] * 16, None, timing), policy, gentle, padded=True)
    widths = [16 * (1 + max(report.admitted)) for report in reports[:12]]
    assert widths[:2] == [16, 16]
    for number, width in enumerate(widths[2:], 2):
        before = widths[:number]
        assert width <= 2 * max(seen for seen in before if before.count(seen) > 1)
    assert max(widths) == 144


def test_room_for_one_item_of_every_chain_is_always_there() -> None:
    """Forty chains after one: widths up to 80 were never seen, and are tried."""
    policy = Adaptive(4, costs=known_costs(widest=5), padded=True)
    reports = played(lambda timing: OracleBackend([items(60)] * 40, None, timing), policy, gentle, padded=True)
    assert max(reports[0].admitted) == 1
    assert max(max(report.admitted) for report in reports) == 4


def test_what_a_padded_probe_pays_for_is_used() -> None:
    """Where items never pay, a chain that was idle for long gets one all the same, and so do all others, as a probe.

    So the waits of all double, although items are accepted. The second chain comes later and would be due later.
    """
    policy = Adaptive(4, costs=known_costs(lambda width: 0.01 * width), padded=True)
    views = [ChainView(ChainId(chain), 0, 4) for chain in range(3)]
    probes: list[int] = []
    for number in range(120):
        now = views if number >= 7 else views[:1]
        policy.limits(now)
        frontier = Frontier([Draft(items(4), [0.6] * 4)] * len(now))
        policy.admit(frontier)
        admitted = frontier.decision().lengths
        assert len(set(admitted)) == 1
        if admitted[0]:
            assert admitted == (1, 1, 1)
            probes.append(number)
        seconds = 0.01 * len(now) * (1 + max(admitted))
        policy.observe(report(policy, now, admitted, admitted, [0.6] * 4, seconds))
    assert [later - earlier for earlier, later in itertools.pairwise(probes)] == [33, 65]


@pytest.mark.parametrize(("num_chains", "rate", "drafting"), [(4, 0.3, 0.01), (8, 0.45, 0.01), (8, 0.6, 0.02)])
def test_chains_that_gave_up_together_try_again_together(num_chains: int, rate: float, drafting: float) -> None:
    """Drafting is paid once for all: it pays for eight chains, not for the few whose probes were accepted first.

    From item 100 on so many drafts are right. Where every chain resumes alone, 11 to 18 % are lost.
    """

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        right = 2 * (position >= 100 and random.Random(f"{chain},{position}").random() < rate)
        return Draft([*future[:right], *([WRONG] * (len(future) - right))][: len(future)])

    def chains(timing: Timing) -> SequenceBackend[int]:
        return SequenceBackend([items(900)] * num_chains, draft, timing)

    def speed(policy: Policy) -> float:
        return per_second(
            played(chains, policy, lambda width: 0.04 + 0.0005 * width, lambda longest: drafting, padded=True)
        )

    assert speed(Adaptive(2, padded=True)) > 0.95 * max(speed(Fixed(length)) for length in range(3))


def test_costly_probes_with_hopeless_claims_are_not_repeated_in_every_round() -> None:
    """A drafter that was wrong and then says so itself: a probe that it gives no chance has failed."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        return Draft([WRONG] * len(future), [0.9 if position < 40 else 0.01] * len(future))

    reports = played(drafter(draft), Adaptive(8), gentle, lambda longest: 0.02)
    asked = [report for report in reports[100:] if report.limits[0]]
    assert len(asked) < 0.1 * len(reports[100:])


def test_the_plan_looks_at_sixteen_drafts_before_it_gives_up() -> None:
    """A drafter that is wrong and claims little: the switch forgives it, and a few rounds do not decide either.

    Where a first item could not pay even if it were right, one look is enough.
    """

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain, position
        return Draft([WRONG] * len(future), [0.1, 0.05, 0.03, 0.02][: len(future)])

    def asked_first(price: float) -> int:
        reports = played(drafter(draft, 200), Adaptive(4), gentle, lambda longest: price)
        return len(list(itertools.takewhile(lambda report: report.limits[0] > 0, reports[2:])))

    assert asked_first(0.01) == 16
    assert asked_first(0.05) < 5


def test_costly_drafts_for_rounds_that_cost_nothing_are_not_asked_for() -> None:
    """A clock too coarse for rounds: whatever drafting costs then, it cannot pay."""
    reports = played(
        lambda timing: OracleBackend([items(512)], None, timing), Adaptive(8), COSTS["free"], lambda longest: 0.01
    )
    asked = [report for report in reports[30:] if report.limits[0]]
    assert len(asked) < 0.05 * len(reports)


def test_execution_in_proportion_to_its_width_leaves_nothing_to_gain() -> None:
    """Where each item costs as much as a round, even a perfect drafter is used for probes only."""
    reports = played(lambda timing: OracleBackend([items(512)], None, timing), Adaptive(8), lambda width: 0.01 * width)
    assert executed(reports) < 25


def test_a_perfect_drafter_that_is_too_slow_is_switched_off() -> None:
    """Drafting at one and a half times the target's cost per item is tried, measured, and left alone."""
    reports = played(
        lambda timing: OracleBackend([items(512)], None, timing), Adaptive(8), gentle, lambda longest: 0.057 * longest
    )
    asked = [report for report in reports if report.limits[0]]
    seconds = sum(report.seconds.total for report in reports)
    assert len(asked) < 0.05 * len(reports)
    assert seconds < 1.05 * 512 * gentle(1)


def test_costly_drafting_is_planned_to_the_length_that_pays() -> None:
    """Two items of each draft are right; drafting costs time per item, so drafts of two are asked for."""
    reports = played(
        lambda timing: ScriptedBackend([items(900)], [[2]], timing),
        Adaptive(8),
        gentle,
        lambda longest: 0.004 * longest,
    )
    asked = [report.limits[0] for report in reports[-80:-2]]
    assert sum(limit == 2 for limit in asked) > 0.8 * len(asked)


def test_costly_drafting_that_seldom_brings_a_draft_is_switched_off() -> None:
    """A perfect drafter that answers one request in twenty, at half a round's price, is not asked every round."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        return Draft(future if position % 20 == 0 else ())

    reports = played(drafter(draft, 900), Adaptive(8), gentle, lambda longest: 0.02)
    asked = [report for report in reports[100:] if report.limits[0]]
    assert len(asked) < 0.2 * len(reports[100:])


def test_free_drafting_that_seldom_brings_a_draft_stays_on() -> None:
    """A lookup that costs nothing is asked in every round, and each of its rare drafts is executed whole."""

    def draft(chain: int, position: int, future: Sequence[int]) -> Draft[int]:
        del chain
        return Draft(future if position % 20 == 0 else ())

    reports = played(drafter(draft, 900), Adaptive(8))
    late = reports[60:-1]
    assert all(report.limits[0] == min(8, 899 - position(reports, report.index)) for report in late)
    assert all(report.admitted == report.drafted for report in late)


def position(reports: Sequence[RoundReport], index: int) -> int:
    """Committed items of the only chain before a round."""
    return sum(report.emitted[0] for report in reports[:index])


def test_the_plain_cost_is_measured_again_while_the_gain_is_in_doubt() -> None:
    """Where drafts gain little a plain round is put in now and then; where they gain much, none is."""

    def draft(right: int) -> DraftFunction:
        return lambda chain, position, future: Draft([*future[:right], *[WRONG] * 8][: len(future)])

    doubtful = played(drafter(draft(1), 900), Adaptive(8), lambda width: 0.01 + 0.03 * width)
    sure = played(drafter(draft(8), 2000), Adaptive(8))
    assert lengths(doubtful)[10:].count(0) in range(3, 12)
    assert lengths(sure)[10:].count(0) == 0


# ----------------------------------------------------------------------------------------------------- never peeking


@st.composite
def offers(draw: st.DrawFn) -> list[Draft[int]]:
    """Drafts for three chains with any estimates."""
    drafts: list[Draft[int]] = []
    for _ in range(3):
        conditional = draw(st.lists(st.floats(0.0, 1.0), max_size=6))
        survival = list(itertools.accumulate(conditional, lambda left, right: left * right))
        drafts.append(Draft(items(len(survival)), survival if draw(st.booleans()) else None))
    return drafts


def decide(seed: int, drafts: Sequence[Draft[int]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What a policy with a random past admits of the drafts."""
    rng = random.Random(seed)
    policy = Adaptive(6, costs=known_costs(rng.choice(list(COSTS.values()))), padded=rng.random() < 0.5)
    views = [ChainView(ChainId(chain), 0, 6) for chain in range(3)]
    for _ in range(rng.randrange(12)):
        policy.limits(views)
        admitted = [rng.randrange(5) for _ in views]
        accepted = [rng.randint(0, length) for length in admitted]
        survival = rng.choice([None, [0.9, 0.8, 0.7, 0.6]])
        policy.observe(report(policy, views, admitted, accepted, survival, 0.04 + 0.001 * sum(admitted)))
    policy.limits(views)
    frontier = Frontier(drafts)
    policy.admit(frontier)
    decision = frontier.decision()
    return decision.lengths, decision.anticipated


@given(st.integers(0, 10**6), offers(), st.data())
def test_what_is_not_admitted_has_no_influence(seed: int, drafts: list[Draft[int]], data: st.DataObject) -> None:
    """Changing values, estimates and even the number of items behind the first refused one changes no decision."""
    lengths, anticipated = decide(seed, drafts)
    assert not any(anticipated)
    altered: list[Draft[int]] = []
    for draft, length in zip(drafts, lengths, strict=True):
        seen = min(length + 1, len(draft.values))  # the refused item's own estimate was looked at, rightly
        tail = data.draw(st.lists(st.floats(0.0, 1.0), max_size=6 - seen)) if seen > length else []
        survival = None if draft.survival is None else [*draft.survival[:seen], *tail]
        altered.append(Draft([*draft.values[:length], *[99] * (seen - length + len(tail))], survival))
    assert decide(seed, altered)[0] == lengths


def test_a_policy_that_judges_drafts_by_their_length_is_noticed() -> None:
    """The check above would fail for a policy that starts a draft only if it is long enough."""

    def peeking(drafts: Sequence[Draft[int]]) -> tuple[int, ...]:
        frontier = Frontier(drafts)
        for index in range(len(drafts)):
            if frontier.available(index) >= 3:
                frontier.admit(index)
        return frontier.decision().lengths

    assert peeking([Draft([1, 2, 3])]) != peeking([Draft([1, 2])])


@given(st.integers(0, 10**6), offers())
def test_decisions_are_a_function_of_what_was_seen(seed: int, drafts: list[Draft[int]]) -> None:
    """Two policies with the same past decide the same: there is no clock and no dice inside."""
    assert decide(seed, drafts) == decide(seed, drafts)


# --------------------------------------------------------------------------------------------------------------- usage


def test_admitting_for_other_chains_than_planned_is_a_misuse() -> None:
    """admit() belongs to the limits() call before it."""
    policy = Adaptive(4)
    policy.limits([ChainView(ChainId(0), 0, 4)])
    with pytest.raises(MisuseError, match="2 drafts after limits"):
        policy.admit(Frontier([Draft("a"), Draft("b")]))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_draft": -1},
        {"max_draft": 4, "min_survival": 0.0},
        {"max_draft": 4, "min_survival": 1.5},
        {"max_draft": 4, "first_wait": 0},
        {"max_draft": 4, "first_wait": 10, "max_wait": 5},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    """A setting that cannot work is reported when the policy is built."""
    with pytest.raises(InvalidSettingError):
        Adaptive(**settings)  # type: ignore[arg-type]


def test_no_drafts_allowed_is_plain_execution() -> None:
    """With max_draft 0 nothing is ever drafted."""
    reports = played(lambda timing: OracleBackend([items(40)], None, timing), Adaptive(0))
    assert executed(reports) == 0
    assert all(report.limits == (0,) for report in reports)


def test_chains_that_are_gone_are_forgotten() -> None:
    """Serving a thousand chains one after another keeps no more than a bounded number of them in memory."""
    policy = Adaptive(4)
    for chain in range(1000):
        policy.limits([ChainView(ChainId(chain), 0, 4)])
    assert len(policy.explain().chains) < 100
