"""The policies a simulation knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specflow.errors import InvalidSettingError
from specflow.policies import PID, Adaptive, CostScheduled, Estimated, Fixed, RoundCosts, StaleBudget, Threshold
from specflow.protocols import Policy

MakePolicy = Callable[[], Policy]

_POLICIES: Mapping[str, Callable[[int, RoundCosts], Policy]] = {
    "plain": lambda _longest, _costs: Fixed(0),
    "cost_scheduled": CostScheduled,
    "stale_budget": StaleBudget,
    "estimated": lambda longest, costs: Estimated(CostScheduled(longest, costs), longest),
    "threshold": lambda longest, _costs: Threshold(longest, 0.5),
    "adaptive": lambda longest, _costs: Adaptive(longest),
    "pid": lambda longest, _costs: PID(longest),
}
"""``estimated`` is cost-scheduled on estimates that are corrected by what was accepted."""

_FIXED = "fixed-"
DEFAULT_POLICIES = ("plain", "fixed", "cost_scheduled", "stale_budget", "estimated", "adaptive", "pid")
"""``fixed`` stands for every fixed length."""


def policy_names() -> Sequence[str]:
    """All names, for help and messages."""
    return (*_POLICIES, "fixed", f"{_FIXED}N")


def is_fixed(name: str) -> bool:
    """True for rows that draft the same length always, none included."""
    return name == "plain" or name.startswith(_FIXED)


def candidates(names: Sequence[str], max_draft: int, costs: RoundCosts) -> Mapping[str, MakePolicy]:
    """Makers of fresh policies, by name and in order.

    Args:
        names: from :func:`policy_names`; ``fixed`` is replaced by every fixed length.
        max_draft: longest draft recorded.
        costs: what policies that schedule by cost are told.

    Raises:
        InvalidSettingError: a name is unknown, or a fixed length is longer than the recorded drafts.
    """
    found: dict[str, MakePolicy] = {}
    for name in names:
        if name == "fixed":
            for length in range(1, max_draft + 1):
                found[f"{_FIXED}{length}"] = _fixed(length)
        elif name.startswith(_FIXED) and name.removeprefix(_FIXED).isdigit():
            length = int(name.removeprefix(_FIXED))
            if not 1 <= length <= max_draft:
                raise InvalidSettingError("policy", name, f"a length in [1, {max_draft}], the longest draft recorded")
            found[name] = _fixed(length)
        elif name in _POLICIES:
            found[name] = _bound(_POLICIES[name], max_draft, costs)
        else:
            raise InvalidSettingError("policy", name, f"one of {', '.join(policy_names())}")
    return found


def _fixed(length: int) -> MakePolicy:
    return lambda: Fixed(length)


def _bound(make: Callable[[int, RoundCosts], Policy], max_draft: int, costs: RoundCosts) -> MakePolicy:
    return lambda: make(max_draft, costs)
