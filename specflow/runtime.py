"""The event-loop room: carries out the scheduler's decisions, under asyncio or trio (anyio).

It starts steps, calls the store and the clock, and reports back. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_process
import anyio.to_thread

from .codec import Box, decode, decode_error, encode
from .contexts import Confined, relay
from .definitions import RESERVED, Attempt, Retry, Step, Workflow, load
from .effects import idempotency_key
from .errors import (
    BackendContractError,
    DefinitionError,
    InvalidSettingError,
    MisuseError,
    ProgramChangedError,
    SpecflowError,
    StepTimeoutError,
    StoreError,
)
from .graph import Pipeline
from .history import Commit, EffectRecord, EffectStatus, EntryKind, Lease, Position, RunRecord, RunStatus
from .outbox import NotSent, Sent
from .policies import Fixed
from .policies.reach import check_policy
from .protocols import RunAheadPolicy, Store
from .replay import Outcome
from .report import Ledger, RunReport
from .scheduler import Decision, Recovered, Scheduler, check_limits, confirmed_at_once
from .speculation import let_go
from .state import State, is_text
from .stores import MemoryStore, this_owner
from .types import Mode
from .worlds import Action, Cancel, Finish, Retract, Show, Start, Task, TaskKind, TaskStatus, Wake

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

_THREADS_AHEAD = 40
"""Most threads that attempts on guesses take at a time."""
_LONGEST_TURN = 0.01
"""Seconds that steps which never wait may keep the event loop for."""
_SENT = (
    EffectStatus.SENT,
    EffectStatus.ACKED,
    EffectStatus.FAILED,
    EffectStatus.UNKNOWN,
    EffectStatus.COMPENSATION_FAILED,
)
"""Effects that may be in the outside world now."""
_UNDO_RETRY = Retry(attempts=3, wait=0.5)
"""For steps that declare no retry of their own: an undo is worth more than one try."""


@dataclass(frozen=True, slots=True)
class CommittedEvent:
    """Something the program emitted, now part of its history."""

    value: Any
    number: int | None = None
    """That of the :class:`SpeculativeEvent` which it confirms; None where it was not shown before."""


@dataclass(frozen=True, slots=True)
class SpeculativeEvent:
    """Something the program may emit: it rests on guesses. Never part of the committed stream."""

    number: int
    """Names it in the :class:`RetractedEvent` or the :class:`CommittedEvent` that follows, in this process."""
    position: Position
    value: Any
    confidence: float
    """Product of the confidences of the guesses it rests on."""


@dataclass(frozen=True, slots=True)
class RetractedEvent:
    """A speculative event that turned out not to happen."""

    number: int


Event = CommittedEvent | SpeculativeEvent | RetractedEvent


@dataclass(frozen=True, slots=True)
class RunResult(Generic[ResultT]):
    """What :func:`run` returns."""

    value: ResultT
    run_id: str
    report: RunReport
    mode: Mode
    """How the result relates to a run without any prediction: EXACT unless a verifier accepted less."""


@overload
async def run(
    program: Workflow[ParametersT, ResultT],
    /,
    *args: Any,
    store: Store | None = ...,
    policy: RunAheadPolicy | None = ...,
    run_id: str | None = ...,
    limits: Mapping[str, int] | None = ...,
    on_event: Callable[[Event], None] | None = ...,
    **kwargs: Any,
) -> RunResult[ResultT]: ...
@overload
async def run(
    program: Pipeline,
    /,
    *args: Any,
    store: Store | None = ...,
    policy: RunAheadPolicy | None = ...,
    run_id: str | None = ...,
    limits: Mapping[str, int] | None = ...,
    on_event: Callable[[Event], None] | None = ...,
    **kwargs: Any,
) -> RunResult[Any]: ...
async def run(
    program: Any,
    /,
    *args: Any,
    store: Store | None = None,
    policy: RunAheadPolicy | None = None,
    run_id: str | None = None,
    limits: Mapping[str, int] | None = None,
    on_event: Callable[[Event], None] | None = None,
    **kwargs: Any,
) -> RunResult[Any]:
    """Run a workflow or a pipeline to its end, ahead of itself where predictors and the policy allow it.

    Args:
        program: a ``@workflow`` or a :class:`~specflow.graph.Pipeline`.
        args: for the program. Encodable values (:mod:`specflow.codec`).
        store: where history is kept; default: in memory.
        policy: how far to run ahead; default: ``Fixed(1)``, one guess deep.
        run_id: names the run in the store; default: a new UUID.
        limits: most attempts at a time per resource class, real work first.
        on_event: called with every event of the committed and of the speculative stream. What it raises ends the run as
            an error of the engine would; it is told nothing more, and the events it missed are not repeated.
        kwargs: for the program.

    Raises:
        DefinitionError: the program or its arguments cannot work; nothing was started.
        RunExistsError: the store has a run of that name.
        ExecutionError: the runtime or the store failed; what was committed can be resumed.
        Exception: whatever the program raised, after its compensable effects were undone.
    """
    _check(program, args, kwargs)
    _check_settings(store, policy, limits, on_event)
    if run_id is not None and not (isinstance(run_id, str) and is_text(run_id)):
        raise InvalidSettingError("run_id", run_id, "a text, or None for a random one")
    store = store if store is not None else MemoryStore()
    data = encode([[*args], kwargs], f"the arguments of {program.name}")
    record = RunRecord(run_id or uuid.uuid4().hex, program.name, program.fingerprint, data, time.time())
    lease = store.create(record, this_owner())
    return await _Run(program, record, store, lease, Recovered(), policy, limits, on_event).execute()


async def resume(  # noqa: PLR0913 - settings are typed by name
    run_id: str,
    *,
    store: Store,
    program: Workflow[..., Any] | Pipeline | None = None,
    policy: RunAheadPolicy | None = None,
    limits: Mapping[str, int] | None = None,
    on_event: Callable[[Event], None] | None = None,
    resolve: Mapping[str, Sent | NotSent] | None = None,
    take_over: bool = False,
    allow_changed: bool = False,
) -> RunResult[Any]:
    """Go on with a run after a crash, a cancellation or a block. A finished run gives its recorded result.

    Args:
        run_id: which run.
        store: where it is kept.
        program: what it runs; default: loaded by the name on record.
        policy: as in :func:`run`.
        limits: as in :func:`run`.
        on_event: as in :func:`run`; events that were committed before are not repeated.
        resolve: what became of effects that a crash left unknown, by idempotency key.
        take_over: go on although another owner still seems alive; its next write is refused.
        allow_changed: go on although the program's code has changed. Divergence from history is still an error.

    Raises:
        InvalidSettingError: a setting or an answer cannot work.
        UnknownRunError: the store has no such run.
        RunBusyError: another live process owns it.
        ProgramChangedError: the program's code is not the one that the run began with.
        EffectUnknownError: whether an effect reached the outside world has to be found out first.
        DivergenceError: the program made another request than its history says.
        Exception: whatever the program raised.
    """
    _check_settings(store, policy, limits, on_event)
    record = store.get_run(run_id)
    if record.status in (RunStatus.COMPLETED, RunStatus.FAILED):
        _check_resolve(resolve or {}, store.effects(run_id))
        return _recorded_result(record, store)
    program = program if program is not None else load(record.program, (Workflow, Pipeline))
    if not isinstance(program, Workflow | Pipeline):
        raise DefinitionError(f"{record.program} is not a @workflow or a Pipeline, but {program!r}")
    if program.fingerprint != record.fingerprint and not allow_changed:
        raise ProgramChangedError(run_id, record.program)
    lease = store.acquire(run_id, this_owner(), take_over=take_over)
    try:
        _check_resolve(resolve or {}, store.effects(run_id))
        recovered = Recovered(
            tuple(store.entries(run_id)),
            tuple(store.effects(run_id)),
            dict(resolve or {}),
            _seed(record, store),
            store.get_run(run_id).status is RunStatus.BLOCKED,
        )
    except BaseException:
        store.release(lease)
        raise
    return await _Run(program, record, store, lease, recovered, policy, limits, on_event).execute()


def fork(
    run_id: str,
    version: int,
    *,
    store: Store,
    new_run_id: str | None = None,
    effects: Literal["replay", "resend"] | None = None,
) -> str:
    """A new run that shares another one's history up to a version; :func:`resume` goes on with it.

    Args:
        run_id: which run.
        version: number of entries to keep.
        store: where both are kept.
        new_run_id: names the fork; default: a new UUID.
        effects: what to do about effects that the run, or one that it was forked from, has sent to the outside world
            after that version: ``"replay"`` their recorded results and errors where the fork makes the same call at
            the same place, or ``"resend"`` them under keys of the new run. A step that raised counts: it may have done
            its work all the same.

    Returns:
        The fork's id.

    Raises:
        MisuseError: there are such effects and ``effects`` does not say what to do.
        UnknownRunError: no such run.
        VersionGoneError: no such version.
    """
    kept = {
        idempotency_key(run_id, entry.position, entry.step, entry.arguments)
        for entry in store.entries(run_id, 0, version)
        if entry.kind is EntryKind.CALL
    }
    record = store.get_run(run_id)
    sent = [
        row
        for row in store.effects(run_id)
        if row.key not in kept and row.status in _SENT and _was_begun(store, record, row)
    ]
    if sent and effects is None:
        names = ", ".join(sorted({row.step for row in sent}))
        raise MisuseError(
            f"after version {version} run {run_id} has sent {len(sent)} effect(s) to the outside world ({names}); "
            'say effects="replay" to use their recorded results, or effects="resend" to send them again'
        )
    unanswered = [row for row in sent if row.status in (EffectStatus.SENT, EffectStatus.UNKNOWN)]
    if unanswered and effects == "replay":
        names = ", ".join(sorted({row.step for row in unanswered}))
        raise MisuseError(
            f"run {run_id} does not know whether {names} reached the outside world, so a fork cannot replay it; resume "
            "the run first, or resolve the effect"
        )
    new_run_id = new_run_id or uuid.uuid4().hex
    rows = [
        dataclasses.replace(
            row,
            key=idempotency_key(new_run_id, row.position, row.step, row.arguments),
            status=EffectStatus.FAILED if row.status is EffectStatus.FAILED else EffectStatus.ACKED,
            error=row.error if row.status is EffectStatus.FAILED else None,  # an undo that failed is its run's affair
            tries=0,  # the fork itself has not started them
        )
        for row in sent
    ]
    store.release(store.fork(run_id, version, new_run_id, this_owner(), tuple(rows) if effects == "replay" else ()))
    return new_run_id


def _was_begun(store: Store, record: RunRecord, row: EffectRecord) -> bool:
    """Whether a run, or the one that it took the row over from when it was forked, has made this effect.

    Other rows keep results of steps that have none, and may be read or computed again.
    """
    while row.tries == 0:
        if record.parent is None:
            return False
        record = store.get_run(record.parent)
        key = idempotency_key(record.run_id, row.position, row.step, row.arguments)
        taken = next((other for other in store.effects(record.run_id) if other.key == key), None)
        if taken is None:
            return False
        row = taken
    return True


def read_state(store: Store, run_id: str, version: int | None = None) -> dict[str, Any]:
    """The key-value state of a run, decoded.

    Args:
        store: where the run is kept.
        run_id: which run.
        version: number of entries; default: all.

    Raises:
        UnknownRunError: no such run.
        VersionGoneError: no such version.
    """
    return {key: decode(data, f"state {key!r}") for key, data in sorted(store.state(run_id, version).items())}


def _check_resolve(resolve: Mapping[str, Any], rows: Sequence[EffectRecord]) -> None:
    known = {row.key for row in rows}
    for key, answer in resolve.items():
        if key not in known:
            raise InvalidSettingError("resolve", key, "idempotency keys of this run's effects")
        if not isinstance(answer, Sent | NotSent):
            raise InvalidSettingError(f"resolve[{key!r}]", answer, "Sent(result) or NotSent()")


def _check_settings(store: Any, policy: Any, limits: Any, on_event: Any) -> None:
    if store is not None and (isinstance(store, type) or not callable(getattr(store, "commit", None))):
        raise InvalidSettingError("store", store, "a store, for example SQLiteStore(path)")
    if on_event is not None and (not callable(on_event) or inspect.iscoroutinefunction(on_event)):
        raise InvalidSettingError("on_event", on_event, "a plain function of one event; it must not be async")
    if limits is not None and not isinstance(limits, Mapping):
        raise InvalidSettingError("limits", limits, "a mapping from resource class to most attempts at a time")
    if policy is not None:
        check_policy(policy)
    check_limits(limits or {})


def _check(program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(program, Step):
        raise DefinitionError(f"{program.name} is a single step; call it from a @workflow")
    if not isinstance(program, Workflow | Pipeline):
        raise DefinitionError(f"run() needs a @workflow or a Pipeline, got {program!r}")
    taken = RESERVED & program.signature.parameters.keys() if isinstance(program, Workflow) else ()
    if taken:
        raise DefinitionError(
            f"parameter {min(taken)!r} of workflow {program.name} is a setting of run(), which keeps it to itself; "
            "rename the parameter"
        )
    program.bind(args, kwargs)


def _seed(record: RunRecord, store: Store) -> str:
    """Forks draw the same random numbers as the run they come from: their common history depends on them."""
    while record.parent is not None:
        record = store.get_run(record.parent)
    return record.run_id


def _recorded_result(record: RunRecord, store: Store) -> RunResult[Any]:
    end = store.entries(record.run_id, max(0, record.head - 1))[-1]
    if end.error is not None:
        raise decode_error(end.error)
    report = Ledger().report(0.0, store.effects(record.run_id))
    mode = Mode(decode(end.arguments, "the recorded mode"))
    return RunResult(decode(end.result or b"", "the recorded result"), record.run_id, report, mode)


class _Run:
    """One run being executed by this process."""

    def __init__(
        self,
        program: Workflow[..., Any] | Pipeline,
        record: RunRecord,
        store: Store,
        lease: Lease,
        recovered: Recovered,
        policy: RunAheadPolicy | None,
        limits: Mapping[str, int] | None,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self._program = program
        self._record = record
        self._store = store
        self._lease = lease
        self._on_event = on_event
        arguments = Box.from_bytes(record.arguments, f"the arguments of {program.name}")
        self._scheduler = Scheduler(
            program.body(arguments),
            name=program.name,
            run_id=record.run_id,
            policy=policy if policy is not None else Fixed(1),
            limits=limits,
            recovered=recovered,
            at=record.created_at,
            find_step=_find_step,
        )
        self._reports: list[tuple[Task, Any, bool]] = []
        self._tokens: list[object] = []
        self._wake = anyio.Event()
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queueing: dict[int, tuple[Task, anyio.CancelScope]] = {}
        """Attempts on guesses that wait for a thread or process, and what ends their waiting."""
        self._timers = 0
        self._has_spawned = False
        self._finish: Outcome | None = None
        self._crash: BaseException | None = None
        self._deaf: Exception | None = None
        """What the listener raised; nothing is told any more."""
        self._is_deaf_known = False
        self._wall_offset = 0.0
        self._clock: Callable[[], float] = time.monotonic

    # Guesses have threads and processes of their own, so that real work never queues behind them.
    @functools.cached_property
    def _ahead(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(_THREADS_AHEAD)

    @functools.cached_property
    def _ahead_processes(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(os.cpu_count() or 1)

    @functools.cached_property
    def _unlimited(self) -> anyio.CapacityLimiter:
        """For work that has its room already."""
        return anyio.CapacityLimiter(math.inf)

    async def execute(self) -> RunResult[Any]:
        try:
            self._clock = _loop_clock()
            started = self._clock()
            self._wall_offset = time.time() - started
            try:
                async with anyio.create_task_group() as group:
                    stop_heartbeat = self._begin_heartbeat(group)
                    try:
                        await self._loop(group)
                    except Exception as error:  # noqa: BLE001 - raised below, outside the group
                        self._crash = error
                    finally:
                        stop_heartbeat()
                    if self._has_spawned:
                        group.cancel_scope.cancel()
            except BaseExceptionGroup as errors:
                raise _only(errors) from None
        finally:
            self._scheduler.close()
            try:
                self._keep_late_answers()
            finally:
                self._store.release(self._lease)
        if self._crash is not None:
            raise self._crash
        if self._deaf is not None:
            raise self._deaf
        outcome = self._finish
        if outcome is None:
            raise MisuseError("the run ended without a result")
        if outcome.error is not None:
            outcome.error.add_note(f"specflow: run {self._record.run_id}")
            raise outcome.error
        ledger = self._scheduler.ledger
        report = ledger.report(self._clock() - started, self._store.effects(self._record.run_id))
        value = outcome.box.fresh() if outcome.box is not None else None
        return RunResult(value, self._record.run_id, report, ledger.mode)

    def _keep_late_answers(self) -> None:
        """A cancelled run waited for threads: what their effects answered goes on record."""
        if self._finish is not None or self._crash is not None:
            return
        commit = self._scheduler.late_answers(
            [(task, result) for task, result, is_over in self._reports if not is_over]
        )
        if commit is not None:
            with contextlib.suppress(StoreError):  # the cancellation is what counts; the effect is reported unknown
                self._store.commit(self._lease, commit)

    async def _loop(self, group: anyio.abc.TaskGroup) -> None:
        decision = self._scheduler.begin(self._clock(), self._wall())
        while True:
            task = self._carry_out(decision, group)
            if self._queueing:
                self._let_real_work_through()
            if task is not None:
                await self._go_inline(task, group)
            if self._finish is not None:
                return
            while not self._reports and not self._tokens and self._crash is None and not self._has_gone_deaf():
                self._wake = anyio.Event()
                await self._wake.wait()
            if self._crash is not None:
                return
            decision = self._merge(self._react())

    async def _go_inline(self, task: Task | None, group: anyio.abc.TaskGroup) -> None:
        """Run a step right here, and those that follow it, as long as nothing else is under way."""
        clock, offset, scheduler = self._clock, self._wall_offset, self._scheduler
        turn_ends = clock() + _LONGEST_TURN
        while task is not None:
            step = task.step
            if task.args is None or not step.is_direct:
                outcome = await self._attempt(task)
                now = clock()
            else:
                try:
                    value = await Confined(step.function(*task.args))
                except (Exception, SystemExit) as error:  # noqa: BLE001 - what a step raises is its outcome
                    now = clock()
                    outcome = self._failed(task, error, now)
                except asyncio.CancelledError:
                    now = clock()
                    outcome = self._failed(task, _own_cancellation(f"step {step.name}"), now)
                else:
                    now = clock()
                    outcome = self._returned(task, value, now)
            decision = scheduler.done(task, outcome, now, now + offset)
            task = scheduler.straight
            if task is not None and task.step.is_direct and decision.commit is not None and not self._timers:
                self._store.commit(self._lease, decision.commit)  # and start it, which is the whole of the decision
            else:
                task = self._carry_out(decision, group)
            if task is not None and self._has_gone_deaf():
                self._spawn(group, self._run_tasks, deque([task]), group)  # it is on record as begun
                return
            if now >= turn_ends and task is not None and task.step.is_direct:
                # Steps that never wait would keep everybody else waiting, and the run from being cancelled.
                await anyio.lowlevel.checkpoint()
                turn_ends = clock() + _LONGEST_TURN

    def _react(self) -> list[Decision]:
        """Report everything that has happened; the decisions are committed together."""
        decisions: list[Decision] = []
        reports, self._reports = self._reports, []
        tokens, self._tokens = self._tokens, []
        now = self._clock()
        wall = now + self._wall_offset
        for task, result, is_over in reports:
            if is_over:
                decisions.append(self._scheduler.over(task, now, wall))
            else:
                decisions.append(self._scheduler.done(task, result, now, wall))
        decisions.extend(self._scheduler.woke(token, now, wall) for token in tokens)
        if self._deaf is not None and not self._is_deaf_known:
            self._is_deaf_known = True
            decisions.append(self._scheduler.fail(self._deaf, now, wall))
        return decisions

    def _merge(self, decisions: Sequence[Decision]) -> Decision:
        if len(decisions) == 1:
            return decisions[0]
        commits = [decision.commit for decision in decisions if decision.commit is not None]
        commit = None
        if commits:
            rows = {row.key: row for one in commits for row in one.effects}
            for decision in decisions:
                for action in decision.actions:
                    if isinstance(action, Start) and action.task.status is TaskStatus.CANCELLED:
                        _take_back(action.task, rows)
            status = next((one.status for one in reversed(commits) if one.status is not None), None)
            entries = tuple(entry for one in commits for entry in one.entries)
            commit = Commit(commits[0].parent, entries, tuple(rows.values()), status)
        return Decision(
            commit,
            tuple(data for decision in decisions for data in decision.emitted),
            tuple(action for decision in decisions for action in decision.actions),
            tuple(number for decision in decisions for number in decision.numbers),
        )

    def _carry_out(self, decision: Decision, group: anyio.abc.TaskGroup) -> Task | None:
        """Commit, then act. Returns a task that may run right here, since nothing else is under way."""
        commit, emitted, actions, numbers = decision
        if commit is not None:
            self._store.commit(self._lease, commit)
        if emitted:
            at_once = confirmed_at_once((decision,))
            for data, number in itertools.zip_longest(emitted, numbers):
                self._tell(CommittedEvent(decode(data, "an emitted value"), None if number in at_once else number))
            actions = tuple(
                action for action in actions if not isinstance(action, Show) or action.number not in at_once
            )
        if len(actions) == 1 and not self._timers and self._scheduler.num_running == 1:
            action = actions[0]
            if type(action) is Start and _is_in_loop(action.task):
                return action.task
        together: deque[Task] = deque()
        for action in actions:
            if not isinstance(action, Start):
                self._act(action, group)
            elif _is_in_loop(action.task) and not action.task.step.has_waited:
                together.append(action.task)
            else:
                self._spawn(group, self._run_tasks, deque([action.task]), group)
        if together:
            self._spawn(group, self._run_tasks, together, group)
        return None

    def _act(self, action: Action, group: anyio.abc.TaskGroup) -> None:
        """Carry out anything but a start."""
        if isinstance(action, Cancel):
            scope = self._scopes.get(action.task.number)
            if scope is not None:
                scope.cancel()
        elif isinstance(action, Wake):
            self._timers += 1
            self._spawn(group, self._timer, action)
        elif isinstance(action, Show):
            value = decode(action.data, "an emitted value")
            self._tell(SpeculativeEvent(action.number, action.position, value, action.confidence))
        elif isinstance(action, Retract):
            self._tell(RetractedEvent(action.number))
        elif isinstance(action, Finish):
            self._finish = action.outcome

    def _tell(self, event: Event) -> None:
        if self._on_event is None or self._deaf is not None:
            return
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001 - raised when the effects under way have ended
            self._deaf = error

    def _has_gone_deaf(self) -> bool:
        return self._deaf is not None and not self._is_deaf_known

    def _wall(self) -> float:
        return self._clock() + self._wall_offset

    # ----------------------------------------------------------------------------------------------------------- tasks

    async def _run_tasks(self, tasks: deque[Task], group: anyio.abc.TaskGroup) -> None:
        """Run what was started together, one after the other as long as nothing waits.

        Parallel steps that never wait need one event-loop task, not one each. As soon as one does wait, the others get
        event-loop tasks of their own.
        """

        def part(step: Step[..., Any]) -> None:
            step.has_waited = True  # from now on it gets an event-loop task at once
            while tasks:
                self._spawn(group, self._run_tasks, deque([tasks.popleft()]), group)

        with anyio.CancelScope() as scope:
            while tasks:
                task = tasks.popleft()
                await self._run_task(task, scope, functools.partial(part, task.step) if tasks else None)

    async def _run_task(self, task: Task, scope: anyio.CancelScope, part: Callable[[], None] | None) -> None:
        result: Any = None
        finished = False
        self._scopes[task.number] = scope
        try:
            if task.status is TaskStatus.RUNNING:
                work = self._work(task)
                result = await (work if part is None else _UntilItWaits(work, part))
                finished = True
            else:
                let_go(task.guesses)
        finally:
            del self._scopes[task.number]
            self._reports.append((task, result, not (finished and task.status is TaskStatus.RUNNING)))
            self._wake.set()

    async def _work(self, task: Task) -> Any:
        if task.kind is TaskKind.PREDICT:
            return await self._ask_predictor(task)
        if task.kind is TaskKind.JUDGE:
            return await self._ask_judge(task)
        return await self._attempt(task)

    async def _ask_predictor(self, task: Task) -> Any:
        try:
            guesses: Any = task.guesses
            if guesses is None:
                guesses = task.step.predictor.predict(task.call)  # type: ignore[union-attr,arg-type]
            return list(await guesses)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a predictor that fails costs its guess
            return error
        except asyncio.CancelledError:
            return _own_cancellation(f"the predictor of {task.step.name}")

    async def _ask_judge(self, task: Task) -> Any:
        predicted, actual = task.judged.fresh() if task.judged is not None else (None, None)
        try:
            return await task.step.verifier.verify(predicted, actual)  # type: ignore[misc]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a judge raises is the call's outcome
            return error
        except asyncio.CancelledError:
            return _own_cancellation(f"the verifier of {task.step.name}")

    async def _attempt(self, task: Task) -> Outcome:
        """Try a step, its undo or its probe until it returns or the retries are used up."""
        step = task.step
        retry = step.retry
        if task.kind is TaskKind.UNDO and retry.attempts == 1:
            retry = _UNDO_RETRY
        cells = task.state.cells if task.state is not None else None
        number = 0
        while True:
            number += 1
            if cells is not None:
                task.state = State(cells)  # a failed try leaves nothing behind
            try:
                value = await self._call(task, number)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - what a step raises is its outcome
                failure = error
            except asyncio.CancelledError:
                failure = _own_cancellation(f"step {step.name}")
            else:
                return self._returned(task, value, self._clock())
            if number >= retry.attempts or not isinstance(failure, retry.on):
                return self._failed(task, failure, self._clock())
            await anyio.sleep(retry.seconds_before(number + 1))

    def _returned(self, task: Task, value: Any, now: float) -> Outcome:
        """What a step returned, if it can be stored and is of the declared type; else that it failed."""
        at, seconds = now + self._wall_offset, now - task.started_at
        try:
            return Outcome(_box(task, value), at=at, seconds=seconds)
        except SpecflowError as error:
            # It has done its work: another try would do it again, and return nothing better.
            return Outcome.raised(error, at=at, seconds=seconds)

    def _failed(self, task: Task, error: BaseException, now: float) -> Outcome:
        return Outcome.raised(error, at=now + self._wall_offset, seconds=now - task.started_at)

    async def _call(self, task: Task, number: int) -> Any:
        step = task.step
        args: Any = task.args
        kwargs: dict[str, Any] = {}
        if args is None:
            args, kwargs = decode(task.arguments, f"the arguments of {step.name}")
        function: Callable[..., Any] = step.function
        if task.kind is TaskKind.UNDO and step.undo is not None:
            row = task.effect
            result = decode(row.result) if row is not None and row.result is not None else None
            function, args = step.undo, (result, *args)
        elif task.kind is TaskKind.PROBE and step.probe is not None:
            function, args = step.probe, (task.key, *args)
        else:
            if step.state_parameter is not None:
                kwargs[step.state_parameter] = task.state
            if step.attempt_parameter is not None:
                kwargs[step.attempt_parameter] = Attempt(self._record.run_id, task.position, task.key, number)
        if (function is step.function and step.where == "loop") or inspect.iscoroutinefunction(function):
            if step.timeout is None:
                return await Confined(function(*args, **kwargs))
            with _limit_of(step):
                return await Confined(function(*args, **kwargs))
        in_process = step.where == "process" and function is step.function
        # Seconds count from when there is a thread or process for it.
        async with contextlib.AsyncExitStack() as room:
            await room.enter_async_context(self._room(task, in_process=in_process))
            with _limit_of(step) as scope:
                value = await self._elsewhere(function, args, kwargs, in_process=in_process)
                if inspect.isawaitable(value):  # a plain function that wraps an async one
                    await room.aclose()
                    value = await Confined(value)
        if scope is not None and scope.cancel_called and step.timeout is not None:
            raise StepTimeoutError(step.name, step.timeout)  # a thread was waited for, and is late all the same
        return value

    @contextlib.asynccontextmanager
    async def _room(self, task: Task, *, in_process: bool) -> AsyncGenerator[None, None]:
        """Wait until there is a thread or process: real work never behind guesses, also where it was a guess before."""
        taken: anyio.CapacityLimiter | None = None
        if task.speculative:
            ahead = self._ahead_processes if in_process else self._ahead
            with anyio.CancelScope() as scope:
                self._queueing[task.number] = (task, scope)
                try:
                    await ahead.acquire()
                    taken = ahead
                finally:
                    del self._queueing[task.number]
        if taken is None:
            usual = anyio.to_process.current_default_process_limiter
            taken = usual() if in_process else anyio.to_thread.current_default_thread_limiter()
            await taken.acquire()
        try:
            yield
        finally:
            taken.release()

    def _let_real_work_through(self) -> None:
        """Attempts that waited for room among the guesses, and are real now, wait no longer there."""
        for task, scope in list(self._queueing.values()):
            if not task.speculative:
                scope.cancel()

    async def _elsewhere(self, function: Any, args: Any, kwargs: Any, *, in_process: bool) -> Any:
        if in_process:
            # Worker processes import the main module under this name, which classes of their results then have.
            sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
            name = f"{function.__module__}:{function.__qualname__}"
            return await anyio.to_process.run_sync(
                _call_by_name, name, args, kwargs, cancellable=True, limiter=self._unlimited
            )
        # A thread cannot be stopped. It is waited for, so that nothing of a run outlives it.
        work = functools.partial(_call_in_thread, function, args, kwargs)
        (value,) = await anyio.to_thread.run_sync(work, limiter=self._unlimited)
        return value

    async def _timer(self, wake: Wake) -> None:
        await anyio.sleep(max(0.0, wake.at - self._clock()))
        self._timers -= 1
        self._tokens.append(wake.token)
        self._wake.set()

    def _spawn(self, group: anyio.abc.TaskGroup, function: Callable[..., Any], *args: Any) -> None:
        self._has_spawned = True
        group.start_soon(function, *args)

    def _begin_heartbeat(self, group: anyio.abc.TaskGroup) -> Callable[[], None]:
        """Renew the lease from time to time. Returns what stops the waiting for the first time."""
        lease_seconds = getattr(self._store, "lease_seconds", None)
        if lease_seconds is None:
            return _do_nothing
        seconds = lease_seconds / 3
        if _is_trio():
            self._spawn(group, self._keep_lease, seconds, seconds, group)
            return _do_nothing
        # Most runs are over before the first renewal is due: a timer costs them far less than a task.
        begin = functools.partial(self._spawn, group, self._keep_lease, 0.0, seconds, group)
        return asyncio.get_running_loop().call_later(seconds, begin).cancel

    async def _keep_lease(self, delay: float, seconds: float, group: anyio.abc.TaskGroup) -> None:
        while True:
            await anyio.sleep(delay)
            delay = seconds
            try:
                self._store.renew(self._lease)
            except Exception as error:  # noqa: BLE001 - raised by the run
                self._crash = error
                group.cancel_scope.cancel()  # the run is somebody else's: what is under way stops as well
                return


class _UntilItWaits:
    """Awaits a coroutine, and calls a function when it waits for the first time, if it ever does.

    Args:
        coroutine: not started yet.
        waits: called before the event loop goes on to something else.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        try:
            asked = coroutine.send(None)
        except StopIteration as done:
            return done.value
        self._waits()
        return (yield from relay(asked, coroutine.send, coroutine.throw, coroutine.close))


@contextlib.contextmanager
def _limit_of(step: Step[..., Any]) -> Generator[anyio.CancelScope | None, None, None]:
    """The step's timeout, if it has one.

    Raises:
        StepTimeoutError: the time is up. What a step raises itself stays what it is, a TimeoutError too.
    """
    if step.timeout is None:
        yield None
        return
    try:
        with anyio.fail_after(step.timeout) as scope:
            yield scope
    except TimeoutError:
        if scope.cancelled_caught:
            raise StepTimeoutError(step.name, step.timeout) from None
        raise


def _is_in_loop(task: Task) -> bool:
    """Is it a step that runs in the event loop, and may never wait?"""
    return task.kind is TaskKind.STEP and task.step.where == "loop"


def _do_nothing() -> None:
    pass


def _is_trio() -> bool:
    """Does trio run the current task? Else asyncio does."""
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    is_running = getattr(lowlevel, "in_trio_run", None)  # missing while another thread imports trio
    return is_running is not None and bool(is_running())


def _loop_clock() -> Callable[[], float]:
    """The running event loop's clock itself: asking anyio for it each time takes as long as a small step."""
    if _is_trio():
        clock: Callable[[], float] = sys.modules["trio"].current_time
        return clock
    loop = asyncio.get_running_loop()
    if type(loop).time is asyncio.BaseEventLoop.time:
        return time.monotonic  # what it asks itself
    return loop.time


def _own_cancellation(who: str) -> BackendContractError:
    """What to make of a cancellation that came out of user code.

    Raises:
        asyncio.CancelledError: it was meant for the running task; called while it is being handled.
    """
    if anyio.current_effective_deadline() == -math.inf:
        raise  # noqa: PLE0704 - the cancellation that is being handled
    task = None if _is_trio() else asyncio.current_task()
    if task is not None and task.cancelling():
        raise  # noqa: PLE0704 - as above
    return BackendContractError(who, "let a cancellation out that was not its own", "handle what it awaits")


def _find_step(name: str) -> Step[..., Any] | None:
    """The step of that name, where it can be imported."""
    try:
        found = load(name, Step)
    except DefinitionError:
        return None
    return found if isinstance(found, Step) and found.name == name else None


def _box(task: Task, value: Any) -> Box:
    """What a task returned, as its outcome.

    Raises:
        UnsupportedValueError: it cannot be stored exactly, or is not what the step is declared to return.
    """
    if task.kind is TaskKind.STEP:
        task.step.check_result(value)
    try:
        return Box(value, task.step.result_label)
    except SpecflowError:
        if task.kind in (TaskKind.UNDO, TaskKind.DELIVER):
            return Box(None)  # nobody reads it
        raise


def _take_back(task: Task, rows: dict[str, EffectRecord]) -> None:
    """A task was stopped in the same breath as it was started: its effect was never begun."""
    row = rows.get(task.key)
    if row is not None and row.status is EffectStatus.SENT:
        rows[task.key] = dataclasses.replace(row, status=EffectStatus.PREPARED, tries=row.tries - 1)


def _call_in_thread(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any]:
    """Runs in a thread. What it returns is wrapped: trio lets no coroutine out of one."""
    return (function(*args, **kwargs),)


def _call_by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs in a worker process: the module's name is bound to the step, not to its function."""
    found = load(name, Step)
    return (found.function if isinstance(found, Step) else found)(*args, **kwargs)


def _only(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that says something: cancellations are the consequence of another one."""
    cancelled = anyio.get_cancelled_exc_class()
    leaves: list[BaseException] = []
    stack: list[BaseException] = [errors]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, cancelled)), leaves[0])


__all__ = [
    "CommittedEvent",
    "Event",
    "NotSent",
    "RetractedEvent",
    "RunResult",
    "Sent",
    "SpeculativeEvent",
    "fork",
    "read_state",
    "resume",
    "run",
]
