"""Settings: frozen, and validated when they are built, so that a mistake is reported before any work starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specflow.errors import InvalidSettingError

from .errors import require

Verification = Literal["auto", "token", "block", "one_hot", "coupled"]
"""Which acceptance rule checks sampled drafts (greedy requests always use the greedy rule).

``auto`` picks the best exact rule for the drafter: ``coupled`` for seeded requests, for drafters without
probabilities and where drafts may branch, ``block`` where the drafter gives the probabilities it sampled from.
"""

VERIFICATIONS: tuple[Verification, ...] = ("auto", "token", "block", "one_hot", "coupled")

POLICIES = ("adaptive", "fixed", "cost_scheduled", "pid")
"""Policies that go by a name."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _items(setting: str, value: object, expected: str) -> tuple[Any, ...]:
    """The items of a sequence setting; a string would be taken apart into its letters, so it is refused."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidSettingError(setting, value, expected)
    return tuple(value)


_BAD_WORDS = "a sequence of words, each a non-empty string or a non-empty sequence of token ids"


def _bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str):
        require(word != "", "bad_words", word, _BAD_WORDS)
        return word
    ids = _items("bad_words", word, _BAD_WORDS)
    require(bool(ids) and all(map(_is_id, ids)), "bad_words", word, _BAD_WORDS)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    max_tokens: int = 128
    """Most tokens to generate; >= 1."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it. Values below 1e-5 count as 0."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one; in [0, 1)."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens already in prompt or output (Keskar et al. 2019, CTRL)."""
    frequency_penalty: float = 0.0
    """Subtract this times a token's count in the output from its logit; in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that occur in the output; in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; -100 all but forbids, +100 all but forces."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Strings (needs a tokenizer) or id sequences that must not be generated."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are impossible, and stop strings ignored, before this many tokens."""
    seed: int | None = None
    """Any integer in [0, 2**63). Under the ``auto`` and ``coupled`` rules the request's tokens then depend on nothing
    but prompt, settings and model; under the ratio rules also on the drafter and the draft lengths."""
    stop: str | Sequence[str] = ()
    """Generation ends before the first occurrence of any of these strings in the output text."""
    include_stop_str: bool = False
    """Keep the stop string in the text."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after any of these tokens, as after an end-of-sequence token."""
    ignore_eos: bool = False
    """Treat end-of-sequence tokens as ordinary ones."""
    logprobs: int | None = None
    """Report the log-probability of each emitted token and of this many most probable ones (0: the emitted only).
    Taken from the model's raw logits, before temperature and processors."""
    logits_processors: Sequence[Callable[[Any, Any], Any]] = ()
    """Hugging Face ``LogitsProcessor`` objects or functions ``(input_ids [1, n], scores [1, V]) -> scores``.
    Called exactly once per emitted token, in order, with or without speculation, so they may keep state. An object that
    may keep state cannot serve two requests at the same time."""
    stopping_criteria: Sequence[Callable[..., Any]] = ()
    """Called after every token with (token_ids [1, n], None) as Hugging Face ``StoppingCriteria``; true ends."""
    max_time: float | None = None
    """Seconds after which the request ends with what it has (finish reason ``deadline``)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in the ids)."""
    speculate: bool = True
    """False switches drafting off for this request. Results of mode ``exact`` have the same tokens either way."""

    def __post_init__(self) -> None:
        """Validate every field; sequences become tuples, so that one-pass iterables and later changes do no harm."""
        self._check_numbers()
        for name in ("include_stop_str", "ignore_eos", "skip_special_tokens", "speculate"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        is_mapping = isinstance(self.logit_bias, Mapping)
        require(is_mapping, "logit_bias", self.logit_bias, "a mapping from token id to number")
        for token, bias in self.logit_bias.items():
            require(_is_id(token) and _is_number(bias), "logit_bias", {token: bias}, "{token id: number}")
        self._settle("logit_bias", dict(self.logit_bias))
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "a string or strings")
        require(all(isinstance(stop, str) and stop for stop in stops), "stop", self.stop, "non-empty strings")
        self._settle("stop", stops)
        ends = _items("stop_token_ids", self.stop_token_ids, "token ids")
        require(all(_is_id(token) for token in ends), "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        self._settle("stop_token_ids", ends)
        self._settle("bad_words", tuple(map(_bad_word, _items("bad_words", self.bad_words, _BAD_WORDS))))
        for name in ("logits_processors", "stopping_criteria"):
            found = _items(name, getattr(self, name), "a sequence of callables")
            require(all(map(callable, found)), name, getattr(self, name), "a sequence of callables")
            self._settle(name, found)

    def _check_numbers(self) -> None:
        at_least_0 = "a number >= 0"
        require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        require(_is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, at_least_0)
        require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(_is_number(self.min_p) and 0 <= self.min_p < 1, "min_p", self.min_p, "a number in [0, 1)")
        require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "a number > 0 (1.0 is off)",
        )  # fmt: skip
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(_is_number(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        require(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0")
        at_most = f"at most max_tokens ({self.max_tokens})"
        require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, at_most)
        require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            "seed", self.seed, "None or an integer in [0, 2**63)",
        )  # fmt: skip
        require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 100),
            "logprobs", self.logprobs, "None or an integer in [0, 100]",
        )  # fmt: skip
        require(
            self.max_time is None or (_is_number(self.max_time) and self.max_time > 0),
            "max_time", self.max_time, "None or seconds > 0",
        )  # fmt: skip

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether and how to draft ahead.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    drafter: Any = "ngram"
    """None, a name (``"ngram"``), the folder of a trained drafter, the path or id of a smaller model, several of these
    joined by ``+`` (``"ngram+my-drafter"`` takes the more promising draft each time, or both; the cheapest first), a
    loaded ``PreTrainedModel``, or any object that implements :class:`specflow_llm.drafters.Drafter`."""
    max_draft_tokens: int = 8
    """Most tokens drafted per request and round, all alternatives counted; 0 is plain decoding."""
    tree: bool = True
    """Let drafters that can do so propose several alternatives for the same place, which are verified together. Happens
    for requests that are verified by matching (greedy and coupled ones), on targets that keep keys and values, under
    any policy but ``"pid"``."""
    policy: Any = "adaptive"
    """``"adaptive"`` (chooses lengths by measured cost and live acceptance, zero included), ``"fixed"``,
    ``"cost_scheduled"`` (times rounds when the model is loaded, then executes what pays by the drafter's confidence),
    ``"pid"`` (steers by acceptance and latency), or any object that implements
    :class:`specflow.protocols.Policy`."""
    verification: Verification = "auto"
    """Acceptance rule for sampled requests."""

    def __post_init__(self) -> None:
        """Validate every field."""
        require(
            _is_int(self.max_draft_tokens) and 0 <= self.max_draft_tokens <= 256,
            "max_draft_tokens", self.max_draft_tokens, "an integer in [0, 256]",
        )  # fmt: skip
        require(isinstance(self.tree, bool), "tree", self.tree, "True or False")
        known = isinstance(self.policy, str) and self.policy in POLICIES
        own = all(callable(getattr(self.policy, method, None)) for method in ("limits", "admit", "observe"))
        own = own and not isinstance(self.policy, type)  # a class has the methods of its instances
        require(known or own, "policy", self.policy, f"{', '.join(map(repr, POLICIES))} or a Policy object")
        require(self.verification in VERIFICATIONS, "verification", self.verification, f"one of {VERIFICATIONS}")
