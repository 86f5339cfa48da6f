"""Other projects' drafter checkpoints: read to the letter, or refused with a reason; never read wrongly in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow_llm import LLM, DraftRequest, Proposal, SamplingParams, Speculation
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.dspark import DSparkConfig, DSparkModel, TargetAdapter
from specflow_llm.dspark.checkpoint import load_drafter, save_drafter
from specflow_llm.dspark.layouts import export_speculators, file_layout, load_for_target
from specflow_llm.errors import CheckpointError
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.foreign_drafters import (
    ANCHOR,
    DFLASH,
    DRAFTABLE,
    MASK,
    MASKS,
    SMALL_VOCABULARY,
    Recipe,
    deepspec,
    reference,
    speculators,
    write,
)
from tests.specflow_llm.models import VOCAB, generate, tiny_model

PROMPTS = [[1, 2, 3], [4, 9], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
BUDGETS = [7, 5, 6]
LAYOUTS = {"speculators": speculators, "deepspec": deepspec}


def a_target(name: str = "qwen3") -> PreTrainedModel:
    """Five layers, so that a layer id that is off by one is another layer."""
    return tiny_model(name, num_hidden_layers=5)


class Recording(DSparkDrafter):
    """Keeps what it was asked and what it proposed."""

    branches = False

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Draft, and remember."""
        proposals = super().propose(requests)
        self.seen: list[tuple[list[int], Proposal]] = getattr(self, "seen", [])
        self.seen += [(list(request.token_ids), made) for request, made in zip(requests, proposals, strict=True)]
        return proposals


def drafted(model: DSparkModel, target: PreTrainedModel, *, longest: int = 8) -> list[tuple[list[int], Proposal]]:
    """What a drafter proposed in a ragged greedy run of the real engine, whose output is checked."""
    drafter = Recording(model, TargetAdapter(target))
    run = decode(target, PROMPTS, BUDGETS, drafter=drafter, policy=Fixed(longest), prefill_chunk=4)
    assert run.outputs == [generate(target, prompt, budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)]
    assert len(drafter.seen) >= 10
    return drafter.seen


def same_drafts(
    seen: Sequence[tuple[list[int], Proposal]],
    recipe: Recipe,
    tensors: dict[str, torch.Tensor],
    target: PreTrainedModel,
    **mistakes: bool,
) -> float:
    """Fraction of proposals whose tokens, and survivals to 1e-4, are those of the reference."""
    right = 0
    longest = 0
    for tokens, proposal in seen:
        expected, survival = reference(recipe, tensors, target, tokens, **mistakes)
        count = len(proposal.token_ids)
        longest = max(longest, count)
        sure = list(proposal.survival or ())
        close = not recipe.confidence or sure == pytest.approx(survival[:count], rel=1e-4, abs=1e-6)
        right += list(proposal.token_ids) == expected[:count] and bool(close)
    assert longest == recipe.gamma
    assert len({token for _, proposal in seen for token in proposal.token_ids}) >= 6  # or equality would mean little
    return right / len(seen)


SPECULATORS = {
    "dspark": ANCHOR,
    "dspark-masks": MASKS,
    "dspark-gated-small-vocabulary": replace(SMALL_VOCABULARY, markov="gated"),
    "dspark-rnn": replace(SMALL_VOCABULARY, markov="rnn"),
    "dspark-gated-masks": replace(MASKS, markov="gated", confidence_with_markov=False, states=(2, 4)),
    "dspark-window": replace(ANCHOR, window=4, layers=1, confidence_with_markov=False),
    "dspark-no-copies": replace(ANCHOR, copies=False, confidence=False),
    "dspark-confidence-only": replace(ANCHOR, markov="none", confidence_with_markov=False),
    "dflash": DFLASH,
    "dflash-small-vocabulary": replace(DFLASH, draftable=tuple(DRAFTABLE), states=(1,)),
    "dflash-anchor": replace(DFLASH, anchor_predicts=True),
}
DEEPSPEC = {
    "dspark": ANCHOR,
    "gated": replace(ANCHOR, markov="gated", slots=3),
    "rnn": replace(ANCHOR, markov="rnn", states=(2, 3)),
    "no-confidence": replace(ANCHOR, confidence=False),
    "confidence-without-markov": replace(ANCHOR, confidence_with_markov=False),
    "dflash": replace(ANCHOR, markov="none", confidence=False),
}
ALL = [("speculators", name) for name in SPECULATORS] + [("deepspec", name) for name in DEEPSPEC]


def a_checkpoint(
    folder: Path, project: str, recipe: Recipe, target: PreTrainedModel, **how: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """On disk, with its tensors."""
    config, tensors = LAYOUTS[project](recipe, target)
    return write(folder / "drafter", config, tensors, **how), tensors


@pytest.mark.parametrize(("project", "name"), ALL)
def test_drafts_are_those_of_the_layout(tmp_path: Path, project: str, name: str) -> None:
    """Tokens and confidences in the engine equal a forward from scratch of the file's own weights and conventions."""
    recipe = (SPECULATORS if project == "speculators" else DEEPSPEC)[name]
    target = a_target()
    folder, tensors = a_checkpoint(tmp_path, project, recipe, target)
    assert file_layout(folder) == project
    model = load_for_target(folder, TargetAdapter(target))
    assert same_drafts(drafted(model, target), recipe, tensors, target) == 1.0


def test_a_drafter_for_another_family(tmp_path: Path) -> None:
    """The drafter's layers have normalised queries whatever the target's: here they serve a Llama."""
    target = a_target("llama")
    folder, tensors = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    model = load_for_target(folder, TargetAdapter(target))
    assert same_drafts(drafted(model, target), ANCHOR, tensors, target) == 1.0


@pytest.mark.parametrize(
    ("wrong", "mistakes"),
    [
        (replace(ANCHOR, states=(2, 4, 5)), {}),
        (replace(ANCHOR, states=(0, 2, 3)), {}),
        (replace(ANCHOR, theta=1e6), {}),
        (ANCHOR, {"shifted_previous": True}),
        (replace(ANCHOR, window=3), {}),
    ],
)
def test_the_comparison_can_fail(tmp_path: Path, wrong: Recipe, mistakes: dict[str, bool]) -> None:
    """Layer ids off by one, another rope, a previous token shifted, a window: each makes most proposals differ."""
    target = a_target()
    folder, tensors = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    seen = drafted(load_for_target(folder, TargetAdapter(target)), target)
    assert same_drafts(seen, wrong, tensors, target, **mistakes) < 0.5


@pytest.mark.parametrize("project", ["speculators", "deepspec"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_and_shards(tmp_path: Path, project: str, dtype: torch.dtype) -> None:
    """Weights in 16 bits, spread over files with an index, are read as they stand; copies may differ by rounding."""
    target = a_target()
    folder, tensors = a_checkpoint(tmp_path, project, ANCHOR, target, dtype=dtype, shards=3)
    rounded = {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
    model = load_for_target(folder, TargetAdapter(target))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert same_drafts(drafted(model, target), ANCHOR, rounded, target) == 1.0


def test_a_short_limit_still_runs_the_whole_block(tmp_path: Path) -> None:
    """Slots see each other both ways: a shorter block would draft other tokens, so it always runs whole."""
    target = a_target()
    folder, tensors = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    seen = drafted(load_for_target(folder, TargetAdapter(target)), target, longest=2)
    shorter = replace(ANCHOR, slots=2)
    differing = 0
    for tokens, proposal in seen:
        count = len(proposal.token_ids)
        assert count <= 2
        assert list(proposal.token_ids) == reference(ANCHOR, tensors, target, tokens)[0][:count]
        differing += list(proposal.token_ids) != reference(shorter, tensors, target, tokens)[0][:count]
    assert differing > len(seen) / 3


@pytest.mark.parametrize("project", ["speculators", "deepspec"])
def test_a_folder_is_a_drafter_setting(tmp_path: Path, project: str) -> None:
    """``Speculation(drafter=folder)`` knows the layout by its config, and the output is the target's."""
    target = a_target()
    folder, _ = a_checkpoint(tmp_path, project, ANCHOR, target)
    llm = LLM(target, speculation=Speculation(drafter=str(folder), max_draft_tokens=4))
    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=10, temperature=0.0))[0]
    assert list(out.token_ids) == generate(target, [1, 2, 3], 10)
    assert out.metrics.drafted > 0


def test_what_is_recognised(tmp_path: Path) -> None:
    """Three layouts by config; anything else is none, and says so when it is loaded."""
    target = a_target()
    adapter = TargetAdapter(target)
    folder, _ = a_checkpoint(tmp_path, "deepspec", ANCHOR, target)
    own = tmp_path / "own"
    save_drafter(load_for_target(folder, adapter), own, dtype=torch.float32)
    assert file_layout(own) == "specflow"
    assert file_layout(tmp_path / "absent") is None
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    assert file_layout(plain) is None
    with pytest.raises(CheckpointError, match="no known layout"):
        load_for_target(plain, adapter)
    (plain / "config.json").write_text('{"dflash_config": {"mask_token_id": 1}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="convert it with the speculators library"):
        load_for_target(plain, adapter)
    (plain / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no object"):
        load_for_target(plain, adapter)
    with pytest.raises(CheckpointError, match="load_for_target"):
        load_drafter(folder)


def test_converting_to_the_own_layout_keeps_every_draft(tmp_path: Path) -> None:
    """Once read, a drafter can be saved here and loaded without its origin."""
    target = a_target()
    adapter = TargetAdapter(target)
    folder, tensors = a_checkpoint(tmp_path, "speculators", SMALL_VOCABULARY, target)
    save_drafter(load_for_target(folder, adapter), tmp_path / "own", dtype=torch.float32)
    again = load_for_target(tmp_path / "own", adapter)
    assert same_drafts(drafted(again, target), SMALL_VOCABULARY, tensors, target) == 1.0
    with pytest.raises(CheckpointError, match="leave layout out"):
        load_for_target(tmp_path / "own", adapter, layout="mask_predicts")


# --- Writing ----------------------------------------------------------------------------------------------------------


def a_model(**fields: Any) -> DSparkModel:
    """A drafter of this library with random heads, for :func:`a_target`."""
    values: dict[str, Any] = {
        "target": "org/tiny",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_target_layers": 5,
        "target_layer_ids": (0, 2, 3),
        "mask_token_id": MASK,
        "block_size": 5,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "max_positions": 256,
        "markov_rank": 6,
    }
    config = DSparkConfig(**{**values, **fields})
    model = DSparkModel(config, None if config.draft_vocab_size is None else torch.tensor(DRAFTABLE))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.0 if "markov" in name else 0.2 if "mlp" in name else 0.4
            sharp = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
            parameter.copy_(scale * noise if parameter.dim() > 1 else sharp + 0.3 * noise)
    return model


EXPORTED: dict[str, tuple[dict[str, Any], Recipe]] = {
    "vanilla": ({}, ANCHOR),
    "gated-masks": (
        {"markov": "gated", "layout": "mask_predicts", "block_size": 4},
        replace(MASKS, markov="gated"),
    ),
    "rnn-small-vocabulary": (
        {"markov": "rnn", "draft_vocab_size": len(DRAFTABLE)},
        replace(SMALL_VOCABULARY, markov="rnn"),
    ),
    "dflash": (
        {
            "markov": "none",
            "markov_rank": 1,
            "confidence": False,
            "confidence_with_markov": False,
            "layout": "mask_predicts",
            "block_size": 4,
        },
        DFLASH,
    ),
    "confidence-only": (
        {"markov": "none", "markov_rank": 1, "confidence_with_markov": False},
        replace(ANCHOR, markov="none", confidence_with_markov=False),
    ),
    "window": ({"sliding_window": 4}, replace(ANCHOR, window=4)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_export_round_trip(tmp_path: Path, name: str) -> None:
    """Written and read back: the same config and bit-equal weights; and the file drafts by the layout's own rules."""
    fields, recipe = EXPORTED[name]
    target = a_target()
    adapter = TargetAdapter(target)
    model = a_model(**fields)
    export_speculators(model, tmp_path / "out", adapter, dtype=torch.float32)
    again = load_for_target(tmp_path / "out", adapter)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert replace(again.config, rope=rope) == replace(model.config, rope=rope)
    ours, theirs = model.state_dict(), again.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert same_drafts(drafted(again, target), recipe, written, target) == 1.0


@pytest.mark.parametrize("recipe", [SMALL_VOCABULARY, DFLASH], ids=["dspark", "dflash"])
def test_an_export_has_the_fields_and_tensors_of_a_hand_written_file(tmp_path: Path, recipe: Recipe) -> None:
    """Field for field and tensor for tensor what the layout's own files have, as the tests write them by hand."""
    target = a_target()
    adapter = TargetAdapter(target)
    folder, tensors = a_checkpoint(tmp_path, "speculators", recipe, target)
    export_speculators(load_for_target(folder, adapter), tmp_path / "out", adapter, dtype=torch.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    by_hand = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    layers = by_hand.pop("transformer_layer_config")
    assert {name: exported["transformer_layer_config"][name] for name in layers} == layers
    for name in ("target_hidden_size", "speculators_version"):
        by_hand.pop(name)
    assert {name: exported[name] for name in by_hand} == by_hand


def test_default_export_is_half_precision(tmp_path: Path) -> None:
    """In bfloat16 the file is small, and reading it back accepts the rounded copies."""
    target = a_target()
    adapter = TargetAdapter(target)
    export_speculators(a_model(), tmp_path / "out", adapter)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert load_for_target(tmp_path / "out", adapter).config.block_size == 5


@pytest.mark.parametrize(
    ("fields", "family", "reason"),
    [
        ({"qk_norm": False}, "qwen3", "queries and keys are not normalised"),
        ({"markov": "rnn", "layout": "mask_predicts"}, "qwen3", "recurrent Markov head"),
        ({}, "gemma", "scales its embeddings"),
        ({"hidden_size": 16, "head_dim": 4}, "qwen3", "hidden size is 16"),
    ],
)
def test_export_refuses_what_the_layout_cannot_express(
    tmp_path: Path, fields: dict[str, Any], family: str, reason: str
) -> None:
    """Nothing is written that another reader would take for something else."""
    with pytest.raises(CheckpointError, match=reason):
        export_speculators(a_model(**fields), tmp_path / "out", TargetAdapter(a_target(family)))
    assert not (tmp_path / "out").exists()


# --- Traps ------------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def setting(name: str, value: Any, *, layers: bool = False) -> Change:
    """A config with another value."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors
        (config["transformer_layer_config"] if layers else config)[name] = value

    return change


def without(name: str) -> Change:
    """A config or a state dict without an entry."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config.pop(name, None)
        tensors.pop(name, None)

    return change


def tensor(name: str, made: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    """A state dict with another tensor, or one more."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config
        tensors[name] = made(tensors)

    return change


def proposing(count: int, **fields: Any) -> Change:
    """A config that proposes so many tokens per block."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = count
        config.update(fields)

    return change


def edited(name: str, row: int) -> Change:
    """One row of a copy is another one."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config
        tensors[name][row] = tensors[name][row].roll(1)

    return change


def another_class(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Made for another architecture, with nothing to compare."""
    config["speculators_config"]["verifier"]["architectures"] = ["FalconForCausalLM"]
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]


def swapped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Another choice of ids that is rising and in range, on which offsets and mask agree."""
    del config
    ids = torch.tensor([*DRAFTABLE[:-1], 62])
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][ids] = True


def any_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Ones."""
    return lambda tensors: torch.ones(shape, dtype=dtype)


SPECULATORS_TRAPS: dict[str, tuple[Recipe, Change, str]] = {
    # Which slots predict.
    "silent about the anchor": (ANCHOR, without("sample_from_anchor"), "state it: layout='anchor_predicts' or"),
    "null about the anchor": (ANCHOR, setting("sample_from_anchor", None), "state it: layout="),
    "a hint is given": (
        MASKS,
        without("sample_from_anchor"),
        "4 tokens from 5 slots, which speaks for 'mask_predicts'",
    ),
    "flag against proposals": (ANCHOR, proposing(4), "as if only masks predicted"),
    "more than trained": (MASKS, proposing(5), "trained for 4"),
    "many more than trained": (ANCHOR, proposing(15), "trained for 5"),
    "recurrent head over masks": (
        replace(ANCHOR, markov="rnn"),
        proposing(4, sample_from_anchor=False),
        "starts at the",
    ),
    "no slot predicts": (MASKS, proposing(0, block_size=1), "block_size"),
    "no block size": (ANCHOR, without("block_size"), "no 'block_size'"),
    # Which layers are read.
    "embeddings as features": (ANCHOR, setting("aux_hidden_state_layer_ids", [0, 3, 4]), "target's embeddings"),
    "the last layer": (ANCHOR, setting("aux_hidden_state_layer_ids", [1, 3, 5]), "after the final norm.*before it"),
    "beyond the last layer": (
        ANCHOR,
        setting("aux_hidden_state_layer_ids", [1, 3, 6]),
        "rising order within.*5 layers",
    ),
    "layers out of order": (ANCHOR, setting("aux_hidden_state_layer_ids", [3, 1, 4]), "rising order"),
    "no layers": (ANCHOR, setting("aux_hidden_state_layer_ids", None), "no 'aux_hidden_state_layer_ids'"),
    "other number of layers": (ANCHOR, setting("aux_hidden_state_layer_ids", [1, 3]), "fc.weight has shape"),
    "a norm per layer": (ANCHOR, tensor("aux_hidden_norms.0.weight", any_tensor(32)), "a norm per target layer"),
    # Rotary positions.
    "another theta": (replace(ANCHOR, theta=5e5), setting("x", 0), "500000.0.* are not the target's.*own_rope=True"),
    "another scaling": (
        ANCHOR,
        setting("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, layers=True),
        "are not the target's",
    ),
    "theta by kind of layer": (
        ANCHOR,
        setting("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}, layers=True),
        "differ by kind of layer",
    ),
    "length-dependent rope": (
        ANCHOR,
        setting("rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, layers=True),
        "'dynamic' is not supported",
    ),
    "partial rope": (
        ANCHOR,
        setting(
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            layers=True,
        ),
        "only a part of each head",
    ),
    # The mask.
    "mask out of range": (ANCHOR, setting("mask_token_id", VOCAB), "no id of the target's vocabulary"),
    "negative mask": (ANCHOR, setting("mask_token_id", -1), "no id of the target's vocabulary"),
    "no mask": (ANCHOR, setting("mask_token_id", None), "no 'mask_token_id'"),
    # The draft vocabulary.
    "ids for offsets": (
        SMALL_VOCABULARY,
        tensor("d2t", lambda tensors: torch.tensor(DRAFTABLE)),
        "holds target ids; this layout stores offsets",
    ),
    "offsets out of range": (SMALL_VOCABULARY, tensor("d2t", lambda tensors: tensors["d2t"] + 9), "do not add up"),
    "offsets against mask": (SMALL_VOCABULARY, tensor("t2d", lambda tensors: tensors["t2d"].roll(1)), "t2d marks"),
    "never filled offsets": (
        SMALL_VOCABULARY,
        tensor("d2t", lambda tensors: torch.zeros_like(tensors["d2t"])),
        "t2d marks",
    ),
    "no offsets": (SMALL_VOCABULARY, without("d2t"), "drafts 24 of 64 ids"),
    "short offsets": (SMALL_VOCABULARY, tensor("d2t", lambda tensors: tensors["d2t"][:-1]), "not 24 whole numbers"),
    "short mask": (SMALL_VOCABULARY, tensor("t2d", lambda tensors: tensors["t2d"][:-1]), "the vocabulary has 64 ids"),
    "other ids than the head's": (SMALL_VOCABULARY, swapped, "its copy lm_head.weight differs.*token 62"),
    "no vocabulary size": (ANCHOR, without("draft_vocab_size"), "no 'draft_vocab_size'"),
    # Embedding and head.
    "another embedding": (ANCHOR, edited("embed_tokens.weight", 17), "its copy embed_tokens.weight.*token 17"),
    "a trained mask row": (ANCHOR, edited("embed_tokens.weight", MASK), "embed_tokens.weight.*token 61"),
    "another head": (ANCHOR, edited("lm_head.weight", 30), "its copy lm_head.weight.*token 30"),
    "an empty copy": (
        ANCHOR,
        tensor("lm_head.weight", lambda tensors: torch.full((VOCAB, 32), torch.nan)),
        "its copy lm_head.weight",
    ),
    "a short copy": (ANCHOR, tensor("lm_head.weight", any_tensor(60, 32)), r"shape \(60, 32\)"),
    "another architecture": (ANCHOR, another_class, "made for a FalconForCausalLM.*no copy"),
    "another vocabulary": (ANCHOR, setting("vocab_size", 80, layers=True), "80"),
    "another width": (ANCHOR, setting("hidden_size", 40, layers=True), "hidden size is 40"),
    # Parts that are not there.
    "four norms": (
        ANCHOR,
        tensor("layers.0.pre_feedforward_layernorm.weight", any_tensor(32)),
        "four norms",
    ),
    "experts": (ANCHOR, tensor("layers.0.mlp.experts.0.up_proj.weight", any_tensor(4, 4)), "a mixture of experts"),
    "biases": (ANCHOR, tensor("layers.0.self_attn.q_proj.bias", any_tensor(32)), "projections with biases"),
    "biases by config": (ANCHOR, setting("attention_bias", value=True, layers=True), "its attention has biases"),
    "fused projections": (ANCHOR, tensor("layers.0.self_attn.qkv_proj.weight", any_tensor(4, 4)), "fused query"),
    "quantised by name": (ANCHOR, tensor("fc.weight_scale", any_tensor(1)), "quantised weights"),
    "quantised by type": (ANCHOR, tensor("fc.weight", any_tensor(32, 96, dtype=torch.int8)), "stored as I8"),
    "eight-bit floats": (
        ANCHOR,
        tensor("fc.weight", lambda tensors: tensors["fc.weight"].to(torch.float8_e4m3fn)),
        "stored as F8_E4M3",
    ),
    "unknown tensor": (ANCHOR, tensor("mask_embedding", any_tensor(32)), "unknown .mask_embedding"),
    "absent tensor": (ANCHOR, without("norm.weight"), "absent .norm.weight"),
    "no queries' norm in one layer": (ANCHOR, without("layers.1.self_attn.q_norm.weight"), "absent .layers.1"),
    "never filled": (
        ANCHOR,
        tensor("fc.weight", lambda tensors: torch.full_like(tensors["fc.weight"], torch.nan)),
        "holds NaN",
    ),
    "mixed windows": (
        replace(ANCHOR, window=4),
        setting("layer_types", ["sliding_attention", "full_attention"], layers=True),
        "mixes sliding-window and full-attention",
    ),
    "causal windows": (
        replace(ANCHOR, window=4),
        setting("sliding_window_non_causal", value=False),
        "causal inside the block",
    ),
    "other layers": (
        ANCHOR,
        setting("layer_types", ["full_attention", "chunked_attention"], layers=True),
        "chunked_attention is not supported",
    ),
    "unknown family": (ANCHOR, setting("model_type", "qwen99", layers=True), "family 'qwen99' cannot be read"),
    "unknown activation": (ANCHOR, setting("hidden_act", "zap", layers=True), "activation 'zap' is unknown"),
    "damaged config": (ANCHOR, setting("hidden_size", "wide", layers=True), "cannot be read"),
    "a size beyond memory": (ANCHOR, setting("intermediate_size", 10**9, layers=True), "has shape"),
    # Fields of other types.
    "slots in words": (ANCHOR, setting("block_size", "five"), "block_size in config.json is 'five', not an integer"),
    "layers in words": (ANCHOR, setting("aux_hidden_state_layer_ids", ["one"]), "not a list of integers"),
    "one layer": (ANCHOR, setting("aux_hidden_state_layer_ids", 3), "not a list of integers"),
    "no object": (ANCHOR, setting("transformer_layer_config", "qwen3"), "not an object"),
    "no list": (ANCHOR, setting("speculators_config", {"proposal_methods": 7}), "not a list"),
    "truth in words": (ANCHOR, setting("sample_from_anchor", "false"), "neither true nor false"),
    "confidence in words": (ANCHOR, setting("enable_confidence_head", "no"), "neither true nor false"),
    # Heads.
    "another speculator": (ANCHOR, setting("speculators_model_type", "eagle3"), "of type 'eagle3'"),
    "unknown Markov head": (ANCHOR, setting("markov_head_type", "gru"), "of kind 'gru'"),
    "confidence reads an absent head": (ANCHOR, setting("markov_rank", 0), "markov_rank is 0"),
    "silent about the Markov head": (ANCHOR, without("markov_head_type"), "no 'markov_head_type'"),
    "silent about confidence": (ANCHOR, without("enable_confidence_head"), "no 'enable_confidence_head'"),
    "another rank": (ANCHOR, setting("markov_rank", 4), r"markov_head\S* has shape"),
}


@pytest.mark.parametrize("trap", SPECULATORS_TRAPS)
def test_speculators_traps_fail_fast(tmp_path: Path, trap: str) -> None:
    """Whatever would be read wrongly is refused by name, before any drafting."""
    recipe, change, reason = SPECULATORS_TRAPS[trap]
    target = a_target()
    config, tensors = speculators(recipe, target)
    change(config, tensors)
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_for_target(folder, TargetAdapter(target))
    assert str(folder) in str(caught.value)
    assert caught.value.remedy


DEEPSPEC_TRAPS: dict[str, tuple[Change, str]] = {
    "Gemma 4": (setting("architectures", ["Gemma4DSparkModel"]), "Gemma4DSparkModel is not supported.*four norms"),
    "Eagle3": (setting("architectures", ["Qwen3Eagle3Model"]), "Qwen3Eagle3Model is not supported"),
    "no architecture": (without("architectures"), r"architecture \(none\)"),
    "embeddings as features": (setting("target_layer_ids", [-1, 2, 3]), "target's embeddings"),
    "the last layer": (setting("target_layer_ids", [0, 2, 4]), "after the final norm"),
    "layers out of order": (setting("target_layer_ids", [2, 0, 3]), "rising order"),
    "another depth of target": (setting("num_target_layers", 7), "number of layers is 7"),
    "another theta": (setting("rope_theta", 1e6), "are not the target's"),
    "mask out of range": (setting("mask_token_id", 64), "no id of the target's vocabulary"),
    "masks predict": (setting("sample_from_anchor", value=False), "in DeepSpec's layout the anchor's slot always does"),
    "another trainer": (
        setting("dflash_config", {"causal": False}),
        "another trainer's file.*layout='anchor_predicts'",
    ),
    "causal blocks": (setting("dflash_query_causal", value=True), "sets dflash_query_causal"),
    "another embedding": (edited("embed_tokens.weight", 40), "embed_tokens.weight.*token 40"),
    "another head": (edited("lm_head.weight", 63), "lm_head.weight.*token 63"),
    "a window": (
        lambda config, tensors: config.update(
            layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=8
        ),
        "causal inside the block",
    ),
    "value norms": (tensor("layers.0.self_attn.v_norm.weight", any_tensor(8)), "normalised values"),
    "hyper-connections": (tensor("layers.0.hc_attn.weight", any_tensor(8)), "hyper-connections"),
    "no rank": (without("markov_rank"), "no 'markov_rank'"),
    "no block size": (without("block_size"), "no 'block_size'"),
}


@pytest.mark.parametrize("trap", DEEPSPEC_TRAPS)
def test_deepspec_traps_fail_fast(tmp_path: Path, trap: str) -> None:
    """The same for the other layout."""
    change, reason = DEEPSPEC_TRAPS[trap]
    target = a_target()
    config, tensors = deepspec(ANCHOR, target)
    change(config, tensors)
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match=reason):
        load_for_target(folder, TargetAdapter(target))


def test_a_trap_does_not_pass_as_an_ordinary_model(tmp_path: Path) -> None:
    """A drafter setting that names an unusable drafter fails when the model is built, not silently and not later."""
    target = a_target()
    config, tensors = deepspec(ANCHOR, target)
    config["architectures"] = ["Gemma4DSparkModel"]
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match="Gemma4DSparkModel"):
        LLM(target, speculation=Speculation(drafter=str(folder)))


@pytest.mark.parametrize(("recipe", "layout"), [(ANCHOR, "anchor_predicts"), (MASKS, "mask_predicts")])
def test_the_caller_may_state_the_layout(tmp_path: Path, recipe: Recipe, layout: Any) -> None:
    """A silent file drafts as its caller says; a file that speaks is not overruled."""
    target = a_target()
    config, tensors = speculators(recipe, target)
    del config["sample_from_anchor"]
    folder = write(tmp_path / "silent", config, tensors)
    model = load_for_target(folder, TargetAdapter(target), layout=layout)
    assert same_drafts(drafted(model, target), recipe, tensors, target) == 1.0
    folder = write(tmp_path / "contrary", {**config, "sample_from_anchor": not recipe.anchor_predicts}, tensors)
    with pytest.raises(CheckpointError, match="the caller states"):
        load_for_target(folder, TargetAdapter(target), layout=layout)


def test_dflash_without_the_flag_lets_masks_predict(tmp_path: Path) -> None:
    """DFlash files older than the flag knew no other way."""
    target = a_target()
    config, tensors = speculators(DFLASH, target)
    del config["sample_from_anchor"]
    model = load_for_target(write(tmp_path / "drafter", config, tensors), TargetAdapter(target))
    assert same_drafts(drafted(model, target), DFLASH, tensors, target) == 1.0


def test_the_caller_may_vouch_for_another_rope(tmp_path: Path) -> None:
    """Then the drafter turns by its own parameters."""
    target, recipe = a_target(), replace(ANCHOR, theta=500.0)
    folder, tensors = a_checkpoint(tmp_path, "deepspec", recipe, target)
    model = load_for_target(folder, TargetAdapter(target), own_rope=True)
    assert same_drafts(drafted(model, target), recipe, tensors, target) == 1.0


def test_copies_may_differ_as_far_as_the_caller_says(tmp_path: Path) -> None:
    """Rows of a target in few bits differ by some per cent; rows of another model by far more."""
    target = a_target()
    config, tensors = speculators(ANCHOR, target)
    generator = torch.Generator().manual_seed(0)
    copy = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = copy + 0.1 * copy.std() * torch.randn(copy.shape, generator=generator)
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match=r"copies_within=0\.2"):
        load_for_target(folder, TargetAdapter(target))
    assert load_for_target(folder, TargetAdapter(target), copies_within=0.2).config.block_size == 5
    tensors["lm_head.weight"] = torch.randn(copy.shape, generator=generator)
    folder = write(tmp_path / "stranger", config, tensors)
    with pytest.raises(CheckpointError, match=r"its copy lm_head\.weight"):
        load_for_target(folder, TargetAdapter(target), copies_within=0.2)


@pytest.mark.parametrize(
    ("family", "fields", "what"),
    [
        ("gemma", {}, "scales its embeddings"),
        ("granite", {"logits_scaling": 8.0}, "scales or caps its logits"),
        ("phi", {}, "has an output head with a bias"),
    ],
)
def test_targets_that_do_more_than_look_up(tmp_path: Path, family: str, fields: dict[str, Any], what: str) -> None:
    """These layouts' drafters use plain embeddings and logits: a target that scales either would get wrong ones."""
    target = tiny_model(family, num_hidden_layers=5, **fields)
    folder, _ = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    with pytest.raises(CheckpointError, match=what):
        load_for_target(folder, TargetAdapter(target))


class Vocabulary:
    """A tokenizer as far as the check looks at it."""

    bos_token_id = 1
    eos_token_id = 2
    chat_template = "<|turn|>{{ message }}"

    def __init__(self) -> None:
        special = {3: "<|turn|>", 4: "<|spare|>"}
        self.added_tokens_decoder = {
            number: type("Token", (), {"content": content, "special": True}) for number, content in special.items()
        }

    def get_vocab(self) -> dict[str, int]:
        """Ids 0 to 59 have a token."""
        return {f"t{number}": number for number in range(60)}


@pytest.mark.parametrize(
    ("mask", "reason"),
    [(1, "bos"), (2, "eos"), (3, "chat template"), (7, "'t7', text"), (4, None), (61, None)],
)
def test_a_mask_must_not_occur_in_text(tmp_path: Path, mask: int, reason: str | None) -> None:
    """With the tokenizer at hand, only a spare special token or an id without a token will do."""
    target = a_target()
    config, tensors = speculators(ANCHOR, target)
    folder = write(tmp_path / "drafter", {**config, "mask_token_id": mask}, tensors)
    if reason is None:
        assert load_for_target(folder, TargetAdapter(target), tokenizer=Vocabulary()).config.mask_token_id == mask
    else:
        with pytest.raises(CheckpointError, match=reason):
            load_for_target(folder, TargetAdapter(target), tokenizer=Vocabulary())


def test_a_mask_that_ends_texts_is_refused_without_a_tokenizer(tmp_path: Path) -> None:
    """The target's config names its end-of-text ids, one or several."""
    target = tiny_model("qwen3", num_hidden_layers=5, eos_token_id=MASK)
    folder, _ = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    with pytest.raises(CheckpointError, match="the target's eos token"):
        load_for_target(folder, TargetAdapter(target))


def test_damaged_files(tmp_path: Path) -> None:
    """Absent, cut and incomplete weights each say what must be there."""
    target = a_target()
    adapter = TargetAdapter(target)
    folder, _ = a_checkpoint(tmp_path, "speculators", ANCHOR, target)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        load_for_target(folder, adapter)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"must hold model\.safetensors"):
        load_for_target(folder, adapter)
    config, tensors = speculators(ANCHOR, target)
    sharded = write(tmp_path / "sharded", config, tensors, shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="every shard"):
        load_for_target(sharded, adapter)
    (sharded / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        load_for_target(sharded, adapter)
