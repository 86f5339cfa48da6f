"""How much faster n-gram and n-gram + DSpark decode than plain decoding: a packaged prompt of each category, in turns.

    python benchmarks/drafter_speed.py --repeats 2 --tokens 64

All share one set of weights, in one process. Each prompt is decoded plainly, with n-gram, and with both; the median of
the repeats counts, as a ratio to plain decoding of the same library. ``specflow-llm bench`` compares with transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.bench.prompts import load_prompts
from specflow_llm.provenance import provenance

WAYS = {"plain": None, "ngram": "ngram", "ngram+dspark": "ngram+dspark"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = LLM(speculation=None)
    llms = {"plain": base}
    for way in ("ngram", "ngram+dspark"):
        drafter = Speculation(drafter=way)
        llms[way] = LLM(speculation=drafter)
    prompts = {prompt.category: prompt for prompt in reversed(load_prompts(None).prompts)}
    params = SamplingParams(max_tokens=options.tokens)
    speeds: dict[str, dict[str, list[float]]] = {}
    for repeat in range(-1, options.repeats):
        for category, prompt in list(prompts.items())[: None if repeat >= 0 else 1]:
            for way, llm in llms.items():
                started = time.perf_counter()
                done = llm.chat([{"role": "user", "content": prompt.text or ""}], params)
                speed = len(done.token_ids) / (time.perf_counter() - started)
                if repeat >= 0:  # the round before is the warm-up
                    speeds.setdefault(category, {}).setdefault(way, []).append(speed)
    rows = {
        category: {way: statistics.median(found) for way, found in ways.items()} for category, ways in speeds.items()
    }
    for category, row in rows.items():
        ratios = "  ".join(f"{way} {row[way] / row['plain']:.2f}" for way in WAYS if way != "plain")
        print(f"{category:16} plain {row['plain']:.1f} tokens/s  {ratios}")
    for way in ("ngram", "ngram+dspark"):
        mean = math.exp(statistics.mean(math.log(row[way] / row["plain"]) for row in rows.values()))
        print(f"geometric mean of {way}: {mean:.2f}")
    if options.json is not None:
        described = {"provenance": provenance(dtype=base.model.dtype), "tokens_per_second": speeds}
        options.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
