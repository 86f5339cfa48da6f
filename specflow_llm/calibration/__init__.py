"""Do confidences keep their word, and temperatures that make them do so. Pure: arrays in, figures out; no model."""

from __future__ import annotations

from .metrics import (
    NUM_BINS,
    ReliabilityBin,
    area_under_curve,
    brier_score,
    calibration_noise,
    expected_calibration_error,
    reliability,
)
from .observations import Observations, conditional_logits, observe, outcomes
from .scaling import Scaling, calibrated, fit_temperatures
from .table import CalibratedDrafter, CalibrationEntry, CalibrationTable, Regime, fingerprint

__all__ = [
    "NUM_BINS",
    "CalibratedDrafter",
    "CalibrationEntry",
    "CalibrationTable",
    "Observations",
    "Regime",
    "ReliabilityBin",
    "Scaling",
    "area_under_curve",
    "brier_score",
    "calibrated",
    "calibration_noise",
    "conditional_logits",
    "expected_calibration_error",
    "fingerprint",
    "fit_temperatures",
    "observe",
    "outcomes",
    "reliability",
]
