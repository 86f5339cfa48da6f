"""Whatever dies, tears or gets in between, a SQLite store holds a prefix of what was to be committed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specflow.codec import decode
from specflow.errors import RunBusyError
from specflow.history import Commit
from specflow.protocols import Store
from specflow.stores import SQLiteStore, this_owner
from specflow.testing import ManualClock
from tests.specflow.stores.worker import RUN, TwoSteps, effect, entry, history

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file of a test is."""
    return tmp_path / "runs.db"


@contextmanager
def worker(path: Path, command: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, which is gone at the end."""
    line = [sys.executable, str(WORKER), str(path), command, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=path.parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_worker(path: Path, command: str, *arguments: object) -> tuple[list[int], int]:
    """What a worker said, and how it ended."""
    with worker(path, command, *arguments) as process:
        said, _ = process.communicate(timeout=60)
    return [int(line) for line in said.split()], process.returncode


def commits_to(head: int) -> list[Commit]:
    """The commits of the workers' run up to a head; fails where none of them ends there."""
    commits: list[Commit] = []
    for commit in history():
        if commit.parent >= head:
            break
        commits.append(commit)
    assert sum(len(commit.entries) for commit in commits) == head, f"{head} is in the middle of a commit"
    return commits


def assert_prefix(path: Path) -> int:
    """Open the file as the next process would, and compare all of it with the workers' run up to its head.

    Returns:
        The head.
    """
    with closing(SQLiteStore(path)) as store:
        if not store.list_runs():
            return 0
        head = store.get_run("run").head
        commits = commits_to(head)
        assert list(store.entries("run")) == [made for commit in commits for made in commit.entries]
        assert list(store.effects("run")) == [made for commit in commits for made in commit.effects]
        for version in {0, head // 2, head - 1, head} - {-1}:
            expected = {"log": list(range(1, version + 1)), "last": version, "sum": version * (version + 1) // 2}
            found = {key: decode(data) for key, data in store.state("run", version).items()}
            assert found == (expected if version else {})
        lease = store.acquire("run", this_owner())  # at once: nobody lives who has it
        assert lease.head == head
        store.release(lease)
        return head


def raw(path: Path, *statements: str) -> Any:
    """Carry out statements behind the store's back; the first value of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            row = connection.execute(statement).fetchone()
        return None if row is None else row[0]


# --------------------------------------------------------------------------------------------------------------- death


STATEMENTS = [
    "BEGIN IMMEDIATE",
    "UPDATE heads",
    "INSERT INTO entries",
    "INSERT INTO state",
    "INSERT INTO outbox",
    "COMMIT",
]


@pytest.mark.parametrize("label", STATEMENTS)
def test_death_before_a_statement_leaves_what_was_said(label: str, path: Path) -> None:
    """A process killed before any statement of a commit leaves exactly the commits that it had said were made."""
    said, code = run_worker(path, "write", label, 9)
    assert code == -signal.SIGKILL
    assert said
    assert assert_prefix(path) == said[-1]


def test_death_after_a_commit_leaves_that_commit(path: Path) -> None:
    """A process killed when a commit has returned, before it could say so, leaves that commit too."""
    said, code = run_worker(path, "write", "after", 5)
    assert (said, code) == ([1, 3, 6, 7], -signal.SIGKILL)
    assert assert_prefix(path) == 9


def test_a_store_that_commits_in_two_steps_is_noticed(path: Path) -> None:
    """The comparison above fails for a store that can die between the entries and the effects of a commit."""
    said, code = run_worker(path, "write-in-two-steps", "INSERT INTO outbox", 5)
    assert (said[-1], code) == (7, -signal.SIGKILL)
    with pytest.raises(AssertionError):
        assert_prefix(path)


def die_at_random(path: Path, rounds: int, seed: int) -> None:
    """Kill a writing process again and again, each time after it has said a random number of words."""
    draw = random.Random(seed)
    head = 0
    for _ in range(rounds):
        with worker(path, "write", "never", 0) as process:
            assert process.stdout is not None
            for _ in range(draw.randint(1, 60)):
                head = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().splitlines()
        head = int(rest[-1]) if rest else head
        found = assert_prefix(path)
        assert found == head or commits_to(found)[-1].parent == head, "it said one commit less at most"
        head = found


def test_death_at_random_instants_leaves_a_prefix(path: Path) -> None:
    """However a writing process is killed, the next one finds whole commits, all that were said to be made."""
    die_at_random(path, rounds=4, seed=random.randrange(2**32))


@pytest.mark.slow
def test_death_at_many_random_instants_leaves_a_prefix(path: Path) -> None:
    """The same, fifty times on one file."""
    die_at_random(path, rounds=50, seed=random.randrange(2**32))


@pytest.mark.parametrize(
    ("label", "count"), [("DELETE FROM state", 1), ("DELETE FROM state", 7), ("UPDATE heads", 1), ("COMMIT", 1)]
)
def test_death_while_collecting_drops_nothing(label: str, count: int, path: Path) -> None:
    """A process killed in the middle of a collect leaves every version readable."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        for commit in commits_to(12):
            store.commit(lease, commit)
        states = [store.state("run", version) for version in range(13)]
        store.release(lease)
    said, code = run_worker(path, "collect", label, count)
    assert (said, code) == ([], -signal.SIGKILL)
    with closing(SQLiteStore(path)) as store:
        assert [store.state("run", version) for version in range(13)] == states
        assert store.collect("run") > 0, "the collect that was interrupted had something to drop"
        assert store.state("run") == states[12]


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("INSERT INTO runs", 1),
        ("INSERT INTO heads", 1),
        ("INSERT INTO outbox", 1),
        ("INSERT INTO outbox", 2),
        ("COMMIT", 1),
    ],
)
def test_death_while_forking_leaves_no_half_fork(label: str, count: int, path: Path) -> None:
    """A process killed at any statement of a fork leaves none: never one that lacks the effects it takes over."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, this_owner())
        for commit in commits_to(3):
            store.commit(lease, commit)
        store.release(lease)
    said, code = run_worker(path, "fork-run", label, count)
    assert (said, code) == ([], -signal.SIGKILL)
    assert assert_prefix(path) == 3
    with closing(SQLiteStore(path)) as store:
        assert [run.run_id for run in store.list_runs()] == ["run"]
    assert run_worker(path, "fork-run", "never", 1) == ([], 0)
    with closing(SQLiteStore(path)) as store:
        assert list(store.effects("fork")) == [effect(7), effect(8)]


# ---------------------------------------------------------------------------------------------------------- torn files


def fast_folder() -> str | None:
    """A folder in memory where there is one: these tests write thousands of files that nobody needs."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 -- made safely by tempfile


class Torn:
    """A file whose last transaction is in the write-ahead log, and what it looks like before and after that."""

    def __init__(self, folder: Path, kind: type[SQLiteStore] = SQLiteStore) -> None:
        self._copy = folder / "copy.db"
        path = folder / "runs.db"
        raw(path, "PRAGMA page_size = 512", "VACUUM")  # small pages: few bytes to tear at
        with closing(kind(path)) as store:
            lease = store.create(RUN, this_owner())
            log = Path(f"{path}-wal")
            for commit in commits_to(3):
                store.commit(lease, commit)
            self.before, self.start = self.look(store), log.stat().st_size
            store.commit(lease, Commit(3, (entry(4),), (effect(4),)))
            self.after = self.look(store)
            self.database, self.log = path.read_bytes(), log.read_bytes()

    def look(self, store: Store) -> object:
        """Everything there is to see."""
        head = store.get_run("run").head
        return head, store.entries("run"), store.effects("run"), [store.state("run", v) for v in range(head + 1)]

    def reopened(self, log: bytes) -> object:
        """What the next process sees when this is left of the log."""
        self._copy.write_bytes(self.database)
        Path(f"{self._copy}-wal").write_bytes(log)
        with closing(SQLiteStore(self._copy)) as store:
            return self.look(store)


def cut_at(places: int) -> None:
    """Cut the log at every ``places``-th byte of the last transaction, and at its end."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        torn = Torn(Path(folder))
        assert torn.start < len(torn.log)
        for size in range(torn.start, len(torn.log), places):
            assert torn.reopened(torn.log[:size]) == torn.before, size
        assert torn.reopened(torn.log[:-1]) == torn.before
        assert torn.reopened(torn.log) == torn.after


def test_a_log_cut_anywhere_gives_the_last_state_or_the_one_before() -> None:
    """Whatever byte of the last transaction is the last one on the disk, the commit is there whole or not at all."""
    cut_at(7)  # prime to the lengths of pages and frames, so that all kinds of places are among them


@pytest.mark.slow
def test_a_log_cut_at_any_byte_gives_the_last_state_or_the_one_before() -> None:
    """The same for every single byte."""
    cut_at(1)


def test_a_log_of_two_steps_is_noticed() -> None:
    """A store that makes two transactions of one commit shows a third state at some cut."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        torn = Torn(Path(folder), TwoSteps)
        seen = [torn.reopened(torn.log[:size]) for size in range(torn.start, len(torn.log), 100)]
        assert any(state not in (torn.before, torn.after) for state in seen)


def test_a_log_with_a_wrong_byte_gives_the_state_before() -> None:
    """A byte of the last transaction that was not written as it should be takes the whole commit away, no more."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        torn = Torn(Path(folder))
        for place in range(torn.start, len(torn.log), 29):
            damaged = bytearray(torn.log)
            damaged[place] ^= 0x40
            assert torn.reopened(bytes(damaged)) == torn.before, place


# ------------------------------------------------------------------------------------------------- several processes


def go(processes: Sequence[subprocess.Popen[str]]) -> list[list[int]]:
    """Let workers that wait begin, all at once, and return what each of them says."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [[int(line) for line in lines.split()] for lines in said]


def assert_each_version_has_one_maker(path: Path, made: dict[str, list[int]], goal: int) -> None:
    """The versions that processes say they made are all there are, each once, and the history says the same."""
    assert sorted(version for versions in made.values() for version in versions) == list(range(1, goal + 1))
    with closing(SQLiteStore(path)) as store:
        steps = {version: written.step for version, written in enumerate(store.entries("run"), start=1)}
        assert steps == {version: name for name, versions in made.items() for version in versions}
        assert decode(store.state("run")["log"]) == list(range(1, goal + 1))


def test_processes_that_race_win_each_version_once(path: Path) -> None:
    """Of two processes that write with one lease, exactly one makes each version."""
    with closing(SQLiteStore(path)) as store:
        lease = store.create(RUN, "everybody")
    with (
        worker(path, "race", "one", 300, lease.fence) as one,
        worker(path, "race", "two", 300, lease.fence) as two,
    ):
        made = dict(zip(("one", "two"), go([one, two]), strict=True))
    assert_each_version_has_one_maker(path, made, 300)


def test_processes_that_fight_lose_nothing(path: Path) -> None:
    """Of two processes that take a run from each other, the last one writes, and no commit is lost or doubled."""
    with closing(SQLiteStore(path)) as store:
        store.release(store.create(RUN, this_owner()))
    with worker(path, "fight", "one", 60) as one, worker(path, "fight", "two", 60) as two:
        made = dict(zip(("one", "two"), go([one, two]), strict=True))
    assert_each_version_has_one_maker(path, made, 60)


def test_processes_that_make_the_file_together_agree(path: Path) -> None:
    """Several processes may open a file that none of them has made yet."""
    with (
        worker(path, "open") as one,
        worker(path, "open") as two,
        worker(path, "open") as three,
    ):
        assert go([one, two, three]) == [[], [], []]
    with closing(SQLiteStore(path)) as store:
        assert store.list_runs() == ()


def test_a_run_of_a_living_process_is_busy_and_of_a_killed_one_free(path: Path) -> None:
    """A run cannot be had while the process that has it lives, however late its lease is, and can when it is killed."""
    with worker(path, "pause", 6) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with closing(SQLiteStore(path, clock=ManualClock(1e12))) as store:
            with pytest.raises(RunBusyError) as caught:
                store.acquire("run", this_owner())
            assert f":{process.pid}:" in caught.value.owner
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has taken notice yet
            assert store.acquire("run", this_owner()).fence == 2


def test_a_late_write_of_another_process_is_refused(path: Path) -> None:
    """A process that slept while another one took its run over writes nothing more, and is told to stop."""
    with worker(path, "pause", 6) as process, closing(SQLiteStore(path)) as store:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lease = store.acquire("run", this_owner(), take_over=True)
        assert lease.head == 6
        said, _ = process.communicate("\n", timeout=60)
        assert (said, process.returncode) == ("stale\n", 0)
        assert store.get_run("run").head == 6
        assert store.commit(lease, Commit(6, (entry(7),))) == 7


def test_a_forked_process_does_not_use_its_parents_connection(path: Path) -> None:
    """SQLite files are damaged by connections that cross a fork, so every call is refused there."""
    with worker(path, "fork") as process:
        said, _ = process.communicate(timeout=60)
    assert (said.splitlines(), process.returncode) == (["child: it was opened before this process was forked", "0"], 0)
