"""The public face as a type checker sees it. This file is checked by mypy and never run.

Each function uses the library as a user would; an annotation that becomes wrong or vague fails ``make check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from specflow.admission import Frontier
from specflow.chain import ChainLoop, run_sync
from specflow.errors import DefinitionError, SpecflowError
from specflow.protocols import ChainBackend, Clock, Observer, Policy
from specflow.types import AcceptPrefix, Admission, ChainId, ChainView, Draft, Mode, Round, RoundReport
from specflow_llm import LLM, Completion, DrafterBase, DraftRequest, Proposal, SamplingParams, Speculation, StreamChunk
from specflow_llm.drafters import Drafter


class HalfOfTheRoom:
    """A policy of a user's own: no base class, only the three methods."""

    def limits(self, chains: Sequence[ChainView]) -> list[int]:
        """Draft half of what fits."""
        return [chain.max_draft // 2 for chain in chains]

    def admit(self, frontier: Frontier) -> None:
        """Execute everything."""
        frontier.admit_all()

    def observe(self, report: RoundReport) -> None:
        """Learn nothing."""


class Counter:
    """An observer of a user's own."""

    def __init__(self) -> None:
        self.emitted = 0

    def on_round(self, report: RoundReport) -> None:
        """Count the items that became history."""
        self.emitted += sum(report.emitted)


class Letters:
    """A backend of a user's own over strings."""

    def chains(self) -> Sequence[ChainView]:
        """One chain."""
        return [ChainView(ChainId(0), position=0, max_draft=4)]

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[str]]:
        """Guess the letter a."""
        return [Draft(values="a" * limit) for limit in limits]

    async def execute(self, drafts: Sequence[Draft[str]], admission: Admission) -> object:
        """Nothing to run."""
        return drafts, admission

    async def verify(
        self, drafts: Sequence[Draft[str]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[str]]:
        """Accept nothing."""
        return [AcceptPrefix(num_accepted=0, replacement="b") for _ in drafts]

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Emit the replacements."""
        return [[verdict.replacement] if verdict.replacement else [] for verdict in verdicts]

    def discard(self) -> None:
        """Nothing to undo."""


def core(clock: Clock) -> None:
    """The block loop keeps the backend's item type."""
    backend: ChainBackend[str] = Letters()
    policy: Policy = HalfOfTheRoom()
    observer: Observer = Counter()
    loop = ChainLoop(backend, policy, [observer], clock)
    assert_type(run_sync(loop.round()), Round[str] | None)
    assert_type(run_sync(loop.run()), int)
    try:
        run_sync(loop.run())
    except DefinitionError as error:
        caught: ValueError = error
        also: SpecflowError = error
        del caught, also


class RepeatLast(DrafterBase):
    """A drafter of a user's own."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Guess that the last token comes again."""
        return [Proposal(token_ids=[request.token_ids[-1]] * request.limit) for request in requests]


def decoding() -> None:
    """Prompts of every kind go in; completions and chunks come out."""
    drafter: Drafter = RepeatLast()
    llm = LLM(
        "smollm2-135m-instruct",
        dtype="auto",
        device="auto",
        speculation=Speculation(drafter=drafter, max_draft_tokens=4, policy=HalfOfTheRoom()),
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=7, stop=["\n\n"])
    assert_type(llm.generate("text", params), list[Completion])
    assert_type(llm.generate(["text", "more text"], [params, params]), list[Completion])
    assert_type(llm.generate([1, 2, 3]), list[Completion])
    assert_type(llm.generate([{"role": "user", "content": "hello"}]), list[Completion])
    for chunk in llm.stream("text", params):
        assert_type(chunk, StreamChunk)
    completion = llm.generate("text", params)[0]
    assert_type(completion.text, str)
    assert_type(completion.token_ids, tuple[int, ...])
    assert_type(completion.finish_reason, str)
    assert_type(completion.mode, Mode)
    assert_type(completion.metrics.mean_accepted_length, float)
