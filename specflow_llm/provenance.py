"""Where a measurement comes from: code, versions, machine, settings and date, as plain data for a JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

DISTRIBUTIONS = ("specflow-engine", "torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Distributions whose versions can change a result."""


def provenance(
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int | None = None,
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What someone needs to know to repeat a measurement, or to understand why theirs differs.

    Args:
        device: where the measured work ran.
        dtype: of the measured model's weights.
        seed: of everything random in the measurement.
        argv: the command and its arguments; None takes this process's own, without the folder the command lies in.

    Returns:
        Plain data. What cannot be found out is None, never left out.
    """
    place = torch.device(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]] if argv is None else list(argv),
        "code": _code(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in DISTRIBUTIONS},
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "device": {"type": place.type, "name": device_name(place)},
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "seed": seed,
    }


def machine() -> dict[str, Any]:
    """System, processor, cores, memory and last-level cache; memory and cache in bytes."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "memory_bytes": _memory("MemTotal"),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as the system gives it."""
    for line in _lines(cpuinfo):
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "cpu model"}:
            return value.strip()
    return platform.processor() or None


def device_name(device: torch.device) -> str | None:
    """The accelerator's name; the processor's for ``cpu``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() if device.type == "cpu" else device.type


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system tells."""
    return _memory("MemAvailable")


def last_level_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache of the first core, where the system tells."""
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    sizes = []
    for size in caches.glob("index*/size"):
        text = "".join(_lines(size)).strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)


def _code() -> dict[str, Any]:
    """The commit this package's own files belong to; None outside a checkout.

    An installed package may lie inside somebody else's repository (a virtual environment does), whose commit would be
    a lie. So the answer is only taken from a repository that tracks this very file.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"commit": None, "modified": None}
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": _git(here.parent, "rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 - fixed verbs
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _memory(field: str) -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
