"""Every predictor in a real run: the result is the plain one, and what can be known is guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from specflow import Context, Effect, run, step, workflow
from specflow.policies import Fixed
from specflow.predictors import (
    TAGE,
    Branch,
    ByArguments,
    Constant,
    FirstOf,
    Fn,
    GShare,
    LastValue,
    Majority,
    Markov,
    NearestNeighbour,
    Perceptron,
    Tournament,
    TraceReplay,
    TwoBit,
)
from specflow.testing import Adversary, Flaky, Oracle

TURNS = 8
PLAIN = [turn % 2 for turn in range(TURNS)]


async def model(turn: int) -> int:
    """A cheap model that is right."""
    await checkpoint()
    return turn % 2


MAKERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "markov": (Markov, True),
    "by arguments": (ByArguments, True),
    "nearest": (lambda: NearestNeighbour(lambda turn: (turn,), k=1), True),
    "trace": (TraceReplay, True),
    "gshare": (lambda: Branch(GShare()), True),
    "perceptron": (lambda: Branch(Perceptron()), True),
    "tage": (lambda: Branch(TAGE()), True),
    "function": (lambda: Fn(lambda turn: turn % 2), True),
    "async function": (lambda: Fn(model), True),
    "first of": (lambda: FirstOf(Fn(lambda _: None), ByArguments()), True),
    "first of, async": (lambda: FirstOf(Fn(lambda _: None), Fn(model)), True),
    "tournament": (lambda: Tournament(LastValue(), ByArguments()), True),
    "tournament, async": (lambda: Tournament(LastValue(), Fn(model)), True),
    "oracle": (lambda: Oracle(lambda call: call.arguments[0] % 2), True),
    "constant": (lambda: Constant(1), False),
    "last value": (LastValue, False),
    "majority": (Majority, False),
    "two-bit": (lambda: Branch(TwoBit()), False),
    "adversary": (lambda: Adversary(lambda call: call.arguments[0] % 2, guesses=3), False),
    "flaky": (lambda: Flaky(0.5, lambda call: call.arguments[0] % 2), False),
}
"""A predictor, and whether it knows an alternating step in the sixth run."""


@pytest.mark.anyio
@pytest.mark.parametrize(("make", "knows"), MAKERS.values(), ids=MAKERS.keys())
async def test_a_run_has_the_plain_result_and_the_hits_it_can_have(make: Callable[[], Any], *, knows: bool) -> None:
    """An alternating step is guessed by those that can know it; the value is the same with all of them.

    How many guesses are made depends on the event loop: a result that is there already is not guessed, and trio chooses
    by chance which task is next.
    """

    @step(effect=Effect.PURE, predict=make())
    async def alternate(turn: int) -> int:
        for _ in range(30):  # longer than the model takes
            await checkpoint()
        return turn % 2

    @workflow
    async def flow(ctx: Context) -> list[int]:
        return [await ctx.call(alternate, turn) for turn in range(TURNS)]

    for _ in range(6):
        result = await run(flow, policy=Fixed(2))
        assert result.value == PLAIN
    if knows:
        assert result.report.misses == 0
        assert result.report.hits > 0
