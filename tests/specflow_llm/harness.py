"""Engines for tests: targets whose law is written down, an auditor that looks at every round, and a driver.

A network is needed to test parity with a network. Where the question is what the engine does with given logits, a table
is faster, and its law is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow.types import RoundReport
from specflow_llm import Completion, Drafter, Engine, EngineConfig, SamplingParams
from specflow_llm.architecture import Architecture, StateKind, inspect_model
from specflow_llm.engine import Update
from specflow_llm.target import SlotTarget, TargetOutput

SURE = 50.0
"""A logit that leaves nothing to chance: exp(-50) of the mass is elsewhere."""

Law = Callable[[tuple[int, ...]], torch.Tensor]
"""Ids so far -> [V] logits of the next token."""


class LawTarget:
    """A target that computes its logits from a law. Implements :class:`specflow_llm.target.Target`.

    It keeps the very ids that were run and kept, so that a test can compare them with what the engine committed.
    """

    def __init__(self, law: Law, vocab_size: int, *, context_length: int | None = None) -> None:
        self.architecture = Architecture(
            name="LawTarget",
            state_kind=StateKind.SLOTS,
            cache_argument="cache",
            layer_types=("full_attention",),
            masks_by_type=False,
            sliding_window=None,
            chunk_size=None,
            additive_masks=False,
            switches_attention=False,
            can_limit_logits=False,
            vocab_size=vocab_size,
            context_length=context_length,
        )
        self.num_forwards = 0
        self.held: list[list[int]] = []
        """Per slot, the ids whose positions are committed."""
        self._law = law
        self._blocks: Sequence[Sequence[int]] = ()

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Take the prompts in."""
        self.held.extend(list(prompt[:-1]) for prompt in prompts)
        return [None] * len(prompts)

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """[B, T, V] logits after each token of each block; NaN where a block is shorter than the widest."""
        assert len(blocks) == len(self.held)
        self.num_forwards += 1
        self._blocks = blocks
        vocab = self.architecture.vocab_size
        logits = torch.full((len(blocks), max(map(len, blocks)), vocab), torch.nan)
        for slot, block in enumerate(blocks):
            for offset in range(len(block)):
                logits[slot, offset] = self._law((*self.held[slot], *block[: offset + 1]))
        return TargetOutput(logits, None)

    def keep(self, slot: int, count: int) -> None:
        """Commit the first ``count`` tokens of the slot's block."""
        assert 0 <= count <= len(self._blocks[slot])
        self.held[slot].extend(self._blocks[slot][:count])

    def close(self, slot: int) -> None:
        """The last slot takes the closed one's place."""
        last = self.held.pop()
        if slot < len(self.held):
            self.held[slot] = last

    def length(self, slot: int) -> int:
        """Committed positions of a slot."""
        return len(self.held[slot])

    def state_bytes(self) -> dict[str, int]:
        """Nothing worth counting."""
        return {}


def scripted(sequence: Sequence[int], vocab_size: int, *, context_length: int | None = None) -> LawTarget:
    """A target that continues every prompt by ``sequence`` (prompt included), position by position, for sure."""

    def law(ids: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(vocab_size)
        logits[sequence[len(ids)] if len(ids) < len(sequence) else 0] = SURE
        return logits

    return LawTarget(law, vocab_size, context_length=context_length)


class Audit:
    """An observer that compares all parts of the engine's state after every round."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []
        self.engine: Engine | None = None

    def on_round(self, report: RoundReport) -> None:
        """Ids, target state, log-probabilities and figures agree on what is committed."""
        self.reports.append(report)
        assert self.engine is not None
        backend = self.engine.backend
        for slot, row in enumerate(backend.rows):
            held: Any = backend.target
            assert held.length(slot) == len(row.token_ids) - 1
            if isinstance(held, LawTarget):
                assert held.held[slot] == row.token_ids[:-1]
            assert row.metrics.emitted == row.num_output
            assert len(row.logprobs) == (0 if row.params.logprobs is None else row.num_output)
        assert len(report.emitted) == len(backend.rows)


def make_engine(
    target: LawTarget | PreTrainedModel,
    drafter: Drafter | None = None,
    *,
    num_draft: int = 16,
    policy: Any = None,
    config: EngineConfig | None = None,
    tokenizer: Any = None,
    clock: Callable[[], float] | None = None,
) -> Engine:
    """An audited engine. A model is run through the slot cache; the policy drafts ``num_draft`` tokens unless given."""
    if isinstance(target, PreTrainedModel):
        target_state: Any = SlotTarget(target, inspect_model(target))
    else:
        target_state = target
    audit = Audit()
    engine = Engine(
        target_state,
        drafter,
        policy or Fixed(num_draft if drafter is not None else 0),
        config or EngineConfig(),
        tokenizer=tokenizer,
        encode=None if tokenizer is None else lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        observers=(audit,),
        **({} if clock is None else {"clock": clock}),
    )
    audit.engine = engine
    return engine


@dataclass(frozen=True)
class Run:
    """What a request's updates said, beside what its completion says."""

    completion: Completion
    pieces: tuple[str, ...]
    """Streamed text, update by update."""


Request = tuple[Sequence[int], SamplingParams]


def drive(engine: Engine, requests: Iterable[Request], *, max_steps: int = 2000) -> list[Run]:
    """Submit requests, step until all are done, and check that updates and completions tell the same story."""
    ids = [engine.submit(prompt, params) for prompt, params in requests]
    updates: dict[int, list[Update]] = {request: [] for request in ids}
    for _ in range(max_steps):
        if not engine.num_unfinished:
            break
        for update in engine.step():
            updates[update.request_id].append(update)
    assert engine.num_unfinished == 0
    return [collect(updates[request]) for request in ids]


def collect(updates: Sequence[Update]) -> Run:
    """Check one request's updates against its completion."""
    completion = updates[-1].completion
    assert completion is not None
    assert all(update.completion is None for update in updates[:-1])
    assert tuple(token for update in updates for token in update.token_ids) == completion.token_ids
    assert "".join(update.text for update in updates) == completion.text
    assert completion.metrics.emitted == len(completion.token_ids)
    assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    return Run(completion, tuple(update.text for update in updates))


def decode(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """Decode one request."""
    return drive(engine, [(prompt, params)])[0].completion
