"""The threshold policy executes the prefix its drafter believes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.errors import InvalidSettingError
from specflow.policies import Threshold
from specflow.types import ChainId, ChainView, Draft

estimates = st.lists(st.floats(0.0, 1.0), max_size=8)


@given(st.lists(estimates, max_size=4), st.floats(0.0, 1.0))
def test_each_draft_is_cut_before_its_first_estimate_below_the_threshold(
    survival: list[list[float]], threshold: float
) -> None:
    """The admitted length is that of the longest prefix of estimates at or above the threshold, draft by draft."""
    frontier = Frontier([Draft(range(len(claims)), claims) for claims in survival])
    Threshold(8, threshold).admit(frontier)
    expected = [
        next((index for index, claim in enumerate(claims) if claim < threshold), len(claims)) for claims in survival
    ]
    assert list(frontier.decision().lengths) == expected
    assert not any(frontier.decision().anticipated)


def test_a_drafter_without_estimates_counts_as_certain() -> None:
    """Without estimates everything is executed, even at threshold 1."""
    frontier = Frontier([Draft("abc")])
    Threshold(3, 1.0).admit(frontier)
    assert frontier.decision().lengths == (3,)


def test_the_limit_is_the_same_for_every_chain() -> None:
    """Limits do not depend on the threshold."""
    assert list(Threshold(5, 0.9).limits([ChainView(ChainId(0), 0, 9), ChainView(ChainId(1), 0, 1)])) == [5, 5]


@pytest.mark.parametrize(("num_draft", "min_survival"), [(-1, 0.5), (4, -0.1), (4, 1.1), (4, float("nan"))])
def test_settings_out_of_range_are_refused(num_draft: int, min_survival: float) -> None:
    """A negative length and a threshold that is no probability are reported when the policy is built."""
    with pytest.raises(InvalidSettingError):
        Threshold(num_draft, min_survival)
