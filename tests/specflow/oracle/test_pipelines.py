"""Random pipelines, run ahead in virtual time, against the same pipelines run step by step in program order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specflow.scheduler import Scheduler
from specflow.testing.serial import run_serial
from specflow.testing.virtual import EPOCH, simulate
from tests.specflow.oracle import mutants
from tests.specflow.oracle.checks import RUN, Case, Watch, problems, read_case, right_results, uneven
from tests.specflow.oracle.pipelines import Graph, Plant, read_graph
from tests.specflow.oracle.programs import SIZE, Dice, no_predictors


def check_pipeline(graph: Graph, start: int, case: Case, scheduler: Callable[..., Scheduler] = Scheduler) -> None:
    """Run a pipeline step by step and ahead, and compare."""
    inputs: dict[str, Any] = {"start": start} if graph.takes_input else {}
    plain = Plant(graph, no_predictors)
    serial = run_serial(plain.pipeline, run_id=RUN, at=EPOCH, **inputs)
    watch = Watch(case)
    plant = Plant(graph, case.make_predictors(right_results(serial), watch.lessons))
    simulation = simulate(
        plant.pipeline,
        policy=case.policy(),
        durations=uneven,
        seed=case.seed,
        limits=case.limits(),
        run_id=RUN,
        stopping=float("inf") if case.lingering else 0.0,
        calls="end" if case.late_calls else "start",
        wall=lambda seconds: EPOCH,
        watch=watch,
        scheduler=scheduler,
        max_actions=20_000,
        **inputs,
    )
    parallel = graph.unordered(plain.pipeline)
    broken = problems(serial, plain.receiver.log, simulation, plant.receiver.log, watch, parallel)
    assert not broken, "\n".join(broken[:5])


@dataclass(frozen=True)
class Example:
    """A pipeline and a way of running it."""

    graph: Graph
    start: int
    case: Case


def _read(data: bytes) -> Example:
    dice = Dice(data)
    case = read_case(dice)
    return Example(read_graph(dice), dice.below(SIZE), case)


examples = st.binary(min_size=100, max_size=100).map(_read)
"""Random pipelines, each with a random way of running it."""


EXAMPLES = 250
"""Examples of a default run."""
IN_PIPELINES = (
    mutants.AcceptsAnything,
    mutants.ComparesLoosely,
    mutants.CommitsOutOfOrder,
    mutants.ReadsStaleState,
    mutants.ReadsItsFuture,
    mutants.UsesWrongIncarnation,
    mutants.ActsOnGuesses,
    mutants.SendsBeforeCommit,
    mutants.IgnoresBudgets,
    mutants.StopsNothing,
)
"""Engines that break a promise about pipelines too."""


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(example=examples)
def test_pipelines(example: Example) -> None:
    """A pipeline that runs ahead of itself leaves the same history, state and effects as one that does not."""
    check_pipeline(example.graph, example.start, example.case)


@pytest.mark.parametrize("mutant", IN_PIPELINES, ids=[mutant.__name__ for mutant in IN_PIPELINES])
def test_mutants(mutant: type[Scheduler]) -> None:
    """Each of these engines is caught within the number of examples that the real one is tested with."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=examples)
    def run_all(example: Example) -> None:
        check_pipeline(example.graph, example.start, example.case, mutant)

    with pytest.raises(AssertionError, match=rf"(?m)^({mutants.MUTANTS[mutant]}):"):
        run_all()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=8_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(example=examples)
def test_many_pipelines(example: Example) -> None:
    """The same for many more, others in every run."""
    check_pipeline(example.graph, example.start, example.case)
