"""What a model is made of, as far as exact speculative decoding must know; and what is refused, by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum

from transformers import PreTrainedModel

from .errors import UnsupportedModelError

_CACHE_ARGUMENTS = (
    "cache",
    "past_key_values",
    "cache_params",
)  # transformers renamed it; some recurrent models kept their own
_SLOT_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "dummy"})
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "moe", "mlp"})
_RECURRENT_MODEL_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"})
_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})
_OWN_MASK_MODEL_TYPES = frozenset({"gpt_neo"})


class StateKind(Enum):
    """Which kind of state a model keeps, and so how its rows roll back."""

    SLOTS = "slots"
    """Keys and values only: roll back by length."""
    RECURRENT = "recurrent"
    """At least one layer folds its past into a fixed-size state: roll back by snapshot and replay."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts a target adapter needs."""

    name: str
    """Class name of the model."""
    state_kind: StateKind
    cache_argument: str
    """The name ``forward`` uses for its cache."""
    layer_types: tuple[str, ...]
    """One entry per decoder layer."""
    masks_by_type: bool
    """True when the model wants a dict of masks keyed by layer type."""
    sliding_window: int | None
    chunk_size: int | None
    additive_masks: bool
    """True when masks are added to scores (eager attention) instead of being boolean."""
    switches_attention: bool
    """True when grouped-query SDPA can be replaced through transformers' attention interface."""
    can_limit_logits: bool
    """True when ``forward`` takes ``logits_to_keep``."""
    vocab_size: int
    context_length: int | None
    """Positions the model was built for; None where it has no limit."""

    @property
    def pads_blocks(self) -> bool:
        """True when a round pads every request's block to the longest; else requests are executed one by one."""
        return self.state_kind is StateKind.SLOTS


def inspect_model(model: PreTrainedModel) -> Architecture:
    """Read a model's architecture.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly here; the message says why and what to do.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    _refuse_unsupported(name, model, parameters)
    layer_types = _layer_types(config)
    recurrent = config.model_type in _RECURRENT_MODEL_TYPES or any(kind in _RECURRENT_LAYERS for kind in layer_types)
    unknown = sorted(set(layer_types) - _SLOT_LAYERS - _RECURRENT_LAYERS)
    if unknown:
        raise UnsupportedModelError(
            name,
            f"its layers of type {', '.join(unknown)} keep a state this library cannot roll back",
            "use another model",
        )
    cache_argument = next((candidate for candidate in _CACHE_ARGUMENTS if candidate in parameters), None)
    if cache_argument is None:
        raise UnsupportedModelError(name, "its forward takes no cache", "use a model with a key-value cache")
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if not recurrent:
        if attention not in {"sdpa", "eager"}:
            raise UnsupportedModelError(
                name,
                f"attention implementation {attention!r} takes no explicit mask per row",
                "load it with attn_implementation='sdpa' or 'eager'",
            )
        if "position_ids" not in parameters:
            raise UnsupportedModelError(
                name,
                "its forward takes no position_ids, so rows of different length cannot share a batch",
                "use another model",
            )
    return Architecture(
        name=name,
        state_kind=StateKind.RECURRENT if recurrent else StateKind.SLOTS,
        cache_argument=cache_argument,
        layer_types=layer_types,
        masks_by_type=getattr(config, "layer_types", None) is not None,
        sliding_window=getattr(config, "sliding_window", None),
        chunk_size=getattr(config, "attention_chunk_size", None),
        additive_masks=attention == "eager",
        switches_attention=_switches_attention(model, attention),
        can_limit_logits="logits_to_keep" in parameters,
        vocab_size=int(config.vocab_size),
        context_length=_usable_context(config),
    )


def _refuse_unsupported(name: str, model: PreTrainedModel, parameters: object) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(name, "it is an encoder-decoder model", "use a decoder-only causal language model")
    if config.model_type in _ALIBI_MODEL_TYPES or getattr(config, "alibi", False):
        raise UnsupportedModelError(
            name,
            "its ALiBi position bias is derived from a padding mask, which cannot describe rows that roll back",
            "use a model with rotary, learned or no position encoding",
        )
    if config.model_type in _OWN_MASK_MODEL_TYPES:
        raise UnsupportedModelError(
            name,
            "its attention cuts a causal mask of its own to the batch's longest row; shorter rows would see too little",
            "use a model whose attention takes its mask as given",
        )
    if "input_ids" not in parameters:  # type: ignore[operator]
        raise UnsupportedModelError(name, "its forward takes no input_ids", "use a causal language model")


def _switches_attention(model: PreTrainedModel, attention: str) -> bool:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)  # some recurrent families have none
    grouped = heads is not None and getattr(config, "num_key_value_heads", None) not in {None, heads}
    # Families that compare the implementation's name themselves (Falcon) do not support other backends, and say so.
    return attention == "sdpa" and grouped and bool(getattr(model, "_supports_attention_backend", False))


def _layer_types(config: object) -> tuple[str, ...]:
    declared = getattr(config, "layer_types", None)
    if declared is not None:
        return tuple(declared)
    count = int(config.num_hidden_layers)  # type: ignore[attr-defined]
    if getattr(config, "sliding_window", None) is not None:
        return ("sliding_attention",) * count
    if getattr(config, "attention_chunk_size", None) is not None:
        return ("chunked_attention",) * count
    return ("full_attention",) * count


def _usable_context(config: object) -> int | None:
    """Positions over which a token's rotary angle depends on nothing but its position.

    LongRoPE switches to other frequencies once any row of the batch passes the original context, for keys that were
    cached with the first ones too; rows would then depend on their neighbours.
    """
    context = _context_length(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if "longrope" not in str(rope.get("rope_type", rope.get("type"))):
        return context
    original = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    return original if context is None or (original is not None and original < context) else context


def _context_length(config: object) -> int | None:
    # Checked in the order that transformers itself documents; recurrent models have none of them.
    for field in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
