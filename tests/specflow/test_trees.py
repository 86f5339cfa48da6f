"""Drafts that branch: shapes, paths, what is learned from them, and how policies and the loop deal with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.chain import ChainLoop, run_sync
from specflow.errors import BackendContractError
from specflow.instrumentation import Counters, Recorder
from specflow.policies import Adaptive, Boundary, CostScheduled, CostTable, Estimated, Fixed, StaleBudget, Threshold
from specflow.policies.acceptance import Calibration, Profile
from specflow.policies.ranks import Ranks
from specflow.testing import ManualClock
from specflow.trees import (
    HISTORY,
    Fate,
    continuations,
    depths,
    fate,
    fate_of_tree,
    path_problem,
    reach,
    shape_problem,
    walk,
)
from specflow.types import AcceptPrefix, Admission, ChainId, ChainView, Draft, PhaseSeconds, RoundReport, Tree

SHAPE = [HISTORY, HISTORY, 0, 2, 1]
"""0 and 1 follow the history, 2 follows 0, 3 follows 2, 4 follows 1."""


def shapes(most: int = 10) -> st.SearchStrategy[list[int]]:
    """Random trees."""
    return st.integers(0, most).flatmap(
        lambda count: st.tuples(*[st.integers(-1, item - 1) for item in range(count)]).map(list)
    )


def report(
    parents: Sequence[int] | None, survival: Sequence[float] | None, admitted: int, path: Sequence[int]
) -> RoundReport:
    """One round of one chain."""
    tree = () if parents is None else (Tree(parents, tuple(path)),)
    size = admitted if parents is None else len(parents)
    return RoundReport(
        0,
        (ChainId(0),),
        (size,),
        (size,),
        (admitted,),
        (len(path),),
        (len(path) + 1,),
        (survival,),
        PhaseSeconds(),
        tree,
    )


def test_depths_and_continuations_of_a_shape() -> None:
    """Worked out by hand."""
    assert depths(SHAPE) == [0, 0, 1, 2, 1]
    assert continuations(SHAPE) == {HISTORY: [0, 1], 0: [2], 2: [3], 1: [4]}


@pytest.mark.parametrize(
    ("parents", "count", "problem"),
    [
        (SHAPE, 5, None),
        ([], 0, None),
        (SHAPE, 4, "5 parents for 4 items"),
        ([0], 1, "item 0 continues item 0"),
        ([-1, 2, 1], 3, "item 1 continues item 2"),
        ([-2], 1, "item 0 continues item -2"),
    ],
)
def test_wrong_shapes_are_named(parents: list[int], count: int, problem: str | None) -> None:
    """A parent stands before its items."""
    found = shape_problem(parents, count)
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    ("path", "admitted", "problem"),
    [
        ((0, 2, 3), 5, None),
        ((), 0, None),
        ((1, 4), 4, "item 4 of 4"),
        ((0, 3), 5, "item 3 after item 0"),
        ((2,), 5, "item 2"),
    ],
)
def test_wrong_paths_are_named(path: tuple[int, ...], admitted: int, problem: str | None) -> None:
    """A path starts at the history, follows parents and stays within what was executed."""
    found = path_problem(SHAPE, path, admitted)
    assert found is None if problem is None else found is not None and problem in found


@given(shapes(), st.lists(st.integers(0, 2), max_size=12), st.data())
def test_a_walk_is_the_longest_path_that_agrees(parents: list[int], truth: list[int], data: st.DataObject) -> None:
    """Compared with looking at every item's whole path."""
    values: list[int] = []
    for parent in parents:
        # Siblings differ, as alternatives do.
        used = {values[item] for item in range(len(values)) if parents[item] == parent}
        free = [value for value in range(len(used) + 4) if value not in used]
        values.append(data.draw(st.sampled_from(free)))
    paths: list[list[int]] = [[]]
    for item in range(len(parents)):
        path, node = [], item
        while node != HISTORY:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    agreeing = [path for path in paths if [values[item] for item in path] == truth[: len(path)]]
    assert walk(values, parents, truth) == max(agreeing, key=len)


# --- What is learned --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), max_size=8), st.data())
def test_a_tree_without_branches_fares_as_its_chain(rates: list[float], data: st.DataObject) -> None:
    """Place by place: claims, trials and acceptances."""
    survival, alive = [], 1.0
    for rate in rates:
        alive *= rate
        survival.append(alive)
    admitted = data.draw(st.integers(0, len(rates)))
    accepted = data.draw(st.integers(0, admitted))
    as_chain = fate(report(None, survival, admitted, range(accepted)), 0)
    as_tree = fate(report(list(range(-1, len(rates) - 1)), survival, admitted, range(accepted)), 0)
    tried = min(admitted, accepted + 1)
    assert (as_tree.admitted, as_tree.accepted) == (tried, accepted)
    assert as_tree.survival == pytest.approx(survival[:tried])
    for known in (as_chain, as_tree):
        calibration, profile = Calibration(8), Profile(8)
        calibration.record(profile, known.survival, known.admitted, known.accepted)
        if known is as_chain:
            expected = profile.accepted, profile.claims, profile.trials
    assert profile.accepted == expected[0]
    assert profile.claims == pytest.approx(expected[1])
    assert profile.trials == expected[2]


def test_alternatives_claim_together() -> None:
    """At each node of the accepted path: the claims of its admitted continuations over its own."""
    survival = [0.5, 0.3, 0.4, 0.1, 0.2]
    for admitted, path, claims in ((5, (0,), [0.8, 0.64]), (2, (0,), [0.8]), (5, (), [0.8])):
        found = fate(report(SHAPE, survival, admitted, path), 0)
        assert (found.admitted, found.accepted) == (len(claims), len(path)), "behind the second nothing was tried"
        assert found.survival == pytest.approx(claims)
    assert fate(report(SHAPE, None, 5, (1, 4)), 0) == Fate(None, 2, 2)
    assert fate_of_tree([], None, ()) == Fate(None, 0, 0)


def test_corrections_multiply_along_the_depth() -> None:
    """An item is corrected by the ratios of all places up to its depth, whatever its rank."""
    calibration, profile = Calibration(3), Profile(3)
    for _ in range(400):
        calibration.record(profile, [1.0, 1.0], 2, 1)  # always the first, never the second
    first, second, third = calibration.scales(profile)
    assert first > 0.95
    assert second < 0.1
    assert third <= second
    corrected = calibration.corrected(profile, [0.5, 0.4, 0.3], [-1, -1, 0])
    assert corrected == [pytest.approx(0.5 * first), pytest.approx(0.4 * first), pytest.approx(0.3 * second)]


def test_counts_are_by_depth() -> None:
    """Alternatives share a place in counters; totals count them all."""
    counters = Counters()
    counters.on_round(report(SHAPE, None, 5, (0, 2)))
    found = counters.snapshot()
    assert (found.admitted, found.accepted, found.emitted) == (5, 2, 3)
    assert found.admitted_by_position == (1, 1, 1)
    assert found.accepted_by_position == (1, 1, 0)
    assert reach(report(SHAPE, None, 2, ()), 0) == 1


# --- What a policy sees -----------------------------------------------------------------------------------------------


def test_a_frontier_knows_the_next_item_s_place() -> None:
    """How many items it continues; in a chain all that were admitted."""
    frontier = Frontier([Draft("abcde", [0.5, 0.3, 0.4, 0.1, 0.15], parents=SHAPE), Draft("ab", [0.5, 0.25])])
    seen = []
    while frontier.available(0):
        seen.append(frontier.depth(0))
        frontier.admit(0)
    assert seen == [0, 0, 1, 2, 1]
    frontier.admit(1)
    assert (frontier.depth(1), frontier.parents(1)) == (1, None)


class TreeBackend:
    """One chain of known items, drafted as trees: the right item is one of several, which one is scripted.

    Args:
        length: items in all; item n is n.
        ranks: for each depth, which alternative is right; beyond ``width`` none is.
        survival: of alternatives, by rank, given the item they continue.
    """

    def __init__(
        self, clock: ManualClock, length: int, ranks: Sequence[int], survival: Sequence[float], *, broken: str = ""
    ) -> None:
        self.clock, self.length, self.ranks, self.survival, self.broken = clock, length, ranks, survival, broken
        self.done = 0
        self.drafting = 0.0

    def chains(self) -> Sequence[ChainView]:
        """The chain, until it ends."""
        room = self.length - self.done - 1
        return [ChainView(ChainId(0), self.done + 1, max(0, room))] if self.done < self.length else []

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """The best items of a tree of alternatives at every depth."""
        self.clock.advance(self.drafting if limits[0] else 0.0)
        values: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        level = [(HISTORY, 1.0)]
        for depth, right in enumerate(self.ranks):
            following = []
            for node, alive in level[:1]:
                for rank, rate in enumerate(self.survival):
                    values.append(self.done + depth if rank == right else -1 - rank)
                    parents.append(node)
                    survival.append(alive * rate)
                    following.append((len(values) - 1, alive * rate))
            level = following[right : right + 1]
        order = sorted(range(len(values)), key=lambda item: (-survival[item], item))[: limits[0]]
        place = {item: rank for rank, item in enumerate(order)} | {HISTORY: HISTORY}
        kept = [place[parents[item]] for item in order]
        if self.broken == "parents" and kept:
            kept[0] = 0
        return [Draft([values[item] for item in order], [survival[item] for item in order], parents=kept)]

    async def execute(self, drafts: Sequence[Draft[int]], admission: Admission) -> object:
        """40 ms, whatever is executed."""
        self.clock.advance(0.04)
        return None

    async def verify(
        self, drafts: Sequence[Draft[int]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[int]]:
        """Follow the right items."""
        (draft,), (count,) = drafts, admission.lengths
        parents = list(draft.parents or ())[:count]
        path = walk(draft.values[:count], parents, range(self.done, self.length))
        if self.broken == "path":
            return [AcceptPrefix(len(path), 0)]
        if self.broken == "order":
            return [AcceptPrefix(len(path), 0, tuple(reversed(path)))]
        return [AcceptPrefix(len(path), self.done + len(path), tuple(path))]

    async def commit(self, verdicts: Sequence[AcceptPrefix[int]]) -> Sequence[Sequence[int]]:
        """Move on."""
        count = min(verdicts[0].num_accepted + 1, self.length - self.done)
        emitted = list(range(self.done, self.done + count))
        self.done += count
        return [emitted]

    def discard(self) -> None:
        """Nothing was touched."""


def played(backend: TreeBackend, policy: Any) -> tuple[RoundReport, ...]:
    """All rounds."""
    recorder = Recorder()
    run_sync(ChainLoop(backend, policy, [recorder], backend.clock).run())
    return recorder.reports


def test_the_loop_reports_trees() -> None:
    """Shape and path stand in the report; the accepted path may be anywhere in the draft."""
    first = played(TreeBackend(ManualClock(), 9, [1, 0], [0.5, 0.4]), Fixed(4))[0]
    assert first.trees[0] is not None
    values = first.trees[0]
    assert first.accepted == (2,)
    assert first.emitted == (3,)
    assert path_problem(values.parents, values.path, 4) is None
    assert values.path[0] == 1, "the second alternative was right"


@pytest.mark.parametrize(
    ("broken", "message"), [("parents", "continues item"), ("path", "its path has"), ("order", "after item")]
)
def test_a_backend_s_wrong_trees_are_refused(broken: str, message: str) -> None:
    """Shapes at predict(), paths at verify()."""
    backend = TreeBackend(ManualClock(), 9, [1, 0], [0.5, 0.4], broken=broken)
    with pytest.raises(BackendContractError, match=message):
        played(backend, Fixed(4))


POLICIES: dict[str, Callable[[], Any]] = {
    "fixed": lambda: Fixed(6),
    "threshold": lambda: Threshold(6, 0.2),
    "adaptive": lambda: Adaptive(6),
    "adaptive, padded": lambda: Adaptive(6, padded=True),
    "estimated": lambda: Estimated(Threshold(6, 0.05), 6),
    "estimated adaptive": lambda: Estimated(Adaptive(6), 6),
    "cost scheduled": lambda: Estimated(CostScheduled(6, costs()), 6),
    "stale budget": lambda: StaleBudget(6, costs()),
    "boundary": lambda: Boundary(Fixed(6), lambda chain: chain.position % 7, short=2),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ranks", [[0, 0, 0], [1, 1, 1], [0, 2, 0], [3, 3, 3]])
def test_every_policy_runs_trees_to_their_end(name: str, ranks: list[int]) -> None:
    """Whatever it admits, every item is emitted once and in order; right alternatives shorten the run."""
    reports = played(TreeBackend(ManualClock(), 60, ranks, [0.5, 0.3, 0.1]), POLICIES[name]())
    assert sum(report.emitted[0] for report in reports) == 60
    if ranks[0] < 2:
        assert len(reports) < 50
        assert any(tree is not None and tree.path for report in reports for tree in report.trees)


def costs() -> CostTable:
    """Executing up to 16 items costs nothing extra."""
    table = CostTable()
    for width in range(1, 17):
        for _ in range(2):
            table.observe(width, 0.04)
    return table


class Priced(TreeBackend):
    """Drafting costs time per item asked for."""

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """As before, later."""
        self.clock.advance(0.01 * limits[0])
        return await super().predict(limits)


def test_adaptive_asks_for_smaller_trees_where_those_are_cheaper() -> None:
    """Of six items only the first two are ever right: asking for more costs what it does not bring."""
    reports = played(Priced(ManualClock(), 900, [1, 9], [0.5, 0.4]), Adaptive(6, costs=costs()))
    asked = [report.limits[0] for report in reports[-80:-8]]
    assert sum(limit <= 3 for limit in asked) > 0.8 * len(asked)
    assert sum(report.emitted[0] for report in reports[-80:]) > 1.7 * 80


class Recovering(Priced):
    """The first item is right, the second one time in five; after 600 items all are."""

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """As before, with other ranks."""
        self.ranks = (
            [0, 0, 0, 0] if self.done >= 600 else [0, 0, 9] if random.Random(self.done).random() < 0.2 else [0, 9]
        )
        return await super().predict(limits)


def test_adaptive_asks_for_larger_trees_again() -> None:
    """What is not asked for is not seen, so it is believed less and less that it is bad."""
    backend = Recovering(ManualClock(), 3000, [0], [0.9, 0.05])
    reports = played(backend, Adaptive(6, costs=costs()))
    done = 0
    middle: list[int] = []
    late: list[int] = []
    for report in reports:
        done += report.emitted[0]
        if 300 < done < 600:
            middle.append(report.limits[0])
        if 2500 < done < 2900:
            late.append(report.limits[0])
    assert sum(limit <= 3 for limit in middle) > 0.8 * len(middle)
    assert sum(limit >= 4 for limit in late) > 0.8 * len(late)


def test_adaptive_asks_for_whole_trees_where_smaller_ones_are_not_cheaper() -> None:
    """Alternatives are drafted together, at one price: the best of many are at least as good as the best of few."""
    backend = TreeBackend(ManualClock(), 400, [1, 1, 1], [0.5, 0.4])
    backend.drafting = 0.01
    reports = played(backend, Adaptive(6, costs=costs()))
    asked = {report.limits[0] for report in reports[20:-8]}
    assert asked == {6}
    assert sum(report.emitted[0] for report in reports) / len(reports) > 2.5


def test_adaptive_gives_up_on_trees_that_do_not_pay() -> None:
    """Always wrong, and drafting costs as much as executing: few rounds are wasted."""
    backend = TreeBackend(ManualClock(), 400, [9, 9], [0.5, 0.4])
    backend.drafting = 0.04
    reports = played(backend, Adaptive(6, costs=costs()))
    assert sum(1 for report in reports if report.drafted[0]) < 40


def test_adaptive_corrects_what_alternatives_claim_together() -> None:
    """Claims of 0.9 for two alternatives of which one is always right are not cut to the first one's hit rate."""
    policy = Adaptive(4, costs=costs())
    played(TreeBackend(ManualClock(), 300, [1, 1], [0.5, 0.4]), policy)
    found = policy.explain()
    assert found.acceptance[0] > 0.9
    assert 0.9 < found.claim_ratio[0] < 1.3


def test_one_bad_draft_says_little_about_a_chain() -> None:
    """A chain starts from what all chains promised, and moves from there by a tenth per draft."""
    pool = Ranks.unseen(3)
    assert [pool.promise(rank) for rank in range(3)] == pytest.approx([0.5, 0.4, 0.32])
    chain = pool.for_chain()
    chain.learn([], 2)
    assert [chain.promise(rank) for rank in range(3)] == pytest.approx([0.45, 0.36, 0.32 + 0.01 * (0.8 * 0.36 - 0.32)])
    pool.learn([1.0, 1.0, 1.0], 3)
    assert pool.promise(0) == pytest.approx(0.51)
    assert chain.promise(0) == pytest.approx(0.45), "its own"


class Moody(TreeBackend):
    """Wrong for the first 200 items; from then on one of two alternatives is right, now this, now that."""

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """As before, with another rank."""
        self.ranks = [9, 9] if self.done < 200 else [random.Random(self.done).randrange(2)] * 2
        return await super().predict(limits)


def test_adaptive_finds_out_that_trees_work_again() -> None:
    """Probes of one item say nothing of later ranks; after one that was accepted, a whole tree is tried."""
    backend = Moody(ManualClock(), 2500, [1, 1], [0.45, 0.44])
    backend.drafting = 0.02
    reports = played(backend, Adaptive(6, costs=costs()))
    assert any(report.limits[0] == 0 for report in reports[:200]), "it gave up"
    late = reports[-100:-8]
    assert sum(report.emitted[0] for report in late) / len(late) > 2.0
