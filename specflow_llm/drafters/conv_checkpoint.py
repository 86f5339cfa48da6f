"""Convolutional drafters on disk: a folder with ``config.json`` and ``model.safetensors``.

Embedding and output head are the target's and not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specflow.errors import InvalidSettingError

from ..dspark import TargetAdapter
from ..dspark.checkpoint import CONFIG_FILE, WEIGHTS_FILE, has_format, write_folder
from ..errors import CheckpointError, DrafterError
from .conv_model import ConvConfig, ConvModel, SharedTables

FORMAT = "specflow-conv"
VERSION = 1


def save_conv(
    model: ConvModel, folder: Path, *, dtype: torch.dtype = torch.bfloat16, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter; a folder is never left with half a file.

    Args:
        model: what to write.
        folder: made if absent.
        dtype: of the stored weights.
        extra: what else to note in ``config.json``, for example how it was trained.
    """
    write_folder(folder, model, {"format": FORMAT, "version": VERSION, "config": model.config.to_dict()}, dtype, extra)


def is_conv(folder: Path) -> bool:
    """True when a folder holds a convolutional drafter."""
    return has_format(folder, FORMAT)


def load_conv(folder: Path, adapter: TargetAdapter) -> ConvModel:
    """Read a drafter, its weights in float32 on the CPU, and give it its target's tables.

    Raises:
        CheckpointError: the folder holds no convolutional drafter, a damaged one, one of a newer version, or one made
            for a target of other sizes.
    """
    described = _read(folder)
    try:
        config = ConvConfig.from_dict(described["config"])
    except (KeyError, TypeError, InvalidSettingError) as error:
        raise CheckpointError(folder, f"its config is wrong ({error})", "train or download it again") from error
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(folder, f"it cannot be read ({error})", "train or download it again") from error
    shared = None if "embedding" in tensors else SharedTables.of(adapter)
    _check_fits(config, adapter, shared, folder)
    try:
        model = ConvModel(config, shared, tensors.get("draft_ids"))
        model.load_state_dict(tensors)
    except (DrafterError, RuntimeError) as error:  # the second one lists what is absent, unknown or of another shape
        raise CheckpointError(
            folder, f"its weights are not those of its config ({error})", "train or download it again"
        ) from error
    return model


def _read(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(folder, f"it cannot be read ({error})", "name the folder of a trained drafter") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise CheckpointError(folder, "it holds no convolutional drafter", "train one: specflow-llm train --kind conv")
    if described.get("version") != VERSION:
        raise CheckpointError(
            folder, f"it has version {described.get('version')}, this library reads {VERSION}", "update specflow"
        )
    return described


def _check_fits(config: ConvConfig, adapter: TargetAdapter, shared: SharedTables | None, origin: object) -> None:
    sizes = [("vocabulary", config.vocab_size, adapter.vocab_size)]
    if shared is not None:
        sizes.append(("embedding's width", config.embedding_size, shared.embedding.shape[1]))
    for what, ours, theirs in sizes:
        if ours != theirs:
            raise CheckpointError(
                origin,
                f"it was made for a target ({config.target}) whose {what} is {ours}; this target's is {theirs}",
                "use a drafter that was trained for this target, or train one: specflow-llm train --kind conv",
            )


__all__ = ["FORMAT", "VERSION", "is_conv", "load_conv", "save_conv"]
