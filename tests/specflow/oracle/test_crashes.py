"""Random workflows that are killed and resumed, in virtual time, against the same workflows run alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specflow.codec import encode
from specflow.errors import EffectUnknownError
from specflow.outbox import NotSent, Sent
from specflow.stores import MemoryStore
from specflow.testing.serial import SerialRun
from tests.specflow.oracle.checks import (
    Case,
    ahead,
    alone,
    branches_of,
    effect_problems,
    quiet_problems,
    read_case,
    stream_problems,
)
from tests.specflow.oracle.programs import PLAIN, SIZE, STATEFUL, Dice, Program, Receiver, Sight, read_program

STEPS = (*PLAIN, *STATEFUL, "post", "reserve", "charge", "charge", "mail", "remit")
"""Without external steps that write the state: who answers for one knows its result, not what it wrote."""


@dataclass(frozen=True)
class Example:
    """A program, a way of running it, and when to kill it."""

    program: Program
    numbers: list[int]
    case: Case
    kills: tuple[int, ...]


def _read(data: bytes) -> Example:
    dice = Dice(data)
    case = read_case(dice)
    kills = tuple(1 + dice.below(12) for _kill in range(1 + dice.below(3)))
    return Example(*read_program(dice, STEPS), case, kills)


examples = st.binary(min_size=160, max_size=160).map(_read)
"""Random programs, ways of running them, and instants at which they are killed."""


def find_out(error: EffectUnknownError, serial: SerialRun, receiver: Receiver) -> Sent | NotSent:
    """What a person would find out about an effect that a crash has left unknown."""
    if not any(sight.key == error.key and sight.action != "undo" for sight in receiver.log):
        return NotSent()
    sight = next(sight for sight in receiver.log if sight.key == error.key)
    results = {
        "charge": (2 * sight.value) % SIZE,
        "reserve": [sight.value, list(sight.position), sight.key],
        "mail": None,
        "remit": None,
    }
    return Sent(results[sight.step])


def check_killed(example: Example) -> None:
    """Run a program, kill it, resume it until it is finished, and compare.

    Raises:
        AssertionError: a promise was broken.
    """
    serial, seen_alone = alone(example.program, example.numbers)
    store, receiver = MemoryStore(), Receiver()
    asked: dict[str, EffectUnknownError] = {}
    emitted: list[Any] = []
    found: list[str] = []
    kills = list(example.kills)
    recover = False
    for _process in range(40):
        simulation, _lab, watch = ahead(
            example.program,
            example.numbers,
            example.case,
            serial,
            store=store,
            receiver=receiver,
            recover=recover,
            resolve={key: find_out(error, serial, receiver) for key, error in asked.items()},
            crash_after=kills.pop(0) if kills else None,
        )
        recover = True
        emitted += simulation.emitted
        found += watch.problems
        if not _is_prefix(simulation.entries, serial):
            found += serial.differences(entries=simulation.entries)
        if simulation.finished:
            found += quiet_problems(simulation)
        if isinstance(simulation.error, EffectUnknownError):
            asked[simulation.error.key] = simulation.error
        elif simulation.finished:
            break
        if not simulation.finished:
            found += stream_problems([])
    else:
        found.append("progress: it was resumed 40 times and is not finished")
    found += serial.differences(
        entries=simulation.entries, state=simulation.state, outcome=(simulation.value, simulation.error)
    )
    if not _is_subsequence(map(encode, emitted), map(encode, serial.events)):
        found.append(f"stream: {emitted} is not a part of {serial.events}")
    seen = list(_without_repeats(receiver.log))
    found += effect_problems(seen_alone.log, seen, branches_of(serial.entries), ran_ahead=example.case.ahead)
    assert not found, "\n".join(found[:5])


def _is_prefix(entries: Sequence[Any], serial: SerialRun) -> bool:
    """Of the serial history."""
    shorter = SerialRun(
        serial.value,
        serial.error,
        serial.entries[: len(entries)],
        serial.versions[: len(entries)],
        serial.events,
        serial.effects,
    )
    return len(entries) <= len(serial.entries) and not shorter.differences(entries=entries)


def _is_subsequence(some: Iterable[bytes], whole: Iterable[bytes]) -> bool:
    rest = iter(whole)
    return all(any(item == other for other in rest) for item in some)


def _without_repeats(log: Sequence[Sight]) -> Iterable[Sight]:
    """What may be repeated after a crash counts once: idempotent effects, and undos, which are safe to repeat."""
    known: set[tuple[str, str]] = set()
    for sight in log:
        place = (sight.action, sight.key)
        if place in known and (sight.action == "undo" or sight.step == "post"):
            continue
        known.add(place)
        yield sight


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(example=examples)
def test_killed(example: Example) -> None:
    """A run that is killed and resumed leaves the history, state and effects of one that is not."""
    check_killed(example)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=8_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(example=examples)
def test_many_killed(example: Example) -> None:
    """The same for many more, others in every run."""
    check_killed(example)
