"""Prepacked linear layers for inference on CPUs, in float32 and, where the CPU multiplies it in hardware, bfloat16.

Verifying a block of drafted tokens multiplies each weight matrix by a handful of rows. PyTorch's ``F.linear`` hands
such shapes to a library that re-packs the whole weight on every call, so that 2 tokens can cost twice as much as 1.
oneDNN keeps the weight in its own blocked layout instead; a product with 8 rows then costs about as much as with 1,
which is what speculation lives on. The arithmetic is of the same type either way; sums are taken in another order, as
they are between any two batch sizes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

_ROWS_HINT = 8  # rows the layout is tuned for: one block of drafts. Other counts work with the same layout.
_MIN_WEIGHTS = 64 * 64  # below this the call overhead decides, not the layout


class PackedLinear(nn.Module):
    """``nn.Linear`` with its weight stored in oneDNN's blocked layout; inference only.

    Args:
        linear: the layer to take over. Its weight is copied into the new layout, not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        with torch.inference_mode(mode=False), torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)  # noqa: SLF001
        # An opaque tensor cannot be a registered buffer: moving or saving the module would fail on it.
        self.__dict__["packed"] = packed
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The blocked weight, for models that ask for its dtype or device; its numbers cannot be read."""
        return cast("torch.Tensor", self.__dict__["packed"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        packed = self.__dict__["packed"]
        return cast(
            "torch.Tensor",
            torch.ops.mkldnn._linear_pointwise(inputs, packed, self.bias, "none", [], ""),  # noqa: SLF001
        )

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def supports_bfloat16(device: torch.device) -> bool:
    """True when this device multiplies bfloat16 matrices in hardware.

    Without it they are several times slower than float32.
    """
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.is_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - the only place PyTorch tells


def can_pack(model: nn.Module) -> bool:
    """True when this model's linear layers would gain: on a CPU, in a type that it multiplies, with oneDNN."""
    parameter = next(model.parameters(), None)
    return parameter is not None and _gains(parameter)


def _gains(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and supports_bfloat16(weight.device))


def pack_linears(model: nn.Module) -> int:
    """Replace the model's ``nn.Linear`` layers by packed ones, in place; returns how many.

    A weight that another module shares (an output head tied to the embedding) is duplicated, because a lookup needs
    the plain layout. Subclasses of ``nn.Linear`` (quantised, parametrised) are left alone.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.numel() >= _MIN_WEIGHTS and _gains(child.weight):
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, packed layers included; a weight shared by two modules counts once."""
    packed = sum(
        module.in_features * module.out_features * module.weight.dtype.itemsize
        for module in model.modules()
        if isinstance(module, PackedLinear)
    )
    return packed + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
