"""A very light drafter: one small convolutional step per drafted token (:mod:`.conv_model`).

Letters in shapes: R requests, T tokens, V target vocabulary, Vd draft vocabulary, D hidden size, L layers, W kernel
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..dspark import TargetAdapter
from ..errors import DrafterError
from ..packing import PackedLinear, can_pack
from .base import DrafterBase, DraftRequest, Proposal, RowId
from .context_bias import Context, ContextBias, Place
from .conv_checkpoint import load_conv
from .conv_model import ConvConfig, ConvModel, SharedTables
from .survival import HitTable, confidence_bucket, confidence_prior


class ConvDrafter(DrafterBase):
    """Drafts token by token with a :class:`ConvModel`, its logits biased by the request's text (:mod:`.context_bias`).

    A request's state stands behind its committed tokens, which never change; drafts are computed from copies, so there
    is nothing to roll back.

    Args:
        model: the model; it is put into evaluation mode.
        target_vocab_size: V.
        name: for logs and metrics.
        pack: keep the output head of a model on a CPU in a layout in which few rows are cheap.

    Raises:
        DrafterError: the model is for another vocabulary.
    """

    gives_probs = True

    def __init__(self, model: ConvModel, *, target_vocab_size: int, name: str = "conv", pack: bool = True) -> None:
        if model.config.vocab_size != target_vocab_size:
            raise DrafterError(
                name,
                f"it was trained for {model.config.vocab_size} token ids, the target has {target_vocab_size}",
                "use the drafter with its own target, or train one for this target",
            )
        self._model = model.eval()
        self._ids = model.draft_ids
        self._head = _Head(model, pack=pack and can_pack(model))
        self._name = name
        self._rows: dict[RowId, _Row] = {}
        self._hits = HitTable(confidence_prior)
        self._bias = ContextBias(model.config.context_bias, vocab_size=target_vocab_size, ids=self._ids)

    @classmethod
    def load(cls, folder: str | Path, adapter: TargetAdapter, *, name: str | None = None) -> ConvDrafter:
        """A drafter from its folder.

        Raises:
            CheckpointError: the folder holds no drafter for this target.
        """
        place = Path(folder)
        model = load_conv(place, adapter).to(device=adapter.device, dtype=adapter.dtype)
        return cls(model, target_vocab_size=adapter.vocab_size, name=name or place.name)

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Draft for all requests together, one model call per drafted position."""
        for request in requests:
            self._learn(request)
        active = [request for request in requests if request.limit > 0]
        drafts = self._draft(active) if active else {}
        return [Proposal(()) if request.row not in drafts else drafts[request.row].proposal() for request in requests]

    def release(self, row: RowId) -> None:
        """Forget a request's state. What it taught about confidence stays."""
        self._rows.pop(row, None)
        self._bias.release(row)

    def state_bytes(self) -> Mapping[str, int]:
        """Weights, apart from the target's tables, and the requests' states and texts."""
        states = sum(row.state.numel() * row.state.element_size() for row in self._rows.values())
        return {
            "draft_weights": self._model.num_own_bytes + self._head.num_bytes,
            "draft_state": states,
            "draft_context": self._bias.num_bytes,
        }

    @torch.inference_mode()
    def _draft(self, requests: Sequence[DraftRequest]) -> dict[RowId, _Draft]:
        hidden, state = self._read(requests)
        drafts = {request.row: _Draft(request, self._bias.read(request)) for request in requests}
        going = [drafts[request.row] for request in requests]
        for index in range(max(request.limit for request in requests)):
            if index:
                kept = [place for place, draft in enumerate(going) if draft.request.limit > index]
                if len(kept) < len(going):
                    going, state = [going[place] for place in kept], state[:, kept]
                last = torch.tensor([draft.tokens[-1] for draft in going], device=state.device)
                states, state = self._model.extend(state, last[:, None])
                hidden = states[:, 0]
            self._choose(going, self._head(hidden))
        for request in requests:
            draft = drafts[request.row]
            self._rows[request.row].pending = (len(request.token_ids), draft.tokens, draft.buckets)
        return drafts

    def _choose(self, drafts: Sequence[_Draft], logits: torch.Tensor) -> None:
        """The next token of every draft from [R, Vd] logits; those that want the most probable one together."""
        logits = logits.float()
        self._bias.apply(logits, [self._bias.continuations(draft.context, draft.place) for draft in drafts])
        greedy = [place for place, draft in enumerate(drafts) if draft.request.sampler.is_trivial]
        if greedy:
            rows = logits if len(greedy) == len(drafts) else logits[greedy]
            best, columns = rows.max(-1)
            tokens = columns if self._ids is None else self._ids[columns]
            tops = (best - rows.logsumexp(-1)).exp()
            for place, token, top in zip(greedy, tokens.tolist(), tops.tolist(), strict=True):
                drafts[place].take(token, None, top, self._hits)
        for place, draft in enumerate(drafts):
            request = draft.request
            if not request.sampler.is_trivial:
                position = len(request.token_ids) + len(draft.tokens)
                chosen = request.sampler.draft(logits[place], request.token_ids, draft.tokens, position, self._ids)
                draft.take(*chosen, self._hits)

    def _read(self, requests: Sequence[DraftRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read each request's new tokens, the anchor included.

        Returns:
            ([R, D] the hidden states behind them, [L, R, W - 1, D] the states behind them).
        """
        unread = [self._unread(request) for request in requests]
        counts = [len(tokens) for tokens, _ in unread]
        longest = max(counts)
        device = unread[0][1].device
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in unread], device=device)
        lengths = None if min(counts) == longest else torch.tensor(counts, device=device)
        hidden, state = self._model.extend(torch.cat([before for _, before in unread], dim=1), ids, lengths)
        last = hidden[:, -1] if lengths is None else hidden[torch.arange(len(counts), device=device), lengths - 1]
        for request, one in zip(requests, state.split(1, dim=1), strict=True):
            # A copy: a slice would keep the whole group's tensor alive.
            self._rows[request.row] = _Row(len(request.token_ids), one.clone() if len(requests) > 1 else one)
        return last, state

    def _unread(self, request: DraftRequest) -> tuple[list[int], torch.Tensor]:
        """The tokens to read, at least one, and the state before them.

        Never more than the receptive field: behind so many tokens the state is the same whatever was before them.
        """
        row, count = self._rows.get(request.row), len(request.token_ids)
        start = max(0, count - self._model.config.receptive_field)
        if row is None or row.read >= count:  # new, or a round that failed and is drafted again
            return list(request.token_ids[start:]), self._model.empty_state(1)
        return list(request.token_ids[max(start, row.read) :]), row.state

    def _learn(self, request: DraftRequest) -> None:
        """Score the last proposal against what was committed since."""
        row = self._rows.get(request.row)
        if row is None:
            return
        start, tokens, buckets = row.pending
        self._hits.score(tokens, buckets, request.token_ids[start:])
        row.pending = (0, [], [])


class _Head:
    """The last projection and the output head, for drafting.

    With a restricted draft vocabulary their product is kept instead, [Vd, D]: nothing but a product of two matrices
    stands between hidden states and logits, and one of rank D costs less than two.
    """

    def __init__(self, model: ConvModel, *, pack: bool) -> None:
        self._model = model
        self._module: nn.Module | None = None
        table, leave = model.table.detach(), model.leave.weight.detach()
        (head_size, embedding_size), hidden_size = table.shape, leave.shape[1]
        if model.draft_ids is None or hidden_size * head_size > embedding_size * (head_size + hidden_size):
            return
        linear = nn.Linear(hidden_size, head_size, bias=model.head_bias is not None, device="meta")
        product = (table.float() @ leave.float()).to(leave.dtype)
        linear.weight = nn.Parameter(product, requires_grad=False)
        if model.head_bias is not None:
            linear.bias = nn.Parameter(model.head_bias.detach().to(leave.dtype), requires_grad=False)
        self._module = PackedLinear(linear) if pack else linear

    @property
    def num_bytes(self) -> int:
        """Bytes of the product, and of the rows that were copied from the target's head."""
        copied = self._model.head if self._model.draft_ids is not None else None
        size = 0 if copied is None else copied.numel() * copied.element_size()
        if self._module is not None:
            size += (
                self._model.config.head_size * self._model.config.hidden_size * self._model.leave.weight.element_size()
            )
        return size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, D] final hidden states -> [R, Vd] logits."""
        if self._module is None:
            return self._model.logits(hidden)
        return self._model.finish(self._module(hidden))


@dataclass(slots=True)
class _Row:
    """What is held for one request."""

    read: int
    """How many committed tokens the state stands behind."""
    state: torch.Tensor
    """[L, 1, W - 1, D]."""
    pending: tuple[int, list[int], list[int]] = (0, [], [])
    """The last proposal: where it began, its tokens, their confidence buckets."""


@dataclass(slots=True)
class _Draft:
    """One request's draft while it grows."""

    request: DraftRequest
    context: Context
    place: Place = field(init=False)
    tokens: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = self.context.start

    def take(self, token: int, probs: torch.Tensor | None, confidence: float, hits: HitTable) -> None:
        """Append a token. Its survival depends on the law's confidence, not on the token."""
        bucket = confidence_bucket(confidence)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * hits.rate(bucket))
        self.buckets.append(bucket)
        self.tokens.append(token)
        self.place = self.context.follow(self.place, token)
        if probs is not None:
            self.probs.append(probs)

    def proposal(self) -> Proposal:
        """The finished draft."""
        return Proposal(self.tokens, torch.stack(self.probs) if self.probs else None, tuple(self.survival))


__all__ = ["ConvConfig", "ConvDrafter", "ConvModel", "SharedTables"]
