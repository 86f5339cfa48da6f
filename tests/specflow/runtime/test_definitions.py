"""What may be declared: names of steps that tell them apart, and retries that cannot repeat an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from specflow.definitions import Retry, Step, given, step, workflow
from specflow.effects import Effect
from specflow.errors import DuplicateStepError, InvalidSettingError
from specflow.history import EffectStatus, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import resume, run
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import Gate, Guesses, World, jumping, row_of, settle

pytestmark = pytest.mark.anyio


# -------------------------------------------------------------------------------------------------------------- names


def adding(amount: int) -> Step[..., int]:
    """A pure step that adds an amount: all of them have one name and one code."""

    @step(effect=Effect.PURE)
    async def add(value: int) -> int:
        return value + amount

    return add


async def doubled(value: int) -> int:
    """Something else."""
    return value * 2


OTHERS: dict[str, Callable[[], Any]] = {
    "another closure": lambda: adding(100),
    "another function": lambda: step(name=adding(1).name, effect=Effect.PURE)(doubled),
    "another default": lambda: step(name=adding(1).name, effect=Effect.PURE)(lambda value, more=1: value + more),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_two_steps_of_one_name_are_refused_before_the_second_runs(other: Callable[[], Any]) -> None:
    """Their results would be taken for each other's: the error names both, and the second has not been called."""
    store = MemoryStore()
    first, second = adding(1), other()

    @workflow
    async def program(ctx: Context) -> list[int]:
        return [await ctx.call(first, 1), await ctx.call(second, 1)]

    with pytest.raises(DuplicateStepError) as caught:
        await run(program, store=store, run_id="r")
    assert caught.value.name == first.name == second.name
    assert f"adding.<locals>.add of module {__name__}" in caught.value.first
    assert f"of module {__name__}" in caught.value.second
    assert caught.value.second in str(caught.value)
    assert len(store.entries("r")) <= 1
    assert store.get_run("r").status is RunStatus.RUNNING


async def test_a_run_goes_on_when_the_names_are_told_apart() -> None:
    """Nothing was harmed: the same run is resumed once the second step has a name of its own."""
    store = MemoryStore()
    steps = [adding(1), adding(100)]

    @workflow
    async def program(ctx: Context) -> list[int]:
        return [await ctx.call(one, 1) for one in steps]

    with pytest.raises(DuplicateStepError):
        await run(program, store=store, run_id="r")
    steps[1] = step(name="add a hundred", effect=Effect.PURE)(steps[1].function)
    assert (await resume("r", store=store, program=program)).value == [2, 101]


async def test_steps_of_one_name_in_branches_are_refused() -> None:
    """Parallel branches belong to the same run."""
    first, second = adding(1), adding(100)

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.gather(ctx.call(first, 1), ctx.call(second, 1))

    with pytest.raises(DuplicateStepError):
        await run(program)


async def test_gathered_guesses_do_not_mix_steps_of_one_name() -> None:
    """Guessing the results of a gather meets the steps before they are called: refused then as well."""
    steps = [
        step(name="same", effect=Effect.PURE, predict=Guesses(2))(one.function) for one in (adding(1), adding(100))
    ]

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(steps[0], [1]) + await ctx.map(steps[1], [1])

    with pytest.raises(DuplicateStepError):
        await run(program, policy=Fixed(2))


async def test_a_second_name_on_a_wrong_guess_is_nobodys_business() -> None:
    """What only a wrong guess would call has harmed nobody."""
    asked = Gate()
    first, second = adding(1), adding(100)
    results: list[int] = []

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @workflow
    async def program(ctx: Context) -> int:
        value = await ctx.call(first, 1)
        return await ctx.call(second if await ctx.call(ask) == "wrong" else first, value)

    async def drive() -> None:
        results.append((await run(program, policy=Fixed(2))).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await asked.reached.wait()
        await settle()
        asked.open()
    assert results == [3]


async def test_a_second_name_on_a_right_guess_is_refused_when_it_is_true() -> None:
    """The world that called it becomes the program, and then the error is the program's."""
    first, second = adding(1), adding(100)

    @step(effect=Effect.READONLY, predict=Guesses("right"))
    async def ask() -> str:
        return "right"

    @workflow
    async def program(ctx: Context) -> int:
        value = await ctx.call(first, 1)
        return await ctx.call(second if await ctx.call(ask) == "right" else first, value)

    with pytest.raises(DuplicateStepError):
        await run(program, policy=Fixed(2))


async def test_the_same_function_may_be_declared_again() -> None:
    """Decorated twice, made anew by code that runs again, or with equal values in its closure, it is one step."""

    async def inner(value: int) -> int:
        return value + 1

    pairs = [(step(effect=Effect.PURE)(inner), step(effect=Effect.PURE)(inner)), (adding(3), adding(3))]
    for first, second in pairs:

        @workflow
        async def program(ctx: Context, first: Any = given, second: Any = given) -> list[int]:
            return [await ctx.call(first, 1), await ctx.call(second, 1)]

        program.function.__kwdefaults__ = None
        program.function.__defaults__ = (first, second)
        one, other = (await run(program)).value
        assert one == other

    @workflow
    async def defines(ctx: Context, amount: int) -> int:
        @step(effect=Effect.PURE, predict=Guesses(0))
        async def add(value: int) -> int:
            return value + amount

        total = 0
        for _ in range(4):
            total = await ctx.call(add, total)
        return total

    assert (await run(defines, 2, policy=Fixed(3))).value == 8  # its body runs once for every guess


# ------------------------------------------------------------------------------------------------------------ retries

MAY_NOT_REPEAT: list[dict[str, Any]] = [{}, {"effect": Effect.IRREVERSIBLE}, {"effect": Effect.BUFFERED}]


class LineBusyError(Exception):
    """Raised before anything is sent."""


@pytest.mark.parametrize("settings", MAY_NOT_REPEAT)
def test_a_retry_that_may_send_twice_is_refused(settings: dict[str, Any]) -> None:
    """A try that raised may have done its work: the declaration fails, and says what to do."""
    with pytest.raises(InvalidSettingError, match="IDEMPOTENT") as caught:

        @step(retry=Retry(attempts=2), **settings)
        async def pay(amount: int) -> str:
            return f"{amount} paid"

    assert caught.value.setting == "retry"
    assert "not_sent=True" in str(caught.value)


@pytest.mark.parametrize("settings", MAY_NOT_REPEAT)
@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_exceptions_that_prove_nothing_are_refused(settings: dict[str, Any], kind: Any) -> None:
    """``not_sent`` over every exception would include what the runtime raises for a try that it cut off."""
    with pytest.raises(InvalidSettingError, match="precise"):
        step(retry=Retry(attempts=2, on=(LineBusyError, kind), not_sent=True), **settings)(doubled)


@pytest.mark.parametrize("kind", [TimeoutError, OSError])
def test_a_timeout_proves_nothing(kind: Any) -> None:
    """With a timeout of its own, a step cannot say that TimeoutError means that nothing was sent; without, it can."""
    retry = Retry(attempts=2, on=(kind,), not_sent=True)
    with pytest.raises(InvalidSettingError, match="StepTimeoutError"):
        step(retry=retry, timeout=5.0)(doubled)
    step(retry=retry)(doubled)


def test_steps_that_may_repeat_take_any_retry() -> None:
    """Steps without effects, those that their service recognises, and those that are undone if they failed half-way."""
    retry = Retry(attempts=3)
    for effect in (Effect.PURE, Effect.READONLY, Effect.IDEMPOTENT):
        step(effect=effect, retry=retry)(doubled)
    step(effect=Effect.BUFFERED, idempotent=True, retry=retry)(doubled)
    step(effect=Effect.COMPENSABLE, undo=doubled, retry=retry)(doubled)
    step(retry=Retry(attempts=1))(doubled)


@jumping
async def test_only_what_was_not_sent_is_tried_again(anyio_backend: Any) -> None:
    """A declared exception leads to another try under the same key, any other one to none."""
    store, world = MemoryStore(), World()
    failures: list[Exception] = [LineBusyError(), LineBusyError(), ConnectionError("sent, and then the line broke")]

    @step(retry=Retry(attempts=9, on=(LineBusyError,), not_sent=True))
    async def call_out(number: int) -> str:
        error = failures.pop(0)
        if not isinstance(error, LineBusyError):
            world.see("called")
        raise error

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(call_out, 1)

    with pytest.raises(ConnectionError):
        await run(program, store=store, run_id="r")
    assert world.seen == ["called"]
    assert failures == []
    row = row_of(store, "r", "call_out")
    assert (row.status, row.tries) == (EffectStatus.FAILED, 1)


def test_a_state_does_not_change_what_may_be_retried() -> None:
    """State writes of a failed try are dropped, but what it sent is not."""
    with pytest.raises(InvalidSettingError):

        @step(retry=Retry(attempts=2))
        async def pay(amount: int, state: State = given) -> None:
            state["paid"] = amount
