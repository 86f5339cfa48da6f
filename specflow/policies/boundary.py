"""Shorter drafts where something new begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..protocols import Policy
from ..types import ChainView, RoundReport


class Boundary:
    """Caps drafts that begin at a boundary, the end of a sentence for example, and otherwise does as the policy inside.

    What follows a boundary depends less on what came before it, so drafts across it are accepted less far. What a
    boundary is the core cannot know: ``since`` says how many items of a chain were committed after its last one. It
    must be computed from committed items only, never from drafted ones; the cap is then decided before there is a
    draft, and sampling stays exact.

    Args:
        policy: the policy inside. It is shown chains that have room for ``short`` items only, so that its own plans
            hold.
        since: items committed after the chain's last boundary, 0 where the newest item is one; None where there is
            none or nobody knows.
        short: most items drafted there; 0 runs plainly across a boundary.
        near: a chain counts as being at a boundary while fewer items than this were committed after it.

    Raises:
        InvalidSettingError: ``short`` is negative or ``near`` below 1.
    """

    def __init__(
        self, policy: Policy, since: Callable[[ChainView], int | None], *, short: int = 2, near: int = 1
    ) -> None:
        if not short >= 0:
            raise InvalidSettingError("short", short, "an integer >= 0")
        if not near >= 1:
            raise InvalidSettingError("near", near, "an integer >= 1")
        self._policy = policy
        self._since = since
        self._short = short
        self._near = near

    @property
    def policy(self) -> Policy:
        """The policy inside."""
        return self._policy

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As the policy inside, for chains that have less room at a boundary."""
        capped = [self._capped(view) for view in chains]
        limits = self._policy.limits(capped)
        return [min(limit, view.max_draft) for limit, view in zip(limits, capped, strict=True)]

    def admit(self, frontier: Frontier) -> None:
        """As the policy inside."""
        self._policy.admit(frontier)

    def observe(self, report: RoundReport) -> None:
        """Hands the report on."""
        self._policy.observe(report)

    def _capped(self, view: ChainView) -> ChainView:
        since = self._since(view)
        if since is None or since >= self._near or view.max_draft <= self._short:
            return view
        return ChainView(view.chain_id, view.position, self._short)
