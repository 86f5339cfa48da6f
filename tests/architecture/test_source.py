"""What the source never does. Read from syntax trees and text, so nothing is imported here."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import PACKAGES, place, python_files, text_files, tree

FORBIDDEN_NAMES = {
    "NotImplementedError": "a base class states what is missing with abc, a seam with a Protocol",
    "hasattr": "what a part can do is written in its Protocol",
    "print": "the library returns values and emits events; the command line writes through its console",
}

PRIVATE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|tmp|mnt|Users|work|private|scratch)(?![\w-])")
"""An absolute path that means something on one machine only."""

OUTSIDE_FILES = re.compile(r"\.\./shared|(?<![\w/])shared/")
"""The folder of data beside the checkout, which an installed package does not have."""

DATA_READERS = ("tests/", "benchmarks/")


def uses(source: ast.Module, name: str) -> list[int]:
    """Lines that read a name."""
    return [node.lineno for node in ast.walk(source) if isinstance(node, ast.Name) and node.id == name]


@pytest.mark.parametrize("name", FORBIDDEN_NAMES)
def test_the_packages_never_use(name: str) -> None:
    """The packages do not use a name that this project has a better answer for."""
    found = [place(path, line) for path in python_files(*PACKAGES) for line in uses(tree(path), name)]
    assert found == [], FORBIDDEN_NAMES[name]


@pytest.mark.parametrize("name", FORBIDDEN_NAMES)
def test_a_forbidden_name_is_noticed(name: str) -> None:
    """The search finds a forbidden name wherever it stands, and not its lookalikes."""
    assert uses(ast.parse(f"def f():\n    if {name}(x): raise {name}\n    console.{name}(x)"), name) == [2, 2]


def lines_with(pattern: re.Pattern[str], exempt: tuple[str, ...] = ()) -> list[str]:
    """Where a pattern occurs in the project's text, outside the exempt top-level folders and this file."""
    found = []
    for path in text_files():
        if str(path) == __file__ or place(path, 0).startswith(exempt):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if pattern.search(line):
                found.append(place(path, number))
    return found


def test_no_file_names_a_path_of_one_machine() -> None:
    """No file of the project holds an absolute path into someone's home or temporary folder."""
    assert lines_with(PRIVATE_PATH) == []


def test_only_tests_and_benchmarks_read_data_beside_the_checkout() -> None:
    """Library, examples and documentation work without any file that the distribution does not hold."""
    assert lines_with(OUTSIDE_FILES, exempt=DATA_READERS) == []


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("open('/home/ann/x')", True),
        ("see /root/notes.txt", True),
        ("`/tmp/x`", True),
        ('"/Users/bob"', True),
        ("https://example.org/home/page", False),
        ("docs/home/index.md", False),
        ("$HOME/tmp/x", False),
        ("and/or, input/output, B/s", False),
    ],
)
def test_private_paths_are_told_from_others(line: str, private: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """The search above finds absolute private paths and leaves addresses and relative paths alone."""
    assert bool(PRIVATE_PATH.search(line)) is private
