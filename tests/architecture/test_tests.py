"""Tests about tests: each says in a sentence what it shows, and none can pass without looking."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import place, python_files, tree

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_under_test(source: ast.Module) -> Iterator[Function]:
    """Every test function and test method of a module."""
    for node in ast.walk(source):
        if isinstance(node, Function) and node.name.startswith("test_"):
            yield node


def says_a_sentence(function: Function) -> bool:
    """Whether the docstring opens with a sentence: a capital or a quote first, a full stop in the first paragraph."""
    first = (ast.get_docstring(function) or "").partition("\n\n")[0].rstrip()
    return first.endswith((".", "`.", ")")) and len(first.split()) > 2


def test_every_test_says_a_sentence() -> None:
    """Every test has a docstring that states the property it shows."""
    found = [
        f"{place(path, function.lineno)} {function.name}"
        for path in python_files("tests")
        for function in functions_under_test(tree(path))
        if not says_a_sentence(function)
    ]
    assert found == []


def test_a_silent_test_is_noticed() -> None:
    """A test without a docstring, or with a mere label, does not pass for one that says a sentence."""
    source = ast.parse(
        'def test_a(): pass\ndef test_b(): "label"\nclass T:\n    async def test_c(self): "It holds a thing."\n'
    )
    assert [function.name for function in functions_under_test(source) if not says_a_sentence(function)] == [
        "test_a",
        "test_b",
    ]
