"""From values to bytes: one encoder per type, found by exact type."""

from __future__ import annotations

import binascii
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from json import JSONEncoder
from json import encoder as json_encoder
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import NoneType
from typing import Any
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

from ..errors import UnsupportedValueError
from .classes import Shape, is_from_pydantic_core, named_tuple_fields, reference, shape_of
from .refusals import ABSENT, RefusedError, check_depth, refusal, type_name

Encoder = Callable[[Any, int], str]
"""JSON text of a value; the number says how many containers are around it."""

PATHS = (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple)}
"""What a defaultdict may make its defaults with."""


def encode(value: Any, where: str = "value") -> bytes:
    """A value as bytes; equal bytes exactly for values of the same types and content.

    Args:
        value: what to encode.
        where: what the value is, for the message of a refusal, such as ``"state 'cart'"``.

    Raises:
        UnsupportedValueError: something in the value cannot come back exactly; the message names where, and its type.
    """
    kind = type(value)
    if kind is str:
        return quote(value).encode("utf-8", "surrogatepass")
    if kind is int and -_SMALL < value < _SMALL:
        return b"%d" % value
    try:
        return (_ENCODERS.get(kind) or _learn(kind))(value, 0).encode("utf-8", "surrogatepass")
    except RefusedError as refused:
        raise refused.error(where) from refused.__cause__
    except RecursionError as error:
        remedy = "the call stack has too little room left for its nesting"
        raise UnsupportedValueError(where, type_name(kind), remedy) from error


# ---------------------------------------------------------------------------------------------------------------------
# Plain JSON

quote: Callable[[str], str] = json_encoder.encode_basestring
"""JSON text of a string."""

_PLAIN = frozenset({str, int, float, bool, NoneType})
_SMALL = 1 << 63
"""Integers below are formatted without asking for their number of digits."""
_MAX_DIGITS = 617
_MAX_PLAIN = 1 << 2048
"""Integers below are written in decimal: they have at most 617 digits, and no interpreter can be set to refuse 640."""


def _make_chunks() -> Callable[[Any, int], Iterable[str]]:
    """Encoder of values that consist of plain lists, tuples, dictionaries and scalars, in pieces of JSON text."""
    make_encoder = getattr(json_encoder, "c_make_encoder", None)
    if make_encoder is None:
        encoder = JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
        return lambda value, _level: encoder.iterencode(value)
    # What JSONEncoder.encode makes anew for every call, which takes longer than encoding a small value.
    sort_keys, skip_keys, allow_nan = False, False, True
    chunks: Callable[[Any, int], Iterable[str]] = make_encoder(
        None, _no_default, quote, None, ":", ",", sort_keys, skip_keys, allow_nan
    )
    return chunks


def _no_default(value: object) -> Any:
    raise refusal(type(value))


_chunks = _make_chunks()


def dump(value: Any) -> str:
    """JSON text of a value that consists of plain JSON."""
    return "".join(_chunks(value, 0))


def _flat(container: Any, items: Iterable[Any]) -> str | None:
    """JSON text of a container of plain scalars; None when an integer in it is too long to be written in decimal."""
    try:
        text = "".join(_chunks(container, 0))
    except ValueError:  # an integer beyond the interpreter's limit
        return None
    if len(text) > _MAX_DIGITS:
        for item in items:
            if type(item) is int and not -_MAX_PLAIN < item < _MAX_PLAIN:
                return None
    return text


def array(items: list[Any] | tuple[Any, ...], depth: int, owner: object = None) -> str:
    """A JSON array of encoded items. ``owner`` is the value they belong to, if not the container itself."""
    if _PLAIN.issuperset(map(type, items)):
        text = _flat(items, items)
        if text is not None:
            return text
    owner = items if owner is None else owner
    check_depth(owner, depth)
    texts: list[str] = []
    deeper = depth + 1
    try:
        for item in items:
            texts.append(text_of(item, deeper))  # noqa: PERF401 -- its length is the index of a refused item
    except RefusedError as refused:
        refused.inside(owner, f"[{len(texts)}]")
        raise
    return f"[{','.join(texts)}]"


def _key_label(key: object) -> str:
    return f"[{reprlib.repr(key)}]"


def _attribute_label(name: object) -> str:
    return f".{name}"


def _entries(
    entries: dict[Any, Any], depth: int, owner: object = None, label: Callable[[object], str] = _key_label
) -> str:
    """A dictionary: a JSON object where the keys allow it."""
    is_plain = True
    for key, item in entries.items():
        if type(key) is not str:
            return f'{{"$dict":{_pairs(entries, depth, owner)}}}'
        if type(item) not in _PLAIN:
            is_plain = False
    if len(entries) == 1 and next(iter(entries)).startswith("$"):
        return f'{{"$dict":{_pairs(entries, depth, owner)}}}'
    if is_plain:
        text = _flat(entries, entries.values())
        if text is not None:
            return text
    owner = entries if owner is None else owner
    check_depth(owner, depth)
    texts: list[str] = []
    deeper = depth + 1
    for key, item in entries.items():
        try:
            texts.append(f"{quote(key)}:{text_of(item, deeper)}")
        except RefusedError as refused:
            refused.inside(owner, label(key))
            raise
    return f"{{{','.join(texts)}}}"


def _pairs(entries: dict[Any, Any], depth: int, owner: object = None) -> str:
    """JSON array of ``[key, value]``, for any keys."""
    owner = entries if owner is None else owner
    check_depth(owner, depth)
    texts: list[str] = []
    for key, item in entries.items():
        try:
            key_text = text_of(key, depth + 1)
        except RefusedError as refused:
            refused.inside(owner, f"[key {reprlib.repr(key)}]")
            raise
        try:
            texts.append(f"[{key_text},{text_of(item, depth + 1)}]")
        except RefusedError as refused:
            refused.inside(owner, _key_label(key))
            raise
    return f"[{','.join(texts)}]"


def joined(texts: dict[str, str]) -> str:
    """A JSON object of texts that are JSON already."""
    return f"{{{','.join(f'{quote(name)}:{text}' for name, text in texts.items())}}}"


def text_of(value: Any, depth: int) -> str:
    """JSON text of any value; ``depth`` counts the containers around it.

    Raises:
        RefusedError: something in it cannot come back exactly.
    """
    kind = type(value)
    return (_ENCODERS.get(kind) or _learn(kind))(value, depth)


# ---------------------------------------------------------------------------------------------------------------------
# Types of the standard library


def _int(value: int, depth: int) -> str:
    del depth
    return int.__repr__(value) if -_MAX_PLAIN < value < _MAX_PLAIN else f'{{"$int":"{value:#x}"}}'


def _complex(value: complex, depth: int) -> str:
    return f'{{"$complex":{array([value.real, value.imag], depth)}}}'


def _bytes(value: bytes | bytearray, depth: int) -> str:
    del depth
    return f'{{"${type(value).__name__}":"{binascii.b2a_base64(value, newline=False).decode("ascii")}"}}'


def _tuple(value: tuple[Any, ...], depth: int) -> str:
    return f'{{"$tuple":{array(value, depth)}}}'


def _set(value: set[Any] | frozenset[Any], depth: int) -> str:
    check_depth(value, depth)
    texts: list[str] = []
    for item in value:
        try:
            texts.append(text_of(item, depth + 1))
        except RefusedError as refused:
            refused.inside(value, f"{{{reprlib.repr(item)}}}")
            raise
    texts.sort()
    return f'{{"${type(value).__name__}":[{",".join(texts)}]}}'


def _range(value: range, depth: int) -> str:
    return f'{{"$range":{array([value.start, value.stop, value.step], depth)}}}'


def _deque(value: deque[Any], depth: int) -> str:
    return f'{{"$deque":[{array(list(value), depth, value)},{text_of(value.maxlen, depth)}]}}'


def _ordered(value: Counter[Any] | OrderedDict[Any, Any], depth: int) -> str:
    return f'{{"${type(value).__name__}":{_pairs(value, depth)}}}'


def _defaultdict(value: defaultdict[Any, Any], depth: int) -> str:
    factory = value.default_factory
    if factory is None:
        name = "null"
    elif isinstance(factory, type) and FACTORIES.get(factory.__name__) is factory:
        name = f'"{factory.__name__}"'
    else:
        allowed = ", ".join(FACTORIES)
        raise RefusedError(defaultdict, f"its default_factory is {factory!r} and may be one of {allowed}, or None")
    return f'{{"$defaultdict":[{name},{_pairs(value, depth)}]}}'


def _moment(value: datetime | time, depth: int) -> str:
    tag, zone = type(value).__name__, value.tzinfo
    if not value.fold and (zone is None or (type(zone) is timezone and _shows_in_iso_format(zone))):
        return f'{{"${tag}":"{value.isoformat()}"}}'
    try:
        zone_text = text_of(zone, depth + 1)
    except RefusedError as refused:
        refused.inside(value, ".tzinfo")
        raise
    return f'{{"${tag}":["{value.replace(tzinfo=None, fold=0).isoformat()}",{zone_text},{value.fold}]}}'


def _date(value: date, depth: int) -> str:
    del depth
    return f'{{"$date":"{value.isoformat()}"}}'


def _timedelta(value: timedelta, depth: int) -> str:
    del depth
    return f'{{"$timedelta":[{value.days},{value.seconds},{value.microseconds}]}}'


def _timezone(value: timezone, depth: int) -> str:
    return f'{{"$timezone":{array(_offset_and_name(value), depth)}}}'


def _shows_in_iso_format(value: timezone) -> bool:
    """Whether ISO format gives the zone of a moment back: it has no names, and Python reads +00:00:00.5 as UTC."""
    offset, *name = _offset_and_name(value)
    return not name and not offset.microseconds


def _offset_and_name(value: timezone) -> tuple[Any, ...]:
    """The offset, and the name if one was given: no public attribute tells a given name from a derived one."""
    arguments: tuple[Any, ...] = value.__getinitargs__()  # type: ignore[attr-defined]
    return arguments


def _pydantic_offset(value: tzinfo, depth: int) -> str:
    """The fixed offset that pydantic gives to times it parses."""
    return f'{{"$TzInfo":{text_of(value.utcoffset(None), depth)}}}'


def _zone(value: ZoneInfo, depth: int) -> str:
    del depth
    if value.key is None:
        raise RefusedError(ZoneInfo, "it has no key: make it with ZoneInfo(key)")
    return f'{{"$ZoneInfo":{quote(value.key)}}}'


def _decimal(value: Decimal, depth: int) -> str:
    del depth
    return f'{{"$Decimal":"{str(value).replace("e", "E")}"}}'  # the context may ask for a small e


def _fraction(value: Fraction, depth: int) -> str:
    return f'{{"$Fraction":{array([value.numerator, value.denominator], depth)}}}'


def _uuid(value: UUID, depth: int) -> str:
    del depth
    if value.is_safe is SafeUUID.unknown:
        return f'{{"$UUID":"{value}"}}'
    return f'{{"$UUID":["{value}","{value.is_safe.name}"]}}'


def _path(value: object, depth: int) -> str:
    del depth
    return f'{{"${type(value).__name__}":{quote(str(value))}}}'


def _class(value: type, depth: int) -> str:
    del depth
    return f'{{"$type":{reference(value)}}}'


# ---------------------------------------------------------------------------------------------------------------------
# Classes of the user


def _learn(kind: type) -> Encoder:
    """Make the encoder of a class that is met for the first time."""
    if issubclass(kind, Enum):
        encoder = _flag_encoder(kind) if issubclass(kind, Flag) else _enum_encoder(kind)
    elif issubclass(kind, type):
        encoder = _class
    elif named_tuple_fields(kind) is not None:
        encoder = _named_tuple_encoder(kind)
    elif is_from_pydantic_core(kind, "TzInfo"):
        encoder = _pydantic_offset
    else:
        shape = shape_of(kind)
        encoder = partial(_model if shape.is_model else _dataclass, shape)
    _ENCODERS[kind] = encoder
    return encoder


def _enum_encoder(kind: type[Enum]) -> Encoder:
    head = f'{{"$enum":[{reference(kind)},'
    return lambda value, _depth: f"{head}{quote(value._name_)}]}}"


def _flag_encoder(kind: type[Flag]) -> Encoder:
    head = f'{{"$flag":[{reference(kind)},'
    return lambda value, _depth: f"{head}{_int(int(value._value_), 0)}]}}"


def _named_tuple_encoder(kind: type) -> Encoder:
    head = f'{{"$namedtuple":[{reference(kind)},'
    names = named_tuple_fields(kind) or ()

    def write(value: Any, depth: int) -> str:
        if len(value) != len(names) or getattr(value, "__dict__", None):
            raise RefusedError(kind, "it holds content besides its fields: use a dataclass")
        return f"{head}{_entries(dict(zip(names, value, strict=True)), depth, value, _attribute_label)}]}}"

    return write


def _dataclass(shape: Shape, value: Any, depth: int) -> str:
    fields: dict[str, Any] = {}
    unset: list[str] = []
    for name in shape.names:
        item = getattr(value, name, ABSENT)
        if item is ABSENT:
            unset.append(name)
        else:
            fields[name] = item
    text = f'{{"$dataclass":[{shape.reference},{_entries(fields, depth, value, _attribute_label)}'
    rest = shape.rest(value)
    if unset or rest:
        more = {"unset": dump(unset)} if unset else {}
        if rest:
            more["also"] = _entries(rest, depth, value, _attribute_label)
        text += f",{joined(more)}"
    return f"{text}]}}"


def _model(shape: Shape, value: Any, depth: int) -> str:
    own = value.__dict__
    chosen = getattr(value, "__pydantic_fields_set__", None)
    if chosen is None:
        raise RefusedError(type(value), "its __init__ has not run: make it with its class, or with model_construct")
    fields = {name: own[name] for name in shape.names if name in own}
    unset = [name for name in shape.names if name not in own] if len(fields) < len(shape.names) else []
    more: dict[str, str] = {}
    if not shape.is_root:
        if value.__pydantic_extra__ is not None:
            more["extra"] = _entries(value.__pydantic_extra__, depth, value, _attribute_label)
        private = value.__pydantic_private__
        if private is not None:
            more["private"] = _entries(private, depth, value, _attribute_label)
        if shape.private:
            unset += sorted(shape.private.difference(private or ()))
    rest = shape.rest(value)
    if rest:
        more["also"] = _entries(rest, depth, value, _attribute_label)
    if unset:
        more["unset"] = dump(unset)
    text = f'{{"$model":[{shape.reference},{_entries(fields, depth, value, _attribute_label)},{dump(sorted(chosen))}'
    return f"{text},{joined(more)}]}}" if more else f"{text}]}}"


_ENCODERS: dict[type, Encoder] = {
    NoneType: lambda _value, _depth: "null",
    bool: lambda value, _depth: "true" if value else "false",
    int: _int,
    float: lambda value, _depth: dump(value),
    complex: _complex,
    str: lambda value, _depth: quote(value),
    bytes: _bytes,
    bytearray: _bytes,
    list: array,
    tuple: _tuple,
    dict: _entries,
    set: _set,
    frozenset: _set,
    range: _range,
    deque: _deque,
    Counter: _ordered,
    OrderedDict: _ordered,
    defaultdict: _defaultdict,
    datetime: _moment,
    date: _date,
    time: _moment,
    timedelta: _timedelta,
    timezone: _timezone,
    ZoneInfo: _zone,
    Decimal: _decimal,
    Fraction: _fraction,
    UUID: _uuid,
    **dict.fromkeys(PATHS, _path),
}
"""Encoders by exact type; classes of the user join when they are met."""
