"""The key-value state of a run as one attempt sees it: every read and write is recorded, nothing is aliased.

Values are encoded when they are put and decoded anew when they are read, so that nobody can change what somebody else
has read. Reads are recorded with the *value* seen: an attempt stays valid when a key changes and changes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from immutables import Map

from .codec import decode, encode
from .errors import StateConflictError, UnsupportedValueError
from .history import Operation, Write
from .stores.cells import apply, fold

Cells = Map[str, "Cell"]
"""All keys of one version. Forking it is copying a pointer."""


class Cell:
    """Encoded value of one key: the bytes themselves, or an operation on an earlier cell that nobody has read yet."""

    __slots__ = ("folded", "kind", "previous", "write")

    def __init__(self, data: bytes | None, previous: Cell | None = None, write: Write | None = None) -> None:
        self.folded = data
        self.previous = previous
        self.write = write
        self.kind = write.operation if write is not None else None
        """An operation that is known to fit the value."""

    @property
    def data(self) -> bytes:
        """The encoded value."""
        if self.folded is None:
            chain: list[Write] = []
            cell: Cell | None = self
            while cell is not None and cell.folded is None and cell.write is not None:
                chain.append(cell.write)
                cell = cell.previous
            data = cell.folded if cell is not None else None
            data = fold(chain[0].key, data, [(write.operation, write.data) for write in reversed(chain)])
            self.folded = data if data is not None else b""
            self.previous = self.write = None
        return self.folded


def cells_of(values: Mapping[str, bytes]) -> Cells:
    """Cells that hold the given encoded values."""
    return Map((key, Cell(data)) for key, data in values.items())


def write_cell(cells: Cells, write: Write) -> Cells:
    """The version after one write."""
    if write.operation is Operation.PUT:
        return cells.set(write.key, Cell(write.data))
    if write.operation is Operation.DELETE:
        return cells.delete(write.key) if write.key in cells else cells
    return cells.set(write.key, Cell(None, cells.get(write.key), write))


@dataclass(frozen=True, slots=True)
class Read:
    """One key was looked at."""

    key: str
    data: bytes | None
    """What was there; None for a missing key."""


@dataclass(frozen=True, slots=True)
class RangeRead:
    """All keys with a prefix were looked at: keys that were not there count too."""

    prefix: str
    items: tuple[tuple[str, bytes], ...]


Access = Read | RangeRead | Write


class State:
    """The state as one attempt sees it. Steps get one by declaring a parameter of this type.

    Keys are non-empty strings; group them with a separator of your own (``"cart/items"``) and read a group with
    :meth:`scan`. Values are anything that :mod:`specflow.codec` can encode.
    """

    __slots__ = ("_accesses", "_cells")

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._accesses: list[Access] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or ``default``. A copy: changing it changes nothing here."""
        cell = self._cells.get(_checked(key))
        data = None if cell is None else cell.data
        self._accesses.append(Read(key, data))
        return default if data is None else decode(data, f"state {key!r}")

    def __getitem__(self, key: str) -> Any:
        missing = object()
        value = self.get(key, missing)
        if value is missing:
            raise KeyError(key)
        return value

    def __contains__(self, key: str) -> bool:
        cell = self._cells.get(_checked(key))
        self._accesses.append(Read(key, None if cell is None else cell.data))
        return cell is not None

    def scan(self, prefix: str = "") -> list[tuple[str, Any]]:
        """All keys that begin with ``prefix`` and their values, sorted by key."""
        items = _range(self._cells, prefix)
        self._accesses.append(RangeRead(prefix, items))
        return [(key, decode(data, f"state {key!r}")) for key, data in items]

    def put(self, key: str, value: Any) -> None:
        """Set a key.

        Raises:
            UnsupportedValueError: the value cannot be stored exactly.
        """
        self._write(Write(_checked(key), Operation.PUT, encode(value, f"state {key!r}")))

    def __setitem__(self, key: str, value: Any) -> None:
        self.put(key, value)

    def delete(self, key: str) -> None:
        """Remove a key; nothing happens when it is not there."""
        self._write(Write(_checked(key), Operation.DELETE, b""))

    def __delitem__(self, key: str) -> None:
        self.delete(key)

    def add(self, key: str, amount: Any) -> None:
        """Add a number to a key without reading it; a missing key counts as 0. Parallel additions merge.

        Raises:
            UnsupportedValueError: the key, or ``amount``, is not a number.
        """
        self._merge(Write(_checked(key), Operation.ADD, encode(amount, f"state {key!r}")))

    def append(self, key: str, item: Any) -> None:
        """Append to a list without reading it; a missing key is an empty list. Parallel appends merge in order.

        Raises:
            UnsupportedValueError: the key is not a list, or the item cannot be stored exactly.
        """
        self._merge(Write(_checked(key), Operation.APPEND, encode(item, f"state {key!r}")))

    def union(self, key: str, items: Iterable[Any]) -> None:
        """Add items to a set without reading it; a missing key is an empty set. Parallel unions merge.

        Raises:
            UnsupportedValueError: the key is not a set, or an item cannot be stored exactly.
        """
        self._merge(Write(_checked(key), Operation.UNION, encode(set(items), f"state {key!r}")))

    def _merge(self, write: Write) -> None:
        """Record an operation that depends on the value's type, after checking that it fits: not when it is read."""
        try:
            check_fit(self._cells, write)
        except UnsupportedValueError:
            # That it does not fit depends on what is there: it has been read.
            cell = self._cells.get(write.key)
            self._accesses.append(Read(write.key, None if cell is None else cell.data))
            raise
        self._write(write)

    def _write(self, write: Write) -> None:
        self._cells = write_cell(self._cells, write)
        self._accesses.append(write)

    # What follows is for the runtime.

    @property
    def cells(self) -> Cells:
        """The version with everything written here."""
        return self._cells

    def take_accesses(self) -> tuple[Access, ...]:
        """What was read and written since this was asked last, in order."""
        if not self._accesses:
            return ()
        taken = tuple(self._accesses)
        self._accesses.clear()
        return taken

    def rebase(self, cells: Cells) -> None:
        """Go on from another version, one that would have shown the same values so far."""
        self._cells = cells

    def replay(self, accesses: Sequence[Access]) -> None:
        """Apply recorded writes without recording them again."""
        for access in accesses:
            if isinstance(access, Write):
                self._cells = write_cell(self._cells, access)


def check_fit(cells: Cells, write: Write) -> None:
    """See that an operation fits the value it is applied to.

    Raises:
        UnsupportedValueError: it does not.
    """
    if not write.operation.is_blind:
        return
    cell = cells.get(write.key)
    if write.operation is Operation.ADD:
        apply(None if cell is None else cell.data, write)
    elif cell is not None and cell.kind is not write.operation:
        apply(cell.data, write)
        cell.kind = write.operation


def revalidate(cells: Cells, accesses: Iterable[Access]) -> Cells | None:
    """Would the same accesses have seen the same values on another version?

    Returns:
        That version with the writes applied, or None when a read would have seen another value.
    """
    for access in accesses:
        if isinstance(access, Write):
            try:
                check_fit(cells, access)
            except UnsupportedValueError:
                return None
            cells = write_cell(cells, access)
        elif isinstance(access, Read):
            cell = cells.get(access.key)
            if (None if cell is None else cell.data) != access.data:
                return None
        elif _range(cells, access.prefix) != access.items:
            return None
    return cells


def writes_of(accesses: Iterable[Access]) -> tuple[Write, ...]:
    """The writes among accesses."""
    return tuple([access for access in accesses if isinstance(access, Write)])


def merge(base: Cells, branches: Sequence[tuple[str, Sequence[Write]]]) -> tuple[Write, ...]:
    """Changes of parallel branches as one sequence of writes, in branch order.

    A branch that leaves a key as it was has not changed it. Operations of one kind on one key merge.

    Args:
        base: the version that all branches started from.
        branches: name and writes of each branch, in program order.

    Raises:
        StateConflictError: two branches changed the same key, and the changes do not merge.
    """
    changers: dict[str, list[tuple[str, Change]]] = {}
    merged: list[Write] = []
    for name, writes in branches:
        for key, change in changes_of(base, writes).items():
            others = changers.setdefault(key, [])
            if others and not change.merges_with(others[-1][1]):
                raise StateConflictError(key, (others[-1][0], name))
            others.append((name, change))
            merged.extend(change.writes)
    for key, found in changers.items():
        check_together(base, key, found)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Change:
    """What one branch has made of one key."""

    writes: tuple[Write, ...]
    merging: Operation | None
    """The operation, where it is the only one and merges."""

    def merges_with(self, other: Change) -> bool:
        """Whether both may come from branches that nothing orders."""
        return self.merging is not None and self.merging is other.merging


def changes_of(base: Cells, writes: Iterable[Write]) -> dict[str, Change]:
    """What writes make of each key, without keys that they leave as they were.

    Args:
        base: the version that the branch started from.
        writes: of one branch, in order.
    """
    grouped: dict[str, list[Write]] = {}
    for write in writes:
        grouped.setdefault(write.key, []).append(write)
    changes: dict[str, Change] = {}
    for key, own in grouped.items():
        kinds = {write.operation for write in own}
        merging = own[0].operation if len(kinds) == 1 and own[0].operation.is_blind else None
        if merging is not None or _differs(base, own):
            changes[key] = Change(tuple(own), merging)
    return changes


def check_together(base: Cells, key: str, changes: Sequence[tuple[str, Change]]) -> None:
    """See that what branches have made of a key fits together: a float and a Decimal each add to 0, but not both.

    Args:
        base: the version that all branches started from.
        key: which key.
        changes: name and change of each branch, in program order.

    Raises:
        StateConflictError: it does not.
    """
    if len(changes) < 2 or all(change.merging in (Operation.APPEND, Operation.UNION) for _name, change in changes):
        return
    cell = base.get(key)
    data = None if cell is None else cell.data
    before = changes[0][0]
    for name, change in changes:
        try:
            data = fold(key, data, [(write.operation, write.data) for write in change.writes])
        except UnsupportedValueError:
            raise StateConflictError(key, (before, name)) from None
        before = name


def _differs(base: Cells, writes: Sequence[Write]) -> bool:
    before = base.get(writes[0].key)
    data = None if before is None else before.data
    after = data
    for write in writes:
        after = apply(after, write)
    return after != data


def _range(cells: Cells, prefix: str) -> tuple[tuple[str, bytes], ...]:
    return tuple(sorted((key, cell.data) for key, cell in cells.items() if key.startswith(prefix)))


def _checked(key: str) -> str:
    if type(key) is not str or not key or not (key.isascii() or is_text(key)):
        raise UnsupportedValueError("the state", f"key {key!r}", "use a non-empty str as key")
    return key


def is_text(value: str) -> bool:
    """Can a str be stored, or does it have halves of surrogate pairs?"""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


__all__ = [
    "Access",
    "Cell",
    "Cells",
    "Change",
    "RangeRead",
    "Read",
    "State",
    "cells_of",
    "changes_of",
    "check_together",
    "is_text",
    "merge",
    "revalidate",
    "write_cell",
    "writes_of",
]
