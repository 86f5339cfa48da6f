"""The SQLite store keeps every promise of the protocol, refuses what it cannot hold, and stays small."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from specflow.codec import decode, encode
from specflow.errors import (
    DecodingError,
    InvalidSettingError,
    StaleOwnerError,
    StoreUnavailableError,
    UnsupportedValueError,
)
from specflow.history import Commit, Entry, EntryKind, Operation, RunRecord, Write
from specflow.protocols import Store
from specflow.stores import SQLiteStore, this_owner
from specflow.stores.conformance import StoreConformance
from specflow.testing import ManualClock
from tests.specflow.stores.worker import RUN, effect, entry


class ClockedStore(SQLiteStore):
    """A store whose time stands still until it is moved."""

    def __init__(self, path: Path, time: ManualClock) -> None:
        self.path = path
        self.time = time
        super().__init__(path, clock=time)


class TestSQLiteStore(StoreConformance):
    """The public suite."""

    durable = True
    multi_process = True
    random_lives = settings(StoreConformance.random_lives, max_examples=12)  # each makes and opens files

    def make_store(self, tmp_path: Path) -> Store:
        """A new file."""
        return ClockedStore(tmp_path / "runs.db", ManualClock(1e9))

    def reopen(self, store: Store) -> Store:
        """The same file and clock."""
        assert isinstance(store, ClockedStore)
        return ClockedStore(store.path, store.time)

    def expire_leases(self, store: Store) -> bool:
        """Move the clock far ahead."""
        assert isinstance(store, ClockedStore)
        store.time.advance(1000.0)
        return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file of a test is."""
    return tmp_path / "runs.db"


def small_entry(*writes: Write) -> Entry:
    """An entry with few bytes of its own."""
    return Entry((1,), EntryKind.CALL, "s", b"", b"", None, writes)


def raw(path: Path, *statements: str) -> Any:
    """Carry out statements behind the store's back; the first value of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            row = connection.execute(statement).fetchone()
        return None if row is None else row[0]


def test_a_closed_store_says_so(path: Path) -> None:
    """After close every call is refused, and closing again does nothing."""
    store = SQLiteStore(path)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.list_runs()


@pytest.mark.parametrize(
    ("name", "setting"), [("synchronous", "OFF"), ("lease_seconds", 0.0), ("lease_seconds", float("nan"))]
)
def test_settings_that_cannot_work_are_named(name: str, setting: Any, path: Path) -> None:
    """A wrong setting is refused before a file is made."""
    with pytest.raises(InvalidSettingError, match=name):
        SQLiteStore(path, **{name: setting})
    assert not path.exists()


def test_memory_is_no_path() -> None:
    """What SQLite takes for a database in memory is refused, and MemoryStore named."""
    with pytest.raises(InvalidSettingError, match="MemoryStore"):
        SQLiteStore(":memory:")


@pytest.mark.parametrize(("synchronous", "level"), [("NORMAL", 1), ("FULL", 2)])
def test_synchronous_reaches_sqlite(synchronous: Any, level: int, path: Path) -> None:
    """The file is in write-ahead mode and commits wait for the disk as was asked for."""
    with closing(SQLiteStore(path, synchronous=synchronous)) as store:
        assert store._connection is not None
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (level,)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# ---------------------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    "wrong",
    [
        replace(small_entry(), step="\ud800"),
        small_entry(Write("\ud800", Operation.PUT, b"")),
        replace(small_entry(), arguments=object()),
        replace(small_entry(), result=2**70),
    ],
    ids=["step", "key", "type", "number"],
)
def test_what_sqlite_cannot_hold_is_refused_whole(wrong: Entry, path: Path) -> None:
    """A commit with text or a number that SQLite has no place for is refused, and the store goes on."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        with pytest.raises(UnsupportedValueError):
            store.commit(lease, Commit(0, (entry(1), wrong), (effect(1),)))
        assert (store.entries("run"), store.effects("run"), store.get_run("run").head) == ((), (), 0)
        assert store.commit(lease, Commit(0, (entry(1),))) == 1


@pytest.mark.parametrize(
    ("damage", "reader"),
    [
        ("UPDATE entries SET kind = 'daydream'", "entries"),
        ("UPDATE entries SET position = 'here'", "entries"),
        ("UPDATE entries SET writes = x'ffffff7f'", "entries"),
        ("UPDATE entries SET writes = x'0100000061'", "entries"),
        ("UPDATE outbox SET status = 'lost'", "effects"),
        ("UPDATE heads SET status = 'lost'", "get_run"),
    ],
)
def test_damaged_rows_are_not_taken_for_values(damage: str, reader: str, path: Path) -> None:
    """Where a row does not give a value, the error says of which run."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        store.commit(lease, Commit(0, (entry(1),), (effect(1),)))
        raw(path, damage)
        with pytest.raises(DecodingError, match="run 'run'"):
            getattr(store, reader)("run")


# ---------------------------------------------------------------------------------------------------------------- size


def test_bytes_per_append_stay_flat(path: Path) -> None:
    """Ten thousand commits that append to one list take as many pages each at the end as in the beginning."""
    sizes: list[int] = []
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
        for number in range(10_001):
            if number % 2000 == 0:
                sizes.append(raw(path, "PRAGMA page_count"))
            store.commit(lease, Commit(number, (small_entry(Write("log", Operation.APPEND, encode(number))),)))
        assert decode(store.state("run")["log"]) == list(range(10_001))
    steps = [after - before for before, after in pairwise(sizes)]
    assert max(steps) < 1.5 * min(steps), steps


def test_collecting_makes_room(path: Path) -> None:
    """The pages of states that were dropped are used for the next ones: the file stays as it is."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
        sizes = []
        for _ in range(6):
            head = store.get_run("run").head
            big = tuple(replace(small_entry(), branch_writes=()) for _ in range(20))
            wide = tuple(replace(made, writes=(Write("big", Operation.PUT, os.urandom(20_000)),)) for made in big)
            store.commit(lease, Commit(head, wide))
            store.collect("run")
            sizes.append(raw(path, "SELECT sum(length(data)) FROM state"))
        assert sizes == [20_000] * 6


def test_a_commit_is_six_statements(path: Path) -> None:
    """A commit of one entry with a write and an effect asks SQLite six things, so that its cost stays where it is."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        store.commit(lease, Commit(0, (entry(1),)))
        asked: list[str] = []
        assert store._connection is not None
        store._connection.set_trace_callback(asked.append)
        store.commit(lease, Commit(1, (small_entry(Write("x", Operation.PUT, b"1")),), (effect(2),)))
        assert len(asked) == 6, asked


def test_stale_owners_are_refused_whatever_they_bring(path: Path) -> None:
    """An owner that was superseded gets the same error for a conflict, an effect and a status: it is told to stop."""
    with closing(SQLiteStore(path)) as store:
        old = store.create(RUN, this_owner())
        store.acquire("run", this_owner(), take_over=True)
        for commit in (Commit(0, (entry(1),)), Commit(7, (entry(8),)), Commit(0, effects=(effect(1),))):
            with pytest.raises(StaleOwnerError):
                store.commit(old, commit)
