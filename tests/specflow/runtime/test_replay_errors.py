"""What a workflow may not do, and how it is told: where it stands, and what to write instead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import trio

from specflow.codec import RecordedError
from specflow.definitions import Attempt, Workflow, step, workflow
from specflow.effects import Effect
from specflow.errors import (
    DefinitionError,
    DivergenceError,
    EffectUnknownError,
    ForeignAwaitError,
    MisuseError,
    ProgramChangedError,
    ReplayError,
    UnsupportedValueError,
)
from specflow.graph import Pipeline
from specflow.history import EffectStatus, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import NotSent, resume, run
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    Guesses,
    PowerCutError,
    World,
    has_entry,
    has_row,
    history,
    row_of,
    rows_of,
    settle,
    values_of,
)

pytestmark = pytest.mark.anyio


@step(effect=Effect.PURE)
async def plus_one(value: int) -> int:
    """A step."""
    return value + 1


@step(effect=Effect.PURE)
async def double(value: int) -> int:
    """Another one."""
    return value * 2


# ------------------------------------------------------------------------------------------------------ foreign awaits


class _Own:
    """An awaitable that yields something of its own."""

    def __await__(self) -> Any:
        yield "something of its own"


FOREIGN: dict[str, Callable[[], Any]] = {
    "anyio.sleep": lambda: anyio.sleep(0.01),
    "checkpoint": anyio.lowlevel.checkpoint,
    "event": lambda: anyio.Event().wait(),
    "own": _Own,
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_await_is_named_with_its_position(name: str) -> None:
    """Awaiting anything but the context ends the run with an error that says after which call, and its cleanup runs."""
    store = MemoryStore()
    cleaned: list[str] = []

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(plus_one, 1)
        await ctx.call(plus_one, 2)
        try:
            await FOREIGN[name]()
        except ForeignAwaitError:
            cleaned.append("caught")  # nobody can go on from here
        finally:
            cleaned.append("cleaned")

    with pytest.raises(ForeignAwaitError) as caught:
        await run(program, store=store, run_id="r")
    assert caught.value.position == "1"
    assert "position 1" in str(caught.value)
    assert "@step" in str(caught.value)
    assert cleaned == ["cleaned"]
    assert [entry.step for entry in store.entries("r")][:2] == [plus_one.name] * 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_sleep_in_a_workflow_is_an_error(anyio_backend: str) -> None:
    """The likeliest mistake, before the first call: the position is the start."""

    @workflow
    async def program(ctx: Context) -> None:
        await asyncio.sleep(0.01)  # noqa: TID251 -- the mistake that this is about

    with pytest.raises(ForeignAwaitError) as caught:
        await run(program)
    assert "start" in caught.value.position


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_sleep_in_a_workflow_is_an_error(anyio_backend: str) -> None:
    """The same for trio."""

    @workflow
    async def program(ctx: Context) -> None:
        await trio.sleep(0.01)

    with pytest.raises(ForeignAwaitError):
        await run(program)


async def test_a_foreign_await_in_a_branch_has_the_branch_s_position() -> None:
    """Inside a nested workflow of a gather the position is the one inside the branch."""

    @workflow
    async def branch(ctx: Context, value: int) -> int:
        value = await ctx.call(plus_one, value)
        if value == 3:
            await anyio.sleep(0.01)
        return value

    @workflow
    async def program(ctx: Context) -> list[int]:
        await ctx.call(plus_one, 0)
        return await ctx.map(branch, [1, 2])

    with pytest.raises(ForeignAwaitError) as caught:
        await run(program)
    assert caught.value.position == "1.1.0"


async def test_a_foreign_await_on_a_wrong_guess_reaches_nobody() -> None:
    """In a world that falls a foreign await is just another error that never happened."""

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        return "right"

    @workflow
    async def program(ctx: Context) -> str:
        answer = await ctx.call(ask)
        if answer == "wrong":
            await anyio.sleep(0.01)
        return answer

    assert (await run(program, policy=Fixed(2))).value == "right"


# -------------------------------------------------------------------------------------------------------- divergence


@dataclass
class Changed:
    """A program that was stopped after some calls, and another one under the same name that goes on."""

    first: Callable[[Context], Any]
    second: Callable[[Context], Any]
    kept: list[Any] = field(default_factory=list)

    async def go_on(self, store: MemoryStore, *, allow_changed: bool = True) -> Any:
        """Run the first until its last step is about to be committed, then resume with the second."""
        first = Workflow(self.first, name="program")
        second = Workflow(self.second, name="program")
        dying = DyingStore(has_entry("last"), inner=store)
        with pytest.raises(PowerCutError):
            await run(first, store=dying, run_id="r")
        self.kept = history(store, "r")
        return (await resume("r", store=store, program=second, allow_changed=allow_changed)).value


@step(effect=Effect.PURE)
async def last(value: int) -> int:
    """The step that the first program was stopped at."""
    return value


async def original(ctx: Context) -> int:
    """Three calls and a stop."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    value = await ctx.call(double, value)
    await ctx.gather(ctx.call(plus_one, 1), ctx.call(double, 2))
    await ctx.sleep(0)
    value = await ctx.call(plus_one, value)
    return await ctx.call(last, value)


async def other_step(ctx: Context) -> int:
    """Another step at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    return await ctx.call(plus_one, value)


async def other_arguments(ctx: Context) -> int:
    """Other arguments at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    return await ctx.call(double, value + 1)


async def other_state(ctx: Context) -> int:
    """Another change of the state before position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value + 1
    return await ctx.call(double, value)


async def missing_state(ctx: Context) -> int:
    """No change of the state before position 1."""
    value = await ctx.call(plus_one, 1)
    return await ctx.call(double, value)


async def sleep_instead(ctx: Context) -> int:
    """A sleep at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    await ctx.sleep(0)
    return value


async def gather_instead(ctx: Context) -> int:
    """A gather at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    await ctx.gather(ctx.call(double, value))
    return value


async def returns_early(ctx: Context) -> int:
    """The end at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    return value


async def raises_early(ctx: Context) -> int:
    """An exception at position 1."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    raise LookupError


async def one_branch_less(ctx: Context) -> int:
    """A gather that lost a branch."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    value = await ctx.call(double, value)
    await ctx.gather(ctx.call(plus_one, 1))
    await ctx.sleep(0)
    return await ctx.call(plus_one, value)


async def one_branch_more(ctx: Context) -> int:
    """A gather that got another branch."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    value = await ctx.call(double, value)
    await ctx.gather(ctx.call(plus_one, 1), ctx.call(double, 2), ctx.call(double, 3))
    await ctx.sleep(0)
    return await ctx.call(plus_one, value)


async def call_for_gather(ctx: Context) -> int:
    """A call where the gather was."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    value = await ctx.call(double, value)
    return await ctx.call(plus_one, value)


async def call_for_sleep(ctx: Context) -> int:
    """A call where the sleep was."""
    value = await ctx.call(plus_one, 1)
    ctx.state["value"] = value
    value = await ctx.call(double, value)
    await ctx.gather(ctx.call(plus_one, 1), ctx.call(double, 2))
    return await ctx.call(plus_one, value)


DIVERGING = {
    other_step: "1",
    other_arguments: "1",
    other_state: "1",
    missing_state: "1",
    sleep_instead: "1",
    gather_instead: "1",
    returns_early: "1",
    raises_early: "1",
    one_branch_less: "2.1.0",
    one_branch_more: "2.2.0",
    call_for_gather: "2",
    call_for_sleep: "3",
}


@pytest.mark.parametrize("second", DIVERGING, ids=lambda function: function.__name__)
async def test_a_program_that_asks_for_something_else_diverges(second: Callable[[Context], Any]) -> None:
    """Whatever differs from the history is an error that names the place, and nothing more is committed."""
    store = MemoryStore()
    changed = Changed(original, second)
    with pytest.raises(DivergenceError) as caught:
        await changed.go_on(store)
    assert caught.value.position == DIVERGING[second]
    assert history(store, "r") == changed.kept
    assert store.get_run("r").status is RunStatus.RUNNING
    assert store.get_run("r").owner is None
    # The code the run began with still goes on.
    assert (await resume("r", store=store, program=Workflow(original, name="program"))).value == 5
    assert history(store, "r")[: len(changed.kept)] == changed.kept


async def test_the_same_program_goes_on() -> None:
    """The recipe above finds nothing where nothing changed."""
    store = MemoryStore()
    assert await Changed(original, original).go_on(store, allow_changed=False) == 5


async def test_a_changed_program_is_refused_unless_allowed() -> None:
    """Other code is an error before anything runs; a harmless change goes on when it is allowed."""

    async def harmless(ctx: Context) -> int:
        first = await ctx.call(plus_one, 1)
        ctx.state["value"] = first
        second = await ctx.call(double, first)
        await ctx.gather(ctx.call(plus_one, 1), ctx.call(double, 2))
        await ctx.sleep(0)
        return -await ctx.call(last, await ctx.call(plus_one, second))

    store = MemoryStore()
    with pytest.raises(ProgramChangedError) as caught:
        await Changed(original, harmless).go_on(store, allow_changed=False)
    assert caught.value.run_id == "r"
    assert store.get_run("r").owner is None
    changed = Workflow(harmless, name="program")
    assert (await resume("r", store=store, program=changed, allow_changed=True)).value == -5


async def test_divergence_is_found_before_effects() -> None:
    """A changed program that leaves its history neither makes an effect nor undoes one."""
    world = World()
    store = MemoryStore()

    @step(effect=Effect.COMPENSABLE, undo=lambda _result: world.see("undone"))
    async def book() -> str:
        world.see("booked")
        return "ticket"

    @step
    async def pay() -> None:
        world.see("paid")

    @step(effect=Effect.BUFFERED)
    async def tell() -> None:
        world.see("told")

    async def first(ctx: Context) -> None:
        await ctx.call(book)
        await ctx.gather(ctx.call(plus_one, 1), ctx.call(plus_one, 2))
        await ctx.call(last, 1)

    async def raises(ctx: Context) -> None:
        await ctx.call(book)
        raise LookupError

    async def pays(ctx: Context) -> None:
        await ctx.call(book)
        await ctx.gather(ctx.call(plus_one, 1), ctx.call(plus_one, 2), ctx.call(pay))

    async def tells(ctx: Context) -> None:
        await ctx.call(book)
        await ctx.call(tell)

    dying = DyingStore(has_entry("last"), inner=store)
    with pytest.raises(PowerCutError):
        await run(Workflow(first, name="program"), store=dying, run_id="r")
    rows = rows_of(store, "r")
    for function in (raises, pays, tells):
        with pytest.raises(DivergenceError):
            await resume("r", store=store, program=Workflow(function, name="program"), allow_changed=True)
        assert world.seen == ["booked"]
        assert rows_of(store, "r") == rows
    await resume("r", store=store, program=Workflow(first, name="program"))
    assert world.seen == ["booked"]


async def test_unseeded_randomness_is_found_on_resume() -> None:
    """Arguments that come out differently on replay are an error with advice, not a second history."""
    draws = iter([0.1, 0.2])
    store = MemoryStore()

    @step(effect=Effect.READONLY)
    async def look(value: float) -> float:
        return value

    @workflow
    async def program(ctx: Context) -> float:
        value = await ctx.call(look, next(draws))
        await ctx.call(last, 1)
        return value

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_entry("last"), inner=store), run_id="r")
    with pytest.raises(DivergenceError) as caught:
        await resume("r", store=store, program=program)
    assert caught.value.position == "0"
    assert "ctx.random" in str(caught.value)


@pytest.mark.parametrize("status", [EffectStatus.ACKED, EffectStatus.SENT])
async def test_unseeded_randomness_does_not_send_an_effect_twice(status: EffectStatus) -> None:
    """An effect begun before a crash is not begun again under other arguments because the program draws anew."""
    world = World()
    store = MemoryStore()
    draws = iter([5, 6])
    slow = Gate()

    @step
    async def pay(amount: int, attempt: Attempt) -> int:
        world.see(amount, attempt.idempotency_key)
        return amount

    @step(effect=Effect.READONLY)
    async def look() -> None:
        await slow.pass_through()

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(look), ctx.call(pay, next(draws)))

    dies = has_entry("look") if status is EffectStatus.ACKED else has_row(EffectStatus.ACKED)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=DyingStore(dies, inner=store), run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await settle()
        slow.open()
    assert row_of(store, "r", "pay").status is status
    with pytest.raises((DivergenceError, EffectUnknownError)):
        await resume("r", store=store, program=program)
    assert world.seen == [5]


@step
async def charge(amount: int) -> int:
    """Irreversible; :class:`_Ledger` says how often it was made."""
    return _Ledger.charged(amount)


@step(name="tests:charge_renamed")
async def charge_renamed(amount: int) -> int:
    """The same under another name."""
    return _Ledger.charged(amount)


@step(effect=Effect.READONLY)
async def look_up() -> int:
    """Changes nothing."""
    return 0


class _Ledger:
    """What was charged since the test began."""

    amounts: list[int]

    @classmethod
    def charged(cls, amount: int) -> int:
        """Charge."""
        cls.amounts.append(amount)
        return amount


@workflow
async def charging(ctx: Context) -> Any:
    """As it was when the run began."""
    return await ctx.call(charge, 5)


@workflow
async def looking_first(ctx: Context) -> Any:
    """A call was put before the charge."""
    await ctx.call(look_up)
    return await ctx.call(charge, 5)


@workflow
async def sleeping_first(ctx: Context) -> Any:
    """A sleep was."""
    await ctx.sleep(0.001)
    return await ctx.call(charge, 5)


@workflow
async def asking_in_parallel_first(ctx: Context) -> Any:
    """Parallel calls were."""
    await ctx.gather(ctx.call(look_up), ctx.call(look_up))
    return await ctx.call(charge, 5)


@workflow
async def charging_by_another_name(ctx: Context) -> Any:
    """The step was moved to another module."""
    return await ctx.call(charge_renamed, 5)


@workflow
async def charging_further_inside(ctx: Context) -> Any:
    """The charge was put into a workflow of its own, which is called where it was."""
    return await ctx.call(charging)


@workflow
async def not_charging(_ctx: Context) -> Any:
    """The charge was taken out."""
    return None


async def _as_before(ctx: Context, inner: Any) -> Any:
    return await ctx.call(inner)


async def _charging_outside(ctx: Context, inner: Any) -> Any:
    await ctx.call(inner)
    return await ctx.call(charge, 5)


async def _charging_directly(ctx: Context, inner: Any) -> Any:
    del inner
    return await ctx.call(charge, 5)


async def _charging_instead(ctx: Context, inner: Any) -> Any:
    del inner
    await ctx.call(look_up)
    return await ctx.call(charge, 5)


@pytest.mark.parametrize(
    ("status", "in_branch"), [(EffectStatus.SENT, False), (EffectStatus.SENT, True), (EffectStatus.ACKED, True)]
)
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (looking_first, _as_before),
        (sleeping_first, _as_before),
        (asking_in_parallel_first, _as_before),
        (charging_by_another_name, _as_before),
        (charging_further_inside, _as_before),
        (not_charging, _as_before),
        (not_charging, _charging_outside),
        (charging, _charging_instead),
        (charging, _charging_directly),
    ],
)
async def test_a_changed_program_does_not_pass_by_an_effect_that_was_begun(
    inner: Workflow[..., Any], outer: Any, status: EffectStatus, *, in_branch: bool
) -> None:
    """An effect that cannot be repeated is neither made again at another place nor forgotten, wherever it was moved."""
    _Ledger.amounts = []
    store = MemoryStore()
    code: list[Any] = [_as_before, charging]
    first = Gate(is_open=status is EffectStatus.SENT)  # an answered effect is on record alone while others go before it

    @step(effect=Effect.READONLY)
    async def wait() -> None:
        await first.pass_through()

    @workflow
    async def program(ctx: Context) -> Any:
        if in_branch:
            return await ctx.gather(ctx.call(wait), ctx.call(nested))
        return await code[0](ctx, code[1])

    @workflow
    async def nested(ctx: Context) -> Any:
        return await code[0](ctx, code[1])

    dies = has_row(EffectStatus.ACKED) if status is EffectStatus.SENT else has_entry("wait")

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=DyingStore(dies, inner=store), run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await settle()
        first.open()
    assert (_Ledger.amounts, row_of(store, "r", "charge").status) == ([5], status)
    code[:] = [outer, inner]
    with pytest.raises(DivergenceError) as caught:
        await resume("r", store=store, program=program, allow_changed=True)
    assert _Ledger.amounts == [5]
    assert "tests.specflow.runtime.test_replay_errors:charge " in str(caught.value)
    assert "begun before a crash" in str(caught.value)
    code[:] = [_as_before, charging]
    if status is EffectStatus.ACKED:
        await resume("r", store=store, program=program)
        assert _Ledger.amounts == [5]
    else:
        answer = {row_of(store, "r", "charge").key: NotSent()}
        code[:] = [outer, inner]
        await resume("r", store=store, program=program, allow_changed=True, resolve=answer)  # somebody found out


async def test_seeded_draws_are_the_same_after_a_crash() -> None:
    """``ctx.random``, ``ctx.uuid`` and ``ctx.now`` give a rebuilt program what they gave the first time."""
    store = MemoryStore()
    seen: list[Any] = []

    @workflow
    async def nested(ctx: Context) -> list[Any]:
        return [ctx.random().random(), await ctx.call(plus_one, 1), ctx.random().random(), str(ctx.uuid())]

    @workflow
    async def program(ctx: Context) -> list[Any]:
        drawn = [ctx.random().random(), ctx.random().random(), str(ctx.uuid()), ctx.now()]
        await ctx.call(plus_one, 1)
        drawn += [ctx.random().random(), ctx.now(), *await ctx.gather(ctx.call(nested), ctx.call(nested))]
        seen.append(drawn)
        await ctx.call(last, 1)
        return drawn

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_entry("last"), inner=store), run_id="r")
    value = (await resume("r", store=store, program=program)).value
    assert seen[0] == seen[1] == value
    flat = [str(item) for item in (*value[:3], value[4], *value[6], *value[7]) if item != 2]
    assert len(set(flat)) == len(flat)  # every draw has a stream of its own


async def test_branches_end_in_any_order_and_replay_in_one() -> None:
    """The order in which parallel steps end does not matter: history and replay are in program order."""
    generator = random.Random(7)
    store = MemoryStore()
    baseline: Any = None
    for number in range(6):
        gates = [Gate() for _ in range(5)]

        @step(effect=Effect.READONLY, name="work")
        async def work(index: int, state: State, gates: Any = None, gate: int = 0) -> int:
            state.append("log", index)
            await _GATES[index].pass_through()
            return index * 10

        async def body(ctx: Context, work: Any = work) -> Any:
            results = await ctx.map(work, range(5))
            return results, ctx.state.get("log"), await ctx.call(last, 1)

        _GATES[:] = gates
        program = Workflow(body, name="program")
        run_id = f"r{number}"
        dying = DyingStore(has_entry("last"), inner=store)

        async def drive(program: Any = program, dying: Any = dying, run_id: str = run_id) -> None:
            with pytest.raises(PowerCutError):
                await run(program, store=dying, run_id=run_id)

        async with anyio.create_task_group() as group:
            group.start_soon(drive)
            order = generator.sample(range(5), 5)
            for index in order:
                await gates[index].reached.wait()
                gates[index].open()
                await settle()
        before = history(store, run_id)
        value = (await resume(run_id, store=store, program=program)).value
        assert value == ([0, 10, 20, 30, 40], [0, 1, 2, 3, 4], 1)
        after = history(store, run_id)
        assert after[: len(before)] == before
        baseline = baseline or after
        assert after == baseline


_GATES: list[Gate] = []


# -------------------------------------------------------------------------------------------------------------- misuse


async def test_a_call_that_is_never_awaited_is_an_error() -> None:
    """A workflow that forgot an await fails with a hint instead of leaving work out."""

    @workflow
    async def program(ctx: Context) -> int:
        ctx.call(plus_one, 1)
        return await ctx.call(plus_one, 2)

    with pytest.raises(MisuseError, match="never awaited"):
        await run(program)


async def test_a_call_in_a_nested_workflow_or_branch_must_be_awaited_too() -> None:
    """The hint also comes for workflows called from others, alone and in parallel."""

    @workflow
    async def nested(ctx: Context) -> int:
        ctx.call(plus_one, 1)
        return 1

    @workflow
    async def called(ctx: Context) -> int:
        return await ctx.call(nested)

    @workflow
    async def gathered(ctx: Context) -> list[int]:
        return await ctx.gather(ctx.call(nested), ctx.call(nested))

    for program in (called, gathered):
        with pytest.raises(MisuseError, match="never awaited"):
            await run(program)


async def test_a_call_is_used_once() -> None:
    """Awaiting a call again, gathering it twice, or using another context's call is an error with advice."""

    @workflow
    async def twice(ctx: Context) -> None:
        call = ctx.call(plus_one, 1)
        await call
        await call

    @workflow
    async def gathered_twice(ctx: Context) -> None:
        call = ctx.call(plus_one, 1)
        await ctx.gather(call, call)

    contexts: list[Context] = []

    @workflow
    async def nested(ctx: Context) -> None:
        await ctx.gather(contexts[0].call(plus_one, 1))

    @workflow
    async def foreign(ctx: Context) -> None:
        contexts[:] = [ctx]
        await ctx.call(nested)

    for program, words in (
        (twice, "awaited before"),
        (gathered_twice, "awaited before"),
        (foreign, "another workflow"),
    ):
        with pytest.raises(MisuseError, match=words):
            await run(program)


async def test_wrong_arguments_are_refused_where_they_are_given() -> None:
    """Arguments that do not fit a step, workflow or pipeline are an error that names it; nothing is started."""
    store = MemoryStore()

    @workflow
    async def takes_two(ctx: Context, one: int, two: int) -> int:
        return one + two

    calls: list[Callable[[Context], Any]] = [
        lambda ctx: ctx.call(plus_one),  # type: ignore[call-arg]
        lambda ctx: ctx.call(plus_one, 1, 2),  # type: ignore[call-arg]
        lambda ctx: ctx.call(plus_one, other=1),  # type: ignore[call-arg]
        lambda ctx: ctx.call(takes_two, 1),  # type: ignore[call-arg]
        lambda ctx: ctx.call(plus_one.function, 1),
        lambda ctx: ctx.gather(plus_one.function(1)),
    ]

    @workflow
    async def program(ctx: Context, index: int) -> Any:
        return await calls[index](ctx)

    for index in range(5):
        with pytest.raises(DefinitionError):
            await run(program, index)
    with pytest.raises(DefinitionError, match="takes_two"):
        await run(takes_two, 1, store=store)
    with pytest.raises(DefinitionError, match="takes_two"):
        await run(takes_two, 1, 2, three=3, store=store)
    pipeline = Pipeline("numbers")

    @pipeline.step
    async def doubled(number: int) -> int:
        return number * 2

    with pytest.raises(DefinitionError):
        await run(pipeline, numbr=1, store=store)
    assert store.list_runs() == ()


async def test_a_workflow_may_be_declared_with_parentheses() -> None:
    """``@workflow()`` declares what ``@workflow`` does, and refuses what it refuses."""

    @workflow()
    async def program(ctx: Context, number: int) -> int:
        """Its own words."""
        return await ctx.call(plus_one, number)

    assert (program.name.rpartition(".")[2], program.__doc__) == ("program", "Its own words.")
    assert (await run(program, 1)).value == 2
    wrong: Any = lambda: None  # noqa: E731 -- its type would be refused before the decorator is asked
    with pytest.raises(DefinitionError, match="async def"):
        workflow()(wrong)


async def test_only_programs_can_be_run() -> None:
    """A step, a plain function or a coroutine is refused with the remedy."""
    wrong: list[Any] = [plus_one, original, lambda: None, None]
    for program in wrong:
        with pytest.raises(DefinitionError, match="workflow"):
            await run(program)


# --------------------------------------------------------------------------------------------- values that do not fit


class Opaque:
    """Nothing can store it."""


async def test_unencodable_values_are_named_where_they_appear() -> None:  # noqa: C901 -- one program for each place
    """Arguments, results, state values, events and the end result: the error names place and type."""

    @step(effect=Effect.PURE)
    async def takes(value: Any) -> None:
        pass

    @step(effect=Effect.PURE)
    async def gives() -> Any:
        return {"deep": [Opaque()]}

    @step(effect=Effect.PURE)
    async def keeps(state: State) -> None:
        state["cart"] = Opaque()

    @workflow
    async def arguments(ctx: Context) -> None:
        await ctx.call(takes, [Opaque()])

    @workflow
    async def result(ctx: Context) -> None:
        await ctx.call(gives)

    @workflow
    async def state_of_a_step(ctx: Context) -> None:
        await ctx.call(keeps)

    @workflow
    async def own_state(ctx: Context) -> None:
        ctx.state["cart"] = Opaque()

    @workflow
    async def event(ctx: Context) -> None:
        ctx.emit(Opaque())

    @workflow
    async def end(ctx: Context) -> Any:
        return Opaque()

    places = {
        arguments: takes.name,
        result: gives.name,
        state_of_a_step: "cart",
        own_state: "cart",
        event: "emitted",
        end: "result",
    }
    for program, place in places.items():
        with pytest.raises(UnsupportedValueError) as caught:
            await run(program)
        assert place in str(caught.value)
        assert "Opaque" in str(caught.value)


async def test_unencodable_program_arguments_are_refused_before_anything_is_written() -> None:
    """A run that could not be rebuilt is not begun."""
    store = MemoryStore()

    @workflow
    async def program(ctx: Context, value: Any) -> None:
        pass

    with pytest.raises(UnsupportedValueError, match="Opaque"):
        await run(program, Opaque(), store=store)
    assert store.list_runs() == ()


async def test_the_program_may_handle_a_value_that_does_not_fit() -> None:
    """Refused values are ordinary exceptions at the place that made them, and leave no trace."""
    store = MemoryStore()

    @step(effect=Effect.PURE)
    async def gives() -> Any:
        return Opaque()

    @workflow
    async def program(ctx: Context) -> str:
        refused = []
        try:
            await ctx.call(gives)
        except UnsupportedValueError:
            refused.append("result")
        try:
            ctx.state["cart"] = Opaque()
        except UnsupportedValueError:
            refused.append("state")
        try:
            ctx.state.add("name", "x")
            ctx.state["name"] = "ok"
        except UnsupportedValueError:
            refused.append("add")
            ctx.state["name"] = "ok"
        return ",".join(refused)

    assert "result,state" in (await run(program, store=store, run_id="r")).value
    assert values_of(store, "r") == {"name": "ok"}


async def test_an_exception_that_cannot_be_stored_is_told_by_a_stand_in_after_a_crash() -> None:
    """A program sees the same error before and after a crash, whatever class the step raised."""

    class LocalError(Exception):
        """Cannot be found by name."""

    store = MemoryStore()
    seen: list[Any] = []

    @step(effect=Effect.READONLY)
    async def fail() -> None:
        raise LocalError("boom", Opaque())

    @workflow
    async def program(ctx: Context) -> str:
        try:
            await ctx.call(fail)
        except Exception as error:  # noqa: BLE001 -- its class is what the test looks at
            seen.append((type(error), "boom" in str(error)))
        await ctx.call(last, 1)
        return "handled"

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_entry("last"), inner=store), run_id="r")
    assert (await resume("r", store=store, program=program)).value == "handled"
    assert seen == [(RecordedError, True)] * 2


async def test_replay_errors_are_one_family() -> None:
    """Everything that keeps a run from being rebuilt can be caught as ReplayError."""
    assert issubclass(DivergenceError, ReplayError)
    assert issubclass(ForeignAwaitError, ReplayError)
    assert issubclass(ProgramChangedError, ReplayError)
