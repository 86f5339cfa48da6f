"""Hidden-state taps: what drafters that read the target's mind get to see.

Letters in shapes: B slots, T block width, D hidden size, F = D times the number of tapped layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import DrafterError

_AFTER_ALL_LAYERS = sys.maxsize


class TappedStates:
    """Outputs of the tapped layers during one forward."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[int, torch.Tensor] = {}

    def record(self, layer: int, states: torch.Tensor) -> None:
        """Keep one layer's output, [B, T, D]."""
        self._states[layer] = states

    def features(self) -> torch.Tensor | None:
        """[B, T, F] tapped outputs side by side in layer order; None without taps."""
        if not self._states:
            return None
        return torch.cat([self._states[layer] for layer in sorted(self._states)], dim=-1)


class FeatureTaps:
    """Records chosen decoder layers' outputs while ``recording``.

    Args:
        model: the target model.
        layers: indices of decoder layers (0 is the first).
        final: record the hidden states after the final norm, too; they come last.

    Raises:
        DrafterError: the model has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, final: bool = False) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._empty: torch.Tensor | None = None
        count = len(set(layers)) + final
        if count:
            width = int(model.config.get_text_config(decoder=True).hidden_size) * count
            self._empty = torch.empty(0, width, dtype=model.dtype, device=model.device)
        if layers:
            stack = _decoder_layers(model)
            for layer in layers:
                if not 0 <= layer < len(stack):
                    raise DrafterError(
                        "features",
                        f"layer {layer} was asked for, but the target has layers 0..{len(stack) - 1}",
                        "choose others",
                    )
                self._modules[layer] = stack[layer]
        if final:
            self._modules[_AFTER_ALL_LAYERS] = model.get_decoder()

    @contextmanager
    def recording(self) -> Iterator[TappedStates]:
        """Hook the layers for the duration of one forward."""
        tapped = TappedStates()
        handles = [module.register_forward_hook(_recorder(tapped, layer)) for layer, module in self._modules.items()]
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """[n, F] features of consecutive chunks, n = 0 where there are none; None without taps."""
        return torch.cat(list(pieces)) if pieces else self._empty


def _recorder(tapped: TappedStates, layer: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # A decoder layer gives a tensor or a tuple; the decoder a named output. Its hidden states come first.
        tapped.record(layer, output if isinstance(output, torch.Tensor) else output[0])

    return hook


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layer stack: the longest ModuleList of the base model, whatever the family calls it."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return child
    raise DrafterError(
        "features", f"no stack of {count} decoder layers found in {type(model).__name__}", "use another target"
    )


class FeatureRows:
    """One request's features, [n, F], growing by doubling; rolling back is not appending."""

    __slots__ = ("_length", "_storage")

    def __init__(self, first: torch.Tensor | None) -> None:
        self._storage = first
        self._length = 0 if first is None else first.shape[0]

    def append(self, rows: torch.Tensor) -> None:
        """Add [m, F] rows of accepted tokens."""
        needed = self._length + rows.shape[0]
        if self._storage is None or needed > self._storage.shape[0]:
            grown = rows.new_empty(max(needed, 2 * self._length), rows.shape[1])
            if self._storage is not None:
                grown[: self._length] = self._storage[: self._length]
            self._storage = grown
        self._storage[self._length : needed] = rows
        self._length = needed

    def view(self) -> torch.Tensor | None:
        """[n, F] view of the committed rows."""
        return None if self._storage is None else self._storage[: self._length]

    @property
    def num_bytes(self) -> int:
        """Bytes of the committed rows."""
        view = self.view()
        return 0 if view is None else view.numel() * view.element_size()
