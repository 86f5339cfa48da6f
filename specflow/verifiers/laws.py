"""Acceptance rules for sampled drafts, written out as exact laws in plain Python.

Each rule takes the target's and the drafter's laws along one drafted block and returns every possible verdict with its
probability, the uniform variates integrated out. They are the reference that a backend's fast, sampling
implementation is compared with, and what :func:`specflow.testing.enumerate_law` works on. Laws must be the ones
really sampled from: after temperature, truncation and penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import BackendContractError

Law = Sequence[float]
"""Probabilities of the items 0..V-1 at one position; they sum to 1."""


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """One possible verdict on a drafted block."""

    num_accepted: int
    """How many drafted items are kept."""
    probability: float
    """Probability of exactly that many, given the block."""
    replacement: tuple[float, ...]
    """Law of the item appended after them."""


class PrefixRule(Protocol):
    """**Protocol:** the exact law of an acceptance rule.

    ``target_probs`` has K + 1 laws: before each drafted item, and after the last. ``draft_probs`` has K laws, those
    the drafter declares to have drawn from. ``values`` are the K drafted items. Outcomes of probability 0 may be left
    out.
    """

    def __call__(
        self, target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
    ) -> Sequence[PrefixOutcome]:
        """All verdicts on the block with their probabilities, which sum to 1."""
        ...


def token_rule(
    target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
) -> Sequence[PrefixOutcome]:
    """Item by item: accept x with probability min(1, target(x) / draft(x)), else draw from the positive difference.

    Exact when every value was drawn from its ``draft_probs``. Leviathan et al. 2023, Algorithm 1; Chen et al. 2023,
    Algorithm 2.

    Raises:
        BackendContractError: a value has probability 0 under its ``draft_probs``.
    """
    outcomes: list[PrefixOutcome] = []
    reached = 1.0
    for position, value in enumerate(values):
        target, draft = target_probs[position], draft_probs[position]
        accept = min(1.0, _ratio(target, draft, value))
        if accept < 1.0:
            outcomes.append(PrefixOutcome(position, reached * (1.0 - accept), residual(target, draft, 1.0)))
        reached *= accept
    outcomes.append(PrefixOutcome(len(values), reached, tuple(target_probs[len(values)])))
    return outcomes


def block_rule(
    target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
) -> Sequence[PrefixOutcome]:
    """The whole block at once: keep the largest prefix that passes its own independent test.

    With P_0 = 1 and P_i = min(1, P_{i-1} target(x_i) / draft(x_i)), prefix i < K passes with probability S / (S + 1 -
    P_i) where S = sum_x max(P_i target_{i+1}(x) - draft_{i+1}(x), 0), and the full block with P_K. After a prefix i <
    K the next item is drawn from max(P_i target_{i+1} - draft_{i+1}, 0), normalised. Never accepts fewer items than
    the token rule on average. Exact when every value was drawn from its ``draft_probs``. Sun et al. 2024, "Block
    Verification Accelerates Speculative Decoding", Algorithm 2.

    Raises:
        BackendContractError: a value has probability 0 under its ``draft_probs``.
    """
    size = len(values)
    ratio = 1.0
    passing: list[float] = []
    replacements: list[tuple[float, ...]] = []
    for position in range(size + 1):
        if position:
            value = values[position - 1]
            ratio = min(1.0, ratio * _ratio(target_probs[position - 1], draft_probs[position - 1], value))
        target = target_probs[position]
        if position == size:
            passing.append(ratio)
            replacements.append(tuple(target))
            continue
        draft = draft_probs[position]
        excess = sum(max(ratio * wanted - drawn, 0.0) for wanted, drawn in zip(target, draft, strict=True))
        # 0/0: the block can be extended without loss and nothing is left to correct, so the prefix passes.
        total = excess + (1.0 - ratio)  # in this order it is never below the excess, so nothing passes with more than 1
        passing.append(excess / total if total > 0.0 else 1.0)
        replacements.append(residual(target, draft, ratio))
    outcomes: list[PrefixOutcome] = []
    undecided = 1.0
    for position in range(size, 0, -1):
        outcomes.append(PrefixOutcome(position, undecided * passing[position], replacements[position]))
        undecided *= 1.0 - passing[position]
    outcomes.append(PrefixOutcome(0, undecided, replacements[0]))
    return outcomes


def one_hot_rule(
    target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
) -> Sequence[PrefixOutcome]:
    """Accept x with probability target(x), else draw from the target without x. ``draft_probs`` are not used.

    Exact for any way of choosing the values: greedy, looked up, filtered, or picked after looking ahead. Drawing from
    the target and accepting while the draw equals the draft has the same law.
    """
    del draft_probs
    outcomes: list[PrefixOutcome] = []
    reached = 1.0
    for position, value in enumerate(values):
        target = target_probs[position]
        one_hot = [1.0 if item == value else 0.0 for item in range(len(target))]
        outcomes.append(PrefixOutcome(position, reached * (1.0 - target[value]), residual(target, one_hot, 1.0)))
        reached *= target[value]
    outcomes.append(PrefixOutcome(len(values), reached, tuple(target_probs[len(values)])))
    return outcomes


def residual(target: Law, draft: Law, scale: float) -> tuple[float, ...]:
    """max(scale * target - draft, 0), normalised; the target itself where that is zero everywhere."""
    excess = [max(scale * wanted - drawn, 0.0) for wanted, drawn in zip(target, draft, strict=True)]
    mass = sum(excess)
    return tuple(weight / mass for weight in excess) if mass > 0.0 else tuple(target)


def _ratio(target: Law, draft: Law, value: int) -> float:
    if draft[value] <= 0.0:
        raise BackendContractError(
            "the drafter", f"drew item {value}, which its law gives probability 0", "declare the law really drawn from"
        )
    return target[value] / draft[value]
