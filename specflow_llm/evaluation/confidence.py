"""Calibration of a drafter's survival estimates, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..calibration import (
    NUM_BINS,
    Observations,
    ReliabilityBin,
    Scale,
    area_under_curve,
    brier_score,
    calibration_noise,
    expected_calibration_error,
    observe,
    reliability,
)
from ..records import RoundRecord


@dataclass(frozen=True, slots=True)
class PositionCalibration:
    """How well the claimed survival of one position keeps its word."""

    position: int
    """From 1."""
    count: int
    """Rounds with a known outcome."""
    mean_claimed: float
    mean_accepted: float
    """Fraction of these rounds whose first ``position`` tokens were all accepted."""
    ece: float
    ece_noise: float
    """The ECE that perfect estimates would show in as many observations: read nothing into less."""
    brier: float
    auc: float | None
    """How well it tells rounds apart; None where all ended alike."""
    bins: tuple[ReliabilityBin, ...]


def positions(
    observations: Observations, scales: Sequence[Scale] | None = None, *, bins: int = NUM_BINS
) -> tuple[PositionCalibration, ...]:
    """Calibration of every position.

    Args:
        observations: of rounds with everything verified.
        scales: one per position; None judges the raw estimates.
        bins: of the ECE and of the reliability plot.
    """
    found = []
    for position in range(observations.num_positions):
        claimed, accepted = observations.at(position, scales)
        size = claimed.size
        found.append(
            PositionCalibration(
                position=position + 1,
                count=int(size),
                mean_claimed=float(claimed.mean()) if size else 0.0,
                mean_accepted=float(accepted.mean()) if size else 0.0,
                ece=expected_calibration_error(claimed, accepted, bins=bins),
                ece_noise=calibration_noise(claimed, bins=bins),
                brier=brier_score(claimed, accepted),
                auc=area_under_curve(claimed, accepted),
                bins=reliability(claimed, accepted, bins=bins),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Confidence:
    """Raw estimates, and the same corrected by the drafter's own calibration where it has one for the regime."""

    raw: tuple[PositionCalibration, ...]
    corrected: tuple[PositionCalibration, ...] | None
    scales: tuple[Scale, ...] | None
    """Of the correction."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def judge(rounds: Sequence[RoundRecord], scales: Sequence[Scale] | None) -> Confidence | None:
    """Calibration of the estimates in recorded rounds; None where nothing was drafted.

    Args:
        rounds: with the drafter's raw estimates.
        scales: of its calibration for this kind of request; one per position or more; None for none.
    """
    if not any(record.survival for record in rounds):
        return None
    observations = observe(rounds)
    if scales is None or len(scales) < observations.num_positions:
        return Confidence(positions(observations), None, None)
    fitting = tuple(scales[: observations.num_positions])
    return Confidence(positions(observations), positions(observations, fitting), fitting)
