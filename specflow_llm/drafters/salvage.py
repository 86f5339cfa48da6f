"""Suffix salvage: what was drafted but not kept is offered again after the correction.

A draft T1 T2 T3 T4 of which T1 T2 were accepted and T3 was replaced by C is not worthless: T4 may still be right. It is
proposed once more, and *verified* once more, because whether it is right depends on C; keeping it unverified would
change the output. Since an offered-again token was drawn in an earlier round whose outcome it shares, it is never
offered with probabilities: it is verified by matching or by the one-hot rule, which are exact for any way of choosing.
The numbers that verification draws are keyed by position and draft index, so that no round sees another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from .base import Drafter, DrafterBase, DraftRequest, Proposal, RowId
from .combined import NOTHING, CombinedDrafter
from .survival import HitTable

_OFFSETS = 8
"""Places in a salvaged suffix whose rates are learned apart; later ones share the last."""

_TOKEN_BYTES = 8


class Alignment(IntEnum):
    """How a leftover may go on after the tokens that were committed instead."""

    UNUSED = 0
    """Everything committed agrees with the draft, which goes on: T4 after T3 was accepted or chosen."""
    REPLACED = 1
    """The correction stands for the rejected token: T4 after C."""
    INSERTED = 2
    """The correction was put before the rejected token: T3 after C."""
    MOVED = 3
    """The correction occurs later in the draft: what followed it there."""


_PRIORS = {Alignment.UNUSED: 0.6, Alignment.REPLACED: 0.2, Alignment.INSERTED: 0.1, Alignment.MOVED: 0.4}
"""Hit rate of the first token before anything was seen."""
_LATER_PRIOR = 0.7
"""The same for tokens after one that came true."""


def _prior_rate(bucket: int) -> float:
    alignment, offset = divmod(bucket, _OFFSETS)
    return _LATER_PRIOR if offset else _PRIORS[Alignment(alignment)]


def leftovers(draft: Sequence[int], committed: Sequence[int]) -> dict[Alignment, Sequence[int]]:
    """What is left of a draft after other tokens were committed, by alignment; empty ones are left out.

    Args:
        draft: the tokens that were proposed.
        committed: what was committed from the place of ``draft[0]`` on.
    """
    agreed = 0
    while agreed < min(len(draft), len(committed)) and draft[agreed] == committed[agreed]:
        agreed += 1
    if agreed == len(committed):
        found = {Alignment.UNUSED: draft[agreed:]}
    else:
        # Usually one token was committed after the agreement; more where no draft was asked for in between.
        after = len(committed)
        found = {Alignment.REPLACED: draft[after:], Alignment.INSERTED: draft[agreed:]}
        for index in range(agreed, len(draft)):
            if draft[index] == committed[-1] and index + 1 != after:
                found[Alignment.MOVED] = draft[index + 1 :]
                break
    return {alignment: tokens for alignment, tokens in found.items() if len(tokens) > 0}


@dataclass(slots=True)
class _Row:
    """One request's last draft, and how it was aligned last."""

    position: int
    """Number of committed tokens when the draft was made."""
    draft: tuple[int, ...]
    asked: int = 0
    """Number of committed tokens when it was aligned last."""
    guesses: dict[Alignment, tuple[int, ...]] = field(default_factory=dict)
    """What each alignment said then."""


class Leftovers(DrafterBase):
    """Offers what is left of each request's last draft. Somebody has to tell it what was drafted.

    Every alignment is scored by what is committed next, whether its tokens were proposed or not; the one with the
    largest expected number of accepted tokens is offered. The rates are shared by all requests.
    """

    def __init__(self) -> None:
        self._rows: dict[RowId, _Row] = {}
        self._hits = HitTable(_prior_rate)

    @property
    def name(self) -> str:
        """``"salvage"``."""
        return "salvage"

    def remember(self, requests: Sequence[DraftRequest], proposals: Sequence[Proposal]) -> None:
        """Take note of what was proposed. An empty proposal leaves the earlier one in place."""
        for request, proposal in zip(requests, proposals, strict=True):
            if len(proposal.token_ids) > 0:
                row = self._rows.get(request.row)
                draft = tuple(proposal.token_ids)
                if row is None:
                    self._rows[request.row] = _Row(len(request.token_ids), draft)
                else:
                    row.position, row.draft = len(request.token_ids), draft

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The most promising leftover of every request; empty where nothing is left."""
        return [self._propose(request) for request in requests]

    def release(self, row: RowId) -> None:
        """Forget a request's draft. What it taught about alignments stays."""
        self._rows.pop(row, None)

    def state_bytes(self) -> Mapping[str, int]:
        """Bytes of the remembered drafts and of the hit rates."""
        held = sum(
            len(row.draft) + sum(len(guess) for guess in row.guesses.values()) + 4 for row in self._rows.values()
        )
        return {"salvaged_drafts": held * _TOKEN_BYTES, "salvage_hit_rates": self._hits.num_bytes}

    def _propose(self, request: DraftRequest) -> Proposal:
        row = self._rows.get(request.row)
        if row is None or request.limit <= 0 or len(request.token_ids) == row.position:
            return NOTHING  # the last: a round that failed is drafted again, as if it had never been
        self._learn(row, request.token_ids)
        committed = request.token_ids[row.position :]
        row.asked = len(request.token_ids)
        row.guesses = {alignment: tuple(left) for alignment, left in leftovers(row.draft, committed).items()}
        best, best_survival = NOTHING, [0.0]
        for alignment, tokens in row.guesses.items():
            offered = tokens[: request.limit]
            survival = self._hits.survival(_bucket(alignment, offset) for offset in range(len(offered)))
            if sum(survival) > sum(best_survival):
                best, best_survival = Proposal(offered, survival=tuple(survival)), survival
        return best

    def _learn(self, row: _Row, token_ids: Sequence[int]) -> None:
        """Score each alignment's guess against what was committed since."""
        committed = token_ids[row.asked :]
        for alignment, tokens in row.guesses.items():
            for offset, (token, true) in enumerate(zip(tokens, committed, strict=False)):
                self._hits.record(_bucket(alignment, offset), token == true)
                if token != true:
                    break
        row.guesses = {}


def _bucket(alignment: Alignment, offset: int) -> int:
    return alignment * _OFFSETS + min(offset, _OFFSETS - 1)


class SalvageDrafter(DrafterBase):
    """A drafter whose rejected and unused tokens are offered again where it has nothing better.

    The choice between a leftover and a new draft is :class:`~specflow_llm.drafters.combined.CombinedDrafter`'s, and so
    is its exactness.

    Args:
        inner: the drafter.
        cost: time to ask it, as a share of a round without it. Above 0 it is not asked where a leftover promises more
            tokens per second; 0 asks always.

    Raises:
        InvalidSettingError: ``cost`` is below 0.
    """

    def __init__(self, inner: Drafter, *, cost: float = 0.0) -> None:
        self._inner = inner
        self._leftovers = Leftovers()
        self._choice = CombinedDrafter(self._leftovers, inner, costs=(0.0, cost))
        self.feature_layers = self._choice.feature_layers
        self.gives_probs = self._choice.gives_probs

    @property
    def name(self) -> str:
        """The drafter's name, with ``+salvage`` behind it."""
        return f"{self._inner.name}+salvage"

    @property
    def num_chosen(self) -> Mapping[str, int]:
        """How many proposals were new drafts and how many were salvaged, by name."""
        return self._choice.num_chosen

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """A new draft or a leftover for every request."""
        proposals = self._choice.propose(requests)
        self._leftovers.remember(requests, proposals)
        return proposals

    def release(self, row: RowId) -> None:
        """Forget a request."""
        self._choice.release(row)

    def state_bytes(self) -> Mapping[str, int]:
        """The drafter's state and the leftovers."""
        return self._choice.state_bytes()
