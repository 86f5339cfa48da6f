"""History in program order: what is on record already, and what is committed next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, make_dataclass, replace
from typing import Any, TypeVar

from .errors import DivergenceError
from .history import Commit, Entry, EntryKind, Position, format_position
from .replay import CallRequest, Finished, GatherRequest, PipelineRequest, SleepRequest
from .speculation import Resolution
from .state import Access, writes_of
from .worlds import Record, Strand

FrozenT = TypeVar("FrozenT")


def _quick_maker(kind: type[FrozenT]) -> Callable[..., FrozenT]:
    """Makes instances of a frozen dataclass with slots, from positional arguments, in a quarter of the usual time.

    A frozen dataclass sets every field through ``object.__setattr__``. Here the fields are set on an instance of a
    class that has the same slots and is not frozen, which then becomes one of the frozen class.
    """
    drafted = [
        (one.name, Any, field() if one.default is MISSING else field(default=one.default))
        for one in fields(kind)  # type: ignore[arg-type]
    ]
    draft: Any = make_dataclass(f"Draft{kind.__name__}", drafted, slots=True, eq=False)

    def make(*values: Any) -> FrozenT:
        made = draft(*values)
        made.__class__ = kind
        return made  # type: ignore[no-any-return]

    return make


_make_entry = _quick_maker(Entry)
_make_commit = _quick_maker(Commit)

_ASKED = frozenset({EntryKind.CALL, EntryKind.SLEEP, EntryKind.FORK})
"""Entries that stand for a request of the program."""


class Timeline:
    """Turns answered requests into entries, in program order, as soon as they rest on nothing unknown.

    A run that goes on makes the entries of its history again; they are compared, not committed twice.

    Args:
        recovered: entries on record.
        on_committed: called for every call that becomes an entry.
        on_resolved: called with the guesses that were resolved by it, before.
        has_failed: asked before every entry; nothing is added to a run that has failed.
        passes_by: asked before every new entry; what it says is wrong fails the run.
    """

    def __init__(
        self,
        recovered: Sequence[Entry],
        on_committed: Callable[[Strand, Record, CallRequest], None],
        on_resolved: Callable[[Sequence[Resolution]], None],
        has_failed: Callable[[], bool],
        passes_by: Callable[[Entry, str], DivergenceError | None],
    ) -> None:
        self._recovered = recovered
        self._on_committed = on_committed
        self._on_resolved = on_resolved
        self._has_failed = has_failed
        self._passes_by = passes_by
        self.recorded: dict[Position, Entry] = {entry.position: entry for entry in recovered if entry.kind in _ASKED}
        """Entries that will answer requests; empty as soon as all of history was made again."""
        self.failure: DivergenceError | None = None
        self._head = 0  # entries that are committed, or part of the commit being put together
        self._committed = len(recovered)
        self._entries: list[Entry] = []
        self._emitted: list[bytes] = []
        self._numbers: list[int | None] = []
        self._wall = 0.0

    @property
    def is_replaying(self) -> bool:
        """True until all of history was made again."""
        return self._head < len(self._recovered)

    @property
    def expected(self) -> Entry | None:
        """What history says comes next; None beyond its end."""
        return self._recovered[self._head] if self._head < len(self._recovered) else None

    @property
    def newest_recorded(self) -> Entry:
        """The last entry of history."""
        return self._recovered[-1]

    @property
    def committed(self) -> int:
        """Number of entries handed out for a commit so far, history included: the head that follows them."""
        return self._committed

    def flush(self, root: Strand, wall: float) -> None:
        """Add whatever rests on nothing unknown.

        Args:
            root: the strand of the program itself.
            wall: wall-clock time, in seconds since the epoch.
        """
        self._wall = wall
        self._flush_strand(root, nested=False)

    def take(self) -> tuple[int, tuple[Entry, ...], tuple[bytes, ...], tuple[int | None, ...]]:
        """The head before, entries, emitted events, and their speculative numbers, since this was asked last."""
        parent, entries, emitted = self._committed, tuple(self._entries), tuple(self._emitted)
        numbers = tuple(self._numbers)
        self._committed += len(entries)
        self._entries, self._emitted, self._numbers = [], [], []
        return parent, entries, emitted, numbers

    def drop(self) -> None:
        """Forget what was not taken: the run failed."""
        self._entries, self._emitted, self._numbers = [], [], []

    def add_plain(self, record: Record, step: str) -> Commit:
        """The commit of one plain call, when nothing else is waiting to be committed."""
        outcome = record.outcome
        entry = _make_entry(
            record.request.position, EntryKind.CALL, step, record.arguments,
            outcome.box.data if outcome.box is not None else None, None, (), (), (), outcome.at, outcome.seconds,
        )  # fmt: skip
        parent = self._committed
        self._committed = parent + 1
        self._head += 1
        return _make_commit(parent, (entry,))

    def _flush_strand(self, strand: Strand, *, nested: bool) -> bool:
        """Returns True when the strand is finished and all of it is committed."""
        head = strand.head
        if head.log is not strand.flushed:
            for record in strand.records(head.log, strand.flushed):
                if self.failure is not None or self._has_failed():
                    return False
                self._flush_record(strand, record, nested=nested)
                strand.flushed = record
        if isinstance(head.waiting, Finished):
            strand.flushed_end = True
            return True
        if head.join is not None and not isinstance(head.waiting, CallRequest | None):
            self._flush_fork(strand, head.waiting, head.accesses, head.events, head.shown, nested=nested)
            join = head.join
            while join.flushed < len(join.strands) and self._flush_strand(join.strands[join.flushed], nested=True):
                join.flushed += 1
        return False

    def _flush_record(self, strand: Strand, record: Record, *, nested: bool) -> None:
        request = record.request
        outcome = record.outcome
        if isinstance(request, CallRequest):
            if record.resolutions:
                self._on_resolved(record.resolutions)
            self._on_committed(strand, record, request)
            accesses = (
                (*record.program_accesses, *record.step_accesses) if record.step_accesses else record.program_accesses
            )
            entry = Entry(
                request.position,
                EntryKind.CALL,
                request.step.name,
                record.arguments,
                outcome.box.data if outcome.box is not None else None,
                outcome.encoded_error(),
                events=record.events,
                at=outcome.at,
                seconds=outcome.seconds,
                mode=record.mode,
            )
            self._commit(entry, accesses, record.shown, nested=nested)
        elif isinstance(request, SleepRequest):
            entry = _entry(request, EntryKind.SLEEP, record.events, outcome.at)
            self._commit(entry, record.program_accesses, record.shown, nested=nested)
        elif isinstance(request, GatherRequest | PipelineRequest):
            self._flush_fork(strand, request, record.program_accesses, record.events, record.shown, nested=nested)
            events: list[bytes] = []
            shown: list[int | None] = []
            for branch in record.branches:
                self._flush_strand(branch, nested=True)
                events.extend(branch.head.events)
                shown.extend(branch.head.shown or (None,) * len(branch.head.events))
            self._on_resolved(record.resolutions)
            entry = _entry(request, EntryKind.JOIN, tuple(events), outcome.at)
            self._commit(entry, record.step_accesses, shown, nested=nested)

    def _flush_fork(
        self,
        strand: Strand,
        request: Any,
        accesses: Sequence[Access],
        events: tuple[bytes, ...],
        shown: Sequence[int],
        *,
        nested: bool,
    ) -> None:
        """Before anything of parallel branches, what the program did before they started."""
        if strand.forked is not request:
            strand.forked = request
            self._commit(_entry(request, EntryKind.FORK, events, self._wall), accesses, shown, nested=nested)

    def _commit(self, entry: Entry, accesses: Sequence[Access], shown: Sequence[int | None], *, nested: bool) -> None:
        writes = writes_of(accesses)
        if writes:
            entry = replace(entry, branch_writes=writes) if nested else replace(entry, writes=writes)
        self.add(entry, shown)

    def add(self, entry: Entry, shown: Sequence[int | None] = ()) -> None:
        """The next entry: compared with what is recorded, or new.

        Args:
            entry: what to add.
            shown: numbers under which its events were shown on the speculative stream; empty when they were not.
        """
        if self.failure is not None or self._has_failed():
            return  # the first one counts: what follows it may be its consequence
        recorded = self.expected
        if recorded is not None:
            if recorded.position != entry.position or recorded.kind is not entry.kind:
                self.failure = DivergenceError(
                    format_position(recorded.position),
                    told(recorded),
                    f"{told(entry)} at {format_position(entry.position)}",
                )
            elif recorded.writes != entry.writes:
                self.failure = DivergenceError(
                    format_position(recorded.position), "other changes of the state", "different ones"
                )
        else:
            self.failure = self._passes_by(entry, told(entry))
            if self.failure is not None:
                return
            self._entries.append(entry)
            if entry.events:
                self._emitted.extend(entry.events)
                self._numbers.extend(shown or (None,) * len(entry.events))
        self._head += 1
        if self._head == len(self._recovered):
            self.recorded = {}


def told(entry: Entry) -> str:
    """An entry as errors name it."""
    if entry.kind is EntryKind.CALL:
        return f"a call of {entry.step}"
    return {
        EntryKind.SLEEP: "a sleep",
        EntryKind.FORK: "parallel calls",
        EntryKind.JOIN: "the end of parallel calls",
    }.get(entry.kind, "the end")


def _entry(request: Any, kind: EntryKind, events: tuple[bytes, ...], at: float) -> Entry:
    return Entry(request.position, kind, kind.value, b"", None, None, events=events, at=at)


__all__ = ["Timeline", "told"]
