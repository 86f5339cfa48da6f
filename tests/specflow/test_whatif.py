"""What-if: seconds, hits and waste worked out by hand, and against runs that really went that way."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.chain import run_sync
from specflow.definitions import step, workflow
from specflow.effects import Effect
from specflow.errors import DivergenceError, InvalidSettingError
from specflow.graph import Pipeline
from specflow.history import Entry, EntryKind, RunRecord
from specflow.policies import ExpectedValue, Fixed, Threshold
from specflow.predictors import Constant, LastValue, Majority, Markov, TraceReplay
from specflow.protocols import RunAheadPolicy
from specflow.recorded import NEVER_RETURNED, FromRecord, Recording, coin, place_of, plain, wrong_value
from specflow.replay import Context, Outcome
from specflow.scheduler import Scheduler
from specflow.simulation import drive, state_after
from specflow.speculation import Budget, Call, Prediction
from specflow.state import State
from specflow.testing import NEVER_RETURNED as THEIRS
from specflow.testing import different_from
from specflow.testing.virtual import Timed, simulate
from specflow.verifiers import Tolerance
from specflow.whatif import HitRate, WhatIf, step_figures, train, what_if
from specflow.worlds import Task

from .samples import SPECIMENS  # isort: skip

Times = Mapping[str, float] | float


@step(effect=Effect.PURE, money=1.0)
async def follow(number: int) -> int:
    """The next number."""
    return number + 1


@step(effect=Effect.PURE)
async def other(number: int) -> int:
    """Ten more."""
    return number + 10


@workflow
async def chain(ctx: Context, length: int) -> int:
    """Each call needs the result of the one before."""
    number = 0
    for _ in range(length):
        number = await ctx.call(follow, number)
    return number


def short(name: str) -> str:
    """The name that a function was defined under."""
    return name.rpartition(".")[2].rpartition(":")[2]


def recorded(program: Any, *args: Any, times: Times = 10.0, **kwargs: Any) -> tuple[RunRecord, Sequence[Entry]]:
    """A run without guesses whose steps took these seconds, by name."""

    def seconds(work: Timed) -> float:
        return times if isinstance(times, float) else times[short(work.step)]

    run = simulate(program, *args, policy=Fixed(0), durations=seconds, **kwargs)
    return run.store.get_run(run.run_id), run.entries


def always(recording: Recording, *guesses: str, confidence: float = 1.0) -> FromRecord:
    """A predictor that makes the same kind of guesses of everything: right or wrong ones."""
    are_right = [guess == "right" for guess in guesses]
    return FromRecord(recording, lambda _call: are_right, confidence=confidence)


def ask(
    program: Any,
    run: tuple[RunRecord, Sequence[Entry]],
    policy: RunAheadPolicy,
    *guesses: str,
    confidence: float = 1.0,
    **settings: Any,
) -> WhatIf:
    """What if every call had been guessed right, or wrong?"""
    predictors = {"*": always(Recording(run[1]), *guesses, confidence=confidence)}
    return what_if(program, *run, policy=policy, predictors=predictors, **settings)


# -------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(("depth", "seconds"), [(0, 40), (1, 20), (2, 20), (3, 10), (9, 10)])
def test_a_chain_that_is_always_guessed_right(depth: int, seconds: float) -> None:
    """Of four calls of 10 s, as many run together as may rest on guesses, and the one that rests on none."""
    found = ask(chain, recorded(chain, 4), Fixed(depth), "right")
    assert (found.seconds, found.plain_seconds, found.recorded_seconds) == (seconds, 40, 40)
    assert (found.saved_seconds, found.speedup) == (40 - seconds, 40 / seconds)
    assert (found.report.hits, found.report.misses) == ((4, 0) if depth else (0, 0))
    assert (found.report.wasted_seconds, found.not_on_record) == (0, 0)
    assert (found.report.money, found.report.wasted_money) == (4, 0)
    assert found.is_complete


@given(length=st.integers(1, 12), depth=st.integers(0, 5), seconds=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_chain_of_equal_steps_goes_in_rounds(length: int, depth: int, seconds: int) -> None:
    """With all guesses right, depth k runs k + 1 calls at a time."""
    found = ask(chain, recorded(chain, length, times=float(seconds)), Fixed(depth), "right")
    assert found.seconds == math.ceil(length / (depth + 1)) * seconds


def two_steps(second: float) -> tuple[Any, tuple[RunRecord, Sequence[Entry]]]:
    """A call of 10 s, then one of another step that needs its result."""

    @workflow
    async def two(ctx: Context) -> int:
        return await ctx.call(other, await ctx.call(follow, 1))

    return two, recorded(two, times={"follow": 10.0, "other": second})


def test_a_wrong_guess_costs_what_runs_on_it_until_it_falls() -> None:
    """Work of 25 s on a wrong guess is stopped after the 10 s that the real result takes."""
    program, run = two_steps(25.0)
    found = ask(program, run, Fixed(1), "wrong")
    assert (found.seconds, found.plain_seconds) == (35, 35)
    assert found.report.wasted_seconds == 10
    assert (found.report.hits, found.report.misses) == (0, 2)
    assert found.not_on_record == 0  # stopped before it came to nothing


def test_a_call_that_is_not_on_record_takes_the_median_and_comes_to_nothing() -> None:
    """Work of 6 s on a wrong guess ends before the guess falls; its world goes no further."""
    program, run = two_steps(6.0)
    found = ask(program, run, Fixed(2), "wrong")
    assert (found.seconds, found.not_on_record) == (16, 1)
    assert found.report.wasted_seconds == 6
    assert (found.report.attempts, found.report.ahead, found.report.squashed) == (3, 1, 1)


def test_the_median_is_that_of_the_step_and_else_of_all_calls() -> None:
    """Steps that the real course of events calls once, thrice or never: 4 s, 2 s, and 3 s over all."""
    wanted: list[str] = []

    @step(effect=Effect.PURE)
    async def choose(number: int) -> str:
        return "known"

    @step(effect=Effect.PURE)
    async def known(number: int) -> int:
        return number

    @step(effect=Effect.PURE)
    async def unknown(number: int) -> int:
        return number

    @workflow
    async def choosing(ctx: Context) -> None:
        for number in range(3):
            await ctx.call(known, number)
        if await ctx.call(choose, 0) == "known":
            await ctx.call(known, 100)
        else:
            await ctx.call(unknown if wanted else known, 200)

    lengths = iter([2.0, 1.0, 3.0, 10.0, 4.0])
    run = simulate(choosing, policy=Fixed(0), durations=lambda _work: next(lengths))
    history = (run.store.get_run(run.run_id), run.entries)
    assert Recording(run.entries).median_seconds(known.name) == 2.5
    wrong = {"choose": always(Recording(run.entries), "wrong")}
    assert what_if(choosing, *history, policy=Fixed(1), predictors=wrong).report.wasted_seconds == 2.5
    wanted.append("unknown")
    assert what_if(choosing, *history, policy=Fixed(1), predictors=wrong).report.wasted_seconds == 3.0


def test_an_equal_pure_call_is_on_record_wherever_it_was_made() -> None:
    """A wrong world that asks what the run asks elsewhere gets that answer, and may go on."""

    @step(effect=Effect.READONLY)
    async def look(number: int) -> int:
        return number

    @workflow
    async def going(ctx: Context) -> None:
        start = await ctx.call(look, 5)
        await ctx.call(other, start)
        await ctx.call(other, 6)

    run = recorded(going, times={"look": 10.0, "other": 3.0})
    found = what_if(going, *run, policy=Fixed(1), predictors={"look": Constant(6)})
    # The wrong world calls other(6), which is on record at another place: 3 s, and then again: reused or run, 3 s more.
    assert found.not_on_record == 0
    assert found.seconds == 10 + 3  # what the wrong world found out about other(6) serves the real call
    assert found.report.reused == 1


def test_a_call_of_a_readonly_step_is_on_record_at_its_place_only() -> None:
    """What a step reads may differ from place to place, so an equal call elsewhere says nothing."""

    @step(effect=Effect.READONLY)
    async def look(number: int) -> int:
        return number

    @workflow
    async def looking(ctx: Context) -> None:
        first = await ctx.call(follow, 5)
        await ctx.call(look, first)
        await ctx.call(look, 7)

    run = recorded(looking, times={"follow": 10.0, "look": 3.0})
    found = what_if(looking, *run, policy=Fixed(1), predictors={"follow": Constant(7)})
    assert (found.not_on_record, found.seconds, found.report.wasted_seconds) == (1, 16, 3)


def test_prices_are_declared_or_given() -> None:
    """Money is counted per attempt; what fell is wasted; a budget keeps it within its limit."""
    program, run = two_steps(6.0)
    found = ask(program, run, Fixed(1), "wrong", money={"other": 0.5, "*": 2.0})
    assert (found.report.money, found.report.wasted_money) == (2.0 + 0.5 + 0.5, 0.5)
    found = ask(program, run, Fixed(1, budget=Budget(money=0.4)), "wrong", money={other.name: 0.5})
    assert (found.report.money, found.report.wasted_money, found.report.ahead) == (1.5, 0, 0)
    assert found.seconds == 16


def test_a_threshold_starts_what_is_believed_in() -> None:
    """Guesses of confidence 0.9: one deep is 0.9, two deep 0.81."""
    run = recorded(chain, 4)
    seconds = [ask(chain, run, Threshold(3, least), "right", confidence=0.9).seconds for least in (0.95, 0.85, 0.8)]
    assert seconds == [40, 20, 20]
    assert ask(chain, run, Threshold(3, 0.7), "right", confidence=0.9).seconds == 10


def test_limits_of_a_resource_hold() -> None:
    """Two slots: with all guesses right, four calls take two rounds, however deep the policy."""

    @step(effect=Effect.PURE, resource="api")
    async def ask_api(number: int) -> int:
        return number + 1

    @workflow
    async def asking(ctx: Context) -> int:
        number = 0
        for _ in range(4):
            number = await ctx.call(ask_api, number)
        return number

    run = recorded(asking)
    assert [ask(asking, run, Fixed(3), "right", limits={"api": slots}).seconds for slots in (1, 2, 4)] == [40, 20, 10]


def test_width_follows_several_guesses_at_a_time() -> None:
    """The second guess is right: width 1 waits for it, width 2 does not."""
    program, run = two_steps(10.0)
    assert ask(program, run, Fixed(1, width=1), "wrong", "right").seconds == 20
    found = ask(program, run, Fixed(1, width=2), "wrong", "right")
    assert (found.seconds, found.report.wasted_seconds) == (10, 10)


def test_parallel_calls_are_guessed_together() -> None:
    """Two branches of 10 s and 6 s, then 5 s on their results: 15 s, or 10 with a right guess of both."""

    @workflow
    async def gathering(ctx: Context) -> int:
        numbers = await ctx.gather(ctx.call(follow, 1), ctx.call(other, 1))
        return await ctx.call(follow, sum(numbers))

    lengths = {"(0, 0, 0)": 10.0, "(0, 1, 0)": 6.0, "(1,)": 5.0}
    run = simulate(gathering, policy=Fixed(0), durations=lambda work: lengths[str(work.position)])
    history = (run.store.get_run(run.run_id), run.entries)
    right = ask(gathering, history, Fixed(1), "right")
    assert (right.plain_seconds, right.seconds) == (15, 10)
    wrong = ask(gathering, history, Fixed(1), "wrong")
    assert (wrong.seconds, wrong.not_on_record, wrong.report.wasted_seconds) == (15, 1, 7.5)


def test_a_pipeline_starts_on_predicted_inputs() -> None:
    """A route of 10 s, guessed; the answer of 7 s that reads it; a fetch of 8 s beside them."""
    pipeline = Pipeline("routing")

    @pipeline.step(effect=Effect.PURE)
    async def route(ticket: str) -> str:
        return "refund"

    @pipeline.step(effect=Effect.READONLY)
    async def fetch(ticket: str) -> str:
        return ticket

    @pipeline.step(effect=Effect.PURE, when={"route": "refund"})
    async def answer(route: str, fetch: str) -> str:
        return route + fetch

    run = recorded(pipeline, ticket="x", times={"route": 10.0, "fetch": 8.0, "answer": 7.0})
    recording = Recording(run[1])
    found = what_if(pipeline, *run, policy=Fixed(1), predictors={"route": always(recording, "right")})
    assert (found.plain_seconds, found.seconds) == (17, 15)
    found = what_if(pipeline, *run, policy=Fixed(1), predictors={"route": Constant("repair")})
    assert (found.seconds, found.report.misses, found.report.wasted_seconds) == (17, 1, 0)  # it skips the answer


def test_a_step_that_raised_raises_again() -> None:
    """Errors are on record with their times, and cannot be guessed."""

    @step(effect=Effect.PURE)
    async def refuse(number: int) -> int:
        raise ValueError(number)

    @workflow
    async def trying(ctx: Context) -> int:
        try:
            return await ctx.call(refuse, 1)
        except ValueError as error:
            return await ctx.call(follow, error.args[0])

    run = recorded(trying, times={"refuse": 4.0, "follow": 5.0})
    found = ask(trying, run, Fixed(3), "right")
    assert (found.seconds, found.plain_seconds, found.report.hits) == (9, 9, 1)

    @workflow
    async def failing(ctx: Context) -> int:
        return await ctx.call(refuse, await ctx.call(follow, 1))

    run = recorded(failing, times={"refuse": 4.0, "follow": 5.0})
    found = ask(failing, run, Fixed(3), "right")
    assert (found.seconds, found.plain_seconds, found.is_complete) == (5, 9, True)


def test_a_sleep_takes_its_time_and_what_follows_does_not_run_ahead_of_it() -> None:
    """10 s, a sleep of 30 s, 10 s."""

    @workflow
    async def sleeping(ctx: Context) -> int:
        number = await ctx.call(follow, 1)
        await ctx.sleep(30)
        return await ctx.call(follow, number)

    run = recorded(sleeping)
    found = ask(sleeping, run, Fixed(3), "right")
    assert found.plain_seconds == pytest.approx(50, abs=1e-5)
    # Guessed at once, the sleep counts from when the guess was found to be right, as in a run.
    assert found.seconds == pytest.approx(50, abs=1e-5)


def test_effects_are_not_run_ahead_and_not_run_at_all() -> None:
    """An irreversible step waits for what comes before; buffered ones cost nothing; nothing reaches the outside."""
    sent: list[str] = []

    @step
    async def send(text: str) -> str:
        sent.append(text)
        return "sent"

    @step(effect=Effect.BUFFERED)
    async def note(text: str) -> None:
        sent.append(f"note {text}")

    @workflow
    async def sending(ctx: Context) -> str:
        number = await ctx.call(follow, 1)
        await ctx.call(note, "a")
        answer = await ctx.call(send, str(number))
        return answer + str(await ctx.call(follow, number))

    run = recorded(sending, times={"follow": 10.0, "send": 3.0, "note": 0.0})
    assert sorted(sent) == ["2", "note a"]
    sent.clear()
    found = ask(sending, run, Fixed(5), "right")
    # The last call needs nothing but guesses; the irreversible one waits for its place, and is the last to end.
    assert (found.plain_seconds, found.seconds) == (23, 13)
    assert sent == []


# ------------------------------------------------------------------------------------------------- state, time, draws


def test_what_steps_wrote_into_the_state_is_written_again() -> None:
    """A program that reads what a step has written goes the recorded way, also after a right guess of its result."""

    @step(effect=Effect.PURE)
    async def fill(number: int, state: State) -> str:
        state.put("kept", number)
        state.add("count", number)
        state.append("list", number)
        state.union("set", {number})
        state.delete("gone")
        return "filled"

    @workflow
    async def filling(ctx: Context) -> Any:
        ctx.state.put("gone", 1)
        for number in (1, 2):
            await ctx.call(fill, number)
            await ctx.call(follow, ctx.state["kept"] + ctx.state["count"] + len(ctx.state["list"]))
        return sorted(ctx.state["set"]), "gone" in ctx.state

    run = recorded(filling, times={"fill": 5.0, "follow": 7.0})
    for guesses in ((), ("right",), ("wrong",)):
        found = ask(filling, run, Fixed(4), *guesses)
        assert found.plain_seconds == 24
        assert found.is_complete
    assert state_after(run[1]) == {"count": b"3", "kept": b"2", "list": b"[1,2]", "set": b'{"$set":[1,2]}'}


def test_a_program_that_reads_the_time_keeps_its_recorded_results() -> None:
    """Under another policy it asks at another time; what is on record at its place stands for that."""

    @workflow
    async def timed(ctx: Context) -> str:
        number = await ctx.call(follow, 1)
        stamp = int(ctx.now().timestamp())
        return f"{await ctx.call(other, stamp)} {number}"

    run = recorded(timed)
    found = ask(timed, run, Fixed(2), "right")
    assert (found.seconds, found.plain_seconds, found.not_on_record) == (10, 20, 0)


def test_draws_are_those_of_the_run() -> None:
    """The seed of random draws is the run's id, or that of the run it was forked from."""

    @workflow
    async def drawing(ctx: Context) -> int:
        return await ctx.call(follow, ctx.random().randrange(10**9))

    run, entries = recorded(drawing)
    assert what_if(drawing, run, entries, policy=Fixed(1)).seconds == 10
    forked = dataclasses.replace(run, run_id="another")
    assert Recording(entries).calls[0].arguments in recorded(drawing)[1][0].arguments
    with_seed = what_if(drawing, forked, entries, policy=Fixed(1), seed=run.run_id)
    assert with_seed.seconds == 10


def test_verifiers_do_not_matter_and_async_predictors_are_not_asked() -> None:
    """A guess holds when it equals the record; a predictor that would have to wait says nothing."""

    class Slow:
        async def predict(self, call: Call) -> Sequence[Prediction]:
            raise AssertionError("asked")

    @step(effect=Effect.PURE, verify=Tolerance(absolute=5.0), predict=Slow())
    async def measure(number: float) -> float:
        return number + 1

    @workflow
    async def measuring(ctx: Context) -> float:
        return await ctx.call(measure, await ctx.call(measure, 1.0))

    run = recorded(measuring)
    assert what_if(measuring, *run, policy=Fixed(1)).report.predictions == 0
    assert ask(measuring, run, Fixed(1), "wrong").report.hits == 0


def test_steps_and_predictors_of_the_user_are_left_as_they_are() -> None:
    """Asking what if changes neither what a step remembers nor how long it is said to take."""

    @step(effect=Effect.PURE, predict=LastValue())
    async def remembered(number: int) -> int:
        return number

    @workflow
    async def remembering(ctx: Context) -> int:
        return await ctx.call(remembered, await ctx.call(remembered, 1))

    run = recorded(remembering)
    before = (remembered.predictor, list(remembered.remembered), remembered.usual_seconds, remembered.verifier)
    what_if(remembering, *run, policy=Fixed(1), predictors={"*": Markov(1)})
    assert before == (remembered.predictor, list(remembered.remembered), remembered.usual_seconds, remembered.verifier)


# ------------------------------------------------------------------------------------------------ against other runs


@workflow
async def winding(ctx: Context, seed: int) -> int:
    """Its way depends on its results."""
    number = seed
    while number < 40:
        if number % 3 == 0:
            number += sum(await ctx.gather(ctx.call(follow, number % 5), ctx.call(other, number % 2)))
        else:
            number = await ctx.call(follow if number % 3 == 1 else other, number)
        ctx.state.add("steps", 1)
    return number


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 3])
def test_right_guesses_save_what_a_run_would_have_saved(seed: int, depth: int) -> None:
    """With the same times and predictors a real run takes the same seconds, and has the same hits and price."""

    def seconds(work: Timed) -> float:
        return 1.0 + coin(7, work.step, work.position)  # no two things happen at the same time

    plain_run = simulate(winding, seed, policy=Fixed(0), durations=seconds)
    predictor = always(Recording(plain_run.entries), "right")
    found = what_if(
        winding,
        plain_run.store.get_run(plain_run.run_id),
        plain_run.entries,
        policy=Fixed(depth),
        predictors={"*": predictor},
    )
    own = [(one, one.predictor) for one in (follow, other)]
    try:
        for one, _before in own:
            one.predictor = predictor
        real = simulate(winding, seed, policy=Fixed(depth), durations=seconds)
    finally:
        for one, before in own:
            one.predictor = before
    assert found.seconds == pytest.approx(real.seconds)
    assert found.plain_seconds == pytest.approx(plain_run.seconds)
    assert (found.report.hits, found.report.misses) == (real.report.hits, real.report.misses)
    assert found.report.money == real.report.money


@pytest.mark.parametrize("policy", [Fixed(2, width=2), Threshold(3, 0.3), ExpectedValue()])
def test_wrong_guesses_never_make_a_run_slower(policy: RunAheadPolicy) -> None:
    """Without limits on resources, work on wrong guesses costs money, not time."""
    run = recorded(winding, 1, times={"follow": 3.0, "other": 4.0})
    recording = Recording(run[1])

    def choose(call: Call) -> Sequence[bool]:
        return (coin(3, *place_of(call)) < 0.5, True)

    found = what_if(winding, *run, policy=policy, predictors={"*": FromRecord(recording, choose, confidence=0.6)})
    assert found.seconds <= found.plain_seconds
    wrong = ask(winding, run, Fixed(2), "wrong")
    assert wrong.seconds == wrong.plain_seconds


# ----------------------------------------------------------------------------------------------------- broken records


def test_a_run_that_has_not_ended_is_followed_to_the_end_of_its_record() -> None:
    """Its seconds are those of what was committed."""
    run, entries = recorded(chain, 5)
    found = ask(chain, (run, entries[:3]), Fixed(1), "right")
    assert not found.is_complete
    assert found.recorded_seconds is None
    assert (found.plain_seconds, found.seconds) == (30, 20)
    nothing = ask(chain, (run, ()), Fixed(1), "right")
    assert (nothing.plain_seconds, nothing.seconds, nothing.speedup) == (0, 0, 1)
    found = ask(chain, (run, entries[:5]), Fixed(0), "right")  # all calls, but no end
    assert (found.seconds, found.is_complete) == (50, False)


def test_a_program_that_goes_another_way_is_a_divergence_at_the_place() -> None:
    """Another step, a missing call and a further call are told apart from a record that has not ended."""

    @workflow
    async def going(ctx: Context, length: int) -> None:
        for number in range(length):
            await ctx.call(turn.get(number, follow), number)

    turn: dict[int, Any] = {}
    run, entries = recorded(going, 3)
    turn[1] = other
    with pytest.raises(DivergenceError, match=r"at position 1 the history says a call of .*follow"):
        what_if(going, run, entries, policy=Fixed(1))
    turn.clear()
    longer, _entries = recorded(going, 4)
    with pytest.raises(DivergenceError, match="at position 3 the history says no call"):
        what_if(going, longer, entries, policy=Fixed(1))
    shorter, _entries = recorded(going, 2)
    with pytest.raises(DivergenceError, match="at position 2 "):
        what_if(going, shorter, entries, policy=Fixed(1))


def test_a_table_that_names_unknown_steps_is_refused() -> None:
    """A misspelt name would otherwise change nothing, silently."""
    run = recorded(chain, 2)
    with pytest.raises(InvalidSettingError, match="folow"):
        what_if(chain, *run, policy=Fixed(1), predictors={"folow": None})
    with pytest.raises(InvalidSettingError, match="folow"):
        what_if(chain, *run, policy=Fixed(1), money={"folow": 1.0})
    assert what_if(chain, *run, policy=Fixed(1), predictors={follow.name: None}, money={"follow": 1.0}).seconds == 20


# ----------------------------------------------------------------------------------------------------- learning, rates


def test_predictors_learn_from_earlier_runs() -> None:
    """A trace of the same run seen before makes every guess right; without it none is made at first."""
    run = recorded(chain, 4)
    assert what_if(chain, *run, policy=Fixed(3), predictors={"*": TraceReplay()}).report.hits == 0
    predictors = {"*": TraceReplay()}
    train(chain, *run, predictors)
    found = what_if(chain, *run, policy=Fixed(3), predictors=predictors)
    assert found.report.hits == 4
    assert found.seconds == 10


def test_hit_rates_are_those_counted_by_hand() -> None:
    """Results 5 5 6 5 and an error: the last value is right once in three guesses, the constant three times in four."""

    @step(effect=Effect.PURE)
    async def give(number: int) -> int:
        if number < 0:
            raise ValueError(number)
        return number

    @workflow
    async def giving(ctx: Context, numbers: list[int]) -> None:
        for number in numbers:
            await ctx.call(give, number)

    lengths = iter([1.0, 5.0, 2.0, 4.0, 8.0])
    run = simulate(giving, [5, 5, 6, 5, -1], policy=Fixed(0), durations=lambda _work: next(lengths))
    makers = {"last": LastValue, "five": lambda: Constant(5), "never": lambda: Constant("5")}
    (figures,) = step_figures([run.entries], makers)
    assert (figures.step, figures.calls, figures.failed) == (give.name, 5, 1)
    assert (figures.seconds, figures.median_seconds) == (20, 4)
    assert figures.hit_rates == {"last": HitRate(4, 3, 1), "five": HitRate(4, 4, 3), "never": HitRate(4, 4, 0)}
    assert HitRate(4, 0, 0).rate is None
    # A second run goes on with what was learned in the first.
    (figures,) = step_figures([run.entries, run.entries], {"last": LastValue})
    assert figures.hit_rates["last"].guesses == 7


def test_results_of_one_branch_are_not_shown_to_another() -> None:
    """Inside a branch a predictor sees what came before the branches and its own results, after them neither branch."""
    shown: dict[tuple[int, ...], tuple[Any, ...]] = {}

    class Watching:
        def predict(self, call: Call) -> Sequence[Prediction]:
            shown[call.position] = (tuple(call.recent), tuple(value for _step, value in call.trail))
            return ()

    @workflow
    async def inside(ctx: Context, number: int) -> None:
        await ctx.call(follow, number)
        await ctx.call(follow, number + 1)

    @workflow
    async def branching(ctx: Context) -> None:
        await ctx.call(follow, 0)
        await ctx.call(other, 0)
        await ctx.gather(ctx.call(inside, 100), ctx.call(inside, 200))
        await ctx.call(follow, 300)

    _run, entries = recorded(branching)
    step_figures([entries], {"watching": Watching})
    assert shown[2, 0, 1] == ((1, 101), (1, 10, 101))
    assert shown[2, 1, 0] == ((1,), (1, 10))
    assert shown[2, 1, 1] == ((1, 201), (1, 10, 201))
    assert shown[3,] == ((1,), (1, 10))


def test_rates_agree_with_those_of_a_run() -> None:
    """What is worked out from history is what a run scores; it learns a call after the next one was guessed."""
    results = [coin(5, number) < 0.7 for number in range(60)]

    @step(effect=Effect.PURE)
    async def toss(number: int) -> bool:
        return results[number]

    @workflow
    async def tossing(ctx: Context) -> None:
        for number in range(len(results)):
            await ctx.call(toss, number)

    run = recorded(tossing)
    for make in (LastValue, Majority, lambda: Markov(2)):
        (figures,) = step_figures([run[1]], {"it": make})
        found = what_if(tossing, *run, policy=Fixed(1), predictors={"*": make()})
        rate = figures.hit_rates["it"]
        guesses = found.report.hits + found.report.misses
        assert rate.guesses - 1 <= guesses <= rate.guesses
        assert abs(found.report.hits - rate.hits) <= (0 if isinstance(make(), LastValue) else 3)


# ------------------------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_wrong_value_is_wrong_and_plain_values_need_no_classes(name: str) -> None:
    """Whatever a step returns, there is a value that differs from it; stored bytes can be read without its class."""
    from specflow.codec import encode  # noqa: PLC0415 - one test only

    value = SPECIMENS[name]
    assert encode(wrong_value(value)) != encode(value)
    plain(encode(value))


def test_wrong_values_agree_with_those_that_tests_use() -> None:
    """The core may not import the testing rooms: two of a kind, kept alike."""
    for value in [True, 1, 1.5, math.nan, "a", b"a", [], [1], (), (1,), {}, {"a": 1}, None, EntryKind.CALL]:
        mine, theirs = wrong_value(value), different_from(value)
        assert str(mine).replace(NEVER_RETURNED, "") == str(theirs).replace(THEIRS, "")


def test_damaged_bytes_are_shown_as_they_are() -> None:
    """Looking at a store never fails because of a value in it."""
    assert plain(b'{"half') == '{"half'
    assert plain(b'"\xed\xa0\xbd"') == "\ud83d"


def test_a_simulation_that_waits_for_ever_says_so() -> None:
    """Work that never ends leaves the run open, with what was committed before."""

    class Stuck:
        def seconds(self, task: Task) -> float:
            return math.inf if task.position == (2,) else 1.0

        async def perform(self, task: Task, at: float) -> Outcome:
            from specflow.codec import Box  # noqa: PLC0415 - one test only

            return Outcome(Box(task.position[0]), at=at)

    from specflow.codec import Box  # noqa: PLC0415 - one test only

    scheduler = Scheduler(chain.body(Box([[4], {}])), name="chain", run_id="stuck", policy=Fixed(0))
    course = run_sync(drive(scheduler, Stuck(), at=100.0))
    assert (course.outcome, course.status, course.seconds) == (None, None, 2.0)
    assert [(entry.position, entry.at) for entry in course.entries] == [((0,), 101.0), ((1,), 102.0)]


def test_what_if_is_a_frozen_value() -> None:
    """It can be kept and compared."""
    run = recorded(chain, 2)
    found = what_if(chain, *run, policy=Fixed(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0.0  # type: ignore[misc]
    assert all(math.isfinite(value) for value in itertools.chain([found.seconds, found.plain_seconds, found.speedup]))
