"""One evaluation, from settings to a report that is plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..bench.load import load_average
from ..bench.measure import Progress, Trial
from ..bench.prompts import choose
from ..bench.run import warnings_about
from ..bench.settings import BenchSettings
from ..calibration import CalibratedDrafter
from ..hub import LoadedModel, load_model
from ..provenance import provenance
from ..records import RecordHeader, RoundRecord, write_rounds
from .acceptance import Acceptance, by_category, count, macro_interval
from .confidence import Confidence, judge
from .lineup import Entrant, line_up, short_name
from .prompts import ChosenPrompts, choose_prompts
from .rollouts import can_branch, roll_out, rule_for
from .settings import EvaluationSettings
from .speed import SpeedRow, measure_speed

SCHEMA = "specflow-llm evaluate 1"


@dataclass(frozen=True, slots=True)
class TreeLengths:
    """What the same drafter accepts where its drafts may branch. Requests are then matched to plain decoding."""

    tokens: int
    """Drafted and verified in every round."""
    macro_accepted_length: float
    macro_interval: tuple[float, float]
    categories: Mapping[str, float]
    """Mean accepted length of each."""
    rounds: tuple[RoundRecord, ...]
    header: RecordHeader

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the rounds have a file of their own."""
        return {
            "tokens": self.tokens,
            "macro_accepted_length": self.macro_accepted_length,
            "macro_interval": list(self.macro_interval),
            "categories": dict(self.categories),
        }


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """One drafter at one temperature, in counts."""

    drafter: str
    temperature: float
    rule: str
    """Acceptance rule."""
    acceptance: Acceptance
    """Over all rounds."""
    categories: Mapping[str, Acceptance]
    macro_accepted_length: float
    """Mean over the categories of the mean accepted length."""
    macro_interval: tuple[float, float]
    """95 % bootstrap interval: other requests of the same kinds."""
    confidence: Confidence | None
    """None where the drafter makes no estimates, or drafted nothing."""
    rounds: tuple[RoundRecord, ...]
    header: RecordHeader
    """Of the file the rounds can be written to."""
    num_positions: int | None
    """Most tokens the drafter drafts at once, where it says so."""
    tree: TreeLengths | None
    """None where its drafts do not branch."""

    @property
    def label(self) -> str:
        """Drafter and temperature, as a file name."""
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.drafter).strip('-')}-T{self.temperature:g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the rounds have a file of their own."""
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "rule": self.rule,
            "macro_accepted_length": self.macro_accepted_length,
            "macro_interval": list(self.macro_interval),
            "acceptance": self.acceptance.as_dict(),
            "categories": {category: counts.as_dict() for category, counts in self.categories.items()},
            "confidence": None if self.confidence is None else self.confidence.as_dict(),
            "tree": None if self.tree is None else self.tree.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything an evaluation found."""

    provenance: Mapping[str, Any]
    settings: EvaluationSettings
    prompts: ChosenPrompts
    results: tuple[DrafterResult, ...]
    speeds: tuple[SpeedRow, ...]
    """Empty where speed was not measured."""
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...]
    """Reasons not to trust the times."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        settings = {field.name: _plain(getattr(self.settings, field.name)) for field in fields(self.settings)}
        return {
            "schema": SCHEMA,
            "provenance": dict(self.provenance),
            "settings": settings,
            "prompts": {
                "source": self.prompts.source,
                "sha256": self.prompts.sha256,
                "skipped": list(self.prompts.skipped),
                "chosen": [[prompt.category, prompt.question_id] for prompt in self.prompts.prompts],
            },
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "results": [result.as_dict() for result in self.results],
            "speeds": [row.as_dict() for row in self.speeds],
            "trials": [
                {**{name: getattr(trial, name) for name in ("candidate", "prompt", "repeat", "seconds")},
                 "tokens": len(trial.output.token_ids), "others_cores": trial.others_cores}
                for trial in self.trials
            ],
        }  # fmt: skip

    def write_rounds(self, folder: Path) -> list[Path]:
        """Write the rounds of every drafter and temperature to a file of its own, for ``calibrate`` and ``simulate``.

        Drafters without estimates are left out: their rounds would claim certainty. Rounds whose drafts branch have a
        file of their own, for ``simulate``.
        """
        paths: list[Path] = []

        def write(name: str, header: RecordHeader, rounds: Sequence[RoundRecord]) -> None:
            path, number = folder / f"{name}.jsonl", 1
            while path in paths:  # names that differ in characters that file names lack
                number += 1
                path = folder / f"{name}-{number}.jsonl"
            write_rounds(path, header, rounds)
            paths.append(path)

        for result in self.results:
            if result.header.provenance["gives_survival"]:
                write(result.label, result.header, result.rounds)
            if result.tree is not None:
                write(f"{result.label}-trees", result.tree.header, result.tree.rounds)
        return paths


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _silent(done: int, total: int, label: str) -> None:
    del done, total, label


def run_evaluation(
    settings: EvaluationSettings,
    *,
    loaded: LoadedModel | None = None,
    argv: Sequence[str] | None = None,
    notify: Callable[[str], None] = lambda _message: None,
    progress: Progress = _silent,
) -> EvaluationReport:
    """Measure drafters: acceptance, calibration, and speed where it is asked for.

    Args:
        settings: what to do.
        loaded: a model to use instead of loading ``settings.target``.
        argv: recorded in the provenance; None takes the process's own.
        notify: told about steps that take long.
        progress: told how far a step is: tokens decoded while counting, runs while timing.

    Raises:
        InvalidSettingError: the prompts cannot be read, or none fits the model.
        ModelNotFoundError: no such model.
        DrafterError: a drafter cannot serve this target, or two have the same name.
        CheckpointError: a drafter's checkpoint or calibration cannot be used.
        UnsupportedModelError: the model cannot be decoded exactly here.
    """
    load_before = load_average()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if loaded is None:
        loaded = load_model(settings.target, dtype=settings.dtype, device=settings.device, notify=notify)
    prompts = choose_prompts(
        loaded,
        settings.prompts,
        max_tokens=settings.max_tokens,
        per_category=settings.per_category,
        limit=settings.limit,
        seed=settings.seed,
    )
    origin = provenance(device=loaded.model.device, dtype=loaded.model.dtype, seed=settings.seed, argv=argv)
    origin["model"] = short_name(loaded.name)
    notes = (
        [f"{len(prompts.skipped)} prompts leave no room for {settings.max_tokens} tokens"] if prompts.skipped else []
    )
    results: list[DrafterResult] = []
    for temperature in settings.temperatures:
        # Built anew for each: some drafters learn, and what they learned at one temperature misleads at another.
        for entrant in line_up(settings.drafters, loaded, notify):
            notify(f"{entrant.name} at temperature {temperature:g}: {len(prompts.prompts)} prompts")
            results.append(
                _measure(settings, loaded, entrant, temperature, prompts, origin, progress, first=not results)
            )
            notes += _notes(results[-1], entrant)
    speeds: Sequence[SpeedRow] = ()
    trials: Sequence[Trial] = ()
    warnings: list[str] = []
    if settings.speed:
        entrants = line_up(settings.drafters, loaded, notify)
        speeds, trials, warnings = _speeds(settings, loaded, entrants, prompts, load_before, notify, progress)
    origin["load_average"] = {"before": load_before, "after": load_average()}
    return EvaluationReport(
        origin, settings, prompts, tuple(results), tuple(speeds), tuple(trials), tuple(warnings), tuple(notes)
    )


def _measure(
    settings: EvaluationSettings,
    loaded: LoadedModel,
    entrant: Entrant,
    temperature: float,
    prompts: ChosenPrompts,
    origin: Mapping[str, Any],
    progress: Progress,
    *,
    first: bool,
) -> DrafterResult:
    # Sampled requests under a ratio rule never branch.
    matched = settings.sampling(temperature, 0).is_greedy or settings.verification in {"auto", "coupled"}
    branches = settings.tree_tokens > 0 and matched and can_branch(loaded, entrant.drafter)
    total = settings.max_tokens * len(prompts.prompts) * (2 if branches else 1)
    done = 0

    def on_token(number: int) -> None:
        nonlocal done
        done += number
        progress(done, total, f"{entrant.name} T={temperature:g} (tokens, at most)")

    is_greedy = settings.sampling(temperature, 0).is_greedy
    rule = "greedy" if is_greedy else rule_for(entrant.drafter, settings.verification, tree=False)
    roll = partial(
        roll_out,
        loaded,
        entrant.drafter,
        prompts.token_ids,
        [settings.sampling(temperature, index) for index in range(len(prompts.prompts))],
        categories=prompts.categories,
        batch_size=settings.batch_size,
        on_token=on_token,
    )
    rollouts = roll(draft_tokens=settings.draft_tokens, verification=settings.verification, check_model=first)
    is_raw = entrant.fingerprint is not None or isinstance(entrant.drafter, CalibratedDrafter)
    # Positions that the drafter never reaches are none of its own: it may draft fewer tokens than it is asked for.
    longest = max((len(record.survival) for record in rollouts.rounds), default=0) or settings.draft_tokens
    header = RecordHeader(
        drafter=entrant.name,
        temperature=temperature,
        max_draft=longest,
        provenance={
            **origin,
            "prompts": prompts.source,
            "prompts_sha256": prompts.sha256,
            "sampling": {key: getattr(settings, key) for key in ("top_k", "top_p", "min_p", "max_tokens")},
            "verification": rule,
            "drafter_fingerprint": entrant.fingerprint,
            "gives_survival": rollouts.gives_survival,
            # What a drafter without a checkpoint or a calibration of its own claims may be corrected already.
            "confidences": "raw" if is_raw else "as given",
        },
    )
    tree = None
    if branches:
        branched = roll(draft_tokens=settings.tree_tokens, tree=True, check_model=False).rounds
        tree = _tree_lengths(branched, settings, header)
    categories = by_category(rollouts.rounds, max_draft=longest)
    table = rollouts.set_aside
    scales = None if table is None else table.scales_for(is_greedy)
    return DrafterResult(
        drafter=entrant.name,
        temperature=temperature,
        rule=rule,
        acceptance=count(rollouts.rounds, max_draft=longest),
        categories=categories,
        macro_accepted_length=fmean(counts.mean_accepted_length for counts in categories.values()),
        macro_interval=macro_interval(rollouts.rounds, seed=settings.seed),
        confidence=judge(rollouts.rounds, scales) if rollouts.gives_survival else None,
        rounds=rollouts.rounds,
        header=header,
        num_positions=entrant.drafter.num_positions if isinstance(entrant.drafter, CalibratedDrafter) else None,
        tree=tree,
    )


def _tree_lengths(rounds: tuple[RoundRecord, ...], settings: EvaluationSettings, chains: RecordHeader) -> TreeLengths:
    kinds = by_category(rounds, max_draft=settings.tree_tokens)
    means = {category: counts.mean_accepted_length for category, counts in kinds.items()}
    rule = "greedy" if chains.temperature == 0.0 else "coupled"
    provenance = {**chains.provenance, "verification": rule, "confidences": "as given"}
    return TreeLengths(
        settings.tree_tokens,
        fmean(means.values()),
        macro_interval(rounds, seed=settings.seed),
        means,
        rounds,
        replace(chains, max_draft=settings.tree_tokens, provenance=provenance),
    )


def _notes(result: DrafterResult, entrant: Entrant) -> list[str]:
    label = f"{result.drafter} at T={result.temperature:g}"
    notes = []
    if not result.header.provenance["gives_survival"]:
        notes.append(
            f"{label}: it makes no survival estimates, so there is no calibration, and no record of its rounds"
        )
    elif not result.acceptance.drafted:
        notes.append(f"{label}: it drafted nothing")
    drafter = entrant.drafter
    table = drafter.calibration if isinstance(drafter, CalibratedDrafter) else None
    entry = None if table is None else table.entry_for(is_greedy=result.rule == "greedy")
    if entry is not None and entry.regime.temperature != result.temperature:
        notes.append(f"{label}: its calibration was fitted at T={entry.regime.temperature:g}")
    return notes


def _speeds(
    settings: EvaluationSettings,
    loaded: LoadedModel,
    entrants: Sequence[Entrant],
    prompts: ChosenPrompts,
    load_before: float | None,
    notify: Callable[[str], None],
    progress: Progress,
) -> tuple[Sequence[SpeedRow], Sequence[Trial], list[str]]:
    timed = choose(prompts.prompts, per_category=settings.speed_per_category, max_categories=None, seed=settings.seed)
    ids = dict(zip(prompts.prompts, prompts.token_ids, strict=True))
    categories = [prompt.category for prompt in timed]
    rows, trials = measure_speed(
        settings, loaded, entrants, [ids[prompt] for prompt in timed], categories, progress=progress, notify=notify
    )
    asked = BenchSettings(per_category=settings.speed_per_category)
    warnings = warnings_about(trials, load_before, len(set(categories)), asked)
    return rows, trials, warnings
