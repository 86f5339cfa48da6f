"""Files that are not ours are refused and left alone; older ones of ours are migrated."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import StoreUnavailableError, StoreVersionError
from specflow.history import Commit
from specflow.stores import SQLiteStore, this_owner
from specflow.stores.schema import APPLICATION_ID, MIGRATIONS, Migration, migrate
from specflow.types import Mode
from tests.specflow.stores.worker import RUN, effect, entry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file of a test is."""
    return tmp_path / "runs.db"


def raw(path: Path, *statements: str) -> Any:
    """Carry out statements behind the store's back; the first value of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            row = connection.execute(statement).fetchone()
        return None if row is None else row[0]


# ------------------------------------------------------------------------------------------------------------ bad files


def unusable(path: Path) -> StoreUnavailableError:
    """The error of opening a path that is no store."""
    with pytest.raises(StoreUnavailableError) as caught:
        SQLiteStore(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    """Other people's files are refused and not a byte of them is changed."""
    path.write_text("a diary, page 1\n" * 100)
    content = path.read_bytes()
    assert "not a database" in unusable(path).problem
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    """A SQLite file that holds something else is refused and not changed."""
    raw(path, "CREATE TABLE diary (page)", "INSERT INTO diary VALUES ('1')")
    content = path.read_bytes()
    assert "another program" in unusable(path).problem
    assert path.read_bytes() == content


def test_a_newer_schema_is_refused_before_harm(path: Path) -> None:
    """A file written by a newer version is refused, with both versions named, and not changed."""
    SQLiteStore(path).close()
    raw(path, "PRAGMA user_version = 99")
    content = path.read_bytes()
    with pytest.raises(StoreVersionError) as caught:
        SQLiteStore(path)
    assert (caught.value.found, caught.value.known) == (99, len(MIGRATIONS))
    assert path.read_bytes() == content


def test_places_that_cannot_hold_a_file_are_refused(tmp_path: Path) -> None:
    """A folder, a path in a folder that is missing, and one below a file are refused; nothing is made."""
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, tmp_path / "missing" / "runs.db", file / "runs.db"):
        unusable(path)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_refused(path: Path) -> None:
    """Opening fails where no commit would succeed, instead of the first commit."""
    SQLiteStore(path).close()
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write to anything")
    assert "readonly" in unusable(path).problem


def test_a_file_that_is_locked_for_ever_is_refused(path: Path) -> None:
    """Where another program does not let go of the file, the wait ends after ``busy_seconds``."""
    SQLiteStore(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            SQLiteStore(path, busy_seconds=0.01)
        other.execute("ROLLBACK")
    SQLiteStore(path).close()


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    """A file of no bytes, as tempfile makes it, is as good as none."""
    path.touch()
    with closing(SQLiteStore(path)) as store:
        store.create(RUN, this_owner())
    assert raw(path, "PRAGMA application_id") == APPLICATION_ID


# ---------------------------------------------------------------------------------------------------------- migrations


SECOND: Migration = (
    "ALTER TABLE runs ADD COLUMN label TEXT NOT NULL DEFAULT 'none'",
    "UPDATE runs SET label = 'old ' || run_id",
)


def connect(path: Path) -> sqlite3.Connection:
    """A connection as migrate() wants it."""
    return sqlite3.connect(path, isolation_level=None)


def test_an_older_file_is_migrated(path: Path) -> None:
    """A file of version 1 gets the migrations it lacks, each once, and keeps what it holds."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        store.commit(lease, Commit(0, (entry(1),), (effect(1),)))
    with closing(connect(path)) as connection:
        migrate(connection, str(path), (*MIGRATIONS, SECOND))
        migrate(connection, str(path), (*MIGRATIONS, SECOND))
        assert connection.execute("SELECT label FROM runs").fetchall() == [("old run",)]
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (1,)
    with pytest.raises(StoreVersionError):
        SQLiteStore(path)


def test_a_file_of_version_1_is_read_on(path: Path) -> None:
    """A run that version 1 began, without modes, counts as exact and goes on; what is new has its mode."""
    with closing(connect(path)) as connection:
        migrate(connection, str(path), MIGRATIONS[:1])
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in VERSION_1:
            connection.execute(statement)
    with closing(SQLiteStore(path)) as store:
        assert [(made.step, made.mode) for made in store.entries("run")] == [("step 1", Mode.EXACT)]
        assert [(made.key, made.mode) for made in store.effects("run")] == [("key 1", Mode.EXACT)]
        lease = store.acquire("run", this_owner())
        lossy, sent = replace(entry(2), mode=Mode.LOSSY), replace(effect(2), mode=Mode.DISTRIBUTION)
        assert store.commit(lease, Commit(1, (lossy,), (sent,))) == 2
    with closing(SQLiteStore(path)) as store:
        assert store.entries("run")[1] == lossy
        assert store.effects("run")[1] == sent
    assert raw(path, "PRAGMA user_version") == len(MIGRATIONS)


VERSION_1 = (
    "INSERT INTO runs VALUES (1, 'run', 'module:program', 'fingerprint', x'', 1.0, NULL, 0, NULL)",
    "INSERT INTO heads VALUES (1, 1, 'running', NULL, 1, 0.0, 0)",
    "INSERT INTO entries VALUES (1, 1, '1', 'call', 'step 1', x'', x'31', NULL, x'', x'', x'', 1.0, 0.5)",
    "INSERT INTO outbox VALUES (1, 1, 'key 1', '1', 'send', 'acked', x'', x'31', NULL, 1, 1.0, x'')",
)
"""A run of one entry and one effect, as version 1 of the schema wrote them."""


def test_a_new_file_gets_all_migrations(path: Path) -> None:
    """A new file goes through every version."""
    with closing(connect(path)) as connection:
        migrate(connection, str(path), (*MIGRATIONS, SECOND, ("CREATE TABLE third (x)",)))
        assert connection.execute("SELECT count(*) FROM runs JOIN third").fetchone() == (0,)
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 2,)


def test_a_migration_that_fails_leaves_the_old_version(path: Path) -> None:
    """When a later statement fails, those before it are undone, and the file still works as it was."""
    with closing(SQLiteStore(path)) as store:
        store.create(RUN, this_owner())
    with closing(connect(path)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            migrate(connection, str(path), (*MIGRATIONS, SECOND, ("ALTER TABLE nothing ADD COLUMN x",)))
        assert not connection.in_transaction
    with closing(SQLiteStore(path)) as store:
        assert store.get_run("run").head == 0
