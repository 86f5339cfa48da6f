"""Backends, policies and a clock that do exactly what they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..types import AcceptPrefix, Admission, ChainId, ChainView, Draft, RoundReport

ValueT = TypeVar("ValueT")

DraftFunction = Callable[[int, int, Sequence[ValueT]], Draft[ValueT]]
"""``(chain, position, future) -> draft``: ``future`` holds the true next items, as many as may be drafted."""


class ManualClock:
    """A clock that moves only when told to. Usable wherever :class:`~specflow.protocols.Clock` is asked for."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Now, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            InvalidSettingError: ``seconds`` is negative.
        """
        if seconds < 0.0:
            raise InvalidSettingError("seconds", seconds, "a duration >= 0")
        self._now += seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """What the phases of a :class:`SequenceBackend` cost on a manual clock."""

    clock: ManualClock
    execute: Callable[[int], float]
    """Seconds by number of items executed (chains + admitted drafts, and what pads them)."""
    predict: Callable[[int], float] = lambda longest: 0.0  # noqa: ARG005 -- a default that costs nothing
    """Seconds by the longest draft asked for; called only when a draft is asked for."""
    padded: bool = False
    """Every chain's block is padded to the longest of the round."""


class _Wrong:
    """A value that equals nothing but itself."""

    def __repr__(self) -> str:
        return "WRONG"


WRONG: Any = _Wrong()
"""A drafted item that is never right, for chains of any type."""


class SequenceBackend(Generic[ValueT]):
    """Chains whose items are known in advance, with drafts from a function.

    Everything a real backend must do is here in its simplest form: execution reads the true items behind each admitted
    draft, verification keeps the longest equal prefix, commit moves the position, discard drops the round.

    Args:
        sequences: the true items of every chain; None is not a legal item.
        draft: what to guess.
        timing: moves a manual clock; None leaves time alone.
    """

    def __init__(
        self, sequences: Sequence[Sequence[ValueT]], draft: DraftFunction[ValueT], timing: Timing | None = None
    ) -> None:
        self._sequences = sequences
        self._draft = draft
        self._timing = timing
        self._positions = [0] * len(sequences)
        self._live = [chain for chain, sequence in enumerate(sequences) if sequence]
        self._in_flight = False
        self._executed = 0
        self._executions = 0

    @property
    def num_executed(self) -> int:
        """Items executed so far, drafted ones and those of plain execution."""
        return self._executed

    @property
    def num_executions(self) -> int:
        """Parallel executions so far."""
        return self._executions

    @property
    def pads_blocks(self) -> bool:
        """See :class:`specflow.protocols.PaddingBackend`."""
        return self._timing is not None and self._timing.padded

    @property
    def in_flight(self) -> bool:
        """True between an execution and its commit or discard."""
        return self._in_flight

    def history(self, chain: int) -> Sequence[ValueT]:
        """The committed items of a chain."""
        return self._sequences[chain][: self._positions[chain]]

    def chains(self) -> Sequence[ChainView]:
        """Chains with items left."""
        return [
            ChainView(ChainId(chain), self._positions[chain], len(self._sequences[chain]) - self._positions[chain] - 1)
            for chain in self._live
        ]

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[ValueT]]:
        """Ask the draft function."""
        if self._timing is not None and any(limits):
            self._timing.clock.advance(self._timing.predict(max(limits)))
        drafts: list[Draft[ValueT]] = []
        for chain, limit in zip(self._live, limits, strict=True):
            position = self._positions[chain]
            future = self._sequences[chain][position : position + limit]
            drafts.append(self._draft(chain, position, future) if limit else Draft(()))
        return drafts

    async def execute(self, drafts: Sequence[Draft[ValueT]], admission: Admission) -> Sequence[Sequence[ValueT]]:
        """The true items at each admitted position and the one after them."""
        width = len(drafts) + admission.total
        if self._timing is not None:
            padded = len(drafts) * (1 + max(admission.lengths))
            self._timing.clock.advance(self._timing.execute(padded if self._timing.padded else width))
        self._in_flight = True
        self._executed += width
        self._executions += 1
        return [
            self._sequences[chain][self._positions[chain] : self._positions[chain] + length + 1]
            for chain, length in zip(self._live, admission.lengths, strict=True)
        ]

    async def verify(
        self, drafts: Sequence[Draft[ValueT]], admission: Admission, outcome: Any
    ) -> Sequence[AcceptPrefix[ValueT]]:
        """Longest equal prefix, then the true item."""
        verdicts: list[AcceptPrefix[ValueT]] = []
        for draft, length, truth in zip(drafts, admission.lengths, outcome, strict=True):
            accepted = 0
            while accepted < length and draft.values[accepted] == truth[accepted]:
                accepted += 1
            verdicts.append(AcceptPrefix(accepted, truth[accepted]))
        return verdicts

    async def commit(self, verdicts: Sequence[AcceptPrefix[ValueT]]) -> Sequence[Sequence[ValueT]]:
        """Move every chain past its accepted items and the replacement."""
        items: list[Sequence[ValueT]] = []
        for chain, verdict in zip(self._live, verdicts, strict=True):
            start = self._positions[chain]
            self._positions[chain] = start + verdict.num_accepted + 1
            items.append(self._sequences[chain][start : self._positions[chain]])
        self._live = [chain for chain in self._live if self._positions[chain] < len(self._sequences[chain])]
        self._in_flight = False
        return items

    def discard(self) -> None:
        """Forget the round; nothing was committed."""
        self._in_flight = False


class OracleBackend(SequenceBackend[ValueT]):
    """A drafter that is always right.

    Args:
        sequences: the true items of every chain.
        survival: the estimate it gives for every item; None gives none.
        timing: moves a manual clock.
    """

    def __init__(
        self, sequences: Sequence[Sequence[ValueT]], survival: float | None = None, timing: Timing | None = None
    ) -> None:
        def draft(chain: int, position: int, future: Sequence[ValueT]) -> Draft[ValueT]:
            del chain, position
            return Draft(future, None if survival is None else [survival] * len(future))

        super().__init__(sequences, draft, timing)


class AdversaryBackend(SequenceBackend[ValueT]):
    """A drafter that is always wrong, and always sure unless told otherwise.

    Args:
        sequences: the true items of every chain.
        survival: the estimate it gives for every item; None gives none.
        timing: moves a manual clock.
    """

    def __init__(
        self, sequences: Sequence[Sequence[ValueT]], survival: float | None = 1.0, timing: Timing | None = None
    ) -> None:
        def draft(chain: int, position: int, future: Sequence[ValueT]) -> Draft[ValueT]:
            del chain, position
            return Draft([WRONG] * len(future), None if survival is None else [survival] * len(future))

        super().__init__(sequences, draft, timing)


class ScriptedBackend(SequenceBackend[ValueT]):
    """Drafts that are right for a scripted number of items, then wrong.

    Args:
        sequences: the true items of every chain.
        script: per chain, how many leading items of each successive draft are right; repeated when it runs out. A
            negative number stands for an empty draft.
        timing: moves a manual clock.
    """

    def __init__(
        self, sequences: Sequence[Sequence[ValueT]], script: Sequence[Sequence[int]], timing: Timing | None = None
    ) -> None:
        turns = [0] * len(sequences)

        def draft(chain: int, position: int, future: Sequence[ValueT]) -> Draft[ValueT]:
            del position
            right = script[chain][turns[chain] % len(script[chain])]
            turns[chain] += 1
            if right < 0:
                return Draft(())
            return Draft([*future[:right], *([WRONG] * (len(future) - right))])

        super().__init__(sequences, draft, timing)


class ScriptedPolicy:
    """Asks for and executes scripted lengths, whatever the estimates say.

    Args:
        limits: draft length of each successive round, for every chain; repeated when it runs out.
        admits: executed length of each successive round, cut to what was drafted; None executes everything.
    """

    def __init__(self, limits: Sequence[int], admits: Sequence[int] | None = None) -> None:
        self._limits = limits
        self._admits = admits
        self._round = 0

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """The scripted limit, shifted by one turn from chain to chain so that rounds are ragged."""
        return [self._limits[(self._round + index) % len(self._limits)] for index in range(len(chains))]

    def admit(self, frontier: Frontier) -> None:
        """The scripted lengths, shifted in the same way."""
        if self._admits is None:
            frontier.admit_all()
            return
        for index in range(len(frontier)):
            wanted = self._admits[(self._round + index) % len(self._admits)]
            frontier.admit(index, min(wanted, frontier.available(index)))

    def observe(self, report: RoundReport) -> None:
        """Move to the next turn."""
        del report
        self._round += 1
