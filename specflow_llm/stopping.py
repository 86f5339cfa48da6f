"""When a request ends.

Every committed token is looked at on its own, so a block is cut at exactly the token where plain decoding would have
stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from .config import SamplingParams
from .detokenizer import Detokenizer
from .detokenizer import Mark as TextMark


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, a stop string or a custom criterion."""
    LENGTH = "length"
    """``max_tokens`` reached, or the model's context is full."""
    DEADLINE = "deadline"
    """``max_time`` passed."""
    CANCELLED = "cancelled"
    """The caller cancelled it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A request's end."""

    reason: FinishReason
    detail: int | str | None = None
    """The token id or string that stopped it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stopper's past, for :meth:`Stopper.rewind`."""

    count: int
    searched: int
    final: str | None
    text: TextMark | None


class Stopper:
    """Watches one request's output, token by token, and keeps its text.

    Args:
        params: the request's settings.
        eos_token_ids: the model's end-of-sequence ids.
        prompt_ids: the prompt, for custom criteria, which see the whole sequence.
        detokenizer: None when there is no tokenizer; text is then empty.
        max_output: most tokens this request can emit (``max_tokens`` or what the context leaves).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        prompt_ids: Sequence[int],
        detokenizer: Detokenizer | None,
        max_output: int,
    ) -> None:
        self._criteria = params.stopping_criteria
        self._min_tokens = params.min_tokens
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._strings = params.stop_strings
        self._longest = max((len(string) for string in self._strings), default=0)
        self._include = params.include_stop_str
        self._detokenizer = detokenizer
        self._sequence = list(prompt_ids) if self._criteria else []
        self._max_output = max_output
        self._count = 0
        self._searched = 0
        self._streamed = 0
        self._final: str | None = None

    @property
    def text(self) -> str:
        """The text so far; the final text, without the stop string, once :meth:`finish` was called."""
        if self._final is not None:
            return self._final
        return "" if self._detokenizer is None else self._detokenizer.text

    def mark(self) -> Mark:
        """The present, to come back to."""
        text = None if self._detokenizer is None else self._detokenizer.mark()
        return Mark(self._count, self._searched, self._final, text)

    def rewind(self, mark: Mark) -> None:
        """Forget every token accepted since ``mark``."""
        if self._criteria and mark.count < self._count:
            del self._sequence[len(self._sequence) - (self._count - mark.count) :]
        self._count, self._searched, self._final = mark.count, mark.searched, mark.final
        if self._detokenizer is not None and mark.text is not None:
            self._detokenizer.rewind(mark.text)

    def accept(self, token_ids: Sequence[int]) -> tuple[int, Stop | None]:
        """Take newly verified tokens in order.

        Returns:
            How many of them became output (the rest lies behind the stop), and the stop, if one occurred.
        """
        if not self._strings and not self._criteria:
            return self._accept_ids(token_ids)
        for index, token in enumerate(token_ids):
            stop = self._accept_one(token)
            if stop is not None:
                return index + 1, stop
        return len(token_ids), None

    def _accept_ids(self, token_ids: Sequence[int]) -> tuple[int, Stop | None]:
        """The same decisions without text or criteria: one pass over ids, one decode for the block."""
        kept, stop = len(token_ids), None
        for index, token in enumerate(token_ids):
            self._count += 1
            stop = self._stop_by_id(token)
            if stop is not None:
                kept = index + 1
                break
        if self._detokenizer is not None:
            self._detokenizer.push(token_ids[:kept])
        return kept, stop

    def _accept_one(self, token: int) -> Stop | None:
        self._count += 1
        if self._criteria:
            self._sequence.append(token)
        if self._detokenizer is not None:
            self._detokenizer.push([token])
        # Strings and criteria come first: the token that completes one may also be the last one allowed.
        stop = self._stop_by_string()
        if stop is None and self._criteria:
            stop = self._stop_by_criterion()
        return stop if stop is not None else self._stop_by_id(token)

    def _stop_by_criterion(self) -> Stop | None:
        sequence = torch.tensor([self._sequence])
        met = [bool(torch.as_tensor(criterion(sequence, None)).any()) for criterion in self._criteria]
        return Stop(FinishReason.STOP, "criterion") if any(met) else None

    def _stop_by_id(self, token: int) -> Stop | None:
        if token in self._stop_ids and self._count > self._min_tokens:
            return Stop(FinishReason.STOP, token)
        if self._count >= self._max_output:
            return Stop(FinishReason.LENGTH)
        return None

    def _stop_by_string(self) -> Stop | None:
        if not self._strings or self._detokenizer is None:
            return None
        text = self._detokenizer.text
        known, self._searched = self._searched, len(text)
        if self._count <= self._min_tokens:
            return None
        # Only what ends in new text counts: a string that was complete before ``min_tokens`` was passed over for good.
        found = [(text.find(string, max(0, known - len(string) + 1)), string) for string in self._strings]
        hits = sorted(((at, len(string), string) for at, string in found if at >= 0), key=lambda hit: (hit[0], -hit[1]))
        if not hits:
            return None
        at, _, string = hits[0]
        self._final = text[: at + len(string)] if self._include else text[:at]
        return Stop(FinishReason.STOP, string)

    def finish(self) -> None:
        """Settle the text: release an incomplete character, unless a stop string already cut it."""
        if self._final is None:
            if self._detokenizer is not None:
                self._detokenizer.flush()
            self._final = self.text

    def take_delta(self) -> str:
        """Text not handed out yet that no later token can take back.

        While a stop string may be forming at the end of the text, that end is held.
        """
        text = self.text
        safe = len(text) if self._final is not None else len(text) - self._forming(text)
        delta = text[self._streamed : safe]
        self._streamed = max(self._streamed, safe)
        return delta

    def _forming(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
