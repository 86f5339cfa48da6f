"""Drafts that branch: alternatives for the same place, of which at most one path is accepted.

Items stand in an order in which each follows the item it continues, the most promising first, so that "the first n" is
the best tree of n items and everything said about prefixes of a chain holds for it: the items expected to be accepted
are the sum of the admitted survivals, because the alternatives exclude each other.

What is learned from a verified chain, place by place, is learned from a tree depth by depth: at each node of the
accepted path, was one of its admitted continuations right, and how much was claimed of them together?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .types import RoundReport

HISTORY = -1
"""The parent of items that continue the committed history."""


def depths(parents: Sequence[int]) -> list[int]:
    """How many items each item continues: 0 right after the history."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == HISTORY else found[parent] + 1)
    return found


def chain(count: int) -> Sequence[int]:
    """The parents of ``count`` items of which each continues the one before."""
    return range(HISTORY, count - 1)


def height(parents: Sequence[int]) -> int:
    """Items on the longest path; 0 without items."""
    return max(depths(parents), default=-1) + 1


def continuations(parents: Sequence[int]) -> dict[int, list[int]]:
    """By item (or :data:`HISTORY`), those that continue it, in order."""
    found: dict[int, list[int]] = {}
    for item, parent in enumerate(parents):
        found.setdefault(parent, []).append(item)
    return found


def shape_problem(parents: Sequence[int], count: int) -> str | None:
    """What is wrong with the parents of ``count`` items; None if nothing is."""
    if len(parents) != count:
        return f"gave {len(parents)} parents for {count} items"
    wrong = next((item for item, parent in enumerate(parents) if not HISTORY <= parent < item), None)
    return None if wrong is None else f"said that item {wrong} continues item {parents[wrong]}"


def path_problem(parents: Sequence[int], path: Sequence[int], admitted: int) -> str | None:
    """What is wrong with an accepted path among the first ``admitted`` items of a tree; None if nothing is."""
    before = HISTORY
    for item in path:
        if not 0 <= item < admitted:
            return f"accepted item {item} of {admitted} executed ones"
        if parents[item] != before:
            return f"accepted item {item} after item {before}, which it does not continue"
        before = item
    return None


def reach(report: RoundReport, index: int) -> int:
    """Places of chain ``index``'s draft at which something was executed: the depth of its tree, a chain's length."""
    tree = report.tree(index)
    if tree is None:
        return report.admitted[index]
    return height(tree.parents[: report.admitted[index]])


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a draft, as that of a chain."""

    survival: Sequence[float] | None
    """By place: claimed probability that the accepted path reaches so far; None without estimates."""
    admitted: int
    """Places at which something was verified."""
    accepted: int
    """Places accepted."""


def fate(report: RoundReport, index: int) -> Fate:
    """The fate of chain ``index``'s draft, place by place. Of a chain, it is what the report says.

    Of a tree, place d is the accepted path's d-th step: what was claimed there is the sum over the admitted
    alternatives.
    """
    survival, admitted, accepted = report.survival[index], report.admitted[index], report.accepted[index]
    tree = report.tree(index)
    if tree is None:
        return Fate(survival, admitted, accepted)
    return fate_of_tree(tree.parents[:admitted], survival, tree.path)


def fate_of_tree(parents: Sequence[int], survival: Sequence[float] | None, path: Sequence[int]) -> Fate:
    """The same for the executed items of one tree and the path that was accepted among them."""
    following = continuations(parents)
    claims: list[float] = []
    alive, tried = 1.0, 0
    for node in (HISTORY, *path):
        options = following.get(node)
        if not options:
            break
        tried += 1
        if survival is not None:
            before = 1.0 if node == HISTORY else survival[node]
            claimed = sum([survival[option] for option in options])
            alive *= 1.0 if claimed >= before else claimed / before
            claims.append(alive)
    return Fate(None if survival is None else claims, tried, len(path))


def walk(values: Sequence[object], parents: Sequence[int], truth: Sequence[object]) -> list[int]:
    """The path of items that agree with what came, as far as there is one."""
    following = continuations(parents)
    path: list[int] = []
    node = HISTORY
    for value in truth:
        node = next((item for item in following.get(node, ()) if values[item] == value), HISTORY)
        if node == HISTORY:
            break
        path.append(node)
    return path
