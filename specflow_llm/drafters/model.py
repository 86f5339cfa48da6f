"""A smaller causal language model as drafter, with its own slot cache.

Letters in shapes: B requests, T block width, V the target's vocabulary, Vd the draft model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from ..architecture import StateKind, inspect_model
from ..errors import DrafterError
from ..packing import weight_bytes
from ..selfcheck import build_target
from ..target import SlotTarget
from .base import DrafterBase, DraftRequest, Proposal, RowId
from .slots import SlotOrder, runs
from .survival import HitTable, confidence_bucket, confidence_prior


class ModelDrafter(DrafterBase):
    """Drafts with a causal language model that shares the target's tokenizer.

    Its vocabulary may be padded differently from the target's: ids the target does not know are never proposed, ids
    the drafter does not know are never guessed. A request that outgrows the draft model's context is simply not
    drafted for any longer.

    Args:
        model: the draft model.
        target_vocab_size: size of the target's vocabulary.
        name: for logs and metrics.

    Raises:
        DrafterError: the model keeps a recurrent state, or no architecture this library can roll back.
    """

    gives_probs = True

    def __init__(self, model: PreTrainedModel, *, target_vocab_size: int, name: str | None = None) -> None:
        architecture = inspect_model(model)
        if architecture.state_kind is not StateKind.SLOTS:
            raise DrafterError(
                architecture.name, "recurrent models cannot draft yet", "use an attention-only draft model"
            )
        target = build_target(model, architecture, prefill_chunk=512)
        if not isinstance(target, SlotTarget):
            raise DrafterError(architecture.name, "it has no slot cache", "use an attention-only draft model")
        self._name = name or model.config.name_or_path or architecture.name
        self._state = target
        self._vocab = target_vocab_size
        self._weight_bytes = weight_bytes(model)
        self._draft_vocab = architecture.vocab_size
        self._context = architecture.context_length
        self._order = SlotOrder()
        self._rows: dict[RowId, _Row] = {}
        self._hits = HitTable(confidence_prior)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._name

    @property
    def num_forwards(self) -> int:
        """Draft-model calls so far."""
        return self._state.num_forwards

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Draft for all requests together, one forward per drafted position."""
        self._learn(requests)
        limits = [self._limit(request) for request in requests]
        active = [index for index, limit in enumerate(limits) if limit > 0]
        proposals = [Proposal([]) for _ in requests]
        if active:
            chosen = [requests[index] for index in active]
            for index, proposal in zip(active, self._draft(chosen, [limits[index] for index in active]), strict=True):
                proposals[index] = proposal
        return proposals

    def release(self, row: RowId) -> None:
        """See :class:`specflow_llm.drafters.base.Drafter`."""
        self._rows.pop(row, None)
        slot = self._order.remove(row)
        if slot is not None:
            self._state.close(slot)

    def state_bytes(self) -> Mapping[str, int]:
        """Weights and key-value cache of the draft model."""
        return {"draft_weights": self._weight_bytes, "draft_kv": self._state.cache.allocated_bytes}

    def _limit(self, request: DraftRequest) -> int:
        if self._context is None:
            return request.limit
        return max(0, min(request.limit, self._context - len(request.token_ids)))

    def _draft(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> list[Proposal]:
        rows = [self._row(request) for request in requests]
        work = [
            _Draft(request, limit, self._unrun(request, row))
            for request, limit, row in zip(requests, limits, rows, strict=True)
        ]
        for step in range(max(limits)):
            going = [draft for draft in work if step < draft.limit]
            for draft, logits in zip(going, self._step(going), strict=True):
                draft.extend(logits, self._hits)
        for draft, row in zip(work, rows, strict=True):
            row.pending = (len(draft.request.token_ids), draft.tokens, draft.buckets)
        return [draft.proposal() for draft in work]

    def _row(self, request: DraftRequest) -> _Row:
        """The request's state; opened, with the prompt run, when it is seen for the first time."""
        if request.row not in self._rows:
            self._state.open([self._readable(request.token_ids)])
            self._order.add(request.row)
            self._rows[request.row] = _Row(list(request.token_ids[:-1]))
        return self._rows[request.row]

    def _unrun(self, request: DraftRequest, row: _Row) -> list[int]:
        """Roll back to what the draft model ran *and* was committed.

        Returns:
            The committed tokens it has not run; at least the anchor.
        """
        ids, held = request.token_ids, row.held
        agreed = row.confirmed
        while agreed < len(held) and agreed < len(ids) - 1 and held[agreed] == ids[agreed]:
            agreed += 1
        del held[agreed:]
        row.confirmed = agreed
        self._state.truncate(self._order.slot(request.row), agreed)
        return list(ids[agreed:])

    def _step(self, drafts: Sequence[_Draft]) -> list[torch.Tensor]:
        """Run each draft's unrun tokens; returns the logits [V] after them, in order."""
        by_slot = {self._order.slot(draft.request.row): draft for draft in drafts}
        logits: dict[RowId, torch.Tensor] = {}
        for first, end in runs(sorted(by_slot)):
            group = [by_slot[slot] for slot in range(first, end)]
            output = self._state.forward_rows(first, [self._readable(draft.unrun) for draft in group]).logits
            for offset, draft in enumerate(group):
                logits[draft.request.row] = self._to_target_vocab(output[offset, len(draft.unrun) - 1])
                self._state.keep(first + offset, len(draft.unrun))
                self._rows[draft.request.row].held.extend(draft.unrun)
        return [logits[draft.request.row] for draft in drafts]

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """Committed ids the drafter has no embedding for read as id 0: drafts get worse there, never the output."""
        return [token if token < self._draft_vocab else 0 for token in tokens]

    def _to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        """[Vd] -> [V]: surplus draft ids are dropped, ids the drafter lacks are impossible."""
        if logits.shape[0] >= self._vocab:
            return logits[: self._vocab]
        return torch.cat([logits, logits.new_full((self._vocab - logits.shape[0],), -torch.inf)])

    def _learn(self, requests: Sequence[DraftRequest]) -> None:
        """Score the last proposals against what was committed since: how often is a draft at this confidence right?"""
        for request in requests:
            row = self._rows.get(request.row)
            if row is None:
                continue
            start, drafted, buckets = row.pending
            self._hits.score(drafted, buckets, request.token_ids[start:])
            row.pending = (0, [], [])


class _Row:
    """What the draft model holds for one request."""

    __slots__ = ("confirmed", "held", "pending")

    def __init__(self, held: list[int]) -> None:
        self.held = held
        """Tokens whose keys and values are in the draft cache, drafted ones included."""
        self.confirmed = len(held)
        """How many of them are known to be committed."""
        self.pending: tuple[int, list[int], list[int]] = (0, [], [])
        """The last proposal: where it began, its tokens, their confidence buckets."""


class _Draft:
    """One request's draft while it grows."""

    __slots__ = ("buckets", "limit", "probs", "request", "survival", "tokens", "unrun")

    def __init__(self, request: DraftRequest, limit: int, unrun: list[int]) -> None:
        self.request = request
        self.limit = limit
        self.unrun = unrun
        self.tokens: list[int] = []
        self.buckets: list[int] = []
        self.survival: list[float] = []
        self.probs: list[torch.Tensor] = []

    def extend(self, logits: torch.Tensor, hits: HitTable) -> None:
        """Choose the next token from [V] logits. Its survival is fixed before the token is drawn."""
        history = self.request.token_ids
        token, probs, confidence = self.request.sampler.draft(
            logits, history, self.tokens, len(history) + len(self.tokens)
        )
        bucket = confidence_bucket(confidence)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * hits.rate(bucket))
        self.buckets.append(bucket)
        self.tokens.append(token)
        if probs is not None:
            self.probs.append(probs)
        self.unrun = [token]

    def proposal(self) -> Proposal:
        """The finished draft."""
        return Proposal(self.tokens, torch.stack(self.probs) if self.probs else None, tuple(self.survival))
