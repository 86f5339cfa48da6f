"""Short ways to say what the tests of the suite need."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ...codec import decode, encode
from ...errors import StaleOwnerError, VersionConflictError, VersionGoneError
from ...history import (
    Commit,
    EffectRecord,
    EffectStatus,
    Entry,
    EntryKind,
    Lease,
    Operation,
    Position,
    RunRecord,
    RunStatus,
    Write,
)
from ...protocols import Store
from ...types import Mode
from ..leases import this_owner

ALICE, BOB = "alice, of another machine", "bob, of another machine"
"""Owners about whom nothing can be found out: their leases hold until they expire."""


_MODES = tuple(Mode)


def make_record(run_id: str = "run", *, program: str = "module:program", created_at: float = 1.0) -> RunRecord:
    """The record of a new run."""
    return RunRecord(run_id, program, "fingerprint", encode(((), {})), created_at)


def make_entry(number: int, *writes: Write) -> Entry:
    """An entry that can be told from those of other numbers."""
    return Entry(
        position=(number,),
        kind=EntryKind.CALL,
        step=f"step {number}",
        arguments=encode(((number,), {})),
        result=encode(number),
        error=None,
        writes=writes,
        events=(encode(f"event {number}"),),
        at=1000.0 + number,
        seconds=0.25,
        mode=_MODES[number % len(_MODES)],
    )


def end_entry() -> Entry:
    """The last entry of a finished run."""
    return Entry((), EntryKind.END, "program", encode(((), {})), encode("done"), None)


def make_effect(key: str, position: Position, *, tries: int = 0) -> EffectRecord:
    """A row of the outbox."""
    return EffectRecord(key, position, "send", EffectStatus.PREPARED, encode("mail"), tries=tries)


def put(key: str, value: Any) -> Write:
    """Replace the value."""
    return Write(key, Operation.PUT, encode(value))


def delete(key: str) -> Write:
    """Remove the key."""
    return Write(key, Operation.DELETE, b"")


def add(key: str, amount: Any) -> Write:
    """Add a number."""
    return Write(key, Operation.ADD, encode(amount))


def append(key: str, item: Any) -> Write:
    """Append to a list."""
    return Write(key, Operation.APPEND, encode(item))


def union(key: str, items: set[Any]) -> Write:
    """Add items to a set."""
    return Write(key, Operation.UNION, encode(items))


def filled(store: Store) -> Lease:
    """A run "run" of Alice's at version 3, with some of everything."""
    lease = store.create(make_record(), ALICE)
    first = make_entry(1, put("x", 1), append("l", "a"), add("n", 5))
    store.commit(lease, Commit(0, (first,), (make_effect("a", (1,)), make_effect("b", (0, 2)))))
    second = make_entry(2, append("l", "b"), union("s", {1, 2}))
    third = make_entry(3, add("n", -2), put("x", "three"), delete("s"))
    store.commit(lease, Commit(1, (second, third)))
    return lease


def rewritten(store: Store, versions: int) -> Lease:
    """A run "run" of Alice's in which every version puts one key, deletes or puts another and appends to a third."""
    lease = store.create(make_record(), ALICE)
    for n in range(1, versions + 1):
        toggled = delete("t") if n % 2 else put("t", n)
        store.commit(lease, Commit(n - 1, (make_entry(n, put("x", n), toggled, append("l", n)),)))
    return lease


def values_of(store: Store, run_id: str, version: int | None = None) -> dict[str, Any]:
    """The state at a version, decoded."""
    return {key: decode(data, f"state {key!r}") for key, data in store.state(run_id, version).items()}


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that readers of a run can see."""

    record: RunRecord
    entries: list[Entry]
    states: list[dict[str, bytes]]
    effects: list[EffectRecord]


def everything(store: Store, run_id: str) -> Seen:
    """All there is to see of a run; states that were collected show as such."""
    record = store.get_run(run_id)
    states: list[dict[str, bytes]] = []
    for version in range(record.head + 1):
        try:
            states.append(dict(store.state(run_id, version)))
        except VersionGoneError:
            states.append({"collected": b""})
    return Seen(record, list(store.entries(run_id)), states, list(store.effects(run_id)))


def assert_state(store: Store, run_id: str, version: int, expected: Mapping[str, bytes], *, certain: bool) -> None:
    """A version reads as expected; where a collect may have dropped it, it may be refused instead."""
    try:
        found = store.state(run_id, version)
    except VersionGoneError:
        assert not certain, f"version {version} of {run_id} is gone"
    else:
        assert dict(found) == dict(expected), f"version {version} of {run_id}"


def assert_refused(store: Store, lease: Lease) -> None:
    """A lease changes nothing any more: no entries, effects or status, and no renewal; giving it back does nothing."""
    before = everything(store, lease.run_id)
    head = before.record.head
    for commit in (
        Commit(head, (make_entry(99, put("x", "late")),), (make_effect("late", (99,)),), RunStatus.FAILED),
        Commit(head, effects=(make_effect("late", (99,)),)),
        Commit(head, status=RunStatus.FAILED),
        Commit(head),
    ):
        with pytest.raises(StaleOwnerError) as caught:
            store.commit(lease, commit)
        assert (caught.value.run_id, caught.value.owner, caught.value.fence) == (
            lease.run_id,
            lease.owner,
            lease.fence,
        )
    with pytest.raises(StaleOwnerError):
        store.renew(lease)
    store.release(lease)
    assert everything(store, lease.run_id) == before


def spoil(result: object) -> None:
    """Change what a reader got, as far as it lets itself be changed."""
    if isinstance(result, MutableMapping):
        result.clear()
        result["spoilt"] = b""
    elif isinstance(result, MutableSequence):
        result.reverse()
        result.append(None)


class Breaking(tuple[Any, ...]):
    """Looks whole until it is read to its end."""

    __slots__ = ()
    MESSAGE = "this commit cannot be read to its end"

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise RuntimeError(self.MESSAGE)


def owner_of_a_dead_process() -> str:
    """What :func:`this_owner` might have said in a process that has ended."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    host, _, start, suffix = this_owner().rsplit(":", 3)
    return f"{host}:{process.pid}:{start}:{suffix}"


def race(stores: Sequence[Store], lease: Lease, goal: int) -> list[list[int]]:
    """Let a thread for each store commit with one lease until the head is at ``goal``.

    Returns:
        The versions that each of them made.
    """
    won: list[list[int]] = [[] for _ in stores]
    failures: list[BaseException] = []
    start = threading.Barrier(len(stores))

    def run(racer: int, store: Store) -> None:
        try:
            start.wait()
            head = 0
            while head < goal:
                entry = replace(make_entry(head, add(f"racer {racer}", 1)), step=f"racer {racer}")
                try:
                    head = store.commit(lease, Commit(head, (entry,)))
                    won[racer].append(head)
                except VersionConflictError as conflict:
                    head = conflict.found
        except BaseException as failure:  # noqa: BLE001 -- shown by the thread that waits
            failures.append(failure)

    threads = [threading.Thread(target=run, args=numbered) for numbered in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return won


__all__ = [
    "ALICE",
    "BOB",
    "Breaking",
    "Seen",
    "add",
    "append",
    "assert_refused",
    "assert_state",
    "delete",
    "end_entry",
    "everything",
    "filled",
    "make_effect",
    "make_entry",
    "make_record",
    "owner_of_a_dead_process",
    "put",
    "race",
    "rewritten",
    "spoil",
    "union",
    "values_of",
]
