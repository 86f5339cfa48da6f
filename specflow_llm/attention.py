"""Attention over blocks with an explicit mask, without copying keys and values per query head.

Transformers' SDPA path repeats keys and values for grouped queries whenever a mask is given. PyTorch's CPU kernel
takes grouped queries directly, so on CPUs the repetition (the whole cache, every layer, every round) is avoided. In
bfloat16 and float16 that kernel is slow where a key head's queries come one by one; there they are folded: they stand
below each other, as if they were tokens of one block (``benchmarks/attention_kernels.py``).
Registered through transformers' own attention interface and switched on only while this library runs a forward: the
model is left as it was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .architecture import Architecture

_NAME = "specflow_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, Hq, T, D]
    key: torch.Tensor,  # [B, Hkv, L, D]
    value: torch.Tensor,  # [B, Hkv, L, Dv]
    attention_mask: torch.Tensor | None,  # [B, 1, T, L] boolean
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, T, Hq, Dv] attention output; grouped queries share their keys and values without a copy on CPUs."""
    special = any(kwargs.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if attention_mask is None or special or query.device.type != "cpu" or query.shape[1] == key.shape[1]:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if query.dtype.itemsize >= 4:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous(), None
    return folded_sdpa(query, key, value, attention_mask, dropout, scaling), None


def folded_sdpa(
    query: torch.Tensor,  # [B, Hq, T, D]
    key: torch.Tensor,  # [B, Hkv, L, D]
    value: torch.Tensor,  # [B, Hkv, L, Dv]
    attention_mask: torch.Tensor,  # [B, 1, T, L] boolean
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor:
    """[B, T, Hq, Dv] attention output, with the queries of a key head below each other."""
    rows, heads, width = query.shape[:3]
    shared = heads // key.shape[1]
    folded = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], shared * width, -1), key, value,
        attn_mask=attention_mask.repeat(1, 1, shared, 1), dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    unfolded = folded.view(rows, key.shape[1], shared, width, -1).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(rows, width, heads, -1)


AttentionInterface.register(_NAME, grouped_sdpa)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def block_attention(model: PreTrainedModel, architecture: Architecture) -> Iterator[None]:
    """Use :func:`grouped_sdpa` in place of SDPA while a block is run."""
    if not architecture.switches_attention:
        yield
        return
    config = model.config.get_text_config(decoder=True)
    previous = config._attn_implementation  # noqa: SLF001 - the public setter rebuilds kernels and walks all modules
    config._attn_implementation_internal = _NAME  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation_internal = previous  # noqa: SLF001
