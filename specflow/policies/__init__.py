"""Policies: how far to run ahead. All of them decide without looking at the values they decide about."""

from __future__ import annotations

from .adaptive import Adaptive
from .beliefs import Belief, Beliefs, Prior
from .boundary import Boundary
from .circuit_breaker import CircuitBreaker, CircuitState, CircuitStatus
from .cost_scheduled import CostScheduled, StaleBudget
from .costs import CostTable
from .estimated import Estimated
from .expected_value import Appraisal, ExpectedValue, Finding
from .explanation import ChainStatus, Explanation
from .fixed import Fixed
from .pid import PID, PIDState
from .round_costs import RoundCosts
from .shadow import Shadow, ShadowReport
from .switch import SwitchState
from .threshold import Threshold

__all__ = [
    "PID",
    "Adaptive",
    "Appraisal",
    "Belief",
    "Beliefs",
    "Boundary",
    "ChainStatus",
    "CircuitBreaker",
    "CircuitState",
    "CircuitStatus",
    "CostScheduled",
    "CostTable",
    "Estimated",
    "ExpectedValue",
    "Explanation",
    "Finding",
    "Fixed",
    "PIDState",
    "Prior",
    "RoundCosts",
    "Shadow",
    "ShadowReport",
    "StaleBudget",
    "SwitchState",
    "Threshold",
]
