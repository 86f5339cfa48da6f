"""The page that says which test tries which fault names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "workflow-faults.md"


def named(text: str) -> set[tuple[str, str]]:
    """File and name of every test that a page names; a name without a file belongs to the file named last."""
    found: set[tuple[str, str]] = set()
    file = ""
    for path, name in re.findall(r"`([\w/]*(?:\.py)?)::(test_\w+)`", text):
        file = path or file
        found.add((file, name))
    return found


def missing(tests: set[tuple[str, str]]) -> list[str]:
    """Tests that are not there."""
    known: dict[str, set[str]] = {}
    for file, _name in tests:
        path = HERE / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        known[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return sorted(f"{file}::{name}" for file, name in tests if name not in known[file])


def test_every_test_that_is_named_exists() -> None:
    """No row points to a test that was renamed or dropped."""
    tests = named(PAGE.read_text(encoding="utf-8"))
    assert len(tests) > 70
    assert missing(tests) == []


def test_a_missing_test_is_noticed() -> None:
    """The check above can fail, for a wrong name and for a wrong file."""
    text = "`test_codec.py::test_nothing`, `::test_neither` and `no/such.py::test_that`"
    assert missing(named(text)) == [
        "no/such.py::test_that",
        "test_codec.py::test_neither",
        "test_codec.py::test_nothing",
    ]
