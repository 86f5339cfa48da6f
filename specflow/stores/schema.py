"""The tables of a SQLite store, and how a file of an older version becomes one of this version.

``PRAGMA user_version`` counts the migrations that a file has seen; ``PRAGMA application_id`` tells our files from those
of other programs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ..errors import StoreUnavailableError, StoreVersionError

Migration = Sequence[str]
"""Statements that lift a file by one version. They run in one transaction, with all other migrations that are due."""

APPLICATION_ID = 0x53464C57
"""``SFLW`` in ASCII."""

MIGRATIONS: tuple[Migration, ...] = (
    (
        # One row for each run, written once. `origin` is the run that holds version `parent_version`: the parent, or
        # an ancestor of it where the fork was made before the parent's own first entry.
        """
        CREATE TABLE runs (
            id INTEGER PRIMARY KEY,
            run_id TEXT NOT NULL UNIQUE,
            program TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            arguments BLOB NOT NULL,
            created_at REAL NOT NULL,
            parent INTEGER,
            parent_version INTEGER NOT NULL,
            origin INTEGER
        )
        """,
        "CREATE INDEX forks ON runs (origin, parent_version)",
        # What changes with every commit, apart from the above so that a commit rewrites few bytes. States up to version
        # `collected` exist only where `kept` lists them.
        """
        CREATE TABLE heads (
            run INTEGER PRIMARY KEY,
            head INTEGER NOT NULL,
            status TEXT NOT NULL,
            owner TEXT,
            fence INTEGER NOT NULL,
            expires_at REAL NOT NULL,
            collected INTEGER NOT NULL
        )
        """,
        "CREATE TABLE kept (run INTEGER, version INTEGER, PRIMARY KEY (run, version)) WITHOUT ROWID",
        # The log. `writes`, `branch_writes` and `events` are framed lists of bytes.
        """
        CREATE TABLE entries (
            run INTEGER NOT NULL,
            version INTEGER NOT NULL,
            position TEXT NOT NULL,
            kind TEXT NOT NULL,
            step TEXT NOT NULL,
            arguments BLOB NOT NULL,
            result BLOB,
            error BLOB,
            writes BLOB NOT NULL,
            branch_writes BLOB NOT NULL,
            events BLOB NOT NULL,
            at REAL NOT NULL,
            seconds REAL NOT NULL,
            PRIMARY KEY (run, version)
        ) WITHOUT ROWID
        """,
        # The state as operations: its value at a version is what they make, up to that version. By version and not by
        # key, so that a commit writes at one place.
        """
        CREATE TABLE state (
            run INTEGER NOT NULL,
            version INTEGER NOT NULL,
            ordinal INTEGER NOT NULL,
            key TEXT NOT NULL,
            operation TEXT NOT NULL,
            data BLOB NOT NULL,
            PRIMARY KEY (run, version, ordinal)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE outbox (
            id INTEGER PRIMARY KEY,
            run INTEGER NOT NULL,
            key TEXT NOT NULL,
            position TEXT NOT NULL,
            step TEXT NOT NULL,
            status TEXT NOT NULL,
            arguments BLOB NOT NULL,
            result BLOB,
            error BLOB,
            tries INTEGER NOT NULL,
            at REAL NOT NULL,
            writes BLOB NOT NULL,
            UNIQUE (run, key)
        )
        """,
        # `holder` is the run that holds the version, `run` the one it was pinned through.
        """
        CREATE TABLE pins (
            holder INTEGER NOT NULL,
            version INTEGER NOT NULL,
            run INTEGER NOT NULL,
            PRIMARY KEY (holder, version, run)
        ) WITHOUT ROWID
        """,
    ),
    (
        # Version 2. Under which mode a result was accepted. Files of version 1 do not say: what they hold counts as
        # exact, as it did before.
        "ALTER TABLE entries ADD COLUMN mode TEXT NOT NULL DEFAULT 'exact'",
        "ALTER TABLE outbox ADD COLUMN mode TEXT NOT NULL DEFAULT 'exact'",
    ),
)
"""Migration ``n`` makes version ``n + 1``. Those that were released are never changed."""


def migrate(connection: sqlite3.Connection, place: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Make a file one of the newest version. All or nothing; files that are not ours are left as they are.

    Args:
        connection: in autocommit mode (``isolation_level=None``), with no transaction open.
        place: named in errors.
        migrations: all there are.

    Raises:
        StoreVersionError: the file has seen migrations that are not known here.
        StoreUnavailableError: the file belongs to another program.
        sqlite3.Error: the file cannot be read or written.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = _version(connection, place, len(migrations))
        for migration in migrations[found:]:
            for statement in migration:
                connection.execute(statement)
        # Written even where nothing is new: a file that cannot be written to shows now, not at the first commit.
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("ROLLBACK" if found == len(migrations) else "COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection, place: str, known: int) -> int:
    """How many of the known migrations the file has seen."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID and (application != 0 or tables):
        raise StoreUnavailableError(place, "it is a SQLite file of another program")
    if version > known:
        raise StoreVersionError(place, version, known)
    return version


__all__ = ["APPLICATION_ID", "MIGRATIONS", "Migration", "migrate"]
