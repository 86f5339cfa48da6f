"""Shorter drafts at boundaries, whatever the policy inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specflow.errors import InvalidSettingError
from specflow.policies import Boundary, CostScheduled, Fixed, RoundCosts
from specflow.types import ChainId, ChainView
from tests.specflow.policies.scheduling import Rounds, table


def views(*positions: int, room: int = 50) -> list[ChainView]:
    """Chains at these positions."""
    return [ChainView(ChainId(chain), position, room) for chain, position in enumerate(positions)]


def since_tenth(view: ChainView) -> int | None:
    """Every tenth item ends a sentence; before the first end nothing is known."""
    return view.position % 10 if view.position >= 10 else None


@pytest.mark.parametrize(("near", "expected"), [(1, [8, 2, 8, 8]), (3, [8, 2, 2, 8])])
def test_drafts_that_begin_at_a_boundary_are_short(near: int, expected: list[int]) -> None:
    """Limits are cut where the newest item, or one of the newest, is a boundary, and nowhere else."""
    policy = Boundary(Fixed(8), since_tenth, short=2, near=near)
    assert list(policy.limits(views(5, 10, 12, 15))) == expected


def test_less_room_and_shorter_plans_stay() -> None:
    """A cap never lengthens a draft: neither beyond the room of a chain nor beyond what the policy inside wants."""
    assert list(Boundary(Fixed(8), since_tenth, short=5).limits(views(10, room=3))) == [3]
    assert list(Boundary(Fixed(1), since_tenth, short=5).limits(views(10))) == [1]
    assert list(Boundary(Fixed(8), since_tenth, short=0).limits(views(20))) == [0]


def test_the_policy_inside_knows_the_cap() -> None:
    """A planner inside counts the seconds of the short draft, not of the long one it would have asked for."""
    costs = RoundCosts({1: table(lambda width: 1.0 + 0.25 * width)}, {1: table(lambda length: length * 1.0)})
    always: Callable[[ChainView], int] = lambda _view: 0  # noqa: E731 - a callable for a test
    short = Rounds(Boundary(CostScheduled(6, costs), always, short=1))
    # T(1) = 1.25 + 1 second of drafting: the bound is 0.25 / 2.25 = 0.111; with six seconds it would be 0.034.
    assert short.admit([0.1]).lengths == (0,)
    assert Rounds(CostScheduled(6, costs)).admit([0.1]).lengths == (1,)


def test_admission_and_reports_are_passed_on() -> None:
    """The policy inside admits and learns as if it were alone."""
    seen: list[object] = []

    class Spy(Fixed):
        def observe(self, report: object) -> None:
            seen.append(report)

    inner = Spy(4)
    rounds = Rounds(Boundary(inner, lambda _view: None))
    assert rounds.admit([0.9, 0.8]).lengths == (2,)
    report = rounds.observe(1)
    assert seen == [report]
    assert Boundary(inner, since_tenth).policy is inner


def test_settings_are_checked() -> None:
    """A negative cap and a reach of nothing are refused."""
    with pytest.raises(InvalidSettingError, match="short"):
        Boundary(Fixed(2), since_tenth, short=-1)
    with pytest.raises(InvalidSettingError, match="near"):
        Boundary(Fixed(2), since_tenth, near=0)
