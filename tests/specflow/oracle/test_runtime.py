"""Random workflows and pipelines under the real runtime, on asyncio and trio, against the same run alone."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.history import Position
from specflow.runtime import CommittedEvent, Event, run
from specflow.stores import MemoryStore
from specflow.testing.serial import SerialRun, run_serial
from tests.specflow.oracle.checks import (
    RUN,
    Case,
    Example,
    branches_of,
    effect_problems,
    read_case,
    read_example,
    right_results,
    stream_problems,
)
from tests.specflow.oracle.pipelines import Graph, Plant, read_graph
from tests.specflow.oracle.programs import SIZE, STATEMENTS, Dice, Lab, Receiver, no_predictors

TIMELESS = tuple(sorted(STATEMENTS.keys() - {"now", "sleep"}))
"""Statements that do not show what time it is."""

SLOW = [pytest.param(batch, marks=pytest.mark.slow) for batch in range(4, 40)]
"""More examples than a default run has time for."""


def pauses(seed: int) -> Callable[[str], Awaitable[None]]:
    """Steps give way to others a few times, as often as the seed says: no run waits, and every order is possible."""
    order = random.Random(seed)

    async def pause(step: str) -> None:
        for _turn in range(order.randrange(6)):
            await anyio.lowlevel.checkpoint()

    return pause


async def carry_out(
    program: Any, arguments: tuple[Any, ...], case: Case, **inputs: Any
) -> tuple[MemoryStore, list[Event], tuple[Any, BaseException | None]]:
    """Run a program for real."""
    store = MemoryStore()
    events: list[Event] = []
    before = len(anyio.get_running_tasks())
    try:
        result = await run(
            program,
            *arguments,
            store=store,
            policy=case.policy(),
            run_id=RUN,
            limits=case.limits(),
            on_event=events.append,
            **inputs,
        )
        outcome: tuple[Any, BaseException | None] = result.value, None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - compared with what the program raises alone
        outcome = None, error
    assert len(anyio.get_running_tasks()) == before
    return store, events, outcome


def broken_promises(
    serial: SerialRun,
    alone: Receiver,
    seen: Receiver,
    ran: tuple[MemoryStore, list[Event], tuple[Any, BaseException | None]],
    parallel: Callable[[Position, Position], bool],
    case: Case,
) -> list[str]:
    """Every broken promise of a real run."""
    store, events, outcome = ran
    found = list(
        serial.differences(
            entries=store.entries(RUN),
            state=store.state(RUN),
            events=[event.value for event in events if isinstance(event, CommittedEvent)],
            outcome=outcome,
        )
    )
    found += stream_problems(events)
    found += effect_problems(alone.log, seen.log, parallel, ran_ahead=case.ahead)
    if store.get_run(RUN).owner is not None:
        found.append("quiet: the lease was not given back")
    return found


async def check_workflow(example: Example) -> None:
    """Run a workflow alone and for real, and compare."""
    plain = Lab(wait=0.0)
    serial = run_serial(plain.workflow, example.program, example.numbers, run_id=RUN)
    lab = Lab(
        example.case.make_predictors(right_results(serial)),
        pauses(example.case.seed),
        resource="lookups",
        wait=0.0,
        threads=example.case.lingering,
    )
    ran = await carry_out(lab.workflow, (example.program, example.numbers), example.case)
    parallel = branches_of(serial.entries)
    broken = broken_promises(serial, plain.receiver, lab.receiver, ran, parallel, example.case)
    assert not broken, "\n".join([*broken[:5], repr(example)])


async def check_pipeline(graph: Graph, start: int, case: Case) -> None:
    """Run a pipeline alone and for real, and compare."""
    inputs = {"start": start} if graph.takes_input else {}
    plain = Plant(graph, no_predictors)
    serial = run_serial(plain.pipeline, run_id=RUN, **inputs)
    plant = Plant(graph, case.make_predictors(right_results(serial)), pauses(case.seed))
    ran = await carry_out(plant.pipeline, (), case, **inputs)
    parallel = graph.unordered(plain.pipeline)
    broken = broken_promises(serial, plain.receiver, plant.receiver, ran, parallel, case)
    assert not broken, "\n".join([*broken[:5], repr((graph, start, case))])


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [*range(4), *SLOW])
async def test_workflows(batch: int) -> None:
    """The runtime keeps the promises of the scheduler under a real event loop, and leaves no task and no lease."""
    for number in range(40):
        data = random.Random(f"workflow {batch} {number}").randbytes(160)
        await check_workflow(read_example(data, statements=TIMELESS))


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [*range(2), *SLOW])
async def test_pipelines(batch: int) -> None:
    """The same for pipelines."""
    for number in range(40):
        dice = Dice(random.Random(f"pipeline {batch} {number}").randbytes(100))
        case = read_case(dice)
        await check_pipeline(read_graph(dice), dice.below(SIZE), case)
