"""Simulated runs take the time that they should, do what real ones do, and are the same every time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specflow.codec import decode
from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import (
    BackendContractError,
    DefinitionError,
    InvalidSettingError,
    RunExistsError,
    StepTimeoutError,
    SuspendedError,
)
from specflow.graph import Pipeline
from specflow.history import RunStatus
from specflow.outbox import NotSent, Sent
from specflow.policies import Fixed
from specflow.runtime import CommittedEvent, RetractedEvent, SpeculativeEvent
from specflow.scheduler import Decision, Scheduler
from specflow.speculation import Budget, Call, Prediction, Verdict
from specflow.stores import MemoryStore
from specflow.testing import EPOCH, Adversary, Flaky, Oracle, Simulation, Timed, run_serial, simulate, spread
from specflow.types import Mode
from specflow.worlds import TaskKind


def chain_of(predictor: Any, effect: Effect = Effect.READONLY, **settings: Any) -> Any:
    """A workflow that counts to n, one step after another."""

    @step(name="count", effect=effect, predict=predictor, **settings)
    async def count(x: int) -> int:
        return x + 1

    @workflow
    async def chain(ctx: Any, n: int) -> int:
        x = 0
        for _turn in range(n):
            x = await ctx.call(count, x)
            ctx.emit(x)
        return x

    return chain


def successor(call: Call) -> int:
    """The right answer of the counting step."""
    result: int = call.arguments[0] + 1
    return result


def check_alone(run: Simulation, program: Any, *args: Any, **kwargs: Any) -> None:
    """A simulated run did what the program does alone, and left nothing behind."""
    serial = run_serial(program, *args, run_id=run.run_id, at=EPOCH, **kwargs)
    assert not serial.differences(
        entries=run.entries, state=run.state, events=run.emitted, outcome=(run.value, run.error)
    )
    assert run.finished
    assert not run.still_running
    assert run.unreleased == 0
    assert all(span.ended is not None for span in run.spans)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_chain_that_is_guessed_right(depth: int, length: int) -> None:
    """With guesses d deep, d + 1 calls at a time: n calls of T seconds take ceil(n / (d + 1)) * T."""
    run = simulate(chain_of(Oracle(successor)), length, policy=Fixed(depth), durations=3.0)
    assert run.seconds == 3.0 * math.ceil(length / (depth + 1))
    assert run.report.attempts == length
    assert run.report.misses == run.report.squashed == 0
    check_alone(run, chain_of(None), length)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_chain_that_is_guessed_wrong(depth: int) -> None:
    """Wrong guesses cost no time: n calls of T seconds take n * T, as without any."""
    run = simulate(chain_of(Adversary(successor)), 6, policy=Fixed(depth), durations=3.0)
    assert run.seconds == 18.0
    assert run.report.hits == 0
    assert run.report.squashed > 0
    check_alone(run, chain_of(None), 6)


def test_a_chain_that_is_guessed_right_sometimes() -> None:
    """One guess deep, a right guess hides the call after it: a call whose predecessor was guessed right starts with it.

    So the time is that of the calls that did not start early, each T, whatever the order of hits and misses.
    """
    length, seconds = 40, 2.0
    flaky = Flaky(0.6, successor, seed=3)
    run = simulate(chain_of(flaky), length, policy=Fixed(1), durations=seconds)
    hidden, turn = 0, 0
    while turn < length - 1:
        if flaky.is_right(Call("count", (turn,), {}, (turn,))):
            hidden += 1
            turn += 1  # the call after it ran beside it; its own guess was made when that was known
        turn += 1
    assert run.seconds == seconds * (length - hidden)
    check_alone(run, chain_of(None), length)


def test_a_slow_predictor_delays_what_runs_ahead() -> None:
    """An async predictor of G seconds lets the next call start G seconds into the call it guesses."""

    class Late:
        async def predict(self, call: Call) -> list[Prediction]:
            return [Prediction(successor(call))]

    def seconds(work: Timed) -> float:
        return 1.0 if work.kind is TaskKind.PREDICT else 5.0

    run = simulate(chain_of(Late()), 2, policy=Fixed(1), durations=seconds)
    assert run.seconds == 6.0
    assert [(span.kind, span.started, span.ended) for span in run.spans if span.kind is TaskKind.STEP] == [
        (TaskKind.STEP, 0.0, 5.0),
        (TaskKind.STEP, 1.0, 6.0),
    ]


def test_a_judge_takes_its_time() -> None:
    """A call whose verifier takes J seconds is answered J seconds later, and work on the guess goes on meanwhile."""

    class Judge:
        mode = Mode.EXACT

        async def verify(self, predicted: Any, actual: Any) -> Verdict:
            return Verdict(accepted=predicted == actual)

    def seconds(work: Timed) -> float:
        return 3.0 if work.kind is TaskKind.JUDGE else 5.0

    run = simulate(chain_of(Oracle(successor), verify=Judge()), 2, policy=Fixed(1), durations=seconds)
    assert run.seconds == 8.0 + 3.0 - 3.0
    plain = simulate(chain_of(None, verify=Judge()), 2, policy=Fixed(0), durations=seconds)
    assert plain.seconds == 16.0


def test_a_diamond_takes_its_longest_path() -> None:
    """A pipeline takes the time of its critical path; with its inputs guessed right, of its longest step."""

    def diamond(predict: bool) -> Pipeline:  # noqa: FBT001
        pipeline = Pipeline("diamond")
        guess = Oracle({"a": 1, "b": 2, "c": 3}) if predict else None
        settings: dict[str, Any] = {"effect": Effect.READONLY, "predict": guess}

        @pipeline.step(name="a", **settings)
        async def a() -> int:
            return 1

        @pipeline.step(name="b", **settings)
        async def b(a: int) -> int:
            return a + 1

        @pipeline.step(name="c", **settings)
        async def c(a: int) -> int:
            return a + 2

        @pipeline.step(name="d", effect=Effect.READONLY)
        async def d(b: int, c: int) -> int:
            return b + c

        return pipeline

    lengths = {"a": 2.0, "b": 3.0, "c": 7.0, "d": 1.0}

    def seconds(work: Timed) -> float:
        return lengths[work.step]

    plain = simulate(diamond(predict=False), policy=Fixed(0), durations=seconds)
    assert plain.seconds == 10.0
    ahead = simulate(diamond(predict=True), policy=Fixed(4), durations=seconds)
    assert ahead.seconds == 7.0
    assert ahead.value == plain.value == 5


def test_retries_and_their_waits_take_time() -> None:
    """Three tries of 1 second with waits of 1 and 2 seconds between take 6 seconds."""

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, wait=1.0, backoff=2.0))
    async def flaky(attempt: Attempt) -> int:
        if attempt.number < 3:
            raise ConnectionError
        return attempt.number

    @workflow
    async def program(ctx: Any) -> int:
        result: int = await ctx.call(flaky)
        return result

    run = simulate(program)
    assert (run.value, run.seconds, run.spans[0].tries) == (3, 6.0, 3)


def test_a_timeout_ends_a_try() -> None:
    """A step that would take longer than its timeout fails when that is over."""

    @step(effect=Effect.READONLY, timeout=2.0)
    async def slow() -> None: ...

    @workflow
    async def program(ctx: Any) -> None:
        await ctx.call(slow)

    run = simulate(program, durations=5.0)
    assert isinstance(run.error, StepTimeoutError)
    assert run.seconds == 2.0
    assert simulate(program, durations=2.0).error is None


def test_sleeping_takes_time() -> None:
    """A sleep is waited for on the virtual clock, and the program sees the time pass."""

    @workflow
    async def program(ctx: Any) -> float:
        before = ctx.now()
        await ctx.sleep(90.0)
        return float((ctx.now() - before).total_seconds())

    run = simulate(program)
    assert (run.value, run.seconds) == (90.0, 90.0)
    still = simulate(program, wall=lambda seconds: EPOCH)
    assert still.seconds == 90.0


def test_what_is_stopped_may_linger() -> None:
    """A stopped execution is over at once, later, or when it would have been: until then it holds its slot."""

    def ends(stopping: float) -> list[float | None]:
        chain = chain_of(Adversary(successor), resource="api")
        run = simulate(
            chain,
            3,
            policy=Fixed(1),
            limits={"api": 2},
            stopping=stopping,
            durations=lambda work: 10.0 if work.ahead else 4.0,
        )
        check_alone(run, chain_of(None), 3)
        return [span.ended for span in run.spans if span.cancelled is not None]

    assert ends(0.0) == [4.0, 8.0]
    assert ends(1.0)[0] == 5.0
    assert ends(math.inf)[0] == 10.0


def test_when_steps_act() -> None:
    """A stopped execution has acted if steps act when they start, and has not if they act when they end."""

    def calls(when: Any) -> int:
        made: list[int] = []

        @step(name="count", effect=Effect.READONLY, predict=Adversary(successor))
        async def count(x: int) -> int:
            made.append(x)
            return x + 1

        @workflow
        async def program(ctx: Any) -> int:
            return int(await ctx.call(count, await ctx.call(count, 0)))

        simulate(program, policy=Fixed(1), durations=lambda work: 9.0 if work.ahead else 1.0, calls=when)
        return len(made)

    assert calls("start") == 3
    assert calls("end") == 2


def test_the_same_arguments_give_the_same_run() -> None:
    """Seed and program decide everything; another seed may order what happens at the same time differently."""

    def go(seed: int) -> Any:
        run = simulate(chain_of(Flaky(0.5, successor)), 12, policy=Fixed(3, width=2), durations=0.0, seed=seed)
        spans = [(span.step, span.position, span.started, span.cancelled, span.ended) for span in run.spans]
        return spans, run.events, run.decisions, run.actions

    assert go(1) == go(1)
    assert len({str(go(seed)) for seed in range(8)}) > 1


def test_drawn_durations_do_not_depend_on_the_policy() -> None:
    """The same call takes the same time under every policy, so that policies can be compared."""

    def lengths(depth: int) -> dict[Any, float]:
        run = simulate(chain_of(Oracle(successor)), 9, policy=Fixed(depth), durations=spread(1.0, 2.0), seed=4)
        return {span.position: (span.ended or 0.0) - span.started for span in run.spans}

    plain, ahead = lengths(0), lengths(3)
    assert plain.keys() == ahead.keys()
    assert all(plain[place] == pytest.approx(ahead[place]) for place in plain)
    assert all(1.0 <= seconds <= 2.0 for seconds in plain.values())
    assert len(set(plain.values())) == 9
    with pytest.raises(InvalidSettingError):
        spread(2.0, 1.0)


def test_both_streams_are_shown() -> None:
    """Events of worlds that fall are shown, labelled, and taken back; the committed stream is the program's."""
    run = simulate(chain_of(Adversary(successor)), 3, policy=Fixed(1))
    assert run.emitted == (1, 2, 3)
    shown = [event.number for event in run.events if isinstance(event, SpeculativeEvent)]
    gone = [event.number for event in run.events if isinstance(event, RetractedEvent)]
    assert shown
    assert sorted(shown) == sorted(gone)
    assert sum(isinstance(event, CommittedEvent) for event in run.events) == 3


def test_a_budget_in_seconds_stops_what_runs_ahead() -> None:
    """Attempts on guesses are stopped when the budget is used up: two at a time have used 3 seconds after 1.5."""
    chain = chain_of(Oracle(successor))
    run = simulate(chain, 3, policy=Fixed(2, budget=Budget(seconds=3.0)), durations=10.0)
    stopped = [span.cancelled for span in run.spans if span.cancelled is not None]
    assert stopped == pytest.approx([1.5, 1.5])
    check_alone(run, chain_of(None), 3)


def test_a_predictor_that_charges_stays_within_the_budget() -> None:
    """Guesses cost money too: they end before the budget does, but for the first, whose price nobody knew."""

    class Costly:
        def predict(self, call: Call) -> list[Prediction]:
            return [Prediction(successor(call) + 1, 1.0, money=0.4), Prediction(None, 0.5, money=0.1)]

    for budget, asked in ((2.0, 4), (1.4, 2), (0.3, 1), (0.0, 1)):
        run = simulate(chain_of(Costly()), 20, policy=Fixed(1, width=2, budget=Budget(money=budget)))
        assert run.report.money == pytest.approx(asked * 0.5)
        check_alone(run, chain_of(None), 20)


def test_a_killed_run_goes_on() -> None:
    """Killed at every possible instant and resumed, a run comes to the same end."""
    whole = simulate(chain_of(Oracle(successor)), 4)
    check_alone(whole, chain_of(None), 4)
    for point in range(1, whole.points):
        store = MemoryStore()
        killed = simulate(chain_of(Oracle(successor)), 4, store=store, crash_after=point)
        assert not killed.finished
        assert (killed.value, killed.error) == (None, None)
        assert store.get_run("simulated").status is RunStatus.RUNNING
        resumed = simulate(chain_of(None), store=store, recover=True)
        assert resumed.value == 4
        assert len(resumed.committed_at) == len(resumed.entries) == 5
        assert not run_serial(chain_of(None), 4, run_id="simulated").differences(
            entries=resumed.entries, state=resumed.state
        )


def test_an_effect_that_a_kill_left_unknown() -> None:
    """The process dies after an irreversible step acted and before its result was recorded: a person has to say."""
    acted: list[int] = []

    @step(name="pay")
    async def pay(x: int) -> int:
        acted.append(x)
        return 10 * x

    @workflow
    async def program(ctx: Any) -> int:
        return int(await ctx.call(pay, 4))

    def dead() -> MemoryStore:
        store = MemoryStore()
        assert not simulate(program, store=store, crash_after=2).finished
        return store

    for answer, value, times in ((Sent(40), 40, 1), (NotSent(), 40, 2)):
        acted.clear()
        store = dead()
        blocked = simulate(program, store=store, recover=True)
        key = getattr(blocked.error, "key", "")
        assert store.get_run("simulated").status is RunStatus.BLOCKED
        resumed = simulate(program, store=store, recover=True, resolve={key: answer})
        assert (resumed.value, len(acted)) == (value, times)


def test_work_is_described() -> None:
    """Whoever decides how long something takes is told what it is."""
    seen: list[Timed] = []

    def seconds(work: Timed) -> float:
        seen.append(work)
        return 1.0

    simulate(chain_of(Oracle(successor)), 2, policy=Fixed(1), durations=seconds, seed=9)
    first, second = seen
    assert (first.kind, first.step, first.position, first.args, first.attempt) == (
        TaskKind.STEP,
        "count",
        (0,),
        (0,),
        1,
    )
    assert (first.number, first.ahead, first.seed, second.number, second.ahead) == (1, False, 9, 2, True)
    assert first.draw() == first.draw() != second.draw()
    assert 0.0 <= first.draw("other") < 1.0


def test_what_cannot_be_simulated() -> None:
    """Steps that wait, negative durations, wrong arguments and a run id that is taken are refused."""

    class Wait:
        def __await__(self) -> Any:
            yield "something"

    @step(effect=Effect.PURE)
    async def waits() -> None:
        await Wait()

    @workflow
    async def program(ctx: Any) -> None:
        await ctx.call(waits)

    with pytest.raises(SuspendedError):
        simulate(program)
    with pytest.raises(InvalidSettingError):
        simulate(chain_of(None), 1, durations=lambda work: -1.0)
    with pytest.raises(DefinitionError):
        simulate(chain_of(None), 1, 2, 3)
    store = MemoryStore()
    simulate(chain_of(None), 1, store=store)
    with pytest.raises(RunExistsError):
        simulate(chain_of(None), 1, store=store)


def test_a_scheduler_that_stands_still_or_never_ends_is_noticed() -> None:
    """A scheduler that waits for nothing, and a program without end, are errors and no hanging."""

    class Idle(Scheduler):
        def begin(self, now: float, at: float) -> Decision:
            super().begin(now, at)
            return Decision(None, (), ())

    with pytest.raises(BackendContractError, match="waits for nothing"):
        simulate(chain_of(None), 1, scheduler=Idle)

    @step(effect=Effect.PURE)
    async def once() -> None: ...

    @workflow
    async def endless(ctx: Any) -> None:
        while True:
            await ctx.call(once)

    with pytest.raises(BackendContractError, match="has to end"):
        simulate(endless, max_actions=50)


def test_every_decision_can_be_watched() -> None:
    """A watcher sees the scheduler after each decision, the last included."""
    seen: list[int] = []
    run = simulate(chain_of(None), 3, watch=lambda scheduler, decision: seen.append(len(scheduler.running)))
    assert seen == [1, 1, 1, 0]
    assert run.decisions == 4
    assert [decode(entry.result or b"null") for entry in run.entries] == [1, 2, 3, 3]
