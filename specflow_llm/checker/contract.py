"""The protocol's rules for proposals, checked on every proposal of every run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from specflow.trees import shape_problem

from ..drafters.base import DraftRequest, Proposal
from ..sampling import RowSampler

SUM_TOLERANCE = 1e-4
"""How far the probabilities of a row may be from adding up to 1."""

ROUNDING = 1e-6
"""How far estimates computed in single precision may be off."""

ANNOUNCES = "gives_probs announces probabilities"
"""The one rule about all proposals of a run together: some must carry probabilities, or none may."""


@dataclass(slots=True)
class ContractLog:
    """Counts violations and keeps the first example of each kind."""

    proposals: int = 0
    tokens: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    """Rule -> how often it was broken."""
    examples: dict[str, str] = field(default_factory=dict)
    """Rule -> its first violation."""
    gave_probs: bool = False
    """Some proposal carried probabilities, as announced."""

    def note(self, rule: str, example: str) -> None:
        """Record a violation."""
        self.violations[rule] = self.violations.get(rule, 0) + 1
        self.examples.setdefault(rule, example)

    def judge_batch(self, requests: Sequence[DraftRequest], before: Sequence[tuple[int, ...]], returned: int) -> None:
        """Check what concerns a whole call: one proposal per request, and no request's tokens were changed."""
        if returned != len(requests):
            self.note("one proposal per request", f"{returned} proposals for {len(requests)} requests")
        for request, tokens in zip(requests, before, strict=True):
            if tuple(request.token_ids) != tokens:
                changed = f"row {request.row}: {len(tokens)} ids became {len(request.token_ids)}"
                self.note("token_ids are read-only", changed)

    def judge(self, request: DraftRequest, proposal: Proposal, *, gives_probs: bool) -> Proposal:
        """Check one proposal and return the part of it that keeps the contract."""
        self.proposals += 1
        self.tokens += len(proposal.token_ids)
        if gives_probs and proposal.probs is not None and not self.gave_probs:
            # A drafter with several sources may propose looked-up tokens as well as sampled ones.
            self.gave_probs = True
            self.violations.pop(ANNOUNCES, None)
            self.examples.pop(ANNOUNCES, None)
        for rule, example in _violations(request, proposal, gives_probs=gives_probs):
            if rule != ANNOUNCES or not self.gave_probs:
                self.note(rule, example)
        return _legal(request, proposal)


def _violations(request: DraftRequest, proposal: Proposal, *, gives_probs: bool) -> Iterator[tuple[str, str]]:
    tokens, vocab_size = proposal.token_ids, request.sampler.vocab_size
    if len(tokens) > request.limit:
        yield "at most `limit` tokens", f"{len(tokens)} tokens where {request.limit} were allowed"
    strange = [token for token in tokens if not isinstance(token, int) or isinstance(token, bool)]
    if strange:
        yield "ids are plain integers", f"a {type(strange[0]).__name__}; use int(...) or .tolist()"
    outside = [token for token in tokens if isinstance(token, int) and not 0 <= token < vocab_size]
    if outside:
        yield "ids of the target's vocabulary", f"token {outside[0]} with a vocabulary of {vocab_size}"
    if proposal.survival is not None:
        yield from _survival_violations(proposal.survival, len(tokens))
    if proposal.parents is not None:
        yield from _shape_violations(request, proposal.parents, len(tokens))
    if proposal.probs is not None:
        if not gives_probs:
            yield ANNOUNCES, "probabilities came from a drafter that says gives_probs=False"
        yield from _probs_violations(proposal.probs, tokens, request.sampler)
    elif gives_probs and len(tokens) > 0 and request.sampler.rule in {"token", "block"}:
        yield ANNOUNCES, "no probabilities for a sampled request, although gives_probs=True"


def _shape_violations(request: DraftRequest, parents: Sequence[int], count: int) -> Iterator[tuple[str, str]]:
    if not request.may_branch:
        yield "trees only where they may be", "a tree for a request that allows none; look at may_branch"
    problem = shape_problem(parents, count)
    if problem is not None:
        yield "a parent before every token of a tree", problem


def _survival_violations(survival: Sequence[float], count: int) -> Iterator[tuple[str, str]]:
    if len(survival) != count:
        yield "one survival estimate per token", f"{len(survival)} estimates for {count} tokens"
    wrong = [value for value in survival if not -ROUNDING <= value <= 1.0 + ROUNDING]
    if wrong:
        yield "survival is a probability", f"an estimate of {wrong[0]}"
    for earlier, later in itertools.pairwise(survival):
        if later > earlier + ROUNDING:
            yield "survival never rises", f"{later:.6g} after {earlier:.6g}"
            return


def _probs_violations(probs: torch.Tensor, tokens: Sequence[int], sampler: RowSampler) -> Iterator[tuple[str, str]]:
    expected = (len(tokens), sampler.vocab_size)
    if tuple(probs.shape) != expected:
        yield "probs is [K, V]", f"shape {tuple(probs.shape)} where {expected} was due"
        return
    if not len(tokens):
        return
    if not bool((probs >= 0.0).all()):
        yield "probabilities are not negative", f"smallest entry {float(probs.amin()):.3g}"
    furthest = float((probs.double().sum(-1) - 1.0).abs().amax())
    if not furthest <= SUM_TOLERANCE:
        yield "probabilities of a row add up to 1", f"a row is off by {furthest:.3g}"
    for index, token in enumerate(tokens):
        if _is_id(token, sampler.vocab_size) and not float(probs[index, token]) > 0.0:
            yield "a drawn token has a positive probability", f"token {token} at index {index} has probability 0"
            return


def _is_id(token: int, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size


def _legal(request: DraftRequest, proposal: Proposal) -> Proposal:
    """The part of a proposal that the engine can take: cut to the limit, without estimates or laws of a wrong shape."""
    count = min(len(proposal.token_ids), request.limit)
    parents = proposal.parents
    if parents is not None:
        fits = request.may_branch and shape_problem(parents, len(proposal.token_ids)) is None
        count = count if fits else 0  # nobody can tell what continues what
        parents = parents[:count] if count else None
    probs, survival = proposal.probs, proposal.survival
    if probs is not None:
        fits = tuple(probs.shape) == (len(proposal.token_ids), request.sampler.vocab_size)
        probs = probs[:count] if fits else None
    if survival is not None:
        usable = len(survival) == len(proposal.token_ids) and not any(math.isnan(value) for value in survival)
        if parents is not None:  # the engine takes a tree's items for sorted
            usable &= not any(later > before + ROUNDING for before, later in itertools.pairwise(survival))
        survival = survival[:count] if usable else None
    tokens = list(proposal.token_ids)[:count]
    return replace(proposal, token_ids=tokens, probs=probs, survival=survival, parents=parents)
