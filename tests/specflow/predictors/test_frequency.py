"""Majority, Markov and by arguments: counting what followed what."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.predictors import ByArguments, Majority, Markov
from tests.specflow.predictors.support import Run, ask, best, hit_rate, play


def test_the_most_frequent_result_is_guessed_first() -> None:
    """Guesses are ranked by how often they came, the newest of equally frequent ones first."""
    predictor, run = Majority(), Run()
    play(predictor, ["b", "a", "a", "c", "a", "b"], run=run)
    assert [guess.value for guess in ask(predictor, run.call("step"))] == ["a", "b", "c"]


def test_the_majority_follows_a_change() -> None:
    """A result that was frequent long ago gives way to what is frequent now."""
    predictor, run = Majority(memory=10.0), Run()
    play(predictor, ["old"] * 200 + ["new"] * 10, run=run)
    assert best(predictor, run.call("step")) == "new"
    patient, run = Majority(memory=1000.0), Run()
    play(patient, ["old"] * 200 + ["new"] * 10, run=run)
    assert best(patient, run.call("step")) == "old"


def test_a_new_favourite_gets_in_where_many_results_are_known() -> None:
    """More different results than are counted do not keep a new one from becoming the most frequent."""
    predictor, run = Majority(memory=1000.0), Run()
    play(predictor, [f"result {number % 16}" for number in range(320)] + ["new"] * 30, run=run)
    assert best(predictor, run.call("step")) == "new"


def test_a_pattern_is_learned_from_the_last_results() -> None:
    """A period of three is predicted completely by two results of context, and not by frequency."""
    pattern = ["a", "a", "b"] * 40
    assert hit_rate(Markov(order=2), pattern, skip=10) == 1.0
    assert hit_rate(Majority(), pattern, skip=10) < 0.7


def test_more_context_tells_more_apart() -> None:
    """A pattern whose next result depends on three results back needs order 3."""
    pattern = list("aabaac") * 40
    assert hit_rate(Markov(order=3), pattern, skip=20) == 1.0
    assert hit_rate(Markov(order=2), pattern, skip=20) < 0.9


def test_an_unknown_context_falls_back_to_a_shorter_one() -> None:
    """After a result never seen before the next guess comes from shorter contexts, down to plain frequency."""
    predictor, run = Markov(order=2), Run()
    play(predictor, ["a", "b"] * 10, run=run)
    assert best(predictor, run.call("step", ahead=[("step", "x"), ("step", "a")])) == "b"
    assert best(predictor, run.call("step", ahead=[("step", "x"), ("step", "y")])) in ("a", "b")


def test_the_start_of_a_run_is_a_context() -> None:
    """What comes first in every run is known, whatever came last in the run before."""
    predictor = Markov(order=2)
    for _ in range(5):
        play(predictor, ["plan", "work", "work", "done"])
    assert play(predictor, ["plan", "work", "work", "done"]) == ["plan", "work", "work", "done"]


def test_several_guesses_are_ranked_by_count() -> None:
    """After the same context the likelier result is first, the other second, and their confidences tell how likely."""
    predictor, run = Markov(order=1), Run()
    play(predictor, ["q", "x", "q", "x", "q", "y"] * 30, run=run)
    first, second = ask(predictor, run.call("step", ahead=[("step", "q")]))
    assert (first.value, second.value) == ("x", "y")
    assert first.confidence == pytest.approx(2 / 3, abs=0.15)
    assert second.confidence == pytest.approx(1 / 3, abs=0.15)


def test_equal_arguments_are_remembered() -> None:
    """The same arguments, keywords in any order, are answered as before; new ones are passed."""
    predictor, run = ByArguments(), Run()
    run.commit(predictor, run.call("look up", ["key"], a=1, b={"x"}), "value")
    assert best(predictor, run.call("look up", ["key"], b={"x"}, a=1)) == "value"
    assert ask(predictor, run.call("look up", ["other"], b={"x"}, a=1)) == []
    assert ask(predictor, run.call("look up", ["key"], a=True, b={"x"})) == []


def test_what_has_to_be_equal_can_be_chosen() -> None:
    """A key function groups calls by a part of their arguments."""
    predictor, run = ByArguments(lambda call: call.arguments[0]["customer"]), Run()
    run.commit(predictor, run.call("discount", {"customer": "ann", "order": 1}), 10)
    assert best(predictor, run.call("discount", {"customer": "ann", "order": 2})) == 10
    assert ask(predictor, run.call("discount", {"customer": "bob", "order": 2})) == []


def test_with_a_memory_of_one_only_the_last_result_counts() -> None:
    """A table that changes is followed at once."""
    predictor, run = ByArguments(memory=1.0), Run()
    for value in ["old", "old", "old", "new"]:
        run.commit(predictor, run.call("look up", "key"), value)
    assert [guess.value for guess in ask(predictor, run.call("look up", "key"))] == ["new"]


class PlainMarkov:
    """The definition: counts of what followed each context, nothing forgotten."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.counts: dict[tuple[Any, ...], Counter[Any]] = defaultdict(Counter)

    def contexts(self, recent: list[Any]) -> list[tuple[Any, ...]]:
        """Longest first; the start of the run stands for the results before the first."""
        newest = recent[-self.order :] if self.order else []
        if len(newest) < self.order:
            newest = ["start", *newest]
        return [tuple(newest[start:]) for start in range(len(newest) + 1)]

    def likeliest(self, recent: list[Any]) -> set[Any]:
        """All results that came most often after the longest known context."""
        for context in self.contexts(recent):
            if self.counts[context]:
                most = max(self.counts[context].values())
                return {value for value, count in self.counts[context].items() if count == most}
        return set()

    def learn(self, recent: list[Any], value: Any) -> None:
        """Count a result."""
        for context in self.contexts(recent):
            self.counts[context][value] += 1


@given(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=60))
def test_markov_equals_its_definition(order: int, results: list[int]) -> None:
    """With nothing forgotten the candidate with the highest count is the one that plain counting finds."""
    predictor, plain, run = Markov(order, memory=1e9, guesses=1), PlainMarkov(order), Run()
    recent: list[int] = []
    for value in results:
        guess = best(predictor, run.call("step"))
        assert guess in (plain.likeliest(recent) or {None})
        plain.learn(recent, value)
        run.commit(predictor, run.call("step"), value)
        recent.append(value)


@pytest.mark.parametrize(("setting", "value"), [("order", -1), ("memory", 0.0), ("guesses", 0), ("limit", 0)])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    """A setting that cannot work is an error where it is declared."""
    with pytest.raises(InvalidSettingError, match=setting):
        Markov(**{setting: value})  # type: ignore[arg-type]
