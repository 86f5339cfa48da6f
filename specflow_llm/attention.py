"""Attention over blocks with an explicit mask, without copying keys and values per query head.

Transformers' SDPA path repeats keys and values for grouped queries whenever a mask is given. On CPUs the repetition
(the whole cache, every layer, every round) is avoided: queries that share a key head stand below each other, as if they
were tokens of one block. PyTorch's own ``enable_gqa`` does not repeat either, but reads every key once per query head:
in bfloat16, with one query per row, it takes 4 to 10 times as long.
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
    rows, heads, width = query.shape[:3]
    shared = heads // key.shape[1]
    mask = attention_mask.expand(rows, 1, width, -1).repeat(1, 1, shared, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], shared * width, -1),
        key, value, attn_mask=mask, dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    attended = attended.view(rows, key.shape[1], shared, width, -1)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, width, heads, -1).contiguous(), None


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
