"""Forks and what their ancestors have sent: nothing is sent twice unless it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from specflow.definitions import step, workflow
from specflow.effects import Effect
from specflow.errors import MisuseError
from specflow.replay import Context
from specflow.runtime import fork, resume, run
from specflow.stores import MemoryStore

pytestmark = pytest.mark.anyio


class Shop:
    """A workflow that adds up and pays, and what it has paid."""

    def __init__(self, *, fails: bool = False) -> None:
        self.paid: list[int] = []
        self.store = MemoryStore()

        @step(effect=Effect.PURE)
        async def total(prices: list[int]) -> int:
            return sum(prices)

        @step(effect=Effect.IRREVERSIBLE)
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            if fails:
                raise ConnectionError("no answer")
            return "receipt"

        @workflow
        async def program(ctx: Context, prices: list[int]) -> str:
            try:
                return await ctx.call(pay, await ctx.call(total, prices))
            except ConnectionError as error:
                return str(error)

        self.program = program

    async def go_on(self, run_id: str, new: str, effects: Any) -> Any:
        """Fork after the sum, and resume the fork."""
        fork(run_id, 1, store=self.store, new_run_id=new, effects=effects)
        return (await resume(new, store=self.store, program=self.program)).value


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_resumed", [True, False])
async def test_a_fork_of_a_fork_replays_what_the_first_run_sent(fails: bool, is_resumed: bool) -> None:  # noqa: FBT001
    """Receipts and errors are handed on; without a word about them, no fork of a fork is made."""
    shop = Shop(fails=fails)
    answer = (await run(shop.program, [1, 2], store=shop.store, run_id="A")).value
    with pytest.raises(MisuseError, match="pay"):
        fork("A", 1, store=shop.store)
    fork("A", 1, store=shop.store, new_run_id="B", effects="replay")
    if is_resumed:
        assert (await resume("B", store=shop.store, program=shop.program)).value == answer
    with pytest.raises(MisuseError, match="pay"):
        fork("B", 1, store=shop.store)
    assert await shop.go_on("B", "C", "replay") == answer
    assert await shop.go_on("C", "D", "replay") == answer
    assert shop.paid == [3]
    assert await shop.go_on("C", "E", "resend") == answer
    assert shop.paid == [3, 3]


async def test_results_kept_without_an_effect_ask_nothing_of_a_fork() -> None:
    """What branches had read when an effect began is on record, too; a fork may simply read it again."""
    store = MemoryStore()
    asked: list[int] = []

    @step(effect=Effect.READONLY)
    async def read(number: int) -> int:
        asked.append(number)
        return number

    @step(effect=Effect.IRREVERSIBLE)
    async def pay(amount: int) -> int:
        return amount

    @workflow
    async def branch(ctx: Context, number: int) -> int:
        return await ctx.call(pay, await ctx.call(read, number))

    @workflow
    async def program(ctx: Context) -> list[int]:
        first = await ctx.call(read, 0)
        return [first, *await ctx.map(branch, [1, 2])]

    value = (await run(program, store=store, run_id="A")).value
    fork("A", 1, store=store, new_run_id="B", effects="replay")
    fork("B", 1, store=store, new_run_id="C", effects="replay")
    for run_id in ("B", "C"):
        assert (await resume(run_id, store=store, program=program)).value == value
