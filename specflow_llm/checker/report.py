"""What the checker found out: frozen values, readable as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    """How a check ended."""

    OK = "ok"
    """The property was looked for and holds as far as the check can see."""
    FAILED = "failed"
    """A counter-example was found; the reason shows it."""
    SKIPPED = "skipped"
    """The property does not apply to this drafter, or cannot be tested on it; the reason says why."""


class Concern(Enum):
    """What a failed check puts at risk."""

    CONTRACT = "contract"
    """The protocol's rules for every proposal. Broken, the engine refuses it, or the other checks mean nothing."""
    EXACTNESS = "exactness"
    """The output: its tokens or its law would differ from plain decoding."""
    STATE = "state"
    """What the drafter remembers. Broken, the output is still right, but guesses are worse, or memory grows."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property and whether it holds."""

    name: str
    concern: Concern
    outcome: Outcome
    reason: str
    """What was compared and what came out, or why the check was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a drafter saves, measured with greedy decoding of one request at a time and a fixed draft length."""

    model: str
    """The target the figures belong to."""
    is_real_model: bool
    """False for the built-in random model: its seconds say nothing about a real model."""
    draft_tokens: int
    """Tokens asked for per round."""
    trees: bool
    """Whether drafts could branch."""
    rounds: int
    emitted: int
    drafted: int
    admitted: int
    accepted: int
    claimed: float
    """Accepted tokens that the drafter's survival estimates promised; equals ``admitted`` where it gives none."""
    acceptance_by_position: tuple[float, ...]
    """Entry k: of the drafts verified at position k (of trees, at depth k), the fraction accepted there."""
    draft_seconds: float
    """Seconds spent in the drafter."""
    plain_round_seconds: float
    """Seconds of a round without a draft: one token."""
    round_seconds: float
    """Seconds of a round with drafts, drafting included."""

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per round, the correction or bonus token included."""
        return _ratio(self.emitted, self.rounds)

    @property
    def verification_pass_rate(self) -> float:
        """VPR: accepted / verified."""
        return _ratio(self.accepted, self.admitted)

    @property
    def draft_utilisation(self) -> float:
        """DU: accepted / drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def draft_seconds_per_token(self) -> float:
        """Seconds to draft one token."""
        return _ratio(self.draft_seconds, self.drafted)

    @property
    def draft_overhead(self) -> float:
        """Drafting per round, in plain rounds."""
        return _ratio(_ratio(self.draft_seconds, self.rounds), self.plain_round_seconds)

    @property
    def verify_overhead(self) -> float:
        """What verifying a block costs more than a plain round, in plain rounds."""
        return _ratio(self.round_seconds, self.plain_round_seconds) - 1.0 - self.draft_overhead

    @property
    def estimated_speedup(self) -> float:
        """Tokens per second over those of plain decoding: mean accepted length / (1 + overhead)."""
        return _ratio(self.mean_accepted_length, 1.0 + self.draft_overhead + self.verify_overhead)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        derived = (
            "mean_accepted_length", "verification_pass_rate", "draft_utilisation", "draft_seconds_per_token",
            "draft_overhead", "verify_overhead", "estimated_speedup",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """Whether a drafter is exact, whether it keeps its state in order, and what it gains."""

    drafter: str
    """The drafter's name."""
    gives_probs: bool
    """Whether it says that its proposals carry the probabilities they were drawn from."""
    checks: tuple[Check, ...]
    gain: Gain | None
    """None where the drafter failed before it could be measured."""

    @property
    def ok(self) -> bool:
        """True when no check failed."""
        return not self.failures

    @property
    def is_exact(self) -> bool:
        """True when no check of the contract or of exactness failed: the output is that of plain decoding."""
        return all(check.concern is Concern.STATE for check in self.failures)

    @property
    def failures(self) -> Sequence[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.outcome is Outcome.FAILED]

    @property
    def verdict(self) -> str:
        """One sentence for a person."""
        if self.ok:
            return f"{self.drafter} is exact, and keeps its state in order."
        names = ", ".join(check.name for check in self.failures)
        if self.is_exact:
            return f"{self.drafter} is exact, but mishandles its state ({names}): guesses or memory suffer."
        return f"{self.drafter} is not exact: {names}."

    def check(self, name: str) -> Check:
        """The check of that name.

        Raises:
            KeyError: there is none.
        """
        found: Mapping[str, Check] = {check.name: check for check in self.checks}
        return found[name]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        checks = [
            {
                "name": check.name,
                "concern": check.concern.value,
                "outcome": check.outcome.value,
                "reason": check.reason,
            }
            for check in self.checks
        ]
        return {
            "drafter": self.drafter,
            "gives_probs": self.gives_probs,
            "ok": self.ok,
            "is_exact": self.is_exact,
            "verdict": self.verdict,
            "checks": checks,
            "gain": None if self.gain is None else self.gain.as_dict(),
        }

    def __str__(self) -> str:
        """The verdict and one line per check."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [f"  {check.outcome.value:<8}{check.name:<{width}}  {check.reason}" for check in self.checks]
        return "\n".join([self.verdict, *lines])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
