"""Guesses that have to be waited for, made by predictors of which that was not known beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from ..speculation import Prediction, let_go

Guesses = Sequence[Prediction]


class Later:
    """Something to await, and what to make of it. Nothing is started before it is awaited.

    Args:
        awaited: what a predictor or function returned.
        then: makes guesses of what came of it, or something to await for them.
    """

    __slots__ = ("_awaited", "_then")

    def __init__(self, awaited: Awaitable[Any], then: Callable[[Any], Guesses | Awaitable[Guesses]]) -> None:
        self._awaited = awaited
        self._then = then

    def __await__(self) -> Generator[Any, Any, Guesses]:
        return self._wait().__await__()

    def close(self) -> None:
        """Nobody will await it."""
        let_go(self._awaited)

    async def _wait(self) -> Guesses:
        made = self._then(await self._awaited)
        return await made if inspect.isawaitable(made) else made


__all__ = ["Guesses", "Later"]
