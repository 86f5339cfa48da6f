"""Run an engine over a batch of prompts, with a clock that makes every policy deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow.protocols import Policy
from specflow.types import RoundReport
from specflow_llm import Completion, Drafter, Engine, EngineConfig, SamplingParams
from specflow_llm.architecture import inspect_model
from specflow_llm.config import Verification
from specflow_llm.selfcheck import build_target
from specflow_llm.target import Target


class TickingClock:
    """Every reading is a millisecond after the last one."""

    def __init__(self) -> None:
        self._ticks = 0

    def __call__(self) -> float:
        """Seconds."""
        self._ticks += 1
        return self._ticks * 1e-3


@dataclass(slots=True)
class RoundLog:
    """Remembers every round."""

    reports: list[RoundReport] = field(default_factory=list)

    def on_round(self, report: RoundReport) -> None:
        """Keep it."""
        self.reports.append(report)


@dataclass(frozen=True, slots=True)
class Run:
    """What came out."""

    completions: list[Completion]
    """In order of submission."""
    reports: list[RoundReport]
    engine: Engine

    @property
    def outputs(self) -> list[list[int]]:
        """Generated ids, in order of submission."""
        return [list(completion.token_ids) for completion in self.completions]

    @property
    def admitted(self) -> int:
        """Drafted tokens that were verified, over all requests."""
        return sum(completion.metrics.admitted for completion in self.completions)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted, over all requests."""
        return sum(completion.metrics.accepted for completion in self.completions)


def make_engine(
    model: PreTrainedModel,
    *,
    drafter: Drafter | None = None,
    policy: Policy | None = None,
    target: Target | None = None,
    log: RoundLog | None = None,
    prefill_chunk: int = 512,
    max_batch_size: int = 32,
    verification: Verification = "auto",
) -> Engine:
    """An engine over a model (or over a target of its own), without tokenizer and self-check."""
    if target is None:
        layers = () if drafter is None else drafter.feature_layers
        target = build_target(
            model, inspect_model(model), feature_layers=layers, check=False, prefill_chunk=prefill_chunk, trees=True
        )
    return Engine(
        target,
        drafter,
        policy or Fixed(0),
        EngineConfig(max_batch_size=max_batch_size, verification=verification),
        observers=[] if log is None else [log],
        clock=TickingClock(),
    )


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    params: Any = None,
    **settings: Any,
) -> Run:
    """Decode a batch to its end.

    Args:
        model: the target.
        prompts: token ids.
        budgets: ``max_tokens`` of each request.
        params: further fields of every request's :class:`SamplingParams`, as a dict.
        settings: see :func:`make_engine`.
    """
    log = RoundLog()
    engine = make_engine(model, log=log, **settings)
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=budget, **(params or {})))
        for prompt, budget in zip(prompts, budgets, strict=True)
    ]
    done: dict[int, Completion] = {}
    while engine.num_unfinished:
        for update in engine.step():
            if update.completion is not None:
                done[update.request_id] = update.completion
    return Run([done[request] for request in requests], log.reports, engine)
