"""The scheduler's picture of a run: strands, the worlds each of them may be in, and the tasks under way.

A *strand* is a piece of program that happens one step after another: the workflow itself, or one parallel branch. A
*world* is one version of a strand: the strand's head is what is known to be true, and every other world rests on a
guess about the request that its parent waits on. A *record* is one answered request; records are linked backwards, so
that worlds share their common past. A *task* is work for the runtime.

Mutable, and private to the scheduler: nothing here acts or decides.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .codec import Box
from .definitions import Step
from .history import EffectRecord, Position, format_position
from .replay import Context, Finished, Outcome, Program, Request
from .speculation import Assumption, Call, Prediction, Resolution
from .state import Access, Cells, State
from .types import Mode


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One answered request of a strand."""

    previous: Record | None
    request: Request
    arguments: bytes
    """Encoded ``[args, kwargs]`` of a call; empty for other requests."""
    outcome: Outcome
    program_accesses: tuple[Access, ...] = ()
    """What the program itself read and wrote since the record before."""
    events: tuple[bytes, ...] = ()
    """What it emitted since then."""
    step_accesses: tuple[Access, ...] = ()
    """What the step read and wrote; for branches that came together their merged changes."""
    branches: tuple[Strand, ...] = ()
    resolutions: tuple[Resolution, ...] = ()
    call: Call | None = None
    """What its predictor saw, if it has one."""
    tried: tuple[Access, ...] = ()
    """What a step that failed had read and written: its changes are void, but its failure rests on what it read."""
    mode: Mode = Mode.EXACT
    """Under which mode the result was accepted."""
    shown: tuple[int, ...] = ()
    """Numbers under which the events were shown on the speculative stream; empty when they were not."""
    number: int = 1
    """So many requests of its strand are answered with it."""

    def __repr__(self) -> str:
        return f"<record of {self.request.describe()} at {format_position(self.request.position)}>"


@dataclass(slots=True, eq=False, repr=False)
class Guess:
    """What a world assumes about the request its parent waits on."""

    box: Box
    assumption: Assumption
    waited_since: float
    """When the attempt of the guessed call started (monotonic seconds)."""
    record: Record
    """The record that the guess stands in for; completed when the guess turns out right."""
    basis: tuple[World, ...] = ()
    """Worlds of other branches whose results the guess is made of; it falls with any of them."""


@dataclass(slots=True, eq=False, repr=False)
class World:
    """One version of a strand."""

    strand: Strand
    parent: World | None
    guess: Guess | None
    program: Program
    log: Record | None = None
    waiting: Request | Finished | None = None
    accesses: tuple[Access, ...] = ()
    """Reads and writes of the program since the newest record."""
    events: tuple[bytes, ...] = ()
    shown: tuple[int, ...] = ()
    """Numbers under which these events were shown on the speculative stream; empty when they were not."""
    arguments: bytes = b""
    """Encoded ``[args, kwargs]`` of the call it waits on."""
    task: Task | None = None
    """The attempt of that call, if it was started."""
    judge: Task | None = None
    """The check of its result, if there is one under way."""
    accesses_of_step: tuple[Access, ...] = ()
    """What the step read and wrote, while its result is being judged."""
    prediction: Task | None = None
    """The predictor at work on it."""
    children: list[World] = field(default_factory=list)
    join: Join | None = None
    call: Call | None = None
    predicted: bool = False
    parked: bool = False
    """Waits to be started: for a slot, the policy, or everything before it."""
    queued: bool = False
    """Waits for nothing but a slot."""
    dead: bool = False
    true_since: float = 0.0
    """When all it rests on was found to be true, if it rested on guesses (wall-clock seconds since the epoch)."""
    halted: bool = False
    """Too far ahead: it goes on when it rests on nothing unknown."""
    script: tuple[Any, ...] = ()
    """Guesses for its next calls, from the prediction it was forked for."""
    script_confidence: float = 0.0
    script_source: str = ""
    incarnation: int = 0
    started_ahead: float | None = None
    """When the first attempt of this world started on a guess (monotonic seconds)."""
    ahead_seconds: float = 0.0
    """Attempt-seconds of attempts that ended while it rested on a guess."""
    finished_ahead: list[Task] = field(default_factory=list)
    """Those attempts, while it still rests on a guess."""
    given_back: bool = False
    """An equal call may use what it has finished."""
    marks: list[tuple[int, Record | None]] = field(default_factory=list)
    """Number of each speculative event it showed, and its newest record then."""

    @property
    def cells(self) -> Cells:
        """The state as its program sees it."""
        return self.program.state.cells

    def __repr__(self) -> str:
        waits = (
            self.waiting.describe()
            if self.waiting is not None and not isinstance(self.waiting, Finished)
            else "nothing"
        )
        rests = f" on a guess of {self.guess.assumption.step}" if self.guess is not None else ""
        return f"<world of {self.strand.name} ({format_position(self.strand.prefix)}){rests}, waiting for {waits}>"


@dataclass(slots=True, eq=False, repr=False)
class Strand:
    """A piece of program that happens one step after another."""

    function: Callable[[Context], Coroutine[Any, Any, Any]]
    prefix: Position
    name: str
    base: Cells
    at: float
    join: Join | None = None
    index: int = 0
    head: World = None  # type: ignore[assignment]  # set as soon as the first world is made
    flushed: Record | None = None
    """Newest record that became a committed entry."""
    flushed_end: bool = False
    is_counted: bool = False
    """The join that it belongs to knows that it is finished."""
    forked: Request | None = None
    """The newest request for parallel branches whose start was committed."""
    spare: Program | None = None
    """A program that nobody needs any more, as it was after ``spare_log``: a world that is forked later goes on with it
    instead of a new one that has to be brought there from the start."""
    spare_log: Record | None = None

    def __repr__(self) -> str:
        return f"<strand {self.name} ({format_position(self.prefix)})>"

    def keep(self, program: Program, log: Record | None) -> None:
        """A program becomes the spare one; the one before is let go."""
        self.let_go()
        self.spare, self.spare_log = program, log

    def take_spare(self, log: Record | None) -> tuple[Program, list[Record]] | None:
        """The spare program and the records that bring it to ``log``; None when it is not on the way there."""
        if self.spare is None:
            return None
        records = self.records(log, self.spare_log)
        if not records or records[0].previous is not self.spare_log:
            return None
        spare, self.spare = self.spare, None
        return spare, records

    def let_go(self) -> None:
        """Nothing is forked any more: the spare program is not needed."""
        if self.spare is not None:
            self.spare.close()
            self.spare = self.spare_log = None

    def records(self, log: Record | None, after: Record | None = None) -> list[Record]:
        """Records up to ``log``, oldest first, without those up to ``after``."""
        found: list[Record] = []
        while log is not None and log is not after:
            found.append(log)
            log = log.previous
        found.reverse()
        return found


@dataclass(slots=True, eq=False, repr=False)
class Join:
    """Parallel branches that a world waits for."""

    world: World
    strands: list[Strand]
    base: Cells
    return_exceptions: bool
    is_pipeline: bool
    open: int
    """Branches that are not finished."""
    flushed: int = 0
    """So many of the first branches are finished, and all of them is committed."""

    def worlds(self) -> Iterator[World]:
        """All worlds of all branches."""
        for strand in self.strands:
            yield from family(strand.head)


def family(world: World) -> Iterator[World]:
    """A world, the worlds forked from it, and those of the branches it waits for."""
    stack = [world]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children)
        if current.join is not None:
            stack.extend(strand.head for strand in current.join.strands)


class TaskKind(enum.Enum):
    """What the runtime has to do."""

    STEP = "step"
    PREDICT = "predict"
    JUDGE = "judge"
    DELIVER = "deliver"
    """Send a buffered effect."""
    UNDO = "undo"
    PROBE = "probe"


class TaskStatus(enum.Enum):
    """Where a task is."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    """Nobody wants its result; it may still be winding down."""


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """Work for the runtime. It answers with what the work returned, and says when the task is really over."""

    number: int
    kind: TaskKind
    step: Step[..., Any]
    position: Position
    arguments: bytes
    """Encoded ``[args, kwargs]`` of the call."""
    key: str = ""
    """Idempotency key; empty where nothing needs one."""
    args: tuple[Any, ...] | None = None
    """The arguments themselves where they cannot be changed by anybody: nothing to decode."""
    judged: Box | None = None
    """``(predicted, actual)`` for a judge."""
    state: State | None = None
    """The view that the step works on, when it declares one."""
    call: Call | None = None
    """What the predictor sees."""
    guesses: Awaitable[Sequence[Prediction]] | None = None
    """What a predictor that is no coroutine function returned to be awaited."""
    worlds: list[World] = field(default_factory=list)
    speculative: bool = False
    status: TaskStatus = TaskStatus.RUNNING
    started_at: float = 0.0
    seconds: float = 0.0
    """How long it took, once it has ended."""
    holds: str | None = None
    """The resource whose slot it takes."""
    money: float = 0.0
    tokens: float = 0.0
    outcome: Outcome | None = None
    """For a judge: the real result that is being judged."""
    effect: EffectRecord | None = None
    doubtful: bool = False
    """It started on guesses that have held, but what it read of the state may have been changed by what they wrote."""

    def __repr__(self) -> str:
        return f"<task {self.number}: {self.kind.value} {self.step.name} at {format_position(self.position)}>"


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(slots=True, eq=False)
class Start:
    """Run a task."""

    task: Task


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a task; its result is not wanted."""

    task: Task


@dataclass(frozen=True, slots=True)
class Wake:
    """Call :meth:`~specflow.scheduler.Scheduler.woke` with this token at a time."""

    at: float
    """Monotonic seconds."""
    token: object


@dataclass(frozen=True, slots=True)
class Show:
    """An event of a world that rests on guesses."""

    number: int
    position: Position
    data: bytes
    confidence: float


@dataclass(frozen=True, slots=True)
class Retract:
    """A shown event turned out not to happen."""

    number: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    outcome: Outcome


Action = Start | Cancel | Wake | Show | Retract | Finish


__all__ = [
    "Action",
    "Cancel",
    "Finish",
    "Guess",
    "Join",
    "Prediction",
    "Record",
    "Retract",
    "Show",
    "Start",
    "Strand",
    "Task",
    "TaskKind",
    "TaskStatus",
    "Wake",
    "World",
    "family",
]
