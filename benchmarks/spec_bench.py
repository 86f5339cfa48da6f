"""``specflow-llm bench`` on Spec-Bench's prompts, where they lie beside the checkout. All options of the command apply.

    python benchmarks/spec_bench.py --json bench.json --plot bench.png

Without the file the command's own small prompt set is used; it says which.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from typer import Typer

from specflow_llm.bench import bench_command

PROMPTS = Path(__file__).parents[1] / "../shared/data/spec_bench.jsonl"


def main() -> None:
    """Run the command, with ``--data`` filled in."""
    if PROMPTS.is_file() and "--data" not in sys.argv:
        sys.argv += ["--data", os.path.relpath(PROMPTS)]
    app = Typer(add_completion=False)
    app.command()(bench_command)
    app()


if __name__ == "__main__":
    main()
