"""Which prompts are used: those that fit the model, at most so many of each category and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from specflow.errors import InvalidSettingError

from ..architecture import inspect_model
from ..bench.prompts import PACKAGED, Prompt, choose, load_prompts
from ..bench.run import encode
from ..calibration.table import sha256_of
from ..hub import LoadedModel


@dataclass(frozen=True, slots=True)
class ChosenPrompts:
    """Prompts of a measurement, as token ids."""

    source: str
    """Name of the file, without its folder; :data:`~specflow_llm.bench.prompts.PACKAGED` for the package's own."""
    sha256: str | None
    """Of the file."""
    prompts: tuple[Prompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    skipped: tuple[str, ...]
    """Prompts that leave no room for the output."""

    @property
    def categories(self) -> tuple[str, ...]:
        """Of each prompt."""
        return tuple(prompt.category for prompt in self.prompts)


def choose_prompts(
    loaded: LoadedModel, data: Path | None, *, max_tokens: int, per_category: int | None, limit: int | None, seed: int
) -> ChosenPrompts:
    """Read prompts and choose among those that leave room for ``max_tokens``.

    Args:
        loaded: the target; its chat template is used where it has one.
        data: a JSONL file as the benchmark reads it; None takes the package's own prompts.
        max_tokens: room needed.
        per_category: at most so many of each category.
        limit: at most so many in all, taken from the categories in turns.
        seed: of the choice.

    Raises:
        InvalidSettingError: the file cannot be read, or no prompt fits.
    """
    found = load_prompts(data)
    context = inspect_model(loaded.model).context_length
    fitting: dict[Prompt, tuple[int, ...]] = {}
    skipped = []
    for prompt in found.prompts:
        ids = encode(loaded, prompt)
        if context is not None and len(ids) + max_tokens > context:
            skipped.append(f"{prompt.category} {prompt.question_id}: {len(ids)} tokens")
        else:
            fitting[prompt] = tuple(ids)
    everything = max(1, len(fitting))
    chosen = choose(list(fitting), per_category=per_category or everything, max_categories=None, seed=seed)
    kept = set(in_turns(chosen)[:limit])
    chosen = [prompt for prompt in chosen if prompt in kept]
    if not chosen:
        raise InvalidSettingError("max_tokens", max_tokens, f"less, so that a prompt fits the context of {context}")
    return ChosenPrompts(
        PACKAGED if data is None else data.name,
        None if data is None else sha256_of(data),
        tuple(chosen),
        tuple(fitting[prompt] for prompt in chosen),
        tuple(skipped),
    )


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each category, then the second ones, and so on."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [prompt for prompt in chain.from_iterable(zip_longest(*groups.values())) if prompt is not None]
