"""Branch predictors for steps with few results."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specflow.errors import InvalidSettingError
from specflow.predictors import TAGE, Branch, BranchPrediction, BranchPredictor, GShare, Perceptron, TwoBit
from tests.specflow.predictors.support import Run, ask, best, hit_rate, play

MAKERS: dict[str, Callable[[], BranchPredictor]] = {
    "two-bit": TwoBit,
    "gshare": GShare,
    "perceptron": Perceptron,
    "tage": TAGE,
}
every_branch_predictor = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_branch_predictor
@pytest.mark.parametrize("values", [(True, False), ("yes", "no"), ({"ok": []}, {"ok": [1]}), (None, 0)])
def test_a_yes_or_no_step_is_predicted(make: Callable[[], BranchPredictor], values: tuple[object, object]) -> None:
    """Whatever the two values are, mutable ones included, a steady one is learned and the other is the second guess."""
    predictor, run = Branch(make()), Run()
    for turn in range(60):
        run.commit(predictor, run.call("step"), values[turn == 3])
    first, second = ask(predictor, run.call("step"))
    assert (first.value, second.value) == values
    assert first.confidence > 0.6
    assert first.confidence + second.confidence == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["gshare", "perceptron", "tage"])
def test_history_predicts_what_a_counter_cannot(name: str) -> None:
    """Alternating results defeat a counter and are learned from the step's earlier results."""
    alternating = ["yes", "no"] * 150
    assert hit_rate(Branch(MAKERS[name]()), alternating, skip=100) > 0.95
    assert hit_rate(Branch(TwoBit()), alternating, skip=100) < 0.6


@pytest.mark.parametrize("name", ["gshare", "perceptron", "tage"])
def test_several_values_are_told_apart(name: str) -> None:
    """A pattern over four values is learned, and all guesses are different values."""
    predictor, pattern = Branch(MAKERS[name](), guesses=3), list("abcd") * 100
    assert hit_rate(predictor, pattern, skip=200) > 0.95
    guesses = ask(predictor, Run().call("step", ahead=[("step", "a")]))
    assert len({guess.value for guess in guesses}) == 3


def test_results_of_other_steps_can_be_the_history() -> None:
    """A decision that follows another step's random decision is known from the run, not from the step alone."""
    rng = random.Random(2)
    rates = {}
    for history in ("step", "run"):
        predictor, run, hits = Branch(GShare(), history=history), Run(), 0  # type: ignore[arg-type]
        for turn in range(400):
            kind = rng.choice(["refund", "question"])
            run.trail.append(("log", ["not predicted", turn]))
            for step, value in (("kind", kind), ("approve", kind == "question")):
                call = run.call(step)
                hits += step == "approve" and turn >= 200 and best(predictor, call) == value
                run.commit(predictor, call, value)
        rates[history] = hits / 200
    assert rates["run"] > 0.95
    assert rates["step"] < 0.7


def test_guessed_results_are_part_of_the_history() -> None:
    """In a world that assumes the next result, the one after it is guessed from that assumption."""
    predictor, run = Branch(GShare()), Run()
    play(predictor, ["yes", "no"] * 50, run=run)
    assert best(predictor, run.call("step")) == "yes"
    assert best(predictor, run.call("step", ahead=[("step", "yes")])) == "no"


def test_bits_are_those_of_the_branch_predictor() -> None:
    """Of two values the first seen is a taken branch; history and directions arrive as in a processor."""

    class Spy:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def predict(self, address: int, history: int) -> BranchPrediction:
            return BranchPrediction(taken=True, confidence=0.75)

        def observe(self, address: int, history: int, *, taken: bool) -> None:
            self.seen.append((history, taken))

    spy = Spy()
    predictor, run = Branch(spy), Run()
    for value in ("yes", "yes", "no", "yes"):
        run.commit(predictor, run.call("step"), value)
    # With the second value known there are two branches, and both learn.
    assert spy.seen == [(0, True), (0b1, True), (0b11, False), (0b11, True), (0b110, True), (0b110, False)]
    assert [(guess.value, guess.confidence) for guess in ask(predictor, run.call("step"))] == [
        ("yes", 0.75),
        ("no", 0.25),
    ]
    spy.seen.clear()
    run.commit(predictor, run.call("step"), "maybe")
    # Three values take two bits each: 3 for the first, 2 for the second, 1 for the third.
    assert spy.seen == [(0b11111011, False), (0b11111011, False), (0b11111011, True)]


def test_more_values_than_the_limit_make_room() -> None:
    """A new value takes the place of the one seen first; the others keep their branches."""
    predictor, run = Branch(TwoBit(), limit=3, guesses=3), Run()
    play(predictor, ["a", "b", "c", "c", "c", "d"], run=run)
    guesses = {guess.value for guess in ask(predictor, run.call("step"))}
    assert guesses == {"b", "c", "d"}
    assert best(predictor, run.call("step")) == "c"


@pytest.mark.parametrize(("setting", "value"), [("history", "all"), ("outcomes", -1), ("guesses", 0), ("limit", 1)])
def test_settings_out_of_range_are_refused(setting: str, value: object) -> None:
    """A setting that cannot work is an error where it is declared."""
    with pytest.raises(InvalidSettingError, match=setting):
        Branch(TwoBit(), **{setting: value})  # type: ignore[arg-type]
