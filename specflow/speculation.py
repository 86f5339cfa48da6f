"""Frozen values of run-ahead execution: what a predictor sees and says, what a policy decides, how guesses turn out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .effects import Effect
from .errors import InvalidSettingError
from .history import Position


@dataclass(frozen=True, slots=True)
class Prediction:
    """A guess of what a step will return.

    Raises:
        InvalidSettingError: ``confidence`` is not a probability, or ``money`` no price.
    """

    value: Any
    confidence: float = 1.0
    """Estimated probability that the guess is right, as the predictor believes; policies calibrate it."""
    then: tuple[Any, ...] = ()
    """Guesses for the results of the calls that follow, should this one hold: the longest right prefix is kept."""
    source: str = ""
    """Name of the predictor; filled in by the runtime when empty."""
    money: float = 0.0
    """What it cost to make this guess."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise InvalidSettingError("confidence", self.confidence, "a probability in [0, 1]")
        if not 0.0 <= self.money < math.inf:
            raise InvalidSettingError("money", self.money, "a finite number >= 0")


@dataclass(frozen=True, slots=True)
class Call:
    """What a predictor may know about the call whose result it guesses."""

    step: str
    """Name of the step."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    position: Position = ()
    recent: Sequence[Any] = ()
    """Results of this step so far, oldest first (the newest 64): of earlier runs in this process, then of this run. In
    a world that rests on guesses these include the guesses."""
    trail: Sequence[tuple[str, Any]] = ()
    """Step and result of the run's latest calls, oldest first (the newest 64)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a guess holds. A wrong guess is a value, never an exception."""

    accepted: bool
    replacement: Any = None
    """The value to use instead of the real result; read only when ``replaces`` is set (a judge may correct it)."""
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Assumption:
    """One guess that a world rests on."""

    step: str
    """The step whose result was guessed."""
    position: Position
    source: str
    """Which predictor guessed."""
    rank: int
    """0 for its likeliest guess, 1 for the next ..."""
    confidence: float
    """As the predictor believed."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What speculation has used up in a run so far: attempts that were squashed or may yet be."""

    attempts: int = 0
    seconds: float = 0.0
    money: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Opportunity:
    """A step that could start now, on guesses that are not resolved yet."""

    step: str
    effect: Effect
    assumptions: tuple[Assumption, ...]
    """The unresolved guesses it would rest on, oldest first; at least one."""
    wait_seconds: float | None
    """How long the oldest of those guesses will still take to resolve, as far as known from earlier calls."""
    step_seconds: float | None
    """How long the step usually takes."""
    money: float
    """What the step costs per call, as declared."""
    tokens: float
    """Tokens it uses per call, as declared."""
    running: int
    """Speculative attempts of this run that are under way."""
    spent: Spent
    """Used up by speculation so far."""

    @property
    def depth(self) -> int:
        """Number of unresolved guesses."""
        return len(self.assumptions)


@dataclass(frozen=True, slots=True)
class Resolution:
    """How a guess turned out."""

    assumption: Assumption
    hit: bool
    saved_seconds: float = 0.0
    """Time that work on the guess ran before the guess was confirmed; 0 for a miss."""
    wasted_seconds: float = 0.0
    """Attempt-seconds of the world that was squashed; 0 for a hit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Hard limits on speculation in one run. None is unlimited.

    Costs are reserved when an attempt starts, at the step's declared price, so a limit is never overrun. What a guess
    costs is known once it was made: the first one of a step's predictor may overrun the limit by its own price.

    Raises:
        InvalidSettingError: a limit is negative.
    """

    money: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    """Attempt-seconds: two attempts of one second each use two. Running attempts are squashed when it is used up."""
    slots: int | None = None
    """Speculative attempts at the same time."""

    def __post_init__(self) -> None:
        for name in ("money", "tokens", "seconds", "slots"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:
                raise InvalidSettingError(name, limit, "a number >= 0, or None")


def let_go(guesses: object) -> None:
    """Nobody will await what a predictor returned: close it if it is a coroutine, cancel it if it is a future."""
    stop = getattr(guesses, "close", None) or getattr(guesses, "cancel", None)
    if stop is not None:
        stop()


__all__ = [
    "Assumption",
    "Budget",
    "Call",
    "Opportunity",
    "Prediction",
    "Resolution",
    "Spent",
    "Verdict",
    "let_go",
]
