"""Several predictors as one: the first that answers, and the one that is right most often."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from specflow.errors import InvalidSettingError
from specflow.predictors import ByArguments, Constant, FirstOf, Fn, LastValue, Majority, Markov, Tournament
from specflow.speculation import Call, Prediction, let_go
from tests.specflow.predictors.support import Run, ask, best, hit_rate


class Waits:
    """Guesses a value after waiting, and counts how often it was asked and told."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.asked = 0
        self.told: list[Any] = []

    async def predict(self, call: Call) -> Sequence[Prediction]:
        """One guess, or none where the value is None."""
        self.asked += 1
        return () if self.value is None else (Prediction(self.value, 0.5),)

    def observe(self, call: Call, value: Any) -> None:
        """Keep what was learned."""
        self.told.append(value)


async def answered(predictor: Any, call: Call) -> Sequence[Prediction]:
    """The guesses of a predictor that waits."""
    return list(await predictor.predict(call))


def test_the_first_that_has_a_guess_is_taken() -> None:
    """Known arguments are answered from the table, others by the last value; each guess is signed by its maker."""
    predictor, run = FirstOf(ByArguments(), LastValue()), Run()
    for number in range(3):
        run.commit(predictor, run.call("square", number), number**2)
    (known,) = ask(predictor, run.call("square", 1))
    (unknown,) = ask(predictor, run.call("square", 9))
    assert (known.value, known.source) == (1, "ByArguments")
    assert (unknown.value, unknown.source) == (4, "LastValue")


def test_all_may_pass() -> None:
    """Where nobody has a guess there is none."""
    for predictor in (FirstOf(LastValue(), Fn(lambda: None)), Tournament(LastValue(), Fn(lambda: None))):
        assert ask(predictor, Run().call("step")) == []


def test_a_list_without_predictors_is_refused() -> None:
    """There must be somebody to ask."""
    for make in (FirstOf, Tournament):
        with pytest.raises(InvalidSettingError, match="predictors"):
            make()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [FirstOf, Tournament])
async def test_those_after_an_async_one_are_asked_when_it_passes(kind: Callable[..., Any]) -> None:
    """A list with an async predictor has to be awaited, and goes on behind one that passes, async or not."""
    for last, expected in ((Constant(7), 7), (Waits(8), 8)):
        predictor = kind(Fn(lambda: None), Waits(None), last)
        assert inspect.iscoroutinefunction(predictor.predict)
        assert [guess.value for guess in await predictor.predict(Run().call("step"))] == [expected]
    nested = kind(kind(Fn(lambda: None), Waits(None)), Constant(9))
    assert [guess.value for guess in await nested.predict(Run().call("step"))] == [9]
    assert not inspect.iscoroutinefunction(kind(Constant(7), Fn(lambda: None)).predict)


class Later(Waits):
    """The same, but a plain method returns what has to be awaited: that is not known before it was asked."""

    @property
    def begun(self) -> int:
        """How often it was awaited."""
        return self.asked

    def predict(self, call: Call) -> Any:
        """Something to await."""
        return super().predict(call)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [FirstOf, Tournament])
async def test_one_that_turns_out_to_wait_is_awaited(kind: Callable[..., Any]) -> None:
    """Those after it are asked when it passes, and from then on it is known that the whole has to be awaited."""
    for value, last, expected in ((6, Constant(7), 6), (None, Constant(7), 7), (None, Waits(8), 8)):
        predictor = kind(Fn(lambda: None), Later(value), last)
        assert [guess.value for guess in await predictor.predict(Run().call("step"))] == [expected]
        assert inspect.iscoroutinefunction(predictor.predict)
        assert [guess.value for guess in await predictor.predict(Run().call("step"))] == [expected]
    let_go(kind(Later(1)).predict(Run().call("step")))  # nothing is left that was never awaited


@pytest.mark.anyio
@pytest.mark.parametrize(("value", "winner"), [("right", "Later"), ("wrong", "Constant")])
async def test_one_that_turns_out_to_wait_competes(value: str, winner: str) -> None:
    """Found out when the first result is scored, it is tried a few times, and chosen while it is the better one."""
    member = Later(value)
    predictor, run = Tournament(Constant("stale", confidence=0.5), member, trials=4), Run()
    for turn in range(30):
        call = run.call("step", turn)
        guesses: Any = predictor.predict(call)
        if inspect.isawaitable(guesses):
            await guesses
        run.commit(predictor, call, "right" if value == "right" or turn % 2 else "stale")
    (guess,) = await answered(predictor, run.call("step", 99))
    assert guess.source == winner
    assert member.told == [told for _, told in run.trail]
    assert member.begun == (30 if winner == "Later" else 4)


@pytest.mark.parametrize("turned", [False, True])
def test_the_better_one_is_picked(turned: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """On a pattern the tournament is as good as Markov, on values that stay a while as LastValue, in any order."""
    pattern = ["a", "b"] * 60
    staying = [f"value {number // 3}" for number in range(180)]
    for results in (pattern, staying):
        alone = [hit_rate(make(), results, skip=20) for make in (LastValue, lambda: Markov(order=1))]
        assert max(alone) > min(alone) + 0.2
        members = [LastValue(), Markov(order=1)]
        together = hit_rate(Tournament(*(members[::-1] if turned else members)), results, skip=20)
        assert together >= max(alone) - 0.05


def test_a_tournament_chooses_per_step() -> None:
    """Two steps that need different predictors get them."""
    predictor, run = Tournament(LastValue(), Markov(order=1)), Run()
    for turn in range(40):
        for step, value in (("alternates", turn % 2), ("steady", turn // 10)):
            run.commit(predictor, run.call(step), value)
    assert ask(predictor, run.call("alternates"))[0].source == "Markov"
    assert ask(predictor, run.call("alternates"))[0].value == 0


def test_a_tournament_follows_a_change() -> None:
    """When the other predictor becomes the better one it is chosen within its memory."""
    predictor, run = Tournament(Constant("x"), Constant("y"), memory=16.0), Run()
    for value in ["x"] * 100 + ["y"] * 30:
        run.commit(predictor, run.call("step"), value)
    assert best(predictor, run.call("step")) == "y"


def test_without_scores_the_first_one_would_always_be_chosen() -> None:
    """A tournament that records nothing is FirstOf, and measurably worse: the test above can fail."""
    pattern = ["a", "b"] * 60
    assert hit_rate(FirstOf(LastValue(), Markov(order=1)), pattern, skip=20) < 0.1


def test_everyone_learns_whoever_was_chosen() -> None:
    """Predictors that were never asked are told the results as well."""
    member = Majority()
    predictor, run = Tournament(Constant("x"), member), Run()
    for _ in range(10):
        run.commit(predictor, run.call("step"), "x")
    assert best(member, run.call("step")) == "x"


@pytest.mark.anyio
@pytest.mark.parametrize(("value", "winner"), [("right", "Waits"), ("wrong", "Constant")])
async def test_an_async_predictor_is_tried_and_then_judged(value: str, winner: str) -> None:
    """It is asked first until it was scored a few times, and from then on only while it is the better one."""
    member = Waits(value)
    predictor, run = Tournament(Constant("stale", confidence=0.5), member, trials=4), Run()
    for turn in range(30):
        call = run.call("step", turn)
        await answered(predictor, call)
        run.commit(predictor, call, "right" if value == "right" or turn % 2 else "stale")
    (guess,) = await answered(predictor, run.call("step", 99))
    assert guess.source == winner
    assert member.told == [value for _, value in run.trail]
    assert member.asked == (31 if winner == "Waits" else 4)


@pytest.mark.anyio
async def test_an_async_predictor_that_only_passes_is_not_waited_for() -> None:
    """To pass counts against it, so that after its trials the others answer at once."""
    member = Waits(None)
    predictor, run = Tournament(LastValue(), member, trials=4), Run()
    for turn in range(20):
        call = run.call("step", turn)
        await answered(predictor, call)
        run.commit(predictor, call, "same")
    assert member.asked == 4
    (guess,) = await answered(predictor, run.call("step", 99))
    assert (guess.value, member.asked) == ("same", 4)


@pytest.mark.anyio
async def test_an_async_function_competes() -> None:
    """A model that is always right wins over the last value, also through another list."""

    async def model(number: int) -> int:
        await checkpoint()
        return number * number

    predictor, run = Tournament(LastValue(), FirstOf(Fn(model)), trials=3), Run()
    for turn in range(20):
        call = run.call("square", turn)
        await answered(predictor, call)
        run.commit(predictor, call, turn * turn)
    (guess,) = await answered(predictor, run.call("square", 50))
    assert (guess.value, guess.source) == (2500, "Fn")


@pytest.mark.anyio
async def test_async_guesses_of_squashed_worlds_are_not_scored() -> None:
    """A guess counts only when the very call it was made for is committed."""
    member = Waits("wrong")
    predictor, run = Tournament(member, trials=1000), Run()
    for turn in range(20):
        await answered(predictor, run.call("step", turn, ahead=[("step", "doomed")]))
        run.commit(predictor, run.call("step", turn), "right")
    (guess,) = await answered(predictor, run.call("step", 1))
    assert guess.value == "wrong"
    assert predictor._rates.rate(("step", 0)) == 0.5


def test_plain_predictors_are_scored_without_being_asked() -> None:
    """The first prediction that is asked for comes from the better one already."""
    predictor, run = Tournament(LastValue(), Markov(order=1)), Run()
    for turn in range(30):
        run.commit(predictor, run.call("step"), turn % 2)
    assert best(predictor, run.call("step")) == 0
