"""Public fakes and checkers: try a policy without a backend, a backend without a model, and prove both exact."""

from __future__ import annotations

from .exactness import (
    DEFAULT_POLICIES,
    PHASES,
    CheckedRun,
    Driver,
    ExactnessReport,
    Fault,
    FaultyBackend,
    InjectedFaultError,
    MispredictingBackend,
    check_exact,
)
from .fakes import (
    WRONG,
    AdversaryBackend,
    ManualClock,
    OracleBackend,
    ScriptedBackend,
    ScriptedPolicy,
    SequenceBackend,
    Timing,
)
from .laws import EnumeratedLaw, SpeculativeProcess, enumerate_law

__all__ = [
    "DEFAULT_POLICIES",
    "PHASES",
    "WRONG",
    "AdversaryBackend",
    "CheckedRun",
    "Driver",
    "EnumeratedLaw",
    "ExactnessReport",
    "Fault",
    "FaultyBackend",
    "InjectedFaultError",
    "ManualClock",
    "MispredictingBackend",
    "OracleBackend",
    "ScriptedBackend",
    "ScriptedPolicy",
    "SequenceBackend",
    "SpeculativeProcess",
    "Timing",
    "check_exact",
    "enumerate_law",
]
