"""Effects: what may run ahead, what is on record when, what is undone, what a crash leaves unknown.

A crash is a store that stops writing at one of its commits (:class:`DyingStore`); real deaths of processes are in
``test_crash.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.codec import decode, decode_error
from specflow.definitions import Attempt, Retry, Step, step, workflow
from specflow.effects import RUN_AHEAD, Effect
from specflow.errors import CompensationError, EffectUnknownError, ExecutionError, InvalidSettingError, MisuseError
from specflow.history import EffectStatus, EntryKind, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import NotSent, RunResult, Sent, fork, resume, run
from specflow.speculation import Budget, Opportunity, Resolution, Verdict
from specflow.state import State
from specflow.stores import MemoryStore
from specflow.verifiers import Judge
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    Guesses,
    PowerCutError,
    RowDroppingStore,
    WatchedStore,
    World,
    has_entry,
    has_row,
    history,
    jumping,
    row_of,
    rows_of,
    settle,
    values_of,
)

pytestmark = pytest.mark.anyio

REVERSIBLE = RUN_AHEAD | {Effect.IDEMPOTENT, Effect.COMPENSABLE}
EVERYTHING = Fixed(4, width=4, effects=REVERSIBLE)
"""Runs ahead on everything that may ever run ahead."""
DIRECT = (Effect.IDEMPOTENT, Effect.COMPENSABLE, Effect.IRREVERSIBLE)
"""Effects that happen while the program waits for them."""


def undo_of(effect: Effect, undo: Callable[..., Any] | None = None) -> dict[str, Any]:
    """The ``undo`` that a step of this class must declare."""

    async def nothing(*args: Any, **kwargs: Any) -> None:
        """Nothing to undo."""

    return {"undo": undo or nothing} if effect is Effect.COMPENSABLE else {}


class Reckless:
    """A user's policy that lists every effect and allows everything."""

    depth = 4
    width = 4
    effects = frozenset(Effect)
    budget = Budget()

    def allows(self, opportunity: Opportunity) -> bool:
        """Always."""
        return True

    def learn(self, resolution: Resolution) -> None:
        """Learns nothing."""


@dataclass
class Guessed:
    """A program that calls a slow, guessed question and then a step, which waits at a gate of its own."""

    settings: dict[str, Any]
    guess: Any = "yes"
    truth: Any = "yes"
    world: World = field(default_factory=World)
    asked: Gate = field(default_factory=Gate)
    acting: Gate = field(default_factory=lambda: Gate(is_open=True))

    def __post_init__(self) -> None:
        @step(effect=Effect.READONLY, predict=Guesses(self.guess))
        async def ask() -> Any:
            await self.asked.pass_through()
            return self.truth

        @step(**self.settings)
        async def act(answer: Any) -> Any:
            await self.acting.pass_through()
            self.world.see(answer)
            return answer

        @workflow
        async def program(ctx: Context) -> Any:
            return await ctx.call(act, await ctx.call(ask))

        self.act = act
        self.program = program


async def started_ahead(guessed: Guessed, policy: Any) -> bool:
    """Run the program; did the step start while the guess was open?"""
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(guessed.program, policy=policy))
        await guessed.asked.reached.wait()
        await settle()
        ahead = guessed.acting.reached.is_set()
        guessed.asked.open()
    assert guessed.world.seen[-1] == guessed.truth
    return ahead


# ----------------------------------------------------------------------------------------------- what may run ahead


@pytest.mark.parametrize("policy", [EVERYTHING, Reckless()], ids=["fixed", "reckless"])
async def test_undeclared_step_never_runs_on_a_guess(policy: Any) -> None:
    """A step without a declared effect waits for the truth under any policy, however sure the guess."""
    guessed = Guessed({}, guess="no")
    assert guessed.act.effect is Effect.IRREVERSIBLE
    assert not await started_ahead(guessed, policy)
    assert guessed.world.seen == ["yes"]
    # The same program with a harmless step does run ahead: the test would notice.
    assert await started_ahead(Guessed({"effect": Effect.READONLY}, guess="no"), policy)


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize("listed", [True, False])
async def test_effects_run_ahead_only_where_listed(effect: Effect, listed: bool) -> None:  # noqa: FBT001
    """Exactly the effects that the policy lists start on a guess; buffered and irreversible ones never do."""
    effects = {effect} - {Effect.IRREVERSIBLE} if listed else set()
    settings = {"effect": effect, **undo_of(effect)}
    ahead = await started_ahead(Guessed(settings), Fixed(4, effects=effects))
    assert ahead is (listed and effect not in (Effect.BUFFERED, Effect.IRREVERSIBLE))


def test_a_policy_cannot_be_built_that_lists_irreversible() -> None:
    """The policies at hand refuse to list IRREVERSIBLE instead of ignoring it silently."""
    with pytest.raises(InvalidSettingError):
        Fixed(1, effects=set(Effect))


# ------------------------------------------------------------------------------------------------- what is on record


async def starts_unrecorded(store: Any, effect: Effect) -> bool:
    """Does a step of this class start before the store knows that it does, and all that came before?"""
    unrecorded: list[bool] = []

    @step(effect=Effect.PURE)
    async def before() -> int:
        return 1

    @step(effect=effect, **undo_of(effect))
    async def act(value: int, attempt: Attempt) -> int:
        rows = {row.key: row.status for row in store.effects("r")}
        on_record = rows.get(attempt.idempotency_key) is EffectStatus.SENT
        complete = [entry.step for entry in store.entries("r")] == [before.name]
        unrecorded.append(not on_record or not complete)
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(act, await ctx.call(before))

    assert (await run(program, store=store, run_id="r")).value == 1
    return unrecorded == [True]


@pytest.mark.parametrize("effect", DIRECT)
async def test_sent_is_on_record_before_the_step_starts(effect: Effect) -> None:
    """When an effect starts, its SENT row and everything the program did before are in the store."""
    assert not await starts_unrecorded(MemoryStore(), effect)
    assert await starts_unrecorded(RowDroppingStore(EffectStatus.SENT), effect)  # a store that forgets is noticed


@pytest.mark.parametrize("effect", DIRECT)
async def test_answer_and_entry_become_real_together(effect: Effect) -> None:
    """The ACKED row holds the result and is written by the commit that writes the entry."""
    store = WatchedStore()

    @step(effect=effect, **undo_of(effect))
    async def act(value: int) -> int:
        return value + 1

    @step(effect=Effect.PURE)
    async def after(value: int) -> int:
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(after, await ctx.call(act, 1))

    assert (await run(program, store=store, run_id="r")).value == 2
    row = row_of(store, "r", "act")
    assert row.status is EffectStatus.ACKED
    assert decode(row.result or b"") == 2
    assert [list(part) for part in decode(row.arguments)] == [[1], []]
    assert store.commit_of_row("act", EffectStatus.ACKED) == store.commit_of_entry("act")
    assert store.commit_of_row("act", EffectStatus.SENT) < store.commit_of_entry("act")


@pytest.mark.parametrize("effect", DIRECT)
async def test_a_failed_effect_is_recorded_with_its_error(effect: Effect) -> None:
    """A step that raises leaves a FAILED row with the exception, and the program may handle it."""
    store = MemoryStore()

    @step(effect=effect, **undo_of(effect))
    async def act() -> None:
        raise LookupError("no such account")

    @workflow
    async def program(ctx: Context) -> str:
        try:
            await ctx.call(act)
        except LookupError as error:
            return str(error)
        return "fine"

    assert (await run(program, store=store, run_id="r")).value == "no such account"
    row = row_of(store, "r", "act")
    assert row.status is EffectStatus.FAILED
    assert isinstance(decode_error(row.error or b""), LookupError)


async def test_pure_and_readonly_steps_leave_no_rows() -> None:
    """Steps that change nothing outside do not appear in the outbox."""
    store = MemoryStore()

    @step(effect=Effect.PURE)
    async def think() -> int:
        return 1

    @step(effect=Effect.READONLY)
    async def look() -> int:
        return 2

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(think) + await ctx.call(look)

    await run(program, store=store, run_id="r")
    assert store.effects("r") == ()


# ---------------------------------------------------------------------------------------------------------- buffered


async def test_a_buffered_call_returns_at_once_and_is_sent_after_its_commit() -> None:
    """The program goes on with None while the delivery is held up, and the delivery finds its entry on record."""
    store = MemoryStore()
    world = World()
    sending, going = Gate(), Gate()

    @step(effect=Effect.BUFFERED)
    async def send(text: str) -> str:
        committed = [entry.step for entry in store.entries("r")]
        world.see((text, send.name in committed))
        await sending.pass_through()
        return "sent"

    @step(effect=Effect.READONLY)
    async def go_on(value: None) -> None:
        assert value is None
        await going.pass_through()

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(go_on, await ctx.call(send, "hello"))
        return "done"

    results: list[RunResult[str]] = []

    async def drive() -> None:
        results.append(await run(program, store=store, run_id="r"))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await going.reached.wait()
        await sending.reached.wait()
        going.open()
        await settle()
        assert not results  # the run does not end before everything is delivered
        assert store.get_run("r").status is RunStatus.RUNNING
        sending.open()
    assert world.seen == [("hello", True)]
    assert results[0].value == "done"
    row = row_of(store, "r", "send")
    assert row.status is EffectStatus.ACKED
    assert decode(row.result or b"") == "sent"
    assert results[0].report.undelivered == ()


async def test_buffered_effects_keep_program_order_per_resource() -> None:
    """Deliveries of one resource go out one at a time in program order; another resource does not wait for them."""
    world = World()
    gates = {name: Gate() for name in ("a1", "a2", "a3", "b1")}

    @step(effect=Effect.BUFFERED, resource="a")
    async def first(name: str) -> None:
        world.see(name)
        await gates[name].pass_through()
        world.see(f"{name} done")

    @step(effect=Effect.BUFFERED, resource="a")
    async def second(name: str) -> None:
        world.see(name)
        await gates[name].pass_through()
        world.see(f"{name} done")

    @step(effect=Effect.BUFFERED, resource="b")
    async def other(name: str) -> None:
        await gates[name].pass_through()

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(first, "a1")
        await ctx.call(second, "a2")
        await ctx.call(first, "a3")
        await ctx.call(other, "b1")

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program))
        await gates["b1"].reached.wait()
        await settle()
        assert world.seen == ["a1"]
        gates["a2"].open()
        gates["a3"].open()
        gates["b1"].open()
        await settle()
        assert world.seen == ["a1"]
        gates["a1"].open()
    assert world.seen == ["a1", "a1 done", "a2", "a2 done", "a3", "a3 done"]


async def test_buffered_effects_of_branches_keep_program_order() -> None:
    """Buffered calls in parallel branches go out in the order of the program, not of the branches' speed."""
    world = World()
    slow = Gate()

    @step(effect=Effect.READONLY)
    async def work(index: int) -> None:
        if index == 0:
            await slow.pass_through()

    @step(effect=Effect.BUFFERED)
    async def tell(text: str) -> None:
        world.see(text)

    @workflow
    async def branch(ctx: Context, index: int) -> None:
        await ctx.call(tell, f"{index} begins")
        await ctx.call(work, index)
        await ctx.call(tell, f"{index} ends")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.map(branch, range(3))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program))
        await slow.reached.wait()
        await settle()
        assert world.seen == ["0 begins"]
        slow.open()
    assert world.seen == [f"{index} {verb}" for index in range(3) for verb in ("begins", "ends")]


async def test_buffered_effects_on_a_guess_wait_for_the_truth() -> None:
    """What a guessed world wants to send stays inside; only the true world's effects ever leave."""
    world = World()
    asked, read = Gate(), Gate()

    @step(effect=Effect.READONLY, predict=Guesses("wrong", "right"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.BUFFERED)
    async def tell(text: str) -> None:
        world.see(text)

    @step(effect=Effect.READONLY)
    async def look(text: str) -> str:
        if text == "right":
            read.reached.set()
        return text

    @workflow
    async def program(ctx: Context) -> str:
        answer = await ctx.call(ask)
        await ctx.call(tell, answer)
        return await ctx.call(look, answer)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=Fixed(4, width=2)))
        await read.reached.wait()  # the right world is past its buffered call
        await settle()
        assert world.seen == []
        asked.open()
    assert world.seen == ["right"]


async def test_a_delivery_that_fails_is_reported_and_the_rest_goes_out() -> None:
    """A failing delivery changes neither the value nor later deliveries; report and outbox name it."""
    store = MemoryStore()
    world = World()

    @step(effect=Effect.BUFFERED, resource="mail", idempotent=True, retry=Retry(attempts=2, wait=0.0))
    async def send(text: str) -> None:
        world.see(text)
        if text == "bad":
            raise ConnectionError("mailbox full")

    @workflow
    async def program(ctx: Context) -> str:
        for text in ("good", "bad", "fine"):
            await ctx.call(send, text)
        return "done"

    result = await run(program, store=store, run_id="r")
    assert result.value == "done"
    assert world.seen == ["good", "bad", "bad", "fine"]
    ((name, error),) = result.report.undelivered
    assert name == send.name
    assert "mailbox full" in error
    assert [row.status for row in rows_of(store, "r", "send")] == [
        EffectStatus.ACKED,
        EffectStatus.FAILED,
        EffectStatus.ACKED,
    ]


async def test_buffered_effects_of_a_run_that_fails_later_were_committed() -> None:
    """A buffered effect is real once its place in the program is committed, also if the program raises afterwards."""
    world = World()

    @step(effect=Effect.BUFFERED)
    async def tell(text: str) -> None:
        world.see(text)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(tell, "before")
        raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        await run(program)
    assert world.seen == ["before"]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_delivery_cut_off_by_a_crash_is_sent_again_only_if_idempotent(idempotent: bool) -> None:  # noqa: FBT001
    """A buffered step in flight at a crash is repeated under its key if declared idempotent, else reported unknown."""
    world = World()

    @step(effect=Effect.BUFFERED, idempotent=idempotent)
    async def send(text: str, attempt: Attempt) -> None:
        world.see(text, attempt.idempotency_key)

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(send, "one")
        await ctx.call(send, "two")
        return "done"

    store = DyingStore(has_row(EffectStatus.ACKED, "send"))
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    assert world.seen == ["one"]
    if idempotent:
        assert (await resume("r", store=store.inner, program=program)).value == "done"
        assert world.seen == ["one", "one", "two"]
        assert world.keys[0] == world.keys[1] != world.keys[2]
        return
    with pytest.raises(EffectUnknownError) as caught:
        await resume("r", store=store.inner, program=program)
    assert caught.value.key == world.keys[0]
    assert world.seen == ["one"]
    result = await resume("r", store=store.inner, program=program, resolve={caught.value.key: Sent()})
    assert result.value == "done"
    assert world.seen == ["one", "two"]


async def test_a_delivery_cut_off_by_a_crash_is_probed() -> None:
    """A buffered step with a probe is asked for after a crash like any other effect."""
    world = World()

    async def was_sent(key: str, text: str) -> Sent | NotSent:
        return Sent() if key in world.keys else NotSent()

    @step(effect=Effect.BUFFERED, probe=was_sent)
    async def send(text: str, attempt: Attempt) -> None:
        world.see(text, attempt.idempotency_key)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(send, "one")
        await ctx.call(send, "two")

    store = DyingStore(has_row(EffectStatus.ACKED, "send"))
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    await resume("r", store=store.inner, program=program)
    assert world.seen == ["one", "two"]


@pytest.mark.parametrize("before", [True, False])
async def test_a_delivery_not_begun_at_a_crash_is_sent_once(before: bool) -> None:  # noqa: FBT001
    """Whether the crash falls before or after the commit of a buffered call, it is delivered exactly once."""
    world = World()

    @step(effect=Effect.BUFFERED, resource="mail", idempotent=True)
    async def send(text: str) -> None:
        world.see(text)

    @step(effect=Effect.PURE)
    async def go_on() -> None:
        pass

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(send, "one")
        await ctx.call(go_on)
        await ctx.call(send, "two")

    store = DyingStore(has_entry("send"), after=not before)
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    assert world.seen == []
    await resume("r", store=store.inner, program=program)
    assert world.seen == ["one", "two"]


async def test_a_buffered_effect_reaches_its_resource_before_later_direct_ones() -> None:
    """On one resource the outside world sees program order, also where a direct effect follows a buffered one."""
    world = World()
    sending = Gate()

    @step(effect=Effect.BUFFERED, resource="account")
    async def announce() -> None:
        await sending.pass_through()
        world.see("announced")

    @step(resource="account")
    async def book() -> None:
        world.see("booked")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(announce)
        await ctx.call(book)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program))
        await sending.reached.wait()
        await settle()
        sending.open()
    assert world.seen == ["announced", "booked"]


# ------------------------------------------------------------------------------------------------------ compensation


def booking(world: World, undo: Callable[..., Any] | None = None, **settings: Any) -> Step[..., Any]:
    """A compensable step ``book(name)`` whose undo the world sees."""

    async def cancel(result: str, name: str) -> None:
        world.see(("undo", name, result))

    @step(effect=Effect.COMPENSABLE, undo=undo or cancel, **settings)
    async def book(name: str) -> str:
        world.see(("book", name))
        return f"ticket {name}"

    return book


async def test_a_failing_run_undoes_newest_first() -> None:
    """When the program raises, acknowledged compensable effects are undone newest first with result and arguments."""
    store = MemoryStore()
    world = World()
    book = booking(world)

    @step(effect=Effect.COMPENSABLE, undo=lambda *args: world.see("never"))
    async def refused() -> None:
        raise ValueError("full")

    @step
    async def pay() -> str:
        world.see("paid")
        return "receipt"

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(book, "flight")
        await ctx.call(pay)
        await ctx.call(book, "hotel")
        await ctx.call(refused)

    with pytest.raises(ValueError, match="full"):
        await run(program, store=store, run_id="r")
    assert world.seen[:3] == [("book", "flight"), "paid", ("book", "hotel")]
    assert world.seen[3:] == [("undo", "hotel", "ticket hotel"), ("undo", "flight", "ticket flight")]
    assert [row.status for row in store.effects("r")] == [
        EffectStatus.COMPENSATED,
        EffectStatus.ACKED,
        EffectStatus.COMPENSATED,
        EffectStatus.FAILED,
    ]
    assert store.get_run("r").status is RunStatus.FAILED
    with pytest.raises(ValueError, match="full"):  # a finished run gives what is on record
        await resume("r", store=store, program=program)
    assert len(world.seen) == 5


async def test_a_handled_error_undoes_nothing() -> None:
    """Effects are undone when the run fails, not when a step does and the program handles it."""
    world = World()
    book = booking(world)

    @step(effect=Effect.READONLY)
    async def fail() -> None:
        raise ValueError

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(book, "flight")
        try:
            await ctx.call(fail)
        except ValueError:
            return "handled"
        return "not reached"

    assert (await run(program)).value == "handled"
    assert world.seen == [("book", "flight")]


async def test_branches_are_undone_in_reverse_program_order() -> None:
    """Effects of parallel branches are undone newest first by their place in the program, whatever finished first."""
    world = World()
    book = booking(world)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.map(book, ["a", "b", "c"])
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 -- it has no text
        await run(program)
    assert [seen[1] for seen in world.seen if seen[0] == "undo"] == ["c", "b", "a"]


async def test_an_undo_is_tried_again() -> None:
    """An undo that fails is retried as its step declares, and what it says in the end counts."""
    world = World()
    tries: list[str] = []

    async def cancel(result: str, name: str) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise ConnectionError

    book = booking(world, cancel, retry=Retry(attempts=3, wait=0.0))

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(book, "flight")
        raise ValueError

    store = MemoryStore()
    with pytest.raises(ValueError):  # noqa: PT011 -- it has no text
        await run(program, store=store, run_id="r")
    assert tries == ["flight"] * 3
    assert row_of(store, "r", "book").status is EffectStatus.COMPENSATED


async def test_an_undo_that_keeps_failing_blocks_the_run() -> None:
    """Then nothing older is undone, the run is BLOCKED and says what could not be undone; resume goes on from there."""
    store = MemoryStore()
    world = World()
    broken = True

    async def cancel(result: str, name: str) -> None:
        if broken and name == "hotel":
            raise ConnectionError("phone is off the hook")
        world.see(("undo", name))

    book = booking(world, cancel, retry=Retry(attempts=2, wait=0.0))

    @workflow
    async def program(ctx: Context) -> None:
        for name in ("flight", "hotel", "car"):
            await ctx.call(book, name)
        raise ValueError("changed my mind")

    with pytest.raises(CompensationError) as caught:
        await run(program, store=store, run_id="r")
    assert "phone is off the hook" in str(caught.value)
    assert caught.value.position == "1"
    assert [seen for seen in world.seen if seen[0] == "undo"] == [("undo", "car")]
    assert store.get_run("r").status is RunStatus.BLOCKED
    assert [row.status for row in store.effects("r")] == [
        EffectStatus.ACKED,
        EffectStatus.COMPENSATION_FAILED,
        EffectStatus.COMPENSATED,
    ]
    assert all(entry.kind is not EntryKind.END for entry in store.entries("r"))

    broken = False
    with pytest.raises(ValueError, match="changed my mind"):
        await resume("r", store=store, program=program)
    assert [seen for seen in world.seen if seen[0] == "undo"] == [
        ("undo", "car"),
        ("undo", "hotel"),
        ("undo", "flight"),
    ]
    assert {row.status for row in store.effects("r")} == {EffectStatus.COMPENSATED}
    assert store.get_run("r").status is RunStatus.FAILED


async def test_a_crash_between_undos_repeats_at_most_the_last() -> None:
    """After a crash during compensation the undos that are on record are not repeated, the others are done."""
    world = World()
    book = booking(world)

    @workflow
    async def program(ctx: Context) -> None:
        for name in "abc":
            await ctx.call(book, name)
        raise ValueError("no")

    commits = 0

    def second_undo(commit: Any) -> bool:
        nonlocal commits
        commits += has_row(EffectStatus.COMPENSATED)(commit)
        return commits == 2

    store = DyingStore(second_undo)
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    with pytest.raises(ValueError, match="no"):
        await resume("r", store=store.inner, program=program)
    undone = [seen[1] for seen in world.seen if seen[0] == "undo"]
    assert undone == ["c", "b", "b", "a"]


# ------------------------------------------------------------------------------------- effects that ran on a guess


async def test_a_squashed_compensable_effect_is_undone() -> None:
    """What was booked on a wrong guess is undone; what was booked on the right one stays."""
    store = MemoryStore()
    world = World()
    asked, booked = Gate(), Gate(is_open=True)
    book = booking(world)

    @step(effect=Effect.READONLY, predict=Guesses("rome", "oslo"))
    async def ask() -> str:
        await asked.pass_through()
        return "oslo"

    @step(effect=Effect.READONLY)
    async def note(text: str) -> None:
        if len(world.seen) == 2:
            booked.reached.set()

    @workflow
    async def program(ctx: Context) -> str:
        ticket = await ctx.call(book, await ctx.call(ask))
        await ctx.call(note, ticket)
        return ticket

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, store=store, policy=EVERYTHING, run_id="r"))
        await booked.reached.wait()
        asked.open()
    assert world.counts() == {("book", "rome"): 1, ("book", "oslo"): 1, ("undo", "rome", "ticket rome"): 1}
    assert {decode(row.arguments)[0][0]: row.status for row in store.effects("r")} == {
        "rome": EffectStatus.COMPENSATED,
        "oslo": EffectStatus.ACKED,
    }


@pytest.mark.parametrize("still_running", [True, False])
@pytest.mark.parametrize("effect", [Effect.IDEMPOTENT, Effect.COMPENSABLE])
async def test_an_equal_call_takes_over_the_effect_of_a_squashed_one(effect: Effect, still_running: bool) -> None:  # noqa: FBT001
    """An effect begun on a wrong guess that the true program wants as well happens once and is not undone."""
    world = World()
    asked, acting = Gate(), Gate(is_open=not still_running)

    async def undo(result: Any, *args: Any) -> None:
        world.see("undone")

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=effect, **undo_of(effect, undo))
    async def act(value: int) -> int:
        await acting.pass_through()
        world.see(value)
        return value

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.call(ask), await ctx.call(act, 7)

    results: list[Any] = []

    async def drive() -> None:
        results.append((await run(program, policy=EVERYTHING)).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await acting.reached.wait()
        await settle()
        asked.open()
        await settle()
        acting.open()
    assert results == [("right", 7)]
    assert world.seen == [7]


async def test_a_wrong_guess_about_a_key_does_not_take_the_real_ones_key() -> None:
    """Attempts with other arguments at one position have another key, so a service never confuses them."""
    world = World()
    asked, acted = Gate(), Gate(is_open=True)

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.IDEMPOTENT)
    async def act(value: str, attempt: Attempt) -> str:
        world.see(value, attempt.idempotency_key)
        acted.reached.set()
        return value

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(act, await ctx.call(ask))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, policy=EVERYTHING))
        await acted.reached.wait()
        asked.open()
    assert world.seen == ["wrong", "right"]
    assert len(set(world.keys)) == 2


async def test_a_compensable_attempt_ahead_is_not_cut_off_by_real_work() -> None:
    """Real work that wants the slot of a compensable attempt waits until that one has an answer; nothing is unknown."""
    world = World()
    asked, booking_gate, working = Gate(), Gate(), Gate(is_open=True)

    async def undo(result: Any) -> None:
        world.see("undone")

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await asked.pass_through()
        return "yes"

    @step(effect=Effect.COMPENSABLE, undo=undo, resource="api")
    async def book() -> str:
        await booking_gate.pass_through()
        world.see("booked")
        return "ticket"

    @step(effect=Effect.READONLY)
    async def wait_a_little() -> None:
        await working.pass_through()

    @step(effect=Effect.READONLY, resource="api")
    async def work() -> None:
        world.see("worked")

    @workflow
    async def guessing(ctx: Context) -> str:
        await ctx.call(ask)
        return await ctx.call(book)

    @workflow
    async def plain(ctx: Context) -> None:
        await ctx.call(wait_a_little)
        await ctx.call(work)

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(plain), ctx.call(guessing))

    results: list[Any] = []

    async def drive() -> None:
        results.append((await run(program, policy=EVERYTHING, limits={"api": 1})).value)

    working = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await booking_gate.reached.wait()
        working.open()
        await settle()
        booking_gate.open()
        await settle()
        asked.open()
    assert results == [[None, "ticket"]]
    assert world.counts() == {"booked": 1, "worked": 1}


@jumping
async def test_a_compensable_attempt_ahead_survives_the_end_of_the_seconds_budget() -> None:
    """When the budget for running ahead is used up, an attempt that may have changed the world is not cut off."""
    world = World()

    async def undo(result: Any) -> None:
        world.see("undone")

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await anyio.sleep(100.0)
        return "yes"

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book() -> str:
        try:
            await anyio.sleep(50.0)
        except BaseException:
            world.see("cut off")
            raise
        world.see("booked")
        return "ticket"

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(ask)
        return await ctx.call(book)

    result = await run(program, policy=Fixed(2, effects=REVERSIBLE, budget=Budget(seconds=10.0)))
    assert result.value == "ticket"
    assert world.seen == ["booked"]
    assert result.report.ahead == 1


async def test_an_effect_that_reads_the_state_is_not_made_on_a_guess_about_it() -> None:
    """A step guessed right may write what an effect ahead of it has read: the effect must not happen twice."""
    store = MemoryStore()
    world = World()
    asked = Gate()

    async def undo(result: Any) -> None:
        world.see("undone")

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask(state: State) -> str:
        await asked.pass_through()
        state["price"] = 100
        return "yes"

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book(state: State) -> int:
        price = state.get("price", 0)
        world.see(("booked", price))
        return price

    @workflow
    async def program(ctx: Context) -> int:
        await ctx.call(ask)
        return await ctx.call(book)

    results: list[int] = []

    async def drive() -> None:
        results.append((await run(program, policy=EVERYTHING, store=store, run_id="r")).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await asked.reached.wait()
        await settle()
        asked.open()
    assert results == [100]
    left = [seen for seen in world.seen if seen != "undone"]
    # Either it waited, or what it did on the old price was undone.
    assert len(left) - world.seen.count("undone") == 1
    assert left[-1] == ("booked", 100)


async def test_a_crash_does_not_forget_an_effect_of_a_wrong_guess() -> None:
    """What was booked on a guess before a crash is undone after it, although the program never comes to that call."""
    world = World()
    asked, booked = Gate(), Gate(is_open=True)

    async def undo(result: str, name: str) -> None:
        world.see(("undo", name))

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book(name: str) -> str:
        world.see(("book", name))
        return f"ticket {name}"

    @step(effect=Effect.READONLY, predict=Guesses(True))  # noqa: FBT003
    async def ask() -> bool:
        await asked.pass_through()
        return False

    @step(effect=Effect.READONLY)
    async def reached() -> None:
        booked.reached.set()

    @workflow
    async def program(ctx: Context) -> str:
        if await ctx.call(ask):
            await ctx.call(book, "flight")
            await ctx.call(reached)
            return "went"
        return "stayed"

    store = DyingStore(has_entry("ask"))

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=store, run_id="r", policy=EVERYTHING)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await booked.reached.wait()
        await settle()
        asked.open()
    assert world.seen == [("book", "flight")]
    # The step cannot be found by its name, since it is local to this test: then the run must say so, not end quietly.
    try:
        result = await resume("r", store=store.inner, program=program, policy=Fixed(0))
    except ExecutionError as error:
        assert book.name in str(error)  # noqa: PT017
        assert store.inner.get_run("r").status is RunStatus.BLOCKED
    else:
        assert result.value == "stayed"
        assert world.seen == [("book", "flight"), ("undo", "flight")]


# ----------------------------------------------------------------------------------------------- results worth keeping


async def reuse(settings: dict[str, Any], argument_of: Callable[[str], int]) -> tuple[int, int]:
    """How often a step behind a wrong guess ran, and how often a result was used again."""
    runs = 0
    asked, done = Gate(), Gate(is_open=True)

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(**settings)
    async def think(value: int) -> int:
        nonlocal runs
        runs += 1
        return value * 2

    @step(effect=Effect.READONLY)
    async def reached(value: int) -> None:
        done.reached.set()

    @workflow
    async def program(ctx: Context) -> int:
        answer = await ctx.call(ask)
        value = await ctx.call(think, argument_of(answer))
        await ctx.call(reached, value)
        return value

    results: list[RunResult[int]] = []

    async def drive() -> None:
        results.append(await run(program, policy=Fixed(3)))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await done.reached.wait()
        await settle()
        asked.open()
    assert results[0].value == argument_of("right") * 2
    return runs, results[0].report.reused


async def test_a_pure_result_of_a_squashed_attempt_serves_an_equal_call() -> None:
    """Work on a wrong guess is not lost if the true program makes the same pure call."""
    runs, reused = await reuse({"effect": Effect.PURE}, lambda _answer: 21)
    assert (runs, reused) == (1, 1)


async def test_only_equal_calls_and_pure_steps_are_served() -> None:
    """A pure call with other arguments runs, and so does a step that reads the outside world."""
    assert await reuse({"effect": Effect.PURE}, len) == (1 + (len("wrong") != len("right")), 1)
    assert await reuse({"effect": Effect.PURE}, lambda answer: ord(answer[0])) == (2, 0)
    assert await reuse({"effect": Effect.READONLY}, lambda _answer: 21) == (2, 0)


# ------------------------------------------------------------------------------------------------------------ the keys


async def test_keys_are_the_same_for_every_retry_and_after_a_crash() -> None:
    """One call at one place of one run has one idempotency key, however often it is tried."""
    world = World()
    numbers: list[int] = []

    @step(effect=Effect.IDEMPOTENT, retry=Retry(attempts=3, wait=0.0))
    async def act(value: int, attempt: Attempt) -> int:
        world.see(value, attempt.idempotency_key)
        numbers.append(attempt.number)
        assert (attempt.run_id, attempt.position) == ("r", (0,))
        if len(world.seen) % 3:
            raise ConnectionError
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(act, 1)

    store = DyingStore(has_entry("act"))
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    assert (await resume("r", store=store.inner, program=program)).value == 1
    assert numbers == [1, 2, 3, 1, 2, 3]
    assert len(set(world.keys)) == 1
    assert row_of(store, "r", "act").tries == 2


async def test_keys_differ_between_places_runs_and_forks() -> None:
    """Equal calls at two places, in two runs, or in a fork are different effects."""
    store = MemoryStore()
    world = World()

    @step(effect=Effect.IDEMPOTENT)
    async def act(value: int, attempt: Attempt) -> int:
        world.see(value, attempt.idempotency_key)
        return value

    @workflow
    async def nested(ctx: Context) -> None:
        await ctx.call(act, 1)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(act, 1)
        await ctx.call(act, 1)
        await ctx.call(nested)
        await ctx.gather(ctx.call(act, 1), ctx.call(nested))

    await run(program, store=store, run_id="one")
    await run(program, store=store, run_id="two")
    fork("one", 0, store=store, new_run_id="three", effects="resend")
    await resume("three", store=store, program=program)
    assert len(world.keys) == 15
    assert len(set(world.keys)) == 15


# --------------------------------------------------------------------------------------------------- unknown outcomes


@dataclass
class CutOff:
    """A run whose one effect happened, or not, when the process died before it knew."""

    happened: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    world: World = field(default_factory=World)
    store: Any = field(default_factory=MemoryStore)

    def define(self) -> None:
        """Make the step anew, with the settings as they are now."""

        @step(**self.settings)
        async def pay(amount: int, attempt: Attempt) -> str:
            if self.happened or row_of(self.store, "r", "pay").tries > 1:
                self.world.see(amount, attempt.idempotency_key)
            return f"paid {amount}"

        self.pay = pay

    async def die(self) -> None:
        """Run until the process dies with the answer in hand."""
        self.define()

        @step(effect=Effect.PURE)
        async def price() -> int:
            return 5

        @workflow
        async def program(ctx: Context) -> str:
            return await ctx.call(self.pay, await ctx.call(price))

        self.program = program
        store = DyingStore(has_row(EffectStatus.ACKED), inner=self.store)
        with pytest.raises(PowerCutError):
            await run(program, store=store, run_id="r")

    async def go_on(self, **settings: Any) -> str:
        """Resume."""
        return str((await resume("r", store=self.store, program=self.program, **settings)).value)


async def test_an_effect_in_flight_at_a_crash_is_reported_unknown() -> None:
    """It is not sent again; the error and the outbox name it, the run is blocked, and asking again changes nothing."""
    cut = CutOff()
    await cut.die()
    for _ in range(2):
        with pytest.raises(EffectUnknownError) as caught:
            await cut.go_on()
        error = caught.value
        assert (error.run_id, error.step, error.position) == ("r", cut.pay.name, "1")
        assert error.key == cut.world.keys[0]
        row = row_of(cut.store, "r", "pay")
        assert (row.status, row.key, row.tries) == (EffectStatus.UNKNOWN, error.key, 1)
        assert cut.store.get_run("r").status is RunStatus.BLOCKED
        assert cut.store.get_run("r").owner is None
    assert cut.world.seen == [5]


@pytest.mark.parametrize("asked_before", [True, False])
async def test_a_person_says_what_became_of_an_unknown_effect(asked_before: bool) -> None:  # noqa: FBT001
    """``Sent`` gives the result, ``NotSent`` sends it; both end the uncertainty, also if resume had raised before."""
    for happened in (True, False):
        cut = CutOff(happened=happened)
        await cut.die()
        key = row_of(cut.store, "r", "pay").key
        if asked_before:
            with pytest.raises(EffectUnknownError):
                await cut.go_on()
        value = await cut.go_on(resolve={key: Sent("by hand") if happened else NotSent()})
        assert value == ("by hand" if happened else "paid 5")
        assert cut.world.seen == [5]
        assert row_of(cut.store, "r", "pay").status is EffectStatus.ACKED
        assert cut.store.get_run("r").status is RunStatus.COMPLETED


async def test_an_answer_that_says_nothing_is_refused() -> None:
    """An answer that is neither ``Sent`` nor ``NotSent`` neither sends the effect nor takes it for sent."""
    cut = CutOff()
    await cut.die()
    key = row_of(cut.store, "r", "pay").key
    wrong: Any = "sent"
    with pytest.raises(InvalidSettingError, match=key):
        await cut.go_on(resolve={key: wrong})
    assert cut.world.seen == [5]
    assert await cut.go_on(resolve={key: Sent("ok")}) == "ok"


async def test_an_answer_that_says_nothing_is_refused_for_deliveries_too() -> None:
    """A buffered effect of unknown fate is not sent again on an answer of the wrong type."""
    world = World()

    @step(effect=Effect.BUFFERED)
    async def send() -> None:
        world.see("sent")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(send)

    store = DyingStore(has_row(EffectStatus.ACKED))
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r")
    wrong: Any = "sent"
    with pytest.raises(InvalidSettingError):
        await resume("r", store=store.inner, program=program, resolve={row_of(store, "r", "send").key: wrong})
    assert world.seen == ["sent"]


@pytest.mark.parametrize("happened", [True, False])
async def test_a_probe_finds_out(happened: bool) -> None:  # noqa: FBT001
    """After a crash the probe gets the key and the arguments, and its answer decides whether the step runs."""
    asked: list[Any] = []
    cut = CutOff(happened=happened)

    def probe(key: str, amount: int) -> Sent | NotSent:
        asked.append((key, amount))
        return Sent(f"found {amount}") if key in cut.world.keys else NotSent()

    cut.settings["probe"] = probe
    await cut.die()
    assert await cut.go_on() == ("found 5" if happened else "paid 5")
    assert asked == [(row_of(cut.store, "r", "pay").key, 5)]
    assert cut.world.seen == [5]


async def test_a_probe_that_fails_leaves_it_unknown() -> None:
    """A probe that raises, or answers something else, does not lead to a second sending."""
    for answer in (None, "sent"):
        cut = CutOff()

        async def probe(key: str, amount: int, answer: Any = answer) -> Any:
            if answer is None:
                raise ConnectionError("bank is closed")
            return answer

        cut.settings["probe"] = probe
        await cut.die()
        with pytest.raises(ExecutionError) as caught:
            await cut.go_on()
        if answer is None:  # why it is still unknown is said
            assert "bank is closed" in "".join(caught.value.__notes__)
            assert isinstance(caught.value.__cause__, ConnectionError)
        assert cut.world.seen == [5]
        key = row_of(cut.store, "r", "pay").key
        assert await cut.go_on(resolve={key: Sent("by phone")}) == "by phone"


async def test_a_probe_can_be_added_later() -> None:
    """The error's advice works: give the step a probe and resume."""
    cut = CutOff()
    await cut.die()
    with pytest.raises(EffectUnknownError):
        await cut.go_on()

    async def probe(key: str, amount: int) -> Sent | NotSent:
        return Sent("found") if key in cut.world.keys else NotSent()

    cut.settings["probe"] = probe
    cut.define()
    assert await cut.go_on() == "found"
    assert cut.world.seen == [5]


async def test_an_answered_effect_is_never_sent_again() -> None:
    """An effect whose answer is on record, but whose entry is not, is answered from the record after a crash."""
    store = MemoryStore()
    world = World()
    slow = Gate()

    @step(effect=Effect.READONLY)
    async def look() -> str:
        await slow.pass_through()
        return "seen"

    @step
    async def pay(attempt: Attempt) -> str:
        world.see("paid", attempt.idempotency_key)
        return "receipt"

    @workflow
    async def program(ctx: Context) -> list[str]:
        return await ctx.gather(ctx.call(look), ctx.call(pay))

    dying = DyingStore(has_entry("look"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await settle()
        assert row_of(store, "r", "pay").status is EffectStatus.ACKED
        assert [entry.kind for entry in store.entries("r")] == [EntryKind.FORK]
        slow.open()
    assert (await resume("r", store=store, program=program)).value == ["seen", "receipt"]
    assert world.seen == ["paid"]


async def test_what_an_answered_effect_wrote_to_the_state_survives_a_crash() -> None:
    """An effect in a branch whose entry still waits for an earlier branch keeps its state changes over a crash."""
    store = MemoryStore()
    slow = Gate()

    @step(effect=Effect.READONLY)
    async def look() -> None:
        await slow.pass_through()

    @step
    async def pay(state: State) -> str:
        state["paid"] = True
        return "receipt"

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.gather(ctx.call(look), ctx.call(pay))
        return ctx.state.get("paid")

    dying = DyingStore(has_entry("look"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await settle()
        assert row_of(store, "r", "pay").status is EffectStatus.ACKED
        slow.open()
    assert (await resume("r", store=store, program=program)).value is True
    assert values_of(store, "r") == {"paid": True}


async def test_the_time_an_effect_was_built_on_survives_a_crash() -> None:
    """An effect whose arguments hold ``ctx.now()`` is the same effect after a crash, not a second one."""
    store = MemoryStore()
    world = World()
    slow, paid = Gate(), Gate()

    @step(effect=Effect.READONLY)
    async def look() -> None:
        await slow.pass_through()

    @step
    async def reserve() -> None:
        world.see("reserved")

    @step
    async def pay(when: Any, attempt: Attempt) -> None:
        world.see("paid", attempt.idempotency_key)
        await paid.pass_through()

    @workflow
    async def second(ctx: Context) -> None:
        await ctx.call(reserve)
        await ctx.call(pay, ctx.now())

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.gather(ctx.call(look), ctx.call(second))

    dying = DyingStore(has_entry("look"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await paid.reached.wait()
        slow.open()
    paid.open()
    with pytest.raises(EffectUnknownError):  # it was in flight when the process died
        await resume("r", store=store, program=program)
    assert world.seen == ["reserved", "paid"]


async def test_a_read_that_an_effect_was_built_on_survives_a_crash() -> None:
    """An irreversible step in a branch puts what led to it on record, although an earlier branch is not done."""
    store = MemoryStore()
    world = World()
    slow = Gate()
    prices = iter([10, 20])

    @step(effect=Effect.READONLY)
    async def look() -> None:
        await slow.pass_through()

    @step(effect=Effect.READONLY)
    async def price() -> int:
        return next(prices)

    @step
    async def pay(amount: int) -> int:
        world.see(amount)
        return amount

    @workflow
    async def second(ctx: Context) -> int:
        amount = await ctx.call(price)
        await ctx.call(pay, amount)
        return amount

    @workflow
    async def program(ctx: Context) -> list[Any]:
        return await ctx.gather(ctx.call(look), ctx.call(second))

    dying = DyingStore(has_entry("look"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await settle()
        assert world.seen == [10]
        slow.open()
    assert (await resume("r", store=store, program=program)).value == [None, 10]
    assert world.seen == [10]


async def test_an_answered_effect_is_judged_after_a_crash() -> None:
    """A recorded answer that no judge has seen yet is judged when the run goes on, as it would have been."""
    store = MemoryStore()
    world = World()
    slow = Gate()

    async def judge(predicted: Any, actual: Any) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(accepted=False, replacement=f"corrected {actual}", replaces=True)

    @step(effect=Effect.READONLY)
    async def look() -> None:
        await slow.pass_through()

    @step(verify=Judge(judge))
    async def pay() -> str:
        world.see("paid")
        return "receipt"

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(look), ctx.call(pay))

    plain = MemoryStore()
    slow.open()
    expected = (await run(program, store=plain, run_id="r")).value
    assert expected == [None, "corrected receipt"]
    slow = Gate()
    dying = DyingStore(has_row(EffectStatus.ACKED), after=True, inner=store)
    with pytest.raises(PowerCutError):
        await run(program, store=dying, run_id="r")
    slow.open()
    assert (await resume("r", store=store, program=program)).value == expected
    assert history(store, "r") == history(plain, "r")
    assert world.seen == ["paid", "paid"]  # once in each run


@pytest.mark.parametrize("answer", ["probe", "sent", "not sent", "nobody knows"])
async def test_an_effect_of_a_wrong_guess_in_flight_at_a_crash_is_settled(answer: str) -> None:  # noqa: C901
    """The program never comes to that call; still it is asked for, and undone if it happened."""
    world = World()
    store = MemoryStore()
    asked, booking_gate = Gate(), Gate()

    async def undo(result: str, name: str) -> None:
        world.see(("undo", name, result))

    async def probe(key: str, name: str) -> Sent | NotSent:
        return Sent("found") if key in world.keys else NotSent()

    @step(effect=Effect.COMPENSABLE, undo=undo, **({"probe": probe} if answer == "probe" else {}))
    async def book(name: str, attempt: Attempt) -> str:
        if answer != "not sent":
            world.see(("book", name), attempt.idempotency_key)
        await booking_gate.pass_through()
        return f"ticket {name}"

    @step(effect=Effect.READONLY, predict=Guesses("flight"))
    async def ask() -> str:
        await asked.pass_through()
        return "nothing"

    @workflow
    async def program(ctx: Context) -> str:
        wish = await ctx.call(ask)
        if wish != "nothing":
            await ctx.call(book, wish)
        # So that the step is known by its name when the run goes on: it is local to this test.
        try:
            await ctx.call(book, "kept")
        finally:
            ctx.emit(wish)
        return wish

    dying = DyingStore(has_entry("ask"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r", policy=EVERYTHING)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await booking_gate.reached.wait()
        asked.open()
    booking_gate.open()
    (row,) = rows_of(store, "r")
    assert row.status is EffectStatus.SENT
    resolve: dict[str, Sent | NotSent] = {}
    if answer != "probe":
        with pytest.raises(EffectUnknownError) as caught:
            await resume("r", store=store, program=program, policy=Fixed(0))
        assert caught.value.key == row.key
        resolve = {row.key: NotSent() if answer == "not sent" else Sent("by hand")}
    if answer == "nobody knows":
        assert store.get_run("r").status is RunStatus.BLOCKED
        return
    assert (await resume("r", store=store, program=program, policy=Fixed(0), resolve=resolve)).value == "nothing"
    undone = [seen for seen in world.seen if seen[0] == "undo"]
    expected = {"probe": [("undo", "flight", "found")], "sent": [("undo", "flight", "by hand")], "not sent": []}
    assert undone == expected[answer]
    statuses = {decode(row.arguments)[0][0]: row.status for row in store.effects("r")}
    assert statuses == {"flight": EffectStatus.COMPENSATED, "kept": EffectStatus.ACKED}
    assert store.get_run("r").status is RunStatus.COMPLETED


async def test_a_fork_does_not_undo_what_its_parent_booked() -> None:
    """Results that a fork takes over belong to its parent, whether the fork goes another way or fails."""
    store = MemoryStore()
    world = World()
    book = booking(world)
    mood = "travel"

    @step(effect=Effect.READONLY)
    async def ask() -> str:
        return mood

    @workflow
    async def program(ctx: Context) -> str:
        wish = await ctx.call(ask)
        if wish == "stay":
            return wish
        ticket = await ctx.call(book, "flight")
        if wish == "fail":
            raise ValueError(wish)
        return str(ticket)

    assert (await run(program, store=store, run_id="r")).value == "ticket flight"
    mood = "stay"
    other_way = fork("r", 0, store=store, effects="replay")
    assert (await resume(other_way, store=store, program=program)).value == "stay"
    mood = "fail"
    failing = fork("r", 0, store=store, effects="replay")
    with pytest.raises(ValueError, match="fail"):
        await resume(failing, store=store, program=program)
    assert world.seen == [("book", "flight")]
    resent = fork("r", 0, store=store, effects="resend")
    with pytest.raises(ValueError, match="fail"):
        await resume(resent, store=store, program=program)
    assert world.seen == [("book", "flight"), ("book", "flight"), ("undo", "flight", "ticket flight")]


async def test_a_run_that_goes_on_after_a_block_is_running() -> None:
    """A person has decided: the run is no longer listed as waiting for one."""
    cut = CutOff(happened=False)
    await cut.die()
    with pytest.raises(EffectUnknownError) as caught:
        await cut.go_on()
    assert cut.store.get_run("r").status is RunStatus.BLOCKED
    dying = DyingStore(lambda commit: commit.status is RunStatus.COMPLETED, inner=cut.store)
    with pytest.raises(PowerCutError):
        await resume("r", store=dying, program=cut.program, resolve={caught.value.key: NotSent()})
    assert cut.store.get_run("r").status is RunStatus.RUNNING


async def test_a_block_does_not_put_effects_on_record_that_were_not_begun() -> None:
    """A run that stops at one unknown effect leaves others as they are: not begun is not unknown."""
    store = MemoryStore()
    world = World()
    asked, booking_gate = Gate(), Gate()

    async def undo(result: Any) -> None:
        world.see("undone")

    @step(effect=Effect.READONLY, predict=Guesses("yes"))
    async def ask() -> str:
        await asked.pass_through()
        return "yes"

    @step(effect=Effect.BUFFERED)
    async def tell() -> None:
        world.see("told")

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book() -> str:
        await booking_gate.pass_through()
        world.see("booked")
        return "ticket"

    @workflow
    async def program(ctx: Context) -> str:
        await ctx.call(ask)
        await ctx.call(tell)
        return await ctx.call(book)

    dying = DyingStore(has_entry("ask"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r", policy=EVERYTHING)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await booking_gate.reached.wait()
        asked.open()
    booking_gate.open()
    with pytest.raises(EffectUnknownError) as caught:
        await resume("r", store=store, program=program, policy=Fixed(0))
    assert caught.value.step == book.name
    result = await resume("r", store=store, program=program, resolve={caught.value.key: NotSent()})
    assert result.value == "ticket"
    assert world.counts() == {"told": 1, "booked": 1}


async def test_a_block_counts_no_sending_that_did_not_begin() -> None:
    """A delivery that a blocked run was about to repeat was not begun, and is not counted as if it had been."""
    store = MemoryStore()
    world = World()

    @step(effect=Effect.BUFFERED, idempotent=True)
    async def again() -> None:
        world.see("again")

    @step(effect=Effect.BUFFERED)
    async def once() -> None:
        world.see("once")

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(again)
        await ctx.call(once)

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_row(EffectStatus.ACKED), inner=store), run_id="r")
    for _ in range(2):
        with pytest.raises(EffectUnknownError):
            await resume("r", store=store, program=program)
    assert world.counts() == {"again": 1, "once": 1}
    assert row_of(store, "r", "again").tries == 1
    assert row_of(store, "r", "once").tries == 1


# ---------------------------------------------------------------------------------------------------------------- forks


@dataclass
class Forked:
    """A finished run of three steps, of which the second has an effect."""

    settings: dict[str, Any] = field(default_factory=dict)
    world: World = field(default_factory=World)
    store: MemoryStore = field(default_factory=MemoryStore)

    async def prepare(self) -> None:
        """Run it."""

        @step(effect=Effect.PURE)
        async def before() -> int:
            return 5

        @step(**self.settings)
        async def act(amount: int, attempt: Attempt) -> str:
            self.world.see(amount, attempt.idempotency_key)
            return f"receipt {len(self.world.seen)}"

        @step(effect=Effect.PURE)
        async def after(receipt: str | None) -> str:
            return f"filed {receipt}"

        @workflow
        async def program(ctx: Context) -> str:
            return await ctx.call(after, await ctx.call(act, await ctx.call(before)))

        self.program = program
        self.result = await run(program, store=self.store, run_id="r")

    async def go_on(self, version: int, effects: Any = None) -> str:
        """Fork and resume."""
        new = fork("r", version, store=self.store, effects=effects)
        return str((await resume(new, store=self.store, program=self.program)).value)


FORKED: list[dict[str, Any]] = [{}, {"effect": Effect.IDEMPOTENT}, {"effect": Effect.BUFFERED}]


@pytest.mark.parametrize("settings", FORKED, ids=["irreversible", "idempotent", "buffered"])
async def test_a_fork_over_sent_effects_must_say_what_to_do(settings: dict[str, Any]) -> None:
    """Going back over an acknowledged effect needs a word: use the recorded results, or send again under new keys."""
    forked = Forked(settings)
    await forked.prepare()
    original = forked.result.value
    with pytest.raises(MisuseError, match="replay"):
        await forked.go_on(1)
    assert len(forked.store.list_runs()) == 1
    assert await forked.go_on(1, "replay") == original
    assert forked.world.seen == [5]
    resent = await forked.go_on(1, "resend")
    assert forked.world.seen == [5, 5]
    assert forked.world.keys[0] != forked.world.keys[1]
    assert resent == original.replace("1", "2")


@pytest.mark.parametrize("settings", FORKED, ids=["irreversible", "idempotent", "buffered"])
async def test_a_fork_after_an_effect_does_not_repeat_it(settings: dict[str, Any]) -> None:
    """Effects of the shared history are done: the fork neither asks about them nor sends them again."""
    forked = Forked(settings)
    await forked.prepare()
    assert await forked.go_on(2) == forked.result.value
    assert forked.world.seen == [5]


async def test_a_fork_under_changed_arguments_sends() -> None:
    """Recorded results serve only the same call at the same place; a fork that asks for another one sends it."""
    store = MemoryStore()
    world = World()
    amount = 5

    @step(effect=Effect.READONLY)
    async def price() -> int:
        return amount

    @step
    async def pay(value: int) -> int:
        world.see(value)
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(pay, await ctx.call(price))

    await run(program, store=store, run_id="r")
    amount = 6
    new = fork("r", 0, store=store, effects="replay")
    assert (await resume(new, store=store, program=program)).value == 6
    assert world.seen == [5, 6]


async def test_a_fork_shares_history_and_leaves_its_origin_alone() -> None:
    """A fork has its parent's entries up to the version, and what it does later is its own."""
    forked = Forked()
    await forked.prepare()
    before = history(forked.store, "r")
    new = fork("r", 2, store=forked.store)
    assert history(forked.store, new) == before[:2]
    await resume(new, store=forked.store, program=forked.program)
    assert history(forked.store, "r") == before
    assert history(forked.store, new) == before
    record = forked.store.get_run(new)
    assert (record.parent, record.parent_version) == ("r", 2)
