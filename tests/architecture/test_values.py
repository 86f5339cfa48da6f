"""Values: what travels between rooms cannot be changed on the way."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from typing import Any

import pytest

from tests.architecture.source import NEEDS_TORCH

VALUE_MODULES = (pytest.param("specflow.types"), pytest.param("specflow_llm.config", marks=NEEDS_TORCH))


def mutable_classes(classes: list[type[Any]]) -> list[str]:
    """Names of the classes that are neither enums nor frozen dataclasses with slots."""
    return [
        cls.__name__
        for cls in classes
        if not issubclass(cls, enum.Enum)
        and not (
            dataclasses.is_dataclass(cls)
            and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
            and "__slots__" in vars(cls)
        )
    ]


@pytest.mark.parametrize("module_name", VALUE_MODULES)
def test_values_are_frozen_and_slotted(module_name: str) -> None:
    """Every class of a value module is an enum or a frozen dataclass with slots."""
    module = importlib.import_module(module_name)
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module_name]
    assert classes
    assert mutable_classes(classes) == []


def test_a_mutable_value_is_noticed() -> None:
    """The check above tells a frozen value with slots from one that lacks either."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Good:
        number: int

    @dataclasses.dataclass(frozen=True)
    class NoSlots:
        number: int

    @dataclasses.dataclass(slots=True)
    class Mutable:
        number: int

    assert mutable_classes([Good, NoSlots, Mutable]) == ["NoSlots", "Mutable"]
