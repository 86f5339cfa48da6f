"""What a predictor is shown of a world: results so far, decoded only when looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .codec import Box
from .definitions import REMEMBERED
from .replay import CallRequest
from .worlds import Record, Strand

_LOOKED_AT = 1024
"""Records that are searched for results of a step."""


class Recent(Sequence[Any]):
    """Results of one step so far, decoded when looked at.

    Args:
        log: newest record that counts; it and those before it may rest on guesses.
        strand: what the record belongs to.
        step: name of the step.
        before: results from before this run.
    """

    __slots__ = ("_boxes",)

    def __init__(self, log: Record | None, strand: Strand, step: str, before: Sequence[Box] = ()) -> None:
        boxes: list[Box] = []
        for record in _walk(log, strand):
            request = record.request
            if isinstance(request, CallRequest) and request.step.name == step and record.outcome.box is not None:
                boxes.append(record.outcome.box)
                if len(boxes) == REMEMBERED:
                    break
        boxes.reverse()
        if before and len(boxes) < REMEMBERED:
            boxes[:0] = before[len(boxes) - REMEMBERED :]
        self._boxes = boxes

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [box.fresh() for box in self._boxes[index]]
        return self._boxes[index].fresh()


class Trail(Sequence[Any]):
    """Step and result of the latest calls, decoded when looked at; arguments as for :class:`Recent`."""

    __slots__ = ("_records",)

    def __init__(self, log: Record | None, strand: Strand) -> None:
        records = []
        for record in _walk(log, strand):
            if isinstance(record.request, CallRequest) and record.outcome.box is not None:
                records.append((record.request.step.name, record.outcome.box))
                if len(records) == REMEMBERED:
                    break
        records.reverse()
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [(name, box.fresh()) for name, box in self._records[index]]
        name, box = self._records[index]
        return name, box.fresh()


def _walk(log: Record | None, strand: Strand) -> Iterable[Record]:
    """A record and those before it, newest first, through the branches it is in; not endlessly far back."""
    seen = 0
    while True:
        while log is not None and seen < _LOOKED_AT:
            yield log
            seen += 1
            log = log.previous
        join = strand.join
        if join is None or seen >= _LOOKED_AT:
            return
        log, strand = join.world.log, join.world.strand


__all__ = ["Recent", "Trail"]
