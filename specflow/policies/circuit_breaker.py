"""Stop following a source of guesses that has become worse than it was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from ..errors import InvalidSettingError
from ..protocols import RunAheadPolicy
from ..speculation import Opportunity, Resolution
from .odds import binomial_tail, hypergeometric_tail
from .reach import Around


class CircuitState(Enum):
    """What is done with the guesses of one source for one step."""

    CLOSED = "closed"
    """They are followed as the policy inside says."""
    OPEN = "open"
    """Nothing starts on them. They are still made and resolved, which is what the wait is counted in."""
    HALF_OPEN = "half open"
    """They are followed again, on probation."""


@dataclass(frozen=True, slots=True)
class CircuitStatus:
    """The circuit of one source of guesses for one step."""

    step: str
    source: str
    state: CircuitState
    reason: str
    """Why it is in that state."""
    recent_rate: float
    """Hits per guess in the window of newest guesses; 0 when it is empty."""
    earlier_rate: float
    """Hits per guess before the window; 0 when there were none."""
    resolutions_left: int
    """Resolutions until the state changes by itself; 0 when it is closed."""
    opened: int
    """How often it has opened."""


@dataclass(frozen=True, slots=True)
class _Limits:
    window: int
    memory: int
    false_alarm: float
    floor: float
    max_misses: int
    rest: int
    max_rest: int
    probes: int


class CircuitBreaker(Around):
    """Refuses work on the guesses of a source that has drifted; asks the policy inside about all others.

    One circuit per (step, source). A closed one opens when, after a miss,

    * **drift**: the newest ``window`` guesses did significantly worse than the up to ``memory`` before them, by
      Fisher's exact test: under an unchanged hit rate, *whatever it is*, so few hits would fall into the window with
      probability ``false_alarm / 2`` at most;
    * **floor**: all remembered guesses together are significantly below ``floor``: a source that hits at ``floor`` or
      more would do so badly with probability ``false_alarm / 2`` at most (binomial);
    * **cap**: ``max_misses`` guesses in a row were wrong. A source of independent guesses that hits at rate p has such
      a row begin at a given guess with probability (1 - p) ** ``max_misses`` at most. A call with w guesses has w - 1
      misses at least: choose the cap with the width in mind.

    By the union bound the first two open the circuit of a steady source within n resolutions with probability
    n * ``false_alarm`` at most; 1 % for a thousand resolutions with the default.

    An open circuit rests for a number of resolutions, then lets work start again (half open). The first hit among the
    next ``probes`` resolutions closes it, and it learns its rate anew; without one it opens again. Every opening
    doubles the rest, up to ``max_rest``, until a closed circuit has lasted ``memory`` resolutions. So of n guesses a
    source that is always wrong has about ``max_misses`` + ``probes`` * (log2(max_rest / rest) + 1 + n / max_rest)
    followed at most.

    Everything is counted in resolutions: there is no clock. Only starts on guesses are ever refused; the policy inside
    learns from every resolution.

    Args:
        policy: the policy inside.
        window: newest guesses that are compared with those before.
        memory: guesses before the window that are remembered.
        false_alarm: probability per resolution of opening the circuit of a steady source at or above ``floor``.
        floor: hit rate that a source should have at least.
        max_misses: consecutive misses that open a circuit whatever its rate.
        rest: resolutions that an open circuit waits at first.
        max_rest: longest wait.
        probes: resolutions of a half-open circuit among which a hit is wanted.

    Raises:
        InvalidSettingError: a setting is out of its range.
    """

    def __init__(  # noqa: PLR0913 - settings of one object, all but the first by keyword
        self,
        policy: RunAheadPolicy,
        *,
        window: int = 20,
        memory: int = 200,
        false_alarm: float = 1e-5,
        floor: float = 0.05,
        max_misses: int = 30,
        rest: int = 50,
        max_rest: int = 800,
        probes: int = 5,
    ) -> None:
        super().__init__(policy)
        counts = (
            ("window", window),
            ("memory", memory),
            ("max_misses", max_misses),
            ("rest", rest),
            ("probes", probes),
        )
        for name, count in counts:
            if not count >= 1:
                raise InvalidSettingError(name, count, "an integer >= 1")
        if not max_rest >= rest:
            raise InvalidSettingError("max_rest", max_rest, f"an integer >= rest={rest}")
        if not 0.0 < false_alarm < 1.0:
            raise InvalidSettingError("false_alarm", false_alarm, "a probability in (0, 1)")
        if not 0.0 <= floor < 1.0:
            raise InvalidSettingError("floor", floor, "a rate in [0, 1)")
        self._limits = _Limits(window, memory, false_alarm, floor, max_misses, rest, max_rest, probes)
        self._circuits: dict[tuple[str, str], _Circuit] = {}

    def allows(self, opportunity: Opportunity) -> bool:
        """What the policy inside says, unless one of the guesses comes through an open circuit."""
        for assumption in opportunity.assumptions:
            circuit = self._circuits.get((assumption.step, assumption.source))
            if circuit is not None and circuit.state is CircuitState.OPEN:
                return False
        return self._policy.allows(opportunity)

    def learn(self, resolution: Resolution) -> None:
        """Move the circuit of the guess, and pass the resolution on."""
        key = (resolution.assumption.step, resolution.assumption.source)
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._circuits[key] = _Circuit(self._limits)
        circuit.resolved(hit=resolution.hit)
        self._policy.learn(resolution)

    def status(self) -> tuple[CircuitStatus, ...]:
        """The circuits of all sources seen, in the order of their first resolution."""
        return tuple([circuit.status(step, source) for (step, source), circuit in self._circuits.items()])


class _Circuit:
    """One circuit. Counts resolutions only."""

    __slots__ = (
        "_earlier", "_is_trusted", "_left", "_limits", "_misses", "_recent", "_rest", "_since",
        "opened", "reason", "state",
    )  # fmt: skip

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self.state = CircuitState.CLOSED
        self.reason = "nothing speaks against it"
        self._recent: deque[bool] = deque()
        self._earlier: deque[bool] = deque(maxlen=limits.memory)
        self._rest = limits.rest
        self._is_trusted = True
        self.opened = 0
        self._misses = 0
        self._since = 0
        self._left = 0

    def resolved(self, *, hit: bool) -> None:
        """A guess turned out right or wrong."""
        if self.state is CircuitState.CLOSED:
            self._watch(hit)
            return
        self._left -= 1
        if self.state is CircuitState.HALF_OPEN and hit:
            self._close("a guess on probation was right")
        elif self._left == 0:
            if self.state is CircuitState.OPEN:
                self.state = CircuitState.HALF_OPEN
                self.reason = "the rest is over: guesses are on probation"
                self._left = self._limits.probes
            else:
                self._open(f"{self._limits.probes} guesses on probation were wrong")

    def status(self, step: str, source: str) -> CircuitStatus:
        """For a person."""
        return CircuitStatus(
            step=step,
            source=source,
            state=self.state,
            reason=self.reason,
            recent_rate=_rate(self._recent),
            earlier_rate=_rate(self._earlier),
            resolutions_left=self._left,
            opened=self.opened,
        )

    def _watch(self, hit: bool) -> None:  # noqa: FBT001 -- the outcome is what is watched
        limits = self._limits
        recent, earlier = self._recent, self._earlier
        if len(recent) == limits.window:
            earlier.append(recent.popleft())
        recent.append(hit)
        self._since += 1
        if self._since >= limits.memory:
            self._rest = limits.rest
            self._is_trusted = True
        if hit:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= limits.max_misses:
            self._open(f"{self._misses} guesses in a row were wrong")
            return
        hits, hits_before = sum(recent), sum(earlier)
        total = len(recent) + len(earlier)
        bound = 0.5 * limits.false_alarm
        if hits * len(earlier) < hits_before * len(recent) and (
            hypergeometric_tail(hits, len(recent), hits + hits_before, total) <= bound
        ):
            self._open(f"{_rate(recent):.0%} of the newest guesses were right after {_rate(earlier):.0%} before")
        elif hits + hits_before < limits.floor * total and (
            binomial_tail(hits + hits_before, total, limits.floor) <= bound
        ):
            self._open(f"{(hits + hits_before) / total:.1%} of the guesses were right, which is below the floor")

    def _open(self, reason: str) -> None:
        if not self._is_trusted:
            self._rest = min(2 * self._rest, self._limits.max_rest)
        self._is_trusted = False
        self.state = CircuitState.OPEN
        self.reason = reason
        self.opened += 1
        self._left = self._rest

    def _close(self, reason: str) -> None:
        # What the source did before no longer says what to expect of it.
        self._recent.clear()
        self._earlier.clear()
        self._misses = 0
        self._since = 0
        self._left = 0
        self.state = CircuitState.CLOSED
        self.reason = reason


def _rate(outcomes: deque[bool]) -> float:
    return sum(outcomes) / len(outcomes) if outcomes else 0.0
