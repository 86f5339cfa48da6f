"""SyncTest: does a program survive being run ahead of itself?

Rollback netcode tests a game by rolling back at every frame although nothing was mispredicted, and comparing checksums
(the SyncTest sessions of GGPO and GGRS). :func:`synctest` does the same to a workflow or pipeline: it is run once as
it is, then again and again with wrong guesses forced on it, with right ones, in other orders, and rebuilt from its
history. A program that depends on nothing but its arguments and its context does the same every time. Where it does
not, the report names the step, the place and the likely cause.

**What runs for real.** PURE and READONLY steps run many times, on wrong arguments too: that is what declaring them so
allows. Steps with any other effect run once at most, in the reference run, and only if that is allowed
(``allow_effects``) or a stub stands in for them; from then on their recorded results are used. Buffered effects are
delivered, and undos run, in the reference run only. Steps run one at a time, in an order that the seed decides, so a
finding can be reproduced. Process steps run in a thread here; waits between tries and ``ctx.sleep`` take no time, and
``ctx.now()`` stands still but for these sleeps.
"""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import anyio
import anyio.to_thread

from .codec import Box, decode, encode
from .definitions import Attempt, Step, Workflow
from .effects import Effect
from .errors import (
    DefinitionError,
    DivergenceError,
    InvalidSettingError,
    MisuseError,
    ReplayError,
    StepTimeoutError,
    UnsupportedValueError,
)
from .graph import Pipeline
from .history import Entry, EntryKind, Position, RunStatus, Write, format_position, parse_position
from .policies import Fixed
from .recorded import FromRecord, Recording, coin, names_of, place_of, redo
from .replay import Context, Outcome
from .rewiring import altered, rewire
from .scheduler import Recovered, Scheduler
from .simulation import Course, drive
from .speculation import Call
from .state import Access, Cells, State
from .verifiers import Equal
from .worlds import Task, TaskKind

_NOTHING = Box(None)
_SLOW = 6.0
"""Virtual seconds of a call that is guessed wrong; other calls take one, so that its wrong world gets some way."""
_DEEP = 8
"""Unresolved guesses, when all of them are right."""
_SHOWN = 200
"""Characters of a value in a message."""
_REFERENCE = "the reference run"
_REPETITION = "a repetition"
_REBUILDING = "a rebuilding from history"


class Cause(Enum):
    """What is likely to be behind a finding."""

    HIDDEN_STATE = "hidden global state"
    """A step declared PURE came to something else for equal arguments; or a workflow did something else after wrong
    worlds of it had run. It depends on something besides its arguments: global state, a clock, randomness."""
    NOT_READONLY = "not really READONLY"
    """A step declared READONLY changes what it reads, or reads what changes from one moment to the next."""
    MUTATED_INPUT = "mutated input"
    """A step, or the workflow, changes an argument in place. It has a copy: nobody else sees the change."""
    UNSEEDED = "unseeded randomness, clock or global state in workflow code"
    """The workflow's own code did something else although all its answers were the same."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    cause: Cause
    step: str
    """The step; for faults of workflow code the call at which they showed, or the workflow."""
    position: Position
    """Where it showed first; empty for the program as a whole."""
    detail: str
    """What was seen."""
    run: str
    """In which run."""

    def __str__(self) -> str:
        place = f"position {format_position(self.position)}, " if self.position else ""
        return f"{place}{self.step}: {self.cause.value}. {self.detail} (Seen in {self.run}.)"


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What :func:`synctest` found."""

    program: str
    findings: tuple[Finding, ...]
    """By place. One per cause and step; of divergences of workflow code one per place."""
    runs: int
    """How often the program was run or rebuilt."""
    calls: int
    """Calls of the reference run."""
    notes: tuple[str, ...] = ()
    """What limits the test, and what may be a fault but need not be."""

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        found = len(self.findings)
        verdict = "nothing found" if self.ok else f"{found} finding{'' if found == 1 else 's'}"
        lines = [f"{self.program}: {verdict} ({self.runs} runs, {self.calls} calls each)"]
        lines += [f"  - {finding}" for finding in self.findings]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


async def synctest(  # noqa: PLR0913 - settings, all by keyword
    program: Workflow[..., Any] | Pipeline,
    /,
    *args: Any,
    seed: int = 0,
    rounds: int = 20,
    most_forced: int = 200,
    stub: Mapping[str, Callable[..., Any]] | None = None,
    allow_effects: bool = False,
    unstable: Collection[str] = (),
    step_seconds: float = 60.0,
    inputs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> SyncReport:
    """Run a program with wrong guesses forced on it, and compare.

    The runs: a reference without guesses, in which every PURE and READONLY call is made twice in a row; a repetition of
    it; ``2 + rounds`` rebuildings from history alone; one run per call with a wrong guess of its result; two runs with
    right guesses of all results, in different orders; ``rounds`` runs with right and wrong guesses at random. Compared
    are the value, the history (position, step, arguments, result, changes of the state), the final state and the
    emitted events. Where a step comes to something else than before, it is reported and the earlier result is used: a
    fault shows at its own place, not at all places after it.

    A fair coin that workflow code tosses once per run is missed with odds of 1 in 2 ** (3 + ``rounds``).

    Args:
        program: a ``@workflow`` or a :class:`~specflow.graph.Pipeline`.
        args: for the program.
        seed: decides the random choices, and what ``ctx.random`` and ``ctx.uuid`` draw.
        rounds: runs with guesses at random.
        most_forced: calls for which a run with a wrong guess is made. Of a longer program so many are drawn at random:
            the test of a program of n calls makes n squared calls otherwise.
        stub: functions to run in place of steps, by name of the step, in full or without its module. They are called
            like the step, without a state or attempt; undos of such steps do not run.
        allow_effects: run steps that change the outside world for real, once.
        unstable: READONLY steps that may come to something else at every call, such as a clock. Their recorded results
            are used.
        step_seconds: longest time, in seconds, for a try of an async step that declares no timeout.
        inputs: further keyword arguments for the program, for names that this function uses itself.
        kwargs: for the program.

    Raises:
        DefinitionError: the program or its arguments cannot work, or it calls a step that changes the outside world,
            has no stub and is not allowed to.
        InvalidSettingError: ``rounds`` or ``most_forced`` is negative, or ``step_seconds`` not positive.
        ReplayError: the workflow awaits something that is not a request to its context.
        MisuseError: the workflow uses its context in a way that cannot work.
    """
    for name, number in (("rounds", rounds), ("most_forced", most_forced)):
        if number < 0:
            raise InvalidSettingError(name, number, "an integer >= 0")
    if not step_seconds > 0:
        raise InvalidSettingError("step_seconds", step_seconds, "a number of seconds > 0")
    if not isinstance(program, Workflow | Pipeline):
        raise DefinitionError(f"synctest() needs a @workflow or a Pipeline, got {program!r}")
    kwargs = {**kwargs, **(inputs or {})}
    program.bind(args, kwargs)
    arguments = Box([[*args], kwargs], f"the arguments of {program.name}")
    handling = _Handling(dict(stub or {}), allow_effects, frozenset(unstable), step_seconds)
    return await _Session(program, arguments, seed, handling).test(rounds, most_forced)


@dataclass(frozen=True, slots=True)
class _Handling:
    """How steps are dealt with."""

    stubs: Mapping[str, Callable[..., Any]]
    allow_effects: bool
    unstable: frozenset[str]
    step_seconds: float

    def stub(self, step: str) -> Callable[..., Any] | None:
        """What stands in for a step."""
        return next((self.stubs[name] for name in names_of(step) if name in self.stubs), None)

    def is_unstable(self, step: Step[..., Any]) -> bool:
        """May a step come to something else at every call?"""
        if step.effect is not Effect.READONLY:
            return False
        return any(name in self.unstable for name in names_of(step.name))


@dataclass(frozen=True, slots=True)
class _Result:
    """What an attempt came to."""

    outcome: Outcome
    reads: tuple[Access, ...] = ()
    writes: tuple[Write, ...] = ()

    def same_as(self, other: _Result) -> bool:
        """Equal result, or error of the same class (its text may hold an address), and equal changes of the state."""
        if self.outcome.failed and other.outcome.failed:
            return type(self.outcome.error) is type(other.outcome.error)
        return self.outcome == other.outcome and self.writes == other.writes

    def __str__(self) -> str:
        changed = sorted({write.key for write in self.writes})
        return _describe(self.outcome) + (f", with a change of {', '.join(changed)}" if changed else "")


@dataclass(frozen=True, slots=True)
class _Plan:
    """One run."""

    label: str
    policy: Fixed
    choose: Callable[[Call], Sequence[bool]] | None
    """Which guesses are made; None for none at all."""
    seconds: Callable[[Task], float]


class _DivergedError(Exception):
    """The program asked for something that it did not ask for before."""

    def __init__(self, task: Task, detail: str) -> None:
        self.step = task.step.name
        self.position = task.position
        self.detail = detail
        super().__init__(detail)


class _Session:
    """All runs of one test."""

    def __init__(self, program: Workflow[..., Any] | Pipeline, arguments: Box, seed: int, handling: _Handling) -> None:
        self.handling = handling
        self.recording = Recording(())
        self.run_id = f"synctest-{seed}"
        self.is_reference = True
        self.label = _REFERENCE
        self.results: dict[tuple[Any, ...], _Result] = {}
        """What each step came to for the arguments, and the parts of the state, that it saw."""
        self.effects: dict[tuple[Position, str, bytes], Outcome] = {}
        """What attempts that change the outside world came to."""
        self.frozen: set[str] = set()
        """READONLY steps whose recorded results are used, because what they read is known to change."""
        self._program = program
        self._arguments = arguments
        self._seed = seed
        self._at = time.time()
        self._findings: dict[tuple[Cause, str, Position | None], Finding] = {}
        self._notes: dict[str, None] = {}
        self._runs = 0
        self._stubs_used: set[str] = set()
        self._buffered: set[str] = set()
        self._started: list[tuple[Sequence[Any], Mapping[str, Any]]] = []

    # ------------------------------------------------------------------------------------------------------------ runs

    async def test(self, rounds: int, most_forced: int) -> SyncReport:
        """Everything that :func:`synctest` says."""
        reference = await self._reference()
        calls = self.recording.calls
        await self._compare(_Plan(_REPETITION, Fixed(0), None, _one_second), reference)
        for _number in range(2 + rounds):
            await self._rebuild(reference)
        for position in self._places(calls, most_forced):
            await self._compare(_missing_at(position), reference)
        await self._compare(_Plan("a run with right guesses", Fixed(1), _all_right, _one_second), reference)
        far = _Plan("a run with right guesses far ahead", Fixed(_DEEP), _all_right, _last_first)
        await self._compare(far, reference)
        for number in range(rounds):
            await self._compare(self._random(number), reference)
        for name in sorted(name for name in self.handling.stubs if name not in self._stubs_used):
            self.note(f"the stub of {name} was never used: the program called no step of that name")
        findings = sorted(self._findings.values(), key=lambda finding: (finding.position, finding.cause.name))
        return SyncReport(self._program.name, tuple(findings), self._runs, len(calls), tuple(self._notes))

    async def _reference(self) -> Course:
        reference = await self._play(_Plan(_REFERENCE, Fixed(0), None, _one_second))
        self.is_reference = False
        error = reference.outcome.error if reference.outcome is not None else None
        if isinstance(error, ReplayError | DefinitionError | MisuseError):
            raise error
        if reference.status not in (RunStatus.COMPLETED, RunStatus.FAILED):
            raise error or MisuseError(f"{self._program.name} waits for something that never comes")
        self._check_arguments()
        self.recording = Recording(reference.entries)
        return reference

    async def _compare(self, plan: _Plan, reference: Course) -> None:
        try:
            simulation = await self._play(plan)
        except _DivergedError as diverged:
            self._diverged(diverged.step, diverged.position, diverged.detail)
            return
        difference = _first_difference(reference, simulation)
        if difference is not None:
            step, position, detail = difference
            self._diverged(step or self._program.name, position, detail)

    async def _rebuild(self, reference: Course) -> None:
        """Feed the recorded answers to the program again; no step runs."""
        self.label = _REBUILDING
        self._runs += 1
        plan = _Plan(_REBUILDING, Fixed(0), None, _one_second)
        scheduler = self._scheduler(plan, Recovered(reference.entries, reference.effects))
        try:
            simulation = await drive(scheduler, _NoWork(), wall=lambda _now: self._at)
        except _DivergedError as diverged:
            self._diverged(diverged.step, diverged.position, diverged.detail)
            return
        error = simulation.outcome.error if simulation.outcome is not None else None
        if isinstance(error, DivergenceError):
            position = parse_position(error.position)
            entry = next((entry for entry in reference.entries if entry.position == position), None)
            step = entry.step if entry is not None and entry.kind is EntryKind.CALL else self._program.name
            self._diverged(step, position, f"The history says {error.recorded}, but it asked for {error.made}.")
        elif simulation.outcome != reference.outcome:
            before, now = _describe(reference.outcome), _describe(simulation.outcome)
            self._diverged(self._program.name, (), f"It came to {before} at first, and to {now} when rebuilt.")

    async def _play(self, plan: _Plan) -> Course:
        self.label = plan.label
        self._runs += 1
        return await drive(self._scheduler(plan, None), _Attempts(self, plan), wall=lambda _now: self._at)

    def _scheduler(self, plan: _Plan, recovered: Recovered | None) -> Scheduler:
        predictor = FromRecord(self.recording, plan.choose) if plan.choose is not None else None
        exchanged: dict[int, tuple[Step[..., Any], Step[..., Any]]] = {}

        def exchange(step: Step[..., Any]) -> Step[..., Any]:
            if id(step) not in exchanged:
                is_buffered = step.effect is Effect.BUFFERED
                if is_buffered:
                    self._buffered.add(step.name)
                own = None if is_buffered else predictor
                other = altered(step, predict=own, verify=Equal())
                exchanged[id(step)] = (step, other)  # keeps the step, so that its id stays its own
            return exchanged[id(step)][1]

        return Scheduler(
            rewire(self._body, exchange),
            name=self._program.name,
            run_id=self.run_id,
            policy=plan.policy,
            recovered=recovered,
            at=self._at,
        )

    def _body(self, context: Context) -> Any:
        if not self.is_reference or isinstance(self._program, Pipeline):
            return self._program.body(self._arguments)(context)
        args, kwargs = self._arguments.fresh()
        self._started.append((args, kwargs))
        return self._program.function(context, *args, **kwargs)

    def _places(self, calls: Sequence[Entry], most: int) -> list[Position]:
        places = [entry.position for entry in calls if entry.step not in self._buffered]
        if len(places) > most:
            self.note(f"wrong guesses were forced at {most} of {len(places)} calls, drawn at random")
            places = sorted(random.Random(self._seed).sample(places, most))  # noqa: S311 - no secret
        return places

    def _random(self, number: int) -> _Plan:
        draw = random.Random(f"{self._seed} {number}")  # noqa: S311 - no secret
        policy = Fixed(draw.randint(1, 4), width=draw.randint(1, 2))
        seed = draw.randrange(2**32)

        def choose(call: Call) -> Sequence[bool]:
            return ((False,), (True,), (False, True), ())[int(4 * coin(seed, *place_of(call)))]

        def seconds(task: Task) -> float:
            return 1.0 + int(4 * coin(seed, task.step.name, task.position, task.number))

        return _Plan(f"random run {number}", policy, choose, seconds)

    # -------------------------------------------------------------------------------------------------------- findings

    def found(self, cause: Cause, step: str, position: Position, detail: str) -> None:
        """Report a fault of a step, once."""
        self._findings.setdefault((cause, step, None), Finding(cause, step, position, detail, self.label))

    def is_known(self, cause: Cause, step: str) -> bool:
        """Was this fault of a step reported?"""
        return (cause, step, None) in self._findings

    def note(self, text: str) -> None:
        """Say something about the test, once."""
        self._notes.setdefault(text)

    def used_stub(self, step: str) -> None:
        """A stub stood in for a step."""
        self._stubs_used.update(names_of(step))

    def _diverged(self, step: str, position: Position, detail: str) -> None:
        """The program's own code did something else, though it had the same answers."""
        is_plain = self.label in (_REPETITION, _REBUILDING)
        if not is_plain and any(cause is Cause.UNSEEDED for cause, _step, _position in self._findings):
            return  # it does so by itself: what it does after wrong guesses says nothing more
        cause = Cause.UNSEEDED if is_plain else Cause.HIDDEN_STATE
        self._findings.setdefault((cause, step, position), Finding(cause, step, position, detail, self.label))

    def _check_arguments(self) -> None:
        program = self._program
        if isinstance(program, Pipeline):
            return  # its inputs go to steps only
        for args, kwargs in self._started:
            changed = _changed_arguments(self._arguments.data, args, kwargs, list(program.signature.parameters))
            if changed:
                detail = f"The workflow changes its argument {changed} in place; whoever passed it does not see that."
                self.found(Cause.MUTATED_INPUT, program.name, (), detail)


class _NoWork:
    """Nothing has to be done to rebuild a run."""

    def seconds(self, task: Task) -> float:
        """No time."""
        del task
        return 0.0

    async def perform(self, task: Task, at: float) -> Any:
        """A call that is not in the history is a divergence; what was delivered or undone stays so."""
        if task.kind is TaskKind.STEP:
            raise _DivergedError(task, f"It calls {task.step.name}, which it did not when its history was recorded.")
        return Outcome(_NOTHING, at=at)


class _Attempts:
    """Runs steps, watches what they do, and compares what they come to."""

    def __init__(self, session: _Session, plan: _Plan) -> None:
        self._session = session
        self._plan = plan

    def seconds(self, task: Task) -> float:
        """As planned."""
        return self._plan.seconds(task) if task.kind is TaskKind.STEP else 0.0

    async def perform(self, task: Task, at: float) -> Any:
        """Run a step, or answer with what it came to when it ran."""
        session, step = self._session, task.step
        cells = task.state.cells if task.state is not None else None
        if task.kind is TaskKind.STEP and not step.effect.is_external:
            result = await self._repeatable(task, at, cells)
        elif session.is_reference:
            result = await self._once(task, at, cells)
        elif task.kind is not TaskKind.STEP:
            return Outcome(_NOTHING, at=at)
        else:
            recorded = session.effects.get((task.position, step.name, task.arguments))
            if recorded is None:
                raise _DivergedError(
                    task, f"It calls {step.name} with other arguments than before, or where it did not."
                )
            entry = session.recording.at(task.position)
            result = _Result(recorded) if entry is None else _recorded(entry, task)
        if task.state is not None and cells is not None:
            task.state = State(cells)
            redo(task.state, (*result.reads, *result.writes))
        outcome = result.outcome
        return Outcome(outcome.box, outcome.error, at=at)

    async def _once(self, task: Task, at: float, cells: Cells | None) -> _Result:
        """An attempt that changes the outside world: only where that is allowed."""
        session, step = self._session, task.step
        stub = session.handling.stub(step.name)
        if stub is None and not session.handling.allow_effects:
            raise DefinitionError(
                f"step {step.name} is declared {step.effect.name}, so that testing this program would change the "
                "outside world; declare its effect if it has none, pass a stub for it, or pass allow_effects "
                "(--allow-effects): then it runs once, and from there on its recorded result is used"
            )
        if task.kind is TaskKind.UNDO and stub is not None:
            return _Result(Outcome(_NOTHING, at=at))
        result = await self._run(task, at, cells)
        if task.kind is TaskKind.STEP:
            session.effects[task.position, step.name, task.arguments] = result.outcome
        return result

    async def _repeatable(self, task: Task, at: float, cells: Cells | None) -> _Result:
        """An attempt that may run any number of times: it has to come to what it came to before."""
        session, step = self._session, task.step
        is_unstable = session.handling.is_unstable(step)
        if (is_unstable or step.name in session.frozen) and not session.is_reference:
            entry = session.recording.at(task.position)
            if entry is not None and (entry.step, entry.arguments) == (step.name, task.arguments):
                return _recorded(entry, task)
        result = await self._run(task, at, cells)
        if is_unstable or step.name in session.frozen:
            return result
        if session.is_reference:
            again = await self._run(task, at, cells)
            if not again.same_as(result):
                self._differs(task, result, again, "when it was called twice in a row")
        # What is read may change together with the world; what is computed may not.
        place = task.position if step.effect is Effect.READONLY or step.attempt_parameter is not None else None
        earlier = session.results.setdefault((step.name, task.arguments, result.reads, place), result)
        if not earlier.same_as(result):
            self._differs(task, earlier, result, f"in {session.label}")
        return earlier

    def _differs(self, task: Task, earlier: _Result, later: _Result, when: str) -> None:
        session, step = self._session, task.step
        detail = f"For equal arguments it came to {earlier} at first, and to {later} {when}."
        if step.effect is Effect.PURE:
            session.found(Cause.HIDDEN_STATE, step.name, task.position, detail)
            return
        if session.label != _REPETITION:
            session.found(Cause.NOT_READONLY, step.name, task.position, detail)
        elif not session.is_known(Cause.NOT_READONLY, step.name):
            session.note(
                f"what READONLY step {step.name} reads at position {format_position(task.position)} was not the same "
                "when the run was repeated; its recorded results were used from there on, so changes that the step "
                "itself may make were not looked for"
            )
        if not session.is_reference:
            session.frozen.add(step.name)

    # ------------------------------------------------------------------------------------------------------------ steps

    async def _run(self, task: Task, at: float, cells: Cells | None) -> _Result:
        """Try until it returns or the tries are used up, without waiting in between."""
        number = 0
        while True:
            number += 1
            state = State(cells) if cells is not None else None
            try:
                box = Box(await self._call(task, number, state), f"the result of {task.step.name}")
            except Exception as error:  # noqa: BLE001 - what a step raises is its outcome
                if number >= task.step.retry.attempts or not isinstance(error, task.step.retry.on):
                    reads, _writes = _accesses(state)
                    return _Result(Outcome.raised(error, at=at), reads)
            else:
                reads, writes = _accesses(state)
                return _Result(Outcome(box, at=at), reads, writes)

    async def _call(self, task: Task, number: int, state: State | None) -> Any:
        session, step = self._session, task.step
        args, kwargs = decode(task.arguments, step.arguments_label)
        injected: dict[str, Any] = {}
        function: Callable[..., Any] = step.function
        stub = session.handling.stub(step.name)
        if task.kind is TaskKind.UNDO and step.undo is not None:
            row = task.effect
            result = decode(row.result) if row is not None and row.result is not None else None
            return await _invoke(functools.partial(step.undo, result, *args, **kwargs))
        if stub is not None:
            session.used_stub(step.name)
            function = stub
        else:
            if step.state_parameter is not None:
                injected[step.state_parameter] = state
            if step.attempt_parameter is not None:
                injected[step.attempt_parameter] = Attempt(session.run_id, task.position, task.key, number)
        seconds = step.timeout if step.timeout is not None else session.handling.step_seconds
        try:
            with anyio.fail_after(seconds) as scope:
                return await _invoke(functools.partial(function, *args, **kwargs, **injected))
        except TimeoutError:
            if scope.cancelled_caught:
                raise StepTimeoutError(step.name, seconds) from None
            raise
        finally:
            self._check_arguments(task, args, kwargs)

    def _check_arguments(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        step = task.step
        changed = _changed_arguments(task.arguments, args, kwargs, list(step.signature.parameters))
        if changed:
            detail = f"It changes its argument {changed} in place; its caller does not see that."
            self._session.found(Cause.MUTATED_INPUT, step.name, task.position, detail)


async def _invoke(function: functools.partial[Any]) -> Any:
    if inspect.iscoroutinefunction(function.func):
        return await function()
    result = await anyio.to_thread.run_sync(function)
    return await result if inspect.isawaitable(result) else result


def _accesses(state: State | None) -> tuple[tuple[Access, ...], tuple[Write, ...]]:
    """What was read, and what was written."""
    accesses = state.take_accesses() if state is not None else ()
    writes = tuple(access for access in accesses if isinstance(access, Write))
    return tuple(access for access in accesses if not isinstance(access, Write)), writes


def _recorded(entry: Entry, task: Task) -> _Result:
    """What is on record for a call, the step's own changes of the state included."""
    outcome = Outcome.stored(entry.result, entry.error)
    if task.state is None or not task.worlds:
        return _Result(outcome)
    own = sum(isinstance(access, Write) for access in task.worlds[0].accesses)
    return _Result(outcome, (), (entry.writes or entry.branch_writes)[own:])


def _changed_arguments(before: bytes, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> str:
    """Names of the arguments that are not what they were; empty when all are."""
    if _same([[*args], dict(kwargs)], before):
        return ""
    old_args, old_kwargs = decode(before)
    changed = [
        names[index] if index < len(names) else f"number {index + 1}"
        for index, (old, new) in enumerate(zip(old_args, args, strict=False))
        if not _same(new, encode(old))
    ]
    changed += [name for name, old in old_kwargs.items() if name not in kwargs or not _same(kwargs[name], encode(old))]
    return " and ".join(changed)


def _same(value: Any, data: bytes) -> bool:
    try:
        return encode(value) == data
    except UnsupportedValueError:
        return False


_Difference = tuple[str | None, Position, str]
"""Step, place and description; the step is None for the program as a whole."""


def _first_difference(old: Course, new: Course) -> _Difference | None:
    """The first difference between two runs."""
    for was, now in zip(old.entries, new.entries, strict=False):
        detail = _entry_difference(was, now)
        if detail is not None:
            shown = now if was.position != now.position else was
            return _step(shown), shown.position, detail
    if len(old.entries) != len(new.entries):
        is_shorter = len(new.entries) < len(old.entries)
        entry = (old if is_shorter else new).entries[min(len(old.entries), len(new.entries))]
        error = new.outcome.error if new.outcome is not None else None
        why = f" ({error!r})" if error is not None and is_shorter else ""
        return _step(entry), entry.position, f"It {'never came' if is_shorter else 'went on'} to {_named(entry)}{why}."
    if old.emitted != new.emitted:
        return None, (), "It emitted other events, or in another order."
    return (None, (), "It left another state.") if old.state != new.state else None


def _entry_difference(was: Entry, now: Entry) -> str | None:
    place = _named(was)
    if (was.position, was.kind, was.step) != (now.position, now.kind, now.step):
        return f"It came to {_named(now)} where it had come to {place} before."
    if was.arguments != now.arguments:
        return f"It calls with {_text(now.arguments)}, and had called with {_text(was.arguments)} before."
    if (was.result, was.error) != (now.result, now.error):
        return f"It came to {_ended(now)}, and had come to {_ended(was)} before."
    if (was.writes, was.branch_writes) != (now.writes, now.branch_writes):
        return f"Before {place} it changed the state in another way."
    return f"Before {place} it emitted other events." if was.events != now.events else None


def _named(entry: Entry) -> str:
    return {EntryKind.CALL: f"a call of {entry.step}", EntryKind.END: "its end"}.get(
        entry.kind, f"a {entry.kind.value}"
    )


def _step(entry: Entry) -> str | None:
    return entry.step if entry.kind is EntryKind.CALL else None


def _ended(entry: Entry) -> str:
    return _describe(Outcome.stored(entry.result, entry.error))


def _describe(outcome: Outcome | None) -> str:
    if outcome is None:
        return "nothing"
    if outcome.error is not None:
        return _cut(f"the error {outcome.error!r}")
    return _text(outcome.box.data if outcome.box is not None else b"null")


def _text(data: bytes) -> str:
    return _cut(data.decode("utf-8", "backslashreplace"))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _missing_at(position: Position) -> _Plan:
    def choose(call: Call) -> Sequence[bool]:
        return (False,) if call.position == position else ()

    def seconds(task: Task) -> float:
        return _SLOW if task.position == position and not task.speculative else 1.0

    return _Plan(f"a run with a wrong guess at position {format_position(position)}", Fixed(1), choose, seconds)


def _one_second(task: Task) -> float:
    del task
    return 1.0


def _last_first(task: Task) -> float:
    """Of calls that start together, the last one ends first."""
    return max(1.0, 1000.0 - task.number)


def _all_right(call: Call) -> Sequence[bool]:
    del call
    return (True,)


__all__ = ["Cause", "Finding", "SyncReport", "synctest"]
