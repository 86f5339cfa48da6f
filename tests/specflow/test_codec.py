"""The codec: every supported value comes back as it was, the bytes are the same everywhere, and the rest is refused."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time as clock
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from specflow.codec import (
    MAX_CAUSES,
    MAX_DEPTH,
    Box,
    RecordedError,
    decode,
    decode_error,
    digest,
    encode,
    encode_error,
    equal,
)
from specflow.errors import DecodingError, ExecutionError, InvalidSettingError, StepTimeoutError, UnsupportedValueError
from tests.specflow.samples import (
    SPECIMENS,
    Access,
    Bag,
    Cached,
    Child,
    Colour,
    Computed,
    ConnectionLostError,
    Frozen,
    FrozenSlotted,
    Item,
    Late,
    Level,
    Link,
    Mask,
    NeedsPartError,
    Number,
    Numbers,
    Opaque,
    Open,
    Order,
    Outer,
    Page,
    Pair,
    Point,
    Rows,
    SilentError,
    Slotted,
    Square,
    Table,
    TeapotError,
    Text,
    Tone,
    Typed,
    digests,
    make_local_error,
    make_local_value,
)

# ---------------------------------------------------------------------------------------------------------------------
# What "comes back as it was" means, stated without the codec


def same(left: Any, right: Any) -> bool:  # noqa: PLR0911 -- a case per kind
    """Whether two values have the same type and content all the way down, in the same order where order can be seen."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Enum | type):
        return left is right
    if isinstance(left, BaseModel):
        return same_model(left, right)
    if is_dataclass(left):
        names = [field.name for field in fields(left)]
        return same([getattr(left, name, "unset") for name in names], [getattr(right, name, "unset") for name in names])
    if isinstance(left, list | tuple | deque):
        sizes = len(left) == len(right) and getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        return sizes and all(map(same, left, right))
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
        return factories and same(list(left.items()), list(right.items()))
    if isinstance(left, set | frozenset):
        rest = list(right)
        for item in left:
            twin = next((index for index, other in enumerate(rest) if same(item, other)), None)
            if twin is None:
                return False
            del rest[twin]
        return not rest
    return same_scalar(left, right)


def same_scalar(left: Any, right: Any) -> bool:  # noqa: PLR0911 -- as above
    """The part of :func:`same` for values that hold no others."""
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (left != left and right != right)  # noqa: PLR0124
    if isinstance(left, complex):
        return same((left.real, left.imag), (right.real, right.imag))
    if isinstance(left, datetime | time):
        return (
            same(left.tzinfo, right.tzinfo)
            and left.fold == right.fold
            and left.replace(tzinfo=None) == right.replace(tzinfo=None)
        )
    if isinstance(left, Decimal):
        return left.as_tuple() == right.as_tuple()
    if isinstance(left, range):
        return (left.start, left.stop, left.step) == (right.start, right.stop, right.step)
    if isinstance(left, UUID):
        return left == right and left.is_safe is right.is_safe
    if isinstance(left, tzinfo):
        return repr(left) == repr(right)
    return bool(left == right)


def same_model(left: BaseModel, right: BaseModel) -> bool:
    """The part of :func:`same` for pydantic models: fields, what was set, extra and private attributes."""
    parts = ["__dict__", "__pydantic_fields_set__"]
    if not isinstance(left, RootModel):
        parts += ["__pydantic_extra__", "__pydantic_private__"]
    return all(same(getattr(left, part), getattr(right, part)) for part in parts)


naive = st.datetimes()
offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
zones = st.one_of(
    st.just(UTC), offsets, st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]).map(ZoneInfo)
)
aware = st.builds(
    lambda moment, zone, fold: moment.replace(tzinfo=zone, fold=fold), naive, st.none() | zones, st.integers(0, 1)
)
texts = st.text(st.characters(exclude_categories=()), max_size=8)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.builds(lambda bits, rest: rest - 2**bits, st.integers(2040, 2055), st.integers()),
    st.floats(),
    texts,
    st.sampled_from(["$tuple", "$dict", "$", "$ref", ""]),
)
hashable_scalars = st.one_of(
    plain,
    st.complex_numbers(),
    st.binary(max_size=8),
    naive,
    aware,
    st.dates(),
    st.times(timezones=st.none() | offsets),
    st.timedeltas(),
    zones,
    st.decimals().filter(lambda number: not number.is_snan()),  # these have no hash
    st.fractions(),
    st.uuids(),
    st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
    st.builds(PurePosixPath, texts.filter(lambda text: "\x00" not in text)),
    st.sampled_from([*Colour, *Level, *Tone]),
    st.integers(0, 7).map(Access),
    st.integers(0, 31).map(Mask),
    st.sampled_from([int, Item, Order, Page[int]]),
)
hashables = st.recursive(
    hashable_scalars,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.frozensets(inner, max_size=3),
        st.builds(Frozen, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=4,
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Everything that holds other values."""
    maps = st.dictionaries(hashables, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts | st.sampled_from(["$tuple", "a"]), inner, max_size=3),
        maps,
        maps.map(OrderedDict),
        maps.map(lambda entries: defaultdict(random.Random(len(entries)).choice([None, list, int]), entries)),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4)),
        st.builds(Item, inner, inner),
        st.builds(Child, inner, inner, inner),
        st.builds(Slotted, inner, inner),
        st.builds(FrozenSlotted, content=inner),
        st.builds(Typed, inner),
        st.builds(Pair, inner, inner),
        st.builds(Outer.Inner, inner),
        st.builds(lambda content: Bag.model_construct(content=content), inner),
        st.builds(lambda extra: Open(**extra), st.dictionaries(st.sampled_from(["a", "b", "known_2"]), inner)),
    )


values = st.recursive(
    st.one_of(
        hashables,
        st.binary(max_size=8).map(bytearray),
        st.sets(hashables, max_size=4),
        st.dictionaries(hashables, st.integers() | st.floats(), max_size=3).map(Counter),
        st.lists(plain, max_size=6),
        st.dictionaries(texts, plain, max_size=4),
    ),
    containers,
    max_leaves=10,
)

# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("value", SPECIMENS.values(), ids=SPECIMENS)
def test_specimens_come_back_as_they_were(value: Any) -> None:
    """Each supported type keeps type and content, and its copy has the same encoding."""
    data = encode(value)
    assert same(decode(data), value)
    assert encode(decode(data)) == data


@given(values)
@settings(max_examples=250, deadline=None)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    """Whatever is put into whatever keeps type and content; equality agrees with itself."""
    data = encode(value)
    twin = decode(data)
    assert same(twin, value)
    assert encode(twin) == data
    assert equal(value, twin)


@given(values, values)
@settings(max_examples=100, deadline=None)
def test_encodings_are_equal_exactly_for_the_same_values(left: Any, right: Any) -> None:
    """Two values have one encoding if they are the same, and two if they are not."""
    assert (encode(left) == encode(right)) is same(left, right) is equal(left, right)


def forgets_maxlen(value: Any) -> Any:
    """A codec with a known fault."""
    return deque(value) if isinstance(value, deque) else decode(encode(value))


def calls_the_constructor(value: Any) -> Any:
    """A codec with a known fault."""
    return Computed(value.width) if isinstance(value, Computed) else decode(encode(value))


def validates_again(value: Any) -> Any:
    """A codec with a known fault."""
    return type(value).model_validate(value.model_dump(by_alias=True)) if isinstance(value, Order) else value


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (lambda value: json.loads(json.dumps(value)), "tuple"),
        (lambda value: json.loads(json.dumps(value, default=list)), "deque"),
        (lambda value: json.loads(json.dumps(value)), "defaultdict"),
        (lambda value: json.loads(json.dumps(value)), "IntEnum"),
        (lambda value: type(value).fromisoformat(value.isoformat()), "zoned datetime"),
        (lambda value: Decimal(float(value)), "Decimal"),
        (forgets_maxlen, "deque"),
        (calls_the_constructor, "computed fields"),
        (validates_again, "model"),
    ],
)
def test_lossy_codecs_are_noticed(faulty: Callable[[Any], Any], name: str) -> None:
    """The comparison above sees each of the losses that codecs are known for."""
    assert same(SPECIMENS[name], SPECIMENS[name])
    assert not same(faulty(SPECIMENS[name]), SPECIMENS[name])


def test_every_specimen_has_its_own_encoding() -> None:
    """No two of the different specimens share their bytes."""
    assert len({encode(value) for value in SPECIMENS.values()}) == len(SPECIMENS)


def test_standard_containers_keep_their_kind() -> None:
    """A default dictionary still makes defaults, a deque still drops, a counter still counts missing keys as 0."""
    rows = decode(encode(defaultdict(list)))
    rows["new"].append(1)
    assert rows == {"new": [1]}
    recent = decode(encode(deque([1, 2], maxlen=2)))
    recent.append(3)
    assert recent == deque([2, 3], maxlen=2)
    assert decode(encode(Counter("aab")))["z"] == 0
    ordered = decode(encode(OrderedDict(a=1, b=2)))
    ordered.move_to_end("a")
    assert list(ordered) == ["b", "a"]


def test_fields_outside_the_constructor_keep_their_value() -> None:
    """A dataclass field with ``init=False`` comes back as it was, not as the constructor would make it, nor as None."""
    twin = decode(encode(SPECIMENS["computed fields"]))
    assert (twin.area, twin.tags, twin.note, twin._seen) == (-1, ["changed"], "none", [3])
    with pytest.raises(AttributeError):
        _ = decode(encode(Late())).later


def test_restoring_a_model_runs_no_validator() -> None:
    """A validator that changes values has changed them once, when the model was made."""
    order = Order(number=1)
    assert order.number == 2
    twin = decode(encode(order))
    assert twin == order
    assert twin.model_fields_set == {"number"}
    assert twin._touched == 0
    twin._touched = 3
    assert order._touched == 0


def test_what_an_instance_holds_besides_its_fields_is_kept() -> None:
    """Slots and attributes of a subclass survive; a cached property is computed again."""
    twin = decode(encode(SPECIMENS["undecorated subclass"]))
    assert (twin.first, twin.extra, twin.other) == (1, [2], {3})
    original = SPECIMENS["generic dataclass"]
    assert decode(encode(original)).__dict__ == {"item": 3}
    cached = Cached(4)
    before = encode(cached)
    assert cached.square == 16
    assert encode(cached) == before
    assert "square" not in decode(encode(cached)).__dict__
    assert decode(encode(cached)).square == 16
    square = Square(side=3)
    before = encode(square)
    assert square.area == 9
    assert encode(square) == before
    assert decode(before).model_dump() == {"side": 3, "area": 9}


def test_times_that_pydantic_parsed_come_back() -> None:
    """Pydantic gives parsed times an offset class of its own, which is kept."""

    class Parsed(RootModel[datetime]):
        pass

    moment = Parsed.model_validate("2024-05-06T07:08:09+02:00").root
    twin = decode(encode(moment))
    assert twin == moment
    assert type(twin.tzinfo) is type(moment.tzinfo)
    assert twin.utcoffset() == timedelta(hours=2)


# ---------------------------------------------------------------------------------------------------------------------
# One encoding everywhere


@pytest.mark.parametrize("seed", ["0", "1", "2024"])
def test_digests_do_not_depend_on_the_process(seed: str) -> None:
    """Another process with another hash seed, hence other set orders, computes the same digests."""
    code = "import sys; from tests.specflow.samples import digests; sys.stdout.write(digests())"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == digests()


@given(st.lists(hashables, unique=True, max_size=8), st.randoms())
def test_the_order_of_insertion_does_not_show_in_a_set(members: list[Any], shuffler: random.Random) -> None:
    """Sets of equal content have one encoding, however they were filled."""
    shuffled = members.copy()
    shuffler.shuffle(shuffled)
    assert encode(set(members)) == encode(set(shuffled))


@pytest.mark.parametrize("limit", [640, 0])
def test_the_limit_on_digits_does_not_show(limit: int) -> None:
    """Long integers have one encoding, and can be decoded, however the interpreter limits their digits."""
    numbers = [10**616 - 1, 10**617, -(2**2048), 3**9000]
    value = {"numbers": numbers, "short": [1, 2]}
    data = [encode(number) for number in numbers], encode(numbers), encode(value)
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        assert ([encode(number) for number in numbers], encode(numbers), encode(value)) == data
        assert decode(data[2]) == value
    finally:
        sys.set_int_max_str_digits(before)


def test_the_decimal_context_does_not_show() -> None:
    """A context that rounds, or writes a small e, changes nothing."""
    value = Decimal("1.234567890123E+50")
    data = encode(value)
    with localcontext() as context:
        context.prec = 2
        context.capitals = 0
        assert encode(value) == data
        assert decode(data).as_tuple() == value.as_tuple()


def test_plain_data_is_plain_json() -> None:
    """What JSON can say exactly is JSON, for people and for other tools."""
    value = {"name": "tea", "tags": ["a", None], "price": 2.5, "ok": True}
    assert encode(value) == b'{"name":"tea","tags":["a",null],"price":2.5,"ok":true}'


def test_a_known_encoding_stays() -> None:
    """The format of stored runs is what it was: these bytes were written by the first version."""
    value = (Item("tea", Decimal("2.50")), {1: {"x"}}, datetime(2024, 1, 2, tzinfo=UTC))
    assert encode(value) == (
        b'{"$tuple":[{"$dataclass":["tests.specflow.samples:Item",{"name":"tea","price":{"$Decimal":"2.50"}}]},'
        b'{"$dict":[[1,{"$set":["x"]}]]},'
        b'{"$datetime":"2024-01-02T00:00:00+00:00"}]}'
    )


def test_pydantic_is_not_imported_for_plain_values() -> None:
    """Encoding and decoding values that are no models leaves pydantic alone."""
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from specflow.codec import decode, encode, encode_error\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class P:\n"
        "    x: object\n"
        "assert decode(encode(P((1, {2})))) == P((1, {2}))\n"
        "encode_error(ValueError(1))"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Equality

DIFFERENT = [
    1,
    True,
    1.0,
    complex(1),
    Decimal(1),
    Decimal("1.0"),
    Fraction(1),
    "1",
    b"1",
    bytearray(b"1"),
    Level.LOW,
    Mask.A,
]


@pytest.mark.parametrize("left", DIFFERENT, ids=repr)
def test_equal_numbers_of_different_types_differ(left: Any) -> None:
    """Every value equals itself and nothing of another type, in containers too."""
    for right in DIFFERENT:
        assert equal(left, right) is (left is right)
        assert equal([left], [right]) is (left is right)
        assert equal({"a": left}, {"a": right}) is (left is right)
        if bytearray not in (type(left), type(right)):
            assert equal({left}, {right}) is (left is right)


def test_equality_of_floats_is_of_what_they_are() -> None:
    """NaN equals NaN, and the two zeros differ."""
    assert equal(float("nan"), -float("nan"))
    assert equal([float("nan")], [float("nan")])
    assert not equal(0.0, -0.0)
    assert not equal([0.0], [-0.0])


def test_the_order_of_a_dictionary_counts() -> None:
    """A program can see the order, so it is part of the value unless the caller says otherwise."""
    left, right = {"a": 1, "b": {1: 2, 3: 4}}, {"b": {3: 4, 1: 2}, "a": 1}
    assert left == right
    assert not equal(left, right)
    assert equal(left, right, ignore_order=True)
    assert not equal(left, {"b": {3: 4, 1: 5}, "a": 1}, ignore_order=True)
    assert not equal(left, {"b": {3: 4, 1: 2}, "a": 1, "c": 1}, ignore_order=True)
    assert not equal(left, {"b": {3: 4, 2: 2}, "a": 1}, ignore_order=True)


def test_ignoring_order_ignores_no_other_order() -> None:
    """Lists, tuples, deques and ordered dictionaries are about order; counters and default dictionaries are not."""
    assert equal(Counter(a=1, b=2), Counter(b=2, a=1), ignore_order=True)
    assert equal(defaultdict(int, a=1, b=2), defaultdict(int, b=2, a=1), ignore_order=True)
    assert not equal(defaultdict(int, a=1, b=2), defaultdict(float, b=2, a=1), ignore_order=True)
    assert not equal(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), ignore_order=True)
    assert not equal([1, 2], [2, 1], ignore_order=True)
    assert not equal((1, 2), (2, 1), ignore_order=True)
    assert not equal(deque([1, 2]), deque([2, 1]), ignore_order=True)
    assert not equal(deque([1], 2), deque([1], 3), ignore_order=True)


@given(values)
@settings(max_examples=100, deadline=None)
def test_every_way_of_comparing_accepts_the_same_value(value: Any) -> None:
    """A copy equals its original however they are compared."""
    twin = decode(encode(value))
    for how in ({"ignore_order": True}, {"fields_only": True}, {"close": lambda left, right: left == right}):
        assert equal(value, twin, **how)
        assert equal([value, 1], [twin, 1], **how)
        assert not equal([value, 1], [twin, 2], **how)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


class OddZone(tzinfo):
    """A time zone of the user's own."""


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = [()]
    for _ in range(depth - 2):
        value = [value]
    return value


def endless() -> dict[str, Any]:
    """A dictionary that contains itself."""
    value: dict[str, Any] = {"rows": [1, {}]}
    value["rows"][1]["back"] = value["rows"]
    return value


def ring() -> Link:
    """Objects that refer to each other in a circle."""
    first = Link(Link(Link()))
    first.next.next.next = first
    return first


REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "object": ({"items": [1, 2, 3, Opaque()]}, "['items'][3]", "tests.specflow.samples.Opaque", "dataclass"),
    "function": ((1, len), "[1]", "builtin_function_or_method", "plain data"),
    "lambda": ({"f": [lambda: 1]}, "['f'][0]", "function", "plain data"),
    "generator": ([(item for item in ())], "[0]", "generator", "plain data"),
    "text subclass": ([Text("a")], "[0]", "tests.specflow.samples.Text", "plain str"),
    "list subclass": ({"r": Rows([1])}, "['r']", "tests.specflow.samples.Rows", "plain list"),
    "int subclass": (Item(Number(1)), ".name", "tests.specflow.samples.Number", "plain int"),
    "key of a subclass": ({Text("a"): 1}, "[key 'a']", "tests.specflow.samples.Text", "plain str"),
    "value behind an odd key": ({(1, 2): [Opaque()]}, "[(1, 2)][0]", "tests.specflow.samples.Opaque", "dataclass"),
    "dataclass and dict": ([Table("t")], "[0]", "tests.specflow.samples.Table", "plain dict"),
    "in a dataclass": (Child(1, Slotted(None, Opaque())), ".price.second", "tests.specflow.samples.Opaque", ""),
    "in a named tuple": (Point(1, [Opaque()]), ".y[0]", "tests.specflow.samples.Opaque", ""),
    "in a model": (Bag.model_construct(content={"a": Opaque()}), ".content['a']", "tests.specflow.samples.Opaque", ""),
    "in extra fields": (Open(other=Opaque()), ".other", "tests.specflow.samples.Opaque", ""),
    "in a deque": (deque([1, Opaque()]), "[1]", "tests.specflow.samples.Opaque", ""),
    "in a default dictionary": (defaultdict(list, {"a": Opaque()}), "['a']", "tests.specflow.samples.Opaque", ""),
    "local class": ([make_local_value()], "[0]", "tests.specflow.samples.make_local_value.<locals>.Local", "top level"),
    "exception": ([ValueError(1)], "[0]", "ValueError", "raise it"),
    "mapping": ([ChainMap({})], "[0]", "collections.ChainMap", "plain data"),
    "view": ([MappingProxyType({})], "[0]", "mappingproxy", "plain data"),
    "namespace": ([SimpleNamespace(a=1)], "[0]", "types.SimpleNamespace", "plain data"),
    "odd factory": ([defaultdict(lambda: 1)], "[0]", "collections.defaultdict", "default_factory"),
    "odd time zone": ([datetime(2024, 1, 1, tzinfo=OddZone())], "[0].tzinfo", "OddZone", "timezone"),
    "clock structure": ([clock.gmtime(0)], "[0]", "time.struct_time", "plain tuple"),
    "ellipsis": ([...], "[0]", "ellipsis", ""),
    "list in itself": ([endless()], "[0]['rows'][1]['back']", "list", "contains itself"),
    "ring of objects": ({"r": ring()}, "['r'].next.next.next", "tests.specflow.samples.Link", "contains itself"),
    "too deep": ({"d": nested(200)}, "['d'][0][0][0]...", "list", f"more than {MAX_DEPTH} levels"),
}


@pytest.mark.parametrize(("value", "path", "kind", "remedy"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_place_type_and_remedy(value: Any, path: str, kind: str, remedy: str) -> None:
    """What cannot come back exactly is refused when it is encoded, with all that is needed to find and change it."""
    with pytest.raises(UnsupportedValueError) as caught:
        encode(value, "state 'cart'")
    assert caught.value.where == f"state 'cart'{path}"
    assert caught.value.kind.endswith(kind)
    assert remedy in caught.value.remedy
    with pytest.raises(UnsupportedValueError):
        Box(value)
    with pytest.raises(UnsupportedValueError):
        digest(value)


def test_a_refused_member_of_a_set_is_shown() -> None:
    """Members of a set have no index, so the message shows the member."""
    with pytest.raises(UnsupportedValueError, match=r"value\{\(len, 1\)\}\[0\] holds".replace("len", "<built.*>")):
        encode({(len, 1)})


def test_nesting_up_to_the_limit_is_supported() -> None:
    """The deepest supported value survives, also in the types whose encoding nests most."""
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    chain: Any = Bag.model_construct(content=())
    for depth in range(MAX_DEPTH // 2 - 1):
        chain = Bag.model_construct(content=Link(chain) if depth % 2 else {1: chain})
    assert same(decode(encode(chain)), chain)


def test_a_full_call_stack_is_a_clear_error() -> None:
    """Where no room is left to go down, encoding and decoding say so instead of failing somewhere inside."""
    value = nested(90)
    data = encode(value)

    def at_the_bottom(action: Callable[[], object], room: int) -> object:
        """Call with little of the recursion limit left."""
        return action() if room == 0 else at_the_bottom(action, room - 1)

    def deepest(action: Callable[[], object], error: type[Exception]) -> Exception | None:
        """The error seen when the stack is nearly full."""
        for room in range(sys.getrecursionlimit(), 0, -10):
            try:
                at_the_bottom(action, room)
            except RecursionError:
                continue
            except error as seen:
                return seen
            return None
        return None

    refused = deepest(lambda: encode(value), UnsupportedValueError)
    assert refused is not None
    assert "call stack" in str(refused)
    damaged = deepest(lambda: decode(data), DecodingError)
    assert damaged is not None
    assert "call stack" in str(damaged)


def test_a_class_that_is_not_found_under_its_name_is_refused() -> None:
    """A second class of the same name would be restored as the first one."""
    impostor = type("Item", (Item,), {"__module__": Item.__module__, "__qualname__": "Item"})
    with pytest.raises(UnsupportedValueError, match="found under its own name"):
        encode(impostor("tea"))


# ---------------------------------------------------------------------------------------------------------------------
# Damage and change


def changed(value: Any, old: bytes, new: bytes) -> bytes:
    """An encoding in which something was renamed since."""
    data = encode(value)
    assert old in data
    return data.replace(old, new)


CHANGED: dict[str, tuple[bytes, str]] = {
    "module is gone": (changed(Item("a"), b"tests.specflow.samples", b"tests.specflow.gone"), "cannot be imported"),
    "class is gone": (changed(Item("a"), b":Item", b":Gone"), "tests.specflow.samples:Gone is not there"),
    "class is a function now": (changed(Item("a"), b":Item", b":digests"), "not there"),
    "class is another kind now": (changed(Item("a"), b":Item", b":Order"), "not a dataclass"),
    "class is plain now": (changed(Item("a"), b":Item", b":Opaque"), "changed"),
    "model is a dataclass now": (changed(Open(), b":Open", b":Item"), "not a pydantic model"),
    "field was renamed": (changed(Item("a"), b'"price"', b'"cost"'), "it had cost, name, and now has name, price"),
    "field was added": (changed(Child("a"), b":Child", b":Item"), "it had name, price, size"),
    "field was removed": (changed(Item("a"), b":Item", b":Child"), "now has name, price, size"),
    "field of a model was renamed": (changed(Open(), b'"known":', b'"older":'), "it had older, and now has known"),
    "private attribute was renamed": (changed(Order(number=1), b"_touched", b"_used"), "changed"),
    "extra fields are not allowed now": (changed(Open(x=1), b":Open", b":Bag").replace(b"known", b"content"), "extra"),
    "named tuple was changed": (changed(Point(1), b'"y"', b'"z"'), "changed"),
    "named tuple is a list now": (changed(Point(1), b":Point", b":Rows"), "changed"),
    "enum member is gone": (changed(Colour.RED, b'"RED"', b'"PINK"'), "no member PINK"),
    "enum is a class now": (changed(Colour.RED, b":Colour", b":Opaque"), "not an enum"),
    "flag is an enum now": (changed(Access.READ, b":Access", b":Colour"), "not a flag"),
    "flag bits are gone": (changed(Access.READ, b",1]", b",64]"), "Access"),
    "generic is plain now": (changed(Page[int](items=[]), b":Page", b":Item"), "not a generic pydantic model"),
    "time zone is gone": (changed(ZoneInfo("UTC"), b"UTC", b"Atlantis/Centre"), "Atlantis"),
    "class is a module": (b'{"$type":"os:path"}', "not there"),
    "no class": (b'{"$type":"os"}', "not there"),
    "no name": (b'{"$type":7}', "not the name of a class"),
    "relative import": (b'{"$type":".samples:Item"}', "cannot be imported"),
    "function by name": (b'{"$type":"os:system"}', "not there"),
    "main program": (b'{"$type":"__main__:Nothing"}', "main program"),
    "nothing": (b"", "damaged"),
    "no JSON": (b"{", "damaged"),
    "no UTF-8": (b'"\xff"', "damaged"),
    "trailing bytes": (b"1 2", "go on after the value"),
    "trailing space": (b"[] ", "go on after the value"),
    "unknown tag": (b'{"$pickle":"x"}', "not a known tag"),
    "odd bytes": (b'{"$bytes":"a"}', "bytes"),
    "odd tuple": (b'{"$tuple":"ab"}', "where a list belongs"),
    "odd Decimal": (b'{"$Decimal":"one"}', "Decimal"),
    "equal members": (b'{"$set":[1,1]}', "equal members"),
    "equal keys": (b'{"$dict":[[1,2],[1,3]]}', "equal members"),
    "mutable key": (b'{"$dict":[[[],2]]}', "unhashable"),
    "unknown factory": (b'{"$defaultdict":["eval",[]]}', "defaultdict"),
    "overfull deque": (b'{"$deque":[[1,2],1]}', "maxlen"),
    "odd date": (b'{"$date":"2024-13-01"}', "date"),
    "unknown place": (changed(Slotted(1), b'"second":null}', b'"second":null},{"also":{"x":1}}'), "no place for x"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "problem"), CHANGED.values(), ids=CHANGED)
def test_changed_classes_and_damaged_bytes_are_errors(data: bytes, problem: str) -> None:
    """Decoding fails closed: no unknown type turns into a dictionary, and no damage into some other value."""
    with pytest.raises(DecodingError, match="the order") as caught:
        decode(data, "the order")
    assert problem in caught.value.problem


@pytest.mark.parametrize("name", ["text", "bytes", "nested list", "dict with odd keys", "model", "dataclass", "set"])
def test_truncated_bytes_are_errors(name: str) -> None:
    """Whatever is quoted or bracketed is damaged when cut anywhere."""
    data = encode(SPECIMENS[name])
    for length in range(len(data)):
        with pytest.raises(DecodingError):
            decode(data[:length])


@given(st.binary(max_size=40) | st.text('{}[]",:$1tuple', max_size=40).map(str.encode))
@settings(max_examples=300)
def test_random_bytes_are_a_value_or_a_decoding_error(data: bytes) -> None:
    """No bytes make decoding fail in another way, and what is decoded can be encoded."""
    try:
        value = decode(data)
    except DecodingError:
        return
    assert same(decode(encode(value)), value)


def test_decoding_calls_no_constructor() -> None:
    """Constructors, validators and post-init hooks run once, when the program makes the value."""
    made: list[str] = []
    Hooked.made = made
    data = encode([Hooked(1), HookedModel(x=1)])
    assert made == ["new", "init", "validate"]
    decode(data)
    assert made == ["new", "init", "validate"]


class Hooked(Item):
    """Notes what is called."""

    made: list[str] = []  # noqa: RUF012 -- shared on purpose

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note it."""
        cls.made.append("new")
        return super().__new__(cls)

    def __init__(self, name: Any) -> None:
        self.made.append("init")
        super().__init__(name)


class HookedModel(BaseModel):
    """Notes what is called."""

    x: int

    @field_validator("x")
    @classmethod
    def _note(cls, value: int) -> int:
        Hooked.made.append("validate")
        return value


# ---------------------------------------------------------------------------------------------------------------------
# Boxes


def mutable() -> dict[str, Any]:
    """A value that can be changed in many places."""
    return {
        "list": [[1]],
        "dict": {"a": {}},
        "set": {1},
        "bytes": bytearray(b"a"),
        "deque": deque([[1]]),
        "item": Item([1]),
        "frozen": Frozen([1]),
        "model": Order(number=1, lines=[[1]]),
        "tuple": ([1],),
    }


def change(value: dict[str, Any]) -> None:
    """Change it in all of them."""
    value["list"][0].append(2)
    value["dict"]["a"]["b"] = 1
    value["set"].add(2)
    value["bytes"].extend(b"b")
    value["deque"][0].append(2)
    value["item"].name.append(2)
    value["frozen"].key.append(2)
    value["model"].items[0].append(2)
    value["model"]._touched = 9
    value["tuple"][0].append(2)
    value["new"] = 1


def test_nobody_can_change_a_boxed_value() -> None:
    """Neither the value that was put in nor any that was taken out is connected with the next."""
    original = mutable()
    box = Box(original)
    change(original)
    assert not same(original, mutable())
    for _ in range(2):
        taken = box.fresh()
        assert same(taken, mutable())
        change(taken)
    assert box.data == encode(mutable())
    restored = Box.from_bytes(box.data)
    change(restored.fresh())
    assert same(restored.fresh(), mutable())


def test_a_tuple_protects_only_itself() -> None:
    """A tuple of what can change is copied like everything else."""
    for original in (([1],), (1, ({"a": 2},)), Point([1], 2)):
        box = Box(original)
        assert box.fresh() is not original
        assert box.fresh() is not box.fresh()
    taken = Box(([1],)).fresh()
    taken[0].append(2)
    box = Box.from_bytes(encode(([1],)))
    box.fresh()[0].append(2)
    assert box.fresh() == ([1],)


@pytest.mark.parametrize("value", SPECIMENS.values(), ids=SPECIMENS)
def test_boxes_of_specimens(value: Any) -> None:
    """A box gives the value back whether made from the value or from bytes, and survives pickling and copying."""
    box = Box(value, "the value")
    assert same(box.fresh(), value)
    assert same(Box.from_bytes(box.data).fresh(), value)
    assert box.data == encode(value)
    for twin in (Box(value), Box.from_bytes(box.data), copy.copy(box), pickle.loads(pickle.dumps(box))):  # noqa: S301
        assert twin == box
        assert hash(twin) == hash(box)
        assert same(twin.fresh(), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        2**5000,
        "text" * 1000,
        0.5,
        (1, ("a", frozenset({2.5}))),
        date(2024, 1, 1),
        Decimal("1.5"),
        Colour.BLUE,
        (),
    ],
    ids=repr,
)
def test_what_cannot_change_is_not_copied(value: Any) -> None:
    """Immutable scalars, and tuples and frozen sets of them, are handed out as they are."""
    box = Box(value)
    assert box.fresh() is value
    restored = Box.from_bytes(box.data)
    assert restored.fresh() is restored.fresh()


def test_boxes_compare_by_content() -> None:
    """Equality and hash of boxes are those of the encodings."""
    assert Box([1, {2}]) == Box([1, {2}])
    assert Box(1) != Box(True)  # noqa: FBT003 -- the point
    assert Box(1) != 1
    assert len({Box(float("nan")), Box(float("nan")), Box(0.0), Box(-0.0)}) == 3


def test_a_damaged_box_says_what_it_is() -> None:
    """Bytes are decoded when the value is asked for, and the error names the value."""
    box = Box.from_bytes(b"{", "the result of plan")
    with pytest.raises(DecodingError, match="the result of plan"):
        box.fresh()


# ---------------------------------------------------------------------------------------------------------------------
# Exceptions


class Amount(BaseModel):
    """Something to violate."""

    amount: int
    names: list[str] = []
    code: str = ""

    @field_validator("code")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 3:
            raise PydanticCustomError("too_wordy", "{code} is {{too}} long", {"code": value})
        return value

    @field_validator("amount")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("must be {positive}")
        return value


class Discreet(BaseModel):
    """Shows no input in its errors."""

    model_config = ConfigDict(hide_input_in_errors=True)

    secret: int


def caught(action: Callable[[], object]) -> BaseException:
    """The exception that an action raises."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 -- whichever it is
        return error
    raise AssertionError("nothing was raised")


def with_notes(error: BaseException, *notes: str) -> BaseException:
    """The exception, with notes."""
    for note in notes:
        error.add_note(note)
    return error


ERRORS: dict[str, BaseException] = {
    "plain": ValueError("bad", (1, {2}), None),
    "empty": RuntimeError(),
    "key": KeyError("k"),
    "file": caught(lambda: Path("no/such/file").read_text(encoding="utf-8")),
    "two files": caught(lambda: Path("no/such/file").rename("no/other")),
    "unicode": caught(b"\xff".decode),
    "attribute": caught(lambda: (1).nothing),  # type: ignore[attr-defined]
    "name": caught(lambda: nothing),  # type: ignore[name-defined] # noqa: F821
    "import": caught(lambda: __import__("no_such_module")),
    "syntax": caught(lambda: compile("a b", "file.py", "exec")),
    "stop": StopIteration(3),
    "exit": SystemExit(2),
    "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError("enough"),
    "json": caught(lambda: json.loads("{")),
    "process": subprocess.CalledProcessError(3, ["cmd"], b"out"),
    "own constructor": TeapotError(99.5),
    "own constructor of a built-in": ConnectionLostError("host"),
    "specflow": InvalidSettingError("depth", -1, "a number"),
    "specflow timeout": StepTimeoutError("plan", 2.5),
    "group": ExceptionGroup("two", [ValueError(1), ExceptionGroup("inner", [TeapotError(1.0)])]),
    "nested": ConnectionError(OSError(5, "inner"), "outer"),
    "notes": with_notes(ValueError("x"), "first", "second"),
    "validation": caught(lambda: Amount.model_validate({"amount": "x", "names": [1]})),
    "validation of json": caught(lambda: Amount.model_validate_json('{"amount": 1.5, "names": 3}')),
    "validation by a validator": caught(lambda: Amount(amount=-1, code="{x} {too}")),
    "validation without input": caught(lambda: Discreet(secret="password")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_exceptions_come_back_as_themselves(error: BaseException) -> None:
    """Type, text, arguments, attributes and notes survive, in a new instance each time."""
    data = encode_error(error)
    twin, other = decode_error(data), decode_error(data)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin is not other
    assert twin is not error
    assert encode_error(twin) == data
    assert getattr(twin, "__notes__", []) == getattr(error, "__notes__", [])
    if not isinstance(error, BaseExceptionGroup) and not any(isinstance(part, BaseException) for part in error.args):
        assert twin.args == error.args
        assert {k: v for k, v in vars(twin).items() if k != "__notes__"} == {
            k: v for k, v in vars(error).items() if k != "__notes__"
        }


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("file", ("errno", "strerror", "filename")),
        ("two files", ("errno", "filename", "filename2")),
        ("unicode", ("encoding", "object", "start", "end", "reason")),
        ("attribute", ("name",)),
        ("name", ("name",)),
        ("import", ("name", "path", "msg")),
        ("syntax", ("filename", "lineno", "offset", "text", "msg")),
        ("stop", ("value",)),
        ("exit", ("code",)),
        ("json", ("doc", "pos", "lineno", "colno")),
        ("process", ("returncode", "cmd", "output")),
        ("own constructor of a built-in", ("host", "errno", "filename")),
        ("validation", ("title",)),
    ],
)
def test_exceptions_keep_what_handlers_read(name: str, attributes: tuple[str, ...]) -> None:
    """Attributes that built-in exceptions keep outside their arguments survive too."""
    error = ERRORS[name]
    twin = decode_error(encode_error(error))
    for attribute in attributes:
        assert same(getattr(twin, attribute), getattr(error, attribute)), attribute


def test_validation_errors_keep_their_findings() -> None:
    """Pydantic's own error, which has no constructor, lists the same findings."""
    for name in ("validation", "validation of json"):
        error, twin = ERRORS[name], decode_error(encode_error(ERRORS[name]))
        assert isinstance(error, ValidationError)
        assert isinstance(twin, ValidationError)
        assert twin.errors() == error.errors()


def test_members_of_groups_and_arguments_are_exceptions_again() -> None:
    """Exceptions inside exceptions are restored, not printed."""
    group = decode_error(encode_error(ERRORS["group"]))
    assert isinstance(group, ExceptionGroup)
    assert [type(member) for member in group.exceptions] == [ValueError, ExceptionGroup]
    inner = group.exceptions[1]
    assert isinstance(inner, ExceptionGroup)
    assert isinstance(inner.exceptions[0], TeapotError)
    assert inner.exceptions[0].temperature == 1.0
    outer = decode_error(encode_error(ERRORS["nested"]))
    assert isinstance(outer.args[0], OSError)
    assert outer.args[0].errno == 5


def chain(length: int) -> Exception:
    """Exceptions that caused each other."""
    error: Exception = ValueError("0")
    for number in range(1, length):
        following = RuntimeError(str(number))
        following.__cause__ = error
        error = following
    return error


def causes(error: BaseException | None) -> list[str]:
    """The texts along a chain of causes."""
    found = []
    while error is not None:
        found.append(str(error))
        error = error.__cause__
    return found


def test_causes_are_kept_up_to_a_limit() -> None:
    """A chain of causes survives, and a very long one is cut."""
    assert causes(decode_error(encode_error(chain(3)))) == ["2", "1", "0"]
    assert causes(decode_error(encode_error(chain(MAX_CAUSES)))) == [str(n) for n in range(MAX_CAUSES - 1, -1, -1)]
    assert len(causes(decode_error(encode_error(chain(5000))))) == MAX_CAUSES


def test_exceptions_that_refer_to_each_other_are_recorded() -> None:
    """A circle of causes, arguments or attributes ends where it would repeat."""
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert causes(decode_error(encode_error(first))) == ["first", "'second'"]
    selfish = ValueError("x")
    selfish.args = (selfish,)
    assert isinstance(decode_error(encode_error(selfish)), RecordedError)
    mirror: Any = ValueError("x")
    mirror.me = mirror
    twin = decode_error(encode_error(mirror))
    assert type(twin) is ValueError
    assert vars(twin) == {}


@pytest.mark.parametrize(
    ("error", "type_name", "message"),
    [
        (make_local_error(), "tests.specflow.samples:make_local_error.<locals>.LocalError", "here only"),
        (ValueError(Opaque, object()), "builtins:ValueError", "object"),
        (SilentError(), "tests.specflow.samples:SilentError", "no printable message"),
        (NeedsPartError(), "tests.specflow.samples:NeedsPartError", "part 1 broke"),
    ],
)
def test_what_cannot_be_restored_is_recorded(error: Exception, type_name: str, message: str) -> None:
    """An exception without a findable class or with odd arguments becomes a RecordedError with its type and text."""
    cause = TeapotError(1.0)
    error.__cause__ = cause
    error.__notes__ = ["a note"]
    data = encode_error(error)
    twin = decode_error(data)
    assert isinstance(twin, RecordedError)
    assert isinstance(twin, ExecutionError)
    assert twin.type_name == type_name
    assert message in twin.message
    assert message in str(twin)
    assert type(twin.__cause__) is TeapotError
    assert twin.__notes__ == ["a note"]
    assert encode_error(twin) == data


@pytest.mark.parametrize("notes", [3, [4, None], SilentError()], ids=["number", "numbers", "exception"])
def test_odd_notes_do_not_matter(notes: Any) -> None:
    """Whatever stands where the notes belong, the exception is recorded."""
    for error in (ValueError("x"), make_local_error()):
        error.__notes__ = notes
        assert str(decode_error(encode_error(error))).endswith(str(error))


def test_attributes_that_cannot_be_encoded_are_left_out() -> None:
    """The rest of the exception survives."""
    error: Any = TeapotError(5.0)
    error.lock = Opaque()
    error.kept = (1, 2)
    twin: Any = decode_error(encode_error(error))
    assert type(twin) is TeapotError
    assert vars(twin) == {"temperature": 5.0, "kept": (1, 2)}


@pytest.mark.parametrize(
    "data",
    [
        encode_error(TeapotError(1.0)).replace(b":TeapotError", b":GoneError"),
        encode_error(TeapotError(1.0)).replace(b"tests.specflow.samples", b"tests.specflow.gone"),
        encode_error(ValueError(Item("a"), TeapotError(1.0))).replace(b":Item", b":Gone"),
    ],
)
def test_an_exception_whose_class_is_gone_keeps_type_and_text(data: bytes) -> None:
    """Decoding a recorded exception never fails: what is gone is named, with the reason in a note."""
    twin = decode_error(data)
    while not isinstance(twin, RecordedError):
        twin = twin.args[0]
    assert twin.type_name.rpartition(":")[2] in ("GoneError", "TeapotError", "ValueError")
    assert twin.message
    assert "restored" in twin.__notes__[0]


@pytest.mark.parametrize("data", [b"", b"1", b"{", b'{"$error":1}', b'{"$error":{"type":"os:system","message":"x"}}'])
def test_bytes_that_hold_no_exception_give_a_recorded_error(data: bytes) -> None:
    """Decoding never raises, and never takes something else for an exception."""
    assert isinstance(decode_error(data), RecordedError)


@given(st.lists(values, max_size=3))
@settings(max_examples=50, deadline=None)
def test_arguments_of_exceptions_come_back_as_they_were(arguments: list[Any]) -> None:
    """Anything the codec supports may be an argument."""
    error = Exception(*arguments)
    twin = decode_error(encode_error(error))
    assert type(twin) is Exception
    assert same(list(twin.args), arguments)


def test_windows_paths_and_root_models_are_compared() -> None:
    """The comparison that the tests rest on tells values apart that differ in one detail only."""
    assert not same(PureWindowsPath("a"), PurePosixPath("a"))
    assert not same(Numbers([1]), Numbers([2]))
    assert not same(Open(known=0), Open())
    assert not same(datetime(2024, 1, 1, fold=1), datetime(2024, 1, 1))  # noqa: DTZ001 -- naive on purpose
    assert not same({1: 2, 3: 4}, {3: 4, 1: 2})
    assert not same({1.0}, {1})
