"""What a run did: predictions and how they turned out, time saved and wasted, money, effects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .definitions import Step
from .history import EffectRecord, EffectStatus, Position
from .speculation import Budget, Resolution, Spent
from .types import Mode
from .worlds import Task, TaskKind, World

LEAST_SECONDS = 1e-6
"""What is left of a budget in seconds counts as nothing below this: clocks and sums are no finer."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step over a whole run."""

    step: str
    calls: int
    """Committed calls."""
    attempts: int
    """Executions started, wrong guesses included."""
    predictions: int
    """Guesses that a world was forked for."""
    hits: int
    misses: int
    """Guesses resolved wrong. A hit and two misses are counted when one of three guesses was right."""
    brier: float | None
    """Mean squared difference between confidence and outcome (Brier 1950); None before the first resolution."""
    saved_seconds: float
    """Time that work on right guesses of this step's result had run before they were confirmed."""
    wasted_seconds: float
    """Attempt-seconds of work on wrong guesses of this step's result."""
    predictor_errors: int
    """Times its predictor or its verifier raised."""

    @property
    def hit_rate(self) -> float | None:
        """Right guesses among resolved ones; None before the first."""
        resolved = self.hits + self.misses
        return self.hits / resolved if resolved else None


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Guesses whose confidence lay in one tenth of [0, 1]."""

    low: float
    high: float
    count: int
    mean_confidence: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run."""

    seconds: float
    """From the start of the run to its end."""
    steps: tuple[StepReport, ...]
    attempts: int
    """Executions started."""
    ahead: int
    """Executions started on a guess."""
    squashed: int
    """Executions started on a guess that fell."""
    worlds: int
    """Worlds forked."""
    rebuilt: int
    """Worlds rebuilt because a key they had read was changed by a step whose result was guessed right."""
    reused: int
    """Calls answered by a pure attempt of a world that fell."""
    saved_seconds: float
    wasted_seconds: float
    """Attempt-seconds of squashed executions."""
    money: float
    """Declared price of everything that ran, predictions included."""
    wasted_money: float
    """The part of it that was squashed."""
    tokens: float
    wasted_tokens: float
    calibration: tuple[CalibrationBin, ...]
    effects: tuple[EffectRecord, ...]
    """The outbox: every effect with its state."""
    undelivered: tuple[tuple[str, str], ...]
    """Step and error of buffered effects that could not be sent."""

    @property
    def predictions(self) -> int:
        """Guesses that a world was forked for."""
        return sum(step.predictions for step in self.steps)

    @property
    def hits(self) -> int:
        """Guesses that were right."""
        return sum(step.hits for step in self.steps)

    @property
    def misses(self) -> int:
        """Guesses that were wrong."""
        return sum(step.misses for step in self.steps)

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.3f} s, {self.attempts} attempts ({self.ahead} ahead, {self.squashed} squashed)",
            f"guesses: {self.hits} right, {self.misses} wrong",
            f"saved {self.saved_seconds:.3f} s, wasted {self.wasted_seconds:.3f} attempt-seconds",
        ]
        for step_name, problem in self.undelivered:
            lines.append(f"NOT DELIVERED: {step_name}: {problem}")
        if self.money:
            lines.append(f"money: {self.money:.4g}, of which wasted {self.wasted_money:.4g}")
        for step in self.steps:
            if step.predictions:
                rate = "-" if step.hit_rate is None else f"{step.hit_rate:.0%}"
                lines.append(f"  {step.step}: {step.calls} calls, {step.predictions} guesses, {rate} right")
        return "\n".join(lines)


@dataclass(slots=True)
class _StepTotals:
    calls: int = 0
    attempts: int = 0
    predictions: int = 0
    hits: int = 0
    misses: int = 0
    squared: float = 0.0
    saved: float = 0.0
    wasted: float = 0.0
    errors: int = 0


@dataclass(slots=True)
class Ledger:
    """Counts while a run goes on, and knows what speculation may still spend."""

    running_ahead: int = 0
    rebuilt: int = 0
    undelivered: list[tuple[str, Position, BaseException]] = field(default_factory=list)
    _steps: dict[str, _StepTotals] = field(default_factory=lambda: defaultdict(_StepTotals))
    _running: dict[int, Task] = field(default_factory=dict)
    """Those on guesses."""
    _doubtful: dict[int, Task] = field(default_factory=dict)
    """Those whose guesses have held, but whose reads may be stale."""
    _attempts: int = 0
    _ahead: int = 0
    _squashed: int = 0
    _worlds: int = 0
    _reused: int = 0
    _money: float = 0.0
    _wasted_money: float = 0.0
    _tokens: float = 0.0
    _wasted_tokens: float = 0.0
    _wasted_seconds: float = 0.0
    _open_seconds: float = 0.0
    """Seconds of finished attempts of worlds that still rest on a guess."""
    _open_money: float = 0.0
    """Price of finished attempts of worlds that still rest on a guess, and of those running ahead."""
    _open_tokens: float = 0.0
    _resolutions: list[Resolution] = field(default_factory=list)
    _modes: set[Mode] = field(default_factory=set)
    _dearest: dict[str, float] = field(default_factory=dict)
    """What asking the predictor of each step has cost at most."""
    _stopping: set[int] = field(default_factory=set)
    """Attempts on guesses that were told to stop and are not over."""

    # ------------------------------------------------------------------------------------------- told by the scheduler

    def started(self, task: Task) -> None:
        """An attempt or a predictor starts."""
        if task.kind is TaskKind.STEP:
            self._attempts += 1
            self._steps[task.step.name].attempts += 1
            self._money += task.money
            self._tokens += task.tokens
        if task.speculative:
            self._running[task.number] = task
            self.running_ahead += 1
            if task.kind is TaskKind.STEP:
                self._ahead += 1
            self._open_money += task.money
            self._open_tokens += task.tokens

    def ended(self, task: Task, now: float) -> None:
        """It returned."""
        task.seconds = now - task.started_at
        if self._running.pop(task.number, None) is not None:
            self.running_ahead -= 1
            if task.kind is TaskKind.STEP:
                self._open_seconds += task.seconds
        elif task.doubtful:
            self._doubtful.pop(task.number, None)
            self._open_seconds += task.seconds
        if task.kind is TaskKind.STEP:
            task.step.took(task.seconds)

    def cancelled(self, task: Task, now: float) -> None:
        """It is stopped: nobody wants it."""
        if self._running.pop(task.number, None) is not None:
            self.running_ahead -= 1
            self._stopping.add(task.number)
            self._waste(task)
            self._wasted_seconds += now - task.started_at
        elif self._doubtful.pop(task.number, None) is not None:
            task.doubtful = False
            self._waste(task)
            self._wasted_seconds += now - task.started_at

    def followed(self, task: Task, coming: Task) -> None:
        """What a certain attempt returned is committed, and the next one starts: `committed`, then `started`."""
        self._steps[task.step.name].calls += 1
        self._attempts += 1
        self._steps[coming.step.name].attempts += 1
        self._money += coming.money
        self._tokens += coming.tokens

    def over(self, task: Task) -> None:
        """It is really over, whether it returned or was stopped."""
        self._stopping.discard(task.number)

    def confirmed(self, task: Task, now: float) -> None:
        """It started on guesses, and they all held. What it costs stays at risk while it may have read too early."""
        del now
        was_running = self._running.pop(task.number, None) is not None
        if was_running:
            self.running_ahead -= 1
        if was_running and task.state is not None:
            task.doubtful = True
            self._doubtful[task.number] = task
            return
        self._open_money -= task.money
        self._open_tokens -= task.tokens

    def cleared(self, task: Task) -> None:
        """What a confirmed attempt has read still stands: nothing of it is at risk any longer."""
        if task.doubtful:
            task.doubtful = False
            self._open_money -= task.money
            self._open_tokens -= task.tokens
            self._open_seconds -= task.seconds

    def squashed(self, world: World) -> None:
        """A world fell with everything it had finished."""
        for task in world.finished_ahead:
            self.wasted(task)

    def wasted(self, task: Task) -> None:
        """A finished attempt turned out to be of no use."""
        self._waste(task)
        self._open_seconds -= task.seconds
        self._wasted_seconds += task.seconds

    def promoted(self, world: World) -> None:
        """All guesses of a world held: what it has finished is no longer at risk."""
        for task in world.finished_ahead:
            self._open_money -= task.money
            self._open_tokens -= task.tokens
            self._open_seconds -= task.seconds
        world.finished_ahead.clear()

    def predicted(self, step: str) -> None:
        """A predictor made a guess that a world is forked for."""
        self._steps[step].predictions += 1
        self._worlds += 1

    def charged(self, step: str, money: float) -> None:
        """A predictor was asked once, and what all its guesses cost is due."""
        self._money += money
        self._wasted_money += money  # a guess itself is never part of the plain run
        self._dearest[step] = max(self._dearest.get(step, 0.0), money)

    def predictor_failed(self, step: str, error: BaseException) -> None:
        """A predictor raised, or guessed something that cannot be stored."""
        del error
        self._steps[step].errors += 1

    def verifier_failed(self, step: str, error: BaseException) -> None:
        """A verifier raised on a guess, which counts as a miss."""
        del error
        self._steps[step].errors += 1

    def committed(self, step: str) -> None:
        """A call was committed."""
        self._steps[step].calls += 1

    def reused(self, step: str) -> None:
        """A call was answered by an attempt of a world that fell."""
        del step
        self._reused += 1

    def squashed_reader(self, task: Task) -> None:
        """A step has to run again: what it read was changed."""
        if task.speculative or task.doubtful:
            task.doubtful = False
            self.wasted(task)
            return
        self._squashed += 1
        self._wasted_money += task.money
        self._wasted_tokens += task.tokens
        self._wasted_seconds += task.seconds

    def resolved(self, resolution: Resolution) -> None:
        """A guess about a committed call turned out right or wrong."""
        self._resolutions.append(resolution)
        totals = self._steps[resolution.assumption.step]
        totals.squared += (resolution.assumption.confidence - resolution.hit) ** 2
        if resolution.hit:
            totals.hits += 1
            totals.saved += resolution.saved_seconds
        else:
            totals.misses += 1
            totals.wasted += resolution.wasted_seconds

    def use_mode(self, mode: Mode) -> None:
        """A guess was accepted under this mode."""
        self._modes.add(mode)

    def _waste(self, task: Task) -> None:
        self._squashed += task.kind is TaskKind.STEP
        self._open_money -= task.money
        self._open_tokens -= task.tokens
        self._wasted_money += task.money
        self._wasted_tokens += task.tokens

    # ------------------------------------------------------------------------------------------ asked by the scheduler

    def spent(self, now: float) -> Spent:
        """What speculation has used up: squashed work, and work that may yet be squashed."""
        return Spent(
            self._squashed + self.running_ahead,
            self._seconds_ahead(now),
            self._wasted_money + self._open_money,
            self._wasted_tokens + self._open_tokens,
        )

    def affords(self, budget: Budget, step: Step[..., Any] | None, now: float, money: float = 0.0) -> bool:
        """Would one more attempt of a step stay within the budget? None asks for a predictor, at its own price."""
        spent = self.spent(now)
        money = step.money if step is not None else money
        tokens = step.tokens if step is not None else 0.0
        if budget.money is not None and spent.money + money > budget.money + 1e-12:
            return False
        if budget.tokens is not None and spent.tokens + tokens > budget.tokens + 1e-12:
            return False
        if budget.slots is not None and self.slots_taken >= budget.slots:
            return False
        return budget.seconds is None or budget.seconds - spent.seconds > LEAST_SECONDS

    def affords_guess(self, budget: Budget, step: str, now: float) -> bool:
        """May a step's predictor be asked? What that costs is known afterwards: taken for as dear as it ever was."""
        if budget.money is None:
            return True
        return self.spent(now).money + self._dearest.get(step, 0.0) <= budget.money + 1e-12

    @property
    def slots_taken(self) -> int:
        """Attempts on guesses that run, those included that were told to stop and are not over."""
        return self.running_ahead + len(self._stopping)

    def seconds_left(self, budget: Budget, now: float) -> float | None:
        """Attempt-seconds that speculation may still use; None is unlimited."""
        return None if budget.seconds is None else budget.seconds - self._seconds_ahead(now)

    def _seconds_ahead(self, now: float) -> float:
        running = sum(now - task.started_at for task in (*self._running.values(), *self._doubtful.values()))
        return self._wasted_seconds + self._open_seconds + running

    @property
    def mode(self) -> Mode:
        """The weakest mode of all verifiers that accepted a guess which was not exactly equal."""
        if Mode.LOSSY in self._modes:
            return Mode.LOSSY
        return Mode.DISTRIBUTION if Mode.DISTRIBUTION in self._modes else Mode.EXACT

    def report(self, seconds: float, effects: Sequence[EffectRecord]) -> RunReport:
        """The finished account."""
        return RunReport(
            seconds,
            tuple(_step_report(name, totals) for name, totals in sorted(self._steps.items())),
            self._attempts,
            self._ahead,
            self._squashed,
            self._worlds,
            self.rebuilt,
            self._reused,
            sum(totals.saved for totals in self._steps.values()),
            self._wasted_seconds,
            self._money,
            self._wasted_money,
            self._tokens,
            self._wasted_tokens,
            _calibration(self._resolutions),
            tuple(row for row in effects if row.tries > 0 or row.status is EffectStatus.PREPARED),
            tuple((step, repr(error)) for step, _position, error in self.undelivered),
        )


def _step_report(name: str, totals: _StepTotals) -> StepReport:
    resolved = totals.hits + totals.misses
    return StepReport(
        name,
        totals.calls,
        totals.attempts,
        totals.predictions,
        totals.hits,
        totals.misses,
        totals.squared / resolved if resolved else None,
        totals.saved,
        totals.wasted,
        totals.errors,
    )


def _calibration(resolutions: Sequence[Resolution]) -> tuple[CalibrationBin, ...]:
    bins: Mapping[int, list[Resolution]] = defaultdict(list)
    for resolution in resolutions:
        bins[min(9, int(resolution.assumption.confidence * 10))].append(resolution)
    return tuple(
        CalibrationBin(
            index / 10,
            (index + 1) / 10,
            len(members),
            sum(member.assumption.confidence for member in members) / len(members),
            sum(member.hit for member in members) / len(members),
        )
        for index, members in sorted(bins.items())
    )


__all__ = ["LEAST_SECONDS", "CalibrationBin", "Ledger", "RunReport", "StepReport"]
