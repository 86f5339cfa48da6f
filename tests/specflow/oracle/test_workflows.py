"""Random workflows, run ahead in virtual time, against the same workflows run alone.

Nothing here depends on time or chance: the default tests draw the same examples every time, so a failure is never a
false alarm. The slow ones draw new examples in every run; a failure of theirs is a fault too, and prints its example.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.specflow.oracle.checks import Example, check, examples

EXAMPLES = 300
"""Examples of a default run."""
ACTING = ("post", "reserve", "hold", "charge", "sign", "mail", "remit", "write", "count", "triple")
"""Steps that act on the outside world, and some to run ahead of."""


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(example=examples())
def test_workflows(example: Example) -> None:
    """Running ahead changes nothing but time and cost: state, history, effects, streams, limits and budgets hold."""
    check(example)


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(example=examples(steps=ACTING))
def test_workflows_that_act(example: Example) -> None:
    """The same for programs that do little but act on the outside world."""
    check(example)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(example=examples())
def test_many_workflows(example: Example) -> None:
    """The same for many more, others in every run."""
    check(example)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=8_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(example=examples(steps=ACTING))
def test_many_workflows_that_act(example: Example) -> None:
    """The same for many more, others in every run."""
    check(example)
