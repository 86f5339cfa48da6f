"""The target model behind one small interface, and its implementation for models whose state is keys and values.

A *slot* is one request's place. Slots are numbered 0..n-1 without gaps: closing a slot moves the last one into its
place, and the caller does the same with its own list. A forward runs a block per slot (the anchor, then drafts)
without committing anything; :meth:`Target.keep` says how many positions of the block became history. What is not kept
is rolled back.

Letters in shapes: B slots, T block width, L used length, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from specflow.trees import depths

from .architecture import Architecture
from .attention import block_attention
from .features import FeatureTaps
from .kv_cache import BlockPlan, SlotCache
from .packing import weight_bytes

DEFAULT_PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward over a block yields."""

    logits: torch.Tensor
    """[B, T, V], in the model's dtype. Row b is meaningful up to its block's width."""
    features: torch.Tensor | None
    """[B, T, F] hidden states of the tapped layers, where a drafter asked for them."""
    slot_forwards: Sequence[int] | None = None
    """Model calls each slot took part in; None where all slots shared one."""


class Target(Protocol):
    """**Protocol:** the target model with one state per slot."""

    @property
    def architecture(self) -> Architecture:
        """What the model is made of."""
        ...

    @property
    def num_forwards(self) -> int:
        """Model calls so far, prefill included."""
        ...

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Add a slot per prompt after the existing ones and run all prompt tokens but the last.

        Returns:
            Per prompt the features [n - 1, F] of the executed tokens, or None without taps.
        """
        ...

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """Run ``blocks[i]`` (anchor, then drafts) on slot i, for all slots at once."""
        ...

    def keep(self, slot: int, count: int) -> None:
        """Commit the first ``count`` positions of the slot's last block."""
        ...

    def close(self, slot: int) -> None:
        """Remove a slot; the last slot takes its number."""
        ...

    def state_bytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        ...


@runtime_checkable
class TreeTarget(Target, Protocol):
    """**Protocol:** a target that can run blocks that branch."""

    @property
    def runs_trees(self) -> bool:
        """Whether this model does."""
        ...

    def forward_trees(self, blocks: Sequence[Sequence[int]], parents: Sequence[Sequence[int] | None]) -> TargetOutput:
        """As :meth:`Target.forward`, where item k + 1 of block i follows item ``parents[i][k] + 1``.

        Args:
            blocks: anchor, then drafts, per slot.
            parents: per slot, those of the drafts (:attr:`specflow.types.Draft.parents`); None for a chain.
        """
        ...

    def arrange(self, slot: int, offsets: Sequence[int]) -> None:
        """Put some items of the slot's last block first, each following the one before, for :meth:`Target.keep`.

        Args:
            slot: which slot.
            offsets: the items, the anchor (0) first.
        """
        ...


class SlotTarget:
    """A target whose rows live in a :class:`~specflow_llm.kv_cache.SlotCache`.

    Args:
        model: the model, in evaluation mode.
        architecture: as read by :func:`specflow_llm.architecture.inspect_model`.
        feature_layers: decoder layers whose outputs are returned with the logits.
        tap_final: return the hidden states after the final norm behind them.
        prefill_chunk: prompt tokens per forward.
        runs_trees: whether blocks may branch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        *,
        feature_layers: Sequence[int] = (),
        tap_final: bool = False,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        runs_trees: bool = True,
    ) -> None:
        self.architecture = architecture
        self.runs_trees = runs_trees
        self.num_forwards = 0
        self._model = model
        self._device = model.device
        self._taps = FeatureTaps(model, feature_layers, final=tap_final)
        self._chunk = prefill_chunk
        self._cache = SlotCache(len(architecture.layer_types), max_capacity=architecture.context_length)
        self._num_slots = 0
        self._weight_bytes = weight_bytes(model)

    @property
    def cache(self) -> SlotCache:
        """The slot cache, for inspection."""
        return self._cache

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """See :class:`Target`."""
        first = self._num_slots
        self._cache.reserve_rows(first + len(prompts))
        features: list[torch.Tensor | None] = []
        for offset, prompt in enumerate(prompts):
            row = first + offset
            self._cache.clear_row(row)
            features.append(self._prefill(row, prompt[:-1]))
            self._num_slots += 1
        return features

    def _prefill(self, row: int, tokens: Sequence[int]) -> torch.Tensor | None:
        pieces: list[torch.Tensor] = []
        for begin in range(0, len(tokens), self._chunk):
            chunk = tokens[begin : begin + self._chunk]
            output = self._run(row, [chunk], last_logits_only=True)
            self._cache.advance(row, len(chunk))
            if output.features is not None:
                pieces.append(output.features[0])
        return self._taps.join(pieces)

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """See :class:`Target`."""
        return self._run(0, blocks, last_logits_only=False)

    def forward_trees(self, blocks: Sequence[Sequence[int]], parents: Sequence[Sequence[int] | None]) -> TargetOutput:
        """See :class:`TreeTarget`."""
        return self._run(0, blocks, parents, last_logits_only=False)

    def forward_rows(self, first: int, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """Like :meth:`forward`, for slots ``first .. first + B - 1`` only."""
        return self._run(first, blocks, last_logits_only=False)

    @torch.inference_mode()
    def _run(
        self,
        first_row: int,
        blocks: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int] | None] = (),
        *,
        last_logits_only: bool,
    ) -> TargetOutput:
        arch, device = self.architecture, self._device
        plan = self._cache.begin(first_row, [len(block) for block in blocks], device)
        width = plan.width
        # Copied without waiting for the device: a round's only wait is for its verdicts.
        ids = torch.tensor([[*block, *([0] * (width - len(block)))] for block in blocks]).to(device, non_blocking=True)
        shapes = parents or [None] * len(blocks)
        places = [_places(count, shape) for count, shape in zip(plan.widths, shapes, strict=True)]
        # Padding queries sit at the row's last real position: always inside the model's position range, never read.
        positions = torch.tensor(
            [
                [start + place for place in [*row, *([row[-1]] * (width - len(row)))]]
                for start, row in zip(plan.starts, places, strict=True)
            ]
        ).to(device, non_blocking=True)
        branching = None
        if any(shape is not None for shape in shapes):
            branching = _Branching.of(plan, shapes, places).to(device)
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._masks(positions, plan.used, branching),
            arch.cache_argument: self._cache,
            "use_cache": True,
        }
        if last_logits_only and arch.can_limit_logits:
            arguments["logits_to_keep"] = 1
        with block_attention(self._model, arch), self._taps.recording() as tapped:
            logits = self._model(**arguments).logits
        self.num_forwards += 1
        return TargetOutput(logits, tapped.features())

    def _masks(
        self, positions: torch.Tensor, used: int, branching: _Branching | None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, T, L] masks, one per layer type where the model distinguishes them.

        Args:
            positions: [B, T] of the queries.
            used: L.
            branching: which items of the block see which, for blocks that branch.
        """
        arch = self.architecture
        kinds = dict.fromkeys(kind for kind in arch.layer_types if kind != "dummy")
        keys = torch.arange(used, device=positions.device)
        if branching is None:
            causal = keys <= positions.unsqueeze(-1)
        else:
            causal, keys = branching.spread(keys)
        masks = {kind: self._finished(self._mask(kind, causal, keys, positions)) for kind in kinds}
        return masks if arch.masks_by_type else next(iter(masks.values()))

    def _mask(self, kind: str, causal: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        arch = self.architecture
        if kind == "sliding_attention" and arch.sliding_window is not None:
            return causal & (keys > positions.unsqueeze(-1) - arch.sliding_window)
        if kind == "chunked_attention" and arch.chunk_size is not None:
            return causal & (keys // arch.chunk_size == positions.unsqueeze(-1) // arch.chunk_size)
        return causal

    def _finished(self, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.unsqueeze(1)
        if not self.architecture.additive_masks:
            return mask
        dtype = self._model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)

    def keep(self, slot: int, count: int) -> None:
        """See :class:`Target`."""
        self._cache.advance(slot, count)

    def arrange(self, slot: int, offsets: Sequence[int]) -> None:
        """See :class:`TreeTarget`."""
        self._cache.arrange(slot, offsets, self._device)

    def close(self, slot: int) -> None:
        """See :class:`Target`."""
        self._num_slots -= 1
        self._cache.move_row(self._num_slots, slot)

    def truncate(self, slot: int, length: int) -> None:
        """Drop a slot's committed positions from ``length`` on."""
        self._cache.truncate(slot, length)

    def length(self, slot: int) -> int:
        """Committed positions of a slot."""
        return self._cache.lengths[slot]

    def state_bytes(self) -> dict[str, int]:
        """See :class:`Target`."""
        return {"target_weights": self._weight_bytes, "target_kv": self._cache.allocated_bytes}


def _places(count: int, parents: Sequence[int] | None) -> list[int]:
    """How far behind the committed positions each of a block's items stands."""
    if parents is None:
        return list(range(count))
    return [0, *[depth + 1 for depth in depths(parents[: count - 1])]]


@dataclass(frozen=True, slots=True)
class _Branching:
    """Who sees whom in a block that branches: what is committed, itself, and what it continues."""

    starts: torch.Tensor
    """[B] committed positions."""
    places: torch.Tensor
    """[B, T] how far behind them each item stands."""
    seen: torch.Tensor
    """[B, T, T] boolean: item t sees item s. Padding sees what the last item sees, and nothing sees padding."""

    @classmethod
    def of(cls, plan: BlockPlan, shapes: Sequence[Sequence[int] | None], places: Sequence[Sequence[int]]) -> _Branching:
        """Of every row's parents (None: a chain) and its items' places."""
        rows, width = len(shapes), plan.width
        seen = torch.zeros(rows, width, width, dtype=torch.bool)
        for row, (shape, standing) in enumerate(zip(shapes, places, strict=True)):
            count = len(standing)
            for item in range(count):
                parent = item - 1 if shape is None or item == 0 else shape[item - 1] + 1
                if parent >= 0:
                    seen[row, item] = seen[row, parent]
                seen[row, item, item] = True
            seen[row, count:] = seen[row, count - 1]
        padded = [[*standing, *([0] * (width - len(standing)))] for standing in places]
        return cls(torch.tensor(plan.starts), torch.tensor(padded), seen)

    def to(self, device: torch.device) -> _Branching:
        """On a device."""
        moved = [tensor.to(device, non_blocking=True) for tensor in (self.starts, self.places, self.seen)]
        return _Branching(*moved)

    def spread(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[L] keys -> ([B, T, L] what every query sees, [B, 1, L] the keys' positions)."""
        rows, width = self.places.shape
        offsets = keys - self.starts[:, None]
        inside = (offsets >= 0) & (offsets < width)
        index = offsets.clamp(0, width - 1)
        within = self.seen.gather(2, index[:, None, :].expand(rows, width, -1))
        sees = (offsets < 0)[:, None, :] | (within & inside[:, None, :])
        positions = torch.where(inside, self.starts[:, None] + self.places.gather(1, index), keys)
        return sees, positions[:, None, :]
