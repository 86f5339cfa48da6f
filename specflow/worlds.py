"""The scheduler's picture of a run: strands, the worlds each of them may be in, and the tasks under way.

A *strand* is a piece of program that happens one step after another: the workflow itself, or one parallel branch. A
*world* is one version of a strand: the strand's head is what is known to be true, and every other world rests on a
guess about the request that its parent waits on. A *record* is one answered request; records are linked backwards, so
that worlds share their common past. A *task* is work for the runtime.

Mutable, and private to the scheduler: nothing here acts or decides.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .codec import Box
from .definitions import Step
from .history import EffectRecord, Position
from .replay import Context, Finished, Outcome, Program, Request
from .speculation import Assumption, Call, Prediction, Resolution
from .state import Access, Cells, State


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
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
    dead: bool = False
    answered: int = 0
    """Requests answered while it rested on a guess."""
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


@dataclass(slots=True, eq=False)
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

    def records(self, log: Record | None, after: Record | None = None) -> list[Record]:
        """Records up to ``log``, oldest first, without those up to ``after``."""
        found: list[Record] = []
        while log is not None and log is not after:
            found.append(log)
            log = log.previous
        found.reverse()
        return found


@dataclass(slots=True, eq=False)
class Join:
    """Parallel branches that a world waits for."""

    world: World
    strands: list[Strand]
    base: Cells
    return_exceptions: bool
    is_pipeline: bool
    open: int

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


@dataclass(slots=True, eq=False)
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


# ------------------------------------------------------------------------------------------------------------ actions


class Start(NamedTuple):
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
