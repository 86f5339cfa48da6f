"""A run that is cancelled leaves nothing behind but its history, and goes on from there.

Cancellation is tried at every tick of the event loop, at every event inside a run, and at random.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import EffectUnknownError
from specflow.history import Commit, EffectStatus, Lease, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import NotSent, Sent, resume, run
from specflow.speculation import Call, Prediction
from specflow.state import State
from specflow.stores import MemoryStore, SQLiteStore
from specflow.verifiers import Judge
from tests.specflow.runtime.support import (
    Gate,
    Guesses,
    World,
    WrappedStore,
    history,
    jumping,
    row_of,
    rows_of,
    settle,
    values_of,
)

pytestmark = pytest.mark.anyio

AHEAD = Fixed(3, width=2, effects={Effect.PURE, Effect.READONLY, Effect.BUFFERED, Effect.IDEMPOTENT})


def living_tasks() -> int:
    """Tasks of this event loop, the caller included."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return trio.lowlevel.current_statistics().tasks_living


class Everything:
    """A program with something of everything, and a count of who is at work."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:  # noqa: C901 -- it has many steps
        self.busy = 0
        self.world = World()
        self.begun = 0

        async def at_work(times: int = 1) -> None:
            self.busy += 1
            self.begun += 1
            try:
                tick()
                for _ in range(times):
                    await anyio.lowlevel.checkpoint()
                tick()
            finally:
                self.busy -= 1

        async def probe(key: str, *args: Any) -> Sent | NotSent:
            await anyio.lowlevel.checkpoint()
            return Sent("paid") if key in self.world.keys else NotSent()

        @step(effect=Effect.READONLY, predict=Guesses("a", "b"), name="ask")
        async def ask(index: int) -> str:
            await at_work(3)
            return "b" if index else "a"

        @step(effect=Effect.READONLY, name="look")
        async def look(text: str, state: State) -> str:
            state.append("log", text)
            await at_work(2)
            return text.upper()

        @step(effect=Effect.PURE, name="think")
        async def think(text: str) -> int:
            await at_work()
            return ord(text)

        @step(effect=Effect.IDEMPOTENT, name="put")
        async def put(value: int, attempt: Attempt) -> int:
            await at_work()
            self.world.see(("put", value), attempt.idempotency_key)
            await at_work()
            return value

        @step(effect=Effect.BUFFERED, idempotent=True, name="tell")
        async def tell(text: str, attempt: Attempt) -> None:
            await at_work()
            self.world.see(("tell", text), attempt.idempotency_key)

        @step(probe=probe, name="pay")
        async def pay(attempt: Attempt) -> str:
            await at_work()
            self.world.see("pay", attempt.idempotency_key)
            await at_work()
            return "paid"

        @workflow
        async def branch(ctx: Context, index: int) -> Any:
            answer = await ctx.call(ask, index)
            ctx.state.add("count", 1)
            return await ctx.call(look, answer)

        @workflow
        async def program(ctx: Context) -> Any:
            first = await ctx.call(ask, 0)
            ctx.emit(first)
            await ctx.call(tell, first)
            texts = await ctx.map(branch, range(2))
            await ctx.sleep(0)
            value = await ctx.call(think, await ctx.call(ask, 1))
            await ctx.call(put, value)
            receipt = await ctx.call(pay)
            await ctx.call(tell, receipt)
            return first, texts, value, receipt, ctx.state.get("log"), ctx.state.get("count")

        self.program = program

    VALUE: ClassVar = ("a", ["A", "B"], 98, "paid", ["a", "b"], 2)
    EFFECTS: ClassVar = {("tell", "a"), ("put", 98), "pay", ("tell", "paid")}

    def check_effects(self) -> None:
        """Each effect happened; those that may not be repeated did so once; repeated ones came under one key."""
        counts = self.world.counts()
        assert self.EFFECTS <= set(counts) <= self.EFFECTS | {("put", 97)}  # as listed, idempotent ones run on guesses
        assert counts["pay"] == 1
        assert len(set(self.world.keys)) == len(counts)


async def plain_history() -> list[Any]:
    """The history of a run that nobody disturbs, without any prediction."""
    store = MemoryStore()
    everything = Everything()
    assert (await run(everything.program, store=store, run_id="r", policy=Fixed(0))).value == Everything.VALUE
    everything.check_effects()
    return history(store, "r")


async def check_left(everything: Everything, store: Any, before: int, plain: list[Any]) -> bool:
    """After a cancellation: nothing is alive, the store holds a prefix, and the run can go on. True if it had begun."""
    assert everything.busy == 0
    assert living_tasks() == before
    if not store.list_runs():
        return False
    assert store.get_run("r").owner is None
    kept = history(store, "r")
    assert kept == plain[: len(kept)]
    result = await resume("r", store=store, program=everything.program, policy=AHEAD)
    assert result.value == Everything.VALUE
    assert history(store, "r") == plain
    assert store.get_run("r").status is RunStatus.COMPLETED
    everything.check_effects()
    assert living_tasks() == before
    return True


async def cancelled_after(ticks: int, everything: Everything, store: Any, settings: dict[str, Any]) -> bool:
    """Run for a number of ticks of the event loop. Did the run end before?"""
    finished = False

    async def drive() -> None:
        nonlocal finished
        result = await run(everything.program, store=store, run_id="r", policy=AHEAD, **settings)
        assert result.value == Everything.VALUE
        finished = True

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    return finished


async def test_cancelled_at_every_tick() -> None:
    """At whatever tick a run is cancelled: nothing of it lives on, its history is a prefix, and it can be resumed."""
    plain = await plain_history()
    before = living_tasks()
    begun = 0
    for ticks in range(500):
        everything, store = Everything(), MemoryStore()
        finished = await cancelled_after(ticks, everything, store, {})
        begun += await check_left(everything, store, before, plain)
        if finished:
            break
    else:
        pytest.fail("the run never ended")
    assert begun > 20


@pytest.mark.parametrize("part", range(2))
async def test_a_thousand_random_cancellations(part: int) -> None:
    """At a random tick, then perhaps resumed and cancelled again; with the other tests here more than 1,000 in all."""
    generator = random.Random(part)
    plain = await plain_history()
    before = living_tasks()
    for _ in range(150):
        everything, store = Everything(), MemoryStore()
        await cancelled_after(generator.randrange(80), everything, store, {"limits": {}})
        if not store.list_runs():
            continue
        if generator.random() < 0.3:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def again(everything: Everything = everything, store: Any = store) -> None:
                        await resume("r", store=store, program=everything.program, policy=AHEAD)

                    group.start_soon(again)
                    for _ in range(generator.randrange(40)):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        await check_left(everything, store, before, plain)


async def test_cancelled_at_every_event() -> None:
    """The same, cancelled from inside: before and after every commit, at every event, begin and end of every step."""
    plain = await plain_history()
    before = living_tasks()
    number = 0
    while True:
        scope = anyio.CancelScope()
        left = number

        def tick(scope: anyio.CancelScope = scope) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                scope.cancel()

        class Ticking(WrappedStore):
            """Ticks around commits."""

            def commit(self, lease: Lease, commit: Commit, tick: Callable[[], None] = tick) -> int:
                """Tick, commit, tick."""
                tick()
                head: int = self.inner.commit(lease, commit)
                tick()
                return head

        everything, store = Everything(tick), MemoryStore()
        with scope:
            await run(
                everything.program,
                store=Ticking(store),
                run_id="r",
                policy=AHEAD,
                on_event=lambda event, tick=tick: tick(),
            )
        cancelled = left < 0
        left = 10**9  # the resumed run is not cancelled
        await check_left(everything, store, before, plain)
        if not cancelled:
            break
        number += 1
    assert number > 40


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_of_asyncio(anyio_backend: str) -> None:
    """``task.cancel()`` works like a cancel scope, at every tick, and the task ends as cancelled."""
    plain = await plain_history()
    before = living_tasks()
    for ticks in range(0, 400, 3):
        everything, store = Everything(), MemoryStore()
        task = asyncio.create_task(run(everything.program, store=store, run_id="r", policy=AHEAD))
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        finished = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() is not finished
        await check_left(everything, store, before, plain)
        if finished:
            return
    pytest.fail("the run never ended")


async def test_a_leak_would_be_noticed() -> None:
    """The checks above have teeth: a step that leaves a task behind, or a store that loses an entry, fails them."""
    plain = await plain_history()
    before = living_tasks()
    release = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(release.wait)
        await anyio.lowlevel.checkpoint()
        with pytest.raises(AssertionError):
            await check_left(Everything(), MemoryStore(), before, plain)
        release.set()

    class Forgetful(WrappedStore):
        """Loses the second entry."""

        def entries(self, *args: Any) -> Any:
            """All but one."""
            found = self.inner.entries(*args)
            return (*found[:1], *found[2:])

    everything, store = Everything(), MemoryStore()
    await cancelled_after(40, everything, store, {})
    with pytest.raises(AssertionError):
        await check_left(everything, Forgetful(store), before, plain)


async def test_cleanup_of_steps_has_run() -> None:
    """Steps that are cancelled run their cleanup to its end, shielded waits included, before the run returns."""
    cleaned: list[str] = []
    everybody = [anyio.Event() for _ in range(4)]

    async def wait(index: int) -> None:
        everybody[index].set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                cleaned.append(f"step {index}")

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask(index: int) -> str:
        await wait(index)
        return "yes"

    @step(effect=Effect.READONLY)
    async def look(index: int) -> None:
        await wait(index + 2)

    @workflow
    async def branch(ctx: Context, index: int) -> None:
        try:
            await ctx.call(ask, index)
            await ctx.call(look, index)
        finally:
            cleaned.append(f"workflow {index}")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.map(branch, range(2))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=Fixed(2)))
        for event in everybody:
            await event.wait()
        group.cancel_scope.cancel()
    assert {line for line in cleaned if line.startswith("step")} == {f"step {index}" for index in range(4)}
    assert {line for line in cleaned if line.startswith("workflow")} == {"workflow 0", "workflow 1"}


async def test_a_program_cannot_go_on_while_it_is_cancelled() -> None:
    """A ``finally`` block of a workflow runs, but what it asks of its context is not done."""
    world = World()
    gate = Gate()

    @step(effect=Effect.IDEMPOTENT)
    async def act(name: str) -> None:
        if name == "wait":
            await gate.pass_through()
        world.see(name)

    @workflow
    async def program(ctx: Context) -> None:
        try:
            await ctx.call(act, "wait")
        finally:
            world.see("finally")
            await ctx.call(act, "late")

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program))
        await gate.reached.wait()
        group.cancel_scope.cancel()
    gc.collect()  # a coroutine that was not closed would warn
    assert world.seen == ["finally"]


async def test_cancelling_one_of_ten_leaves_the_others_alone() -> None:
    """Ten runs on one store: the one that is cancelled stops, the other nine finish untouched."""
    store = MemoryStore()
    programs = [Everything() for _ in range(10)]
    gates = [anyio.Event() for _ in range(10)]
    results: dict[int, Any] = {}
    scopes = [anyio.CancelScope() for _ in range(10)]

    async def drive(index: int) -> None:
        def pause(event: Any) -> None:
            gates[index].set()

        with scopes[index]:
            results[index] = (
                await run(programs[index].program, store=store, run_id=f"r{index}", policy=AHEAD, on_event=pause)
            ).value

    async with anyio.create_task_group() as group:
        for index in range(10):
            group.start_soon(drive, index)
        await gates[4].wait()
        scopes[4].cancel()
    assert 4 not in results
    assert results == {index: Everything.VALUE for index in range(10) if index != 4}
    assert programs[4].busy == 0
    assert [record.status for record in store.list_runs()].count(RunStatus.COMPLETED) == 9
    assert (await resume("r4", store=store, program=programs[4].program)).value == Everything.VALUE
    for one in programs:
        one.check_effects()


async def test_a_run_inside_a_step_is_cancelled_with_it() -> None:
    """Cancelling the outer run stops a run that one of its steps has started; both can be resumed."""
    outer_store, inner_store = MemoryStore(), MemoryStore()
    gate = Gate()
    before = living_tasks()

    @step(effect=Effect.READONLY)
    async def wait() -> str:
        await gate.pass_through()
        return "inner"

    @workflow
    async def inner(ctx: Context) -> list[str]:
        return await ctx.gather(ctx.call(wait), ctx.call(wait))

    @step(effect=Effect.IDEMPOTENT)
    async def nest() -> list[str]:
        if inner_store.list_runs():
            return (await resume("inner", store=inner_store, program=inner)).value
        return (await run(inner, store=inner_store, run_id="inner")).value

    @workflow
    async def outer(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(nest), ctx.call(wait))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(outer, store=outer_store, run_id="outer"))
        await gate.reached.wait()
        await settle()
        group.cancel_scope.cancel()
    assert living_tasks() == before
    assert outer_store.get_run("outer").owner is None
    assert inner_store.get_run("inner").owner is None
    gate.open()
    assert (await resume("outer", store=outer_store, program=outer)).value == [["inner", "inner"], "inner"]


# ------------------------------------------------------------------------------------------------ threads and processes


async def test_a_step_in_a_thread_is_waited_for() -> None:
    """A thread cannot be stopped: the cancelled run returns only when it ended, and the thread pool survives."""
    begun, release = threading.Event(), threading.Event()
    ended: list[str] = []
    limiter = anyio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1

    @step(effect=Effect.READONLY)
    def work() -> str:
        begun.set()
        assert release.wait(30)
        ended.append("work")
        return "done"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(work)

    returned = anyio.Event()
    store = MemoryStore()
    scope = anyio.CancelScope()

    async def drive() -> None:
        with scope:
            await run(program, store=store, run_id="r")
        assert ended == ["work"]
        returned.set()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(drive)
            while not begun.is_set():
                await anyio.lowlevel.checkpoint()
            scope.cancel()
            await settle()
            assert not returned.is_set()
            release.set()
        assert returned.is_set()
        assert store.get_run("r").owner is None
        assert limiter.borrowed_tokens == 0
        assert await anyio.to_thread.run_sync(lambda: "alive") == "alive"
        assert (await resume("r", store=store, program=program)).value == "done"
    finally:
        limiter.total_tokens = before


async def test_a_thread_that_ends_as_it_is_cancelled_breaks_nothing() -> None:
    """Fifty times: the step's thread ends in the very moment of the cancellation; the one thread of the pool lives."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    try:
        for index in range(50):
            begun, release = threading.Event(), threading.Event()

            @step(effect=Effect.READONLY, name="work")
            def work(begun: Any = begun, release: Any = release) -> int:
                _EVENTS[0].set()
                _EVENTS[1].wait(30)
                return 7

            _EVENTS[:] = [begun, release]

            @workflow
            async def program(ctx: Context, work: Any = None) -> int:
                return await ctx.call(_STEPS[0])

            _STEPS[:] = [work]
            async with anyio.create_task_group() as group:
                group.start_soon(lambda program=program: run(program))
                while not begun.is_set():
                    await anyio.lowlevel.checkpoint()
                if index % 2:
                    release.set()
                    group.cancel_scope.cancel()
                else:
                    group.cancel_scope.cancel()
                    release.set()
            assert limiter.borrowed_tokens == 0
        assert await anyio.to_thread.run_sync(lambda: "alive") == "alive"
    finally:
        limiter.total_tokens = before


_EVENTS: list[threading.Event] = []
_STEPS: list[Any] = []


async def test_an_effect_in_a_thread_that_was_waited_for_is_known() -> None:
    """The answer of an effect that could not be stopped is put on record: after a cancellation nothing is unknown."""
    begun, release = threading.Event(), threading.Event()
    world = World()
    store = MemoryStore()

    @step
    def pay(amount: int) -> str:
        begun.set()
        assert release.wait(30)
        world.see(amount)
        return f"paid {amount}"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(pay, 5)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, store=store, run_id="r"))
        while not begun.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
        release.set()
    assert world.seen == [5]
    assert row_of(store, "r", "pay").status is EffectStatus.ACKED
    assert (await resume("r", store=store, program=program)).value == "paid 5"
    assert world.seen == [5]


async def test_an_effect_that_was_stopped_half_way_is_unknown() -> None:
    """Cancelling an irreversible async step leaves open what it did, and resume says so."""
    gate = Gate()
    store = MemoryStore()

    @step
    async def pay() -> None:
        await gate.pass_through()

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(pay)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, store=store, run_id="r"))
        await gate.reached.wait()
        group.cancel_scope.cancel()
    with pytest.raises(EffectUnknownError):
        await resume("r", store=store, program=program)
    assert row_of(store, "r", "pay").tries == 1


@step(effect=Effect.READONLY, where="process")
def block_for_ever(path: str) -> None:
    """Say in a named pipe who this is, then wait for ever."""
    with open(path, "w") as pipe:  # noqa: PTH123 -- opening a pipe waits for its reader, which is the point
        pipe.write(str(os.getpid()))
    threading.Event().wait()


@step(effect=Effect.PURE, where="process")
def process_id(value: int) -> tuple[int, int]:
    """In which process this is."""
    return value * 2, os.getpid()


@workflow
async def in_a_process(ctx: Context, path: str) -> tuple[int, int]:
    """A quick step in a process, then one that never ends."""
    found = await ctx.call(process_id, 21)
    if path:
        await ctx.call(block_for_ever, path)
    return found


def is_running(process: int) -> bool:
    """Is there a process of this number that has not ended?"""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux about processes")
async def test_a_step_in_a_process_is_killed(tmp_path: Path) -> None:
    """A step in a worker process that never ends is killed when its run is cancelled; quick ones return results."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    store = MemoryStore()
    value, worker = (await run(in_a_process, "")).value
    assert value == 42
    assert worker != os.getpid()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(in_a_process, str(pipe), store=store, run_id="r"))
        blocked = int(await anyio.to_thread.run_sync(pipe.read_text))
        assert is_running(blocked)
        group.cancel_scope.cancel()
    assert not is_running(blocked)
    assert store.get_run("r").owner is None
    assert [entry.step for entry in store.entries("r")] == [process_id.name]


# ----------------------------------------------------------------------------------------------------- other moments


@jumping
async def test_a_deadline_around_a_run_stops_it_and_the_rest_is_done_later() -> None:
    """A run under ``move_on_after`` stops at the deadline; a sleep that was cut short is finished, not repeated."""
    store = MemoryStore()

    @step(effect=Effect.PURE)
    async def work() -> int:
        return 1

    @workflow
    async def program(ctx: Context) -> int:
        await ctx.call(work)
        await ctx.sleep(100.0)
        return await ctx.call(work)

    began = trio.current_time()
    with anyio.move_on_after(60.0) as scope:
        await run(program, store=store, run_id="r")
    assert scope.cancelled_caught
    assert trio.current_time() - began == pytest.approx(60.0)
    # The clock of the loop jumped, that of the wall did not: the wall still has the whole hundred seconds to go.
    assert (await resume("r", store=store, program=program)).value == 1
    assert len([entry for entry in store.entries("r") if entry.step == work.name]) == 2


@jumping
async def test_cancelled_while_waiting_for_the_next_try() -> None:
    """A run that is cancelled between two tries frees everything, and the resumed run begins with try 1."""
    store = MemoryStore()
    numbers: list[int] = []

    @step(effect=Effect.IDEMPOTENT, resource="api", retry=Retry(attempts=2, wait=100.0, max_wait=100.0))
    async def work(attempt: Attempt) -> int:
        numbers.append(attempt.number)
        if len(numbers) == 1:
            raise ConnectionError
        return 1

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.gather(ctx.call(work))

    with anyio.move_on_after(50.0) as scope:
        await run(program, store=store, run_id="r", limits={"api": 1})
    assert scope.cancelled_caught
    assert (await resume("r", store=store, program=program, limits={"api": 1})).value == [1]
    assert numbers == [1, 1]


async def test_cancelled_during_compensation() -> None:
    """An undo that was cut short is done again when the run is resumed; those done before are not."""
    store = MemoryStore()
    gate = Gate()
    undone: list[str] = []

    async def undo(result: Any, name: str) -> None:
        if name == "first":
            await gate.pass_through()
        undone.append(name)

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book(name: str) -> None:
        pass

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(book, "first")
        await ctx.call(book, "second")
        raise LookupError("no")

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, store=store, run_id="r"))
        await gate.reached.wait()
        group.cancel_scope.cancel()
    assert undone == ["second"]
    assert [row.status for row in rows_of(store, "r")] == [EffectStatus.ACKED, EffectStatus.COMPENSATED]
    gate.open()
    with pytest.raises(LookupError, match="no"):
        await resume("r", store=store, program=program)
    assert undone == ["second", "first"]
    assert store.get_run("r").status is RunStatus.FAILED


async def test_cancelled_while_predicting_and_judging() -> None:
    """Predictors and judges at work are stopped with the run."""
    stopped: list[str] = []
    reached = {"predict": anyio.Event(), "judge": anyio.Event()}

    async def wait(name: str) -> None:
        reached[name].set()
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(name)

    class Slow:
        """A predictor that takes for ever."""

        async def predict(self, call: Call) -> list[Prediction]:
            """Never."""
            await wait("predict")
            return []

    async def judge(predicted: Any, actual: Any) -> bool:
        await wait("judge")
        return True

    gate = Gate()

    @step(effect=Effect.READONLY, predict=Slow())
    async def ask() -> str:
        await gate.pass_through()
        return "yes"

    @step(effect=Effect.READONLY, verify=Judge(judge))
    async def look() -> str:
        return "seen"

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.gather(ctx.call(ask), ctx.call(look))

    before = living_tasks()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=Fixed(2)))
        for event in reached.values():
            await event.wait()
        group.cancel_scope.cancel()
    assert sorted(stopped) == ["judge", "predict"]
    assert living_tasks() == before


async def test_a_squashed_step_that_resists_is_waited_for() -> None:
    """An attempt on a wrong guess that takes its time to stop has stopped when the run returns."""
    stopped: list[str] = []
    resisting = Gate()
    asked = Gate()

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.READONLY)
    async def look(answer: str) -> str:
        if answer == "wrong":
            try:
                resisting.reached.set()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await resisting._open.wait()
                stopped.append("look")
        return answer

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(look, await ctx.call(ask))

    results: list[str] = []

    async def drive() -> None:
        results.append((await run(program, policy=Fixed(2))).value)
        assert stopped == ["look"]

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await resisting.reached.wait()
        asked.open()
        await settle()
        assert not results
        resisting.open()
    assert results == ["right"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("alone", [True, False])
async def test_a_cancellation_of_the_step_s_own_is_its_failure(anyio_backend: str, alone: bool) -> None:  # noqa: FBT001
    """A step that awaits something which was cancelled elsewhere fails; its run neither hangs nor ends as cancelled."""

    @step(effect=Effect.READONLY)
    async def wait() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    @step(effect=Effect.READONLY)
    async def other() -> int:
        await anyio.lowlevel.checkpoint()
        return 1

    @workflow
    async def program(ctx: Context) -> str:
        calls = [ctx.call(wait)] if alone else [ctx.call(other), ctx.call(wait)]
        try:
            await ctx.gather(*calls)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is not a cancellation of the run
            return f"failed: {type(error).__name__}"
        return "not reached"

    with anyio.fail_after(10):
        result = await run(program)
    assert result.value.startswith("failed")


class _LeaveError(BaseException):
    """Like SystemExit, which asyncio does not let a test catch."""


async def test_a_step_that_ends_the_process_ends_the_run() -> None:
    """What is no ``Exception``, like ``KeyboardInterrupt``, is no failure of the step, and leaves nothing behind."""
    before = living_tasks()
    for where in ("step", "branch", "program"):
        store = MemoryStore()

        @step(effect=Effect.READONLY, name="leave")
        async def leave() -> None:
            if where != "program":  # noqa: B023 -- called before the loop goes on
                raise _LeaveError

        @workflow
        async def program(ctx: Context) -> None:
            if where == "branch":  # noqa: B023
                await ctx.gather(ctx.call(_STEPS[0]), ctx.call(_STEPS[0]))
            await ctx.call(_STEPS[0])
            raise _LeaveError

        _STEPS[:] = [leave]
        with pytest.raises(_LeaveError):
            await run(program, store=store, run_id="r")
        assert store.get_run("r").owner is None
        assert store.get_run("r").status is RunStatus.RUNNING
        assert living_tasks() == before


async def test_cancelled_on_a_file(tmp_path: Path) -> None:
    """The same on SQLite: a hundred cancellations of one run, each resumed, end in the plain history."""
    plain = await plain_history()
    generator = random.Random(3)
    store = SQLiteStore(tmp_path / "runs.db")
    everything = Everything()
    await cancelled_after(10, everything, store, {})
    for _ in range(100):
        async with anyio.create_task_group() as group:

            async def again() -> None:
                await resume("r", store=store, program=everything.program, policy=AHEAD)

            group.start_soon(again)
            for _ in range(generator.randrange(1, 12)):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        kept = history(store, "r")
        assert kept == plain[: len(kept)]
    assert (await resume("r", store=store, program=everything.program)).value == Everything.VALUE
    assert history(store, "r") == plain
    assert values_of(store, "r") == {"log": ["a", "b"], "count": 2}
    everything.check_effects()
    store.close()
