"""Counters, log events and the recorder see every round and change nothing."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import structlog.testing

from specflow.chain import ChainLoop, run_sync
from specflow.instrumentation import EVENTS, ROUND_COMMITTED, Counters, Recorder, StructlogObserver
from specflow.policies import Fixed
from specflow.protocols import Observer
from specflow.testing import ManualClock, ScriptedBackend, ScriptedPolicy, Timing
from specflow.types import PhaseSeconds


def observed(*observers: Observer) -> None:
    """Two chains, four rounds: drafts of three, of which 3, 0, -, 1 and 1, 2 items are right."""
    clock = ManualClock()
    timing = Timing(clock, execute=float, predict=lambda longest: longest / 2)
    backend = ScriptedBackend(["abcdefghi", "klmno"], [[3, 0, -1, 1], [1, 2]], timing)
    policy = ScriptedPolicy(limits=[3], admits=[2, 3])
    run_sync(ChainLoop(backend, policy, observers, clock).run())


def test_counters_add_up_what_the_reports_say() -> None:
    """Every total equals the sum over the recorded reports."""
    counters, recorder = Counters(), Recorder()
    observed(counters, recorder)
    snapshot = counters.snapshot()
    reports = recorder.reports
    assert snapshot.rounds == len(reports) > 3
    assert snapshot.chain_rounds == sum(len(report.chain_ids) for report in reports)
    assert snapshot.drafted == sum(sum(report.drafted) for report in reports)
    assert snapshot.admitted == sum(sum(report.admitted) for report in reports)
    assert snapshot.accepted == sum(sum(report.accepted) for report in reports)
    assert snapshot.emitted == 14
    assert snapshot.seconds == PhaseSeconds(
        predict=sum(report.seconds.predict for report in reports),
        execute=sum(report.seconds.execute for report in reports),
    )
    for position in range(len(snapshot.admitted_by_position)):
        assert snapshot.admitted_by_position[position] == sum(
            admitted > position for report in reports for admitted in report.admitted
        )
        assert snapshot.accepted_by_position[position] == sum(
            accepted > position for report in reports for accepted in report.accepted
        )


def test_derived_numbers_are_the_fields_ratios() -> None:
    """Mean accepted length, pass rate and utilisation are computed from the totals as the field defines them."""
    counters = Counters()
    observed(counters)
    snapshot = counters.snapshot()
    assert snapshot.mean_accepted_length == snapshot.emitted / snapshot.chain_rounds > 1.0
    assert snapshot.verification_pass_rate == snapshot.accepted / snapshot.admitted
    assert snapshot.draft_utilisation == snapshot.accepted / snapshot.drafted
    assert snapshot.draft_utilisation < snapshot.verification_pass_rate < 1.0
    assert snapshot.acceptance_by_position[0] > snapshot.acceptance_by_position[2]


def test_a_run_without_drafts_has_ratios_of_zero_and_length_one() -> None:
    """Plain execution divides by nothing: no pass rate, one item per round."""
    counters = Counters()
    run_sync(ChainLoop(ScriptedBackend(["abc"], [[0]]), Fixed(0), [counters]).run())
    snapshot = counters.snapshot()
    assert (snapshot.mean_accepted_length, snapshot.verification_pass_rate, snapshot.draft_utilisation) == (
        1.0,
        0.0,
        0.0,
    )
    assert snapshot.acceptance_by_position == ()


def test_nothing_counted_is_a_snapshot_too() -> None:
    """A snapshot before the first round holds zeros."""
    snapshot = Counters().snapshot()
    assert (snapshot.rounds, snapshot.emitted, snapshot.mean_accepted_length) == (0, 0, 0.0)


def test_a_snapshot_is_a_value() -> None:
    """It cannot be changed, does not follow later rounds, and travels as JSON with the derived numbers."""
    counters = Counters()
    before = counters.snapshot()
    observed(counters)
    assert before.rounds == 0
    with pytest.raises(FrozenInstanceError):
        before.rounds = 1  # type: ignore[misc]
    snapshot = counters.snapshot()
    data = json.loads(json.dumps(snapshot.as_dict()))
    assert data["emitted"] == 14
    assert data["mean_accepted_length"] == snapshot.mean_accepted_length
    assert data["acceptance_by_position"] == list(snapshot.acceptance_by_position)
    assert data["seconds"]["execute"] == snapshot.seconds.execute


def test_log_events_have_fixed_names_and_keys() -> None:
    """Each round logs one event with exactly the documented keys, through whatever structlog is configured to do."""
    recorder = Recorder()
    with structlog.testing.capture_logs() as entries:
        observed(StructlogObserver(), recorder)
    assert len(entries) == len(recorder.reports)
    for entry, report in zip(entries, recorder.reports, strict=True):
        assert entry["event"] == ROUND_COMMITTED
        assert entry["log_level"] == "info"
        assert set(entry) - {"event", "log_level"} == set(EVENTS[ROUND_COMMITTED])
        assert (entry["round"], entry["emitted"]) == (report.index, sum(report.emitted))


def test_a_logger_can_be_handed_over() -> None:
    """Any object with info() will do; structlog is then not needed."""

    class Notebook:
        """Keeps events."""

        def __init__(self) -> None:
            self.events: list[tuple[str, dict[str, Any]]] = []

        def info(self, event: str, **values: Any) -> None:
            self.events.append((event, values))

    notebook = Notebook()
    observed(StructlogObserver(notebook))
    assert {event for event, _ in notebook.events} == {ROUND_COMMITTED}
    assert all(set(values) == set(EVENTS[ROUND_COMMITTED]) for _, values in notebook.events)


def test_logging_leaves_structlog_unconfigured() -> None:
    """Building and using the observer configures nothing."""
    structlog.reset_defaults()
    observed(StructlogObserver(logger=structlog.testing.CapturingLogger()))
    StructlogObserver()
    assert not structlog.is_configured()


def test_the_recorder_keeps_reports_in_order() -> None:
    """Reports come out as a tuple, oldest first, and an earlier tuple does not grow."""
    recorder = Recorder()
    nothing = recorder.reports
    observed(recorder)
    assert nothing == ()
    assert [report.index for report in recorder.reports] == list(range(len(recorder.reports)))
