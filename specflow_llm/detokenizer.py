"""Ids to text, incrementally: the pieces add up to the final text, and none of them ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"  # what decoders put for bytes that do not form a character (yet)
_WINDOW = 4  # tokens; the longest character takes four bytes


class Decoder(Protocol):
    """**Protocol:** the part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any:
        """Text of these ids."""
        ...


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a detokenizer's past, for :meth:`Detokenizer.rewind`."""

    num_ids: int
    window: int
    shown: str
    released: str


class Detokenizer:
    """Turns a growing list of ids into text.

    A token's text can depend on its predecessors (leading spaces, characters spread over several byte tokens), so each
    step decodes a short window that begins a few tokens back; what it has beyond the text already released is new.
    Replacement characters at its end may be a character that is not complete yet, and are held.

    The text is a function of the ids alone, never of how they were cut into pushes: otherwise it would depend on how
    many drafted tokens were accepted together.

    Args:
        tokenizer: decodes ids.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_ids", "_pieces", "_released", "_shown", "_skip", "_tokenizer", "_window")

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0  # the window's first token: text before it is settled
        self._shown = ""  # what has been released of the window's text
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
        known = len(self._ids)
        self._ids.extend(token_ids)
        current = self._decode(self._window)
        if len(token_ids) > 1 and _REPLACEMENT in current:
            # Decoders differ in what an incomplete character does to the characters before it, so what is released
            # when matters. Text without one can be released at once, with the same result.
            del self._ids[known:]
            return "".join([self.push([token]) for token in token_ids])
        return self._release(current, current.rstrip(_REPLACEMENT))

    def flush(self) -> str:
        """Release what an incomplete character held back, as the decoder shows it."""
        current = self._decode(self._window)
        return self._release(current, current)

    def mark(self) -> Mark:
        """The present, to come back to."""
        return Mark(len(self._ids), self._window, self._shown, self.text)

    def rewind(self, mark: Mark) -> None:
        """Forget everything pushed since ``mark``."""
        del self._ids[mark.num_ids :]
        self._window, self._shown, self._released = mark.window, mark.shown, mark.released
        self._pieces.clear()

    def _release(self, current: str, safe: str) -> str:
        """Hand out what ``safe``, a beginning of the window's text ``current``, has beyond the text already shown."""
        if len(safe) <= len(self._shown):
            return ""
        piece = safe[len(self._shown) :]
        self._pieces.append(piece)
        self._shown = safe
        if safe == current:
            self._move_window(current)
        return piece

    def _move_window(self, current: str) -> None:
        """Start the next window a few tokens back, where its text is the end of the whole text.

        It is not where a decoder strips all of it (spaces), or where it begins inside a character.
        """
        start = len(self._ids) - _WINDOW
        while start > self._window:
            shown = self._decode(start)
            if shown.strip() and current.endswith(shown):
                self._window, self._shown = start, shown
                return
            start -= _WINDOW

    def _decode(self, start: int) -> str:
        ids = self._ids[start:]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
        return text
