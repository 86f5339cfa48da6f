"""Plain ``predict`` methods that return something to await: nobody knows before they are asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from specflow import Budget, Context, Effect, run, step, workflow
from specflow.policies import Fixed
from specflow.predictors import FirstOf, Fn, Tournament
from specflow.speculation import Call, Prediction
from specflow.stores import MemoryStore
from specflow.testing.virtual import simulate
from specflow.whatif import what_if
from specflow.worlds import TaskKind
from tests.specflow.runtime.support import Gate


class Ready:
    """Something to await that is neither a coroutine nor a future."""

    def __await__(self) -> Any:
        return (yield from checkpoint().__await__()) or [Prediction("right", 0.9)]


async def model() -> list[Prediction]:
    """A cheap model."""
    await checkpoint()
    return [Prediction("right", 0.9)]


def call_up(function: Callable[[], Any]) -> Any:
    """A plain function that returns what an async one is about to."""
    return function()


class Lambda:
    """A predictor made of a function of the call."""

    def __init__(self, predict: Callable[[Call], Any]) -> None:
        self.predict = predict


WAYS: dict[str, Callable[[], Any]] = {
    "a lambda over a coroutine": lambda: Lambda(lambda call: model()),
    "an object to await": lambda: Lambda(lambda call: Ready()),
    "Fn over a partial": lambda: Fn(functools.partial(call_up, model)),
    "FirstOf": lambda: FirstOf(Fn(lambda: None), Lambda(lambda call: model())),
    "Tournament": lambda: Tournament(Lambda(lambda call: model())),
}


@pytest.mark.anyio
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())
async def test_what_a_plain_method_returns_to_be_awaited_is_awaited(make: Callable[[], Any]) -> None:
    """The protocol allows it: the guess comes while the step is at work, and is followed."""
    asked, looked = Gate(), Gate(is_open=True)
    results: list[Any] = []

    @step(effect=Effect.READONLY, predict=make())
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.READONLY)
    async def look(answer: str) -> str:
        await looked.pass_through()
        return answer

    @workflow
    async def flow(ctx: Context) -> str:
        return await ctx.call(look, await ctx.call(ask))

    async def drive() -> None:
        results.append(await run(flow, policy=Fixed(1)))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await looked.reached.wait()  # on the guess: the answer is not there yet
        asked.open()
    (result,) = results
    assert (result.value, result.report.hits, result.report.misses) == ("right", 1, 0)


@pytest.mark.anyio
async def test_what_fails_while_it_is_awaited_costs_its_guess() -> None:
    """An error, or an answer that is no list of predictions, is counted against the predictor and harms nobody."""

    async def broken() -> Any:
        raise ConnectionError("no model")

    async def nonsense() -> Any:
        return 7

    for answer in (broken, nonsense):

        @step(effect=Effect.READONLY, predict=Lambda(lambda call, answer=answer: answer()))
        async def ask() -> str:
            for _ in range(20):
                await checkpoint()
            return "right"

        @workflow
        async def flow(ctx: Context, ask: Any = ask) -> str:
            return await ctx.call(ask)

        result = await run(flow, policy=Fixed(1))
        assert result.value == "right"
        assert result.report.hits == result.report.misses == 0


@pytest.mark.anyio
async def test_what_is_not_awaited_is_let_go() -> None:
    """Where a guess is not wanted, cannot be afforded, or comes too late, nothing is left that was never awaited."""
    made: list[Any] = []

    def predict(call: Call) -> Any:
        made.append(model())
        return made[-1]

    @step(effect=Effect.READONLY, predict=Lambda(predict))
    async def ask(number: int) -> str:
        return "right"

    @workflow
    async def alone(ctx: Context) -> str:
        return await ctx.call(ask, 1)

    @workflow
    async def together(ctx: Context) -> list[str]:
        return await ctx.map(ask, range(2))

    for flow in (alone, together):
        for policy in (Fixed(1), Fixed(1, budget=Budget(seconds=0.0)), Fixed(1, budget=Budget(slots=0))):
            assert (await run(flow, policy=policy)).value in ("right", ["right"] * 2)
    assert made
    assert {inspect.getcoroutinestate(one) for one in made} == {inspect.CORO_CLOSED}


def test_a_recorded_run_is_followed_without_asking_it() -> None:
    """What-if asks nobody who has to be awaited, also where that only turns out when it is asked."""
    store = MemoryStore()

    @step(effect=Effect.READONLY, predict=Lambda(lambda call: model()))
    async def ask(number: int) -> int:
        return number

    @workflow
    async def flow(ctx: Context) -> list[int]:
        return [await ctx.call(ask, number) for number in range(3)]

    anyio.run(lambda: run(flow, store=store, run_id="r", policy=Fixed(0)))
    estimate = what_if(flow, store.get_run("r"), store.entries("r"), policy=Fixed(2))
    assert estimate.report.hits == estimate.report.misses == 0


def test_it_is_awaited_in_virtual_time() -> None:
    """The simulation takes it as it takes an async method."""

    async def at_once() -> list[Prediction]:
        return [Prediction("right", 0.9)]

    @step(effect=Effect.READONLY, predict=Lambda(lambda call: at_once()))
    async def ask() -> str:
        return "right"

    @step(effect=Effect.READONLY)
    async def look(answer: str) -> str:
        return answer

    @workflow
    async def flow(ctx: Context) -> str:
        return await ctx.call(look, await ctx.call(ask))

    simulation = simulate(flow, policy=Fixed(1), durations=lambda work: 0.5 if work.kind is TaskKind.PREDICT else 2.0)
    assert (simulation.value, simulation.report.hits, simulation.seconds) == ("right", 1, 2.5)
