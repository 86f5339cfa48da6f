"""What a run leaves behind: committed entries, effects on their way, and the record of the run itself.

Everything here is frozen, and values of the user's program appear encoded (:mod:`specflow.codec`): nothing that a
program still holds can change its history.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .types import Mode

Position = tuple[int, ...]
"""Where in the program a call stands: the index of the request, then the indices inside nested workflows and branches.
Tuple order is program order."""


def format_position(position: Position) -> str:
    """``(3, 1, 0)`` as ``"3.1.0"``."""
    return ".".join(map(str, position))


def parse_position(text: str) -> Position:
    """Inverse of :func:`format_position`."""
    return tuple(map(int, text.split("."))) if text else ()


class Operation(Enum):
    """What a :class:`Write` does to a key."""

    PUT = "put"
    DELETE = "delete"
    ADD = "add"
    """Add a number. Commutes with other additions."""
    APPEND = "append"
    """Append one item to a list. Branches that append merge in program order."""
    UNION = "union"
    """Add items to a set. Commutes with other unions."""

    @property
    def is_blind(self) -> bool:
        """True for operations that merge with others of their kind instead of replacing the value."""
        return self in (Operation.ADD, Operation.APPEND, Operation.UNION)


@dataclass(frozen=True, slots=True)
class Write:
    """One change of one key."""

    key: str
    operation: Operation
    data: bytes
    """The encoded operand; empty for :attr:`Operation.DELETE`."""


class EntryKind(Enum):
    """What kind of place in the program an entry records."""

    CALL = "call"
    SLEEP = "sleep"
    FORK = "fork"
    """Parallel branches start; carries what the program changed and emitted before."""
    JOIN = "join"
    """Parallel branches came together; carries the state changes of all of them."""
    END = "end"
    """The workflow returned or raised. Always the last entry, at position ``()``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One committed place of the program. Entries are committed in program order; entry n makes version n (from 1)."""

    position: Position
    kind: EntryKind
    step: str
    """Name of the step; of the workflow for :attr:`EntryKind.END`."""
    arguments: bytes
    """Encoded ``[args, kwargs]``; for :attr:`EntryKind.END` the run's :class:`~specflow.types.Mode`."""
    result: bytes | None
    """Encoded return value; None when it raised."""
    error: bytes | None
    """Encoded exception; None when it returned."""
    writes: tuple[Write, ...] = ()
    """State changes of the program since the entry before, then those of the step itself. What stores apply."""
    branch_writes: tuple[Write, ...] = ()
    """The same for an entry inside a parallel branch: real for that branch at once, for the run only at the join. Kept
    so that the branch can be rebuilt; stores do not apply them."""
    events: tuple[bytes, ...] = ()
    """Encoded values the program emitted since the entry before."""
    at: float = 0.0
    """Wall-clock time the result counts from, in seconds since the epoch; what ``ctx.now()`` shows afterwards."""
    seconds: float = 0.0
    """How long the attempt took."""
    mode: Mode = Mode.EXACT
    """Under which mode its result was accepted: that of the verifier, where a guess stands for something that was not
    equal. A run is as exact as the least exact of its entries, also after a crash."""


class EffectStatus(Enum):
    """Where an effect is on its way to the outside world."""

    PREPARED = "prepared"
    """Committed, not yet sent (buffered effects)."""
    SENT = "sent"
    """The step was started; without an answer it is not known whether the outside world changed."""
    ACKED = "acked"
    """The step returned; its result is recorded."""
    FAILED = "failed"
    """The step raised, timed out, or returned what cannot be stored; the error is recorded. What it has changed before
    that is for the program to find out."""
    UNKNOWN = "unknown"
    """A crash fell between SENT and the answer, and the effect may not be sent twice. A person or a probe decides."""
    COMPENSATED = "compensated"
    """Undone."""
    COMPENSATION_FAILED = "compensation failed"
    """Its undo kept failing. A person has to look."""


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """One row of the outbox."""

    key: str
    """Idempotency key, from the program position."""
    position: Position
    step: str
    status: EffectStatus
    arguments: bytes
    result: bytes | None = None
    """Encoded result once ACKED."""
    error: bytes | None = None
    """Encoded exception of a failed attempt or a failed undo."""
    tries: int = 0
    """How often this run started it; 0 for a result that a fork took over from its parent."""
    at: float = 0.0
    """Wall-clock time the result counts from, in seconds since the epoch, as its entry will have it."""
    writes: tuple[Write, ...] = ()
    """State changes of the step itself, kept here until its entry can be committed."""
    mode: Mode = Mode.EXACT
    """As its entry will have it."""


class RunStatus(Enum):
    """Where a run is in its life."""

    RUNNING = "running"
    """Not finished: it has a live owner, or waits to be resumed."""
    COMPLETED = "completed"
    FAILED = "failed"
    """The program raised, and what had to be compensated is."""
    BLOCKED = "blocked"
    """An effect is UNKNOWN or could not be compensated; a person has to decide before it goes on."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as a store knows it."""

    run_id: str
    program: str
    """Name of the workflow or pipeline, ``module:qualname``."""
    fingerprint: str
    """Digest of the program's code; a run refuses to go on under another program unless told to."""
    arguments: bytes
    """Encoded ``[args, kwargs]``."""
    created_at: float
    """Seconds since the epoch."""
    status: RunStatus = RunStatus.RUNNING
    head: int = 0
    """Number of committed entries, which is the newest version."""
    parent: str | None = None
    """The run it was forked from."""
    parent_version: int = 0
    """The version it was forked at."""
    owner: str | None = None
    """Who holds the lease, if anybody."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a run. A later lease of the same run has a higher ``fence``; older ones are refused."""

    run_id: str
    owner: str
    fence: int
    head: int
    """The run's head when the lease was given."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything that becomes real together."""

    parent: int
    """The head this commit follows; anything else is refused."""
    entries: tuple[Entry, ...] = ()
    effects: tuple[EffectRecord, ...] = ()
    """New or changed outbox rows, by key."""
    status: RunStatus | None = None
    """The run's new status, if it changes."""
