"""Tools for tests of the runtime: stores that watch or misbehave, a world outside, and gates that order what happens.

Nothing here waits for time to pass: a step waits at a :class:`Gate` until the test opens it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.codec import decode
from specflow.history import Commit, EffectRecord, EffectStatus, Entry, Lease
from specflow.protocols import Store
from specflow.speculation import Call, Prediction
from specflow.stores import MemoryStore

jumping = pytest.mark.parametrize("anyio_backend", ["jumping"], indirect=True)
"""Marks a test that runs under trio with a clock that jumps to the next deadline whenever everybody waits."""


class Gate:
    """A place in a step: the step says that it came there, and waits until the test opens the gate."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.reached = anyio.Event()
        self._open = anyio.Event()
        if is_open:
            self._open.set()

    def open(self) -> None:
        """Let everybody pass, now and later."""
        self._open.set()

    async def pass_through(self) -> None:
        """Say that somebody came, and wait until the gate is open."""
        self.reached.set()
        await self._open.wait()


class World:
    """What the outside world saw, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.keys: list[str] = []

    def see(self, what: Any, key: str = "") -> None:
        """Something changed the outside world."""
        self.seen.append(what)
        self.keys.append(key)

    def counts(self) -> Counter[Any]:
        """How often each thing was seen."""
        return Counter(self.seen)


class WrappedStore:
    """Hands everything on to another store; subclasses change one thing."""

    def __init__(self, inner: Store | None = None) -> None:
        self.inner: Any = inner if inner is not None else MemoryStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WatchedStore(WrappedStore):
    """Keeps every commit in the order it was made."""

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__(inner)
        self.commits: list[Commit] = []

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Commit and remember."""
        head: int = self.inner.commit(lease, commit)
        self.commits.append(commit)
        return head

    def commit_of_entry(self, step: str) -> int:
        """Index of the commit that held the first entry of a step."""
        return next(
            index for index, commit in enumerate(self.commits) if any(step in entry.step for entry in commit.entries)
        )

    def commit_of_row(self, step: str, status: EffectStatus) -> int:
        """Index of the first commit with a row of a step in a status."""
        return next(
            index
            for index, commit in enumerate(self.commits)
            if any(step in row.step and row.status is status for row in commit.effects)
        )


class RowDroppingStore(WrappedStore):
    """A broken store: outbox rows of one status never reach it."""

    def __init__(self, status: EffectStatus, inner: Store | None = None) -> None:
        super().__init__(inner)
        self._status = status

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Commit without those rows."""
        rows = tuple(row for row in commit.effects if row.status is not self._status)
        head: int = self.inner.commit(lease, replace(commit, effects=rows))
        return head


class PowerCutError(BaseException):
    """The process dies here. Not an ``Exception``: nothing in a program or a step may catch it."""


class DyingStore(WrappedStore):
    """Dies at one of its commits, as the process would: nothing of this run is written any more.

    Args:
        dies: told every commit; True makes this the last one.
        after: whether that commit still reaches the store.
        error: how the runtime learns of it.
    """

    def __init__(
        self,
        dies: Callable[[Commit], bool],
        *,
        after: bool = False,
        error: BaseException | None = None,
        inner: Store | None = None,
    ) -> None:
        super().__init__(inner)
        self._dies = dies
        self._after = after
        self._error = error or PowerCutError()
        self.dead = False

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Commit, or die."""
        if self.dead:
            raise self._error
        if self._dies(commit):
            self.dead = True
            if self._after:
                self.inner.commit(lease, commit)
            raise self._error
        head: int = self.inner.commit(lease, commit)
        return head


def has_row(status: EffectStatus, step: str = "") -> Callable[[Commit], bool]:
    """Does a commit hold an outbox row of this status, of a step with this in its name?"""
    return lambda commit: any(row.status is status and step in row.step for row in commit.effects)


def has_entry(step: str) -> Callable[[Commit], bool]:
    """Does a commit hold an entry of a step with this in its name?"""
    return lambda commit: any(step in entry.step for entry in commit.entries)


class Guesses:
    """Guesses from a table by the last part of the step's name; a list is followed in the order of positions."""

    def __init__(self, *values: Any, confidence: float = 0.9) -> None:
        self._values = values
        self._confidence = confidence

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Always the same."""
        return [Prediction(value, self._confidence) for value in self._values]


def story(entry: Entry) -> tuple[Any, ...]:
    """An entry without the times at which things happened."""
    return (
        entry.position,
        entry.kind,
        entry.step,
        entry.arguments,
        entry.result,
        entry.error,
        entry.writes,
        entry.branch_writes,
        entry.events,
    )


def history(store: Any, run_id: str) -> list[tuple[Any, ...]]:
    """A run's entries without times."""
    return [story(entry) for entry in store.entries(run_id)]


def values_of(store: Any, run_id: str) -> dict[str, Any]:
    """The state of a run, decoded."""
    return {key: decode(data) for key, data in store.state(run_id).items()}


def rows_of(store: Any, run_id: str, step: str = "") -> list[EffectRecord]:
    """Outbox rows of the steps with this in their name."""
    return [row for row in store.effects(run_id) if step in row.step]


def row_of(store: Any, run_id: str, step: str) -> EffectRecord:
    """The one outbox row of a step."""
    (row,) = rows_of(store, run_id, step)
    return row


async def settle() -> None:
    """Wait until every other task waits for something that only the test can give it."""
    for _ in range(20):  # under asyncio the call below looks again only after a tenth of a second
        await anyio.lowlevel.checkpoint()
    await anyio.wait_all_tasks_blocked()
