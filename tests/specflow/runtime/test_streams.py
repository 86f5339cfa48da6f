"""The two streams belong together: a committed event says which speculative one it confirms."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.definitions import given, step, workflow
from specflow.effects import Effect
from specflow.errors import InvalidSettingError
from specflow.history import EffectStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import CommittedEvent, Event, RetractedEvent, SpeculativeEvent, resume, run
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import (
    Gate,
    Guesses,
    World,
    settle,
)

pytestmark = pytest.mark.anyio


def check_numbers(events: list[Event]) -> int:
    """Every shown event is retracted or confirmed, exactly once; a confirmation follows, and says the same.

    Returns:
        How many were confirmed.
    """
    shown: dict[int, Any] = {}
    open_numbers: set[int] = set()
    confirmed = 0
    for event in events:
        if isinstance(event, SpeculativeEvent):
            assert event.number not in shown
            shown[event.number] = event.value
            open_numbers.add(event.number)
        elif isinstance(event, RetractedEvent):
            open_numbers.remove(event.number)
        elif event.number is not None:
            open_numbers.remove(event.number)
            assert shown[event.number] == event.value
            confirmed += 1
    assert not open_numbers
    return confirmed


@pytest.mark.parametrize("guesses", [(), ("right",), ("wrong",), ("wrong", "right")])
async def test_committed_events_name_what_they_confirm(guesses: tuple[str, ...]) -> None:
    """Equal texts are told apart: each committed event confirms the one that was shown for its own place."""

    @step(effect=Effect.READONLY, predict=Guesses(*guesses))
    async def ask() -> str:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        return "right"

    @step(effect=Effect.READONLY)
    async def look(text: str) -> str:
        return text

    @workflow
    async def branch(ctx: Context, index: int) -> None:
        ctx.emit("same")
        ctx.emit(await ctx.call(look, await ctx.call(ask)))
        ctx.emit("same")

    @workflow
    async def program(ctx: Context) -> None:
        ctx.emit("same")
        ctx.emit(await ctx.call(look, await ctx.call(ask)))
        ctx.emit("same")
        await ctx.map(branch, range(2))
        ctx.emit("same")
        await ctx.call(ask)
        ctx.emit("same")

    events: list[Event] = []
    await run(program, on_event=events.append, policy=Fixed(3, width=2))
    confirmed = check_numbers(events)
    assert bool(confirmed) is ("right" in guesses)
    committed = [event for event in events if isinstance(event, CommittedEvent)]
    assert len(committed) == 11
    if not guesses:
        assert all(event.number is None for event in committed)


async def test_an_event_that_was_shown_on_a_wrong_guess_first_confirms_the_right_one() -> None:
    """Two worlds show the same text; the committed event names that of the world which held."""
    asked = Gate()
    events: list[Event] = []

    @step(effect=Effect.READONLY, predict=Guesses("wrong", "right"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @workflow
    async def program(ctx: Context) -> str:
        answer = await ctx.call(ask)
        ctx.emit("answered")
        return answer

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, on_event=events.append, policy=Fixed(1, width=2)))
        await asked.reached.wait()
        await settle()
        asked.open()
    shown = [event for event in events if isinstance(event, SpeculativeEvent)]
    assert [event.value for event in shown] == ["answered", "answered"]
    (retracted,) = [event.number for event in events if isinstance(event, RetractedEvent)]
    (committed,) = [event for event in events if isinstance(event, CommittedEvent)]
    assert (retracted, committed.number) == (shown[0].number, shown[1].number)
    assert check_numbers(events) == 1


async def test_a_rebuilt_world_shows_anew_and_the_newest_is_confirmed() -> None:
    """A step guessed right that writes the state makes a world that read it start anew, under new numbers."""
    asked = Gate()
    events: list[Event] = []
    store = MemoryStore()

    @step(effect=Effect.READONLY, predict=Guesses("right"))
    async def ask(state: State = given) -> str:
        await asked.pass_through()
        state["key"] = "changed"
        return "right"

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(ask)
        ctx.emit("before")
        ctx.emit(ctx.state.get("key", "unchanged"))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(program, store=store, on_event=events.append, policy=Fixed(1)))
        await asked.reached.wait()
        await settle()
        asked.open()
    committed = [event for event in events if isinstance(event, CommittedEvent)]
    assert [event.value for event in committed] == ["before", "changed"]
    check_numbers(events)


class Deaf:
    """A listener that breaks at the first event, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: Event) -> None:
        """Break."""
        self.calls += 1
        raise ValueError(f"no ears for {event}")


async def test_a_listener_that_breaks_cuts_no_effect_off() -> None:
    """What is under way gets its answer on record, nothing more is started, and the run can be resumed."""
    world, paid, held, store, listener = World(), Gate(), Gate(), MemoryStore(), Deaf()

    @step
    async def pay(amount: int) -> int:
        await paid.pass_through()
        world.see(("paid", amount))
        return amount

    @step(effect=Effect.READONLY)
    async def ask(number: int) -> int:
        await paid.reached.wait()
        return number

    @step(effect=Effect.READONLY)
    async def hold() -> None:
        await held.pass_through()

    @workflow
    async def telling(ctx: Context) -> int:
        ctx.emit("hello")
        await ctx.call(ask, 1)
        await ctx.call(hold)
        return int(await ctx.call(pay, 3))

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(telling), ctx.call(pay, 5))

    async def drive() -> None:
        with pytest.raises(ValueError, match="no ears"):
            await run(program, store=store, run_id="r", on_event=listener)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await paid.reached.wait()
        await settle()
        paid.open()
    assert (world.seen, listener.calls) == ([("paid", 5)], 1)
    assert [row.status for row in store.effects("r")] == [EffectStatus.ACKED]
    held.open()
    result = await resume("r", store=store, program=program)
    assert result.value == [3, 5]
    assert sorted(world.seen) == [("paid", 3), ("paid", 5)]


async def test_steps_that_follow_each_other_at_once_stop_when_the_listener_breaks() -> None:
    """At most the step that was on record as begun runs; what is committed stays, and is not run again."""
    seen: list[int] = []
    store = MemoryStore()

    @step
    async def note(number: int) -> None:
        seen.append(number)

    @workflow
    async def program(ctx: Context) -> None:
        for number in range(20):
            if number == 3:
                ctx.emit("three")
            await ctx.call(note, number)

    with pytest.raises(ValueError, match="no ears"):
        await run(program, store=store, run_id="r", on_event=Deaf())
    assert seen in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    await resume("r", store=store, program=program)
    assert seen == list(range(20))


async def test_a_listener_that_breaks_at_the_last_event_is_heard_of() -> None:
    """The run is finished and on record; the error is raised all the same."""
    store = MemoryStore()

    @workflow
    async def program(ctx: Context) -> int:
        ctx.emit("the end")
        return 5

    with pytest.raises(ValueError, match="no ears"):
        await run(program, store=store, run_id="r", on_event=Deaf())
    assert (await resume("r", store=store, program=program)).value == 5


async def test_a_listener_is_a_plain_function() -> None:
    """Refused before anything starts."""

    async def listens(event: Event) -> None:
        raise AssertionError(event)

    @workflow
    async def program(ctx: Context) -> None:
        raise AssertionError(ctx)

    wrong: Any
    for wrong in (5, listens):
        with pytest.raises(InvalidSettingError, match="on_event"):
            await run(program, on_event=wrong)
