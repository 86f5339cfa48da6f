"""Why a value cannot be encoded or decoded, on the way to the caller."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

from ..errors import UnsupportedValueError

MAX_DEPTH = 100
"""Containers inside containers, at most."""

ABSENT: Any = object()
"""Stands for an attribute that is not set, and for a value that is not kept."""


class RefusedError(Exception):
    """Carries a refusal up to the caller and collects the path on its way, so that encoding need not track it."""

    def __init__(self, kind: type, remedy: str, *, too_deep: bool = False) -> None:
        super().__init__(kind, remedy)
        self.kind = kind
        self.remedy = remedy
        self.too_deep = too_deep
        self.labels: list[str] = []
        self.owners: list[object] = []

    def inside(self, owner: object, label: str) -> None:
        """Note that the refused value stands at ``label`` of ``owner``."""
        self.labels.append(label)
        self.owners.append(owner)

    def error(self, where: str) -> UnsupportedValueError:
        """The refusal as the caller sees it."""
        labels = self.labels[::-1]
        if self.too_deep:
            seen: set[int] = set()
            for index, owner in enumerate(reversed(self.owners)):
                if id(owner) in seen:
                    place = where + "".join(labels[:index])
                    return UnsupportedValueError(
                        place, type_name(type(owner)), "it contains itself: refer to it by an id"
                    )
                seen.add(id(owner))
            labels[4:] = ["..."]
        return UnsupportedValueError(where + "".join(labels), type_name(self.kind), self.remedy)


class DamagedError(Exception):
    """Bytes that do not spell a value."""


def type_name(kind: type) -> str:
    """How messages call a class."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_BUILT_ON = (
    str, int, float, complex, bytes, bytearray, tuple, list, OrderedDict, Counter, defaultdict, dict, set, frozenset,
    deque, datetime, date, time, timedelta, Decimal, Fraction, UUID,
)  # fmt: skip
"""Types whose subclasses would come back as plain ones."""


def refusal(kind: type) -> RefusedError:
    """A type is not supported; says what to do instead."""
    base = next((base for base in _BUILT_ON if issubclass(kind, base)), None)
    if issubclass(kind, BaseException):
        remedy = "raise it, or return its text"
    elif getattr(kind, "tolist", None) is not None:
        remedy = "convert it with .tolist()"
    elif base is not None:
        remedy = f"it would come back as a plain {type_name(base)}: convert it, or put it into a dataclass"
    elif issubclass(kind, tzinfo):
        remedy = "use datetime.timezone or zoneinfo.ZoneInfo"
    else:
        remedy = "use plain data, a dataclass, a pydantic model, a named tuple or an enum"
    return RefusedError(kind, remedy)


def check_depth(value: object, depth: int) -> None:
    """Refuse a container inside too many others.

    Raises:
        RefusedError: there are :data:`MAX_DEPTH` around it.
    """
    if depth >= MAX_DEPTH:
        raise RefusedError(type(value), f"it is nested more than {MAX_DEPTH} levels deep: flatten it", too_deep=True)
