"""What the runtime adds to a step: counted, not timed, since counts do not depend on the machine or its load."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow import Context, Effect, Fixed, State, given, run, step, workflow
from specflow.history import Commit, Entry, EntryKind, Lease
from specflow.predictors import LastValue
from specflow.speculation import Call, Prediction
from specflow.state import cells_of
from specflow.stores import MemoryStore
from specflow.timeline import _make_commit, _make_entry
from specflow.worlds import Strand, World
from tests.specflow.runtime.support import Gate, WrappedStore, jumping

pytestmark = pytest.mark.anyio


@step(effect=Effect.PURE)
async def add_one(value: int) -> int:
    """Never waits."""
    return value + 1


@step(effect=Effect.PURE, resource="lookups")
async def look_up(value: int) -> int:
    """Never waits, but for a slot."""
    return value + 1


@workflow
async def count_to(ctx: Context, limit: int) -> int:
    """One step after the other."""
    value = 0
    while value < limit:
        value = await ctx.call(add_one, value)
    return value


@workflow
async def side_by_side(ctx: Context, width: int) -> int:
    """All steps at the same time."""
    return len(await ctx.map(add_one, range(width)))


class Next:
    """Guesses right, but for every fourth value."""

    def predict(self, call: Call) -> Sequence[Prediction]:
        """One guess."""
        value = call.arguments[0]
        return [Prediction(value + 1 if value % 4 else -1, 0.9)]


@step(effect=Effect.PURE, resource="lookups", predict=Next())
async def foresee(value: int) -> int:
    """Waits once; its result is guessed."""
    await anyio.lowlevel.checkpoint()
    return value + 1


@workflow
async def twice(ctx: Context, value: int) -> int:
    """Two steps one after the other."""
    return await ctx.call(foresee, await ctx.call(foresee, value))


@workflow
async def side_by_side_on_guesses(ctx: Context, width: int) -> int:
    """Two steps in every branch, the second of which may run ahead where it finds a slot."""
    return len(await ctx.map(twice, range(width)))


@workflow
async def side_by_side_with_slots(ctx: Context, width: int) -> int:
    """All steps at the same time, a few of which find a slot."""
    return len(await ctx.map(look_up, range(width)))


async def calls_of(work: Callable[[], Awaitable[Any]]) -> int:
    """How many functions are called while something runs, those written in C included."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_step_costs_few_calls() -> None:
    """A step of a plain loop takes at most 70 calls of functions, generators and coroutines included; once 275."""
    await run(count_to, 10, policy=Fixed(0))
    short = await calls_of(lambda: run(count_to, 100, policy=Fixed(0)))
    long = await calls_of(lambda: run(count_to, 300, policy=Fixed(0)))
    assert (long - short) / 200 <= 70


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "program", [side_by_side, side_by_side_with_slots, side_by_side_on_guesses], ids=["free", "limited", "guessed"]
)
async def test_parallel_steps_cost_the_same_each(program: Any) -> None:
    """Twice or four times as many branches take two or four times as many calls, and at most 3 % more."""
    await run(program, 10, policy=Fixed(1), limits={"lookups": 3})
    costs = [
        await calls_of(functools.partial(run, program, width, policy=Fixed(1), limits={"lookups": 3})) / width
        for width in (100, 200, 400)
    ]
    assert costs[2] < 1.03 * costs[0]
    assert costs[2] < 1.03 * costs[1]


# -------------------------------------------------------------------------------------------------- event-loop tasks


async def test_parallel_steps_that_never_wait_share_an_event_loop_task() -> None:
    """Starting an event-loop task takes longer than such a step."""
    tasks: list[int] = []

    @step(effect=Effect.READONLY)
    async def note(index: int) -> int:
        tasks.append(anyio.get_current_task().id)
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(note, range(5))

    assert (await run(program)).value == [0, 1, 2, 3, 4]
    assert len(set(tasks)) == 1


async def test_a_parallel_step_that_waits_holds_nobody_up() -> None:
    """The second of four steps waits until the fourth has run: they are all under way at the same time."""
    gate = Gate()
    order: list[int] = []

    @step(effect=Effect.READONLY)
    async def note(index: int) -> int:
        if index == 1:
            with anyio.fail_after(60):  # opened and closed in the same event-loop task, or this raises
                await gate.pass_through()
        if index == 3:
            gate.open()
        order.append(index)
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(note, range(4))

    assert (await run(program)).value == [0, 1, 2, 3]
    assert order[0] == 0
    assert order[-1] == 1


async def test_a_parallel_step_that_waits_is_given_what_it_waited_for() -> None:
    """Results and exceptions of what a step awaits reach it, also when other steps were to start after it."""

    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise ConnectionError("no line")

    @step(effect=Effect.READONLY)
    async def ask(index: int) -> str:
        send, receive = anyio.create_memory_object_stream[str](1)
        async with send, receive, anyio.create_task_group() as group:
            group.start_soon(send.send, f"answer {index}")
            answer = await receive.receive()
        try:
            await fail()
        except ConnectionError as error:
            return f"{answer}, {error}"
        return "nothing"

    @workflow
    async def program(ctx: Context) -> list[str]:
        return await ctx.map(ask, range(3))

    assert (await run(program)).value == [f"answer {index}, no line" for index in range(3)]


async def test_a_run_is_cancelled_while_one_of_its_parallel_steps_waits() -> None:
    """The step that waits is told, and so are those that were started together with it."""
    gate = Gate()
    left: list[int] = []

    @step(effect=Effect.READONLY)
    async def wait(index: int) -> int:
        try:
            await gate.pass_through()
        finally:
            left.append(index)
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(wait, range(3))

    async with anyio.create_task_group() as group:
        group.start_soon(run, program)
        await gate.reached.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert sorted(left) == [0, 1, 2]


async def test_steps_that_never_wait_let_others_have_their_turn() -> None:
    """Nobody else would ever run, and the run could not be cancelled, as long as such steps follow each other."""
    seen: list[bool] = [False]

    @step(effect=Effect.READONLY)
    async def look(index: int) -> bool:
        return seen[0]

    @workflow
    async def program(ctx: Context) -> bool:
        for index in range(100_000):  # takes many times as long as steps may keep the event loop for
            if await ctx.call(look, index):
                return True
        return False

    async def show() -> None:
        await anyio.lowlevel.checkpoint()
        seen[0] = True

    async with anyio.create_task_group() as group:
        group.start_soon(show)
        assert (await run(program, policy=Fixed(0))).value


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_lease_is_renewed_on_asyncio() -> None:
    """The first renewal comes from a timer of the loop, the second from the task that it starts."""
    renewed = [anyio.Event(), anyio.Event()]

    class Watched(WrappedStore):
        count = 0

        def renew(self, lease: Lease) -> None:
            self.inner.renew(lease)
            renewed[min(self.count, 1)].set()
            self.count += 1

    @step(effect=Effect.READONLY)
    async def wait() -> int:
        for event in renewed:
            await event.wait()
        return 1

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(wait)

    assert (await run(program, store=Watched(MemoryStore(lease_seconds=0.05)))).value == 1


# -------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_fork_after_a_right_guess_takes_over_the_program_before_it(depth: int) -> None:
    """With right guesses only, a run of 50 calls starts the program once per level of depth, not 50 times."""
    starts: list[int] = []

    class Right:
        def predict(self, call: Call) -> Sequence[Prediction]:
            return [Prediction(call.arguments[0] + 1, 0.9)]

    @step(effect=Effect.PURE, predict=Right())
    async def after(value: int) -> int:
        await anyio.lowlevel.checkpoint()
        return value + 1

    @workflow
    async def program(ctx: Context) -> int:
        starts.append(1)
        value = 0
        while value < 50:
            value = await ctx.call(after, value)
            ctx.state.put(f"seen/{value}", value)
        return len(ctx.state.scan("seen/"))

    result = await run(program, policy=Fixed(depth))
    assert result.value == 50
    # A call that ends while it still rests on a guess is not guessed itself; how many do depends on the event loop.
    assert result.report.hits >= 10
    assert len(starts) <= depth + 1 + result.report.hits // 4


async def test_a_wrong_guess_costs_one_start_of_the_program() -> None:
    """Every fourth guess is wrong: the program is started once for each of these, and twice besides."""
    starts: list[int] = []

    @step(effect=Effect.PURE, predict=Next())
    async def after(value: int) -> int:
        await anyio.lowlevel.checkpoint()
        return value + 1

    @workflow
    async def program(ctx: Context) -> int:
        starts.append(1)
        value = 0
        while 0 <= value < 20:
            value = await ctx.call(after, value)
        return value

    result = await run(program, policy=Fixed(1))
    assert result.value == 20
    assert 1 <= result.report.misses < result.report.hits
    assert len(starts) <= 2 + result.report.misses


async def test_a_fork_sees_what_a_step_wrote_whose_result_was_guessed() -> None:
    """A program that is taken over is given the changes of the steps it is brought past."""

    @step(effect=Effect.PURE, predict=LastValue())
    async def tally(index: int, state: State = given) -> None:
        await anyio.lowlevel.checkpoint()
        state.add("sum", index)

    @workflow
    async def program(ctx: Context) -> list[int]:
        seen = []
        for index in range(8):
            await ctx.call(tally, index)
            if index % 3 == 2:  # most of what runs ahead reads nothing that the step writes, and is kept
                seen.append(ctx.state["sum"])
        return seen

    result = await run(program)
    assert result.value == [3, 15]
    assert result.report.hits >= 4


# ------------------------------------------------------------------------------------------------------------- exits


async def test_an_exit_on_a_wrong_guess_reaches_nobody() -> None:
    """sys.exit() is an outcome like any other exception: here, of an attempt that is squashed."""
    left: list[int] = []

    class Wrong:
        def predict(self, call: Call) -> Sequence[Prediction]:
            return [Prediction(-1, 0.9)]

    gate = Gate()

    @step(effect=Effect.READONLY, predict=Wrong())
    async def first() -> int:
        await gate.pass_through()
        return 1

    @step(effect=Effect.PURE)
    async def second(value: int) -> int:
        if value < 0:
            left.append(value)
            gate.open()
            sys.exit(3)
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(second, await ctx.call(first))

    assert (await run(program)).value == 1
    assert left == [-1]


@pytest.mark.parametrize("width", [1, 2])
async def test_an_exit_of_a_real_step_is_raised_by_the_run(width: int) -> None:
    """It reaches the program where the step was called, and ends the run if the program lets it pass."""

    @step(effect=Effect.PURE)
    async def leave(index: int) -> int:
        sys.exit(3 + index)

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.call(leave, 0) if width == 1 else await ctx.map(leave, range(width))

    store = MemoryStore()
    with pytest.raises(SystemExit) as raised:
        await run(program, store=store, run_id="r")
    assert raised.value.code == 3
    assert store.get_run("r").status.value == "failed"


# ------------------------------------------------------------------------------------------------------------- sleeps


@jumping
async def test_a_sleep_counts_from_when_the_guess_before_it_was_found_right() -> None:
    """A step of 10 seconds is guessed at once; the 5 seconds after it begin when it has really returned."""

    class Right:
        def predict(self, call: Call) -> Sequence[Prediction]:
            return [Prediction("done", 0.9)]

    @step(effect=Effect.READONLY, predict=Right())
    async def work() -> str:
        await anyio.sleep(10.0)
        return "done"

    @workflow
    async def program(ctx: Context) -> str:
        result = await ctx.call(work)
        await ctx.sleep(5.0)
        return result

    began = anyio.current_time()
    result = await run(program)
    assert result.report.hits == 1
    assert anyio.current_time() - began == pytest.approx(15.0)


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_quickly_made_values_are_the_frozen_ones() -> None:
    """Equal to one that its class has made, of the same class, and as unchangeable."""
    quick = _make_entry((3,), EntryKind.CALL, "step", b"[]", b"1", None)
    assert quick == Entry((3,), EntryKind.CALL, "step", b"[]", b"1", None)
    assert type(quick) is Entry
    assert hash(quick) == hash(Entry((3,), EntryKind.CALL, "step", b"[]", b"1", None))
    with pytest.raises(FrozenInstanceError):
        quick.step = "another"  # type: ignore[misc]
    assert _make_commit(7, (quick,)) == Commit(7, (quick,))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_the_scheduler_sees_is_named_in_one_line() -> None:
    """Worlds, strands and records hold each other: their names do not."""
    strand = Strand(lambda _context: None, (), "module:program", cells_of({}), 0.0)  # type: ignore[arg-type,return-value]
    world = World(strand, None, None, None)  # type: ignore[arg-type]
    strand.head = world
    child = World(strand, world, None, None)  # type: ignore[arg-type]
    world.children.append(child)
    for one in (strand, world, child):
        assert "module:program" in repr(one)
        assert len(repr(one)) < 200
