"""Frozen values that travel between the rooms of the engine.

Every class here is immutable and says what happened or what is allowed; none of them acts.
A wrong prediction is a value (:class:`AcceptPrefix` with ``num_accepted`` below the admitted length), never an
exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, TypeVar

ChainId = NewType("ChainId", int)
"""Names one chain (one sequential process: a request, a branch trace, an agent) for as long as it lives."""

ValueT = TypeVar("ValueT")


class Mode(Enum):
    """How a speculative run relates to the plain run; written on every result."""

    EXACT = "exact"
    """The same values as the plain run."""
    DISTRIBUTION = "distribution"
    """Values drawn from the same law as the plain run."""
    LOSSY = "lossy"
    """Opted into: the law may differ by a stated threshold."""


@dataclass(frozen=True, slots=True)
class ChainView:
    """What a policy may know about a chain before anything is drafted for it."""

    chain_id: ChainId
    """Which chain."""
    position: int
    """Number of committed items so far."""
    max_draft: int
    """More drafted items than this can never be committed (room left minus the item a plain round yields); >= 0."""


@dataclass(frozen=True, slots=True)
class Draft(Generic[ValueT]):
    """A predicted continuation of one chain: ``values[0]`` is the first item after the committed history."""

    values: Sequence[ValueT]
    """The proposed items, at most as many as the limit that was asked for. Empty is legal and means plain execution."""
    survival: Sequence[float] | None = None
    """``survival[k]`` estimates P(values[0..k] are all accepted). It must be computable *before* ``values[k]`` is
    chosen; that is what keeps scheduling by survival exact. None: the drafter has no estimate (treated as 1.0)."""
    payload: object = None
    """Whatever the backend needs back at verification (for decoding: the tensor the tokens were sampled from)."""
    parents: Sequence[int] | None = None
    """For a draft that branches: ``parents[k]`` is the item that ``values[k]`` continues, one before it, or -1 for the
    committed history. Siblings are alternatives, so at most one path is accepted, and ``survival[k]`` estimates
    P(``values[k]`` and all it continues are accepted). It may depend on ``values[k]``: give trees only where
    verification is exact for any values. None: a chain, in which each item continues the one before."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Which prefix of every draft is executed."""

    lengths: tuple[int, ...]
    """Admitted prefix length per chain, in round order."""
    anticipated: tuple[bool, ...]
    """True where the policy looked at estimates beyond the admitted prefix before deciding. Such a draft must be
    verified by a rule that is exact for any way of choosing the values (one-hot)."""

    @property
    def total(self) -> int:
        """Number of drafted items executed in the round, over all chains."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class AcceptPrefix(Generic[ValueT]):
    """The verdict on one draft: keep ``num_accepted`` items, then append ``replacement``.

    ``replacement`` is the correction after a rejected item, or the bonus item after a fully accepted draft. None means
    the chain ends inside the accepted prefix and nothing is appended.
    """

    num_accepted: int
    replacement: ValueT | None
    path: tuple[int, ...] | None = None
    """The accepted items of a draft that branches, from the history on; None where they are the first ones."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What became of a draft that branches."""

    parents: Sequence[int]
    """See :attr:`Draft.parents`."""
    path: tuple[int, ...]
    """The accepted items, each continuing the one before."""


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Wall-clock seconds one round spent in each phase."""

    predict: float = 0.0
    admit: float = 0.0
    execute: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.predict + self.admit + self.execute + self.verify + self.commit


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did. All tuples are in round order, one entry per chain."""

    index: int
    """Number of the round, from 0."""
    chain_ids: tuple[ChainId, ...]
    limits: tuple[int, ...]
    """How many items the policy asked for (already clamped to what the chain has room for)."""
    drafted: tuple[int, ...]
    """How many the drafter proposed."""
    admitted: tuple[int, ...]
    """How many of those were executed and verified."""
    accepted: tuple[int, ...]
    """How many of those were accepted by the verifier, before any stop truncated the block."""
    emitted: tuple[int, ...]
    """How many items became history: accepted + 1, or fewer if the chain stopped inside the block."""
    survival: tuple[Sequence[float] | None, ...]
    """The drafter's estimates, per chain, as proposed."""
    seconds: PhaseSeconds
    trees: tuple[Tree | None, ...] = ()
    """Per chain, the shape and fate of a draft that branched; empty where none did."""
    padded: bool = False
    """Every chain was executed as far as the one with the most admitted items, and cost as much: what the backend
    says (:class:`~specflow.protocols.PaddingBackend`)."""

    def tree(self, index: int) -> Tree | None:
        """Of chain ``index``; None where its draft was a chain."""
        return self.trees[index] if self.trees else None


@dataclass(frozen=True, slots=True)
class Round(Generic[ValueT]):
    """A round's report together with the items it committed, per chain."""

    report: RoundReport
    items: Sequence[Sequence[ValueT]]
