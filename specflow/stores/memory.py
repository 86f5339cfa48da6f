"""Runs in memory: every version is a persistent map, so that forking one is copying a pointer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock

from immutables import Map

from ..errors import (
    RunBusyError,
    RunExistsError,
    StaleOwnerError,
    UnknownRunError,
    VersionConflictError,
    VersionGoneError,
)
from ..history import Commit, EffectRecord, Entry, Lease, Operation, RunRecord, RunStatus, Write
from .cells import fold
from .leases import check_lease_seconds, is_free
from .lineage import Stem, check_new
from .retention import FINISHED, retention


class _Cell:
    """The newest write to a key, and the cell it changed: None where it replaced the value or nothing was there."""

    __slots__ = ("before", "data", "operation")

    def __init__(self, before: _Cell | None, operation: Operation, data: bytes) -> None:
        self.before = before
        self.operation = operation
        self.data = data


_Cells = Map[str, _Cell]


@dataclass(slots=True, eq=False)
class _Run:
    created: RunRecord
    """As it was created; what changes since stands below."""
    stem: Stem
    cells: _Cells
    """State at the head."""
    status: RunStatus
    head: int
    owner: str | None
    expires_at: float
    fence: int = 1
    entries: list[Entry | None] = field(default_factory=list)
    """Entries ``stem.base + 1`` on; None where one was collected."""
    states: dict[int, _Cells] = field(default_factory=dict)
    """State at the versions after ``stem.base`` that were not collected."""
    effects: dict[str, EffectRecord] = field(default_factory=dict)
    pins: set[tuple[str, int]] = field(default_factory=set)
    """Pinned versions that this run holds, with the run they were pinned through."""
    origins: set[int] = field(default_factory=set)
    """Versions that this run holds and others were forked at."""


class MemoryStore:
    """Keeps runs for as long as the object lives. Usable from several threads.

    A commit costs time and memory in proportion to what it writes, not to what is there: appending to a list stores the
    new item, and the list is put together when somebody reads it.

    Args:
        lease_seconds: how long a lease holds without being renewed. Matters for owners of other machines only: see
            :mod:`specflow.stores.leases`.
        clock: now, in seconds since the epoch.
        cache_bytes: how much memory values may use that were put together for readers.

    Raises:
        InvalidSettingError: ``lease_seconds`` is not positive.
    """

    def __init__(
        self,
        *,
        lease_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
        cache_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        check_lease_seconds(lease_seconds)
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._numbered: list[_Run] = []
        self._folded = _Folded(cache_bytes)
        self._lock = RLock()

    @property
    def lease_seconds(self) -> float:
        """How long a lease holds without being renewed; the runtime renews it several times in that time."""
        return self._lease_seconds

    def create(self, run: RunRecord, owner: str) -> Lease:
        """Add a run and lease it to ``owner``.

        Raises:
            InvalidSettingError: the record has a history already; :meth:`fork` makes such runs.
            RunExistsError: the id is taken.
        """
        check_new(run)
        with self._lock:
            return self._add(run, Stem(len(self._numbered)), Map(), owner)

    def acquire(self, run_id: str, owner: str, *, take_over: bool = False) -> Lease:
        """Lease an existing run.

        Args:
            run_id: which run.
            owner: who asks.
            take_over: take the lease from an owner that still seems alive; its next write is refused.

        Raises:
            UnknownRunError: no such run.
            RunBusyError: its lease was not given back, and its owner's process is alive, or may be and has not let the
                lease expire.
        """
        with self._lock:
            run = self._run(run_id)
            now = self._clock()
            if run.owner is not None and not take_over and not is_free(run.owner, run.expires_at, now):
                raise RunBusyError(run_id, run.owner)
            run.owner, run.fence, run.expires_at = owner, run.fence + 1, now + self._lease_seconds
            return Lease(run_id, owner, run.fence, run.head)

    def renew(self, lease: Lease) -> None:
        """Keep a lease from expiring.

        Raises:
            StaleOwnerError: the lease was given back, or the run leased again meanwhile.
        """
        with self._lock:
            self._held(lease).expires_at = self._clock() + self._lease_seconds

    def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens when it is no longer held."""
        with self._lock:
            run = self._runs.get(lease.run_id)
            if run is not None and run.fence == lease.fence:
                run.owner = None

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Make entries, their state changes, outbox rows and the status real, all or nothing. Renews the lease.

        Returns:
            The new head.

        Raises:
            StaleOwnerError: the lease was given back, or the run leased again meanwhile.
            VersionConflictError: the head is not ``commit.parent``.
        """
        with self._lock:
            run = self._held(lease)
            if run.head != commit.parent:
                raise VersionConflictError(lease.run_id, commit.parent, run.head)
            head, cells = run.head, run.cells
            states: dict[int, _Cells] = {}
            for entry in commit.entries:
                head += 1
                if entry.writes:
                    cells = _written(cells, entry.writes)
                states[head] = cells
            effects = {effect.key: effect for effect in commit.effects} if commit.effects else None
            expires_at = self._clock() + self._lease_seconds
            # Nothing above changed the run, and nothing below can fail.
            run.entries += commit.entries
            run.states.update(states)
            if effects is not None:
                run.effects.update(effects)
            run.cells, run.head, run.expires_at = cells, head, expires_at
            if commit.status is not None:
                run.status = commit.status
            return head

    def get_run(self, run_id: str) -> RunRecord:
        """The record of a run.

        Raises:
            UnknownRunError: no such run.
        """
        with self._lock:
            return _record(self._run(run_id))

    def list_runs(self) -> Sequence[RunRecord]:
        """All runs, oldest first."""
        with self._lock:
            return tuple(sorted(map(_record, self._numbered), key=lambda record: record.created_at))

    def entries(self, run_id: str, after: int = 0, until: int | None = None) -> Sequence[Entry]:
        """Committed entries ``after + 1 .. until`` (default: the head), oldest first; a fork has its parent's too.

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: some of them do not exist, or were collected.
        """
        with self._lock:
            run = self._run(run_id)
            until = run.head if until is None else until
            if until > run.head:
                raise VersionGoneError(run_id, until, f"the newest is {run.head}")
            found: list[Entry] = []
            for number, start, stop in run.stem.segments(max(after, 0), until):
                holder = self._numbered[number]
                base = holder.stem.base
                for version, entry in enumerate(holder.entries[start - base : stop - base], start=start + 1):
                    if entry is None:
                        raise VersionGoneError(run_id, version, "its entry was collected")
                    found.append(entry)
            return tuple(found)

    def state(self, run_id: str, version: int | None = None) -> Mapping[str, bytes]:
        """Encoded value of every key at a version (default: the head).

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: that version does not exist, or was collected.
            UnsupportedValueError: a committed operation does not fit the value it was applied to.
        """
        with self._lock:
            run = self._run(run_id)
            cells = run.cells if version is None else self._cells(run, run_id, version)
            values = {key: self._value(key, cell) for key, cell in cells.items()}
        return {key: value for key, value in values.items() if value is not None}

    def effects(self, run_id: str) -> Sequence[EffectRecord]:
        """The outbox of a run, in program order; a fork has none of its parent's rows.

        Raises:
            UnknownRunError: no such run.
        """
        with self._lock:
            return tuple(sorted(self._run(run_id).effects.values(), key=lambda effect: effect.position))

    def fork(
        self, run_id: str, version: int, new_run_id: str, owner: str, effects: Sequence[EffectRecord] = ()
    ) -> Lease:
        """A new run whose history begins with the first ``version`` entries of another; no entry is copied.

        Its outbox begins with ``effects``: there is no fork without them, whatever happens.

        Raises:
            UnknownRunError: no such run.
            RunExistsError: the new id is taken.
            VersionGoneError: that version does not exist, or was collected.
        """
        with self._lock:
            parent = self._run(run_id)
            cells = self._cells(parent, run_id, version)
            rows = {effect.key: effect for effect in effects}
            self.entries(run_id, 0, version)  # raises where some were collected
            origin = parent.stem.holder(version)
            record = replace(
                parent.created,
                run_id=new_run_id,
                created_at=self._clock(),
                status=RunStatus.RUNNING,
                parent=run_id,
                parent_version=version,
            )
            lease = self._add(record, Stem(len(self._numbered), version, origin), cells, owner)
            self._numbered[-1].effects.update(rows)
            self._numbered[origin.number].origins.add(version)
            return lease

    def pin(self, run_id: str, version: int) -> None:
        """Keep a version from being collected. Pinning it twice is pinning it once.

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: that version does not exist, or was collected.
        """
        with self._lock:
            run = self._run(run_id)
            self._cells(run, run_id, version)
            self._numbered[run.stem.holder(version).number].pins.add((run_id, version))

    def unpin(self, run_id: str, version: int) -> None:
        """Let a pinned version go; nothing happens when it is not pinned.

        Raises:
            UnknownRunError: no such run.
        """
        with self._lock:
            self._numbered[self._run(run_id).stem.holder(version).number].pins.discard((run_id, version))

    def collect(self, run_id: str) -> int:
        """Drop what no reader can ask for: state of versions that are neither the head, pinned, nor a fork's origin.

        Of a finished run also the entries after the last version that is pinned or a fork's origin, but never the last
        entry, which holds the result.

        Returns:
            How many versions and entries were dropped.

        Raises:
            UnknownRunError: no such run.
        """
        with self._lock:
            run = self._run(run_id)
            kept = retention(run.head, run.status, (version for _, version in run.pins), run.origins)
            gone = [version for version in run.states if version not in kept.versions]
            for version in gone:
                del run.states[version]
            dropped = len(gone)
            if run.status in FINISHED:
                base = run.stem.base
                for index in range(max(kept.entries_until - base, 0), len(run.entries) - 1):
                    dropped += run.entries[index] is not None
                    run.entries[index] = None
            return dropped

    def close(self) -> None:
        """Nothing to let go of: the runs stay readable."""

    def _add(self, record: RunRecord, stem: Stem, cells: _Cells, owner: str) -> Lease:
        if record.run_id in self._runs:
            raise RunExistsError(record.run_id)
        run = _Run(
            created=record,
            stem=stem,
            cells=cells,
            status=record.status,
            head=stem.base,
            owner=owner,
            expires_at=self._clock() + self._lease_seconds,
        )
        self._runs[record.run_id] = run
        self._numbered.append(run)
        return Lease(record.run_id, owner, run.fence, run.head)

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRunError(run_id)
        return run

    def _held(self, lease: Lease) -> _Run:
        run = self._run(lease.run_id)
        if run.owner is None or run.fence != lease.fence:
            raise StaleOwnerError(lease.run_id, lease.owner, lease.fence)
        return run

    def _cells(self, run: _Run, run_id: str, version: int) -> _Cells:
        if not 0 <= version <= run.head:
            raise VersionGoneError(run_id, version, f"there are versions 0 to {run.head}")
        if version == 0:
            return Map()
        cells = self._numbered[run.stem.holder(version).number].states.get(version)
        if cells is None:
            raise VersionGoneError(run_id, version, "its state was collected")
        return cells

    def _value(self, key: str, cell: _Cell) -> bytes | None:
        """Encoded value that a chain of writes gives."""
        if cell.operation is Operation.PUT:
            return cell.data
        chain: list[tuple[Operation, bytes]] = []
        known: bytes | None = None
        link: _Cell | None = cell
        while link is not None:
            known = self._folded.get(link)
            if known is not None:
                break
            chain.append((link.operation, link.data))
            link = link.before
        if chain:
            known = fold(key, known, reversed(chain))
            if known is not None:
                self._folded.add(cell, known)
        return known


class _Folded:
    """Values that were put together from chains, those used last, up to a number of bytes."""

    OVERHEAD = 200
    """Bytes that an entry takes besides the value, roughly."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[_Cell, bytes] = OrderedDict()

    def get(self, cell: _Cell) -> bytes | None:
        value = self._values.get(cell)
        if value is not None:
            self._values.move_to_end(cell)
        return value

    def add(self, cell: _Cell, value: bytes) -> None:
        self._values[cell] = value
        self._bytes += len(value) + self.OVERHEAD
        while self._bytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= len(oldest) + self.OVERHEAD


def _written(cells: _Cells, writes: Sequence[Write]) -> _Cells:
    """The state after the writes of one entry."""
    if not writes:
        return cells
    changed = cells.mutate()
    for write in writes:
        if write.operation is Operation.DELETE:
            changed.pop(write.key, None)
        else:
            before = changed.get(write.key) if write.operation.is_blind else None
            changed[write.key] = _Cell(before, write.operation, write.data)
    return changed.finish()


def _record(run: _Run) -> RunRecord:
    return replace(run.created, status=run.status, head=run.head, owner=run.owner)


__all__ = ["MemoryStore"]
