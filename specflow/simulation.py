"""Virtual time: a scheduler driven to its end without an event loop, a clock or a wait.

The decisions are the real ones: only how long tasks take, and what they come to, is somebody else's word. One task ends
after another, in the order of their times and, at the same time, of their starts; what is decided takes no time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .history import EffectRecord, Entry, RunStatus
from .replay import Outcome, SleepRequest
from .report import RunReport
from .scheduler import Decision, Scheduler
from .state import cells_of, write_cell
from .worlds import Cancel, Finish, Start, Task, TaskStatus, Wake, World


class Work(Protocol):
    """**Protocol:** how long tasks take, and what they come to."""

    def seconds(self, task: Task) -> float:
        """How long a task takes. Asked once, when it starts; infinity for one that never ends by itself."""
        ...

    async def perform(self, task: Task, at: float) -> Any:
        """What a task comes to. Asked when it ends, and not at all if it was cancelled before.

        Args:
            task: which task.
            at: wall-clock time in seconds since the epoch.

        Returns:
            What :meth:`~specflow.scheduler.Scheduler.done` takes for a task of this kind. An exception ends the
            simulation.
        """
        ...


@dataclass(frozen=True, slots=True)
class Course:
    """How a run went in virtual time."""

    outcome: Outcome | None
    """What the program returned or raised, or the error of the engine; None when it waits for something that never
    comes."""
    seconds: float
    """Virtual time of its end; of its last commit when it never ended."""
    entries: tuple[Entry, ...]
    """What was committed."""
    emitted: tuple[bytes, ...]
    """The committed stream, encoded."""
    effects: tuple[EffectRecord, ...]
    """The outbox."""
    status: RunStatus | None
    """COMPLETED or FAILED when the program came to its end."""
    report: RunReport

    @property
    def state(self) -> Mapping[str, bytes]:
        """Encoded value of every key, after everything that was committed here."""
        return state_after(self.entries)


def state_after(entries: Iterable[Entry], base: Mapping[str, bytes] | None = None) -> Mapping[str, bytes]:
    """Encoded value of every key after these entries.

    Raises:
        UnsupportedValueError: an operation does not fit the value it was applied to.
    """
    cells = cells_of(base or {})
    for entry in entries:
        for write in entry.writes:
            cells = write_cell(cells, write)
    return {key: cell.data for key, cell in sorted(cells.items())}


async def drive(
    scheduler: Scheduler,
    work: Work,
    *,
    at: float = 0.0,
    wall: Callable[[float], float] | None = None,
    observe: Callable[[float, Decision], None] | None = None,
) -> Course:
    """Drive a scheduler that has not begun to its end.

    The coroutine waits only where ``work.perform`` does; with work that never waits
    :func:`specflow.chain.run_sync` runs it. A cancelled task is over at once.

    Args:
        scheduler: what is driven.
        work: the tasks.
        at: wall-clock time at the start, in seconds since the epoch.
        wall: wall-clock time at a virtual time; default: it passes together with it.
        observe: called with the virtual time and every decision.

    Raises:
        Exception: what ``work`` raised.
    """
    simulation = _Simulation(scheduler, work, wall if wall is not None else lambda now: at + now, observe)
    try:
        return await simulation.run()
    finally:
        scheduler.close()


class _Simulation:
    def __init__(
        self,
        scheduler: Scheduler,
        work: Work,
        wall: Callable[[float], float],
        observe: Callable[[float, Decision], None] | None,
    ) -> None:
        self._scheduler = scheduler
        self._work = work
        self._wall = wall
        self._observe = observe
        self._now = 0.0
        self._queue: list[tuple[float, int, Task | Wake]] = []
        self._number = itertools.count()
        self._over: deque[Task] = deque()
        self._entries: list[Entry] = []
        self._emitted: list[bytes] = []
        self._effects: dict[str, EffectRecord] = {}
        self._status: RunStatus | None = None
        self._committed_at = 0.0
        self._outcome: Outcome | None = None

    async def run(self) -> Course:
        self._carry_out(self._scheduler.begin(self._now, self._wall(self._now)))
        while self._outcome is None:
            if self._over:
                self._carry_out(self._scheduler.over(self._over.popleft(), self._now, self._wall(self._now)))
                continue
            if not self._queue or self._queue[0][0] == math.inf:
                break
            self._now, _number, item = heapq.heappop(self._queue)
            if isinstance(item, Wake):
                self._carry_out(self._scheduler.woke(item.token, self._now, self._woken_at(item.token)))
            elif item.status is TaskStatus.RUNNING:
                result = await self._work.perform(item, self._wall(self._now))
                self._carry_out(self._scheduler.done(item, result, self._now, self._wall(self._now)))
        effects = tuple(sorted(self._effects.values(), key=lambda row: row.position))
        seconds = self._now if self._outcome is not None else self._committed_at
        return Course(
            self._outcome,
            seconds,
            tuple(self._entries),
            tuple(self._emitted),
            effects,
            self._status,
            self._scheduler.ledger.report(seconds, effects),
        )

    def _carry_out(self, decision: Decision) -> None:
        if self._observe is not None:
            self._observe(self._now, decision)
        commit = decision.commit
        if commit is not None:
            self._entries += commit.entries
            self._effects.update((row.key, row) for row in commit.effects)
            self._status = commit.status or self._status
            self._committed_at = self._now
        self._emitted += decision.emitted
        for action in decision.actions:
            if isinstance(action, Start):
                self._push(self._now + self._work.seconds(action.task), action.task)
            elif isinstance(action, Wake):
                self._push(max(self._now, action.at), action)
            elif isinstance(action, Cancel):
                self._over.append(action.task)
            elif isinstance(action, Finish):
                self._outcome = action.outcome

    def _push(self, when: float, item: Task | Wake) -> None:
        heapq.heappush(self._queue, (when, next(self._number), item))

    def _woken_at(self, token: object) -> float:
        """A sleep has lasted as long as it should, also on a wall clock that stands still."""
        wall = self._wall(self._now)
        match token:
            case (World() as world, SleepRequest() as request):
                return max(wall, world.program.at + request.seconds)
        return wall


__all__ = ["Course", "Work", "drive", "state_after"]
