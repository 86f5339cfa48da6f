"""Calibration of a drafter's survival estimates, position by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from specflow.policies.acceptance import Calibration, Profile

from ..calibration import (
    NUM_BINS,
    Observations,
    ReliabilityBin,
    Scale,
    area_under_curve,
    brier_score,
    calibrated,
    calibration_noise,
    conditional_logits,
    expected_calibration_error,
    observe,
    outcomes,
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
    """Estimates: raw, corrected by the drafter's calibration for the regime, and by what was accepted before."""

    raw: tuple[PositionCalibration, ...]
    corrected: tuple[PositionCalibration, ...] | None
    scales: tuple[Scale, ...] | None
    """Of the correction."""
    live: tuple[PositionCalibration, ...]
    """Corrected by the drafter's calibration, if it has one, and by live acceptance: what adaptive policies go by."""

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
    width = observations.num_positions
    fitting = tuple(scales[:width]) if scales is not None and len(scales) >= width else None
    corrected = None if fitting is None else positions(observations, fitting)
    live = positions(observe(list(with_live_correction(rounds, fitting)), num_positions=width))
    return Confidence(positions(observations), corrected, fitting, live)


def with_live_correction(rounds: Sequence[RoundRecord], scales: Sequence[Scale] | None) -> Iterator[RoundRecord]:
    """The same rounds with the estimates that a policy would have had, which learns from the rounds before.

    The requests are taken as running together: their first rounds, then their second rounds, and so on. Rounds side by
    side do not learn from each other, as in a batch.

    Args:
        rounds: with the drafter's raw estimates, everything verified.
        scales: of its calibration; one per position or more; None for none.
    """
    drafting = [record for record in rounds if record.survival]
    learned = Calibration(max((len(record.survival) for record in drafting), default=1))
    profiles: dict[int, Profile] = {}
    requests: dict[int, list[RoundRecord]] = {}
    for record in drafting:
        requests.setdefault(record.request, []).append(record)
        profiles.setdefault(record.request, Profile(len(learned.pool.claims)))
    for together in zip_longest(*requests.values()):
        ran = [record for record in together if record is not None]
        claims = [_scaled(record, scales) for record in ran]
        for record, claim in zip(ran, claims, strict=True):
            yield replace(record, survival=tuple(learned.corrected(profiles[record.request], claim)))
        for record, claim in zip(ran, claims, strict=True):
            known_accepted, known = outcomes(record)
            learned.record(profiles[record.request], claim, known, known_accepted)


def _scaled(record: RoundRecord, scales: Sequence[Scale] | None) -> Sequence[float]:
    if scales is None:
        return record.survival
    claims: list[float] = calibrated(conditional_logits(record.survival), scales).tolist()
    return claims
