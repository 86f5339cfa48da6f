"""The adaptive policy can say what it believes and why."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from specflow.chain import ChainLoop, run_sync
from specflow.policies import Adaptive, CostTable, Explanation, SwitchState
from specflow.policies.explanation import predicted_gain
from specflow.testing import AdversaryBackend, ManualClock, OracleBackend, SequenceBackend, Timing


def cost(width: int) -> float:
    """One second, and a tenth for each item more."""
    return 0.9 + 0.1 * width


def explained(backend: type[OracleBackend[int] | AdversaryBackend[int]], rounds: int) -> Explanation:
    """What a policy says after some rounds."""
    clock = ManualClock()
    policy = Adaptive(4)
    made: SequenceBackend[int] = backend([list(range(5 * rounds))], None, Timing(clock, cost))
    loop = ChainLoop(made, policy, clock=clock)
    for _ in range(rounds):
        run_sync(loop.round())
    return policy.explain()


def flat(seconds: dict[int, float]) -> CostTable:
    """A table that has seen each width twice."""
    table = CostTable()
    for width, value in seconds.items():
        table.observe(width, value)
        table.observe(width, value)
    return table


def test_nothing_measured_is_said_so() -> None:
    """Before the first round there is nothing to explain."""
    explanation = Adaptive(4).explain()
    assert explanation.reason == "No round has been measured yet."
    assert (explanation.chains, explanation.execute_seconds, explanation.best_length) == ((), (), 4)


def test_a_working_drafter_is_explained_with_its_gain() -> None:
    """Four right items at 1.4 times the cost are explained as a gain close to 5 / 1.4."""
    explanation = explained(OracleBackend, 40)
    assert explanation.best_length == 4
    assert explanation.predicted_gain == pytest.approx(5 / 1.4, rel=0.1)
    assert explanation.last_round_gain == pytest.approx(5 / 1.4, rel=0.1)
    assert all(rate > 0.8 for rate in explanation.acceptance)
    assert dict(explanation.execute_seconds)[1] == pytest.approx(1.0)
    assert explanation.reason.startswith("Drafts of 4 are expected to run 3.")
    assert [status.state for status in explanation.chains] == [SwitchState.ON]


def test_a_useless_drafter_is_explained_with_its_switch() -> None:
    """After failures the chain is off, with a reason, and with the rounds left to the next probe."""
    explanation = explained(AdversaryBackend, 15)
    (status,) = explanation.chains
    assert status.state is SwitchState.OFF
    assert status.max_length == 0
    assert 0 < status.rounds_to_probe <= 16
    assert "accepted" in status.reason
    assert explanation.acceptance[0] < 0.3


def test_an_explanation_is_a_value_that_travels_as_json() -> None:
    """The snapshot cannot be changed, does not change later, and is JSON-safe with its reason."""
    explanation = explained(OracleBackend, 10)
    with pytest.raises(FrozenInstanceError):
        explanation.best_length = 0  # type: ignore[misc]
    data = json.loads(json.dumps(explanation.as_dict()))
    assert data["reason"] == explanation.reason
    assert data["chains"][0]["state"] == "on"
    assert data["acceptance"] == list(explanation.acceptance)


def test_no_drafts_allowed_has_its_own_reason() -> None:
    """With max_draft 0 the explanation says that this is a setting, not a finding."""
    policy = Adaptive(0)
    clock = ManualClock()
    run_sync(ChainLoop(OracleBackend([[1, 2]], None, Timing(clock, cost)), policy, clock=clock).run())
    assert "max_draft is 0" in policy.explain().reason


@pytest.mark.parametrize(
    ("acceptance", "drafting", "offer_rate", "expected"),
    [
        ([0.5, 0.25], 0.0, 1.0, (1.75 / 1.2, 2)),
        ([0.05, 0.0], 0.0, 1.0, (1.0, 0)),
        ([1.0, 1.0], 5.0, 1.0, (1.0, 0)),
        ([1.0, 1.0], 0.0, 0.5, (2.0 / 1.1, 2)),
    ],
    ids=["pays", "is not accepted", "drafts too slowly", "answers half the time"],
)
def test_the_predicted_gain_is_expected_items_over_expected_time(
    acceptance: list[float], drafting: float, offer_rate: float, expected: tuple[float, int]
) -> None:
    """One chain, one second plain, a tenth per item more: gain and best length are those worked out by hand."""
    costs = flat({1: 1.0, 2: 1.1, 3: 1.2})
    gain, length = predicted_gain(acceptance, costs, flat({1: drafting, 2: drafting}), offer_rate)
    assert gain == pytest.approx(expected[0])
    assert length == expected[1]


def test_without_any_cost_the_gain_is_in_items() -> None:
    """Where nothing has been measured time does not count."""
    assert predicted_gain([1.0, 1.0], CostTable(), CostTable(), 1.0) == (3.0, 2)
