"""What followed the same words earlier in the text: a bias on a drafter's logits.

A small drafter knows the language, not the text it is in: names, numbers, terms and turns of phrase that the target
takes up again. A cache model (Kuhn and De Mori 1990, "A cache-based natural language model for speech recognition";
Jelinek et al. 1991, "A dynamic language model for speech recognition", for n-grams) knows nothing else. Here the two
are one law: a token that followed the last m tokens somewhere in the text before gets a bias on its logit that grows
with m, its *order*. Unlike the drafts of :class:`~specflow_llm.drafters.ngram.NGramDrafter` this works at every place
of a draft and beside what the drafter itself expects there.

The biases are fitted when a drafter's training ends (:mod:`specflow_llm.training.context`) and lie in its config. A
drafter that copies by itself gets small ones.

The law that tokens are drawn from is whatever stands here, so this is as exact as any drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .base import DraftRequest, RowId
from .suffix_automaton import SuffixAutomaton

_MOST_EXTRA = 1024
"""Most ids per request that are added to a restricted draft vocabulary."""
_MOST_CONTINUATIONS = 64
"""Most continuations of one string that are looked at: those seen first most recently."""


class Place(NamedTuple):
    """Where in the text the end of a history or of a draft occurred before."""

    state: int
    """Of the automaton."""
    length: int
    """Tokens of the suffix that occurred; 0 for none."""


@dataclass(frozen=True, slots=True)
class Continuations:
    """What followed a place before, each token once, with the length of the longest suffix that it followed."""

    columns: Sequence[int]
    """Of the logits."""
    orders: Sequence[int]


@dataclass(slots=True)
class Context:
    """One request's text."""

    automaton: SuffixAutomaton
    extra: list[int] = field(default_factory=list)
    """Ids of the text that are not in the draft vocabulary: their logits stand behind its columns, in this order."""
    columns: dict[int, int] = field(default_factory=dict)
    """Of those ids."""

    @property
    def start(self) -> Place:
        """The place of the history's end."""
        match = self.automaton.match
        return Place(match.state, match.length)

    def follow(self, place: Place, token: int) -> Place:
        """The place after one more token, drafted or committed."""
        return Place(*self.automaton.read(place.state, place.length, token))

    def after(self, place: Place) -> Iterator[tuple[int, int]]:
        """Tokens that followed a place before, each once, with their orders: how much of the place they followed."""
        return self.automaton.continuations(place.state, place.length, _MOST_CONTINUATIONS)


class ContextBias:
    """Biases the logits of one drafter by what every request's own text says.

    Args:
        biases: in logits, for orders 1, 2, ...; empty switches it off.
        vocab_size: ``V``, the target's.
        ids: the draft vocabulary, in the order of the logits' columns; None for all ids.
        extends: ids of the text that cannot be drafted get columns behind those that can, see :attr:`Context.extra`.
    """

    def __init__(
        self, biases: Sequence[float], *, vocab_size: int, ids: torch.Tensor | None, extends: bool = False
    ) -> None:
        self._biases = (0.0, *biases)
        self._size = vocab_size if ids is None else len(ids)
        self._columns: list[int] | None = None
        if ids is not None:
            self._columns = [-1] * vocab_size
            for column, token in enumerate(ids.tolist()):
                self._columns[token] = column
        self._extends = extends and ids is not None
        self._contexts: dict[RowId, Context] = {}
        self._unread = Context(SuffixAutomaton(1))

    @property
    def biases(self) -> tuple[float, ...]:
        """As given."""
        return self._biases[1:]

    @property
    def max_order(self) -> int:
        """The longest suffix that is told apart; 0 where it is switched off."""
        return len(self._biases) - 1

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of the requests' automata."""
        return sum(context.automaton.num_bytes for context in self._contexts.values())

    def read(self, request: DraftRequest) -> Context:
        """A request's text with all committed tokens read."""
        if not self.max_order:
            return self._unread
        context = self._contexts.get(request.row)
        if context is None:
            context = self._contexts[request.row] = Context(SuffixAutomaton(self.max_order))
        fresh = request.token_ids[len(context.automaton.tokens) :]
        context.automaton.extend_many(fresh)
        self._extend(context, fresh)
        return context

    def release(self, row: RowId) -> None:
        """Forget a request's text."""
        self._contexts.pop(row, None)

    def continuations(self, context: Context, place: Place) -> Continuations:
        """What followed a place before, as far as it has columns."""
        orders: list[int] = []
        columns: list[int] = []
        for token, order in context.after(place):
            column = token if self._columns is None else self._columns[token]
            if column < 0:
                column = context.columns.get(token, -1)
            if column >= 0:
                orders.append(order)
                columns.append(column)
        return Continuations(columns, orders)

    def apply(self, logits: torch.Tensor, rows: Sequence[Continuations]) -> None:
        """Add the biases, in place.

        Args:
            logits: [N, C] fp32, the draft vocabulary's columns and those of the texts' other ids.
            rows: N, what followed the place of each row.
        """
        places: list[int] = []
        columns: list[int] = []
        values: list[float] = []
        for row, found in enumerate(rows):
            places += [row] * len(found.columns)
            columns += found.columns
            values += [self._biases[order] for order in found.orders]
        if values:
            device = logits.device
            where = torch.tensor([places, columns]).to(device, non_blocking=True)
            logits.index_put_((where[0], where[1]), torch.tensor(values).to(device), accumulate=True)

    def _extend(self, context: Context, tokens: Iterable[int]) -> None:
        if not self._extends or self._columns is None:
            return
        for token in tokens:
            if self._columns[token] < 0 and token not in context.columns and len(context.extra) < _MOST_EXTRA:
                context.columns[token] = self._size + len(context.extra)
                context.extra.append(token)
