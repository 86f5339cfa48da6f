"""DSpark and DFlash at work: a block drafted in one backbone pass, tokens chosen one after the other by the heads.

What the drafter keeps of a request are the keys and values of *committed* tokens' features. Drafted tokens never get
there: the block's own keys and values are written behind the committed ones and overwritten by the next block, so
rolling back is doing nothing.

Letters in shapes: R requests, K slots of a block, G drafted tokens (gamma), D hidden size, F features, V target
vocabulary, Vd draft vocabulary, C columns (Vd and the ids that requests' texts add), r Markov rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from specflow.trees import HISTORY

from ..calibration import CalibrationTable
from ..dspark import DSparkModel, TargetAdapter
from ..dspark.checkpoint import check_fits
from ..dspark.layers import KeyValue
from ..dspark.layouts import load_for_target
from ..errors import DrafterError
from ..kv_cache import SlotCache
from ..packing import can_pack, pack_linears, weight_bytes
from .base import DrafterBase, DraftRequest, Proposal, RowId
from .context_bias import Context, ContextBias, Place
from .growing import ALTERNATIVES, LEAST_SURVIVAL, GrowingTree, Tip
from .slots import SlotOrder, runs
from .survival import HitTable, confidence_bucket, confidence_prior

_TRUST = {True: 1.0, False: 0.9}
"""What a drafted alternative's probability is worth, greedily or not: the shipped drafter's came true so often
(docs/log.md)."""

_POOL = {True: (0.4, 0.3, 0.4), False: (0.5, 0.0, 0.3)}
"""Weights of three log-odds in those of acceptance, greedily or not: the confidence head's, and the likeliest token's
without and with the biases (a logarithmic opinion pool: Genest and Zidek 1986, section 3). The head is trained on how
much two laws overlap; whether their likeliest tokens agree, the drafter's own law says better. Fitted to the shipped
drafter (docs/log.md)."""

_MOST_CERTAIN = 0.99
"""Probabilities count as at most this, and at least what is left of 1, before their log-odds are pooled."""


class DSparkDrafter(DrafterBase):
    """Drafts with a trained :class:`~specflow_llm.dspark.DSparkModel`.

    Logits are biased by what followed the same words earlier in the request's text (:mod:`.context_bias`), as far as
    its config says. The first 1024 ids that occur there but not in the draft vocabulary can then be drafted too, unless
    the target's head is packed and not tied to its embedding.

    Confidences pool its confidence head's answer with the probability of the likeliest token, and are corrected by a
    calibration table if it has one; without a head they are learned from how often drafts of that top probability were
    accepted.

    Args:
        model: the drafter's weights; they are moved to the target's device and type.
        adapter: the target.
        calibration: scales for the pooled logits, by kind of request and position.
        name: for logs and metrics.
        pack: move layers on CPUs to a layout in which short blocks are cheap.

    Raises:
        CheckpointError: the drafter was made for a target of other sizes.
    """

    gives_probs = True
    branches = True

    def __init__(
        self,
        model: DSparkModel,
        adapter: TargetAdapter,
        *,
        calibration: CalibrationTable | None = None,
        name: str = "dspark",
        pack: bool = True,
    ) -> None:
        check_fits(model.config, adapter, name)
        self.config = model.config
        self.feature_layers = model.config.target_layer_ids
        self._name = name
        self._adapter = adapter
        self._model = model.to(device=adapter.device, dtype=adapter.dtype).eval()
        self._ids: torch.Tensor | None = model.draft_ids
        self._id_list: list[int] | None = None if self._ids is None else self._ids.tolist()
        self._head = adapter.head(self._ids)
        self._weight_bytes = weight_bytes(model)
        head = model.markov_head
        # Single rows are read where only some logits are corrected; a packed weight has none.
        self._markov_rows = head.output.weight.detach() if head is not None and model.config.markov_top_k else None
        if pack and can_pack(model):
            pack_linears(model)
            self._head.pack()
        self._cache = SlotCache(model.config.num_layers, max_capacity=model.config.max_positions)
        self._order = SlotOrder()
        self._pending: dict[RowId, _Pending] = {}
        self._hits = HitTable(confidence_prior)
        self._calibration = calibration
        self._rows = adapter.rows_at_hand()
        self._bias = ContextBias(
            model.config.context_bias,
            vocab_size=adapter.vocab_size,
            ids=self._ids,
            extends=self._rows is not None,
        )

    @classmethod
    def load(
        cls, folder: str | Path, adapter: TargetAdapter, *, name: str | None = None, tokenizer: Any = None
    ) -> DSparkDrafter:
        """A drafter from its folder, of any layout in :mod:`specflow_llm.dspark.layouts`, with its calibration.

        Raises:
            CheckpointError: the folder holds no drafter for this target.
        """
        place = Path(folder)
        model = load_for_target(place, adapter, tokenizer=tokenizer)
        table = CalibrationTable.load(place, num_positions=model.config.block_size)
        return cls(model, adapter, calibration=table, name=name or place.name)

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self._name

    @property
    def num_positions(self) -> int:
        """Most tokens drafted at once behind each other."""
        return self.config.block_size

    @property
    def calibration(self) -> CalibrationTable | None:
        """The table in use; None for raw confidences."""
        return self._calibration

    def use_calibration(self, table: CalibrationTable | None) -> None:
        """Correct confidences by this table from now on; None goes back to raw ones."""
        self._calibration = table

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Draft for all requests together: one backbone pass, then one cheap step per token."""
        self._learn(requests)
        proposals = [Proposal([]) for _ in requests]
        limits = [self._limit(request) for request in requests]
        active = [index for index, limit in enumerate(limits) if limit > 0]
        if not active:
            return proposals
        chosen = [requests[index] for index in active]
        self._absorb(chosen)
        hidden = self._backbone(chosen)
        chains = [place for place, request in enumerate(chosen) if not request.may_branch]
        trees = [place for place, request in enumerate(chosen) if request.may_branch]
        for places, draft in ((chains, self._chains), (trees, self._trees)):
            if places:
                asked = [self._asked(chosen[place], limits[active[place]]) for place in places]
                found = draft(asked, hidden if len(places) == len(chosen) else hidden[places])
                for place, proposal in zip(places, found, strict=True):
                    proposals[active[place]] = proposal
        return proposals

    def release(self, row: RowId) -> None:
        """See :class:`specflow_llm.drafters.base.Drafter`."""
        self._pending.pop(row, None)
        self._bias.release(row)
        slot = self._order.remove(row)
        if slot is not None:
            self._cache.move_row(len(self._order), slot)

    def state_bytes(self) -> Mapping[str, int]:
        """Weights, the context's keys and values, and the texts' automata; embedding and head are the target's."""
        return {
            "draft_weights": self._weight_bytes,
            "draft_kv": self._cache.allocated_bytes,
            "draft_context": self._bias.num_bytes,
        }

    def _limit(self, request: DraftRequest) -> int:
        room = self.config.max_positions - self.config.num_slots - len(request.token_ids) + 1
        if room < 0 or len(request.token_ids) < 2:
            return 0
        return request.limit if request.may_branch else min(request.limit, self.config.block_size)

    # --- State: what is committed -------------------------------------------------------------------------------------

    def _absorb(self, requests: Sequence[DraftRequest]) -> None:
        """Bring every request's keys and values up to its committed features."""
        pieces: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        spans: list[tuple[int, int]] = []
        for request in requests:
            slot = self._slot(request)
            held, features = self._cache.lengths[slot], request.features
            wanted = len(request.token_ids) - 1
            if features is None or features.shape != (wanted, self.config.feature_size):
                raise DrafterError(
                    self._name,
                    f"it got features of shape {None if features is None else tuple(features.shape)} for {wanted} "
                    f"executed tokens",
                    f"hand over [{wanted}, {self.config.feature_size}] outputs of target layers {self.feature_layers}",
                )
            if wanted > held:
                pieces.append(features[held:])
                places.append(torch.arange(held, wanted, device=features.device))
                spans.append((slot, wanted - held))
        if not pieces:
            return
        fused = self._model.fuse(torch.cat(pieces)[None])
        layers = self._model.context(fused, torch.cat(places)[None])
        begin = 0
        for slot, count in spans:
            part = slice(begin, begin + count)
            self._cache.begin(slot, [count], fused.device)
            for layer, (keys, values) in zip(self._cache.layers, layers, strict=True):
                layer.update(keys[:, :, part], values[:, :, part])
            self._cache.advance(slot, count)
            begin += count

    def _slot(self, request: DraftRequest) -> int:
        if request.row not in self._order:
            self._cache.reserve_rows(len(self._order) + 1)
            slot = self._order.add(request.row)
            self._cache.clear_row(slot)
        return self._order.slot(request.row)

    # --- Drafting -----------------------------------------------------------------------------------------------------

    def _backbone(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        """[R, G, D] hidden states of the predicting slots, in the order of the requests."""
        by_slot = {self._order.slot(request.row): index for index, request in enumerate(requests)}
        rows: list[torch.Tensor] = [torch.empty(0)] * len(requests)
        for first, end in runs(sorted(by_slot)):
            anchors = [requests[by_slot[slot]].token_ids[-1] for slot in range(first, end)]
            hidden = self._block(first, anchors)
            for offset, slot in enumerate(range(first, end)):
                rows[by_slot[slot]] = hidden[offset]
        return torch.stack(rows)[:, self.config.first_slot :]

    def _block(self, first: int, anchors: Sequence[int]) -> torch.Tensor:
        """[R, K, D] for a run of slots."""
        config, device = self.config, self._adapter.device
        plan = self._cache.begin(first, [config.num_slots] * len(anchors), device)
        inputs = torch.full((len(anchors), config.num_slots), config.mask_token_id, dtype=torch.int64)
        inputs[:, 0] = torch.tensor(anchors)
        starts = torch.tensor(plan.starts)
        positions = (starts[:, None] + torch.arange(config.num_slots)).to(device, non_blocking=True)
        oldest = 0 if config.sliding_window is None else max(0, min(plan.starts) - config.sliding_window)
        mask = self._mask(plan.starts, oldest, plan.used)

        def join(layer: int, block: KeyValue) -> KeyValue:
            keys, values = self._cache.layers[layer].update(*block)
            return keys[:, :, oldest:], values[:, :, oldest:]

        embedded = self._adapter.embed(inputs.to(device, non_blocking=True))
        return self._model.block(embedded, positions, join, None if mask is None else mask.to(device))

    def _mask(self, starts: Sequence[int], oldest: int, used: int) -> torch.Tensor | None:
        """Boolean [R, 1, K, L]; None where every row sees all there is."""
        config = self.config
        if min(starts) == max(starts):
            return None
        keys = torch.arange(oldest, used)
        begins = torch.tensor(starts)[:, None]
        seen = keys < begins + config.num_slots
        if config.sliding_window is not None:
            seen &= keys >= begins - config.sliding_window
        return seen[:, None, None, :].expand(-1, 1, config.num_slots, -1)

    def _asked(self, request: DraftRequest, limit: int) -> _Asked:
        context = self._bias.read(request)
        vocabulary = self._ids
        if vocabulary is not None and context.extra:
            vocabulary = torch.cat((vocabulary, torch.tensor(context.extra, device=vocabulary.device)))
        return _Asked(request, limit, context, vocabulary)

    def _base(self, asked: Sequence[_Asked], hidden: torch.Tensor) -> torch.Tensor:
        """[R, G, D] -> [R, G, C] logits: the draft vocabulary's, then those of the ids that each request's text adds.

        Requests add different numbers of ids; columns that a request lacks are impossible.
        """
        base = self._head(hidden)
        width = max(len(entry.context.extra) for entry in asked)
        if not width or self._rows is None:
            return base
        more = base.new_full((*base.shape[:-1], width), -math.inf)
        weight, bias = self._rows
        for row, entry in enumerate(asked):
            if entry.vocabulary is not None and entry.context.extra:
                ids = entry.vocabulary[self.config.head_size :]
                states = hidden[row].to(weight.dtype)
                raw = functional.linear(states, weight[ids], None if bias is None else bias[ids])
                more[row, :, : len(ids)] = self._adapter.finish(raw)
        return torch.cat((base, more), dim=-1)

    def _chains(self, asked: Sequence[_Asked], hidden: torch.Tensor) -> Sequence[Proposal]:
        """A chain for each of these requests, up to its limit; hidden is [R, G, D]."""
        drafts = [_Draft(entry) for entry in asked]
        self._draft(drafts, hidden)
        if self._model.confidence_head is None:
            for draft in drafts:
                start = len(draft.request.token_ids)
                self._pending[draft.request.row] = _Pending(start, draft.tokens, draft.buckets)
        return [draft.proposal() for draft in drafts]

    def _draft(self, drafts: Sequence[_Draft], hidden: torch.Tensor) -> None:
        """Choose the tokens of every chain, slot by slot; hidden is [R, G, D]."""
        model, device = self._model, hidden.device
        base = self._base([draft.asked for draft in drafts], hidden)
        previous = torch.tensor([draft.request.token_ids[-1] for draft in drafts], device=device)
        state = None if model.markov_head is None else model.markov_head.initial_state(hidden[:, 0])
        for slot in range(max(draft.limit for draft in drafts)):
            logits, embedded = base[:, slot], model.previous(previous)  # written to: no slot is read twice
            if model.markov_head is not None and embedded is not None:
                serial, state = model.markov_head.step(embedded, hidden[:, slot], state)
                self._correct(logits, serial)
            sure = None if model.confidence_head is None else model.confidence_head(hidden[:, slot], embedded).float()
            before = None if sure is None else _top_log_odds(logits)
            self._add_bias(logits, [(draft.asked, draft.place) for draft in drafts])
            if sure is not None and before is not None:
                after = _top_log_odds(logits) if self._bias.max_order else before
                opinions = torch.stack((sure, before, after), dim=-1)
                for draft, logit in zip(drafts, self._pooled(drafts, opinions), strict=True):
                    draft.expect(self._probability(draft, slot, logit))
            chosen = self._choose(drafts, slot, logits)
            for draft, token in zip(drafts, chosen, strict=True):
                draft.place = draft.asked.context.follow(draft.place, token)
            previous = torch.tensor(chosen, device=device)

    def _add_bias(self, logits: torch.Tensor, places: Sequence[tuple[_Asked, Place]]) -> None:
        """Bias [N, C] logits in place by what followed each place in its request's text."""
        self._bias.apply(logits, [self._bias.continuations(entry.context, place) for entry, place in places])

    def _trees(self, asked: Sequence[_Asked], hidden: torch.Tensor) -> Sequence[Proposal]:
        """Grow a tree of the likeliest continuations for requests with their limits; hidden is [R, G, D].

        Slot by slot, all continuations that may still be among the best ``limit`` are followed: what continues an item
        promises less than the item does, so nothing is missed but alternatives beyond the first few. What a token
        promises is its probability: the confidence head speaks of the likeliest token only.
        """
        model, device = self._model, hidden.device
        base = self._base(asked, hidden)
        trees = [GrowingTree(entry.limit) for entry in asked]
        tips = [Tip(number, HISTORY, entry.request.token_ids[-1]) for number, entry in enumerate(asked)]
        places = [entry.context.start for entry in asked]
        state = None if model.markov_head is None else model.markov_head.initial_state(hidden[:, 0])
        for slot in range(hidden.shape[1]):
            rows = torch.tensor([tip.tree for tip in tips], device=device)
            here, logits = hidden[rows, slot], base[rows, slot]
            embedded = model.previous(torch.tensor([tip.token for tip in tips], device=device))
            if model.markov_head is not None and embedded is not None:
                serial, state = model.markov_head.step(embedded, here, state)
                self._correct(logits, serial)
            self._add_bias(logits, [(asked[tip.tree], place) for tip, place in zip(tips, places, strict=True)])
            options = self._alternatives(asked, trees, tips, slot, logits)
            for tip, (tokens, shares) in zip(tips, options, strict=True):
                trust = _TRUST[asked[tip.tree].request.sampler.is_greedy]
                trees[tip.tree].extend(tip.item, slot, tokens, [trust * share for share in shares])
            numbers = {(tip.tree, tip.item): number for number, tip in enumerate(tips)}
            following = [tip for number, tree in enumerate(trees) for tip in tree.tips(number, slot)]
            if not following:
                break
            parents = [numbers[tip.tree, trees[tip.tree].parents[tip.item]] for tip in following]
            if state is not None:
                state = state[torch.tensor(parents, device=device)]
            places = [
                asked[tip.tree].context.follow(places[parent], tip.token)
                for tip, parent in zip(following, parents, strict=True)
            ]
            tips = following
        return [tree.proposal() for tree in trees]

    def _alternatives(
        self,
        asked: Sequence[_Asked],
        trees: Sequence[GrowingTree],
        tips: Sequence[Tip],
        slot: int,
        logits: torch.Tensor,
    ) -> list[tuple[list[int], list[float]]]:
        """For every tip the likeliest next tokens and their shares; logits is [N, C]."""
        options: list[tuple[list[int], list[float]]] = [([], [])] * len(tips)
        greedy = [place for place, tip in enumerate(tips) if asked[tip.tree].request.sampler.is_trivial]
        if greedy:
            rows = logits if len(greedy) == len(tips) else logits[greedy]
            best = rows.topk(min(ALTERNATIVES, rows.shape[-1]), dim=-1)
            shares = (best.values - rows.logsumexp(-1, keepdim=True)).exp().tolist()
            for place, columns, found in zip(greedy, best.indices.tolist(), shares, strict=True):
                possible = sum(share > 0.0 for share in found)  # columns that pad come last
                options[place] = self._tokens(asked[tips[place].tree], columns[:possible]), found[:possible]
        noises: dict[int, torch.Tensor | None] = {}
        for place, tip in enumerate(tips):
            entry = asked[tip.tree]
            request = entry.request
            if request.sampler.is_trivial:
                continue
            if tip.tree not in noises:
                position = len(request.token_ids) + slot
                noises[tip.tree] = request.sampler.draft_noise(position, logits.device, entry.vocabulary)
            drafted = trees[tip.tree].path(tip.item)
            options[place] = request.sampler.alternatives(
                entry.own(logits[place]), request.token_ids, drafted, ALTERNATIVES, entry.vocabulary, noises[tip.tree]
            )
        return options

    def _tokens(self, entry: _Asked, columns: Sequence[int]) -> list[int]:
        """The ids of columns of a request's logits; impossible columns, which only pad, stand for id 0."""
        ids, extra = self._id_list, entry.context.extra
        if ids is None:
            return list(columns)
        known = len(ids)
        return [
            ids[column] if column < known else extra[column - known] if column - known < len(extra) else 0
            for column in columns
        ]

    def _correct(self, logits: torch.Tensor, serial: torch.Tensor) -> None:
        """Add the Markov bias to [R, C] logits in place: for all columns of the draft vocabulary, or the likeliest."""
        head = self._model.markov_head
        if head is None:
            return
        base = logits[:, : self.config.head_size]
        count = self.config.markov_top_k
        if self._markov_rows is None or not 0 < count < base.shape[-1]:
            base += head.output(serial).float()
            return
        best = base.topk(count, dim=-1)
        bias = torch.einsum("rkd,rd->rk", self._markov_rows[best.indices].float(), serial.float())
        # What is left out keeps its base logit: the law the token is drawn from is whatever stands here.
        base.scatter_add_(-1, best.indices, bias)

    def _choose(self, drafts: Sequence[_Draft], slot: int, logits: torch.Tensor) -> list[int]:
        """A token for every draft that is not finished; the others repeat theirs, unread."""
        greedy = [index for index, draft in enumerate(drafts) if draft.request.sampler.is_trivial]
        chosen = [0] * len(drafts)
        if greedy:
            rows = logits if len(greedy) == len(drafts) else logits[greedy]
            tops: list[float] = []
            if self._model.confidence_head is None:
                tops = (rows.amax(-1) - rows.logsumexp(-1)).exp().tolist()
            for place, (index, column) in enumerate(zip(greedy, rows.argmax(-1).tolist(), strict=True)):
                (chosen[index],) = self._tokens(drafts[index].asked, (column,))
                if slot < drafts[index].limit:
                    self._take(drafts[index], chosen[index], None, tops[place] if tops else 0.0)
        for index, draft in enumerate(drafts):
            if draft.request.sampler.is_trivial:
                continue
            if slot >= draft.limit:
                chosen[index] = draft.tokens[-1]
                continue
            history, entry = draft.request.token_ids, draft.asked
            token, probs, top = draft.request.sampler.draft(
                entry.own(logits[index]), history, draft.tokens, len(history) + len(draft.tokens), entry.vocabulary
            )
            chosen[index] = token
            self._take(draft, token, probs, top)
        return chosen

    def _take(self, draft: _Draft, token: int, probs: torch.Tensor | None, top: float) -> None:
        if self._model.confidence_head is None:
            bucket = confidence_bucket(top)
            draft.buckets.append(bucket)
            draft.expect(self._hits.rate(bucket))
        draft.tokens.append(token)
        if probs is not None:
            draft.probs.append(probs)

    def _pooled(self, drafts: Sequence[_Draft], opinions: torch.Tensor) -> list[float]:
        """[R, 3] log-odds as :data:`_POOL` has them -> one for each draft."""
        weights = opinions.new_tensor([_POOL[draft.request.sampler.is_greedy] for draft in drafts])
        return (opinions * weights).sum(-1).tolist()

    def _probability(self, draft: _Draft, slot: int, logit: float) -> float:
        """What the pooled log-odds say, corrected for the kind of request."""
        if self._calibration is not None:
            scales = self._calibration.scales_for(draft.request.sampler.is_greedy)
            if scales is not None:
                logit = scales[slot].apply(logit)
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))

    def _learn(self, requests: Sequence[DraftRequest]) -> None:
        """Without a confidence head: score the last proposals against what was committed since."""
        for request in requests:
            pending = self._pending.pop(request.row, None)
            if pending is None:
                continue
            self._hits.score(pending.tokens, pending.buckets, request.token_ids[pending.start :])


def _top_log_odds(logits: torch.Tensor) -> torch.Tensor:
    """[N, C] -> [N] log-odds of the likeliest column."""
    probs = (logits.amax(-1) - logits.logsumexp(-1)).exp()
    return probs.clamp(1.0 - _MOST_CERTAIN, _MOST_CERTAIN).logit()


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request in one round."""

    request: DraftRequest
    limit: int
    context: Context
    vocabulary: torch.Tensor | None
    """Ids of its columns; None where they are all ids."""

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """[C] -> its own columns, without those that pad."""
        return logits if self.vocabulary is None else logits[: len(self.vocabulary)]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A proposal whose fate is not known yet."""

    start: int
    """Length of the history it continued."""
    tokens: Sequence[int]
    buckets: Sequence[int]


class _Draft:
    """One request's draft while it grows."""

    __slots__ = ("asked", "buckets", "limit", "place", "probs", "request", "survival", "tokens")

    def __init__(self, asked: _Asked) -> None:
        self.asked = asked
        self.request = asked.request
        self.limit = asked.limit
        self.place = asked.context.start
        self.tokens: list[int] = []
        self.buckets: list[int] = []
        self.survival: list[float] = []
        self.probs: list[torch.Tensor] = []

    def expect(self, rate: float) -> None:
        """Extend the survival by the next token's acceptance probability, before that token is chosen."""
        if len(self.survival) < self.limit:
            before = self.survival[-1] if self.survival else 1.0
            self.survival.append(max(LEAST_SURVIVAL, before * rate))

    def proposal(self) -> Proposal:
        """The finished draft."""
        return Proposal(self.tokens, torch.stack(self.probs) if self.probs else None, tuple(self.survival))
