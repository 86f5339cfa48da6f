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
        try:
            asked = enter(awaited.send, None)
        except StopIteration as done:
            return done.value
        return (
            yield from relay(
                asked,
                lambda answer: enter(awaited.send, answer),
                lambda error: enter(awaited.throw, error),
                lambda: enter(awaited.close),
            )
        )


def relay(
    asked: Any, send: Callable[[Any], Any], throw: Callable[[BaseException], Any], close: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Hand on what a coroutine asks of its event loop, and the answers to it, until it returns.

    Args:
        asked: what it has asked for first.
        send: advances it with an answer.
        throw: advances it with an error.
        close: lets it go.
    """
    try:
        while True:
            try:
                answer = yield asked
            except GeneratorExit:
                close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is for the coroutine
                asked = throw(error)
            else:
                asked = send(answer)
    except StopIteration as done:
        return done.value


__all__ = ["Confined", "relay"]
