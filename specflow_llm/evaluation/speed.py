"""Speed against plain decoding: interleaved runs over the same model, medians, geometric means over categories."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..bench.candidates import CandidateInfo, Output
from ..bench.differences import diagnose
from ..bench.measure import Progress, Trial, run_trials, warm_up
from ..bench.summary import geometric_mean, typical_trials
from ..config import Speculation
from ..hub import LoadedModel
from ..llm import LLM
from .lineup import PLAIN, Entrant
from .rollouts import can_branch, rule_for
from .settings import EvaluationSettings


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One way to decode, over all timed prompts. Of repeated runs the one with the median time counts."""

    name: str
    temperature: float
    tokens_per_second: float
    """Whole calls, prefill included."""
    speedup: float
    """Geometric mean over categories of tokens per second against plain decoding of the same prompt."""
    by_category: Mapping[str, float]
    worst_prompt: float
    spread: float | None
    """Median over prompts of (slowest - fastest) / median time of the repeats; None with a single repeat."""
    mean_accepted_length: float
    """With the policy's own draft lengths: less than with everything drafted, where drafting does not pay."""
    mean_admitted: float
    """Draft tokens verified per round."""
    milliseconds_per_round: Mapping[str, float]
    """By phase."""
    identical: int | None
    """Prompts whose tokens equal plain decoding's, in every repeat; None for sampled requests."""
    unexplained: int | None
    """Prompts that differ by more than rounding explains: a bug if not 0."""
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _Timed:
    """One drafter at one temperature, as the benchmark's runner wants it."""

    def __init__(self, name: str, llm: LLM, settings: EvaluationSettings, temperature: float) -> None:
        self.info = CandidateInfo(
            name=name, is_ours=True, is_packed=llm.packed_layers > 0, speculates=name != PLAIN, baseline=PLAIN
        )
        self._llm = llm
        self._settings = settings
        self._temperature = temperature

    def run(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """See :class:`specflow_llm.bench.candidates.Candidate`."""
        del max_tokens  # the settings' own
        done = self._llm.generate([list(prompt)], self._settings.sampling(self._temperature, 0))[0]
        return Output(done.token_ids, done.metrics.target_forwards, done.metrics)


def measure_speed(
    settings: EvaluationSettings,
    loaded: LoadedModel,
    entrants: Sequence[Entrant],
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str],
    *,
    progress: Progress,
    notify: Callable[[str], None] = lambda _message: None,
) -> tuple[list[SpeedRow], list[Trial]]:
    """Time every drafter and plain decoding, at every temperature.

    Args:
        settings: what to do.
        loaded: the target.
        entrants: the drafters.
        prompts: token ids.
        categories: of each prompt.
        progress: told before every timed run.
        notify: told about steps that take long.

    Returns:
        One row per temperature and way to decode, plain decoding first; and all timed runs.
    """
    llms = {PLAIN: LLM(loaded.model, tokenizer=loaded.tokenizer, speculation=None, check_model=False)}
    for entrant in entrants:
        branches = settings.policy != "pid" and can_branch(loaded, entrant.drafter)  # which runs chains
        llms[entrant.name] = LLM(
            loaded.model,
            tokenizer=loaded.tokenizer,
            speculation=Speculation(
                drafter=entrant.drafter,
                max_draft_tokens=settings.draft_tokens,
                policy=settings.policy,
                tree=branches,
                verification=rule_for(entrant.drafter, settings.verification, tree=branches),
            ),
            check_model=False,
        )
    rows: list[SpeedRow] = []
    timed: list[Trial] = []
    for temperature in settings.temperatures:
        notify(f"timing at temperature {temperature:g}")
        candidates = [_Timed(name, llm, settings, temperature) for name, llm in llms.items()]
        warm_up(candidates, prompts[0], settings.max_tokens, progress)
        trials = run_trials(
            candidates,
            prompts,
            max_tokens=settings.max_tokens,
            repeats=settings.repeats,
            device=loaded.model.device,
            progress=progress,
        )
        timed += trials
        rows += summarise_speed(list(llms), trials, categories, temperature=temperature)
        if settings.sampling(temperature, 0).is_greedy:
            rows[-len(llms) :] = [_compared(row, trials, loaded, prompts) for row in rows[-len(llms) :]]
    return rows, timed


def summarise_speed(
    names: Sequence[str], trials: Sequence[Trial], categories: Sequence[str], *, temperature: float
) -> list[SpeedRow]:
    """One row per name; plain decoding must be among them.

    Args:
        names: in the order of the rows.
        trials: all timed runs at this temperature.
        categories: of each prompt.
        temperature: of the requests.
    """
    typical = typical_trials(trials)
    rows = []
    for name in names:
        own = [typical[name, prompt] for prompt in range(len(categories))]
        ratios = [_speed(trial) / _speed(typical[PLAIN, trial.prompt]) for trial in own]
        groups: dict[str, list[float]] = {}
        for ratio, category in zip(ratios, categories, strict=True):
            groups.setdefault(category, []).append(ratio)
        categorised = {category: geometric_mean(group) for category, group in groups.items()}
        metrics = [trial.output.metrics for trial in own if trial.output.metrics is not None]
        rounds = sum(item.rounds for item in metrics)
        phases: dict[str, float] = {}
        for item in metrics:
            for phase, seconds in item.phase_seconds.items():
                phases[phase] = phases.get(phase, 0.0) + 1e3 * seconds / rounds
        rows.append(
            SpeedRow(
                name=name,
                temperature=temperature,
                tokens_per_second=sum(len(trial.output.token_ids) for trial in own)
                / sum(trial.seconds for trial in own),
                speedup=geometric_mean(categorised.values()),
                by_category=categorised,
                worst_prompt=min(ratios),
                spread=_spread([trial for trial in trials if trial.candidate == name], len(categories)),
                mean_accepted_length=sum(item.emitted for item in metrics) / rounds,
                mean_admitted=sum(item.admitted for item in metrics) / rounds,
                milliseconds_per_round=phases,
                identical=None,
                unexplained=None,
                prompts=len(categories),
            )
        )
    return rows


def _compared(
    row: SpeedRow, trials: Sequence[Trial], loaded: LoadedModel, prompts: Sequence[Sequence[int]]
) -> SpeedRow:
    """The row with what became of greedy parity."""
    plain = {trial.prompt: trial.output.token_ids for trial in trials if trial.candidate == PLAIN and not trial.repeat}
    differing: dict[int, bool] = {}
    for trial in trials:
        if trial.candidate == row.name and trial.output.token_ids != plain[trial.prompt]:
            found = diagnose(loaded.model, prompts[trial.prompt], plain[trial.prompt], trial.output.token_ids)
            bad = found is not None and not found.explained_by_rounding
            differing[trial.prompt] = differing.get(trial.prompt, False) or bad
    return replace(row, identical=row.prompts - len(differing), unexplained=sum(differing.values()))


def _speed(trial: Trial) -> float:
    return len(trial.output.token_ids) / trial.seconds


def _spread(trials: Sequence[Trial], num_prompts: int) -> float | None:
    times = [[trial.seconds for trial in trials if trial.prompt == prompt] for prompt in range(num_prompts)]
    if all(len(seconds) == 1 for seconds in times):
        return None
    return statistics.median((max(seconds) - min(seconds)) / statistics.median(seconds) for seconds in times)
