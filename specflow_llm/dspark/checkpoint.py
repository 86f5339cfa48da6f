"""Drafters on disk: a folder with ``config.json`` and ``model.safetensors``.

Embedding and output head are the target's and not stored. Other projects' layouts are read by :mod:`.layouts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from specflow.errors import InvalidSettingError

from ..errors import CheckpointError
from ..packing import PackedLinear
from .adapter import TargetAdapter
from .config import DSparkConfig
from .model import DSparkModel

FORMAT = "specflow-dspark"
VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_drafter(
    model: DSparkModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter; a folder is never left with half a file.

    Args:
        model: what to write.
        folder: made if absent.
        dtype: of the stored weights.
        extra: what else to note in ``config.json``, for example how it was trained.

    Raises:
        CheckpointError: the model's layers were packed for drafting, so that their weights cannot be read any more.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise CheckpointError(
            folder, "the model was packed for drafting", "save it before a drafter takes it over, or use pack=False"
        )
    write_folder(folder, model, {"format": FORMAT, "version": VERSION, "config": model.config.to_dict()}, dtype, extra)


def write_folder(
    folder: Path, model: nn.Module, description: Mapping[str, Any], dtype: torch.dtype, extra: Mapping[str, Any] | None
) -> None:
    """Write weights and then their description, each whole; drafters of every format lie in such folders.

    Args:
        folder: made if absent.
        model: whose weights.
        description: format, version and config.
        dtype: of the stored weights.
        extra: what else to note in ``config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int32)).cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if tensor is not None
    }
    write_whole(folder / WEIGHTS_FILE, lambda path: save_file(tensors, path))
    text = json.dumps({**description, **(extra or {})}, indent=2) + "\n"
    write_whole(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then move it there: a reader never sees half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    write(unfinished)
    unfinished.chmod(0o644)  # some writers make files that only their owner can read
    unfinished.replace(path)


def is_drafter(folder: Path) -> bool:
    """True when a folder holds a drafter in this library's own layout."""
    return has_format(folder, FORMAT)


def has_format(folder: Path, name: str) -> bool:
    """True when a folder's ``config.json`` says that it holds a drafter of this format."""
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("format") == name


def load_drafter(folder: Path) -> DSparkModel:
    """Read a drafter, in float32 on the CPU.

    Raises:
        CheckpointError: the folder holds no drafter, or a damaged one, or one of a newer version.
    """
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(folder, f"it cannot be read ({error})", "name the folder of a trained drafter") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise CheckpointError(
            folder,
            "it is not in this library's layout",
            "other layouts need the target: specflow_llm.dspark.layouts.load_for_target(folder, adapter)",
        )
    if described.get("version") != VERSION:
        raise CheckpointError(
            folder, f"it has version {described.get('version')}, this library reads {VERSION}", "update specflow"
        )
    try:
        model = DSparkModel(DSparkConfig.from_dict(described["config"]))
    except (KeyError, TypeError, InvalidSettingError) as error:  # activations and rotary kinds are looked up by name
        raise CheckpointError(folder, f"its config is wrong ({error})", "train or download it again") from error
    load_tensors(model, tensors, folder)
    return model


def check_tensors(model: DSparkModel, tensors: Mapping[str, torch.Tensor], origin: object) -> None:
    """Every tensor of a model must be there, with its shape, and no other.

    Raises:
        CheckpointError: some are absent, unknown or of another shape.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    absent, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if absent or unknown:
        raise CheckpointError(
            origin,
            f"tensors are absent ({', '.join(absent) or 'none'}) or unknown ({', '.join(unknown) or 'none'})",
            "check that config and weights belong together",
        )
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise CheckpointError(
                origin,
                f"{name} has shape {tuple(tensors[name].shape)}, the config says {tuple(tensor.shape)}",
                "check that config and weights belong together",
            )


def load_tensors(model: DSparkModel, tensors: Mapping[str, torch.Tensor], origin: object) -> None:
    """Fill a model.

    Raises:
        CheckpointError: see :func:`check_tensors`; or the draft vocabulary is not one.
    """
    check_tensors(model, tensors, origin)
    ids = tensors.get("draft_ids")
    if ids is not None and not (
        len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < model.config.vocab_size
    ):
        raise CheckpointError(
            origin,
            f"draft_ids are not different ids of a vocabulary of {model.config.vocab_size}",
            "check that config and weights belong together",
        )
    types = {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor is not None}
    model.load_state_dict({name: tensors[name].to(dtype) for name, dtype in types.items()})


def check_fits(config: DSparkConfig, adapter: TargetAdapter, origin: object) -> None:
    """Refuse a drafter made for a target of other sizes.

    Raises:
        CheckpointError: naming what differs.
    """
    for what, ours, theirs in (
        ("vocabulary", config.vocab_size, adapter.vocab_size),
        ("hidden size", config.hidden_size, adapter.hidden_size),
        ("number of layers", config.num_target_layers, adapter.num_layers),
    ):
        if ours != theirs:
            raise CheckpointError(
                origin,
                f"it was made for a target ({config.target}) whose {what} is {ours}; this target's is {theirs}",
                "use a drafter that was trained for this target, or train one: specflow-llm train",
            )
