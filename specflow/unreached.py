"""Effects that cannot be repeated, were begun before a crash, and whose call the program has yet to make again.

A deterministic program comes to them in program order, before it does anything else there. One that passes them by was
changed, or depends on something outside its arguments: it would make the same effect again at another place, or leave
unsaid that it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .errors import DivergenceError
from .history import EffectRecord, EffectStatus, Entry, EntryKind, Position, format_position

_BEGUN = frozenset({EffectStatus.SENT, EffectStatus.UNKNOWN, EffectStatus.ACKED, EffectStatus.FAILED})


class Unreached:
    """Those effects, in program order.

    Args:
        rows: of the outbox, as the store knew them.
        entries: history; its calls were made, so their effects are not waited for.
        is_final: by step name, whether the step is made for real only and once: never on a guess, and cannot be
            repeated. None where no such step is known. Asked as late as possible: steps become known as the program
            asks for them.
        is_used: by key, whether the effect has served its call meanwhile.
    """

    def __init__(
        self,
        rows: Iterable[EffectRecord],
        entries: Sequence[Entry],
        is_final: Callable[[str], bool | None],
        is_used: Callable[[str], bool],
    ) -> None:
        self._is_final = is_final
        self._is_used = is_used
        begun = [row for row in rows if row.tries > 0 and row.status in _BEGUN]
        self._rows: list[EffectRecord] = []
        self._forks: set[Position] = set()
        if begun:
            made = {entry.position for entry in entries if entry.kind is EntryKind.CALL}
            self._rows = sorted((row for row in begun if row.position not in made), key=lambda row: row.position)
            self._forks = {entry.position for entry in entries if entry.kind is EntryKind.FORK}

    def passed_by_call(self, position: Position, step: str) -> DivergenceError | None:
        """What is wrong with making a call there; None for nothing."""
        if not self._rows:
            return None
        return self._passed(position, f"a call of {step}", step)

    def passed_by_entry(self, entry: Entry, made: str) -> DivergenceError | None:
        """What is wrong with the next entry of history being this; None for nothing.

        Args:
            entry: new, in program order.
            made: how errors name it.
        """
        if not self._rows:
            return None
        if entry.kind is EntryKind.FORK:
            self._forks.add(entry.position)
        return self._passed(entry.position, made, entry.step if entry.kind is EntryKind.CALL else None)

    def passed_by_end(self) -> DivergenceError | None:
        """What is wrong with the program's having ended; None for nothing.

        Steps that nobody knows do not count: they may have been begun on a guess, and the end looks after those.
        """
        return self._passed(None, "the end", None)

    def _passed(self, position: Position | None, made: str, step: str | None) -> DivergenceError | None:
        for row in self._rows:
            if self._is_used(row.key) or (position is not None and not self._is_passed(row, position, step)):
                continue
            is_final = self._is_final(row.step)
            if is_final or (is_final is None and position is not None):
                recorded = f"a call of {row.step} that was begun before a crash and may have had its effect"
                where = "" if position in (None, row.position) else f" at {format_position(position or ())}"
                return DivergenceError(format_position(row.position), recorded, f"{made}{where}")
        return None

    def _is_passed(self, row: EffectRecord, position: Position, step: str | None) -> bool:
        """Whether a program that asks for something at a position cannot come to the row's any more."""
        begun = row.position
        if begun == position:
            return step != row.step
        if begun[: len(position)] == position:
            return step is not None  # a call of a step has nothing inside; parallel calls have
        if position[: len(begun)] == begun:
            return True  # inside something that stands where the call was
        common = next(place for place, (one, other) in enumerate(zip(begun, position, strict=False)) if one != other)
        return begun[common] < position[common] and begun[:common] not in self._forks


__all__ = ["Unreached"]
