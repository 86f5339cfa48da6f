"""The transformer layers that a checkpoint's config describes, in the words of :class:`DSparkConfig`.

Both layouts describe them as transformers describes a model, and write only some fields; the rest are that model
family's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.activations import ACT2FN

from ...errors import CheckpointError
from ..adapter import TargetAdapter

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles depend on the position alone."""
_NOT_LAYERS = ("model_type", "architectures", "auto_map", "transformers_version", "_attn_implementation")


def read_backbone(
    values: Mapping[str, Any],
    adapter: TargetAdapter,
    *,
    own_rope: bool,
    origin: object,
    window_non_causal: bool = False,
) -> dict[str, Any]:
    """Fields of :class:`DSparkConfig` that describe the layers.

    Args:
        values: a transformers config as plain data.
        adapter: the target, whose rotary parameters the drafter must share.
        own_rope: the caller vouches that others are meant.
        origin: for messages.
        window_non_causal: layers with a sliding window let a block's slots see each other both ways.

    Raises:
        CheckpointError: the config is of an unknown family, lacks a field, or asks for parts that drafters here lack.
    """
    family = values.get("model_type", "qwen3")
    fields = {name: value for name, value in values.items() if name not in _NOT_LAYERS}
    try:
        config: Any = AutoConfig.for_model(family, **fields)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise CheckpointError(
            origin, f"its layers' config of family {family!r} cannot be read ({error})", "check config.json"
        ) from error
    heads = _count(config, "num_attention_heads", origin)
    if getattr(config, "attention_bias", False):
        raise CheckpointError(
            origin, "its attention has biases, which this library's drafters do not have", "use another checkpoint"
        )
    activation = str(_field(config, "hidden_act", origin))
    if activation not in ACT2FN:
        raise CheckpointError(origin, f"its activation {activation!r} is unknown", "check hidden_act in its config")
    return {
        "vocab_size": _count(config, "vocab_size", origin),
        "hidden_size": _count(config, "hidden_size", origin),
        "num_layers": _count(config, "num_hidden_layers", origin),
        "num_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "intermediate_size": _count(config, "intermediate_size", origin),
        "activation": activation,
        "norm_eps": float(_field(config, "rms_norm_eps", origin)),
        "max_positions": _count(config, "max_position_embeddings", origin),
        "sliding_window": _window(config, non_causal=window_non_causal, origin=origin),
        "rope": _rope(config, adapter, own_rope=own_rope, origin=origin),
    }


def _window(config: Any, *, non_causal: bool, origin: object) -> int | None:
    """The sliding window of all layers; None where they see everything."""
    count = _count(config, "num_hidden_layers", origin)
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != count:
        problem = f"{unknown[0]} is not supported" if unknown else f"{len(types)} layers are named"
        raise CheckpointError(
            origin, f"its layer_types do not describe {count} attention layers: {problem}", "use another checkpoint"
        )
    window = getattr(config, "sliding_window", None)
    if window is None or "sliding_attention" not in types:
        return None
    if "full_attention" in types:
        raise CheckpointError(
            origin,
            "it mixes sliding-window and full-attention layers; drafters here have one kind",
            "use another checkpoint, or train a drafter here: specflow-llm train",
        )
    if not non_causal:
        raise CheckpointError(
            origin,
            "its sliding-window layers are causal inside the block (sliding_window_non_causal is not set); slots see "
            "each other both ways here",
            "use a checkpoint trained with sliding_window_non_causal, or without a window",
        )
    return int(window)


def _rope(config: Any, adapter: TargetAdapter, *, own_rope: bool, origin: object) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            origin,
            "its rotary parameters differ by kind of layer; drafters here have one set",
            "use a checkpoint with plain rope_parameters",
        )
    kind = str(rope.get("rope_type", "default"))
    if kind not in _ROPE_TYPES or "rope_theta" not in rope:
        raise CheckpointError(
            origin,
            f"its rotary type {kind!r} is not supported" if kind not in _ROPE_TYPES else "it has no rope_theta",
            f"use a checkpoint with one of {', '.join(_ROPE_TYPES)} and a rope_theta",
        )
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(
            origin,
            f"it turns only a part of each head (partial_rotary_factor {rope['partial_rotary_factor']})",
            "use a checkpoint that turns whole heads",
        )
    plain = _plain(rope)
    targets = _target_ropes(adapter)
    if targets and plain not in targets and not own_rope:
        raise CheckpointError(
            origin,
            f"its rotary parameters {plain} are not the target's {targets[0]}: far from the start of a text it would "
            "look at the wrong places",
            "correct rope_parameters in its config; if it was trained with these on purpose, say so with own_rope=True",
        )
    return plain


def _target_ropes(adapter: TargetAdapter) -> list[dict[str, Any]]:
    """The target's rotary parameters; several where its kinds of layers differ, none where it has none."""
    rope = dict(getattr(adapter.config, "rope_parameters", None) or {})
    nested = [_plain(value) for value in rope.values() if isinstance(value, Mapping)]
    return nested or ([_plain(rope)] if rope else [])


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Comparable: without what says nothing."""
    values = {name: float(value) if isinstance(value, int) else value for name, value in rope.items()}
    values.setdefault("rope_type", "default")
    return {
        name: value
        for name, value in sorted(values.items())
        if value is not None and (name, value) != ("partial_rotary_factor", 1.0) and name != "type"
    }


def _field(config: Any, name: str, origin: object) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise CheckpointError(
            origin, f"its layers' config has no {name!r}", "add the field with the value it was trained with"
        )
    return value


def _count(config: Any, name: str, origin: object) -> int:
    return int(_field(config, name, origin))
