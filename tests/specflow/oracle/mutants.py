"""Schedulers that break the contract, each in one way: what the oracle has to notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from specflow.codec import Box
from specflow.effects import Effect
from specflow.history import EffectRecord, Position, Write
from specflow.replay import CallRequest, Outcome
from specflow.report import Ledger
from specflow.scheduler import Decision, Scheduler
from specflow.state import State, writes_of
from specflow.worlds import Cancel, Guess, Record, Show, Start, Task, TaskKind, World


class AcceptsAnything(Scheduler):
    """Never checks a guess."""

    def _holds(self, request: object, guess: Guess, outcome: Outcome, *, judged: bool) -> bool:
        return not outcome.failed


class ComparesLoosely(Scheduler):
    """Compares with ``==``: 1 is True, 1.0 is 1."""

    def _holds(self, request: object, guess: Guess, outcome: Outcome, *, judged: bool) -> bool:
        return outcome.box is not None and bool(guess.box.fresh() == outcome.box.fresh())


class CommitsOutOfOrder(Scheduler):
    """Two entries that are committed together change places."""

    def _decide(self) -> Decision:
        decision = super()._decide()
        commit = decision.commit
        if commit is None or len(commit.entries) < 2:
            return decision
        first, second, *rest = commit.entries
        return decision._replace(commit=replace(commit, entries=(second, first, *rest)))


class ShowsGuessesAsFacts(Scheduler):
    """Speculative events go to the committed stream as well."""

    def _decide(self) -> Decision:
        decision = super()._decide()
        shown = tuple(action.data for action in decision.actions if isinstance(action, Show))
        return decision._replace(emitted=decision.emitted + shown)


class ReadsStaleState(Scheduler):
    """What a step wrote reaches those who ran past it, but nobody asks whether they had read it before."""

    def _rebase(self, world: World, assumed: Record, writes: Sequence[Write]) -> None:
        world.program.state.replay(writes)


class ReadsItsFuture(Scheduler):
    """A step sees what was written after it, on a guess of its result."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._seers: set[Task] = set()

    def _start_step(self, world: World, *args: Any, **settings: Any) -> None:
        super()._start_step(world, *args, **settings)
        if world.task is not None and world.task.state is not None and world.children:
            world.task.state = State(world.children[0].cells)
            self._seers.add(world.task)

    def _step_done(self, task: Task, outcome: Outcome) -> None:
        if task in self._seers and task.state is not None:
            written = State(task.state.cells)
            written._accesses.extend(writes_of(task.state.take_accesses()))  # what it read is forgotten
            task.state = written
        super()._step_done(task, outcome)


class DropsRetractions(Scheduler):
    """Events of a world that falls are not taken back."""

    def _retract(self, world: World, kept: Sequence[Record] = ()) -> None:
        world.marks = []


class UsesWrongIncarnation(Scheduler):
    """A result of a world that fell answers the call at that place, whatever its arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ghosts: dict[Position, Outcome] = {}

    def _give_back_results(self, records: Iterable[Record]) -> None:
        records = list(records)
        super()._give_back_results(records)
        for record in records:
            request = record.request
            if isinstance(request, CallRequest) and not request.step.effect.is_external:
                self._ghosts[request.position] = record.outcome

    def _try_start(self, world: World, *, settled: bool) -> bool:
        request = world.waiting
        if isinstance(request, CallRequest) and request.position in self._ghosts and self._rests_on_nothing(world):
            self._unpark(world)
            self._answer(world, self._ghosts.pop(request.position))
            return True
        return super()._try_start(world, settled=settled)


class ActsOnGuesses(Scheduler):
    """Starts irreversible steps before what they follow is known."""

    def _start_ahead(self, world: World, request: CallRequest) -> bool:
        if request.step.effect is Effect.IRREVERSIBLE and self._take_slot(request.step, speculative=True):
            self._start_step(world, request, "early", None, speculative=True)
            return True
        return super()._start_ahead(world, request)


class SendsBeforeCommit(Scheduler):
    """Sends buffered effects of worlds that rest on guesses."""

    def _launch_call(self, world: World, request: CallRequest) -> None:
        super()._launch_call(world, request)
        if request.step.effect is Effect.BUFFERED and not self._rests_on_nothing(world):
            arguments = world.log.arguments if world.log is not None else b""
            task = self._new_task(TaskKind.DELIVER, request.step, request.position, arguments, "early")
            self._actions.append(Start(task))


class SharesResults(Scheduler):
    """Hands the same object to everybody."""

    def done(self, task: Task, result: Any, now: float, at: float) -> Decision:
        """As before, with a result that is not copied."""
        if isinstance(result, Outcome) and result.box is not None:
            result.box = _SharedBox(result.box)
        return super().done(task, result, now, at)


class _SharedBox(Box):
    """A box whose content can be changed."""

    __slots__ = ("_shared",)

    def __init__(self, box: Box) -> None:
        super().__init__(None)
        self._data = box.data
        self._shared = box.fresh()

    def fresh(self) -> Any:
        """Not so fresh."""
        return self._shared


class UndoesOldestFirst(Scheduler):
    """Takes effects back in the order in which they happened."""

    def _to_undo(self, *, failed: bool) -> list[EffectRecord]:
        return super()._to_undo(failed=failed)[::-1]


class UndoesNothing(Scheduler):
    """Leaves compensable effects of a failed run as they are."""

    def _to_undo(self, *, failed: bool) -> list[EffectRecord]:
        return []


class LearnsFromGuesses(Scheduler):
    """Tells predictors what it guessed as if it had happened."""

    def _fork_on(self, world: World, box: Box, *args: Any, **settings: Any) -> None:
        request = world.waiting
        if isinstance(request, CallRequest) and world.call is not None:
            observe = getattr(request.step.predictor, "observe", None)
            if observe is not None:
                observe(world.call, box.fresh())
        super()._fork_on(world, box, *args, **settings)


class IgnoresBudgets(Scheduler):
    """Starts whatever it likes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ledger = _GenerousLedger()


class _GenerousLedger(Ledger):
    def affords(self, *args: Any) -> bool:
        """Always."""
        return True

    def seconds_left(self, *args: Any) -> None:
        """Unlimited."""

    @property
    def slots_taken(self) -> int:
        """None."""
        return 0


class StopsNothing(Scheduler):
    """Gives attempts up without telling them to stop."""

    def _cancel(self, task: Task) -> None:
        super()._cancel(task)
        self._actions = [action for action in self._actions if not (isinstance(action, Cancel) and action.task is task)]


class IgnoresLimits(Scheduler):
    """Takes no notice of limits per resource class."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = {}


COURSE = "outcome|state|history"
"""Promises about the course of events."""

MUTANTS: dict[type[Scheduler], str] = {
    AcceptsAnything: COURSE,
    ComparesLoosely: COURSE,
    CommitsOutOfOrder: "history",
    ShowsGuessesAsFacts: "stream",
    ReadsStaleState: COURSE,
    ReadsItsFuture: COURSE,
    DropsRetractions: "stream",
    UsesWrongIncarnation: COURSE,
    ActsOnGuesses: "effects",
    SendsBeforeCommit: "effects",
    SharesResults: f"{COURSE}|predictors",
    UndoesOldestFirst: "effects",
    UndoesNothing: "effects",
    LearnsFromGuesses: "predictors",
    IgnoresBudgets: "budget",
    StopsNothing: "quiet",
    IgnoresLimits: "limits",
}
"""All of them, and the promise that each of them breaks."""
