"""What the tests of the SQLite store run in other processes. Says each head on a line of its own once it is committed.

Commands, after the path of the file:

* ``write LABEL COUNT``: go on with the run of :func:`history`, and die at the statement that begins with LABEL when it
  comes for the COUNTth time; LABEL ``after`` dies when a commit has returned, ``never`` goes on until killed.
* ``write-in-two-steps LABEL COUNT``: the same with a store that is broken.
* ``pause HEAD``: write up to a head, wait for a line, and say "stale" if the next commit is refused for that reason.
* ``collect LABEL COUNT``: collect the run, and die likewise.
* ``fork-run LABEL COUNT``: fork the run with two effects that the fork takes over, and die likewise.
* ``race NAME GOAL FENCE``: wait for a line, then commit with a lease that others have too until the head is at GOAL.
* ``fight NAME GOAL``: wait for a line, then do so with leases that are taken over from whoever has them.
* ``fork``: use a store on both sides of a fork.
* ``open``: wait for a line, then open the file.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from specflow.codec import encode
from specflow.errors import StaleOwnerError, StoreUnavailableError, VersionConflictError
from specflow.history import Commit, EffectRecord, EffectStatus, Entry, EntryKind, Lease, Operation, RunRecord, Write
from specflow.stores import SQLiteStore, this_owner

RUN = RunRecord("run", "module:program", "fingerprint", b"", 1.0)


def entry(version: int, step: str = "step") -> Entry:
    """Entry of a version, which changes every kind of value."""
    writes = (
        Write("log", Operation.APPEND, encode(version)),
        Write("last", Operation.PUT, encode(version)),
        Write("sum", Operation.ADD, encode(version)),
    )
    return Entry((version,), EntryKind.CALL, step, encode(version), encode(version), None, writes)


def effect(version: int) -> EffectRecord:
    """The row of the outbox that is committed with the last entry of a commit."""
    return EffectRecord(f"key {version}", (version,), "send", EffectStatus.PREPARED, encode(version))


def history() -> Iterator[Commit]:
    """The commits of the run, without end: of one, two and three entries in turn."""
    head = 0
    for size in cycle((1, 2, 3)):
        entries = tuple(entry(version) for version in range(head + 1, head + size + 1))
        yield Commit(head, entries, (effect(head + size),))
        head += size


@dataclass(slots=True)
class Trap:
    """Dies at a statement."""

    label: str
    count: int

    def __call__(self, statement: str) -> None:
        """Called before a statement is carried out."""
        if statement.strip().startswith(self.label):
            self.count -= 1
            if self.count == 0:
                die()


def die() -> None:
    """As ``kill -9`` does it: no handler, no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


def say(word: object) -> None:
    """To the process that waits."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def wait() -> None:
    """For the process that started this one."""
    say("ready")
    sys.stdin.readline()


class TwoSteps(SQLiteStore):
    """Commits entries and effects one after the other: what the tests of crashes must notice."""

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Two transactions where there must be one."""
        head = super().commit(lease, replace(commit, effects=()))
        return super().commit(lease, Commit(head, effects=commit.effects))


def write(path: Path, label: str, count: int, kind: type[SQLiteStore] = SQLiteStore) -> None:
    """Go on with the run until death."""
    store = kind(path)
    lease = store.acquire("run", this_owner()) if store.list_runs() else store.create(RUN, this_owner())
    assert store._connection is not None
    store._connection.set_trace_callback(Trap(label, count))
    for commit in history():
        if commit.parent >= lease.head:
            head = store.commit(lease, commit)
            if label == "after":
                count -= 1
                if count == 0:
                    die()
            say(head)


def pause(path: Path, head: int) -> None:
    """Write, wait, and write again."""
    store = SQLiteStore(path)
    lease = store.create(RUN, this_owner())
    for commit in history():
        if commit.parent == head:
            wait()
        try:
            store.commit(lease, commit)
        except StaleOwnerError:
            say("stale")
            break
    store.close()


def collect(path: Path, label: str, count: int) -> None:
    """Collect the run until death."""
    store = SQLiteStore(path)
    assert store._connection is not None
    store._connection.set_trace_callback(Trap(label, count))
    store.collect("run")
    store.close()


def fork_run(path: Path, label: str, count: int) -> None:
    """Fork the run until death."""
    store = SQLiteStore(path)
    assert store._connection is not None
    store._connection.set_trace_callback(Trap(label, count))
    store.fork("run", 2, "fork", this_owner(), (effect(7), effect(8)))
    store.close()


def race(path: Path, name: str, goal: int, fence: int) -> None:
    """Commit with everybody's lease."""
    store = SQLiteStore(path)
    wait()
    head = 0
    while head < goal:
        try:
            head = store.commit(Lease("run", "everybody", fence, 0), Commit(head, (entry(head + 1, name),)))
            say(head)
        except VersionConflictError as conflict:
            head = conflict.found
    store.close()


def fight(path: Path, name: str, goal: int) -> None:
    """Commit with leases of one's own."""
    store = SQLiteStore(path)
    wait()
    lease = store.acquire("run", this_owner(), take_over=True)
    head = lease.head
    while head < goal:
        try:
            head = store.commit(lease, Commit(head, (entry(head + 1, name),)))
            say(head)
        except StaleOwnerError:
            lease = store.acquire("run", this_owner(), take_over=True)
            head = lease.head
    store.close()


def fork(path: Path) -> None:
    """Say what a forked process is told, then the head that its parent still reads."""
    store = SQLiteStore(path)
    store.create(RUN, this_owner())
    child = os.fork()
    if child == 0:
        try:
            store.list_runs()
        except StoreUnavailableError as error:
            say(f"child: {error.problem.partition(';')[0]}")
        store.close()
        return
    os.waitpid(child, 0)
    say(store.get_run("run").head)
    store.close()


def main(path: Path, command: str, *arguments: str) -> None:
    """Do what the command line says."""
    if command == "write":
        write(path, arguments[0], int(arguments[1]))
    elif command == "write-in-two-steps":
        write(path, arguments[0], int(arguments[1]), TwoSteps)
    elif command == "pause":
        pause(path, int(arguments[0]))
    elif command == "collect":
        collect(path, arguments[0], int(arguments[1]))
    elif command == "fork-run":
        fork_run(path, arguments[0], int(arguments[1]))
    elif command == "race":
        race(path, arguments[0], int(arguments[1]), int(arguments[2]))
    elif command == "fight":
        fight(path, arguments[0], int(arguments[1]))
    elif command == "fork":
        fork(path)
    elif command == "open":
        wait()
        SQLiteStore(path).close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
