"""Prediction by precedent: the last time the run looked like this, what came next?"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

from ..speculation import Call, Prediction
from .memory import Bounded, HitRates, Kept, key_of, whole

_MOST_CONTEXT: Final = 32
"""A call shows the newest 64 results. Half of them leave room to see whether the first one shown is the run's first."""

_LONGEST: Final = 0
_POSITION: Final = -1

Context = tuple[int, Hashable]
"""What kind of context it is (a number of results, or one of the two above), and which one: a digest, or a place."""


class _Next:
    """What came next."""

    __slots__ = ("mark", "result", "step")

    def __init__(self, step: str, result: Kept) -> None:
        self.step = step
        self.result = result
        self.mark = _mark(step, result.key)


class TraceReplay:
    """What the last run did at this point, and what it did after that.

    Builds that run ahead from the trace of the last build work like this (Spall, Mitchell and Tobin-Hochstadt 2020,
    "Build Scripts with Perfect Dependencies"), and so do agents that mine recurring tool calls. Use one object for all
    steps of a workflow: it then sees the whole trail, although it also learns other steps' results from the trails it
    is shown.

    A point of a run is known by the results before it: all of them near the start, and the newest 1, 2, 4 ...
    ``context``, and by the program position. Each remembers what came next the last time. Longer contexts tell apart
    the turns of a loop; short ones and the position find the way back after a divergence. The guess comes from the
    context whose guesses were right most often lately for this step, and that rate is the confidence; a longer context
    is thought to be as good as a shorter one until it has proved worse. Runs at the same time do not disturb each
    other.

    Memory: ``limit`` contexts with one result each, over all steps.

    Args:
        ahead: how many further results to guess (:attr:`~specflow.speculation.Prediction.then`), of whichever steps
            come.
        context: longest context, in results; at most 32.
        memory: guesses after which one has faded to 1/e in the confidence.
        limit: most contexts kept; the one learned least recently is forgotten.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(self, *, ahead: int = 4, context: int = 16, memory: float = 50.0, limit: int = 16_384) -> None:
        self._ahead = whole("ahead", ahead, 0)
        self._context = whole("context", context, 1, _MOST_CONTEXT)
        self._lengths = [1 << power for power in reversed(range(context.bit_length()))]
        self._following: Bounded[Context, _Next] = Bounded(limit)
        self._rates = HitRates(memory)
        self._lock = threading.Lock()

    def predict(self, call: Call) -> Sequence[Prediction]:
        """What came next the last time, if that was this step."""
        marks = self._marks(call.trail, len(call.trail), self._context)
        best, confidence = None, 0.5
        for context, following in self._guesses(call, self._contexts(marks)):
            rate = self._rates.rate((call.step, context[0]), max(confidence, 0.5))
            if best is None or rate >= confidence:
                best, confidence = following, rate
        if best is None:
            return ()
        return (Prediction(best.result.copy(), confidence, self._after(marks, best)),)

    def observe(self, call: Call, value: Any) -> None:
        """Remember that this result came next, and score what each context would have guessed."""
        kept = Kept(value)
        marks = self._marks(call.trail, len(call.trail), self._context + 1)
        contexts = self._contexts(marks[-self._context :])
        with self._lock:
            for context, following in self._guesses(call, contexts):
                self._rates.record((call.step, context[0]), hit=following.result.key == kept.key)
            self._learn_others(call.trail, marks)
            self._learn([*contexts, _place(call)], _Next(call.step, kept))

    def _guesses(self, call: Call, contexts: Sequence[Context]) -> Iterator[tuple[Context, _Next]]:
        """What each known context says about this step, the position first and the longest last."""
        for context in (_place(call), *reversed(contexts)):
            following = self._following.get(context)
            if following is not None and following.step == call.step:
                yield context, following

    def _after(self, marks: list[int], following: _Next) -> tuple[Any, ...]:
        """Results that came after ``following``, of any steps, until the way is unknown."""
        values: list[Any] = []
        for _ in range(self._ahead):
            marks = [*marks[1 - self._context :], following.mark] if self._context > 1 else [following.mark]
            found = None
            for context in self._contexts(marks):
                found = self._following.get(context)
                if found is not None:
                    break
            if found is None:
                break
            values.append(found.result.copy())
            following = found
        return tuple(values)

    @staticmethod
    def _marks(trail: Sequence[tuple[str, Any]], end: int, count: int) -> list[int]:
        """The marks of the newest entries before ``end``, oldest first."""
        return [_mark(step, key_of(value)) for step, value in trail[max(0, end - count) : end]]

    def _contexts(self, marks: Sequence[int]) -> list[Context]:
        """Contexts of the point after the newest calls, longest first.

        Fewer than ``context`` marks are those of the whole run so far.
        """
        shown = len(marks)
        shorter = [(length, hash(tuple(marks[-length:]))) for length in self._lengths if length < shown]
        return [(_LONGEST, hash(tuple(marks))), *shorter]

    def _learn(self, contexts: Sequence[Context], following: _Next) -> None:
        for context in contexts:
            self._following.put(context, following)

    def _learn_others(self, trail: Sequence[tuple[str, Any]], marks: list[int]) -> None:
        """Learn the latest calls of steps that use another predictor, or none: nobody reports them.

        Args:
            trail: the calls.
            marks: those of the newest calls, one more than a context has.
        """
        # A call shows 64 results. Where it shows that many, what stands before the first of them is unknown.
        first = 0 if len(trail) < 2 * self._context else self._context
        for end in range(len(trail) - 1, first - 1, -1):
            if end < len(trail) - 1:  # rare: mostly the newest call was reported, or the one before it
                marks = self._marks(trail, end + 1, self._context + 1)
            *before, mark = marks
            contexts = self._contexts(before)
            known = self._following.get(contexts[0])
            if known is not None and known.mark == mark:
                return
            step, value = trail[end]
            self._learn(contexts, _Next(step, Kept(value)))


def _mark(step: str, key: Hashable) -> int:
    """A number for a step and its result. Two that share one by chance would cost a wrong guess, nothing else."""
    return hash((step, key))


def _place(call: Call) -> Context:
    return (_POSITION, (call.step, call.position))
