"""The block drafter: a parallel backbone over the target's features, with serial heads on top.

DSpark (arXiv:2607.05147, section 3); with the heads off it is DFlash. Only what is trained lives here: embedding and
output head are the target's own (:mod:`.adapter`).

Letters in shapes: B sequences, S context positions, A blocks, K slots of a block, D hidden size, F features, V target
vocabulary, Vd draft vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .config import DSparkConfig
from .heads import ConfidenceHead, build_markov_head
from .layers import BlockLayer, KeyValue, RMSNorm, Rotary

KeyValueJoin = Callable[[int, KeyValue], KeyValue]
"""(layer, keys and values of the block) -> keys and values for attention, [B, Hkv, L, E] each."""


class DSparkModel(nn.Module):
    """Fusion of target features, backbone layers, Markov head and confidence head.

    Args:
        config: sizes and conventions.
        draft_ids: [Vd] target ids in the order of the draft vocabulary; required exactly where the config has one.
    """

    draft_ids: torch.Tensor | None

    def __init__(self, config: DSparkConfig, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.rotary = Rotary(config)
        if config.draft_vocab_size is not None and draft_ids is None:
            draft_ids = torch.arange(config.draft_vocab_size)  # replaced when a checkpoint is loaded
        self.register_buffer("draft_ids", draft_ids)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("markov_head", "confidence_head")):
                nn.init.normal_(parameter, std=0.02)
        for layer in self._layers:
            # Residual branches start small, so that the block's embeddings reach the head at first.
            nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02 / (2 * len(self.layers)) ** 0.5)
            nn.init.normal_(layer.mlp.down_proj.weight, std=0.02 / (2 * len(self.layers)) ** 0.5)

    @property
    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features of target layers -> what every layer injects; [..., F] -> [..., D] (DSpark, equation 2)."""
        fused: torch.Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return fused

    def context(self, fused: torch.Tensor, positions: torch.Tensor) -> list[KeyValue]:
        """Keys and values of context positions, per layer.

        Args:
            fused: [B, S, D].
            positions: [B, S] absolute positions of those tokens.
        """
        angles = self.rotary(positions, fused.dtype)
        return [layer.self_attn.key_value(fused, angles) for layer in self._layers]

    def block(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        join: KeyValueJoin,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the backbone over blocks.

        Args:
            embedded: [B, Q, D] the target's embeddings of anchors and masks.
            positions: [B, Q] absolute positions of the slots.
            join: ``(layer, block's keys and values) -> context's and block's`` for each layer in turn.
            mask: boolean [B, 1, Q, L] over what is gathered; None where everything is visible.

        Returns:
            [B, Q, D] hidden states after the final norm.
        """
        states = embedded.to(self.norm.weight.dtype)
        angles = self.rotary(positions, states.dtype)
        for index, layer in enumerate(self._layers):
            normed = layer.input_layernorm(states)
            key_value = join(index, layer.self_attn.key_value(normed, angles))
            states = layer.finish(states, normed, angles, key_value, mask)
        hidden: torch.Tensor = self.norm(states)
        return hidden

    def forward(
        self, features: torch.Tensor, anchors: torch.Tensor, embedded: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of many blocks per sequence at once, for training.

        Args:
            features: [B, S, F] of whole sequences, padded at the end.
            anchors: [B, A] positions of anchors; -1 for blocks that only pad.
            embedded: [B, A, K, D] embeddings of anchors and masks; K may differ from the config's.
            lengths: [B] real positions of each sequence.

        Returns:
            [B, A, K, D]; rows of padding blocks mean nothing.
        """
        batch, blocks = anchors.shape
        slots = embedded.shape[2]
        size = features.shape[1]
        places = torch.arange(size, device=features.device)
        context = self.context(self.fuse(features), places.expand(batch, size))
        positions = anchors.clamp(min=0).unsqueeze(-1) + torch.arange(slots, device=features.device)
        mask = block_mask(anchors, size, slots, lengths, self.config.sliding_window)
        hidden = self.block(embedded.flatten(1, 2), positions.flatten(1), concatenated(context), mask.unsqueeze(1))
        unfolded: torch.Tensor = hidden.unflatten(1, (blocks, slots))
        return unfolded

    def previous(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """[...] ids of the tokens before each slot -> [..., r] for both heads; None without a Markov head."""
        if self.markov_head is None:
            return None
        embedded: torch.Tensor = self.markov_head.previous(token_ids)
        return embedded


def concatenated(context: Sequence[KeyValue]) -> KeyValueJoin:
    """Joins by copying: the context's keys and values per layer in front of the block's."""

    def join(layer: int, block: KeyValue) -> KeyValue:
        keys, values = context[layer]
        return torch.cat([keys, block[0]], dim=2), torch.cat([values, block[1]], dim=2)

    return join


def block_mask(
    anchors: torch.Tensor, size: int, slots: int, lengths: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """What each slot sees: context strictly before its block's anchor, and its own block in both directions.

    The anchor's own features are not there when drafting (the target has not run it), so they are not seen in
    training either. Padding blocks see themselves only.

    Args:
        anchors: [B, A] positions; -1 for padding blocks.
        size: S, context positions.
        slots: K, slots per block.
        lengths: [B] real context positions.
        window: context positions seen, counted back from the anchor.

    Returns:
        boolean [B, A * K, S + A * K].
    """
    batch, blocks = anchors.shape
    places = torch.arange(size, device=anchors.device)
    seen = (places < anchors.unsqueeze(-1)) & (places < lengths[:, None, None])
    if window is not None:
        seen &= places >= anchors.unsqueeze(-1) - window
    own = torch.eye(blocks, dtype=torch.bool, device=anchors.device).expand(batch, blocks, blocks)
    rows = torch.cat([seen, own.repeat_interleave(slots, dim=2)], dim=2)
    return rows.repeat_interleave(slots, dim=1)


def parameter_count(model: nn.Module) -> int:
    """Trained numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
