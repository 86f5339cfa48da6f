"""Effects of a run on their way to the outside world: one row per call, by idempotency key."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .effects import idempotency_key
from .history import EffectRecord, EffectStatus, Position


@dataclass(frozen=True, slots=True)
class Sent:
    """The answer of a probe, or of a person: the effect did happen, this was its result, and this is what it wrote.

    For example ``Sent("receipt")``, or for a step that declares a State ``Sent("receipt", writes={"paid": 42})``.
    """

    result: Any = None
    writes: Mapping[str, Any] | Callable[[Any], object] | None = None
    """What the step wrote to the state: values by key, or a function that is called with the
    :class:`~specflow.state.State` and writes them again (``lambda state: state.append("paid", 42)``). Has to be said
    where the step declares a State; ``{}`` for nothing. What a probe returns is encoded: values, no function."""


@dataclass(frozen=True, slots=True)
class NotSent:
    """The answer of a probe, or of a person: the effect did not happen."""


class Outbox:
    """The rows, which of them changed since the last commit, and which have served their call.

    Args:
        run_id: part of every key.
        rows: what the store knows.
        resolve: what a person found out about unknown effects, by key.
    """

    def __init__(self, run_id: str, rows: Iterable[EffectRecord], resolve: Mapping[str, Sent | NotSent]) -> None:
        self._run_id = run_id
        self._rows = {row.key: row for row in rows}
        self._changed: dict[str, EffectRecord] = {}
        self._used: set[str] = set()
        self._resolve = dict(resolve)
        self._queues: dict[str, deque[EffectRecord]] = {}
        self._places: dict[Position, list[EffectRecord]] = {}
        for row in self._rows.values():
            self._places.setdefault(row.position, []).append(row)

    def key(self, position: Position, step: str, arguments: bytes, purpose: str = "do") -> str:
        """The idempotency key of a call."""
        return idempotency_key(self._run_id, position, step, arguments, purpose)

    def get(self, key: str) -> EffectRecord | None:
        """The row of a call, if there is one."""
        return self._rows.get(key)

    @property
    def has_rows(self) -> bool:
        """Is there any row?"""
        return bool(self._rows)

    def rows(self) -> Iterable[EffectRecord]:
        """All rows."""
        return self._rows.values()

    def recorded_at(self, position: Position) -> Iterable[EffectRecord]:
        """Rows of one place in the program as the store knew them when the run went on."""
        return self._places.get(position, ())

    def put(self, row: EffectRecord) -> None:
        """Add or change a row; part of the next commit."""
        self._rows[row.key] = row
        self._changed[row.key] = row

    def take_changes(self) -> tuple[EffectRecord, ...]:
        """Rows changed since this was asked last."""
        changes = tuple(self._changed.values())
        self._changed.clear()
        return changes

    def withdraw(self) -> None:
        """Nothing more is started: effects that were about to be sent stay as the store knows them."""
        begun = (EffectStatus.PREPARED, EffectStatus.SENT)
        self._changed = {key: row for key, row in self._changed.items() if row.status not in begun}

    def use(self, key: str) -> None:
        """A call was answered with this row: a recorded result is consumed once."""
        self._used.add(key)

    def give_back(self, key: str) -> None:
        """The world of that call fell: the row may serve an equal call at the same place."""
        self._used.discard(key)

    def is_used(self, key: str) -> bool:
        """Has the row served its call?"""
        return key in self._used

    def resolution(self, key: str) -> Sent | NotSent | None:
        """What a person found out about an unknown effect."""
        return self._resolve.get(key)

    def forget_resolution(self, key: str) -> None:
        """It was acted on."""
        self._resolve.pop(key, None)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Queues in which a buffered effect waits to be sent."""
        return tuple(queue for queue, rows in self._queues.items() if rows)

    def enqueue(self, queue: str, row: EffectRecord) -> None:
        """A buffered effect was committed: it has to be sent after those before it in its queue."""
        self._queues.setdefault(queue, deque()).append(row)

    def next_in(self, queue: str) -> EffectRecord | None:
        """The next buffered effect of a queue."""
        waiting = self._queues.get(queue)
        return waiting[0] if waiting else None

    def take_from(self, queue: str) -> None:
        """The next buffered effect of a queue is on its way."""
        self._queues[queue].popleft()


__all__ = ["NotSent", "Outbox", "Sent"]
