"""Measuring drafters: accepted length, acceptance by position, calibration, and speed against plain decoding."""

from __future__ import annotations

from .acceptance import Acceptance, count
from .calibrate import CalibrationResult, check_recording, fit_and_test, store
from .confidence import Confidence, PositionCalibration
from .run import DrafterResult, EvaluationReport, run_evaluation
from .settings import EvaluationSettings
from .speed import SpeedRow

__all__ = [
    "Acceptance",
    "CalibrationResult",
    "Confidence",
    "DrafterResult",
    "EvaluationReport",
    "EvaluationSettings",
    "PositionCalibration",
    "SpeedRow",
    "check_recording",
    "count",
    "fit_and_test",
    "run_evaluation",
    "store",
]
