"""What a drafter borrows from its target: embedding, output head and how hidden states become logits.

One adapter for all families: it uses the target's own modules and checks itself against the target's own logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..errors import DrafterError
from ..packing import PackedLinear

_CHECKED_TOKENS = 8
_TOLERANCE = 2e-2
"""Relative; low-precision targets round their logits."""


def target_name(model: PreTrainedModel) -> str:
    """Where a target was loaded from, or its class."""
    return str(model.config.name_or_path or type(model).__name__)


class TargetAdapter:
    """Embedding and head of a target, frozen and shared, never copied into a drafter's checkpoint.

    Args:
        model: the target, in evaluation mode.

    Raises:
        DrafterError: the target has no output head, or its logits are not the head's of its last hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        self.name = target_name(model)
        self.config = config
        self.model = model
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self._embedding: nn.Module = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if head is None:
            raise DrafterError(type(model).__name__, "the target has no output head", "use a causal language model")
        self._head: nn.Module = head
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        # Families that scale in their embedding module (Gemma) have no such field.
        self._embedding_scale = float(getattr(config, "embedding_multiplier", None) or 1.0)
        self._check()

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The target's floating type."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def head_module(self) -> nn.Module:
        """The target's output head."""
        return self._head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] ids -> [..., D], scaled as the target scales them."""
        embedded: torch.Tensor = self._embedding(token_ids)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def head_rows(self, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output head's weight [n, D] and bias [n], for these ids or all of them, detached."""
        weight, bias = self._head_weight(), self._head_bias()
        if weight is None:
            packed: Any = self._head.weight
            weight = packed.to_dense()
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return weight.detach(), bias

    def _head_weight(self) -> torch.Tensor | None:
        """[V, D] in the plain layout; None where the head is packed and has no tied embedding, which never is."""
        weight: Any = self._head.weight
        if not isinstance(self._head, PackedLinear):
            return torch.as_tensor(weight)
        embedding: Any = self._embedding.weight
        tied = bool(getattr(self.config, "tie_word_embeddings", False)) and embedding.shape[0] == self.vocab_size
        return torch.as_tensor(embedding) if tied else None

    def _head_bias(self) -> torch.Tensor | None:
        bias: Any = getattr(self._head, "bias", None)
        return None if bias is None else torch.as_tensor(bias).detach()

    def rows_at_hand(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """:meth:`head_rows` of all ids where that copies nothing; None where the head's weight had to be unpacked."""
        weight = self._head_weight()
        return None if weight is None else (weight.detach(), self._head_bias())

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to its head's output: scale and soft cap, in float32."""
        logits = logits.float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] hidden states after the final norm -> [..., V] fp32 logits."""
        return self.finish(self._head(hidden.to(self.dtype)))

    @torch.inference_mode()
    def last_hidden(self, token_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, S] ids -> [B, S, D] hidden states after the final norm, without the head's cost."""
        decoder: Any = self.model.get_decoder()
        hidden: torch.Tensor = decoder(
            input_ids=token_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return hidden

    @torch.inference_mode()
    def _check(self) -> None:
        """Teacher and head must agree with the model: a hidden state taken before the norm would train for nothing."""
        ids = torch.arange(_CHECKED_TOKENS, device=self.device).remainder(self.vocab_size)[None]
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        found = self.logits(self.last_hidden(ids))
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())
        ):
            raise DrafterError(
                type(self.model).__name__,
                "its logits are not its output head's of its last hidden states, so a drafter cannot share the head",
                "use another drafter for it ('ngram', or a smaller model)",
            )

    def head(self, ids: torch.Tensor | None) -> DraftHead:
        """An output head for these ids, or for all."""
        return DraftHead(self, ids)


class DraftHead:
    """The target's output head, restricted to the ids that can be drafted.

    Args:
        adapter: the target.
        ids: [Vd] the ids, in column order; None for the whole vocabulary.
    """

    def __init__(self, adapter: TargetAdapter, ids: torch.Tensor | None) -> None:
        self._adapter = adapter
        self.weight, self.bias = adapter.head_rows(ids)
        self._module: nn.Module | None = None
        if ids is None:
            self._module = adapter.head_module

    def pack(self) -> None:
        """Move to the layout in which a few rows are cheap on a CPU; for drafting only, gradients do not pass."""
        if self._module is None:
            linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None, device="meta")
            linear.weight = nn.Parameter(self.weight, requires_grad=False)
            if self.bias is not None:
                linear.bias = nn.Parameter(self.bias, requires_grad=False)
            self._module = PackedLinear(linear)

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., Vd], before scale and soft cap; gradients pass to ``hidden`` unless packed."""
        if self._module is not None and not torch.is_grad_enabled():
            output: torch.Tensor = self._module(hidden.to(self._adapter.dtype))
            return output
        return functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] hidden states after the drafter's final norm -> [..., Vd] fp32 logits."""
        return self._adapter.finish(self.raw(hidden))
