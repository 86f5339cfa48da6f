"""The project's files, syntax trees and modules, for tests that look at the code instead of running it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specflow", "specflow_llm")
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
IMPORTABLE_PACKAGES = (pytest.param("specflow"), pytest.param("specflow_llm", marks=NEEDS_TORCH))

TEXT_SUFFIXES = frozenset(
    {"", ".cfg", ".ipynb", ".json", ".jsonl", ".md", ".py", ".pyi", ".toml", ".txt", ".yaml", ".yml"}
)
OURS_THOUGH_HIDDEN = frozenset({".ci", ".github", ".gitignore"})
MADE_BY_TOOLS = frozenset({"__pycache__", "build", "dist", "site"})


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the given top-level folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files(folder: Path = ROOT) -> Iterator[Path]:
    """Every text file of the project that a person wrote."""
    for path in sorted(folder.iterdir()):
        if path.name in MADE_BY_TOOLS or (path.name.startswith(".") and path.name not in OURS_THOUGH_HIDDEN):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield path


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, line: int) -> str:
    """``file:line``, as a person would look it up."""
    return f"{path.relative_to(ROOT)}:{line}"


def modules(package: str) -> list[ModuleType]:
    """Import and return every module of a package, the package itself first."""
    root = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}.")]
    return [root, *(importlib.import_module(name) for name in names if not name.endswith(".__main__"))]
