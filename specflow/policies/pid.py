"""A controller that steers draft length by acceptance and the admission threshold by latency."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..admission import Frontier
from ..errors import InvalidSettingError
from ..types import ChainId, ChainView, RoundReport
from .costs import CostTable
from .odds import binomial_tail

AGGRESSIVENESS = (0.3, 1.5)
"""Range of the aggressiveness; the upper end drafts ``max_draft`` items."""
THRESHOLD = (0.7, 0.99)
"""Range of the admission threshold."""

_PROPORTIONAL, _INTEGRAL, _DERIVATIVE = 1.0, 0.2, 0.5
"""Weights of the error, its sum and its change, before the learning rate."""
_MAX_SUM = 2.0
"""Bounds the summed error, so that a long bad stretch is not paid back for as long again."""
_SLOW = 4.0
"""A round slower than this many median rounds is a stall and left out of the latency ratio."""
_MAX_COOLDOWN = 256
_SPARE_CHAINS = 64
"""Chains that may be absent from a round without being forgotten, beyond as many as are present."""


@dataclass(frozen=True, slots=True)
class PIDState:
    """Where the controller stands."""

    aggressiveness: float
    threshold: float
    draft_length: int
    """Items drafted per chain and round at this aggressiveness."""
    acceptance: float | None
    """Accepted per executed item in the window; None while it is empty."""
    latency_ratio: float | None
    """Seconds spent over seconds that plain execution takes for as many items, at the newest update; None before it."""
    updates: int
    anomalies: int
    """How often acceptance fell so suddenly that control started over."""
    cooling: int
    """Chains that pause drafting now."""


class PID:
    """Steers how much is drafted and how sure it must be, by feedback instead of a model of costs.

    Every ``update_every`` emitted items:

    * the **aggressiveness** moves by ``learning_rate`` times a PID term of the error, acceptance in the sliding window
      minus ``target``, within [0.3, 1.5]. A draft has ``aggressiveness / 1.5 * max_draft`` items, at least one;
    * the admission **threshold** moves by ``learning_rate * (latency ratio - 1)``, within [0.7, 0.99]: up while
      speculation is slower than plain execution, down while it is faster. An item is executed when its claimed
      acceptance, given the items before it, reaches the threshold. Drafters without estimates claim certainty;
    * an **anomaly** starts control over at the least aggressiveness and with an empty window: so few items were
      accepted since the last update, of those tried, that the rate in the window before explains it with probability
      ``false_alarm`` at most (binomial).

    A chain with ``max_fruitless`` consecutive drafts of which nothing was accepted pauses drafting for ``cooldown``
    rounds, and twice as long each time until something is accepted.

    There is no clock: seconds come from the reports, and those of plain execution from the first two rounds at each
    new number of chains, which run without drafts, and from later rounds in which no chain drafts. Decisions use
    earlier rounds and, for an item, the claims of it and of the item before: sampling stays exact.

    Args:
        max_draft: most items drafted per chain and round.
        aggressiveness: at first.
        threshold: at first.
        learning_rate: how far one update moves both.
        target: acceptance to steer for, per executed item.
        update_every: emitted items between two updates.
        window: executed drafts that acceptance is measured over.
        false_alarm: probability of a steady acceptance looking like an anomaly, per update.
        max_fruitless: consecutive fruitless drafts before a pause.
        cooldown: rounds of the first pause.

    Raises:
        InvalidSettingError: a setting is out of its range.
    """

    def __init__(  # noqa: PLR0913 - settings of one object, all but the first by keyword
        self,
        max_draft: int,
        *,
        aggressiveness: float = 0.8,
        threshold: float = 0.85,
        learning_rate: float = 0.1,
        target: float = 0.6,
        update_every: int = 100,
        window: int = 256,
        false_alarm: float = 1e-4,
        max_fruitless: int = 3,
        cooldown: int = 16,
    ) -> None:
        if not max_draft >= 0:
            raise InvalidSettingError("max_draft", max_draft, "an integer >= 0")
        for name, value, (low, high) in (
            ("aggressiveness", aggressiveness, AGGRESSIVENESS),
            ("threshold", threshold, THRESHOLD),
            ("learning_rate", learning_rate, (0.0, 1.0)),
            ("target", target, (0.0, 1.0)),
            ("false_alarm", false_alarm, (0.0, 1.0)),
        ):
            if not low <= value <= high:
                raise InvalidSettingError(name, value, f"a number in [{low}, {high}]")
        counts = (
            ("update_every", update_every),
            ("window", window),
            ("max_fruitless", max_fruitless),
            ("cooldown", cooldown),
        )
        for name, count in counts:
            if not count >= 1:
                raise InvalidSettingError(name, count, "an integer >= 1")
        self._max_draft = max_draft
        self._aggressiveness = aggressiveness
        self._threshold = threshold
        self._learning_rate = learning_rate
        self._target = target
        self._update_every = update_every
        self._false_alarm = false_alarm
        self._max_fruitless = max_fruitless
        self._cooldown = cooldown
        self._window: deque[tuple[int, int]] = deque(maxlen=window)
        self._plain = CostTable()
        self._chains: dict[ChainId, _Pause] = {}
        self._since = _Stretch()
        self._sum = 0.0
        self._last_error: float | None = None
        self._latency_ratio: float | None = None
        self._updates = 0
        self._anomalies = 0

    @property
    def state(self) -> PIDState:
        """Where the controller stands now."""
        return PIDState(
            aggressiveness=self._aggressiveness,
            threshold=self._threshold,
            draft_length=self._length(),
            acceptance=_rate(self._window),
            latency_ratio=self._latency_ratio,
            updates=self._updates,
            anomalies=self._anomalies,
            cooling=sum(pause.left > 0 for pause in self._chains.values()),
        )

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """The length of the current aggressiveness; 0 for chains that pause and while plain seconds are unknown."""
        if len(self._chains) > 2 * len(chains) + _SPARE_CHAINS:
            live = {view.chain_id for view in chains}
            self._chains = {chain_id: pause for chain_id, pause in self._chains.items() if chain_id in live}
        if self._plain.samples(len(chains)) < 2:
            return [0] * len(chains)
        length = self._length()
        return [0 if self._pause(view.chain_id).left else min(length, view.max_draft) for view in chains]

    def admit(self, frontier: Frontier) -> None:
        """Each draft up to its first item whose claimed acceptance is below the threshold."""
        for index in range(len(frontier)):
            before = 1.0
            survival = frontier.survival(index)
            while survival is not None and survival > 0.0 and survival >= self._threshold * before:
                frontier.admit(index)
                before, survival = survival, frontier.survival(index)

    def observe(self, report: RoundReport) -> None:
        """Learn from a finished round, and move when enough items were emitted."""
        num_chains = len(report.chain_ids)
        if not any(report.limits):
            self._plain.observe(num_chains, report.seconds.total)
        for index, chain_id in enumerate(report.chain_ids):
            self._pause(chain_id).observe(report, index, self._max_fruitless, self._cooldown)
            if report.admitted[index]:
                self._since.drafts.append((report.accepted[index], report.admitted[index]))
        emitted = sum(report.emitted)
        self._since.emitted += emitted
        if any(report.limits):
            plain = self._plain.seconds(num_chains) / num_chains * emitted
            self._since.rounds.append((report.seconds.total, plain))
        if self._since.emitted >= self._update_every:
            self._update()
            self._since = _Stretch()

    def _update(self) -> None:
        self._updates += 1
        self._steer_threshold()
        recent = self._since.drafts
        if not recent:
            return
        is_anomaly = self._is_anomaly(recent)
        self._window.extend(recent)
        if is_anomaly:
            self._anomalies += 1
            self._aggressiveness = AGGRESSIVENESS[0]
            self._window.clear()
            self._sum, self._last_error = 0.0, None
            return
        self._steer_aggressiveness()

    def _is_anomaly(self, recent: Sequence[tuple[int, int]]) -> bool:
        # Items behind the first rejected one were not tried, so they are no further evidence.
        tried_before = sum(_tried(draft) for draft in self._window)
        if not tried_before:
            return False
        rate = _totals(self._window)[0] / tried_before
        accepted, tried = _totals(recent)[0], sum(map(_tried, recent))
        return accepted < rate * tried and binomial_tail(accepted, tried, rate) <= self._false_alarm

    def _steer_aggressiveness(self) -> None:
        error = (_rate(self._window) or 0.0) - self._target
        self._sum = _clamped(self._sum + error, (-_MAX_SUM, _MAX_SUM))
        change = 0.0 if self._last_error is None else error - self._last_error
        self._last_error = error
        term = _PROPORTIONAL * error + _INTEGRAL * self._sum + _DERIVATIVE * change
        self._aggressiveness = _clamped(self._aggressiveness + self._learning_rate * term, AGGRESSIVENESS)

    def _steer_threshold(self) -> None:
        rounds = self._since.rounds
        if not rounds:
            return
        median = sorted([spent for spent, _ in rounds])[(len(rounds) - 1) // 2]
        kept = [(spent, plain) for spent, plain in rounds if spent <= _SLOW * median]
        plain = sum(plain for _, plain in kept)
        if plain > 0.0:
            self._latency_ratio = sum(spent for spent, _ in kept) / plain
            move = self._learning_rate * (self._latency_ratio - 1.0)
            self._threshold = _clamped(self._threshold + move, THRESHOLD)

    def _length(self) -> int:
        if self._max_draft == 0:
            return 0
        return max(1, min(self._max_draft, round(self._aggressiveness / AGGRESSIVENESS[1] * self._max_draft)))

    def _pause(self, chain_id: ChainId) -> _Pause:
        pause = self._chains.get(chain_id)
        if pause is None:
            pause = self._chains[chain_id] = _Pause()
        return pause


class _Pause:
    """Fruitless drafts of one chain in a row, and the pause that follows."""

    __slots__ = ("fruitless", "left", "pauses")

    def __init__(self) -> None:
        self.fruitless = 0
        self.left = 0
        self.pauses = 0

    def observe(self, report: RoundReport, index: int, max_fruitless: int, cooldown: int) -> None:
        if self.left:
            self.left -= 1
        elif report.accepted[index]:
            self.fruitless = self.pauses = 0
        elif report.drafted[index]:
            self.fruitless += 1
            if self.fruitless >= max_fruitless:
                self.left = min(cooldown << self.pauses, max(_MAX_COOLDOWN, cooldown))
                self.pauses = min(self.pauses + 1, 16)
                self.fruitless = 0


class _Stretch:
    """What happened since the last update."""

    __slots__ = ("drafts", "emitted", "rounds")

    def __init__(self) -> None:
        self.drafts: list[tuple[int, int]] = []
        self.emitted = 0
        self.rounds: list[tuple[float, float]] = []


def _totals(drafts: Sequence[tuple[int, int]] | deque[tuple[int, int]]) -> tuple[int, int]:
    return sum(accepted for accepted, _ in drafts), sum(executed for _, executed in drafts)


def _tried(draft: tuple[int, int]) -> int:
    """Items of a draft up to the first rejected one."""
    accepted, executed = draft
    return min(accepted + 1, executed)


def _rate(drafts: Sequence[tuple[int, int]] | deque[tuple[int, int]]) -> float | None:
    accepted, executed = _totals(drafts)
    return accepted / executed if executed else None


def _clamped(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
