"""The target for recurrent and hybrid models: rows roll back by snapshot and replay.

A recurrent layer folds its past into a fixed-size state, so a rejected token cannot be removed from it. Each slot
therefore keeps the state as of its last fully kept block (the snapshot) and the committed tokens since then (the
backlog). The next block runs backlog + anchor + drafts from a copy of the snapshot in one forward; a block kept in
full becomes the new snapshot. A long backlog is replayed once, in a forward of its own. Padding would pollute such a
state, so slots are run one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from .architecture import Architecture
from .errors import SlotError
from .features import FeatureTaps
from .packing import weight_bytes
from .target import DEFAULT_PREFILL_CHUNK, TargetOutput

_MAX_BACKLOG = 8  # beyond this many tokens one replay forward is cheaper than carrying them along


class _Slot:
    """One request's snapshot, its backlog, and the last block run on it."""

    __slots__ = ("backlog", "block", "snapshot", "trial")

    def __init__(self, snapshot: DynamicCache) -> None:
        self.snapshot = snapshot
        self.backlog: list[int] = []
        self.block: list[int] = []
        self.trial: DynamicCache | None = None


def clone_cache(cache: DynamicCache) -> DynamicCache:
    """A copy that can be run on without changing the original.

    Recurrent states are updated in place by transformers and are cloned; keys and values are replaced by
    concatenation and can be shared.
    """
    twin = copy.copy(cache)
    twin.layers = [_clone_layer(layer) for layer in cache.layers]
    return twin


def _clone_layer(layer: Any) -> Any:
    twin = copy.copy(layer)
    in_place = isinstance(layer, LinearAttentionCacheLayerMixin)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            twin.__dict__[name] = {
                key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()
            }
        elif in_place and isinstance(value, torch.Tensor):
            twin.__dict__[name] = value.clone()
    return twin


class RecurrentTarget:
    """A target whose rows are separate caches with snapshots. Implements :class:`specflow_llm.target.Target`.

    Args:
        model: the model, in evaluation mode.
        architecture: as read by :func:`specflow_llm.architecture.inspect_model`.
        feature_layers: decoder layers whose outputs are returned with the logits.
        tap_final: return the hidden states after the final norm behind them.
        prefill_chunk: prompt tokens per forward.
        one_by_one: run tokens in single-token forwards. For models whose multi-token continuation from a state is not
            exact in the installed
            transformers; exact, but speculation cannot gain anything.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        *,
        feature_layers: Sequence[int] = (),
        tap_final: bool = False,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        one_by_one: bool = False,
    ) -> None:
        self.architecture = architecture
        self.num_forwards = 0
        self._model = model
        self._device = model.device
        self._taps = FeatureTaps(model, feature_layers, final=tap_final)
        self._chunk = 1 if one_by_one else prefill_chunk
        self._slots: list[_Slot] = []
        self._weight_bytes = weight_bytes(model)

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """See :class:`specflow_llm.target.Target`."""
        features: list[torch.Tensor | None] = []
        for prompt in prompts:
            cache = DynamicCache(config=self._model.config)
            body = list(prompt[:-1])
            run = self._run(cache, body, last_logits_only=True).features if body else None
            features.append(self._taps.join([] if run is None else [run[0]]))
            self._slots.append(_Slot(cache))
        return features

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """See :class:`specflow_llm.target.Target`."""
        outputs: list[TargetOutput] = []
        slot_forwards: list[int] = []
        for slot, block in zip(self._slots, blocks, strict=True):
            before = self.num_forwards
            outputs.append(self._forward_slot(slot, block))
            slot_forwards.append(self.num_forwards - before)
        width = max(len(block) for block in blocks)
        logits = torch.stack([_padded(output.logits[0], width) for output in outputs])
        rows = [output.features for output in outputs]
        features = None
        if rows[0] is not None:
            features = torch.stack([_padded(row[0], width) for row in rows if row is not None])
        return TargetOutput(logits, features, slot_forwards)

    def _forward_slot(self, slot: _Slot, block: Sequence[int]) -> TargetOutput:
        if len(slot.backlog) > _MAX_BACKLOG:
            replayed = clone_cache(slot.snapshot)  # a forward that raises halfway must not have touched the snapshot
            self._run(replayed, slot.backlog, last_logits_only=True)
            slot.snapshot, slot.backlog = replayed, []
        slot.block = list(block)
        slot.trial = clone_cache(slot.snapshot)
        output = self._run(slot.trial, slot.backlog + slot.block, last_logits_only=False)
        own = slice(-len(block), None)  # what stands before it belongs to the backlog
        return TargetOutput(output.logits[:, own], None if output.features is None else output.features[:, own])

    @torch.inference_mode()
    def _run(self, cache: DynamicCache, tokens: Sequence[int], *, last_logits_only: bool) -> TargetOutput:
        """Continue ``cache`` by ``tokens``; features, and logits where all are asked for, cover every one of them."""
        arch = self.architecture
        limit = {"logits_to_keep": 1} if last_logits_only and arch.can_limit_logits else {}
        logits: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        for begin in range(0, len(tokens), self._chunk):
            ids = torch.tensor([list(tokens[begin : begin + self._chunk])], device=self._device)
            with self._taps.recording() as tapped:
                output = self._model(**{"input_ids": ids, arch.cache_argument: cache, "use_cache": True, **limit})
            self.num_forwards += 1
            logits.append(output.logits)
            features = tapped.features()
            if features is not None:
                pieces.append(features)
        return TargetOutput(torch.cat(logits, dim=1), torch.cat(pieces, dim=1) if pieces else None)

    def keep(self, slot: int, count: int) -> None:
        """See :class:`specflow_llm.target.Target`.

        Raises:
            SlotError: the last block has fewer positions that are not committed yet.
        """
        state = self._slots[slot]
        if not 0 <= count <= len(state.block):
            raise SlotError(slot, f"cannot commit {count} positions of a block of {len(state.block)}")
        if count == len(state.block) and state.trial is not None:
            state.snapshot = state.trial
            state.backlog = []
        else:
            state.backlog = state.backlog + state.block[:count]
        state.trial = None
        state.block = []

    def close(self, slot: int) -> None:
        """See :class:`specflow_llm.target.Target`."""
        last = self._slots.pop()
        if slot < len(self._slots):
            self._slots[slot] = last

    def state_bytes(self) -> dict[str, int]:
        """See :class:`specflow_llm.target.Target`."""
        total = 0
        for slot in self._slots:
            for layer in slot.snapshot.layers:
                for value in vars(layer).values():
                    tensors = value.values() if isinstance(value, dict) else (value,)
                    total += sum(
                        item.numel() * item.element_size() for item in tensors if isinstance(item, torch.Tensor)
                    )
        return {"target_weights": self._weight_bytes, "target_kv": total}


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[t, X] -> [width, X], zeros below."""
    if rows.shape[0] == width:
        return rows
    return torch.cat([rows, rows.new_zeros(width - rows.shape[0], rows.shape[1])])
