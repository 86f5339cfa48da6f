"""Every seam of the engine on one page. All of them are structural: implement the methods, inherit nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .admission import Frontier
from .types import AcceptPrefix, Admission, ChainView, Draft, RoundReport

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


__all__ = ["ChainBackend", "Clock", "Observer", "Policy"]
