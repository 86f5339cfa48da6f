"""What a round will cost, by how many chains take part, how much is drafted and how much is executed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..errors import InvalidSettingError
from .costs import CostTable

_NOTHING: Mapping[int, CostTable] = {}


class RoundCosts:
    """Seconds of drafting and of executing a round, from tables that were measured beforehand.

    Execution is tabulated by the number of chains and by *width*, the items executed per chain (1 + draft). How drafts
    of unequal length share a round depends on who executes it:

    * **packed** (the default): items of all chains stand side by side, and a round costs what its total number of
      items costs. One admitted item costs the same in every chain.
    * **padded**: every chain's block is padded to the longest, and a round costs what that width costs for all chains.
      The first item at a new depth pays for all chains; further items at that depth are free.

    Numbers of chains that were not measured are interpolated at equal width; beyond the measured ones a round costs
    what as many items in all cost at the nearest measured number of chains. So a single table of total items, measured
    with one chain, serves any number of chains: ``RoundCosts({1: table})``.

    Args:
        execute: seconds by width, for each measured number of chains.
        draft: seconds of drafting by draft length, for each measured number of chains; none means it costs nothing.
        padded: blocks are padded to the longest of the round.

    Raises:
        InvalidSettingError: a table is missing or empty, or a number of chains is below 1.
    """

    def __init__(
        self, execute: Mapping[int, CostTable], draft: Mapping[int, CostTable] = _NOTHING, *, padded: bool = False
    ) -> None:
        for name, tables in (("execute", execute), ("draft", draft)):
            if any(number < 1 for number in tables):
                raise InvalidSettingError(name, sorted(tables), "numbers of chains >= 1")
            if any(not table.points() for table in tables.values()):
                raise InvalidSettingError(name, sorted(tables), "tables with at least one measurement each")
        if not execute:
            raise InvalidSettingError("execute", dict(execute), "a table for at least one number of chains")
        self._execute = dict(execute)
        self._draft = dict(draft)
        self._executed_at = sorted(execute)
        self._drafted_at = sorted(draft)
        self._padded = padded
        self._curves: dict[int, list[float]] = {}

    @classmethod
    def of(cls, costs: RoundCosts | CostTable) -> RoundCosts:
        """``costs`` itself, or a table of total items as packed costs without drafting."""
        return cls({1: costs}) if isinstance(costs, CostTable) else costs

    @property
    def is_padded(self) -> bool:
        """True when a round costs what its longest block costs in every chain."""
        return self._padded

    def steps(self, num_chains: int, max_draft: int) -> int:
        """How many steps above plain execution there are: the deepest draft when padded, else all items together."""
        return max_draft if self._padded else num_chains * max_draft

    def execution(self, num_chains: int, upto: int) -> Sequence[float]:
        """Seconds of execution at steps 0 (plain) to at least ``upto``. Read-only.

        A step is one more drafted item at the deepest place when padded, and one more drafted item in all when packed.
        """
        curve = self._curves.setdefault(num_chains, [])
        for step in range(len(curve), upto + 1):
            width = 1.0 + (step if self._padded else step / num_chains)
            curve.append(self._at(num_chains, width))
        return curve

    def drafting(self, num_chains: int, length: int) -> float:
        """Seconds of drafting up to ``length`` items for each of so many chains; 0.0 for none."""
        if length < 1 or not self._drafted_at:
            return 0.0
        known = self._drafted_at
        index = bisect_left(known, num_chains)
        if index == len(known):
            # Not less than in proportion: an unmeasured load must not look cheap to draft for at every round.
            return self._draft[known[-1]].seconds(length) * num_chains / known[-1]
        upper = self._draft[known[index]].seconds(length)
        if known[index] == num_chains or index == 0:
            return upper
        share = (num_chains - known[index - 1]) / (known[index] - known[index - 1])
        return upper * share + self._draft[known[index - 1]].seconds(length) * (1.0 - share)

    def round(self, lengths: Sequence[int], asked: int) -> float:
        """Seconds of a round that executes drafts of these lengths after asking for up to ``asked`` items each."""
        step = max(lengths, default=0) if self._padded else sum(lengths)
        return self.drafting(len(lengths), asked) + self.execution(len(lengths), step)[step]

    def _at(self, num_chains: int, width: float) -> float:
        known = self._executed_at
        index = bisect_left(known, num_chains)
        if index < len(known) and known[index] == num_chains:
            return _between(self._execute[num_chains], width)
        if index in {0, len(known)}:
            nearest = known[min(index, len(known) - 1)]
            return _between(self._execute[nearest], width * num_chains / nearest)
        low, high = known[index - 1], known[index]
        share = (num_chains - low) / (high - low)
        return _between(self._execute[low], width) * (1.0 - share) + _between(self._execute[high], width) * share


def _between(table: CostTable, width: float) -> float:
    low = int(width)
    curve = table.curve(low + 1)
    return curve[low] + (width - low) * (curve[low + 1] - curve[low])
