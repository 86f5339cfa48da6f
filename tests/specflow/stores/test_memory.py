"""The store in memory keeps every promise of the protocol, and appending costs the same however much is there."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from specflow.codec import decode, encode
from specflow.errors import InvalidSettingError
from specflow.history import Commit, Entry, EntryKind, Operation, RunRecord, Write
from specflow.protocols import Store
from specflow.stores import MemoryStore, this_owner
from specflow.stores.conformance import StoreConformance
from specflow.testing import ManualClock


class ClockedStore(MemoryStore):
    """A memory store whose time stands still until it is moved."""

    def __init__(self) -> None:
        self.time = ManualClock(1e9)
        super().__init__(clock=self.time)


class TestMemoryStore(StoreConformance):
    """The public suite."""

    def make_store(self, tmp_path: Path) -> Store:
        """A store on a manual clock."""
        return ClockedStore()

    def expire_leases(self, store: Store) -> bool:
        """Move the clock far ahead."""
        assert isinstance(store, ClockedStore)
        store.time.advance(1000.0)
        return True


def entry(number: int, *writes: Write) -> Entry:
    """An entry with few bytes of its own."""
    return Entry((number,), EntryKind.CALL, "step", b"", b"", None, writes)


def append(item: int) -> Write:
    """Append to the one list of these tests."""
    return Write("log", Operation.APPEND, encode(item))


def test_bytes_per_append_stay_flat() -> None:
    """Ten thousand commits that append to one list take as much memory each at the end as in the beginning."""
    store = MemoryStore()
    lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
    sizes = []
    tracemalloc.start()
    try:
        for number in range(10_001):
            if number % 2000 == 0:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            store.commit(lease, Commit(number, (entry(number, append(number)),)))
    finally:
        tracemalloc.stop()
    steps = [(after - before) / 2000 for before, after in pairwise(sizes)]
    assert max(steps) < 1.5 * min(steps), steps
    assert decode(store.state("run")["log"]) == list(range(10_001))


def test_values_put_together_for_readers_are_bounded() -> None:
    """Reading every version of a growing list, newest first, keeps no more bytes than the cache may hold."""
    store = MemoryStore(cache_bytes=50_000)
    lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
    store.commit(lease, Commit(0, tuple(entry(number, append(number)) for number in range(300))))
    for version in range(300, 0, -1):
        assert decode(store.state("run", version)["log"]) == list(range(version))
    assert sum(map(len, store._folded._values.values())) <= store._folded._bytes <= 50_000


def test_a_version_is_read_on_from_the_one_before() -> None:
    """After a read the next version decodes one operation more, not the whole chain: the cache is really used."""
    store = MemoryStore()
    lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
    store.commit(lease, Commit(0, tuple(entry(number, append(number)) for number in range(100))))
    store.state("run", 60)
    cell = store._runs["run"].states[60]["log"]
    assert store._folded.get(cell) == encode(list(range(60)))
    store._folded._values[cell] = encode(["from the cache"])
    assert decode(store.state("run", 62)["log"]) == ["from the cache", 60, 61]


def test_a_fork_shares_its_parents_versions() -> None:
    """A fork points at the parent's map and entries; nothing of them is copied."""
    store = MemoryStore()
    lease = store.create(RunRecord("run", "program", "", b"", 0.0), this_owner())
    store.commit(lease, Commit(0, (entry(1, append(1)), entry(2, append(2)))))
    store.fork("run", 1, "fork", this_owner())
    assert store._runs["fork"].cells is store._runs["run"].states[1]
    assert store._runs["fork"].entries == []
    assert store.entries("fork")[0] is store.entries("run")[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_lease_has_to_hold_for_a_while(seconds: float) -> None:
    """A lease of no length is refused when the store is made."""
    with pytest.raises(InvalidSettingError, match="lease_seconds"):
        MemoryStore(lease_seconds=seconds)


@pytest.mark.parametrize("changes", [{"head": 1}, {"parent": "other"}, {"parent_version": 1}])
def test_a_new_run_has_no_history(changes: dict[str, object]) -> None:
    """Creating a run whose record claims entries or a parent is refused, and nothing is added."""
    store = MemoryStore()
    with pytest.raises(InvalidSettingError, match="new run"):
        store.create(RunRecord("run", "program", "", b"", 0.0, **changes), "me")  # type: ignore[arg-type]
    assert store.list_runs() == ()
