"""What predictors remember with: keys, copies, bounded tables, fading rates."""

from __future__ import annotations

import enum
import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.codec import digest
from specflow.errors import InvalidSettingError, UnsupportedValueError
from specflow.predictors.memory import Bounded, HitRates, Kept, arguments_key, copy_of, key_of, ranked
from specflow.speculation import Call


class Size(enum.Enum):
    """An enum whose values are numbers."""

    SMALL = 1
    LARGE = 2


class Mode(enum.Enum):
    """An enum whose values cannot be hashed."""

    A = [1]  # noqa: RUF012 -- that is the point
    B = [2]  # noqa: RUF012


ODD: list[Any] = [
    0, 1, True, False, 0.0, -0.0, 1.0, math.nan, "1", b"1", None, (1,), [1], {1}, frozenset({1}), {"a": 1, "b": 2},
    {"b": 2, "a": 1}, Size.SMALL, Size.LARGE, Mode.A, Mode.B,
]  # fmt: skip

plain = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["", "1", "a"]) | st.binary()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.tuples(inner), max_leaves=4)


def test_keys_tell_apart_what_canonical_forms_do() -> None:
    """Two values have equal keys exactly when they have equal digests: nan is itself, True is not 1, 0.0 not -0.0."""
    for left in ODD:
        for right in ODD:
            assert (key_of(left) == key_of(right)) == (digest(left) == digest(right)), (left, right)


@given(values, values)
def test_keys_are_equal_when_digests_are(left: Any, right: Any) -> None:
    """The short way for plain values agrees with the encoding."""
    assert (key_of(left) == key_of(right)) == (digest(left) == digest(right))
    assert hash(key_of(left)) == hash(key_of(copy_of(left)))


@given(values)
def test_copies_are_equal_and_independent(value: Any) -> None:
    """A copy has the value's canonical form, and a list in it is another list."""
    for copy in (copy_of(value), Kept(value).copy(), Kept(value).copy()):
        assert digest(copy) == digest(value)
        if isinstance(value, list):
            assert copy is not value


def test_values_that_cannot_be_encoded_are_refused() -> None:
    """No step can return them, so no guess can be right."""
    for function in (key_of, Kept, copy_of):
        with pytest.raises(UnsupportedValueError):
            function(threading.Lock())


def test_keywords_may_come_in_any_order() -> None:
    """Arguments are the same whichever order keywords were written in, and positions are not keywords."""
    one, other = Call("s", (1,), {"a": 1, "b": [2]}), Call("s", (1,), {"b": [2], "a": 1})
    assert arguments_key(one) == arguments_key(other)
    assert arguments_key(one) != arguments_key(Call("s", (1, 1), {"b": [2]}))


def test_reading_a_bounded_table_does_not_keep_an_item() -> None:
    """The item written least recently goes, however often it was read."""
    table: Bounded[str, int] = Bounded(2)
    table.put("a", 1)
    table.put("b", 2)
    assert [table.get("a") for _ in range(3)] == [1, 1, 1]
    table.put("c", 3)
    assert (table.get("a"), table.get("b"), table.get("c"), len(table)) == (None, 2, 3, 2)
    assert table.touch("b", lambda: 9) == 2
    assert table.touch("d", lambda: 9) == 9
    assert (table.get("c"), table.pop("b"), table.pop("b")) == (None, 2, None)


@given(st.lists(st.booleans(), max_size=50), st.floats(1.0, 100.0))
def test_a_rate_lies_between_never_and_always(hits: list[bool], memory: float) -> None:
    """The estimate is a mean of 0, 1 and the prior, so that it never claims certainty."""
    rates = HitRates(memory)
    for hit in hits:
        rates.record("state", hit=hit)
    assert 0.0 < rates.rate("state") < 1.0
    assert rates.rate("state", prior=0.1) < rates.rate("state", prior=0.9)
    assert rates.resolved("state") == len(hits)


def test_a_rate_is_laplaces_and_fades() -> None:
    """With a long memory it is (hits + 1) / (guesses + 2); with a short one the newest guesses decide."""
    long, short = HitRates(1e12), HitRates(3.0)
    for rates in (long, short):
        for hit in [True] * 20 + [False] * 10:
            rates.record("state", hit=hit)
    assert long.rate("state") == pytest.approx(21 / 32)
    assert short.rate("state") < 0.25
    assert long.rate("never seen", prior=0.3) == pytest.approx(0.3)


def test_states_of_a_rate_are_bounded() -> None:
    """The state seen first is forgotten where there are too many."""
    rates = HitRates(10.0, limit=2)
    for state in "abc":
        rates.record(state, hit=True)
    assert rates.resolved("a") == 0
    assert (rates.resolved("b"), rates.resolved("c")) == (1, 1)


def test_ranked_guesses_keep_their_order_and_add_up_to_one_at_most() -> None:
    """A later guess claims no more than the one before, and all together no more than certainty."""
    kept = [Kept(value) for value in "abc"]
    assert [(guess.value, guess.confidence) for guess in ranked(kept, [0.2, 0.4, 0.1])] == [
        ("a", 0.2),
        ("b", 0.2),
        ("c", 0.1),
    ]
    assert [guess.confidence for guess in ranked(kept, [0.8, 0.8, 0.4])] == pytest.approx([0.4, 0.4, 0.2])


def test_tables_of_no_size_are_refused() -> None:
    """A limit or memory below one keeps nothing."""
    for make in (lambda: Bounded(0), lambda: HitRates(0.9), lambda: HitRates(5.0, limit=0)):
        with pytest.raises(InvalidSettingError):
            make()
