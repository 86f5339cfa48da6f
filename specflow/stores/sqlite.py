"""Runs in one SQLite file: log, state, outbox and head change in one transaction, or not at all."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NoReturn

from ..errors import (
    InvalidSettingError,
    RunBusyError,
    RunExistsError,
    StaleOwnerError,
    StoreUnavailableError,
    UnknownRunError,
    UnsupportedValueError,
    VersionConflictError,
    VersionGoneError,
)
from ..history import Commit, EffectRecord, Entry, Lease, Operation, RunRecord, RunStatus
from .cells import fold
from .leases import check_lease_seconds, is_free
from .lineage import Stem, check_new
from .retention import FINISHED, Retention, retention
from .rows import effect_of, effect_row, entry_of, entry_row, run_of, state_rows
from .schema import MIGRATIONS, migrate

_MAX_STEMS = 10_000
"""Runs whose place in the file is remembered, so that a commit need not look it up."""

_CHECKPOINT_PAGES = 4000
"""Pages of the write-ahead log (16 MB) after which they are moved to the file. Moving waits for the disk twice, also in
NORMAL mode; with SQLite's own limit of 1000 pages it would happen after every few hundred commits."""

_READ, _WRITE = "BEGIN", "BEGIN IMMEDIATE"
"""A reader sees one version of the file throughout; a writer takes the write lock before it looks."""

_OPERATIONS = {operation.value: operation for operation in Operation}

_RUN_COLUMNS = """
    SELECT r.run_id, r.program, r.fingerprint, r.arguments, r.created_at, h.status, h.head, p.run_id,
           r.parent_version, h.owner
    FROM runs r JOIN heads h ON h.run = r.id LEFT JOIN runs p ON p.id = r.parent
"""
_ADD_RUN = """
    INSERT INTO runs (run_id, program, fingerprint, arguments, created_at, parent, parent_version, origin)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO NOTHING
"""
_ADD_HEAD = """
    INSERT INTO heads (run, head, status, owner, fence, expires_at, collected) VALUES (?, ?, ?, ?, 1, ?, ?)
"""
_LEASE = "UPDATE heads SET owner = ?, fence = fence + 1, expires_at = ? WHERE run = ?"
_RENEW = "UPDATE heads SET expires_at = ? WHERE run = ? AND fence = ? AND owner IS NOT NULL"
_RELEASE = "UPDATE heads SET owner = NULL WHERE run = ? AND fence = ?"
_MOVE_HEAD = """
    UPDATE heads SET head = ?, status = coalesce(?, status), expires_at = ?
    WHERE run = ? AND fence = ? AND owner IS NOT NULL AND head = ?
"""
_ADD_ENTRY = "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ADD_STATE = "INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)"
_PUT_EFFECT = """
    INSERT INTO outbox (run, key, position, step, status, arguments, result, error, tries, at, writes, mode)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run, key) DO UPDATE SET
        position = excluded.position, step = excluded.step, status = excluded.status, arguments = excluded.arguments,
        result = excluded.result, error = excluded.error, tries = excluded.tries,
        at = excluded.at, writes = excluded.writes, mode = excluded.mode
"""
_ENTRIES = """
    SELECT position, kind, step, arguments, result, error, writes, branch_writes, events, at, seconds, mode
    FROM entries WHERE run = ? AND version > ? AND version <= ? ORDER BY version
"""
_STATE = """
    SELECT key, operation, data FROM state WHERE run = ? AND version > ? AND version <= ? ORDER BY version, ordinal
"""
_EFFECTS = """
    SELECT key, position, step, status, arguments, result, error, tries, at, writes, mode
    FROM outbox WHERE run = ? ORDER BY id
"""


class SQLiteStore:
    """Keeps runs in one SQLite file. Usable from several threads and, each with a store of its own, several processes.

    The file is in write-ahead mode: readers and the writer do not wait for each other. It must be on a disk of this
    machine, since SQLite's locks do not hold over a network.

    Args:
        path: the file; made when it is missing, in a folder that exists.
        synchronous: ``"NORMAL"``: what was committed survives any death of the process; a power failure may take back
            the last commits, whole and in order. ``"FULL"``: nor does it, since every commit waits for the disk.
        lease_seconds: how long a lease holds without being renewed. Matters for owners of other machines only: see
            :mod:`specflow.stores.leases`.
        clock: now, in seconds since the epoch; the same for all processes that share the file.
        busy_seconds: how long a call waits for the transactions of other processes.

    Raises:
        InvalidSettingError: a setting has a value that cannot work.
        StoreUnavailableError: the path cannot be read and written, or is not a file of this kind.
        StoreVersionError: the file was written by a newer version of specflow.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        lease_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
        busy_seconds: float = 30.0,
    ) -> None:
        if synchronous not in {"NORMAL", "FULL"}:
            raise InvalidSettingError("synchronous", synchronous, '"NORMAL" or "FULL"')
        if os.fspath(path) == ":memory:":
            raise InvalidSettingError("path", path, "a file; MemoryStore keeps runs in memory")
        check_lease_seconds(lease_seconds)
        self._path = str(Path(path).absolute())
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._stems: dict[str, Stem] = {}
        self._lock = RLock()
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = _connect(self._path, synchronous, busy_seconds)

    @property
    def lease_seconds(self) -> float:
        """How long a lease holds without being renewed; the runtime renews it several times in that time."""
        return self._lease_seconds

    def create(self, run: RunRecord, owner: str) -> Lease:
        """Add a run and lease it to ``owner``.

        Raises:
            InvalidSettingError: the record has a history already; :meth:`fork` makes such runs.
            RunExistsError: the id is taken.
            UnsupportedValueError: SQLite cannot hold the record.
            StoreUnavailableError: the file cannot be used any more.
        """
        check_new(run)
        fixed = (run.run_id, run.program, run.fingerprint, run.arguments, run.created_at, None, 0, None)
        with self._transaction(_WRITE) as connection:
            return self._add(connection, fixed, run.status, owner)

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
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, run_id)
            holder, fence, expires_at, head = connection.execute(
                "SELECT owner, fence, expires_at, head FROM heads WHERE run = ?", (stem.number,)
            ).fetchone()
            now = self._clock()
            if not take_over and not is_free(holder, expires_at, now):
                raise RunBusyError(run_id, holder)
            connection.execute(_LEASE, (owner, now + self._lease_seconds, stem.number))
            return Lease(run_id, owner, fence + 1, head)

    def renew(self, lease: Lease) -> None:
        """Keep a lease from expiring.

        Raises:
            StaleOwnerError: the lease was given back, or the run leased again meanwhile.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, lease.run_id)
            expires_at = self._clock() + self._lease_seconds
            if not connection.execute(_RENEW, (expires_at, stem.number, lease.fence)).rowcount:
                raise StaleOwnerError(lease.run_id, lease.owner, lease.fence)

    def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens when it is no longer held.

        Raises:
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._find(connection, lease.run_id)
            if stem is not None:
                connection.execute(_RELEASE, (stem.number, lease.fence))

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Make entries, their state changes, outbox rows and the status real, all or nothing. Renews the lease.

        Returns:
            The new head.

        Raises:
            StaleOwnerError: the lease was given back, or the run leased again meanwhile.
            VersionConflictError: the head is not ``commit.parent``.
            UnsupportedValueError: SQLite cannot hold a value (beyond 1 GB, or text with lone surrogates).
            StoreUnavailableError: the file cannot be used any more.
        """
        head = commit.parent + len(commit.entries)
        status = None if commit.status is None else commit.status.value
        with self._transaction(_WRITE) as connection:
            run = self._stem(connection, lease.run_id).number
            expires_at = self._clock() + self._lease_seconds
            moved = connection.execute(_MOVE_HEAD, (head, status, expires_at, run, lease.fence, commit.parent))
            if not moved.rowcount:
                self._refuse(connection, run, lease, commit.parent)
            states = []
            for version, entry in enumerate(commit.entries, start=commit.parent + 1):
                connection.execute(_ADD_ENTRY, entry_row(run, version, entry))
                if entry.writes:
                    states += state_rows(run, version, entry.writes)
            if states:
                connection.executemany(_ADD_STATE, states)
            if commit.effects:
                connection.executemany(_PUT_EFFECT, [effect_row(run, effect) for effect in commit.effects])
        return head

    def get_run(self, run_id: str) -> RunRecord:
        """The record of a run.

        Raises:
            UnknownRunError: no such run.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_READ) as connection:
            row = connection.execute(f"{_RUN_COLUMNS} WHERE r.run_id = ?", (run_id,)).fetchone()
        if row is None:
            raise UnknownRunError(run_id)
        return run_of(row, f"run {run_id!r}")

    def list_runs(self) -> Sequence[RunRecord]:
        """All runs, oldest first.

        Raises:
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_READ) as connection:
            rows = connection.execute(f"{_RUN_COLUMNS} ORDER BY r.created_at, r.id").fetchall()
        return tuple(run_of(row, f"run {row[0]!r}") for row in rows)

    def entries(self, run_id: str, after: int = 0, until: int | None = None) -> Sequence[Entry]:
        """Committed entries ``after + 1 .. until`` (default: the head), oldest first; a fork has its parent's too.

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: some of them do not exist, or were collected.
            DecodingError: an entry is damaged.
            StoreUnavailableError: the file cannot be used any more.
        """
        rows: list[Any] = []
        with self._transaction(_READ) as connection:
            stem = self._stem(connection, run_id)
            head = _head(connection, stem)
            until = head if until is None else until
            if until > head:
                raise VersionGoneError(run_id, until, f"the newest is {head}")
            for segment in stem.segments(max(after, 0), until):
                rows += _all_of(connection.execute(_ENTRIES, segment).fetchall(), run_id, segment[1], segment[2])
        return tuple(entry_of(row, f"an entry of run {run_id!r}") for row in rows)

    def state(self, run_id: str, version: int | None = None) -> Mapping[str, bytes]:
        """Encoded value of every key at a version (default: the head).

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: that version does not exist, or was collected.
            UnsupportedValueError: a committed operation does not fit the value it was applied to.
            StoreUnavailableError: the file cannot be used any more.
        """
        chains: dict[str, list[tuple[Operation, bytes]]] = {}
        with self._transaction(_READ) as connection:
            stem = self._stem(connection, run_id)
            head = _head(connection, stem)
            version = head if version is None else version
            _check_version(connection, stem, run_id, version, head)
            for segment in stem.segments(0, version):
                for key, name, data in connection.execute(_STATE, segment):
                    operation = _OPERATIONS[name]
                    if operation.is_blind:
                        chains.setdefault(key, []).append((operation, data))
                    else:
                        chains[key] = [(operation, data)]
        values = {key: fold(key, None, chain) for key, chain in chains.items()}
        return {key: value for key, value in values.items() if value is not None}

    def effects(self, run_id: str) -> Sequence[EffectRecord]:
        """The outbox of a run, in program order; a fork has none of its parent's rows.

        Raises:
            UnknownRunError: no such run.
            DecodingError: a row is damaged.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_READ) as connection:
            stem = self._stem(connection, run_id)
            rows = connection.execute(_EFFECTS, (stem.number,)).fetchall()
        effects = [effect_of(row, f"an effect of run {run_id!r}") for row in rows]
        return tuple(sorted(effects, key=lambda effect: effect.position))

    def fork(
        self, run_id: str, version: int, new_run_id: str, owner: str, effects: Sequence[EffectRecord] = ()
    ) -> Lease:
        """A new run whose history begins with the first ``version`` entries of another; no entry is copied.

        Its outbox begins with ``effects``: there is no fork without them, whatever happens.

        Raises:
            UnknownRunError: no such run.
            RunExistsError: the new id is taken.
            VersionGoneError: that version does not exist, or was collected.
            UnsupportedValueError: SQLite cannot hold an effect.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, run_id)
            _check_version(connection, stem, run_id, version, _head(connection, stem))
            for segment in stem.segments(0, version):
                versions = connection.execute(
                    "SELECT version FROM entries WHERE run = ? AND version > ? AND version <= ? ORDER BY version",
                    segment,
                )
                _all_of(versions.fetchall(), run_id, segment[1], segment[2])
            fixed = connection.execute(
                "SELECT program, fingerprint, arguments FROM runs WHERE id = ?", (stem.number,)
            ).fetchone()
            origin = stem.holder(version).number
            row = (new_run_id, *fixed, self._clock(), stem.number, version, origin)
            lease = self._add(connection, row, RunStatus.RUNNING, owner)
            if effects:
                new = connection.execute("SELECT id FROM runs WHERE run_id = ?", (new_run_id,)).fetchone()[0]
                connection.executemany(_PUT_EFFECT, [effect_row(new, effect) for effect in effects])
            return lease

    def pin(self, run_id: str, version: int) -> None:
        """Keep a version from being collected. Pinning it twice is pinning it once.

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: that version does not exist, or was collected.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, run_id)
            _check_version(connection, stem, run_id, version, _head(connection, stem))
            connection.execute(
                "INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", (stem.holder(version).number, version, stem.number)
            )

    def unpin(self, run_id: str, version: int) -> None:
        """Let a pinned version go; nothing happens when it is not pinned.

        Raises:
            UnknownRunError: no such run.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, run_id)
            connection.execute(
                "DELETE FROM pins WHERE holder = ? AND version = ? AND run = ?",
                (stem.holder(version).number, version, stem.number),
            )

    def collect(self, run_id: str) -> int:
        """Drop what no reader can ask for: state of versions that are neither the head, pinned, nor a fork's origin.

        Of a finished run also the entries after the last version that is pinned or a fork's origin, but never the last
        entry, which holds the result. The freed pages of the file are used again; it does not shrink.

        Returns:
            How many rows were dropped.

        Raises:
            UnknownRunError: no such run.
            StoreUnavailableError: the file cannot be used any more.
        """
        with self._transaction(_WRITE) as connection:
            stem = self._stem(connection, run_id)
            run = stem.number
            head, status = connection.execute("SELECT head, status FROM heads WHERE run = ?", (run,)).fetchone()
            pinned = connection.execute("SELECT version FROM pins WHERE holder = ?", (run,)).fetchall()
            origins = connection.execute("SELECT parent_version FROM runs WHERE origin = ?", (run,)).fetchall()
            kept = retention(head, RunStatus(status), _firsts(pinned), _firsts(origins))
            dropped = _drop_state(connection, run, kept)
            if RunStatus(status) in FINISHED:
                dropped += connection.execute(
                    "DELETE FROM entries WHERE run = ? AND version > ? AND version < ?", (run, kept.entries_until, head)
                ).rowcount
            connection.execute("UPDATE heads SET collected = ? WHERE run = ?", (head, run))
            connection.execute("DELETE FROM kept WHERE run = ?", (run,))
            connection.executemany("INSERT INTO kept VALUES (?, ?)", [(run, version) for version in kept.versions])
            return dropped

    def close(self) -> None:
        """Let go of the file. Every call but this one fails afterwards."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and self._process == os.getpid():
                connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Generator[sqlite3.Connection]:
        with self._lock:
            connection = self._usable()
            try:
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError) as error:
                raise _refused(error) from error
            except sqlite3.Error as error:
                raise StoreUnavailableError(self._path, str(error)) from error
            except (OverflowError, UnicodeEncodeError) as error:
                raise _refused(error) from error

    def _usable(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            # SQLite's locks belong to the process that took them: a copy of the connection would damage the file.
            raise StoreUnavailableError(self._path, "it was opened before this process was forked; open it here anew")
        if self._connection is None:
            raise StoreUnavailableError(self._path, "it was closed")
        return self._connection

    def _add(self, connection: sqlite3.Connection, fixed: tuple[Any, ...], status: RunStatus, owner: str) -> Lease:
        """Add the row of a run, given without id, and its head."""
        run_id, head = fixed[0], fixed[6]
        added = connection.execute(_ADD_RUN, fixed)
        if not added.rowcount:
            raise RunExistsError(run_id)
        expires_at = self._clock() + self._lease_seconds
        connection.execute(_ADD_HEAD, (added.lastrowid, head, status.value, owner, expires_at, head))
        return Lease(run_id, owner, 1, head)

    def _stem(self, connection: sqlite3.Connection, run_id: str) -> Stem:
        stem = self._find(connection, run_id)
        if stem is None:
            raise UnknownRunError(run_id)
        return stem

    def _find(self, connection: sqlite3.Connection, run_id: str) -> Stem | None:
        known = self._stems.get(run_id)
        if known is not None:
            return known
        chain: list[tuple[int, int]] = []
        row = connection.execute("SELECT id, parent_version, origin FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        while row is not None:
            number, base, origin = row
            chain.append((number, base))
            row = connection.execute("SELECT id, parent_version, origin FROM runs WHERE id = ?", (origin,)).fetchone()
        stem: Stem | None = None
        for number, base in reversed(chain):
            stem = Stem(number, base, stem)
        if stem is not None:
            if len(self._stems) >= _MAX_STEMS:
                self._stems.clear()
            self._stems[run_id] = stem
        return stem

    def _refuse(self, connection: sqlite3.Connection, run: int, lease: Lease, parent: int) -> NoReturn:
        """Say why a commit found nothing to change."""
        owner, fence, head = connection.execute("SELECT owner, fence, head FROM heads WHERE run = ?", (run,)).fetchone()
        if owner is None or fence != lease.fence:
            raise StaleOwnerError(lease.run_id, lease.owner, lease.fence)
        raise VersionConflictError(lease.run_id, parent, head)


def _connect(path: str, synchronous: str, busy_seconds: float) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            path, timeout=busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
        )
    except sqlite3.Error as error:
        raise StoreUnavailableError(path, str(error)) from error
    try:
        migrate(connection, path, MIGRATIONS)
        _use_write_ahead_log(connection, path, time.monotonic() + busy_seconds)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnavailableError(path, str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection, path: str, deadline: float) -> None:
    """Switch the file to write-ahead mode, which it stays in.

    SQLite does not wait for other connections here, even where it is told to wait in general. A transaction of our own
    does wait for theirs; after it we try again.
    """
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError:
            if time.monotonic() >= deadline:
                raise
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("ROLLBACK")
        else:
            if mode != "wal":
                raise StoreUnavailableError(path, f"SQLite cannot keep a write-ahead log there (mode {mode!r})")
            return


def _head(connection: sqlite3.Connection, stem: Stem) -> int:
    head: int = connection.execute("SELECT head FROM heads WHERE run = ?", (stem.number,)).fetchone()[0]
    return head


def _check_version(connection: sqlite3.Connection, stem: Stem, run_id: str, version: int, head: int) -> None:
    """Refuse a version whose state is not there. Version 0 always is: it has none."""
    if not 0 <= version <= head:
        raise VersionGoneError(run_id, version, f"there are versions 0 to {head}")
    holder = stem.holder(version).number
    found = connection.execute(
        "SELECT 1 FROM heads WHERE run = ? AND (collected < ? OR ? IN (SELECT version FROM kept WHERE run = ?))",
        (holder, version, version, holder),
    ).fetchone()
    if version > 0 and found is None:
        raise VersionGoneError(run_id, version, "its state was collected")


def _all_of(rows: list[Any], run_id: str, after: int, until: int) -> list[Any]:
    if len(rows) != until - after:
        raise VersionGoneError(run_id, after + 1, f"entries of versions {after + 1} to {until} were collected")
    return rows


def _drop_state(connection: sqlite3.Connection, run: int, kept: Retention) -> int:
    """Delete the rows of a run that no kept version is made of.

    Going back from the head, a row is needed unless its key was replaced after it and up to the kept version before
    which it stands: the next kept version then does not see it, and neither does any later one.
    """
    boundaries = sorted(kept.versions)
    replaced: set[str] = set()
    unneeded: list[tuple[int, int, int]] = []
    rows = connection.execute(
        "SELECT version, ordinal, key, operation FROM state WHERE run = ? ORDER BY version DESC, ordinal DESC", (run,)
    )
    for version, ordinal, key, name in rows:
        while boundaries and boundaries[-1] >= version:
            boundaries.pop()
            replaced.clear()
        if key in replaced:
            unneeded.append((run, version, ordinal))
        elif not _OPERATIONS[name].is_blind:
            replaced.add(key)
    connection.executemany("DELETE FROM state WHERE run = ? AND version = ? AND ordinal = ?", unneeded)
    return len(unneeded)


def _firsts(rows: list[Any]) -> list[int]:
    return [row[0] for row in rows]


def _refused(error: Exception) -> UnsupportedValueError:
    return UnsupportedValueError("a record", "text, bytes or a number that SQLite cannot hold", f"it says: {error}")


__all__ = ["SQLiteStore"]
