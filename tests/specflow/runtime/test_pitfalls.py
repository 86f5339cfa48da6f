"""Pitfalls of optimistic execution, one by one, in virtual time. The oracle meets them at random; here they are named.

Which test is about which reported fault or pitfall is listed in ``docs/workflow-faults.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specflow.codec import decode
from specflow.definitions import Step, Workflow, given, step, workflow
from specflow.effects import Effect
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.state import State
from specflow.stores import MemoryStore
from specflow.testing.virtual import Simulation, Timed, simulate
from tests.specflow.runtime.support import Guesses


def seconds(work: Timed) -> float:
    """The guessed question takes long enough for everything else to run ahead of its answer."""
    return 100.0 if work.step.endswith("ask") else 1.0


def values_of(run: Simulation) -> dict[str, Any]:
    """The state at the end, decoded."""
    return {key: decode(data) for key, data in run.state.items()}


def both(program: Workflow[..., Any], *, depth: int = 1, width: int = 1) -> Simulation:
    """The run ahead, after seeing that value and state are those of the plain run."""
    plain = simulate(program, policy=Fixed(0), durations=seconds)
    ahead = simulate(program, policy=Fixed(depth, width=width), durations=seconds)
    assert (ahead.value, repr(ahead.error)) == (plain.value, repr(plain.error))
    assert values_of(ahead) == values_of(plain)
    assert [entry.result for entry in ahead.entries] == [entry.result for entry in plain.entries]
    assert ahead.still_running == ()
    assert ahead.unreleased == 0
    return ahead


def attempts_at(run: Simulation, of: Step[..., Any]) -> int:
    """How often a step was started."""
    return sum(span.step == of.name for span in run.spans)


# ------------------------------------------------------------------------------------- what a reader of the state saw

Change = Callable[[State], object]


def aba(state: State) -> None:
    """Another value, and back."""
    state["k"] = 2
    state["k"] = 1


def created_anew(state: State) -> None:
    """Gone, and there again."""
    del state["k"]
    state["k"] = 1


def put(key: str, value: Any) -> Change:
    """Put a value."""
    return lambda state: state.put(key, value)


READS: dict[str, tuple[Change, Change, bool]] = {
    "a value that changed": (put("k", 2), lambda state: state["k"], True),
    "a value that changed and changed back": (aba, lambda state: state["k"], False),
    "another key": (put("other", 2), lambda state: state["k"], False),
    "a key that was deleted": (lambda state: state.delete("k"), lambda state: state.get("k"), True),
    "a key that was deleted and created again": (created_anew, lambda state: state["k"], False),
    "a missing key that appeared": (put("new", None), lambda state: "new" in state, True),
    "a missing key with a default": (put("new", 0), lambda state: state.get("new", 0), True),
    "a range with a new key": (put("p/3", 3), lambda state: state.scan("p/"), True),
    "a range beside a new key": (put("q", 3), lambda state: state.scan("p/"), False),
    "a range that lost a key": (lambda state: state.delete("p/1"), lambda state: state.scan("p/"), True),
    "a range with a key put again": (put("p/1", 1), lambda state: state.scan("p/"), False),
    "an empty range that fills": (put("r/1", 1), lambda state: state.scan("r/"), True),
    "the whole state": (put("q", 3), lambda state: state.scan(), True),
    "a value that grew": (lambda state: state.append("list", 2), lambda state: state["list"], True),
}
"""What a step writes whose result was guessed right, what ran ahead of it reads, and whether that has to run again."""


@pytest.mark.parametrize(("change", "read", "again"), READS.values(), ids=READS)
@pytest.mark.parametrize("reader", ["step", "program"])
def test_only_readers_of_what_changed_run_again(change: Change, read: Change, again: bool, reader: str) -> None:  # noqa: FBT001
    """Values are compared, not versions; ranges and missing keys are reads; nobody else is disturbed."""
    looks: list[Any] = []

    @step(effect=Effect.READONLY, predict=Guesses("right"))
    async def ask(state: State = given) -> str:
        change(state)
        return "right"

    @step(effect=Effect.READONLY)
    async def look(answer: str, state: State = given) -> Any:
        found = read(state)
        looks.append(found)
        return repr(found)

    @step(effect=Effect.READONLY)
    async def show(text: str) -> str:
        looks.append(text)
        return text

    @workflow
    async def program(ctx: Context) -> Any:
        for key, value in {"k": 1, "p/1": 1, "p/2": 2, "list": [1]}.items():
            ctx.state[key] = value
        answer = await ctx.call(ask)
        if reader == "step":
            return await ctx.call(look, answer)
        return await ctx.call(show, repr(read(ctx.state)))

    both(program)
    assert len(looks) == (3 if again else 2)  # one of them in the plain run


def test_what_an_earlier_life_wrote_is_gone_when_a_later_one_does_not_write_it() -> None:
    """A world that is built again writes less: the stale key vanishes, and its readers run again."""

    @step(effect=Effect.READONLY, predict=Guesses("right"))
    async def ask(state: State = given) -> str:
        state["k"] = 2
        return "right"

    @step(effect=Effect.READONLY)
    async def mark(answer: str, state: State = given) -> str:
        if state["k"] == 1:
            state["extra"] = "written in a life that never was"
        return answer

    @step(effect=Effect.READONLY)
    async def look(answer: str, state: State = given) -> Any:
        return state.get("extra")

    @workflow
    async def program(ctx: Context) -> Any:
        ctx.state["k"] = 1
        return await ctx.call(look, await ctx.call(mark, await ctx.call(ask)))

    run = both(program)
    assert run.value is None
    assert values_of(run) == {"k": 2}
    assert attempts_at(run, mark) == 2  # it did run ahead


# ------------------------------------------------------------------------------------------------------ doomed programs


def test_an_endless_loop_on_a_wrong_guess_ends_somewhere() -> None:
    """A program that would call steps for ever on a wrong guess stops far ahead, and reaches nobody."""
    ticks: list[int] = []

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        return "right"

    @step(effect=Effect.READONLY)
    async def tick(number: int) -> int:
        ticks.append(number)
        return number + 1

    @workflow
    async def program(ctx: Context) -> str:
        answer = await ctx.call(ask)
        number = 0
        while answer == "wrong":
            number = await ctx.call(tick, number)
        return answer

    simulate(program, policy=Fixed(1), durations=lambda work: 10.0 if work.step.endswith("ask") else 0.01)
    assert 100 < len(ticks) < 300
    both(program)


def test_an_error_in_a_doomed_world_reaches_nobody() -> None:
    """What the program itself raises on a wrong guess is not the program's error, in any branch of it."""

    @step(effect=Effect.READONLY, predict=Guesses(0))
    async def ask() -> int:
        return 2

    @workflow
    async def half(ctx: Context) -> float:
        return 1 / await ctx.call(ask)

    @workflow
    async def program(ctx: Context) -> list[float]:
        return [await ctx.call(half), *await ctx.map(half, [])] + await ctx.gather(ctx.call(half), ctx.call(half))

    assert both(program, depth=3).value == [0.5] * 3


@pytest.mark.parametrize("raises", [False, True])
def test_a_call_that_joins_an_attempt_of_a_falling_world_gets_its_answer(raises: bool) -> None:  # noqa: FBT001
    """A real call waits for an equal pure attempt begun on a wrong guess: that it falls, or raises, blocks nobody."""

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        return "right"

    @step(effect=Effect.PURE)
    async def think(number: int) -> int:
        if raises:
            raise ArithmeticError(number)
        return number + 1

    @workflow
    async def program(ctx: Context) -> Any:
        answer = await ctx.call(ask)
        return answer, await ctx.call(think, 1)

    def slow_to_think(work: Timed) -> float:
        return 5.0 if work.step.endswith("think") else 1.0

    run = simulate(program, policy=Fixed(1), durations=slow_to_think)
    assert run.seconds == 5.0  # it did join: alone it would end at 6
    if raises:
        assert isinstance(run.error, ArithmeticError)
    else:
        assert run.value == ("right", 2)
    assert attempts_at(run, think) == 1


def test_guesses_that_hold_but_change_the_state_do_not_make_work_without_end() -> None:
    """Every step is guessed right, and writes what all later ones read: waste is bounded by the depth, not the length.

    Each answer makes those ahead of it run again, of which there are as many as the policy is deep.
    """
    length, depth = 24, 6

    @step(effect=Effect.READONLY, predict=Guesses("same"))
    async def count(number: int, state: State = given) -> str:
        state["k"] = state.get("k", 0) + 1
        return "same"

    @workflow
    async def program(ctx: Context) -> int:
        for number in range(length):
            await ctx.call(count, number)
        return int(ctx.state["k"])

    run = both(program, depth=depth)
    assert run.value == length
    assert length < attempts_at(run, count) <= (2 * depth + 2) * length


# ------------------------------------------------------------------------------------ what may come out differently


def test_what_was_read_and_not_on_record_is_read_again_after_a_crash() -> None:
    """A later branch's reading, held back by an earlier branch, is lost with the process; the run uses one only."""
    readings: list[int] = []
    store = MemoryStore()

    @step(effect=Effect.READONLY)
    async def ask() -> str:
        return "slow"

    @step(effect=Effect.READONLY)
    async def read() -> int:
        readings.append(len(readings))
        return readings[-1]

    @workflow
    async def branch(ctx: Context) -> list[int]:
        first = await ctx.call(read)
        return [first, await ctx.call(double, first)]

    @step(effect=Effect.PURE)
    async def double(number: int) -> int:
        return 2 * number

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(ask), ctx.call(branch))

    killed = simulate(program, policy=Fixed(0), store=store, durations=seconds, crash_after=4)
    assert not killed.finished
    assert readings == [0]
    assert all(entry.step != read.name for entry in killed.entries)
    run = simulate(program, policy=Fixed(0), store=store, durations=seconds, recover=True)
    assert run.value == ["slow", [1, 2]]
    assert [decode(entry.result) for entry in run.entries if entry.step in (read.name, double.name)] == [1, 2]
