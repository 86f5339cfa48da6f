"""Fitting what a drafter gains from its request's own text (:mod:`specflow_llm.drafters.context_bias`).

Text that the drafter was not trained on says how much likelier a token is than the drafter thinks, where it followed
the same words before. The biases of all orders together maximise the likelihood of the tokens that came; the negative
logarithm of that is convex in them.

Letters in shapes: N slots, W continuations of a slot, M orders, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..drafters.context_bias import Context, ContextBias, Continuations
from ..drafters.suffix_automaton import SuffixAutomaton
from .batches import Batch

CONTEXT_BIAS = (1.0, 2.5, 4.0, 5.0, 6.0, 6.5)
"""Biases of a new drafter, until its own are fitted: between those that suit greedy and sampled requests of a drafter
trained for a few hours (``docs/log.md``, 2026-11-30)."""

_RIDGE = 1.0
"""A normal prior of unit width: an order that was hardly seen keeps its bias."""
_STEPS = 100


class ContextObservations:
    """What the logits of slots and their texts say about biases.

    Args:
        bias: as the drafter has it; its M biases are expected before anything is seen.
    """

    def __init__(self, bias: ContextBias) -> None:
        self._bias = bias
        self._logits: list[torch.Tensor] = []
        self._orders: list[torch.Tensor] = []
        self._rest: list[torch.Tensor] = []
        self._came: list[int] = []

    def __len__(self) -> int:
        """Slots that say something."""
        return len(self._came)

    def add(self, batch: Batch, pieces: Iterable[torch.Tensor], labels: torch.Tensor) -> None:
        """Add the supervised slots of a batch.

        Args:
            batch: their texts.
            pieces: their logits without any bias, [n, Vd] for some slots after the others; N in all.
            labels: [N] column of the token that came; slots of others, with -1, are left out.
        """
        found, came, begin = self._continuations(batch), labels.tolist(), 0
        for logits in pieces:
            part = range(begin, begin + len(logits))
            begin = part.stop
            slots = [slot for slot in part if found[slot].columns and came[slot] >= 0]
            if not slots:
                continue
            rows = logits[torch.tensor([slot - part.start for slot in slots], device=logits.device)].float()
            where = _padded([torch.tensor(found[slot].columns) for slot in slots], -1).to(rows.device)
            known = where >= 0
            inside = rows.gather(-1, where.clamp(min=0)).double().cpu()
            rest = rows.scatter(-1, torch.where(known, where, where[:, :1]), -torch.inf).logsumexp(-1)
            self._rest += rest.double().cpu()
            for number, slot in enumerate(slots):
                columns, orders = found[slot].columns, found[slot].orders
                self._logits.append(inside[number, : len(columns)].clone())
                self._orders.append(torch.tensor(orders))
                self._came.append(dict(zip(columns, orders, strict=True)).get(came[slot], 0))

    def _continuations(self, batch: Batch) -> list[Continuations]:
        """What followed each supervised slot's context before, in the order of the slots."""
        rows, blocks, offsets = batch.supervised.nonzero(as_tuple=True)
        ends = (batch.anchors[rows, blocks] + offsets + 1).tolist()  # tokens before the one that came
        by_row: dict[int, set[int]] = {}
        for row, end in zip(rows.tolist(), ends, strict=True):
            by_row.setdefault(row, set()).add(end)
        known: dict[tuple[int, int], Continuations] = {}
        for row, wanted in by_row.items():
            context = Context(SuffixAutomaton(self._bias.max_order))
            for end, token in enumerate(batch.token_ids[row, : max(wanted)].tolist(), start=1):
                context.automaton.extend(token)
                if end in wanted:
                    known[row, end] = self._bias.continuations(context, context.start)
        return [known[row, end] for row, end in zip(rows.tolist(), ends, strict=True)]

    def fit(self) -> tuple[float, ...]:
        """[M] the most likely biases; the prior's without observations."""
        if not self._came:
            return self._bias.biases
        prior = torch.tensor(self._bias.biases, dtype=torch.float64)
        none = torch.zeros(1, dtype=torch.float64)  # order 0 has no bias
        logits = _padded(self._logits, -torch.inf)
        orders = _padded(self._orders, 0)
        rest, came = torch.stack(self._rest), torch.tensor(self._came)
        free = prior.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([free], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            every = torch.cat((none, free))
            totals = torch.logaddexp(rest, (logits + every[orders]).logsumexp(-1))
            value = (totals - every[came]).sum() + 0.5 * _RIDGE * (free - prior).square().sum()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        return tuple(free.detach().tolist())


def _padded(rows: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill)
