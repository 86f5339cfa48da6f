"""Trees of alternatives while they are drafted: which continuations are followed, and the best of them at the end.

The survival of an item is the product of the rates along its path, so that of its continuations is smaller, and the
best ``limit`` items are a tree whichever they are (EAGLE-2's dynamic draft tree, Li et al. 2024, section 4.2, with
acceptance rates in place of the drafter's probabilities).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from specflow.errors import BackendContractError
from specflow.trees import HISTORY, chain, continuations, shape_problem

from .base import Drafter, Proposal

ALTERNATIVES = 8
"""Most continuations of one item that are looked at."""
_TOLERANCE = 1e-6
"""Estimates may rise by this much: they are products of fp32 numbers."""
LEAST_SURVIVAL = 1e-6
"""Estimates do not fall below this, so that ratios of them mean something."""


@dataclass(frozen=True, slots=True)
class Tip:
    """An item that may be continued."""

    tree: int
    """Which tree, where several grow together."""
    item: int
    """Which item of it, or :data:`~specflow.trees.HISTORY`."""
    token: int
    """Its token; the anchor for the history."""


class GrowingTree:
    """One request's alternatives, in the order in which they are found.

    Args:
        limit: most items of the finished tree.
    """

    def __init__(self, limit: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.survival: list[float] = []
        self._depths: list[int] = []
        self._limit = limit
        self._floor = 0.0

    def extend(self, item: int, depth: int, tokens: Sequence[int], rates: Sequence[float]) -> None:
        """Add alternatives that continue an item.

        Args:
            item: which, or the history.
            depth: of the new items.
            tokens: the alternatives, the likeliest first. Those that cannot be among the best any more are left out.
            rates: of each, the probability that it is right if the item is.
        """
        before = 1.0 if item == HISTORY else self.survival[item]
        for token, rate in zip(tokens, rates, strict=True):
            survival = max(LEAST_SURVIVAL, before * rate)
            if survival <= self._floor:
                break
            self.tokens.append(token)
            self.parents.append(item)
            self.survival.append(survival)
            self._depths.append(depth)

    def tips(self, tree: int, depth: int) -> list[Tip]:
        """The items of a depth that are among the best so far: no other can have a continuation that ends up there."""
        best = self._best()
        if len(best) == self._limit:
            self._floor = self.survival[best[-1]]
        return [Tip(tree, item, self.tokens[item]) for item in sorted(best) if self._depths[item] == depth]

    def path(self, item: int) -> list[int]:
        """The tokens from the history up to an item, its own included."""
        found = []
        while item != HISTORY:
            found.append(self.tokens[item])
            item = self.parents[item]
        return found[::-1]

    def proposal(self) -> Proposal:
        """The best items, the most promising first."""
        best = self._best()
        place = {item: rank for rank, item in enumerate(best)}
        return Proposal(
            [self.tokens[item] for item in best],
            None,
            tuple([self.survival[item] for item in best]),
            [place[self.parents[item]] if self.parents[item] != HISTORY else HISTORY for item in best],
        )

    def _best(self) -> list[int]:
        # Ties go to the one found first, which is never a continuation of the other.
        return sorted(range(len(self.tokens)), key=lambda item: -self.survival[item])[: self._limit]


def check_shape(drafter: Drafter, proposal: Proposal, *, may_branch: bool) -> None:
    """Make sure that a proposal is a chain, or a tree where one is allowed, with its items in order.

    Raises:
        BackendContractError: it is not.
    """
    parents, survival = proposal.parents, proposal.survival
    if parents is None:
        return
    problem = shape_problem(parents, len(proposal.token_ids))
    remedy = "give one parent per token: a token before it, or -1 for the anchor"
    if not may_branch:
        problem, remedy = "proposed a tree for a request that allows none", "look at DraftRequest.may_branch"
    elif survival is not None and any(later > before + _TOLERANCE for before, later in itertools.pairwise(survival)):
        problem, remedy = "proposed a tree whose survival estimates rise", "put the most promising tokens first"
    if problem is not None:
        raise BackendContractError(f"drafter {drafter.name}", problem, remedy)


def merged(proposals: Sequence[Proposal], limit: int) -> Proposal:
    """One tree of several drafts' tokens, for the best ``limit`` of which they are worth verifying together.

    Where drafts agree the larger estimate stands. Alternatives exclude each other, so a lesser one is worth at most
    what the greater ones leave; estimates of what continues it shrink with it.

    Args:
        proposals: with survival estimates; chains and trees, without probabilities.
        limit: most tokens.
    """
    items: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    claims: list[float] = []
    for proposal in proposals:
        count = len(proposal.token_ids)
        shape = chain(count) if proposal.parents is None else proposal.parents
        placed = {HISTORY: HISTORY}
        for number, (token, parent, claim) in enumerate(
            zip(proposal.token_ids, shape, proposal.survival or (1.0,) * count, strict=True)
        ):
            key = placed[parent], token
            if key not in items:
                items[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                claims.append(claim)
            placed[number] = items[key]
            claims[items[key]] = max(claims[items[key]], claim)
    tree = GrowingTree(limit)
    following = continuations(parents)
    waiting = [(HISTORY, HISTORY, 0)]
    while waiting:
        item, place, depth = waiting.pop()
        before = 1.0 if item == HISTORY else max(claims[item], LEAST_SURVIVAL)
        options = sorted(following.get(item, ()), key=lambda option: -claims[option])
        rates, left = [], 1.0
        for option in options:
            rates.append(min(left, claims[option] / before))
            left -= rates[-1]
        first = len(tree.tokens)
        tree.extend(place, depth, [tokens[option] for option in options], rates)
        waiting += [(option, first + number, depth + 1) for number, option in enumerate(options)]
    return tree.proposal()
