"""Speedups of a saved benchmark run without the timed runs that other processes disturbed.

    python benchmarks/undisturbed.py benchmarks/results/spec_bench.json

A pair (candidate, generate) on a prompt counts when other processes used at most ``--cores`` cores during both runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

REFERENCE = "generate"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per candidate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path)
    parser.add_argument("--cores", type=float, default=0.2)
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    categories = [prompt["category"] for prompt in report["prompts"]["chosen"]]
    quiet = {
        (trial["candidate"], trial["prompt"]): trial["seconds"]
        for trial in report["trials"]
        if (trial["others_cores"] or 0.0) <= options.cores
    }
    print(f"{len(quiet)} of {len(report['trials'])} timed runs were undisturbed")
    for name in [row["info"]["name"] for row in report["summaries"][1:]]:
        ratios: dict[str, list[float]] = defaultdict(list)
        for prompt, category in enumerate(categories):
            if (name, prompt) in quiet and (REFERENCE, prompt) in quiet:
                ratios[category].append(quiet[REFERENCE, prompt] / quiet[name, prompt])
        means = {category: statistics.geometric_mean(values) for category, values in ratios.items()}
        pairs = sum(map(len, ratios.values()))
        print(f"{name}: {statistics.geometric_mean(means.values()):.2f} over {pairs} prompts")
        print("  " + "  ".join(f"{category} {mean:.2f}" for category, mean in means.items()))


if __name__ == "__main__":
    main()
