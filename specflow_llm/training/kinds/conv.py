"""Convolutional drafters, for the smallest machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specflow.errors import InvalidSettingError

from ...drafters.conv_checkpoint import load_conv, save_conv
from ...drafters.conv_model import ConvConfig, ConvModel, SharedTables
from ...dspark.adapter import TargetAdapter
from ...dspark.model import parameter_count
from ..context import CONTEXT_BIAS
from ..design import coverage, frequent_ids
from ..samples import Sample
from .cards import model_card

_DRAFT_VOCABULARY = 4096


class ConvKind:
    """See :class:`.base.Kind`. The target's embedding and output head are shared.

    Args:
        adapter: the target.
        tokenizer: not needed.
    """

    def __init__(self, adapter: TargetAdapter, tokenizer: Any = None) -> None:
        del tokenizer
        self._adapter = adapter

    def design(self, changes: Mapping[str, Any]) -> ConvConfig:
        """See :class:`.base.Kind`."""
        adapter = self._adapter
        values: dict[str, Any] = {
            "target": adapter.name,
            "vocab_size": adapter.vocab_size,
            "embedding_size": SharedTables.of(adapter).embedding.shape[1],
            "draft_vocab_size": min(_DRAFT_VOCABULARY, adapter.vocab_size),
            "context_bias": CONTEXT_BIAS,
        }
        changeable = set(ConvConfig.__dataclass_fields__) - {"target", "vocab_size", "embedding_size"}
        unknown = sorted(set(changes) - changeable)
        if unknown:
            raise InvalidSettingError("drafter", unknown, f"of a conv drafter: {', '.join(sorted(changeable))}")
        values.update(changes)
        if values["draft_vocab_size"] == adapter.vocab_size:
            values["draft_vocab_size"] = None
        return ConvConfig(**values)

    def load(self, folder: Path, changes: Mapping[str, Any], *, seed: int, fresh: bool) -> ConvModel:
        """See :class:`.base.Kind`. Its sizes stay."""
        del seed, fresh
        model = load_conv(folder, self._adapter)
        biases = changes.get("context_bias", model.config.context_bias or CONTEXT_BIAS)
        model.config = model.config.with_(context_bias=biases)
        sizes = {name: value for name, value in changes.items() if name != "context_bias"}
        differing = sorted(name for name in sizes if sizes[name] != getattr(model.config, name, None))
        if differing:
            raise InvalidSettingError("drafter", differing, "nothing new: a conv drafter to go on from keeps its sizes")
        return model.to(self._adapter.device)

    def new(
        self, config: ConvConfig, samples: Sequence[Sample], *, seed: int, fresh: bool, notify: Callable[[str], None]
    ) -> ConvModel:
        """See :class:`.base.Kind`. There is nothing to copy from a target."""
        del fresh, notify
        ids = None
        if config.draft_vocab_size is not None:
            ids = frequent_ids(samples, config.draft_vocab_size, config.vocab_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ConvModel(config, SharedTables.of(self._adapter), ids)
        return model.to(self._adapter.device)

    def layers(self, config: ConvConfig) -> tuple[int, ...]:
        """See :class:`.base.Kind`. None are read."""
        del config
        return ()

    def describe(self, model: ConvModel, samples: Sequence[Sample]) -> str:
        """See :class:`.base.Kind`."""
        config = model.config
        return (
            f"drafter: {parameter_count(model) / 1e6:.1f} M parameters, {config.num_layers} convolutional layers of "
            f"width {config.hidden_size} that see {config.receptive_field} tokens; "
            f"{coverage(samples, model.draft_ids):.1%} of the target's tokens can be drafted"
        )

    def save(self, model: ConvModel, folder: Path, extra: Mapping[str, Any]) -> None:
        """See :class:`.base.Kind`."""
        save_conv(model, folder, extra=extra)

    def card(self, config: ConvConfig, trained: Mapping[str, Any]) -> str:
        """See :class:`.base.Kind`."""
        what = (
            f"A convolutional drafter: {config.num_layers} causal depthwise-separable layers of width "
            f"{config.hidden_size}, {config.head_size} ids of {config.vocab_size} can be drafted. It sees the last "
            f"{config.receptive_field} tokens and nothing of the target's hidden states, and shares the target's "
            "embedding and output head. It drafts token by token; a slot is a drafted token's place in its round, and "
            "its figures are taken after the target's true tokens, not after drafted ones (teacher forcing)."
        )
        return model_card(config.target, what, trained)
