"""A suffix automaton over token ids that grows as text is committed, and finds where its end occurred before.

The automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text") has one state per class
of substrings that end at the same positions, at most two states per token, and is extended in amortised constant time.
The longest suffix that occurred before is the suffix link of the newest state. Walking the links from there marks two
more facts in every state that the end of the text belongs to:

* where its most recent occurrence ended, so that the continuation is one look-up away;
* how often it occurred, so that the most frequent continuation can be told from the most recent one.

In "aaaa..." the chain of links is as long as the text, and walking it for every token would be quadratic. (Larsson
2014, "Most recent match queries in on-line suffix trees", pays a logarithm instead.) Matches are therefore cut at
``max_match`` tokens: every answer is exact for the longest suffix *of at most that many tokens*, and the walk takes at
most ``max_match + 1`` steps. In natural text it takes about four.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specflow.errors import InvalidSettingError

ROOT = 0
"""The state of the empty string."""
BYTES_PER_TOKEN = 8
"""A slot in the list of tokens; the integers themselves belong to whoever made them."""
BYTES_PER_STATE = sys.getsizeof({0: 0}) + 5 * 8 + 3 * sys.getsizeof(2**20)
"""A dict of transitions, a slot in each of five lists, and the integers that a state does not share with others."""


class Match(NamedTuple):
    """A suffix that occurred earlier, and where."""

    state: int
    """The automaton's state of the suffix; :data:`ROOT` when there is no match."""
    length: int
    """Length of the suffix in tokens; 0 when there is no match."""
    next_index: int
    """Index, in the automaton's tokens, of the token that followed its most recent earlier occurrence."""
    occurrences: int
    """How often it occurred earlier; occurrences may overlap."""


class SuffixAutomaton:
    """Every substring of a growing text, with its most recent end and its number of occurrences.

    Args:
        max_match: longest suffix that is looked for, in tokens; >= 1.

    Raises:
        InvalidSettingError: ``max_match`` is below 1.
    """

    __slots__ = (
        "_counts",
        "_last",
        "_lengths",
        "_links",
        "_match_length",
        "_match_state",
        "_recent",
        "_seen",
        "_shown",
        "_transitions",
        "max_match",
        "tokens",
    )

    def __init__(self, max_match: int) -> None:
        if max_match < 1:
            raise InvalidSettingError("max_match", max_match, "an integer >= 1")
        self.max_match = max_match
        self.tokens: list[int] = []
        """The text. Read it; only :meth:`extend` may write it."""
        self._transitions: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]  # of the longest string in the state
        self._recent = [0]  # index after the most recent occurrence; 0: none that goes on
        self._counts = [0]
        self._last = ROOT  # the state of the whole text
        # The match cut one token later than the one that is shown, because the count of a continuation is the count of
        # a string one token longer. Every state whose shortest string has at most max_match + 1 tokens is kept marked.
        self._match_state = ROOT
        self._match_length = 0
        # The match that is shown, and what its state knew before the newest position was marked.
        self._shown = ROOT
        self._seen = (0, 0)

    @property
    def match(self) -> Match:
        """The longest suffix of the text, up to ``max_match`` tokens, that also occurred earlier."""
        next_index, occurrences = self._seen
        return Match(self._shown, min(self._match_length, self.max_match), next_index, occurrences)

    @property
    def num_states(self) -> int:
        """Number of states, the root included; at most twice the number of tokens."""
        return len(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Estimate of the bytes held. Natural text is assumed: most states have few transitions."""
        return BYTES_PER_STATE * len(self._lengths) + BYTES_PER_TOKEN * len(self.tokens)

    def extend(self, token: int, *, goes_on: bool = True) -> None:
        """Append one token.

        Amortised O(1) for the automaton plus a walk over at most ``max_match + 1`` states.

        Args:
            token: any integer.
            goes_on: False where a later match must not be continued past this token.
        """
        self.tokens.append(token)
        state = self._append(token)
        self._follow(token, self._links[state])
        self._mark(state, goes_on=goes_on)

    def extend_many(self, tokens: Iterable[int]) -> None:
        """Append tokens in order."""
        for token in tokens:
            self.extend(token)

    def step(self, state: int, token: int) -> int | None:
        """The state after reading ``token``, for the longest string of at most ``max_match`` tokens; None if unseen."""
        target = self._transitions[state].get(token)
        return None if target is None else self._cut(target, self.max_match)

    def read(self, state: int, length: int, token: int) -> tuple[int, int]:
        """State and length of the longest suffix, after one more token, that occurs; (:data:`ROOT`, 0) for none.

        Matching statistics by suffix links (Chang and Lawler 1994, "Sublinear approximate string matching and
        biological applications", section 3): a step adds at most one token to the match, and every link that is
        followed takes one or more away.

        Args:
            state: of the suffix so far.
            length: of the suffix so far, in tokens.
            token: the next one.
        """
        target = self.step(state, token)
        while target is None and state != ROOT:
            state, length = self.shorter(state)
            target = self.step(state, token)
        return (ROOT, 0) if target is None else (target, min(length + 1, self.max_match))

    def continuations(self, state: int, length: int, most: int) -> Iterator[tuple[int, int]]:
        """Tokens that followed a suffix, or a shorter one of at least one token, each with the longest it was found at.

        Args:
            state: of the suffix.
            length: of the suffix, in tokens.
            most: continuations looked at of each suffix, those seen first most recently; others may be found at a
                shorter one.
        """
        found: set[int] = set()
        while state != ROOT:
            transitions = self._transitions[state]
            for token in transitions if len(transitions) <= most else list(transitions)[-most:]:
                if token not in found:
                    found.add(token)
                    yield token, length
            state, length = self.shorter(state)

    def shorter(self, state: int) -> tuple[int, int]:
        """The state and length of the longest suffix that occurred in other places too."""
        link = self._links[state]
        return link, self._lengths[link]

    def occurrences(self, state: int) -> int:
        """How often the strings of a state occurred, the end of the text included."""
        return self._counts[state]

    def next_index(self, state: int) -> int:
        """Index of the token after the most recent occurrence, the end of the text included; 0 if none goes on."""
        return self._recent[state]

    def num_continuations(self, state: int) -> int:
        """How many different tokens followed the strings of a state."""
        return len(self._transitions[state])

    def copy(self, start: int, limit: int) -> list[int]:
        """Copy ``limit`` tokens from index ``start`` on, reading into the copy itself past the end of the text.

        With a start d tokens before the end the copy is periodic with period d, as in Lempel-Ziv decoding. It ends
        early at a negative token (the separators of a :class:`Corpus`).
        """
        copied = self.tokens[start : start + limit]
        period = len(copied)
        while len(copied) < limit:
            copied.append(copied[-period])
        if min(copied) < 0:
            del copied[next(index for index, token in enumerate(copied) if token < 0) :]
        return copied

    def most_frequent(self, state: int) -> int | None:
        """The token that followed the strings of a state most often; the most recently seen one among equals."""
        best, best_key = None, (0, 0)
        for token, target in self._transitions[state].items():
            key = (self._counts[target], self._recent[target])
            if key > best_key and token >= 0:
                best, best_key = token, key
        return best

    def _append(self, token: int) -> int:
        """Add the state of the whole text (Blumer et al., procedure ``update``) and return it."""
        transitions, links, lengths = self._transitions, self._links, self._lengths
        suffix = self._last
        self._last = state = len(lengths)
        transitions.append({})
        lengths.append(lengths[suffix] + 1)
        self._recent.append(0)
        self._counts.append(0)
        while suffix >= 0 and token not in transitions[suffix]:
            transitions[suffix][token] = state
            suffix = links[suffix]
        if suffix < 0:
            links.append(ROOT)
            return state
        target = transitions[suffix][token]
        links.append(target)
        if lengths[target] != lengths[suffix] + 1:
            links[state] = self._split(suffix, token, target)
        return state

    def _split(self, suffix: int, token: int, target: int) -> int:
        """Give the strings of ``target`` that end here too a state of their own (``split``) and return it."""
        transitions, links, lengths = self._transitions, self._links, self._lengths
        half = len(lengths)
        transitions.append(transitions[target].copy())
        links.append(links[target])
        lengths.append(lengths[suffix] + 1)
        # Until the newest position is marked, both halves have occurred at the same places.
        self._recent.append(self._recent[target])
        self._counts.append(self._counts[target])
        links[target] = half
        while suffix >= 0 and transitions[suffix].get(token) == target:
            transitions[suffix][token] = half
            suffix = links[suffix]
        return half

    def _cut(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a state's strings (or the state itself where they are shorter)."""
        links, lengths = self._links, self._lengths
        while state != ROOT and lengths[links[state]] >= length:
            state = links[state]
        return state

    def _follow(self, token: int, longest: int) -> None:
        """Move the match on: ``longest`` is the state of the longest suffix that occurred earlier, of any length."""
        cut = self.max_match + 1
        length = self._lengths[longest]
        if length < cut:
            self._match_state = self._shown = longest
            self._match_length = length
            return
        if length > cut:
            # The previous match was cut too, or had exactly that length, and goes on with this token.
            longest = self._transitions[self._match_state][token]
        self._match_state = self._cut(longest, cut)
        self._match_length = cut
        self._shown = self._cut(longest, self.max_match)

    def _mark(self, state: int, *, goes_on: bool) -> None:
        """Note in every state that the end of the text belongs to, up to the cut, that it occurred here."""
        recent, counts, links = self._recent, self._counts, self._links
        self._seen = recent[self._shown], counts[self._shown]
        if self._match_length > self.max_match:
            state = self._match_state
        end = len(self.tokens)
        while state != ROOT:
            if goes_on:
                recent[state] = end
            counts[state] += 1
            state = links[state]


class Corpus:
    """Token sequences that many requests may look things up in: one automaton, built once and then only read.

    Args:
        sequences: token id sequences, the most relevant last (the most recent occurrence is the last one). No match
            and no continuation crosses from one sequence into another.
        max_match: longest suffix that is looked for, in tokens; >= 1.

    Raises:
        InvalidSettingError: ``max_match`` is below 1, or a sequence holds a negative id.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], max_match: int) -> None:
        self.automaton = SuffixAutomaton(max_match)
        for number, sequence in enumerate(sequences, start=1):
            if len(sequence) == 0:
                continue
            if min(sequence) < 0:
                raise InvalidSettingError("corpus", min(sequence), "token ids >= 0")
            self.automaton.extend_many(sequence[:-1])
            self.automaton.extend(sequence[-1], goes_on=False)
            self.automaton.extend(-number, goes_on=False)  # a separator that occurs once, so that nothing matches it

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return len(self.automaton.tokens)


class CorpusCursor:
    """The longest suffix of a stream of tokens that occurs in a corpus; amortised O(1) per token."""

    __slots__ = ("_automaton", "_length", "_state")

    def __init__(self, corpus: Corpus) -> None:
        self._automaton = corpus.automaton
        self._state = ROOT
        self._length = 0

    @property
    def match(self) -> Match:
        """The longest suffix, up to ``max_match`` tokens, that occurs in the corpus and goes on there."""
        automaton, state, length = self._automaton, self._state, self._length
        while state != ROOT and automaton.next_index(state) == 0:
            state, length = automaton.shorter(state)
        return Match(state, length, automaton.next_index(state), automaton.occurrences(state))

    def advance(self, token: int) -> None:
        """Read one token of the stream."""
        self._state, self._length = self._automaton.read(self._state, self._length, token)

    def advance_many(self, tokens: Iterable[int]) -> None:
        """Read tokens in order."""
        for token in tokens:
            self.advance(token)
