"""Context variables that a step sets are its own, whether or not it gets an event-loop task of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from typing import Any


class Confined:
    """Awaits something in a copy of the context in which this is made, as an event-loop task of its own would.

    Args:
        awaited: usually a coroutine that was not started yet; anything else that can be awaited is awaited as it is.
    """

    __slots__ = ("_awaited", "_enter")

    def __init__(self, awaited: Awaitable[Any]) -> None:
        self._awaited = awaited
        self._enter = copy_context().run

    def __await__(self) -> Generator[Any, Any, Any]:
        awaited, enter = self._awaited, self._enter
        if not inspect.iscoroutine(awaited):
            return (yield from awaited.__await__())
        advance: Callable[[Any], Any] = awaited.send
        value: Any = None
        while True:
            try:
                asked = enter(advance, value)
            except StopIteration as done:
                return done.value
            try:
                value = yield asked
            except GeneratorExit:
                enter(awaited.close)
                raise
            except BaseException as error:  # noqa: BLE001 - it is for the coroutine
                advance, value = awaited.throw, error
            else:
                advance = awaited.send


__all__ = ["Confined"]
