"""Checkpoint folders of other projects, read tensor by tensor; copies of embeddings are read by rows, never whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ..checkpoint import CONFIG_FILE, WEIGHTS_FILE

INDEX_FILE = "model.safetensors.index.json"

FLOATING = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that are numbers as they stand; all others need a scale that only their quantiser knows."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``.

    Raises:
        CheckpointError: it is absent or no JSON object.
    """
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            folder, f"{CONFIG_FILE} cannot be read ({error})", "name the folder of a trained drafter"
        ) from error
    if not isinstance(described, dict):
        raise CheckpointError(folder, f"{CONFIG_FILE} holds no object", "download the drafter again")
    return described


class TensorFiles:
    """The tensors of a folder, in one file or in several with an index.

    Args:
        folder: holds ``model.safetensors``, or an index and its shards.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        try:
            if (folder / INDEX_FILE).is_file():
                shards = set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
            else:
                shards = {WEIGHTS_FILE}
            for shard in sorted(shards):
                self._list(shard)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(
                folder,
                f"its weights cannot be read ({error})",
                f"it must hold {WEIGHTS_FILE}, or {INDEX_FILE} and every shard that it names",
            ) from error

    def _list(self, shard: str) -> None:
        with safe_open(self.folder / shard, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                self._files[name], self._types[name] = shard, part.get_dtype()
                self._shapes[name] = tuple(part.get_shape())

    @property
    def names(self) -> frozenset[str]:
        """All tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self._shapes[name]

    def stored_type(self, name: str) -> str:
        """Of one tensor, as safetensors calls it: ``BF16``, ``I64``, ..."""
        return self._types[name]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored."""
        with safe_open(self.folder / self._files[name], "pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def rows(self, name: str, indices: Iterable[int]) -> torch.Tensor:
        """Some rows of a matrix, [n, D] in float32."""
        with safe_open(self.folder / self._files[name], "pt") as opened:
            part: Any = opened.get_slice(name)
            return torch.cat([part[index : index + 1] for index in indices]).float()


def required(described: Mapping[str, Any], field: str, origin: object) -> Any:
    """A field that a layout always writes.

    Raises:
        CheckpointError: it is absent or null.
    """
    value = described.get(field)
    if value is None:
        raise CheckpointError(
            origin,
            f"{CONFIG_FILE} has no {field!r}, and nothing in its layout says what else to take",
            "add the field with the value it was trained with",
        )
    return value


def flag(described: Mapping[str, Any], field: str, origin: object) -> bool | None:
    """A field that is true or false; None where it is absent or null.

    Raises:
        CheckpointError: it is something else, a text for example, whose truth would be taken for what it says.
    """
    value = described.get(field)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(
        origin, f"{CONFIG_FILE} has {field} = {value!r}, which is neither true nor false", "correct the field"
    )


def whole_number(described: Mapping[str, Any], field: str, origin: object) -> int:
    """A field that a layout always writes as an integer.

    Raises:
        CheckpointError: it is absent or something else.
    """
    value = required(described, field, origin)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(field, value, "an integer", origin)
    return value


def whole_numbers(described: Mapping[str, Any], field: str, origin: object) -> list[int]:
    """A field that a layout always writes as a list of integers.

    Raises:
        CheckpointError: it is absent or something else.
    """
    value = required(described, field, origin)
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise _wrong(field, value, "a list of integers", origin)
    return value


def part_of(described: Mapping[str, Any], field: str, origin: object) -> Mapping[str, Any]:
    """A field that is an object, empty where it is absent.

    Raises:
        CheckpointError: it is something else.
    """
    value = described.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(field, value, "an object", origin)
    return value or {}


def list_of(described: Mapping[str, Any], field: str, origin: object) -> list[Any]:
    """A field that is a list, empty where it is absent.

    Raises:
        CheckpointError: it is something else.
    """
    value = described.get(field)
    if value is not None and not isinstance(value, list):
        raise _wrong(field, value, "a list", origin)
    return value or []


def _wrong(field: str, value: object, expected: str, origin: object) -> CheckpointError:
    return CheckpointError(
        origin, f"{field} in {CONFIG_FILE} is {value!r}, not {expected}", "download the drafter again"
    )
