"""Limits per resource, retries and timeouts of steps.

Time is trio's mock clock, which jumps whenever everybody waits: hours of backoff pass at once, and in order.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import pairwise
from typing import Any

import anyio
import pytest
import trio

from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import InvalidSettingError, StepTimeoutError, UnsupportedValueError
from specflow.history import EffectStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import run
from specflow.speculation import Budget
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import Gate, Guesses, World, jumping, row_of, settle, values_of

pytestmark = pytest.mark.anyio


class Meter:
    """How many are inside at the same time."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)

    def __exit__(self, *exc: object) -> None:
        self.inside -= 1


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_attempts_at_a_time_than_the_limit(limit: int) -> None:
    """Parallel calls of a resource class never exceed its limit, use all of it, and get it in program order."""
    meter = Meter()
    order: list[int] = []
    full = anyio.Event()
    gate = anyio.Event()

    @step(effect=Effect.READONLY, resource="api")
    async def ask(index: int) -> int:
        order.append(index)
        with meter:
            if meter.inside == limit:
                full.set()
            await gate.wait()
        return index

    @step(effect=Effect.READONLY)
    async def free(index: int) -> int:
        await full.wait()
        return index

    @workflow
    async def program(ctx: Context) -> Any:
        calls = [ctx.call(ask, index) for index in range(7)]
        return await ctx.gather(*calls, ctx.call(free, 7))

    found: list[Any] = []

    async def drive() -> None:
        found.append((await run(program, limits={"api": limit})).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await full.wait()
        await settle()
        assert meter.inside == limit
        gate.set()
    assert found == [list(range(8))]
    assert meter.most == limit
    assert sorted(order[:limit]) == list(range(limit))  # under trio, tasks started together begin in any order
    assert sorted(order) == list(range(7))


async def test_real_work_takes_the_slot_of_an_attempt_on_a_guess() -> None:
    """A speculative attempt that holds the only slot is stopped for real work, and done again when its turn comes."""
    meter = Meter()
    world = World()
    asked, ahead, begin = Gate(), Gate(), Gate()

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await asked.pass_through()
        return "yes"

    @step(effect=Effect.READONLY, resource="api")
    async def look() -> str:
        with meter:
            world.see("look")
            await ahead.pass_through()
        return "looked"

    @step(effect=Effect.READONLY)
    async def wait() -> None:
        await begin.pass_through()

    @step(effect=Effect.READONLY, resource="api")
    async def work() -> str:
        with meter:
            world.see("work")
        return "worked"

    @workflow
    async def guessing(ctx: Context) -> str:
        await ctx.call(ask)
        return await ctx.call(look)

    @workflow
    async def plain(ctx: Context) -> str:
        await ctx.call(wait)
        return await ctx.call(work)

    @workflow
    async def program(ctx: Context) -> list[str]:
        return await ctx.gather(ctx.call(guessing), ctx.call(plain))

    found: list[Any] = []

    async def drive() -> None:
        found.append((await run(program, policy=Fixed(2), limits={"api": 1})).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await ahead.reached.wait()
        assert world.seen == ["look"]
        begin.open()
        await settle()
        assert world.seen[:2] == ["look", "work"]  # the guess is still open: the slot was taken from it
        ahead.open()
        asked.open()
    assert found == [["looked", "worked"]]
    assert meter.most == 1
    assert world.seen.count("work") == 1


async def test_a_guess_gets_no_slot_while_real_work_waits_for_one() -> None:
    """With every slot taken by real work, the next free one goes to waiting real work, not to an attempt on a guess."""
    order: list[str] = []
    asked, holding = Gate(), Gate()

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await asked.pass_through()
        return "yes"

    @step(effect=Effect.READONLY, resource="api")
    async def use(name: str) -> str:
        order.append(name)
        if name == "holder":
            await holding.pass_through()
        return name

    @workflow
    async def guessing(ctx: Context) -> str:
        await ctx.call(ask)
        return await ctx.call(use, "ahead")

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(guessing), ctx.call(use, "holder"), ctx.call(use, "second"))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=Fixed(2), limits={"api": 1}))
        await holding.reached.wait()
        await asked.reached.wait()
        await settle()
        holding.open()
        await settle()
        asked.open()
    # The attempt ahead may have come first, before anybody wanted the slot; it never comes between.
    assert [name for name in order if name != "ahead"] == ["holder", "second"]
    assert order.index("second") == order.index("holder") + 1


async def test_a_slot_is_given_back_by_failures_and_squashes() -> None:
    """Slots of failed and of squashed attempts are free again: a later call never waits for one that is gone."""
    asked = Gate()

    @step(effect=Effect.READONLY, predict=Guesses("a", "b", "c"))
    async def ask() -> str:
        await asked.pass_through()
        return "d"

    @step(effect=Effect.READONLY, resource="api")
    async def use(name: str) -> str:
        if name == "fail":
            raise ValueError(name)
        if name in ("a", "b", "c"):
            asked.open()
            await anyio.sleep_forever()
        return name

    @workflow
    async def program(ctx: Context) -> list[str]:
        used = [await ctx.call(use, await ctx.call(ask))]
        for name in ("fail", "next"):
            try:
                used.append(await ctx.call(use, name))
            except ValueError as error:
                used.append(f"not {error}")
        return used

    result = await run(program, policy=Fixed(2, width=3), limits={"api": 1})
    assert result.value == ["d", "not fail", "next"]


async def test_a_delivery_counts_against_its_resource() -> None:
    """A buffered effect and a step of one resource with limit 1 are never under way at the same time."""
    meter = Meter()
    sending, working = Gate(), Gate()

    @step(effect=Effect.BUFFERED, resource="api")
    async def send() -> None:
        with meter:
            await sending.pass_through()

    @step(effect=Effect.READONLY, resource="api")
    async def look() -> str:
        with meter:
            await working.pass_through()
        return "looked"

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(send)
        return await ctx.call(look)

    found: list[str] = []

    async def drive() -> None:
        found.append((await run(program, limits={"api": 1})).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await settle()
        sending.open()
        await settle()
        working.open()
    assert found == ["looked"]
    assert meter.most == 1


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_that_lets_nobody_through_is_refused(limit: int) -> None:
    """A limit below 1 would wait for ever: it is an error before anything is written."""
    store = MemoryStore()

    @step(effect=Effect.READONLY, resource="api")
    async def use() -> None:
        pass

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(use)

    with anyio.fail_after(10), pytest.raises(InvalidSettingError):
        await run(program, limits={"api": limit}, store=store)
    assert store.list_runs() == ()


async def test_budget_slots_bound_attempts_on_guesses_only() -> None:
    """``Budget.slots`` limits attempts on guesses; real work is not counted."""
    ahead, real = Meter(), Meter()
    asked = Gate()
    everybody = anyio.Event()

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask(index: int) -> str:
        with real:
            if real.inside == 4:
                everybody.set()
            await asked.pass_through()
        return "yes"

    @step(effect=Effect.READONLY)
    async def look(index: int) -> int:
        with ahead:
            if not asked._open.is_set():
                await anyio.sleep_forever() if index < 0 else await asked._open.wait()
        return index

    @workflow
    async def branch(ctx: Context, index: int) -> int:
        await ctx.call(ask, index)
        return await ctx.call(look, index)

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(branch, range(4))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=Fixed(2, budget=Budget(slots=2))))
        await everybody.wait()
        await settle()
        assert real.inside == 4
        assert ahead.inside == 2
        asked.open()


# ------------------------------------------------------------------------------------------------------------ retries


@jumping
async def test_retries_wait_longer_each_time() -> None:
    """Waits grow by the factor up to their limit, and the first try waits for nothing."""
    at: list[float] = []

    @step(effect=Effect.READONLY, retry=Retry(attempts=6, wait=3.0, backoff=2.0, max_wait=20.0))
    async def ask() -> str:
        at.append(trio.current_time())
        if len(at) < 6:
            raise ConnectionError
        return "answer"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(ask)

    began = trio.current_time()
    result = await run(program)
    assert result.value == "answer"
    assert at[0] == began
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits == pytest.approx([3.0, 6.0, 12.0, 20.0, 20.0])
    (report,) = result.report.steps
    assert report.calls == 1


async def test_the_last_failure_is_raised_when_the_tries_are_used_up() -> None:
    """After the declared number of tries the program sees the exception of the last one."""
    numbers: list[int] = []

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, wait=0.0))
    async def ask(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        raise ConnectionError(f"try {attempt.number}")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(ask)

    with pytest.raises(ConnectionError, match="try 3"):
        await run(program)
    assert numbers == [1, 2, 3]


async def test_only_listed_exceptions_are_tried_again() -> None:
    """An exception outside ``Retry.on`` ends the tries at once."""
    tries: list[str] = []
    failures: dict[str, type[Exception]] = {"listed": ConnectionResetError, "other": PermissionError}

    @step(effect=Effect.READONLY, retry=Retry(attempts=4, wait=0.0, on=(ConnectionError,)))
    async def ask(kind: str) -> None:
        tries.append(kind)
        raise failures[kind]

    @workflow
    async def program(ctx: Context) -> None:
        for kind in failures:
            with contextlib.suppress(OSError):
                await ctx.call(ask, kind)

    await run(program)
    assert tries == ["listed"] * 4 + ["other"]


@pytest.mark.parametrize("guess", [(), ("right",), ("wrong",)], ids=["plain", "hit", "miss"])
async def test_a_failed_try_leaves_nothing_in_the_state(guess: tuple[str, ...]) -> None:
    """Only the writes of the try that returned are committed, and each try sees the state as it was before."""
    store = MemoryStore()
    seen: list[list[Any]] = []

    @step(effect=Effect.READONLY, predict=Guesses(*guess))
    async def ask() -> str:
        return "right"

    tries: dict[str, int] = {}

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, wait=0.0))
    async def work(answer: str, state: State) -> str:
        tries[answer] = tries.get(answer, 0) + 1
        seen.append(state.get("log", []))
        state.append("log", f"{answer} {tries[answer]}")
        state.add("count", 1)
        if tries[answer] < 3:
            state["broken"] = True
            raise ConnectionError
        return answer

    @workflow
    async def program(ctx: Context) -> Any:
        ctx.state["log"] = ["begin"]
        await ctx.call(work, await ctx.call(ask))
        return ctx.state.get("log"), ctx.state.get("count"), "broken" in ctx.state

    result = await run(program, store=store, run_id="r", policy=Fixed(2, width=2))
    assert result.value == (["begin", "right 3"], 1, False)
    assert values_of(store, "r") == {"log": ["begin", "right 3"], "count": 1}
    assert all(log == ["begin"] for log in seen)


async def test_a_step_that_used_up_its_tries_leaves_nothing_in_the_state() -> None:
    """A step that fails for good has written nothing, and the program that handles it goes on from there."""
    store = MemoryStore()

    @step(effect=Effect.READONLY, retry=Retry(attempts=2, wait=0.0))
    async def work(state: State) -> None:
        state["broken"] = True
        raise ConnectionError

    @workflow
    async def program(ctx: Context) -> bool:
        try:
            await ctx.call(work)
        except ConnectionError:
            ctx.state["handled"] = True
        return "broken" in ctx.state

    assert (await run(program, store=store, run_id="r")).value is False
    assert values_of(store, "r") == {"handled": True}


async def test_each_try_gets_its_own_arguments() -> None:
    """A failed try that changed its arguments has changed a copy."""
    seen: list[list[int]] = []

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, wait=0.0))
    async def work(items: list[int]) -> int:
        seen.append(list(items))
        items.append(0)
        if len(seen) < 3:
            raise ConnectionError
        return len(items)

    @workflow
    async def program(ctx: Context) -> Any:
        items = [1, 2]
        return await ctx.call(work, items), items

    assert (await run(program)).value == (3, [1, 2])
    assert seen == [[1, 2]] * 3


async def test_a_result_that_cannot_be_stored_does_not_repeat_the_effect() -> None:
    """A step that returned has done its work: a result that cannot be encoded is no reason to try again."""
    world = World()
    store = MemoryStore()

    @step(effect=Effect.IDEMPOTENT, retry=Retry(attempts=3, wait=0.0))
    async def pay() -> object:
        world.see("paid")
        return object()

    @workflow
    async def program(ctx: Context) -> str:
        try:
            await ctx.call(pay)
        except UnsupportedValueError as error:
            return str(error)
        return "stored"

    text = (await run(program, store=store, run_id="r")).value
    assert pay.name in text
    assert "object" in text
    assert world.seen == ["paid"]


@jumping
async def test_a_retried_step_keeps_its_effect_row() -> None:
    """All tries of one attempt belong to one row and one key; the row is FAILED only when no try is left."""
    store = MemoryStore()
    statuses: list[EffectStatus] = []
    keys: set[str] = set()

    @step(retry=Retry(attempts=3, wait=60.0, on=(ConnectionError,), not_sent=True))
    async def pay(attempt: Attempt) -> None:
        statuses.append(row_of(store, "r", "pay").status)
        keys.add(attempt.idempotency_key)
        raise ConnectionError

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(pay)

    with pytest.raises(ConnectionError):
        await run(program, store=store, run_id="r")
    assert statuses == [EffectStatus.SENT] * 3
    assert len(keys) == 1
    assert row_of(store, "r", "pay").status is EffectStatus.FAILED


# ----------------------------------------------------------------------------------------------------------- timeouts


@jumping
async def test_a_timeout_holds_for_every_try() -> None:
    """Each try has the whole timeout, waits between tries do not count, and the last overrun is a StepTimeoutError."""
    began: list[float] = []
    ended: list[float] = []

    @step(effect=Effect.READONLY, timeout=10.0, retry=Retry(attempts=3, wait=50.0, backoff=1.0))
    async def ask() -> None:
        began.append(trio.current_time())
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(ask)

    with pytest.raises(StepTimeoutError) as caught:
        await run(program)
    assert (caught.value.step, caught.value.seconds) == (ask.name, 10.0)
    assert isinstance(caught.value, TimeoutError)
    assert [end - begin for begin, end in zip(began, ended, strict=True)] == pytest.approx([10.0] * 3)
    assert [later - end for end, later in zip(ended, began[1:], strict=False)] == pytest.approx([50.0] * 2)


@jumping
async def test_a_step_in_time_is_left_alone() -> None:
    """A step that takes a little less than its timeout returns, and a TimeoutError of its own is its own."""

    @step(effect=Effect.READONLY, timeout=10.0)
    async def ask(*, own: bool) -> str:
        await anyio.sleep(9.999)
        if own:
            raise TimeoutError("the server's")
        return "answer"

    @workflow
    async def program(ctx: Context) -> str:
        try:
            await ctx.call(ask, own=True)
        except TimeoutError as error:
            return f"{type(error).__name__} {error}, {await ctx.call(ask, own=False)}"
        return "not reached"

    assert (await run(program)).value == "TimeoutError the server's, answer"


@jumping
async def test_a_timeout_can_be_handled_and_is_recorded() -> None:
    """The program may catch a StepTimeoutError, and a resumed run sees the same one."""
    store = MemoryStore()

    @step(effect=Effect.READONLY, timeout=1.0)
    async def ask() -> None:
        await anyio.sleep_forever()

    @workflow
    async def program(ctx: Context) -> Any:
        try:
            await ctx.call(ask)
        except StepTimeoutError as error:
            return error.step, error.seconds
        return None

    assert (await run(program, store=store, run_id="r")).value == (ask.name, 1.0)


@jumping
async def test_a_thread_that_overran_is_waited_for_and_timed_out() -> None:
    """A thread cannot be stopped: when it ends late, its step has timed out all the same, and its writes are gone."""
    store = MemoryStore()
    release = threading.Event()
    ended: list[str] = []

    @step(effect=Effect.READONLY, timeout=5.0)
    def slow(state: State) -> str:
        state["late"] = True
        assert release.wait(30)
        ended.append("thread")
        return "late"

    @workflow
    async def program(ctx: Context) -> str:
        try:
            return await ctx.call(slow)
        except StepTimeoutError:
            return "timed out"

    async def open_later() -> None:
        await anyio.sleep(20.0)  # the clock jumps: the timeout comes first
        release.set()

    async with anyio.create_task_group() as group:
        group.start_soon(open_later)
        result = await run(program, store=store, run_id="r")
    assert ended == ["thread"]
    assert result.value == "timed out"
    assert values_of(store, "r") == {}


@jumping
async def test_a_timeout_in_a_doomed_world_reaches_nobody() -> None:
    """A step on a wrong guess may run into its timeout without anybody noticing."""
    asked = Gate()

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await anyio.sleep(100.0)
        return "right"

    @step(effect=Effect.READONLY, timeout=1.0)
    async def look(answer: str) -> str:
        if answer == "wrong":
            asked.reached.set()
            await anyio.sleep_forever()
        return answer

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(look, await ctx.call(ask))

    assert (await run(program, policy=Fixed(2))).value == "right"
    assert asked.reached.is_set()
