"""What parallel branches make of one key: pipelines and gathers, against each other and against the serial account."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from specflow.definitions import given, step, workflow
from specflow.effects import Effect
from specflow.errors import StateConflictError
from specflow.graph import Pipeline
from specflow.replay import Context
from specflow.runtime import read_state, run
from specflow.state import State
from specflow.stores import MemoryStore
from specflow.testing import run_serial

pytestmark = pytest.mark.anyio


def diamond(second: Any, third: Any, *, swapped: bool) -> Pipeline:
    """``first`` puts k = 1; ``second`` and ``third`` follow it, in either order; ``last`` reads k after both."""
    pipeline = Pipeline("diamond")

    @pipeline.step(effect=Effect.PURE)
    async def first(x: int, state: State = given) -> int:
        state.put("k", x)
        return x

    async def left(first: int, state: State = given) -> int:
        second(state)
        return first

    async def right(first: int, state: State = given) -> int:
        third(state)
        return first

    for function in (right, left) if swapped else (left, right):
        pipeline.step(effect=Effect.PURE)(function)

    @pipeline.step(effect=Effect.PURE)
    async def last(left: int, right: int, state: State = given) -> Any:
        return state.get("k", f"missing after {left + right}")

    return pipeline


@pytest.mark.parametrize("swapped", [False, True])
async def test_a_change_is_measured_against_what_the_branch_found(swapped: bool) -> None:  # noqa: FBT001
    """Deleting what a step before had put is a change, and conflicts; putting it again is none, and loses nothing."""
    changes = diamond(lambda state: state.put("k", 5), lambda state: state.delete("k"), swapped=swapped)
    with pytest.raises(StateConflictError, match="'k'"):
        await run(changes, x=1)
    assert isinstance(run_serial(changes, x=1).error, StateConflictError)
    for kept in (lambda state: state.put("k", 1), lambda state: None):
        pipeline = diamond(lambda state: state.put("k", 5), kept, swapped=swapped)
        store = MemoryStore()
        result = await run(pipeline, x=1, store=store)
        assert result.value == run_serial(pipeline, x=1).value == 5
        assert read_state(store, result.run_id) == {"k": 5}


@pytest.mark.parametrize("amounts", [(1.5, Decimal("2.5")), (10**400, 0.5), (Decimal(1), 1.5)])
async def test_numbers_that_do_not_add_up_conflict_where_the_branches_meet(amounts: tuple[Any, Any]) -> None:
    """Each fits the key alone; together they would leave a state that nobody can read."""

    @step(effect=Effect.PURE)
    async def add(number: Any, state: State = given) -> None:
        state.add("total", number)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.gather(*[ctx.call(add, amount) for amount in amounts])

    with pytest.raises(StateConflictError, match="numbers of one kind"):
        await run(program)
    assert isinstance(run_serial(program).error, StateConflictError)

    pipeline = Pipeline("sums")

    @pipeline.step(effect=Effect.PURE)
    async def one(state: State = given) -> None:
        state.add("total", amounts[0])

    @pipeline.step(effect=Effect.PURE)
    async def other(state: State = given) -> None:
        state.add("total", amounts[1])

    with pytest.raises(StateConflictError, match="'total'"):
        await run(pipeline)
    assert isinstance(run_serial(pipeline).error, StateConflictError)


async def test_numbers_of_one_kind_still_add_up() -> None:
    """Integers and floats mix, as they do in Python."""
    store = MemoryStore()

    @step(effect=Effect.PURE)
    async def add(number: Any, state: State = given) -> None:
        state.add("total", number)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.map(add, [1, 2.5, 3])

    result = await run(program, store=store)
    assert read_state(store, result.run_id) == {"total": 6.5}
