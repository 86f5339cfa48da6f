"""Trace replay: what the last run did at this point, several steps ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specflow.errors import InvalidSettingError
from specflow.predictors import TraceReplay
from tests.specflow.predictors.support import Run, ask

Trace = Sequence[tuple[str, Any]]

AGENT: Trace = [
    ("plan", "search a"),
    ("search", ["page 1", "page 2"]),
    ("plan", "search b"),
    ("search", ["page 3"]),
    ("judge", True),
    ("plan", "answer"),
    ("write", "the answer is 42"),
]


def replay(predictor: TraceReplay, trace: Trace, silent: Sequence[str] = ()) -> list[bool]:
    """Whether each call of a run was guessed right; calls of silent steps are not reported to the predictor."""
    run, right = Run(), []
    for step, value in trace:
        call = run.call(step)
        if step in silent:
            run.trail.append((step, value))
            continue
        guesses = ask(predictor, call)
        right.append(bool(guesses) and guesses[0].value == value)
        run.commit(predictor, call, value)
    return right


def test_a_run_like_the_last_one_is_known_in_full() -> None:
    """Nothing is known of the first run; the second one is guessed from its first call to its last."""
    predictor = TraceReplay()
    replay(predictor, AGENT)
    assert replay(predictor, AGENT) == [True] * len(AGENT)


def test_another_step_than_last_time_is_passed() -> None:
    """Where the last run called another step, its result is no guess for this one."""
    predictor = TraceReplay()
    replay(predictor, AGENT)
    assert ask(predictor, Run().call("search")) == []


def test_the_start_of_a_run_is_not_learned_from_the_middle_of_another() -> None:
    """Calls learned from a long run's trail do not pass for the first calls of a run."""
    predictor, run = TraceReplay(), Run()
    run.trail = [("other", number) for number in range(100)]
    run.commit(predictor, run.call("step"), "x")
    assert ask(predictor, Run().call("other")) == []
    (guess,) = ask(predictor, Run().call("other", ahead=run.trail[60:80]))
    assert guess.value == 80


@pytest.mark.parametrize("ahead", [0, 1, 3, 20])
def test_it_sees_several_steps_ahead(ahead: int) -> None:
    """``then`` holds the results of the calls that followed, of whichever steps, as far as asked and known."""
    predictor, run = TraceReplay(ahead=ahead), Run()
    replay(predictor, AGENT)
    for index, (step, value) in enumerate(AGENT):
        (guess,) = ask(predictor, run.call(step))
        assert guess.value == value
        assert list(guess.then) == [result for _, result in AGENT[index + 1 : index + 1 + ahead]]
        run.trail.append((step, value))


def test_it_finds_the_way_back_after_a_divergence() -> None:
    """A different result costs its own guess; the position and short contexts lead back at once."""
    predictor = TraceReplay()
    replay(predictor, AGENT)
    changed = [*AGENT[:3], ("search", ["page 9"]), *AGENT[4:]]
    assert replay(predictor, changed) == [True, True, True, False, True, True, True]


def test_it_finds_the_way_back_after_further_calls() -> None:
    """Calls that the last run did not make shift every position; equal results are recognised all the same."""
    predictor = TraceReplay()
    replay(predictor, AGENT)
    longer = [*AGENT[:4], ("plan", "search c"), ("search", ["page 7"]), *AGENT[4:]]
    assert replay(predictor, longer)[-2:] == [True, True]
    shorter = [*AGENT[:2], *AGENT[4:]]
    assert replay(predictor, shorter)[-2:] == [True, True]


def test_the_newest_run_counts() -> None:
    """After a run that went another way, that way is guessed."""
    predictor = TraceReplay()
    replay(predictor, AGENT)
    other = [("plan", "answer"), ("write", "don't know")]
    replay(predictor, other)
    assert replay(predictor, other) == [True, True]


def test_turns_of_a_loop_are_told_apart() -> None:
    """Equal results in a row do not hide which turn it is, up to the context's length."""
    loop = [("poll", "wait")] * 9 + [("poll", "ready"), ("fetch", "data")]
    predictor = TraceReplay(context=16)
    replay(predictor, loop)
    assert replay(predictor, loop) == [True] * len(loop)


def test_steps_without_a_predictor_are_learned_from_the_trail() -> None:
    """A step that reports nothing still shows up in later trails, so its results are known as context and ahead."""
    predictor = TraceReplay(ahead=2)
    replay(predictor, AGENT, silent=("search", "judge"))
    assert replay(predictor, AGENT, silent=("search", "judge")) == [True] * 4
    run = Run()
    (guess,) = ask(predictor, run.call("plan"))
    assert guess.then == (["page 1", "page 2"], "search b")


def test_changed_results_of_such_steps_are_noticed() -> None:
    """What a silent step returned in the last run counts, not what it returned in the first that was seen."""
    predictor = TraceReplay(ahead=1)
    for page in ("page 1", "page 9"):
        replay(predictor, [("plan", "go"), ("search", page), ("write", "done")], silent=("search",))
    (guess,) = ask(predictor, Run().call("plan"))
    assert guess.then == ("page 9",)


def test_long_runs_are_followed() -> None:
    """Beyond what a call shows, the newest results still say where the run is."""
    long = [("step", number % 90) for number in range(300)]
    predictor = TraceReplay()
    replay(predictor, long)
    assert all(replay(predictor, long))


def test_the_end_of_what_a_call_shows_is_not_the_start_of_the_run() -> None:
    """In the middle of a long run, the guess is not what came at the start of the last one."""
    predictor = TraceReplay(context=2)
    replay(predictor, [("step", "first"), *[("step", "other")] * 100])
    run = Run()
    run.trail = [("unknown", number) for number in range(64)]
    assert [guess.value for guess in ask(predictor, run.call("step"))] == ["other"]


def test_confidence_falls_where_runs_differ() -> None:
    """A step that returns something new in every run is guessed with little confidence, a steady one with much."""
    predictor = TraceReplay()
    for number in range(30):
        replay(predictor, [("id", f"id {number}"), ("check", "fine")])
    run = Run()
    (unsteady,) = ask(predictor, run.call("id"))
    (steady,) = ask(predictor, run.call("check", ahead=[("id", "id 99")]))
    assert unsteady.confidence < 0.2
    assert steady.value == "fine"
    assert steady.confidence > 0.8


def test_runs_at_the_same_time_are_told_apart_by_their_trails() -> None:
    """Two kinds of runs that are interleaved call by call are each followed."""
    kinds = {name: [("start", name), *[("work", f"{name} {turn}") for turn in range(6)]] for name in ("x", "y")}
    predictor = TraceReplay()
    wrong = 0
    for again in range(2):
        runs = {name: Run() for name in kinds}
        for turn in range(7):
            for name, run in runs.items():
                step, value = kinds[name][turn]
                call = run.call(step)
                guesses = ask(predictor, call)
                wrong += again and turn > 0 and (not guesses or guesses[0].value != value)
                run.commit(predictor, call, value)
    assert wrong == 0


@pytest.mark.parametrize(("setting", "value"), [("context", 0), ("context", 33), ("ahead", -1), ("limit", 0)])
def test_settings_out_of_range_are_refused(setting: str, value: int) -> None:
    """A context that a call cannot show is an error where it is declared."""
    with pytest.raises(InvalidSettingError, match=setting):
        TraceReplay(**{setting: value})  # type: ignore[arg-type]
