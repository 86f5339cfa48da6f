"""Frozen values as rows of the SQLite store, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DecodingError
from ..history import (
    EffectRecord,
    EffectStatus,
    Entry,
    EntryKind,
    Operation,
    RunRecord,
    RunStatus,
    Write,
    format_position,
    parse_position,
)
from ..types import Mode

Row = tuple[Any, ...]

# Looking a member up by its value in a dict takes a tenth of the time that calling the enum takes, and `_value_` of a
# member a tenth of `value`; there are several in every entry.
_KINDS = {kind.value: kind for kind in EntryKind}
_MODES = {mode.value: mode for mode in Mode}
_OPERATIONS = {operation.value.encode(): operation for operation in Operation}

_LENGTH = 4
"""Bytes of the length before each part of a frame. A part is shorter than SQLite's limit of 10**9 bytes for a row."""


def entry_row(run: int, version: int, entry: Entry) -> Row:
    """The columns of ``entries``, in the order of the table."""
    return (
        run,
        version,
        format_position(entry.position),
        entry.kind._value_,
        entry.step,
        entry.arguments,
        entry.result,
        entry.error,
        _frame_writes(entry.writes),
        _frame_writes(entry.branch_writes),
        _frame(entry.events),
        entry.at,
        entry.seconds,
        entry.mode._value_,
    )


def entry_of(row: Row, place: str) -> Entry:
    """Inverse of :func:`entry_row`, without run and version.

    Raises:
        DecodingError: the row is damaged.
    """
    position, kind, step, arguments, result, error, writes, branch_writes, events, at, seconds, mode = row
    try:
        return Entry(
            position=parse_position(position),
            kind=_KINDS[kind],
            step=step,
            arguments=arguments,
            result=result,
            error=error,
            writes=_unframe_writes(writes),
            branch_writes=_unframe_writes(branch_writes),
            events=tuple(_unframe(events)) if events else (),
            at=at,
            seconds=seconds,
            mode=_MODES[mode],
        )
    except (ValueError, TypeError, KeyError) as problem:
        raise DecodingError(place, str(problem)) from problem


def state_rows(run: int, version: int, writes: Sequence[Write]) -> list[Row]:
    """The rows of ``state`` that the writes of one entry make.

    What a later write of the same entry replaces is left out. So a row that replaces the value comes before all others
    of its version and key.
    """
    if len(writes) == 1:
        write = writes[0]
        return [(run, version, 0, write.key, write.operation._value_, write.data)]
    rows: list[Row] = []
    replaced: set[str] = set()
    for ordinal, write in reversed(list(enumerate(writes))):
        if write.key not in replaced:
            rows.append((run, version, ordinal, write.key, write.operation._value_, write.data))
            if not write.operation.is_blind:
                replaced.add(write.key)
    return rows[::-1]


def effect_row(run: int, effect: EffectRecord) -> Row:
    """The columns of ``outbox`` without the id, in the order of the table."""
    return (
        run,
        effect.key,
        format_position(effect.position),
        effect.step,
        effect.status._value_,
        effect.arguments,
        effect.result,
        effect.error,
        effect.tries,
        effect.at,
        _frame_writes(effect.writes),
        effect.mode._value_,
    )


def effect_of(row: Row, place: str) -> EffectRecord:
    """Inverse of :func:`effect_row`, without the run.

    Raises:
        DecodingError: the row is damaged.
    """
    key, position, step, status, arguments, result, error, tries, at, writes, mode = row
    try:
        return EffectRecord(
            key=key,
            position=parse_position(position),
            step=step,
            status=EffectStatus(status),
            arguments=arguments,
            result=result,
            error=error,
            tries=tries,
            at=at,
            writes=_unframe_writes(writes),
            mode=_MODES[mode],
        )
    except (ValueError, TypeError, KeyError) as problem:
        raise DecodingError(place, str(problem)) from problem


def run_of(row: Row, place: str) -> RunRecord:
    """A record from the columns of ``runs`` and ``heads``, in the order of its fields.

    Raises:
        DecodingError: the row is damaged.
    """
    run_id, program, fingerprint, arguments, created_at, status, head, parent, parent_version, owner = row
    try:
        return RunRecord(
            run_id=run_id,
            program=program,
            fingerprint=fingerprint,
            arguments=arguments,
            created_at=created_at,
            status=RunStatus(status),
            head=head,
            parent=parent,
            parent_version=parent_version,
            owner=owner,
        )
    except ValueError as problem:
        raise DecodingError(place, str(problem)) from problem


def _frame(parts: Sequence[bytes]) -> bytes:
    """Parts with their lengths before them, as one bytes object."""
    return b"".join([len(part).to_bytes(_LENGTH, "little") + part for part in parts]) if parts else b""


def _unframe(data: bytes) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise ValueError("a part is longer than what is there")
        parts.append(data[start:at])
    return parts


def _frame_writes(writes: Sequence[Write]) -> bytes:
    if not writes:
        return b""
    return _frame(
        [part for write in writes for part in (write.key.encode(), write.operation._value_.encode(), write.data)]
    )


def _unframe_writes(data: bytes) -> tuple[Write, ...]:
    if not data:
        return ()
    parts = iter(_unframe(data))
    return tuple(
        Write(key.decode(), _OPERATIONS[operation], operand)
        for key, operation, operand in zip(parts, parts, parts, strict=True)
    )


__all__ = ["Row", "effect_of", "effect_row", "entry_of", "entry_row", "run_of", "state_rows"]
