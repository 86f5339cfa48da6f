"""Do in-order work early: predict, execute in parallel, verify, commit or roll back."""

from __future__ import annotations

from .admission import Frontier
from .chain import ChainLoop, run_sync
from .errors import (
    AdmissionClosedError,
    BackendContractError,
    DefinitionError,
    ExecutionError,
    InvalidSettingError,
    MisuseError,
    SpecflowError,
    SuspendedError,
)
from .instrumentation import Counters, CounterSnapshot, Recorder, StructlogObserver
from .policies import Adaptive, CostTable, Explanation, Fixed, Threshold
from .protocols import ChainBackend, Clock, Observer, Policy
from .types import (
    AcceptPrefix,
    Admission,
    ChainId,
    ChainView,
    Draft,
    Mode,
    PhaseSeconds,
    Round,
    RoundReport,
)

__all__ = [
    "AcceptPrefix",
    "Adaptive",
    "Admission",
    "AdmissionClosedError",
    "BackendContractError",
    "ChainBackend",
    "ChainId",
    "ChainLoop",
    "ChainView",
    "Clock",
    "CostTable",
    "CounterSnapshot",
    "Counters",
    "DefinitionError",
    "Draft",
    "ExecutionError",
    "Explanation",
    "Fixed",
    "Frontier",
    "InvalidSettingError",
    "MisuseError",
    "Mode",
    "Observer",
    "PhaseSeconds",
    "Policy",
    "Recorder",
    "Round",
    "RoundReport",
    "SpecflowError",
    "StructlogObserver",
    "SuspendedError",
    "Threshold",
    "run_sync",
]
