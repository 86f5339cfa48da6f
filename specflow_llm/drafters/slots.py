"""Which request sits in which slot of a cache whose rows must stay next to each other."""

from __future__ import annotations

from collections.abc import Sequence

from .base import RowId


class SlotOrder:
    """Slots 0..n-1, one per request; taking one out moves the last into its place, as the cache does."""

    def __init__(self) -> None:
        self._rows: list[RowId] = []
        self._slots: dict[RowId, int] = {}

    def __contains__(self, row: RowId) -> bool:
        return row in self._slots

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: RowId) -> int:
        """Give a request the next slot."""
        self._slots[row] = len(self._rows)
        self._rows.append(row)
        return self._slots[row]

    def slot(self, row: RowId) -> int:
        """A request's slot."""
        return self._slots[row]

    def remove(self, row: RowId) -> int | None:
        """Take a request out.

        Returns:
            The slot it had, which the last one moves into; None for unknown requests.
        """
        slot = self._slots.pop(row, None)
        if slot is None:
            return None
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last
            self._slots[last] = slot
        return slot


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal ranges (first, end) of consecutive numbers in a sorted sequence."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return found
