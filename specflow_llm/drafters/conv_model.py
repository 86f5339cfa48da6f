"""A very light model: causal depthwise-separable convolutions over the last few tokens, with a state of fixed size.

A layer mixes a few positions per channel (depthwise, causal) and then channels per position (pointwise), the gated form
of Dauphin et al. 2017, "Language modeling with gated convolutional networks", with the depthwise-separable convolution
of Kaiser et al. 2018, "Depthwise separable convolutions for neural machine translation". What a layer needs of the past
are its last ``kernel_size - 1`` inputs, so a token costs the same at any length of text, and a prompt no more than its
last ``receptive_field`` tokens.

Letters in shapes: B requests, T tokens, V target vocabulary, Vd draft vocabulary, E embedding, D hidden size, L layers,
W kernel width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specflow.errors import InvalidSettingError

from ..dspark import TargetAdapter
from ..dspark.config import checked_biases
from ..dspark.layers import RMSNorm
from ..errors import DrafterError

_SHORT = 32
"""Up to so many tokens, sums over a sliding view cost less than a convolution's call (measured: 10 us against 75)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """Sizes of a :class:`ConvModel`.

    Raises:
        InvalidSettingError: a size cannot work; the message names it.
    """

    target: str = ""
    """Name of the target model, for messages."""
    vocab_size: int
    """V, the target's."""
    hidden_size: int = 256
    """D."""
    num_layers: int = 4
    """L."""
    kernel_size: int = 6
    """W, tokens that one layer looks at, the newest included."""
    embedding_size: int = 96
    """E: of the model's own embedding, or, where the target's is shared, of the target it was made for."""
    draft_vocab_size: int | None = None
    """Vd: how many ids can be drafted; None for all of the target's. The output head is most of a step's cost."""
    block_size: int = 7
    """Tokens per round for which training tells acceptance. Drafts may be shorter or longer."""
    context_bias: tuple[float, ...] = ()
    """Added when drafting to the logit of a token that followed the last 1, 2, ... tokens earlier in the request's text
    (:mod:`.context_bias`); empty: nothing."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "embedding_size", "block_size"):
            if not _is_count(getattr(self, name)):
                raise InvalidSettingError(name, getattr(self, name), "an integer >= 1")
        if not _is_count(self.kernel_size, 2):
            raise InvalidSettingError("kernel_size", self.kernel_size, "an integer >= 2: 1 would see no past")
        size = self.draft_vocab_size
        if size is not None and not (_is_count(size) and size <= self.vocab_size):
            raise InvalidSettingError("draft_vocab_size", size, f"None or an integer in [1, {self.vocab_size}]")
        object.__setattr__(self, "context_bias", checked_biases(self.context_bias))

    @property
    def receptive_field(self) -> int:
        """Tokens that a prediction depends on."""
        return self.num_layers * (self.kernel_size - 1) + 1

    @property
    def head_size(self) -> int:
        """Vd: columns of the logits."""
        return self.draft_vocab_size or self.vocab_size

    def with_(self, **changes: Any) -> ConvConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "context_bias": list(self.context_bias)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConvConfig:
        """Read :meth:`to_dict` back.

        Raises:
            InvalidSettingError: a field is unknown or absent, or has a value that cannot work.
        """
        known = {entry.name for entry in fields(cls)}
        if set(values) - known or "vocab_size" not in values:
            raise InvalidSettingError("drafter config", sorted(values), f"vocab_size and {', '.join(sorted(known))}")
        return cls(**values)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class SharedTables:
    """The target's embedding and head. They stay the target's: not trained, not saved, not counted."""

    embedding: torch.Tensor
    """[V, E]."""
    head: torch.Tensor
    """[V, E]; the same tensor where the target ties them."""
    bias: torch.Tensor | None = None
    """[V] the head's."""
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the target does to its head's output (scale, soft cap)."""

    @classmethod
    def of(cls, adapter: TargetAdapter) -> SharedTables:
        """A target's own."""
        embedding: Any = adapter.model.get_input_embeddings()
        head, bias = adapter.head_rows()
        return cls(embedding.weight, head, bias, adapter.finish)


class ConvModel(nn.Module):
    """Predicts the next token from the last ``receptive_field`` ones.

    Either the target's frozen embedding and head are shared, or a small embedding of its own serves as both.

    Args:
        config: its sizes.
        shared: the target's tables.
        draft_ids: [Vd] target ids in the order of the draft vocabulary; used where the config has one, by default the
            lowest ones.

    Raises:
        DrafterError: the target's tables or the draft vocabulary do not fit the config.
    """

    embedding: torch.Tensor
    head: torch.Tensor | None
    """[Vd, E] the target's rows; None with tables of its own."""
    head_bias: torch.Tensor | None
    draft_ids: torch.Tensor | None

    def __init__(
        self, config: ConvConfig, shared: SharedTables | None = None, draft_ids: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", _checked_ids(config, draft_ids))
        self._finish = None if shared is None else shared.finish
        if shared is None:
            self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.embedding_size) * 0.05)
            self.head = None
            self.head_bias = nn.Parameter(torch.zeros(config.head_size))
        else:
            self._share(shared)
        self.enter = nn.Linear(self.embedding.shape[1], config.hidden_size, bias=False)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, 1e-6)
        self.leave = nn.Linear(config.hidden_size, self.table.shape[1], bias=False)

    def _share(self, shared: SharedTables) -> None:
        for name, table in (("embedding", shared.embedding), ("head", shared.head)):
            if table.dim() != 2 or table.shape[0] != self.config.vocab_size:
                raise DrafterError(
                    "conv",
                    f"the target's {name} has shape {tuple(table.shape)} for a vocabulary of {self.config.vocab_size}",
                    "set vocab_size to the target's",
                )
        head, bias, ids = shared.head.detach(), shared.bias, self.draft_ids
        if ids is not None:
            head, bias = head[ids.to(head.device)], None if bias is None else bias[ids.to(bias.device)]
        # Not persistent: a checkpoint holds only what was trained.
        self.register_buffer("embedding", shared.embedding.detach(), persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("head_bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def table(self) -> torch.Tensor:
        """[Vd, E] rows of the output head."""
        if self.head is not None:
            return self.head
        return self.embedding if self.draft_ids is None else self.embedding[self.draft_ids]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] ids from the beginning of a text -> [B, T, Vd] logits of the token after each."""
        hidden, _ = self.extend(self.empty_state(token_ids.shape[0]), token_ids)
        return self.logits(hidden)

    def step(self, state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One more token: ([L, B, W - 1, D] state, [B] ids) -> ([B, Vd] logits, the state behind it)."""
        hidden, state = self.extend(state, token[:, None])
        return self.logits(hidden[:, 0]), state

    def empty_state(self, batch_size: int) -> torch.Tensor:
        """[L, B, W - 1, D] the state before the first token."""
        config = self.config
        weight = self.enter.weight
        return weight.new_zeros(config.num_layers, batch_size, config.kernel_size - 1, config.hidden_size)

    def extend(
        self, state: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens. Nothing is changed in place, so an old state can be gone back to by keeping it.

        Args:
            state: [L, B, W - 1, D] behind the tokens read before.
            token_ids: [B, T] the next ones.
            lengths: [B] how many of them count; what pads a row's end is not seen by what is before it, and the state
                stands before it. None where all count.

        Returns:
            ([B, T, D] final hidden states, the state behind the last token that counts).
        """
        hidden = self.enter(F.embedding(token_ids, self.embedding).to(self.enter.weight.dtype))
        places = None
        if lengths is not None:  # of a row's last W - 1 inputs, among the W - 1 old ones and the T new ones
            places = lengths[:, None] + torch.arange(self.config.kernel_size - 1, device=hidden.device)
            places = places[..., None].expand(-1, -1, self.config.hidden_size)
        after = []
        for layer, before in zip(self.layers, state.unbind(), strict=True):
            hidden, kept = layer(hidden, before, places)
            after.append(kept)
        return self.norm(hidden), torch.stack(after)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] final hidden states -> [..., E], what the output head reads."""
        left: torch.Tensor = self.leave(hidden)
        return left

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] final hidden states -> [..., Vd] logits."""
        table = self.table
        bias = None if self.head_bias is None else self.head_bias.to(table.dtype)
        return self.finish(F.linear(self.outputs(hidden).to(table.dtype), table, bias))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to its head's output."""
        return logits if self._finish is None else self._finish(logits)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the weights, the target's tables left out."""
        return sum(weight.numel() * weight.element_size() for weight in self.parameters())


def _checked_ids(config: ConvConfig, ids: torch.Tensor | None) -> torch.Tensor | None:
    size = config.draft_vocab_size
    if size is None:
        if ids is not None:
            raise DrafterError(
                "conv", "it got a draft vocabulary that its config does not have", "set draft_vocab_size"
            )
        return None
    if ids is None:
        return torch.arange(size)
    if ids.shape != (size,) or len(ids.unique()) != size or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise DrafterError(
            "conv",
            f"its draft vocabulary is not {size} different ids of a vocabulary of {config.vocab_size}",
            "check that config and weights belong together",
        )
    return ids.to(torch.int64)


class _Layer(nn.Module):
    """x + out(silu(depthwise(value)) * gate), with value and gate from the normalised input."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm = RMSNorm(size, 1e-6)
        self.spread = nn.Linear(size, 2 * size, bias=False)
        self.depthwise = nn.Conv1d(size, size, config.kernel_size, groups=size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))
        self.out = nn.Linear(size, size, bias=False)

    def forward(
        self, hidden: torch.Tensor, before: torch.Tensor, places: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a few positions, then channels.

        Args:
            hidden: [B, T, D].
            before: [B, W - 1, D] earlier inputs of the convolution.
            places: [B, W - 1, D] which inputs to keep, of the W - 1 + T there are; None keeps the last ones.

        Returns:
            ([B, T, D], [B, W - 1, D] the inputs kept).
        """
        value, gate = self.spread(self.norm(hidden)).chunk(2, dim=-1)
        inputs = torch.cat([before, value], dim=1)
        weight = self.depthwise.weight
        if hidden.shape[1] <= _SHORT and not torch.is_grad_enabled():  # a draft: the same sums
            mixed = (inputs.unfold(1, weight.shape[2], 1) * weight[:, 0]).sum(-1)
        else:
            mixed = self.depthwise(inputs.transpose(1, 2)).transpose(1, 2)
        mixed = mixed + self.bias
        kept = inputs[:, inputs.shape[1] - before.shape[1] :] if places is None else inputs.gather(1, places)
        return hidden + self.out(F.silu(mixed) * gate), kept
