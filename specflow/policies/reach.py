"""How far a workflow may run ahead under a policy: the settings that the scheduler enforces by itself."""

from __future__ import annotations

from collections.abc import Collection

from ..effects import RUN_AHEAD, Effect
from ..errors import InvalidSettingError
from ..protocols import RunAheadPolicy
from ..speculation import Budget

UNLIMITED = Budget()
"""A budget without limits."""


class Reach:
    """Holds the settings of a run-ahead policy. The scheduler enforces them before it asks the policy.

    Args:
        depth: most unresolved guesses that one world may rest on; 0 is plain execution.
        width: most guesses of one result that are followed at the same time.
        effects: effects that may run on a guess.
        budget: hard limits on what speculation may use up in one run.

    Raises:
        InvalidSettingError: a setting is out of its range, or ``effects`` lists IRREVERSIBLE: what cannot be undone
            never runs on a guess.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int = 1,
        effects: Collection[Effect] = RUN_AHEAD,
        budget: Budget = UNLIMITED,
    ) -> None:
        if type(depth) is not int or depth < 0:
            raise InvalidSettingError("depth", depth, "an integer >= 0")
        if type(width) is not int or width < 1:
            raise InvalidSettingError("width", width, "an integer >= 1")
        if not isinstance(budget, Budget):
            raise InvalidSettingError("budget", budget, "a Budget, for example Budget(money=0.05)")
        if not all(isinstance(effect, Effect) for effect in effects):
            raise InvalidSettingError("effects", effects, "a collection of Effect")
        if Effect.IRREVERSIBLE in effects:
            raise InvalidSettingError("effects", effects, "effects without IRREVERSIBLE, which never runs on a guess")
        self._depth = depth
        self._width = width
        self._effects = frozenset(effects)
        self._budget = budget

    @property
    def depth(self) -> int:
        """Most unresolved guesses that one world may rest on; 0 is plain execution."""
        return self._depth

    @property
    def width(self) -> int:
        """Most guesses of one result that are followed at the same time."""
        return self._width

    @property
    def effects(self) -> frozenset[Effect]:
        """Effects that may run on a guess."""
        return self._effects

    @property
    def budget(self) -> Budget:
        """Hard limits on what speculation may use up in one run; the scheduler enforces them."""
        return self._budget


def check_policy(policy: object) -> None:
    """See that something is a run-ahead policy, not a class of them, say.

    Raises:
        InvalidSettingError: it is not.
    """
    if isinstance(policy, type) or not callable(getattr(policy, "allows", None)):
        raise InvalidSettingError("policy", policy, "a run-ahead policy, for example Fixed(1)")


class Around:
    """Passes on the settings of the policy inside.

    Args:
        policy: the policy inside.

    Raises:
        InvalidSettingError: it is none.
    """

    def __init__(self, policy: RunAheadPolicy) -> None:
        check_policy(policy)
        self._policy = policy

    @property
    def depth(self) -> int:
        """As the policy inside."""
        return self._policy.depth

    @property
    def width(self) -> int:
        """As the policy inside."""
        return self._policy.width

    @property
    def effects(self) -> frozenset[Effect]:
        """As the policy inside."""
        return self._policy.effects

    @property
    def budget(self) -> Budget:
        """As the policy inside."""
        return self._policy.budget
