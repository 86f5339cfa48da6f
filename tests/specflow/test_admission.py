"""The frontier shows one estimate at a time and keeps book of what was admitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.errors import AdmissionClosedError
from specflow.types import Draft


def frontier() -> Frontier:
    """Three drafts: two items with estimates, three without, none."""
    return Frontier([Draft("ab", [0.9, 0.5]), Draft("cde"), Draft("")])


def test_only_the_next_estimate_is_shown() -> None:
    """Admitting an item reveals the estimate after it, and nothing else does."""
    shown = frontier()
    assert shown.survival(0) == 0.9
    assert shown.survival(0) == 0.9
    shown.admit(0)
    assert shown.survival(0) == 0.5
    shown.admit(0)
    assert shown.survival(0) is None


def test_no_estimate_counts_as_certainty_and_no_item_as_none() -> None:
    """A drafter without estimates is taken at 1.0; an empty draft has nothing to show."""
    shown = frontier()
    assert len(shown) == 3
    assert (shown.survival(1), shown.survival(2)) == (1.0, None)
    assert [shown.available(index) for index in range(3)] == [2, 3, 0]


def test_the_decision_lists_prefix_lengths_per_chain() -> None:
    """Several items may be admitted on one estimate; the decision holds lengths in round order."""
    shown = frontier()
    shown.admit(1, 2)
    assert shown.admitted(1) == 2
    decision = shown.decision()
    assert decision.lengths == (0, 2, 0)
    assert decision.anticipated == (False, False, False)
    assert decision.total == 2


def test_admitting_all_respects_what_is_closed() -> None:
    """admit_all() takes every item of every draft that was not closed before."""
    shown = frontier()
    shown.close(1)
    shown.admit_all()
    assert shown.decision().lengths == (2, 0, 0)


@pytest.mark.parametrize(("index", "count"), [(0, 3), (2, 1), (1, -1)])
def test_admitting_more_than_there_is_fails(index: int, count: int) -> None:
    """Admitting past the end of a draft, or a negative number, is a misuse that names what is left."""
    with pytest.raises(AdmissionClosedError) as caught:
        frontier().admit(index, count)
    assert caught.value.asked == count
    assert caught.value.available == frontier().available(index)


def test_a_closed_draft_shows_and_admits_nothing() -> None:
    """Closing hides the next estimate and refuses further items, and keeps those admitted."""
    shown = frontier()
    shown.admit(0)
    shown.close(0)
    assert shown.survival(0) is None
    assert shown.available(0) == 0
    with pytest.raises(AdmissionClosedError):
        shown.admit(0)
    assert shown.decision().lengths == (1, 0, 0)


def test_revealing_marks_the_draft_as_anticipated() -> None:
    """Looking at all estimates is allowed and leaves a mark on that draft alone."""
    shown = frontier()
    assert shown.reveal(0) == [0.9, 0.5]
    assert shown.reveal(1) is None
    assert shown.decision().anticipated == (True, True, False)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_admitted_and_available_always_add_up(sizes: list[int], data: st.DataObject) -> None:
    """Whatever is admitted in whatever order, admitted + available is the draft's size until it is closed."""
    shown = Frontier([Draft(range(size)) for size in sizes])
    for _ in range(data.draw(st.integers(0, 10))):
        index = data.draw(st.integers(0, len(sizes) - 1))
        shown.admit(index, data.draw(st.integers(0, shown.available(index))))
        assert shown.admitted(index) + shown.available(index) == sizes[index]
    assert shown.decision().total == sum(shown.admitted(index) for index in range(len(sizes)))
