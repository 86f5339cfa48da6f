"""Scheduling by cost: what is admitted, and how close that comes to the best fixed length."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.errors import InvalidSettingError, MisuseError
from specflow.policies import CostScheduled, Fixed, RoundCosts, StaleBudget
from specflow.protocols import Policy
from specflow.types import Draft
from tests.specflow.policies.scheduling import Rounds, table

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

DRAFTS = st.lists(
    st.lists(st.floats(0.0, 1.0), max_size=4).map(
        lambda factors: list(itertools.accumulate(factors, lambda a, b: a * b))
    ),
    min_size=1,
    max_size=3,
)


def rate(costs: RoundCosts, drafts: Sequence[Sequence[float]], lengths: Sequence[int]) -> float:
    """Expected items per second of a round that executes these lengths."""
    expected = sum(1.0 + sum(draft[:length]) for draft, length in zip(drafts, lengths, strict=True))
    return expected / costs.round(lengths, 0)


def best_rate(costs: RoundCosts, drafts: Sequence[Sequence[float]]) -> float:
    """The same for the best lengths of all."""
    return max(rate(costs, drafts, lengths) for lengths in itertools.product(*[range(len(d) + 1) for d in drafts]))


@UNTIMED
@given(DRAFTS, st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.booleans())
def test_admission_is_optimal_where_costs_are_convex(
    drafts: list[list[float]],
    start: float,
    slope: float,
    padded: bool,  # noqa: FBT001 - a parameter of the case
) -> None:
    """With convex costs no other choice of lengths promises more items per second than algorithm 1's."""
    convex = table(lambda width: start + slope * width + 0.05 * max(0, width - 5), range(1, 20))
    costs = RoundCosts({1: convex, 2: convex, 3: convex} if padded else {1: convex}, padded=padded)
    lengths = Rounds(CostScheduled(4, costs), num_chains=len(drafts)).admit(*drafts).lengths
    assert rate(costs, drafts, lengths) == pytest.approx(best_rate(costs, drafts), rel=1e-9)


def test_the_marginal_rule() -> None:
    """An item is admitted if and only if a > tau * (T(B + 1) / T(B) - 1)."""
    costs = table(lambda width: 1.0 + 0.25 * width)
    for survival in (0.19, 0.21):
        # One chain: tau = 1, T(1) = 1.25, T(2) = 1.5, so the bound is 0.2.
        assert Rounds(CostScheduled(3, costs)).admit([survival]).lengths == (int(survival > 0.2),)


def test_drafting_is_part_of_the_round() -> None:
    """Seconds spent on drafting lower the bound: what costs little beside them is worth executing."""
    execute = table(lambda width: 1.0 + 0.25 * width)
    with_drafting = RoundCosts({1: execute}, {1: table(lambda length: 1.25, range(1, 4))})
    assert Rounds(CostScheduled(3, with_drafting)).admit([0.15]).lengths == (1,)  # the bound is 0.25 / 2.5 now


def test_flat_costs_admit_everything_and_hopeless_items_are_left() -> None:
    """Where items are free all are executed but those with no chance."""
    costs = table(lambda _width: 1.0)
    assert Rounds(CostScheduled(4, costs), 2).admit([0.9, 0.01, 0.0, 0.0], [0.001]).lengths == (2, 1)
    assert Rounds(StaleBudget(4, costs), 2).admit([0.9, 0.01, 0.0, 0.0], [0.001]).lengths == (2, 1)


def test_the_likeliest_items_of_all_chains_come_first() -> None:
    """With room for little, items are taken by survival over all chains, not chain by chain."""
    costs = table(lambda width: max(1.0, 1.0 + 10.0 * (width - 5)))  # five items are free, a sixth is not
    assert Rounds(CostScheduled(4, costs), 2).admit([0.5, 0.4], [0.9, 0.6]).lengths == (1, 2)


def test_ties_go_to_the_lesser_depth_then_to_the_earlier_chain() -> None:
    """Equal estimates are told apart by their place alone."""
    costs = table(lambda width: max(1.0, 1.0 + 10.0 * (width - 4)))  # room for one of two chains' items
    assert Rounds(CostScheduled(4, costs), 3).admit([0.5, 0.5], [0.5, 0.5], [0.5]).lengths == (1, 0, 0)
    costs = table(lambda width: max(1.0, 1.0 + 10.0 * (width - 6)))
    assert Rounds(CostScheduled(4, costs), 3).admit([0.5, 0.5], [0.5, 0.5], [0.5]).lengths == (1, 1, 1)


def staircase(width: int) -> float:
    """A step of 0.6 s after every eighth item."""
    return 1.0 + 0.6 * ((width - 1) // 8)


def test_a_staircase_does_not_stop_admission() -> None:
    """The first item of a step does not pay alone; with those behind it it does, so the whole step is filled."""
    costs = table(staircase)
    drafts = [[0.95**place for place in range(1, 8)] for _ in range(4)]
    alone = 0.95 * staircase(8) < (8 + 4 * 0.9) * 0.6  # the ninth item on its own
    assert alone
    lengths = Rounds(CostScheduled(7, costs), 4).admit(*drafts).lengths
    assert sum(lengths) == 4 * 7  # 32 items in all: the fourth step to its end


def test_a_padded_round_takes_a_depth_at_a_time() -> None:
    """Padded, one sure chain does not widen the block for seven others, and a widened block is used by all."""
    costs = RoundCosts({8: table(lambda width: 1.0 + 0.5 * width, range(1, 9))}, padded=True)
    sure, unsure = [0.95, 0.9, 0.85, 0.8], [0.2, 0.02, 0.01, 0.0]
    assert set(Rounds(CostScheduled(4, costs), 8).admit(sure, *[unsure] * 7).lengths) == {0}
    fair = [0.9, 0.2, 0.0, 0.0]
    assert set(Rounds(CostScheduled(4, costs), 8).admit(sure, *[fair] * 7).lengths) == {1}


def test_the_stale_budget_is_as_old_as_said() -> None:
    """With lag 2 the budget follows the estimates of two rounds earlier; the items are the likeliest of today."""
    costs = table(lambda width: 1.0 + 0.3 * width)
    rounds = Rounds(StaleBudget(3, costs))
    good, bad = [0.9, 0.8, 0.7], [0.05, 0.01, 0.001]
    admitted = []
    for draft in (good, bad, bad, good, good):
        admitted.append(rounds.admit(draft).lengths[0])
        rounds.observe(0)
    assert admitted == [3, 3, 3, 0, 0]


def test_the_budget_goes_to_the_likeliest_of_today() -> None:
    """Two chains that changed places since: the budget earned by one is spent on the other."""
    costs = table(lambda width: 1.0 + 0.3 * width)
    rounds = Rounds(StaleBudget(2, costs, lag=1), 2)
    rounds.admit([0.9, 0.8], [0.1, 0.0])
    rounds.observe(0, 0)
    assert rounds.admit([0.1, 0.0], [0.9, 0.8]).lengths == (0, 2)


def test_chains_without_a_past_count_as_the_average() -> None:
    """A chain that drafted nothing a round ago is expected to do as those that did."""
    costs = table(lambda width: 1.0 + 0.3 * width)
    rounds = Rounds(StaleBudget(2, costs, lag=1), 2)
    rounds.admit([0.9, 0.8], [])
    rounds.observe(0, 0)
    assert rounds.admit([0.9, 0.8], [0.9, 0.8]).lengths == (2, 2)


@pytest.mark.parametrize("make", [CostScheduled, StaleBudget])
def test_costly_drafts_that_do_not_pay_are_not_asked_for(make: Callable[..., Policy]) -> None:
    """After 16 drafts that do not pay drafting stops, but for two rounds of drafts after 32, 64, 128 and 256."""
    costs = RoundCosts({1: table(lambda _width: 1.0)}, {1: table(lambda length: 1.0, range(1, 5))})
    rounds = Rounds(make(4, costs))
    asked = []
    for _ in range(1000):
        rounds.admit([0.3, 0.1, 0.0, 0.0])
        asked.append(rounds.limits[0])
        rounds.observe(0)
    assert set(asked) == {0, 4}
    assert asked[:16] == [4] * 16
    assert 6 <= sum(limit > 0 for limit in asked[16:]) <= 12
    assert not any(asked[600:700]) or not any(asked[700:800])


@pytest.mark.parametrize(
    ("num_chains", "rounds_of_drafts"), [(1, 16 + 2 + 2 + 2), (4, 4 + 2 + 2 + 2), (16, 1 + 1 + 1 + 1)]
)
def test_many_chains_show_what_their_drafts_are_like_in_one_round(num_chains: int, rounds_of_drafts: int) -> None:
    """Looking costs a round of full drafts for all chains, so no more rounds are taken than show 16 drafts, or two."""
    costs = RoundCosts(
        {num_chains: table(lambda _width: 1.0, range(1, 100))}, {num_chains: table(lambda _length: 1.0, range(1, 5))}
    )
    rounds = Rounds(CostScheduled(4, costs), num_chains=num_chains)
    asked = 0
    for _ in range(256):
        rounds.admit(*[[0.3, 0.1, 0.0, 0.0]] * num_chains)
        asked += rounds.limits[0] > 0
        rounds.observe(*[0] * num_chains)
    assert asked == rounds_of_drafts


def test_drafting_resumes_when_drafts_become_good() -> None:
    """A probe that finds good estimates, again and again, brings drafting back."""
    costs = RoundCosts({1: table(lambda _width: 1.0)}, {1: table(lambda length: 0.5, range(1, 5))})
    rounds = Rounds(CostScheduled(4, costs))
    for _ in range(40):
        rounds.admit([0.1, 0.0, 0.0, 0.0])
        rounds.observe(0)
    assert rounds.limits == [0]
    for _ in range(2000):
        rounds.admit([0.9, 0.9, 0.9, 0.9])
        rounds.observe(4)
    assert rounds.limits == [4]


def test_settings_are_checked() -> None:
    """Negative lengths, no lag, and a frontier of another round are refused."""
    costs = table(float)
    with pytest.raises(InvalidSettingError, match="max_draft"):
        CostScheduled(-1, costs)
    with pytest.raises(InvalidSettingError, match="lag"):
        StaleBudget(2, costs, lag=0)
    for policy in (CostScheduled(2, costs), StaleBudget(2, costs)):
        with pytest.raises(MisuseError, match="1 drafts after limits"):
            policy.admit(Frontier([Draft((1,))]))


# ------------------------------------------------------------------------------- within 2 % of the best fixed length

CURVES: dict[str, Callable[[int], float]] = {
    "affine": lambda items: 1.0 + 0.03 * items,
    "steep": lambda items: 0.3 + 0.1 * items,
    "a knee": lambda items: max(1.0, 0.05 * items),
    "steps": staircase,
}
DRAFTING: dict[str, Callable[[int], float]] = {"free": lambda _length: 0.0, "a block": lambda _length: 0.15}
LONGEST = 7
ROUNDS = 250


@functools.cache
def true_estimates(chains: int) -> list[list[list[float]]]:
    """Rounds of drafts by chain, whose estimates are the chances themselves; drafts differ in ease."""
    rng = random.Random(chains)
    rounds = []
    for _ in range(ROUNDS):
        drafts = []
        for _ in range(chains):
            ease = rng.choice([0.3, 0.6, 0.9, 0.95])
            chances = [min(0.99, max(0.02, ease + rng.uniform(-0.1, 0.1))) for _ in range(LONGEST)]
            drafts.append(list(itertools.accumulate(chances, lambda before, chance: before * chance)))
        rounds.append(drafts)
    return rounds


def throughput(policy: Policy, costs: RoundCosts, chains: int) -> float:
    """Expected items per second over the same rounds. No outcome is drawn: the chances are known."""
    driver = Rounds(policy, chains)
    items = seconds = 0.0
    for drafts in true_estimates(chains):
        lengths = driver.admit(*drafts).lengths
        items += sum(1.0 + sum(draft[:length]) for draft, length in zip(drafts, lengths, strict=True))
        seconds += costs.round(lengths, max(driver.limits))
        driver.observe(*[0] * chains)
    return items / seconds


def priced(curve: str, drafting: str, *, padded: bool) -> RoundCosts:
    """Costs of a curve of total items, measured at every batch size that is used."""
    execute = {
        chains: table(lambda width, chains=chains: CURVES[curve](width * chains), range(1, LONGEST + 2))  # type: ignore[misc]
        for chains in (1, 4, 16)
    }
    asking = {chains: table(DRAFTING[drafting], range(1, LONGEST + 1)) for chains in (1, 4, 16)}
    return RoundCosts(execute, asking, padded=padded)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("curve", "drafting"), [("affine", "free"), ("steep", "a block"), ("a knee", "free"), ("steps", "a block")]
)
def test_scheduling_comes_within_two_percent_of_the_best_fixed_length(
    curve: str,
    drafting: str,
    padded: bool,  # noqa: FBT001 - a parameter of the case
) -> None:
    """At batch 1, 4 and 16 and with calibrated estimates, against the best of all fixed lengths by brute force."""
    costs = priced(curve, drafting, padded=padded)
    for chains in (1, 4, 16):
        best = max(throughput(Fixed(length), costs, chains) for length in range(LONGEST + 1))
        scheduled = throughput(CostScheduled(LONGEST, costs), costs, chains)
        assert scheduled >= 0.98 * best, f"{scheduled / best:.3f} of the best fixed length at batch {chains}"


def test_scheduling_beats_every_fixed_length_where_ease_varies() -> None:
    """With packed items, costs that rise, and stretches that differ, one length for all is worse by a tenth."""
    costs = priced("affine", "free", padded=False)
    best = max(throughput(Fixed(length), costs, 4) for length in range(LONGEST + 1))
    assert throughput(CostScheduled(LONGEST, costs), costs, 4) > 1.1 * best
