"""Public fakes and checkers.

Try a policy without a backend, a backend without a model, and prove both exact. Run a workflow alone
(:func:`run_serial`) or in virtual time (:func:`simulate`), and compare.
"""

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
from .predictors import NEVER_RETURNED, Adversary, Flaky, Oracle, different_from
from .serial import SerialEffect, SerialRun, run_serial
from .virtual import EPOCH, Durations, Simulation, Span, Timed, simulate, spread

__all__ = [
    "DEFAULT_POLICIES",
    "EPOCH",
    "NEVER_RETURNED",
    "PHASES",
    "WRONG",
    "Adversary",
    "AdversaryBackend",
    "CheckedRun",
    "Driver",
    "Durations",
    "EnumeratedLaw",
    "ExactnessReport",
    "Fault",
    "FaultyBackend",
    "Flaky",
    "InjectedFaultError",
    "ManualClock",
    "MispredictingBackend",
    "Oracle",
    "OracleBackend",
    "ScriptedBackend",
    "ScriptedPolicy",
    "SequenceBackend",
    "SerialEffect",
    "SerialRun",
    "Simulation",
    "Span",
    "SpeculativeProcess",
    "Timed",
    "Timing",
    "check_exact",
    "different_from",
    "enumerate_law",
    "run_serial",
    "simulate",
    "spread",
]
