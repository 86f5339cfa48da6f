"""Drives workflows: a coroutine whose only awaits are requests, rebuilt at will from what was answered before.

No event loop. :class:`Program` sends answers into the coroutine and returns the request it stops at. Since a program
depends on nothing but its arguments and those answers, feeding the same answers to a new coroutine gives the same
program again: that is how a run survives a crash, and how a world is forked to run ahead on a guess.
"""

from __future__ import annotations

import contextvars
import hashlib
import itertools
import random
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from .codec import Box, decode_error, encode, encode_error
from .definitions import Step, Workflow, driven
from .errors import DefinitionError, DivergenceError, ForeignAwaitError, MisuseError
from .history import Position, format_position
from .state import Access, Cells, State

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")


class Outcome:
    """What a request was answered with. One outcome may be fed to many programs: each gets its own copy."""

    __slots__ = ("at", "box", "error", "error_data", "seconds")

    def __init__(
        self, box: Box | None, error: BaseException | None = None, *, at: float = 0.0, seconds: float = 0.0
    ) -> None:
        self.box = box
        self.error = error
        self.error_data: bytes | None = None
        self.at = at
        """Wall-clock time it counts from, in seconds since the epoch."""
        self.seconds = seconds
        """How long it took to get."""

    @classmethod
    def raised(cls, error: BaseException, *, at: float = 0.0, seconds: float = 0.0) -> Outcome:
        """The step raised."""
        return cls(None, error, at=at, seconds=seconds)

    @classmethod
    def stored(cls, result: bytes | None, error: bytes | None, *, at: float = 0.0, seconds: float = 0.0) -> Outcome:
        """An outcome as history has it."""
        if error is None:
            return cls(Box.from_bytes(result if result is not None else encode(None)), at=at, seconds=seconds)
        outcome = cls(None, decode_error(error), at=at, seconds=seconds)
        outcome.error_data = error
        return outcome

    @property
    def failed(self) -> bool:
        """True when the step raised."""
        return self.error is not None

    def encoded_error(self) -> bytes | None:
        """The exception as bytes; None when there is none."""
        if self.error is not None and self.error_data is None:
            self.error_data = encode_error(self.error)
        return self.error_data

    def fresh_error(self) -> BaseException:
        """A copy of the exception, so that no two programs share one.

        In the process where it was raised its traceback goes on into the step; what goes on record has none.
        """
        data = self.encoded_error()
        trace = None if self.error is None else self.error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame):
            trace = trace.tb_next
        return decode_error(data if data is not None else b"").with_traceback(trace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outcome):
            return NotImplemented
        return self.box == other.box and self.encoded_error() == other.encoded_error()

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True, eq=False)
class CallRequest:
    """Run a step. Nobody changes it; it is not frozen because that would triple the time it takes to make one."""

    position: Position
    step: Step[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def describe(self) -> str:
        """For messages."""
        return f"a call of {self.step.name}"


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """Run several calls in parallel."""

    position: Position
    calls: tuple[PendingCall[Any], ...]
    return_exceptions: bool

    def describe(self) -> str:
        """For messages."""
        return f"a gather of {len(self.calls)} calls"


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """Wait."""

    position: Position
    seconds: float

    def describe(self) -> str:
        """For messages."""
        return f"a sleep of {self.seconds} s"


@dataclass(frozen=True, slots=True)
class InputsRequest:
    """Wait for the results of other branches of a pipeline."""

    position: Position
    branches: tuple[int, ...]
    """Indices of the branches, in the order of the answer."""

    def describe(self) -> str:
        """For messages."""
        return f"the results of branches {self.branches}"


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """Run the branches of a pipeline: like a gather, but a branch may wait for the results of earlier ones."""

    position: Position
    branches: tuple[tuple[str, Callable[[Context], Coroutine[Any, Any, Any]]], ...]
    """Name and body of each branch, in program order."""

    def describe(self) -> str:
        """For messages."""
        return f"a pipeline of {len(self.branches)} steps"


Request = CallRequest | GatherRequest | SleepRequest | InputsRequest | PipelineRequest


@dataclass(frozen=True, slots=True)
class Finished:
    """The program returned or raised."""

    outcome: Outcome


class Suspend:
    """Awaiting it hands the request to whoever drives the coroutine."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self._request)


class PendingCall(Generic[ResultT]):
    """A call that was written down; it starts when it is awaited or gathered, once."""

    __slots__ = ("_context", "args", "kwargs", "target", "used")

    def __init__(
        self,
        context: Context,
        target: Step[..., Any] | Workflow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._context = context
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.used = False

    def __await__(self) -> Generator[Any, Any, ResultT]:
        context, target = self._context, self.target
        if self.used:
            self.use(context)  # refuses
        self.used = True
        context.open_calls -= 1
        position = context.next_position()
        if isinstance(target, Step):
            result: ResultT = yield CallRequest(position, target, self.args, self.kwargs)
            return result
        nested = context.nested(position)
        value: ResultT = yield from target.function(nested, *self.args, **self.kwargs).__await__()
        nested.close()
        return value

    def use(self, context: Context) -> None:
        """Mark as started.

        Raises:
            MisuseError: it was started before, or belongs to another workflow.
        """
        if self.used:
            raise MisuseError(f"this call of {self.target.name} was awaited before; make a new ctx.call for each use")
        if context is not self._context:
            raise MisuseError(f"this call of {self.target.name} belongs to another workflow's context")
        self.used = True
        context.open_calls -= 1


_LONGEST_SEED = 64
"""Bytes of a run's name that can key its draws; longer ones are hashed."""


def seed_of(run_id: str) -> bytes:
    """What keys the random draws of a run of that name: different for different names, at most 64 bytes."""
    name = run_id.encode()
    return name if len(name) <= _LONGEST_SEED else hashlib.blake2b(name).digest()


class Context:
    """What a workflow may ask for. One per workflow invocation; only awaits on it are allowed inside a workflow."""

    __slots__ = ("_draws", "_next", "_prefix", "_program", "open_calls")

    def __init__(self, program: Program, prefix: Position) -> None:
        self._program = program
        self._prefix = prefix
        self._next = 0
        self._draws = 0
        self.open_calls = 0

    @overload
    def call(
        self, target: Step[ParametersT, ResultT], /, *args: ParametersT.args, **kwargs: ParametersT.kwargs
    ) -> PendingCall[ResultT]: ...
    @overload
    def call(
        self, target: Workflow[ParametersT, ResultT], /, *args: ParametersT.args, **kwargs: ParametersT.kwargs
    ) -> PendingCall[ResultT]: ...
    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> PendingCall[Any]:
        """Call a step or another workflow; await the result.

        Raises:
            DefinitionError: the target is neither, or the arguments do not fit its signature.
        """
        if not isinstance(target, Step) and not isinstance(target, Workflow):
            raise DefinitionError(f"ctx.call needs a @step or a @workflow, got {target!r}; decorate it")
        target.bind(args, kwargs)
        self.open_calls += 1
        return PendingCall(self, target, args, kwargs)

    async def gather(self, *calls: PendingCall[Any], return_exceptions: bool = False) -> list[Any]:
        """Run calls in parallel and return their results in order.

        Every branch runs to its end, on the state as it was here plus its own changes. Then their changes are merged;
        the first exception in branch order is raised.

        Args:
            calls: what ``ctx.call`` returned.
            return_exceptions: put exceptions into the list instead of raising the first.

        Raises:
            StateConflictError: two branches changed the same key, and the changes do not merge.
        """
        for call in calls:
            if not isinstance(call, PendingCall):
                raise DefinitionError(f"ctx.gather needs calls made with ctx.call, got {call!r}")
            call.use(self)
        if not calls:
            return []
        results = await Suspend(GatherRequest(self.next_position(), calls, return_exceptions))
        if return_exceptions:
            return [value if error is None else decode_error(error) for value, error in results]
        return [value for value, _error in results]

    async def map(
        self,
        target: Step[Concatenate[ItemT, ...], ResultT] | Workflow[Concatenate[ItemT, ...], ResultT],
        items: Iterable[ItemT],
    ) -> list[ResultT]:
        """One call per item, in parallel; results in the order of the items."""
        return await self.gather(*[self.call(target, item) for item in items])

    async def sleep(self, seconds: float) -> None:
        """Wait. After a crash only what is left of it.

        Raises:
            DefinitionError: ``seconds`` is negative.
        """
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise DefinitionError(f"ctx.sleep needs a number of seconds >= 0, got {seconds!r}")
        await Suspend(SleepRequest(self.next_position(), float(seconds)))

    @property
    def state(self) -> State:
        """The run's key-value state."""
        return self._program.state

    def now(self) -> datetime:
        """The time at which the latest awaited result came in, in UTC. The same whenever the run is rebuilt."""
        return datetime.fromtimestamp(self._program.at, UTC)

    def random(self) -> random.Random:
        """A new generator, seeded by run and place in the program: the same whenever the run is rebuilt."""
        return random.Random(self._draw("random"))  # noqa: S311 - reproducible by design, no secret

    def uuid(self) -> uuid.UUID:
        """A new UUID (version 4 in form), the same whenever the run is rebuilt."""
        return uuid.UUID(bytes=self._draw("uuid")[:16], version=4)

    def emit(self, value: Any) -> None:
        """Send a value to the run's stream.

        Raises:
            UnsupportedValueError: the value cannot be stored exactly.
        """
        self._program.events.append(encode(value, "the emitted value"))

    def next_position(self) -> Position:
        """Take the next position (for the runtime)."""
        position = (*self._prefix, self._next)
        self._next += 1
        return position

    def nested(self, position: Position) -> Context:
        """The context of a workflow called from here (for the runtime)."""
        return Context(self._program, position)

    def close(self) -> None:
        """The workflow returned (for the runtime).

        Raises:
            MisuseError: it wrote down calls that it never awaited.
        """
        if self.open_calls:
            raise MisuseError(
                f"{self.open_calls} call(s) made with ctx.call were never awaited; write `await ctx.call(...)`"
            )

    def _draw(self, purpose: str) -> bytes:
        place = f"{purpose}\x00{format_position(self._prefix)}\x00{self._next}\x00{self._draws}".encode()
        self._draws += 1
        return hashlib.blake2b(place, key=self._program.seed, digest_size=32).digest()


class Program:
    """One coroutine being driven, at one point of its history.

    It runs in a copy of the context in which it is made: context variables that it sets are seen by nobody else, and
    are gone with it when it belonged to a wrong guess.

    Args:
        function: called with a context and the arguments; returns the coroutine.
        prefix: position that its requests are numbered under.
        seed: key of its random draws, at most 64 bytes.
        cells: the state it starts from.
        at: wall-clock time it starts at, in seconds since the epoch.
    """

    __slots__ = ("_context", "_coroutine", "_enter", "_last", "at", "events", "seed", "state")

    def __init__(
        self,
        function: Callable[[Context], Coroutine[Any, Any, Any]],
        *,
        prefix: Position,
        seed: bytes,
        cells: Cells,
        at: float,
    ) -> None:
        self.seed = seed
        self.at = at
        self.state = State(cells)
        self.events: list[bytes] = []
        self._last: Position = prefix
        self._context = Context(self, prefix)
        self._enter = contextvars.copy_context().run
        self._enter(driven.set, True)  # noqa: FBT003 - the value of the variable
        self._coroutine = self._enter(function, self._context)

    def start(self) -> Request | Finished:
        """Run to the first request."""
        return self._drive(self._coroutine.send, None)

    def resume(self, outcome: Outcome) -> Request | Finished:
        """Answer the request it waits on and run to the next."""
        if outcome.at > self.at:  # noqa: PLR1730 - max() takes three times as long
            self.at = outcome.at
        box = outcome.box
        if box is not None:
            return self._drive(self._coroutine.send, box.fresh())
        return self._drive(self._coroutine.throw, outcome.fresh_error())

    def catch_up(self, answers: Sequence[Answer]) -> Request | Finished:
        """Answer a started program's requests one after another, as in :func:`replay`."""
        diverged = self._enter(self._catch_up, answers)
        if diverged is not None:
            return diverged
        outcome, accesses, _request = answers[-1]
        self.state.replay(accesses)
        self.forget()
        return self.resume(outcome)

    def _catch_up(self, answers: Sequence[Answer]) -> Finished | None:
        """All answers but the last; what was asked for instead of what was expected, if anything."""
        # Written out for speed: forks and recoveries spend their time here.
        coroutine, state = self._coroutine, self.state
        send, at = coroutine.send, self.at
        expected = answers[0][2]
        try:
            for (outcome, accesses, _request), (_outcome, _accesses, expected) in itertools.pairwise(answers):
                if accesses:
                    state.replay(accesses)
                if outcome.at > at:
                    self.at = at = outcome.at
                box = outcome.box
                made = send(box.fresh()) if box is not None else coroutine.throw(outcome.fresh_error())
                if type(made) is CallRequest is type(expected):
                    if made.position == expected.position and made.step.is_same(expected.step):
                        continue
                elif type(made) is type(expected) and made.position == expected.position:
                    continue
                return _diverged(expected, made)
        except StopIteration:
            return _diverged(expected, None)
        except (Exception, SystemExit):  # noqa: BLE001 - it did not raise the first time
            return _diverged(expected, None)
        return None

    def take_events(self) -> tuple[bytes, ...]:
        """What was emitted since this was asked last."""
        if not self.events:
            return ()
        taken = tuple(self.events)
        self.events.clear()
        return taken

    def forget(self) -> None:
        """Drop accesses and events that are on record already."""
        self.state.take_accesses()
        self.events.clear()

    def close(self) -> None:
        """Let the coroutine go. Its ``finally`` blocks run; what they ask for is refused."""
        try:
            self._enter(self._coroutine.close)
        except RuntimeError:
            pass  # it awaited something while it was closed: it belongs to a world that is gone
        except Exception:  # noqa: BLE001 - errors of a world that is gone reach nobody
            return

    def _drive(self, advance: Callable[[Any], Any], value: Any) -> Request | Finished:
        try:
            request = self._enter(advance, value)
            if not isinstance(request, Request):
                error = ForeignAwaitError(format_position(self._last) or "the start", repr(request))
                self.close()
                return Finished(Outcome.raised(error, at=self.at))
        except StopIteration as done:
            return self._finish(done.value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a program raises is its outcome
            return Finished(Outcome.raised(error, at=self.at))
        self._last = request.position
        return request

    def _finish(self, value: Any) -> Finished:
        try:
            self._context.close()
            return Finished(Outcome(Box(value, "the workflow's result"), at=self.at))
        except (DefinitionError, MisuseError) as error:
            return Finished(Outcome.raised(error, at=self.at))


Answer = tuple[Outcome, Sequence[Access], Request]
"""What a request was answered with, the state accesses of the step itself, and the request."""


def replay(program: Program, answers: Sequence[Answer]) -> Request | Finished:
    """Bring a new program to where another one stands.

    Args:
        program: not started yet.
        answers: for each request, in order.

    Returns:
        What it waits on now; that it raised :class:`~specflow.errors.DivergenceError` if it made another request than
        the other program did.
    """
    request = program.start()
    if not answers:
        return request
    if type(request) is not type(answers[0][2]) or _is_another(request, answers[0][2]):
        return _diverged(answers[0][2], request)
    return program.catch_up(answers)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __package__


def _is_another(made: Any, expected: Any) -> bool:
    if made.position != expected.position:
        return True
    return type(made) is CallRequest and not made.step.is_same(expected.step)


def _diverged(expected: Request, made: Any) -> Finished:
    asked = "nothing" if made is None else made.describe() if isinstance(made, Request) else repr(made)
    error = DivergenceError(format_position(expected.position), expected.describe(), asked)
    return Finished(Outcome.raised(error))


async def call_alone(context: Context, target: Step[..., Any] | Workflow[..., Any], args: Any, kwargs: Any) -> Any:
    """A workflow of one call: what runs in a parallel branch."""
    if isinstance(target, Step):
        return await context.call(target, *args, **kwargs)
    return await target.function(context, *args, **kwargs)


__all__ = [
    "Answer",
    "CallRequest",
    "Context",
    "Finished",
    "GatherRequest",
    "InputsRequest",
    "Outcome",
    "PendingCall",
    "PipelineRequest",
    "Program",
    "Request",
    "SleepRequest",
    "Suspend",
    "call_alone",
    "replay",
    "seed_of",
]
