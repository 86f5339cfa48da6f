"""Hidden states that drafters see: those of committed tokens, and of no others."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow_llm import DrafterError, DraftRequest, Proposal
from specflow_llm.architecture import inspect_model
from specflow_llm.features import FeatureRows, FeatureTaps
from specflow_llm.target import SlotTarget
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.drafters import NearDrafter
from tests.specflow_llm.models import VOCAB, generate, tiny_model

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
BUDGETS = [26, 15, 20]


class FeatureRecorder(NearDrafter):
    """Right about two times out of three, and keeps a copy of every request's tokens and features."""

    def __init__(self, truths: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
        super().__init__(truths, VOCAB, hit_rate=0.7)
        self.feature_layers = layers
        self.seen: list[tuple[list[int], torch.Tensor | None]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Look, then draft."""
        for request in requests:
            features = None if request.features is None else request.features.clone()
            self.seen.append((list(request.token_ids), features))
        return super().propose(requests)


@torch.inference_mode()
def states_from_scratch(model: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """[n, F] outputs of the layers side by side, from one plain forward."""
    states = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    first = 0 if model.config.model_type == "mamba2" else 1  # most models list the embeddings first
    return torch.cat([states[layer + first][0] for layer in layers], dim=-1)


def recorded(name: str, layers: Sequence[int], prefill_chunk: int = 5) -> FeatureRecorder:
    """What a drafter saw during a ragged run with rejections."""
    model = tiny_model(name)
    outputs = [generate(model, prompt, budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)]
    truths = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    drafter = FeatureRecorder(truths, layers)
    run = decode(model, PROMPTS, BUDGETS, drafter=drafter, policy=Fixed(4), prefill_chunk=prefill_chunk)
    assert run.outputs == outputs
    assert 0 < run.accepted < run.admitted
    return drafter


# The last layer is left out: transformers lists its output after the final norm only.
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", (0,)),
        ("gemma3-alternating", (0, 1)),
        ("gemma3-alternating", (1,)),
        ("gpt2", (0,)),
        ("mamba2", (0,)),
        ("qwen3-next", (0,)),
    ],
)
def test_drafters_see_the_states_of_committed_tokens_only(name: str, layers: Sequence[int]) -> None:
    """At every call a request has one row per token but the last, equal to those of a forward from scratch."""
    drafter = recorded(name, layers)
    assert len(drafter.seen) > 15
    for tokens, features in drafter.seen:
        assert features is not None
        assert features.shape[0] == len(tokens) - 1
        if len(tokens) > 1:
            expected = states_from_scratch(tiny_model(name), tokens[:-1], layers)
            assert features.shape == expected.shape
            assert (features - expected).abs().max() < 1e-3


def test_rows_of_rejected_tokens_would_be_noticed() -> None:
    """The states of another token at the same place differ by more than the tolerance above."""
    model = tiny_model("llama")
    right, wrong = (states_from_scratch(model, [1, 2, last], (0,)) for last in (3, 4))
    assert (right - wrong).abs().max() > 0.1


def test_layers_come_in_order() -> None:
    """Whatever order layers are asked for in, features stand side by side in layer order, each once."""
    forwards, backwards = recorded("gemma3-alternating", (0, 1)), recorded("gemma3-alternating", (1, 0))
    for (_, one), (_, other) in zip(forwards.seen, backwards.seen, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_drafters_that_want_nothing_get_nothing() -> None:
    """Without feature layers there are no features, and none are kept."""
    drafter = recorded("llama", ())
    assert all(features is None for _, features in drafter.seen)


def test_the_last_layer_is_tapped_before_the_final_norm() -> None:
    """A tap on the last layer gives the layer's own output; its norm is what transformers lists last."""
    model = tiny_model("llama")
    target = SlotTarget(model, inspect_model(model), feature_layers=(1,))
    features = target.open([[1, 2, 3, 4]])[0]
    assert features is not None
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, output_hidden_states=True)
        assert (model.model.norm(features) - expected.hidden_states[-1][0]).abs().max() < 1e-4


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_layers_that_do_not_exist_are_refused(layer: int) -> None:
    """The refusal names the layer and those there are."""
    with pytest.raises(DrafterError, match=rf"layer {layer} was asked for, but the target has layers 0\.\.1"):
        FeatureTaps(tiny_model("llama"), (0, layer))


def test_hooks_are_gone_after_a_forward_even_if_it_raises() -> None:
    """The model keeps no hook of ours, whether a block went well or not."""
    model = copy.deepcopy(tiny_model("llama"))
    taps = FeatureTaps(model, (0, 1))

    def hooks() -> list[list[int]]:
        return [list(layer._forward_hooks) for layer in model.model.layers]

    before = hooks()  # transformers may have put its own there
    with taps.recording() as tapped:
        assert [len(now) for now in hooks()] == [len(then) + 1 for then in before]
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    assert tapped.features() is not None
    assert hooks() == before
    with pytest.raises(InterruptedError), taps.recording():
        raise InterruptedError
    assert hooks() == before


def test_taps_find_the_stack_of_every_family() -> None:
    """Layers are found whatever the family calls them, also where experts form lists of the same length."""
    for name in ("gpt2", "gpt-neox", "opt", "falcon-rotary", "mixtral-moe", "mamba2", "qwen3-next"):
        model = tiny_model(name)
        target = FeatureTaps(model, (0,))
        with torch.inference_mode(), target.recording() as tapped:
            model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        features = tapped.features()
        assert features is not None
        assert (features[0] - states_from_scratch(model, [1, 2, 3], (0,))).abs().max() < 1e-4


def test_rows_grow_by_doubling() -> None:
    """Appended rows read back in order; the storage moves a logarithmic number of times."""
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(size, 6, generator=generator) for size in (3, 1, 0, 4, 1, 1, 2, 7, 1, 1, 1)]
    rows = FeatureRows(pieces[0])
    places = set()
    for count, piece in enumerate(pieces[1:], start=2):
        rows.append(piece)
        view = rows.view()
        assert view is not None
        assert torch.equal(view, torch.cat(pieces[:count]))
        assert rows.num_bytes == view.shape[0] * 6 * 4
        places.add(view.data_ptr())
    assert len(places) <= 4


def test_rows_may_begin_with_nothing() -> None:
    """A prompt of one token has no rows yet; a drafter without taps never has any."""
    rows = FeatureRows(torch.empty(0, 6))
    rows.append(torch.ones(2, 6))
    view = rows.view()
    assert view is not None
    assert torch.equal(view, torch.ones(2, 6))
    assert FeatureRows(None).view() is None
    assert FeatureRows(None).num_bytes == 0
