"""What is settled when a run stops or branches off: effects under way, unknown ones, and those that are taken over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from specflow.definitions import Attempt, Workflow, given, step, workflow
from specflow.errors import BackendContractError, EffectUnknownError, UnknownRunError
from specflow.history import EffectRecord, EffectStatus, Lease, RunStatus
from specflow.outbox import NotSent, Sent
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import fork, resume, run
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    PowerCutError,
    World,
    WrappedStore,
    has_row,
    row_of,
    rows_of,
    settle,
    values_of,
)

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------- effects that wrote the state, by hand


class Paying:
    """A run that died with the answer of a step in hand that writes the state; two branches have written before."""

    def __init__(self, **settings: Any) -> None:
        self.world, self.store = World(), MemoryStore()

        @step(**settings)
        async def pay(amount: int, state: State = given, attempt: Attempt = given) -> str:
            self.world.see(amount, attempt.idempotency_key)
            state["paid"] = state.get("paid", 0) + amount
            state.append("log", f"paid {amount}")
            state.delete("debt")
            return "receipt"

        @workflow
        async def program(ctx: Context) -> Any:
            ctx.state["debt"] = 5
            ctx.state["log"] = ["begun"]
            receipt = await ctx.call(pay, 5)
            return receipt, dict(ctx.state.scan())

        self.pay, self.program = pay, program

    async def die(self) -> str:
        """Returns the key of the effect."""
        with pytest.raises(PowerCutError):
            await run(self.program, store=DyingStore(has_row(EffectStatus.ACKED), inner=self.store), run_id="r")
        return row_of(self.store, "r", "pay").key

    async def go_on(self, **settings: Any) -> Any:
        """Resume."""
        return (await resume("r", store=self.store, program=self.program, **settings)).value


def as_the_step_did(state: State) -> None:
    """What ``pay`` writes."""
    state["paid"] = state.get("paid", 0) + 5
    state.append("log", "paid 5")
    state.delete("debt")


async def test_an_effect_known_by_hand_brings_its_state_changes() -> None:
    """``Sent(result, writes=...)`` puts values, or makes the step's own changes again; both are committed."""
    for writes, expected in (
        ({"paid": 5, "log": ["begun", "paid 5"]}, {"paid": 5, "log": ["begun", "paid 5"], "debt": 5}),
        (as_the_step_did, {"paid": 5, "log": ["begun", "paid 5"]}),
        ({}, {"log": ["begun"], "debt": 5}),
    ):
        paying = Paying()
        key = await paying.die()
        receipt, seen = await paying.go_on(resolve={key: Sent("by hand", writes=writes)})
        assert receipt == "by hand"
        assert seen == expected == values_of(paying.store, "r")
        assert paying.world.seen == [5]
        assert row_of(paying.store, "r", "pay").status is EffectStatus.ACKED


async def test_an_effect_known_by_hand_must_say_what_it_wrote() -> None:
    """For a step that declares a State, a bare ``Sent`` would lose its changes: refused, and the run stays blocked."""
    paying = Paying()
    key = await paying.die()
    for _ in range(2):
        with pytest.raises(BackendContractError, match=r"writes=\{\}"):
            await paying.go_on(resolve={key: Sent("by hand")})
        assert paying.store.get_run("r").status is RunStatus.BLOCKED
        assert row_of(paying.store, "r", "pay").status is EffectStatus.UNKNOWN
    receipt, seen = await paying.go_on(resolve={key: Sent("by hand", writes=as_the_step_did)})
    assert (receipt, seen["paid"]) == ("by hand", 5)
    assert paying.world.seen == [5]


@pytest.mark.parametrize("tells", [True, False])
async def test_a_probe_brings_state_changes_too(tells: bool) -> None:  # noqa: FBT001
    """A probe answers for a step that writes the state under the same rule."""

    def probe(key: str, amount: int) -> Sent:
        return Sent(f"found {amount}", writes={"paid": amount} if tells else None)

    paying = Paying(probe=probe)
    await paying.die()
    if not tells:
        with pytest.raises(BackendContractError, match="pay"):
            await paying.go_on()
        assert paying.store.get_run("r").status is RunStatus.BLOCKED
        return
    assert await paying.go_on() == ("found 5", {"paid": 5, "log": ["begun"], "debt": 5})
    assert paying.world.seen == [5]


async def test_state_changes_by_hand_merge_with_other_branches() -> None:
    """Appending again, instead of putting the whole list, merges at the join as the step's own append would have."""
    store, world = MemoryStore(), World()

    @step
    async def pay(amount: int, state: State = given) -> int:
        world.see(amount)
        state.append("log", amount)
        return amount

    @workflow
    async def program(ctx: Context) -> list[int]:
        await ctx.map(pay, [1, 2])
        return list(ctx.state["log"])

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_row(EffectStatus.ACKED), inner=store), run_id="r")
    seen = list(world.seen)

    def appends(amount: int) -> Sent:
        return Sent(amount, writes=lambda state: state.append("log", amount))

    answers = {
        row.key: appends(amount) if amount in seen else NotSent()
        for row, amount in zip(rows_of(store, "r", "pay"), (1, 2), strict=False)
    }
    assert (await resume("r", store=store, program=program, resolve=answers)).value == [1, 2]
    assert sorted(world.seen) == [1, 2]


# --------------------------------------------------------------------------------------- a block, and who is under way


class Blocking:
    """Two branches; the first stops at an effect of unknown fate while the second one's effect is under way."""

    def __init__(self, *, fails: bool = False) -> None:
        self.world, self.store = World(), MemoryStore()
        self.gate, self.asked = Gate(), Gate()

        async def nobody_knows(key: str) -> None:
            await self.asked.pass_through()
            raise ConnectionError("the bank does not answer")

        @step(probe=nobody_knows)
        async def lost() -> str:
            self.world.see("lost")
            return "found"

        @step
        async def slow(number: int, state: State = given) -> str:
            self.world.see("begun")
            try:
                await self.gate.pass_through()
            except BaseException:
                self.world.see("cut off")
                raise
            self.world.see("ended")
            if fails:
                raise ConnectionError("no line")
            state["slow"] = number
            return "slow"

        async def body(ctx: Context, *, both: bool = True) -> Any:
            calls = [ctx.call(lost), ctx.call(slow, 2)] if both else [ctx.call(lost)]
            return [repr(value) for value in await ctx.gather(*calls, return_exceptions=True)]

        async def only_the_first(ctx: Context) -> Any:
            return await body(ctx, both=False)

        async def program(ctx: Context) -> Any:
            return await body(ctx)

        self.program = Workflow(program, name="program")
        self.shorter = Workflow(only_the_first, name="program")
        self.shorter.fingerprint = self.program.fingerprint

    async def block(self) -> EffectUnknownError:
        """Die with the first effect's answer in hand, before the second began; go on until the run is blocked."""
        with pytest.raises(PowerCutError):
            await run(self.shorter, store=DyingStore(has_row(EffectStatus.ACKED), inner=self.store), run_id="r")
        raised: list[EffectUnknownError] = []

        async def drive() -> None:
            with pytest.raises(EffectUnknownError) as caught:
                await resume("r", store=self.store, program=self.program, policy=Fixed(0))
            raised.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(drive)
            await self.gate.reached.wait()
            await self.asked.reached.wait()
            self.asked.open()
            await settle()
            assert self.store.get_run("r").status is RunStatus.BLOCKED
            assert raised == []
            self.gate.open()
        return raised[0]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_waits_for_effects_under_way(fails: bool) -> None:  # noqa: FBT001
    """An effect of another branch is not cut off half-way: its answer, or its failure, is on record, and is used."""
    blocking = Blocking(fails=fails)
    unknown = await blocking.block()
    assert blocking.world.seen == ["lost", "begun", "ended"]
    row = row_of(blocking.store, "r", "slow")
    assert row.status is (EffectStatus.FAILED if fails else EffectStatus.ACKED)
    assert [write.key for write in row.writes] == ([] if fails else ["slow"])
    answer = {unknown.key: Sent("by hand")}
    result = await resume("r", store=blocking.store, program=blocking.program, resolve=answer)
    assert result.value == ["'by hand'", repr(ConnectionError("no line")) if fails else "'slow'"]
    assert blocking.world.seen == ["lost", "begun", "ended"]
    assert values_of(blocking.store, "r") == ({} if fails else {"slow": 2})


def test_a_cut_off_effect_would_be_noticed() -> None:
    """The step of the test above says when it is stopped."""
    blocking = Blocking()

    async def cut() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: run(blocking.program))
                await blocking.gate.reached.wait()
                scope.cancel()

    anyio.run(cut)
    assert "cut off" in blocking.world.seen


# --------------------------------------------------------------------------------------------------------------- forks


class BreaksAfterForking(WrappedStore):
    """A store whose next commit fails: where a fork is made in two steps, the second one does not come about."""

    def fork(
        self, run_id: str, version: int, new_run_id: str, owner: str, effects: Sequence[EffectRecord] = ()
    ) -> Lease:
        """Fork."""
        lease: Lease = self.inner.fork(run_id, version, new_run_id, owner, effects)
        return lease

    def commit(self, lease: Lease, commit: Any) -> int:
        """The process dies here."""
        raise PowerCutError


class BreaksWhileForking(WrappedStore):
    """A store that dies in the middle of a fork."""

    def fork(
        self, run_id: str, version: int, new_run_id: str, owner: str, effects: Sequence[EffectRecord] = ()
    ) -> Lease:
        """Die while the effects are read."""

        class Dying(tuple[Any, ...]):
            __slots__ = ()

            def __iter__(self) -> Any:
                yield from super().__iter__()
                raise PowerCutError

        lease: Lease = self.inner.fork(run_id, version, new_run_id, owner, Dying(effects))
        return lease


async def paid_once(store: Any) -> tuple[Any, World]:
    """A finished run with one irreversible effect."""
    world = World()

    @step
    async def pay(amount: int) -> str:
        world.see(amount)
        return f"receipt {len(world.seen)}"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(pay, 5)

    await run(program, store=store, run_id="r")
    return program, world


async def test_a_fork_that_replays_needs_one_write() -> None:
    """The recorded results come with the fork itself: no death between the two can make a fork that pays again."""
    store = MemoryStore()
    program, world = await paid_once(store)
    fork("r", 0, store=BreaksAfterForking(store), new_run_id="copy", effects="replay")
    assert [row.status for row in store.effects("copy")] == [EffectStatus.ACKED]
    assert (await resume("copy", store=store, program=program)).value == "receipt 1"
    assert world.seen == [5]


async def test_a_fork_that_dies_leaves_nothing() -> None:
    """There is no fork without the results that it was to replay, and its name can be used again."""
    store = MemoryStore()
    program, world = await paid_once(store)
    with pytest.raises(PowerCutError):
        fork("r", 0, store=BreaksWhileForking(store), new_run_id="copy", effects="replay")
    with pytest.raises(UnknownRunError):
        store.get_run("copy")
    fork("r", 0, store=store, new_run_id="copy", effects="replay")
    assert (await resume("copy", store=store, program=program)).value == "receipt 1"
    assert world.seen == [5]


async def test_a_fork_of_a_fork_replays_what_was_replayed() -> None:
    """A taken-over result is the first run's: forking again neither asks about it nor loses it silently."""
    store = MemoryStore()
    program, world = await paid_once(store)
    fork("r", 0, store=store, new_run_id="copy", effects="replay")
    assert (await resume("copy", store=store, program=program)).value == "receipt 1"
    assert store.get_run("copy").owner is None
    assert world.seen == [5]
