"""Faults that random programs have found in the engine, each as the smallest program that shows it."""

from __future__ import annotations

import pytest

from tests.specflow.oracle.checks import Case, Example, check
from tests.specflow.oracle.test_crashes import Example as Killed
from tests.specflow.oracle.test_crashes import check_killed

FOUND: dict[str, Example] = {
    "a task that was told to stop while its report was on its way kept its slot": Example(
        (("while", 0, (("call", "read", 0, 0),)),), [2, 0, 0, 0], Case(("adversary",), depth=2, seed=180)
    ),
    "branches of a gather shared the objects they were called with": Example(
        (
            (
                "gather",
                (
                    ("flow", (), 0),
                    ("flow", (("call", "reserve", 0, 1),), 0),
                    ("flow", (("gather", (("step", "charge", 2),), False),), 0),
                ),
                True,
            ),
        ),
        [0, 0, 0, 0],
        Case(("oracle",), depth=0, seed=7),
    ),
    "events shown by a world were forgotten when its guess about the next call held": Example(
        (("show", "swap", 0), ("call", "write", 0, 0)),
        [0, 0, 0, 0],
        Case(("oracle", "oracle", "adversary"), depth=2, seed=22),
    ),
    "events shown by a world were forgotten when it was rebuilt": Example(
        (("show", "write", 0), ("show", "write", 0), ("has", 0, 0)),
        [0, 0, 0, 0],
        Case(("oracle",), depth=2, seed=3),
    ),
    "events shown by parallel branches were forgotten when they came together": Example(
        (
            ("call", "judged", 0, 0),
            ("gather", (("flow", (("gather", (("flow", (("emit", 0),), 0),), False),), 0),), True),
        ),
        [0, 0, 0, 0],
        Case(("adversary",), seed=5),
    ),
    "what parallel branches had read was not checked when a step before them wrote it": Example(
        (("call", "swap", 0, 0), ("gather", (("step", "swap", 0),), False)), [0, 0, 0, 0], Case(("oracle",), seed=5)
    ),
    "effects of parallel branches that had come together on a wrong guess were not undone": Example(
        (("call", "reserve", 0, 0), ("map", "reserve")), [0, 0, 0, 0], Case(("adversary",), ahead=True, seed=2)
    ),
    "effects of a world that was rebuilt were not undone": Example(
        (("call", "swap", 0, 0), ("scan", 0), ("call", "reserve", 0, 0)), [0, 0, 0, 0], Case(("oracle",), ahead=True)
    ),
    "a branch that was rebuilt when its guess held counted twice as finished": Example(
        (
            (
                "gather",
                (
                    (
                        "flow",
                        (
                            ("show", "write", 0),
                            (
                                "gather",
                                (("step", "write", 0), ("flow", (("show", "write", 0), ("show", "reserve", 0)), 0)),
                                False,
                            ),
                        ),
                        0,
                    ),
                ),
                False,
            ),
        ),
        [0, 0, 0, 0],
        Case(("oracle",), ahead=True, seed=5),
    ),
    "a world that fell a moment ago was answered with a result that could be reused": Example(
        (
            ("call", "kind", 0, 1),
            ("call", "kind", 1, 0),
            ("call", "kind", 0, 1),
            ("show", "kind", 0),
            ("show", "kind", 0),
        ),
        [0, 0, 0, 0],
        Case(("both",), depth=2, width=3, seconds=0.0, seed=166),
    ),
    "a world that fell a moment ago was launched": Example(
        (("map", "kind"), ("map", "kind"), ("map", "kind")), [2, 0, 0, 0], Case(("scripted",), depth=2, seed=3)
    ),
    "the result of a call was guessed before its arguments were known": Example(
        (("show", "hold", 0), ("get", 0, 0), ("show", "hold", 0), ("show", "hold", 0)),
        [0, 0, 0, 0],
        Case(("oracle",), seed=113),
    ),
    "a step that failed because of what it read was not asked whether that still stood there": Example(
        (("confuse", 0, 0), ("show", "retried", 0), ("call", "retried", 2, 0)),
        [0, 0, 1, 0],
        Case(("oracle",), seed=1),
    ),
    "the failure of a step stayed when what it had read was written anew before it": Example(
        (("confuse", 0, 0), ("call", "retried", 0, 1), ("call", "retried", 1, 0)), [0, 0, 0, 0], Case(("oracle",))
    ),
    "an effect that ran ahead took the idempotency key of another step at its place": Example(
        (
            ("call", "look_up", 0, 0),
            ("if", 0, (("call", "reserve", 2, 2),), (("call", "mail", 2, 2),)),
        ),
        [0, 0, 0, 0],
        Case(("adversary",), ahead=True),
    ),
    "a parked call was answered at once, which confirmed a guess, and nobody committed it": Example(
        (
            ("call", "post", 0, 0),
            ("call", "post", 0, 0),
            ("call", "write", 0, 0),
            ("call", "post", 0, 0),
            ("call", "post", 0, 0),
            ("call", "write", 0, 0),
            ("call", "hold", 0, 0),
        ),
        [0, 0, 0, 0],
        Case(("oracle", "oracle"), depth=3, ahead=True, seed=6),
    ),
    "an attempt counted as certain before it was known whether what it had read still stood": Example(
        (("call", "read", 0, 0), ("call", "swap", 0, 0), ("call", "read", 0, 0), ("call", "read", 0, 0)),
        [0, 0, 0, 0],
        Case(("oracle", "oracle"), depth=2, money=1.0, seed=1),
    ),
}
"""What was wrong, and how it shows."""

FOUND_BY_KILLING: dict[str, Killed] = {
    "a call that a person said was never sent was not begun again": Killed(
        (("call", "look_up", 0, 0), ("call", "reserve", 0, 0)),
        [2, 3, 3, 3],
        Case(("raising", "both"), width=2, ahead=True, seed=168),
        (1,),
    ),
    "an unknown effect was reported as a change of the program": Killed(
        (("map", "mail"),), [0, 0, 0, 0], Case(("oracle",), depth=0), (2,)
    ),
}
"""The same for runs that were killed."""


@pytest.mark.parametrize("example", FOUND.values(), ids=FOUND)
def test_found(example: Example) -> None:
    """A fault of the past does not come back, whatever the schedule."""
    for seed in (example.case.seed, *range(8)):
        check(example.with_seed(seed))


@pytest.mark.parametrize("example", FOUND_BY_KILLING.values(), ids=FOUND_BY_KILLING)
def test_found_by_killing(example: Killed) -> None:
    """The same for faults in what a crash leaves behind."""
    check_killed(example)
