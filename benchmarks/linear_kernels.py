"""Why linear layers are packed on CPUs: time of one product by number of rows, for each way PyTorch offers.

    python benchmarks/linear_kernels.py --json linear_kernels.json
    python benchmarks/linear_kernels.py --dtype bfloat16 --json linear_kernels_bf16.json

Every shape is held in enough copies to exceed the caches, as a model's layers do. Medians; ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from specflow_llm.provenance import provenance

SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
"""(out_features, in_features): the layers of the demo model, its output head last."""
ROWS = (1, 2, 4, 8, 16)
WORKING_SET = 120e6  # bytes

Way = tuple[Callable[[torch.Tensor, int], Any], Callable[[torch.Tensor, Any], torch.Tensor]]
"""(prepare a weight for a number of rows, multiply rows by it)."""

WAYS: dict[str, Way] = {
    "F.linear": (lambda weight, _rows: weight, F.linear),
    "MKL packed": (
        lambda weight, rows: (torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), weight, rows),  # noqa: SLF001
        lambda rows, packed: torch.ops.mkl._mkl_linear(rows, packed[0], packed[1], None, packed[2]),  # noqa: SLF001
    ),
    "oneDNN, plain layout": (
        lambda weight, _rows: weight,
        lambda rows, weight: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], ""),  # noqa: SLF001
    ),
    "oneDNN packed for 8 rows": (
        lambda weight, _rows: torch.ops.mkldnn._reorder_linear_weight(weight, 8),  # noqa: SLF001
        lambda rows, weight: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], ""),  # noqa: SLF001
    ),
}


def measure(shape: tuple[int, int], num_rows: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Median microseconds of one product, by way; a way this build lacks is left out."""
    copies = max(1, int(WORKING_SET / (shape[0] * shape[1] * dtype.itemsize)))
    weights = [torch.randn(shape).to(dtype) for _ in range(copies)]
    rows = torch.randn(1, num_rows, shape[1]).to(dtype)
    ready: dict[str, list[Any]] = {}
    for name, (prepare, multiply) in WAYS.items():
        try:
            prepared = [prepare(weight, num_rows) for weight in weights]
            multiply(rows, prepared[0])
        except (AttributeError, NotImplementedError, RuntimeError):
            continue
        ready[name] = prepared
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, prepared in ready.items():
            multiply = WAYS[name][1]
            started = time.perf_counter()
            for weight in prepared:
                multiply(rows, weight)
            seconds[name].append((time.perf_counter() - started) / copies)
    return {name: statistics.median(values) * 1e6 for name, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="write the figures with provenance to this file")
    options = parser.parse_args(arguments)
    dtype: torch.dtype = getattr(torch, options.dtype)
    results = []
    with torch.no_grad():
        for shape in SHAPES:
            for num_rows in ROWS:
                figures = measure(shape, num_rows, options.repeats, dtype)
                results.append({"shape": shape, "rows": num_rows, "microseconds": figures})
                cells = "  ".join(f"{name} {value:8.0f}" for name, value in figures.items())
                print(f"{shape[0]:>6} x {shape[1]:<5} rows {num_rows:>2}  microseconds: {cells}", flush=True)
    if options.json is not None:
        data = {"provenance": provenance(device=torch.device("cpu"), dtype=dtype), "results": results}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
