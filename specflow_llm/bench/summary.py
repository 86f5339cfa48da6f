"""From timed runs to figures: ratios, geometric means, counts, seconds by phase, and what forward costs predict."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .candidates import REFERENCE, CandidateInfo
from .limits import cost_at
from .measure import Trial

PHASES = ("prefill", "predict", "admit", "execute", "verify", "commit", "other")
"""``other`` is the rest of the call: admission of the request, text, and what lies between rounds."""

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Counts:
    """What decoding did, over all prompts."""

    rounds: int
    drafted: int
    admitted: int
    accepted: int
    emitted: int
    mean_accepted_length: float
    """Tokens emitted per round, the correction or bonus token included."""
    verification_pass_rate: float
    """VPR: accepted / verified."""
    draft_utilisation: float
    """DU: accepted / drafted."""
    acceptance_by_position: tuple[float, ...]
    verified_by_position: tuple[int, ...]
    """How often a draft was verified at each position."""
    block_widths: Mapping[int, int]
    """Tokens per verification forward -> forwards."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One row: a candidate over all prompts. Of repeated runs the one with the median time counts."""

    info: CandidateInfo
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    """Geometric mean over the categories of the speedup over ``generate`` in the same run."""
    interval: tuple[float, float]
    """95 % bootstrap interval of ``speedup``: other prompts of the same kind."""
    by_category: Mapping[str, float]
    """Geometric mean over a category's prompts."""
    worst_prompt: float
    best_prompt: float
    spread: float | None
    """Median over prompts of (slowest - fastest) / median time of the repeats; None with a single repeat."""
    target_forwards: int
    tokens_per_forward: float
    identical: int
    """Prompts whose output equals ``generate``'s, in every repeat."""
    prompts: int
    counts: Counts | None = None
    phase_seconds: Mapping[str, float] | None = None

    @property
    def outside_forward(self) -> float | None:
        """Share of the time spent outside target forwards; None where it was not measured."""
        if self.phase_seconds is None:
            return None
        return 1.0 - (self.phase_seconds["prefill"] + self.phase_seconds["execute"]) / self.seconds

    @property
    def decode_seconds(self) -> float | None:
        """Seconds without the prefill; None where that is unknown."""
        return None if self.phase_seconds is None else self.seconds - self.phase_seconds["prefill"]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "outside_forward": self.outside_forward, "decode_seconds": self.decode_seconds}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the measured costs of forwards and drafts predict for speculation, and what came of it, prefill left out.

    The quotient of the two is the efficiency: what is missing from one went into verdicts and book-keeping.
    """

    candidate: str
    mean_width: float
    """Mean tokens per verification forward: 1 + admitted drafts."""
    cost_ratio: float
    """v(n): mean cost of the verification forwards over the cost of a forward over one token, by the measured table."""
    draft_ratio: float
    """Measured seconds of drafting per round over the cost of a forward over one token."""
    predicted: float
    """tau T(1) / (T_draft + T(n)): mean accepted length / (``cost_ratio`` + ``draft_ratio``)."""
    measured: float
    """Decoding seconds per token without speculation over those with it, on the same model object."""


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def typical_trials(trials: Sequence[Trial]) -> dict[tuple[str, int], Trial]:
    """Of the repeats of each (candidate, prompt) the one with the median time (the lower one of two)."""
    groups: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.candidate, trial.prompt), []).append(trial)
    return {key: sorted(group, key=lambda trial: trial.seconds)[(len(group) - 1) // 2] for key, group in groups.items()}


def summarise(
    infos: Sequence[CandidateInfo], trials: Sequence[Trial], categories: Sequence[str], *, seed: int
) -> list[Summary]:
    """One summary per candidate, in order.

    Args:
        infos: the candidates; one of them is the reference.
        trials: all timed runs.
        categories: of each prompt.
        seed: of the bootstrap.
    """
    typical = typical_trials(trials)
    references = {
        trial.prompt: trial.output.token_ids for trial in trials if trial.candidate == REFERENCE and trial.repeat == 0
    }
    summaries = []
    for info in infos:
        own = [typical[info.name, prompt] for prompt in range(len(categories))]
        ratios = [_speed(trial) / _speed(typical[REFERENCE, trial.prompt]) for trial in own]
        repeats: dict[int, list[Trial]] = {}
        for trial in trials:
            if trial.candidate == info.name:
                repeats.setdefault(trial.prompt, []).append(trial)
        tokens = sum(len(trial.output.token_ids) for trial in own)
        seconds = sum(trial.seconds for trial in own)
        forwards = sum(trial.output.target_forwards for trial in own)
        by_category = _by_category(ratios, categories)
        summaries.append(
            Summary(
                info=info,
                tokens=tokens,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                speedup=geometric_mean(by_category.values()),
                interval=_bootstrap(ratios, categories, seed),
                by_category=by_category,
                worst_prompt=min(ratios),
                best_prompt=max(ratios),
                spread=_spread(list(repeats.values())),
                target_forwards=forwards,
                tokens_per_forward=tokens / forwards,
                identical=sum(
                    all(trial.output.token_ids == references[prompt] for trial in group)
                    for prompt, group in repeats.items()
                ),
                prompts=len(categories),
                counts=_counts(own),
                phase_seconds=_phases(own),
            )
        )
    return summaries


def predict(summaries: Sequence[Summary], costs: Mapping[str, Mapping[int, float]]) -> list[Prediction]:
    """Predicted against measured speedup of every speculating row of this library.

    Args:
        summaries: all rows.
        costs: seconds of a forward by model (``"plain"``, ``"packed"``) and width.
    """
    rows = {summary.info.name: summary for summary in summaries}
    predictions = []
    for summary in summaries:
        counts, phases, base = summary.counts, summary.phase_seconds, rows.get(summary.info.baseline or "")
        if counts is None or phases is None or base is None:
            continue
        if base.decode_seconds is None or summary.decode_seconds is None:
            continue
        table = costs["packed" if summary.info.is_packed else "plain"]
        widths = counts.block_widths
        rounds = sum(widths.values())
        mean_cost = sum(number * cost_at(table, width) for width, number in widths.items()) / rounds
        ratio = mean_cost / cost_at(table, 1)
        draft_ratio = phases["predict"] / rounds / cost_at(table, 1)
        predictions.append(
            Prediction(
                candidate=summary.info.name,
                mean_width=sum(number * width for width, number in widths.items()) / rounds,
                cost_ratio=ratio,
                draft_ratio=draft_ratio,
                predicted=counts.mean_accepted_length / (ratio + draft_ratio),
                measured=(base.decode_seconds / base.tokens) / (summary.decode_seconds / summary.tokens),
            )
        )
    return predictions


def _speed(trial: Trial) -> float:
    """Tokens per second: outputs that part from the reference may have another length."""
    return len(trial.output.token_ids) / trial.seconds


def _by_category(ratios: Sequence[float], categories: Sequence[str]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for ratio, category in zip(ratios, categories, strict=True):
        groups.setdefault(category, []).append(ratio)
    return {category: geometric_mean(group) for category, group in groups.items()}


def _bootstrap(ratios: Sequence[float], categories: Sequence[str], seed: int) -> tuple[float, float]:
    """Percentile interval over resampled prompts within each category."""
    rng = random.Random(seed)  # noqa: S311 - resampling, no secret
    groups: dict[str, list[float]] = {}
    for ratio, category in zip(ratios, categories, strict=True):
        groups.setdefault(category, []).append(math.log(ratio))
    means = sorted(
        statistics.fmean(statistics.fmean(rng.choices(group, k=len(group))) for group in groups.values())
        for _ in range(_RESAMPLES)
    )
    return math.exp(means[int(0.025 * _RESAMPLES)]), math.exp(means[int(0.975 * _RESAMPLES) - 1])


def _spread(groups: Sequence[Sequence[Trial]]) -> float | None:
    if all(len(group) == 1 for group in groups):
        return None
    times = [[trial.seconds for trial in group] for group in groups]
    return statistics.median((max(seconds) - min(seconds)) / statistics.median(seconds) for seconds in times)


def _counts(trials: Sequence[Trial]) -> Counts | None:
    figures = [trial.output.metrics for trial in trials]
    if any(metrics is None for metrics in figures):
        return None
    widths: Counter[int] = Counter()
    verified: Counter[int] = Counter()
    accepted_at: Counter[int] = Counter()
    for trial in trials:
        metrics = trial.output.metrics
        if metrics is None:
            continue
        widths.update(trial.output.block_widths)
        for position, rate in enumerate(metrics.acceptance_by_position):
            tries = sum(number for width, number in trial.output.block_widths.items() if width > position + 1)
            verified[position] += tries
            accepted_at[position] += round(rate * tries)
    rounds, drafted, admitted, accepted, emitted = (
        sum(getattr(metrics, name) for metrics in figures)
        for name in ("rounds", "drafted", "admitted", "accepted", "emitted")
    )
    return Counts(
        rounds=rounds,
        drafted=drafted,
        admitted=admitted,
        accepted=accepted,
        emitted=emitted,
        mean_accepted_length=emitted / rounds,
        verification_pass_rate=accepted / admitted if admitted else 0.0,
        draft_utilisation=accepted / drafted if drafted else 0.0,
        acceptance_by_position=tuple(accepted_at[position] / verified[position] for position in sorted(verified)),
        verified_by_position=tuple(verified[position] for position in sorted(verified)),
        block_widths=dict(sorted(widths.items())),
    )


def _phases(trials: Sequence[Trial]) -> dict[str, float] | None:
    totals = dict.fromkeys(PHASES, 0.0)
    for trial in trials:
        metrics = trial.output.metrics
        if metrics is None:
            return None
        for name, seconds in metrics.phase_seconds.items():
            totals[name] += seconds
        totals["other"] += trial.seconds - sum(metrics.phase_seconds.values())
    return totals
