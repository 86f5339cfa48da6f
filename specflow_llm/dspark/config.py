"""What a block drafter is made of: frozen, validated, and written beside its weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from specflow.errors import InvalidSettingError

from ..errors import require

MarkovKind = Literal["none", "vanilla", "gated", "rnn"]
Layout = Literal["anchor_predicts", "mask_predicts"]

MARKOV_KINDS: tuple[MarkovKind, ...] = ("none", "vanilla", "gated", "rnn")
LAYOUTS: tuple[Layout, ...] = ("anchor_predicts", "mask_predicts")
_MOST_ORDERS = 16
_LARGEST_BIAS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """Sizes and conventions of one drafter (DSpark, arXiv:2607.05147, section 3.1).

    DFlash is ``markov="none"`` and ``confidence=False``.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    # The target it was made for.
    target: str
    """Name of the target model, for messages."""
    vocab_size: int
    """V: ids the target's embedding knows."""
    hidden_size: int
    """D: width of the target's hidden states, embedding and output head, and of the drafter."""
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Decoder layers whose outputs the drafter reads, 0 the first, strictly increasing. The last layer is not
    allowed: libraries disagree on whether its output is the one before or after the final norm."""
    mask_token_id: int
    """Input of the slots after the anchor; a reserved id that never occurs in text."""

    # The backbone.
    block_size: int = 7
    """gamma: most tokens drafted at once."""
    layout: Layout = "anchor_predicts"
    """``anchor_predicts``: the block is the anchor and gamma - 1 masks, every slot predicts the token after it
    (DSpark). ``mask_predicts``: the anchor and gamma masks, the masks predict themselves (DFlash)."""
    num_layers: int = 2
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str = "silu"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary parameters as in transformers' ``config.rope_parameters``."""
    max_positions: int = 4096
    sliding_window: int | None = None
    """Context positions a block sees, counted back from its anchor; None for all."""

    # The heads.
    draft_vocab_size: int | None = None
    """Vd: how many ids can be drafted in any text; None for all of the target's."""
    markov: MarkovKind = "vanilla"
    markov_rank: int = 128
    markov_top_k: int = 0
    """Correct only this many of the likeliest base logits when drafting; 0 corrects all."""
    confidence: bool = True
    confidence_with_markov: bool = True

    context_bias: tuple[float, ...] = ()
    """Added when drafting to the logit of a token that followed the last 1, 2, ... tokens earlier in the request's text
    (:mod:`specflow_llm.drafters.context_bias`); empty: nothing. Not part of the paper."""

    def __post_init__(self) -> None:
        """Validate every field."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_target_layers",
            "block_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
        ):
            require(_is_count(getattr(self, name), 1), name, getattr(self, name), "an integer >= 1")
        ids = self.target_layer_ids
        object.__setattr__(self, "target_layer_ids", tuple(ids))
        increasing = all(first < second for first, second in itertools.pairwise(ids))
        require(bool(ids) and increasing, "target_layer_ids", ids, "layer numbers in strictly rising order")
        require(
            ids[0] >= 0 and ids[-1] < self.num_target_layers - 1,
            "target_layer_ids",
            ids,
            f"layers 0..{self.num_target_layers - 2} of the target; its last layer is left out because libraries "
            "disagree on whether that output is taken before or after the final norm",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"an id of the target's vocabulary, 0 to {self.vocab_size - 1}",
        )
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, "a divisor of num_heads")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, for rotary positions")
        for name in ("qk_norm", "confidence", "confidence_with_markov"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(self.layout in LAYOUTS, "layout", self.layout, f"one of {LAYOUTS}")
        require(self.markov in MARKOV_KINDS, "markov", self.markov, f"one of {MARKOV_KINDS}")
        rank = "an integer >= 1 (markov='none' switches the head off)"
        require(self.markov == "none" or _is_count(self.markov_rank, 1), "markov_rank", self.markov_rank, rank)
        require(_is_count(self.markov_top_k, 0), "markov_top_k", self.markov_top_k, "an integer >= 0")
        size = self.draft_vocab_size
        require(
            size is None or (_is_count(size, 1) and size <= self.vocab_size),
            "draft_vocab_size",
            size,
            f"None or an integer in [1, {self.vocab_size}]",
        )
        window = self.sliding_window
        require(window is None or _is_count(window, 1), "sliding_window", window, "None or an integer >= 1")
        object.__setattr__(self, "rope", dict(self.rope))
        object.__setattr__(self, "context_bias", checked_biases(self.context_bias))

    @property
    def feature_size(self) -> int:
        """F: width of the features the target hands over."""
        return self.hidden_size * len(self.target_layer_ids)

    @property
    def num_slots(self) -> int:
        """Tokens a block is made of."""
        return self.block_size + self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 0 if self.layout == "anchor_predicts" else 1

    @property
    def head_size(self) -> int:
        """Vd: columns of the drafter's logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def previous_size(self) -> int:
        """Width of the Markov head's embedding of the previous token; 0 without one."""
        return 0 if self.markov == "none" else self.markov_rank

    def with_(self, **changes: Any) -> DSparkConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **asdict(self),
            "target_layer_ids": list(self.target_layer_ids),
            "rope": dict(self.rope),
            "context_bias": list(self.context_bias),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DSparkConfig:
        """Read :meth:`to_dict` back.

        Raises:
            InvalidSettingError: a field is unknown or absent, or has a value that cannot work.
        """
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(values) - known)
        require(not unknown, "drafter config", unknown, f"no fields but {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidSettingError("drafter config", sorted(values), f"all required fields ({error})") from error


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers spread evenly over the target, from the second to the third last (DSpark, appendix B).

    >>> spread_layers(36, 5)
    (1, 9, 17, 25, 33)
    """
    first = max(0, min(1, num_target_layers - 2))
    last = max(first, num_target_layers - 3)
    if count == 1:
        return (last,)
    ids = [round(first + index * (last - first) / (count - 1)) for index in range(count)]
    return tuple(dict.fromkeys(ids))


def checked_biases(biases: object) -> tuple[float, ...]:
    """Context biases of a config, as plain numbers.

    Raises:
        InvalidSettingError: it is no list of so many numbers, or one is out of range.
    """
    numbers: list[Any] = list(biases) if isinstance(biases, (list, tuple)) else [None]
    fits = all(
        isinstance(bias, (int, float)) and not isinstance(bias, bool) and abs(bias) <= _LARGEST_BIAS for bias in numbers
    )
    wanted = (
        f"a list of at most {_MOST_ORDERS} numbers from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, for tokens that followed "
        "the last 1, 2, ... tokens"
    )
    require(len(numbers) <= _MOST_ORDERS and fits, "context_bias", biases, wanted)
    return tuple(map(float, numbers))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


__all__ = ["LAYOUTS", "MARKOV_KINDS", "DSparkConfig", "Layout", "MarkovKind", "checked_biases", "spread_layers"]
