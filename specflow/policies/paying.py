"""Which drafted items of a round are executed: those that pay, by measured costs and corrected estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from ..admission import Frontier
from .acceptance import Calibration, Profile
from .costs import CostTable

_LOOK_AHEAD = 8
"""Items, or depths, over which a step in the costs must pay off."""
_FLOOR_OF_ALTERNATIVES = 0.5
"""The least survival worth executing, where drafts branch, as a share of that in chains."""

Item = tuple[float, int, int, float, float]
"""(-estimated survival, chain, position, claimed survival, claim given the items before); a heap is best first."""


def reach(costs: CostTable, num_chains: int) -> int:
    """The largest width that may be executed: room for one item of every chain, whatever is known."""
    return max(costs.reach, 2 * num_chains)


@dataclass(slots=True)
class Paying:
    """One round's admission: items are admitted as long as they raise the expected items per second.

    Only revealed estimates are looked at: sampling stays exact.
    """

    frontier: Frontier
    calibration: Calibration
    """What estimates are corrected by."""
    profiles: Sequence[Profile]
    """[chains] what is known about each."""
    branching: Sequence[bool]
    """[chains] whether its drafts branch, as far as is known before this round."""
    limits: Sequence[int]
    """[chains] items asked for."""
    costs: CostTable
    """Of executing a width."""
    drafting_seconds: float
    """Spent by now."""
    max_draft: int
    """Most items ever asked for of a chain."""
    min_survival: float
    """Least survival worth executing, whatever it costs."""
    gain: float = 1.0
    """Expected items per second of the round as it was admitted, over those of a plain one."""
    _scales: dict[int, list[float]] = field(default_factory=dict)
    """By chain whose draft branches: what claims are multiplied with, by depth."""

    def one_by_one(self, waiting: list[Item], num_probes: int) -> list[Item]:
        """Admit the likeliest item of all chains while that pays.

        Args:
            waiting: the next item of every chain that has a likely one.
            num_probes: items that are executed anyway.

        Returns:
            What did not pay: the next item of every chain that has one left.
        """
        num_chains = len(self.profiles)
        width, expected = num_chains + num_probes, float(num_chains)
        most = sum([self.frontier.available(item[1]) for item in waiting])
        curve = self.costs.curve(width + most + _LOOK_AHEAD)
        heap = list(waiting)
        heapify(heap)
        seconds = self.drafting_seconds + curve[width]
        widest = reach(self.costs, num_chains)
        while heap and width < widest:
            extra = curve[width + 1] - curve[width]
            pays = extra <= 0.0 or -heap[0][0] * seconds > expected * extra
            if not pays and not self._pays_ahead(
                heap, expected, seconds, curve[width : min(width + _LOOK_AHEAD, widest) + 1]
            ):
                break
            self.frontier.admit(heap[0][1])
            expected -= heap[0][0]
            width += 1
            seconds += extra
            following = self._following(heap[0])
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, following)
        self._note_gain(expected, seconds)
        return heap

    def depth_by_depth(self, waiting: list[Item], executed: int) -> list[Item]:
        """Admit one more item of every chain that has a likely one while that pays: blocks are padded to the longest.

        Args:
            waiting: the next item of every chain that has a likely one.
            executed: items of a chain that are executed anyway.

        Returns:
            What did not pay.
        """
        num_chains = len(self.profiles)
        deepest = min(self.max_draft, reach(self.costs, num_chains) // num_chains - 1)
        costs = self.costs.multiples(num_chains, 1 + deepest)
        seconds = [self.drafting_seconds + costs[1 + max(depth, executed)] for depth in range(deepest + 1)]
        expected, depth = float(num_chains), 0
        while waiting and depth < deepest:
            gain = -sum([item[0] for item in waiting])
            extra = seconds[depth + 1] - seconds[depth]
            pays = extra <= 0.0 or gain * seconds[depth] > expected * extra
            if not pays and not self._deeper_pays(waiting, expected, seconds[depth : depth + _LOOK_AHEAD + 1]):
                break
            for item in waiting:
                self.frontier.admit(item[1])
            expected += gain
            depth += 1
            following = [self._following(item) for item in waiting]
            waiting = [item for item in following if item is not None]
        self._note_gain(expected, seconds[depth])
        return waiting

    def _following(self, item: Item) -> Item | None:
        """What comes after an item that was just admitted; None where nothing does that is likely enough."""
        negative, index, position, survival, _ = item
        following = self.frontier.survival(index)
        if following is None:
            return None
        position += 1
        claim = min(1.0, following / survival) if survival > 0.0 else 0.0
        profile, floor = self.profiles[index], self.min_survival
        if self.frontier.parents(index) is None:
            negative *= min(1.0, claim * self.calibration.ratio(profile, position))
        else:
            # What comes next may continue any earlier item: its claim is corrected from the history on.
            if index not in self._scales:
                self._scales[index] = self.calibration.scales(profile)
            negative = -min(1.0, following * self._scales[index][self.frontier.depth(index)])
            floor *= _FLOOR_OF_ALTERNATIVES
        return None if -negative < floor else (negative, index, position, following, claim)

    def _note_gain(self, expected: float, seconds: float) -> None:
        """What the round promises, against a plain one."""
        num_chains = len(self.profiles)
        plain = self.costs.seconds(num_chains)
        self.gain = expected / num_chains * (plain / seconds if seconds > 0.0 else 1.0)

    def _deeper_pays(self, waiting: Sequence[Item], expected: float, seconds: Sequence[float]) -> bool:
        """True when the next items of all chains, some depths of them together, raise the items per second.

        The items behind the revealed ones are assumed to be claimed like them, corrected for their own positions.

        Args:
            waiting: revealed items.
            expected: items expected without any of them.
            seconds: of the round with 0, 1, 2, ... depths more.
        """
        own = [-item[0] for item in waiting]
        gained = 0.0
        for step in range(1, len(seconds)):
            gained += sum(own)
            if gained * seconds[0] > expected * (seconds[step] - seconds[0]):
                return True
            if not any(own):
                return False
            for number, (_, index, position, _, claim) in enumerate(waiting):
                place = position + step
                # What was asked for, not what was drafted, as in _pays_ahead.
                if place >= self.limits[index]:
                    own[number] = 0.0
                    continue
                ratio = 1.0 if self.branching[index] else self.calibration.ratio(self.profiles[index], place)
                own[number] *= min(1.0, claim * ratio)
        return False

    def _pays_ahead(self, heap: list[Item], expected: float, seconds: float, curve: Sequence[float]) -> bool:
        """True when the next items, taken together, raise the items per second although the first does not.

        For the items behind the revealed one of the best chain the claim made of it is assumed, corrected for their
        own positions. Of the other chains only what is revealed is considered.

        Args:
            heap: revealed items, best first; not changed.
            expected: items expected without any of them.
            seconds: of the round without any of them.
            curve: seconds of executing 0, 1, 2, ... items more.
        """
        negative, index, position, _, claim = heap[0]
        profile = self.profiles[index]
        # What was asked for, not what was drafted: where a draft ends may depend on its values, and then its length
        # must not decide about them.
        last = self.limits[index]
        others = sorted([item[0] for item in heap[1:]], reverse=True)
        own, gained = -negative, 0.0
        for step in range(1, len(curve)):
            if position < last and not (others and -others[-1] > own):
                gained += own
                position += 1
                ratio = 1.0 if self.branching[index] or position >= last else self.calibration.ratio(profile, position)
                own *= min(1.0, claim * ratio) if position < last else 0.0
            elif others:
                gained -= others.pop()
            else:
                return False
            if gained * seconds > expected * (curve[step] - curve[0]):
                return True
        return False
