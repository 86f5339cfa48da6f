"""The mode of a run is that of its whole history: what was accepted before a crash counts, what fell does not."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from specflow.definitions import step, workflow
from specflow.effects import Effect
from specflow.history import Commit, EntryKind
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import fork, resume, run
from specflow.speculation import Verdict
from specflow.stores import MemoryStore, SQLiteStore
from specflow.types import Mode
from specflow.verifiers import Tolerance
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    Guesses,
    PowerCutError,
    World,
    has_entry,
    settle,
)

pytestmark = pytest.mark.anyio


class SlowTolerance:
    """A verifier that takes its time."""

    mode = Mode.LOSSY

    async def verify(self, predicted: float, actual: float) -> Verdict:
        """Close enough."""
        await anyio.lowlevel.checkpoint()
        return Verdict(accepted=abs(predicted - actual) <= 1.0)


def thermometer(verify: Any = None, guess: float = 20.0) -> Any:
    """A step whose guess is close, and accepted."""

    @step(effect=Effect.READONLY, predict=Guesses(guess), verify=verify or Tolerance(absolute=1.0))
    async def temperature(room: str) -> float:
        return 20.5

    return temperature


@step(effect=Effect.IDEMPOTENT)
async def note(text: str) -> str:
    """The step at whose commit a run dies. It starts when everything before it is on record."""
    return text


@pytest.mark.parametrize("verify", [Tolerance(absolute=1.0), SlowTolerance()], ids=["plain", "async"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_crash_does_not_forget_that_a_guess_was_accepted(kind: str, verify: Any, tmp_path: Any) -> None:
    """A run that goes on without any guess still says LOSSY: a value that it was built on was not the real one."""
    inner: Any = MemoryStore() if kind == "memory" else SQLiteStore(tmp_path / "runs.db")
    temperature = thermometer(verify)

    @workflow
    async def program(ctx: Context) -> float:
        degrees = await ctx.call(temperature, "office")
        await ctx.call(note, "read")
        return degrees

    store = DyingStore(has_entry("note"), inner=inner)
    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r", policy=Fixed(1))
    assert [entry.mode for entry in inner.entries("r")] == [Mode.LOSSY]
    result = await resume("r", store=inner, program=program, policy=Fixed(0))
    assert (result.value, result.mode) == (20.0, Mode.LOSSY)
    assert (await resume("r", store=inner, program=program)).mode is Mode.LOSSY  # as it is on record
    inner.close()


async def test_a_fork_is_as_exact_as_the_history_it_shares() -> None:
    """A fork behind a lossy entry is lossy, one before it is not."""
    store = MemoryStore()
    temperature = thermometer()

    @workflow
    async def program(ctx: Context) -> float:
        await ctx.call(note, "start")
        return await ctx.call(temperature, "office")

    await run(program, store=store, run_id="r", policy=Fixed(1))
    for version, mode, value in ((1, Mode.EXACT, 20.5), (2, Mode.LOSSY, 20.0)):
        new = fork("r", version, store=store)
        result = await resume(new, store=store, program=program, policy=Fixed(0))
        assert (result.value, result.mode) == (value, mode)


async def test_what_fell_does_not_make_a_run_lossy() -> None:
    """A verifier that accepted a guess in a world that was squashed has changed nothing of the run."""
    asked, measured = Gate(), Gate()
    results: list[Any] = []

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.READONLY)
    async def after(degrees: float) -> None:
        measured.reached.set()

    temperature = thermometer()

    @workflow
    async def program(ctx: Context) -> str:
        if (answer := await ctx.call(ask)) == "wrong":
            await ctx.call(after, await ctx.call(temperature, "office"))
        return answer

    async def drive() -> None:
        results.append(await run(program, policy=Fixed(3)))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await measured.reached.wait()
        await settle()
        asked.open()
    assert (results[0].value, results[0].mode) == ("right", Mode.EXACT)


async def test_an_exact_hit_stays_exact_over_a_crash() -> None:
    """A loose verifier alone does not make a run lossy: the guess was equal."""
    store = DyingStore(has_entry("note"))
    temperature = thermometer(guess=20.5)

    @workflow
    async def program(ctx: Context) -> float:
        degrees = await ctx.call(temperature, "office")
        await ctx.call(note, "read")
        return degrees

    with pytest.raises(PowerCutError):
        await run(program, store=store, run_id="r", policy=Fixed(1))
    assert (await resume("r", store=store.inner, program=program)).mode is Mode.EXACT


async def test_a_lossy_result_that_an_effect_was_built_on_keeps_its_mode() -> None:
    """A result put on record ahead of its entry, because an effect of its branch follows, says its mode there."""
    world, slow, paid = World(), Gate(), Gate()
    inner = MemoryStore()
    temperature = thermometer()

    @step(effect=Effect.READONLY)
    async def first() -> int:
        await slow.pass_through()
        return 1

    @step
    async def pay(degrees: float) -> str:
        world.see(degrees)
        paid.reached.set()
        return "receipt"

    @workflow
    async def heat(ctx: Context) -> str:
        return await ctx.call(pay, await ctx.call(temperature, "office"))

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.gather(ctx.call(first), ctx.call(heat))

    def is_joined(commit: Commit) -> bool:
        return any(entry.kind is EntryKind.CALL for entry in commit.entries)

    store = DyingStore(is_joined, inner=inner)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=store, run_id="r", policy=Fixed(2))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await paid.reached.wait()
        await settle()
        slow.open()
    assert {row.step.rpartition(".")[2]: row.mode for row in inner.effects("r")} == {
        "temperature": Mode.LOSSY,
        "pay": Mode.EXACT,
    }
    result = await resume("r", store=inner, program=program, policy=Fixed(0))
    assert (result.value, result.mode) == ([1, "receipt"], Mode.LOSSY)
    assert world.seen == [20.0]
    assert [entry.mode for entry in inner.entries("r") if entry.step == temperature.name] == [Mode.LOSSY]


class Rewriting:
    """A verifier that takes its time and puts something else in place of every result."""

    mode = Mode.LOSSY

    async def verify(self, predicted: Any, actual: float) -> Verdict:
        """Twice as much."""
        del predicted
        await anyio.lowlevel.checkpoint()
        return Verdict(accepted=False, replacement=2.0 * actual, replaces=True)


@pytest.mark.parametrize(
    "verify", [Tolerance(absolute=1.0), SlowTolerance(), Rewriting()], ids=["plain", "async", "own"]
)
@pytest.mark.parametrize("policy", [Fixed(0), Fixed(1), Fixed(3)], ids=lambda policy: str(policy.depth))
async def test_what_was_accepted_in_a_wrong_world_is_nobodys_result(verify: Any, policy: Fixed) -> None:
    """A pure step's result serves an equal call after its world fell; a guess that was close enough does not."""
    slow = Gate(is_open=policy.depth == 0)
    store = MemoryStore()

    @step(effect=Effect.PURE, predict=Guesses("wrong"))
    async def first() -> str:
        await slow.pass_through()
        return "right"

    @step(effect=Effect.PURE, predict=Guesses(20.0), verify=verify)
    async def temperature() -> float:
        return 20.5

    @step(effect=Effect.READONLY)
    async def after(value: float) -> float:
        return value

    @workflow
    async def program(ctx: Context) -> float:
        await ctx.call(first)
        return float(await ctx.call(after, await ctx.call(temperature)))

    async with anyio.create_task_group() as group:

        async def drive() -> None:
            result = await run(program, store=store, run_id="r", policy=policy)
            modes = {entry.mode for entry in store.entries("r") if entry.step.endswith("temperature")}
            if isinstance(verify, Rewriting):
                assert (result.value, result.mode, modes) == (41.0, Mode.LOSSY, {Mode.LOSSY})
            else:
                assert result.mode is Mode.LOSSY or result.value == 20.5
                assert modes == {result.mode}

        group.start_soon(drive)
        await settle()
        slow.open()
