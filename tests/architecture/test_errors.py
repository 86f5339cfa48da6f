"""The error trees: drawn once in a docstring, equal to the classes, and able to travel between processes."""

from __future__ import annotations

import builtins
import copy
import importlib
import inspect
import pickle
import re
from typing import Any, get_type_hints

import pytest

from tests.architecture.source import NEEDS_TORCH

ERROR_MODULES = (pytest.param("specflow.errors"), pytest.param("specflow_llm.errors", marks=NEEDS_TORCH))

DRAWN_LINE = re.compile(r"^(?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \((?P<builtin>\w+)\))?(?: {2,}|$)")
INDENT = 4

SAMPLES: dict[Any, Any] = {
    tuple[str, str]: ("one", "two"),
    str: "some text",
    int: 3,
    float: 0.5,
    bool: True,
    object: ("any", "value"),
}
"""One picklable value for each annotation that error constructors use."""

Drawing = dict[str, tuple[str | None, str | None]]
"""Class name -> (name of the parent it hangs below, builtin it also is)."""


def parse_drawing(docstring: str) -> Drawing:
    """Read the tree out of the literal block of a docstring."""
    drawing: Drawing = {}
    path: list[str] = []
    block = inspect.cleandoc(docstring).partition("::\n")[2].strip("\n")
    indent_of_block = len(block) - len(block.lstrip(" "))
    for line in block.splitlines():
        if not line.startswith(" " * indent_of_block):
            break  # the literal block has ended
        match = DRAWN_LINE.match(line[indent_of_block:])
        if match is None:
            continue  # the description of the line above runs on
        depth = len(match["indent"]) // INDENT
        assert depth <= len(path), f"{match['name']} hangs below nothing"
        assert match["name"] not in drawing, f"{match['name']} is drawn twice"
        path[depth:] = [match["name"]]
        drawing[match["name"]] = (path[depth - 1] if depth else None, match["builtin"])
    return drawing


def lookup(name: str, module_name: str) -> type[Exception]:
    """Find a drawn class in the module, or in the core's tree that it extends."""
    for candidate in (module_name, "specflow.errors"):
        found = getattr(importlib.import_module(candidate), name, None)
        if found is not None:
            error: type[Exception] = found
            return error
    pytest.fail(f"{name} is drawn in {module_name}, but no such class exists")


def own_errors(module_name: str) -> list[type[Exception]]:
    """The error classes a module defines."""
    module = importlib.import_module(module_name)
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module_name
    ]


def build(error: type[Exception]) -> Exception:
    """Build an error from sample values, one per constructor argument."""
    constructor = vars(error).get("__init__")
    if constructor is None:
        return error("some message")
    hints = get_type_hints(constructor)
    names = list(inspect.signature(constructor).parameters)[1:]
    return error(**{name: SAMPLES[hints[name]] for name in names})


@pytest.mark.parametrize("module_name", ERROR_MODULES)
def test_the_drawing_equals_the_classes(module_name: str) -> None:
    """Every class is drawn below its real parent with its real builtin, and every drawn class exists."""
    drawing = parse_drawing(importlib.import_module(module_name).__doc__ or "")
    for name, (parent, builtin) in drawing.items():
        bases = lookup(name, module_name).__bases__
        if parent is not None:
            assert bases[0] is lookup(parent, module_name), name
            assert [base.__name__ for base in bases[1:]] == ([builtin] if builtin else []), name
        if builtin is not None:
            assert getattr(builtins, builtin) in bases, name
    assert {error.__name__ for error in own_errors(module_name)} <= set(drawing)


def test_a_wrong_drawing_is_noticed() -> None:
    """The parser sees depth, builtins and running text, so a class drawn in the wrong place would differ."""
    drawing = parse_drawing(
        """Title.

        ::

            Root
            ├── Left (ValueError)      some words
            │   └── Leaf               words that
            │                          run on
            └── Right                  more words

        Not part of the drawing: Stray
        """
    )
    assert drawing == {
        "Root": (None, None),
        "Left": ("Root", "ValueError"),
        "Leaf": ("Left", None),
        "Right": ("Root", None),
    }


@pytest.mark.parametrize("module_name", ERROR_MODULES)
def test_every_error_is_a_specflow_error(module_name: str) -> None:
    """One ``except SpecflowError`` catches everything the library raises on purpose."""
    base = importlib.import_module("specflow.errors").SpecflowError
    assert own_errors(module_name)
    assert [error for error in own_errors(module_name) if not issubclass(error, base)] == []


@pytest.mark.parametrize("module_name", ERROR_MODULES)
def test_errors_survive_pickling_and_copying(module_name: str) -> None:
    """Type, message and attributes of every error are the same after a trip to another process."""
    for error_type in own_errors(module_name):
        error = build(error_type)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 -- our own bytes
            assert type(twin) is error_type
            assert str(twin) == str(error) != ""
            assert twin.__dict__ == error.__dict__


@pytest.mark.parametrize("module_name", ERROR_MODULES)
def test_errors_carry_their_facts_as_attributes(module_name: str) -> None:
    """Whatever an error was built from can be read back from it, so that nobody has to parse a message."""
    for error_type in own_errors(module_name):
        constructor = vars(error_type).get("__init__")
        if constructor is not None:
            error = build(error_type)
            for name in list(inspect.signature(constructor).parameters)[1:]:
                assert hasattr(error, name), f"{error_type.__name__}.{name}"
