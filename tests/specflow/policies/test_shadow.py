"""A shadow scores and counts but starts nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.policies import ExpectedValue, Fixed, Shadow
from specflow.speculation import Resolution
from tests.specflow.policies.opportunities import follow, guess, opportunity, teach


@given(st.lists(st.booleans(), max_size=60))
def test_nothing_is_ever_started_and_every_would_be_start_is_counted(hits: list[bool]) -> None:
    """The shadow of a policy refuses all, and counts what the same policy alone would have started."""
    question = opportunity(money=0.02, tokens=3.0)
    alone = follow(ExpectedValue(), hits, question)
    policy = Shadow(ExpectedValue())
    assert not any(follow(policy, hits, question))
    report = policy.report()
    assert report.asked == len(hits)
    assert report.allowed == sum(alone)
    assert report.allowed_by_step == ({"search": sum(alone)} if any(alone) else {})
    assert report.money == pytest.approx(0.02 * sum(alone))
    assert report.tokens == pytest.approx(3.0 * sum(alone))
    assert (report.hits, report.misses) == (sum(hits), len(hits) - sum(hits))


def test_asking_again_counts_once() -> None:
    """A refused opportunity that comes up again before its guess is resolved is one opportunity, allowed or not."""
    policy = Shadow(Fixed(1))
    for _ in range(5):
        assert not policy.allows(opportunity())
        assert not policy.allows(opportunity(guess(position=1)))
    assert (policy.report().asked, policy.report().allowed) == (2, 2)
    policy.learn(Resolution(guess(), hit=False))
    policy.allows(opportunity())
    policy.allows(opportunity(guess(position=1)))
    assert policy.report().asked == 3


def test_what_is_allowed_later_counts_as_allowed() -> None:
    """An answer that turns from no to yes while the guess is open, and back, is one start."""
    policy = Shadow(ExpectedValue())
    for wait in (0.0, 8.0, 0.0, 8.0):
        policy.allows(opportunity(wait_seconds=wait, money=0.01))
    report = policy.report()
    assert (report.asked, report.allowed, report.money) == (1, 1, 0.01)


def test_guesses_that_are_never_resolved_are_forgotten() -> None:
    """Runs that fail leave a bounded number of open opportunities behind."""
    policy = Shadow(Fixed(1))
    for position in range(3000):
        policy.allows(opportunity(guess(position=position)))
    assert policy.report().asked == 3000
    assert len(policy._open) <= 1024


def test_the_policy_inside_learns() -> None:
    """What was learned in the shadow is there when the policy is let out."""
    inside = ExpectedValue()
    teach(Shadow(inside), [False] * 40)
    assert not inside.allows(opportunity())


def test_a_report_is_a_snapshot() -> None:
    """A report does not change afterwards, and cannot be changed."""
    policy = Shadow(Fixed(1))
    policy.learn(Resolution(guess(), hit=True))
    report = policy.report()
    policy.learn(Resolution(guess(), hit=True))
    policy.allows(opportunity())
    assert (report.hits, report.allowed_by_step) == (1, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.hits = 2  # type: ignore[misc]


def test_the_hit_rate_of_nothing_is_zero() -> None:
    """A report before the first resolution has a rate; later it is hits per guess."""
    policy = Shadow(Fixed(1))
    assert policy.report().hit_rate == 0.0
    teach(policy, [True, False, False, False])
    assert policy.report().hit_rate == 0.25
