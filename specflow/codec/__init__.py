"""Values as bytes and back: exact, typed, and the same bytes in every process.

Everything that crosses a boundary (arguments, results, state, events, errors) is encoded, so that nobody can change
what somebody else holds, equality has one meaning, and history outlives the process. A value either comes back with the
same type and content or is refused when it is encoded; nothing is flattened into something similar.

**What survives.** None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range,
deque, Counter, OrderedDict, defaultdict; datetime, date, time, timedelta, timezone, ZoneInfo; Decimal, Fraction, UUID,
paths; members of enums and flags; named tuples, dataclasses and pydantic models (also generic ones), with what their
instances hold besides their fields; classes, by name. Not kept: whether two places shared one object, results of
:class:`functools.cached_property` (they are computed again), the ``__orig_class__`` that :mod:`typing` notes on
instances of generic classes, sign and payload of a NaN, and the order in which a set iterates.

**Format.** JSON in UTF-8 where JSON says it exactly, and ``{"$tag": ...}`` for the rest; a dictionary of one key that
looks like a tag is tagged itself. Lone surrogates are written as UTF-8 would write them if it could. Truncated or
changed bytes are noticed when they no longer spell a value; whoever keeps bytes on an unsafe medium adds a checksum.

**Trust.** Bytes name classes. Decoding imports their modules and takes dataclasses, pydantic models, enums, named
tuples, exceptions and classes from them, and nothing else. It sets attributes and runs no constructor, validator or
``__setstate__`` of theirs, so stored values are data and not code; but importing a module runs the module, so bytes are
trusted to name what may be imported. Do not decode bytes from a stranger.
"""

from __future__ import annotations

from .boxes import Box
from .comparison import digest, equal
from .exceptions import RecordedError
from .reading import decode
from .recording import MAX_CAUSES, decode_error, encode_error
from .refusals import MAX_DEPTH
from .writing import encode

__all__ = [
    "MAX_CAUSES",
    "MAX_DEPTH",
    "Box",
    "RecordedError",
    "decode",
    "decode_error",
    "digest",
    "encode",
    "encode_error",
    "equal",
]
