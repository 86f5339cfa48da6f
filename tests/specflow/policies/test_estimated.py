"""Survival estimates learned from what was accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specflow.admission import Frontier
from specflow.errors import AdmissionClosedError, InvalidSettingError
from specflow.policies import Estimated, Fixed
from specflow.types import ChainView, RoundReport
from tests.specflow.policies.scheduling import Rounds


class Watcher(Fixed):
    """Executes everything one item at a time, and keeps what it saw."""

    def __init__(self, num_draft: int) -> None:
        super().__init__(num_draft)
        self.seen: list[list[float]] = []
        self.reported: list[Sequence[float] | None] = []

    def admit(self, frontier: Frontier) -> None:
        """Look before each step."""
        self.seen = []
        for index in range(len(frontier)):
            shown: list[float] = []
            while (survival := frontier.survival(index)) is not None:
                shown.append(survival)
                frontier.admit(index)
            self.seen.append(shown)

    def observe(self, report: RoundReport) -> None:
        """Keep what is reported."""
        self.reported = list(report.survival)


def accepted_of(chances: Sequence[float], rng: random.Random) -> int:
    """How many items of a draft are accepted, with these chances given those before."""
    for place, chance in enumerate(chances):
        if rng.random() >= chance:
            return place
    return len(chances)


def test_a_drafter_without_estimates_gets_its_acceptance_profile() -> None:
    """After 3000 drafts with chances 0.9, 0.6, 0.3 the survival shown is near their running products.

    Tolerance 0.15: a bucket remembers about 100 trials of the first item and 50 of the third, so that the deviation of
    what is shown is 0.05 at most. It holds with this seed; over seeds it would fail for about one in a hundred.
    """
    watcher, rng = Watcher(3), random.Random(1)
    rounds = Rounds(Estimated(watcher, 3))
    for _ in range(3000):
        rounds.admit(None)
        rounds.observe(accepted_of((0.9, 0.6, 0.3), rng))
    rounds.admit(None)
    assert rounds.policy is not watcher
    for shown, true in zip(watcher.seen[0], (0.9, 0.54, 0.162), strict=True):
        assert shown == pytest.approx(true, abs=0.15)
    assert isinstance(rounds.policy, Estimated)
    assert rounds.policy.rates()[0] == pytest.approx(0.9, abs=0.1)


def test_an_overconfident_drafter_is_corrected() -> None:
    """A drafter that claims 0.95 where 0.5 comes true is shown near 0.5; an honest one is left alone."""
    for claim, true in ((0.95, 0.5), (0.7, 0.7)):
        watcher, rng = Watcher(1), random.Random(2)
        rounds = Rounds(Estimated(watcher, 1))
        for _ in range(2000):
            rounds.admit([claim])
            rounds.observe(accepted_of([true], rng))
        rounds.admit([claim])
        assert watcher.seen[0][0] == pytest.approx(true, abs=0.1)


def test_runs_of_luck_are_a_context() -> None:
    """Where acceptance comes in runs, a chain after a success is rated higher than one after a failure."""
    watcher = Watcher(1)
    rounds = Rounds(Estimated(watcher, 1), 2)
    for index in range(600):
        rounds.admit(None, None)
        lucky = (index // 20) % 2
        rounds.observe(lucky, 1 - lucky)
    rounds.admit(None, None)
    high, low = sorted((watcher.seen[0][0], watcher.seen[1][0]), reverse=True)
    assert high > 0.85
    assert low < 0.15


def test_the_callers_context_is_used() -> None:
    """Chains in contexts of unequal worth are told apart, although both just had a success."""

    def even(view: ChainView) -> bool:
        return view.chain_id % 2 == 0

    watcher = Watcher(1)
    rounds = Rounds(Estimated(watcher, 1, context=even), 2)
    for index in range(400):
        rounds.admit(None, None)
        rounds.observe(1 if index % 10 else 0, 0 if index % 10 else 1)
    rounds.admit(None, None)
    rounds.observe(1, 1)
    rounds.admit(None, None)  # after a success each, so that nothing but the context differs
    assert watcher.seen[0][0] > watcher.seen[1][0] + 0.2


def test_the_report_holds_what_was_shown() -> None:
    """The policy inside learns from the estimates that it saw, not from the claims."""
    watcher = Watcher(3)
    rounds = Rounds(Estimated(watcher, 3), 2)
    for _ in range(5):
        rounds.admit([0.9, 0.8, 0.7], None)
        shown = [list(estimates) for estimates in watcher.seen]
        rounds.observe(1, 2)
        assert [pytest.approx(list(estimates or ())) for estimates in watcher.reported] == shown


def test_estimates_fall_and_only_the_next_one_is_shown() -> None:
    """Corrected estimates never rise along a draft, and items behind the next one change nothing that is shown."""
    shown = []
    for tail in ([0.7, 0.6], [0.1, 0.0]):
        watcher = Watcher(4)
        rounds = Rounds(Estimated(watcher, 4))
        for _ in range(20):
            rounds.admit([0.9, 0.9, 0.5, 0.5])
            rounds.observe(3)
        rounds.admit([0.9, 0.8, *tail])
        shown.append(watcher.seen[0])
        assert watcher.seen[0] == sorted(watcher.seen[0], reverse=True)
    assert shown[0][:2] == shown[1][:2]


def test_what_was_given_up_is_tried_again() -> None:
    """A position that is no longer executed is forgotten slowly, so that its rate recovers towards that of others."""

    class FirstOnly(Watcher):
        def admit(self, frontier: Frontier) -> None:
            frontier.admit(0)
            self.seen = [[frontier.survival(0) or 0.0]]

    watcher, other = Watcher(2), FirstOnly(2)
    policy = Estimated(watcher, 2)
    rounds = Rounds(policy)
    for _ in range(100):
        rounds.admit(None)
        rounds.observe(1)
    rounds.admit(None)
    assert watcher.seen[0][1] < 0.15
    policy._policy = other  # the same memory under a policy that leaves the second position alone
    for _ in range(3000):
        rounds.admit(None)
        rounds.observe(1)
    assert other.seen[0][0] > 0.6


class Probing(Fixed):
    """Uses every method of a frontier."""

    def admit(self, frontier: Frontier) -> None:
        """Two at once, one revealed, one closed, one in full."""
        assert len(frontier) == 4
        frontier.admit(0, 2)
        assert frontier.admitted(0) == 2
        assert frontier.available(0) == 1
        with pytest.raises(AdmissionClosedError):
            frontier.admit(0, 2)
        assert len(frontier.reveal(1) or ()) == 3
        frontier.close(2)
        assert frontier.survival(2) is None
        frontier.admit_all()
        assert frontier.survival(3) is None


def test_the_whole_frontier_is_there() -> None:
    """Counts, closing, revealing and admitting all work through the correction, and mark what they should."""
    admission = Rounds(Estimated(Probing(3), 3), 4).admit(*[[0.9, 0.8, 0.7]] * 4)
    assert admission.lengths == (3, 3, 0, 3)
    assert admission.anticipated == (False, True, False, False)


def test_settings_are_checked() -> None:
    """A negative length is refused, and drafts never exceed the length that rates are kept for."""
    with pytest.raises(InvalidSettingError, match="max_draft"):
        Estimated(Fixed(1), -1)
    rounds = Rounds(Estimated(Fixed(9), 2))
    rounds.admit(None)
    assert list(rounds.limits) == [2]
