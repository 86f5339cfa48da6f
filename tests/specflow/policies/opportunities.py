"""Opportunities and resolutions with sane defaults, and a source of guesses with a fixed hit rate."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specflow.effects import Effect
from specflow.protocols import RunAheadPolicy
from specflow.speculation import Assumption, Opportunity, Resolution, Spent

__all__ = ["follow", "guess", "opportunity", "outcomes", "teach"]


def guess(
    step: str = "plan", source: str = "markov", rank: int = 0, confidence: float = 1.0, position: int = 0
) -> Assumption:
    """One guess."""
    return Assumption(step=step, position=(position,), source=source, rank=rank, confidence=confidence)


def opportunity(
    *guesses: Assumption,
    effect: Effect = Effect.READONLY,
    wait_seconds: float | None = 8.0,
    step_seconds: float | None = 10.0,
    money: float = 0.0,
    tokens: float = 0.0,
    running: int = 0,
    spent: Spent = Spent(),  # noqa: B008 - frozen, so sharing it is safe
) -> Opportunity:
    """A step called ``search`` that could start on guesses."""
    return Opportunity(
        step="search",
        effect=effect,
        assumptions=guesses or (guess(),),
        wait_seconds=wait_seconds,
        step_seconds=step_seconds,
        money=money,
        tokens=tokens,
        running=running,
        spent=spent,
    )


def outcomes(rate: float, count: int, seed: int) -> list[bool]:
    """Independent outcomes at a hit rate."""
    rng = random.Random(seed)
    return [rng.random() < rate for _ in range(count)]


def teach(policy: RunAheadPolicy, hits: Sequence[bool], assumption: Assumption | None = None) -> None:
    """Resolve one guess after another."""
    for hit in hits:
        policy.learn(Resolution(assumption or guess(), hit))


def follow(policy: RunAheadPolicy, hits: Sequence[bool], question: Opportunity | None = None) -> list[bool]:
    """Ask before each resolution whether to start; returns the answers. The guess resolved is the oldest one."""
    question = question or opportunity()
    answers = []
    for hit in hits:
        answers.append(policy.allows(question))
        policy.learn(Resolution(question.assumptions[0], hit))
    return answers
