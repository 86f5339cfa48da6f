"""Values derive their totals from their parts."""

from __future__ import annotations

from specflow.types import Admission, PhaseSeconds


def test_the_total_of_an_admission_counts_all_chains() -> None:
    """Admission.total is the number of drafted items executed in the round."""
    assert Admission((2, 0, 5), (False, False, True)).total == 7


def test_the_seconds_of_a_round_are_those_of_its_phases() -> None:
    """PhaseSeconds.total adds the five phases up."""
    assert PhaseSeconds(1.0, 2.0, 4.0, 8.0, 16.0).total == 31.0
