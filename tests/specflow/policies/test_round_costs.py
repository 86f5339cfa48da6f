"""Costs of rounds: what is tabulated, what lies between, and what lies beyond."""

from __future__ import annotations

import pytest

from specflow.errors import InvalidSettingError
from specflow.policies import CostTable, RoundCosts
from tests.specflow.policies.scheduling import table


def affine(start: float, slope: float) -> CostTable:
    """Seconds by width."""
    return table(lambda width: start + slope * width, range(1, 9))


def test_one_table_of_total_items_serves_any_number_of_chains() -> None:
    """Packed, a round of n chains with k drafted items in all costs what n + k items cost."""
    costs = RoundCosts.of(affine(1.0, 0.5))
    assert not costs.is_padded
    for lengths in ((0,), (3,), (0, 0, 0), (1, 0, 4)):
        assert costs.round(lengths, 8) == pytest.approx(1.0 + 0.5 * (len(lengths) + sum(lengths)))


def test_padded_rounds_cost_their_longest_block() -> None:
    """Padded, a round of two chains costs what the longest draft's width costs at that number of chains."""
    costs = RoundCosts({2: affine(1.0, 0.5)}, padded=True)
    assert costs.round((3, 0), 0) == costs.round((3, 3), 0) == pytest.approx(1.0 + 0.5 * 4)
    assert costs.steps(2, 7) == 7
    assert RoundCosts({2: affine(1.0, 0.5)}).steps(2, 7) == 14


def test_unmeasured_numbers_of_chains() -> None:
    """Between measured numbers costs are interpolated; beyond them as many items cost the same in all."""
    costs = RoundCosts({2: affine(1.0, 0.5), 4: affine(3.0, 0.5)}, padded=True)
    assert costs.execution(3, 0)[0] == pytest.approx(0.5 * (1.5 + 3.5))
    assert costs.execution(8, 1)[1] == pytest.approx(3.0 + 0.5 * 4)  # 16 items: width 4 of 4 chains
    assert costs.execution(1, 3)[3] == pytest.approx(1.0 + 0.5 * 2)  # 4 items: width 2 of 2 chains


def test_drafting_is_free_for_nothing_and_never_cheaper_than_in_proportion() -> None:
    """No draft costs nothing; between measured numbers of chains it is interpolated, beyond them proportional."""
    costs = RoundCosts({1: affine(1.0, 0.0)}, {2: affine(0.0, 0.1), 4: affine(0.2, 0.1)})
    assert costs.drafting(2, 0) == 0.0
    assert costs.drafting(1, 3) == pytest.approx(0.3)
    assert costs.drafting(3, 3) == pytest.approx(0.4)
    assert costs.drafting(8, 3) == pytest.approx(1.0)
    assert RoundCosts({1: affine(1.0, 0.0)}).drafting(2, 5) == 0.0
    assert costs.round((1,), 3) == pytest.approx(1.3)


def test_missing_tables_are_refused() -> None:
    """Costs of nothing, of no chains, or without a measurement cannot be asked for anything."""
    with pytest.raises(InvalidSettingError, match="at least one number of chains"):
        RoundCosts({})
    with pytest.raises(InvalidSettingError, match="numbers of chains >= 1"):
        RoundCosts({0: affine(1.0, 0.0)})
    with pytest.raises(InvalidSettingError, match="at least one measurement"):
        RoundCosts({1: affine(1.0, 0.0)}, {1: CostTable()})
