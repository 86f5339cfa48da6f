"""What declarations may look like, and what they then do: wrapped and repeated functions, annotations, names."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional, Protocol, TypedDict

import anyio
import pytest

import specflow
from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import (
    BackendContractError,
    DefinitionError,
    DuplicateStepError,
    GraphError,
    InvalidSettingError,
    StepTimeoutError,
    UnsupportedValueError,
)
from specflow.graph import Pipeline
from specflow.history import EffectStatus
from specflow.policies import CircuitBreaker, ExpectedValue, Fixed, Shadow
from specflow.predictors import Branch, Fn, LastValue, Majority, Markov, Tournament, TraceReplay, TwoBit
from specflow.replay import Context
from specflow.runtime import run
from specflow.speculation import Budget, Prediction, Verdict
from specflow.state import State
from specflow.stores import MemoryStore
from specflow.types import Mode
from specflow.whatif import what_if
from tests.specflow.runtime.support import Gate, Guesses, rows_of

pytestmark = pytest.mark.anyio


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as many write it: what it makes of an async function is a plain one that returns a coroutine."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Undo:
    """An undo that is an object with an async call."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    async def __call__(self, receipt: str, amount: int) -> None:
        """Undo it."""
        self.done.append((receipt, amount))


# -------------------------------------------------------------------------------------------------- wrapped functions


async def test_what_a_plain_function_returns_is_awaited() -> None:
    """Steps, buffered steps and undos may be plain functions that return a coroutine: their work is done."""
    sent: list[str] = []
    refunded: list[int] = []
    undo = Undo()

    async def refund(_receipt: str, amount: int) -> None:
        refunded.append(amount)

    @step(effect=Effect.COMPENSABLE, undo=passed_on(refund))
    async def pay(_amount: int) -> str:
        return "receipt"

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def book(_amount: int) -> str:
        return "booked"

    @step(effect=Effect.BUFFERED)
    @passed_on
    async def mail(text: str) -> None:
        await anyio.lowlevel.checkpoint()
        sent.append(text)

    @step(effect=Effect.PURE)
    @passed_on
    async def double(number: int) -> int:
        return 2 * number

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(mail, "hi")
        number = await ctx.call(double, 2)
        await ctx.call(pay, number)
        await ctx.call(book, number)
        raise ValueError(str(number))

    with pytest.raises(ValueError, match="4"):
        await run(program)
    assert (sent, refunded, undo.done) == (["hi"], [4], [("booked", 4)])


# ------------------------------------------------------------------------------------------------- repeated functions


async def reserve(number: int) -> int:
    """Declared twice below."""
    return number


@pytest.mark.parametrize("other", ["pure", "undo", "probe"])
async def test_one_function_with_two_effects_is_two_steps(other: str) -> None:
    """Their rows and undos could not be told apart, so one of them needs another name."""
    undone: list[tuple[str, int]] = []
    settings: dict[str, Any] = {
        "effect": Effect.COMPENSABLE,
        "undo": lambda _result, number: undone.append(("A", number)),
    }
    real = step(**settings)(reserve)
    others: dict[str, Any] = {
        "pure": {"effect": Effect.PURE},
        "undo": {**settings, "undo": lambda _result, number: undone.append(("B", number + 0))},
        "probe": {**settings, "probe": lambda _key, number: number},
    }
    dry = step(**others[other])(reserve)

    @workflow
    async def program(ctx: Context) -> None:
        await ctx.call(dry, 1)
        await ctx.call(real, 2)

    with pytest.raises(DuplicateStepError, match="reserve"):
        await run(program)
    named = step(name="reserve for real", **settings)(reserve)

    @workflow
    async def named_apart(ctx: Context) -> None:
        await ctx.call(dry, 1)
        await ctx.call(named, 2)
        raise LookupError

    if other == "pure":
        with pytest.raises(LookupError):
            await run(named_apart)
        assert undone == [("A", 2)]


@pytest.mark.parametrize("policy", [Fixed(0), Fixed(1), Fixed(3)], ids=lambda policy: str(policy.depth))
async def test_a_step_may_be_made_inside_the_workflow(policy: Fixed) -> None:
    """The program is rebuilt for every right guess, and makes the step anew: it is the same step."""

    @step(effect=Effect.PURE, predict=Guesses(1))
    async def ask(_number: int) -> int:
        await anyio.lowlevel.checkpoint()
        return 1

    @workflow
    async def program(ctx: Context) -> int:
        @step(effect=Effect.PURE)
        async def local(number: int) -> int:
            return number + 1

        total = 0
        for number in range(3):
            total += await ctx.call(local, number)
        return total + await ctx.call(ask, 0) + await ctx.call(local, total)

    assert (await run(program, policy=policy)).value == 14


# ------------------------------------------------------------------------------------------------- time, tries, names


async def test_a_timeout_does_not_count_the_wait_for_a_thread() -> None:
    """What waits for a thread has not begun: it is not late when it gets one after its timeout has passed."""

    @step(effect=Effect.READONLY, timeout=1.0)
    def quick() -> str:
        return "fine"

    @workflow
    async def program(ctx: Context) -> str:
        return await ctx.call(quick)

    limiter = anyio.to_thread.current_default_thread_limiter()
    threads, results = limiter.total_tokens, []

    async def drive() -> None:
        results.append((await run(program)).value)

    limiter.total_tokens = 1
    try:
        async with anyio.create_task_group() as group, limiter:  # the only thread is taken
            group.start_soon(drive)
            while not limiter.statistics().tasks_waiting:
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(1.2):
                await anyio.sleep_forever()
    finally:
        limiter.total_tokens = threads
    assert results == ["fine"]


async def test_real_work_leaves_the_queue_of_guesses() -> None:
    """What was started on a guess and waits behind others for a thread gets one at once when the guess holds."""
    wrong_ones = threading.Event()
    answer, begun = Gate(), threading.Semaphore(0)

    class Two:
        def predict(self, _call: Any) -> list[Prediction]:
            return [Prediction("many", 0.9), Prediction("one", 0.1)]

    @step(effect=Effect.READONLY, predict=Two())
    async def route() -> str:
        await answer.pass_through()
        return "one"

    @step(effect=Effect.READONLY)
    def slow(_number: int) -> None:
        begun.release()
        wrong_ones.wait(60)

    @step(effect=Effect.READONLY)
    async def all_threads_are_taken() -> None:
        await anyio.to_thread.run_sync(lambda: [begun.acquire() for _ in range(40)])

    @step(effect=Effect.READONLY)
    def quick() -> str:
        wrong_ones.set()  # those that guessed wrong are still under way: nobody else lets them go
        return "fine"

    @workflow
    async def program(ctx: Context) -> Any:
        if await ctx.call(route) == "many":
            return await ctx.map(slow, range(45))
        await ctx.call(all_threads_are_taken)
        answer.open()
        return await ctx.call(quick)

    with anyio.fail_after(50):
        assert (await run(program, policy=Fixed(1, width=2))).value == "fine"


def test_a_long_poll_needs_no_larger_numbers() -> None:
    """The factor on the wait outgrows a float after some thousand tries; the longest wait stays."""
    assert Retry(attempts=5000, wait=1.0, max_wait=2.0).seconds_before(4999) == 2.0
    assert Retry(attempts=5000, wait=0.0, max_wait=2.0).seconds_before(4999) == 0.0


async def test_draws_of_runs_with_long_names_differ() -> None:
    """Names that agree in their first 64 bytes are different names."""

    @workflow
    async def program(ctx: Context) -> tuple[str, float]:
        return str(ctx.uuid()), ctx.random().random()

    base = "company/region/production/order-fulfilment/customer-0000000000000042/"
    found = [(await run(program, run_id=f"{base}{number}")).value for number in range(3)]
    assert len(set(found)) == 3
    again = (await run(program, run_id=f"{base}1", store=MemoryStore())).value
    assert again == found[1]


async def test_a_name_that_cannot_be_stored_is_refused_before_anything() -> None:
    """Half a surrogate pair is no text: neither a run nor a key of the state can be called so."""
    store = MemoryStore()

    @workflow
    async def program(ctx: Context) -> None:
        ctx.state.put("\ud800", 1)

    with pytest.raises(InvalidSettingError, match="run_id"):
        await run(program, run_id="\ud800", store=store)
    assert store.list_runs() == ()
    with pytest.raises(UnsupportedValueError, match="key"):
        await run(program, store=store)


async def test_a_setting_of_run_is_no_parameter() -> None:
    """``run(w, run_id=...)`` names the run; a workflow that has such a parameter would never see it."""

    @workflow
    async def program(_ctx: Context, run_id: str = "default") -> str:
        return run_id

    with pytest.raises(DefinitionError, match=r"'run_id'.*rename"):
        await run(program, run_id="customer-7")

    @workflow
    async def outer(ctx: Context) -> str:
        return await ctx.call(program, run_id="inner")

    assert (await run(outer)).value == "inner"


# -------------------------------------------------------------------------------------------------------- annotations


Alias = State


async def dotted(state: specflow.State, attempt: specflow.Attempt) -> Any:
    """Named through the package."""
    state.put("seen", attempt.number)
    return attempt.idempotency_key


async def optional(state: State | None = None, attempt: Optional[Attempt] = None) -> Any:  # noqa: UP045
    """As readers of typed code expect it."""
    assert state is not None
    assert attempt is not None
    state.put("seen", attempt.number)
    return attempt.idempotency_key


async def aliased(state: Alias, attempt: Annotated[Attempt, "who"]) -> Any:
    """Under another name, and with a note."""
    state.put("seen", attempt.number)
    return attempt.idempotency_key


@pytest.mark.parametrize("function", [dotted, optional, aliased], ids=lambda function: function.__name__)
async def test_states_and_attempts_are_filled_in_however_they_are_named(function: Callable[..., Any]) -> None:
    """A parameter that gets None in silence has no idempotency key."""
    one = step(effect=Effect.IDEMPOTENT)(function)

    @workflow
    async def program(ctx: Context) -> Any:
        return await ctx.call(one)

    store = MemoryStore()
    result = await run(program, store=store)
    (row,) = rows_of(store, result.run_id)
    assert (row.key, row.status) == (result.value, EffectStatus.ACKED)


# ----------------------------------------------------------------------------------------------------------- verifiers


@pytest.mark.parametrize(
    ("verdict", "error", "match"),
    [
        (Verdict(accepted=True, replacement=3, replaces=True), BackendContractError, "accepts a guess and replaces"),
        (Verdict(accepted=False, replacement=object(), replaces=True), UnsupportedValueError, "verifier of"),
    ],
)
async def test_a_judge_that_contradicts_itself_is_named(verdict: Verdict, error: type[Exception], match: str) -> None:
    """What it put in place of the result is neither ignored nor an error without a name."""

    class Judge:
        mode = Mode.LOSSY

        async def verify(self, _predicted: Any, _actual: Any) -> Verdict:
            return verdict

    @step(effect=Effect.PURE, predict=Guesses(1), verify=Judge())
    async def ask() -> int:
        return 2

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(ask)

    with pytest.raises(error, match=match):
        await run(program)


# ----------------------------------------------------------------------------------------------------------- pipelines


class Ticket(TypedDict):
    """Structural: nothing is an instance of it."""

    number: int


class Named(Protocol):
    """For type checkers only."""

    name: str


async def test_pipelines_take_typed_dicts_and_protocols() -> None:
    """Types that objects are not instances of connect steps, and are checked as far as they can be."""
    pipeline = Pipeline("tickets")

    @pipeline.step(effect=Effect.PURE)
    async def ticket(raw: Ticket, extra: Named) -> Ticket:
        return {"number": raw["number"] + extra["name"]}  # type: ignore[index]

    @pipeline.step(effect=Effect.PURE)
    async def number(ticket: Ticket) -> int:
        return ticket["number"]

    assert (await run(pipeline, raw={"number": 1}, extra={"name": 2})).value == 3
    with pytest.raises(GraphError, match="raw"):
        await run(pipeline, raw=["number"], extra={"name": 2})


async def test_an_input_has_to_suit_every_step_that_reads_it() -> None:
    """The first reader's annotation does not speak for the others."""
    pipeline = Pipeline("readers")

    @pipeline.step(effect=Effect.PURE)
    async def first(x: object) -> int:
        return 1

    @pipeline.step(effect=Effect.PURE)
    async def second(x: int) -> int:
        return x

    with pytest.raises(GraphError, match="'x'"):
        await run(pipeline, x="text")


@pytest.mark.parametrize(
    ("when", "match"),
    [([("a", 1)], "mapping"), ("a", "mapping"), ({"a": []}, "never runs"), ({"a": lambda value: value}, "function")],
)
def test_conditions_that_cannot_work_are_refused(when: Any, match: str) -> None:
    """A step that never runs, or an error of its own, is not what was meant."""
    pipeline = Pipeline("conditions")

    @pipeline.step(effect=Effect.PURE)
    async def a() -> int:
        return 1

    async def b(a: int) -> int:
        return a

    def declare() -> None:
        pipeline.step(effect=Effect.PURE, when=when)(b)
        pipeline.freeze()

    with pytest.raises(GraphError, match=match):
        declare()


class Route(enum.Enum):
    """All its members may be a condition."""

    LEFT = "left"
    RIGHT = "right"


async def test_an_enum_as_a_condition_means_any_of_its_members() -> None:
    """A class that can be iterated is a collection like others."""
    pipeline = Pipeline("routes")

    @pipeline.step(effect=Effect.PURE)
    async def route(name: str) -> Any:
        return Route(name) if name else None

    @pipeline.step(effect=Effect.PURE, when={"route": Route})
    async def follow(route: Any) -> str:
        return f"went {route.value}"

    assert [(await run(pipeline, name=name)).value for name in ("left", "")] == ["went left", None]


def test_what_a_pipeline_results_in_is_part_of_it() -> None:
    """A run that began with another output is another program."""
    prints = []
    for output in (None, "a", "b"):
        pipeline = Pipeline("outputs", output=output)

        @pipeline.step(effect=Effect.PURE)
        async def a() -> int:
            return 1

        @pipeline.step(effect=Effect.PURE)
        async def b() -> int:
            return 2

        prints.append(pipeline.fingerprint)
    assert len(set(prints)) == 3


FLOW = """
import os
import sys
from lib import shared
from specflow import Effect, Pipeline

flow = Pipeline("triage")
flow.step(shared)

@flow.step(effect=Effect.PURE, when={"shared": {"billing", "refund", "x", "y"}})
async def triage(shared: str) -> str:
    if sys.argv[1] == "run":
        os._exit(9)
    return shared + "!"
"""
MAIN = """
import sys
import anyio
import flow_module
from specflow import resume, run
from specflow.stores import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[2])
    if sys.argv[1] == "run":
        await run(flow_module.flow, store=store, run_id="r", text="billing")
    print((await resume("r", store=store)).value)

anyio.run(main)
"""
LIB = """
from specflow import Effect, step

@step(effect=Effect.PURE)
async def shared(text: str) -> str:
    return text
"""


def test_a_crashed_pipeline_is_found_and_resumed_by_another_process(tmp_path: Path) -> None:
    """Its condition is a set, its name that of one of its steps, and its first step comes from another module."""
    for name, text in (("flow_module", FLOW), ("main", MAIN), ("lib", LIB)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    root = Path(__file__).parents[3]

    def process(action: str, seed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "main.py", action, "runs.db"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    crashed = process("run", "1")
    assert crashed.returncode == 9, crashed.stderr
    for seed in ("2", "3"):
        resumed = process("resume", seed)
        assert resumed.stdout.strip() == "billing!", resumed.stderr


# ------------------------------------------------------------------------------------------------------------ settings


WRONG: list[Callable[[], Any]] = [
    lambda: ExpectedValue(budget=0.05),  # type: ignore[arg-type]
    lambda: ExpectedValue(budget=None),  # type: ignore[arg-type]
    lambda: CircuitBreaker(None),  # type: ignore[arg-type]
    lambda: Shadow(Fixed),  # type: ignore[arg-type]
    lambda: Fixed(1.5),  # type: ignore[arg-type]
    lambda: Tournament(LastValue),  # type: ignore[arg-type]
    lambda: Branch(TwoBit),  # type: ignore[arg-type]
    lambda: Fn(5),  # type: ignore[arg-type]
    lambda: Markov(1.5),  # type: ignore[arg-type]
    lambda: Markov(100),
    lambda: Majority(guesses=1.5),  # type: ignore[arg-type]
    lambda: TraceReplay(ahead=1.5),  # type: ignore[arg-type]
    lambda: Prediction(1, money=-5.0),
    lambda: Prediction(1, money=float("nan")),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_settings_are_refused_where_they_are_given(number: int) -> None:
    """Not in the middle of a run, and not by never guessing anything."""
    with pytest.raises(InvalidSettingError):
        WRONG[number]()


async def test_a_replay_refuses_limits_that_let_nothing_run() -> None:
    """It is the limit that is wrong, not the program."""
    store = MemoryStore()

    @step(effect=Effect.PURE)
    async def one() -> int:
        return 1

    @workflow
    async def program(ctx: Context) -> int:
        return await ctx.call(one)

    run_id = (await run(program, store=store)).run_id
    with pytest.raises(InvalidSettingError, match="limits"):
        what_if(program, store.get_run(run_id), store.entries(run_id), policy=Fixed(1), limits={"api": 0})


async def test_a_step_that_is_late_is_still_late() -> None:
    """Seconds count from when there is a thread; afterwards they count."""

    @step(effect=Effect.READONLY, timeout=0.05)
    def nap() -> None:
        threading.Event().wait(0.2)

    @step(effect=Effect.READONLY, timeout=0.05)
    @passed_on
    async def sleep() -> None:
        await anyio.sleep(30)

    @workflow
    async def program(ctx: Context, number: int) -> None:
        await ctx.call((nap, sleep)[number])

    for number in range(2):
        with pytest.raises(StepTimeoutError):
            await run(program, number)


async def test_budgets_are_budgets() -> None:
    """A good one is taken."""
    assert ExpectedValue(budget=Budget(money=0.05)).budget.money == 0.05
