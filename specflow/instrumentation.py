"""What rounds tell the outside: counters, structured log events, and a plain recorder.

All of them are observers (:class:`~specflow.protocols.Observer`): hand them to the loop. None configures logging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Protocol

from .trees import reach
from .types import PhaseSeconds, RoundReport

ROUND_COMMITTED = "round.committed"
EVENTS: Mapping[str, tuple[str, ...]] = {
    ROUND_COMMITTED: (
        "round",
        "chains",
        "drafted",
        "admitted",
        "accepted",
        "emitted",
        "predict_seconds",
        "admit_seconds",
        "execute_seconds",
        "verify_seconds",
        "commit_seconds",
    ),
}
"""Every event name with its keys, which are always all present.

=================== ==============================================================================================
``round.committed`` one round became history. ``round`` counts from 0; ``chains`` is the number of chains in it;
                    ``drafted``, ``admitted``, ``accepted`` and ``emitted`` are items over all chains; the seconds are
                    wall-clock time per phase.
=================== ==============================================================================================
"""


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """Totals over the rounds seen so far."""

    rounds: int
    chain_rounds: int
    """Rounds summed over the chains that took part in them."""
    drafted: int
    """Items proposed."""
    admitted: int
    """Proposed items that were executed and verified."""
    accepted: int
    """Executed items that the verifier accepted."""
    emitted: int
    """Items that became history, replacements and bonus items included."""
    admitted_by_position: tuple[int, ...]
    """How often an item at place k of a draft was executed, by k; alternatives share a place."""
    accepted_by_position: tuple[int, ...]
    """How often one was accepted there, by k; as long as ``admitted_by_position``."""
    seconds: PhaseSeconds

    @property
    def mean_accepted_length(self) -> float:
        """Items emitted per chain and round, replacement or bonus included; 1.0 is plain execution, 0.0 is no round."""
        return _ratio(self.emitted, self.chain_rounds)

    @property
    def verification_pass_rate(self) -> float:
        """Accepted items per executed draft item; 0.0 where none was executed."""
        return _ratio(self.accepted, self.admitted)

    @property
    def draft_utilisation(self) -> float:
        """Accepted items per proposed item; 0.0 where none was proposed."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Fraction of the executed k-th items that were accepted, by k."""
        return tuple(
            _ratio(accepted, admitted)
            for accepted, admitted in zip(self.accepted_by_position, self.admitted_by_position, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, JSON-safe, the derived numbers included."""
        return {
            **asdict(self),
            "admitted_by_position": list(self.admitted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
            "acceptance_by_position": list(self.acceptance_by_position),
            "mean_accepted_length": self.mean_accepted_length,
            "verification_pass_rate": self.verification_pass_rate,
            "draft_utilisation": self.draft_utilisation,
        }


class Counters:
    """Adds rounds up. A snapshot is a value: it does not change when further rounds come in."""

    def __init__(self) -> None:
        self._rounds = 0
        self._chain_rounds = 0
        self._drafted = 0
        self._admitted = 0
        self._emitted = 0
        self._admitted_lengths: list[int] = []
        self._accepted_lengths: list[int] = []
        self._seconds = [0.0] * 5

    def on_round(self, report: RoundReport) -> None:
        """Take in one round."""
        self._rounds += 1
        self._chain_rounds += len(report.chain_ids)
        self._drafted += sum(report.drafted)
        self._emitted += sum(report.emitted)
        self._admitted += sum(report.admitted)
        reached = [reach(report, index) for index in range(len(report.admitted))] if report.trees else report.admitted
        missing = max(reached) + 1 - len(self._admitted_lengths)
        if missing > 0:
            self._admitted_lengths += [0] * missing
            self._accepted_lengths += [0] * missing
        for admitted, accepted in zip(reached, report.accepted, strict=True):
            self._admitted_lengths[admitted] += 1
            self._accepted_lengths[accepted] += 1
        seconds = report.seconds
        totals = self._seconds
        totals[0] += seconds.predict
        totals[1] += seconds.admit
        totals[2] += seconds.execute
        totals[3] += seconds.verify
        totals[4] += seconds.commit

    def snapshot(self) -> CounterSnapshot:
        """The totals so far."""
        admitted, accepted = _at_least(self._admitted_lengths), _at_least(self._accepted_lengths)
        return CounterSnapshot(
            rounds=self._rounds,
            chain_rounds=self._chain_rounds,
            drafted=self._drafted,
            admitted=self._admitted,
            accepted=sum(accepted),
            emitted=self._emitted,
            admitted_by_position=admitted,
            accepted_by_position=accepted,
            seconds=PhaseSeconds(*self._seconds),
        )


class EventLogger(Protocol):
    """**Protocol:** the one method of a structured logger that is used here."""

    def info(self, event: str, **values: Any) -> Any:
        """Log ``event`` with its keys."""
        ...


class StructlogObserver:
    """Logs one ``round.committed`` event per round (see :data:`EVENTS`).

    Args:
        logger: where to log; None takes ``structlog.get_logger("specflow")``, whose configuration is the application's.
    """

    def __init__(self, logger: EventLogger | None = None) -> None:
        if logger is None:
            import structlog  # noqa: PLC0415 -- paid for only by those who log

            logger = structlog.get_logger("specflow")
        self._logger: EventLogger = logger

    def on_round(self, report: RoundReport) -> None:
        """Log the round."""
        seconds = report.seconds
        self._logger.info(
            ROUND_COMMITTED,
            round=report.index,
            chains=len(report.chain_ids),
            drafted=sum(report.drafted),
            admitted=sum(report.admitted),
            accepted=sum(report.accepted),
            emitted=sum(report.emitted),
            predict_seconds=seconds.predict,
            admit_seconds=seconds.admit,
            execute_seconds=seconds.execute,
            verify_seconds=seconds.verify,
            commit_seconds=seconds.commit,
        )


class Recorder:
    """Keeps every report, for tests and for looking at a short run round by round."""

    def __init__(self) -> None:
        self._reports: list[RoundReport] = []

    @property
    def reports(self) -> tuple[RoundReport, ...]:
        """The reports so far, oldest first."""
        return tuple(self._reports)

    def on_round(self, report: RoundReport) -> None:
        """Keep the report."""
        self._reports.append(report)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _at_least(lengths: list[int]) -> tuple[int, ...]:
    """From a histogram of lengths: how many were at least 1, 2, 3, ..."""
    return tuple(accumulate(reversed(lengths[1:])))[::-1]
