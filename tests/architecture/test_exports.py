"""Front doors: what a package offers is exactly what it says it offers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import IMPORTABLE_PACKAGES, modules


def public_names(module: ModuleType) -> set[str]:
    """Names a user can reach: no underscore, no submodule, nothing that only steers the compiler."""
    names = {name for name in dir(module) if not name.startswith("_") and name != "annotations"}
    return {name for name in names if not isinstance(getattr(module, name), ModuleType)}


@pytest.mark.parametrize("package", IMPORTABLE_PACKAGES)
def test_front_doors_list_exactly_their_public_names(package: str) -> None:
    """``__all__`` of a package and of each of its subpackages equals its public names, each once (ruff sorts them)."""
    doors = [module for module in modules(package) if hasattr(module, "__path__")]
    assert doors
    for door in doors:
        listed = list(getattr(door, "__all__", []))
        assert len(listed) == len(set(listed)), door.__name__
        assert set(listed) == public_names(door), door.__name__


@pytest.mark.parametrize("package", IMPORTABLE_PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    """Each module has a docstring, so that a newcomer finds the room by its name and first line."""
    assert [module.__name__ for module in modules(package) if not (module.__doc__ or "").strip()] == []


@pytest.mark.parametrize("package", IMPORTABLE_PACKAGES)
def test_packages_are_marked_as_typed(package: str) -> None:
    """A ``py.typed`` file tells type checkers to use the annotations."""
    door = modules(package)[0]
    assert door.__file__ is not None
    assert (Path(door.__file__).parent / "py.typed").is_file()
