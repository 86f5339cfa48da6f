"""What of a run is kept when it is collected: one rule for every store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..history import RunStatus

FINISHED = frozenset({RunStatus.COMPLETED, RunStatus.FAILED})
"""Statuses after which a run is not rebuilt from its entries any more."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep of the versions that a run holds itself."""

    versions: frozenset[int]
    """Versions whose state is kept."""
    entries_until: int
    """Entries up to this one are kept, and the last one in any case: it holds the result of a finished run."""


def retention(head: int, status: RunStatus, pinned: Iterable[int], origins: Iterable[int]) -> Retention:
    """What readers may still ask a run for.

    Args:
        head: newest version.
        status: an unfinished run is rebuilt from its entries and keeps all of them.
        pinned: versions held by this run that were pinned, through this run or through a fork.
        origins: versions held by this run that others were forked at. They keep the entries before them too, since
            those are part of the fork's history.
    """
    asked_for = {*pinned, *origins}
    entries_until = max(asked_for, default=0) if status in FINISHED else head
    return Retention(frozenset({head, *asked_for}), entries_until)


__all__ = ["FINISHED", "Retention", "retention"]
