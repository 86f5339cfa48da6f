"""Every seam of the engine on one page. All of them are structural: implement the methods, inherit nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from .admission import Frontier
from .effects import Effect
from .history import Commit, EffectRecord, Entry, Lease, RunRecord
from .speculation import Budget, Call, Opportunity, Prediction, Resolution, Verdict
from .types import AcceptPrefix, Admission, ChainView, Draft, Mode, RoundReport

ValueT = TypeVar("ValueT")


class ChainBackend(Protocol[ValueT]):
    """**Protocol:** many sequential processes whose next items can be guessed, executed in parallel and checked.

    The loop calls ``predict``, ``execute``, ``verify`` and ``commit`` once per round, in that order, with one entry per
    chain in the order of :meth:`chains`. Between rounds every part of the backend's state agrees on the committed
    items. A backend that never really waits can be driven without an event loop (:func:`specflow.chain.run_sync`).
    """

    def chains(self) -> Sequence[ChainView]:
        """The live chains, in the order of this round. Empty: nothing is left to do."""
        ...

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[ValueT]]:
        """Guess the next items of each chain, at most ``limits[i]`` of them; fewer or none is always legal."""
        ...

    async def execute(self, drafts: Sequence[Draft[ValueT]], admission: Admission) -> object:
        """Run the admitted prefixes of all chains in one parallel execution; the outcome is handed to ``verify``."""
        ...

    async def verify(
        self, drafts: Sequence[Draft[ValueT]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[ValueT]]:
        """Compare what was guessed with what the execution says. Pure: nothing is committed here."""
        ...

    async def commit(self, verdicts: Sequence[AcceptPrefix[ValueT]]) -> Sequence[Sequence[ValueT]]:
        """Make accepted items history, roll the rest back, and return the items each chain really emitted.

        A chain may emit fewer items than the verdict allows (it stopped inside the block), never more.
        """
        ...

    def discard(self) -> None:
        """Drop everything this round did beyond the committed state; called when a phase raises."""
        ...


@runtime_checkable
class PaddingBackend(Protocol):
    """**Protocol:** a chain backend that says how it executes unequal drafts; others are taken to waste nothing."""

    @property
    def pads_blocks(self) -> bool:
        """True when every chain is executed as far as the longest admitted draft, and costs as much."""
        ...


class Policy(Protocol):
    """**Protocol:** how far to run ahead. Pure decisions: no I/O, no model, no clock."""

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """How many items to draft for each chain; 0 is plain execution. Clamped to ``max_draft`` by the loop."""
        ...

    def admit(self, frontier: Frontier) -> None:
        """Choose which prefixes to execute, over all chains at once, by admitting items on the frontier."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Learn from a finished round."""
        ...


class Observer(Protocol):
    """**Protocol:** sees every finished round. Must not raise."""

    def on_round(self, report: RoundReport) -> None:
        """Called once per round, after commit."""
        ...


class Clock(Protocol):
    """**Protocol:** seconds from an arbitrary origin; ``time.perf_counter`` is one."""

    def __call__(self) -> float:
        """Now, in seconds."""
        ...


class Predictor(Protocol):
    """**Protocol:** guesses what a step will return. One method is enough; see :class:`LearningPredictor`."""

    def predict(self, call: Call) -> Sequence[Prediction] | Awaitable[Sequence[Prediction]]:
        """Guesses for this call, likeliest first; empty to pass.

        A plain method must be quick (microseconds) and pure: everything it may use of the run is in ``call``,
        including results that are themselves guesses, so there is nothing to undo when a guess was wrong. An
        ``async`` method, or what a plain one returns to be awaited, runs beside the step as speculative work: it may
        call a cheap model.
        """
        ...


class LearningPredictor(Predictor, Protocol):
    """**Protocol:** a predictor that also learns."""

    def observe(self, call: Call, value: Any) -> None:
        """Learn what the step really returned. Called for committed calls only, in program order."""
        ...


class Verifier(Protocol):
    """**Protocol:** does a guess hold?"""

    @property
    def mode(self) -> Mode:
        """What a run whose guesses are accepted by this verifier may claim."""
        ...

    def verify(self, predicted: Any, actual: Any) -> Verdict | Awaitable[Verdict]:
        """Compare the guess that a world ran on with the real result.

        An ``async`` method may take its time: the world goes on running ahead meanwhile, and is committed or squashed
        with the verdict.
        """
        ...


class RunAheadPolicy(Protocol):
    """**Protocol:** how far a workflow runs ahead. Pure decisions: no I/O, no clock."""

    @property
    def depth(self) -> int:
        """Most unresolved guesses that one world may rest on; 0 is plain execution."""
        ...

    @property
    def width(self) -> int:
        """Most guesses of one result that are followed at the same time."""
        ...

    @property
    def effects(self) -> frozenset[Effect]:
        """Effects that may run on a guess; IRREVERSIBLE is ignored."""
        ...

    @property
    def budget(self) -> Budget:
        """Hard limits on what speculation may use up in one run; the scheduler enforces them."""
        ...

    def allows(self, opportunity: Opportunity) -> bool:
        """Start this step now, on a guess?"""
        ...

    def learn(self, resolution: Resolution) -> None:
        """A guess was resolved. Called for guesses about committed calls only, in program order."""
        ...


class Store(Protocol):
    """**Protocol:** where runs are kept. ``specflow.stores.conformance`` checks an implementation.

    Versions of a run are numbered by its committed entries. All methods are synchronous and atomic; a failed call has
    changed nothing. Speculation never reaches a store.
    """

    def create(self, run: RunRecord, owner: str) -> Lease:
        """Add a run and lease it to ``owner``.

        Raises:
            RunExistsError: the id is taken.
        """
        ...

    def acquire(self, run_id: str, owner: str, *, take_over: bool = False) -> Lease:
        """Lease an existing run.

        Args:
            run_id: which run.
            owner: who asks, as :func:`specflow.stores.this_owner` names it.
            take_over: take the lease from an owner that still seems alive; its next write is refused.

        Raises:
            UnknownRunError: no such run.
            RunBusyError: another owner holds a lease that has not expired, and its process may be alive.
        """
        ...

    def renew(self, lease: Lease) -> None:
        """Keep a lease from expiring.

        Raises:
            StaleOwnerError: the run was leased to somebody else meanwhile.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens when it is no longer held."""
        ...

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Make entries, their state changes, outbox rows and the status real, all or nothing.

        Returns:
            The new head.

        Raises:
            StaleOwnerError: the lease is no longer the newest one of the run.
            VersionConflictError: the head is not ``commit.parent``.
        """
        ...

    def get_run(self, run_id: str) -> RunRecord:
        """The record of a run.

        Raises:
            UnknownRunError: no such run.
        """
        ...

    def list_runs(self) -> Sequence[RunRecord]:
        """All runs, oldest first."""
        ...

    def entries(self, run_id: str, after: int = 0, until: int | None = None) -> Sequence[Entry]:
        """Committed entries ``after + 1 .. until`` (default: the head), oldest first; a fork has its parent's too.

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: some of them were collected.
        """
        ...

    def state(self, run_id: str, version: int | None = None) -> Mapping[str, bytes]:
        """Encoded value of every key at a version (default: the head).

        Raises:
            UnknownRunError: no such run.
            VersionGoneError: that version does not exist, or was collected.
        """
        ...

    def effects(self, run_id: str) -> Sequence[EffectRecord]:
        """The outbox of a run, in program order."""
        ...

    def fork(
        self, run_id: str, version: int, new_run_id: str, owner: str, effects: Sequence[EffectRecord] = ()
    ) -> Lease:
        """A new run whose history begins with the first ``version`` entries of another; no entry is copied.

        Args:
            run_id: which run to fork.
            version: number of entries to share.
            new_run_id: names the fork.
            owner: who gets its lease.
            effects: the rows that its outbox begins with: recorded results that it takes over. The fork and these rows
                become real together, or not at all.

        Raises:
            UnknownRunError: no such run.
            RunExistsError: the new id is taken.
            VersionGoneError: that version does not exist, or was collected.
        """
        ...

    def pin(self, run_id: str, version: int) -> None:
        """Keep a version from being collected."""
        ...

    def unpin(self, run_id: str, version: int) -> None:
        """Let a pinned version go; nothing happens when it is not pinned."""
        ...

    def collect(self, run_id: str) -> int:
        """Drop what no reader can ask for: state of versions that are neither the head, pinned, nor a fork's origin.

        Entries of an unfinished run are kept, since it is rebuilt from them.

        Returns:
            How many stored items were dropped.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


__all__ = [
    "ChainBackend",
    "Clock",
    "LearningPredictor",
    "Observer",
    "Policy",
    "Predictor",
    "RunAheadPolicy",
    "Store",
    "Verifier",
]
