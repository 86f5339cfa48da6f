"""Branch predictors: two-bit counters by address, and by address and history."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.predictors import BranchPredictor, GShare, TwoBit


def accuracy(predictor: BranchPredictor, outcomes: Iterable[tuple[int, bool]]) -> float:
    """Fraction of (address, taken) pairs predicted right, learning as they retire."""
    right = seen = history = 0
    for address, taken in outcomes:
        right += predictor.predict(address, history).taken == taken
        predictor.observe(address, history, taken=taken)
        history = history << 1 | taken
        seen += 1
    return right / seen


def trained(predictor: BranchPredictor, outcomes: Iterable[bool], address: int = 0) -> BranchPredictor:
    """A predictor that has seen a branch take these directions."""
    for taken in outcomes:
        predictor.observe(address, 0, taken=taken)
    return predictor


@pytest.mark.parametrize("make", [TwoBit, GShare], ids=["two-bit", "gshare"])
def test_a_branch_that_always_goes_one_way_is_learned(make: type[TwoBit | GShare]) -> None:
    """After a short warm-up a constant branch is predicted right every time."""
    assert accuracy(make(), [(7, True)] * 200) > 0.94


def test_one_odd_outcome_does_not_change_a_saturated_counter() -> None:
    """The second bit keeps a loop branch predicted as taken after its single exit (Smith 1981)."""
    predictor = trained(TwoBit(), [True, True, True, False])
    assert predictor.predict(0, 0).taken
    assert not trained(predictor, [False, False]).predict(0, 0).taken


def test_a_loop_costs_a_two_bit_counter_one_miss_per_exit() -> None:
    """A loop of ten iterations is predicted right nine times out of ten."""
    assert accuracy(TwoBit(), [(3, step % 10 != 9) for step in range(2000)]) == pytest.approx(0.9, abs=0.01)


def test_history_tells_apart_what_an_address_cannot() -> None:
    """A strictly alternating branch defeats a counter and is learned completely with history (McFarling 1993)."""
    alternating = [(5, step % 2 == 0) for step in range(1000)]
    assert accuracy(TwoBit(), alternating) <= 0.55
    assert accuracy(GShare(), alternating) > 0.97


def test_gshare_without_history_is_the_two_bit_predictor() -> None:
    """With no history bits both predictors agree on everything."""
    outcomes = [(step % 7, step % 3 == 0) for step in range(500)]
    assert accuracy(GShare(history_bits=0), outcomes) == accuracy(TwoBit(), outcomes)


def test_addresses_that_agree_in_their_low_bits_share_a_counter() -> None:
    """A small table confuses branches, a larger one does not."""
    outcomes = [(address, address == 0) for _ in range(200) for address in (0, 16)]
    assert accuracy(TwoBit(table_bits=4), outcomes) < 0.6
    assert accuracy(TwoBit(table_bits=5), outcomes) > 0.95


def test_predicting_changes_nothing() -> None:
    """Predictions along a path that is squashed leave no trace: only retired branches are learned."""
    predictor = trained(GShare(), [True, False, True])
    before = [predictor.predict(0, history) for history in range(8)]
    for history in range(1000):
        predictor.predict(history, history)
    assert [predictor.predict(0, history) for history in range(8)] == before


def test_confidence_is_how_often_the_counter_state_was_right() -> None:
    """A saturated counter that is right nine times in ten says about 0.9; an unknown one says even odds."""
    predictor = TwoBit()
    assert predictor.predict(0, 0).confidence == 0.5
    for step in range(3000):
        predictor.observe(step % 3, 0, taken=step % 30 != 0)
    assert predictor.predict(1, 0).confidence == pytest.approx(0.97, abs=0.03)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.booleans()), max_size=60))
def test_any_address_and_history_are_served(events: list[tuple[int, int, bool]]) -> None:
    """Addresses and histories of any size index the table, and confidences stay inside (0, 1)."""
    for predictor in (TwoBit(table_bits=3), GShare(table_bits=3, history_bits=2)):
        for address, history, taken in events:
            assert 0.0 < predictor.predict(address, history).confidence < 1.0
            predictor.observe(address, history, taken=taken)


@pytest.mark.parametrize("table_bits", [0, 25])
def test_table_sizes_out_of_range_are_refused(table_bits: int) -> None:
    """A table must have at least two counters and fit into memory."""
    with pytest.raises(InvalidSettingError, match="table_bits"):
        TwoBit(table_bits)
    with pytest.raises(InvalidSettingError, match="table_bits"):
        GShare(table_bits, 0)


@pytest.mark.parametrize("history_bits", [-1, 5])
def test_more_history_than_table_is_refused(history_bits: int) -> None:
    """History bits beyond the table's index would be silently lost."""
    with pytest.raises(InvalidSettingError, match="history_bits"):
        GShare(table_bits=4, history_bits=history_bits)
