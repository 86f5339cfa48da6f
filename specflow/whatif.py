"""What would another policy or predictor have made of a recorded run? Answered in virtual time; nothing is run.

**The model.** The program is rebuilt under the real scheduler and its code runs anew, but no step does:

* A call of the real course of events, or of a world whose guesses all equal what is on record, returns (or raises)
  what the call of that step at that place did, and takes the seconds that it took then. What such a step wrote into the
  state is written again.
* A call of a world that rests on a wrong guess is on record when the run has a call of the same step with equal
  arguments at the same place or, for PURE steps that read neither the state nor their attempt, at any
  place. It takes the recorded seconds
  and returns the recorded result.
* Any other call of such a world takes the median of the recorded seconds of its step (of all calls, for a step that was
  never called) and comes to nothing: it costs time and money, and its world goes no further.
* Guesses, decisions, commits, deliveries of buffered effects and undos take no time. A cancelled attempt ends at once.
  What a step had read of the state is not on record: no step is run again because a key has changed under it. Steps
  remember nothing of earlier runs.
* Guesses hold when they equal the recorded result, whatever verifier the step has. Async predictors are not asked: what
  they would have said is not on record. The limits per resource class are those that are given.

So seconds and hits of a program that does nothing but call steps are exact for these durations; the waste of worlds
that rest on wrong guesses is an estimate. A program that reads ``ctx.now()`` may ask for other things at other times:
then its recorded results still stand for the calls at their places, and :class:`~specflow.errors.DivergenceError` says
where that cannot be.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .chain import run_sync
from .codec import Box
from .definitions import Step, Workflow
from .effects import Effect
from .errors import DivergenceError, ExecutionError, InvalidSettingError
from .graph import Pipeline
from .history import Entry, EntryKind, Position, RunRecord, RunStatus, format_position
from .policies import Fixed
from .predictors.memory import key_of
from .protocols import Predictor, RunAheadPolicy
from .recorded import Recording, names_of, plain, plain_arguments, redo
from .replay import Outcome
from .report import RunReport
from .rewiring import altered, rewire
from .scheduler import Recovered, Scheduler, check_limits
from .simulation import Course, drive
from .speculation import Call, let_go
from .state import writes_of
from .verifiers import Equal
from .worlds import Task, TaskKind

ValueT = TypeVar("ValueT")

_NOTHING = Box(None)
_REMEMBERED = 64
"""Results that a predictor is shown."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A recorded run under another policy or other predictors. Seconds are virtual."""

    seconds: float
    """What the run would have taken."""
    plain_seconds: float
    """What it would have taken without any guess, by the same model."""
    recorded_seconds: float | None
    """From the run's creation to its end by the clock, crashes and pauses included; None when it has not ended."""
    is_complete: bool
    """False for a run that has not ended: it is followed to the end of its record."""
    not_on_record: int
    """Attempts on wrong guesses whose cost is an estimate, and which came to nothing."""
    report: RunReport
    """As of a real run: guesses, hits, seconds and money wasted."""

    @property
    def saved_seconds(self) -> float:
        """Less than the plain run; negative when it would have taken longer."""
        return self.plain_seconds - self.seconds

    @property
    def speedup(self) -> float:
        """How many times as fast as the plain run; 1 when neither takes any time."""
        return self.plain_seconds / self.seconds if self.seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class HitRate:
    """How a predictor does on recorded results. Its first guesses count."""

    calls: int
    """Calls with a result to guess."""
    guesses: int
    """Calls it had a guess for."""
    hits: int
    """Guesses equal to the result."""

    @property
    def rate(self) -> float | None:
        """Hits per guess; None without one."""
        return self.hits / self.guesses if self.guesses else None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step over recorded runs."""

    step: str
    calls: int
    failed: int
    """Calls that raised."""
    seconds: float
    """Of all calls together."""
    median_seconds: float
    hit_rates: Mapping[str, HitRate]
    """By name of the predictor."""


def what_if(
    program: Workflow[..., Any] | Pipeline,
    record: RunRecord,
    entries: Sequence[Entry],
    *,
    policy: RunAheadPolicy,
    predictors: Mapping[str, Predictor | None] | None = None,
    money: Mapping[str, float] | None = None,
    limits: Mapping[str, int] | None = None,
    seed: str | None = None,
) -> WhatIf:
    """Follow a recorded run under another policy or other predictors. See the module for the model.

    Args:
        program: what the run ran.
        record: the run.
        entries: all its committed entries.
        policy: how far to run ahead. It learns: hand in a new one.
        predictors: by step, which is named in full, without its module, or by ``"*"`` for all that are not named.
            Others keep their own; buffered steps have none. Predictors learn, those that were declared too.
        money: price of a call, by step in the same way; default: as declared.
        limits: most attempts at a time per resource class.
        seed: what random draws of the run depend on: for a fork, the id of the run that it comes from in the end.

    Raises:
        DivergenceError: the program does not make the calls that are on record.
        InvalidSettingError: a table names a step that the run did not call, or a limit lets nothing run.
    """
    recording = Recording(entries)
    predictors, money = predictors or {}, money or {}
    check_limits(limits or {})
    _check_names("predictors", predictors, recording)
    _check_names("money", money, recording)

    def exchange(step: Step[..., Any]) -> Step[..., Any]:
        return _quiet(step, named(predictors, step.name, step.predictor), named(money, step.name, step.money))

    def without(step: Step[..., Any]) -> Step[..., Any]:
        return _quiet(step, None, step.money)

    replayed = _Replayed(program, record, entries, recording, limits, seed)
    ahead, not_on_record = replayed.follow(policy, exchange)
    plain_run, _none = replayed.follow(Fixed(0), without)
    return WhatIf(
        ahead.seconds,
        plain_run.seconds,
        entries[-1].at - record.created_at if replayed.is_complete else None,
        replayed.is_complete,
        not_on_record,
        ahead.report,
    )


def train(
    program: Workflow[..., Any] | Pipeline,
    record: RunRecord,
    entries: Sequence[Entry],
    predictors: Mapping[str, Predictor | None],
    *,
    seed: str | None = None,
) -> None:
    """Let predictors learn from a recorded run, as if it were run once more without running ahead.

    Args:
        program: what the run ran.
        record: the run.
        entries: all its committed entries.
        predictors: as of :func:`what_if`; names that the run did not call are ignored.
        seed: as of :func:`what_if`.

    Raises:
        DivergenceError: the program does not make the calls that are on record.
    """

    def exchange(step: Step[..., Any]) -> Step[..., Any]:
        return _quiet(step, named(predictors, step.name, step.predictor), step.money)

    _Replayed(program, record, entries, Recording(entries), None, seed).follow(Fixed(0), exchange)


def step_figures(
    runs: Iterable[Sequence[Entry]], predictors: Mapping[str, Callable[[], Predictor]]
) -> tuple[StepFigures, ...]:
    """What recorded runs say about each step, and how well predictors would have guessed its results.

    The predictors learn from each call before the next one is guessed, one run after the other; a run may learn a call
    later, when the result is committed. Values are taken as stored: no class of the program is imported.

    Args:
        runs: committed entries of each run, in the order in which the runs are learned from.
        predictors: makes a new predictor, by the name it is reported under. Async ones are not asked.

    Returns:
        In the order of the steps' names.
    """
    made = {name: make() for name, make in predictors.items()}
    calls: dict[str, list[Entry]] = defaultdict(list)
    tallies: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    results: dict[str, int] = defaultdict(int)
    for entries in runs:
        seen = _Seen(entries)
        for entry in seen.calls:
            calls[entry.step].append(entry)
            if entry.result is None:
                continue
            results[entry.step] += 1
            value = plain(entry.result)
            call = seen.call(entry, value)
            for name, predictor in made.items():
                guesses = _ask(predictor, call)
                tally = tallies[entry.step, name]
                tally[0] += bool(guesses)
                tally[1] += bool(guesses) and key_of(guesses[0].value) == key_of(value)
                observe = getattr(predictor, "observe", None)
                if observe is not None:
                    observe(call, value)
    return tuple(
        StepFigures(
            step,
            len(own),
            sum(entry.error is not None for entry in own),
            sum(entry.seconds for entry in own),
            statistics.median(entry.seconds for entry in own),
            {name: HitRate(results[step], *tallies[step, name]) for name in made},
        )
        for step, own in sorted(calls.items())
    )


def named(table: Mapping[str, ValueT], step: str, default: ValueT) -> ValueT:
    """What a table says about a step that it names in full, by the end of its name, or by ``"*"``."""
    for name in (*names_of(step), "*"):
        if name in table:
            return table[name]
    return default


class _NotOnRecordError(ExecutionError):
    """Ends an attempt that came to nothing. No program sees it: its world goes no further."""


def _quiet(step: Step[..., Any], predictor: Predictor | None, money: float) -> Step[..., Any]:
    """The step as the model has it."""
    if predictor is not None and (inspect.iscoroutinefunction(predictor.predict) or step.effect is Effect.BUFFERED):
        predictor = None
    return altered(step, predict=predictor, verify=Equal(), money=money)


def _check_names(setting: str, table: Mapping[str, Any], recording: Recording) -> None:
    known = sorted({entry.step for entry in recording.calls})
    for name in table:
        if name != "*" and not any(name in names_of(step) for step in known):
            raise InvalidSettingError(setting, name, f"a step that the run called: {', '.join(known) or 'none'}")


def _ask(predictor: Predictor, call: Call) -> Sequence[Any]:
    if inspect.iscoroutinefunction(predictor.predict):
        return ()
    guesses = predictor.predict(call)
    if inspect.isawaitable(guesses):
        let_go(guesses)
        return ()
    return guesses


class _Replayed:
    """A recorded run that can be followed again."""

    def __init__(
        self,
        program: Workflow[..., Any] | Pipeline,
        record: RunRecord,
        entries: Sequence[Entry],
        recording: Recording,
        limits: Mapping[str, int] | None,
        seed: str | None,
    ) -> None:
        self._program = program
        self._record = record
        self._entries = entries
        self._recording = recording
        self._limits = limits
        self._seed = seed or record.run_id
        self.is_complete = bool(entries) and entries[-1].kind is EntryKind.END

    def follow(
        self, policy: RunAheadPolicy, exchange: Callable[[Step[..., Any]], Step[..., Any]]
    ) -> tuple[Course, int]:
        """The simulation, and how many attempts were not on record.

        Raises:
            DivergenceError: the program does not make the calls that are on record.
        """
        exchanged: dict[int, tuple[Step[..., Any], Step[..., Any]]] = {}

        def once(step: Step[..., Any]) -> Step[..., Any]:
            if id(step) not in exchanged:
                exchanged[id(step)] = (step, exchange(step))  # keeps the step, so that its id stays its own
            return exchanged[id(step)][1]

        arguments = Box.from_bytes(self._record.arguments, f"the arguments of run {self._record.run_id}")
        scheduler = Scheduler(
            rewire(self._program.body(arguments), once, halt=_NotOnRecordError),
            name=self._program.name,
            run_id=self._record.run_id,
            policy=policy,
            limits=self._limits,
            recovered=Recovered(seed=self._seed),
            at=self._record.created_at,
        )
        work = _RecordedWork(self._recording, is_complete=self.is_complete)
        simulation = run_sync(drive(scheduler, work, at=self._record.created_at))
        self._check(simulation)
        return simulation, work.not_on_record

    def _check(self, simulation: Course) -> None:
        ended = simulation.status in (RunStatus.COMPLETED, RunStatus.FAILED)
        if simulation.outcome is not None and not ended and simulation.outcome.error is not None:
            raise simulation.outcome.error  # the engine's, not the program's
        kept, made = self._entries, simulation.entries
        for was, now in zip(kept, made, strict=False):
            if (was.position, was.kind, was.step) != (now.position, now.kind, now.step):
                raise _diverged(was.position, _told(was), _told(now))
        if self.is_complete and len(made) < len(kept):
            raise _diverged(kept[len(made)].position, _told(kept[len(made)]), "nothing")


class _RecordedWork:
    """Attempts that return what is on record."""

    def __init__(self, recording: Recording, *, is_complete: bool) -> None:
        self._recording = recording
        self._is_complete = is_complete
        self.not_on_record = 0

    def seconds(self, task: Task) -> float:
        """As recorded; the median for what is not on record, for ever beyond the end of the record."""
        if task.kind is not TaskKind.STEP:
            return 0.0
        entry = self._find(task)
        if entry is not None:
            return entry.seconds
        return self._recording.median_seconds(task.step.name) if task.speculative else math.inf

    async def perform(self, task: Task, at: float) -> Any:
        """As recorded; what is not on record comes to nothing."""
        if task.kind is TaskKind.PREDICT:
            let_go(task.guesses)  # it turns out to wait, and is not asked
            return ()
        if task.kind is not TaskKind.STEP:
            return Outcome(_NOTHING, at=at)
        entry = self._find(task)
        if entry is None:
            self.not_on_record += 1
            return Outcome.raised(_NotOnRecordError(task.step.name), at=at)
        if task.state is not None and task.worlds:
            own = len(writes_of(task.worlds[0].accesses))  # what the program itself had changed before the call
            redo(task.state, (entry.writes or entry.branch_writes)[own:])
        return Outcome.stored(entry.result, entry.error, at=at, seconds=entry.seconds)

    def _find(self, task: Task) -> Entry | None:
        step = task.step
        entry = self._recording.at(task.position)
        is_true = any(self._recording.is_true(world) for world in task.worlds)
        if is_true and entry is not None and entry.step == step.name:
            return entry
        if is_true and not task.speculative:
            if entry is not None:
                raise _diverged(task.position, _told(entry), f"a call of {step.name}")
            if self._is_complete:
                raise _diverged(task.position, "no call", f"a call of {step.name}")
            return None  # the record ends before it
        if entry is not None and (entry.step, entry.arguments) == (step.name, task.arguments):
            return entry
        if step.is_reusable:
            return self._recording.equal_call(step.name, task.arguments)
        return None


def _diverged(position: Position, recorded: str, made: str) -> DivergenceError:
    return DivergenceError(format_position(position) or "the end", recorded, made)


def _told(entry: Entry) -> str:
    if entry.kind is EntryKind.CALL:
        return f"a call of {entry.step}"
    return "its end" if entry.kind is EntryKind.END else f"a {entry.kind.value} at {format_position(entry.position)}"


class _Seen:
    """What a predictor would have been shown before each call of a run."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.calls = [entry for entry in entries if entry.kind is EntryKind.CALL]
        self._joins = [entry.position for entry in entries if entry.kind is EntryKind.JOIN]
        self._strands: dict[Position, tuple[Position, ...]] = {}
        self._results: dict[tuple[Position, ...], list[tuple[str, Any]]] = defaultdict(list)
        self._own: dict[tuple[tuple[Position, ...], str], list[Any]] = defaultdict(list)

    def call(self, entry: Entry, value: Any) -> Call:
        """The call, with what came before it; then its result comes before the calls that follow."""
        strand = self._strand(entry.position)
        trail: list[tuple[str, Any]] = []
        recent: list[Any] = []
        for depth in range(len(strand) + 1):  # a branch sees its own results and those before it, no other branch's
            trail += self._results[strand[:depth]][-_REMEMBERED:]
            recent += self._own[strand[:depth], entry.step][-_REMEMBERED:]
        self._results[strand].append((entry.step, value))
        self._own[strand, entry.step].append(value)
        args, kwargs = plain_arguments(entry.arguments)
        return Call(
            entry.step, tuple(args), kwargs, entry.position, tuple(recent[-_REMEMBERED:]), tuple(trail[-_REMEMBERED:])
        )

    def _strand(self, position: Position) -> tuple[Position, ...]:
        """The branches that a place is in, the outermost first."""
        inside = position[:-1]  # places that differ in the last index only follow each other
        if inside not in self._strands:
            self._strands[inside] = tuple(
                sorted(position[: len(join) + 1] for join in self._joins if _contains(join, position))
            )
        return self._strands[inside]


def _contains(join: Position, position: Position) -> bool:
    return len(position) > len(join) and position[: len(join)] == join


__all__ = ["HitRate", "StepFigures", "WhatIf", "named", "step_figures", "train", "what_if"]
