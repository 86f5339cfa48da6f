"""The fixed policy drafts one length and executes all of it."""

from __future__ import annotations

import pytest

from specflow.chain import ChainLoop, run_sync
from specflow.errors import InvalidSettingError
from specflow.instrumentation import Recorder
from specflow.policies import Fixed
from specflow.testing import AdversaryBackend, OracleBackend


def test_every_chain_gets_the_same_length_and_all_of_it_is_executed() -> None:
    """Limits are num_draft for all chains, and admitted equals drafted, whatever the estimates and results."""
    recorder = Recorder()
    run_sync(ChainLoop(AdversaryBackend(["abcdefgh", "klmnop"], survival=0.01), Fixed(2), [recorder]).run())
    assert recorder.reports[0].limits == (2, 2)
    assert all(report.admitted == report.drafted == report.limits for report in recorder.reports)


def test_zero_is_plain_execution() -> None:
    """With num_draft 0 each round emits one item per chain and drafts none."""
    backend = OracleBackend(["abcdef"])
    assert run_sync(ChainLoop(backend, Fixed(0)).run()) == 6
    assert backend.num_executed == 6


def test_a_negative_length_is_refused() -> None:
    """The mistake is reported when the policy is built."""
    with pytest.raises(InvalidSettingError, match="num_draft=-1"):
        Fixed(-1)
