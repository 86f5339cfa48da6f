"""All policies at all loads, as tables and plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from specflow.errors import InvalidSettingError

from ..display import plain_table
from ..profile import CostProfile, differences
from ..records import Recording
from .candidates import DEFAULT_POLICIES, candidates, is_fixed
from .replay import Outcome, replay

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What every policy achieved at every load."""

    recording: Recording
    profile: CostProfile
    outcomes: tuple[Outcome, ...]

    @property
    def policies(self) -> Sequence[str]:
        """Names in order."""
        return tuple(dict.fromkeys(outcome.policy for outcome in self.outcomes))

    @property
    def loads(self) -> Sequence[int]:
        """Concurrencies in order."""
        return tuple(dict.fromkeys(outcome.concurrency for outcome in self.outcomes))

    @property
    def warnings(self) -> Sequence[str]:
        """Where the recording and the costs come from different places, and loads that were not measured."""
        header = self.recording.header
        apart = differences({**header.provenance, "drafter": header.drafter}, self.profile.provenance)
        found = [
            f"rounds were recorded with {name} {recorded!r}, costs measured with {measured!r}"
            for name, (recorded, measured) in apart.items()
        ]
        most = max(shape.batch for shape in self.profile.execute)
        if max(self.loads) > most:
            found.append(f"costs were measured for up to {most} requests; above that they are extrapolated")
        if self.recording.branches and "pid" in self.policies:
            found.append("these drafts branch; pid is given chains when it decodes, so its row says little")
        longest = max(shape.draft for shape in self.profile.execute)
        if self.recording.header.max_draft > longest:
            found.append(f"costs were measured for drafts of up to {longest}; above that they are extrapolated")
        return found

    def at(self, policy: str, concurrency: int) -> Outcome:
        """One outcome.

        Raises:
            KeyError: it was not simulated.
        """
        for outcome in self.outcomes:
            if outcome.policy == policy and outcome.concurrency == concurrency:
                return outcome
        raise KeyError((policy, concurrency))

    def best_fixed(self, concurrency: int) -> Outcome | None:
        """The fixed length, 0 included, with the highest throughput; None where none was simulated."""
        found = [
            outcome for outcome in self.outcomes if outcome.concurrency == concurrency and is_fixed(outcome.policy)
        ]
        return max(found, key=lambda outcome: outcome.throughput, default=None)

    def relative(self, outcome: Outcome) -> float | None:
        """Throughput over that of the best fixed length at the same load."""
        best = self.best_fixed(outcome.concurrency)
        return None if best is None or best.throughput == 0.0 else outcome.throughput / best.throughput

    def as_dict(self) -> dict[str, Any]:
        """Plain data, JSON-safe."""
        header = self.recording.header
        return {
            "drafter": header.drafter,
            "temperature": header.temperature,
            "max_draft": header.max_draft,
            "recorded_rounds": len(self.recording.rounds),
            "padded": self.profile.padded,
            "warnings": list(self.warnings),
            "best_fixed": {
                str(load): best.policy for load in self.loads if (best := self.best_fixed(load)) is not None
            },
            "outcomes": [
                {
                    **asdict(outcome),
                    "throughput": outcome.throughput,
                    "mean_accepted_length": outcome.mean_accepted_length,
                    "mean_draft_length": outcome.mean_draft_length,
                    "pass_rate": outcome.pass_rate,
                    "relative_to_best_fixed": self.relative(outcome),
                }
                for outcome in self.outcomes
            ],
            "provenance": {"rounds": dict(header.provenance), "costs": dict(self.profile.provenance)},
        }


def simulate(
    recording: Recording,
    profile: CostProfile,
    *,
    policies: Sequence[str] = DEFAULT_POLICIES,
    concurrency: Sequence[int] = DEFAULT_CONCURRENCY,
) -> Simulation:
    """Replay a recording under every policy at every load.

    Raises:
        InvalidSettingError: a policy is unknown, a load below 1, or nothing is recorded.
    """
    if not concurrency:
        raise InvalidSettingError("concurrency", concurrency, "at least one number of requests")
    costs = profile.costs()
    makers = candidates(policies, recording.header.max_draft, costs)
    if not makers:
        raise InvalidSettingError("policy", policies, "at least one policy")
    return Simulation(
        recording,
        profile,
        tuple(
            replay(recording, costs, make(), name=name, concurrency=load)
            for load in dict.fromkeys(concurrency)
            for name, make in makers.items()
        ),
    )


def tables(simulation: Simulation) -> Iterator[tuple[str, Table]]:
    """Titles and tables: throughput, tokens per round, and executed draft length, each by policy and load."""
    yield "tokens per second (relative to the best fixed length)", _table(simulation, _throughput)
    yield (
        "tokens emitted per round and request",
        _table(simulation, lambda _simulation, outcome: f"{outcome.mean_accepted_length:.2f}"),
    )
    yield (
        "drafted tokens executed per round and request",
        _table(simulation, lambda _simulation, outcome: f"{outcome.mean_draft_length:.2f}"),
    )


def _throughput(simulation: Simulation, outcome: Outcome) -> str:
    relative = simulation.relative(outcome)
    best = simulation.best_fixed(outcome.concurrency)
    if relative is None:
        return f"{outcome.throughput:.1f}"
    mark = " *" if best is outcome else ""
    return f"{outcome.throughput:.1f} ({relative:.3f}){mark}"


def _table(simulation: Simulation, cell: Callable[[Simulation, Outcome], str]) -> Table:
    table = plain_table("policy", *[f"{load} at once" for load in simulation.loads])
    for policy in simulation.policies:
        table.add_row(policy, *[cell(simulation, simulation.at(policy, load)) for load in simulation.loads])
    return table
