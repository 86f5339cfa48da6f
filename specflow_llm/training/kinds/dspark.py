"""DSpark and DFlash drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...dspark.adapter import TargetAdapter
from ...dspark.checkpoint import check_fits, load_drafter, save_drafter
from ...dspark.config import DSparkConfig
from ...dspark.model import DSparkModel, parameter_count
from ..context import CONTEXT_BIAS
from ..design import coverage, design, new_drafter, start_from_target, target_layers_to_copy
from ..resize import resized
from ..samples import Sample
from .cards import model_card


class DSparkKind:
    """See :class:`.base.Kind`.

    Args:
        adapter: the target.
        tokenizer: the target's, where there is one.
    """

    def __init__(self, adapter: TargetAdapter, tokenizer: Any) -> None:
        self._adapter, self._tokenizer = adapter, tokenizer

    def design(self, changes: Mapping[str, Any]) -> DSparkConfig:
        """See :class:`.base.Kind`."""
        return design(self._adapter, self._tokenizer, **dict(changes))

    def load(self, folder: Path, changes: Mapping[str, Any], *, seed: int, fresh: bool) -> DSparkModel:
        """See :class:`.base.Kind`."""
        model = load_drafter(folder)
        check_fits(model.config, self._adapter, folder)
        wanted = {"context_bias": model.config.context_bias or CONTEXT_BIAS, **changes}
        return resized(model.to(self._adapter.device), wanted, self._adapter, seed=seed, fresh=fresh)

    def new(
        self, config: DSparkConfig, samples: Sequence[Sample], *, seed: int, fresh: bool, notify: Callable[[str], None]
    ) -> DSparkModel:
        """See :class:`.base.Kind`."""
        model = new_drafter(config, samples, self._adapter, seed)
        layers = target_layers_to_copy(config, self._adapter)
        if layers and not fresh:
            start_from_target(model, self._adapter, layers)
            notify(f"starting from copies of the target's layers {', '.join(map(str, layers))}")
        return model

    def layers(self, config: DSparkConfig) -> tuple[int, ...]:
        """See :class:`.base.Kind`."""
        return config.target_layer_ids

    def describe(self, model: DSparkModel, samples: Sequence[Sample]) -> str:
        """See :class:`.base.Kind`."""
        config = model.config
        return (
            f"drafter: {parameter_count(model) / 1e6:.1f} M parameters, {config.num_layers} layers, blocks of "
            f"{config.block_size}, Markov head {config.markov}; {coverage(samples, model.draft_ids):.1%} of the "
            "target's tokens can be drafted"
        )

    def save(self, model: DSparkModel, folder: Path, extra: Mapping[str, Any]) -> None:
        """See :class:`.base.Kind`."""
        save_drafter(model, folder, extra=extra)

    def card(self, config: DSparkConfig, trained: Mapping[str, Any]) -> str:
        """See :class:`.base.Kind`."""
        what = (
            f"A DSpark drafter: {config.num_layers} layers, blocks of {config.block_size}, Markov head "
            f"{config.markov} of rank {config.previous_size}, {config.head_size} ids of {config.vocab_size} can be "
            f"drafted. It reads the outputs of target layers {', '.join(map(str, config.target_layer_ids))}."
        )
        return model_card(config.target, what, trained)
