"""Workflows as a type checker sees them. This file is checked by mypy and never run."""

from __future__ import annotations

from typing import assert_type

from specflow import Attempt, Context, Effect, Pipeline, RunResult, State, given, run, step, workflow
from specflow.predictors import LastValue


@step
async def plain(value: int) -> str:
    """An async step."""
    return str(value)


@step(effect=Effect.PURE, predict=LastValue())
def threaded(value: int, *, twice: bool = False) -> float:
    """A sync step with settings."""
    return value * (2.0 if twice else 1.0)


@step(effect=Effect.IDEMPOTENT)
async def injected(value: int, state: State = given, attempt: Attempt = given) -> bytes:
    """A step with parameters that the runtime fills in."""
    state.put("last", value)
    return attempt.idempotency_key.encode()


@workflow
async def nested(ctx: Context, value: int) -> list[str]:
    """A workflow that another calls."""
    return await ctx.map(plain, range(value))


@workflow
async def outer(ctx: Context, value: int) -> int:
    """Results have the types that the steps declare."""
    assert_type(await ctx.call(plain, value), str)
    assert_type(await ctx.call(threaded, value, twice=True), float)
    assert_type(await ctx.call(injected, value), bytes)
    assert_type(await ctx.call(nested, value), list[str])
    await ctx.call(plain, "no int")  # type: ignore[call-overload]
    await ctx.call(threaded, value, thrice=True)  # type: ignore[call-arg]
    return value


pipeline = Pipeline("typed")


@pipeline.step
async def first(ticket: str) -> int:
    """A step of a pipeline keeps its signature."""
    return len(ticket)


@pipeline.step(effect=Effect.PURE)
async def second(first: int) -> str:
    """So does one with settings."""
    return str(first)


async def use() -> None:
    """Runs are typed by their workflow."""
    assert_type(await run(outer, 3), RunResult[int])
