"""The two streams belong together: a committed event says which speculative one it confirms."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.definitions import given, step, workflow
from specflow.effects import Effect
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import CommittedEvent, Event, RetractedEvent, SpeculativeEvent, run
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import (
    Gate,
    Guesses,
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
