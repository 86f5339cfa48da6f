"""What the block loop itself costs per round, measured with a backend that does nothing.

Prints one JSON object: CPU microseconds per round for several numbers of chains and policies, the price of an
additional chain, and where and how it was measured. Budgets: at most 20 us per round with one chain and 3 us per
additional chain under the fixed policy; at most 50 us more than that for the adaptive policy with one chain and 8
drafts.

    python benchmarks/chain_overhead.py --rounds 20000
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specflow import (
    AcceptPrefix,
    Adaptive,
    Admission,
    ChainId,
    ChainLoop,
    ChainView,
    Draft,
    Fixed,
    Policy,
    Threshold,
    run_sync,
)
from specflow.testing import ManualClock

NUM_DRAFT = 8
NUM_ACCEPTED = 5


JITTER = (0.97, 1.03, 1.0, 1.05, 0.99, 0.95, 1.02)
"""Simulated timing noise, so that the adaptive policy has to keep its cost table up to date."""


class NullBackend:
    """Answers every phase with values made beforehand, so that what is left is the loop and the policy.

    Simulated time passes in ``execute``: 38 ms and 1 ms per item more, a small model on a CPU.

    Args:
        num_chains: chains in every round.
        num_rounds: rounds until all chains end.
        clock: moved by ``execute``.
    """

    def __init__(self, num_chains: int, num_rounds: int, clock: ManualClock) -> None:
        self._left = num_rounds
        self._clock = clock
        self._views = [ChainView(ChainId(chain), 0, NUM_DRAFT) for chain in range(num_chains)]
        survival = [0.9 ** (position + 1) for position in range(NUM_DRAFT)]
        self._drafts = {limit: Draft(list(range(limit)), survival[:limit]) for limit in range(NUM_DRAFT + 1)}
        self._verdicts = {length: AcceptPrefix(min(length, NUM_ACCEPTED), 0) for length in range(NUM_DRAFT + 1)}
        self._items = {length: list(range(length + 1)) for length in range(NUM_DRAFT + 1)}

    def chains(self) -> Sequence[ChainView]:
        """The same views every round."""
        return self._views if self._left else ()

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """Drafts of the lengths asked for."""
        drafts = self._drafts
        return [drafts[limit] for limit in limits]

    async def execute(self, drafts: Sequence[Draft[int]], admission: Admission) -> object:
        """Only time passes."""
        width = len(drafts) + admission.total
        self._clock.advance((0.038 + 0.001 * (width - 1)) * JITTER[self._left % len(JITTER)])
        return None

    async def verify(
        self, drafts: Sequence[Draft[int]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[int]]:
        """The first five items of each draft are right."""
        del drafts, outcome
        verdicts = self._verdicts
        return [verdicts[length] for length in admission.lengths]

    async def commit(self, verdicts: Sequence[AcceptPrefix[int]]) -> Sequence[Sequence[int]]:
        """Items made beforehand."""
        self._left -= 1
        items = self._items
        return [items[verdict.num_accepted] for verdict in verdicts]

    def discard(self) -> None:
        """Nothing to undo."""


def microseconds_per_round(make_policy: Callable[[], Policy], num_chains: int, num_rounds: int, repeats: int) -> float:
    """CPU time, best of ``repeats`` runs: what is measured is the code, not the neighbours on the machine."""
    best = float("inf")
    for _ in range(repeats):
        clock = ManualClock()
        loop = ChainLoop(NullBackend(num_chains, num_rounds, clock), make_policy(), clock=clock)
        started = time.thread_time()
        run_sync(loop.run())
        best = min(best, time.thread_time() - started)
    return best / num_rounds * 1e6


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a policy's rounds cost, in CPU microseconds."""

    us_per_round: dict[int, float]
    """By number of chains."""

    @property
    def us_per_chain(self) -> float:
        """What one chain more adds: least squares over all numbers of chains."""
        chains, costs = list(self.us_per_round), list(self.us_per_round.values())
        return statistics.linear_regression(chains, costs).slope

    def as_dict(self) -> dict[str, object]:
        """Rounded, for JSON."""
        by_chains = {str(chains): round(cost, 2) for chains, cost in self.us_per_round.items()}
        return {"us_per_round": by_chains, "us_per_chain": round(self.us_per_chain, 2)}


def provenance() -> dict[str, object]:
    """Where, when and how this was measured."""
    root = Path(__file__).resolve().parents[1]
    git = shutil.which("git")
    commit = ""
    if git is not None:
        done = subprocess.run([git, "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603 -- fixed arguments
        commit = done.stdout.strip()
    return {
        "argv": sys.argv,
        "commit": commit or None,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": sys.version,
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000, help="rounds per run with one chain")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 8, 32], help="numbers of chains")
    options = parser.parse_args(arguments)
    if len(set(options.chains)) < 2 or min(options.chains) < 1:
        parser.error("--chains needs at least two different numbers, all of them at least 1")
    policies: dict[str, Callable[[], Policy]] = {
        "fixed": lambda: Fixed(NUM_DRAFT),
        "threshold": lambda: Threshold(NUM_DRAFT, 0.5),
        "adaptive": lambda: Adaptive(NUM_DRAFT),
        "adaptive, padded": lambda: Adaptive(NUM_DRAFT, padded=True),
    }
    results = {
        name: Measurement(
            {
                chains: microseconds_per_round(policy, chains, max(100, options.rounds // chains), options.repeats)
                for chains in options.chains
            }
        ).as_dict()
        for name, policy in policies.items()
    }
    budgets = {"fixed_us_one_chain": 20.0, "fixed_us_per_chain": 3.0, "adaptive_us_more_than_fixed": 50.0}
    report = {"drafted_per_chain": NUM_DRAFT, "results": results, "budgets": budgets, "provenance": provenance()}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
