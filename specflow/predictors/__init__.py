"""Predictors: guess what comes next from what has been committed."""

from __future__ import annotations

from .branch import BranchPrediction, BranchPredictor, GShare, TwoBit

__all__ = ["BranchPrediction", "BranchPredictor", "GShare", "TwoBit"]
