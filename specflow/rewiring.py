"""Runs a program with other steps than its own: its requests are changed on their way to whoever drives it.

The program's code, its positions and its arguments stay as they are. So a run can be repeated with another predictor, a
stub or a watched function in place of a step, and nothing of the user's is changed while that happens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from typing import Any

from .definitions import Step, Workflow
from .replay import CallRequest, Context, GatherRequest, PipelineRequest, SleepRequest

Body = Callable[[Context], Coroutine[Any, Any, Any]]
"""A program as the scheduler takes it."""
Exchange = Callable[[Step[..., Any]], Step[..., Any]]
"""Gives the step to run in place of one: the same object for the same step, with the same name."""


def rewire(body: Body, exchange: Exchange, *, halt: type[Exception] | None = None) -> Body:
    """The same program with other steps, in branches and nested workflows too.

    Args:
        body: the program.
        exchange: gives the step to run in place of one.
        halt: an exception that the program never sees: where a step raises it, the program waits from then on.
    """

    async def rewired(context: Context) -> Any:
        return await _Passage(body(context), exchange, halt)

    return rewired


def altered(step: Step[..., Any], **settings: Any) -> Step[..., Any]:
    """A new step like another one, with some settings of :func:`~specflow.definitions.step` changed.

    It remembers nothing of earlier runs.
    """
    own = {
        "name": step.name,
        "effect": step.effect,
        "predict": step.predictor,
        "verify": step.verifier,
        "undo": step.undo,
        "probe": step.probe,
        "retry": step.retry,
        "timeout": step.timeout,
        "resource": step.resource,
        "where": step.where,
        "idempotent": step.idempotent,
        "money": step.money,
        "tokens": step.tokens,
    }
    return Step(step.function, **{**own, **settings})


class _Passage:
    """Awaiting it runs a coroutine whose requests are changed before they are made."""

    __slots__ = ("_coroutine", "_exchange", "_halt")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], exchange: Exchange, halt: type[Exception] | None) -> None:
        self._coroutine = coroutine
        self._exchange = exchange
        self._halt = halt

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        answer: Any = None
        raised: BaseException | None = None
        try:
            while True:
                try:
                    request = coroutine.send(answer) if raised is None else coroutine.throw(raised)
                except StopIteration as done:
                    return done.value
                answer, raised = None, None
                try:
                    answer = yield self._changed(request)
                except Exception as error:  # noqa: BLE001 - handed on below, to where it belongs
                    raised = error
                if raised is not None and self._halt is not None and isinstance(raised, self._halt):
                    while True:
                        yield SleepRequest(request.position, math.inf)
        finally:
            coroutine.close()

    def _changed(self, request: Any) -> Any:
        if isinstance(request, CallRequest):
            return replace(request, step=self._exchange(request.step))
        if isinstance(request, GatherRequest):
            for call in request.calls:
                call.target = self._target(call.target)
        elif isinstance(request, PipelineRequest):
            branches = tuple((name, rewire(body, self._exchange, halt=self._halt)) for name, body in request.branches)
            return replace(request, branches=branches)
        return request

    def _target(self, target: Step[..., Any] | Workflow[..., Any]) -> Step[..., Any] | Workflow[..., Any]:
        if isinstance(target, Step):
            # Exchanged when its branch makes the call; here, too, since all calls of a gather are guessed together.
            return self._exchange(target)
        function = target.function

        def nested(context: Context, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            def body(inner: Context) -> Coroutine[Any, Any, Any]:
                return function(inner, *args, **kwargs)

            return rewire(body, self._exchange, halt=self._halt)(context)

        other = copy.copy(target)
        other.function = nested
        return other


__all__ = ["Body", "Exchange", "altered", "rewire"]
