"""The slot cache: rows x capacity with a length per row, usable by unmodified Hugging Face models.

Every request owns one row. A forward writes the keys and values of a block at the row's own positions, right after
its committed length; attention sees the used prefix through an explicit mask. Rolling back rejected tokens is *not
raising the length*: nothing is copied, on acceptance or rejection, and the next block overwrites what was rejected.
Storage grows by doubling, so growth is amortised O(1) a token.

Letters in shapes: B rows in a block, T block width, L used length, C capacity, H key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .errors import SlotError


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Where one forward reads and writes."""

    first_row: int
    """The block covers rows ``first_row .. first_row + B - 1``."""
    starts: tuple[int, ...]
    """Position of each row's first query; equal to its committed length."""
    widths: tuple[int, ...]
    """Number of real queries per row; the rest of the block is padding."""
    width: int
    """T: the widest row."""
    used: int
    """L: keys and values 0..L-1 are returned to attention."""
    slots: torch.Tensor | None
    """[B, T] position each query writes to, padding to the scratch slot; None when all rows write one common range."""


_NO_BLOCK = BlockPlan(0, (), (), 0, 0, None)


class _Space:
    """What a cache and its layers share: its size, and the block being run.

    Layers know this and not their cache: a cycle of references would keep keys and values alive until the garbage
    collector comes round.
    """

    __slots__ = ("_row_index", "capacity", "num_rows", "plan")

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.plan = _NO_BLOCK
        self._row_index: torch.Tensor | None = None

    def row_index(self, count: int, device: torch.device) -> torch.Tensor:
        """[count, 1] row numbers for scattered writes, kept between layers."""
        cached = self._row_index
        if cached is None or cached.shape[0] != count or cached.device != device:
            cached = torch.arange(count, device=device).unsqueeze(1)
            self._row_index = cached
        return cached


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [rows, H, capacity + 1, D]; the last position is scratch for padding queries."""

    is_sliding = False

    def __init__(self, space: _Space) -> None:
        super().__init__()
        self._space = space

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage for the cache's current size; zeros, because masked garbage must at least be finite."""
        rows, capacity = self._space.num_rows, self._space.capacity
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity + 1, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity + 1, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a block, [B, H, T, D] each, at the planned positions; return the used prefix, [B, H, L, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._space.plan
        rows = slice(plan.first_row, plan.first_row + len(plan.starts))
        keys, values = self.keys[rows], self.values[rows]
        if plan.slots is None:
            span = slice(plan.starts[0], plan.starts[0] + plan.width)
            keys[:, :, span] = key_states
            values[:, :, span] = value_states
        else:
            batch = self._space.row_index(len(plan.starts), key_states.device)
            keys[batch, :, plan.slots] = key_states.transpose(1, 2)
            values[batch, :, plan.slots] = value_states.transpose(1, 2)
        return keys[:, :, : plan.used], values[:, :, : plan.used]

    def resize(self, rows: int, capacity: int) -> None:
        """Move to larger storage, keeping every committed position."""
        if not self.is_initialized:
            return
        self.keys = self._grown(self.keys, rows, capacity)
        self.values = self._grown(self.values, rows, capacity)

    @staticmethod
    def _grown(old: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        new = old.new_zeros(rows, old.shape[1], capacity + 1, old.shape[3])
        kept_rows, kept = min(rows, old.shape[0]), min(capacity, old.shape[2] - 1)
        new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
        return new

    @torch.inference_mode()
    def gather(self, row: int, start: int, offsets: torch.Tensor) -> None:
        """Put the positions ``start + offsets`` of a row next to each other, from ``start`` on."""
        if self.is_initialized:
            end = start + len(offsets)
            self.keys[row, :, start:end] = self.keys[row].index_select(1, start + offsets)
            self.values[row, :, start:end] = self.values[row].index_select(1, start + offsets)

    @torch.inference_mode()  # storage that grew during a forward may only be written in this mode
    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy ``length`` committed positions of one row over another."""
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zero a row: what an earlier request left there may not be finite, and 0 x NaN is NaN."""
        if self.is_initialized:
            self.keys[row].zero_()
            self.values[row].zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the plan decides
        """(L, offset 0) of the planned block."""
        return self._space.plan.used, 0

    def get_seq_length(self) -> int:
        """Longest committed length among the planned rows."""
        return max(self._space.plan.starts, default=0)

    def get_max_length(self) -> int:
        """No maximum: storage grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum: storage grows (the name older transformers use)."""
        return -1

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        if not self.is_initialized:
            return 0
        return self.keys.numel() * self.keys.element_size() + self.values.numel() * self.values.element_size()


class SlotCache(Cache):  # type: ignore[misc]
    """A Hugging Face cache whose rows advance and roll back independently.

    Args:
        num_layers: decoder layers of the model.
        rows: rows to allocate first.
        capacity: positions per row to allocate first.
        max_capacity: positions a row may ever hold (the model's context), or None.

    Rows are kept compact by the caller: a block always covers a contiguous range of rows, so that attention gets
    views, never copies.
    """

    def __init__(self, num_layers: int, *, rows: int = 1, capacity: int = 256, max_capacity: int | None = None) -> None:
        self._space = _Space(rows, capacity if max_capacity is None else min(capacity, max_capacity))
        self.max_capacity = max_capacity
        self.lengths = [0] * rows
        """Committed positions per row."""
        super().__init__(layers=[SlotLayer(self._space) for _ in range(num_layers)])

    @property
    def num_rows(self) -> int:
        """Allocated rows."""
        return self._space.num_rows

    @property
    def capacity(self) -> int:
        """Allocated positions per row."""
        return self._space.capacity

    @property
    def plan(self) -> BlockPlan:
        """The last block."""
        return self._space.plan

    def reserve_rows(self, rows: int) -> None:
        """Make sure ``rows`` rows exist."""
        if rows > self.num_rows:
            self._resize(max(rows, 2 * self.num_rows), self.capacity)

    def _require_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise SlotError(row, f"does not exist; {self.num_rows} rows are allocated")

    def _reserve_capacity(self, needed: int, row: int) -> None:
        if needed <= self.capacity:
            return
        if self.max_capacity is not None and needed > self.max_capacity:
            raise SlotError(row, f"needs {needed} positions, but the model's context holds {self.max_capacity}")
        grown = max(needed, 2 * self.capacity)
        self._resize(self.num_rows, grown if self.max_capacity is None else min(grown, self.max_capacity))

    def _resize(self, rows: int, capacity: int) -> None:
        for layer in self.layers:
            layer.resize(rows, capacity)
        self.lengths += [0] * (rows - self.num_rows)
        self._space.num_rows, self._space.capacity = rows, capacity

    def begin(self, first_row: int, widths: Sequence[int], device: torch.device) -> BlockPlan:
        """Plan a block that appends ``widths[i]`` uncommitted positions to row ``first_row + i``.

        Raises:
            SlotError: a row does not exist or would outgrow the model's context.
        """
        last = first_row + len(widths)
        if first_row < 0 or last > self.num_rows:
            raise SlotError(last - 1, f"does not exist; {self.num_rows} rows are allocated")
        starts = tuple(self.lengths[first_row:last])
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        longest = max(ends)
        self._reserve_capacity(longest, first_row + ends.index(longest))
        width = max(widths)
        uniform = min(widths) == width and min(starts) == max(starts)
        slots = None
        if not uniform:
            scratch = self.capacity
            table = [
                [*range(start, start + count), *([scratch] * (width - count))]
                for start, count in zip(starts, widths, strict=True)
            ]
            slots = torch.tensor(table).to(device, non_blocking=True)
        self._space.plan = BlockPlan(first_row, starts, tuple(widths), width, longest, slots)
        return self.plan

    def advance(self, row: int, count: int) -> None:
        """Commit the first ``count`` positions of the row's last block; the rest is rolled back by omission.

        Raises:
            SlotError: the last block did not write that many positions to this row, or rows were moved since.
        """
        self._require_written(row, count)
        self.lengths[row] += count

    def arrange(self, row: int, offsets: Sequence[int], device: torch.device) -> None:
        """Put some positions of the row's last block first, in this order, so that :meth:`advance` can commit them.

        Committed positions stay as they are; what else the block wrote may be lost.

        Args:
            row: which row.
            offsets: places in the block, rising.
            device: where the storage is.

        Raises:
            SlotError: the last block did not write them to this row, or rows were moved since.
        """
        self._require_written(row, offsets[-1] + 1 if offsets else 0)
        kept = 0  # the leading positions stand where they belong
        while kept < len(offsets) and offsets[kept] == kept:
            kept += 1
        if kept < len(offsets):
            places = torch.tensor([offset - kept for offset in offsets[kept:]]).to(device, non_blocking=True)
            for layer in self.layers:
                layer.gather(row, self.lengths[row] + kept, places)

    def _require_written(self, row: int, count: int) -> None:
        self._require_row(row)
        index = row - self.plan.first_row
        planned = 0 <= index < len(self.plan.widths)
        written = self.plan.widths[index] if planned else 0
        if not planned or not 0 <= count <= written or self.lengths[row] != self.plan.starts[index]:
            raise SlotError(
                row, f"cannot commit {count} positions; the last block wrote {written} that are not committed yet"
            )

    def truncate(self, row: int, length: int) -> None:
        """Lower a row's committed length.

        Raises:
            SlotError: the row is shorter than that, or does not exist.
        """
        self._require_row(row)
        if not 0 <= length <= self.lengths[row]:
            raise SlotError(row, f"cannot be cut to {length} positions; it holds {self.lengths[row]}")
        self.lengths[row] = length

    @torch.inference_mode()  # storage that was allocated during a forward may only be written in this mode
    def clear_row(self, row: int) -> None:
        """Empty a row for a new request; nothing of an earlier one stays.

        Raises:
            SlotError: the row does not exist.
        """
        self._require_row(row)
        for layer in self.layers:
            layer.clear_row(row)
        self.lengths[row] = 0

    @torch.inference_mode()
    def move_row(self, source: int, target: int) -> None:
        """Replace row ``target`` by row ``source``, which becomes empty. Used when a request leaves a hole.

        Raises:
            SlotError: one of the rows does not exist.
        """
        self._require_row(source)
        self._require_row(target)
        if source != target:
            self.clear_row(target)
            for layer in self.layers:
                layer.move_row(source, target, self.lengths[source])
            self.lengths[target] = self.lengths[source]
        self.lengths[source] = 0
        self._space.plan = _NO_BLOCK  # what the last block wrote no longer stands where the plan says

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def bytes_per_position(self) -> int:
        """Bytes one position of one row takes, over all layers (0 before the first forward)."""
        return self.allocated_bytes // (self.num_rows * (self.capacity + 1))
