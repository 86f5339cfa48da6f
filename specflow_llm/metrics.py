"""Figures of a request: counts first (they do not jitter), then seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specflow.types import PhaseSeconds


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What decoding one request took."""

    prompt_tokens: int
    target_forwards: int
    """Model calls this request took part in: prefill chunks, rounds, and what recurrent models replay."""
    rounds: int
    """Rounds this request took part in; each verifies one block."""
    drafted: int
    """Tokens proposed."""
    admitted: int
    """Drafted tokens that were verified."""
    accepted: int
    """Verified tokens that were accepted and emitted."""
    emitted: int
    """Tokens generated."""
    acceptance_by_position: tuple[float, ...]
    """Entry k: of the drafts verified at position k, the fraction accepted there; alternatives share a position."""
    phase_seconds: Mapping[str, float]
    """Wall-clock seconds of the rounds this request took part in, by phase, and of its prefill."""
    state_bytes: Mapping[str, int]
    """Bytes held by the engine when the request ended, by kind of state."""

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per round, the correction or bonus token included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def verification_pass_rate(self) -> float:
        """VPR: accepted / verified."""
        return self.accepted / self.admitted if self.admitted else 0.0

    @property
    def draft_utilisation(self) -> float:
        """DU: accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **asdict(self),
            "mean_accepted_length": self.mean_accepted_length,
            "verification_pass_rate": self.verification_pass_rate,
            "draft_utilisation": self.draft_utilisation,
        }


@dataclass(slots=True)
class MetricsBuilder:
    """Collects one request's figures while it runs."""

    prompt_tokens: int
    forwards: int = 0
    rounds: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    emitted: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_counts(
        self, *, drafted: int, admitted: int, accepted: int, emitted: int, forwards: int = 1, reached: int | None = None
    ) -> None:
        """Add one round.

        ``accepted`` counts emitted draft tokens only: those behind a stop never became output. ``reached`` is the
        number of positions at which something was verified, the depth of a tree; None for a chain.
        """
        reached = admitted if reached is None else reached
        self.rounds += 1
        self.forwards += forwards
        self.drafted += drafted
        self.admitted += admitted
        self.accepted += accepted
        self.emitted += emitted
        grow = reached - len(self.verified_at)
        if grow > 0:
            self.verified_at += [0] * grow
            self.accepted_at += [0] * grow
        for position in range(reached):
            self.verified_at[position] += 1
            if position < accepted:
                self.accepted_at[position] += 1

    def add_seconds(self, phases: PhaseSeconds) -> None:
        """Add one round's seconds."""
        for name in PhaseSeconds.__slots__:
            self.seconds[name] = self.seconds.get(name, 0.0) + getattr(phases, name)

    def build(self, state_bytes: Mapping[str, int]) -> RequestMetrics:
        """The finished figures."""
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            target_forwards=self.forwards,
            rounds=self.rounds,
            drafted=self.drafted,
            admitted=self.admitted,
            accepted=self.accepted,
            emitted=self.emitted,
            acceptance_by_position=tuple(
                hits / tries for hits, tries in zip(self.accepted_at, self.verified_at, strict=True) if tries
            ),
            phase_seconds=dict(self.seconds),
            state_bytes=dict(state_bytes),
        )
