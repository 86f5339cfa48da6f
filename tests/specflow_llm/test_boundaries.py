"""Sentence ends are found in committed tokens, and drafts across them are short."""

from __future__ import annotations

from collections.abc import Sequence

from specflow.policies import Boundary, Fixed
from specflow.types import ChainId, ChainView, RoundReport
from specflow_llm import DrafterBase, DraftRequest, Engine, EngineConfig, Proposal, SamplingParams
from specflow_llm.boundaries import SentenceEnds
from tests.specflow_llm.harness import scripted

TEXTS = ["a", " b", ".", '."', " no", "\n", "e.g", "?)"]
"""The text of each token."""


class Words:
    """A tokenizer of eight tokens."""

    def decode(self, token_ids: list[int]) -> str:
        """Their texts, joined."""
        return "".join(TEXTS[token] for token in token_ids)


class Patient(DrafterBase):
    """Proposes as much as it may."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Token 0, again and again."""
        return [Proposal([0] * request.limit) for request in requests]


class Lengths:
    """Keeps how much was drafted, by the number of committed tokens."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []

    def on_round(self, report: RoundReport) -> None:
        """Keep it."""
        self.reports.append(report)


def test_drafts_across_sentence_ends_are_short() -> None:
    """Each round's draft has the full length, but two tokens where the newest committed token ends a sentence."""
    sequence = [0, 1, 2, 4, 1, 3, 1, 1, 5, 1, 6, 7, 1, 1, 1, 1, 1, 1, 1, 1]
    ends = SentenceEnds()
    lengths = Lengths()
    engine = Engine(scripted(sequence, 8), Patient(), Boundary(Fixed(5), ends), EngineConfig(), observers=[lengths])
    ends.watch(engine.backend, Words())
    engine.submit(sequence[:2], SamplingParams(max_tokens=12))
    while engine.num_unfinished:
        engine.step()
    position, seen = 2, []
    for report in lengths.reports:
        seen.append((TEXTS[sequence[position - 1]], report.drafted[0], 13 - position))
        position += report.emitted[0]
    assert len(seen) > 8
    for text, drafted, room in seen:
        wanted = 2 if text in {".", '."', "\n", "?)"} else 5
        assert drafted == min(wanted, room), text


def test_nothing_is_known_before_it_is_told() -> None:
    """Unwatched, or asked about a request that is gone, it names no end."""
    ends = SentenceEnds()
    view = ChainView(ChainId(7), 3, 9)
    assert ends(view) is None
    engine = Engine(scripted([0, 1], 8), None, Fixed(0), EngineConfig())
    ends.watch(engine.backend, Words())
    assert ends(view) is None
