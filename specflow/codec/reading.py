"""From bytes to values: one decoder per tag. Every decoder fails closed."""

from __future__ import annotations

import binascii
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from importlib import import_module
from json import JSONDecoder
from typing import Any
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

from ..errors import DecodingError
from .classes import class_of, known_shape, named_tuple_fields
from .exceptions import revive_error
from .refusals import DamagedError, type_name
from .writing import FACTORIES, PATHS

Decoder = Callable[[Any], Any]


def decode(data: bytes, where: str = "value") -> Any:
    """The value that was encoded, as a new object.

    Args:
        data: bytes from :func:`specflow.codec.encode`.
        where: what the value is, for the message of an error.

    Raises:
        DecodingError: the bytes do not spell a value, or name a class that is gone or has other fields by now.
    """
    try:
        text = data.decode("utf-8", "surrogatepass")
        value, end = _DECODER.raw_decode(text)
    except DamagedError as damaged:
        raise DecodingError(where, str(damaged)) from damaged.__cause__
    except RecursionError as error:
        raise DecodingError(where, "the call stack has too little room left for its nesting") from error
    except Exception as error:
        raise DecodingError(where, f"the bytes are damaged ({error})") from error
    if end != len(text):
        raise DecodingError(where, f"the bytes are damaged (they go on after the value, at character {end})")
    return value


def tree_of(data: bytes) -> Any:
    """The JSON of an encoding, with its tags.

    Raises:
        ValueError: it is no JSON.
    """
    return _RAW_DECODER.decode(data.decode("utf-8", "surrogatepass"))


def revive(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        DamagedError: a tag in it is damaged.
        ValueError: it is no JSON.
    """
    return _DECODER.decode(text)


def _revive_object(found: dict[str, Any]) -> Any:
    """Turn a tagged JSON object into its value; called for every object, the inner ones first."""
    if len(found) != 1:
        return found
    ((tag, body),) = found.items()
    if not tag.startswith("$"):
        return found
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise DamagedError(f"{tag!r} is not a known tag")
    try:
        return decoder(body)
    except (DamagedError, RecursionError):
        raise
    except Exception as error:
        raise DamagedError(f"a {tag[1:]} in it is damaged ({error})") from error


_DECODER = JSONDecoder(object_hook=_revive_object, parse_constant=float)
"""``parse_constant`` makes a new NaN each time: a set may hold several."""
_RAW_DECODER = JSONDecoder(parse_constant=float)


def _typed(kind: type, body: Any) -> Any:
    """The body of a tag, which must be of one type."""
    if type(body) is not kind:
        raise DamagedError(f"{reprlib.repr(body)} stands where a {kind.__name__} belongs")
    return body


def _whole(made: Any, body: list[Any]) -> Any:
    """A set or dictionary, unless some of its members were equal."""
    if len(made) != len(body):
        raise DamagedError("it has equal members")
    return made


def _fill(empty: dict[Any, Any], pairs: Any) -> Any:
    dict.update(empty, _typed(list, pairs))
    return _whole(empty, pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Types of the standard library


def _bytes(body: Any) -> bytes:
    return binascii.a2b_base64(_typed(str, body), strict_mode=True)


def _defaultdict(body: Any) -> Any:
    name, pairs = _typed(list, body)
    return _fill(defaultdict(None if name is None else FACTORIES[name]), pairs)


def _deque(body: Any) -> Any:
    items, maxlen = _typed(list, body)
    if maxlen is not None and len(items) > maxlen:
        raise DamagedError("a deque is longer than its maxlen")
    return deque(_typed(list, items), maxlen)


def _moment(kind: type[datetime | time], body: Any) -> Any:
    if type(body) is str:
        return kind.fromisoformat(body)
    text, zone, fold = _typed(list, body)
    return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _pydantic_offset(body: Any) -> Any:
    return import_module("pydantic_core").TzInfo(_typed(timedelta, body).total_seconds())


def _uuid(body: Any) -> UUID:
    if type(body) is str:
        return UUID(body)
    text, safety = _typed(list, body)
    return UUID(text, is_safe=SafeUUID[safety])


def _path(kind: type, body: Any) -> Any:
    return kind(_typed(str, body))


# ---------------------------------------------------------------------------------------------------------------------
# Classes of the user


def _enum(body: Any) -> Any:
    reference, name = _typed(list, body)
    kind = class_of(reference)
    if not issubclass(kind, Enum):
        raise DamagedError(f"class {type_name(kind)} is not an enum any more")
    member = kind.__members__.get(name)
    if member is None:
        raise DamagedError(f"enum {type_name(kind)} has no member {name} any more")
    return member


def _flag(body: Any) -> Any:
    reference, number = _typed(list, body)
    kind = class_of(reference)
    if not issubclass(kind, Flag):
        raise DamagedError(f"class {type_name(kind)} is not a flag any more")
    value = kind(_typed(int, number))
    if value._value_ != number:
        raise DamagedError(f"flag {type_name(kind)} has no members for {number} any more")
    return value


def _named_tuple(body: Any) -> Any:
    reference, fields = _typed(list, body)
    kind: Any = class_of(reference)
    if named_tuple_fields(kind) != tuple(fields):
        raise DamagedError(f"class {type_name(kind)} changed: it had {', '.join(fields)}")
    return tuple.__new__(kind, fields.values())


def _dataclass(body: Any) -> Any:
    reference, fields, *tail = _typed(list, body)
    kind, shape = known_shape(reference, is_model=False)
    if not tail:
        return shape.build(kind, fields, fields.keys(), {})
    more: dict[str, Any] = tail[0]
    return shape.build(kind, fields, {*fields, *more.get("unset", ())}, more.get("also", {}))


def _model(body: Any) -> Any:
    reference, fields, chosen, *tail = _typed(list, body)
    more: dict[str, Any] = tail[0] if tail else {}
    kind, shape = known_shape(reference, is_model=True)
    extra, private = more.get("extra"), more.get("private")
    described: Any = kind
    if extra and described.model_config.get("extra") != "allow":
        raise DamagedError(f"class {type_name(kind)} changed: it does not allow extra fields any more")
    stored = {*fields, *more.get("unset", ()), *(private or ())}
    instance = shape.build(kind, {}, stored, more.get("also", {}))
    # Fields of a model live in its __dict__; what is set there passes no validator.
    instance.__dict__.update(fields)
    object.__setattr__(instance, "__pydantic_fields_set__", set(chosen))
    if not shape.is_root:
        object.__setattr__(instance, "__pydantic_extra__", extra)
        object.__setattr__(instance, "__pydantic_private__", private)
    return instance


_DECODERS: dict[str, Decoder] = {
    "$int": lambda body: int(_typed(str, body), 16),
    "$complex": lambda body: complex(*map(partial(_typed, float), body)),
    "$bytes": _bytes,
    "$bytearray": lambda body: bytearray(_bytes(body)),
    "$tuple": lambda body: tuple(_typed(list, body)),
    "$dict": lambda body: _fill({}, body),
    "$set": lambda body: _whole(set(_typed(list, body)), body),
    "$frozenset": lambda body: _whole(frozenset(_typed(list, body)), body),
    "$range": lambda body: range(*_typed(list, body)),
    "$deque": _deque,
    "$Counter": lambda body: _fill(Counter(), body),
    "$OrderedDict": lambda body: _whole(OrderedDict(_typed(list, body)), body),
    "$defaultdict": _defaultdict,
    "$datetime": partial(_moment, datetime),
    "$date": date.fromisoformat,
    "$time": partial(_moment, time),
    "$timedelta": lambda body: timedelta(*_typed(list, body)),
    "$timezone": lambda body: timezone(*_typed(list, body)),
    "$TzInfo": _pydantic_offset,
    "$ZoneInfo": lambda body: ZoneInfo(_typed(str, body)),
    "$Decimal": lambda body: Decimal(_typed(str, body)),
    "$Fraction": lambda body: Fraction(*map(partial(_typed, int), body)),
    "$UUID": _uuid,
    "$type": class_of,
    "$enum": _enum,
    "$flag": _flag,
    "$namedtuple": _named_tuple,
    "$dataclass": _dataclass,
    "$model": _model,
    "$error": revive_error,
    **{f"${kind.__name__}": partial(_path, kind) for kind in PATHS},
}
