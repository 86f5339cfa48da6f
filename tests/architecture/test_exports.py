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
def test_front_door_lists_exactly_its_public_names(package: str) -> None:
    """``__all__`` equals the package's public names, each once; the front door holds nothing else (ruff sorts it)."""
    door = modules(package)[0]
    listed = list(door.__all__)
    assert len(listed) == len(set(listed))
    assert set(listed) == public_names(door)


@pytest.mark.parametrize("package", IMPORTABLE_PACKAGES)
def test_rooms_with_a_list_of_names_list_all_they_offer(package: str) -> None:
    """Where a subpackage has an ``__all__``, each name exists and none that is defined below it is missing."""
    for door in modules(package)[1:]:
        listed = getattr(door, "__all__", None)
        if listed is None or not hasattr(door, "__path__"):
            continue
        own = {
            name
            for name in public_names(door)
            if getattr(getattr(door, name), "__module__", door.__name__).startswith(door.__name__)
        }
        assert own <= set(listed) <= public_names(door), door.__name__


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
