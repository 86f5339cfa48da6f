"""Pure decisions of a run: which steps to start, on which guesses, what holds, what falls, what is committed.

No event loop, no clock, no I/O. The runtime reports what happened (:meth:`Scheduler.begin`, :meth:`Scheduler.done`,
:meth:`Scheduler.over`, :meth:`Scheduler.woke`) with the time, and carries out the :class:`Decision` it gets back. A
decision's commit must be durable before its actions are carried out: an irreversible step is started only after what
led to it, and the fact that it is about to start, are on record.

**The one rule.** A world's work is committed when, in program order, every guess it rests on has been resolved true.
A strand's head rests on nothing that is not known, so the lowest uncommitted step is never squashed.
"""

from __future__ import annotations

import heapq
import inspect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .branches import (
    Candidate,
    all_inputs_of,
    best_combinations,
    branch_writes,
    inherited_writes,
    outcome_of,
    pipeline_writes,
    value_of,
)
from .codec import Box, decode, decode_error, encode
from .definitions import Step, encode_arguments
from .effects import Effect
from .errors import (
    BackendContractError,
    CompensationError,
    DivergenceError,
    DuplicateStepError,
    EffectUnknownError,
    InvalidSettingError,
    SpecflowError,
    StateConflictError,
    StepTimeoutError,
    UnsupportedValueError,
)
from .history import (
    Commit,
    EffectRecord,
    EffectStatus,
    Entry,
    EntryKind,
    Position,
    RunStatus,
    Write,
    format_position,
)
from .outbox import NotSent, Outbox, Sent
from .protocols import Predictor, RunAheadPolicy
from .replay import (
    Answer,
    CallRequest,
    Context,
    Finished,
    GatherRequest,
    InputsRequest,
    Outcome,
    PendingCall,
    PipelineRequest,
    Program,
    SleepRequest,
    call_alone,
    replay,
    seed_of,
)
from .report import LEAST_SECONDS, Ledger
from .sight import Recent, Trail
from .speculation import Assumption, Call, Opportunity, Prediction, Resolution, Verdict, let_go
from .state import Access, Cells, State, cells_of, merge, revalidate, writes_of
from .timeline import Timeline, told
from .types import Mode
from .unreached import Unreached
from .worlds import (
    Action,
    Cancel,
    Finish,
    Guess,
    Join,
    Record,
    Retract,
    Show,
    Start,
    Strand,
    Task,
    TaskKind,
    TaskStatus,
    Wake,
    World,
    family,
)

_NOTHING = Box(None)
_LEFT_OVER = frozenset({EffectStatus.SENT, EffectStatus.UNKNOWN, EffectStatus.ACKED, EffectStatus.COMPENSATION_FAILED})
"""Effects that may have reached the outside world."""
_UNCHANGEABLE = frozenset({type(None), bool, int, float, str, bytes})
"""Arguments of these types need no copy."""
_MAX_AHEAD = 256
"""Records a world may be ahead of its strand's head: an endless loop on a wrong guess ends here."""
_MAX_INCARNATIONS = 3
"""After so many rebuilds a world waits until it rests on nothing unknown."""
_REUSABLE = 128
"""Results of squashed pure attempts that are kept for an equal call."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store knows of a run that goes on."""

    entries: Sequence[Entry] = ()
    effects: Sequence[EffectRecord] = ()
    resolve: Mapping[str, Sent | NotSent] = field(default_factory=dict)
    """What a person found out about unknown effects, by key."""
    seed: str | None = None
    """Of random draws: the run that this one was forked from, directly or through others; default: the run itself."""
    was_blocked: bool = False
    """A person had to decide something before it could go on."""


def check_limits(limits: Mapping[str, int]) -> None:
    """See that every resource class may have an attempt.

    Raises:
        InvalidSettingError: a limit is not an integer >= 1.
    """
    for resource, limit in limits.items():
        if type(limit) is not int or limit < 1:
            raise InvalidSettingError(f"limits[{resource!r}]", limit, "an integer >= 1")


def _no_verdict(step: Step[..., Any], returned: object) -> BackendContractError:
    return BackendContractError(f"the verifier of {step.name}", f"returned {returned!r}", "it must return a Verdict")


def _may_have_happened(row: EffectRecord) -> bool:
    """Has a compensable effect changed the outside world, as far as is known?

    A step that timed out, or whose result was refused, may have done its work.
    """
    if row.status is EffectStatus.FAILED and row.error is not None:
        return isinstance(decode_error(row.error), StepTimeoutError | UnsupportedValueError)
    return row.status in (EffectStatus.ACKED, EffectStatus.COMPENSATION_FAILED)


def _can_share(args: tuple[Any, ...]) -> bool:
    """Can nobody change these arguments?"""
    for value in args:  # noqa: SIM110 - as all(...) it takes three times as long
        if type(value) not in _UNCHANGEABLE:
            return False
    return True


def _box_or_none(value: Any) -> Box | None:
    try:
        return Box(value, "a prediction")
    except SpecflowError:
        return None


class Decision(NamedTuple):
    """What the runtime has to carry out, in this order."""

    commit: Commit | None
    emitted: tuple[bytes, ...]
    """Encoded events of the committed stream, real once the commit is."""
    actions: tuple[Action, ...]
    numbers: tuple[int | None, ...] = ()
    """For each of these events, the number under which it was shown on the speculative stream; None for one that was
    not."""


class Scheduler:
    """Decides a run.

    Args:
        function: the program: called with a context, returns the coroutine.
        name: of the program.
        run_id: part of idempotency keys.
        policy: how far to run ahead.
        limits: most attempts at a time per resource class; the default for unnamed ones is no limit.
        recovered: history of a run that goes on.
        at: wall-clock time the run was created, in seconds since the epoch.
        find_step: the step of that name, for effects of a crashed process that this one never comes to.
    """

    def __init__(
        self,
        function: Callable[[Context], Coroutine[Any, Any, Any]],
        *,
        name: str,
        run_id: str,
        policy: RunAheadPolicy,
        limits: Mapping[str, int] | None = None,
        recovered: Recovered | None = None,
        at: float = 0.0,
        find_step: Callable[[str], Step[..., Any] | None] | None = None,
    ) -> None:
        self._function = function
        self._name = name
        self._run_id = run_id
        self._policy = policy
        self._limits = dict(limits or {})
        self._at = at
        self._find_step = find_step
        recovered = recovered or Recovered()
        self._seed = seed_of(recovered.seed or run_id)
        self._was_blocked = recovered.was_blocked
        self._outbox = Outbox(run_id, recovered.effects, recovered.resolve)
        self._unreached = Unreached(
            [row for row in recovered.effects if not isinstance(recovered.resolve.get(row.key), NotSent)],
            recovered.entries,
            self._is_final,
            self._outbox.is_used,
        )
        self._timeline = Timeline(
            recovered.entries,
            self._on_committed,
            self._on_resolved,
            self._has_failed,
            self._unreached.passed_by_entry,
        )

        self._root = Strand(function, (), name, cells_of({}), at)
        self._ready: deque[World] = deque()
        self._parked: dict[World, None] = {}
        self._undecided: dict[World, None] = {}  # those parked worlds that wait for something else than a slot
        self._queues: dict[str, list[tuple[Position, int, World]]] = {}  # the certain others: a heap per resource
        self._guessing: dict[str, deque[World]] = {}  # those on guesses that wait for a slot, per resource
        self._next_in_queue = 0
        self._doomed: list[World] = []
        self._deeper: list[World] = []
        self._unasked: list[tuple[World, CallRequest | GatherRequest]] = []
        self._tasks: dict[int, Task] = {}
        self._next_task = 1
        self._held: dict[str, int] = {}
        self._pure: dict[tuple[str, bytes], Task] = {}
        self._reusable: OrderedDict[tuple[str, bytes], Outcome] = OrderedDict()
        self._delivering: set[str] = set()
        self._undo: list[EffectRecord] | None = None
        self._next_mark = 1
        self._watched_until = math.inf
        self._finished: Outcome | None = None
        self._over = False
        self._failure: BaseException | None = None
        self._steps: dict[str, Step[..., Any]] = {}
        self._before: dict[str, tuple[Box, ...]] = {}

        self._handlers: dict[TaskKind, Callable[[Task, Any], None]] = {
            TaskKind.STEP: self._step_done,
            TaskKind.PREDICT: self._prediction_done,
            TaskKind.JUDGE: self._judge_done,
            TaskKind.DELIVER: self._delivery_done,
            TaskKind.UNDO: self._undo_done,
            TaskKind.PROBE: self._probe_done,
        }
        self.ledger = Ledger()
        self.straight: Task | None = None
        """A plain call that was started just now and is all that is going on: its commit and its start are the whole of
        the newest decision."""
        self.now = 0.0
        self.wall = at
        # What the decision being put together holds.
        self._actions: list[Action] = []
        self._status: RunStatus | None = None

    # ------------------------------------------------------------------------------------------------------ reported

    def begin(self, now: float, at: float) -> Decision:
        """Start the program."""
        self._tick(now, at)
        if self._was_blocked:
            self._status = RunStatus.RUNNING  # unless it turns out to be blocked still
        self._start_strand(self._root)
        return self._decide()

    def done(self, task: Task, result: Any, now: float, at: float) -> Decision:
        """A task returned: an :class:`~specflow.replay.Outcome`, predictions for PREDICT, a verdict for JUDGE."""
        is_straight = self.straight is task or (task.step.is_plain and self._is_alone(task))
        self._tick(now, at)
        if is_straight and result.error is None:
            return self._go_straight_on(task, result)
        wanted = task.status is TaskStatus.RUNNING  # it may have been told to stop while its report was on its way
        self._release(task)
        if wanted:
            task.status = TaskStatus.DONE
            if self._failure is None:
                self._handlers[task.kind](task, result)
            else:
                self._answered_too_late(task, result)
        return self._decide()

    def over(self, task: Task, now: float, at: float) -> Decision:
        """A cancelled task really ended: its slot is free. Until then it counts against the limits."""
        self._tick(now, at)
        self._release(task)
        return self._decide()

    def woke(self, token: object, now: float, at: float) -> Decision:
        """A time that was asked for has come."""
        self._tick(now, at)
        if isinstance(token, tuple):
            world, request = token
            if not world.dead and world.waiting is request:
                self._answer(world, Outcome(_NOTHING, at=at))
        else:
            self._watched_until = math.inf
            self._enforce_seconds()
        return self._decide()

    def fail(self, error: BaseException, now: float, at: float) -> Decision:
        """Something outside went wrong: start nothing more, and wait for effects under way."""
        self._tick(now, at)
        if not self._over:
            self._failure = self._failure or error
        return self._decide()

    @property
    def running(self) -> tuple[Task, ...]:
        """Tasks that were started and are not over."""
        return tuple(self._tasks.values())

    @property
    def num_running(self) -> int:
        """How many tasks were started and are not over."""
        return len(self._tasks)

    # ----------------------------------------------------------------------------------------------------- decisions

    def _tick(self, now: float, at: float) -> None:
        self.now = now
        self.wall = at
        self.straight = None

    def _decide(self) -> Decision:
        self._go_as_far_as_possible()
        if self._failure is not None:
            self._fail()
        elif self._finished is not None and not self._over:
            self._wind_up()
        commit = None
        changes = self._outbox.take_changes()
        parent, entries, emitted, numbers = self._timeline.take()
        if entries or changes or self._status is not None:
            commit = Commit(parent, entries, changes, self._status)
        decision = Decision(commit, emitted, tuple(self._actions), numbers)
        self._actions = []
        self._status = None
        return decision

    def _go_as_far_as_possible(self) -> None:
        while True:
            while self._ready and self._failure is None:
                self._launch(self._ready.popleft())
            if self._failure is not None:
                return
            for world in self._doomed:
                self._squash(world)
            self._doomed.clear()
            self._timeline.flush(self._root, self.wall)
            self._failure = self._failure or self._timeline.failure
            for queue in self._outbox.waiting:
                self._deliver(queue)
            # After the commit, so that predictors have learned from what was committed just now.
            self._look_ahead()
            if self._parked:
                self._start_parked()
            # A parked call may have been answered by the result of an equal one, and a guess been confirmed by that.
            if not self._ready and not self._deeper:
                return

    def _look_ahead(self) -> None:
        """Ask what new calls will return, and run ahead further where a guess was right."""
        for world, request in self._unasked:
            if world.waiting is not request:
                continue
            if isinstance(request, CallRequest):
                self._predict(world, request)
            else:
                self._predict_gather(world, request)
        self._unasked.clear()
        for promoted in self._deeper:
            for world in list(family(promoted)):
                is_launched = bool(world.arguments)  # one that was forked just now is asked when its call is looked at
                if isinstance(world.waiting, CallRequest) and is_launched and not world.predicted and not world.dead:
                    self._predict(world, world.waiting)
        self._deeper.clear()

    def _launch(self, world: World) -> None:
        """A world's program stopped at a request: see what can be done about it."""
        if world.dead or (self._doomed and self._is_falling(world)):
            return
        if self._steps_ahead(world) > _MAX_AHEAD:
            world.halted = True  # an endless loop on a wrong guess must end somewhere
            return
        request = world.waiting
        if isinstance(request, CallRequest):
            self._launch_call(world, request)
        elif isinstance(request, Finished):
            self._world_finished(world, request)
        elif isinstance(request, GatherRequest | PipelineRequest):
            self._launch_branches(world, request)
        elif isinstance(request, InputsRequest):
            self._launch_inputs(world, request)
        elif isinstance(request, SleepRequest):
            self._launch_sleep(world, request)

    def _launch_branches(self, world: World, request: GatherRequest | PipelineRequest) -> None:
        self._recorded_as(world, request, EntryKind.FORK)
        if self._failure is not None:
            return
        if isinstance(request, PipelineRequest):
            self._launch_join(world, request.position, request.branches, return_exceptions=False, is_pipeline=True)
            return
        bodies = [
            (pending.target.name, _alone(pending.target, pending.args, pending.kwargs)) for pending in request.calls
        ]
        self._launch_join(world, request.position, bodies, return_exceptions=request.return_exceptions)
        self._unasked.append((world, request))

    # --------------------------------------------------------------------------------------------------------- calls

    def _launch_call(self, world: World, request: CallRequest) -> None:
        step = request.step
        try:
            self._meet(step)
        except DuplicateStepError as error:
            if self._rests_on_nothing(world):
                self._failure = error
            world.halted = True  # on a guess it is nobody's business yet
            return
        try:
            world.arguments = encode_arguments(request.args, request.kwargs, step.arguments_label)
        except SpecflowError as error:
            self._answer(world, Outcome.raised(error, at=self.wall))
            return
        known = self._known_entry(world, request)
        if known is not None:
            self._answer_from_history(world, request, known)
            return
        if self._failure is not None:
            return
        if step.effect is Effect.BUFFERED:
            self._answer(world, Outcome(_NOTHING, at=world.program.at))
            return
        if not self._try_start(world, settled=False) and world.waiting is request:
            self._park(world)
        if world.waiting is request:
            self._unasked.append((world, request))

    def _meet(self, step: Step[..., Any]) -> None:
        """A step is asked for; note what it returned before this run when that is the first time.

        Raises:
            DuplicateStepError: another step has this name.
        """
        known = self._steps.get(step.name)
        if known is None:
            self._steps[step.name] = step
            self._before[step.name] = tuple(step.remembered)
        elif known is not step:
            known.check_same(step)

    def _park(self, world: World) -> None:
        """The call has to wait for a slot, the policy, or everything before it."""
        world.parked = True
        self._parked[world] = None
        if not world.queued:
            self._undecided[world] = None

    def _known_entry(self, world: World, request: CallRequest) -> Entry | None:
        entry = self._recorded_as(world, request, EntryKind.CALL)
        if entry is None:
            return None
        if entry.step != request.step.name or entry.arguments != world.arguments:
            made = request.describe()
            if entry.step == request.step.name:
                made += " with other arguments"
            self._failure = DivergenceError(format_position(request.position), told(entry), made)
            return None
        return entry

    def _recorded_as(self, world: World, request: Any, kind: EntryKind) -> Entry | None:
        """What history has for a request; None for nothing, or for something else, which is a failure."""
        if not self._timeline.recorded or not self._rests_on_nothing(world):
            return None
        entry = self._timeline.recorded.get(request.position)
        if entry is not None and entry.kind is kind:
            return entry
        if entry is not None or _comes_before(request.position, self._timeline.newest_recorded):
            recorded = told(entry) if entry is not None else "nothing there"
            self._failure = DivergenceError(format_position(request.position), recorded, request.describe())
        return None

    def _answer_from_history(self, world: World, request: CallRequest, entry: Entry) -> None:
        own = writes_of(world.accesses)
        recorded = entry.writes or entry.branch_writes
        if recorded[: len(own)] != own or (len(recorded) > len(own) and request.step.state_parameter is None):
            self._failure = DivergenceError(
                format_position(request.position), "other changes of the state before this call", "different ones"
            )
            return
        if request.step.effect.is_external:
            self._outbox.use(self._outbox.key(request.position, request.step.name, world.arguments))
        outcome = Outcome.stored(entry.result, entry.error, at=entry.at, seconds=entry.seconds)
        record = self._record(world, outcome, recorded[len(own) :])
        record.mode = entry.mode
        self._advance(world, record)

    def _try_start(self, world: World, *, settled: bool) -> bool:
        """Start the attempt of a parked call if everything allows it.

        Args:
            world: waits on a call that has no attempt yet.
            settled: everything that could be flushed was.
        """
        request = world.waiting
        if not isinstance(request, CallRequest):
            return False
        step = request.step
        if step.is_reusable and (self._reusable or self._pure):
            identity = (step.name, world.arguments)
            outcome = self._reusable.get(identity)
            if outcome is not None:
                self._unpark(world)
                self.ledger.reused(step.name)
                self._answer(world, Outcome(outcome.box, outcome.error, at=self.wall, seconds=outcome.seconds))
                return True
            task = self._pure.get(identity)
            if task is not None and task.status is TaskStatus.RUNNING:
                self._unpark(world)
                world.task = task
                task.worlds.append(world)
                if self._rests_on_nothing(world):
                    self._make_authoritative(task)
                return True
        if self._rests_on_nothing(world):
            return self._start_authoritative(world, request, settled=settled)
        return self._start_ahead(world, request)

    def _start_authoritative(self, world: World, request: CallRequest, *, settled: bool) -> bool:
        step = request.step
        row: EffectRecord | None = None
        known: EffectRecord | None = None
        key = ""
        if step.needs_key or self._outbox.has_rows:
            key = self._outbox.key(request.position, request.step.name, world.arguments)
            known = self._outbox.get(key)
            if known is not None and not self._outbox.is_used(key):
                if self._join_attempt(world, key) or self._answer_from_row(world, request, known):
                    return True
            elif known is None and self._may_repeat(request):
                return True
        if step.effect.is_external:
            if step.resource is not None and self._is_sending(step.resource):
                return False  # the outside world sees the program's order on every resource
            if not self._settled(world) and not (settled and self._secure(world)):
                return False
            tries = known.tries + 1 if known is not None else 1
            row = EffectRecord(key, request.position, step.name, EffectStatus.SENT, world.arguments, tries=tries)
        if not self._take_slot(step, speculative=False):
            self._queue(world, request)
            return False
        if row is not None:
            self._outbox.put(row)
        self._start_step(world, request, key, row, speculative=False)
        return True

    def _is_final(self, name: str) -> bool | None:
        """Whether that step's effects happen for real only, and once; None where it cannot be found."""
        step = self._steps.get(name) or (self._find_step(name) if self._find_step is not None else None)
        return None if step is None else step.effect is Effect.IRREVERSIBLE

    def _join_attempt(self, world: World, key: str) -> bool:
        """An effect of this very call may be under way, begun on a guess that fell: it serves the real call."""
        for task in self._tasks.values():
            if task.kind is TaskKind.STEP and task.key == key and task.status is TaskStatus.RUNNING:
                self._unpark(world)
                world.task = task
                task.worlds.append(world)
                self._make_authoritative(task)
                return True
        return False

    def _may_repeat(self, request: CallRequest) -> bool:
        """Was this call on record with other arguments, or at another place? Then its effect would be made twice.

        Effects that may have run ahead do not count: their arguments may have been guesses.
        """
        step = request.step
        if step.effect.is_external:
            self._failure = self._failure or self._unreached.passed_by_call(request.position, step.name)
            if self._failure is not None:
                return True
        if step.effect in (Effect.IDEMPOTENT, Effect.COMPENSABLE):
            return False
        for row in self._outbox.recorded_at(request.position):
            if row.step == step.name and row.tries > 0:
                self._failure = DivergenceError(
                    format_position(request.position),
                    f"a call of {row.step}",
                    f"{request.describe()} with other arguments",
                )
                return True
        return False

    def _answer_from_row(self, world: World, request: CallRequest, row: EffectRecord) -> bool:
        """An effect of this call is on record from before a crash (or from running ahead)."""
        step = request.step
        if row.status in (EffectStatus.ACKED, EffectStatus.FAILED):
            self._outbox.use(row.key)
            self._unpark(world)
            outcome = Outcome.stored(row.result, row.error, at=row.at)
            if row.tries > 0:
                self._settle(world, outcome, row.writes)  # what the step returned, not judged yet
            else:
                self._answer(world, outcome, row.writes, judged=row.mode)
            return True
        if row.status not in (EffectStatus.SENT, EffectStatus.UNKNOWN) or step.idempotent:
            return False
        answer = self._outbox.resolution(row.key)
        if isinstance(answer, NotSent):
            self._outbox.put(replace(row, status=EffectStatus.PREPARED))
            self._outbox.forget_resolution(row.key)
            return False  # to be started now, like any other call
        if answer is not None:
            self._apply_answer(world, row, answer)
            return True
        self._unpark(world)
        if step.probe is not None:
            task = self._new_task(TaskKind.PROBE, step, request.position, world.arguments, row.key)
            task.worlds.append(world)
            task.effect = row
            self._actions.append(Start(task))
            return True
        self._block_on(row)
        return True

    def _apply_answer(self, world: World, row: EffectRecord, answer: object) -> None:
        if isinstance(answer, Sent):
            writes = self._written_by_hand(world, row, answer)
            if writes is None:
                return
            box = Box(answer.result, f"the result of {row.step}")
            self._outbox.put(replace(row, status=EffectStatus.ACKED, result=box.data, at=self.wall, writes=writes))
            self._outbox.use(row.key)
            self._unpark(world)
            self._answer(world, Outcome(box, at=self.wall), writes)
        elif isinstance(answer, NotSent):
            self._outbox.put(replace(row, status=EffectStatus.PREPARED))
            self._outbox.forget_resolution(row.key)
            self._park(world)
        else:
            self._failure = _no_answer(row, answer)

    def _written_by_hand(self, world: World, row: EffectRecord, answer: Sent) -> tuple[Write, ...] | None:
        """State changes of an effect that somebody answers for; None is a failure: it had to be said what they are."""
        if answer.writes is None:
            if not isinstance(world.waiting, CallRequest) or world.waiting.step.state_parameter is None:
                return ()
            self._block_on(row)
            self._failure = BackendContractError(
                f"the answer about {row.step}",
                "does not say what it wrote to the state",
                "say Sent(result, writes={key: value}), writes={} for nothing, or writes=function_of_the_state",
            )
            return None
        state = State(world.cells)
        if callable(answer.writes):
            answer.writes(state)
        else:
            for key, value in answer.writes.items():
                state.put(key, value)
        return writes_of(state.take_accesses())

    def _start_ahead(self, world: World, request: CallRequest) -> bool:
        """Start an attempt on guesses, if its effect, the policy, the budget and the slots allow it."""
        step = request.step
        policy = self._policy
        ledger = self.ledger
        key = self._outbox.key(request.position, step.name, world.arguments)
        if not self._may_run_ahead(world, step, key) or not ledger.affords(policy.budget, step, self.now):
            return False
        assumptions = self._assumptions(world)
        if not assumptions:
            return False  # what it was guessed from has just come true; its answer is on its way
        opportunity = Opportunity(
            step.name,
            step.effect,
            tuple(assumption for assumption, _guess in assumptions),
            self._expected_wait(assumptions),
            step.usual_seconds,
            step.money,
            step.tokens,
            ledger.running_ahead,
            ledger.spent(self.now),
        )
        if not policy.allows(opportunity):
            return False
        if not self._take_slot(step, speculative=True):
            if step.resource is not None and not self._has_slot(step.resource):
                world.queued = True
                self._undecided.pop(world, None)
                self._guessing.setdefault(step.resource, deque()).append(world)
            return False
        row = None
        if step.effect.is_external:
            row = EffectRecord(key, request.position, step.name, EffectStatus.SENT, world.arguments, tries=1)
            self._outbox.put(row)
        if world.started_ahead is None:
            world.started_ahead = self.now
        self._start_step(world, request, key, row, speculative=True)
        return True

    def _may_run_ahead(self, world: World, step: Step[..., Any], key: str) -> bool:
        if step.effect is Effect.IRREVERSIBLE or step.effect not in self._policy.effects:
            return False
        if self._outbox.get(key) is not None:
            return False  # an effect of this very call is on its way: one attempt at a time may use its key
        if step.effect.is_external and self._follows_on(world, step.resource):
            return False  # the same resource sees effects in program order
        if step.effect.is_external and step.state_parameter is not None:
            return False  # a key it reads may yet change below it, and it could not be made anew
        return world.incarnation < _MAX_INCARNATIONS and self._steps_ahead(world) <= _MAX_AHEAD

    def _follows_on(self, world: World, resource: str | None) -> bool:
        """Is an unanswered call before this one going to change the same resource?"""
        above = world.parent
        while above is not None and resource is not None:
            waiting = above.waiting
            if (
                isinstance(waiting, CallRequest)
                and waiting.step.resource == resource
                and waiting.step.effect.is_external
            ):
                return True
            join = above.strand.join
            above = above.parent if above.parent is not None else join.world if join is not None else None
        return False

    def _start_step(
        self, world: World, request: CallRequest, key: str, row: EffectRecord | None, *, speculative: bool
    ) -> None:
        step = request.step
        self._unpark(world)
        task = self._new_task(TaskKind.STEP, step, request.position, world.arguments, key)
        task.speculative = speculative
        task.holds = step.resource
        task.money, task.tokens = step.money, step.tokens
        task.effect = row
        task.worlds.append(world)
        if step.state_parameter is not None:
            task.state = State(world.cells)
        if not request.kwargs and _can_share(request.args):
            task.args = request.args
        world.task = task
        if step.is_reusable:
            self._pure[step.name, world.arguments] = task
        self.ledger.started(task)
        if speculative:
            self._watch_seconds()
        self._actions.append(Start(task))

    def _step_done(self, task: Task, outcome: Outcome) -> None:
        self.ledger.ended(task, self.now)
        if task.step.is_reusable and self._pure.get((task.step.name, task.arguments)) is task:
            del self._pure[task.step.name, task.arguments]
        accesses = task.state.take_accesses() if task.state is not None else ()
        if task.effect is not None:
            row = _answered(task.effect, outcome, () if outcome.failed else accesses)
            self._outbox.put(row)
            if task.worlds:
                self._outbox.use(row.key)
        if not task.worlds and (task.speculative or task.doubtful):
            self.ledger.wasted(task)  # its world fell before it ended
        for world in list(task.worlds):
            if world.dead or world.task is not task or (self._doomed and self._is_falling(world)):
                continue
            world.task = None
            if accesses and revalidate(world.cells, accesses) is None:
                # A guess about something that writes the state came true meanwhile, and changed what the step read.
                self.ledger.squashed_reader(task)
                world.incarnation += 1
                self._park(world)
                continue
            self.ledger.cleared(task)
            if task.speculative and world is task.worlds[0]:
                world.ahead_seconds += task.seconds
                world.finished_ahead.append(task)
            self._settle(world, outcome, accesses)

    # ---------------------------------------------------------------------------------------------------- plain calls

    def _is_alone(self, task: Task) -> bool:
        """True when a plain call of the workflow itself is all that is going on."""
        head = self._root.head
        return (
            head.task is task
            and task.status is TaskStatus.RUNNING
            and len(self._tasks) == 1
            and len(task.worlds) == 1
            and not head.children
            and not self._timeline.is_replaying
            and not (self._parked or self._doomed or self._deeper or self._reusable or self._outbox.has_rows)
        )

    def _go_straight_on(self, task: Task, outcome: Outcome) -> Decision:
        """The usual case of a program without guesses, in one go: answer, commit, start the next call.

        Does what the general way does, which costs three times as much because it has to consider everything else.
        """
        world = self._root.head
        task.status = TaskStatus.DONE
        del self._tasks[task.number]
        if self._pure:
            self._pure.clear()
        self.ledger.ended(task, self.now)
        program = world.program
        record = Record(
            world.log, world.waiting, task.arguments, outcome, world.accesses, world.events,  # type: ignore[arg-type]
            shown=world.shown,
        )  # fmt: skip
        if world.log is not None:
            record.number = world.log.number + 1
        world.log, world.task, world.call = record, None, None
        was_silent = not world.accesses and not world.events
        waiting = program.resume(outcome)
        world.accesses, world.events = program.state.take_accesses(), program.take_events()
        world.shown = ()
        world.waiting = waiting
        world.arguments = b""
        if not was_silent or not isinstance(waiting, CallRequest) or not self._is_known_and_plain(waiting.step):
            self._ready.append(world)
            return self._decide()
        following = waiting.step
        try:
            arguments = encode_arguments(waiting.args, waiting.kwargs, following.arguments_label)
        except SpecflowError:
            self._ready.append(world)  # the general way gives the refusal to the program
            return self._decide()
        world.arguments = arguments
        self._root.flushed = record
        number = self._next_task
        self._next_task = number + 1
        coming = Task(number, TaskKind.STEP, following, waiting.position, arguments, started_at=self.now)
        coming.money, coming.tokens = following.money, following.tokens
        coming.worlds.append(world)
        if not waiting.kwargs and _can_share(waiting.args):
            coming.args = waiting.args
        self._tasks[number] = world.task = self.straight = coming
        self.ledger.followed(task, coming)
        return Decision(self._timeline.add_plain(record, task.step.name), (), (Start(coming),))

    def _is_known_and_plain(self, step: Step[..., Any]) -> bool:
        return step.is_plain and self._steps.get(step.name) is step

    def _is_falling(self, world: World) -> bool:
        """Does it rest on a guess that turned out wrong just now? The end of one task may answer several worlds."""
        current: World | None = world
        while current is not None:
            if current in self._doomed:
                return True
            join = current.strand.join
            current = current.parent if current.parent is not None else join.world if join is not None else None
        return False

    # ------------------------------------------------------------------------------------------------------- verdicts

    def _settle(self, world: World, outcome: Outcome, accesses: Sequence[Access]) -> None:
        """A call has its real result: have it judged where its verifier takes time, else answer."""
        request = world.waiting
        if not isinstance(request, CallRequest) or outcome.failed or not request.step.judged:
            self._answer(world, outcome, accesses)
            return
        child = next((child for child in world.children if child.guess and child.guess.box == outcome.box), None)
        child = child or next(
            (child for child in world.children if child.guess and child.guess.assumption.rank >= 0), None
        )
        if child is None and len(self._assumptions(world)) < self._policy.depth and outcome.box is not None:
            # Nobody guessed: the result itself is the guess that the judge decides about.
            self._fork(world, request, Prediction(outcome.box.fresh(), 1.0, source="unjudged"), -1, None)
            child = world.children[-1] if world.children else None
        guessed = child.guess.box if child is not None and child.guess is not None else outcome.box
        actual = outcome.box
        task = self._new_task(
            TaskKind.JUDGE,
            request.step,
            request.position,
            world.arguments,
            "",
        )
        task.judged = Box((guessed.fresh() if guessed else None, actual.fresh() if actual else None))
        task.worlds.append(world)
        task.outcome = outcome
        task.speculative = not self._rests_on_nothing(world)
        if accesses:
            task.state = State(world.cells)
            for access in accesses:
                if isinstance(access, Write):
                    task.state.replay((access,))
        world.judge = task
        world.accesses_of_step = tuple(accesses)
        self._actions.append(Start(task))

    def _judge_done(self, task: Task, result: Any) -> None:
        world = task.worlds[0]
        if world.dead or world.judge is not task or task.outcome is None:
            return
        world.judge = None
        accesses = world.accesses_of_step
        world.accesses_of_step = ()
        outcome = task.outcome
        mode = task.step.verifier.mode
        if isinstance(result, BaseException):
            failed = Outcome.raised(result, at=self.wall, seconds=outcome.seconds)
            self._answer(world, failed, accesses, judged=mode)
            return
        if not isinstance(result, Verdict):
            self._failure = _no_verdict(task.step, result)
            return
        if result.accepted and result.replaces:
            self._failure = BackendContractError(
                f"the verifier of {task.step.name}",
                "accepts a guess and replaces it",
                "Verdict(accepted=True) takes the guess, Verdict(accepted=False, replacement=x, replaces=True) takes x",
            )
            return
        guessed, _actual = task.judged.fresh() if task.judged is not None else (None, None)
        if result.accepted:
            outcome = Outcome(Box(guessed), at=outcome.at, seconds=outcome.seconds)
        elif result.replaces:
            where = f"the replacement by the verifier of {task.step.name}"
            try:
                outcome = Outcome(Box(result.replacement, where), at=self.wall, seconds=outcome.seconds)
            except SpecflowError as error:
                outcome = Outcome.raised(error, at=self.wall, seconds=outcome.seconds)
        self._answer(world, outcome, accesses, judged=mode)

    def _answer(
        self, world: World, outcome: Outcome, accesses: Sequence[Access] = (), *, judged: Mode | None = None
    ) -> None:
        """The request that a world waits on has its answer: keep the world that guessed it, squash the others.

        Args:
            world: which world.
            outcome: the answer.
            accesses: what the step read and wrote.
            judged: the mode under which the answer was accepted; None when guesses are still to be compared with it.
        """
        request = world.waiting
        mode = judged if judged is not None else Mode.EXACT
        children, world.children = world.children, []
        chosen: World | None = None
        resolutions: list[Resolution] = []
        for child in children:
            guess = child.guess
            if guess is None:
                continue
            held = None if chosen is not None else self._holds(request, guess, outcome, judged=judged is not None)
            hit = held is not None
            if held is not None:
                chosen = child
                mode = mode if judged is not None else held
            if guess.assumption.rank >= 0:
                resolutions.append(self._resolution(child, guess, hit=hit))
        if world.prediction is not None:
            self._cancel(world.prediction)
            world.prediction = None
        for child in children:
            if child is not chosen:
                for fallen in family(child):
                    self._give_back(fallen)  # the world that goes on may want what they have finished
        record = chosen.guess.record if chosen is not None and chosen.guess is not None else None
        if record is None:
            record = self._record(world, outcome, accesses)
            record.resolutions = tuple(resolutions)
            record.mode = mode
            self._advance(world, record)
        else:
            record.step_accesses = tuple(accesses)
            record.outcome.seconds = outcome.seconds
            record.resolutions = tuple(resolutions)
            record.branches = _branches(world)
            record.call = world.call
            record.mode = mode
            children.remove(chosen)  # type: ignore[arg-type]
            self._promote(world, chosen, accesses)  # type: ignore[arg-type]
        # Squashed a little later: the world that goes on may want what they have started.
        self._doomed.extend(children)

    def _holds(self, request: object, guess: Guess, outcome: Outcome, *, judged: bool) -> Mode | None:
        """The mode under which a guess holds; None when it does not."""
        if outcome.failed or outcome.box is None or guess.box == outcome.box:
            return None if outcome.box is None else Mode.EXACT
        if judged or not isinstance(request, CallRequest) or request.step.judged:
            return None
        verifier = request.step.verifier
        try:
            verdict = verifier.verify(guess.box.fresh(), outcome.box.fresh())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's verifier
            self.ledger.verifier_failed(request.step.name, error)  # the guess may be something it never expected
            return None
        if not isinstance(verdict, Verdict):
            self._failure = _no_verdict(request.step, verdict)
            return None
        if verdict.replaces:
            self._failure = BackendContractError(
                f"the verifier of {request.step.name}",
                "replaces the result",
                "make its verify() async: only a judge, who sees every result, may put something else in its place",
            )
            return None
        return verifier.mode if verdict.accepted else None

    def _resolution(self, child: World, guess: Guess, *, hit: bool) -> Resolution:
        if hit:
            return Resolution(guess.assumption, hit=True, saved_seconds=self._head_start(child))
        wasted = 0.0
        for world in family(child):
            wasted += world.ahead_seconds
            if world.task is not None and world.task.speculative:
                wasted += self.now - world.task.started_at
        return Resolution(guess.assumption, hit=False, wasted_seconds=wasted)

    def _head_start(self, world: World) -> float:
        """Seconds of work that a world has done before its guess was confirmed, on its critical path at most."""
        if world.started_ahead is None:
            return 0.0
        worked = world.ahead_seconds
        if world.task is not None and world.task.speculative:
            worked += self.now - world.task.started_at
        return min(worked, self.now - world.started_ahead)

    def _record(self, world: World, outcome: Outcome, accesses: Sequence[Access]) -> Record:
        # A step that failed has changed nothing, but it may have failed because of what it read.
        has_failed = outcome.failed and isinstance(world.waiting, CallRequest)
        record = Record(
            world.log,
            world.waiting,  # type: ignore[arg-type]  # a finished world is not answered
            world.arguments if isinstance(world.waiting, CallRequest) else b"",
            outcome,
            world.accesses,
            world.events,
            () if has_failed else tuple(accesses),
            _branches(world),
            (),
            world.call,
            tuple(accesses) if has_failed else (),
            shown=world.shown,
        )
        if world.log is not None:
            record.number = world.log.number + 1
        if outcome.at == 0.0:
            outcome.at = self.wall
        return record

    def _advance(self, world: World, record: Record) -> None:
        """The world itself goes on with an answer."""
        if (
            world.script
            and isinstance(record.request, CallRequest)
            and record.request.step.effect is not Effect.BUFFERED
        ):
            came_true = record.outcome.box is not None and record.outcome.box == _box_or_none(world.script[0])
            world.script = world.script[1:] if came_true else ()
        world.log = record
        world.join = None
        world.call = None
        world.predicted = False
        self._unpark(world)
        if record.step_accesses:
            world.program.state.replay(record.step_accesses)
            world.program.forget()
        self._stopped(world, world.program.resume(record.outcome))

    def _stopped(self, world: World, request: Any) -> None:
        world.waiting = request
        world.accesses = world.program.state.take_accesses()
        world.events = world.program.take_events()
        world.shown = ()
        world.arguments = b""
        if world.events and not self._rests_on_nothing(world):
            world.shown = tuple(range(self._next_mark, self._next_mark + len(world.events)))
            confidence = 1.0
            for assumption, _guess in self._assumptions(world):
                confidence *= assumption.confidence
            for data in world.events:
                world.marks.append((self._next_mark, world.log))
                self._actions.append(Show(self._next_mark, _position(world), data, confidence))
                self._next_mark += 1
        self._ready.append(world)

    def _promote(self, world: World, child: World, accesses: Sequence[Access]) -> None:
        """A guess held: the world that rested on it takes its parent's place."""
        guess = child.guess
        child.guess = world.guess
        child.parent = world.parent
        if world.parent is not None:
            siblings = world.parent.children
            siblings[siblings.index(world)] = child
        else:
            child.strand.head = child
        world.dead = True
        world.strand.keep(world.program, world.log)
        self._unpark(world)
        if world.join is not None:
            world.join = None
        self._inherit(world, child)
        writes = writes_of(accesses)
        if writes and guess is not None:
            self._rebase(child, guess.record, writes)
        if child.parent is None and self._rests_on_nothing(child):
            self._became_true(child)
        if isinstance(child.waiting, Finished | SleepRequest):
            self._ready.append(child)
        self._deeper.append(child)

    def _inherit(self, world: World, child: World) -> None:
        """What a world has shown and spent on the guess that it rests on is now at risk with the child."""
        child.marks[:0] = world.marks
        child.finished_ahead[:0] = world.finished_ahead
        child.ahead_seconds += world.ahead_seconds
        if world.started_ahead is not None:
            child.started_ahead = world.started_ahead

    def _gather_risk(self, branch: World, world: World) -> None:
        """What a finished branch has shown and spent on guesses is at risk with the world that waited for it."""
        world.marks += [(mark, world.log) for mark, _log in branch.marks]
        world.finished_ahead += branch.finished_ahead
        world.ahead_seconds += branch.ahead_seconds
        if branch.started_ahead is not None:
            world.started_ahead = min(branch.started_ahead, world.started_ahead or branch.started_ahead)
        branch.marks, branch.finished_ahead, branch.ahead_seconds = [], [], 0.0

    def _became_true(self, world: World) -> None:
        """What a world has started no longer rests on guesses."""
        for current in [world, *(own for own in family(world) if own is not world)]:
            if not self._rests_on_nothing(current):
                continue
            current.marks.clear()
            self.ledger.promoted(current)
            if current.task is not None:
                self._make_authoritative(current.task)
            if current.judge is not None:
                current.judge.speculative = False
            current.true_since = self.wall
            if current.queued:
                current.queued = False
                self._undecided[current] = None
            if current.halted or (current is not world and isinstance(current.waiting, SleepRequest)):
                current.halted = False
                self._ready.append(current)

    def _make_authoritative(self, task: Task) -> None:
        if task.speculative:
            self.ledger.confirmed(task, self.now)
            task.speculative = False

    def _rebase(self, world: World, assumed: Record, writes: Sequence[Write]) -> None:
        """A step whose result was guessed right also wrote the state: keep what did not read what it wrote.

        The world is rebuilt up to its first record that would have read something else.
        """
        cells: Cells | None = assumed_cells(world.strand, assumed, writes)
        kept = assumed
        for record in world.strand.records(world.log, assumed):
            if cells is not None:
                cells = revalidate(cells, record.program_accesses)
            if cells is None or record.branches or revalidate(cells, record.tried) is None:
                break  # what parallel branches have read is not on their common record: they run again
            after = revalidate(cells, record.step_accesses)
            if after is None:
                break
            cells, kept = after, record
        else:
            seen = revalidate(cells, world.accesses) if cells is not None and world.join is None else None
            if seen is not None and revalidate(seen, world.accesses_of_step) is not None:
                world.program.state.rebase(seen)
                for child in list(world.children):
                    self._rebase_or_squash(child)
                return
        self._rebuild(world, kept)

    def _rebase_or_squash(self, child: World) -> None:
        # Its past changed below its own guess: forked anew when its parent's call is looked at again.
        parent = child.parent
        if parent is not None:
            parent.children.remove(child)
            parent.predicted = False
        self._squash(child)

    def _rebuild(self, world: World, kept: Record) -> None:
        for child in world.children:
            self._squash(child)
        world.children = []
        self._drop_work(world)
        self._retract(world, world.strand.records(kept.previous))  # what follows ``kept`` is shown anew
        self._give_back_results(world.strand.records(world.log, kept))
        last = kept.request.position
        for task in [task for task in world.finished_ahead if task.position[: len(last)] > last]:
            world.finished_ahead.remove(task)
            self.ledger.wasted(task)
        self.ledger.rebuilt += 1
        world.incarnation += 1
        world.program.close()
        world.log = kept
        world.call = None
        world.predicted = False
        world.program, request = self._replayed(world.strand, kept)
        self._stopped(world, request)

    def _replayed(self, strand: Strand, log: Record | None) -> tuple[Program, Any]:
        """A program that was answered all records up to ``log``, and what it waits on."""
        spare = strand.take_spare(log)
        if spare is not None:
            program, records = spare
            return program, program.catch_up(_answers(records))
        program = Program(strand.function, prefix=strand.prefix, seed=self._seed, cells=strand.base, at=strand.at)
        return program, replay(program, _answers(strand.records(log)))

    # --------------------------------------------------------------------------------------------------------- guesses

    def _predict(self, world: World, request: CallRequest) -> None:
        """Ask what the call may return, and fork a world for each guess that depth and width allow."""
        predictor = request.step.predictor
        if world.predicted or world.dead or world.waiting is not request:
            return
        script = world.script
        if predictor is None and not script:
            return
        args, kwargs = decode(world.arguments)  # copies: a predictor may keep them, the program may change its own
        call = Call(
            request.step.name,
            tuple(args),
            kwargs,
            request.position,
            Recent(world.log, world.strand, request.step.name, self._before.get(request.step.name, ())),
            Trail(world.log, world.strand),
        )
        if predictor is not None:
            world.call = call
        if len(self._assumptions(world)) >= self._policy.depth or self._steps_ahead(world) > _MAX_AHEAD:
            return
        world.predicted = True
        if script:
            prediction = Prediction(script[0], world.script_confidence, script[1:], world.script_source)
            self.ledger.predicted(request.step.name)
            self._fork(world, request, prediction, 0, None)
            return
        if predictor is not None and self._affords_guess(request.step):
            self._ask(world, request, predictor, call)

    def _ask(self, world: World, request: CallRequest, predictor: Predictor, call: Call) -> None:
        guesses: Any = None
        if not inspect.iscoroutinefunction(predictor.predict):
            try:
                guesses = predictor.predict(call)
                if not inspect.isawaitable(guesses):
                    self._fork_all(world, request, guesses)
                    return
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a predictor that fails costs its guess, nothing else
                self.ledger.predictor_failed(request.step.name, error)
                return
        if self.ledger.affords(self._policy.budget, None, self.now):
            task = self._new_task(TaskKind.PREDICT, request.step, request.position, world.arguments, "")
            task.call = call
            task.guesses = guesses
            task.worlds.append(world)
            task.speculative = True
            world.prediction = task
            self.ledger.started(task)
            self._actions.append(Start(task))
        elif guesses is not None:
            let_go(guesses)

    def _affords_guess(self, step: Step[..., Any]) -> bool:
        return self.ledger.affords_guess(self._policy.budget, step.name, self.now)

    def _prediction_done(self, task: Task, result: Any) -> None:
        self.ledger.ended(task, self.now)
        world = task.worlds[0]
        if world.prediction is task:
            world.prediction = None
        if isinstance(result, BaseException):
            self.ledger.predictor_failed(task.step.name, result)
        elif not world.dead and isinstance(world.waiting, CallRequest) and world.waiting.position == task.position:
            try:
                self._fork_all(world, world.waiting, result)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                self.ledger.predictor_failed(task.step.name, error)

    def _fork_all(self, world: World, request: CallRequest, predictions: Iterable[Prediction]) -> None:
        price = 0.0
        try:
            for rank, prediction in enumerate(predictions):
                if rank >= self._policy.width or world.dead:
                    break
                price += prediction.money
                self.ledger.predicted(request.step.name)
                self._fork(world, request, prediction, rank, request.step)
        finally:
            self.ledger.charged(request.step.name, price)

    def _predict_gather(self, world: World, request: GatherRequest) -> None:
        """Guess the results of parallel calls together, where each has a quick predictor."""
        if world.dead or self._timeline.recorded or len(self._assumptions(world)) >= self._policy.depth:
            return
        results: list[tuple[Any, None]] = []
        confidence = 1.0
        for pending in request.calls:
            guess = self._quick_guess(world, request.position, pending)
            if guess is None:
                return
            results.append((guess.value, None))
            confidence *= guess.confidence
        prediction = Prediction(results, confidence, source="gather")
        self.ledger.predicted("gather")
        self._fork(world, request, prediction, 0, None)

    def _quick_guess(self, world: World, position: Position, pending: PendingCall[Any]) -> Prediction | None:
        """The likeliest result of one of several parallel calls, if it can be guessed at once and by itself."""
        step = pending.target
        if not isinstance(step, Step) or step.predictor is None or step.state_parameter is not None or step.judged:
            return None
        if inspect.iscoroutinefunction(step.predictor.predict) or not self._affords_guess(step):
            return None
        try:
            self._meet(step)
            args, kwargs = decode(encode_arguments(pending.args, pending.kwargs, step.arguments_label))
            recent = Recent(world.log, world.strand, step.name, self._before[step.name])
            call = Call(step.name, tuple(args), kwargs, position, recent, Trail(world.log, world.strand))
            guesses: Any = step.predictor.predict(call)
            if inspect.isawaitable(guesses):
                let_go(guesses)
                return None
            guess = next(iter(guesses), None)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self.ledger.predictor_failed(step.name, error)
            return None
        if guess is not None:
            self.ledger.charged(step.name, guess.money)
        return guess

    def _fork(self, world: World, request: Any, prediction: Prediction, rank: int, step: Step[..., Any] | None) -> None:
        try:
            box = Box(prediction.value, "a prediction")
        except SpecflowError as error:
            self.ledger.predictor_failed(_step_name(request), error)
            return
        if any(child.guess is not None and child.guess.box == box for child in world.children):
            return
        source = prediction.source or (type(step.predictor).__name__ if step is not None else "")
        assumption = Assumption(_step_name(request), request.position, source, rank, prediction.confidence)
        self._fork_on(world, box, assumption, prediction.then)

    def _fork_on(
        self,
        world: World,
        box: Box,
        assumption: Assumption,
        then: tuple[Any, ...] = (),
        basis: tuple[World, ...] = (),
    ) -> None:
        record = self._record(world, Outcome(box, at=self.wall), ())
        since = world.task.started_at if world.task is not None else self.now
        guess = Guess(box, assumption, since, record, basis)
        program, request = self._replayed(world.strand, record)
        child = World(world.strand, world, guess, program, log=record)
        child.script, child.script_confidence, child.script_source = then, assumption.confidence, assumption.source
        world.children.append(child)
        self._stopped(child, request)

    def _squash(self, world: World) -> None:
        """Drop a world and everything that rests on it."""
        if world.dead:
            return
        for child in world.children:
            self._squash(child)
        world.children = []
        self._drop_work(world)
        world.dead = True
        world.program.close()
        self.ledger.squashed(world)
        self._give_back(world)
        self._retract(world)
        strand = world.strand
        if strand.join is not None and strand.join.is_pipeline:
            for other in list(strand.join.worlds()):
                if other.guess is not None and world in other.guess.basis and not other.dead:
                    if other.parent is not None and other in other.parent.children:
                        other.parent.children.remove(other)
                        other.parent.predicted = False
                    self._squash(other)

    def _retract(self, world: World, kept: Sequence[Record] = ()) -> None:
        """Take back what a world has shown, but for what it showed after these records."""
        stays = {id(record) for record in kept}
        for mark, log in world.marks:
            if id(log) not in stays:
                self._actions.append(Retract(mark))
        world.marks = [(mark, log) for mark, log in world.marks if id(log) in stays]

    def _give_back(self, world: World) -> None:
        """Results of a squashed world that an equal call may still use."""
        if world.given_back:
            return
        world.given_back = True
        self._give_back_results(
            world.strand.records(world.log, world.guess.record if world.guess is not None else None)
        )

    def _give_back_results(self, records: Iterable[Record]) -> None:
        for record in records:
            for branch in record.branches:
                self._give_back_results(branch.records(branch.head.log))
            request = record.request
            if not isinstance(request, CallRequest) or record.outcome.failed:
                continue
            step = request.step
            if step.effect.is_external:
                self._outbox.give_back(self._outbox.key(request.position, request.step.name, record.arguments))
            elif step.is_reusable and record.mode is Mode.EXACT and not step.judged:
                # Otherwise what stands there is a guess that was close enough, or what a judge made of the result.
                self._reusable[step.name, record.arguments] = record.outcome
                while len(self._reusable) > _REUSABLE:
                    self._reusable.popitem(last=False)

    def _drop_work(self, world: World) -> None:
        """Let go of the attempt, judge, predictor and branches of a world."""
        self._unpark(world)
        if world.task is not None:
            task, world.task = world.task, None
            if world in task.worlds:
                task.worlds.remove(world)
            # What may have changed the outside world is not stopped half-way: its result is needed to undo it.
            if not task.worlds and not task.step.effect.is_external:
                self._cancel(task)
        for helper in (world.judge, world.prediction):
            if helper is not None:
                self._cancel(helper)
        world.judge = world.prediction = None
        if world.join is not None:
            join, world.join = world.join, None
            for strand in join.strands:
                self._squash(strand.head)
                strand.let_go()

    def _cancel(self, task: Task) -> None:
        if task.status is not TaskStatus.RUNNING:
            return
        task.status = TaskStatus.CANCELLED
        self.ledger.cancelled(task, self.now)
        if self._pure.get((task.step.name, task.arguments)) is task:
            del self._pure[task.step.name, task.arguments]
        self._actions.append(Cancel(task))

    def _assumptions(self, world: World) -> list[tuple[Assumption, Guess]]:
        """Unresolved guesses that a world rests on, oldest first."""
        join = world.strand.join
        above = world.parent if world.parent is not None else join.world if join is not None else None
        found = self._assumptions(above) if above is not None else []
        guess = world.guess
        if guess is not None:
            known = {id(other) for _assumption, other in found}
            for basis in guess.basis:
                found.extend(item for item in self._assumptions(basis) if id(item[1]) not in known)
            if not guess.basis:
                found.append((guess.assumption, guess))
        return found

    def _rests_on_nothing(self, world: World) -> bool:
        if world.strand.join is None:
            return world.parent is None
        current: World | None = world
        while current is not None:
            if current.parent is not None:
                return False
            join = current.strand.join
            current = join.world if join is not None else None
        return True

    def _steps_ahead(self, world: World) -> int:
        """Requests of its strand that were answered on guesses."""
        head = world.strand.head
        if not self._rests_on_nothing(head):
            return _number(world.log)
        return _number(world.log) - _number(head.log)

    def _expected_wait(self, assumptions: Sequence[tuple[Assumption, Guess]]) -> float | None:
        """Seconds until the oldest guess resolves."""
        assumption, guess = assumptions[0]
        step = self._steps.get(assumption.step)
        if step is None or step.usual_seconds is None:
            return None
        return max(0.0, step.usual_seconds - (self.now - guess.waited_since))

    # -------------------------------------------------------------------------------------------------------- branches

    def _launch_join(
        self,
        world: World,
        position: Position,
        bodies: Sequence[tuple[str, Callable[[Context], Coroutine[Any, Any, Any]]]],
        *,
        return_exceptions: bool,
        is_pipeline: bool = False,
    ) -> None:
        join = Join(world, [], world.cells, return_exceptions, is_pipeline, len(bodies))
        for index, (name, body) in enumerate(bodies):
            strand = Strand(body, (*position, index), name, world.cells, world.program.at, join, index)
            join.strands.append(strand)
        world.join = join
        for strand in join.strands:
            self._start_strand(strand)

    def _start_strand(self, strand: Strand) -> None:
        program = Program(strand.function, prefix=strand.prefix, seed=self._seed, cells=strand.base, at=strand.at)
        strand.head = World(strand, None, None, program)
        self._stopped(strand.head, program.start())

    def _world_finished(self, world: World, finished: Finished) -> None:
        strand = world.strand
        if strand.join is not None and strand.join.is_pipeline:
            self._feed_dependents(world)
        if world.parent is not None or world.dead:
            return
        join = strand.join
        if join is None:
            self._finished = finished.outcome
            return
        if join.world.join is not join or strand.is_counted:
            return
        strand.is_counted = True
        strand.let_go()
        join.open -= 1
        if join.open == 0:
            self._join_done(join)

    def _join_done(self, join: Join) -> None:
        outcomes: list[Outcome] = []
        changes: list[tuple[str, Sequence[Write]]] = []
        for strand in join.strands:
            waiting = strand.head.waiting
            if not isinstance(waiting, Finished):
                return
            outcomes.append(waiting.outcome)
            name = f"{strand.name} ({format_position(strand.prefix)})"
            changes.append((name, branch_writes(strand)))
        for strand in join.strands:
            self._gather_risk(strand.head, join.world)
        at = max((outcome.at for outcome in outcomes), default=self.wall)
        failed = next((outcome for outcome in outcomes if outcome.failed), None)
        try:
            merged = merge(join.base, changes) if not join.is_pipeline else pipeline_writes(join)
        except StateConflictError as conflict:
            self._answer(join.world, Outcome.raised(conflict, at=at))
            return
        if failed is not None and not join.return_exceptions:
            self._answer(join.world, Outcome(None, failed.fresh_error(), at=at), merged)
            return
        values = [
            (outcome.box.fresh() if outcome.box is not None else None, outcome.encoded_error()) for outcome in outcomes
        ]
        self._answer(join.world, Outcome(Box(values), at=at), merged)

    # ------------------------------------------------------------------------------------------------------- pipelines

    def _launch_inputs(self, world: World, request: InputsRequest) -> None:
        """A branch of a pipeline waits for others: answer, or run ahead on what they may return."""
        join = world.strand.join
        if join is None:
            return
        strands = [join.strands[index] for index in request.branches]
        if world.parent is None and all(self._is_done(strand) for strand in strands):
            self._answer_inputs(world, strands)
            return
        self._guess_inputs(world, request, strands)

    def _is_done(self, strand: Strand) -> bool:
        head = strand.head
        return head is not None and isinstance(head.waiting, Finished)

    def _answer_inputs(self, world: World, strands: Sequence[Strand]) -> None:
        failed = next((strand for strand in strands if outcome_of(strand.head).failed), None)
        at = max((outcome_of(strand.head).at for strand in strands), default=self.wall)
        try:
            writes = inherited_writes(world.strand, strands)
        except StateConflictError as conflict:
            self._answer(world, Outcome.raised(conflict, at=at))
            return
        if failed is not None:
            self._answer(world, Outcome(None, outcome_of(failed.head).fresh_error(), at=at))
            return
        values = [value_of(strand.head) for strand in strands]
        self._answer(world, Outcome(Box(values), at=at), writes)

    def _feed_dependents(self, world: World) -> None:
        """A world of a branch has a result: others may go on with it, for real or on the guess it rests on."""
        join = world.strand.join
        if join is None:
            return
        for strand in join.strands:
            head = strand.head
            if head is None or head.dead or not isinstance(head.waiting, InputsRequest):
                continue
            if world.strand.index in head.waiting.branches:
                self._launch_inputs(head, head.waiting)

    def _guess_inputs(self, world: World, request: InputsRequest, strands: Sequence[Strand]) -> None:
        if self._policy.depth < 1 or world.dead or self._timeline.recorded:
            return
        candidates = [self._candidates(strand) for strand in strands]
        if not all(candidates):
            return
        for combination in best_combinations(candidates, self._policy.width):
            guessed = [candidate for candidate in combination if candidate.basis is not None]
            if not guessed:
                continue
            box = Box([candidate.value for candidate in combination])
            basis = tuple(candidate.basis for candidate in guessed if candidate.basis is not None)
            if any(child.guess is not None and child.guess.box == box for child in world.children):
                continue
            # Inputs may rest on the same guess: it counts once.
            rests_on = {id(guess): one for other in basis for one, guess in self._assumptions(other)}
            places = {one.position for one in rests_on.values()}
            if len(places) < len(rests_on) or len(rests_on) > self._policy.depth:
                continue  # they contradict each other, or are too many
            if len(world.children) >= self._policy.width:
                continue
            confidence = math.prod(one.confidence for one in rests_on.values())
            assumption = Assumption(world.strand.name, request.position, "inputs", -1, confidence)
            self._fork_on(world, box, assumption, basis=basis)

    def _candidates(self, strand: Strand) -> list[Candidate]:
        """Results that a branch has or may have, likeliest first."""
        head = strand.head
        if head is None:
            return []
        if isinstance(head.waiting, Finished):
            outcome = head.waiting.outcome
            return [] if outcome.failed else [Candidate(value_of(head), 1.0, None)]
        found: list[Candidate] = []
        for world in family(head):
            if world is head or world.dead or world.strand is not strand or not isinstance(world.waiting, Finished):
                continue
            if world.waiting.outcome.failed:
                continue
            confidence = 1.0
            for assumption, _guess in self._assumptions(world):
                confidence *= assumption.confidence
            found.append(Candidate(value_of(world), confidence, world))
        found.sort(key=lambda candidate: -candidate.confidence)
        return found

    # ---------------------------------------------------------------------------------------------------------- sleeps

    def _launch_sleep(self, world: World, request: SleepRequest) -> None:
        if not self._rests_on_nothing(world):
            return
        entry = self._recorded_as(world, request, EntryKind.SLEEP)
        if self._failure is not None:
            return
        if entry is not None:
            self._advance(world, self._record(world, Outcome(_NOTHING, at=entry.at), ()))
            return
        # Counted from the answer before, which is on record: after a crash only the rest is waited for. Where it was
        # guessed, what is on record is when it was guessed; what counts is when it was found to be right.
        since = max(world.program.at, world.true_since)
        left = max(0.0, since + request.seconds - self.wall)
        self._actions.append(Wake(self.now + left, (world, request)))

    # ----------------------------------------------------------------------------------------------------------- slots

    def _take_slot(self, step: Step[..., Any], *, speculative: bool) -> bool:
        budget = self._policy.budget
        if speculative and budget.slots is not None and self.ledger.slots_taken >= budget.slots:
            return False
        resource = step.resource
        if resource is None:
            return True
        if self._has_slot(resource):
            self._held[resource] = self._held.get(resource, 0) + 1
            return True
        if not speculative:
            self._preempt(resource)
        return False

    def _has_slot(self, resource: str) -> bool:
        limit = self._limits.get(resource)
        return limit is None or self._held.get(resource, 0) < limit

    def _preempt(self, resource: str) -> None:
        """Real work waits for a slot: take it from the youngest attempt on a guess. It is free when that one ended."""
        if not self.ledger.running_ahead:
            return
        if any(task.holds == resource and task.status is TaskStatus.CANCELLED for task in self._tasks.values()):
            return
        for task in reversed(list(self._tasks.values())):
            if task.holds == resource and _may_stop(task):
                self._interrupt(task)
                return

    def _interrupt(self, task: Task) -> None:
        """Stop an attempt; its worlds wait to start it again."""
        for world in task.worlds:
            world.task = None
            self._park(world)
        task.worlds.clear()
        self._cancel(task)

    def _release(self, task: Task) -> None:
        self.ledger.over(task)
        if self._tasks.pop(task.number, None) is not None and task.holds is not None:
            self._held[task.holds] -= 1

    def _start_parked(self) -> None:
        sure: list[World] = []
        ahead: list[World] = []
        for world in self._undecided:
            if not world.dead:
                (sure if self._rests_on_nothing(world) else ahead).append(world)
        self._start_sure(sure)
        if self._failure is not None:
            return
        # Real work that found no slot comes first: nothing that runs ahead may take the next one.
        wanted: set[str | None] = {_resource(world) for world in sure if world in self._parked} - {None}
        wanted.update(resource for resource, queue in self._queues.items() if queue)
        for world in ahead:
            self._start_guessing(world, wanted)
        for resource, guessing in tuple(self._guessing.items()):
            while guessing and resource not in wanted and self._has_slot(resource):
                world = guessing.popleft()
                if world.queued:
                    world.queued = False
                    self._undecided[world] = None
                    self._start_guessing(world, wanted)

    def _start_sure(self, worlds: list[World]) -> None:
        """Start calls that rest on nothing unknown, first in program order first."""
        worlds.sort(key=_position)
        for world in worlds:
            resource = _resource(world)
            if resource in self._queues:
                self._serve(resource, _position(world))
            if world in self._parked and self._failure is None:
                self._try_start(world, settled=True)
        for resource in tuple(self._queues):
            self._serve(resource)

    def _start_guessing(self, world: World, wanted: set[str | None]) -> None:
        """Start a call on guesses, unless one before it has seen to that, or real work needs the slot."""
        is_gone = world.dead or (self._doomed and self._is_falling(world))
        if world in self._parked and not is_gone and _resource(world) not in wanted:
            self._try_start(world, settled=True)

    def _queue(self, world: World, request: CallRequest) -> None:
        """All that a call waits for is a slot: it is looked at again when there is one, in program order."""
        resource = request.step.resource
        if resource is not None and not world.queued:
            world.queued = True
            self._undecided.pop(world, None)
            self._next_in_queue += 1
            heapq.heappush(self._queues.setdefault(resource, []), (request.position, self._next_in_queue, world))

    def _serve(self, resource: str, before: Position | None = None) -> None:
        """Start calls that wait for a slot, first in program order first; not those after a position."""
        queue = self._queues[resource]
        while queue and self._failure is None:
            position, _number, world = queue[0]
            if world.queued and before is not None and position > before:
                return
            if world.queued and not self._has_slot(resource):
                self._preempt(resource)
                return
            heapq.heappop(queue)
            if world.queued:
                world.queued = False
                self._undecided[world] = None
                self._try_start(world, settled=True)

    def _unpark(self, world: World) -> None:
        if world.parked:
            world.parked = world.queued = False
            self._parked.pop(world, None)
            self._undecided.pop(world, None)

    def _new_task(self, kind: TaskKind, step: Step[..., Any], position: Position, arguments: bytes, key: str) -> Task:
        task = Task(self._next_task, kind, step, position, arguments, key, started_at=self.now)
        self._next_task += 1
        self._tasks[task.number] = task
        return task

    def _watch_seconds(self) -> None:
        left = self.ledger.seconds_left(self._policy.budget, self.now)
        if left is None:
            return
        deadline = self.now + left / max(1, self.ledger.running_ahead)
        if deadline < self._watched_until:
            self._watched_until = deadline
            self._actions.append(Wake(deadline, None))

    def _enforce_seconds(self) -> None:
        left = self.ledger.seconds_left(self._policy.budget, self.now)
        if left is None or self.ledger.running_ahead == 0:
            return
        if left > LEAST_SECONDS:
            self._watch_seconds()
            return
        for task in list(self._tasks.values()):
            if task.kind is TaskKind.STEP and _may_stop(task):
                self._interrupt(task)

    # --------------------------------------------------------------------------------------------------------- effects

    def _settled(self, world: World) -> bool:
        """True when everything that a call follows is committed, or part of the commit being put together."""
        current = world
        while current.log is current.strand.flushed:
            join = current.strand.join
            if current.log is not None or join is None:
                return True
            current = join.world
        return False

    def _secure(self, world: World) -> bool:
        """Put results that a call follows on record although an earlier branch still keeps them from being committed.

        Otherwise a crash could make them come out differently, after an irreversible step was built on them.

        Returns:
            False when one of them also changed the state: then the call has to wait for the commit.
        """
        records: list[Record] = []
        current: World | None = world
        while current is not None:
            strand = current.strand
            records.extend(strand.records(current.log, strand.flushed))
            join = strand.join
            if join is not None and join.is_pipeline:
                for index in all_inputs_of(join, strand.index):
                    other = join.strands[index]
                    records.extend(other.records(other.head.log, other.flushed))
            current = join.world if join is not None else None
        calls = [record for record in records if isinstance(record.request, CallRequest)]
        if any(writes_of(record.step_accesses) for record in calls):
            return False
        resource = _resource(world)
        if resource is not None and any(_is_buffered_on(record.request, resource) for record in calls):
            return False
        if any(record.branches or isinstance(record.request, SleepRequest) for record in records):
            return False
        for record in calls:
            request = record.request
            if not isinstance(request, CallRequest) or request.step.effect is Effect.BUFFERED:
                continue
            key = self._outbox.key(request.position, request.step.name, record.arguments)
            if self._outbox.get(key) is not None:
                continue
            outcome = record.outcome
            row = EffectRecord(
                key,
                request.position,
                request.step.name,
                EffectStatus.FAILED if outcome.failed else EffectStatus.ACKED,
                record.arguments,
                outcome.box.data if outcome.box is not None else None,
                outcome.encoded_error(),
                at=outcome.at,
                mode=record.mode,
            )
            self._outbox.put(row)
            self._outbox.use(key)
        return True

    def _buffer(self, record: Record, request: CallRequest) -> None:
        """A buffered effect is committed: from here on it must reach the outside world."""
        key = self._outbox.key(request.position, request.step.name, record.arguments)
        row = self._outbox.get(key)
        if row is None:
            if self._timeline.is_replaying:
                return  # before this run was forked: its parent sent it, or will
            row = EffectRecord(key, request.position, request.step.name, EffectStatus.PREPARED, record.arguments)
            self._outbox.put(row)
        elif row.status in (EffectStatus.ACKED, EffectStatus.FAILED):
            return
        queue = request.step.resource or request.step.name
        self._outbox.enqueue(queue, row)
        self._deliver(queue)

    def _deliver(self, queue: str) -> None:
        """Send the next buffered effect of a queue: one at a time, in program order."""
        row = self._outbox.next_in(queue) if queue not in self._delivering and self._failure is None else None
        if row is None:
            return
        step = self._steps[row.step]
        if row.status not in (EffectStatus.SENT, EffectStatus.UNKNOWN) or step.idempotent:
            self._send(queue, row)
            return
        answer = self._outbox.resolution(row.key)
        if answer is not None:
            self._settle_delivery(queue, row, answer)
        elif step.probe is not None:
            task = self._new_task(TaskKind.PROBE, step, row.position, row.arguments, row.key)
            task.effect = row
            self._delivering.add(queue)
            self._actions.append(Start(task))
        else:
            self._block_on(row)

    def _settle_delivery(self, queue: str, row: EffectRecord, answer: object) -> None:
        """A crash had left it unknown whether a buffered effect was sent."""
        if isinstance(answer, Sent):
            box = Box(answer.result, f"the result of {row.step}")
            self._outbox.put(replace(row, status=EffectStatus.ACKED, result=box.data))
            self._outbox.take_from(queue)
            self._deliver(queue)
        elif isinstance(answer, NotSent):
            self._send(queue, row)
        else:
            self._failure = _no_answer(row, answer)

    def _send(self, queue: str, row: EffectRecord) -> None:
        step = self._steps[row.step]
        if not self._take_slot(step, speculative=False):
            return  # looked at again whenever something ends
        self._outbox.take_from(queue)
        row = replace(row, status=EffectStatus.SENT, tries=row.tries + 1)
        self._outbox.put(row)
        task = self._new_task(TaskKind.DELIVER, step, row.position, row.arguments, row.key)
        task.holds = step.resource
        task.effect = row
        self._delivering.add(queue)
        self._actions.append(Start(task))

    def _is_sending(self, resource: str) -> bool:
        """Is a buffered effect of this resource committed and not yet sent?"""
        return resource in self._delivering or self._outbox.next_in(resource) is not None

    def _block_on(self, row: EffectRecord) -> None:
        """A person has to find out whether an effect reached the outside world."""
        self._outbox.put(replace(row, status=EffectStatus.UNKNOWN))
        self._status = RunStatus.BLOCKED
        self._failure = EffectUnknownError(self._run_id, row.step, format_position(row.position), row.key)

    def _delivery_done(self, task: Task, outcome: Outcome) -> None:
        row = task.effect
        if row is None:
            return
        queue = task.step.resource or task.step.name
        self._delivering.discard(queue)
        self._outbox.put(_answered(row, outcome))
        if outcome.failed:
            self.ledger.undelivered.append((task.step.name, task.position, outcome.fresh_error()))
        self._deliver(queue)

    def _probe_done(self, task: Task, result: Any) -> None:
        row = task.effect
        if row is None:
            return
        if isinstance(result, Outcome):
            if result.failed or result.box is None:
                self._block_on(row)
                if self._failure is not None and result.error is not None:
                    self._failure.add_note(f"specflow: its probe raised {result.error!r}")
                    self._failure.__cause__ = result.error
                return
            result = result.box.fresh()
        if not task.worlds and task.step.effect is not Effect.BUFFERED:
            self._settle_leftover(row, result)
        elif not task.worlds:
            queue = task.step.resource or task.step.name
            self._delivering.discard(queue)
            self._settle_delivery(queue, row, result)
        elif not task.worlds[0].dead:
            self._apply_answer(task.worlds[0], row, result)

    # ----------------------------------------------------------------------------------------------------------- commit

    def _has_failed(self) -> bool:
        return self._failure is not None

    def _on_committed(self, strand: Strand, record: Record, request: CallRequest) -> None:
        """A call is part of history: count it, send what it buffered, and let the predictor learn."""
        self.ledger.committed(request.step.name)
        if record.mode is not Mode.EXACT:
            self.ledger.use_mode(record.mode)
        if request.step.effect is Effect.BUFFERED:
            self._buffer(record, request)
        self._observe(strand, record, request)

    def _on_resolved(self, resolutions: Sequence[Resolution]) -> None:
        """Guesses about a committed request are resolved."""
        for resolution in resolutions:
            self.ledger.resolved(resolution)
            self._policy.learn(resolution)

    def _observe(self, strand: Strand, record: Record, request: CallRequest) -> None:
        predictor = request.step.predictor
        outcome = record.outcome
        if predictor is None or outcome.box is None:
            return
        if not self._timeline.is_replaying:
            request.step.remembered.append(outcome.box)
        observe = getattr(predictor, "observe", None)
        if observe is None:
            return
        call = record.call
        if call is None:
            args, kwargs = decode(record.arguments)
            name = request.step.name
            recent = Recent(record.previous, strand, name, self._before.get(name, ()))
            call = Call(name, tuple(args), kwargs, request.position, recent, Trail(record.previous, strand))
        try:
            observe(call, outcome.box.fresh())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a predictor that fails costs its guess, nothing else
            self.ledger.predictor_failed(request.step.name, error)

    # ------------------------------------------------------------------------------------------------------------- end

    def _wind_up(self) -> None:
        """The program is finished: deliver what is buffered, undo what a failure calls for, and write the end."""
        if self._finished is None or self._delivering or self._outbox.waiting:
            return
        expected = self._timeline.expected
        if expected is not None and expected.kind is not EntryKind.END:
            # Found before anything is undone: a program that ends too early may not undo what its history did.
            self._failure = DivergenceError(format_position(expected.position), told(expected), "the end")
        self._failure = self._failure or self._unreached.passed_by_end()
        if self._failure is not None:
            self._fail()
            return
        if any(task.kind is TaskKind.STEP and task.effect is not None for task in self._tasks.values()):
            return  # started on a guess that fell; whether it has to be undone shows when it ends
        outcome = self._finished
        if self._undo is None:
            if not self._leftovers_are_known():
                return
            self._undo = self._to_undo(failed=outcome.failed)
            self._next_undo()
        if any(task.kind is TaskKind.UNDO for task in self._tasks.values()) or self._failure is not None:
            return
        if self._undo:
            return
        head = self._root.head
        self._timeline.add(
            Entry(
                (),
                EntryKind.END,
                self._name,
                encode(self.ledger.mode.value),
                outcome.box.data if outcome.box is not None else None,
                outcome.encoded_error(),
                writes_of(head.accesses),
                (),
                head.events,
                self.wall,
            ),
            head.shown,
        )
        self._status = RunStatus.FAILED if outcome.failed else RunStatus.COMPLETED
        self._over = True
        self._stop_everything()
        self._actions.append(Finish(outcome))

    def _leftovers_are_known(self) -> bool:
        """Settle what a crash has left of effects that were begun on guesses, and that the program never comes to."""
        if any(task.kind is TaskKind.PROBE for task in self._tasks.values()):
            return False
        for row in list(self._outbox.rows()):
            if self._outbox.is_used(row.key) or row.tries == 0 or row.status not in _LEFT_OVER:
                continue
            if row.step not in self._steps:
                step = self._find_step(row.step) if self._find_step is not None else None
                if step is None:
                    self._cannot_undo(row, "no step of that name can be found any more")
                    return False
                self._steps[row.step] = step
            step = self._steps[row.step]
            if step.effect is Effect.COMPENSABLE and row.status in (EffectStatus.SENT, EffectStatus.UNKNOWN):
                answer = self._outbox.resolution(row.key)
                if answer is not None:
                    self._settle_leftover(row, answer)
                elif step.probe is not None:
                    task = self._new_task(TaskKind.PROBE, step, row.position, row.arguments, row.key)
                    task.effect = row
                    self._actions.append(Start(task))
                    return False
                else:
                    self._block_on(row)
                    self._fail()
                    return False
        return True

    def _settle_leftover(self, row: EffectRecord, answer: object) -> None:
        if isinstance(answer, Sent):
            box = Box(answer.result, f"the result of {row.step}")
            self._outbox.put(replace(row, status=EffectStatus.ACKED, result=box.data))
        elif isinstance(answer, NotSent):
            self._outbox.put(replace(row, status=EffectStatus.COMPENSATED))  # there is nothing to undo
        else:
            self._failure = _no_answer(row, answer)

    def _cannot_undo(self, row: EffectRecord, reason: str) -> None:
        self._status = RunStatus.BLOCKED
        self._failure = CompensationError(self._run_id, row.step, format_position(row.position), reason)
        self._fail()

    def _to_undo(self, *, failed: bool) -> list[EffectRecord]:
        """Compensable effects to undo, oldest first: all of a failed run, and those started on guesses that fell.

        Effects that a fork took over from its parent are the parent's.
        """
        rows = []
        for row in list(self._outbox.rows()):
            step = self._steps.get(row.step)
            if step is None or step.effect is not Effect.COMPENSABLE or row.tries == 0:
                continue
            if not _may_have_happened(row) or self._is_settled_by_hand(row):
                continue
            if failed or not self._outbox.is_used(row.key):
                rows.append(row)
        return sorted(rows, key=lambda row: row.position)

    def _is_settled_by_hand(self, row: EffectRecord) -> bool:
        """A person says that an effect whose undo failed is not, or no longer, in the outside world."""
        if row.status is EffectStatus.COMPENSATION_FAILED and isinstance(self._outbox.resolution(row.key), NotSent):
            self._outbox.put(replace(row, status=EffectStatus.COMPENSATED))
            return True
        return False

    def _next_undo(self) -> None:
        if not self._undo:
            return
        row = self._undo[-1]
        step = self._steps[row.step]
        key = self._outbox.key(row.position, row.step, row.arguments, "undo")
        task = self._new_task(TaskKind.UNDO, step, row.position, row.arguments, key)
        task.effect = row
        self._actions.append(Start(task))

    def _undo_done(self, task: Task, outcome: Outcome) -> None:
        row = task.effect
        if row is None or self._undo is None:
            return
        if outcome.failed:
            self._outbox.put(replace(row, status=EffectStatus.COMPENSATION_FAILED, error=outcome.encoded_error()))
            self._status = RunStatus.BLOCKED
            self._failure = CompensationError(
                self._run_id, row.step, format_position(row.position), repr(outcome.error)
            )
            return
        self._undo.pop()
        self._outbox.put(replace(row, status=EffectStatus.COMPENSATED))
        self._next_undo()

    def _fail(self) -> None:
        """The run cannot go on; what is committed stays, nothing more is."""
        self._timeline.drop()
        self._outbox.withdraw()
        if self._failure is not None and not self._over:
            for action in [action for action in self._actions if isinstance(action, Start)]:
                self._actions.remove(action)  # it never began, and nobody will say that it is over
                self._release(action.task)
                let_go(action.task.guesses)
            # What may have changed the outside world is not cut off: its answer goes on record first.
            under_way = [task for task in self._tasks.values() if _may_have_begun(task)]
            for task in list(self._tasks.values()):
                if task not in under_way:
                    self._cancel(task)
            if under_way:
                return
            self._over = True
            self._stop_everything()
            self._actions.append(Finish(Outcome.raised(self._failure, at=self.wall)))

    def _answered_too_late(self, task: Task, result: Any) -> None:
        """An effect has ended after the run had failed: the program hears of it when the run goes on."""
        row = _late_row(task, result)
        if row is not None:
            self._outbox.put(row)

    def _stop_everything(self) -> None:
        for task in list(self._tasks.values()):
            self._cancel(task)
        for world in list(family(self._root.head)):
            world.strand.let_go()
            if world is not self._root.head:
                world.dead = True
                world.program.close()

    def late_answers(self, ended: Sequence[tuple[Task, Any]]) -> Commit | None:
        """What effects have answered that ended while the run was being cancelled: they are not unknown."""
        rows = [row for task, outcome in ended if (row := _late_row(task, outcome)) is not None]
        return Commit(self._timeline.committed, effects=tuple(rows)) if rows else None

    def close(self) -> None:
        """Let every program go; for a run that is cancelled from outside."""
        if self._root.head is not None:
            for world in list(family(self._root.head)):
                world.strand.let_go()
                world.program.close()


def _answered(row: EffectRecord, outcome: Outcome, accesses: Sequence[Access] = ()) -> EffectRecord:
    """The row of an effect that has ended."""
    return replace(
        row,
        status=EffectStatus.FAILED if outcome.failed else EffectStatus.ACKED,
        result=outcome.box.data if outcome.box is not None else None,
        error=outcome.encoded_error(),
        at=outcome.at,
        writes=writes_of(accesses),
    )


def _late_row(task: Task, outcome: Any) -> EffectRecord | None:
    """The row of an effect that has ended when nobody could go on with its answer; None where there is none."""
    if task.effect is None or not isinstance(outcome, Outcome):
        return None
    if task.kind in (TaskKind.STEP, TaskKind.DELIVER):
        accesses = task.state.take_accesses() if task.state is not None and not outcome.failed else ()
        return _answered(task.effect, outcome, accesses)
    if task.kind is TaskKind.UNDO and not outcome.failed:
        return replace(task.effect, status=EffectStatus.COMPENSATED)
    return None


def _may_have_begun(task: Task) -> bool:
    """Is it an effect under way?"""
    is_effect = task.effect is not None and task.kind in (TaskKind.STEP, TaskKind.DELIVER, TaskKind.UNDO)
    return is_effect and task.status is TaskStatus.RUNNING


def _may_stop(task: Task) -> bool:
    """May an attempt on a guess be cut off? Not when it may have changed the outside world: its answer is needed."""
    return task.speculative and task.status is TaskStatus.RUNNING and not task.step.effect.is_external


def _no_answer(row: EffectRecord, answer: object) -> BackendContractError:
    return BackendContractError(f"the probe of {row.step}", f"returned {answer!r}", "return Sent(result) or NotSent()")


def _is_buffered_on(request: Any, resource: str) -> bool:
    step = request.step
    return step.effect is Effect.BUFFERED and step.resource == resource


def _comes_before(position: Position, entry: Entry) -> bool:
    """Would a request at this position be committed before an entry?"""
    if entry.kind is EntryKind.END:
        return True
    if entry.kind is EntryKind.JOIN and position[: len(entry.position)] == entry.position:
        return True
    return position <= entry.position


def assumed_cells(strand: Strand, record: Record, writes: Sequence[Write]) -> Cells | None:
    """The state after a record whose step turned out to write it."""
    state = State(strand.base)
    for earlier in strand.records(record):
        state.replay(earlier.program_accesses)
        state.replay(writes if earlier is record else earlier.step_accesses)
    return state.cells


def _alone(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Context], Coroutine[Any, Any, Any]]:
    """The body of a branch. It may run several times, and beside others that got the same objects: on copies."""
    positional = [_copier(value) for value in args]
    named = {name: _copier(value) for name, value in kwargs.items()}

    def body(context: Context) -> Coroutine[Any, Any, Any]:
        copies = tuple(copy() for copy in positional)
        return call_alone(context, target, copies, {name: copy() for name, copy in named.items()})

    return body


def _copier(value: Any) -> Callable[[], Any]:
    try:
        return Box(value).fresh
    except SpecflowError:
        return lambda: value  # a step refuses it when it is called; a workflow may take a function or a step


def _answers(records: Iterable[Record]) -> list[Answer]:
    return [(record.outcome, record.step_accesses, record.request) for record in records]


def _number(log: Record | None) -> int:
    return log.number if log is not None else 0


def _branches(world: World) -> tuple[Strand, ...]:
    return tuple(world.join.strands) if world.join is not None else ()


def _position(world: World) -> Position:
    waiting = world.waiting
    return waiting.position if waiting is not None and not isinstance(waiting, Finished) else world.strand.prefix


def _resource(world: World) -> str | None:
    return world.waiting.step.resource if isinstance(world.waiting, CallRequest) else None


def _step_name(request: Any) -> str:
    return request.step.name if isinstance(request, CallRequest) else "gather"


def confirmed_at_once(decisions: Sequence[Decision]) -> frozenset[int]:
    """Numbers of events that these decisions, carried out together, would show as speculative and commit as well.

    Whoever carries them out commits them only, as events that were not shown before.
    """
    confirmed = {number for decision in decisions for number in decision.numbers if number is not None}
    if not confirmed:
        return frozenset()
    actions = (action for decision in decisions for action in decision.actions)
    return frozenset(action.number for action in actions if isinstance(action, Show) and action.number in confirmed)


__all__ = ["Decision", "Recovered", "Scheduler", "check_limits", "confirmed_at_once"]
