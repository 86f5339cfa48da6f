"""Parallel branches: what they changed, what a pipeline's branch inherits, and what it may be guessed to read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Box
from .errors import StateConflictError
from .history import Write
from .replay import Finished, InputsRequest, Outcome
from .state import Change, changes_of, check_together, write_cell, writes_of
from .worlds import Join, Strand, World

_NOTHING = Box(None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that a branch of a pipeline has or may have."""

    value: Any
    confidence: float
    basis: World | None
    """The world that it is the result of; None when it is known to be true."""


def best_combinations(candidates: Sequence[Sequence[Candidate]], width: int) -> list[list[Candidate]]:
    """One candidate per input, likeliest combinations first."""
    combinations: list[list[Candidate]] = [[]]
    for options in candidates:
        combinations = [[*chosen, option] for chosen in combinations for option in options[:width]]
        combinations.sort(key=_negative_confidence)
        combinations = combinations[: max(1, width)]
    return combinations


def _negative_confidence(combination: Sequence[Candidate]) -> float:
    product = -1.0
    for candidate in combination:
        product *= candidate.confidence
    return product


def branch_writes(strand: Strand) -> tuple[Write, ...]:
    """Everything a finished branch has changed."""
    writes: list[Write] = []
    for record in strand.records(strand.head.log):
        writes.extend(writes_of(record.program_accesses))
        writes.extend(writes_of(record.step_accesses))
    writes.extend(writes_of(strand.head.accesses))
    return tuple(writes)


def inherited_writes(strand: Strand, inputs: Sequence[Strand]) -> tuple[Write, ...]:
    """Changes of all branches that come before one of a pipeline, directly or through others."""
    join = strand.join
    if join is None:
        return ()
    direct = {other.index for other in inputs}
    before = direct.union(*(all_inputs_of(join, index) for index in direct))
    ancestors = [join.strands[index] for index in sorted(before)]
    return _ordered_writes(join, ancestors)


def pipeline_writes(join: Join) -> tuple[Write, ...]:
    """Changes of all branches of a pipeline, in program order.

    Raises:
        StateConflictError: two branches that no dependency orders changed the same key.
    """
    return _ordered_writes(join, join.strands)


def _ordered_writes(join: Join, strands: Sequence[Strand]) -> tuple[Write, ...]:
    """Changes of some branches in program order; those not ordered by a dependency must not touch the same key.

    Args:
        join: where all branches come together.
        strands: some of them, with all that come before one of them.
    """
    writes = {strand.index: _own_writes(strand) for strand in sorted(strands, key=lambda strand: strand.index)}
    touched = Counter(key for own in writes.values() for key in {write.key for write in own})
    if all(count == 1 for count in touched.values()):
        return tuple(write for own in writes.values() for write in own)
    before = {index: all_inputs_of(join, index) for index in writes}
    changes: dict[int, dict[str, Change]] = {}
    for index, own in writes.items():
        # What a branch has changed is what it left different from how it found it.
        found = join.base
        for earlier in sorted(before[index]):
            for change in changes[earlier].values():
                found = functools.reduce(write_cell, change.writes, found)
        changes[index] = changes_of(found, own)
        for earlier in sorted(changes.keys() - before[index] - {index}):
            _refuse_conflict(join, (earlier, changes[earlier]), (index, changes[index]))
    for key, count in touched.items():
        if count > 1:
            made = [(join.strands[index].name, own[key]) for index, own in changes.items() if key in own]
            check_together(join.base, key, made)
    return tuple(write for own in changes.values() for change in own.values() for write in change.writes)


def _refuse_conflict(join: Join, *branches: tuple[int, dict[str, Change]]) -> None:
    (one, changes), (other, others) = branches
    for key in sorted(changes.keys() & others.keys()):
        if not changes[key].merges_with(others[key]):
            raise StateConflictError(key, (join.strands[one].name, join.strands[other].name))


def _own_writes(strand: Strand) -> tuple[Write, ...]:
    """What a branch has changed itself, without what it inherited with its inputs."""
    writes: list[Write] = []
    for record in strand.records(strand.head.log):
        writes.extend(writes_of(record.program_accesses))
        if not isinstance(record.request, InputsRequest):
            writes.extend(writes_of(record.step_accesses))
    writes.extend(writes_of(strand.head.accesses))
    return tuple(writes)


def outcome_of(world: World) -> Outcome:
    """What a finished world returned or raised."""
    waiting = world.waiting
    return waiting.outcome if isinstance(waiting, Finished) else Outcome(_NOTHING)


def value_of(world: World) -> Any:
    """A copy of what a finished world returned."""
    box = outcome_of(world).box
    return box.fresh() if box is not None else None


def _inputs_of(strand: Strand) -> tuple[int, ...]:
    """Branches that a branch of a pipeline waits for directly."""
    records = strand.records(strand.head.log) if strand.head is not None else []
    requests = [record.request for record in records]
    if strand.head is not None and isinstance(strand.head.waiting, InputsRequest):
        requests.append(strand.head.waiting)
    return tuple(index for request in requests if isinstance(request, InputsRequest) for index in request.branches)


def all_inputs_of(join: Join, index: int) -> set[int]:
    """Branches that a branch of a pipeline waits for, directly or through others."""
    found: set[int] = set()
    stack = list(_inputs_of(join.strands[index]))
    while stack:
        other = stack.pop()
        if other not in found:
            found.add(other)
            stack.extend(_inputs_of(join.strands[other]))
    return found


__all__ = [
    "Candidate",
    "all_inputs_of",
    "best_combinations",
    "branch_writes",
    "inherited_writes",
    "outcome_of",
    "pipeline_writes",
    "value_of",
]
