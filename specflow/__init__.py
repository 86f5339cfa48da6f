"""Do in-order work early: predict, execute in parallel, verify, commit or roll back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .admission import Frontier
from .chain import ChainLoop, run_sync
from .effects import Effect
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
from .protocols import ChainBackend, Clock, Observer, Policy, Predictor, RunAheadPolicy, Store, Verifier
from .speculation import Budget, Call, Prediction, Verdict
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

if TYPE_CHECKING:
    from .definitions import Attempt, Retry, Step, Workflow, given, step, workflow
    from .graph import Pipeline
    from .outbox import NotSent, Sent
    from .replay import Context
    from .report import RunReport
    from .runtime import CommittedEvent, RetractedEvent, RunResult, SpeculativeEvent, fork, read_state, resume, run
    from .state import State

__all__ = [
    "AcceptPrefix",
    "Adaptive",
    "Admission",
    "AdmissionClosedError",
    "Attempt",
    "BackendContractError",
    "Budget",
    "Call",
    "ChainBackend",
    "ChainId",
    "ChainLoop",
    "ChainView",
    "Clock",
    "CommittedEvent",
    "Context",
    "CostTable",
    "CounterSnapshot",
    "Counters",
    "DefinitionError",
    "Draft",
    "Effect",
    "ExecutionError",
    "Explanation",
    "Fixed",
    "Frontier",
    "InvalidSettingError",
    "MisuseError",
    "Mode",
    "NotSent",
    "Observer",
    "PhaseSeconds",
    "Pipeline",
    "Policy",
    "Prediction",
    "Predictor",
    "Recorder",
    "RetractedEvent",
    "Retry",
    "Round",
    "RoundReport",
    "RunAheadPolicy",
    "RunReport",
    "RunResult",
    "Sent",
    "SpecflowError",
    "SpeculativeEvent",
    "State",
    "Step",
    "Store",
    "StructlogObserver",
    "SuspendedError",
    "Threshold",
    "Verdict",
    "Verifier",
    "Workflow",
    "fork",
    "given",
    "read_state",
    "resume",
    "run",
    "run_sync",
    "step",
    "workflow",
]

_ROOMS = {
    "Attempt": ".definitions",
    "CommittedEvent": ".runtime",
    "Context": ".replay",
    "NotSent": ".outbox",
    "Pipeline": ".graph",
    "RetractedEvent": ".runtime",
    "Retry": ".definitions",
    "RunReport": ".report",
    "RunResult": ".runtime",
    "Sent": ".outbox",
    "SpeculativeEvent": ".runtime",
    "State": ".state",
    "Step": ".definitions",
    "Workflow": ".definitions",
    "fork": ".runtime",
    "given": ".definitions",
    "read_state": ".runtime",
    "resume": ".runtime",
    "run": ".runtime",
    "step": ".definitions",
    "workflow": ".definitions",
}
"""Where the names of workflows live. These rooms are entered on first use: decoding needs neither stores nor a loop."""


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_ROOMS[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
