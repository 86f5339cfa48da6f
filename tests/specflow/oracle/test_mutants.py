"""The oracle notices an engine that breaks the contract."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from specflow.scheduler import Scheduler
from tests.specflow.oracle.checks import Example, check, examples
from tests.specflow.oracle.mutants import MUTANTS
from tests.specflow.oracle.test_workflows import ACTING, EXAMPLES


@pytest.mark.parametrize(("mutant", "promise"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_mutants(mutant: type[Scheduler], promise: str) -> None:
    """Each of these engines is caught within the number of examples that the real one is tested with."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=examples(steps=ACTING) if promise == "effects" else examples())
    def run_all(example: Example) -> None:
        check(example, mutant)

    with pytest.raises(AssertionError, match=rf"(?m)^({promise}):"):
        run_all()
