"""A decoding target of static shapes, whose forwards are captured once and replayed as CUDA graphs.

On a GPU an eager forward of a few tokens mostly spends its time launching kernels; a captured graph launches all
at once, but its shapes and addresses are fixed. So the cache has a fixed number of rows and positions, attention always
sees all of them through a mask, and what changes from round to round is a tensor of fixed size on the device.

Letters in shapes: B rows in a block, T block width, H key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from specflow_llm.architecture import Architecture
from specflow_llm.target import TargetOutput


class StaticLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [rows, H, capacity + 1, D], written at positions that live on the device.

    Attention always sees the whole capacity; the mask hides what is not there. Nothing depends on numbers of the host.
    """

    is_sliding = False

    def __init__(self, owner: StaticTarget) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeroed storage."""
        rows, length = self._owner.rows, self._owner.capacity + 1
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a block, [B, H, T, D] each; return all of the rows' storage, [B, H, capacity + 1, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots = self._owner.row_index, self._owner.slots
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        first, last = self._owner.row_range
        return self.keys[first:last], self.values[first:last]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(capacity + 1, offset 0)."""
        del query_length
        return self._owner.capacity + 1, 0

    def get_seq_length(self) -> int:
        """Not known on the host, and not needed: positions and masks are given."""
        return 0

    def get_max_length(self) -> int:
        """The capacity."""
        return self._owner.capacity

    get_max_cache_shape = get_max_length


class StaticTarget:
    """A target of fixed rows and capacity whose forwards are CUDA graphs.

    Implements :class:`specflow_llm.target.Target`. There is one graph per prepared block width; a narrower block is run
    in the next wider one. Rows without a request run along on scratch storage.

    Args:
        model: a model with full attention in all layers.
        architecture: as read by ``inspect_model``.
        rows: requests at a time.
        capacity: positions per row, at least.
    """

    def __init__(self, model: PreTrainedModel, architecture: Architecture, *, rows: int, capacity: int) -> None:
        self.architecture = architecture
        self.num_forwards = 0
        self.rows = rows
        # With the scratch position, a multiple of eight: masks of other lengths are copied by the attention kernels.
        self.capacity = (capacity + 8) // 8 * 8 - 1
        self.uses_graphs = model.device.type == "cuda"
        self._model = model
        self._device = model.device
        self._lengths: list[int] = []
        self._all_rows = torch.arange(rows, device=self._device).unsqueeze(1)
        self._keys = torch.arange(self.capacity + 1, device=self._device)
        self._cache = Cache(layers=[StaticLayer(self) for _ in architecture.layer_types])
        self._graphs: dict[int, _Graph] = {}
        self.row_index = self._all_rows
        self.row_range = (0, rows)
        self.slots = torch.zeros(1, 1, dtype=torch.long, device=self._device)

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Run all prompt tokens but the last, one row at a time, without a graph."""
        for prompt in prompts:
            row, length = len(self._lengths), len(prompt) - 1
            self._lengths.append(length)
            if length:
                table = torch.tensor(
                    [[list(prompt[:-1])], [list(range(length))], [list(range(length))]], device=self._device
                )
                self._run(table, row, row + 1)
                self.num_forwards += 1
        return [None] * len(prompts)

    @property
    def widths(self) -> list[int]:
        """Prepared block widths."""
        return sorted(self._graphs)

    def prepare(self, widths: Sequence[int]) -> None:
        """Capture graphs for these block widths, where there are none yet."""
        for width in widths:
            if width not in self._graphs:
                self._graphs[width] = self._capture(width)

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """Run a block on every slot: one copy to the device and one replay."""
        needed = max(map(len, blocks))
        if all(width < needed for width in self._graphs):
            self.prepare([needed])
        graph = self._graphs[min(width for width in self._graphs if width >= needed)]
        # The last round's copy from the staging buffer is over: its results have been read since.
        graph.staging.copy_(self._table(blocks, graph.width))
        graph.inputs.copy_(graph.staging, non_blocking=True)
        graph.replay()
        self.num_forwards += 1
        return TargetOutput(graph.logits[: len(blocks)], None)

    def replay(self, width: int) -> None:
        """Run a prepared forward once more on its last inputs, to time it."""
        self._graphs[width].replay()

    def _table(self, blocks: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """[3, rows, width]: ids, positions, storage slots. Padding repeats the last position and writes to scratch."""
        ids, positions, slots = [], [], []
        for row in range(self.rows):
            block = list(blocks[row]) if row < len(blocks) else []
            start, pad = (self._lengths[row] if block else 0), width - len(block)
            places = list(range(start, start + len(block)))
            ids.append(block + [0] * pad)
            positions.append(places + [places[-1] if places else 0] * pad)
            slots.append(places + [self.capacity] * pad)
        return torch.tensor([ids, positions, slots])

    def _capture(self, width: int) -> _Graph:
        inputs = torch.zeros(3, self.rows, width, dtype=torch.long, device=self._device)
        inputs[2].fill_(self.capacity)
        return _Graph(width, inputs, lambda: self._run(inputs, 0, self.rows), is_captured=self.uses_graphs)

    @torch.inference_mode()
    def _run(self, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
        ids, positions, self.slots = table[0], table[1], table[2]
        self.row_index, self.row_range = self._all_rows[first:last], (first, last)
        mask = (self._keys <= positions.unsqueeze(-1)).unsqueeze(1)
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask,
            self.architecture.cache_argument: self._cache,
        }
        logits: torch.Tensor = self._model(**arguments, use_cache=True).logits
        return logits

    def keep(self, slot: int, count: int) -> None:
        """Commit the first ``count`` positions of the slot's last block."""
        self._lengths[slot] += count

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Remove a slot; the last one takes its number."""
        last = len(self._lengths) - 1
        if slot != last:
            length = self._lengths[last]
            for layer in self._cache.layers:
                layer.keys[slot, :, :length] = layer.keys[last, :, :length]
                layer.values[slot, :, :length] = layer.values[last, :, :length]
            self._lengths[slot] = length
        self._lengths.pop()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of keys and values."""
        layers = [layer for layer in self._cache.layers if layer.is_initialized]
        return {"target_kv": sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in layers)}


class _Graph:
    """A forward that is captured once and replayed; on a CPU it is simply run."""

    def __init__(
        self, width: int, inputs: torch.Tensor, forward: Callable[[], torch.Tensor], *, is_captured: bool
    ) -> None:
        self.width = width
        self.inputs = inputs
        self.staging = torch.zeros_like(inputs, device="cpu", pin_memory=is_captured)
        self.logits = torch.empty(0)
        self._forward = forward
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_captured:
            self._record()

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries set themselves up on first calls, which a capture does not allow
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._forward()
        self._graph = graph

    def replay(self) -> None:
        """Run on the present inputs; the logits land in ``logits``."""
        if self._graph is None:
            self.logits = self._forward()
        else:
            self._graph.replay()
