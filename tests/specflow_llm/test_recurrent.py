"""Targets, recurrent ones that roll back by snapshot and slot targets alike, against forwards without any cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from specflow_llm.architecture import inspect_model
from specflow_llm.errors import SlotError
from specflow_llm.recurrent import RecurrentTarget, clone_cache
from specflow_llm.selfcheck import build_target
from specflow_llm.target import SlotTarget, Target, TargetOutput
from tests.specflow_llm.models import RECURRENT_CONFIGS, VOCAB, tiny_model

MAX_ROWS, MAX_LENGTH, MAX_DRAFTS = 3, 48, 4
TOLERANCE = 1e-3
"""Largest difference of a logit or a feature; a wrong state moves them by about one."""
FEATURE_LAYER = 0
tokens_of = st.integers(0, VOCAB - 1)


@torch.inference_mode()
def plain_run(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, V] logits and [n, D] outputs of the tapped layer, without a cache."""
    ids = torch.tensor([list(tokens)])
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    # Most models list the embeddings first; Mamba2 does not.
    first = 0 if model.config.model_type == "mamba2" else 1
    return output.logits[0], output.hidden_states[FEATURE_LAYER + first][0]


def close_to(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to float32 rounding."""
    return found.shape == expected.shape and bool(((found - expected).abs() < TOLERANCE).all())


class TargetMachine(RuleBasedStateMachine):
    """Opens, runs, keeps and closes slots through the Target protocol, beside lists of committed tokens."""

    model_name: ClassVar[str] = "llama"
    make: ClassVar[Callable[[PreTrainedModel], Target]]

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model(self.model_name)
        self.target = type(self).make(self.model)
        self.rows: list[list[int]] = []

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(prompts=st.lists(st.lists(tokens_of, min_size=1, max_size=12), min_size=1, max_size=2))
    def open(self, prompts: list[list[int]]) -> None:
        """New requests; all tokens but the last are run."""
        features = self.target.open(prompts)
        for prompt, found in zip(prompts, features, strict=True):
            self.rows.append(prompt)
            assert found is not None
            expected = plain_run(self.model, prompt)[1][:-1]
            assert close_to(found, expected) if len(expected) else found.shape == expected.shape

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def run_round(self, data: st.DataObject) -> None:
        """Every slot runs its last token and some drafts, and keeps some of them."""
        drafts = [data.draw(st.lists(tokens_of, max_size=MAX_DRAFTS), label="drafts") for _ in self.rows]
        output = self.target.forward([[row[-1], *draft] for row, draft in zip(self.rows, drafts, strict=True)])
        assert output.features is not None
        for slot, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            size = 1 + len(draft)
            logits, features = plain_run(self.model, row + draft)
            assert close_to(output.logits[slot, :size], logits[-size:])
            assert close_to(output.features[slot, :size], features[-size:])
        for slot, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            kept = data.draw(st.integers(1, 1 + len(draft)), label="kept")
            self.target.keep(slot, kept)
            row += [*draft[: kept - 1], data.draw(tokens_of, label="next token")]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """A slot goes; the last one takes its number."""
        slot = data.draw(st.integers(0, len(self.rows) - 1), label="slot")
        self.target.close(slot)
        last = self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last

    @precondition(lambda self: any(len(row) > MAX_LENGTH for row in self.rows))
    @rule()
    def close_long_rows(self) -> None:
        """Keep the plain forwards cheap."""
        for slot in reversed(range(len(self.rows))):
            if len(self.rows[slot]) > MAX_LENGTH:
                self.target.close(slot)
                last = self.rows.pop()
                if slot < len(self.rows):
                    self.rows[slot] = last


def recurrent(model: PreTrainedModel) -> Target:
    """The default."""
    return RecurrentTarget(model, inspect_model(model), feature_layers=(FEATURE_LAYER,), prefill_chunk=5)


def one_by_one(model: PreTrainedModel) -> Target:
    """The fallback for models that continue a state by one token only."""
    return RecurrentTarget(model, inspect_model(model), feature_layers=(FEATURE_LAYER,), one_by_one=True)


def slots(model: PreTrainedModel) -> Target:
    """The target of attention-only models."""
    return SlotTarget(model, inspect_model(model), feature_layers=(FEATURE_LAYER,), prefill_chunk=5)


SEARCH = settings(
    max_examples=8, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def machine(name: str, make: Callable[[PreTrainedModel], Target]) -> type[TargetMachine]:
    """The machine for one model and target."""
    return type("Machine", (TargetMachine,), {"model_name": name, "make": staticmethod(make)})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("mamba2", recurrent),
        ("mamba2", one_by_one),
        ("qwen3-next", recurrent),
        ("qwen3-next", one_by_one),
        ("llama", slots),
        ("gemma3-alternating", slots),
        ("gpt2", slots),
    ],
)
def test_any_sequence_of_rounds_equals_plain_forwards(name: str, make: Callable[[PreTrainedModel], Target]) -> None:
    """Whatever is opened, drafted, kept and closed, logits and features equal those of forwards without a cache."""
    run_state_machine_as_test(machine(name, make), settings=SEARCH)


# --- Known-wrong targets ----------------------------------------------------------------------------------------------


class NoSnapshot(RecurrentTarget):
    """Known-wrong: blocks run on the committed state itself."""

    def _forward_slot(self, slot, block) -> TargetOutput:  # type: ignore[no-untyped-def] # noqa: ANN001
        """Run in place."""
        output = super()._forward_slot(slot, block)
        slot.snapshot = slot.trial
        return output


class LosesTheBacklog(RecurrentTarget):
    """Known-wrong: a partly kept block leaves no trace."""

    def keep(self, slot: int, count: int) -> None:
        """Forget what was kept of a partly kept block."""
        partly = count < len(self._slots[slot].block)
        super().keep(slot, count)
        if partly:
            self._slots[slot].backlog = []


class SharedStates(RecurrentTarget):
    """Known-wrong: the copy that a block runs on shares its recurrent states with the snapshot."""

    def _forward_slot(self, slot, block) -> TargetOutput:  # type: ignore[no-untyped-def] # noqa: ANN001
        """Run on a shallow copy."""
        slot.block = list(block)
        slot.trial = copy.copy(slot.snapshot)
        slot.trial.layers = [copy.copy(layer) for layer in slot.snapshot.layers]
        output = self._run(slot.trial, slot.backlog + slot.block, last_logits_only=False)
        features = None if output.features is None else output.features[:, -len(block) :]
        return TargetOutput(output.logits[:, -len(block) :], features)


class ClosesTheLast(SlotTarget):
    """Known-wrong: whichever slot is closed, the last one goes."""

    def close(self, slot: int) -> None:
        """Ignore the number."""
        super().close(self._num_slots - 1)


@pytest.mark.parametrize("wrong", [NoSnapshot, LosesTheBacklog, SharedStates, ClosesTheLast])
def test_a_wrong_target_is_caught(wrong: type[RecurrentTarget | SlotTarget]) -> None:
    """The machine finds each of four plausible mistakes."""
    name = "mamba2" if issubclass(wrong, RecurrentTarget) else "llama"
    search = settings(SEARCH, max_examples=100, derandomize=True, phases=[Phase.generate])
    wrong_machine = machine(
        name, lambda model: wrong(model, inspect_model(model), feature_layers=(FEATURE_LAYER,), prefill_chunk=5)
    )
    with pytest.raises((AssertionError, SlotError)):
        run_state_machine_as_test(wrong_machine, settings=search)


# --- Snapshots --------------------------------------------------------------------------------------------------------


def filled_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache after a few tokens."""
    cache = DynamicCache(config=model.config)
    extend(model, cache, [1, 2, 3, 4, 5])
    return cache


@torch.inference_mode()
def extend(model: PreTrainedModel, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits after each of some more tokens."""
    argument = inspect_model(model).cache_argument
    logits: torch.Tensor = model(**{"input_ids": torch.tensor([tokens]), argument: cache, "use_cache": True}).logits[0]
    return logits


def content(cache: DynamicCache) -> list[dict[str, object]]:
    """A deep copy of everything the layers hold."""
    return [copy.deepcopy(vars(layer)) for layer in cache.layers]


def same_content(left: list[dict[str, object]], right: list[dict[str, object]]) -> bool:
    """Whether two copies are equal, tensors by value."""

    def same(one: object, two: object) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            return torch.equal(one, two)
        if isinstance(one, dict) and isinstance(two, dict):
            return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
        return one == two

    return len(left) == len(right) and all(same(one, two) for one, two in zip(left, right, strict=True))


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_running_on_a_clone_leaves_the_original_alone(name: str) -> None:
    """After blocks on a clone, every tensor, flag and counter of the original is what it was, and vice versa."""
    model = tiny_model(name)
    original = filled_cache(model)
    clone = clone_cache(original)
    before = content(original)
    assert same_content(content(clone), before)
    first = extend(model, clone, [9, 8, 7])
    extend(model, clone, [6])
    assert same_content(content(original), before)
    second = clone_cache(original)
    held = content(second)
    assert close_to(extend(model, original, [9, 8, 7]), first)
    assert same_content(content(second), held)


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_a_shallow_copy_would_not_do(name: str) -> None:
    """The comparison above notices a copy that shares its recurrent states."""
    model = tiny_model(name)
    original = filled_cache(model)
    shallow = copy.copy(original)
    shallow.layers = [copy.copy(layer) for layer in original.layers]
    before = content(original)
    extend(model, shallow, [9, 8, 7])
    assert not same_content(content(original), before)


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_a_long_backlog_is_replayed_once(name: str) -> None:
    """Up to 8 tokens ride along with the next block; more are replayed in one forward, and then never again."""
    model = tiny_model(name)
    target = RecurrentTarget(model, inspect_model(model))
    target.open([[1, 2, 3]])
    committed, forwards = [1, 2, 3], []
    for turn in range(7):
        before = target.num_forwards
        draft = [(turn + step) % VOCAB for step in range(4)]
        logits = target.forward([[committed[-1], *draft]]).logits[0]
        assert close_to(logits, plain_run(model, committed + draft)[0][-5:])
        target.keep(0, 3)
        committed += [*draft[:2], 60 - turn]
        forwards.append(target.num_forwards - before)
    assert forwards == [1, 1, 1, 2, 1, 1, 2]  # the backlog grows by 3 tokens: 9 of them are replayed


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_a_block_is_one_forward(name: str) -> None:
    """The self-check finds that a whole block can be run at once, so that speculation can pay."""
    model = tiny_model(name)
    target = build_target(model, inspect_model(model), prefill_chunk=64)
    assert isinstance(target, RecurrentTarget)
    target.open([[1, 2, 3]])
    before = target.num_forwards
    target.forward([[3, 4, 5, 6, 7]])
    assert target.num_forwards == before + 1


@pytest.mark.parametrize("failing_call", [0, 1])
@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_a_forward_that_raises_changes_nothing(name: str, failing_call: int) -> None:
    """Whether the replay or the block itself fails halfway, the same block can be run again and is right."""
    model = copy.deepcopy(tiny_model(name))
    target = RecurrentTarget(model, inspect_model(model))
    target.open([[1, 2, 3]])
    committed = [1, 2, 3]
    for turn in range(3):
        target.forward([[committed[-1], 4, 5, 6]])
        target.keep(0, 3)
        committed += [4, 5, 20 + turn]
    calls: list[int] = []

    def fail(module: torch.nn.Module, args: object, output: object) -> None:
        calls.append(0)
        if len(calls) == failing_call + 1:
            raise InterruptedError

    # The last module that runs: by then every layer has changed its state.
    handle = model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(InterruptedError):
        target.forward([[committed[-1], 7, 8]])
    handle.remove()
    logits = target.forward([[committed[-1], 7, 8]]).logits[0]
    assert close_to(logits, plain_run(model, [*committed, 7, 8])[0][-3:])


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_keeping_what_was_not_run_is_refused(name: str) -> None:
    """More positions than the block has, fewer than none, and the same block twice are misuse."""
    model = tiny_model(name)
    target = RecurrentTarget(model, inspect_model(model))
    target.open([[1, 2, 3]])
    target.forward([[3, 4]])
    for wrong in (3, -1):
        with pytest.raises(SlotError, match="cannot commit"):
            target.keep(0, wrong)
    target.keep(0, 2)
    with pytest.raises(SlotError, match="cannot commit"):
        target.keep(0, 1)


def test_bytes_grow_with_the_slots() -> None:
    """A recurrent state has a fixed size, reported once per slot."""
    model = tiny_model("mamba2")
    target = RecurrentTarget(model, inspect_model(model))
    sizes = []
    for _ in range(3):
        target.open([[1, 2, 3]])
        sizes.append(sum(count for kind, count in target.state_bytes().items() if kind != "target_weights"))
    assert sizes[0] > 0
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
