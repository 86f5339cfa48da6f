"""The serial heads: what the tokens drafted so far say about the next one, and whether it will be accepted.

Letters in shapes: N any leading sizes, K slots, D hidden size, r Markov rank, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from .config import DSparkConfig


class MarkovHead(nn.Module, ABC):
    """Adds to slot k's logits a bias that depends on the token before it (DSpark, equation 5).

    The bias is ``W2 z`` with ``z`` of rank r; the kinds differ in how they make ``z`` from the previous token's
    embedding ``W1[x]`` and the slot's hidden state.

    Args:
        config: sizes.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.previous = nn.Embedding(config.vocab_size, config.markov_rank)
        self.output = nn.Linear(config.markov_rank, config.head_size, bias=False)
        # The bias starts at zero because W1 does, so that tokens never met in training never bias anything.
        nn.init.zeros_(self.previous.weight)
        nn.init.normal_(self.output.weight, std=config.markov_rank**-0.5)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the first step starts from: hidden is [N, D]."""
        del hidden
        return None

    @abstractmethod
    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One slot: ([N, r] embedded previous tokens, [N, D] hidden) -> ([N, r] z, state for the next slot)."""

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All slots, teacher forced: ([N, K, r], [N, K, D]) -> [N, K, r] z."""
        state = self.initial_state(hidden[..., 0, :])
        rows = []
        for slot in range(hidden.shape[-2]):
            row, state = self.step(previous[..., slot, :], hidden[..., slot, :], state)
            rows.append(row)
        return torch.stack(rows, dim=-2)


class VanillaMarkovHead(MarkovHead):
    """First order: z is the previous token's embedding."""

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`MarkovHead`."""
        del hidden
        return previous, state

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`MarkovHead`; no loop is needed."""
        del hidden
        return previous


class GatedMarkovHead(MarkovHead):
    """z is the embedding behind a gate that the slot's hidden state opens."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`MarkovHead`."""
        return self.forward(previous, hidden), state

    def forward(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`MarkovHead`; no loop is needed."""
        gated: torch.Tensor = torch.sigmoid(self.gate(torch.cat([hidden, previous], dim=-1))) * previous
        return gated


class RnnMarkovHead(MarkovHead):
    """A small recurrent cell carries all tokens drafted so far, not only the last."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.rank = config.markov_rank
        self.cell = nn.Linear(config.hidden_size + 2 * config.markov_rank, 3 * config.markov_rank)
        nn.init.zeros_(self.output.weight)  # z depends on the hidden state, too: it is not zero at the start

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros, [N, r]."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`MarkovHead`."""
        before = self.initial_state(hidden) if state is None else state
        gate, candidate, output = self.cell(torch.cat([before, previous, hidden], dim=-1)).chunk(3, dim=-1)
        opened = torch.sigmoid(gate)
        after = opened * before + (1.0 - opened) * torch.tanh(candidate)
        return torch.tanh(output), after


class ConfidenceHead(nn.Module):
    """The logit of P(the token of this slot is accepted | those before it were) (DSpark, section 3.2).

    It sees the slot's hidden state and the token before it, never the slot's own token: scheduling by it stays exact.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_previous = config.confidence_with_markov and config.previous_size > 0
        width = config.hidden_size + (config.previous_size if self.with_previous else 0)
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """([..., D] hidden, [..., r] embedded previous tokens) -> [...] logits."""
        inputs = hidden
        if self.with_previous and previous is not None:
            inputs = torch.cat([hidden, previous], dim=-1)
        logits: torch.Tensor = self.linear(inputs)
        return logits.squeeze(-1)


_KINDS: dict[str, type[MarkovHead]] = {
    "vanilla": VanillaMarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


def build_markov_head(config: DSparkConfig) -> MarkovHead | None:
    """The head a config asks for; None for ``markov="none"``."""
    return None if config.markov == "none" else _KINDS[config.markov](config)
