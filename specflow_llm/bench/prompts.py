"""Prompts to measure on: a JSONL file laid out like Spec-Bench's (Xia et al. 2024), or the package's own small set."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

PACKAGED = "packaged prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a benchmark."""

    question_id: str
    category: str
    text: str | None
    """The first user turn."""
    token_ids: tuple[int, ...] | None = None
    """Instead of text, for models without a tokenizer."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and where they came from."""

    source: str
    """The file's path, or :data:`PACKAGED`."""
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories in order of first appearance."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))


def load_prompts(data: Path | None) -> PromptSet:
    """Read prompts: a JSONL file of ``{"question_id", "category", "turns"}``, or ``"token_ids"`` in place of the turns.

    Args:
        data: the file; None takes the package's own prompts.

    Raises:
        InvalidSettingError: the file is missing, empty, or a line lacks a field.
    """
    if data is None:
        text = resources.files("specflow_llm").joinpath("data", "prompts.jsonl").read_text(encoding="utf-8")
        return PromptSet(PACKAGED, _parse(text, PACKAGED))
    if not data.is_file():
        raise InvalidSettingError("data", str(data), "a JSONL file of prompts")
    return PromptSet(str(data), _parse(data.read_text(encoding="utf-8"), str(data)))


def _parse(text: str, source: str) -> tuple[Prompt, ...]:
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line)))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InvalidSettingError(
                "data",
                f"{source}, line {number}",
                f"an object with question_id, category and turns ({type(error).__name__}: {error})",
            ) from error
    if not prompts:
        raise InvalidSettingError("data", source, "at least one prompt")
    return tuple(prompts)


def _prompt(row: dict[str, Any]) -> Prompt:
    name, category = str(row["question_id"]), str(row["category"])
    if "token_ids" in row:
        return Prompt(name, category, None, tuple(int(token) for token in row["token_ids"]))
    return Prompt(name, category, str(row["turns"][0]))


def choose(prompts: Sequence[Prompt], *, per_category: int, max_categories: int | None, seed: int) -> list[Prompt]:
    """At most ``per_category`` prompts of each category, drawn by a seeded shuffle; categories keep their order."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    chosen = []
    for category in list(by_category)[:max_categories]:
        members = by_category[category]
        # Seeded by the category's name too: the choice within one does not depend on which others there are.
        random.Random(f"{seed} {category}").shuffle(members)  # noqa: S311 - a choice of prompts, no secret
        chosen.extend(members[:per_category])
    return chosen
