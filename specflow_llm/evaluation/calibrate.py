"""Fit scales to a drafter's recorded rounds, try them on other requests, and store them beside the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..calibration import CalibrationEntry, CalibrationTable, Method, Regime, fingerprint, fit_scales, observe
from ..errors import CheckpointError, DataFileError
from ..records import Recording
from .confidence import PositionCalibration, positions

GOAL = 0.02
"""Calibration error that every position should stay below."""


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Fitted scales, and what they change on the requests they were not fitted on."""

    entry: CalibrationEntry
    before: tuple[PositionCalibration, ...]
    """Held out, raw."""
    after: tuple[PositionCalibration, ...]
    """Held out, with the scales."""
    fit_counts: tuple[int, ...]
    """Known outcomes per position that the scales were fitted on."""

    @property
    def is_met(self) -> bool:
        """True when every position with known outcomes is below :data:`GOAL`."""
        return all(position.ece < GOAL for position in self.after if position.count)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {
                "position": after.position,
                "temperature": scale.temperature,
                "shift": scale.shift,
                "fitted": fitted,
                "fit_count": fit_count,
                "count": after.count,
                "mean_accepted": after.mean_accepted,
                "mean_claimed_before": before.mean_claimed,
                "mean_claimed_after": after.mean_claimed,
                "ece_before": before.ece,
                "ece_after": after.ece,
                "ece_noise": after.ece_noise,
                "brier_before": before.brier,
                "brier_after": after.brier,
                "auc_before": before.auc,
                "auc_after": after.auc,
            }
            for before, after, scale, fitted, fit_count in zip(
                self.before, self.after, self.entry.scales, self.entry.fitted, self.fit_counts, strict=True
            )
        ]
        return {"method": self.entry.method, "positions": rows, "goal": GOAL, "is_met": self.is_met}


def check_recording(recording: Recording, folder: Path) -> None:
    """Refuse a recording that says nothing about this checkpoint's raw confidences.

    Args:
        recording: what was read.
        folder: the checkpoint.

    Raises:
        DataFileError: it holds corrected confidences, or none, is of drafts that branch, or of other weights.
        CheckpointError: the folder holds no weights.
    """
    origin = recording.header.provenance
    name = recording.header.drafter
    if recording.branches:
        raise DataFileError(
            f"the recording of {name}",
            "its drafts branch, and what trees claim does not come from the confidences that are calibrated",
            "give the recording of chains, which evaluate writes beside it",
        )
    if origin.get("confidences", "raw") != "raw":
        raise DataFileError(
            f"the recording of {name}",
            "its confidences may be corrected already",
            "record a trained drafter by itself: `specflow-llm evaluate --drafter FOLDER --out DIR`",
        )
    if not origin.get("gives_survival", True):
        raise DataFileError(f"the recording of {name}", "the drafter makes no estimates", "use one with confidences")
    known = origin.get("drafter_fingerprint")
    if known is not None and known != fingerprint(folder):
        raise DataFileError(
            f"the recording of {name}", f"it is of other weights than those in {folder}", "record this checkpoint"
        )


def fit_and_test(
    recording: Recording, *, method: Method = "platt", fraction: float = 0.5, seed: int = 0
) -> CalibrationResult:
    """Fit on some requests, test on the others.

    The scales that were tested are the ones to store: nothing is fitted again to all data afterwards.

    Args:
        recording: raw confidences, with everything verified that was drafted.
        method: ``"platt"``: a temperature and a shift per position; ``"temperature"``: the paper's.
        fraction: of the requests, to fit on.
        seed: of the choice.

    Raises:
        InvalidSettingError: nothing was drafted, there are fewer than two requests, or no such method.
    """
    header = recording.header
    observations = observe(recording.rounds)
    fitting, testing = observations.split(fraction, seed=seed)
    scaling = fit_scales(fitting, method=method)
    before, after = positions(testing), positions(testing, scaling.scales)
    origin = header.provenance
    sampling = origin.get("sampling", {})
    entry = CalibrationEntry(
        method=method,
        scales=scaling.scales,
        fitted=scaling.fitted,
        regime=Regime(
            target=str(origin.get("model", "unknown")),
            temperature=header.temperature,
            top_k=sampling.get("top_k", 0),
            top_p=sampling.get("top_p", 1.0),
            min_p=sampling.get("min_p", 0.0),
            verification=str(origin.get("verification", "unknown")),
            data=str(origin.get("prompts", "unknown")),
            data_sha256=origin.get("prompts_sha256"),
            requests=len(set(observations.requests)),
            rounds=len(observations.requests),
        ),
        counts=testing.counts,
        ece_before=tuple(position.ece for position in before),
        ece_after=tuple(position.ece for position in after),
        ece_noise=tuple(position.ece_noise for position in after),
    )
    return CalibrationResult(entry, before, after, fitting.counts)


def store(entry: CalibrationEntry, folder: Path, *, num_positions: int | None = None) -> Path:
    """Put a calibration beside a checkpoint; that of the other kind of request (greedy, sampled) stays.

    A table that was fitted to other weights is replaced as a whole.

    Args:
        entry: what was fitted.
        folder: the checkpoint.
        num_positions: tokens the drafter drafts at once, where that is known.

    Returns:
        The file's path.

    Raises:
        CheckpointError: the folder holds no weights.
        InvalidSettingError: the calibration has fewer positions than the drafter.
    """
    size = len(entry.scales)
    if num_positions is not None and size != num_positions:
        raise InvalidSettingError(
            "draft_tokens", size, f"{num_positions} or more: a calibration needs all positions that the drafter drafts"
        )
    fresh = CalibrationTable(drafter=fingerprint(folder))
    try:
        table = CalibrationTable.load(folder, num_positions=size) or fresh
    except CheckpointError:
        table = fresh
    return table.with_entry(entry).save(folder)
