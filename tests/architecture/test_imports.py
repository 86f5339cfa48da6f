"""Importing is cheap, quiet and goes in one direction (the layers themselves are held by ``lint-imports``)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.architecture.source import IMPORTABLE_PACKAGES, PACKAGES, ROOT, place, python_files, tree

HEAVY = ("torch", "transformers", "numpy", "scipy", "pandas", "matplotlib")
MAX_MODULES = 150
"""How many modules ``import specflow`` may load beyond a bare interpreter. A count, because seconds depend on the
machine. It was 63 when the limit was set."""

IMPORT_ALL_OF_CORE = """
import importlib, json, pkgutil, sys
bare = set(sys.modules)
import specflow
front = set(sys.modules) - bare
for module in pkgutil.walk_packages(specflow.__path__, prefix="specflow."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps({"front": sorted(front), "all": sorted(set(sys.modules) - bare)}))
"""

IMPORT_AND_LOOK_AT_LOGGING = """
import importlib, json, logging, sys, warnings
warnings.simplefilter("ignore")  # other people's deprecations are not this test's subject
front = importlib.import_module(sys.argv[1])
[getattr(front, name) for name in front.__all__]  # enters the rooms that a front door opens on first use
import structlog
ours = [name for name in logging.root.manager.loggerDict if name.split(".")[0].startswith("specflow")]
handlers = {name: len(logging.getLogger(name).handlers) for name in ours}
handlers["root"] = len(logging.root.handlers)
levels = [logging.getLogger(name).level for name in ours]
print(json.dumps({"handlers": handlers, "levels": levels, "configured": structlog.is_configured()}))
"""


def run_python(code: str, *arguments: str) -> dict[str, object]:
    """Run code in a fresh interpreter and return the JSON it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that importing the core loads: the front door alone, and every room of it."""
    return run_python(IMPORT_ALL_OF_CORE)  # type: ignore[return-value]


def test_no_room_of_the_core_loads_a_heavy_library(loaded: dict[str, list[str]]) -> None:
    """Importing every module of specflow loads neither torch nor any other large numeric library."""
    roots = {name.partition(".")[0] for name in loaded["all"]}
    assert roots.isdisjoint(HEAVY)
    assert "specflow" in roots


def test_the_front_door_of_decoding_opens_its_rooms_on_first_use() -> None:
    """``import specflow_llm`` alone loads no large library, so that a command line's help is instant."""
    loaded = run_python("import json, sys, specflow_llm; print(json.dumps({'all': sorted(sys.modules)}))")["all"]
    assert isinstance(loaded, list)
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


def test_import_of_the_core_stays_light(loaded: dict[str, list[str]]) -> None:
    """``import specflow`` loads a bounded number of modules."""
    assert len(loaded["front"]) <= MAX_MODULES


@pytest.mark.parametrize("package", IMPORTABLE_PACKAGES)
def test_import_configures_no_logging(package: str) -> None:
    """Importing adds no logging handler, sets no level and leaves structlog unconfigured: that is the application's."""
    seen = run_python(IMPORT_AND_LOOK_AT_LOGGING, package)
    assert set(seen["handlers"].values()) == {0}  # type: ignore[attr-defined]
    assert set(seen["levels"]) <= {0}  # type: ignore[call-overload]
    assert seen["configured"] is False


def front_door_imports(source: ast.Module, package: str, depth: int) -> list[int]:
    """Lines on which a module ``depth`` folders deep imports ``package`` itself instead of one of its modules."""
    found = []
    for node in ast.walk(source):
        match node:
            case ast.Import(names=names) if any(alias.name == package for alias in names):
                found.append(node.lineno)
            case ast.ImportFrom(module=module, level=level) if (module, level) in {(package, 0), (None, depth)}:
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_inside_a_package_imports_its_front_door(package: str) -> None:
    """Modules import each other directly, so the front door can re-export all of them without a cycle."""
    found = [
        place(path, line)
        for path in python_files(package)
        for line in front_door_imports(tree(path), package, depth=len(path.relative_to(ROOT).parent.parts))
    ]
    assert found == []


def test_an_import_of_the_front_door_is_noticed() -> None:
    """Every way to import the package itself is found; imports of its modules and of lookalikes are not."""
    source = ast.parse(
        "import box\nfrom box import lid\nfrom . import lid\n"
        "from .lid import open\nfrom box.lid import open\nimport boxes\nfrom .. import other\n"
    )
    assert front_door_imports(source, "box", depth=1) == [1, 2, 3]
    assert front_door_imports(source, "box", depth=2) == [1, 2, 7]
