"""Perceptron and TAGE: what they learn that counters cannot, and what they cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.predictors import TAGE, BranchPredictor, GShare, Perceptron, TwoBit

Branches = Iterable[tuple[int, bool]]

MAKERS: dict[str, Callable[[], BranchPredictor]] = {"perceptron": Perceptron, "tage": TAGE}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def accuracy(predictor: BranchPredictor, outcomes: Branches, skip: int = 0) -> float:
    """Fraction of branches predicted right after the first ``skip``, learning as they retire."""
    history, hits = 0, []
    for address, taken in outcomes:
        hits.append(predictor.predict(address, history).taken == taken)
        predictor.observe(address, history, taken=taken)
        history = history << 1 | taken
    return sum(hits[skip:]) / len(hits[skip:])


def echo(distance: int, count: int, seed: int = 4) -> list[tuple[int, bool]]:
    """A random branch, and one that repeats what the random one did ``distance`` outcomes before."""
    rng = random.Random(seed)
    outcomes: list[tuple[int, bool]] = []
    for _ in range(count):
        outcomes.append((1, rng.random() < 0.5))
        outcomes.append((2, outcomes[-distance][1] if len(outcomes) >= distance else False))
    return outcomes


@both
def test_a_branch_that_always_goes_one_way_is_learned(make: Callable[[], BranchPredictor]) -> None:
    """After a short warm-up a constant branch is predicted right every time, either way."""
    for taken in (True, False):
        assert accuracy(make(), [(7, taken)] * 200, skip=20) == 1.0


def test_a_perceptron_sees_farther_than_a_table_of_counters() -> None:
    """A branch that repeats an outcome 19 back is learned among random ones; eight bits of history show nothing."""
    outcomes = echo(19, 1500)
    second = accuracy(Perceptron(history_bits=24), outcomes, skip=1000)
    assert second > 0.72  # the random half cannot be predicted: 0.75 is the most
    assert accuracy(GShare(), outcomes, skip=1000) < 0.6


def test_a_perceptron_does_not_learn_an_exclusive_or() -> None:
    """What is not linearly separable stays unknown to it (Jimenez and Lin 2001, section 2), and gshare learns it."""
    rng, outcomes = random.Random(6), []
    for _ in range(1500):
        first, second = rng.random() < 0.5, rng.random() < 0.5
        outcomes += [(1, first), (2, second), (3, first != second)]
    assert accuracy(Perceptron(), outcomes, skip=1500) < 0.60
    assert accuracy(GShare(), outcomes, skip=1500) > 0.62


def test_weights_saturate() -> None:
    """No weight leaves its range, however long a branch goes one way."""
    predictor = Perceptron(history_bits=4, weight_bits=3)
    accuracy(predictor, [(0, True)] * 100 + [(0, False)] * 100)
    weights = [weight for row in predictor._rows.values() for weight in row]
    assert min(weights) >= -4
    assert max(weights) <= 3


def test_tage_learns_loops_longer_than_a_gshare_history() -> None:
    """The exit of a loop of 40 turns is predicted from a history of 64 outcomes, not from one of 8."""
    loop = [(3, turn % 40 != 39) for turn in range(6000)]
    assert accuracy(TAGE(), loop, skip=3000) > 0.995
    assert accuracy(GShare(), loop, skip=3000) < 0.98


def test_tage_does_not_pay_for_its_long_histories_on_random_branches() -> None:
    """Biased random branches are predicted almost as well as by the counters of its base table."""
    rng = random.Random(8)
    outcomes = [(address, rng.random() < 0.85) for _ in range(1500) for address in range(4)]
    assert accuracy(TAGE(), outcomes, skip=1000) > accuracy(TwoBit(), outcomes, skip=1000) - 0.03


def entry_of(predictor: TAGE, number: int, address: int, history: int) -> int:
    """The entry of a branch in one of the tagged tables."""
    return predictor._tables[number].place(address, history)[0]


@pytest.mark.parametrize("taken", [True, False])
def test_a_misprediction_allocates_an_entry_that_says_what_happened(taken: bool) -> None:  # noqa: FBT001 -- a case
    """The new entry is weak, of no proven use, and has the direction that was missed."""
    predictor = TAGE(tables=1)
    for _ in range(0 if taken else 3):
        predictor._base.observe(5, taken=True)
    predictor.observe(5, 0b1010, taken=taken)
    table, entry = predictor._tables[0], entry_of(predictor, 0, 5, 0b1010)
    assert table.tags[entry] == table.place(5, 0b1010)[1]
    assert (table.counters[entry], table.useful[entry]) == (0 if taken else -1, 0)


def test_a_new_entry_is_passed_over_while_new_entries_do_worse() -> None:
    """It guesses only once trust in new entries has grown; trust grows when they would have been right."""
    predictor = TAGE(tables=1)
    predictor.observe(5, 0b1010, taken=True)  # allocates; the base table still says not taken
    predictor._base.observe(5, taken=False)
    assert not predictor.predict(5, 0b1010).taken
    before = predictor._faith
    predictor.observe(5, 0b1010, taken=True)
    assert predictor._faith == before - 1  # the new entry was right
    predictor._tables[0].counters[entry_of(predictor, 0, 5, 0b1010)] = 0
    predictor._tables[0].useful[entry_of(predictor, 0, 5, 0b1010)] = 0
    predictor._base.observe(5, taken=False)
    assert predictor.predict(5, 0b1010).taken


def test_entries_that_prove_useful_are_kept() -> None:
    """An entry that is right where the guess without it is wrong gains use, and loses it only by and by."""
    predictor = TAGE(tables=1)
    for _ in range(6):
        predictor._base.observe(5, taken=False)
        predictor.observe(5, 0b1010, taken=True)
    table, entry = predictor._tables[0], entry_of(predictor, 0, 5, 0b1010)
    useful = table.useful[entry]
    assert useful >= 2
    tag = table.tags[entry] = table.tags[entry] ^ 1  # another branch's now
    predictor._base.observe(5, taken=False)
    predictor.observe(5, 0b1010, taken=True)  # mispredicted, and no entry is free
    assert (table.tags[entry], table.useful[entry]) == (tag, useful - 1)


def test_new_entries_go_to_short_histories_more_often() -> None:
    """Of three free tables the first is chosen half of the time, and every one sometimes."""
    predictor = TAGE(12, tables=3, base_bits=16)
    for address in range(400):
        predictor.observe(address, 0b1010, taken=True)
    used = [sum(tag != 0xFFFF for tag in table.tags) for table in predictor._tables]
    assert used[0] == pytest.approx(200, abs=60)
    assert used[1] == pytest.approx(100, abs=50)
    assert used[2] == pytest.approx(100, abs=50)


def test_usefulness_ages() -> None:
    """Aging clears one bit of every usefulness in turn, so that an entry that stopped being useful can be replaced."""
    predictor = TAGE(tables=1, table_bits=4, aging_period=10)
    table = predictor._tables[0]
    table.useful[3] = 3
    accuracy(predictor, [(0, True)] * 10)
    assert table.useful[3] == 1
    accuracy(predictor, [(0, True)] * 10)
    assert table.useful[3] == 0


def test_history_lengths_grow_geometrically() -> None:
    """From the shortest to the longest in equal ratios, both ends included."""
    lengths = [table._length for table in TAGE(tables=5, shortest=4, longest=64)._tables]
    assert lengths == [4, 8, 16, 32, 64]


@both
def test_predicting_changes_nothing(make: Callable[[], BranchPredictor]) -> None:
    """Predictions along a path that is squashed leave no trace: only retired branches are learned."""
    predictor = make()
    accuracy(predictor, echo(5, 100))
    before = [predictor.predict(address, history) for address in range(3) for history in range(32)]
    for history in range(500):
        predictor.predict(history, history * 7)
    assert [predictor.predict(address, history) for address in range(3) for history in range(32)] == before


@both
def test_the_same_branches_give_the_same_predictions(make: Callable[[], BranchPredictor]) -> None:
    """Nothing depends on chance: TAGE's coin is part of its state."""
    first, second = make(), make()
    history = 0
    for address, taken in echo(9, 400):
        assert first.predict(address, history) == second.predict(address, history)
        for predictor in (first, second):
            predictor.observe(address, history, taken=taken)
        history = history << 1 | taken


@both
def test_confidence_tells_sure_from_unsure(make: Callable[[], BranchPredictor]) -> None:
    """A branch that always goes one way is predicted with more confidence than a random one."""
    predictor, rng, history = make(), random.Random(1), 0
    for _ in range(1500):
        for address, taken in ((0, True), (1, rng.random() < 0.5)):
            predictor.observe(address, history, taken=taken)
            history = history << 1 | taken
    sure = predictor.predict(0, history).confidence
    unsure = predictor.predict(1, history << 1 | 1).confidence
    assert sure > 0.9
    assert unsure < 0.75


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**90), st.booleans()), max_size=60))
def test_any_address_and_history_are_served(events: list[tuple[int, int, bool]]) -> None:
    """Addresses and histories of any size index the tables, and confidences stay inside (0, 1)."""
    for predictor in (Perceptron(3, 5), TAGE(3, tables=3, shortest=2, longest=80, base_bits=3)):
        for address, history, taken in events:
            assert 0.0 < predictor.predict(address, history).confidence < 1.0
            predictor.observe(address, history, taken=taken)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (Perceptron, "table_bits", 0),
        (Perceptron, "history_bits", 0),
        (Perceptron, "weight_bits", 1),
        (TAGE, "table_bits", 21),
        (TAGE, "tables", 0),
        (TAGE, "shortest", 0),
        (TAGE, "longest", 3),
        (TAGE, "tag_bits", 16),
        (TAGE, "base_bits", 0),
        (TAGE, "aging_period", 0),
    ],
)
def test_settings_out_of_range_are_refused(kind: type[Perceptron | TAGE], setting: str, value: int) -> None:
    """A table that cannot be built is an error where it is declared."""
    with pytest.raises(InvalidSettingError, match="table_bits" if setting == "base_bits" else setting):
        kind(**{setting: value})


@pytest.mark.parametrize("make", [TwoBit, GShare])
def test_counters_can_start_taken(make: type[TwoBit | GShare]) -> None:
    """What is guessed of a branch never seen is a setting."""
    assert not make().predict(5, 3).taken
    assert make(initially_taken=True).predict(5, 3).taken
