"""Policies: how far to run ahead. All of them decide without looking at the values they decide about."""

from __future__ import annotations

from .adaptive import Adaptive
from .beliefs import Belief, Beliefs, Prior
from .circuit_breaker import CircuitBreaker, CircuitState, CircuitStatus
from .costs import CostTable
from .expected_value import Appraisal, ExpectedValue, Finding
from .explanation import ChainStatus, Explanation
from .fixed import Fixed
from .shadow import Shadow, ShadowReport
from .switch import SwitchState
from .threshold import Threshold

__all__ = [
    "Adaptive",
    "Appraisal",
    "Belief",
    "Beliefs",
    "ChainStatus",
    "CircuitBreaker",
    "CircuitState",
    "CircuitStatus",
    "CostTable",
    "ExpectedValue",
    "Explanation",
    "Finding",
    "Fixed",
    "Prior",
    "Shadow",
    "ShadowReport",
    "SwitchState",
    "Threshold",
]
