"""The slot cache against a model that keeps a list of tokens per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specflow_llm.errors import SlotError
from specflow_llm.kv_cache import BlockPlan, SlotCache, SlotLayer

CPU = torch.device("cpu")
LAYERS, HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 2, 4
POISON = -1.0
"""What padding queries write. Tokens are positive, and fresh storage holds zeros."""
MAX_ROWS, MAX_CAPACITY, MAX_WIDTH = 5, 23, 5


def states(tokens: torch.Tensor, layer: int, size: int) -> torch.Tensor:
    """[B, T] tokens -> [B, H, T, size] keys or values that tell token, layer, head and component apart."""
    offsets = (torch.arange(HEADS * size).reshape(1, HEADS, 1, size) + 100 * layer) / 1000
    spread: torch.Tensor = tokens[:, None, :, None] + offsets
    return spread


def write(cache: SlotCache, first: int, blocks: list[list[float]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run one block through every layer; returns what attention would see."""
    plan = cache.begin(first, [len(block) for block in blocks], CPU)
    padded = torch.tensor([[*block, *[POISON] * (plan.width - len(block))] for block in blocks])
    return [
        layer.update(states(padded, index, KEY_SIZE), states(padded, index, VALUE_SIZE))
        for index, layer in enumerate(cache.layers)
    ]


def holds(seen: torch.Tensor, row: int, tokens: list[float], layer: int) -> bool:
    """Whether a row's first positions are exactly these tokens."""
    expected = states(torch.tensor([tokens]), layer, seen.shape[3])[0]
    return torch.equal(seen[row, :, : len(tokens)], expected)


class CacheMachine(RuleBasedStateMachine):
    """Opens, writes, commits, cuts and closes rows, and does the same with lists."""

    cache_class: ClassVar[type[SlotCache]] = SlotCache

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []
        self.block: dict[int, list[float]] = {}
        """Row -> what the last block wrote there and may still be committed."""
        self.starts: dict[int, int] = {}
        self.next_token = 0.0

    @initialize(capacity=st.integers(1, 5), rows=st.integers(1, 2))
    def create(self, capacity: int, rows: int) -> None:
        """A cache of some first size."""
        self.cache = self.cache_class(LAYERS, rows=rows, capacity=capacity, max_capacity=MAX_CAPACITY)

    def fresh(self, count: int) -> list[float]:
        """Tokens never seen before."""
        self.next_token += count
        return [self.next_token - count + 1 + index for index in range(count)]

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule()
    def open_row(self) -> None:
        """A new request takes the row after the last one."""
        row = len(self.rows)
        self.cache.reserve_rows(row + 1)
        self.cache.truncate(row, 0)
        self.rows.append([])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def write_block(self, data: st.DataObject) -> None:
        """A forward over neighbouring rows, each with its own number of tokens."""
        first = data.draw(st.integers(0, len(self.rows) - 1), label="first row")
        last = data.draw(st.integers(first, len(self.rows) - 1), label="last row")
        widths = [data.draw(st.integers(1, MAX_WIDTH), label="width") for _ in range(first, last + 1)]
        blocks = [self.fresh(width) for width in widths]
        longest = max(len(self.rows[first + index]) + width for index, width in enumerate(widths))
        if longest > MAX_CAPACITY:
            with pytest.raises(SlotError, match="context holds"):
                write(self.cache, first, blocks)
            return
        seen = write(self.cache, first, blocks)
        event("scattered" if self.cache.plan.slots is not None else "one range")
        for layer, pair in enumerate(seen):
            for states_seen in pair:
                assert states_seen.shape[2] == longest
                assert not (states_seen.floor() == POISON).any(), "padding is visible"
                for index, block in enumerate(blocks):
                    assert holds(states_seen, index, self.rows[first + index] + block, layer)
        self.block = {first + index: block for index, block in enumerate(blocks)}
        self.starts = {row: len(self.rows[row]) for row in self.block}

    @precondition(lambda self: self.block)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Some of a block is accepted."""
        row = data.draw(st.sampled_from(sorted(self.block)), label="row")
        width = len(self.block[row])
        count = data.draw(st.one_of(st.just(width), st.integers(0, width)), label="count")
        if len(self.rows[row]) != self.starts[row]:
            with pytest.raises(SlotError, match="cannot commit"):
                self.cache.advance(row, count)
            return
        self.cache.advance(row, count)
        self.rows[row] += self.block[row][:count]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def advance_too_far(self, data: st.DataObject) -> None:
        """More than was written, less than nothing, or a row the block did not cover."""
        row = data.draw(st.integers(0, len(self.rows) - 1), label="row")
        written = len(self.block.get(row, ()))
        excess = data.draw(st.sampled_from([written + 1, written + 7, -1]), label="count")
        with pytest.raises(SlotError, match="cannot commit"):
            self.cache.advance(row, excess)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Committed tokens are taken back."""
        row = data.draw(st.integers(0, len(self.rows) - 1), label="row")
        length = data.draw(st.integers(0, len(self.rows[row])), label="length")
        self.cache.truncate(row, length)
        del self.rows[row][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def lengthen(self, data: st.DataObject) -> None:
        """A row cannot be cut to more than it holds, or to less than nothing."""
        row = data.draw(st.integers(0, len(self.rows) - 1), label="row")
        wrong = data.draw(st.sampled_from([len(self.rows[row]) + 1, -1]), label="length")
        with pytest.raises(SlotError, match="cannot be cut"):
            self.cache.truncate(row, wrong)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close_row(self, data: st.DataObject) -> None:
        """A request leaves; the last row takes its place, and nothing of the last block can be committed any longer."""
        row = data.draw(st.integers(0, len(self.rows) - 1), label="row")
        last = self.rows.pop()
        self.cache.move_row(len(self.rows), row)
        if row < len(self.rows):
            self.rows[row] = last
        self.block = {}

    @rule(beyond=st.integers(0, 3), action=st.sampled_from(["begin", "advance", "truncate", "move", "negative"]))
    def unknown_row(self, beyond: int, action: str) -> None:
        """A row that was never allocated is refused by every operation."""
        row = -1 - beyond if action == "negative" else self.cache.num_rows + beyond
        actions: dict[str, Callable[[], object]] = {
            "begin": lambda: self.cache.begin(row, [1], CPU),
            "move": lambda: self.cache.move_row(0, row),
            "truncate": lambda: self.cache.truncate(row, 0),
        }
        with pytest.raises(SlotError, match="does not exist"):
            actions.get(action, lambda: self.cache.advance(row, 0))()

    @invariant()
    def the_model_agrees(self) -> None:
        """Lengths and every committed position equal the model's."""
        if not self.rows:
            return
        assert self.cache.lengths[: len(self.rows)] == [len(tokens) for tokens in self.rows]
        assert not any(self.cache.lengths[len(self.rows) :])
        assert self.cache.capacity <= MAX_CAPACITY
        for layer, stored in enumerate(self.cache.layers):
            if stored.is_initialized:
                for row, tokens in enumerate(self.rows):
                    assert holds(stored.keys, row, tokens, layer)
                    assert holds(stored.values, row, tokens, layer)


CacheMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def test_any_sequence_of_operations_agrees_with_lists() -> None:
    """Whatever is opened, written, committed, cut and closed, and when: the cache holds what lists would hold."""
    run_state_machine_as_test(CacheMachine, settings=CacheMachine.TestCase.settings)


# --- Known-wrong caches -----------------------------------------------------------------------------------------------


class PaddingInPlace(SlotCache):
    """Known-wrong: padding is written at the row's own next positions."""

    def begin(self, first_row: int, widths: Any, device: torch.device) -> BlockPlan:
        """Ranges of full width for every row."""
        plan = super().begin(first_row, widths, device)
        if plan.slots is not None:
            slots = torch.tensor([[*range(start, start + plan.width)] for start in plan.starts]).clamp(
                max=self.capacity
            )
            self._space.plan = BlockPlan(plan.first_row, plan.starts, plan.widths, plan.width, plan.used, slots)
        return self.plan


class ScratchInside(SlotCache):
    """Known-wrong: the scratch position is the last one that a row may use."""

    def begin(self, first_row: int, widths: Any, device: torch.device) -> BlockPlan:
        """Scratch is off by one."""
        plan = super().begin(first_row, widths, device)
        if plan.slots is not None:
            slots = plan.slots.masked_fill(plan.slots == self.capacity, self.capacity - 1)
            self._space.plan = BlockPlan(plan.first_row, plan.starts, plan.widths, plan.width, plan.used, slots)
        return self.plan


class ForgetsLengths(SlotCache):
    """Known-wrong: a moved row keeps the length of the row it replaced."""

    def move_row(self, source: int, target: int) -> None:
        """Move the states only."""
        replaced = self.lengths[target]
        super().move_row(source, target)
        self.lengths[target] = replaced if source != target else 0


class ForgetsStates(SlotCache):
    """Known-wrong: a moved row keeps the states of the row it replaced."""

    def move_row(self, source: int, target: int) -> None:
        """Move the length only."""
        length = self.lengths[source]
        self.lengths[source] = 0
        super().move_row(source, target)
        self.lengths[target] = length if source != target else 0


class KeepsTheBlock(SlotCache):
    """Known-wrong: rejected tokens are committed as well."""

    def advance(self, row: int, count: int) -> None:
        """Commit all of it."""
        super().advance(row, count)
        self.lengths[row] += self.plan.widths[row - self.plan.first_row] - count


class TrustsThePlan(SlotCache):
    """Known-wrong: a block can still be committed after rows were moved."""

    def move_row(self, source: int, target: int) -> None:
        """Keep the plan."""
        plan = self.plan
        super().move_row(source, target)
        self._space.plan = plan


class ShrinkingLayer(SlotLayer):
    """Known-wrong: growing loses the last position."""

    def resize(self, rows: int, capacity: int) -> None:
        """Cut before growing."""
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :-1], self.values[:, :, :-1]
        super().resize(rows, capacity)


class LosesAPosition(SlotCache):
    """Known-wrong through its layers."""

    def __init__(self, num_layers: int, **sizes: Any) -> None:
        super().__init__(num_layers, **sizes)
        self.layers = [ShrinkingLayer(self._space) for _ in range(num_layers)]


@pytest.mark.parametrize(
    "wrong",
    [PaddingInPlace, ScratchInside, ForgetsLengths, ForgetsStates, KeepsTheBlock, TrustsThePlan, LosesAPosition],
)
def test_a_wrong_cache_is_caught(wrong: type[SlotCache]) -> None:
    """The machine finds each of seven plausible mistakes."""
    machine = type("WrongMachine", (CacheMachine,), {"cache_class": wrong})
    search = settings(CacheMachine.TestCase.settings, max_examples=1000, derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, SlotError, IndexError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=search)


# --- Cost -------------------------------------------------------------------------------------------------------------


def test_accepting_and_rejecting_copy_nothing() -> None:
    """Committing, cutting and overwriting a block leave the storage where it is, and allocate none."""
    cache = SlotCache(LAYERS, rows=2, capacity=32)
    write(cache, 0, [[1.0, 2.0, 3.0], [4.0]])
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    held = cache.allocated_bytes
    cache.advance(0, 1)
    cache.advance(1, 1)
    write(cache, 0, [[5.0], [6.0, 7.0]])
    cache.advance(0, 0)
    cache.advance(1, 2)
    cache.truncate(1, 1)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == places
    assert cache.allocated_bytes == held


def test_attention_sees_views() -> None:
    """What a layer returns shares the layer's storage."""
    cache = SlotCache(LAYERS, rows=2, capacity=32)
    seen = write(cache, 0, [[1.0, 2.0], [3.0]])
    for (keys, values), layer in zip(seen, cache.layers, strict=True):
        assert keys.data_ptr() == layer.keys.data_ptr()
        assert values.data_ptr() == layer.values.data_ptr()


def test_growth_is_amortised() -> None:
    """A thousand tokens, one at a time, move the storage no more than ten times from a capacity of one."""
    cache = SlotCache(1, rows=1, capacity=1)
    capacities = set()
    for token in range(1000):
        write(cache, 0, [[float(token)]])
        cache.advance(0, 1)
        capacities.add(cache.capacity)
    assert len(capacities) <= 11
    assert max(capacities) < 2048


def test_growth_ends_at_the_context() -> None:
    """Doubling stops at the most a row may hold, and that much can be used."""
    cache = SlotCache(1, rows=1, capacity=8, max_capacity=13)
    write(cache, 0, [[float(token) for token in range(13)]])
    cache.advance(0, 13)
    assert cache.capacity == 13
    with pytest.raises(SlotError, match="needs 14 positions, but the model's context holds 13"):
        cache.begin(0, [1], CPU)
    assert cache.lengths == [13]


def test_equal_rows_are_written_as_one_range() -> None:
    """Rows of equal length and width take the path without scattered writes, and see the same states on either path."""
    plain, scattered = SlotCache(1, rows=3, capacity=8), SlotCache(1, rows=3, capacity=8)
    blocks = [[1.0, 2.0], [3.0, 4.0]]
    assert plain.begin(0, [2, 2], CPU).slots is None
    one_range = write(plain, 0, blocks)[0]
    several = write(scattered, 0, [*blocks, [5.0]])[0]
    assert scattered.plan.slots is not None
    assert all(torch.equal(left, right[:2]) for left, right in zip(one_range, several, strict=True))


def test_bytes_are_those_of_the_tensors() -> None:
    """Reported bytes are rows x (capacity + 1 scratch position) x what one position takes."""
    cache = SlotCache(LAYERS, rows=2, capacity=7)
    assert cache.allocated_bytes == 0
    write(cache, 0, [[1.0], [2.0]])
    position = LAYERS * HEADS * (KEY_SIZE + VALUE_SIZE) * 4
    assert cache.bytes_per_position == position
    assert cache.allocated_bytes == 2 * 8 * position


def test_the_cache_answers_what_models_ask() -> None:
    """Sizes that model code reads describe the planned block: used length, offset 0, no maximum, nothing sliding."""
    cache = SlotCache(LAYERS, rows=2, capacity=16)
    assert cache.get_seq_length() == 0
    write(cache, 0, [[1.0, 2.0, 3.0], [4.0]])
    cache.advance(0, 3)
    cache.advance(1, 1)
    cache.begin(0, [2, 4], CPU)
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(4, 0) == (5, 0)
    assert not any(cache.is_sliding)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1
