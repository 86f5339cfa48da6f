"""Which run holds which part of a history: a fork goes on from its parent's entries without copying them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import InvalidSettingError
from ..history import RunRecord

Segment = tuple[int, int, int]
"""Number of a run, and the versions ``first - 1`` and ``last`` of it: a half-open range, as in ``after``, ``until``."""


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """What never changes about a run: its number in the store, and where it branches off.

    The run itself holds the entries and states of versions ``base + 1`` on; those up to ``base`` are found along
    ``origin``.
    """

    number: int
    base: int = 0
    """The version it was forked at; 0 for a run that was not forked."""
    origin: Stem | None = field(default=None, repr=False)
    """The run that holds version ``base``. For the fork of a fork, not always the run that was named."""

    def holder(self, version: int) -> Stem:
        """The run that holds a version of this history."""
        stem = self
        while version <= stem.base and stem.origin is not None:
            stem = stem.origin
        return stem

    def segments(self, after: int, until: int) -> list[Segment]:
        """Where versions ``after + 1 .. until`` of this history are, oldest first."""
        found: list[Segment] = []
        stem: Stem | None = self
        while stem is not None and until > after:
            if until > stem.base:
                found.append((stem.number, max(after, stem.base), until))
                until = stem.base
            stem = stem.origin
        return found[::-1]


def check_new(run: RunRecord) -> None:
    """Refuse to create a run that has a history: its entries are not in the record.

    Raises:
        InvalidSettingError: the head is not 0, or a parent is named.
    """
    if run.head != 0:
        raise InvalidSettingError("head", run.head, "0 for a new run")
    if run.parent is not None or run.parent_version != 0:
        raise InvalidSettingError("parent", run.parent, "None for a new run; Store.fork() makes forks")


__all__ = ["Segment", "Stem", "check_new"]
