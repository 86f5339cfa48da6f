"""A recorded run as a source of answers: what calls returned, how long they took, and guesses right or wrong."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final

from .codec import Box, decode, encode
from .errors import SpecflowError
from .history import Entry, EntryKind, Operation, Position, Write, format_position
from .speculation import Call, Prediction
from .state import Access, Read, State
from .worlds import Guess, World

NEVER_RETURNED: Final = "specflow: no step returns this"
"""A guess that is wrong whatever the step returns."""


class Recording:
    """The calls of a recorded run.

    Args:
        entries: its committed entries, oldest first.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.calls: tuple[Entry, ...] = tuple(entry for entry in entries if entry.kind is EntryKind.CALL)
        """In program order."""
        self._at = {entry.position: entry for entry in self.calls}
        self._equal: dict[tuple[str, bytes], Entry] = {}
        self._gathered: dict[Position, list[Entry]] = defaultdict(list)
        """First calls of parallel branches, in the order of the branches, by the place where they started."""
        durations: dict[str, list[float]] = defaultdict(list)
        for entry in self.calls:
            self._equal.setdefault((entry.step, entry.arguments), entry)
            durations[entry.step].append(entry.seconds)
            if len(entry.position) > 2 and entry.position[-1] == 0:
                self._gathered[entry.position[:-2]].append(entry)
        self._medians = {step: statistics.median(seconds) for step, seconds in durations.items()}
        every = [seconds for one in durations.values() for seconds in one]
        self._median = statistics.median(every) if every else 0.0

    def at(self, position: Position) -> Entry | None:
        """The call at a place of the program."""
        return self._at.get(position)

    def equal_call(self, step: str, arguments: bytes) -> Entry | None:
        """The first call of a step with these encoded ``[args, kwargs]``, wherever it was made."""
        return self._equal.get((step, arguments))

    def median_seconds(self, step: str) -> float:
        """How long the step usually took; a step without calls counts as the median of all calls."""
        return self._medians.get(step, self._median)

    def find(self, call: Call) -> Entry | None:
        """The recorded call that a predictor is asked about: at its place, or among those gathered there."""
        entry = self._at.get(call.position)
        if entry is not None:
            return entry if entry.step == call.step else None
        arguments = encode([[*call.arguments], dict(call.keywords)])
        gathered = self._gathered.get(call.position, ())
        return next((entry for entry in gathered if (entry.step, entry.arguments) == (call.step, arguments)), None)

    def is_true(self, world: World) -> bool:
        """Does every guess that a world rests on equal what is on record?"""
        seen: set[int] = set()
        stack = [world]
        while stack:
            current = stack.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            guess = current.guess
            if guess is not None:
                # A guess of what other branches return is as true as the guesses of these.
                if not guess.basis and not self._holds(guess):
                    return False
                stack.extend(guess.basis)
            join = current.strand.join
            above = current.parent if current.parent is not None else join.world if join is not None else None
            if above is not None:
                stack.append(above)
        return True

    def _holds(self, guess: Guess) -> bool:
        position = guess.assumption.position
        entry = self._at.get(position)
        if entry is not None:
            return entry.result == guess.box.data
        gathered = self._gathered.get(position)
        if not gathered or any(call.result is None for call in gathered):
            return False
        return encode([(decode(call.result or b""), None) for call in gathered]) == guess.box.data


class FromRecord:
    """Guesses with knowledge of what is on record.

    Args:
        recording: the run whose results are guessed.
        choose: for a call, whether each guess is to be right, likeliest first; none to pass.
        confidence: claimed probability of the first guess; each further one claims half of the one before.
    """

    def __init__(
        self, recording: Recording, choose: Callable[[Call], Sequence[bool]], *, confidence: float = 1.0
    ) -> None:
        self._recording = recording
        self._choose = choose
        self._confidence = confidence

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Right and wrong guesses, as chosen. A call that is not on record, or raised, has no right one."""
        chosen = self._choose(call)
        if not chosen:
            return ()
        entry = self._recording.find(call)
        result = entry.result if entry is not None else None
        guesses: list[Prediction] = []
        for rank, is_right in enumerate(chosen):
            if is_right and result is None:
                continue
            if is_right:
                value = decode(result or b"")
            else:
                value = wrong_value(decode(result)) if result is not None else NEVER_RETURNED
            guesses.append(Prediction(value, self._confidence / 2**rank))
        return guesses


def wrong_value(value: Any) -> Any:
    """A value that is not equal to another, of the same type where there is an obvious one."""
    other = _variation(value)
    try:
        return NEVER_RETURNED if encode(other) == encode(value) else Box(other).fresh()
    except SpecflowError:
        return NEVER_RETURNED


def redo(state: State, accesses: Iterable[Access]) -> None:
    """Read and write what was read and written before, so that it is on record as done by this state's owner."""
    for access in accesses:
        if isinstance(access, Read):
            _found = access.key in state
        elif not isinstance(access, Write):
            state.scan(access.prefix)
        elif access.operation is Operation.DELETE:
            state.delete(access.key)
        else:
            value = decode(access.data, f"state {access.key!r}")
            change = {
                Operation.PUT: state.put,
                Operation.ADD: state.add,
                Operation.APPEND: state.append,
                Operation.UNION: state.union,
            }[access.operation]
            change(access.key, value)


def names_of(step: str) -> tuple[str, ...]:
    """What a person may call a step: its name in full, without the module, or the last part of that."""
    qualname = step.partition(":")[2] or step
    return step, qualname, qualname.rpartition(".")[2]


def coin(seed: int, *place: object) -> float:
    """A number in [0, 1) that depends on nothing but the seed and the place."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def place_of(call: Call) -> tuple[str, str]:
    """Step and position of a call, for :func:`coin`."""
    return call.step, format_position(call.position)


def plain(data: bytes) -> Any:
    """What stored bytes say, as plain JSON values: types appear as tags, and no class is imported.

    Bytes that are damaged appear as text.
    """
    text = data.decode("utf-8", "surrogatepass")
    try:
        return json.loads(text)
    except ValueError:
        return text


def plain_arguments(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Encoded ``[args, kwargs]`` as :func:`plain` values."""
    match plain(data):
        case [[*args], dict() as kwargs]:
            return args, kwargs
        case other:
            return ([] if other in ("", None) else [other]), {}


def _variation(value: Any) -> Any:  # noqa: PLR0911 - one answer per type
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next((member for member in type(value) if member is not value), NEVER_RETURNED)
    if type(value) is int:
        return value + 1
    if type(value) is float:
        return math.nextafter(value, math.inf) if math.isfinite(value) else 0.0
    if type(value) is str:
        return f"{value}?"
    if type(value) is bytes:
        return value + b"?"
    if type(value) in (list, tuple):
        return type(value)([*value, *value[-1:]]) if value else type(value)([NEVER_RETURNED])
    if type(value) is dict:
        return dict(list(value.items())[:-1]) if value else {NEVER_RETURNED: None}
    return NEVER_RETURNED


__all__ = [
    "NEVER_RETURNED",
    "FromRecord",
    "Recording",
    "coin",
    "names_of",
    "place_of",
    "plain",
    "plain_arguments",
    "redo",
    "wrong_value",
]
