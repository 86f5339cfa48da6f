"""Classes of the user: found again by name, their instances taken apart and put together field by field."""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from importlib import import_module
from json.encoder import encode_basestring
from types import MemberDescriptorType, NoneType
from typing import Any

from .refusals import ABSENT, DamagedError, RefusedError, refusal, type_name


def class_of(reference: Any) -> type:
    """The class that a reference names: ``"module:qualname"``, or a list of a generic model and its arguments.

    Raises:
        DamagedError: there is no such class.
    """
    if type(reference) is not str:
        return _parametrised(reference)
    module_name, parts = _parsed(reference)
    found: Any = sys.modules.get(module_name)
    if found is None:
        try:
            found = import_module(module_name)
        except Exception as error:
            raise DamagedError(f"class {reference} cannot be imported ({error})") from error
    for part in parts:
        found = getattr(found, part, None)
        if not isinstance(found, type):
            hint = "; classes of a main program are found only by that program" if module_name == "__main__" else ""
            raise DamagedError(f"class {reference} is not there any more{hint}")
    kind: type = found
    return kind


@lru_cache(maxsize=1024)
def _parsed(reference: str) -> tuple[str, tuple[str, ...]]:
    """Module and path. Only the parsing is remembered: what the name stands for may change."""
    module_name, _, path = reference.partition(":")
    return module_name, tuple(path.split("."))


def _parametrised(reference: Any) -> type:
    if type(reference) is not list or not reference:
        raise DamagedError(f"{reprlib.repr(reference)} is not the name of a class")
    origin, *arguments = map(class_of, reference)
    base = model_base()
    if base is None or not issubclass(origin, base):
        raise DamagedError(f"{reference[0]} is not a generic pydantic model")
    parametrised: type = origin[tuple(arguments)]  # type: ignore[index]
    return parametrised


def reference(kind: type) -> str:
    """JSON text of what :func:`class_of` finds the class by.

    Raises:
        RefusedError: it cannot be found by a name.
    """
    generic = getattr(kind, "__pydantic_generic_metadata__", None)
    if generic and generic["origin"] is not None:
        arguments: tuple[Any, ...] = generic["args"]
        if not all(isinstance(argument, type) for argument in arguments):
            raise RefusedError(kind, "its parameters are not all classes: derive a model of its own name from it")
        return f"[{','.join(map(reference, (generic['origin'], *arguments)))}]"
    module, path = kind.__module__, kind.__qualname__
    if kind is NoneType:
        module = "types"
    elif module == "__mp_main__":  # the name of the main module in a worker process
        module = "__main__"
    if "<locals>" in path:
        raise RefusedError(kind, "define its class at the top level of a module, where it can be found again")
    name = f"{module}:{path}"
    try:
        found: type | None = class_of(name)
    except DamagedError:
        found = None
    if found is not kind:
        raise RefusedError(kind, f"{name} is not its class: a class must be found under its own name")
    return encode_basestring(name)


def model_base() -> type | None:
    """Pydantic's BaseModel, if anybody has imported it: otherwise no value can be a model."""
    base: type | None = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base


def is_from_pydantic_core(kind: type, name: str) -> bool:
    """Whether a class is the one of this name in pydantic's compiled part."""
    return kind.__name__ == name and kind.__module__.startswith("pydantic_core")


def named_tuple_fields(kind: type) -> tuple[str, ...] | None:
    """The fields of a named tuple; None for other classes."""
    names = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and isinstance(names, tuple) and all(isinstance(name, str) for name in names):
        return names
    return None


class Shape:
    """How instances of a dataclass or pydantic model are taken apart and put together again.

    Args:
        kind: the class.

    Raises:
        RefusedError: it is neither, cannot be found by name, or its instances cannot be made without its constructor.
    """

    __slots__ = ("expected", "has_dict", "is_model", "is_root", "known", "names", "private", "reference", "slots")

    def __init__(self, kind: type) -> None:
        base = model_base()
        described: Any = kind
        self.is_model = base is not None and issubclass(kind, base)
        self.private: frozenset[str] = frozenset()
        """Names of a model's private attributes."""
        if self.is_model:
            self.names: tuple[str, ...] = tuple(described.model_fields)
            self.private = frozenset(described.__private_attributes__)
        elif dataclasses.is_dataclass(kind):
            self.names = tuple(field.name for field in dataclasses.fields(kind))
        else:
            raise refusal(kind)
        try:
            object.__new__(kind)
        except TypeError as error:
            raise refusal(kind) from error  # it extends a type that keeps content of its own in C
        self.reference = reference(kind)
        self.is_root: bool = getattr(kind, "__pydantic_root_model__", False)
        """Pydantic keeps less on root models."""
        self.expected = frozenset(self.names) | self.private
        self.has_dict = kind.__dictoffset__ != 0
        attributes = [(name, attribute) for cls in kind.__mro__ for name, attribute in vars(cls).items()]
        derived = {name for name, attribute in attributes if isinstance(attribute, cached_property)}
        self.known = frozenset(self.names) | derived | {"__orig_class__"}
        self.slots = tuple(
            name
            for name, attribute in attributes
            if isinstance(attribute, MemberDescriptorType)
            and name not in self.known
            and not name.startswith("__pydantic_")
        )
        """Slots that are not fields."""

    def rest(self, value: Any) -> dict[str, Any]:
        """What an instance holds besides its fields."""
        rest: dict[str, Any] = {}
        if self.has_dict and not self.known.issuperset(value.__dict__):
            rest = {name: item for name, item in value.__dict__.items() if name not in self.known}
        for name in self.slots:
            item = getattr(value, name, ABSENT)
            if item is not ABSENT:
                rest[name] = item
        return rest

    def build(self, kind: type, fields: Mapping[str, Any], stored: AbstractSet[str], rest: Mapping[str, Any]) -> Any:
        """An instance with these fields and this rest; ``stored`` are the names there were when it was encoded.

        Raises:
            DamagedError: the class has other names by now.
        """
        if stored != self.expected:
            raise DamagedError(
                f"class {type_name(kind)} changed: it had {', '.join(sorted(stored)) or 'no fields'}, "
                f"and now has {', '.join(sorted(self.expected)) or 'none'}"
            )
        instance: Any = object.__new__(kind)
        for name, item in fields.items():
            object.__setattr__(instance, name, item)
        for name, item in rest.items():
            if name in self.slots:
                object.__setattr__(instance, name, item)
            elif self.has_dict:
                instance.__dict__[name] = item
            else:
                raise DamagedError(f"class {type_name(kind)} changed: it has no place for {name}")
        return instance


_SHAPES: dict[type, Shape] = {}


def shape_of(kind: type) -> Shape:
    """The shape of a class, worked out once.

    Raises:
        RefusedError: as :class:`Shape`.
    """
    shape = _SHAPES.get(kind)
    if shape is None:
        shape = _SHAPES[kind] = Shape(kind)
    return shape


def known_shape(name: Any, *, is_model: bool) -> tuple[type, Shape]:
    """The class of a reference, which must still be what it was.

    Raises:
        DamagedError: it is gone or something else.
    """
    kind = class_of(name)
    try:
        shape = shape_of(kind)
    except RefusedError as refused:
        raise DamagedError(f"class {type_name(kind)} changed: {refused.remedy}") from refused
    if shape.is_model is not is_model:
        raise DamagedError(f"class {type_name(kind)} is not a {'pydantic model' if is_model else 'dataclass'} any more")
    return kind, shape
