"""Several drafters for one target: each round and request takes the draft that promises the most accepted tokens.

**Why the choice cannot bias the output.** A draft without probabilities is verified by a rule that is exact for any way
of choosing its tokens (matching or one-hot), so everything about it may be looked at, and its value is the sum of all
its survival estimates. A draft *with* probabilities is verified by a ratio rule, which is exact only if its tokens
follow the stated law *given that it was chosen*. Its estimates for later tokens depend on earlier drawn ones, and so
may its length; a choice by either is a choice by the tokens themselves. What may decide is what was known before the
first token was drawn: its first estimate, and how far this source's drafts were accepted in earlier rounds. The
alternative, all estimates and no probabilities, accepts a drawn token x with the target's probability p(x) instead of
min(1, p(x) / q(x)), which costs far more than a better choice can gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from specflow.errors import BackendContractError, InvalidSettingError
from specflow.policies.acceptance import Calibration, Profile
from specflow.trees import chain, fate_of_tree, height, walk

from .base import BranchingDrafter, Drafter, DrafterBase, DraftRequest, Proposal, RowId
from .growing import check_shape, merged

NOTHING = Proposal(())

_POSITIONS = 16
"""Draft positions whose acceptance is learned apart; later ones share the last."""

_FLOAT_BYTES = 32
"""A float in a list: the object and the pointer to it."""


class CombinedDrafter(DrafterBase):
    """Asks several drafters, the cheapest first, and takes the most promising draft for each request, or all of them.

    A draft is worth the number of its tokens that are expected to be accepted, by its own survival estimates corrected
    by how often this drafter's claims came true, for this request and in general
    (:class:`~specflow.policies.acceptance.Calibration`). Where the tokens were sampled, only what was known before they
    were drawn takes part in the choice; see the module. Chosen drafts carry the corrected estimates.

    A drafter that costs something is asked only for the requests where the drafts at hand do not already promise more
    tokens per second than its usual result would. It must catch up by itself when it was passed over for some rounds,
    as the protocol demands anyway (:class:`~specflow_llm.drafters.base.DraftRequest`: tokens only ever grow).

    Where a request's draft may branch nothing has to be chosen: all drafts at hand are verified together, as one tree
    of their best tokens (:func:`~specflow_llm.drafters.growing.merged`). That holds if it holds for one drafter.

    ``gives_probs`` holds if it holds for one of the drafters, and nothing is lost by that: a looked-up token is
    accepted with its probability under the target, by the one-hot rule as well as by matching, while a sampled one is
    accepted more often by block verification. Where drafts are chains, a request without a seed then follows the
    target's law instead of repeating the plain run; seeded requests repeat it in any case.

    Args:
        drafters: two or more, the cheapest first. The first one is always asked.
        costs: for each drafter, the time to ask it as a share of a round without it; 0 means to ask always. By default
            0 for the first and 0.25 for the others.
        probe_every: a drafter whose worth could not be observed for so many rounds of a request is tried once.

    Raises:
        InvalidSettingError: fewer than two drafters, one of them twice, or an argument is out of range.
    """

    def __init__(self, *drafters: Drafter, costs: Sequence[float] | None = None, probe_every: int = 16) -> None:
        if len(drafters) < 2:
            raise InvalidSettingError("drafters", len(drafters), "at least two drafters to choose from")
        if len({id(drafter) for drafter in drafters}) < len(drafters):
            raise InvalidSettingError("drafters", [drafter.name for drafter in drafters], "every drafter once")
        if costs is None:
            costs = (0.0, *(0.25,) * (len(drafters) - 1))
        if len(costs) != len(drafters) or not all(cost >= 0.0 for cost in costs):
            raise InvalidSettingError("costs", costs, f"{len(drafters)} numbers >= 0, one per drafter")
        if probe_every < 1:
            raise InvalidSettingError("probe_every", probe_every, "an integer >= 1")
        self.feature_layers = sorted({layer for drafter in drafters for layer in drafter.feature_layers})
        self.gives_probs = any(drafter.gives_probs for drafter in drafters)
        self._name = "+".join(drafter.name for drafter in drafters)
        self._probe_every = probe_every
        self._sources = [
            _Source(drafter, cost, _columns(drafter.feature_layers, self.feature_layers), len(self.feature_layers))
            for drafter, cost in zip(drafters, costs, strict=True)
        ]
        self.branches = any(source.branches for source in self._sources)
        self._rows: dict[RowId, _Row] = {}
        self._chosen: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """The drafters' names, joined by a plus."""
        return self._name

    @property
    def num_chosen(self) -> Mapping[str, int]:
        """By drafter name, how many of its proposals were taken so far."""
        return self._chosen

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The most promising proposal for every request.

        Raises:
            BackendContractError: a drafter did not return one proposal per request.
        """
        cases = [_Case(request, self._row(request)) for request in requests if request.limit > 0]
        for number, source in enumerate(self._sources):
            asked = [case for case in cases if self._is_worth_asking(number, case)]
            if not asked:
                continue
            for case, proposal in zip(asked, source.ask([case.request for case in asked]), strict=True):
                case.offers.append(self._offer(number, case, proposal))
        chosen = {case.request.row: self._choose(case) for case in cases}
        return [chosen.get(request.row, NOTHING) for request in requests]

    def release(self, row: RowId) -> None:
        """Let every drafter forget a request, also where one of them raises."""
        self._rows.pop(row, None)
        with ExitStack() as stack:
            for source in self._sources:
                stack.callback(source.drafter.release, row)

    def state_bytes(self) -> Mapping[str, int]:
        """The drafters' state, summed by kind, and what was learned about each request."""
        held: Counter[str] = Counter()
        for source in self._sources:
            held.update(source.drafter.state_bytes())
        profiles = len(self._rows) * len(self._sources) * 3 * _POSITIONS * _FLOAT_BYTES
        offers = sum(len(offer.token_ids) for row in self._rows.values() for offer in row.offers)
        return {**held, "source_rates": profiles + 2 * offers * _FLOAT_BYTES}

    def _row(self, request: DraftRequest) -> _Row:
        """The request's state; the drafts of its last round are scored by what was committed since."""
        row = self._rows.get(request.row)
        if row is None:
            profiles = [Profile(_POSITIONS) for _ in self._sources]
            row = self._rows[request.row] = _Row(profiles, [0] * len(self._sources))
        offers, row.offers = row.offers, []
        if offers:
            committed = request.token_ids[row.position : row.position + _POSITIONS]
            # A round that failed is drafted again with the same noise: nothing may be learned from its tokens before.
            for offer in offers if committed else ():
                self._sources[offer.source].score(row.profiles[offer.source], offer, committed)
        return row

    def _is_worth_asking(self, number: int, case: _Case) -> bool:
        """Whether more tokens per second are to be expected with this drafter's draft than with those at hand."""
        source, row = self._sources[number], case.row
        if number == 0 or source.cost == 0.0 or row.unscored[number] >= self._probe_every:
            return True
        best = max(case.offers, key=lambda offer: offer.value)  # the first drafter's at least
        together = usual = source.usual_value(row.profiles[number], case.request.limit)
        if case.request.may_branch and best.survival:
            together = max(usual, best.value + (1.0 - best.survival[0]) * usual)
        return (1.0 + best.value) * (1.0 + source.cost) < 1.0 + together

    def _offer(self, number: int, case: _Case, proposal: Proposal) -> _Offer:
        """A proposal with its value: all estimates count where its verification is exact for any way of choosing."""
        source, profile = self._sources[number], case.row.profiles[number]
        count = len(proposal.token_ids)
        claims = proposal.survival if proposal.survival is not None and len(proposal.survival) == count else None
        survival = source.corrected(profile, claims, proposal)
        if proposal.probs is None or not survival:
            value = sum(survival)
        else:
            value = self._value_of_sampled(source, profile, case.request.limit, survival)
        return _Offer(number, proposal, claims, survival, value)

    @staticmethod
    def _value_of_sampled(source: _Source, profile: Profile, limit: int, survival: Sequence[float]) -> float:
        """Accepted tokens to expect of a sampled draft, from what was known before its first token was drawn."""
        return source.usual_value(profile, limit, first=survival[0])

    def _choose(self, case: _Case) -> Proposal:
        """Take the best offer, or one that is due to be tried, and note what can be scored next time."""
        row, request = case.row, case.request
        best = max(case.offers, key=lambda offer: offer.value)  # the cheapest of equals
        for offer in case.offers:
            # A sampled draft that is not verified says little about its acceptance: to be judged it must be taken.
            if offer.is_sampled and row.unscored[offer.source] >= self._probe_every:
                best = offer
        row.position = len(request.token_ids)
        row.offers = [
            _Scored(offer.source, tuple(offer.proposal.token_ids), offer.claims, offer.proposal.parents)
            for offer in case.offers
            if offer.proposal.token_ids and (offer is best or not offer.is_sampled)
        ]
        scored = {offer.source for offer in row.offers}
        row.unscored = [0 if number in scored else rounds + 1 for number, rounds in enumerate(row.unscored)]
        if not best.proposal.token_ids:
            return NOTHING
        if request.may_branch:
            drafts = [offer for offer in case.offers if offer.proposal.token_ids]
            self._chosen.update(self._sources[offer.source].drafter.name for offer in drafts)
            return merged([replace(offer.proposal, survival=offer.survival) for offer in drafts], request.limit)
        self._chosen[self._sources[best.source].drafter.name] += 1
        return replace(best.proposal, survival=best.survival)


def _columns(wanted: Sequence[int], union: Sequence[int]) -> list[int]:
    """Where a drafter's layers stand among all tapped ones."""
    return [union.index(layer) for layer in sorted(set(wanted))]


@dataclass(slots=True)
class _Source:
    """One drafter, and what was learned about it."""

    drafter: Drafter
    cost: float
    columns: list[int]
    """Its feature layers' places among the tapped layers."""
    num_layers: int
    """Tapped layers, over all drafters."""
    calibration: Calibration = field(default_factory=lambda: Calibration(_POSITIONS))
    reach: int = 0
    """Longest draft that was scored; 0 before the first."""

    @property
    def branches(self) -> bool:
        """Whether its proposals may be trees."""
        return isinstance(self.drafter, BranchingDrafter) and self.drafter.branches

    def ask(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Its proposals, one per request."""
        shown = [
            replace(request, features=self.features(request.features), may_branch=request.may_branch and self.branches)
            for request in requests
        ]
        proposals = self.drafter.propose(shown)
        if len(proposals) != len(requests):
            raise BackendContractError(
                f"drafter {self.drafter.name}",
                f"returned {len(proposals)} proposals for {len(requests)} requests",
                "return one per request",
            )
        for request, proposal in zip(shown, proposals, strict=True):
            check_shape(self.drafter, proposal, may_branch=request.may_branch)
        return proposals

    def features(self, features: torch.Tensor | None) -> torch.Tensor | None:
        """[n, F] of all tapped layers -> those of this drafter's; a view, unless they do not stand side by side."""
        if features is None or not self.columns:
            return None
        first, count = self.columns[0], len(self.columns)
        width = features.shape[1] // self.num_layers
        if self.columns == list(range(first, first + count)):
            return features[:, first * width : (first + count) * width]
        return torch.cat([features[:, place * width : (place + 1) * width] for place in self.columns], dim=1)

    def corrected(self, profile: Profile, claims: Sequence[float] | None, proposal: Proposal) -> tuple[float, ...]:
        """Survival estimates in the light of earlier rounds; without claims, every token claims to be certain."""
        claims = (1.0,) * len(proposal.token_ids) if claims is None else claims
        return tuple(self.calibration.corrected(profile, claims, proposal.parents))

    def usual_value(self, profile: Profile, limit: int, first: float | None = None) -> float:
        """Accepted tokens to expect of a draft of the usual length, from earlier rounds alone.

        Args:
            profile: the request's.
            limit: most tokens of the draft.
            first: estimated acceptance of the first token, where it is known.
        """
        length = min(limit, self.reach) if self.reach else limit
        rates = [self.calibration.rate(profile, min(position, _POSITIONS - 1)) for position in range(length)]
        if first is not None:
            rates[:1] = [first]
        value, alive = 0.0, 1.0
        for rate in rates:
            alive *= rate
            value += alive
        return value

    def score(self, profile: Profile, offer: _Scored, committed: Sequence[int]) -> None:
        """Compare a draft with what was committed.

        Committed tokens follow the target's law whatever was drafted, so drafts that were not taken are judged as
        fairly as those that were. What a policy cut off a sampled draft is judged by whether the target's own token
        agrees, which is a little harder than being accepted.
        """
        parents = chain(len(offer.token_ids)) if offer.parents is None else offer.parents
        path = walk(offer.token_ids, parents, committed)
        known = fate_of_tree(parents, offer.claims, path)
        self.reach = max(self.reach, height(parents))
        # Behind what is committed nothing is known yet.
        self.calibration.record(profile, known.survival, min(known.admitted, len(committed)), len(path))


@dataclass(frozen=True, slots=True)
class _Scored:
    """A draft whose fate will show."""

    source: int
    token_ids: tuple[int, ...]
    claims: Sequence[float] | None
    parents: Sequence[int] | None


@dataclass(slots=True)
class _Row:
    """What was learned about one request, and the drafts of its last round."""

    profiles: list[Profile]
    unscored: list[int]
    """Per drafter, rounds since one of its drafts could be judged."""
    offers: list[_Scored] = field(default_factory=list)
    position: int = 0
    """Number of committed tokens when they were made."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """One drafter's proposal for one request."""

    source: int
    proposal: Proposal
    claims: Sequence[float] | None
    survival: tuple[float, ...]
    value: float

    @property
    def is_sampled(self) -> bool:
        """Whether it is verified by a rule that rests on how its tokens were drawn."""
        return self.proposal.probs is not None


@dataclass(slots=True)
class _Case:
    """One request in one round."""

    request: DraftRequest
    row: _Row
    offers: list[_Offer] = field(default_factory=list)
