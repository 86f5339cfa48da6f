"""Timed runs: every candidate on every prompt, interleaved, in rotating order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from .candidates import Candidate, Output
from .load import cpu_use, others_cores

ItemT = TypeVar("ItemT")

_WARM_UP_TOKENS = 16


class Progress(Protocol):
    """**Protocol:** told how far a run is."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` timed runs are finished; ``label`` comes next."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed run."""

    candidate: str
    prompt: int
    """Index into the chosen prompts."""
    repeat: int
    seconds: float
    """Wall-clock time of the whole call, prefill included, from prompt ids to output ids."""
    others_cores: float | None
    """Cores that other processes used meanwhile."""
    output: Output


def rotated(items: Sequence[ItemT], by: int) -> list[ItemT]:
    """The items, beginning with number ``by`` (modulo their count)."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def order_of_runs(candidates: Sequence[ItemT], num_prompts: int, repeats: int) -> Iterator[tuple[int, int, ItemT]]:
    """(repeat, prompt, candidate) in the order of running.

    All candidates run on a prompt one right after the other, so that a machine that grows slower or faster treats them
    alike; the one that begins moves on with every prompt and every repeat, so that none has the others' heat or caches
    against it more often than they have its.
    """
    for repeat in range(repeats):
        for prompt in range(num_prompts):
            for candidate in rotated(candidates, prompt + repeat * num_prompts + repeat):
                yield repeat, prompt, candidate


def warm_up(candidates: Sequence[Candidate], prompt: Sequence[int], max_tokens: int, progress: Progress) -> None:
    """Run every candidate once, untimed: first calls allocate, compile and learn costs."""
    for number, candidate in enumerate(candidates):
        progress(number, len(candidates), f"warming up {candidate.info.name}")
        candidate.run(prompt, min(max_tokens, _WARM_UP_TOKENS))


def run_trials(
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    repeats: int,
    device: torch.device,
    progress: Progress,
) -> list[Trial]:
    """Time every candidate on every prompt.

    Args:
        candidates: at least one.
        prompts: token ids.
        max_tokens: new tokens per run.
        repeats: timed runs of each pair.
        device: waited for before and after each run.
        progress: told before every run.
    """
    total = len(candidates) * len(prompts) * repeats
    trials: list[Trial] = []
    for repeat, index, candidate in order_of_runs(candidates, len(prompts), repeats):
        progress(len(trials), total, candidate.info.name)
        synchronise(device)
        before = cpu_use()
        started = time.perf_counter()
        output = candidate.run(prompts[index], max_tokens)
        synchronise(device)
        seconds = time.perf_counter() - started
        trials.append(Trial(candidate.info.name, index, repeat, seconds, others_cores(before, cpu_use()), output))
    progress(total, total, "done")
    return trials


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
