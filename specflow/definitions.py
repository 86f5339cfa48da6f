"""What users declare: steps and workflows.

A :class:`Step` is one unit of work with a declared effect. A :class:`Workflow` is an ordinary coroutine function whose
only awaits are requests to its context.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

from .codec import Box, encode
from .effects import Effect
from .errors import (
    BackendContractError,
    DefinitionError,
    DuplicateStepError,
    InvalidSettingError,
    MisuseError,
    StepTimeoutError,
    UnsupportedValueError,
)
from .history import Position
from .protocols import Predictor, Verifier
from .state import State
from .types import Mode
from .verifiers import Equal

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

Where = Literal["loop", "thread", "process"]

_SMALL = 1 << 53
"""Ints below need no encoder."""
_NEWEST = 0.2
"""Weight of the newest duration of a step in its running mean."""
REMEMBERED = 64
"""Results that a predictor is shown."""
RESERVED = frozenset({"store", "policy", "run_id", "limits", "on_event"})
"""Keywords that :func:`specflow.run` takes itself, so that programs cannot have them."""
_MAX_NESTED = 8
"""Functions in closures of functions that are compared before two steps count as different."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When to try a failed step again.

    A step that may not be repeated (IRREVERSIBLE, or BUFFERED without ``idempotent``) is tried again only where
    ``not_sent`` says that the exceptions in ``on`` prove that nothing was sent.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    attempts: int = 1
    """How often to try in all; 1 is no retry."""
    wait: float = 1.0
    """Seconds before the second try."""
    backoff: float = 2.0
    """Factor on the wait for every further try."""
    max_wait: float = 60.0
    """Longest wait, in seconds."""
    on: tuple[type[Exception], ...] = (Exception,)
    """Only these exceptions are worth another try."""
    not_sent: bool = False
    """The step raises what is listed in ``on`` only where it has not changed the outside world: another try cannot do
    it twice. List precise exceptions, such as ``ConnectionRefusedError`` or one of your own."""

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise InvalidSettingError("attempts", self.attempts, "an integer >= 1")
        for name in ("wait", "backoff", "max_wait"):
            if not _is_at_least_zero(getattr(self, name)):
                raise InvalidSettingError(name, getattr(self, name), "a number >= 0")
        listed = self.on if isinstance(self.on, tuple) else ()
        if not listed or not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in listed):
            raise InvalidSettingError("on", self.on, "a tuple of exception classes, for example (TimeoutError,)")

    def seconds_before(self, attempt: int) -> float:
        """Wait before try number ``attempt`` (2 is the first that waits)."""
        try:
            return min(self.max_wait, self.wait * self.backoff ** (attempt - 2))
        except OverflowError:  # a number of its own could not hold the factor
            return min(self.max_wait, self.wait and self.max_wait)


driven: ContextVar[bool] = ContextVar("driven", default=False)
"""True while a workflow's own code runs: what it calls then is not a step of the run."""
given: Any = object()
"""Default for parameters that the runtime fills in: ``async def pay(amount: int, attempt: Attempt = given)``. It tells
readers and type checkers that callers do not pass them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a step may know about its own execution: declare a parameter ``attempt: Attempt = given`` to receive it."""

    run_id: str
    position: Position
    idempotency_key: str
    """Hand it to the service that is called: the same for every retry and recovery of this call."""
    number: int
    """1 for the first try."""


class Step(Generic[ParametersT, ResultT]):
    """One unit of work of a workflow or pipeline; made by :func:`step`. Calling it directly runs the plain function."""

    def __init__(  # noqa: PLR0913 - settings are typed by name
        self,
        function: Callable[ParametersT, Any],
        *,
        name: str | None = None,
        effect: Effect = Effect.IRREVERSIBLE,
        predict: Predictor | None = None,
        verify: Verifier | None = None,
        undo: Callable[..., Any] | None = None,
        probe: Callable[..., Any] | None = None,
        retry: Retry | None = None,
        timeout: float | None = None,
        resource: str | None = None,
        where: Where | None = None,
        idempotent: bool = False,
        money: float = 0.0,
        tokens: float = 0.0,
    ) -> None:
        if not callable(function) or getattr(function, "__qualname__", None) is None:
            raise DefinitionError(
                f"a step is a function with a name, not {function!r}; write `@step` or `@step(effect=...)` above a def"
            )
        self.function = function
        self.name = name or f"{function.__module__}:{function.__qualname__}"
        self.effect = effect
        self.predictor = predict
        self.verifier: Verifier = verify if verify is not None else Equal()
        self.undo = undo.function if isinstance(undo, Step) else undo
        self.probe = probe.function if isinstance(probe, Step) else probe
        self.retry = retry or Retry()
        self.timeout = timeout
        self.resource = resource
        is_async = inspect.iscoroutinefunction(function)
        self.where: Where = where or ("loop" if is_async else "thread")
        self.idempotent = idempotent or effect is Effect.IDEMPOTENT
        self.money = money
        self.tokens = tokens
        self.arguments_label = f"the arguments of {self.name}"
        self.result_label = f"the result of {self.name}"
        self.returns = _plain_return(function)
        self.judged = inspect.iscoroutinefunction(getattr(self.verifier, "verify", None))
        self.remembered: deque[Box] = deque(maxlen=REMEMBERED)
        """Its newest committed results in this process, over all runs: what its predictor is shown at first."""
        self.usual_seconds: float | None = None
        """Running mean of how long it takes, over all runs in this process; None before the first attempt ended."""
        self.has_waited = False
        """One of several attempts that were started together has waited for something: they may all be expected to."""
        self.signature, injected = _signature(function)
        self._positional = _positional(self.signature)
        self.state_parameter = injected.get(State)
        self.attempt_parameter = injected.get(Attempt)
        self.is_reusable = effect is Effect.PURE and self.state_parameter is None and self.attempt_parameter is None
        """The result of an attempt may serve any call with equal arguments."""
        self.is_plain = (
            effect in (Effect.PURE, Effect.READONLY)
            and predict is None
            and not self.judged
            and resource is None
            and not injected
        )
        """Nothing but its arguments and its result has to be considered."""
        self.is_direct = self.is_plain and self.where == "loop" and timeout is None and self.retry.attempts == 1
        """It is only awaited, once."""
        self.needs_key = self.attempt_parameter is not None or (isinstance(effect, Effect) and effect.is_external)
        functools.update_wrapper(self, function, updated=())
        self._check_protocols()
        self._check(is_async=is_async)

    def __call__(self, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> Any:
        """Run the plain function, outside any run: what it returns, or awaits, is its own.

        Raises:
            MisuseError: called by a workflow, which would run it on guesses and again at every recovery.
        """
        if driven.get():
            raise MisuseError(
                f"a workflow called step {self.name} directly; write `await ctx.call({self.function.__name__}, ...)`"
            )
        return self.function(*args, **kwargs)

    def check_result(self, value: Any) -> None:
        """Compare a result with a plain class in the return annotation.

        Raises:
            UnsupportedValueError: it is of another type.
        """
        expected = self.returns
        if expected is None or isinstance(value, expected):
            return
        if not (type(value) is int and expected in (float, complex)):
            remedy = f"it is declared to return {expected.__name__}: change the step or its annotation"
            raise UnsupportedValueError(self.result_label, type(value).__name__, remedy)

    def __repr__(self) -> str:
        return f"<step {self.name}>"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check arguments against the signature.

        Raises:
            DefinitionError: they do not fit.
        """
        if not kwargs and len(args) in self._positional:
            return  # the usual case; binding takes longer than all the rest of a call
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"step {self.name} cannot be called like this: {error}") from None

    def check_same(self, other: Step[..., Any]) -> None:
        """Refuse another step of this name in one run, unless it is the same function with the same effect once more.

        One function may be decorated twice, and a step may be made anew by code that runs again.

        Raises:
            DuplicateStepError: it is another function, the same code over other values, or has its effect in another
                way.
        """
        if self is other:
            return
        if not _is_same(self.function, other.function, _MAX_NESTED):
            raise DuplicateStepError(self.name, _told(self.function), _told(other.function))
        for setting in ("effect", "undo", "probe", "idempotent"):
            one, another = getattr(self, setting), getattr(other, setting)
            if one is not another and not _is_same(one, another, _MAX_NESTED):
                raise DuplicateStepError(self.name, f"one with {setting}={one!r}", f"one with {setting}={another!r}")

    def is_same(self, other: Step[..., Any]) -> bool:
        """Whether both may stand for the same step of one run, as :meth:`check_same` has it."""
        if self is other:
            return True
        if self.name != other.name:
            return False
        try:
            self.check_same(other)
        except DuplicateStepError:
            return False
        return True

    def took(self, seconds: float) -> None:
        """An attempt ended after this long."""
        usual = self.usual_seconds
        self.usual_seconds = seconds if usual is None else usual + _NEWEST * (seconds - usual)

    def _check_protocols(self) -> None:
        if not isinstance(self.effect, Effect):
            raise InvalidSettingError("effect", self.effect, "a member of specflow.Effect")
        if self.predictor is not None and (
            isinstance(self.predictor, type) or not callable(getattr(self.predictor, "predict", None))
        ):
            raise InvalidSettingError("predict", self.predictor, "a predictor object, for example LastValue() or Fn(f)")
        if isinstance(self.verifier, type) or not callable(getattr(self.verifier, "verify", None)):
            raise InvalidSettingError("verify", self.verifier, "a verifier object, for example Predicate(f)")
        mode = getattr(self.verifier, "mode", None)
        if not isinstance(mode, Mode):
            raise InvalidSettingError(
                "verify", self.verifier, f"a verifier whose mode is a member of specflow.Mode, not {mode!r}"
            )
        if not isinstance(self.retry, Retry):
            raise InvalidSettingError("retry", self.retry, "a Retry, for example Retry(attempts=3)")
        if self.effect is Effect.BUFFERED and self.state_parameter is not None:
            raise InvalidSettingError("effect", self.effect, f"another effect: {self.name} declares a State")
        self._check_retry()

    def _check_retry(self) -> None:
        """A second try must not be a second effect."""
        may_repeat = self.idempotent or self.effect not in (Effect.IRREVERSIBLE, Effect.BUFFERED)
        if may_repeat or self.retry.attempts == 1:
            return
        if not self.retry.not_sent:
            raise InvalidSettingError(
                "retry",
                self.retry,
                f"no retry: {self.name} is {self.effect.name}, and a try that raised may have reached the outside "
                "world. Declare it IDEMPOTENT if its service ignores a repeated idempotency key, or say "
                "Retry(..., on=(SomeError,), not_sent=True) if it raises SomeError only before anything was sent",
            )
        # What the runtime itself raises for a try that it cut off says nothing about what was sent.
        for error in (StepTimeoutError, BackendContractError):
            broad = [kind.__name__ for kind in self.retry.on if issubclass(error, kind)]
            if broad and (error is not StepTimeoutError or self.timeout is not None):
                raise InvalidSettingError(
                    "retry.on",
                    ", ".join(broad),
                    f"precise exceptions: {error.__name__} is one of these, and {self.name} may have sent before it",
                )

    def _check(self, *, is_async: bool) -> None:
        if (self.undo is not None) != (self.effect is Effect.COMPENSABLE):
            raise InvalidSettingError(
                "undo", self.undo, f"a function exactly when effect is COMPENSABLE; step {self.name} is {self.effect}"
            )
        if (self.where == "loop") != is_async:
            wanted = "'loop'" if is_async else "'thread' or 'process'"
            raise InvalidSettingError(
                "where", self.where, f"{wanted}, since {self.name} is{'' if is_async else ' not'} async"
            )
        if self.timeout is not None and not (_is_at_least_zero(self.timeout) and self.timeout > 0):
            raise InvalidSettingError("timeout", self.timeout, "seconds > 0, or None")
        if self.resource is not None and not isinstance(self.resource, str):
            raise InvalidSettingError("resource", self.resource, "the name of a resource class, or None")
        for name in ("money", "tokens"):
            if not _is_at_least_zero(getattr(self, name)):
                raise InvalidSettingError(name, getattr(self, name), "a number >= 0")
        if self.effect is Effect.BUFFERED and self.predictor is not None:
            raise InvalidSettingError("predict", self.predictor, f"None: the buffered step {self.name} returns None")
        if self.where == "process":
            self._check_process()

    def _check_process(self) -> None:
        if self.state_parameter is not None:
            raise InvalidSettingError("where", "process", f"'thread': {self.name} reads the state")
        if "<locals>" in self.function.__qualname__:
            raise InvalidSettingError("where", "process", f"a module-level function; {self.name} is nested")


class Workflow(Generic[ParametersT, ResultT]):
    """A coroutine that the runtime drives; made by :func:`workflow`. Run it with :func:`specflow.run`."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, ResultT]], *, name: str | None = None) -> None:
        if not inspect.iscoroutinefunction(function):
            raise DefinitionError(f"@workflow needs an `async def` function, got {function!r}")
        self.function = function
        self.name = name or f"{function.__module__}:{function.__qualname__}"
        self.fingerprint = fingerprint(function)
        self.signature, _ = _signature(function, skip_first=True)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"

    def body(self, arguments: Box) -> Callable[[Any], Coroutine[Any, Any, ResultT]]:
        """The program to run with these encoded ``(args, kwargs)``: every coroutine gets its own copy of them."""

        def start(context: Any) -> Coroutine[Any, Any, ResultT]:
            args, kwargs = arguments.fresh()
            return self.function(context, *args, **kwargs)

        return start

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check arguments against the signature.

        Raises:
            DefinitionError: they do not fit.
        """
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"workflow {self.name} cannot be called like this: {error}") from None


@overload
def step(function: Callable[ParametersT, Awaitable[ResultT]], /) -> Step[ParametersT, ResultT]: ...
@overload
def step(function: Callable[ParametersT, ResultT], /) -> Step[ParametersT, ResultT]: ...
@overload
def step(
    function: None = None,
    /,
    *,
    name: str | None = None,
    effect: Effect = ...,
    predict: Predictor | None = None,
    verify: Verifier | None = None,
    undo: Callable[..., Any] | None = None,
    probe: Callable[..., Any] | None = None,
    retry: Retry | None = None,
    timeout: float | None = None,
    resource: str | None = None,
    where: Where | None = None,
    idempotent: bool = False,
    money: float = 0.0,
    tokens: float = 0.0,
) -> StepDecorator: ...
def step(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Declare a step.

    Args:
        function: sync or async. Parameters annotated :class:`~specflow.state.State` or :class:`Attempt` are filled in
            by the runtime (give them the default :data:`given`); all others, and the result, must be values that
            :mod:`specflow.codec` can encode.
        settings: ``name`` (default ``module:qualname``); ``effect`` (default IRREVERSIBLE: never runs ahead);
            ``predict`` a :class:`~specflow.protocols.Predictor` of its result; ``verify`` a
            :class:`~specflow.protocols.Verifier` (default: exact equality); ``undo(result, *args, **kwargs)`` for a
            COMPENSABLE step, safe to repeat; ``probe(key, *args, **kwargs)`` that finds out after a crash whether the
            effect happened and returns :class:`~specflow.runtime.Sent` or :class:`~specflow.runtime.NotSent`;
            ``retry``; ``timeout`` in seconds per try; ``resource`` the class whose limit it counts against; ``where``
            "loop", "thread" or "process" (default: loop for async functions, thread for others); ``idempotent`` a
            BUFFERED step may be sent again after a crash; ``money`` and ``tokens`` most that one call costs.

    Raises:
        InvalidSettingError: a setting cannot work.
    """
    if function is not None:
        return Step(function)
    return lambda inner: Step(inner, **settings)


class StepDecorator:
    """Only its type matters: what ``@step(...)`` returns keeps the signature of the function it decorates."""

    @overload
    def __call__(self, function: Callable[ParametersT, Awaitable[ResultT]], /) -> Step[ParametersT, ResultT]: ...
    @overload
    def __call__(self, function: Callable[ParametersT, ResultT], /) -> Step[ParametersT, ResultT]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        """The step."""
        return Step(function)


@overload
def workflow(
    function: Callable[Concatenate[Any, ParametersT], Coroutine[Any, Any, ResultT]], /
) -> Workflow[ParametersT, ResultT]: ...
@overload
def workflow(function: None = None, /) -> WorkflowDecorator: ...
def workflow(function: Callable[..., Any] | None = None, /) -> Any:
    """Declare a workflow: an ``async def`` whose first parameter is a :class:`~specflow.replay.Context`.

    ``@workflow`` and ``@workflow()`` are the same.

    Raises:
        DefinitionError: the function is not a coroutine function.
    """
    return WorkflowDecorator() if function is None else Workflow(function)


class WorkflowDecorator:
    """What ``@workflow()`` returns: it keeps the signature of the function it decorates."""

    def __call__(
        self, function: Callable[Concatenate[Any, ParametersT], Coroutine[Any, Any, ResultT]], /
    ) -> Workflow[ParametersT, ResultT]:
        """The workflow."""
        return cast("Workflow[ParametersT, ResultT]", Workflow(function))


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> bytes:
    """Arguments of a call as ``[args, kwargs]``, encoded.

    Raises:
        UnsupportedValueError: one of them cannot be stored exactly.
    """
    if not kwargs:
        if len(args) == 1 and type(args[0]) is int and -_SMALL < args[0] < _SMALL:
            return b"[[%d],{}]" % args[0]
        if not args:
            return b"[[],{}]"
    return encode([[*args], dict(kwargs)], where)


def fingerprint(function: Callable[..., Any]) -> str:
    """Digest of a function's own code, without line numbers, comments and docstring; not of what it calls."""
    digest = hashlib.blake2b(digest_size=16)

    def feed(code: Any) -> None:
        digest.update(code.co_code)
        digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
        for constant in code.co_consts:
            if constant is function.__doc__:
                continue
            if inspect.iscode(constant):
                feed(constant)
            elif isinstance(constant, frozenset):
                digest.update(repr(sorted(map(repr, constant))).encode())
            else:
                digest.update(repr(constant).encode())

    feed(function.__code__)
    return digest.hexdigest()


def load(target: str, wanted: type | tuple[type, ...] = object) -> Any:
    """The object that ``"module:name"`` names.

    Args:
        target: the name.
        wanted: what it has to be, where the module has several things that go by this name (a pipeline goes by its
            label, and may have a step of that name). Where none of them is, the one that is called so is returned.

    Raises:
        DefinitionError: there is no such module or name.
    """
    module_name, _, name = target.partition(":")
    if not name:
        raise DefinitionError(f"{target!r} does not name a program: write module:name")
    if module_name == "__main__" and name not in vars(sys.modules["__main__"]):
        raise DefinitionError(
            f"{target!r} was defined in a script; put it into a module that can be imported, or name the program"
        )
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise DefinitionError(f"{target!r} cannot be loaded: {error}") from None
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    # A pipeline goes by its label, whatever variable holds it.
    found = [value, *(one for one in vars(module).values() if getattr(one, "name", None) == target)]
    found = [one for one in found if one is not None]
    if not found:
        raise DefinitionError(f"{target!r} cannot be loaded: module {module_name} has no {name}")
    return next((one for one in found if isinstance(one, wanted)), found[0])


def _is_same(first: Any, second: Any, depth: int) -> bool:
    """Are two functions the same one, or the same code over the same values? What cannot be compared differs."""
    if first is second:
        return True
    if isinstance(first, Step) and isinstance(second, Step):
        first, second = first.function, second.function
    if not (inspect.isfunction(first) and inspect.isfunction(second)):
        return _is_equal(first, second)
    if first.__code__ != second.__code__ or first.__module__ != second.__module__ or not depth:
        return False
    return all(
        one.keys() == other.keys() and all(_is_same(one[name], other[name], depth - 1) for name in one)
        for one, other in zip(_values_of(first), _values_of(second), strict=True)
    )


def _is_equal(first: Any, second: Any) -> bool:
    if inspect.ismethod(first) or isinstance(first, type):
        return bool(first == second)
    try:
        return encode(first) == encode(second)
    except UnsupportedValueError:
        return False


def _values_of(function: FunctionType) -> tuple[dict[Any, Any], dict[str, Any], dict[str, Any]]:
    """What a function's result depends on besides its arguments and its module: defaults and closure."""
    closure: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            closure[name] = cell.cell_contents
    return dict(enumerate(function.__defaults__ or ())), function.__kwdefaults__ or {}, closure


def _told(function: Callable[..., Any]) -> str:
    """A function as errors name it."""
    name = f"{getattr(function, '__qualname__', function)!s} of module {getattr(function, '__module__', None)}"
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} (line {code.co_firstlineno})"


def _signature(function: Callable[..., Any], *, skip_first: bool = False) -> tuple[inspect.Signature, dict[type, str]]:
    """Signature without injected parameters, and which parameter receives which injected type.

    Raises:
        DefinitionError: a parameter is to be filled in, but with what is not known.
    """
    signature = inspect.signature(function)
    injected: dict[type, str] = {}
    kept: list[inspect.Parameter] = []
    for index, parameter in enumerate(signature.parameters.values()):
        if skip_first and index == 0:
            continue
        annotation = _annotation(function, parameter)
        if annotation in (State, Attempt):
            injected[annotation] = parameter.name
        elif parameter.default is given and not skip_first:  # a workflow has its context to ask
            raise DefinitionError(
                f"parameter {parameter.name} of {_told(function)} has the default `given`, but is annotated "
                f"{parameter.annotation!r}; annotate it State or Attempt"
            )
        else:
            kept.append(parameter)
    return signature.replace(parameters=kept), injected


def _plain_return(function: Callable[..., Any]) -> type | None:
    """The class that a function is declared to return, where the annotation is just that."""
    annotation = inspect.signature(function).return_annotation
    if isinstance(annotation, str):
        annotation = {**vars(builtins), **getattr(function, "__globals__", {})}.get(annotation)
    if not isinstance(annotation, type) or annotation in (object, Any, inspect.Signature.empty):
        return None
    try:
        isinstance(None, annotation)
    except TypeError:
        return None  # a protocol, or another class that instances cannot be compared with
    return annotation


def _positional(signature: inspect.Signature) -> range:
    """Numbers of arguments that a call without keywords may have."""
    least = most = 0
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            most += 1
            least += parameter.default is parameter.empty
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            return range(0)
    return range(least, most + 1)


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return _without_none(annotation)
    # Annotations need not exist at run time: what cannot be found is not one of the types that are filled in.
    name = annotation.strip("'\"")
    if parameter.default is given:  # it is one of them, also where it is imported for type checkers only
        return {"State": State, "Attempt": Attempt}.get(name.rpartition(".")[2])
    names = getattr(function, "__globals__", {})
    first, *rest = name.split(".")
    if all(part.isidentifier() for part in (first, *rest)):
        return functools.reduce(lambda found, part: getattr(found, part, None), rest, names.get(first))
    if not any(found in name for found in ("State", "Attempt")):
        return None
    try:
        return _without_none(eval(name, dict(names)))  # noqa: S307 - the program's own code, as typing evaluates it
    except Exception:  # noqa: BLE001 - an annotation for type checkers only
        return None


def _without_none(annotation: Any) -> Any:
    """``X`` of ``X | None`` and ``Annotated[X, ...]``; other annotations as they are."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        return _without_none(others[0]) if len(others) == 1 else annotation
    return annotation


def _is_at_least_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


__all__ = [
    "REMEMBERED",
    "RESERVED",
    "Attempt",
    "Retry",
    "Step",
    "StepDecorator",
    "Where",
    "Workflow",
    "driven",
    "encode_arguments",
    "fingerprint",
    "given",
    "load",
    "step",
    "workflow",
]
