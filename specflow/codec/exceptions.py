"""From the body of an ``$error`` tag to an exception, which never fails: what is gone is stood in for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import ExecutionError
from .classes import class_of, is_from_pydantic_core
from .refusals import DamagedError, type_name

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for every class that a class statement made


class RecordedError(ExecutionError):
    """Stands for an exception that cannot be recorded or restored as itself.

    Either its class cannot be found by name, or its arguments cannot be encoded, or its text cannot be made without
    what was left out.

    Args:
        type_name: the class of the exception, ``module:qualname``.
        message: its text.
    """

    def __init__(self, type_name: str, message: str) -> None:
        self.type_name = type_name
        self.message = message
        super().__init__(f"{type_name}: {message}")


def revive_error(body: Any) -> BaseException:
    """The exception, or a :class:`RecordedError` if it cannot be restored."""
    try:
        return _restored(body)
    except Exception as error:  # noqa: BLE001 -- an exception never hides another
        return unrestored(body, str(error))


def unrestored(body: Any, problem: str) -> RecordedError:
    """Stands for an exception that was encoded and cannot be restored any more.

    Raises:
        Exception: the body does not name it either.
    """
    kind, message = body["type"], body["message"]
    if type(kind) is not str or type(message) is not str:
        raise DamagedError("it is not the body of an exception")
    error = RecordedError(kind, message)
    error.add_note(f"It could not be restored: {problem}.")
    return error


def _restored(body: dict[str, Any]) -> BaseException:
    kind = class_of(body["type"])
    if not issubclass(kind, BaseException):
        raise DamagedError(f"class {type_name(kind)} is not an exception any more")
    if "validation" in body:
        error = _restored_validation_error(kind, *body["validation"])
    else:
        # The constructor of the nearest built-in class: it fills what that class keeps in C, and runs no code of the
        # user, whose own constructor may want other arguments than those it handed on.
        built_in: Any = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
        error = built_in.__new__(kind, *body["args"])
        built_in.__init__(error, *body["args"])
        vars(error).update(body["state"])
        for name, item in body.get("hidden", {}).items():
            object.__setattr__(error, name, item)
    error.__cause__ = body.get("cause")
    return error


def is_validation_error(kind: type) -> bool:
    """Whether a class is pydantic's ValidationError, which has neither arguments nor a constructor."""
    return is_from_pydantic_core(kind, "ValidationError")


def _restored_validation_error(kind: Any, title: str, lines: list[Any], source: str, hides_input: Any) -> BaseException:
    if not is_validation_error(kind):
        raise DamagedError(f"class {type_name(kind)} is not pydantic's ValidationError")
    core = import_module("pydantic_core")
    details = []
    for finding, place, message, value, context in lines:
        detail = {"type": finding, "loc": tuple(place), "input": value, **({"ctx": context} if context else {})}
        try:
            core.PydanticKnownError(finding, context or None)
        except KeyError:  # a type of the user's own
            detail["type"] = core.PydanticCustomError(finding, message, context or None)
        details.append(detail)
    error: BaseException = kind.from_exception_data(title, details, input_type=source, hide_input=hides_input)
    error.args = ()
    return error
