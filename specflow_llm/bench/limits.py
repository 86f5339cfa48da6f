"""What the hardware allows: memory bandwidth, bytes a forward must read, and what forwards over several tokens cost.

A decoding step reads every weight once, so no plain decoder emits more than bandwidth / weight bytes tokens per second;
one that emits ``tau`` tokens per forward emits at most ``tau`` times that. Speculation pays as far as a forward over
k + 1 tokens costs less than k + 1 forwards: with v(n) = time of a forward over n tokens / time over one, the speedup is
tau / v(k + 1) (Leviathan et al. 2023, section 3, without their assumption that v is 1).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from ..architecture import inspect_model
from ..provenance import last_level_cache_bytes
from ..selfcheck import build_target
from ..target import DEFAULT_PREFILL_CHUNK
from .measure import rotated, synchronise

_CACHES = 8
"""The streamed buffer is this many times the last-level cache, so that little of it is found there."""
_UNKNOWN_CACHE = 64 * 2**20
_GPU_BUFFER = 4 * 2**30
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Measured memory bandwidth, in bytes per second."""

    best: float
    """The largest of ``kernels``."""
    kernels: Mapping[str, float]
    """Several ways to stream the buffer: none of them is the fastest everywhere."""
    buffer_bytes: int


def memory_bandwidth(device: torch.device, *, buffer_bytes: int | None = None, repeats: int = 5) -> Bandwidth:
    """Stream a buffer that no cache holds, with the current threads; the fastest pass of the fastest kernel counts.

    Args:
        device: whose memory.
        buffer_bytes: None takes eight times the last-level cache (4 GiB on a GPU).
        repeats: passes per kernel.
    """
    if buffer_bytes is None:
        cache = last_level_cache_bytes() or _UNKNOWN_CACHE
        buffer_bytes = _GPU_BUFFER if device.type == "cuda" else _CACHES * cache
    columns = max(1, buffer_bytes // 4 // _ROWS)
    matrix = torch.ones(_ROWS, columns, device=device)
    vector = torch.ones(columns, device=device)
    twin = torch.empty_like(matrix)
    size = matrix.numel() * matrix.element_size()
    kernels: dict[str, tuple[Callable[[], object], int]] = {
        "sum": (matrix.sum, size),
        "sum of rows": (lambda: matrix.sum(dim=1), size),
        "matrix x vector": (lambda: matrix @ vector, size),
        "copy": (lambda: twin.copy_(matrix), 2 * size),
    }
    rates = {}
    for name, (kernel, moved) in kernels.items():
        kernel()
        rates[name] = moved / min(_seconds(kernel, device) for _ in range(repeats))
    return Bandwidth(max(rates.values()), rates, size)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a forward over one token reads.

    All parameters, each once, except an input embedding of its own: of that, one row is read. Mixtures of experts read
    less than this.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding.weight else embedding.weight
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter is not looked_up
    )


def forward_costs(
    models: Mapping[str, PreTrainedModel], *, context: int, widths: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """Median seconds of a target forward over n tokens, for each model and each width n.

    Args:
        models: by name; measured in turns.
        context: committed tokens before the block.
        widths: numbers of tokens.
        repeats: passes over all widths and models, after one that does not count.
    """
    targets = {}
    for name, model in models.items():
        target = build_target(model, inspect_model(model), check=False, prefill_chunk=DEFAULT_PREFILL_CHUNK)
        target.open([[token % target.architecture.vocab_size for token in range(context + 1)]])
        targets[name] = target
    samples: dict[tuple[str, int], list[float]] = {}
    pairs = [(name, width) for width in widths for name in targets]
    for turn in range(repeats + 1):
        for name, width in rotated(pairs, turn * (len(pairs) // (repeats + 1))):
            target, device = targets[name], models[name].device
            block = [[token % target.architecture.vocab_size for token in range(width)]]
            seconds = _seconds(lambda target=target, block=block: target.forward(block), device)  # type: ignore[misc]
            if turn:
                samples.setdefault((name, width), []).append(seconds)
    return {name: {width: statistics.median(samples[name, width]) for width in widths} for name in targets}


def cost_at(costs: Mapping[int, float], width: float) -> float:
    """Seconds of a forward over ``width`` tokens: linear between measured widths, and beyond the last two."""
    points = sorted(costs.items())
    if len(points) == 1:
        return points[0][1]
    below, above = points[0], points[1]
    for left, right in pairwise(points):
        below, above = left, right
        if width <= right[0]:
            break
    slope = (above[1] - below[1]) / (above[0] - below[0])
    return below[1] + slope * (width - below[0])


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - started
