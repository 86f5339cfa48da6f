"""Checkpoints of other projects, written by hand, and what they draft, computed from scratch.

Nothing here uses the library's layouts or its drafter: names and conventions are written down a second time, and the
forward is plain arithmetic in float64, one head at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.specflow_llm.models import VOCAB

HEADS, KV_HEADS, HEAD_DIM, WIDTH, MLP, RANK = 4, 2, 8, 32, 40, 6
EPS = 1e-6
MASK = 61
DRAFTABLE = [2, 3, 5, 8, 9, 13, 14, 20, 21, 22, 27, 30, 33, 34, 40, 41, 44, 47, 50, 52, 55, 58, 60, 63]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One drafter, in the words of neither project."""

    states: tuple[int, ...] = (1, 3, 4)
    """What it reads of transformers' ``hidden_states`` (0 is the embeddings, i + 1 the output of layer i)."""
    slots: int = 5
    anchor_predicts: bool = True
    layers: int = 2
    markov: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    draftable: tuple[int, ...] | None = None
    window: int | None = None
    theta: float = 10000.0
    copies: bool = True

    @property
    def gamma(self) -> int:
        """Tokens per block."""
        return self.slots if self.anchor_predicts else self.slots - 1


def tensors_of(recipe: Recipe, target: PreTrainedModel, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict under the names that both projects share."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, scale: float = 0.4) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(WIDTH, WIDTH * len(recipe.states)),
        "hidden_norm.weight": norm(WIDTH),
        "norm.weight": norm(WIDTH),
    }
    for layer in range(recipe.layers):
        shapes = {"q": (HEADS * HEAD_DIM, WIDTH), "k": (KV_HEADS * HEAD_DIM, WIDTH), "v": (KV_HEADS * HEAD_DIM, WIDTH)}
        for name, shape in {**shapes, "o": (WIDTH, HEADS * HEAD_DIM)}.items():
            tensors[f"layers.{layer}.self_attn.{name}_proj.weight"] = matrix(*shape)
        for name in ("q_norm", "k_norm"):
            # Sharp attention: slots that hold the same mask differ by their positions alone.
            tensors[f"layers.{layer}.self_attn.{name}.weight"] = 2.0 * norm(HEAD_DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{name}.weight"] = norm(WIDTH)
        for name, shape in {"gate": (MLP, WIDTH), "up": (MLP, WIDTH), "down": (WIDTH, MLP)}.items():
            tensors[f"layers.{layer}.mlp.{name}_proj.weight"] = matrix(*shape, scale=0.2)
    tensors.update(_heads_of(recipe, matrix))
    if recipe.copies:
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        head = target.get_output_embeddings().weight.detach()
        tensors["lm_head.weight"] = (head if recipe.draftable is None else head[list(recipe.draftable)]).clone()
    return tensors


def _heads_of(recipe: Recipe, matrix: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    columns = VOCAB if recipe.draftable is None else len(recipe.draftable)
    tensors: dict[str, torch.Tensor] = {}
    if recipe.markov != "none":
        tensors["markov_head.markov_w1.weight"] = matrix(VOCAB, RANK, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = matrix(columns, RANK, scale=1.0)
    if recipe.markov == "gated":
        tensors["markov_head.gate_proj.weight"] = matrix(RANK, WIDTH + RANK)
        tensors["markov_head.gate_proj.bias"] = matrix(RANK)
    if recipe.markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = matrix(3 * RANK, 2 * RANK + WIDTH)
        tensors["markov_head.joint_proj.bias"] = matrix(3 * RANK)
    if recipe.confidence:
        width = WIDTH + (RANK if recipe.confidence_with_markov else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, width, scale=0.2)
        tensors["confidence_head.proj.bias"] = matrix(1)
    return tensors


def speculators(recipe: Recipe, target: PreTrainedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors in the ``speculators`` layout."""
    kind = "dflash" if recipe.markov == "none" and not recipe.confidence else "dspark"
    heads = {
        "markov_rank": 0 if recipe.markov == "none" else RANK,
        "markov_head_type": "vanilla" if recipe.markov == "none" else recipe.markov,
        "enable_confidence_head": recipe.confidence,
        "confidence_head_with_markov": recipe.confidence_with_markov,
    }
    config = {
        "architectures": [f"{'DSpark' if kind == 'dspark' else 'DFlash'}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.6.0",
        "aux_hidden_state_layer_ids": list(recipe.states),
        "block_size": recipe.slots,
        "sample_from_anchor": recipe.anchor_predicts,
        "mask_token_id": MASK,
        "draft_vocab_size": VOCAB if recipe.draftable is None else len(recipe.draftable),
        "target_hidden_size": None,
        "sliding_window_non_causal": recipe.window is not None,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": recipe.gamma}],
            "verifier": {"name_or_path": "org/tiny", "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": recipe.theta},
            "layer_types": ["full_attention" if recipe.window is None else "sliding_attention"] * recipe.layers,
            "use_sliding_window": recipe.window is not None,
            "sliding_window": recipe.window,
        },
        **(heads if kind == "dspark" else {}),
    }
    tensors = tensors_of(recipe, target)
    if recipe.draftable is not None:
        ids = torch.tensor(recipe.draftable)
        tensors["d2t"] = torch.tensor([token - column for column, token in enumerate(recipe.draftable)])
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return config, tensors


def deepspec(recipe: Recipe, target: PreTrainedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors in DeepSpec's layout."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "rope_theta": recipe.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * recipe.layers,
        "tie_word_embeddings": False,
        "num_target_layers": target.config.num_hidden_layers,
        "target_layer_ids": [state - 1 for state in recipe.states],
        "mask_token_id": MASK,
        "block_size": recipe.slots,
        "num_anchors": 512,
        "markov_rank": 0 if recipe.markov == "none" else RANK,
        "enable_confidence_head": recipe.confidence,
    }
    if recipe.markov != "none":
        config["markov_head_type"] = recipe.markov
    if recipe.confidence:
        config["confidence_head_with_markov"] = recipe.confidence_with_markov
    return config, tensors_of(recipe, target)


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Put a checkpoint on disk, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = {
        name: (tensor.to(dtype) if tensor.dtype == torch.float32 else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    names, places = sorted(stored), {}
    for shard in range(shards):
        part = names[shard::shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@torch.inference_mode()
def reference(
    recipe: Recipe,
    tensors: dict[str, torch.Tensor],
    target: PreTrainedModel,
    tokens: Sequence[int],
    *,
    shifted_previous: bool = False,
) -> tuple[list[int], list[float]]:
    """What such a drafter proposes greedily after these tokens, and how likely it thinks each of them to survive.

    Args:
        recipe: what it is.
        tensors: its weights, under the projects' names.
        target: lends embedding, head and hidden states.
        tokens: all committed tokens; the last one is the anchor, which the target has not run.
        shifted_previous: a known mistake, to see that it shows: heads get the token before the previous one.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    past = torch.tensor([list(tokens[:-1])])
    states = target(input_ids=past, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([states[index][0] for index in recipe.states], dim=-1).double()
    context = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    inputs = torch.tensor([tokens[-1]] + [MASK] * (recipe.slots - 1))
    block = target.get_input_embeddings().weight[inputs].double()
    begin = len(tokens) - 1
    for layer in range(recipe.layers):
        part = {
            name.removeprefix(f"layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        block = block + _attend(recipe, part, _norm(block, part["input_layernorm.weight"]), context, begin)
        inner = _norm(block, part["post_attention_layernorm.weight"])
        gate = inner @ part["mlp.gate_proj.weight"].T
        up = inner @ part["mlp.up_proj.weight"].T
        block = block + (gate / (1.0 + torch.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T
    hidden = _norm(block, weights["norm.weight"])[0 if recipe.anchor_predicts else 1 :]
    ids = list(range(VOCAB)) if recipe.draftable is None else list(recipe.draftable)
    head = target.get_output_embeddings().weight.double()[ids]
    return _serial(recipe, weights, hidden, head, ids, tokens, shifted_previous)


def _serial(
    recipe: Recipe,
    weights: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    head: torch.Tensor,
    ids: Sequence[int],
    tokens: Sequence[int],
    shifted: bool,  # noqa: FBT001 - passed on
) -> tuple[list[int], list[float]]:
    drafted: list[int] = []
    survival: list[float] = []
    state = torch.zeros(RANK, dtype=torch.float64)
    for slot in range(recipe.gamma):
        before = [*tokens, *drafted]
        previous = torch.zeros(0, dtype=torch.float64)
        logits = head @ hidden[slot]
        if recipe.markov != "none":
            previous = weights["markov_head.markov_w1.weight"][before[-2 if shifted else -1]]
            out = previous
            if recipe.markov == "gated":
                joined = torch.cat([hidden[slot], previous])
                opened = weights["markov_head.gate_proj.weight"] @ joined + weights["markov_head.gate_proj.bias"]
                out = torch.sigmoid(opened) * previous
            if recipe.markov == "rnn":
                joined = torch.cat([state, previous, hidden[slot]])
                raw = weights["markov_head.joint_proj.weight"] @ joined + weights["markov_head.joint_proj.bias"]
                keep, new, shown = torch.sigmoid(raw[:RANK]), torch.tanh(raw[RANK : 2 * RANK]), raw[2 * RANK :]
                state, out = keep * state + (1.0 - keep) * new, torch.tanh(shown)
            logits = logits + weights["markov_head.markov_w2.weight"] @ out
        if recipe.confidence:
            seen = torch.cat([hidden[slot], previous]) if recipe.confidence_with_markov else hidden[slot]
            logit = float(weights["confidence_head.proj.weight"][0] @ seen + weights["confidence_head.proj.bias"][0])
            # Not part of any layout: our drafter pools the head's logit with the log-odds of the likeliest token.
            top = min(max(float(logits.softmax(-1).max()), 0.01), 0.99)
            logit = 0.4 * logit + (0.3 + 0.4) * math.log(top / (1.0 - top))
            survival.append((survival[-1] if survival else 1.0) / (1.0 + math.exp(-logit)))
        drafted.append(ids[int(logits.argmax())])
    return drafted, survival


def _attend(
    recipe: Recipe, part: dict[str, torch.Tensor], block: torch.Tensor, context: torch.Tensor, begin: int
) -> torch.Tensor:
    oldest = 0 if recipe.window is None else max(0, begin - recipe.window)
    sources = torch.cat([context[oldest:], block])
    heads = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        rows, lent = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM), slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
        queries = _norm(block @ part["self_attn.q_proj.weight"][rows].T, part["self_attn.q_norm.weight"])
        keys = _norm(sources @ part["self_attn.k_proj.weight"][lent].T, part["self_attn.k_norm.weight"])
        values = sources @ part["self_attn.v_proj.weight"][lent].T
        turned = _turn(queries, begin, recipe.theta) @ _turn(keys, oldest, recipe.theta).T / math.sqrt(HEAD_DIM)
        heads.append(torch.softmax(turned, dim=-1) @ values)
    return torch.cat(heads, dim=-1) @ part["self_attn.o_proj.weight"].T


def _turn(states: torch.Tensor, first: int, theta: float) -> torch.Tensor:
    """Each pair (i, i + half) as a complex number, turned by position times theta^(-i / half)."""
    half = HEAD_DIM // 2
    pairs = torch.complex(states[:, :half], states[:, half:])
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(first, first + len(states), dtype=torch.float64), speeds)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / torch.sqrt((states * states).mean(dim=-1, keepdim=True) + EPS) * weight


ANCHOR = Recipe()
MASKS = replace(ANCHOR, anchor_predicts=False)
SMALL_VOCABULARY = replace(ANCHOR, draftable=tuple(DRAFTABLE))
DFLASH = replace(MASKS, markov="none", confidence=False)
