"""Which drafted items to execute, by survival and load: the schedulers of DSpark (arXiv:2607.05147).

Both take a round's cost as known (:class:`RoundCosts`, measured at start) and the drafter's estimates as calibrated
(wrap them in :class:`Estimated` where they are not). With n chains, B items in the execution of which B - n are drafts,
and expected items tau = n + the sum of the drafts' survivals, both maximise tau per second of the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import count

from ..admission import Frontier
from ..errors import InvalidSettingError, MisuseError
from ..types import ChainId, ChainView, RoundReport
from .costs import CostTable
from .draft_plan import DraftPlan
from .round_costs import RoundCosts


class _Scheduled:
    """What both schedulers share: draft lengths, and the size of the round."""

    def __init__(self, max_draft: int, costs: RoundCosts | CostTable) -> None:
        if not max_draft >= 0:
            raise InvalidSettingError("max_draft", max_draft, "an integer >= 0")
        self._max_draft = max_draft
        self._costs = RoundCosts.of(costs)
        self._plan = DraftPlan(max_draft, self._costs)
        self._round: list[ChainId] = []
        self._longest = 0
        self._drafting_seconds = 0.0

    @property
    def costs(self) -> RoundCosts:
        """Seconds of a round, as measured beforehand."""
        return self._costs

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As much as allowed where drafting is cheap, else the common length that promises most, 0 included."""
        self._round = [view.chain_id for view in chains]
        length = self._plan.length(len(chains))
        limits = [min(length, view.max_draft) for view in chains]
        self._longest = max(limits)
        self._drafting_seconds = self._costs.drafting(len(chains), self._longest)
        return limits

    def observe(self, report: RoundReport) -> None:
        """Learn what the drafter's estimates are like; costs are taken as given."""
        self._plan.observe(report)

    def _steps(self, frontier: Frontier) -> Iterator[_Step]:
        return _deepest(frontier) if self._costs.is_padded else _likeliest(frontier)

    def _check(self, frontier: Frontier) -> None:
        if len(frontier) != len(self._round):
            raise MisuseError(f"admit() got {len(frontier)} drafts after limits() for {len(self._round)} chains")


class CostScheduled(_Scheduled):
    """Executes the likeliest items of all chains as long as each raises the expected items per second (algorithm 1).

    Items are taken in order of survival, ties by depth and then by chain. One of survival a is admitted when it raises
    tau / T, that is when ``a > tau * (T(B + 1) / T(B) - 1)``; the first that does not ends the admission. T includes
    the seconds of drafting, which are spent by then. Where blocks are padded to the longest (:class:`RoundCosts`), the
    step is not one item but one more item of every chain that has one, at the cost of widening the block.

    Measured costs have steps, at which the paper's early stop gets stuck: the first item of a step pays for all. So
    where the next item does not pay alone, the items after it are guessed: the visible estimates, going on to fall as
    estimates at those depths fell in recent rounds. If some number of items pays together, so many are admitted.

    The decision about an item rests on the estimates of that item, of items before it in its chain, of other chains and
    of earlier rounds: sampling stays exact.

    Args:
        max_draft: most items drafted per chain and round.
        costs: seconds of a round; a plain :class:`CostTable` counts total items.

    Raises:
        InvalidSettingError: ``max_draft`` is negative.
    """

    def admit(self, frontier: Frontier) -> None:
        """Admit while that pays.

        Raises:
            MisuseError: the frontier is not of the chains that ``limits`` was called for.
        """
        self._check(frontier)
        num_chains = len(self._round)
        curve = self._costs.execution(num_chains, self._costs.steps(num_chains, self._max_draft))
        spent, expected, promised = self._drafting_seconds, float(num_chains), 0
        for step, item in enumerate(self._steps(frontier)):
            if item.gain <= 0.0:
                break
            extra = curve[step + 1] - curve[step]
            pays = extra <= 0.0 or item.gain * (spent + curve[step]) > expected * extra
            if not pays and not promised:
                promised = self._paying(item, expected, [spent + seconds for seconds in curve[step:]])
            if not pays and not promised:
                break
            item.admit()
            expected += item.gain
            promised = max(0, promised - 1)

    def _paying(self, item: _Step, expected: float, seconds: Sequence[float]) -> int:
        """How many of the next items raise the items per second most when taken together; 0 if none do.

        Args:
            item: the next one.
            expected: items expected without it.
            seconds: of the round with 0, 1, 2, ... of them.
        """
        decay = self._plan.decay()
        guesses: list[float] = []
        for estimate, place in item.visible():
            guess = estimate
            guesses.append(guess)
            # What was asked for bounds a draft, not where it ends: that may depend on its values.
            for following in range(place + 1, self._longest):
                guess *= decay[following]
                guesses.append(guess)
        return _best_count(sorted(guesses, reverse=True), expected, seconds)


class StaleBudget(_Scheduled):
    """Decides *how many* items to execute from old estimates, and *which* from new ones (DSpark, section 5.2).

    For executions that must be sized before their drafts are there: the number of items comes from the estimates of
    ``lag`` rounds earlier, by comparing all numbers (no early stop, so steps in the costs do no harm), and is filled
    with the likeliest items of the current drafts, ties by depth and then by chain. An item is among the K likeliest
    or not whatever its own value is, and K is older than the draft: sampling stays exact.

    A chain that had no draft ``lag`` rounds ago counts as the average of those that had, and as certain to be accepted
    where none had. Where blocks are padded to the longest, the budget is a depth, and all items up to it are executed.

    Args:
        max_draft: most items drafted per chain and round.
        costs: seconds of a round; a plain :class:`CostTable` counts total items.
        lag: age of the estimates that the budget rests on, in rounds; 1 is the round before.

    Raises:
        InvalidSettingError: ``max_draft`` is negative or ``lag`` below 1.
    """

    def __init__(self, max_draft: int, costs: RoundCosts | CostTable, *, lag: int = 2) -> None:
        super().__init__(max_draft, costs)
        if not lag >= 1:
            raise InvalidSettingError("lag", lag, "an integer >= 1")
        self._limits: Sequence[int] = ()
        self._estimates: deque[Mapping[ChainId, Sequence[float]]] = deque(maxlen=lag)

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As much as allowed where drafting is cheap, else the common length that promises most, 0 included."""
        self._limits = super().limits(chains)
        return self._limits

    def admit(self, frontier: Frontier) -> None:
        """Fill the budget with the likeliest items.

        Raises:
            MisuseError: the frontier is not of the chains that ``limits`` was called for.
        """
        self._check(frontier)
        budget = self.budget()
        if not budget:
            return
        for item in self._steps(frontier):
            if item.gain <= 0.0:
                break
            item.admit()
            budget -= 1
            if not budget:
                break

    def observe(self, report: RoundReport) -> None:
        """Keep the estimates for the rounds to come."""
        super().observe(report)
        self._estimates.append(
            {
                chain_id: _falling([1.0] * drafted if survival is None else survival)
                for chain_id, survival, drafted, limit in zip(
                    report.chain_ids, report.survival, report.drafted, report.limits, strict=True
                )
                if limit > 0
            }
        )

    def budget(self) -> int:
        """Drafted items to execute in all (depth, when padded) for the chains and limits of the current round."""
        num_chains = len(self._round)
        known = self._estimates[0] if len(self._estimates) == self._estimates.maxlen else {}
        unknown = _average(list(known.values()), self._max_draft)
        gains = [
            (known.get(chain_id) or unknown)[:limit] for chain_id, limit in zip(self._round, self._limits, strict=True)
        ]
        depth = max(self._limits, default=0)
        if self._costs.is_padded:
            steps = [sum(gain[place] for gain in gains if place < len(gain)) for place in range(depth)]
        else:
            steps = sorted([estimate for gain in gains for estimate in gain], reverse=True)
        curve = self._costs.execution(num_chains, len(steps))
        return _best_count(steps, float(num_chains), [self._drafting_seconds + seconds for seconds in curve])


def _best_count(gains: Sequence[float], expected: float, seconds: Sequence[float]) -> int:
    """How many gains, from the first on, give the most items per second when taken together; the fewest on a tie.

    Args:
        gains: expected items of each.
        expected: items expected with none of them.
        seconds: of the round with 0, 1, 2, ... of them.
    """
    best, best_expected, best_seconds = 0, expected, seconds[0]
    for taken, (gain, spent) in enumerate(zip(gains, seconds[1:], strict=False), start=1):
        expected += gain
        if expected * best_seconds > best_expected * spent:
            best, best_expected, best_seconds = taken, expected, spent
    return best


@dataclass(frozen=True, slots=True)
class _Step:
    """What may be admitted next."""

    gain: float
    """Items expected of it."""
    admit: Callable[[], None]
    visible: Callable[[], Sequence[tuple[float, int]]]
    """The estimates that are visible before it is admitted, its own included, each with its place in a draft."""


def _likeliest(frontier: Frontier) -> Iterator[_Step]:
    """The drafted items of all chains, likeliest first.

    The next one is shown once the one before was admitted. Ties go to the lesser depth, then to the earlier chain:
    nothing about the values. An estimate above the one before it in its chain counts as equal to that.
    """
    heap: list[tuple[float, int, int]] = []
    for index in range(len(frontier)):
        survival = frontier.survival(index)
        if survival is not None:
            heap.append((-survival, 0, index))
    heapify(heap)

    def visible() -> Sequence[tuple[float, int]]:
        return [(-negative, place) for negative, place, _ in heap]

    while heap:
        negative, place, index = heap[0]
        yield _Step(-negative, partial(frontier.admit, index), visible)
        following = frontier.survival(index)
        if following is None:
            heappop(heap)
        else:
            heapreplace(heap, (max(negative, -following), place + 1, index))


def _deepest(frontier: Frontier) -> Iterator[_Step]:
    """Depth by depth, the items at that depth of all chains at once."""
    before = [1.0] * len(frontier)
    for depth in count():
        indices = []
        for index in range(len(frontier)):
            survival = frontier.survival(index)
            if survival is not None:
                before[index] = min(before[index], survival)
                if before[index] > 0.0:
                    indices.append(index)
        if not indices:
            return
        gain = sum(before[index] for index in indices)
        yield _Step(gain, partial(_admit_each, frontier, indices), partial(_only, gain, depth))


def _admit_each(frontier: Frontier, indices: Sequence[int]) -> None:
    for index in indices:
        frontier.admit(index)


def _only(gain: float, depth: int) -> Sequence[tuple[float, int]]:
    return [(gain, depth)]


def _falling(estimates: Sequence[float]) -> Sequence[float]:
    """The estimates with none above the one before it."""
    result: list[float] = []
    for estimate in estimates:
        result.append(min(result[-1], estimate) if result else estimate)
    return result


def _average(drafts: Sequence[Sequence[float]], length: int) -> Sequence[float]:
    """Mean estimate by place over drafts that are not empty, 0 behind an end; 1.0 where there is no such draft."""
    offered = [draft for draft in drafts if draft]
    if not offered:
        return [1.0] * length
    return [sum(draft[place] for draft in offered if place < len(draft)) / len(offered) for place in range(length)]
