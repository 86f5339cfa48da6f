"""Where sentences end, for :class:`specflow.policies.Boundary`: told from committed tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specflow.types import ChainView

from .backend import DecodingBackend

_ENDS = (".", "!", "?", "…", "。", "！", "？", ":", "\n")  # noqa: RUF001 - full-width marks end sentences too
_CLOSING = "\"'”’)]}*_ "  # noqa: RUF001 - typographic quotes close sentences too
"""Stripped before a token is judged: a sentence may end inside quotes."""
_LOOK_BACK = 64
"""Tokens that are searched for an end; further away none matters."""


class Decoder(Protocol):
    """**Protocol:** the part of a tokenizer that is needed."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens."""
        ...


class SentenceEnds:
    """How many tokens a request committed after its last sentence end.

    The policy is needed to build an LLM, and the LLM to know the tokens, so this object is told where to look later::

        ends = SentenceEnds()
        llm = LLM(speculation=Speculation(policy=Boundary(Adaptive(8), ends)))
        ends.watch(llm.engine.backend, llm.tokenizer)

    Until then it knows of no ends.
    """

    def __init__(self) -> None:
        self._backend: DecodingBackend | None = None
        self._tokenizer: Decoder | None = None
        self._is_end: dict[int, bool] = {}

    def watch(self, backend: DecodingBackend, tokenizer: Decoder) -> None:
        """Look at this engine's requests from now on."""
        self._backend = backend
        self._tokenizer = tokenizer
        self._is_end = {}

    def __call__(self, view: ChainView) -> int | None:
        """Tokens committed after the last sentence end, 0 where the newest is one; None without one nearby."""
        if self._backend is None:
            return None
        for row in self._backend.rows:
            if int(row.row_id) == view.chain_id:
                return self._since(row.token_ids)
        return None

    def _since(self, token_ids: Sequence[int]) -> int | None:
        for since, token in enumerate(reversed(token_ids[-_LOOK_BACK:])):
            if self._ends(token):
                return since
        return None

    def _ends(self, token: int) -> bool:
        known = self._is_end.get(token)
        if known is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode([token])
            known = self._is_end[token] = text.rstrip(_CLOSING).endswith(_ENDS)
        return known
