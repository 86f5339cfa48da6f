"""The tests of the public suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ...errors import (
    RunBusyError,
    RunExistsError,
    UnknownRunError,
    UnsupportedValueError,
    VersionConflictError,
    VersionGoneError,
)
from ...history import (
    Commit,
    EffectRecord,
    EffectStatus,
    Entry,
    EntryKind,
    Operation,
    Position,
    RunStatus,
    Write,
)
from ...protocols import Store
from ...types import Mode
from ..leases import is_alive, this_owner
from .builders import (
    ALICE,
    BOB,
    Breaking,
    add,
    append,
    assert_refused,
    assert_state,
    delete,
    end_entry,
    everything,
    filled,
    make_effect,
    make_entry,
    make_record,
    owner_of_a_dead_process,
    put,
    race,
    rewritten,
    spoil,
    union,
    values_of,
)
from .random_lives import RandomLife


class StoreConformance(ABC):
    """Inherit from this in a class whose name begins with ``Test``, and say how to make the store."""

    durable: ClassVar[bool] = False
    """What was committed is there when the store is opened again."""
    multi_process: ClassVar[bool] = False
    """Several processes may have the same data open at once, each through a store of its own."""
    threads: ClassVar[bool] = True
    """Several threads may use one store."""
    random_lives: ClassVar[settings] = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    """How many random lives the model test tries, and how many operations there are in each."""

    @abstractmethod
    def make_store(self, tmp_path: Path) -> Store:
        """A new store without runs; ``tmp_path`` is an empty folder of its own."""

    def reopen(self, store: Store) -> Store:
        """Another store over the same data. Where ``multi_process`` holds, ``store`` may still be open."""
        return store

    def expire_leases(self, store: Store) -> bool:
        """Let time pass until every lease of the store has expired, by moving the clock that was handed to it.

        Returns:
            Whether that was possible; the tests that need it are skipped otherwise.
        """
        del store
        return False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test. Closed a second time where a test has closed it, which must do nothing."""
        store = self.make_store(tmp_path)
        yield store
        store.close()

    # ------------------------------------------------------------------------------------------------------ creating

    def test_create_adds_a_run_and_leases_it(self, store: Store) -> None:
        """A created run reads as it was given, at version 0, owned by who created it."""
        record = make_record()
        lease = store.create(record, ALICE)
        assert (lease.run_id, lease.owner, lease.head) == ("run", ALICE, 0)
        assert store.get_run("run") == replace(record, owner=ALICE)
        assert (list(store.entries("run")), dict(store.state("run")), list(store.effects("run"))) == ([], {}, [])

    def test_create_refuses_a_taken_id(self, store: Store) -> None:
        """A second run of one id is refused, and the first is untouched and still owned."""
        lease = filled(store)
        before = everything(store, "run")
        with pytest.raises(RunExistsError):
            store.create(make_record(program="another"), BOB)
        assert everything(store, "run") == before
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    def test_runs_do_not_mix(self, store: Store) -> None:
        """Entries, state and effects of one run are not seen in another."""
        first, second = store.create(make_record("first"), ALICE), store.create(make_record("second"), ALICE)
        store.commit(first, Commit(0, (make_entry(1, put("x", 1)),), (make_effect("a", (1,)),)))
        assert (list(store.entries("second")), dict(store.state("second")), list(store.effects("second"))) == (
            [],
            {},
            [],
        )
        store.commit(second, Commit(0, (make_entry(2, put("x", 2)),), (make_effect("a", (2,)),)))
        assert (values_of(store, "first"), values_of(store, "second")) == ({"x": 1}, {"x": 2})
        assert [effect.position for effect in store.effects("first")] == [(1,)]

    def test_list_runs_begins_with_the_oldest(self, store: Store) -> None:
        """Runs are listed by the time they were created at, forks among them, as get_run shows them."""
        assert list(store.list_runs()) == []
        for name, created_at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            store.create(make_record(name, created_at=created_at), ALICE)
        store.fork("b", 0, "fork of b", BOB)
        listed = list(store.list_runs())
        assert [record.run_id for record in listed] == ["a", "b", "c", "fork of b"]
        assert listed == [store.get_run(record.run_id) for record in listed]

    def test_unknown_runs_are_named(self, store: Store) -> None:
        """Every question about a run that does not exist is answered with its id."""
        store.create(make_record("known"), ALICE)
        questions: list[Callable[[], object]] = [
            lambda: store.acquire("unknown", ALICE),
            lambda: store.acquire("unknown", ALICE, take_over=True),
            lambda: store.get_run("unknown"),
            lambda: store.entries("unknown"),
            lambda: store.state("unknown"),
            lambda: store.state("unknown", 0),
            lambda: store.fork("unknown", 0, "new", ALICE),
        ]
        for question in questions:
            with pytest.raises(UnknownRunError) as caught:
                question()
            assert caught.value.run_id == "unknown"
        assert [record.run_id for record in store.list_runs()] == ["known"]

    # -------------------------------------------------------------------------------------------------------- leases

    def test_a_lease_that_was_given_back_can_be_had(self, store: Store) -> None:
        """After release anybody may acquire the run, at its head and with a higher fence."""
        first = filled(store)
        store.release(first)
        assert store.get_run("run").owner is None
        second = store.acquire("run", BOB)
        assert (second.run_id, second.owner, second.head) == ("run", BOB, 3)
        assert second.fence > first.fence
        assert store.get_run("run").owner == BOB

    def test_a_lease_that_was_given_back_writes_nothing(self, store: Store) -> None:
        """After release the old lease can neither commit nor be renewed, even while nobody else has the run."""
        lease = filled(store)
        store.release(lease)
        assert_refused(store, lease)

    def test_a_leased_run_is_busy(self, store: Store) -> None:
        """While a lease may be used nobody gets another, not even under the same name, and the owner is told."""
        lease = filled(store)
        for owner in (BOB, ALICE):
            with pytest.raises(RunBusyError) as caught:
                store.acquire("run", owner)
            assert (caught.value.run_id, caught.value.owner) == ("run", ALICE)
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    def test_a_run_of_this_process_is_busy(self, store: Store) -> None:
        """A process that holds a lease cannot get a second one for the same run."""
        store.create(make_record(), this_owner())
        with pytest.raises(RunBusyError):
            store.acquire("run", this_owner())

    def test_a_run_of_a_dead_process_is_free_at_once(self, store: Store) -> None:
        """A lease whose owner ran on this machine and is gone is not waited for."""
        dead = owner_of_a_dead_process()
        if is_alive(dead) is not False:
            pytest.skip("this system does not tell which processes are alive")
        lease = store.create(make_record(), dead)
        assert store.acquire("run", BOB).owner == BOB
        assert_refused(store, lease)

    def test_an_expired_lease_is_free(self, store: Store) -> None:
        """When a lease has run out and nothing is known of its owner, another may have the run."""
        lease = filled(store)
        if not self.expire_leases(store):
            pytest.skip("the suite cannot let leases expire")
        assert store.acquire("run", BOB).owner == BOB
        assert_refused(store, lease)

    def test_an_expired_lease_still_writes_until_it_is_taken(self, store: Store) -> None:
        """Expiry alone refuses nobody: a slow owner goes on while nobody else has asked for the run."""
        lease = filled(store)
        if not self.expire_leases(store):
            pytest.skip("the suite cannot let leases expire")
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    def test_a_renewed_lease_does_not_expire(self, store: Store) -> None:
        """Renewing starts the time anew."""
        lease = filled(store)
        if not self.expire_leases(store):
            pytest.skip("the suite cannot let leases expire")
        store.renew(lease)
        with pytest.raises(RunBusyError):
            store.acquire("run", BOB)
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    def test_taking_over_makes_the_old_owner_stale(self, store: Store) -> None:
        """After take_over the old lease neither commits entries, effects or a status, nor is it renewed."""
        old = filled(store)
        new = store.acquire("run", BOB, take_over=True)
        assert new.fence > old.fence
        assert new.head == 3
        assert_refused(store, old)
        assert store.commit(new, Commit(3, (make_entry(4),))) == 4
        assert_refused(store, old)

    def test_a_stale_release_changes_nothing(self, store: Store) -> None:
        """Giving back a superseded lease does not free the run under its new owner; nor does doing it twice."""
        old = filled(store)
        new = store.acquire("run", BOB, take_over=True)
        store.release(old)
        assert store.get_run("run").owner == BOB
        with pytest.raises(RunBusyError):
            store.acquire("run", ALICE)
        assert store.commit(new, Commit(3, (make_entry(4),))) == 4
        store.release(new)
        newest = store.acquire("run", ALICE)
        store.release(new)
        assert store.commit(newest, Commit(4, (make_entry(5),))) == 5

    def test_fences_only_grow(self, store: Store) -> None:
        """However leases change hands, each has a higher fence than all before, and only the last one writes."""
        leases = [store.create(make_record(), ALICE)]
        for number in range(6):
            if number % 2:
                store.release(leases[-1])
            leases.append(store.acquire("run", (ALICE, BOB)[number % 2], take_over=number % 2 == 0))
        fences = [lease.fence for lease in leases]
        assert fences == sorted(set(fences))
        for lease in leases[:-1]:
            assert_refused(store, lease)
        assert store.commit(leases[-1], Commit(0, (make_entry(1),))) == 1

    # ----------------------------------------------------------------------------------------------------- committing

    def test_a_commit_makes_everything_real_together(self, store: Store) -> None:
        """Entries, their state, effects and the status are there after the commit, and the new head is returned."""
        lease = store.create(make_record(), ALICE)
        entries = (make_entry(1, put("x", 1)), make_entry(2, put("y", 2)))
        effect = make_effect("key", (2,))
        assert store.commit(lease, Commit(0, entries, (effect,), RunStatus.BLOCKED)) == 2
        assert tuple(store.entries("run")) == entries
        assert values_of(store, "run") == {"x": 1, "y": 2}
        assert list(store.effects("run")) == [effect]
        assert store.get_run("run") == replace(make_record(), head=2, status=RunStatus.BLOCKED, owner=ALICE)

    def test_every_entry_makes_a_version(self, store: Store) -> None:
        """Entry n makes version n, also when several entries are committed at once; version 0 is empty."""
        lease = store.create(make_record(), ALICE)
        store.commit(lease, Commit(0, tuple(make_entry(n, put("x", n), put(f"only {n}", n)) for n in (1, 2, 3))))
        store.commit(lease, Commit(3, (make_entry(4, delete("only 1")),)))
        assert values_of(store, "run", 0) == {}
        assert values_of(store, "run", 1) == {"x": 1, "only 1": 1}
        assert values_of(store, "run", 2) == {"x": 2, "only 1": 1, "only 2": 2}
        assert values_of(store, "run", 3) == {"x": 3, "only 1": 1, "only 2": 2, "only 3": 3}
        assert values_of(store, "run", 4) == values_of(store, "run") == {"x": 3, "only 2": 2, "only 3": 3}

    def test_a_commit_without_entries_keeps_the_head(self, store: Store) -> None:
        """Effects and the status can change without a new version; what is not given stays."""
        lease = filled(store)
        effect = make_effect("new", (9,))
        assert store.commit(lease, Commit(3, effects=(effect,))) == 3
        assert effect in store.effects("run")
        assert store.get_run("run").status is RunStatus.RUNNING
        assert store.commit(lease, Commit(3, status=RunStatus.FAILED)) == 3
        assert store.commit(lease, Commit(3)) == 3
        assert store.get_run("run").status is RunStatus.FAILED
        assert effect in store.effects("run")

    def test_a_commit_on_another_version_changes_nothing(self, store: Store) -> None:
        """A commit that follows any version but the head is refused whole, with both versions named."""
        lease = filled(store)
        before = everything(store, "run")
        for parent in (0, 2, 4):
            for entries in ((make_entry(7, put("x", "wrong")),), ()):
                with pytest.raises(VersionConflictError) as caught:
                    store.commit(lease, Commit(parent, entries, (make_effect("a", (1,), tries=9),), RunStatus.FAILED))
                assert (caught.value.run_id, caught.value.expected, caught.value.found) == ("run", parent, 3)
                assert everything(store, "run") == before
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    def test_a_commit_that_fails_midway_changes_nothing(self, store: Store) -> None:
        """When the data of a commit cannot be read to its end, nothing of it is there afterwards."""
        lease = filled(store)
        before = everything(store, "run")
        entries = (make_entry(4, put("x", "wrong")), make_entry(5, put("y", "wrong")))
        effects = (make_effect("a", (1,), tries=9), make_effect("new", (5,)))
        broken_writes = replace(make_entry(6), writes=Breaking((put("z", 1),)))
        commits = [
            Commit(3, entries, Breaking(effects), RunStatus.FAILED),
            Commit(3, Breaking(entries), effects, RunStatus.FAILED),
            Commit(3, (*entries, broken_writes), effects, RunStatus.FAILED),
        ]
        for commit in commits:
            with pytest.raises(Exception, match=Breaking.MESSAGE):
                store.commit(lease, commit)
            assert everything(store, "run") == before
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4

    # -------------------------------------------------------------------------------------------------------- reading

    def test_entries_come_back_exactly(self, store: Store) -> None:
        """Every field of an entry is read as it was written: None is not empty bytes, floats keep all their digits."""
        lease = store.create(make_record(), ALICE)
        entries = (
            Entry((0,), EntryKind.CALL, "a step", b"\x00\xff", b"", None, at=0.1 + 0.2, seconds=1e-300),
            Entry((12, 0, 3), EntryKind.CALL, "ünï 漢字 \x00 '\"", b"", None, b"error"),
            Entry((13,), EntryKind.SLEEP, "sleep", b"1", b"2", None, events=(b"", b"one", b"\x00" * 1000)),
            Entry(
                (14,),
                EntryKind.JOIN,
                "join",
                b"",
                b"",
                b"",
                writes=(put("k\x00é", 1), delete(""), put("k\x00é", 2)),
                branch_writes=(append("b", 1), union("c", {1}), add("d", 1)),
                at=1.7e9 + 1e-6,
                seconds=123.456,
                mode=Mode.DISTRIBUTION,
            ),
            Entry((15,), EntryKind.CALL, "a lossy step", b"", b"", None, mode=Mode.LOSSY),
            Entry((), EntryKind.END, "program", b"x" * 100_000, b"y" * 100_000, None),
        )
        store.commit(lease, Commit(0, entries))
        assert tuple(store.entries("run")) == entries

    def test_writes_of_branches_are_not_applied(self, store: Store) -> None:
        """The state shows what ``writes`` did; ``branch_writes`` are kept with the entry only."""
        lease = store.create(make_record(), ALICE)
        store.commit(lease, Commit(0, (replace(make_entry(1, put("x", 1)), branch_writes=(put("x", 2), put("y", 2))),)))
        assert values_of(store, "run") == {"x": 1}

    def test_any_range_of_entries_can_be_asked_for(self, store: Store) -> None:
        """``after`` is left out, ``until`` is included, the head is the default, and a range may be empty."""
        lease = store.create(make_record(), ALICE)
        history = [make_entry(n) for n in range(1, 6)]
        store.commit(lease, Commit(0, tuple(history)))
        for after in range(6):
            assert list(store.entries("run", after)) == history[after:]
            for until in range(after, 6):
                assert list(store.entries("run", after, until)) == history[after:until]

    def test_versions_that_do_not_exist_are_refused(self, store: Store) -> None:
        """The state at a version below 0 or beyond the head is an error that names run and version, as is a fork."""
        filled(store)
        for version in (-1, 4, 1000):
            with pytest.raises(VersionGoneError) as caught:
                store.state("run", version)
            assert (caught.value.run_id, caught.value.version) == ("run", version)
            with pytest.raises(VersionGoneError):
                store.fork("run", version, "new", BOB)
        assert [record.run_id for record in store.list_runs()] == ["run"]

    def test_operations_make_the_value(self, store: Store) -> None:
        """Put replaces, delete removes, add counts from 0, append grows a list, union a set, in order."""
        lease = store.create(make_record(), ALICE)
        steps: list[tuple[Write, dict[str, Any]]] = [
            (add("n", 2), {"n": 2}),
            (add("n", 0.5), {"n": 2.5}),
            (put("n", Decimal("0.1")), {"n": Decimal("0.1")}),
            (add("n", Decimal("0.2")), {"n": Decimal("0.3")}),
            (append("l", [1]), {"n": Decimal("0.3"), "l": [[1]]}),
            (append("l", "two"), {"n": Decimal("0.3"), "l": [[1], "two"]}),
            (delete("n"), {"l": [[1], "two"]}),
            (delete("never there"), {"l": [[1], "two"]}),
            (put("l", [0]), {"l": [0]}),
            (append("l", 1), {"l": [0, 1]}),
            (delete("l"), {}),
            (append("l", 5), {"l": [5]}),
            (union("s", {1, 2}), {"l": [5], "s": {1, 2}}),
            (union("s", {2, 3}), {"l": [5], "s": {1, 2, 3}}),
            (put("s", frozenset({9})), {"l": [5], "s": frozenset({9})}),
            (union("s", {8}), {"l": [5], "s": frozenset({8, 9})}),
        ]
        for number, (write, _) in enumerate(steps):
            store.commit(lease, Commit(number, (make_entry(number, write),)))
        for number, (_, expected) in enumerate(steps, start=1):
            found = values_of(store, "run", number)
            assert (found, {key: type(value) for key, value in found.items()}) == (
                expected,
                {key: type(value) for key, value in expected.items()},
            )

    def test_operations_within_one_entry_are_in_order(self, store: Store) -> None:
        """Several writes to one key in one entry act one after the other."""
        lease = store.create(make_record(), ALICE)
        writes = (
            append("l", 1), put("l", [2]), append("l", 3), append("l", 4),
            put("gone", 1), delete("gone"),
            add("back", 7), delete("back"), add("back", 1), add("back", 2),
        )  # fmt: skip
        store.commit(lease, Commit(0, (make_entry(1, *writes),)))
        store.commit(lease, Commit(1, (make_entry(2, append("l", 5), add("back", 4)),)))
        assert values_of(store, "run", 1) == {"l": [2, 3, 4], "back": 3}
        assert values_of(store, "run", 2) == {"l": [2, 3, 4, 5], "back": 7}

    def test_what_is_put_is_kept_to_the_byte(self, store: Store) -> None:
        """A store does not look into a value that was put: any bytes come back as they were."""
        lease = store.create(make_record(), ALICE)
        values = {"a": b"not encoded at all", "b": bytes(range(256)), "c": b"z" * 200_000}
        writes = tuple(Write(key, Operation.PUT, data) for key, data in values.items())
        store.commit(lease, Commit(0, (make_entry(1, *writes),)))
        assert dict(store.state("run")) == values

    def test_an_operation_that_does_not_fit_is_named(self, store: Store) -> None:
        """Reading a version at which a str was appended to says so and names the key; other versions are readable."""
        for run_id, wrong in (("a", append("key", 1)), ("b", union("key", {1})), ("c", add("key", 1))):
            lease = store.create(make_record(run_id), ALICE)
            store.commit(lease, Commit(0, (make_entry(1, put("key", "a str")), make_entry(2, wrong))))
            with pytest.raises(UnsupportedValueError, match="key"):
                store.state(run_id)
            assert values_of(store, run_id, 1) == {"key": "a str"}

    def test_what_a_reader_gets_is_not_the_store(self, store: Store) -> None:
        """Nothing a reader does to what it got, where that can be changed at all, changes what the next one gets."""
        filled(store)
        before = everything(store, "run")
        for version in (None, 2):
            spoil(store.state("run", version))
        spoil(store.entries("run"))
        spoil(store.effects("run"))
        spoil(store.list_runs())
        assert everything(store, "run") == before
        assert list(store.list_runs()) == [store.get_run("run")]

    def test_what_was_read_stays_as_it_was(self, store: Store) -> None:
        """Values handed out before a commit do not change with it."""
        lease = filled(store)
        held = (store.get_run("run"), store.entries("run"), store.state("run"), store.effects("run"))
        copies = (held[0], list(held[1]), dict(held[2]), list(held[3]))
        store.commit(lease, Commit(3, (make_entry(4, put("x", "new"), append("l", 9)),), (make_effect("z", (4,)),)))
        assert (held[0], list(held[1]), dict(held[2]), list(held[3])) == copies

    # -------------------------------------------------------------------------------------------------------- effects

    def test_effects_are_in_program_order(self, store: Store) -> None:
        """The outbox is sorted by position, number by number, whatever the order of commits."""
        lease = store.create(make_record(), ALICE)
        positions: list[Position] = [(10,), (2, 1), (2,), (10, 0, 5), (9,), (2, 0)]
        for number, position in enumerate(positions):
            store.commit(lease, Commit(0, effects=(make_effect(f"key {number}", position),)))
        assert [effect.position for effect in store.effects("run")] == sorted(positions)

    def test_an_effect_is_updated_by_key(self, store: Store) -> None:
        """A row with a known key replaces the old one, field by field; rows at one position keep their order."""
        lease = store.create(make_record(), ALICE)
        sent = EffectRecord("key", (1,), "send", EffectStatus.SENT, b"arguments", tries=1)
        undo = make_effect("undo", (1,))
        store.commit(lease, Commit(0, (make_entry(1),), (sent,)))
        store.commit(lease, Commit(1, effects=(undo,)))
        assert list(store.effects("run")) == [sent, undo]
        for change in (
            replace(sent, status=EffectStatus.ACKED, result=b"", tries=2, mode=Mode.LOSSY),
            replace(sent, status=EffectStatus.COMPENSATION_FAILED, result=b"result", error=b"error", tries=3),
            replace(sent, status=EffectStatus.UNKNOWN, at=0.1 + 0.2, writes=(put("k", 1), delete(""), append("k", 2))),
        ):
            store.commit(lease, Commit(1, effects=(change,)))
            assert list(store.effects("run")) == [change, undo]

    # ---------------------------------------------------------------------------------------------------------- forks

    def test_a_fork_begins_with_the_history_of_its_parent(self, store: Store) -> None:
        """A fork has its parent's first entries and states, a record of its own, a lease, and an empty outbox."""
        filled(store)
        lease = store.fork("run", 2, "fork", BOB)
        assert (lease.run_id, lease.owner, lease.head) == ("fork", BOB, 2)
        assert list(store.entries("fork")) == list(store.entries("run", 0, 2))
        assert [values_of(store, "fork", n) for n in range(3)] == [values_of(store, "run", n) for n in range(3)]
        assert list(store.effects("fork")) == []
        fork, parent = store.get_run("fork"), store.get_run("run")
        assert fork == replace(
            parent, run_id="fork", created_at=fork.created_at, head=2, parent="run", parent_version=2, owner=BOB
        )
        with pytest.raises(VersionGoneError):
            store.state("fork", 3)

    def test_a_fork_and_its_parent_go_on_apart(self, store: Store) -> None:
        """Neither sees what the other commits later, whichever commits first."""
        parent_lease = filled(store)
        lease = store.fork("run", 2, "fork", BOB)
        base, inherited = values_of(store, "run", 2), list(store.entries("run", 0, 2))
        parent = everything(store, "run")
        theirs = (make_entry(30, append("l", "fork"), put("x", "fork")), make_entry(31, add("n", 100)))
        assert store.commit(lease, Commit(2, theirs, (make_effect("f", (30,)),), RunStatus.BLOCKED)) == 4
        assert everything(store, "run") == parent
        ours = (make_entry(4, append("l", "parent"), put("y", "parent")),)
        assert store.commit(parent_lease, Commit(3, ours)) == 4
        assert list(store.entries("fork")) == [*inherited, *theirs]
        assert values_of(store, "fork") == base | {"l": [*base["l"], "fork"], "x": "fork", "n": base["n"] + 100}
        assert values_of(store, "fork", 2) == base

    def test_a_fork_begins_with_the_effects_it_takes_over(self, store: Store) -> None:
        """The rows that are given with a fork are its outbox, and nobody else's; commits go on from them."""
        filled(store)
        parent = everything(store, "run")
        taken = (
            replace(make_effect("f", (3,)), status=EffectStatus.ACKED, result=b"", mode=Mode.LOSSY),
            replace(make_effect("a", (2, 1), tries=2), writes=(put("x", 1),), at=0.1 + 0.2),
        )
        lease = store.fork("run", 2, "fork", BOB, taken)
        assert list(store.effects("fork")) == [taken[1], taken[0]]
        assert everything(store, "run") == parent
        changed = replace(taken[0], status=EffectStatus.COMPENSATED)
        assert store.commit(lease, Commit(2, (make_entry(3),), (changed, make_effect("g", (4,))))) == 3
        assert list(store.effects("fork")) == [taken[1], changed, make_effect("g", (4,))]
        store.fork("fork", 3, "fork of fork", ALICE)
        assert list(store.effects("fork of fork")) == []

    def test_a_fork_that_fails_midway_is_not_there(self, store: Store) -> None:
        """When its effects cannot be read to their end there is no fork: its id is free, and its parent untouched."""
        filled(store)
        parent = everything(store, "run")
        with pytest.raises(Exception, match=Breaking.MESSAGE):
            store.fork("run", 2, "fork", BOB, Breaking((make_effect("f", (3,)),)))
        assert [record.run_id for record in store.list_runs()] == ["run"]
        with pytest.raises(UnknownRunError):
            store.get_run("fork")
        assert everything(store, "run") == parent
        store.fork("run", 1, "fork", BOB)
        assert (list(store.effects("fork")), store.get_run("fork").head) == ([], 1)

    def test_the_status_of_a_fork_is_its_own(self, store: Store) -> None:
        """The fork of a finished run is a running one."""
        lease = filled(store)
        store.commit(lease, Commit(3, (end_entry(),), status=RunStatus.FAILED))
        store.fork("run", 2, "fork", BOB)
        assert store.get_run("fork").status is RunStatus.RUNNING

    def test_forks_of_forks_keep_the_whole_history(self, store: Store) -> None:
        """Forks can be forked at any version, their own or inherited; ranges of entries reach across all of them."""
        lease = filled(store)
        expected = {"run": (list(store.entries("run")), [values_of(store, "run", n) for n in range(4)])}
        plan = [
            ("run", 2, "a"), ("a", 4, "b"), ("b", 3, "c"), ("b", 1, "d"), ("d", 1, "e"), ("c", 0, "f"), ("f", 0, "g"),
        ]  # fmt: skip
        for parent, version, name in plan:
            lease = store.fork(parent, version, name, BOB)
            history, states = expected[parent][0][:version], expected[parent][1][: version + 1]
            for number in (1, 2):
                entry = make_entry(100 * number + ord(name), append("l", f"{name}{number}"), put("by", name))
                store.commit(lease, Commit(version + number - 1, (entry,)))
                history = [*history, entry]
                last = states[-1]
                states = [*states, last | {"l": [*last.get("l", []), f"{name}{number}"], "by": name}]
            expected[name] = (history, states)
            assert (store.get_run(name).parent, store.get_run(name).parent_version) == (parent, version)
        for name, (history, states) in expected.items():
            assert [values_of(store, name, n) for n in range(len(states))] == states
            for after in range(len(history) + 1):
                for until in range(after, len(history) + 1):
                    assert list(store.entries(name, after, until)) == history[after:until]

    def test_fork_refuses_a_taken_id(self, store: Store) -> None:
        """A fork needs a new id; the run that has it is untouched, as is the parent."""
        filled(store)
        store.create(make_record("other"), ALICE)
        before = everything(store, "run"), everything(store, "other")
        for taken in ("other", "run"):
            with pytest.raises(RunExistsError):
                store.fork("run", 1, taken, BOB)
        assert (everything(store, "run"), everything(store, "other")) == before

    def test_a_fork_needs_no_lease_of_its_parent(self, store: Store) -> None:
        """A run can be forked while somebody else works on it, who is not disturbed."""
        lease = filled(store)
        fork = store.fork("run", 3, "fork", BOB)
        assert store.commit(lease, Commit(3, (make_entry(4),))) == 4
        assert store.commit(fork, Commit(3, (make_entry(5),))) == 4
        assert store.get_run("run").owner == ALICE

    # ----------------------------------------------------------------------------------------------------- collecting

    def test_collect_keeps_what_can_be_asked_for(self, store: Store) -> None:
        """Head, pinned versions and origins of forks are readable as before; other versions are so, or are refused."""
        lease = rewritten(store, 10)
        store.pin("run", 3)
        store.pin("run", 7)
        store.fork("run", 5, "fork", BOB)
        before = everything(store, "run")
        assert store.collect("run") >= 0
        for version, state in enumerate(before.states):
            assert_state(store, "run", version, state, certain=version in {3, 5, 7, 10})
        assert list(store.entries("run")) == before.entries, "an unfinished run is rebuilt from its entries"
        assert store.get_run("run") == before.record
        assert list(store.effects("run")) == before.effects
        assert dict(store.state("fork")) == before.states[5]
        assert list(store.entries("fork")) == before.entries[:5]
        for version in (3, 5, 7, 10):
            store.fork("run", version, f"later at {version}", BOB)
            assert dict(store.state(f"later at {version}")) == before.states[version]
        assert store.commit(lease, Commit(10, (make_entry(11, append("l", 11)),))) == 11
        assert values_of(store, "run")["l"] == [*range(1, 12)]

    def test_collect_drops_something(self, store: Store) -> None:
        """What a run wrote over again is dropped, once: a second collect finds nothing."""
        lease = store.create(make_record(), ALICE)
        store.commit(lease, Commit(0, tuple(make_entry(n, put("x", "value" * n)) for n in range(1, 51))))
        store.commit(lease, Commit(50, (end_entry(),), status=RunStatus.COMPLETED))
        assert store.collect("run") > 0
        assert store.collect("run") == 0
        assert values_of(store, "run") == {"x": "value" * 50}

    def test_unpinned_versions_may_go(self, store: Store) -> None:
        """After unpin a version is like any other; unpinning what is not pinned does nothing; the rest stays pinned."""
        lease = rewritten(store, 6)
        states = everything(store, "run").states
        store.pin("run", 2)
        store.pin("run", 4)
        store.unpin("run", 2)
        store.unpin("run", 2)
        store.unpin("run", 5)
        store.collect("run")
        for version, state in enumerate(states):
            assert_state(store, "run", version, state, certain=version in {4, 6})
        store.unpin("run", 4)
        store.commit(lease, Commit(6, (make_entry(7, put("x", "new")),)))
        store.collect("run")
        for version, state in enumerate(states):
            assert_state(store, "run", version, state, certain=False)
        assert values_of(store, "run")["x"] == "new"

    def test_a_finished_run_keeps_what_forks_and_pins_need(self, store: Store) -> None:
        """After a finished run is collected its head is readable, and its forks and pinned versions have their past."""
        lease = rewritten(store, 10)
        fork = store.fork("run", 4, "fork", BOB)
        store.pin("run", 6)
        store.commit(lease, Commit(10, (end_entry(),), status=RunStatus.COMPLETED))
        before = everything(store, "run")
        store.collect("run")
        for version in (4, 6, 11):
            assert dict(store.state("run", version)) == before.states[version]
        assert list(store.entries("run", 0, 6)) == before.entries[:6]
        assert store.get_run("run") == before.record
        assert store.commit(fork, Commit(4, (make_entry(50, append("l", "fork")),))) == 5
        assert list(store.entries("fork", 0, 4)) == before.entries[:4]
        assert values_of(store, "fork")["l"] == [1, 2, 3, 4, "fork"]
        with suppress(VersionGoneError):  # nobody rebuilds a finished run
            assert list(store.entries("run")) == before.entries
        store.fork("run", 6, "late", BOB)
        assert list(store.entries("late")) == before.entries[:6]

    def test_pins_and_origins_count_through_forks(self, store: Store) -> None:
        """A version pinned through a fork, or forked from a fork, is kept in the run that holds it."""
        lease = rewritten(store, 8)
        states = everything(store, "run").states
        store.fork("run", 6, "fork", BOB)
        store.pin("fork", 2)
        store.fork("fork", 4, "fork of fork", BOB)
        store.pin("run", 2)
        store.unpin("run", 2)
        store.commit(lease, Commit(8, (end_entry(),), status=RunStatus.COMPLETED))
        for run_id in ("fork", "run", "fork of fork"):
            store.collect(run_id)
        assert dict(store.state("fork", 2)) == states[2], "unpinning through another run is not unpinning"
        assert dict(store.state("fork of fork", 4)) == states[4]
        assert dict(store.state("fork", 6)) == states[6]
        assert len(store.entries("fork of fork")) == 4
        assert len(store.entries("fork")) == 6

    def test_collecting_one_run_leaves_others_alone(self, store: Store) -> None:
        """Parents, forks and strangers read as before, version by version."""
        rewritten(store, 6)
        lease = store.fork("run", 3, "fork", BOB)
        store.commit(
            lease, Commit(3, tuple(make_entry(40 + n, put("x", n)) for n in range(4)), status=RunStatus.FAILED)
        )
        store.create(make_record("stranger"), ALICE)
        before = everything(store, "run"), everything(store, "stranger")
        store.collect("fork")
        assert (everything(store, "run"), everything(store, "stranger")) == before

    # ----------------------------------------------------------------------------------------- several users, one truth

    def test_threads_that_race_win_each_version_once(self, store: Store) -> None:
        """Of commits that follow one version at the same time exactly one succeeds, whichever thread makes it."""
        if not self.threads:
            pytest.skip("the store is for one thread")
        lease = store.create(make_record(), ALICE)
        won = race([store] * 4, lease, goal=25)
        assert sorted(version for wins in won for version in wins) == list(range(1, 26))
        steps = [entry.step for entry in store.entries("run")]
        assert all(steps[version - 1] == f"racer {racer}" for racer, wins in enumerate(won) for version in wins)
        assert values_of(store, "run") == {f"racer {racer}": len(wins) for racer, wins in enumerate(won) if wins}

    def test_what_was_committed_is_there_after_reopening(self, store: Store) -> None:
        """Runs, forks, pins, effects and leases survive: everything reads as before, and the lease still holds."""
        if not self.durable:
            pytest.skip("the store is not durable")
        lease = rewritten(store, 6)
        store.commit(lease, Commit(6, effects=(make_effect("a", (1,)),), status=RunStatus.BLOCKED))
        store.pin("run", 2)
        fork = store.fork("run", 4, "fork", BOB)
        store.commit(fork, Commit(4, (make_entry(50, append("l", "fork")),)))
        store.collect("fork")
        before = [everything(store, run_id) for run_id in ("run", "fork")]
        store.close()
        again = self.reopen(store)
        try:
            assert again is not store
            assert [everything(again, run_id) for run_id in ("run", "fork")] == before
            with pytest.raises(RunBusyError):
                again.acquire("run", BOB)
            assert again.commit(lease, Commit(6, (make_entry(7, append("l", 7)),))) == 7
            again.collect("run")
            assert dict(again.state("run", 2)) == before[0].states[2]
            newer = again.acquire("run", BOB, take_over=True)
            assert newer.fence > lease.fence
            assert_refused(again, lease)
        finally:
            again.close()

    def test_two_stores_on_one_truth_see_each_other(self, store: Store) -> None:
        """What is committed through one store is read through the other at once, and fencing holds between them."""
        if not self.multi_process:
            pytest.skip("one process at a time")
        lease = filled(store)
        other = self.reopen(store)
        try:
            assert other is not store
            assert everything(other, "run") == everything(store, "run")
            with pytest.raises(RunBusyError):
                other.acquire("run", BOB)
            store.commit(lease, Commit(3, (make_entry(4, append("l", 4)),)))
            assert everything(other, "run") == everything(store, "run")
            newer = other.acquire("run", BOB, take_over=True)
            assert_refused(store, lease)
            assert other.commit(newer, Commit(4, (make_entry(5),))) == 5
            with pytest.raises(VersionConflictError):
                store.commit(newer, Commit(4, (make_entry(5),)))
            other.fork("run", 5, "fork", BOB)
            with pytest.raises(RunExistsError):
                store.create(make_record("fork"), ALICE)
            assert everything(other, "fork") == everything(store, "fork")
            assert everything(other, "run") == everything(store, "run")
        finally:
            other.close()

    def test_stores_that_race_win_each_version_once(self, store: Store) -> None:
        """Of commits through several stores that follow one version exactly one succeeds."""
        if not (self.multi_process and self.threads):
            pytest.skip("one process at a time")
        lease = store.create(make_record(), ALICE)
        others = [self.reopen(store), self.reopen(store)]
        try:
            won = race(others, lease, goal=15)
            assert sorted(version for wins in won for version in wins) == list(range(1, 16))
            assert values_of(store, "run") == {f"racer {racer}": len(wins) for racer, wins in enumerate(won) if wins}
        finally:
            for other in others:
                other.close()

    # ------------------------------------------------------------------------------------------------- random lives

    def test_random_lives_match_the_model(self, tmp_path: Path) -> None:
        """Whatever is done in whatever order, the store reads like a few Python lists and dicts."""

        class Life(RandomLife):
            suite = self
            folder = tmp_path

        run_state_machine_as_test(Life, settings=self.random_lives)


__all__ = ["StoreConformance"]
