"""What a drafter borrows from targets of many families, and the drafters designed for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import PreTrainedModel

from specflow.errors import InvalidSettingError
from specflow.policies import Fixed
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.dspark import DSparkModel, TargetAdapter
from specflow_llm.errors import DrafterError
from specflow_llm.features import FeatureTaps
from specflow_llm.packing import PackedLinear, pack_linears
from specflow_llm.training.design import (
    coverage,
    design,
    frequent_ids,
    mask_token,
    new_drafter,
    start_from_target,
    target_layers_to_copy,
)
from tests.specflow_llm.block_drafters import random_ids, sample, spread
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.models import VOCAB, tiny_config, tiny_model
from tests.specflow_llm.tokenizers import CharTokenizer, byte_level_bpe

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral-sliding", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3-alternating", {}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "gpt2": ("gpt2", {}),
    "phi-bias": ("phi", {}),
    "mixtral": ("mixtral-moe", {}),
}
TIED = [False, True]


def family(name: str, *, tied: bool = False, **overrides: Any) -> PreTrainedModel:
    """A tiny model of a family, with three layers where the family allows."""
    base, fields = FAMILIES[name]
    layers = {"n_layer": 3} if base == "gpt2" else {"num_hidden_layers": 3}
    return tiny_model(base, **{**layers, **fields, "tie_word_embeddings": tied, **overrides})


def ids_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


# --- Logits and embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_models_own(name: str, tied: bool) -> None:  # noqa: FBT001 - a parameter
    """The head, its scale and its soft cap, applied to last hidden states, give the model's logits."""
    model = family(name, tied=tied)
    adapter = TargetAdapter(model)
    ids = ids_of(2, 11)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = adapter.last_hidden(ids)
        torch.testing.assert_close(adapter.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    some = torch.tensor([3, 1, 60])
    for chosen in (None, some):
        head = adapter.head(chosen)
        wanted = expected if chosen is None else expected[..., chosen]
        torch.testing.assert_close(head(hidden.clone()), wanted.clone(), rtol=1e-4, atol=1e-4)  # with gradients
        head.pack()
        with torch.no_grad():
            torch.testing.assert_close(head(hidden.clone()), wanted.clone(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
def test_a_packed_target_lends_the_same_weights(tied: bool) -> None:  # noqa: FBT001 - a parameter
    """The blocked layout of a packed head is read back, whole and in part."""
    plain = family("llama", tied=tied, hidden_size=64)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed) > 0
    assert isinstance(packed.get_output_embeddings(), PackedLinear)
    mine, theirs = TargetAdapter(packed), TargetAdapter(plain)
    some = torch.tensor([7, 0, 33])
    for chosen in (None, some):
        assert torch.equal(mine.head_rows(chosen)[0], theirs.head_rows(chosen)[0])
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for chosen in (None, some):
        first, second = mine.head(chosen)(hidden), theirs.head(chosen)(hidden)
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(first.square().sum(), hidden)
        assert bool(grad.any())


def test_a_bias_of_the_head_is_lent_too() -> None:
    """Phi's head has one; leaving it out would be noticed by the check on construction."""
    adapter = TargetAdapter(family("phi-bias"))
    weight, bias = adapter.head_rows()
    assert bias is not None
    assert weight.shape == (VOCAB, 32)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_scaled_as_the_target_scales_them(name: str) -> None:
    """What enters the target's first layer is what a block's anchor is embedded as."""
    if name == "gpt2":
        pytest.skip("it adds learned positions to its embeddings")
    model = family(name)
    adapter = TargetAdapter(model)
    seen: list[torch.Tensor] = []
    layer: Any = model.get_decoder().layers[0]
    handle = layer.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    ids = ids_of(1, 5)
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
        handle.remove()
        torch.testing.assert_close(adapter.embed(ids), seen[0], rtol=1e-5, atol=1e-5)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_whose_logits_are_not_its_heads_is_refused() -> None:
    """A multiplier that this adapter does not know of is found by comparison, and the error says what to use."""
    model = copy.deepcopy(family("llama"))
    original = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(DrafterError, match="not its output head's"):
        TargetAdapter(model)


def test_a_model_without_a_head_is_refused() -> None:
    """A bare decoder has no logits to draft for."""
    with pytest.raises(DrafterError, match="no output head"):
        TargetAdapter(transformers.LlamaModel(tiny_config("llama")).eval())


def test_a_teacher_before_the_final_norm_is_refused() -> None:
    """Hidden states taken before the norm give other logits; training on them would look fine and draft badly."""

    class PreNorm(TargetAdapter):
        """The known fault of TorchSpec#169 and verl-SpeCo#76."""

        def last_hidden(self, token_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            """The last layer's raw output."""
            taps = FeatureTaps(self.model, [self.num_layers - 1])
            with taps.recording() as tapped:
                super().last_hidden(token_ids, attention_mask)
            found = tapped.features()
            assert found is not None
            return found

    with pytest.raises(DrafterError, match="last hidden states"):
        PreNorm(family("llama"))


# --- Drafters designed for a target -----------------------------------------------------------------------------------

PROMPTS = [[5], random_ids(9, 1), random_ids(4, 2)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_designed_drafter_leaves_greedy_output_as_it_is(name: str) -> None:
    """In each family a fresh drafter of the default design serves the engine, and the tokens are plain decoding's."""
    model = family(name)
    adapter = TargetAdapter(model)
    made = design(adapter, draft_vocab_size=40)
    assert made.qk_norm == (name in {"qwen3", "gemma3"})
    drafts = new_drafter(made, [sample(random_ids(30))], adapter, 0)
    spread(drafts)
    plain = decode(model, PROMPTS, [12, 6, 9])
    drafted = decode(model, PROMPTS, [12, 6, 9], drafter=DSparkDrafter(drafts, adapter), policy=Fixed(5))
    assert drafted.outputs == plain.outputs
    assert drafted.admitted > 0


def test_design_takes_the_targets_sizes() -> None:
    """Width, heads, MLP, norms and rotary parameters are the target's; a change wins; an unknown field is named."""
    adapter = TargetAdapter(family("qwen3"))
    made = design(adapter)
    assert (made.hidden_size, made.num_heads, made.num_kv_heads, made.head_dim) == (32, 4, 2, 8)
    assert (made.intermediate_size, made.rope, made.vocab_size) == (48, adapter.config.rope_parameters, VOCAB)
    assert made.draft_vocab_size is None  # all ids
    assert made.target_layer_ids == (1,)
    assert design(adapter, num_layers=1, num_features=1).num_layers == 1
    assert design(adapter, target_layer_ids=(0,)).target_layer_ids == (0,)
    with pytest.raises(InvalidSettingError, match="colour"):
        design(adapter, colour="red")


def test_the_draft_vocabulary_holds_the_commonest_of_the_targets_own_tokens() -> None:
    """Counted over what the target wrote, not over prompts; ids rise, so that columns are in order."""
    samples = [sample([9, 9, 9, 9, 5, 5, 7], first_own=4), sample([3, 7, 7, 2], first_own=1)]
    ids = frequent_ids(samples, 3, 16)
    assert ids.tolist() == [2, 5, 7]
    assert coverage(samples, ids) == 1.0
    assert coverage(samples, torch.tensor([7])) == pytest.approx(0.5)
    assert coverage(samples, None) == 1.0
    assert frequent_ids(samples, 5, 16).tolist() == [0, 1, 2, 5, 7]  # filled with the lowest


def test_a_mask_is_an_id_that_no_text_has() -> None:
    """A reserved special token if there is one, else an id without a name, else the last."""
    assert mask_token(100, None) == 99
    assert mask_token(70, CharTokenizer()) == 69
    assert mask_token(64, CharTokenizer()) == 63
    tokenizer = copy.deepcopy(byte_level_bpe())
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<reserved>"]})
    assert mask_token(size + 8, tokenizer) == tokenizer.convert_tokens_to_ids("<reserved>")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_a_drafter_that_starts_from_target_layers_attends_as_they_do(name: str) -> None:
    """The keys and values of the context are the copied layer's own, if it follows the deepest layer that is read."""
    model = family(name)
    adapter = TargetAdapter(model)
    made = design(adapter, num_layers=1, target_layer_ids=(1,), qk_norm=name == "qwen3")
    assert target_layers_to_copy(made, adapter) == (2,)
    drafts = new_drafter(made, [sample(random_ids(30))], adapter, 0)
    start_from_target(drafts, adapter, (2,))
    ids = ids_of(1, 7)
    taps = FeatureTaps(model, [1])
    with torch.inference_mode(), taps.recording() as tapped:
        cache = model(input_ids=ids, use_cache=True).past_key_values
    features = tapped.features()
    assert features is not None
    with torch.no_grad():
        keys, values = drafts.context(drafts.fuse(features.clone()), torch.arange(7)[None])[0]
    torch.testing.assert_close(keys, cache.layers[2].keys, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values, cache.layers[2].values, rtol=1e-3, atol=1e-3)


def test_layers_of_other_shapes_are_not_copied() -> None:
    """Layers with norms after attention, or of another width, have no counterpart; nothing is copied then."""
    gemma2 = TargetAdapter(family("gemma2"))
    assert target_layers_to_copy(design(gemma2), gemma2) == ()
    llama = TargetAdapter(family("llama"))
    assert target_layers_to_copy(design(llama, intermediate_size=64), llama) == ()
    assert target_layers_to_copy(design(llama, num_layers=4), llama) == ()
    assert target_layers_to_copy(design(llama, num_layers=2), llama) == (1, 2)


def test_a_new_drafter_depends_on_its_seed_and_leaves_the_global_generator_alone() -> None:
    """Equal seeds give equal weights; drawing them does not move anybody else's numbers."""
    adapter = TargetAdapter(family("llama"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made: list[DSparkModel] = [new_drafter(design(adapter), [], adapter, seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    weights = [model.fc.weight for model in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert functional.cosine_similarity(weights[0].flatten(), weights[2].flatten(), dim=0).abs() < 0.5
