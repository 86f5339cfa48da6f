from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow_llm.drafters.suffix_automaton import ROOT, Corpus, CorpusCursor, Match, SuffixAutomaton

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=48))
LIMITS = st.one_of(st.integers(1, 6), st.just(1000))


def seeded(seed: int) -> random.Random:
    """Pseudo-random numbers that are the same in every run."""
    return random.Random(seed)


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Index after every occurrence of ``part`` in ``text``."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def reference_match(text: Sequence[int], max_match: int) -> tuple[int, int, int]:
    """Length, next index and count of the longest suffix that occurred earlier, by looking everywhere."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        earlier = ends_of(text, text[len(text) - length :])[:-1]
        if earlier:
            return length, earlier[-1], len(earlier)
    return 0, 0, 0


def state_of(automaton: SuffixAutomaton, part: Sequence[int]) -> int | None:
    """The state reached by reading ``part`` from the root."""
    state: int | None = ROOT
    for token in part:
        if state is not None:
            state = automaton.step(state, token)
    return state


def substrings(text: Sequence[int], longest: int) -> set[tuple[int, ...]]:
    """Every different substring of at most ``longest`` tokens, without the empty one."""
    return {
        tuple(text[start : start + size])
        for size in range(1, min(longest, len(text)) + 1)
        for start in range(len(text) - size + 1)
    }


@UNTIMED
@given(TEXTS, LIMITS)
def test_the_match_is_the_longest_earlier_suffix_and_its_most_recent_place(text: list[int], max_match: int) -> None:
    """After every token the match's length, place and count equal those found by searching the whole text."""
    automaton = SuffixAutomaton(max_match)
    for index, token in enumerate(text):
        automaton.extend(token)
        match = automaton.match
        expected = reference_match(text[: index + 1], max_match)
        assert (match.length, match.next_index, match.occurrences) == expected
        assert (match.state == ROOT) is (match.length == 0)


def test_the_reference_tells_first_from_most_recent() -> None:
    """Searching finds the most recent place, so that an automaton that kept the first one would be caught."""
    assert reference_match([1, 2, 3, 1, 2, 4, 1, 2], 8) == (2, 5, 2)


@UNTIMED
@given(TEXTS, st.integers(1, 5))
def test_states_count_their_occurrences(text: list[int], max_match: int) -> None:
    """Reading any substring of up to ``max_match`` tokens leads to its number of occurrences and its last end."""
    automaton = SuffixAutomaton(max_match)
    automaton.extend_many(text)
    for part in substrings(text, max_match):
        state = state_of(automaton, part)
        ends = ends_of(text, part)
        assert state is not None
        assert (automaton.occurrences(state), automaton.next_index(state)) == (len(ends), ends[-1])
        assert automaton.num_continuations(state) == len({text[end] for end in ends if end < len(text)})


@UNTIMED
@given(TEXTS, st.integers(1, 5))
def test_the_most_frequent_continuation_has_the_highest_count(text: list[int], max_match: int) -> None:
    """The proposed token followed the substring most often, and most recently among those that did so as often."""
    automaton = SuffixAutomaton(max_match)
    automaton.extend_many(text)
    for part in substrings(text, max_match):
        state = state_of(automaton, part)
        assert state is not None
        followers = [text[end] for end in ends_of(text, part) if end < len(text)]
        counts = Counter(followers)
        best = [token for token in counts if counts[token] == max(counts.values())]
        last = max(best, key=lambda token: len(followers) - followers[::-1].index(token), default=None)
        assert automaton.most_frequent(state) == last


@UNTIMED
@given(TEXTS)
def test_unseen_substrings_have_no_state(text: list[int]) -> None:
    """Reading a substring that never occurred ends at None."""
    automaton = SuffixAutomaton(1000)
    automaton.extend_many(text)
    assert automaton.step(ROOT, 99) is None
    for part in substrings(text, 4):
        for token in range(4):
            assert (state_of(automaton, (*part, token)) is None) is (not ends_of(text, (*part, token)))


@UNTIMED
@given(TEXTS)
def test_there_are_at_most_two_states_per_token(text: list[int]) -> None:
    """The number of states stays within the bound of Blumer et al.: 2n - 1 states and the root for n > 1."""
    automaton = SuffixAutomaton(4)
    automaton.extend_many(text)
    assert automaton.num_states <= max(2 * len(text), 2)


def fibonacci_word(size: int) -> list[int]:
    """The word whose suffixes repeat in the most entangled way."""
    shorter, word = [0], [0, 1]
    while len(word) < size:
        shorter, word = word, word + shorter
    return word[:size]


HARD_TEXTS: dict[str, Callable[[int], list[int]]] = {
    "constant": lambda size: [0] * size,
    "two runs": lambda size: [0] * (size // 2) + [1] + [0] * (size - size // 2 - 1),
    "many runs": lambda size: ([0] * 63 + [1]) * (size // 64),
    "growing runs": lambda size: [token for run in range(int((2 * size) ** 0.5) + 1) for token in [0] * run + [1]][
        :size
    ],
    "periodic": lambda size: [index % 3 for index in range(size)],
    "fibonacci": fibonacci_word,
    "all different": lambda size: list(range(size)),
    "binary": lambda size: seeded(1).choices((0, 1), k=size),
    "repeated passage": lambda size: seeded(2).choices(range(500), k=size // 4) * 4,
}


def lines_executed(action: Callable[[], object]) -> int:
    """Number of source lines that an action runs: a count of work that no clock disturbs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del frame, argument
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)
    return count


MAX_MATCH = 8
MOST_LINES = 75 + 5 * (MAX_MATCH + 1)


def lines_per_token(text: list[int], max_match: int) -> float:
    """Work of building an automaton."""
    return lines_executed(lambda: SuffixAutomaton(max_match).extend_many(text)) / len(text)


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_the_work_per_token_is_bounded(name: str) -> None:
    """Building takes a bounded number of executed lines per token, and hardly more for a text four times as long.

    A token costs about 40 lines of straight code, 5 for each of at most ``MAX_MATCH + 1`` states that are marked, and
    2 per link that Blumer et al. amortise to a constant.
    """
    short, long = (lines_per_token(HARD_TEXTS[name](size), MAX_MATCH) for size in (512, 2048))
    assert long <= MOST_LINES
    assert long <= 1.2 * short


def test_counting_lines_notices_quadratic_work() -> None:
    """Without a useful cut the walk over the suffixes of a constant text is quadratic, and the bounds above break."""
    short, long = (lines_per_token([0] * size, max_match=size) for size in (128, 512))
    assert long > 5 * MOST_LINES
    assert long > 3 * short


@UNTIMED
@given(TEXTS.filter(bool), st.integers(0, 47), st.integers(1, 40))
def test_a_copy_reads_into_itself(text: list[int], start: int, limit: int) -> None:
    """A copy equals what appending its tokens to the text one by one and reading on gives."""
    start = min(start, len(text) - 1)
    automaton = SuffixAutomaton(4)
    automaton.extend_many(text)
    written = list(text)
    for index in range(limit):
        written.append(written[start + index])
    assert automaton.copy(start, limit) == written[len(text) :]


def test_the_size_estimate_is_close_to_what_python_allocates() -> None:
    """The estimate of the bytes held lies within 15 % of the traced allocations, for text with repeated words."""
    words = [[index * 10 + part for part in range(1 + index % 3)] for index in range(2000)]
    weights = [1 / (index + 1) for index in range(2000)]
    text = [token for word in seeded(3).choices(words, weights, k=3000) for token in word]
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton(16)
        automaton.extend_many(text)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert automaton.num_bytes == pytest.approx(allocated, rel=0.15)


@pytest.mark.parametrize("max_match", [0, -1])
def test_an_empty_match_length_is_refused(max_match: int) -> None:
    """A longest match of no tokens is an invalid setting."""
    with pytest.raises(InvalidSettingError, match="max_match"):
        SuffixAutomaton(max_match)


# --------------------------------------------------------------------------------------------------------------- corpus

CORPORA = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=14), min_size=0, max_size=4)
)


def reference_lookup(corpus: Sequence[Sequence[int]], text: Sequence[int], max_match: int) -> tuple[int, list[int]]:
    """Length of the longest suffix of the text that goes on in the corpus, and its last continuation there."""
    for length in range(min(max_match, len(text)), 0, -1):
        suffix = text[len(text) - length :]
        found = [list(part[end:]) for part in corpus for end in ends_of(part, suffix) if end < len(part)]
        if found:
            return length, found[-1]
    return 0, []


@UNTIMED
@given(CORPORA, TEXTS, LIMITS)
def test_the_cursor_finds_the_longest_suffix_that_goes_on_in_the_corpus(
    sequences: list[list[int]], text: list[int], max_match: int
) -> None:
    """After every token the cursor's length and continuation equal those found by searching each sequence alone."""
    corpus = Corpus(sequences, max_match)
    cursor = CorpusCursor(corpus)
    for index, token in enumerate(text):
        cursor.advance(token)
        match = cursor.match
        length, continuation = reference_lookup(sequences, text[: index + 1], max_match)
        assert match.length == length
        if length:
            assert corpus.automaton.copy(match.next_index, 100) == continuation


def test_a_match_never_crosses_sequences() -> None:
    """The end of one sequence and the start of the next are not one text."""
    cursor = CorpusCursor(Corpus([[1, 2], [3, 4]], 8))
    cursor.advance_many([1, 2, 3])
    assert cursor.match.length == 1
    cursor = CorpusCursor(Corpus([[1, 2], [3, 4]], 8))
    cursor.advance_many([1, 2])
    assert cursor.match == Match(ROOT, 0, 0, 0)


def test_many_cursors_share_a_corpus() -> None:
    """Cursors over one corpus do not disturb each other."""
    corpus = Corpus([[1, 2, 3, 4, 5]], 8)
    left, right = CorpusCursor(corpus), CorpusCursor(corpus)
    for one, other in zip([1, 2, 3], [3, 4, 9], strict=True):
        left.advance(one)
        right.advance(other)
    assert (left.match.length, right.match.length) == (3, 0)


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_the_work_of_a_cursor_per_token_is_bounded(name: str) -> None:
    """Reading a stream against a corpus takes a bounded number of lines per token, whatever the two are."""
    corpus = Corpus([HARD_TEXTS[name](512)], MAX_MATCH)
    for stream in HARD_TEXTS.values():
        tokens = stream(512)
        lines = lines_executed(partial(CorpusCursor(corpus).advance_many, tokens))
        assert lines <= 40 * len(tokens)


def test_empty_sequences_are_skipped_and_negative_ids_refused() -> None:
    """An empty sequence adds nothing; an id below zero cannot be a token."""
    assert len(Corpus([[], []], 4)) == 0
    with pytest.raises(InvalidSettingError, match="corpus=-3"):
        Corpus([[1, -3]], 4)
