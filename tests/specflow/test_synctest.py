"""SyncTest: every planted fault is found at its step, and nothing is found where nothing is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import DefinitionError, ForeignAwaitError, GraphError, InvalidSettingError, MisuseError
from specflow.graph import Pipeline
from specflow.replay import Context
from specflow.state import State
from specflow.synctest import Cause, SyncReport, synctest
from specflow.verifiers import Tolerance

pytestmark = pytest.mark.anyio

ROUNDS = 6
"""Random runs in most tests. No test relies on luck: a fault that shows by chance only is tossed for every time."""


@step(effect=Effect.PURE)
async def double(number: Any) -> Any:
    """Twice as much."""
    return number * 2


@step(effect=Effect.PURE)
def halve(number: int) -> int:
    """Half of an even number; refuses others."""
    if number % 2:
        raise ValueError(number)
    return number // 2


def runs_of(calls: int, rounds: int) -> int:
    """How many runs a test makes: reference, repetition, rebuildings, one per call, two with right guesses, random."""
    return 2 + (2 + rounds) + calls + 2 + rounds


def only(report: SyncReport) -> tuple[Cause, str, tuple[int, ...]]:
    """Cause, step and place of the one finding."""
    assert len(report.findings) == 1, str(report)
    finding = report.findings[0]
    return finding.cause, finding.step, finding.position


# ------------------------------------------------------------------------------------------------------ nothing wrong


@workflow
async def nested(ctx: Context, number: int) -> int:
    """Called by another workflow."""
    ctx.state.add("nested", 1)
    return await ctx.call(double, number) + 1


@workflow
async def clean(ctx: Context, numbers: list[int]) -> dict[str, Any]:
    """Uses all that a context offers, and nothing else."""
    total = 0
    for number in numbers:
        total += await ctx.call(double, number)
        ctx.state.put(f"total/{number}", total)
        ctx.emit(total)
    started = ctx.now()
    await ctx.sleep(3600)
    waited = (ctx.now() - started).total_seconds()
    try:
        await ctx.call(halve, ctx.random().choice([1, 3, 5]))
    except ValueError as error:
        total += error.args[0]
    gathered = await ctx.gather(ctx.call(nested, 1), ctx.call(double, [ctx.uuid().hex]), ctx.call(nested, total))
    same = await ctx.map(double, [7, 7, 7])
    return {"total": total, "waited": waited, "gathered": gathered, "same": same, "state": ctx.state.scan("total/")}


async def test_a_clean_workflow_gives_no_finding() -> None:
    """Time, draws, sleeps, state, events, errors, branches and nested workflows are the same in every run."""
    report = await synctest(clean, [1, 2, 2], rounds=20)
    assert report.ok, str(report)
    assert report.notes == ()
    assert report.calls == 3 + 1 + 3 + 3
    assert report.runs == runs_of(report.calls, 20)


async def test_a_clean_pipeline_gives_no_finding() -> None:
    """Pipelines are tested like workflows."""
    pipeline = Pipeline("clean")

    @pipeline.step(effect=Effect.PURE)
    async def category(ticket: str) -> str:
        return ticket[:1]

    @pipeline.step(effect=Effect.READONLY)
    def customer(ticket: str) -> int:
        return len(ticket)

    @pipeline.step(effect=Effect.PURE, when={"category": "a"})
    async def answer(category: str, customer: int) -> str:
        return category * customer

    for ticket, calls in (("abc", 3), ("bcd", 2)):
        report = await synctest(pipeline, ticket=ticket, rounds=ROUNDS)
        assert report.ok, str(report)
        assert report.calls == calls


async def test_a_program_that_fails_the_same_way_each_time_is_clean() -> None:
    """An exception is an outcome like any other."""

    @workflow
    async def failing(ctx: Context) -> None:
        await ctx.call(double, 1)
        await ctx.call(halve, 3)

    report = await synctest(failing, rounds=ROUNDS)
    assert report.ok, str(report)


async def test_state_is_restored_for_every_run() -> None:
    """Steps that read and write the state see in each run what they saw in the first."""

    @step(effect=Effect.PURE)
    def visit(name: str, state: State) -> int:
        state.add("visits", 1)
        state.union("names", {name})
        state.append("order", name)
        if "first" not in state:
            state.put("first", name)
        state.delete("missing")
        return int(state["visits"])

    @workflow
    async def visiting(ctx: Context) -> Any:
        counts = [await ctx.call(visit, name) for name in "abca"]
        return counts, sorted(ctx.state["names"]), ctx.state["order"], ctx.state["first"]

    report = await synctest(visiting, rounds=ROUNDS)
    assert report.ok, str(report)


async def test_guesses_are_compared_exactly_whatever_verifier_a_step_has() -> None:
    """A verifier that accepts a wrong guess would make an inexact run look like a fault of the program."""

    @step(effect=Effect.PURE, verify=Tolerance(absolute=1.0))
    async def measure(number: float) -> float:
        return number / 3

    @workflow
    async def measuring(ctx: Context) -> float:
        return await ctx.call(measure, await ctx.call(measure, 1.0))

    report = await synctest(measuring, rounds=ROUNDS)
    assert report.ok, str(report)


async def test_one_attempt_that_serves_worlds_of_which_some_are_falling() -> None:
    """The end of one shared attempt of a PURE step may disprove the guess under another world that waits for it."""

    @workflow
    async def same_again(ctx: Context) -> list[int]:
        return [await ctx.call(double, 0) for _ in range(4)]

    report = await synctest(same_again, rounds=30)
    assert report.ok, str(report)


# ------------------------------------------------------------------------------------------------------- hidden state


async def test_a_pure_step_that_counts_is_found_at_its_first_call() -> None:
    """A result that changes when the call is repeated is no function of the arguments."""
    counter = itertools.count()

    @step(effect=Effect.PURE)
    async def number_of(text: str) -> int:
        return next(counter)

    @workflow
    async def counting(ctx: Context) -> Any:
        await ctx.call(double, 1)
        return [await ctx.call(number_of, text) for text in "ab"]

    report = await synctest(counting, rounds=ROUNDS)
    assert only(report) == (Cause.HIDDEN_STATE, number_of.name, (1,))
    assert "twice in a row" in report.findings[0].detail


async def test_state_that_only_wrong_worlds_leave_behind_is_found_at_its_reader() -> None:
    """Plain runs agree with each other; a wrong guess makes the step write what the next one reads."""
    memory: dict[str, int] = {}

    @step(effect=Effect.PURE)
    async def remember(number: int) -> str:
        memory["number"] = number
        return "noted"

    @step(effect=Effect.PURE)
    async def recall(note: str) -> int:
        return memory["number"]

    @workflow
    async def remembering(ctx: Context) -> int:
        number = await ctx.call(double, 4)
        return await ctx.call(recall, await ctx.call(remember, number))

    report = await synctest(remembering, rounds=0)
    assert only(report) == (Cause.HIDDEN_STATE, recall.name, (2,))
    assert report.findings[0].run == "a run with a wrong guess at position 0"
    assert "came to 8 at first, and to 9" in report.findings[0].detail


async def test_state_that_depends_on_the_order_of_independent_steps_is_found() -> None:
    """Right guesses let a later step run first; a step whose result depends on that is found."""
    latest = ["nothing"]

    @step(effect=Effect.PURE)
    async def write(text: str) -> str:
        latest[0] = text
        return "done"

    @step(effect=Effect.PURE)
    async def read(of: str) -> str:
        return latest[0]

    @workflow
    async def ordered(ctx: Context) -> str:
        await ctx.call(write, "a")
        await ctx.call(write, "b")
        first = await ctx.call(read, "x")
        await ctx.call(write, "c")
        return first

    report = await synctest(ordered, rounds=0)
    assert only(report) == (Cause.HIDDEN_STATE, read.name, (2,))


async def test_state_that_workflow_code_leaves_behind_in_wrong_worlds_is_found() -> None:
    """Plain runs and rebuildings agree; code of a wrong world changes something that the real one reads."""
    odd: list[int] = []

    @workflow
    async def noting(ctx: Context) -> int:
        if (number := await ctx.call(double, 1)) % 2:
            odd.append(number)
        return await ctx.call(double, len(odd))

    report = await synctest(noting, rounds=ROUNDS)
    assert only(report) == (Cause.HIDDEN_STATE, double.name, (1,))
    assert report.findings[0].run == "a run with a wrong guess at position 0"


async def test_every_faulty_step_is_found_and_none_that_only_reads_their_results() -> None:
    """A fault shows at its own step: what follows gets the result that it got before."""
    counters = {"a": itertools.count(), "b": itertools.count(100)}

    @step(effect=Effect.PURE)
    def first(number: int) -> int:
        return next(counters["a"])

    @step(effect=Effect.PURE)
    def second(number: int) -> int:
        return next(counters["b"])

    @workflow
    async def chained(ctx: Context) -> int:
        number = await ctx.call(double, await ctx.call(first, 0))
        return await ctx.call(double, await ctx.call(second, number))

    report = await synctest(chained, rounds=ROUNDS)
    found = [(finding.cause, finding.step, finding.position) for finding in report.findings]
    assert found == [(Cause.HIDDEN_STATE, first.name, (0,)), (Cause.HIDDEN_STATE, second.name, (2,))]


async def test_a_pure_step_whose_changes_of_the_state_vary_is_found() -> None:
    """What a step writes into the state is part of what it comes to."""
    counter = itertools.count()

    @step(effect=Effect.PURE)
    def stamp(state: State) -> str:
        state.put("stamp", next(counter))
        return "ok"

    @workflow
    async def stamping(ctx: Context) -> str:
        return await ctx.call(stamp)

    assert only(await synctest(stamping, rounds=ROUNDS)) == (Cause.HIDDEN_STATE, stamp.name, (0,))


async def test_a_fault_in_a_branch_of_a_pipeline_is_found() -> None:
    """The place names the branch."""
    counter = itertools.count()
    pipeline = Pipeline("counting")

    @pipeline.step(effect=Effect.PURE)
    async def ticket_number(ticket: str) -> int:
        return next(counter)

    @pipeline.step(effect=Effect.PURE)
    async def reply(ticket_number: int) -> str:
        return f"number {ticket_number}"

    report = await synctest(pipeline, ticket="x", rounds=ROUNDS)
    assert only(report) == (Cause.HIDDEN_STATE, ticket_number.name, (0, 0, 0))


# ----------------------------------------------------------------------------------------------------------- READONLY


async def test_a_readonly_step_that_changes_what_it_reads_is_found() -> None:
    """Called twice in a row, it sees what it has done itself."""
    visits = [0]

    @step(effect=Effect.READONLY)
    async def visits_so_far(page: str) -> int:
        visits[0] += 1
        return visits[0]

    @workflow
    async def reading(ctx: Context) -> int:
        await ctx.call(double, 1)
        return await ctx.call(visits_so_far, "home")

    assert only(await synctest(reading, rounds=ROUNDS)) == (Cause.NOT_READONLY, visits_so_far.name, (1,))


async def test_a_readonly_step_that_wrong_worlds_change_is_found() -> None:
    """It reads the same until it has run on arguments of a wrong world."""
    largest = [0]

    @step(effect=Effect.READONLY)
    async def record(number: int) -> int:
        largest[0] = max(largest[0], number)
        return largest[0]

    @workflow
    async def recording(ctx: Context) -> int:
        return await ctx.call(record, await ctx.call(double, 5))

    report = await synctest(recording, rounds=ROUNDS)
    assert only(report) == (Cause.NOT_READONLY, record.name, (1,))
    assert "wrong guess at position 0" in report.findings[0].run or "right" in report.findings[0].run


async def test_a_world_that_changes_by_itself_is_a_note_not_a_finding() -> None:
    """What a READONLY step reads may change between runs; two calls in a row agree."""
    prices = iter(range(10, 1000))
    price = [0]

    @step(effect=Effect.READONLY)
    async def read_price(item: str) -> int:
        return price[0]

    @workflow
    async def pricing(ctx: Context) -> int:
        if not ctx.state.get("opened"):
            ctx.state.put("opened", "yes")
        return await ctx.call(double, await ctx.call(read_price, "tea"))

    @step(effect=Effect.READONLY)
    async def open_market() -> None:
        price[0] = next(prices)

    @workflow
    async def trading(ctx: Context) -> int:
        await ctx.call(open_market)
        return await ctx.call(double, await ctx.call(read_price, "tea"))

    assert (await synctest(pricing, rounds=ROUNDS)).ok
    report = await synctest(trading, rounds=ROUNDS)
    assert report.ok, str(report)
    assert len(report.notes) == 1
    assert read_price.name in report.notes[0]


async def test_a_clock_may_be_declared_unstable() -> None:
    """Recorded readings stand in for those that would differ every time."""
    readings = itertools.count()

    @step(effect=Effect.READONLY)
    def read_clock() -> int:
        return next(readings)

    @workflow
    async def timed(ctx: Context) -> list[int]:
        return [await ctx.call(double, await ctx.call(read_clock)) for _ in range(2)]

    assert only(await synctest(timed, rounds=ROUNDS))[0] is Cause.NOT_READONLY
    for name in (read_clock.name, read_clock.name.partition(":")[2]):
        report = await synctest(timed, rounds=ROUNDS, unstable=[name])
        assert report.ok, str(report)
        assert report.notes == ()


# ------------------------------------------------------------------------------------------------------ mutated input


async def test_a_step_that_changes_its_argument_is_found_with_the_arguments_name() -> None:
    """Positional and named arguments are told apart, and so are those that stay as they were."""

    @step(effect=Effect.PURE)
    async def sort_in_place(label: str, items: list[int], more: dict[str, int]) -> int:
        items.sort()
        more.pop("x", None)
        return items[0]

    @workflow
    async def sorting(ctx: Context) -> int:
        await ctx.call(double, 1)
        return await ctx.call(sort_in_place, "a", [3, 1, 2], more={"x": 1})

    report = await synctest(sorting, rounds=ROUNDS)
    assert only(report) == (Cause.MUTATED_INPUT, sort_in_place.name, (1,))
    assert "its argument items and more in place" in report.findings[0].detail


async def test_a_step_that_changes_its_argument_and_then_raises_is_found() -> None:
    """The arguments are looked at however the step ends."""

    @step(effect=Effect.PURE)
    def spoil(items: list[Any]) -> None:
        items.append(object())
        raise KeyError("spoilt")

    @workflow
    async def spoiling(ctx: Context) -> str:
        try:
            await ctx.call(spoil, [1])
        except KeyError:
            return "spoilt"
        return "fine"

    assert only(await synctest(spoiling, rounds=ROUNDS)) == (Cause.MUTATED_INPUT, spoil.name, (0,))


async def test_a_workflow_that_changes_its_argument_is_found() -> None:
    """It belongs to the program as a whole; what the workflow builds itself it may change."""

    @workflow
    async def emptying(ctx: Context, jobs: list[int], *, label: str) -> list[int]:
        done: list[int] = []
        while jobs:
            done.append(await ctx.call(double, jobs.pop()))
            await ctx.call(double, done)
        return done

    report = await synctest(emptying, [1, 2], label="x", rounds=ROUNDS)
    assert only(report) == (Cause.MUTATED_INPUT, emptying.name, ())
    assert "its argument jobs in place" in report.findings[0].detail


# --------------------------------------------------------------------------------------------- divergent workflow code


def draw_number() -> float:
    """What a careless author would write."""
    return random.random()


@pytest.mark.parametrize("make", [draw_number, itertools.count().__next__], ids=["randomness", "global counter"])
async def test_workflow_code_that_is_not_the_same_twice_is_found_at_the_call_it_changes(
    make: Callable[[], Any],
) -> None:
    """The answers before the call are the same, so it is the program itself that differs."""

    @workflow
    async def careless(ctx: Context) -> float:
        await ctx.call(double, 1)
        return await ctx.call(double, make())

    report = await synctest(careless, rounds=ROUNDS)
    assert only(report) == (Cause.UNSEEDED, double.name, (1,))


async def test_a_coin_that_workflow_code_tosses_is_found_by_rebuilding() -> None:
    """A coin that falls the same way in the repetition is tossed again in every rebuilding."""
    tosses = itertools.chain([True, True], itertools.cycle([True, True, False]))

    @workflow
    async def tossing(ctx: Context) -> int:
        await ctx.call(double, 1)
        return await ctx.call(double if next(tosses) else halve, 2)

    report = await synctest(tossing, rounds=ROUNDS)
    assert only(report)[0::2] == (Cause.UNSEEDED, (1,))
    assert report.findings[0].run == "a rebuilding from history"


async def test_a_workflow_that_sometimes_calls_more_or_less_is_found() -> None:
    """Calls that are missing, and calls after the recorded end, are divergences too."""

    def program(lengths: list[int]) -> Any:
        ways = itertools.chain(lengths, itertools.repeat(3))

        @workflow
        async def varying(ctx: Context) -> None:
            for number in range(next(ways)):
                await ctx.call(double, number)

        return varying

    for lengths in ([3, 2, 3], [2, 3, 3], [2, 2, 3], [3, 3, 2]):
        report = await synctest(program(lengths), rounds=ROUNDS)
        assert {finding.cause for finding in report.findings} == {Cause.UNSEEDED}, (lengths, str(report))
        assert {finding.position for finding in report.findings} <= {(2,), ()}


async def test_a_result_an_event_and_a_change_of_state_that_vary_are_found() -> None:
    """Where the calls are the same, the value, the stream and the state still have to be."""

    def program(kind: str) -> Any:
        counter = itertools.count()

        @workflow
        async def varying(ctx: Context) -> int:
            await ctx.call(double, 1)
            number = next(counter)
            if kind == "event":
                ctx.emit(number)
            elif kind == "state":
                ctx.state.put("number", number)
            await ctx.call(double, 2)
            return number if kind == "result" else 0

        return varying

    places = {"result": (), "event": (1,), "state": (1,)}
    for kind, place in places.items():
        report = await synctest(program(kind), rounds=ROUNDS)
        assert {finding.cause for finding in report.findings} == {Cause.UNSEEDED}, (kind, str(report))
        assert report.findings[0].position == place


# ------------------------------------------------------------------------------------------------------------- effects


class Post:
    """An outside world that remembers what reached it."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, text: str) -> str:
        """Something that cannot be undone."""
        self.sent.append(text)
        return f"receipt {len(self.sent)}"


def posting(post: Post, effect: Effect | None) -> Any:
    """A program that sends something between two harmless calls."""
    settings: dict[str, Any] = {} if effect is None else {"effect": effect}
    if effect is Effect.COMPENSABLE:
        settings["undo"] = lambda receipt, text: post.sent.append(f"undo {text} {receipt}")

    @step(**settings)
    async def send(text: str) -> str:
        return post.send(text)

    @workflow
    async def sending(ctx: Context, text: str) -> Any:
        text = await ctx.call(double, text)
        receipt = await ctx.call(send, text)
        return await ctx.call(double, receipt or "none")

    return sending


@pytest.mark.parametrize("effect", [None, *(effect for effect in Effect if effect.is_external)])
async def test_effects_are_refused_unless_allowed_and_then_happen_once(effect: Effect | None) -> None:
    """Without permission nothing is sent; with it, one thing, whatever number of runs is made."""
    post = Post()
    program = posting(post, effect)
    with pytest.raises(DefinitionError, match="would change the outside world"):
        await synctest(program, "hi", rounds=ROUNDS)
    assert post.sent == []
    report = await synctest(program, "hi", rounds=ROUNDS, allow_effects=True)
    assert report.ok, str(report)
    assert post.sent == ["hihi"]


@pytest.mark.parametrize("effect", [None, *(effect for effect in Effect if effect.is_external)])
async def test_a_stub_stands_in_for_an_effect(effect: Effect | None) -> None:
    """The step itself never runs; its stub runs once, with the step's arguments."""
    post = Post()
    calls: list[str] = []
    report = await synctest(posting(post, effect), "hi", rounds=ROUNDS, stub={"posting.<locals>.send": calls.append})
    assert report.ok, str(report)
    assert (post.sent, calls) == ([], ["hihi"])
    assert report.notes == ()


async def test_a_stub_that_no_step_is_named_after_is_noted() -> None:
    """A misspelt name does not pass silently."""
    report = await synctest(clean, [1], rounds=0, stub={"sent": print})
    assert "sent" in report.notes[0]


async def test_a_failing_program_is_compensated_once() -> None:
    """The undo belongs to the reference run; all others use what is on record."""
    post = Post()

    @step(effect=Effect.COMPENSABLE, undo=lambda receipt, text: post.sent.append(f"undo {receipt}"))
    def reserve(text: str) -> str:
        return post.send(text)

    @workflow
    async def ordering(ctx: Context) -> None:
        await ctx.call(reserve, "room")
        await ctx.call(halve, 1)

    report = await synctest(ordering, rounds=ROUNDS, allow_effects=True)
    assert report.ok, str(report)
    assert post.sent == ["room", "undo receipt 1"]


async def test_an_effect_whose_arguments_vary_is_a_finding_and_still_happens_once() -> None:
    """What diverges is reported at the effect, instead of being sent."""
    post = Post()
    counter = itertools.count()

    @step
    def send(text: str) -> str:
        return post.send(text)

    @workflow
    async def sending(ctx: Context) -> str:
        return await ctx.call(send, f"number {next(counter)}")

    report = await synctest(sending, rounds=ROUNDS, allow_effects=True)
    assert only(report) == (Cause.UNSEEDED, send.name, (0,))
    assert post.sent == ["number 0"]


# ---------------------------------------------------------------------------------------------------------- the steps


async def test_tries_timeouts_and_attempts_are_as_in_a_run() -> None:
    """A failed try is repeated without waiting, a step that takes too long fails, an attempt knows its place."""
    failures = iter([OSError("once")] * 1)

    @step(effect=Effect.PURE, retry=Retry(attempts=3, wait=1000.0))
    async def unsteady(number: int) -> int:
        if (error := next(failures, None)) is not None:
            raise error
        return number

    @step(effect=Effect.PURE, timeout=0.01)
    async def endless(number: int) -> int:
        await anyio.sleep_forever()
        return number

    @step(effect=Effect.PURE)
    async def place(attempt: Attempt) -> str:
        return f"{attempt.run_id} {attempt.position} {attempt.number} {attempt.idempotency_key}"

    @workflow
    async def trying(ctx: Context) -> Any:
        await ctx.call(unsteady, 1)
        try:
            await ctx.call(endless, 2)
        except TimeoutError:
            return await ctx.call(place), await ctx.call(place)

    report = await synctest(trying, rounds=2)
    assert report.ok, str(report)


async def test_a_step_without_a_timeout_is_given_one() -> None:
    """A step that never ends must not keep the test from ending."""

    @step(effect=Effect.PURE)
    async def endless() -> None:
        await anyio.sleep_forever()

    @workflow
    async def waiting(ctx: Context) -> str:
        try:
            await ctx.call(endless)
        except TimeoutError:
            return "late"
        return "in time"

    assert (await synctest(waiting, rounds=0, step_seconds=0.01)).ok


# ------------------------------------------------------------------------------------------------------------ bad input


async def test_what_cannot_be_tested_is_refused_before_anything_runs() -> None:
    """Wrong settings, wrong programs and wrong arguments are errors that say so."""
    with pytest.raises(InvalidSettingError, match="rounds=-1"):
        await synctest(clean, [1], rounds=-1)
    with pytest.raises(InvalidSettingError, match="step_seconds=0"):
        await synctest(clean, [1], step_seconds=0)
    with pytest.raises(DefinitionError, match="needs a @workflow or a Pipeline"):
        await synctest(double, 1)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="cannot be called like this"):
        await synctest(clean)
    pipeline = Pipeline("reading")

    @pipeline.step(effect=Effect.PURE)
    async def read(text: str) -> str:
        return text

    with pytest.raises(GraphError, match="'text' is missing"):
        await synctest(pipeline)
    assert (await synctest(pipeline, rounds=0, inputs={"text": "x"})).ok


async def test_a_workflow_that_breaks_the_rules_is_an_error_not_a_finding() -> None:
    """Foreign awaits and forgotten calls have errors of their own, which name the place."""

    @workflow
    async def impatient(ctx: Context) -> None:
        await ctx.call(double, 1)
        await anyio.lowlevel.checkpoint()

    @workflow
    async def forgetful(ctx: Context) -> None:
        ctx.call(double, 1)

    with pytest.raises(ForeignAwaitError, match="after position 0"):
        await synctest(impatient, rounds=0)
    with pytest.raises(MisuseError, match="never awaited"):
        await synctest(forgetful, rounds=0)


# ----------------------------------------------------------------------------------------------------------- the report


async def test_a_report_is_a_frozen_value_and_a_text() -> None:
    """It can be kept, and read by a person."""
    report = await synctest(clean, [1], rounds=0)
    assert str(report) == f"{clean.name}: nothing found ({report.runs} runs, {report.calls} calls each)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.runs = 0  # type: ignore[misc]


async def test_a_seed_decides_everything() -> None:
    """The same seed finds the same in the same runs; another one draws other numbers."""
    drawn: list[float] = []

    @step(effect=Effect.PURE)
    async def note(number: float) -> None:
        drawn.append(number)

    @workflow
    async def drawing(ctx: Context) -> None:
        await ctx.call(note, ctx.random().random())

    reports = [await synctest(drawing, rounds=2, seed=seed) for seed in (1, 1, 2)]
    assert reports[0] == reports[1]
    assert len(set(drawn)) == 2


async def test_many_calls_are_sampled_and_the_report_says_so() -> None:
    """Beyond a limit, places for a wrong guess are drawn: a long program is tested in bounded time."""

    @step(effect=Effect.PURE)
    async def nothing() -> None:
        return None

    @workflow
    async def long(ctx: Context) -> None:
        for _ in range(5):
            await ctx.gather(*[ctx.call(nothing) for _ in range(10)])

    report = await synctest(long, rounds=0, most_forced=7)
    assert report.ok, str(report)
    assert report.calls == 50
    assert report.runs == runs_of(7, 0)
    assert "7 of 50 calls" in report.notes[0]
