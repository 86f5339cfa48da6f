"""What running ahead gains in virtual time, beside what arithmetic says it must gain.

    python benchmarks/virtual_speedup.py --json benchmarks/results/virtual_speedup.json

The scheduler is the real one; only time is simulated, so the figures do not depend on the machine.

Chain of N actor calls that may run ahead (each takes G, guesses are free, right with probability p, at most d open):
every G seconds the run advances to the first wrong guess, so

    speedup = (1 - p^(d+1)) / (1 - p)          (Leviathan et al. 2023, equation 1, with calls in the place of tokens)

Chain of actor and tool where only the tool may run ahead (guess takes g, tool T, hit rate a; Speculative Actions, Ye
et al. 2025):

    seconds = a N max(G, g + T) + (1 - a) N (G + T)

p and a are the shares of right guesses that were really drawn. Graphs: without prediction the critical path, with an
oracle on every step the longest step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specflow import Budget, Call, Context, Effect, Fixed, Pipeline, Prediction, step, workflow
from specflow.policies import CircuitBreaker, ExpectedValue
from specflow.protocols import RunAheadPolicy
from specflow.testing import Adversary, Flaky, Oracle
from specflow.testing.virtual import Timed, simulate
from specflow.worlds import TaskKind

Row = dict[str, Any]


def actor_chain(calls: int, probability: float, depth: int, seed: int) -> Row:
    """Actor calls that may run ahead."""
    guesser = Flaky(probability, lambda call: call.arguments[0] + 1, seed)

    # Not PURE: results of squashed pure attempts serve equal calls later, which the formula knows nothing of.
    @step(effect=Effect.READONLY, predict=guesser)
    async def act(value: int) -> int:
        return value + 1

    @workflow
    async def chain(ctx: Context, count: int) -> int:
        value = 0
        for _ in range(count):
            value = await ctx.call(act, value)
        return value

    ahead = simulate(chain, calls, policy=Fixed(depth), durations=1.0, seed=seed)
    plain = simulate(chain, calls, policy=Fixed(0), durations=1.0, seed=seed)
    right = sum(guesser.is_right(Call(act.name, (), position=(index,))) for index in range(calls)) / calls
    expected = depth + 1.0 if right == 1.0 else (1 - right ** (depth + 1)) / (1 - right)
    return {
        "program": f"{calls} actor calls",
        "setting": f"p={probability} depth={depth}",
        "measured": plain.seconds / ahead.seconds,
        "expected": expected,
        "wasted attempts": ahead.report.squashed,
    }


class SlowGuesser:
    """A guesser that takes time: its predictions come from another predictor."""

    def __init__(self, inner: Flaky) -> None:
        self._inner = inner

    async def predict(self, call: Call) -> list[Prediction]:
        """As the inner one, later."""
        return list(self._inner.predict(call))


def actor_and_tool(rounds: int, probability: float, seconds: tuple[float, float, float], seed: int) -> Row:
    """The actor never runs ahead, the tool does; ``seconds`` are those of actor, guess and tool."""
    actor, guess, tool = seconds
    flaky = Flaky(probability, lambda call: call.arguments[0] * 10, seed)

    @step(predict=SlowGuesser(flaky))  # undeclared: never runs ahead
    async def plan(index: int) -> int:
        return index * 10

    @step(effect=Effect.READONLY)
    async def use(query: int) -> int:
        return query + 1

    @workflow
    async def agent(ctx: Context, count: int) -> int:
        total = 0
        for index in range(count):
            total += await ctx.call(use, await ctx.call(plan, index))
        return total

    def durations(work: Timed) -> float:
        if work.kind is TaskKind.PREDICT:
            return guess
        return actor if "plan" in work.step else tool

    run = simulate(agent, rounds, policy=Fixed(1), durations=durations, seed=seed)
    drawn = run.report.hits / rounds
    expected = drawn * rounds * max(actor, guess + tool) + (1 - drawn) * rounds * (actor + tool)
    plain = rounds * (actor + tool)
    return {
        "program": f"{rounds} rounds of actor and tool",
        "setting": f"p={probability} G={actor} g={guess} T={tool}",
        "measured": plain / run.seconds,
        "expected": plain / expected,
        "wasted attempts": run.report.squashed,
    }


def graph(nodes: int, seed: int, *, predict: bool) -> Row:
    """A random graph of steps."""
    draw = random.Random(seed)
    lengths = {f"n{index}": draw.uniform(1.0, 10.0) for index in range(nodes)}
    reads = {
        f"n{index}": sorted(draw.sample([f"n{other}" for other in range(index)], min(index, draw.randint(0, 3))))
        for index in range(nodes)
    }
    pipeline = Pipeline("random")
    values: dict[str, int] = {}
    for name, sources in reads.items():
        values[name] = 1 + sum(values[source] for source in sources)
        predictor = Oracle({name: values[name]} if predict else {})
        pipeline.step(effect=Effect.PURE, predict=predictor, name=name)(make_node(name, sources))
    finish: dict[str, float] = {}
    for name, sources in reads.items():
        finish[name] = lengths[name] + max((finish[source] for source in sources), default=0.0)
    run = simulate(
        pipeline, policy=Fixed(nodes if predict else 0), durations=lambda work: lengths[work.step], seed=seed
    )
    bound = max(lengths.values()) if predict else max(finish.values())
    serial = sum(lengths.values())
    return {
        "program": f"graph of {nodes} steps",
        "setting": "oracle" if predict else "no prediction",
        "measured": serial / run.seconds,
        "expected": serial / bound,
        "wasted attempts": run.report.squashed,
    }


def make_node(name: str, sources: list[str]) -> Callable[..., Any]:
    """A step function whose parameters are its sources."""
    scope: dict[str, Any] = {}
    exec(f"async def {name}({', '.join(sources)}):\n    return 1 + sum([{', '.join(sources)}])", scope)  # noqa: S102
    function: Callable[..., Any] = scope[name]
    function.__module__ = __name__
    return function


def adversary(policy_name: str, policy: RunAheadPolicy, calls: int) -> Row:
    """Always wrong, always sure: time and spending against no speculation."""

    @step(effect=Effect.READONLY, money=0.01, predict=Adversary())
    async def act(value: int) -> int:
        return value

    @workflow
    async def chain(ctx: Context, count: int) -> int:
        for index in range(count):
            await ctx.call(act, index)
        return count

    run = simulate(chain, calls, policy=policy, durations=1.0)
    return {
        "program": f"{calls} calls, adversary",
        "setting": policy_name,
        "measured": calls / run.seconds,
        "expected": 1.0,
        "wasted attempts": run.report.squashed,
        "wasted money": run.report.wasted_money,
    }


def main() -> None:
    """Run all settings and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    calls, seed = options.calls, options.seed
    rows = [
        actor_chain(calls, probability, depth, seed)
        for probability in (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
        for depth in (1, 2, 4, 8)
    ]
    rows += [
        actor_and_tool(calls, probability, seconds, seed)
        for probability in (0.3, 0.5, 0.9)
        for seconds in ((1.0, 0.1, 0.5), (1.0, 0.1, 2.0), (1.0, 0.8, 0.8), (5.0, 1.0, 1.0))
    ]
    rows += [graph(nodes, seed + nodes, predict=predict) for nodes in (8, 20, 40) for predict in (False, True)]
    rows += [
        adversary("Fixed(4, width=3)", Fixed(4, width=3), calls),
        adversary("Fixed(4), budget 0.5", Fixed(4, budget=Budget(money=0.5)), calls),
        adversary("CircuitBreaker(Fixed(4))", CircuitBreaker(Fixed(4)), calls),
        adversary("ExpectedValue, budget 0.5", ExpectedValue(budget=Budget(money=0.5)), calls),
    ]
    print(f"{'program':34}{'setting':28}{'speedup':>9}{'expected':>9}{'ratio':>7}{'wasted':>8}{'money':>8}")
    for row in rows:
        row["ratio"] = row["measured"] / row["expected"]
        print(
            f"{row['program']:34}{row['setting']:28}{row['measured']:9.3f}{row['expected']:9.3f}{row['ratio']:7.3f}"
            f"{row['wasted attempts']:8}{row.get('wasted money', 0.0):8.2f}"
        )
    worst = max(abs(row["ratio"] - 1.0) for row in rows)
    print(f"largest deviation from the closed form: {worst:.1%}")
    if options.json:
        info = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": sys.version.split()[0], "seed": seed}
        options.json.write_text(json.dumps({"provenance": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
