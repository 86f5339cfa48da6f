"""The kinds of drafters that ``train`` makes: an explicit table. A new kind is one module here and one row in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specflow.errors import InvalidSettingError

from ...dspark.adapter import TargetAdapter
from .base import Kind
from .conv import ConvKind
from .dspark import DSparkKind

KINDS: dict[str, Callable[[TargetAdapter, Any], Kind[Any, Any]]] = {"dspark": DSparkKind, "conv": ConvKind}


def build_kind(name: str, adapter: TargetAdapter, tokenizer: Any) -> Kind[Any, Any]:
    """A kind of drafters for a target.

    Raises:
        InvalidSettingError: there is no kind of that name.
    """
    if name not in KINDS:
        raise InvalidSettingError("kind", name, f"one of {', '.join(sorted(KINDS))}")
    return KINDS[name](adapter, tokenizer)


__all__ = ["KINDS", "ConvKind", "DSparkKind", "Kind", "build_kind"]
