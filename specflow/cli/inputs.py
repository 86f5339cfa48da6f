"""Arguments of a program as JSON: read, and made what the program declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from ..definitions import Workflow
from ..errors import DefinitionError
from ..graph import Pipeline
from .specs import parse_json


def read_arguments(program: Workflow[..., Any] | Pipeline, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments.

    A JSON list holds positional ones, an object named ones, anything else is a single one. Where the program declares a
    type, such as a dataclass, a model, a tuple or a date, the value is made one.

    Raises:
        InvalidSettingError: the text is not JSON.
        DefinitionError: a value cannot be made what the program declares.
    """
    given = parse_json("args", text)
    args = given if isinstance(given, list) else [] if isinstance(given, dict) else [given]
    kwargs = given if isinstance(given, dict) else {}
    declared = _declared(program)
    names = list(declared)
    typed = [_typed(names[place], value, declared) if place < len(names) else value for place, value in enumerate(args)]
    return typed, {name: _typed(name, value, declared) for name, value in kwargs.items()}


def _declared(program: Workflow[..., Any] | Pipeline) -> Mapping[str, Any]:
    """The parameters in their order, with their types; ``object`` where there is none that can be looked up."""
    if isinstance(program, Pipeline):
        return program.freeze().inputs
    try:
        hints = get_type_hints(program.function)
    except (NameError, TypeError, AttributeError):
        hints = {}  # annotations that exist for type checkers only
    parameters = program.signature.parameters.values()
    return {
        parameter.name: hints.get(parameter.name, object)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _typed(name: str, value: Any, declared: Mapping[str, Any]) -> Any:
    kind = declared.get(name, object)
    if kind is object or kind is Any:
        return value
    from pydantic import PydanticUserError, TypeAdapter, ValidationError  # noqa: PLC0415 - for typed programs only

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, (name, *problem["loc"])))
        raise DefinitionError(f"the argument {place} is not what the program declares: {problem['msg']}") from None
    except PydanticUserError:
        return value  # of a type that is made in other ways only


__all__ = ["read_arguments"]
