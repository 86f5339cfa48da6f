"""One benchmark run, from settings to a report that is plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from specflow.errors import InvalidSettingError

from ..architecture import inspect_model
from ..hub import LoadedModel, load_model
from ..provenance import provenance
from .candidates import REFERENCE, Lineup, line_up
from .differences import diagnose
from .limits import Bandwidth, forward_costs, memory_bandwidth, weight_bytes
from .load import BUSY_CORES, BUSY_LOAD, load_average
from .measure import Progress, Trial, run_trials, warm_up
from .prompts import Prompt, choose, load_prompts
from .settings import BenchSettings
from .summary import Prediction, Summary, predict, summarise

SCHEMA = "specflow-llm bench 1"
SPEEDUP_GOAL = 1.4
"""Speculation should reach this geometric mean over the categories."""
CATEGORY_GOAL = 0.98
"""No category should be slower than this against ``generate``."""
_FEW_CATEGORIES = 8
_TOO_MANY_DISTURBED = 0.1


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A goal, what was measured, and whether it was met."""

    goal: str
    candidate: str
    measured: float
    wanted: float
    is_met: bool


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything a run found."""

    provenance: dict[str, Any]
    settings: BenchSettings
    source: str
    """Where the prompts came from."""
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    skipped: Sequence[str]
    """Prompts that did not fit the model's context."""
    trials: Sequence[Trial]
    summaries: Sequence[Summary]
    differences: Sequence[dict[str, Any]]
    """First difference of every output that is not ``generate``'s."""
    bandwidth: Bandwidth
    weight_bytes: int
    costs: dict[str, dict[int, float]]
    """Seconds of a forward by model and width."""
    cost_context: int
    predictions: Sequence[Prediction]
    conclusions: Sequence[Conclusion]
    warnings: Sequence[str]
    """Reasons not to trust the times. Empty on a quiet machine."""
    notes: Sequence[str]

    @property
    def read_seconds(self) -> float:
        """Seconds it takes to read the weights once: no forward can be faster."""
        return self.weight_bytes / self.bandwidth.best

    def row(self, name: str) -> Summary:
        """The summary of one candidate."""
        return next(summary for summary in self.summaries if summary.info.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        settings = {**asdict(self.settings), "data": None if self.settings.data is None else str(self.settings.data)}
        reference = {trial.prompt: trial.output.token_ids for trial in self.trials if trial.candidate == REFERENCE}
        return {
            "schema": SCHEMA,
            "provenance": self.provenance,
            "settings": settings,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "conclusions": [asdict(conclusion) for conclusion in self.conclusions],
            "summaries": [summary.as_dict() for summary in self.summaries],
            "differences": list(self.differences),
            "limits": {
                "weight_bytes": self.weight_bytes,
                "bandwidth": asdict(self.bandwidth),
                "read_seconds": self.read_seconds,
                "plain_tokens_per_second": 1.0 / self.read_seconds,
                "forward_seconds": {
                    name: {str(width): cost for width, cost in table.items()} for name, table in self.costs.items()
                },
                "forward_context": self.cost_context,
                "predictions": [asdict(prediction) for prediction in self.predictions],
            },
            "prompts": {
                "source": self.source,
                "skipped": list(self.skipped),
                "chosen": [
                    {
                        "question_id": prompt.question_id,
                        "category": prompt.category,
                        "prompt_ids": list(ids),
                        "output_ids": list(reference[index]),
                    }
                    for index, (prompt, ids) in enumerate(zip(self.prompts, self.prompt_ids, strict=True))
                ],
            },
            "trials": [_trial(trial) for trial in self.trials],
        }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "candidate": trial.candidate,
        "prompt": trial.prompt,
        "repeat": trial.repeat,
        "seconds": trial.seconds,
        "tokens": len(trial.output.token_ids),
        "target_forwards": trial.output.target_forwards,
        "others_cores": trial.others_cores,
    }


def _silent(done: int, total: int, label: str) -> None:
    del done, total, label


def run_bench(
    settings: BenchSettings,
    *,
    loaded: LoadedModel | None = None,
    argv: Sequence[str] | None = None,
    notify: Callable[[str], None] = lambda _message: None,
    progress: Progress = _silent,
) -> BenchReport:
    """Measure this library against transformers' own ways to generate, on the same prompts, model, dtype and threads.

    Args:
        settings: what to do.
        loaded: a model to use instead of loading ``settings.model``; not packed.
        argv: recorded in the provenance; None takes the process's own.
        notify: told about steps that take long.
        progress: told before every timed run.

    Raises:
        InvalidSettingError: the prompts cannot be read, or none fits the model.
        ModelNotFoundError: no such model.
        UnsupportedModelError: the model cannot be decoded exactly here.
    """
    load_before = load_average()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    if loaded is None:
        loaded = load_model(settings.model, dtype=settings.dtype, device=settings.device, pack=False, notify=notify)
    device = loaded.model.device
    source, prompts, prompt_ids, skipped = _prompts(settings, loaded)
    with _quiet_transformers():
        lineup = line_up(settings, loaded, notify)
        warm_up(lineup.candidates, prompt_ids[0], settings.max_tokens, progress)
        trials = run_trials(
            lineup.candidates,
            prompt_ids,
            max_tokens=settings.max_tokens,
            repeats=settings.repeats,
            device=device,
            progress=progress,
        )
        load_after = load_average()
        notify("looking for differences")
        differences = _differences(lineup, trials, prompts, prompt_ids)
        notify("measuring memory bandwidth and forward costs")
        context = _typical_context(settings, loaded, prompt_ids)
        costs = forward_costs(lineup.models, context=context, widths=_widths(settings), repeats=settings.cost_repeats)
    infos = [candidate.info for candidate in lineup.candidates]
    summaries = summarise(infos, trials, [prompt.category for prompt in prompts], seed=settings.seed)
    origin = provenance(device=device, dtype=loaded.model.dtype, seed=settings.seed, argv=argv)
    return BenchReport(
        provenance={**origin, "model": loaded.name, "load_average": {"before": load_before, "after": load_after}},
        settings=settings,
        source=source,
        prompts=prompts,
        prompt_ids=prompt_ids,
        skipped=skipped,
        trials=trials,
        summaries=summaries,
        differences=differences,
        bandwidth=memory_bandwidth(device),
        weight_bytes=weight_bytes(loaded.model),
        costs=costs,
        cost_context=context,
        predictions=predict(summaries, costs),
        conclusions=conclude(summaries),
        warnings=warnings_about(trials, load_before, len({prompt.category for prompt in prompts}), settings),
        notes=lineup.notes,
    )


def encode(loaded: LoadedModel, prompt: Prompt) -> list[int]:
    """Prompt ids: through the chat template where the model has one, as its users would send it.

    Raises:
        InvalidSettingError: a text prompt for a model without a tokenizer.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if loaded.tokenizer is None or prompt.text is None:
        raise InvalidSettingError("data", prompt.question_id, "token_ids, because the model has no tokenizer")
    if loaded.tokenizer.chat_template is None:
        ids: list[int] = loaded.tokenizer(prompt.text)["input_ids"]
        return ids
    messages = [{"role": "user", "content": prompt.text}]
    encoded = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def _prompts(settings: BenchSettings, loaded: LoadedModel) -> tuple[str, list[Prompt], list[list[int]], list[str]]:
    """Choose among the prompts that leave room for the output."""
    found = load_prompts(settings.data)
    context = inspect_model(loaded.model).context_length
    fitting: dict[Prompt, list[int]] = {}
    skipped = []
    for prompt in found.prompts:
        ids = encode(loaded, prompt)
        if context is not None and len(ids) + settings.max_tokens > context:
            skipped.append(f"{prompt.category} {prompt.question_id}: {len(ids)} tokens")
        else:
            fitting[prompt] = ids
    chosen = choose(
        list(fitting), per_category=settings.per_category, max_categories=settings.max_categories, seed=settings.seed
    )
    if not chosen:
        raise InvalidSettingError(
            "max_tokens", settings.max_tokens, f"less, so that a prompt fits the model's context of {context}"
        )
    return found.source, chosen, [fitting[prompt] for prompt in chosen], skipped


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Generation flags that do not apply to greedy decoding would be warned about on every call."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _widths(settings: BenchSettings) -> list[int]:
    widths = list(range(1, settings.cost_widths + 1))
    return widths if settings.draft_tokens < settings.cost_widths else [*widths, settings.draft_tokens + 1]


def _typical_context(settings: BenchSettings, loaded: LoadedModel, prompt_ids: Sequence[Sequence[int]]) -> int:
    """Tokens in the cache halfway through the median prompt's output."""
    lengths = sorted(len(ids) for ids in prompt_ids)
    context = inspect_model(loaded.model).context_length
    wanted = lengths[len(lengths) // 2] + settings.max_tokens // 2
    return wanted if context is None else max(1, min(wanted, context - max(_widths(settings)) - 1))


def _differences(
    lineup: Lineup, trials: Sequence[Trial], prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    references = {
        trial.prompt: trial.output.token_ids for trial in trials if trial.candidate == REFERENCE and trial.repeat == 0
    }
    found = []
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    for trial in trials:
        key = (trial.candidate, trial.prompt, trial.output.token_ids)
        if trial.output.token_ids == references[trial.prompt] or key in seen:
            continue
        seen.add(key)
        difference = diagnose(
            lineup.loaded.model, prompt_ids[trial.prompt], references[trial.prompt], trial.output.token_ids
        )
        if difference is not None:
            prompt = prompts[trial.prompt]
            found.append(
                {
                    "candidate": trial.candidate,
                    "category": prompt.category,
                    "question_id": prompt.question_id,
                    **asdict(difference),
                }
            )
    return found


def conclude(summaries: Sequence[Summary]) -> list[Conclusion]:
    """Compare the rows that a user gets by default (with packing where it applies) with the goals."""
    packed = any(summary.info.is_packed for summary in summaries)
    lookups = [summary for summary in summaries if not summary.info.is_ours and summary.info.speculates]
    conclusions = []
    for summary in summaries:
        info = summary.info
        if not info.is_ours or info.is_packed != packed:
            continue
        goals = [("at least as fast as generate", summary.speedup, 1.0)]
        if info.speculates:
            goals = [
                ("geometric mean over the categories", summary.speedup, SPEEDUP_GOAL),
                ("slowest category", min(summary.by_category.values()), CATEGORY_GOAL),
            ]
            if lookups:
                best = max(lookups, key=lambda row: row.speedup)
                goals.append((f"ahead of {best.info.name}", summary.speedup, best.speedup))
        conclusions += [
            Conclusion(goal, info.name, measured, wanted, measured >= wanted) for goal, measured, wanted in goals
        ]
    return conclusions


def warnings_about(
    trials: Sequence[Trial], load_before: float | None, num_categories: int, settings: BenchSettings
) -> list[str]:
    """Reasons not to believe the times: a busy machine, one that does not tell, too few prompts.

    Args:
        trials: all timed runs.
        load_before: the load average before this process began to work, or None.
        num_categories: of the chosen prompts.
        settings: what was asked for.
    """
    warnings = []
    if load_before is not None and load_before > BUSY_LOAD:
        warnings.append(f"the machine was busy before the run: load average {load_before:.2f}")
    known = [trial.others_cores for trial in trials if trial.others_cores is not None]
    disturbed = sum(cores > BUSY_CORES for cores in known)
    if known and disturbed > _TOO_MANY_DISTURBED * len(known):
        warnings.append(
            f"other processes used more than {BUSY_CORES} cores during {disturbed} of {len(known)} timed runs "
            f"({sum(known) / len(known):.2f} cores on average)"
        )
    if not known and load_before is None:
        warnings.append("this system does not tell how busy it is: nobody knows whether the run was disturbed")
    if num_categories < _FEW_CATEGORIES or settings.per_category < 2:
        warnings.append(
            f"only {num_categories} categories with at most {settings.per_category} prompt(s) each: too few to "
            "conclude from"
        )
    return warnings
