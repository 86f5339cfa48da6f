"""Do confidences keep their word, and scales that make them do so. Pure: arrays in, figures out; no model."""

from __future__ import annotations

from .fitting import METHODS, Method, Scaling, check_method, fit_scales
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
from .scaling import Scale, calibrated
from .table import CalibratedDrafter, CalibrationEntry, CalibrationTable, Regime, fingerprint

__all__ = [
    "METHODS",
    "NUM_BINS",
    "CalibratedDrafter",
    "CalibrationEntry",
    "CalibrationTable",
    "Method",
    "Observations",
    "Regime",
    "ReliabilityBin",
    "Scale",
    "Scaling",
    "area_under_curve",
    "brier_score",
    "calibrated",
    "calibration_noise",
    "check_method",
    "conditional_logits",
    "expected_calibration_error",
    "fingerprint",
    "fit_scales",
    "observe",
    "outcomes",
    "reliability",
]
