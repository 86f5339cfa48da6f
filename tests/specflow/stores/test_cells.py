"""What writes make of a value is what plain Python makes of it, and what does not fit is named."""

from __future__ import annotations

import decimal
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.codec import decode, encode
from specflow.errors import DecodingError, UnsupportedValueError
from specflow.history import Operation, Write
from specflow.stores.cells import apply, fold
from specflow.stores.lineage import Stem

Step = tuple[Operation, Any]

NUMBERS = st.one_of(
    st.tuples(st.sampled_from([Operation.PUT, Operation.ADD]), st.integers() | st.floats(allow_nan=False, width=16)),
    st.tuples(st.just(Operation.DELETE), st.none()),
)
LISTS = st.one_of(
    st.tuples(st.just(Operation.APPEND), st.integers() | st.lists(st.integers(), max_size=2)),
    st.tuples(st.just(Operation.PUT), st.lists(st.integers(), max_size=2)),
    st.tuples(st.just(Operation.DELETE), st.none()),
)
SETS = st.one_of(
    st.tuples(st.sampled_from([Operation.PUT, Operation.UNION]), st.sets(st.integers(0, 5), max_size=3)),
    st.tuples(st.just(Operation.DELETE), st.none()),
)


def plainly(steps: list[Step]) -> Any:
    """The value after the steps, in plain Python; None for a missing key."""
    value: Any = None
    for operation, operand in steps:
        if operation is Operation.PUT:
            value = operand
        elif operation is Operation.DELETE:
            value = None
        elif operation is Operation.ADD:
            value = (0 if value is None else value) + operand
        elif operation is Operation.APPEND:
            value = [*([] if value is None else value), operand]
        else:
            value = (set() if value is None else value) | operand
    return value


@given(st.lists(NUMBERS) | st.lists(LISTS) | st.lists(SETS))
def test_operations_do_what_python_does(steps: list[Step]) -> None:
    """Folding at once, folding one by one and plain Python agree, to the byte."""
    encoded = [(operation, b"" if operation is Operation.DELETE else encode(operand)) for operation, operand in steps]
    one_by_one = None
    for operation, data in encoded:
        one_by_one = apply(one_by_one, Write("key", operation, data))
    value = plainly(steps)
    expected = None if value is None else encode(value)
    assert fold("key", None, encoded) == one_by_one == expected


@given(st.lists(LISTS), st.integers(0, 20))
def test_a_fold_can_go_on_from_any_point(steps: list[Step], where: int) -> None:
    """What was folded before is as good as the operations themselves: caches may keep it."""
    encoded = [(operation, b"" if operation is Operation.DELETE else encode(operand)) for operation, operand in steps]
    first, rest = encoded[:where], encoded[where:]
    assert fold("key", fold("key", None, first), rest) == fold("key", None, encoded)


@pytest.mark.parametrize(
    ("value", "operation", "operand"),
    [
        ("text", Operation.APPEND, 1),
        ((1,), Operation.APPEND, 1),
        ({1}, Operation.APPEND, 1),
        ([1], Operation.UNION, {1}),
        ({1}, Operation.UNION, [1]),
        ("text", Operation.ADD, 1),
        (1, Operation.ADD, "text"),
        ("a", Operation.ADD, "b"),
        ([1], Operation.ADD, [2]),
        (True, Operation.ADD, 1),
        (1, Operation.ADD, True),
        (0.5, Operation.ADD, Decimal(1)),
        (10**400, Operation.ADD, 0.5),
    ],
)
def test_what_does_not_fit_is_named(value: Any, operation: Operation, operand: Any) -> None:
    """The error names the key, the types and the operation; what Python would do with two strings does not count."""
    with pytest.raises(UnsupportedValueError) as caught:
        apply(encode(value), Write("the key", operation, encode(operand)))
    message = str(caught.value)
    assert "'the key'" in message
    assert type(value).__name__ in message
    assert type(operand).__name__ in message
    assert operation.value in message


def test_damage_is_named() -> None:
    """Bytes that give no value are reported with the key, be they value or operand."""
    for previous, operand in ((b"?", encode(1)), (encode(1), b"?")):
        with pytest.raises(DecodingError, match="the key"):
            apply(previous, Write("the key", Operation.ADD, operand))


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.DELETE])
def test_values_that_are_replaced_are_not_looked_at(operation: Operation) -> None:
    """Putting and deleting work on any bytes."""
    after = apply(b"?", Write("key", operation, b"??" if operation is Operation.PUT else b""))
    assert after == (b"??" if operation is Operation.PUT else None)


def test_decimals_do_not_depend_on_the_thread() -> None:
    """A sum of Decimals has the same digits whatever precision the program has set, and never raises."""
    steps = [(Operation.ADD, encode(Decimal(text))) for text in ("1E+40", "0.1", "-1E+40")]
    with decimal.localcontext(prec=5):
        narrow = fold("key", None, steps)
    assert narrow == fold("key", None, steps)
    assert narrow is not None
    assert decode(narrow) == Decimal("0.1")
    infinite = [(Operation.ADD, encode(Decimal(text))) for text in ("Infinity", "-Infinity")]
    total = fold("key", None, infinite)
    assert total is not None
    assert decode(total).is_nan()


@given(st.lists(st.integers(0, 100), max_size=6), st.data())
def test_segments_are_where_the_versions_are(marks: list[int], data: st.DataObject) -> None:
    """The segments of any range, put together, name for each version the run that holds it."""
    stem, head = Stem(0), 5
    for number, mark in enumerate(marks, start=1):
        base = mark % (head + 1)
        stem, head = Stem(number, base, stem.holder(base)), base + mark % 4
    after = data.draw(st.integers(0, head))
    until = data.draw(st.integers(after, head))
    found = []
    for number, first, last in stem.segments(after, until):
        found += [(version, number) for version in range(first + 1, last + 1)]
    assert found == [(version, stem.holder(version).number) for version in range(after + 1, until + 1)]
