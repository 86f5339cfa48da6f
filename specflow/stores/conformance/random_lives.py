"""Random operations on a store and on a model of it that is a few lists and dicts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from ...codec import encode
from ...errors import RunBusyError, RunExistsError, StaleOwnerError, VersionConflictError, VersionGoneError
from ...history import Commit, EffectRecord, EffectStatus, Entry, Lease, Operation, RunRecord, RunStatus, Write
from ...protocols import Store
from ...types import Mode
from ..retention import FINISHED
from .builders import ALICE, BOB, end_entry, make_entry, make_record, values_of


@dataclass(slots=True, eq=False)
class _ModelRun:
    """A run as plain lists and dicts, each version a copy."""

    record: RunRecord
    lease: Lease | None
    """The newest one; None after it was given back."""
    history: list[Entry] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    effects: dict[str, EffectRecord] = field(default_factory=dict)
    parent: _ModelRun | None = None
    base: int = 0
    stale: list[Lease] = field(default_factory=list)
    pins: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    """Versions held here whose state a collect may have dropped."""
    lost: set[int] = field(default_factory=set)
    """Versions held here whose entry a collect may have dropped."""

    @property
    def head(self) -> int:
        return len(self.history)

    def holder(self, version: int) -> _ModelRun:
        run = self
        while version <= run.base and run.parent is not None:
            run = run.parent
        return run

    def has_state(self, version: int) -> bool:
        return version not in self.holder(version).doubtful

    def has_entries(self, after: int, until: int) -> bool:
        return all(version not in self.holder(version).lost for version in range(after + 1, until + 1))


Change = tuple[str, Operation, Any]

_NUMBERS, _LISTS, _SETS = ("n1", "n2"), ("l1", "l2"), ("s1", "s2")
_SMALL = st.integers(-3, 3)
_CHANGE: st.SearchStrategy[Change] = st.one_of(
    st.tuples(st.sampled_from(_NUMBERS), st.sampled_from([Operation.PUT, Operation.ADD]), _SMALL),
    st.tuples(st.sampled_from(_LISTS), st.just(Operation.APPEND), _SMALL),
    st.tuples(st.sampled_from(_LISTS), st.just(Operation.PUT), st.lists(_SMALL, max_size=2)),
    st.tuples(st.sampled_from(_SETS), st.sampled_from([Operation.PUT, Operation.UNION]), st.sets(_SMALL, max_size=2)),
    st.tuples(st.sampled_from(_NUMBERS + _LISTS + _SETS), st.just(Operation.DELETE), st.none()),
)


def _write(change: Change) -> Write:
    key, operation, operand = change
    return Write(key, operation, b"" if operation is Operation.DELETE else encode(operand))


_ENTRIES = st.lists(st.lists(_CHANGE, max_size=4), min_size=1, max_size=4)
_EFFECTS = st.lists(
    st.builds(
        EffectRecord,
        key=st.sampled_from("abcd"),
        position=st.lists(st.integers(0, 11), min_size=1, max_size=2).map(tuple),
        step=st.just("send"),
        status=st.sampled_from(EffectStatus),
        arguments=st.just(b""),
        result=st.none() | st.binary(max_size=2),
        error=st.none() | st.binary(max_size=2),
        tries=st.integers(0, 3),
        at=st.floats(0.0, 1e10),
        writes=st.lists(_CHANGE.map(_write), max_size=2).map(tuple),
        mode=st.sampled_from(Mode),
    ),
    max_size=2,
)
_OWNERS = st.sampled_from([ALICE, BOB])
_UNFINISHED = st.sampled_from([None, None, RunStatus.RUNNING, RunStatus.BLOCKED])


def _changed(state: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """The state after the changes, sharing nothing with the one before."""
    after = {key: type(value)(value) for key, value in state.items()}
    for key, operation, operand in changes:
        if operation is Operation.PUT:
            after[key] = operand
        elif operation is Operation.DELETE:
            after.pop(key, None)
        elif operation is Operation.ADD:
            after[key] = after.get(key, 0) + operand
        elif operation is Operation.APPEND:
            after[key] = [*after.get(key, []), operand]
        else:
            after[key] = after.get(key, set()) | operand
    return after


class StoreMaker(Protocol):
    """**Protocol:** what random lives need of the suite."""

    durable: ClassVar[bool]

    def make_store(self, tmp_path: Path) -> Store:
        """A new store in an empty folder."""
        ...

    def reopen(self, store: Store) -> Store:
        """Another store over the data of one that was closed."""
        ...


class RandomLife(RuleBasedStateMachine):
    """Does the same to a store and to the model, and compares what a reader sees."""

    runs = Bundle("runs")

    suite: ClassVar[StoreMaker]
    folder: ClassVar[Path]
    """Where the folders of the stores are made."""

    def __init__(self) -> None:
        super().__init__()
        self._store = self.suite.make_store(Path(tempfile.mkdtemp(dir=self.folder)))
        self._model: dict[str, _ModelRun] = {}
        self._count = 0

    def teardown(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _created(self, owner: str) -> str:
        record = make_record(f"run {self._next()}", created_at=float(self._count))
        lease = self._store.create(record, owner)
        assert lease.head == 0
        self._model[record.run_id] = _ModelRun(replace(record, owner=owner), lease)
        with pytest.raises(RunExistsError):
            self._store.create(record, owner)
        return record.run_id

    def _made(self, entries: list[list[Change]]) -> tuple[Entry, ...]:
        return tuple(make_entry(self._next(), *map(_write, changes)) for changes in entries)

    def _lease(self, run_id: str) -> Lease:
        run = self._model[run_id]
        if run.lease is None:
            self.change_owner(run_id, ALICE, "ask")
        assert run.lease is not None
        return run.lease

    @initialize(target=runs, owner=_OWNERS, entries=_ENTRIES)
    def begin(self, owner: str, entries: list[list[Change]]) -> str:
        """A first run."""
        run_id = self._created(owner)
        self.commit(run_id, entries, [], None)
        return run_id

    @precondition(lambda self: len(self._model) < 3)
    @rule(target=runs, owner=_OWNERS)
    def create(self, owner: str) -> str:
        """A new run; the same id again is refused."""
        return self._created(owner)

    @rule(run_id=runs, entries=_ENTRIES, effects=_EFFECTS, status=_UNFINISHED)
    def commit(
        self, run_id: str, entries: list[list[Change]], effects: list[EffectRecord], status: RunStatus | None
    ) -> None:
        """The owner commits entries and effects; where there is none, somebody becomes it."""
        run = self._model[run_id]
        if run.record.status in FINISHED:
            return
        lease = self._lease(run_id)
        made = self._made(entries)
        assert self._store.commit(lease, Commit(run.head, made, tuple(effects), status)) == run.head + len(made)
        for entry, changes in zip(made, entries, strict=True):
            run.history.append(entry)
            run.states.append(_changed(run.states[-1], changes))
        run.effects.update({effect.key: effect for effect in effects})
        run.record = replace(run.record, head=run.head, status=status or run.record.status)
        self._compare(run_id, run.head - len(made))

    @rule(run_id=runs, entries=_ENTRIES)
    def commit_entries(self, run_id: str, entries: list[list[Change]]) -> None:
        """The same once more, so that histories get long."""
        self.commit(run_id, entries, [], None)

    @rule(run_id=runs, status=st.sampled_from([RunStatus.COMPLETED, RunStatus.FAILED]), sure=st.sampled_from("yn"))
    def finish(self, run_id: str, status: RunStatus, sure: str) -> None:
        """The owner ends the run."""
        run = self._model[run_id]
        if run.record.status in FINISHED or sure == "n":
            return
        self._store.commit(self._lease(run_id), Commit(run.head, (end_entry(),), status=status))
        run.history.append(end_entry())
        run.states.append(_changed(run.states[-1], ()))
        run.record = replace(run.record, head=run.head, status=status)

    @rule(
        run_id=runs,
        distance=st.sampled_from([-3, -2, -1, 1, 2]),
        which=st.integers(0, 99),
        entries=_ENTRIES,
        effects=_EFFECTS,
    )
    def commit_wrongly(
        self, run_id: str, distance: int, which: int, entries: list[list[Change]], effects: list[EffectRecord]
    ) -> None:
        """The owner commits on a version that is not the head, and an owner that was superseded does all it can."""
        run = self._model[run_id]
        made = self._made(entries)
        if run.lease is not None:
            with pytest.raises(VersionConflictError):
                self._store.commit(run.lease, Commit(run.head + distance, made, tuple(effects), RunStatus.BLOCKED))
        if run.stale:
            lease = run.stale[which % len(run.stale)]
            with pytest.raises(StaleOwnerError):
                self._store.commit(lease, Commit(run.head, made, tuple(effects), RunStatus.BLOCKED))
            with pytest.raises(StaleOwnerError):
                self._store.renew(lease)
            self._store.release(lease)
        self._compare(run_id, run.head)

    @rule(run_id=runs, owner=_OWNERS, how=st.sampled_from(["release", "ask", "take over"]))
    def change_owner(self, run_id: str, owner: str, how: str) -> None:
        """The owner gives its lease back, or somebody asks for it, with or without force."""
        run = self._model[run_id]
        if how == "release":
            if run.lease is not None:
                self._store.release(run.lease)
                run.stale.append(run.lease)
                run.lease, run.record = None, replace(run.record, owner=None)
        elif run.lease is not None and how == "ask":
            with pytest.raises(RunBusyError):
                self._store.acquire(run_id, owner)
        else:
            lease = self._store.acquire(run_id, owner, take_over=how == "take over")
            if run.lease is not None:
                run.stale.append(run.lease)
            assert (lease.owner, lease.head) == (owner, run.head)
            assert all(lease.fence > old.fence for old in run.stale)
            run.lease, run.record = lease, replace(run.record, owner=owner)

    @precondition(lambda self: len(self._model) < 6)
    @rule(target=runs, run_id=runs, where=st.integers(0, 99), owner=_OWNERS, effects=_EFFECTS)
    def fork(self, run_id: str, where: int, owner: str, effects: list[EffectRecord]) -> str:
        """Somebody forks a run at any version, with effects to take over; where a collect was, this may be refused."""
        parent = self._model[run_id]
        version = where % (parent.head + 1)
        new = f"run {self._next()}"
        certain = parent.has_state(version) and parent.has_entries(0, version)
        try:
            lease = self._store.fork(run_id, version, new, owner, tuple(effects))
        except VersionGoneError:
            assert not certain
            return run_id
        record = self._store.get_run(new)
        self._model[new] = _ModelRun(
            record=replace(
                parent.record,
                run_id=new,
                created_at=record.created_at,
                status=RunStatus.RUNNING,
                head=version,
                parent=run_id,
                parent_version=version,
                owner=owner,
            ),
            lease=lease,
            history=parent.history[:version],
            states=parent.states[: version + 1],
            effects={effect.key: effect for effect in effects},
            parent=parent,
            base=version,
        )
        # What the store has shown to be there it must keep for the fork.
        parent.holder(version).doubtful.discard(version)
        for inherited in range(1, version + 1):
            parent.holder(inherited).lost.discard(inherited)
        self._compare(new, 0)
        return new

    @rule(run_id=runs, where=st.integers(0, 99), undo=st.sampled_from("yn"))
    def pin(self, run_id: str, where: int, undo: str) -> None:
        """Somebody pins a version, which may be refused where a collect was; or unpins it, pinned or not."""
        run = self._model[run_id]
        version = where % (run.head + 1)
        if undo == "y":
            self._store.unpin(run_id, version)
            run.pins.discard(version)
            return
        try:
            self._store.pin(run_id, version)
        except VersionGoneError:
            assert not run.has_state(version)
        else:
            run.pins.add(version)
            run.holder(version).doubtful.discard(version)

    @rule(run_id=runs)
    def collect(self, run_id: str) -> None:
        """Somebody collects a run; all runs are compared, since forks share what is held."""
        run = self._model[run_id]
        self._store.collect(run_id)
        runs = self._model.values()
        needed = {version for other in runs for version in other.pins if other.holder(version) is run}
        needed |= {other.base for other in runs if other.parent and other.parent.holder(other.base) is run}
        held = set(range(run.base + 1, run.head + 1))
        run.doubtful |= held - needed - {run.head}
        if run.record.status in FINISHED:
            run.lost |= {version for version in held if version > max(needed, default=0)}
        for each in self._model:
            self._compare(each, 0)

    @precondition(lambda self: self.suite.durable)
    @rule()
    def reopen(self) -> None:
        """The process ends and another one opens the store."""
        self._store.close()
        self._store = self.suite.reopen(self._store)
        for each in self._model:
            self._compare(each, 0)

    @invariant()
    def records_match(self) -> None:
        """The list of runs is as the model says."""
        listed = {record.run_id: record for record in self._store.list_runs()}
        assert listed == {run_id: run.record for run_id, run in self._model.items()}

    def _compare(self, run_id: str, since: int) -> None:
        """Compare everything a reader sees of a run, states and entries from version ``since`` on."""
        run = self._model[run_id]
        assert self._store.get_run(run_id) == run.record
        effects = sorted(run.effects.values(), key=lambda effect: effect.position)
        assert list(self._store.effects(run_id)) == effects
        for version in range(since, run.head + 1):
            try:
                found = values_of(self._store, run_id, version)
            except VersionGoneError:
                assert not run.has_state(version), f"version {version} of {run_id} is gone"
            else:
                assert found == run.states[version], f"version {version} of {run_id}"
        for after in {since, (since + run.head) // 2, run.head}:
            try:
                entries = list(self._store.entries(run_id, after))
            except VersionGoneError:
                assert not run.has_entries(after, run.head), f"entries of {run_id} after {after} are gone"
            else:
                assert entries == run.history[after:]


__all__ = ["RandomLife", "StoreMaker"]
