"""What user code may rely on around its own: context variables, tracebacks, injected parameters, and clear refusals."""

from __future__ import annotations

import functools
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

import specflow
from specflow.definitions import Attempt, Retry, given, step, workflow
from specflow.effects import Effect
from specflow.errors import BackendContractError, DefinitionError, InvalidSettingError
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import Sent, resume, run
from specflow.speculation import Verdict
from specflow.stores import MemoryStore
from specflow.types import Mode
from tests.specflow.runtime.support import Gate, Guesses, settle

pytestmark = pytest.mark.anyio

mood: ContextVar[str] = ContextVar("mood", default="clean")


# ---------------------------------------------------------------------------------------------------- context variables


@pytest.mark.parametrize("policy", [Fixed(0), Fixed(2)], ids=lambda policy: str(policy.depth))
async def test_what_a_wrong_guess_sets_is_seen_by_nobody(policy: Fixed) -> None:
    """A workflow's context variables are its own: those of a world that fell are gone, the caller's stay."""
    asked = Gate(is_open=policy.depth == 0)

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask() -> str:
        await asked.pass_through()
        return "right"

    @step(effect=Effect.READONLY)
    async def read(_answer: str) -> str:
        return mood.get()

    @workflow
    async def program(ctx: Context) -> tuple[str, str]:
        answer = await ctx.call(ask)
        if answer == "wrong":
            mood.set("leaked")
        seen_by_step = await ctx.call(read, answer)
        return seen_by_step, mood.get()

    async def drive() -> None:
        assert (await run(program, policy=policy)).value == ("clean", "clean")
        assert mood.get() == "clean"

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await settle()
        asked.open()


async def test_a_workflow_keeps_what_it_sets_over_its_steps() -> None:
    """It is one program, and goes on in the same context; nested workflows are part of it."""

    @step(effect=Effect.PURE)
    async def nothing() -> None:
        mood.set("of the step")

    @workflow
    async def inner(ctx: Context) -> str:
        await ctx.call(nothing)
        return mood.get()

    @workflow
    async def program(ctx: Context) -> tuple[str, str]:
        mood.set("of the workflow")
        inside = await ctx.call(inner)
        return inside, mood.get()

    assert (await run(program)).value == ("of the workflow", "of the workflow")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("number", [1, 3])
async def test_what_a_step_sets_is_its_own(number: int, *, waits: bool) -> None:
    """Whether it runs at once, waits, or runs beside others: neither later steps nor the caller see it."""

    @step(effect=Effect.READONLY)
    async def set_it(name: str) -> str:
        before = mood.get()
        mood.set(name)
        if waits:
            await anyio.lowlevel.checkpoint()
        assert mood.get() == name
        return before

    @workflow
    async def program(ctx: Context) -> list[str]:
        first = await ctx.gather(*[ctx.call(set_it, f"step {index}") for index in range(number)])
        return [*first, await ctx.call(set_it, "last")]

    assert (await run(program)).value == ["clean"] * (number + 1)
    assert mood.get() == "clean"


async def test_an_exception_thrown_into_a_step_reaches_it() -> None:
    """A step that waits in its own context is cancelled like any other, and may clean up."""
    cleaned: list[str] = []

    @step(effect=Effect.READONLY, timeout=0.01)
    async def slow() -> None:
        mood.set("mine")
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(mood.get())

    @workflow
    async def program(ctx: Context) -> str:
        try:
            await ctx.call(slow)
        except TimeoutError:
            return "late"
        return "in time"

    assert (await run(program)).value == "late"
    assert cleaned == ["mine"]


# ----------------------------------------------------------------------------------------------------------- tracebacks


def deep_inside(number: int) -> int:
    """Fails, below a step."""
    raise KeyError(number)


@pytest.mark.parametrize("policy", [Fixed(0), Fixed(2)], ids=lambda policy: str(policy.depth))
async def test_the_traceback_of_a_step_that_fails_leads_to_its_line(policy: Fixed) -> None:
    """The program catches a copy; in the process where it was raised the copy says where."""

    @step(effect=Effect.READONLY, predict=Guesses(5))
    async def fails() -> int:
        return deep_inside(3)

    @workflow
    async def program(ctx: Context) -> int:
        return int(await ctx.call(fails))

    store = MemoryStore()
    with pytest.raises(KeyError) as caught:
        await run(program, store=store, run_id="r", policy=policy)
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[-2:] == ["fails", "deep_inside"]
    assert "program" in functions
    with pytest.raises(KeyError) as again:
        await resume("r", store=store, program=program)
    assert "deep_inside" not in [frame.name for frame in traceback.extract_tb(again.value.__traceback__)]


# --------------------------------------------------------------------------------------------------------- declarations


async def test_injected_parameters_are_found_under_any_name_of_their_class() -> None:
    """``specflow.Attempt`` and classes imported for type checkers only are filled in like ``Attempt``."""

    @step(effect=Effect.IDEMPOTENT)
    async def dotted(attempt: specflow.Attempt = given) -> bool:
        return isinstance(attempt, Attempt)

    async def unseen(attempt: Attempt = given) -> bool:
        return isinstance(attempt, Attempt)

    unseen.__annotations__["attempt"] = "typed_only.Attempt"
    found = step(effect=Effect.IDEMPOTENT)(unseen)

    @workflow
    async def program(ctx: Context) -> list[bool]:
        return [await ctx.call(dotted), await ctx.call(found)]

    assert (await run(program)).value == [True, True]


def _given_an_int(amount: int = given) -> int:
    return amount


class _NoMode:
    def verify(self, predicted: Any, actual: Any) -> Verdict:
        return Verdict(predicted == actual)


class _TextMode(_NoMode):
    mode = "lossy"


async def _plain(value: int = 0) -> int:
    return value


WRONG: dict[str, Callable[[], Any]] = {
    "a partial": lambda: step(functools.partial(_plain, 1)),
    "a text": lambda: step("name"),  # type: ignore[call-overload]
    "given an int": lambda: step(_given_an_int),
    "no mode": lambda: step(verify=_NoMode())(_plain),  # type: ignore[arg-type]
    "mode is a text": lambda: step(verify=_TextMode())(_plain),  # type: ignore[arg-type]
    "timeout is a text": lambda: step(timeout="x")(_plain),  # type: ignore[call-overload]
    "resource is a number": lambda: step(resource=5)(_plain),  # type: ignore[call-overload]
    "money is a text": lambda: step(money="x")(_plain),  # type: ignore[call-overload]
    "half an attempt": lambda: Retry(attempts=2.5),  # type: ignore[arg-type]
    "one class": lambda: Retry(on=ValueError),  # type: ignore[arg-type]
    "half a guess": lambda: Fixed(1.5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("declare", WRONG.values(), ids=WRONG)
async def test_what_cannot_work_is_refused_where_it_is_declared(declare: Callable[[], Any]) -> None:
    """With an error of this package that says what to write."""
    with pytest.raises((DefinitionError, InvalidSettingError)):
        declare()


async def test_settings_of_a_run_are_refused_before_it_starts() -> None:
    """A wrong type is not an error of the store, or of the encoder."""

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.sleep("1")  # type: ignore[arg-type]

    wrong: list[dict[str, Any]] = [{"run_id": 5}, {"store": MemoryStore}, {"limits": ["db"]}]
    for settings in wrong:
        with pytest.raises(InvalidSettingError):
            await run(program, **settings)
    store = MemoryStore()
    with pytest.raises(DefinitionError, match="number of seconds"):
        await run(program, store=store, run_id="r")
    with pytest.raises(InvalidSettingError, match="resolve"):  # also when there is nothing left to resolve
        await resume("r", store=store, program=program, resolve={"nobody's key": Sent(1)})


# ----------------------------------------------------------------------------------------------- predictors, verifiers


class _Exits:
    """A predictor that calls ``sys.exit`` while it guesses, or while it learns."""

    def __init__(self, where: str) -> None:
        self._where = where

    def predict(self, call: Any) -> Any:
        if self._where == "predict":
            sys.exit(3)
        return []

    def observe(self, call: Any, value: Any) -> None:
        if self._where == "observe":
            sys.exit(3)


@pytest.mark.parametrize("where", ["predict", "observe"])
async def test_a_predictor_that_exits_costs_its_guess(where: str) -> None:
    """As one that raises does."""

    @step(effect=Effect.READONLY, predict=_Exits(where))
    async def ask() -> int:
        return 5

    @workflow
    async def program(ctx: Context) -> int:
        return int(await ctx.call(ask))

    assert (await run(program, policy=Fixed(2))).value == 5


class _Says:
    mode = Mode.EXACT

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def verify(self, predicted: Any, actual: Any) -> Any:
        return self._answer


class _SaysLate(_Says):
    async def verify(self, predicted: Any, actual: Any) -> Any:  # type: ignore[override]
        return self._answer


@pytest.mark.parametrize(
    "verifier",
    [_Says(answer=True), _SaysLate(answer=True), _Says(Verdict(accepted=False, replacement=1, replaces=True))],
)
async def test_a_verifier_that_breaks_its_contract_is_named(verifier: Any) -> None:
    """Something that is no verdict, and a plain verifier that wants to replace the result."""
    asked = Gate()

    @step(effect=Effect.READONLY, predict=Guesses(5), verify=verifier)
    async def ask() -> int:
        await asked.pass_through()
        return 6  # an equal one is right without asking

    @step(effect=Effect.READONLY)
    async def read(value: int) -> int:
        return value

    @workflow
    async def program(ctx: Context) -> int:
        return int(await ctx.call(read, await ctx.call(ask)))

    async def drive() -> None:
        with pytest.raises(BackendContractError, match="verifier of"):
            await run(program, policy=Fixed(2))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await settle()
        asked.open()


# ------------------------------------------------------------------------------------------------------------ processes

SCRIPT = """
import anyio
from dataclasses import dataclass
from specflow import Effect, run, step, workflow

@dataclass
class Point:
    x: int

@step(effect=Effect.PURE, where="process")
def square(point: Point) -> Point:
    return Point(point.x ** 2)

@workflow
async def program(ctx):
    return (await ctx.call(square, Point(3))).x

if __name__ == "__main__":
    print(anyio.run(run, program).value)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_may_return_classes_of_the_script(tmp_path: Path) -> None:
    """The worker knows the script under another name than the script itself does."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)  # noqa: ASYNC221
    assert (done.stdout, done.returncode) == ("9\n", 0), done.stderr
