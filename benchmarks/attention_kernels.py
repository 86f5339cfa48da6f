"""Why queries that share a key head are folded: time of attention over a masked cache, for each way to group queries.

    python benchmarks/attention_kernels.py --json attention_kernels.json

Shapes are the demo model's (9 query heads, 3 key heads of 64); the mask is ragged, as in a batch. Medians; ways take
turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specflow_llm.attention import folded_sdpa, grouped_sdpa
from specflow_llm.provenance import provenance

HEADS, KV_HEADS, SIZE = 9, 3, 64
CASES = ((1, 1, 100), (1, 8, 600), (8, 1, 600), (16, 8, 300), (64, 1, 100), (64, 1, 300))
"""(rows, tokens of the block, tokens in the cache)."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """What transformers' attention functions ask of a layer."""

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


LAYER = Layer()
WAYS: dict[str, Attention] = {
    "repeated (transformers)": lambda q, k, v, mask: sdpa_attention_forward(LAYER, q, k, v, mask)[0],
    "enable_gqa": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
    "folded": folded_sdpa,
    "chosen (here)": lambda q, k, v, mask: grouped_sdpa(LAYER, q, k, v, mask)[0],
}


def measure(case: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Median microseconds, by way."""
    rows, tokens, held = case
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, HEADS, tokens, SIZE, generator=generator).to(dtype)
    keys, values = (
        torch.randn(rows, KV_HEADS, held + 64, SIZE, generator=generator).to(dtype)[:, :, :held] for _ in range(2)
    )
    lengths = torch.randint(held // 2, held + 1, (rows,), generator=generator)
    mask = (torch.arange(held) < lengths[:, None])[:, None, None].expand(rows, 1, tokens, held)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats + 1):
        for name, attend in WAYS.items():
            started = time.perf_counter()
            attend(query, keys, values, mask)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(found[1:]) * 1e6 for name, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures with provenance to this file")
    options = parser.parse_args(arguments)
    results = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for case in CASES:
                figures = measure(case, dtype, options.repeats)
                results.append({"dtype": str(dtype), "case": case, "microseconds": figures})
                cells = "  ".join(f"{name} {value:7.0f}" for name, value in figures.items())
                print(f"{str(dtype)[6:]:9} rows {case[0]:2} tokens {case[1]} cache {case[2]}  {cells}", flush=True)
    if options.json is not None:
        described = {"provenance": dict(provenance(device=torch.device("cpu"))), "results": results}
        options.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
