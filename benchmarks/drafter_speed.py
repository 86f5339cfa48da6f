"""How much faster n-gram, DSpark and both decode than plain decoding: a packaged prompt of each category, in turns.

    python benchmarks/drafter_speed.py --repeats 5 --tokens 64

All share one process and one kind of weights. Each prompt is decoded in every way; the median of the repeats counts,
as a ratio to plain decoding of the same library. ``specflow-llm bench`` compares with transformers.

Efficiency is what is left of the speed-up that counts promise: measured speed-up of decoding (prefill aside) over
tau * T(1) / (T_draft + T(L + 1)), with tau tokens per round, T(1) a plain forward, T(L + 1) a verifying one and T_draft
a draft, all from the same runs. What is missing is spent on verdicts and book-keeping.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.bench.prompts import load_prompts
from specflow_llm.provenance import provenance

PLAIN = "plain"
DRAFTERS = ("ngram", "dspark", "ngram+dspark")


class Totals:
    """Sums over one way's timed runs."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.rounds = self.emitted = 0
        self.decoding = 0.0

    @property
    def per_token(self) -> float:
        """Seconds of decoding, prefill aside."""
        return self.decoding / self.emitted

    @property
    def length(self) -> float:
        """Tokens per round."""
        return self.emitted / self.rounds

    def phase(self, name: str) -> float:
        """Seconds per round."""
        return self.seconds[name] / self.rounds


def efficiency(way: Totals, plain: Totals) -> float:
    """Measured over promised speed-up."""
    promised = way.length * plain.phase("execute") / (way.phase("predict") + way.phase("execute"))
    return plain.per_token / way.per_token / promised


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llms = {PLAIN: LLM(speculation=None)}
    llms.update({drafter: LLM(speculation=Speculation(drafter=drafter)) for drafter in DRAFTERS})
    prompts = {prompt.category: prompt for prompt in reversed(load_prompts(None).prompts)}
    params = SamplingParams(max_tokens=options.tokens)
    speeds: dict[str, dict[str, list[float]]] = {}
    totals = {way: Totals() for way in llms}
    for repeat in range(-1, options.repeats):
        for category, prompt in list(prompts.items())[: None if repeat >= 0 else 1]:
            for way, llm in llms.items():
                started = time.perf_counter()
                done = llm.chat([{"role": "user", "content": prompt.text or ""}], params)
                elapsed = time.perf_counter() - started
                if repeat < 0:  # the round before is the warm-up
                    continue
                speeds.setdefault(category, {}).setdefault(way, []).append(len(done.token_ids) / elapsed)
                mine = totals[way]
                for phase, seconds in done.metrics.phase_seconds.items():
                    mine.seconds[phase] += seconds
                mine.rounds += done.metrics.rounds
                mine.emitted += done.metrics.emitted
                mine.decoding += elapsed - done.metrics.phase_seconds.get("prefill", 0.0)
    rows = {
        category: {way: statistics.median(found) for way, found in ways.items()} for category, ways in speeds.items()
    }
    for category, row in rows.items():
        ratios = "  ".join(f"{way} {row[way] / row[PLAIN]:.2f}" for way in DRAFTERS)
        print(f"{category:16} plain {row[PLAIN]:.1f} tokens/s  {ratios}")
    summary = {}
    for way in DRAFTERS:
        mean = math.exp(statistics.mean(math.log(row[way] / row[PLAIN]) for row in rows.values()))
        mine = totals[way]
        summary[way] = {
            "speedup": mean, "efficiency": efficiency(mine, totals[PLAIN]), "tokens_per_round": mine.length,
            "milliseconds_per_round": {phase: 1e3 * mine.phase(phase) for phase in mine.seconds},
        }  # fmt: skip
        print(
            f"{way:13} geometric mean {mean:.2f}  tokens per round {mine.length:.2f}  efficiency "
            f"{summary[way]['efficiency']:.2f}"
        )
    if options.json is not None:
        described = {
            "provenance": provenance(dtype=llms[PLAIN].model.dtype), "tokens_per_second": speeds, "summary": summary,
            "plain_milliseconds_per_round": {name: 1e3 * totals[PLAIN].phase(name) for name in totals[PLAIN].seconds},
        }  # fmt: skip
        options.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
