"""The PID controller: where it moves, how far, and when it stops."""

from __future__ import annotations

import pytest

from specflow.errors import InvalidSettingError
from specflow.policies import PID
from tests.specflow.policies.scheduling import Rounds

SURE = [0.999**place for place in range(1, 16)]
LONGEST = 15


def started(policy: PID, num_chains: int = 1, plain: float = 1.0) -> Rounds:
    """A driver that has run the plain rounds that every number of chains begins with."""
    rounds = Rounds(policy, num_chains)
    for _ in range(2):
        assert rounds.admit(*[SURE] * num_chains).total == 0
        rounds.observe(*[0] * num_chains, seconds=plain)
    return rounds


def run(rounds: Rounds, count: int, accepted: int, seconds: float = 1.0) -> None:
    """Rounds in which as many items are accepted."""
    for _ in range(count):
        rounds.admit(SURE)
        rounds.observe(accepted, seconds=seconds)


def test_it_starts_as_described() -> None:
    """Aggressiveness 0.8 and threshold 0.85, and plain rounds first, to have something to compare with."""
    policy = PID(LONGEST)
    assert (policy.state.aggressiveness, policy.state.threshold) == (0.8, 0.85)
    assert policy.state.draft_length == 8
    assert policy.state.acceptance is None
    rounds = started(policy)
    rounds.admit(SURE)
    assert list(rounds.limits) == [8]


def test_accepted_drafts_get_longer_up_to_the_bound() -> None:
    """With everything accepted aggressiveness rises to 1.5, where drafts have full length, and stays there."""
    policy = PID(LONGEST)
    run(started(policy), 400, LONGEST)
    assert policy.state.aggressiveness == 1.5
    assert policy.state.draft_length == LONGEST
    assert policy.state.acceptance == 1.0
    assert policy.state.anomalies == 0


def test_rejected_drafts_get_shorter_down_to_the_bound() -> None:
    """With one item in eight accepted aggressiveness falls to where the acceptance aimed at is met."""
    policy = PID(LONGEST)
    run(started(policy), 1500, 1)
    assert policy.state.draft_length <= 3
    assert policy.state.acceptance is not None
    assert policy.state.acceptance > 0.3
    steep = PID(LONGEST, target=1.0, learning_rate=1.0)
    run(started(steep), 1500, 1)
    assert steep.state.aggressiveness == 0.3


def test_it_moves_every_so_many_items_only() -> None:
    """Nothing changes within 100 emitted items; the hundredth moves it."""
    policy = PID(LONGEST)
    rounds = started(policy)  # emits 2
    run(rounds, 10, 8)  # 9 each
    assert policy.state.updates == 0
    assert policy.state.aggressiveness == 0.8
    run(rounds, 1, 8)
    assert policy.state.updates == 1
    assert policy.state.aggressiveness > 0.8


def test_the_threshold_follows_latency() -> None:
    """Speculation slower per item than plain execution raises the threshold to 0.99, faster lowers it to 0.7."""
    slow, fast = PID(LONGEST), PID(LONGEST)
    run(started(slow), 400, 4, seconds=20.0)
    run(started(fast), 400, 4, seconds=1.0)
    assert slow.state.threshold == 0.99
    assert slow.state.latency_ratio == pytest.approx(4.0)
    assert fast.state.threshold == 0.7
    assert fast.state.latency_ratio == pytest.approx(0.2)


def test_one_stalled_round_is_no_latency() -> None:
    """A round of a hundred times the usual length is left out of the ratio."""
    policy = PID(LONGEST)
    rounds = started(policy)
    run(rounds, 10, 8)
    run(rounds, 1, 8, seconds=100.0)
    assert policy.state.latency_ratio == pytest.approx(1.0 / 9.0)


def test_admission_compares_the_claim_given_the_items_before() -> None:
    """The first item whose conditional claim is below the threshold ends the admission, however small the product."""
    rounds = started(PID(LONGEST, threshold=0.85))
    assert rounds.admit([0.9, 0.8, 0.7, 0.7, 0.5, 0.5]).lengths == (4,)  # conditionals .9 .89 .875 1 .71
    assert rounds.admit([0.8, 0.8]).lengths == (0,)
    assert rounds.admit(None, lengths=[5]).lengths == (5,)


def test_a_collapse_starts_control_over() -> None:
    """Acceptance that falls from nine in ten to nearly nothing is an anomaly: least aggressiveness at once."""
    policy = PID(LONGEST, max_fruitless=1000)
    rounds = started(policy)
    for _ in range(100):
        run(rounds, 9, LONGEST)
        run(rounds, 1, 1)
    before = policy.state
    assert before.anomalies == 0
    assert before.aggressiveness > 1.0
    while policy.state.updates == before.updates:
        run(rounds, 1, 0)
    assert policy.state.anomalies == 1
    assert policy.state.aggressiveness == 0.3


def test_three_fruitless_drafts_pause_a_chain() -> None:
    """After three drafts without an accepted item a chain pauses for 16 rounds, then for 32; others go on."""
    policy = PID(LONGEST)
    rounds = started(policy, num_chains=2)
    drafted = []
    for _ in range(80):
        rounds.admit(SURE, SURE)
        drafted.append(rounds.limits[0] > 0)
        assert rounds.limits[1] > 0
        rounds.observe(0, 3)
    assert drafted[:22] == [True] * 3 + [False] * 16 + [True] * 3
    assert drafted[22:58] == [False] * 32 + [True] * 3 + [False]


def test_an_accepted_item_ends_the_streak() -> None:
    """Two fruitless drafts and a fruitful one, again and again, never pause a chain; nor do rounds without a draft."""
    policy = PID(LONGEST)
    rounds = started(policy)
    for accepted in [0, 0, 1] * 30:
        rounds.admit(SURE)
        assert rounds.limits[0] > 0
        rounds.observe(accepted)
    for _ in range(10):
        rounds.admit([])
        assert rounds.limits[0] > 0
        rounds.observe(0)
    assert policy.state.cooling == 0


def test_it_is_deterministic() -> None:
    """The same rounds lead to the same state: there is no clock and no randomness."""
    states = []
    for _ in range(2):
        policy = PID(LONGEST)
        rounds = started(policy)
        for index in range(300):
            rounds.admit(SURE)
            rounds.observe(index % 7, seconds=1.0 + index % 3)
        states.append(policy.state)
    assert states[0] == states[1]


def test_no_drafts_are_legal() -> None:
    """With max_draft 0 everything runs plainly."""
    rounds = started(PID(0))
    assert rounds.admit([]).lengths == (0,)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_draft", -1), ("aggressiveness", 0.2), ("aggressiveness", 1.6), ("threshold", 0.5), ("threshold", 1.0),
        ("learning_rate", -0.1), ("target", 1.5), ("update_every", 0), ("window", 0), ("max_fruitless", 0),
        ("cooldown", 0), ("false_alarm", 2.0),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    """Each bound is checked, and the message names the setting."""
    settings: dict[str, float] = {"max_draft": 4, setting: value}
    with pytest.raises(InvalidSettingError, match=setting):
        PID(**settings)  # type: ignore[arg-type]
