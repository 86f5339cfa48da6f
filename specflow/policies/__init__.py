"""Policies: how far to run ahead. All of them decide without looking at the values they decide about."""

from __future__ import annotations

from .adaptive import Adaptive
from .costs import CostTable
from .explanation import ChainStatus, Explanation
from .fixed import Fixed
from .switch import SwitchState
from .threshold import Threshold

__all__ = ["Adaptive", "ChainStatus", "CostTable", "Explanation", "Fixed", "SwitchState", "Threshold"]
