"""Transformer layers of the drafter: target-style, with the target's features injected as keys and values.

Letters in shapes: B sequences, Q queries, S context positions, D hidden size, H heads, Hkv key-value heads, E head
size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .config import DSparkConfig

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [B, Hkv, L, E] each."""
Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary angles, [B, L, E] each."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return functional.rms_norm(inputs.float(), inputs.shape[-1:], self.weight.float(), self.eps).to(inputs.dtype)


class Rotary:
    """Rotary angles for absolute positions, always computed in float32.

    A cast of the drafter to bfloat16 must not round the frequencies: acceptance would fall with position.
    """

    def __init__(self, config: DSparkConfig) -> None:
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.head_dim * config.num_heads,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope),
            )
        )
        self._frequencies: torch.Tensor = rotary.inv_freq.float().clone()
        self._scaling = float(rotary.attention_scaling)

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """[B, L] positions -> angles."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.float().unsqueeze(-1) * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(states: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Turn [B, H, L, E] states by their positions' angles (Su et al. 2021, in the half-split form of Llama)."""
    cos, sin = angles[0].unsqueeze(1), angles[1].unsqueeze(1)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class BlockAttention(nn.Module):
    """Queries come from the block only; keys and values from the injected context and the block (DFlash, DSpark 3.1).

    The context passes through this layer's key and value projections, not through its input norm or MLP.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(size, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, size, bias=False)
        self.q_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else nn.Identity()
        self._grouped = config.num_heads != config.num_kv_heads

    def key_value(self, inputs: torch.Tensor, angles: Angles) -> KeyValue:
        """[B, L, D] context features or block states -> their keys and values."""
        keys = self.k_norm(self._split(self.k_proj(inputs)))
        return rotate(keys, angles), self._split(self.v_proj(inputs))

    def forward(
        self, states: torch.Tensor, angles: Angles, key_value: KeyValue, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend from the block to everything handed in.

        Args:
            states: [B, Q, D] normalised block states.
            angles: of the block's positions.
            key_value: context and block together, [B, Hkv, L, E].
            mask: boolean [B, 1, Q, L], true where visible; None where everything is.

        Returns:
            [B, Q, D].
        """
        queries = rotate(self.q_norm(self._split(self.q_proj(states))), angles)
        keys, values = key_value
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=self._grouped
        )
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return split


class GatedMLP(nn.Module):
    """SwiGLU and its relatives (Shazeer 2020)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.activation]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        output: torch.Tensor = self.down_proj(self.activation(self.gate_proj(inputs)) * self.up_proj(inputs))
        return output


class BlockLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def finish(
        self,
        states: torch.Tensor,
        normed: torch.Tensor,
        angles: Angles,
        key_value: KeyValue,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention and MLP with their residuals, once keys and values are gathered; [B, Q, D] -> [B, Q, D]."""
        states = states + self.self_attn(normed, angles, key_value, mask)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output
