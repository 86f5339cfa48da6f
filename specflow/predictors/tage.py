"""TAGE: tables of tagged counters, each for a longer history than the one before."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from ..errors import InvalidSettingError
from .branch import RATE_MEMORY, BranchPrediction, Counters, check_between
from .memory import HitRates

_MOST_COUNTER: Final = 3
_LEAST_COUNTER: Final = -4
_MOST_USEFUL: Final = 3
_MOST_FAITH: Final = 15
_HALF_FAITH: Final = 8
_NO_TAG: Final = 0xFFFF
"""Of entries never allocated. No branch has it: tags are shorter."""

_PRIME: Final = (1 << 61) - 1
_MASK: Final = (1 << 64) - 1
_ODD_1: Final = 0x9E3779B97F4A7C15
_ODD_2: Final = 0xC2B2AE3D27D4EB4F
_ODD_3: Final = 0xD6E8FEB86659FD93

_TAPS: Final = 0x80200003
"""Of a shift register that takes every state of 32 bits but 0."""
_SEED: Final = 0x2545F491

_ALTERNATE_USED: Final = -1
"""State whose hit rate counts when a new entry's guess was passed over."""


class TAGE:
    """Tagged tables with geometrically growing history lengths, the longest match predicts.

    Seznec and Michaud 2006, "A Case for (Partially) TAgged GEometric History Length Branch Prediction": a base table of
    two-bit counters by address, and tagged tables of three-bit counters with two-bit usefulness. A misprediction
    allocates an entry for a longer history. An entry that was just allocated is passed over while such entries do worse
    than what they replace. The index and tag hashes are this module's own; everything else follows the paper. The
    confidence is how often guesses by a counter of that strength were right lately (Seznec 2011, "Storage Free
    Confidence Estimation for the TAGE Branch Predictor").

    Args:
        table_bits: each tagged table has ``2 ** table_bits`` entries.
        tables: number of tagged tables.
        shortest: history length of the first tagged table, in outcomes.
        longest: history length of the last.
        tag_bits: length of the tags.
        base_bits: the base table has ``2 ** base_bits`` counters.
        aging_period: retired branches after which one bit of every usefulness is cleared, high and low bit in turn.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(
        self,
        table_bits: int = 10,
        *,
        tables: int = 5,
        shortest: int = 4,
        longest: int = 64,
        tag_bits: int = 9,
        base_bits: int = 12,
        aging_period: int = 1 << 18,
    ) -> None:
        check_between("table_bits", table_bits, 1, 20)
        check_between("tables", tables, 1, 16)
        check_between("shortest", shortest, 1, 1024)
        check_between("tag_bits", tag_bits, 1, 15)
        if not shortest <= longest <= 4096:
            raise InvalidSettingError("longest", longest, f"an integer in [shortest={shortest}, 4096]")
        if not aging_period >= 1:
            raise InvalidSettingError("aging_period", aging_period, "an integer >= 1")
        self._base = Counters(base_bits)
        self._tables = [_Table(table_bits, tag_bits, length) for length in _lengths(tables, shortest, longest)]
        self._aging_period = aging_period
        self._retired = 0
        self._faith = _HALF_FAITH
        """USE_ALT_ON_NA of the paper: from 8 on, new entries are passed over."""
        self._random = _SEED
        self._rates = HitRates(RATE_MEMORY)

    def predict(self, address: int, history: int) -> BranchPrediction:
        """The direction of the longest matching history, or of the next one where that entry is too new."""
        found = self._find(address, history)
        if found.state is None:
            return self._base.predict(address)
        return BranchPrediction(found.taken, self._rates.rate(found.state))

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Move the counter that predicted, judge its use, and allocate where the guess was wrong."""
        found = self._find(address, history)
        if found.state is not None:
            self._rates.record(found.state, hit=found.taken == taken)
        if found.provider is None:
            self._base.observe(address, taken=taken)
        else:
            table = self._tables[found.provider]
            entry = found.entries[found.provider]
            if found.is_new and found.provider_taken != found.alternate_taken:
                step = 1 if found.alternate_taken == taken else -1
                self._faith = min(max(self._faith + step, 0), _MOST_FAITH)
            table.learn(entry, taken=taken)
            if found.provider_taken != found.alternate_taken:
                table.judge(entry, useful=found.provider_taken == taken)
        if found.taken != taken:
            self._allocate(found, taken=taken)
        self._retired += 1
        if self._retired % self._aging_period == 0:
            keep = 0b01 if self._retired // self._aging_period % 2 else 0b10
            for table in self._tables:
                table.age(keep)

    def _find(self, address: int, history: int) -> _Found:
        places = [table.place(address, history) for table in self._tables]
        entries = [entry for entry, _ in places]
        tags = [tag for _, tag in places]
        matches = [number for number, table in enumerate(self._tables) if table.tags[entries[number]] == tags[number]]
        if not matches:
            taken = self._base.predict(address).taken
            return _Found(entries, tags, None, taken, taken, taken, None, is_new=False)
        provider = matches[-1]
        counter = self._tables[provider].counters[entries[provider]]
        if len(matches) > 1:
            alternate_taken = self._tables[matches[-2]].counters[entries[matches[-2]]] >= 0
        else:
            alternate_taken = self._base.predict(address).taken
        is_new = counter in (-1, 0) and self._tables[provider].useful[entries[provider]] == 0
        passed_over = is_new and self._faith >= _HALF_FAITH
        taken = alternate_taken if passed_over else counter >= 0
        state = _ALTERNATE_USED if passed_over else counter if counter >= 0 else -1 - counter
        return _Found(entries, tags, provider, counter >= 0, alternate_taken, taken, state, is_new=is_new)

    def _allocate(self, found: _Found, *, taken: bool) -> None:
        """Give the branch an entry in one table with a longer history than the one that predicted."""
        first = 0 if found.provider is None else found.provider + 1
        longer = range(first, len(self._tables))
        free = [number for number in longer if self._tables[number].useful[found.entries[number]] == 0]
        for number in free:
            # Each table is chosen half of the time before the next is considered: short histories learn faster.
            if number == free[-1] or self._coin():
                self._tables[number].allocate(found.entries[number], found.tags[number], taken=taken)
                return
        for number in longer:
            self._tables[number].judge(found.entries[number], useful=False)

    def _coin(self) -> bool:
        """Half of the time True, the same in every run: a linear feedback shift register, moved by retired branches."""
        low = self._random & 1
        self._random >>= 1
        if low:
            self._random ^= _TAPS
        return bool(low)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the tables say about a branch."""

    entries: list[int]
    """Its entry in each tagged table."""
    tags: list[int]
    """Its tag in each."""
    provider: int | None
    """The table with the longest matching history; None is the base table."""
    provider_taken: bool
    alternate_taken: bool
    """What would be guessed without the provider."""
    taken: bool
    """The guess."""
    state: int | None
    """Strength of the counter that predicts; None for the base table, which keeps its own rates."""
    is_new: bool
    """Whether the provider's entry was just allocated, as far as one can tell."""


class _Table:
    """Tagged counters for histories of one length."""

    __slots__ = ("_history_mask", "_index_mask", "_length", "_tag_mask", "counters", "tags", "useful")

    def __init__(self, table_bits: int, tag_bits: int, length: int) -> None:
        self._length = length
        self._history_mask = (1 << length) - 1
        self._index_mask = (1 << table_bits) - 1
        self._tag_mask = (1 << tag_bits) - 1
        self.counters = array("b", bytes(1 << table_bits))
        self.tags = array("H", [_NO_TAG]) * (1 << table_bits)
        self.useful = bytearray(1 << table_bits)

    def place(self, address: int, history: int) -> tuple[int, int]:
        """Entry and tag of a branch: different bits of one hash of its address and history."""
        # The modulus folds histories beyond 60 outcomes; shorter ones it leaves as they are.
        folded = (history & self._history_mask) % _PRIME
        mixed = (folded * _ODD_1 + address * _ODD_2 + self._length) & _MASK
        mixed = ((mixed ^ (mixed >> 31)) * _ODD_3) & _MASK
        return (mixed >> 44) & self._index_mask, (mixed >> 20) & self._tag_mask

    def learn(self, entry: int, *, taken: bool) -> None:
        """Move a counter."""
        counter = self.counters[entry]
        self.counters[entry] = min(counter + 1, _MOST_COUNTER) if taken else max(counter - 1, _LEAST_COUNTER)

    def judge(self, entry: int, *, useful: bool) -> None:
        """An entry was right, or wrong, where the guess without it would have been the other way."""
        value = self.useful[entry]
        self.useful[entry] = min(value + 1, _MOST_USEFUL) if useful else max(value - 1, 0)

    def allocate(self, entry: int, tag: int, *, taken: bool) -> None:
        """Give an entry to another branch, weakly."""
        self.tags[entry] = tag
        self.counters[entry] = 0 if taken else -1
        self.useful[entry] = 0

    def age(self, keep: int) -> None:
        """Keep only some bits of every usefulness."""
        self.useful = self.useful.translate(bytes(value & keep for value in range(256)))


def _lengths(tables: int, shortest: int, longest: int) -> list[int]:
    """Round(shortest * ratio ** i), from ``shortest`` to ``longest``."""
    if tables == 1:
        return [shortest]
    ratio = (longest / shortest) ** (1.0 / (tables - 1))
    return [round(shortest * ratio**number) for number in range(tables)]
