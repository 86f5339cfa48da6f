"""A new drafter for a target: sizes from its config, vocabulary from its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specflow.errors import InvalidSettingError

from ..dspark.adapter import TargetAdapter
from ..dspark.config import DSparkConfig, spread_layers
from ..dspark.model import DSparkModel
from ..packing import PackedLinear
from .batches import loss_mask
from .context import CONTEXT_BIAS
from .samples import Sample

SMALL_TARGET = 1_000_000_000
"""Targets with fewer parameters get a three-layer drafter with a restricted vocabulary; larger ones DSpark's five.

Three layers learned faster than two, and two faster than one (``docs/benchmarks.md``); each costs a thirtieth of the
demo model.
"""


def design(adapter: TargetAdapter, tokenizer: Any = None, **changes: Any) -> DSparkConfig:
    """The default drafter of a target.

    Layers have the target's own sizes: the block's hidden states start as its embeddings and end at its output head.

    Args:
        adapter: the target.
        tokenizer: where a reserved id for masks is looked for; None takes the highest id.
        changes: fields of :class:`DSparkConfig` to set otherwise, and ``num_features`` (how many target layers are
            read, spread evenly, unless ``target_layer_ids`` says which).

    Raises:
        InvalidSettingError: a field is unknown or cannot work.
    """
    config = adapter.config
    small = sum(parameter.numel() for parameter in adapter.model.parameters()) < SMALL_TARGET
    heads = int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if not isinstance(rope.get("rope_theta"), (int, float)):
        # Families with several kinds of layers nest them; the drafter attends to everything, as full layers do.
        rope = dict(rope.get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0})
    rope.pop("partial_rotary_factor", None)
    values: dict[str, Any] = {
        "target": adapter.name,
        "vocab_size": adapter.vocab_size,
        "hidden_size": adapter.hidden_size,
        "num_target_layers": adapter.num_layers,
        "target_layer_ids": spread_layers(adapter.num_layers, changes.pop("num_features", 5)),
        "mask_token_id": mask_token(adapter.vocab_size, tokenizer),
        "num_layers": min(3, adapter.num_layers) if small else 5,
        "num_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or adapter.hidden_size // heads),
        "intermediate_size": _mlp_size(config, adapter.hidden_size),
        "norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        "qk_norm": any("q_norm" in name for name, _ in adapter.model.named_parameters()),
        "rope": rope,
        "max_positions": int(getattr(config, "max_position_embeddings", None) or 4096),
        "draft_vocab_size": min(12288, adapter.vocab_size) if small else None,
        "markov_rank": min(128 if small else 256, adapter.hidden_size),
        "context_bias": CONTEXT_BIAS,
    }
    unknown = sorted(set(changes) - set(DSparkConfig.__dataclass_fields__))
    if unknown:
        raise InvalidSettingError("drafter", unknown, f"fields of DSparkConfig: {', '.join(sorted(values))}, ...")
    for name in ("target", "vocab_size", "hidden_size", "num_target_layers"):
        if changes.get(name, values[name]) != values[name]:
            raise InvalidSettingError(name, changes[name], f"{values[name]!r}, the target's; leave it out")
    values.update(changes)
    if values["draft_vocab_size"] == adapter.vocab_size:
        values["draft_vocab_size"] = None
    return DSparkConfig(**values)


def _mlp_size(config: Any, hidden_size: int) -> int:
    """The target's own; families that name no single size (GPT-2, mixtures of experts) get four times the width."""
    size = getattr(config, "intermediate_size", None)
    return int(size) if isinstance(size, int) and size >= hidden_size else 4 * hidden_size


def mask_token(vocab_size: int, tokenizer: Any) -> int:
    """An id that never occurs in text: a reserved special token that the chat template does not use, else the last id.

    The anchor and the context tell the slots apart, not the masks, so any unused id serves.
    """
    if tokenizer is None:
        return vocab_size - 1
    used = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk", "sep", "cls")}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    known: Mapping[str, int] = tokenizer.get_vocab()
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    spare = [
        number
        for number, token in added.items()
        if token.special and number not in used and token.content not in template
    ]
    in_range = [number for number in spare if 0 <= number < vocab_size]
    if in_range:
        return max(in_range)
    unnamed = set(range(vocab_size)) - set(known.values())
    return max(unnamed) if unnamed else vocab_size - 1


def frequent_ids(samples: Sequence[Sample], size: int, vocab_size: int) -> torch.Tensor:
    """[size] the ids that the target wrote most often, in rising order; ties and gaps go to the lowest ids."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(torch.tensor(sample.token_ids)[loss_mask(sample)].tolist())
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int64)


def coverage(samples: Sequence[Sample], ids: torch.Tensor | None) -> float:
    """Fraction of the target's own tokens that can be drafted."""
    if ids is None:
        return 1.0
    known, inside, total = set(ids.tolist()), 0, 0
    for sample in samples:
        own = torch.tensor(sample.token_ids)[loss_mask(sample)].tolist()
        inside += sum(token in known for token in own)
        total += len(own)
    return inside / total if total else 1.0


def new_drafter(config: DSparkConfig, samples: Sequence[Sample], adapter: TargetAdapter, seed: int) -> DSparkModel:
    """A drafter with fresh weights, on the target's device."""
    ids = None
    if config.draft_vocab_size is not None:
        ids = frequent_ids(samples, config.draft_vocab_size, config.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DSparkModel(config, ids)
    return model.to(adapter.device)


@torch.no_grad()
def start_from_target(model: DSparkModel, adapter: TargetAdapter, layers: Sequence[int]) -> None:
    """Copy target layers into a drafter's, so that attention to injected features works before training.

    A target layer reads normalised hidden states; a drafter's layer reads them from the block and, as injected
    features, from the context. With the deepest tapped layer passed through the fusion unchanged, and norm weights
    folded into the projections, the drafter's keys and values of the context are the target's own, if ``layers``
    follow that tap.

    Args:
        model: the drafter; its layers must have the target's sizes and names, as in the Llama family.
        adapter: the target.
        layers: target layer to copy for each drafter layer.

    Raises:
        InvalidSettingError: the target's layers have other names or sizes.
    """
    stack: Any = adapter.model.get_decoder().layers
    final = adapter.model.get_decoder().norm
    width = model.config.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, -width:] = torch.eye(width)
    model.norm.weight.copy_(_scale(final, width))
    for index, number in enumerate(layers):
        mine: Any = model.layers[index]
        theirs = stack[number]
        scale = _scale(theirs.input_layernorm, width)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(mine.self_attn, name).weight.copy_(_plain(getattr(theirs.self_attn, name)) * scale)
        mine.self_attn.o_proj.weight.copy_(_plain(theirs.self_attn.o_proj))
        for name in ("q_norm", "k_norm") if model.config.qk_norm else ():
            norm = getattr(theirs.self_attn, name, None)
            if norm is not None:  # targets without one: it starts at 1, and has to be learned
                getattr(mine.self_attn, name).weight.copy_(_scale(norm, model.config.head_dim))
        mine.post_attention_layernorm.weight.copy_(_scale(theirs.post_attention_layernorm, width))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mine.mlp, name).weight.copy_(_plain(getattr(theirs.mlp, name)))


def _scale(norm: Any, width: int) -> torch.Tensor:
    """What a norm multiplies by: families store the factor, or the factor minus one. Ones have a mean square of one."""
    factors: torch.Tensor = norm(torch.ones(1, width, dtype=norm.weight.dtype, device=norm.weight.device))[0]
    return factors


def _plain(linear: Any) -> torch.Tensor:
    weight: torch.Tensor = linear.weight
    return weight.to_dense() if weight.is_mkldnn else weight


def target_layers_to_copy(config: DSparkConfig, adapter: TargetAdapter) -> tuple[int, ...]:
    """The target's last layers, one per drafter layer; empty where sizes or names differ."""
    stack: Any = getattr(adapter.model.get_decoder(), "layers", None)
    if stack is None or config.num_layers > adapter.num_layers:
        return ()
    numbers = tuple(range(adapter.num_layers - config.num_layers, adapter.num_layers))
    mine = DSparkModel(config.with_(draft_vocab_size=None, markov="none", confidence=False)).layers[0]
    expected = {name: tuple(parameter.shape) for name, parameter in mine.named_parameters()}
    for number in numbers:
        norms = [name for name, _ in stack[number].named_children() if name.endswith("layernorm")]
        if norms != ["input_layernorm", "post_attention_layernorm"]:
            return ()  # norms after attention or MLP have no counterpart
        shapes = {name: (module.out_features, module.in_features) for name, module in _linears(stack[number])}
        if any(
            shapes.get(name.removesuffix(".weight")) != shape for name, shape in expected.items() if len(shape) == 2
        ):
            return ()
    return numbers


def _linears(layer: Any) -> list[tuple[str, Any]]:
    kinds = (torch.nn.Linear, PackedLinear)
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, kinds)]
