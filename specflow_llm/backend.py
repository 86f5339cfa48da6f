"""Decoding as a block loop: implements :class:`specflow.protocols.ChainBackend` for token sequences.

Invariant at the top of a round, for every row: the target holds positions 0..n-2 of the n committed ids; the last id
(the anchor) is committed but not yet run. A round runs anchor + admitted drafts, accepts a path (of a chain, a prefix),
appends one more token, and commits as many positions as tokens were emitted. Ids, target state, features, text,
log-probabilities and figures move in :meth:`DecodingBackend.commit` and nowhere else; randomness is keyed by absolute
position, so it has nothing to roll back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specflow.errors import BackendContractError
from specflow.trees import HISTORY, chain, continuations, height
from specflow.types import AcceptPrefix, Admission, ChainId, ChainView, Draft

from .config import SamplingParams
from .drafters.base import BranchingDrafter, Drafter, DraftRequest, Proposal, RowId
from .drafters.growing import check_shape
from .features import FeatureRows
from .metrics import MetricsBuilder
from .sampling import RowSampler, TokenLogprob, top_logprobs
from .stopping import Mark, Stop, Stopper
from .target import Target, TargetOutput, TreeTarget
from .verification import verify_greedy, verify_row, verify_row_tree, verify_tree

_ESTIMATE_BYTES = 8  # survival estimates are Python floats


@dataclass(slots=True, kw_only=True)
class Row:
    """One request while it is decoded."""

    row_id: RowId
    params: SamplingParams
    token_ids: list[int]
    """Committed ids: prompt, then output."""
    num_prompt: int
    max_output: int
    """Most tokens this request may emit: ``max_tokens``, or what the context leaves."""
    sampler: RowSampler
    stopper: Stopper
    metrics: MetricsBuilder
    logprobs: list[TokenLogprob] = field(default_factory=list)
    features: FeatureRows = field(default_factory=lambda: FeatureRows(None))
    num_reported: int = 0
    """How many output tokens the engine has handed out."""
    stop: Stop | None = None
    failure: Exception | None = None
    """What the request's own code (a logits processor, a stopping criterion) raised; it is not decoded any further."""

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.num_prompt


class DecodingBackend:
    """Rows of one target model, drafted by one drafter.

    Args:
        target: the target model.
        drafter: None decodes plainly.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.rows: list[Row] = []
        """Live rows; row i owns the target's slot i."""
        self._target = target
        self._drafter = drafter
        self._trees: TreeTarget | None = None
        if isinstance(target, TreeTarget) and isinstance(drafter, BranchingDrafter):
            self._trees = target if target.runs_trees and drafter.branches else None
        self._drafts: Sequence[Draft[int]] = ()
        self._admission = Admission((), ())
        self._output: TargetOutput | None = None
        self._marks: list[Mark | None] = []
        self._emitted: list[list[int]] = []
        self._num_estimates = 0

    @property
    def target(self) -> Target:
        """The target model."""
        return self._target

    @property
    def pads_blocks(self) -> bool:
        """See :class:`specflow.protocols.PaddingBackend`."""
        return self._target.architecture.pads_blocks

    @property
    def drafter(self) -> Drafter | None:
        """The drafter."""
        return self._drafter

    @property
    def branches(self) -> bool:
        """Whether drafts of requests that are verified by matching may be trees."""
        return self._trees is not None

    def add(self, rows: Sequence[Row]) -> None:
        """Run the prompts of new rows (all but the last token) and let them take part in the next round."""
        for row in rows:
            before = self._target.num_forwards
            features = self._target.open([row.token_ids])[0]
            row.metrics.forwards += self._target.num_forwards - before
            row.features = FeatureRows(features)
            self.rows.append(row)

    def remove(self, row_id: RowId) -> Row:
        """Take a row out, finished or not, and free all its state.

        Raises:
            KeyError: no such row.
        """
        index = next((index for index, row in enumerate(self.rows) if row.row_id == row_id), None)
        if index is None:
            raise KeyError(row_id)
        row = self.rows[index]
        last = self.rows.pop()
        if index < len(self.rows):
            self.rows[index] = last
        self._target.close(index)
        if self._drafter is not None:
            self._drafter.release(row_id)
        return row

    def chains(self) -> Sequence[ChainView]:
        """See :class:`specflow.protocols.ChainBackend`."""
        drafting = self._drafter is not None
        return [
            ChainView(
                ChainId(row.row_id),
                len(row.token_ids),
                max(0, row.max_output - row.num_output - 1) if drafting and row.params.speculate else 0,
            )
            for row in self.rows
        ]

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """See :class:`specflow.protocols.ChainBackend`."""
        drafts: list[Draft[int]] = [Draft(())] * len(limits)
        wanted = [index for index, limit in enumerate(limits) if limit > 0]
        if wanted and self._drafter is not None:
            requests = [self._request(self.rows[index], limits[index]) for index in wanted]
            proposals = self._drafter.propose(requests)
            if len(proposals) != len(requests):
                raise BackendContractError(
                    f"drafter {self._drafter.name}",
                    f"returned {len(proposals)} proposals for {len(requests)} requests",
                    "return one per request",
                )
            for index, proposal in zip(wanted, proposals, strict=True):
                drafts[index] = self._draft(proposal, self.rows[index])
        return drafts

    def _may_branch(self, row: Row) -> bool:
        return self._trees is not None and row.sampler.matches

    def _request(self, row: Row, limit: int) -> DraftRequest:
        return DraftRequest(row.row_id, row.token_ids, limit, row.sampler, row.features.view(), self._may_branch(row))

    def _draft(self, proposal: Proposal, row: Row) -> Draft[int]:
        """A proposal as the loop takes it, if it is one."""
        name = f"drafter {self._drafter.name if self._drafter else ''}"
        if not isinstance(proposal, Proposal):
            raise BackendContractError(name, f"proposed {proposal!r}", "return a Proposal, Proposal([]) for no guess")
        try:
            token_ids = tuple(map(operator.index, proposal.token_ids))
        except TypeError:
            remedy = "tokens are ids of the vocabulary, integers"
            raise BackendContractError(name, f"proposed {list(proposal.token_ids)!r}", remedy) from None
        probs = proposal.probs
        if proposal.survival is not None and not all(map(math.isfinite, proposal.survival)):
            raise BackendContractError(
                name,
                f"estimates survival as {list(proposal.survival)!r}",
                "give probabilities, or None for no estimates; a trained drafter that does this has lost its weights",
            )
        expected = (len(token_ids), self._target.architecture.vocab_size)
        if self._drafter is not None:
            check_shape(self._drafter, proposal, may_branch=self._may_branch(row))
        if probs is not None and tuple(probs.shape) != expected:
            raise BackendContractError(
                name,
                f"gave probabilities of shape {tuple(probs.shape)} for {len(token_ids)} tokens",
                f"the tensor each token was sampled from must have shape {expected}",
            )
        return Draft(token_ids, proposal.survival, probs, proposal.parents)

    async def execute(self, drafts: Sequence[Draft[int]], admission: Admission) -> TargetOutput:
        """See :class:`specflow.protocols.ChainBackend`: one target forward for anchors and admitted drafts."""
        vocab = self._target.architecture.vocab_size
        blocks = []
        for row, draft, length in zip(self.rows, drafts, admission.lengths, strict=True):
            # Ids outside the vocabulary are rejected at verification; the model must not look them up.
            block = [token if 0 <= token < vocab else 0 for token in draft.values[:length]]
            blocks.append([row.token_ids[-1], *block])
        shapes = [_branching(draft, length) for draft, length in zip(drafts, admission.lengths, strict=True)]
        if self._trees is not None and any(shape is not None for shape in shapes):
            return self._trees.forward_trees(blocks, shapes)
        return self._target.forward(blocks)

    async def verify(
        self, drafts: Sequence[Draft[int]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[int]]:
        """See :class:`specflow.protocols.ChainBackend`.

        Stops are decided here, on tokens that are not committed yet: the user's code may raise, and then only its own
        request ends. :meth:`discard` takes the stoppers back to where they were.
        """
        if not isinstance(outcome, TargetOutput):
            raise BackendContractError("verify()", f"got {type(outcome).__name__}", "hand it what execute() returned")
        self._drafts, self._admission, self._output = drafts, admission, outcome
        self._marks = [row.stopper.mark() for row in self.rows]
        self._emitted = [[] for _ in self.rows]
        with torch.inference_mode():
            # One transfer for all greedy rows: the only host synchronisation of their round.
            trivial = any(row.sampler.is_trivial for row in self.rows)
            best = outcome.logits.float().argmax(dim=-1).tolist() if trivial else []
            return [self._settle(index, best) for index in range(len(self.rows))]

    def _settle(self, index: int, best: list[list[int]]) -> AcceptPrefix[int]:
        """Verify one row's draft and decide what it emits. A row whose own code raises emits nothing and is marked."""
        row, draft = self.rows[index], self._drafts[index]
        try:
            if row.sampler.is_sequential:
                return self._settle_one_by_one(index)
            verdict = self._verdict(index, best)
            path = range(verdict.num_accepted) if verdict.path is None else verdict.path
            tokens = [draft.values[item] for item in path]
            if verdict.replacement is not None:
                tokens.append(verdict.replacement)
            kept, row.stop = row.stopper.accept(tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the request, which hands it on
            self._rewind(index)
            row.failure = error
            self._emitted[index] = []
            return AcceptPrefix(0, None)
        self._emitted[index] = tokens[:kept]
        return verdict

    def _settle_one_by_one(self, index: int) -> AcceptPrefix[int]:
        """The same for a row with logits processors: they must see each emitted token once, none behind the stop."""
        row, output, emitted = self.rows[index], self._output, self._emitted[index]
        draft, length = self._drafts[index], self._admission.lengths[index]
        if output is None:
            return AcceptPrefix(0, None)
        following = continuations(_parents(draft, length))
        path: list[int] = []
        while True:
            node = path[-1] if path else HISTORY
            logits = output.logits[index, node + 1 : node + 2]
            chosen = verify_row(row.sampler, logits, [*row.token_ids, *emitted], ()).replacement
            if chosen is None:
                return _accepted(draft, path, None)
            _, row.stop = row.stopper.accept([chosen])
            emitted.append(chosen)
            item = next((item for item in following.get(node, ()) if draft.values[item] == chosen), None)
            if item is None:
                return _accepted(draft, path, chosen)
            path.append(item)
            if row.stop is not None:
                return _accepted(draft, path, None)

    def _verdict(self, index: int, best: list[list[int]]) -> AcceptPrefix[int]:
        row, draft, length = self.rows[index], self._drafts[index], self._admission.lengths[index]
        tokens = draft.values[:length]
        if row.sampler.is_trivial:
            if draft.parents is None:
                return verify_greedy(best[index][: length + 1], tokens)
            return verify_tree(lambda node, _: best[index][node + 1], tokens, draft.parents[:length])
        output = self._output
        logits = output.logits[index, : length + 1] if output is not None else torch.empty(0)
        if draft.parents is not None:
            return verify_row_tree(row.sampler, logits, row.token_ids, tokens, draft.parents[:length])
        probs = draft.payload[:length] if isinstance(draft.payload, torch.Tensor) else None
        return verify_row(row.sampler, logits, row.token_ids, tokens, probs, self._admission.anticipated[index])

    async def commit(self, verdicts: Sequence[AcceptPrefix[int]]) -> Sequence[Sequence[int]]:
        """See :class:`specflow.protocols.ChainBackend`: every part of a row's state moves here, together."""
        emitted = [self._commit_row(index, verdict) for index, verdict in enumerate(verdicts)]
        self._num_estimates = sum(len(draft.survival) for draft in self._drafts if draft.survival is not None)
        self.discard()
        return emitted

    def _commit_row(self, index: int, verdict: AcceptPrefix[int]) -> list[int]:
        row, draft, tokens = self.rows[index], self._drafts[index], self._emitted[index]
        kept, output = len(tokens), self._output
        # The places of the block that the emitted tokens were chosen at: the anchor's, then those of the accepted path.
        places = list(range(kept)) if verdict.path is None else [0, *[item + 1 for item in verdict.path]][:kept]
        in_order = places == list(range(kept))
        # What needs memory comes first: if it fails, this row has not moved, and discard() takes its stopper back.
        logprobs: list[TokenLogprob] = []
        if output is not None and row.params.logprobs is not None:
            rows = output.logits[index, :kept] if in_order else output.logits[index, places]
            logprobs = top_logprobs(rows, tokens, row.params.logprobs)
        if self._trees is not None and not in_order:
            self._trees.arrange(index, places)
        if output is not None and output.features is not None:
            row.features.append(output.features[index, :kept] if in_order else output.features[index, places])
        self._marks[index] = None
        row.token_ids.extend(tokens)
        self._target.keep(index, kept)
        row.logprobs.extend(logprobs)
        slot_forwards = None if output is None else output.slot_forwards
        row.metrics.add_counts(
            drafted=len(draft.values),
            admitted=self._admission.lengths[index],
            accepted=min(verdict.num_accepted, kept),
            emitted=kept,
            reached=None if draft.parents is None else height(draft.parents[: self._admission.lengths[index]]),
            forwards=1 if slot_forwards is None else slot_forwards[index],
        )
        return tokens

    def _rewind(self, index: int) -> None:
        """Take a row back to the top of the round, unless it was committed."""
        mark = self._marks[index]
        if mark is not None:
            row = self.rows[index]
            row.stopper.rewind(mark)
            row.stop, row.failure = None, None

    def discard(self) -> None:
        """See :class:`specflow.protocols.ChainBackend`. Before commit, stoppers are all that was touched."""
        for index in range(len(self._marks)):
            self._rewind(index)
        self._drafts, self._admission, self._output = (), Admission((), ()), None
        self._marks, self._emitted = [], []

    def state_bytes(self) -> dict[str, int]:
        """Bytes held, by kind of state."""
        held = {"draft_weights": 0, "draft_kv": 0, **self._target.state_bytes()}
        held["hidden_states"] = sum(row.features.num_bytes for row in self.rows)
        held["confidences"] = self._num_estimates * _ESTIMATE_BYTES if self.rows else 0
        if self._drafter is not None:
            held.update(self._drafter.state_bytes())
        return held


def _branching(draft: Draft[int], length: int) -> Sequence[int] | None:
    """The shape of a draft's first items; None where they are a chain."""
    shape = _parents(draft, length)
    return None if list(shape) == list(chain(length)) else shape


def _parents(draft: Draft[int], length: int) -> Sequence[int]:
    return chain(length) if draft.parents is None else draft.parents[:length]


def _accepted(draft: Draft[int], path: Sequence[int], replacement: int | None) -> AcceptPrefix[int]:
    return AcceptPrefix(len(path), replacement, None if draft.parents is None else tuple(path))
