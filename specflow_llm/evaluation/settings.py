"""What an evaluation measures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..config import VERIFICATIONS, SamplingParams, Speculation, Verification
from ..errors import require
from ..hub import DEMO_MODEL

SPEC_BENCH = "spec-bench"
DATA_VARIABLE = "SPECFLOW_BENCH_DATA"
"""Environment variable that names Spec-Bench's question file, for the benchmark and for ``--prompts spec-bench``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    target: Any = DEMO_MODEL
    """Built-in name, folder, ``.gguf`` file or hub id."""
    drafters: tuple[Any, ...] = ("ngram",)
    """As :class:`~specflow_llm.config.Speculation` takes them: names, paths, ids, or objects."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = "auto"
    """Rule for sampled requests; ``auto`` is block verification for drafters with probabilities, else matching."""
    prompts: Path | None = None
    """JSONL as the benchmark reads it; None takes the prompts that the package carries."""
    per_category: int | None = None
    """At most so many prompts of each category; None takes all."""
    limit: int | None = None
    """At most so many prompts in all, drawn from the categories in turns; None takes all."""
    max_tokens: int = 128
    draft_tokens: int = 8
    """Tokens drafted, and all of them verified, in every round of the counts."""
    tree_tokens: int = 15
    """Also count rounds in which drafts may branch, for drafters that do so, with so many tokens; 0 leaves it out."""
    batch_size: int = 4
    """Requests decoded together while counting. Counts do not depend on it, but for rounding."""
    speed: bool = True
    """Also time every drafter against plain decoding."""
    speed_per_category: int = 1
    """Timed prompts of each category."""
    repeats: int = 3
    """Timed runs of each drafter on each prompt; their median counts."""
    policy: Any = "adaptive"
    """Draft lengths of the timed runs: as a user has it. Counts are always taken with everything verified."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    """Chooses the prompts, and seeds the requests."""

    def __post_init__(self) -> None:
        """Validate every field."""
        if not self.drafters:
            raise InvalidSettingError("drafters", self.drafters, "at least one")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InvalidSettingError("temperatures", self.temperatures, "one or more different numbers")
        if self.verification not in VERIFICATIONS:
            raise InvalidSettingError("verification", self.verification, f"one of {VERIFICATIONS}")
        for name in ("draft_tokens", "batch_size", "speed_per_category", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidSettingError(name, getattr(self, name), "an integer >= 1")
        require(0 <= self.tree_tokens <= 256, "tree_tokens", self.tree_tokens, "an integer in [0, 256]")
        for name in ("per_category", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSettingError(name, value, "an integer >= 1, or None")
        for temperature in self.temperatures:
            self.sampling(temperature, 0)
        for drafter in self.drafters:
            Speculation(drafter=drafter, max_draft_tokens=self.draft_tokens, policy=self.policy)

    def sampling(self, temperature: float, index: int) -> SamplingParams:
        """Settings of one request.

        Args:
            temperature: one of ``temperatures``.
            index: the prompt's number; every request has a seed of its own.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + index,
        )


def find_prompts(name: str | None) -> Path | None:
    """The file behind ``--prompts``.

    Args:
        name: a path, ``spec-bench``, or None for the package's own prompts.

    Raises:
        InvalidSettingError: ``spec-bench`` was asked for, and nobody said where it is.
    """
    if name is None:
        return None
    if name != SPEC_BENCH:
        return Path(name)
    place = os.environ.get(DATA_VARIABLE)
    if not place:
        raise InvalidSettingError(
            "prompts", name, f"the path of a JSONL file; or set {DATA_VARIABLE} to Spec-Bench's question.jsonl"
        )
    return Path(place)
