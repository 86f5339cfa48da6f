"""Prompt lookup: when the end of the text occurred before, propose what followed it then.

Saxena 2023 ("Prompt Lookup Decoding") searches the text for its last few tokens. Here a suffix automaton finds the
*longest* suffix that occurred before, of any length and in constant time per token, in the request's own text and in
an optional corpus; and the drafter learns from the text itself how far such a continuation can be trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specflow.errors import InvalidSettingError

from .base import DrafterBase, DraftRequest, Proposal, RowId
from .suffix_automaton import ROOT, Corpus, CorpusCursor, Match, SuffixAutomaton
from .survival import HitTable

Selection = Literal["recent", "frequent"]
"""Which continuation is proposed where a suffix occurred more than once."""

SELECTIONS: tuple[Selection, ...] = ("recent", "frequent")

# A prediction's bucket is its source, its kind and its match length; these are the three that predict its fate.
OWN_TEXT, CORPUS = range(2)
SEEN_ONCE, UNANIMOUS, DIVIDED = range(3)
LENGTHS = (1, 2, 3, 4, 6, 10, 16, 32)
"""Upper ends of the match length buckets; longer matches share one more bucket."""
BUCKETS_PER_KIND = len(LENGTHS) + 1
BUCKETS_PER_SOURCE = 3 * BUCKETS_PER_KIND

NOTHING = Proposal(())


def prior_rate(bucket: int) -> float:
    """The hit rate assumed for a bucket before anything is learned.

    Laplace's rule of succession: a context of m tokens that has predicted the next one is m successes in m trials,
    hence (m + 1) / (m + 2) if the first token were a prediction too. It is not, so m / (m + 2) is taken, and half of it
    where the text already continued in more than one way.
    """
    kind, index = divmod(bucket % BUCKETS_PER_SOURCE, BUCKETS_PER_KIND)
    length = (*LENGTHS, 2 * LENGTHS[-1])[index]
    return length / (length + 2) / (2 if kind == DIVIDED else 1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The continuation that a row's text suggests now."""

    automaton: SuffixAutomaton
    """Where the match was found: the row's own text or the corpus."""
    match: Match
    first_bucket: int
    """First bucket of the source."""
    bucket: int
    """What kind of prediction it is."""
    token: int
    """The next token."""


@dataclass(slots=True)
class Row:
    """State of one request; it changes with every committed token."""

    history: SuffixAutomaton
    cursor: CorpusCursor | None
    prediction: Prediction | None = None


class NGramDrafter(DrafterBase):
    """Proposes the continuation of the longest suffix that occurred before, in the own text or in a corpus.

    The longer match wins, the own text on ties. Periodic text is continued without end: a copy that reaches the end of
    the text goes on reading what it has just written.

    ``survival[k]`` is the product of learned hit rates. After every committed token the drafter predicts the next one;
    when it is known, whether drafted or not, the prediction's kind scores a hit or a miss. The kind is the source, the
    match length, and whether the matched suffix occurred once, several times with one continuation, or with several.
    Prompts are not scored: how often a prompt repeats itself says little about how often a model repeats it. The rates
    are shared by all requests, so a new one starts with what earlier ones taught.

    The estimate for token k is computed from the text and from tokens 0..k-1 of the draft, never from token k, so a
    policy may schedule by it. (Lookup is deterministic and its tokens carry no probabilities, so that they are
    verified by a rule that is exact for any choice; the estimate would be safe even otherwise.)

    Args:
        selection: among several occurrences of the longest suffix, continue like the most recent one, or with the
            most frequent next token, token by token (the most recent among equals).
        min_match: ignore matches of fewer tokens; >= 1.
        max_match: take matches longer than this as equal, which bounds the cost per token; >= ``min_match``.
        corpus: token id sequences of the target's vocabulary to look things up in as well, the most relevant last.
            They are read once, here.
        decay: how fast hit rates forget; see :class:`~specflow_llm.drafters.survival.HitTable`.

    Raises:
        InvalidSettingError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        selection: Selection = "recent",
        min_match: int = 1,
        max_match: int = 16,
        corpus: Iterable[Sequence[int]] = (),
        decay: float = 0.995,
    ) -> None:
        if selection not in SELECTIONS:
            raise InvalidSettingError("selection", selection, f"one of {SELECTIONS}")
        if min_match < 1:
            raise InvalidSettingError("min_match", min_match, "an integer >= 1")
        if max_match < min_match:
            raise InvalidSettingError("max_match", max_match, f"an integer >= min_match ({min_match})")
        self._selection = selection
        self._min_match = min_match
        self._max_match = max_match
        self._corpus = Corpus(corpus, max_match)
        self._hit_table = HitTable(prior_rate, decay=decay)
        self._length_bucket = [bisect_left(LENGTHS, length) for length in range(max_match + 1)]
        self._rows: dict[RowId, Row] = {}

    @property
    def name(self) -> str:
        """``"ngram"``."""
        return "ngram"

    @property
    def hit_table(self) -> HitTable:
        """What has been learned so far, shared by all requests."""
        return self._hit_table

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Look up the continuation of every request; empty where the last token is new or the limit is 0."""
        return [self._propose(request) for request in requests]

    def release(self, row: RowId) -> None:
        """Forget a request's text. What it taught about hit rates stays."""
        self._rows.pop(row, None)

    def state_bytes(self) -> Mapping[str, int]:
        """Estimated bytes of the requests' automata, of the corpus and of the hit rates."""
        return {
            "ngram_history": sum(row.history.num_bytes for row in self._rows.values()),
            "ngram_corpus": self._corpus.automaton.num_bytes if len(self._corpus) else 0,
            "ngram_hit_rates": self._hit_table.num_bytes,
        }

    def _propose(self, request: DraftRequest) -> Proposal:
        # A request that never asks for a draft costs nothing; one that asks again later catches up then.
        if request.limit <= 0:
            return NOTHING
        prediction = self._caught_up(request.row, request.token_ids).prediction
        if prediction is None:
            return NOTHING
        if self._selection == "recent":
            tokens, buckets = self._copy_recent(prediction, request.limit)
        else:
            tokens, buckets = self._chain_frequent(prediction, request.limit)
        return Proposal(tokens, survival=self._hit_table.survival(buckets))

    def _caught_up(self, row_id: RowId, token_ids: Sequence[int]) -> Row:
        """The row's state with all committed tokens read; those after the first call are scored."""
        row = self._rows.get(row_id)
        if row is None:
            row = Row(SuffixAutomaton(self._max_match), CorpusCursor(self._corpus) if len(self._corpus) else None)
            row.history.extend_many(token_ids)
            if row.cursor is not None:
                row.cursor.advance_many(token_ids)
            row.prediction = self._predict(row)
            self._rows[row_id] = row
            return row
        for token in token_ids[len(row.history.tokens) :]:
            if row.prediction is not None:
                self._hit_table.record(row.prediction.bucket, row.prediction.token == token)
            row.history.extend(token)
            if row.cursor is not None:
                row.cursor.advance(token)
            row.prediction = self._predict(row)
        return row

    def _predict(self, row: Row) -> Prediction | None:
        automaton, match, first_bucket = row.history, row.history.match, OWN_TEXT * BUCKETS_PER_SOURCE
        if row.cursor is not None:
            found = row.cursor.match
            if found.length > match.length:
                automaton, match, first_bucket = self._corpus.automaton, found, CORPUS * BUCKETS_PER_SOURCE
        if match.length < self._min_match:
            return None
        bucket = (
            first_bucket + self._kind(automaton, match.state, match.occurrences) + self._length_bucket[match.length]
        )
        token: int | None = automaton.tokens[match.next_index]
        if self._selection == "frequent":
            token = automaton.most_frequent(match.state)
        return None if token is None else Prediction(automaton, match, first_bucket, bucket, token)

    @staticmethod
    def _kind(automaton: SuffixAutomaton, state: int, occurrences: int) -> int:
        """First bucket of the kind of a prediction, within its source."""
        if occurrences == 1:
            return SEEN_ONCE * BUCKETS_PER_KIND
        kind = UNANIMOUS if automaton.num_continuations(state) == 1 else DIVIDED
        return kind * BUCKETS_PER_KIND

    def _copy_recent(self, prediction: Prediction, limit: int) -> tuple[list[int], list[int]]:
        """Copy from after the most recent occurrence; with each token the match grows by one.

        If w is followed by x at its most recent occurrence, that is also where wx occurred most recently. So the copy
        is what looking up every token anew would give, the draft so far included, with a match that may grow past
        ``max_match`` inside the draft.
        """
        automaton, match = prediction.automaton, prediction.match
        tokens = automaton.copy(match.next_index, limit)
        buckets = [prediction.bucket]
        state: int | None = match.state
        kind = self._kind(automaton, match.state, match.occurrences)
        for length, token in enumerate(tokens[:-1], start=match.length + 1):
            # Past the end of the text there is nothing to look up; the copy stays what it was.
            state = None if state is None else automaton.step(state, token)
            if state is not None:
                kind = self._kind(automaton, state, automaton.occurrences(state))
            buckets.append(prediction.first_bucket + kind + self._length_bucket[min(length, self._max_match)])
        return tokens, buckets

    def _chain_frequent(self, prediction: Prediction, limit: int) -> tuple[list[int], list[int]]:
        """Take the most frequent continuation of the longest suffix that has one, again and again."""
        automaton, match = prediction.automaton, prediction.match
        tokens, buckets = [prediction.token], [prediction.bucket]
        state, length = automaton.step(match.state, prediction.token), match.length + 1
        while state is not None and len(tokens) < limit:
            token = automaton.most_frequent(state)
            if token is None:  # the end of the text, or of a sequence of the corpus: a shorter suffix may go on
                state, length = automaton.shorter(state)
                if state == ROOT:
                    break
                continue
            length = min(length, self._max_match)
            kind = self._kind(automaton, state, automaton.occurrences(state))
            tokens.append(token)
            buckets.append(prediction.first_bucket + kind + self._length_bucket[length])
            state, length = automaton.step(state, token), length + 1
        return tokens, buckets
