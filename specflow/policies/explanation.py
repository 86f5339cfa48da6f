"""Why speculation is, or is not, faster: the snapshot an adaptive policy gives of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..types import ChainId
from .costs import CostTable
from .switch import SwitchState


@dataclass(frozen=True, slots=True)
class ChainStatus:
    """The switch of one chain."""

    chain_id: ChainId
    state: SwitchState
    reason: str
    """Why it is in that state."""
    max_length: int
    """Longest draft allowed now."""
    rounds_to_probe: int
    """Rounds without an executed draft until a single item is tried."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an adaptive policy believes."""

    acceptance: tuple[float, ...]
    """Probability that so much of a draft is accepted, by place, over all chains; alternatives share a place."""
    claim_ratio: tuple[float, ...]
    """Items accepted per item the drafter claimed, by position; below 1 the drafter is overconfident."""
    offer_rate: float
    """Fraction of the requests for a draft that were answered with one."""
    execute_seconds: tuple[tuple[int, float], ...]
    """Measured (items executed, with their padding; seconds of the round without drafting), by width."""
    draft_seconds: tuple[tuple[int, float], ...]
    """Measured (items asked for, seconds of drafting), by length."""
    predicted_gain: float
    """Items per second at the best draft length over items per second without drafts, for one chain; at least 1.0."""
    best_length: int
    """The draft length of that gain; 0 where plain execution is best."""
    last_round_gain: float
    """The same ratio as expected for the last admitted round, with its real drafts and number of chains."""
    chains: tuple[ChainStatus, ...]

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        if not self.execute_seconds:
            return "No round has been measured yet."
        if not self.acceptance:
            return "Drafting is not allowed (max_draft is 0)."
        found = (
            f"{self.acceptance[0]:.0%} of first drafted items are accepted, "
            f"{self.offer_rate:.0%} of requests bring a draft."
        )
        if self.best_length == 0:
            return f"Plain execution is expected to be fastest: {found}"
        return (
            f"Drafts of {self.best_length} are expected to run {self.predicted_gain:.2f} times as fast "
            f"as plain execution: {found}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, JSON-safe."""
        data = asdict(self)
        data["chains"] = [{**status, "state": status["state"].value} for status in data["chains"]]
        return {**data, "reason": self.reason}


def predicted_gain(
    acceptance: Sequence[float], costs: CostTable, drafting: CostTable, offer_rate: float
) -> tuple[float, int]:
    """Best expected throughput of one chain relative to plain execution, and the draft length that gives it.

    Args:
        acceptance: probability that item k is accepted, by k; in a chain, that items 0..k all are.
        costs: seconds by number of executed items.
        drafting: seconds by number of drafted items.
        offer_rate: probability that there is a draft.
    """
    plain = costs.seconds(1)
    best_gain, best_length = 1.0, 0
    expected = 1.0
    for length, survival in enumerate(acceptance, start=1):
        expected += offer_rate * survival
        # Without a draft the round is a plain one, except that asking for it was paid.
        seconds = drafting.seconds(length) + offer_rate * costs.seconds(1 + length) + (1.0 - offer_rate) * plain
        gain = expected * (plain / seconds if seconds > 0.0 else 1.0)
        if gain > best_gain:
            best_gain, best_length = gain, length
    return best_gain, best_length
