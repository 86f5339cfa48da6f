"""One owner at a time: leases, fences, late writes of those who lost the run, and finding runs whose owner died."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from specflow.definitions import Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import RunBusyError, RunExistsError, StaleOwnerError, StoreUnavailableError, UnknownRunError
from specflow.history import Commit, EffectStatus, Lease, RunRecord, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import CommittedEvent, resume, run
from specflow.stores import MemoryStore, SQLiteStore, this_owner
from specflow.testing import ManualClock
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    Guesses,
    PowerCutError,
    World,
    WrappedStore,
    has_entry,
    history,
    jumping,
    rows_of,
    settle,
)

pytestmark = pytest.mark.anyio

ELSEWHERE = "another-machine:1:1:cafe"
"""An owner of whom nobody here can know whether it is alive."""


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Both stores."""
    return MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")


class Elsewhere(WrappedStore):
    """The same store as another machine sees it: leases taken through it have a foreign owner."""

    def create(self, run: RunRecord, owner: str) -> Lease:
        """Create for the other machine."""
        lease: Lease = self.inner.create(run, ELSEWHERE)
        return lease

    def acquire(self, run_id: str, owner: str, *, take_over: bool = False) -> Lease:
        """Acquire for the other machine."""
        lease: Lease = self.inner.acquire(run_id, ELSEWHERE, take_over=take_over)
        return lease


class Two:
    """A program of two effects with a gate in each, of which every execution counts."""

    def __init__(self) -> None:
        self.world = World()
        self.gates = {"one": Gate(), "two": Gate()}

        @step(effect=Effect.IDEMPOTENT)
        async def act(name: str) -> str:
            self.world.see(name)
            await self.gates[name].pass_through()
            return name

        @workflow
        async def program(ctx: Context) -> list[str]:
            return [await ctx.call(act, "one"), await ctx.call(act, "two")]

        self.program = program

    def open(self) -> None:
        """Open both gates."""
        for gate in self.gates.values():
            gate.open()


async def outcome_of(outcomes: list[Any], *args: Any, **settings: Any) -> None:
    """Run, and keep the value or the error."""
    try:
        outcomes.append((await run(*args, **settings)).value)
    except Exception as error:  # noqa: BLE001 -- what a run raises is what the test looks at
        outcomes.append(error)


# -------------------------------------------------------------------------------------------------- one run, one owner


async def test_a_second_run_with_the_same_id_is_refused(store: Any) -> None:
    """While it runs and after it ended, a run's id cannot be used again, and nothing of the run is touched."""
    two = Two()
    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, two.program, store=store, run_id="r"))
        await two.gates["one"].reached.wait()
        with pytest.raises(RunExistsError) as caught:
            await run(two.program, store=store, run_id="r")
        assert caught.value.run_id == "r"
        two.open()
    assert outcomes == [["one", "two"]]
    assert two.world.seen == ["one", "two"]
    before = history(store, "r")
    with pytest.raises(RunExistsError):
        await run(two.program, store=store, run_id="r")
    assert history(store, "r") == before


async def test_a_live_run_cannot_be_resumed(store: Any) -> None:
    """Recovery that meets a run which is alive in this very process leaves it alone."""
    two = Two()
    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, two.program, store=store, run_id="r"))
        await two.gates["one"].reached.wait()
        with pytest.raises(RunBusyError) as caught:
            await resume("r", store=store, program=two.program)
        assert caught.value.run_id == "r"
        assert caught.value.owner == this_owner()
        two.open()
    assert outcomes == [["one", "two"]]
    assert two.world.seen == ["one", "two"]
    assert (await resume("r", store=store, program=two.program)).value == ["one", "two"]
    assert two.world.seen == ["one", "two"]


async def test_whoever_lost_the_run_writes_nothing_more(store: Any) -> None:
    """After a take-over the old owner dies with StaleOwnerError at its next write and starts no further step."""
    two = Two()
    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, two.program, store=store, run_id="r"))
        await two.gates["one"].reached.wait()

        async def take_over() -> None:
            result = await resume("r", store=store, program=two.program, take_over=True)
            outcomes.append(result.value)

        other = Two()
        # The new owner runs its own copy of the program, so that the two are told apart by what they did.
        other.world = two.world
        lease = store.acquire("r", this_owner(), take_over=True)
        two.open()
        await settle()
        assert isinstance(outcomes[0], StaleOwnerError)
        assert outcomes[0].run_id == "r"
        assert store.entries("r") == ()
        assert two.world.seen == ["one"]
        assert store.get_run("r").owner == lease.owner  # the loser did not give the winner's lease back
        store.release(lease)
        await take_over()
    assert outcomes[1] == ["one", "two"]
    assert two.world.seen == ["one", "one", "two"]


async def test_a_take_over_by_resume_leaves_one_owner(store: Any) -> None:
    """With ``take_over`` a live run is resumed: the new owner finishes it once, the old one ends with an error."""
    two = Two()
    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, two.program, store=store, run_id="r"))
        await two.gates["one"].reached.wait()

        async def take_over() -> None:
            outcomes.append((await resume("r", store=store, program=two.program, take_over=True)).value)

        group.start_soon(take_over)
        await settle()
        two.open()
    assert min(map(str, outcomes), key=len) == "['one', 'two']"
    (error,) = [outcome for outcome in outcomes if not isinstance(outcome, list)]
    assert isinstance(error, StaleOwnerError)
    assert two.world.counts() == {"one": 2, "two": 1}  # the loser's second step never began
    assert [entry.step.rsplit(".", 1)[-1] for entry in store.entries("r")] == ["act", "act", "program"]
    assert store.get_run("r").owner is None


async def test_a_late_write_of_a_replaced_run_is_refused(store: Any) -> None:
    """A commit that was held up while the run was taken over changes nothing when it lands."""

    class Slow(WrappedStore):
        """Hands a commit over only after somebody else took the run."""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Land late."""
            if has_entry("act")(commit) and self.inner.get_run("r").head == 0:
                newer = self.inner.acquire("r", ELSEWHERE, take_over=True)
                self.inner.commit(newer, Commit(0, status=RunStatus.BLOCKED))
                self.inner.release(newer)
            head: int = self.inner.commit(lease, commit)
            return head

    two = Two()
    two.open()
    with pytest.raises(StaleOwnerError):
        await run(two.program, store=Slow(store), run_id="r")
    assert store.entries("r") == ()
    assert store.get_run("r").status is RunStatus.BLOCKED
    assert {row.status for row in rows_of(store, "r", "act")} == {EffectStatus.SENT}


async def test_an_unfenced_store_would_be_noticed() -> None:
    """The check above has teeth: with a store that ignores fences the late write lands."""

    class Unfenced(WrappedStore):
        """Takes every write for the newest owner's."""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Commit under whatever lease is the newest."""
            newest = self.inner.acquire("r", ELSEWHERE, take_over=True)
            head: int = self.inner.commit(newest, replace(commit, parent=newest.head))
            return head

    inner = MemoryStore()
    two = Two()
    two.open()
    assert (await run(two.program, store=Unfenced(inner), run_id="r")).value == ["one", "two"]
    assert len(inner.entries("r")) == 3


async def test_steps_running_ahead_stop_with_the_owner(store: Any) -> None:
    """Whoever lost the run stops its speculative attempts as well: nothing of it is left when the error is raised."""
    asked, ahead = Gate(), Gate()
    left: list[str] = []

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await asked.pass_through()
        return "yes"

    @step(effect=Effect.READONLY)
    async def look() -> None:
        try:
            await ahead.pass_through()
        finally:
            left.append("look")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(ask)
        await ctx.call(look)

    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, program, store=store, run_id="r", policy=Fixed(2)))
        await ahead.reached.wait()
        store.release(store.acquire("r", this_owner(), take_over=True))
        asked.open()
    assert isinstance(outcomes[0], StaleOwnerError)
    assert left == ["look"]


async def test_an_unknown_run_cannot_be_resumed(store: Any) -> None:
    """Resuming something that never was names it."""
    with pytest.raises(UnknownRunError, match="nobody"):
        await resume("nobody", store=store)


@pytest.mark.parametrize("failure", ["step", "program", "store", "observer"])
async def test_the_lease_is_given_back_however_a_run_ends(store: Any, failure: str) -> None:
    """After an error in a step, the program, the store or an observer the run is free at once."""

    @step(effect=Effect.PURE)
    async def work() -> None:
        if failure == "step":
            raise LookupError

    @workflow
    async def program(ctx: Context) -> None:
        ctx.emit("begun")
        await ctx.call(work)
        if failure == "program":
            raise LookupError

    class Refusing(WrappedStore):
        """Cannot write."""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Refuse."""
            raise StoreUnavailableError("here", "the disk is full")

    def observe(event: Any) -> None:
        assert isinstance(event, CommittedEvent)
        if failure == "observer":
            raise LookupError

    used = Refusing(store) if failure == "store" else store
    with pytest.raises((LookupError, StoreUnavailableError)):
        await run(program, store=used, run_id="r", on_event=observe)
    assert store.get_run("r").owner is None


# --------------------------------------------------------------------------------------------------------- expiry


def clocked(kind: str, tmp_path: Path, clock: ManualClock) -> Any:
    """A store whose leases hold for 30 seconds of a manual clock."""
    if kind == "memory":
        return MemoryStore(lease_seconds=30.0, clock=clock)
    return SQLiteStore(tmp_path / "runs.db", lease_seconds=30.0, clock=clock)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_lease_of_another_machine_holds_until_it_expires(kind: str, tmp_path: Path) -> None:
    """Of an owner elsewhere nobody knows whether it lives: its run is busy for the lease, and free after it."""
    clock = ManualClock(1e9)
    store = clocked(kind, tmp_path, clock)
    two = Two()
    two.open()
    dying = DyingStore(has_entry("program"), inner=store)
    dying.release = lambda lease: None  # type: ignore[attr-defined]  # a machine that is gone gives nothing back
    with pytest.raises(PowerCutError):
        await run(two.program, store=Elsewhere(dying), run_id="r")
    assert store.get_run("r").owner == ELSEWHERE
    clock.advance(29.0)
    with pytest.raises(RunBusyError) as caught:
        await resume("r", store=store, program=two.program)
    assert caught.value.owner == ELSEWHERE
    clock.advance(2.0)
    assert (await resume("r", store=store, program=two.program)).value == ["one", "two"]
    assert two.world.counts() == {"one": 1, "two": 2}  # the answer of the second was lost with the machine


@jumping
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("retrying", [True, False])
async def test_a_lease_is_renewed_while_a_long_step_runs(kind: str, tmp_path: Path, *, retrying: bool) -> None:
    """A step, or a wait between its tries, may last many times longer than the lease: nobody can take the run."""
    tries = 0

    def now() -> float:
        return 1e9 + trio.current_time()

    store = (
        MemoryStore(lease_seconds=30.0, clock=now)
        if kind == "memory"
        else SQLiteStore(tmp_path / "runs.db", lease_seconds=30.0, clock=now)
    )
    refused = 0

    @step(effect=Effect.READONLY, retry=Retry(attempts=2, wait=600.0, max_wait=600.0))
    async def work() -> str:
        nonlocal tries
        tries += 1
        if retrying and tries == 1:
            raise ConnectionError
        if not retrying:
            await anyio.sleep(600.0)
        return "done"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(work)

    outcomes: list[Any] = []

    async def drive() -> None:
        outcomes.append((await run(program, store=Elsewhere(store), run_id="r")).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        for _ in range(10):
            await anyio.sleep(55.0)
            try:
                store.acquire("r", this_owner())
            except RunBusyError:
                refused += 1
    assert refused == 10
    assert outcomes == ["done"]


@jumping
async def test_whoever_cannot_renew_stops() -> None:
    """An owner whose lease was taken meanwhile learns it from the next renewal, without waiting for its step."""
    store = MemoryStore(lease_seconds=30.0, clock=lambda: 1e9 + trio.current_time())
    left: list[float] = []

    @step(effect=Effect.READONLY)
    async def work(index: int) -> None:
        try:
            await anyio.sleep(3600.0)
        finally:
            left.append(trio.current_time())

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.map(work, range(2))

    outcomes: list[Any] = []
    began = trio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: outcome_of(outcomes, program, store=Elsewhere(store), run_id="r"))
        await anyio.sleep(1.0)
        store.acquire("r", this_owner(), take_over=True)
    assert isinstance(outcomes[0], StaleOwnerError)
    assert len(left) == 2
    assert max(left) - began <= 30.0


# ---------------------------------------------------------------------------------------------------- other processes

_OTHER = """
import os, signal, sys
import anyio
from specflow.definitions import step, workflow
from specflow.effects import Effect
from specflow.runtime import run, resume
from specflow.stores import SQLiteStore

@step(effect=Effect.IDEMPOTENT, name="test:count")
async def count(index: int) -> int:
    with open(sys.argv[2], "a") as file:
        file.write(f"{index} {os.getpid()}\\n")
    if index == 1 and sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 1 and sys.argv[3] == "wait":
        print("reached", flush=True)
        sys.stdin.readline()
    return index

@workflow
async def program(ctx):
    return [await ctx.call(count, index) for index in range(3)]

program.name = "test:program"
program.fingerprint = "1"

async def main():
    store = SQLiteStore(sys.argv[1])
    try:
        print("value", (await run(program, store=store, run_id="r")).value, flush=True)
    except BaseException as error:
        print("error", type(error).__name__, flush=True)

anyio.run(main)
"""


def other_process(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    """Start a process that runs three steps and dies, or waits to be told, in the second."""
    script = tmp_path / "other.py"
    script.write_text(textwrap.dedent(_OTHER))
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs.db"), str(tmp_path / "log"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
    )


def here(tmp_path: Path) -> tuple[Any, list[str]]:
    """The same program in this process, and where its steps write."""

    @step(effect=Effect.IDEMPOTENT, name="test:count")
    async def count(index: int) -> int:
        with (tmp_path / "log").open("a") as file:
            file.write(f"{index} here\n")
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return [await ctx.call(count, index) for index in range(3)]

    program.name = "test:program"
    program.fingerprint = "1"
    return program, []


async def test_the_run_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    """The operating system says that the owner is gone: nobody waits for its lease to expire."""
    with other_process(tmp_path, "die") as other:
        other.communicate()
    assert other.returncode == -9
    program, _ = here(tmp_path)
    store = SQLiteStore(tmp_path / "runs.db", lease_seconds=1e6)
    record = store.get_run("r")
    assert record.owner is not None
    assert record.status is RunStatus.RUNNING
    assert (await resume("r", store=store, program=program)).value == [0, 1, 2]
    assert store.get_run("r").status is RunStatus.COMPLETED
    assert store.get_run("r").owner is None
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [index for index, _who in log] == ["0", "1", "1", "2"]
    assert [who for _index, who in log][2:] == ["here", "here"]
    store.close()


async def test_two_processes_never_both_run(tmp_path: Path) -> None:
    """A live owner in another process keeps the run; once it was taken over, its next write is refused and it stops."""
    program, _ = here(tmp_path)
    with other_process(tmp_path, "wait") as other:
        assert other.stdout is not None
        assert (await anyio.to_thread.run_sync(other.stdout.readline)) == "reached\n"
        store = SQLiteStore(tmp_path / "runs.db")
        with pytest.raises(RunBusyError):
            await resume("r", store=store, program=program)
        with pytest.raises(RunExistsError):
            await run(program, store=store, run_id="r")
        assert (await resume("r", store=store, program=program, take_over=True)).value == [0, 1, 2]
        output, _ = await anyio.to_thread.run_sync(lambda: other.communicate("go on\n"))
    assert output == "error StaleOwnerError\n"
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [index for index, who in log if who != "here"] == ["0", "1"]
    assert [index for index, who in log if who == "here"] == ["1", "2"]
    assert len(store.entries("r")) == 4
    store.close()
