"""What it costs to rebuild a workflow from its history, per step: the price of a fork and of a recovery.

Run it as ``python benchmarks/replay_cost.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from specflow import Context, Effect, step, workflow
from specflow.codec import Box, encode
from specflow.replay import CallRequest, Outcome, Program, replay
from specflow.state import cells_of


@step(effect=Effect.PURE)
async def add_one(value: int) -> int:
    """The smallest step."""
    return value + 1


@workflow
async def count_to(ctx: Context, limit: int) -> int:
    """A loop of steps."""
    value = 0
    while value < limit:
        value = await ctx.call(add_one, value)
    return value


def rebuild(steps: int) -> float:
    """Microseconds per replayed step of one rebuild."""
    body = count_to.body(Box.from_bytes(encode([[steps + 1], {}])))
    program = Program(body, prefix=(), seed=b"", cells=cells_of({}), at=0.0)
    answers = [
        (Outcome(Box(value), at=1.0), (), CallRequest((value - 1,), add_one, (value - 1,), {}))
        for value in range(1, steps + 1)
    ]
    started = time.perf_counter()
    request = replay(program, answers)
    seconds = time.perf_counter() - started
    assert isinstance(request, CallRequest)
    assert request.args == (steps,)
    program.close()
    return seconds / steps * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = [rebuild(options.steps) for _ in range(options.rounds)]
    print(f"{statistics.median(times):.2f} us per replayed step ({min(times):.2f} to {max(times):.2f})")
    if options.json:
        options.json.write_text(json.dumps({"microseconds_per_step": times, "steps": options.steps}) + "\n")


if __name__ == "__main__":
    main()
