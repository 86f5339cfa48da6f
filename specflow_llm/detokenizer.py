"""Ids to text, incrementally: the concatenation of the pieces is the final text, and no piece ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"  # what decoders put for bytes that do not form a character (yet)


class Decoder(Protocol):
    """**Protocol:** the part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any:
        """Text of these ids."""
        ...


class Detokenizer:
    """Turns a growing list of ids into text.

    A token's text can depend on its predecessors (leading spaces, characters spread over several byte tokens), so each step decodes a short window twice:
    without and with the new tokens; the difference is new text. While the window ends in an incomplete character nothing is released.

    Args:
        tokenizer: decodes ids.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_ids", "_pieces", "_read", "_released", "_skip", "_tokenizer", "_window")

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0  # the window's first token: text before it is settled
        self._read = 0  # tokens whose text has been released
        self._pieces: list[str] = []
        self._released = ""

    @property
    def text(self) -> str:
        """Everything released so far."""
        if self._pieces:
            self._released += "".join(self._pieces)
            self._pieces.clear()
        return self._released

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text they complete (possibly empty)."""
        self._ids.extend(token_ids)
        return self._release(final=False)

    def flush(self) -> str:
        """Release what an incomplete character held back, as the decoder shows it."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        settled = self._decode(self._ids[self._window : self._read])
        current = self._decode(self._ids[self._window :])
        if not final and (current.endswith(_REPLACEMENT) or len(current) <= len(settled)):
            return ""
        piece = current[len(settled) :]
        self._window = self._anchor(len(self._ids)) if piece else self._window
        self._read = len(self._ids)
        if piece:
            self._pieces.append(piece)
        return piece

    def _anchor(self, end: int) -> int:
        """Start the next window a few tokens back, at one that yields text: a decoder may strip the first space of a window."""
        start = max(self._window, end - 4)
        while start > self._window and not self._decode(self._ids[start:end]).strip():
            start = max(self._window, start - 4)
        return start

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""
        return text
