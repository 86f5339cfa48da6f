"""Exceptions as bytes and back. Neither direction ever raises: an error must not hide another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from ..errors import DecodingError
from .classes import reference
from .exceptions import RecordedError, is_validation_error, unrestored
from .reading import decode, revive, tree_of
from .refusals import RefusedError, refusal
from .writing import array, joined, quote, text_of

MAX_CAUSES = 8
"""Exceptions kept of a chain of causes, the raised one included."""

_HIDDEN_STATE: dict[type[BaseException], tuple[str, ...]] = {
    ImportError: ("name", "path"),
    NameError: ("name",),
    AttributeError: ("name",),
}
"""What built-in exceptions keep outside their arguments and their ``__dict__``."""


def encode_error(error: BaseException) -> bytes:
    """An exception as bytes. Never raises.

    What comes back is the exception itself or, where its class or arguments cannot, a :class:`RecordedError` with its
    type and message. Attributes that cannot be encoded are left out, and so are traceback and context. Of the chain of
    causes at most :data:`MAX_CAUSES` exceptions are kept.
    """
    try:
        text = _recorded(error, ())
    except Exception:  # noqa: BLE001 -- whatever an exception's own code does, it is recorded
        text = _written(_stand_in(error), "", ())
    return text.encode("utf-8", "surrogatepass")


def decode_error(data: bytes) -> BaseException:
    """A new instance of the exception that was encoded. Never raises.

    What cannot be restored is a :class:`RecordedError`; its notes say why.
    """
    problem = "the bytes do not hold an exception"
    try:
        found = decode(data)
        if isinstance(found, BaseException):
            return found
    except DecodingError as error:
        problem = error.problem
    with suppress(Exception):
        return unrestored(tree_of(data)["$error"], problem)
    return RecordedError("builtins:Exception", f"an exception was recorded here, but {problem}")


def _recorded(error: BaseException, above: tuple[int, ...]) -> str:
    """The exception, as itself if it can be restored. ``above`` are the exceptions it stands in."""
    above = (*above, id(error))
    cause = error.__cause__
    tail = ""
    if cause is not None and id(cause) not in above and len(above) < MAX_CAUSES:
        tail = f',"cause":{_recorded(cause, above)}'
    with suppress(Exception):
        return _written(error, tail, above)
    return _written(_stand_in(error), tail, above)


def _stand_in(error: BaseException) -> RecordedError:
    kind = type(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 -- the user's __str__
        message = "(it has no printable message)"
    stand_in = RecordedError(f"{kind.__module__}:{kind.__qualname__}", message)
    with suppress(Exception):  # anything may have been put where the notes belong
        for note in error.__notes__:
            stand_in.add_note(str(note))
    return stand_in


def _written(error: BaseException, tail: str, above: tuple[int, ...]) -> str:
    """The exception as itself.

    Raises:
        Exception: whatever keeps it from being written, or from being restored.
    """
    kind, message = type(error), str(error)
    head = f'{{"$error":{{"type":{reference(kind)},"message":{quote(message)}'
    must_read_the_same = is_validation_error(kind)
    for content in _contents(error, above):
        text = f"{head},{content}{tail}}}}}"
        twin = revive(text)
        # The text of an ordinary exception may differ for good reasons, such as the order of a set in it.
        if type(twin) is kind and (str(twin) == message or not must_read_the_same):
            return text
    raise refusal(kind)


def _contents(error: BaseException, above: tuple[int, ...]) -> Iterator[str]:
    """Ways to write down what an exception holds, the likeliest first."""
    if is_validation_error(type(error)):
        findings: Any = error
        lines = _validation_lines(findings, above)
        # The exception does not tell how it was made, but its text does.
        for source, hides_input in product(("python", "json"), ("false", "true")):
            yield f'"validation":[{quote(findings.title)},{lines},"{source}",{hides_input}]'
        return
    state: dict[str, str] = {}
    for name, item in vars(error).items():
        with suppress(RefusedError):
            state[name] = _part(item, above)
    text = f'"args":[{_arguments(error, above)}],"state":{joined(state)}'
    names = [name for kind, names in _HIDDEN_STATE.items() if isinstance(error, kind) for name in names]
    hidden = {name: getattr(error, name, None) for name in names}
    if any(hidden.values()):
        text += f',"hidden":{joined({name: quote(item) for name, item in hidden.items() if type(item) is str})}'
    yield text


def _arguments(error: BaseException, above: tuple[int, ...]) -> str:
    """What the nearest built-in class is to be made with."""
    if isinstance(error, BaseExceptionGroup):
        return f"{quote(error.message)},[{','.join(_part(member, above) for member in error.exceptions)}]"
    arguments: tuple[Any, ...] = error.args
    if isinstance(error, OSError) and len(arguments) == 2 and error.filename is not None:
        # The arguments of such an error leave out the file names that it was made with.
        arguments += (error.filename,) if error.filename2 is None else (error.filename, None, error.filename2)
    return ",".join(_part(argument, above) for argument in arguments)


def _part(part: Any, above: tuple[int, ...]) -> str:
    """An argument or attribute of an exception; it may be an exception itself."""
    if not isinstance(part, BaseException):
        return text_of(part, 1)
    if id(part) in above or len(above) >= MAX_CAUSES:
        raise RefusedError(type(part), "the chain of exceptions is too long")
    return _recorded(part, above)


def _validation_lines(error: Any, above: tuple[int, ...]) -> str:
    """The findings of pydantic's ValidationError."""
    lines = []
    for line in error.errors(include_url=False):
        context = joined({name: _part(item, above) for name, item in line.get("ctx", {}).items()})
        place, value = array(line["loc"], 1), text_of(line["input"], 1)
        lines.append(f"[{quote(line['type'])},{place},{quote(line['msg'])},{value},{context}]")
    return f"[{','.join(lines)}]"
