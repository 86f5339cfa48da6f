"""The contract, checked from outside: what a run left behind against what the same program does when it runs alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from specflow.codec import decode, encode
from specflow.effects import RUN_AHEAD, Effect
from specflow.errors import ExecutionError
from specflow.history import Entry, EntryKind, Position
from specflow.policies import Fixed, Threshold
from specflow.protocols import Predictor, RunAheadPolicy
from specflow.replay import CallRequest
from specflow.runtime import Event, RetractedEvent, SpeculativeEvent
from specflow.scheduler import Decision, Scheduler
from specflow.speculation import Budget
from specflow.testing.serial import SerialRun, run_serial
from specflow.testing.virtual import EPOCH, Simulation, Span, Timed, simulate
from specflow.worlds import TaskKind, TaskStatus, World
from tests.specflow.oracle.guesses import CLEAN, LIKELY, PREDICTORS, Lesson, Student
from tests.specflow.oracle.programs import (
    EXTERNAL,
    Dice,
    Lab,
    Predictors,
    Program,
    Receiver,
    Sight,
    read_program,
)

AHEAD = RUN_AHEAD | {Effect.IDEMPOTENT, Effect.COMPENSABLE}
"""Effects of a user who lets everything run ahead that may."""

COMPENSABLE = ("reserve", "hold")
"""Steps that can be undone."""

# --------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One way of running a program."""

    predictors: tuple[str, ...]
    """Kinds; each step gets one of them."""
    depth: int = 1
    width: int = 1
    threshold: float | None = None
    ahead: bool = False
    """External effects run ahead where they may."""
    slots: int | None = None
    money: float | None = None
    seconds: float | None = None
    bank: int | None = None
    """Limit of the resource class that external steps share."""
    lookups: int | None = None
    """Limit of the resource class that a READONLY step counts against."""
    lingering: bool = False
    """What is told to stop goes on to its end, as in a thread."""
    late_calls: bool = False
    """Steps act when they end rather than when they start."""
    seed: int = 0

    def policy(self) -> RunAheadPolicy:
        """A new policy."""
        budget = Budget(money=self.money, seconds=self.seconds, slots=self.slots)
        effects = AHEAD if self.ahead else RUN_AHEAD
        if self.threshold is None:
            return Fixed(self.depth, width=self.width, effects=effects, budget=budget)
        return Threshold(self.depth, self.threshold, width=self.width, effects=effects, budget=budget)

    def limits(self) -> Mapping[str, int]:
        """Most attempts at a time."""
        chosen = {"bank": self.bank, "lookups": self.lookups}
        return {name: limit for name, limit in chosen.items() if limit is not None}

    def make_predictors(self, answers: Mapping[Position, Any], lessons: list[Lesson] | None = None) -> Predictors:
        """The predictor of each step; what they are told is added to ``lessons``."""
        told = lessons if lessons is not None else []

        def make(step: str) -> Predictor | None:
            kind = self.predictors[sum(step.encode()) % len(self.predictors)]
            return Student(step, PREDICTORS[kind](answers, self.seed), told)

        return make


BUDGETS: tuple[dict[str, float], ...] = (
    {},
    {},
    {},
    {"slots": 1},
    {"slots": 2},
    {"money": 1.0},
    {"money": 2.5},
    {"seconds": 1.0},
    {"seconds": 3.0},
    {"slots": 3, "money": 2.0, "seconds": 2.0},
    {"slots": 0},
    {"money": 0.0},
    {"seconds": 0.0},
)


def read_case(dice: Dice) -> Case:
    """One way of running."""
    return Case(
        predictors=dice.some(LIKELY, 1, 3),
        depth=dice.pick((1, 2, 3, 4, 2, 3, 4, 0)),
        width=dice.pick((1, 2, 3)),
        threshold=dice.pick((None, None, None, 0.2, 0.7)),
        ahead=dice.pick((False, False, True)),
        **dice.pick(BUDGETS),
        bank=dice.pick((None, 1)),
        lookups=dice.pick((None, None, 1, 2)),
        lingering=dice.pick((False, True)),
        late_calls=dice.pick((False, True)),
        seed=dice.below(256),
    )


@dataclass(frozen=True)
class Example:
    """A program and a way of running it."""

    program: Program
    numbers: list[int]
    case: Case

    def with_seed(self, seed: int) -> Example:
        """The same on another schedule."""
        return replace(self, case=replace(self.case, seed=seed))


def read_example(data: bytes, **words: Sequence[str]) -> Example:
    """A program and a way of running it, from 160 bytes; ``words`` as for :func:`read_program`."""
    dice = Dice(data)
    case = read_case(dice)
    return Example(*read_program(dice, **words), case)


def examples(**words: Sequence[str]) -> st.SearchStrategy[Example]:
    """Random programs, each with a random way of running it."""
    return st.binary(min_size=160, max_size=160).map(lambda data: read_example(data, **words))


Parallel = Callable[[Position, Position], bool]
"""Whether two places of a program may happen in any order."""


def uneven(work: Timed) -> float:
    """Seconds from a few values, many of them equal: things happen at the same time, in every order."""
    return random.Random(f"{work.seed} {work.number} {work.attempt}").choice((0.0, 0.5, 1.0, 1.0, 2.0, 5.0))


def right_results(serial: SerialRun) -> dict[Position, Any]:
    """What each call that succeeds returns, by position."""
    return {
        entry.position: decode(entry.result)
        for entry in serial.entries
        if entry.kind is EntryKind.CALL and entry.result is not None
    }


# -------------------------------------------------------------------------------------------------------------- checks

RUN = "run"


def alone(program: Program, numbers: list[int]) -> tuple[SerialRun, Receiver]:
    """The program on its own."""
    lab = Lab()
    return run_serial(lab.workflow, program, numbers, run_id=RUN, at=EPOCH), lab.receiver


def ahead(
    program: Program,
    numbers: list[int],
    case: Case,
    serial: SerialRun,
    *,
    scheduler: Callable[..., Scheduler] = Scheduler,
    receiver: Receiver | None = None,
    **settings: Any,
) -> tuple[Simulation, Lab, Watch]:
    """The program in virtual time, run as the case says."""
    prices = {"triple": 1.0, "look_up": 0.5, "read": 1.0, "write": 0.5}
    watch = Watch(case)
    predictors = case.make_predictors(right_results(serial), watch.lessons)
    lab = Lab(predictors, prices=prices, resource="lookups", receiver=receiver)
    simulation = simulate(
        lab.workflow,
        program,
        numbers,
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
        find_step=lab.steps.get,
        **settings,
    )
    return simulation, lab, watch


@dataclass
class Watch:
    """Looks at the scheduler after every decision."""

    case: Case
    problems: list[str] = field(default_factory=list)
    lessons: list[Lesson] = field(default_factory=list)
    """What predictors were told, in order."""

    def __call__(self, scheduler: Scheduler, decision: Decision) -> None:
        """Check what must hold at every instant."""
        limits = self.case.limits()
        held = Counter(task.step.resource for task in scheduler.running if task.kind is not TaskKind.PREDICT)
        for resource, limit in limits.items():
            if held[resource] > limit:
                self.problems.append(f"limits: {held[resource]} attempts of {resource} at {scheduler.now}")
        running = [task for task in scheduler.running if task.speculative and task.kind is not TaskKind.JUDGE]
        for world in scheduler._parked:
            self._check_priority(scheduler, world)
        if self.case.slots is not None and len(running) > self.case.slots:
            self.problems.append(f"budget: {len(running)} speculative attempts at {scheduler.now}")

    def _check_priority(self, scheduler: Scheduler, world: World) -> None:
        """A call that is certain and finds no slot takes that of an attempt on a guess."""
        request = world.waiting
        if not isinstance(request, CallRequest) or not scheduler._rests_on_nothing(world):
            return
        resource = request.step.resource
        if resource not in self.case.limits() or request.step.effect.is_external:
            return
        holders = [task for task in scheduler.running if task.holds == resource]
        stops = any(task.status is TaskStatus.CANCELLED for task in holders)
        if not stops and any(task.speculative and not task.step.effect.is_external for task in holders):
            self.problems.append(f"progress: {request.step.name} waits for a slot that an attempt on a guess holds")


def problems(
    serial: SerialRun,
    expected: Sequence[Sight],
    simulation: Simulation,
    seen: Sequence[Sight],
    watch: Watch,
    parallel: Parallel | None = None,
) -> list[str]:
    """Every broken promise; empty if there is none."""
    case = watch.case
    found = [
        *serial.differences(
            entries=simulation.entries,
            state=simulation.state,
            events=simulation.emitted,
            outcome=(simulation.value, simulation.error),
        )
    ]
    found += stream_problems(simulation.events)
    found += effect_problems(expected, seen, parallel or branches_of(serial.entries), ran_ahead=case.ahead)
    found += watch.problems
    found += quiet_problems(simulation)
    found += report_problems(simulation)
    found += lesson_problems(serial, watch.lessons, simulation)
    found += budget_problems(simulation, case)
    if set(case.predictors) <= CLEAN:
        found += [
            f"predictor: {step.predictor_errors} failures of {step.step}"
            for step in simulation.report.steps
            if step.predictor_errors
        ]
    return found


def stream_problems(events: Sequence[Event]) -> list[str]:
    """Speculative events are either retracted, once, or happen, and the committed event says which one it was."""
    shown: dict[int, bytes] = {}
    found: list[str] = []
    retracted: set[int] = set()
    confirmed: set[int] = set()
    for event in events:
        if isinstance(event, SpeculativeEvent):
            if event.number in shown:
                found.append(f"stream: event {event.number} was shown twice")
            shown[event.number] = encode(event.value)
        elif isinstance(event, RetractedEvent):
            if event.number not in shown or event.number in retracted:
                found.append(f"stream: event {event.number} was retracted, but not shown, or retracted before")
            retracted.add(event.number)
        elif event.number is not None:
            if event.number in retracted or event.number in confirmed:
                found.append(f"stream: event {event.number} happened twice, or although it was retracted")
            if shown.get(event.number) != encode(event.value):
                found.append(f"stream: event {event.number} is not what was shown under its number")
            confirmed.add(event.number)
    lost = shown.keys() - retracted - confirmed
    return found + [f"stream: {shown[number]!r} was shown, never retracted and never committed" for number in lost]


def effect_problems(
    expected: Sequence[Sight], seen: Sequence[Sight], parallel: Parallel, *, ran_ahead: bool
) -> list[str]:
    """The outside world saw the same, in the same order where there is one, and nothing twice.

    Where effects run ahead (the user's choice), idempotent ones may be seen that do not happen, and compensable ones
    may be seen if they are taken back.
    """
    undone = {sight.step for sight in (*expected, *seen) if sight.action == "undo"}
    free = {"post", *COMPENSABLE, *undone} if ran_ahead else set()
    return [
        *_count_problems(expected, seen, undone if ran_ahead else set(), ran_ahead=ran_ahead),
        *_order_problems(expected, [sight for sight in seen if sight.step not in free], parallel),
    ]


def _count_problems(
    expected: Sequence[Sight], seen: Sequence[Sight], undone: set[str], *, ran_ahead: bool
) -> Iterator[str]:
    wanted = Counter((sight.action, sight.step, sight.key) for sight in expected)
    got = Counter((sight.action, sight.step, sight.key) for sight in seen)
    for place in wanted.keys() | got.keys():
        _action, step, key = place
        if step in undone:
            did, took_back = got["do", step, key], got["undo", step, key]
            if did - took_back != wanted["do", step, key] - wanted["undo", step, key] or did > 2:
                yield f"effects: {step} {key} was done {did} times and undone {took_back} times"
        elif got[place] != wanted[place] and not (ran_ahead and step == "post" and got[place] > wanted[place]):
            yield f"effects: {place} was seen {got[place]} times instead of {wanted[place]}"


def _order_problems(expected: Sequence[Sight], seen: Sequence[Sight], parallel: Parallel) -> Iterator[str]:
    places = {(sight.action, sight.key): place for place, sight in enumerate(seen)}
    order = [sight for sight in expected if (sight.action, sight.key) in places]
    for index, earlier in enumerate(order):
        for later in order[index + 1 :]:
            has_order = earlier.action == later.action == "send" or not parallel(earlier.position, later.position)
            is_turned = places[earlier.action, earlier.key] > places[later.action, later.key]
            if earlier.queue == later.queue and has_order and is_turned:
                yield f"effects: {later} was seen before {earlier}"


def branches_of(entries: Sequence[Entry]) -> Parallel:
    """Whether two places are in different branches of one gather: no order between them was asked for."""
    forks = {entry.position for entry in entries if entry.kind is EntryKind.FORK}

    def parallel(one: Position, other: Position) -> bool:
        for length, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                return one[:length] in forks
        return False

    return parallel


def report_problems(simulation: Simulation) -> list[str]:
    """The account of a run is what was seen of it."""
    steps = [span for span in simulation.spans if span.kind is TaskKind.STEP]
    report = simulation.report
    seen = {
        "attempts": (report.attempts, len(steps)),
        "money": (round(report.money, 6), round(sum(span.money for span in steps), 6)),
        "calls": (sum(step.calls for step in report.steps), _calls(simulation.entries)),
    }
    found = [f"report: {told} {name} instead of {real}" for name, (told, real) in seen.items() if told != real]
    ahead = sum(span.ahead for span in steps)  # some may be certain as soon as they have been decided upon
    if not ahead <= report.ahead <= report.attempts or report.squashed > report.attempts:
        found.append(f"report: {report}")
    if report.hits + report.misses > report.predictions:
        found.append(f"report: {report}")
    return found


def _calls(entries: Sequence[Entry]) -> int:
    return sum(entry.kind is EntryKind.CALL for entry in entries)


def lesson_problems(serial: SerialRun, lessons: Sequence[Lesson], simulation: Simulation) -> list[str]:
    """Predictors are told what was committed, in program order, and nothing else."""
    buffered = {span.step for span in simulation.spans if span.kind is TaskKind.DELIVER}
    expected = [
        (entry.position, entry.step, entry.result)
        for entry in serial.entries
        if entry.kind is EntryKind.CALL and entry.result is not None and entry.step not in buffered
    ]
    return [] if list(lessons) == expected else [f"predictors: they were told {list(lessons)} instead of {expected}"]


def quiet_problems(simulation: Simulation) -> list[str]:
    """Nothing is left running, and nothing that was certain was stopped."""
    found = [f"quiet: {span.step} at {span.position} was still running" for span in simulation.still_running]
    if simulation.unreleased:
        found.append(f"quiet: the scheduler still counts {simulation.unreleased} tasks")
    is_blocked = isinstance(simulation.error, ExecutionError)  # then everything is stopped
    for span in simulation.spans:
        if span.ended is None:
            found.append(f"quiet: {span.step} at {span.position} never ended")
        is_certain = span.kind is TaskKind.STEP and span.confirmed is not None
        if is_certain and span.cancelled is not None and not is_blocked:
            found.append(f"progress: {span.step} at {span.position} was certain and was stopped")
    return found


def budget_problems(simulation: Simulation, case: Case) -> list[str]:
    """What running ahead had used up at any instant stays within the budget.

    Counted from outside: an attempt that started on a guess costs until its guesses have all held. For an attempt that
    ended before, that is when its call was committed; with parallel branches and judges a commit may come later than
    the truth, so this is checked for runs without them.
    """
    if any(entry.kind is EntryKind.FORK for entry in simulation.entries):
        return []
    if any(span.kind is TaskKind.JUDGE for span in simulation.spans):
        return []
    spans = [span for span in simulation.spans if span.kind is TaskKind.STEP and span.ahead]
    confirmed = {span.number: _confirmed_at(span, simulation) for span in spans}
    instants = sorted(
        {moment for span in spans for moment in (span.started, span.cancelled, span.ended) if moment is not None}
    )
    found: list[str] = []
    for now in instants:
        at_risk = [span for span in spans if span.started <= now and confirmed[span.number] > now]
        money = sum(span.money for span in at_risk)
        # An attempt that may have changed the outside world is not stopped half-way, whatever it costs.
        seconds = sum(_used(span, now) for span in at_risk if span.step not in EXTERNAL)
        if case.money is not None and money > case.money + 1e-9:
            found.append(f"budget: {money} of {case.money} money was at risk at {now}")
        if case.seconds is not None and seconds > case.seconds + 1e-6:
            found.append(f"budget: {seconds} of {case.seconds} seconds were at risk at {now}")
    return found[:1]


def _used(span: Span, now: float) -> float:
    end = min(moment for moment in (now, span.cancelled, span.ended) if moment is not None)
    return end - span.started


def _confirmed_at(span: Span, simulation: Simulation) -> float:
    """When all guesses that an attempt rested on had held; infinity if they never did."""
    if span.confirmed is not None:
        return span.confirmed
    if span.cancelled is not None:
        return float("inf")
    for entry, when in zip(simulation.entries, simulation.committed_at, strict=True):
        if (entry.kind, entry.position, entry.arguments) == (EntryKind.CALL, span.position, span.arguments):
            return when
    return float("inf")


def check(example: Example, scheduler: Callable[..., Scheduler] = Scheduler) -> None:
    """Run a program alone and ahead, and compare.

    Raises:
        AssertionError: a promise was broken.
    """
    serial, seen_alone = alone(example.program, example.numbers)
    simulation, lab, watch = ahead(example.program, example.numbers, example.case, serial, scheduler=scheduler)
    broken = problems(serial, seen_alone.log, simulation, lab.receiver.log, watch)
    assert not broken, "\n".join(broken[:5])
