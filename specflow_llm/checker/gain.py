"""What a drafter saves on a model: counts first, then seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow.trees import reach
from specflow.types import RoundReport

from ..config import SamplingParams, Speculation
from ..llm import LLM, Prompt
from .harness import WatchedDrafter
from .report import Gain

DEFAULT_TEXTS: tuple[str, ...] = (
    "Repeat this list three times: apple, banana, cherry, date, elderberry.",
    "Write this function again with better names:\n\ndef f(a, b):\n    c = a + b\n    d = c * 2\n    return d\n",
    "Name three things that people like about the sea, and say why.",
)
"""Prompts for models with a tokenizer: copying, editing, and free text."""


@dataclass(slots=True)
class RoundLog:
    """Keeps every finished round."""

    reports: list[RoundReport] = field(default_factory=list)

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        self.reports.append(report)

    @property
    def mean_seconds(self) -> float:
        """Seconds per round."""
        return sum(report.seconds.total for report in self.reports) / max(1, len(self.reports))


def acceptance_by_position(reports: Sequence[RoundReport]) -> tuple[float, ...]:
    """Entry k: of the drafts verified at position k (of trees, at depth k), the fraction accepted there."""
    verified: list[int] = []
    hits: list[int] = []
    for report in reports:
        for index, accepted in enumerate(report.accepted):
            reached = reach(report, index)
            grow = max(0, reached - len(verified))
            verified += [0] * grow
            hits += [0] * grow
            for position in range(reached):
                verified[position] += 1
                hits[position] += position < accepted
    return tuple(hit / tries for hit, tries in zip(hits, verified, strict=True))


def _claimed(report: RoundReport) -> float:
    """Accepted tokens that the estimates promised."""
    return sum(
        float(admitted) if survival is None else sum(survival[:admitted])
        for admitted, survival in zip(report.admitted, report.survival, strict=True)
    )


def measure_gain(
    drafter: WatchedDrafter,
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    max_draft_tokens: int,
    is_real_model: bool,
    tree: bool = False,
) -> Gain:
    """Decode prompts with and without the drafter, one request at a time, in turns after a warm-up.

    Args:
        drafter: who drafts.
        model: the target.
        tokenizer: None with prompts of ids.
        prompts: what to complete.
        max_tokens: tokens per completion.
        max_draft_tokens: draft length, the same in every round.
        is_real_model: see :class:`~specflow_llm.checker.Gain`.
        tree: let drafts branch.
    """
    plain_log, log = RoundLog(), RoundLog()
    policy = Fixed(max_draft_tokens)
    speculation = Speculation(drafter=drafter, max_draft_tokens=max_draft_tokens, policy=policy, tree=tree)
    plain = LLM(model, tokenizer=tokenizer, speculation=None, check_model=False, observers=[plain_log])
    speculative = LLM(model, tokenizer=tokenizer, speculation=speculation, check_model=False, observers=[log])
    for llm in (plain, speculative):
        llm.generate([prompts[0]], SamplingParams(max_tokens=min(8, max_tokens)))
    plain_log.reports.clear()
    log.reports.clear()
    for prompt in prompts:
        for llm in (plain, speculative):
            llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
    reports = log.reports
    return Gain(
        model=plain.name,
        is_real_model=is_real_model,
        draft_tokens=max_draft_tokens,
        trees=tree,
        rounds=len(reports),
        emitted=sum(sum(report.emitted) for report in reports),
        drafted=sum(sum(report.drafted) for report in reports),
        admitted=sum(sum(report.admitted) for report in reports),
        accepted=sum(sum(report.accepted) for report in reports),
        claimed=sum(_claimed(report) for report in reports),
        acceptance_by_position=acceptance_by_position(reports),
        draft_seconds=sum(report.seconds.predict for report in reports),
        plain_round_seconds=plain_log.mean_seconds,
        round_seconds=log.mean_seconds,
    )
