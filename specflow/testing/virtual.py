"""Runs in virtual time: the real scheduler and a real store, with no event loop and no waiting.

:func:`simulate` does what the runtime does, on a clock that jumps from one event to the next. An execution takes as
long as it is told to, and its result is what the step function returns when it is called. So a run of hours takes
milliseconds, and the order in which things end is chosen by a seed. Three uses: fuzzing schedules, measuring what
running ahead saves without measuring the machine, and trying policies and predictors on steps whose times are known::

    def seconds(work: Timed) -> float:
        return 2.0 if work.step == "search" else 0.5

    ahead = simulate(agent, "why?", policy=Fixed(2), durations=seconds)
    plain = simulate(agent, "why?", policy=Fixed(0), durations=seconds)
    speedup = plain.seconds / ahead.seconds

The same arguments give the same run, to the last event, if program, predictors and policy start the same. A step keeps
its newest results and its usual duration from run to run in one process, which predictors and policies may look at: for
runs that are to be equal, make the steps anew.
"""

from __future__ import annotations

import hashlib
import heapq
import inspect
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..chain import run_sync
from ..codec import Box, decode, encode
from ..definitions import Attempt, Retry, Step, Workflow
from ..errors import BackendContractError, InvalidSettingError, StepTimeoutError, SuspendedError
from ..graph import Pipeline
from ..history import EffectRecord, Entry, Lease, Position, RunRecord, format_position
from ..outbox import NotSent, Sent
from ..policies import Fixed
from ..protocols import RunAheadPolicy, Store
from ..replay import Outcome
from ..report import RunReport
from ..runtime import CommittedEvent, Event, RetractedEvent, SpeculativeEvent
from ..scheduler import Decision, Recovered, Scheduler, confirmed_at_once
from ..speculation import let_go
from ..state import State
from ..stores import MemoryStore
from ..worlds import Cancel, Finish, Retract, Show, Start, Task, TaskKind, TaskStatus, Wake

EPOCH = 1_700_000_000.0
"""Wall-clock time at which simulated runs begin, in seconds since the epoch: 14 November 2023."""

_UNDO_RETRY = Retry(attempts=3, wait=0.5)
"""As the runtime: an undo is worth more than one try."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One execution whose duration is asked for."""

    kind: TaskKind
    """A step, a predictor, a judge, the delivery of a buffered effect, an undo or a probe."""
    step: str
    position: Position
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    attempt: int
    """1 for the first try, 2 for the first retry ..."""
    number: int
    """How many executions the run had started, this one included. Differs between policies; the rest does not."""
    ahead: bool
    """It starts on a guess."""
    seed: int
    """Of the simulation."""

    def draw(self, purpose: str = "") -> float:
        """A number in [0, 1) that depends on seed, step, position and attempt only: the same under every policy."""
        place = f"{self.seed}\x00{self.step}\x00{format_position(self.position)}\x00{self.attempt}\x00{purpose}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") / 2**64


Durations = float | Callable[[Timed], float]
"""Seconds that an execution takes: one number for all of them, or a function."""


@dataclass(slots=True)
class Span:
    """One execution, for a timeline."""

    number: int
    kind: TaskKind
    step: str
    position: Position
    arguments: bytes
    """Encoded ``[args, kwargs]`` of the call."""
    started: float
    """Seconds since the start of the run."""
    ahead: bool
    """It started on a guess."""
    money: float
    tokens: float
    tries: int = 0
    """How often its function was called."""
    confirmed: float | None = None
    """When it stopped resting on a guess; its start if it never did; None if it was squashed."""
    cancelled: float | None = None
    """When it was told to stop."""
    ended: float | None = None
    """When it really was over; None: not before the run was."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """How a simulated run went."""

    value: Any
    """What the program returned; None when it raised, or did not finish."""
    error: BaseException | None
    """What it raised."""
    finished: bool
    """False when the run was stopped by ``crash_after``."""
    seconds: float
    """Virtual seconds from the start of this process to its end."""
    report: RunReport
    entries: tuple[Entry, ...]
    """The history in the store."""
    committed_at: tuple[float, ...]
    """When each of them was committed, in virtual seconds; 0 for those that were there before."""
    state: Mapping[str, bytes]
    """Encoded value of every key at the end."""
    effects: tuple[EffectRecord, ...]
    """The outbox."""
    events: tuple[Event, ...]
    """Both streams, as a caller of the runtime sees them."""
    spans: tuple[Span, ...]
    """Every execution, in order of start."""
    commits: int
    """Commits written to the store: one commit may carry many entries."""
    decisions: int
    """Decisions the scheduler made."""
    actions: int
    """Actions it asked for."""
    points: int
    """Instants that ``crash_after`` counts."""
    still_running: tuple[Span, ...]
    """Executions that were neither over nor told to stop when the run finished: always empty, or there is a leak."""
    unreleased: int
    """Tasks that the scheduler still counted after all were over: always 0, or it leaks slots."""
    run_id: str
    store: Store

    @property
    def emitted(self) -> tuple[Any, ...]:
        """Values of the committed stream."""
        return tuple(event.value for event in self.events if isinstance(event, CommittedEvent))


def simulate(  # noqa: PLR0913 - settings by keyword
    program: Workflow[..., Any] | Pipeline,
    /,
    *args: Any,
    store: Store | None = None,
    policy: RunAheadPolicy | None = None,
    durations: Durations = 1.0,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
    run_id: str = "simulated",
    stopping: Durations = 0.0,
    calls: Literal["start", "end"] = "start",
    wall: Callable[[float], float] | None = None,
    crash_after: int | None = None,
    recover: bool = False,
    resolve: Mapping[str, Sent | NotSent] | None = None,
    find_step: Callable[[str], Step[..., Any] | None] | None = None,
    watch: Callable[[Scheduler, Decision], None] | None = None,
    scheduler: Callable[..., Scheduler] = Scheduler,
    max_actions: int = 1_000_000,
    **kwargs: Any,
) -> Simulation:
    """Run a workflow or pipeline in virtual time.

    Executions of one instant end in an order drawn from ``seed``, and are reported one by one or together, as a busy
    event loop would. Async steps, predictors and verifiers are run to their end when they are called: they must not
    really wait. A step whose duration is longer than its timeout fails when the timeout is over.

    Args:
        program: what to run.
        args: for the program.
        store: where history is kept; default: a new one in memory.
        policy: how far to run ahead; default: ``Fixed(1)``.
        durations: seconds of each execution, also of predictors (those that are async), judges, deliveries, undos and
            probes. 0 is legal.
        seed: decides the order of what happens at the same time.
        limits: most attempts at a time per resource class.
        run_id: part of idempotency keys, and the seed of the program's random draws.
        stopping: seconds until an execution that is told to stop is over; at most the rest of its duration. For steps
            in threads, which cannot be stopped, that rest: ``math.inf``.
        calls: whether a step function is called when its execution starts, or when it ends. In the second case a
            stopped execution has changed nothing; real ones may stop anywhere between.
        wall: virtual seconds to wall-clock seconds since the epoch; default: :data:`EPOCH` plus the virtual seconds.
        crash_after: stop like a killed process after so many points: every commit, and every call of a step function,
            is one. Nothing is cleaned up.
        recover: go on with a run of that id in the store. The arguments on record are used.
        resolve: what became of effects that a crash left unknown, by idempotency key.
        find_step: the step of that name, for effects of a crashed process that this one never comes to.
        watch: called with the scheduler after each decision was carried out: for checks of what holds at every instant.
        scheduler: makes the scheduler; replace it to test one that is broken.
        max_actions: a run that needs more is taken for an endless loop.
        kwargs: for the program.

    Raises:
        DefinitionError: the program or its arguments cannot work.
        SuspendedError: something really waits.
        BackendContractError: the scheduler stands still, or never ends.
    """
    settings = _Settings(
        durations,
        stopping,
        calls,
        seed,
        wall if wall is not None else lambda seconds: EPOCH + seconds,
        crash_after,
        watch,
        max_actions,
    )
    store = store if store is not None else MemoryStore()
    if recover:
        record, lease, recovered = _recovered(store, run_id, resolve or {})
    else:
        program.bind(args, kwargs)
        data = encode([[*args], dict(kwargs)], f"the arguments of {program.name}")
        record = RunRecord(run_id, program.name, program.fingerprint, data, settings.wall(0.0))
        lease, recovered = store.create(record, _OWNER), Recovered()
    made = scheduler(
        program.body(Box.from_bytes(record.arguments, f"the arguments of {program.name}")),
        name=program.name,
        run_id=run_id,
        policy=policy if policy is not None else Fixed(1),
        limits=limits,
        recovered=recovered,
        at=record.created_at,
        find_step=find_step,
    )
    return _Process(settings, made, store, lease, record.head).run()


def spread(low: float, high: float) -> Callable[[Timed], float]:
    """Durations between two bounds, drawn by seed and place in the program: the same under every policy.

    Args:
        low: shortest, in seconds.
        high: longest, in seconds.

    Raises:
        InvalidSettingError: the bounds are not ``0 <= low <= high``.
    """
    if not 0 <= low <= high:
        raise InvalidSettingError("low, high", (low, high), "0 <= low <= high")
    return lambda work: low + (high - low) * work.draw("seconds")


class _CrashError(Exception):
    """The simulated process is killed here."""


@dataclass(slots=True, eq=False)
class _Running:
    """A task under way."""

    task: Task
    span: Span
    retry: Retry
    cells: Any
    attempt: int = 0
    outcome: Any = None
    until: float = 0.0


@dataclass(order=True, slots=True)
class _Happening:
    at: float
    tie: float
    number: int
    kind: str = field(compare=False)
    about: Any = field(compare=False)


_OWNER = "simulation"
"""Who holds the lease of a simulated run."""


@dataclass(frozen=True, slots=True)
class _Settings:
    durations: Durations
    stopping: Durations
    calls: Literal["start", "end"]
    seed: int
    wall: Callable[[float], float]
    crash_after: int | None
    watch: Callable[[Scheduler, Decision], None] | None
    max_actions: int


def _recovered(store: Store, run_id: str, resolve: Mapping[str, Sent | NotSent]) -> tuple[RunRecord, Lease, Recovered]:
    """A run that goes on after its process was killed."""
    record = origin = store.get_run(run_id)
    while origin.parent is not None:
        origin = store.get_run(origin.parent)
    lease = store.acquire(run_id, _OWNER, take_over=True)
    entries, effects = tuple(store.entries(run_id)), tuple(store.effects(run_id))
    return record, lease, Recovered(entries, effects, dict(resolve), origin.run_id)


class _Process:
    """One simulated process that carries out what the scheduler decides."""

    def __init__(self, settings: _Settings, scheduler: Scheduler, store: Store, lease: Lease, head: int) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.store = store
        self.lease = lease
        self.run_id = lease.run_id
        self.order = random.Random(settings.seed)  # noqa: S311 - reproducible by design, no secret
        self.now = 0.0
        self.queue: list[_Happening] = []
        self.sequence = 0
        self.executions: dict[Task, _Running] = {}
        self.spans: list[Span] = []
        self.events: list[Event] = []
        self.committed_at: list[float] = [0.0] * head
        self.commits = self.decisions = self.actions = self.points = 0
        self.finish: Outcome | None = None

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> Simulation:
        is_killed = False
        still_running: tuple[Span, ...] = ()
        try:
            self._carry_out([self.scheduler.begin(0.0, self._wall())])
            while self.finish is None:
                self._step()
            seconds = self.now
            still_running = tuple(
                self.executions[task].span for task in self.scheduler.running if task.status is TaskStatus.RUNNING
            )
            self._drain()
        except _CrashError:
            is_killed, seconds = True, self.now
        finally:
            self.scheduler.close()
            if not is_killed:
                self.store.release(self.lease)
        return self._account(finished=not is_killed, seconds=seconds, still_running=still_running)

    def _wall(self) -> float:
        return self.settings.wall(self.now)

    def _step(self) -> None:
        """Let the next things happen: some of those that are due first, reported together."""
        if not self.queue:
            raise BackendContractError(
                "the scheduler", "waits for nothing", "until the run is finished something has to be under way"
            )
        due = [heapq.heappop(self.queue)]
        while self.queue and self.queue[0].at <= due[0].at and self.order.random() < 0.5:
            due.append(heapq.heappop(self.queue))
        self.now = max(self.now, due[0].at)
        wall = self._wall()
        # As in the runtime: what happened is noted first, then reported, then the decisions are carried out.
        reports = [report for happening in due if (report := self._happened(happening)) is not None]
        decisions = []
        for kind, about, result in reports:
            if kind == "over":
                decisions.append(self.scheduler.over(about, self.now, wall))
            elif kind == "woke":
                decisions.append(self.scheduler.woke(about, self.now, wall))
            else:
                decisions.append(self.scheduler.done(about, result, self.now, wall))
        self._carry_out(decisions)

    def _happened(self, happening: _Happening) -> tuple[str, Any, Any] | None:
        if happening.kind == "woke":
            return "woke", happening.about, None
        execution: _Running = happening.about
        is_known = execution.task in self.executions
        if is_known and happening.kind == "over":
            self._ended(execution)
            return "over", execution.task, None
        if not is_known or execution.span.cancelled is not None:
            return None  # told to stop meanwhile; it is over when it says so
        if happening.kind == "end":
            return self._tried(execution)
        self._try(execution)
        return None

    def _tried(self, execution: _Running) -> tuple[str, Any, Any] | None:
        """A try has ended: report it, or try again."""
        if execution.outcome is None:
            execution.outcome = self._call(execution)
        outcome, retry = execution.outcome, execution.retry
        if isinstance(outcome, Outcome):
            if outcome.error is not None and execution.attempt < retry.attempts and isinstance(outcome.error, retry.on):
                self._push(self.now + retry.seconds_before(execution.attempt + 1), "retry", execution)
                return None
            outcome.at = self._wall()
            outcome.seconds = self.now - execution.span.started
        self._ended(execution)
        return "done", execution.task, outcome

    def _ended(self, execution: _Running) -> None:
        execution.span.ended = self.now
        del self.executions[execution.task]

    def _drain(self) -> None:
        """The run is finished; what was told to stop comes to its end."""
        for task, execution in list(self.executions.items()):
            if execution.span.cancelled is not None:
                self._ended(execution)
                self._carry_out([self.scheduler.over(task, self.now, self._wall())])

    def _push(self, at: float, kind: str, about: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, _Happening(at, self.order.random(), self.sequence, kind, about))

    def _point(self) -> None:
        """A place where the process may be killed."""
        self.points += 1
        if self.settings.crash_after is not None and self.points >= self.settings.crash_after:
            raise _CrashError

    # ------------------------------------------------------------------------------------------------------ decisions

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        at_once = confirmed_at_once(decisions)
        for decision in decisions:
            self.decisions += 1
            if decision.commit is not None:
                self.store.commit(self.lease, decision.commit)
                self.committed_at += [self.now] * len(decision.commit.entries)
                self.commits += 1
                self._point()
            for data, number in itertools.zip_longest(decision.emitted, decision.numbers):
                confirmed = None if number in at_once else number
                self.events.append(CommittedEvent(decode(data, "an emitted value"), confirmed))
        for decision in decisions:
            for action in decision.actions:
                if not isinstance(action, Show) or action.number not in at_once:
                    self._act(action)
            if self.settings.watch is not None:
                self.settings.watch(self.scheduler, decision)
        for execution in self.executions.values():
            if execution.span.confirmed is None and not execution.task.speculative:
                execution.span.confirmed = self.now

    def _act(self, action: Any) -> None:
        self.actions += 1
        if self.actions > self.settings.max_actions:
            raise BackendContractError("the scheduler", f"asked for {self.actions} actions", "a run has to end")
        if isinstance(action, Start):
            self._start(action.task)
        elif isinstance(action, Cancel):
            self._stop(action.task)
        elif isinstance(action, Wake):
            self._push(max(self.now, action.at), "woke", action.token)
        elif isinstance(action, Show):
            value = decode(action.data, "an emitted value")
            self.events.append(SpeculativeEvent(action.number, action.position, value, action.confidence))
        elif isinstance(action, Retract):
            self.events.append(RetractedEvent(action.number))
        elif isinstance(action, Finish):
            self.finish = action.outcome

    def _start(self, task: Task) -> None:
        span = Span(
            len(self.spans) + 1,
            task.kind,
            task.step.name,
            task.position,
            task.arguments,
            self.now,
            task.speculative,
            task.money,
            task.tokens,
        )
        self.spans.append(span)
        retry = task.step.retry if task.kind not in (TaskKind.PREDICT, TaskKind.JUDGE) else Retry()
        if task.kind is TaskKind.UNDO and retry.attempts == 1:
            retry = _UNDO_RETRY
        execution = _Running(task, span, retry, task.state.cells if task.state is not None else None)
        self.executions[task] = execution
        if task.status is TaskStatus.RUNNING:
            self._try(execution)
        else:
            let_go(task.guesses)
            self._stop(task)  # told to stop before it began

    def _try(self, execution: _Running) -> None:
        task = execution.task
        execution.attempt += 1
        execution.outcome = None
        if execution.cells is not None and task.kind is not TaskKind.JUDGE:
            task.state = State(execution.cells)  # a failed try leaves nothing behind
        seconds = self._seconds(self.settings.durations, execution)
        timeout = task.step.timeout if task.kind not in (TaskKind.PREDICT, TaskKind.JUDGE) else None
        if timeout is not None and seconds > timeout:
            seconds = timeout
            execution.outcome = Outcome.raised(StepTimeoutError(task.step.name, timeout))
        elif self.settings.calls == "start":
            execution.outcome = self._call(execution)
        execution.until = self.now + seconds
        self._push(execution.until, "end", execution)

    def _stop(self, task: Task) -> None:
        execution = self.executions.get(task)
        if execution is None or execution.span.cancelled is not None:
            return  # its end is on its way to the scheduler
        execution.span.cancelled = self.now
        left = max(0.0, execution.until - self.now)
        self._push(self.now + min(left, self._seconds(self.settings.stopping, execution)), "over", execution)

    def _seconds(self, durations: Durations, execution: _Running) -> float:
        if not callable(durations):
            return durations
        task = execution.task
        args, kwargs = decode(task.arguments)
        work = Timed(
            task.kind,
            task.step.name,
            task.position,
            tuple(args),
            kwargs,
            execution.attempt,
            execution.span.number,
            execution.span.ahead,
            self.settings.seed,
        )
        seconds = durations(work)
        if not seconds >= 0:
            raise InvalidSettingError("durations", seconds, "seconds >= 0")
        return seconds

    # ---------------------------------------------------------------------------------------------------------- calls

    def _call(self, execution: _Running) -> Any:
        task = execution.task
        execution.span.tries += 1
        try:
            if task.kind is TaskKind.PREDICT:
                guesses: Any = task.guesses
                if guesses is None:
                    guesses = task.step.predictor.predict(task.call)  # type: ignore[union-attr,arg-type]
                return list(_plain(guesses))
            if task.kind is TaskKind.JUDGE:
                predicted, actual = task.judged.fresh() if task.judged is not None else (None, None)
                return _plain(task.step.verifier.verify(predicted, actual))
            value = _plain(self._function(execution))
            box = Box(value, f"the result of {task.step.name}")
        except (SuspendedError, _CrashError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a step raises is its outcome
            if task.kind in (TaskKind.PREDICT, TaskKind.JUDGE):
                return error
            self._point()
            return Outcome.raised(error)
        self._point()
        return Outcome(box)

    def _function(self, execution: _Running) -> Any:
        task = execution.task
        step = task.step
        args, kwargs = (task.args, {}) if task.args is not None else decode(task.arguments)
        if task.kind is TaskKind.UNDO and step.undo is not None:
            row = task.effect
            result = decode(row.result) if row is not None and row.result is not None else None
            return step.undo(result, *args, **kwargs)
        if task.kind is TaskKind.PROBE and step.probe is not None:
            return step.probe(task.key, *args, **kwargs)
        if step.state_parameter is not None:
            kwargs[step.state_parameter] = task.state
        if step.attempt_parameter is not None:
            kwargs[step.attempt_parameter] = Attempt(self.run_id, task.position, task.key, execution.attempt)
        return step.function(*args, **kwargs)

    # -------------------------------------------------------------------------------------------------------- account

    def _account(self, *, finished: bool, seconds: float, still_running: tuple[Span, ...]) -> Simulation:
        outcome = self.finish if finished else None
        effects = tuple(self.store.effects(self.run_id))
        return Simulation(
            outcome.box.fresh() if outcome is not None and outcome.box is not None else None,
            outcome.error if outcome is not None else None,
            finished,
            seconds,
            self.scheduler.ledger.report(seconds, effects),
            tuple(self.store.entries(self.run_id)),
            tuple(self.committed_at),
            self.store.state(self.run_id),
            effects,
            tuple(self.events),
            tuple(self.spans),
            self.commits,
            self.decisions,
            self.actions,
            self.points,
            still_running,
            len(self.scheduler.running) if finished else 0,
            self.run_id,
            self.store,
        )


def _plain(value: Any) -> Any:
    """What a function returned; a coroutine is run, and must not wait."""

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return run_sync(wait(value)) if inspect.isawaitable(value) else value


__all__ = ["EPOCH", "Durations", "Simulation", "Span", "Timed", "simulate", "spread"]
