"""The public fakes do what they are told, no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specflow.admission import Frontier
from specflow.chain import ChainLoop, run_sync
from specflow.errors import InvalidSettingError
from specflow.instrumentation import Recorder
from specflow.policies import Fixed
from specflow.testing import (
    WRONG,
    AdversaryBackend,
    ManualClock,
    OracleBackend,
    ScriptedBackend,
    ScriptedPolicy,
    SequenceBackend,
    Timing,
)
from specflow.types import AcceptPrefix, Admission, ChainId, ChainView, Draft


def test_a_manual_clock_moves_when_told() -> None:
    """Time stands still until it is advanced, and never goes back."""
    clock = ManualClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(0.5)
    assert clock() == 5.5
    with pytest.raises(InvalidSettingError):
        clock.advance(-1.0)


def test_wrong_equals_nothing_but_itself() -> None:
    """The always-wrong value differs from every item, and shows itself in messages."""
    assert WRONG != 0
    assert WRONG is not None
    assert repr(WRONG) == "WRONG"


def test_phases_of_a_sequence_backend_commit_only_in_commit() -> None:
    """Predicting, executing and verifying move no position; discard drops the round; commit moves exactly once."""
    backend = SequenceBackend(["abcde"], lambda chain, position, future: Draft(future))
    admission = Admission((2,), (False,))
    drafts = run_sync(backend.predict([2]))
    outcome = run_sync(backend.execute(drafts, admission))
    assert backend.in_flight
    verdicts = run_sync(backend.verify(drafts, admission, outcome))
    assert list(verdicts) == [AcceptPrefix(2, "c")]
    assert list(backend.history(0)) == []
    backend.discard()
    assert not backend.in_flight
    assert list(backend.history(0)) == []
    assert [list(items) for items in run_sync(backend.commit(verdicts))] == [["a", "b", "c"]]
    assert backend.chains() == [ChainView(ChainId(0), 3, 1)]


def test_a_draft_function_sees_where_it_is_and_what_is_true() -> None:
    """It is called with chain, position and the true items ahead, as many as may be drafted, and not for limit 0."""
    calls: list[tuple[int, int, str]] = []

    def draft(chain: int, position: int, future: Sequence[str]) -> Draft[str]:
        calls.append((chain, position, "".join(future)))
        return Draft(())

    run_sync(ChainLoop(SequenceBackend(["abc", "xyz"], draft), ScriptedPolicy(limits=[5, 0])).run())
    assert calls == [(0, 0, "ab"), (1, 1, "y")]


def test_executions_are_counted_with_their_plain_items() -> None:
    """num_executed counts chains and admitted drafts of each execution, num_executions the executions."""
    backend = AdversaryBackend(["abcd"])
    run_sync(ChainLoop(backend, Fixed(2)).run())
    assert backend.num_executions == 4
    assert backend.num_executed == 4 + (2 + 2 + 1 + 0)


def test_the_oracle_is_always_right() -> None:
    """Every draft of the oracle is accepted whole."""
    recorder = Recorder()
    run_sync(ChainLoop(OracleBackend(["abcdefgh"], survival=0.7), Fixed(3), [recorder]).run())
    assert all(report.accepted == report.drafted for report in recorder.reports)
    assert recorder.reports[0].survival == ([0.7, 0.7, 0.7],)


@pytest.mark.parametrize("survival", [1.0, None, 0.2])
def test_the_adversary_is_always_wrong_and_as_sure_as_told(survival: float | None) -> None:
    """No draft of the adversary is ever accepted, and its estimates are those asked for."""
    recorder = Recorder()
    run_sync(ChainLoop(AdversaryBackend(["abcd"], survival), Fixed(2), [recorder]).run())
    assert all(report.accepted == (0,) for report in recorder.reports)
    assert recorder.reports[0].survival == (None if survival is None else [survival] * 2,)


def test_a_script_decides_how_much_of_each_draft_is_right() -> None:
    """Successive drafts are right for the scripted number of items; a negative number is an empty draft."""
    recorder = Recorder()
    backend = ScriptedBackend([range(30)], [[2, 0, -1, 3]])
    run_sync(ChainLoop(backend, Fixed(3), [recorder]).run())
    assert [report.accepted[0] for report in recorder.reports[:5]] == [2, 0, 0, 3, 2]
    assert [report.drafted[0] for report in recorder.reports[:5]] == [3, 3, 0, 3, 3]


def test_timing_charges_drafting_only_where_a_draft_is_asked_for() -> None:
    """Plain rounds cost their execution alone; the default drafting time is zero."""
    clock = ManualClock()
    timing = Timing(clock, execute=float, predict=lambda longest: 100.0 * longest)
    run_sync(ChainLoop(OracleBackend(["ab"], timing=timing), Fixed(0), clock=clock).run())
    assert clock() == 2.0
    clock = ManualClock()
    run_sync(ChainLoop(OracleBackend(["ab"], timing=Timing(clock, float)), Fixed(1), clock=clock).run())
    assert clock() == 2.0


def test_a_scripted_policy_turns_with_rounds_and_chains() -> None:
    """Limits and lengths follow the script, shifted by one per chain, and never exceed what was drafted."""
    recorder = Recorder()
    policy = ScriptedPolicy(limits=[3, 1], admits=[0, 9])
    run_sync(ChainLoop(OracleBackend(["abcdefgh", "abcdefgh"]), policy, [recorder]).run())
    assert [report.limits for report in recorder.reports[:2]] == [(3, 1), (1, 3)]
    assert [report.admitted for report in recorder.reports[:2]] == [(0, 1), (1, 0)]


def test_a_scripted_policy_without_lengths_executes_everything() -> None:
    """Leaving the lengths out admits all that was drafted."""
    policy = ScriptedPolicy(limits=[2])
    frontier = Frontier([Draft("ab"), Draft("c")])
    policy.admit(frontier)
    assert frontier.decision().lengths == (2, 1)
