"""What drafts that branch are worth, by size: tokens per round, and whether their estimates keep their word.

Every draft is verified as it is, so the figures are counts; outputs are compared with plain decoding's.

    SPECFLOW_BENCH_DATA=spec_bench.jsonl python benchmarks/draft_trees.py --prompts spec-bench --per-category 1

``--trust`` sets what an alternative's probability counts for (:mod:`specflow_llm.drafters.dspark`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from specflow.policies import Fixed
from specflow.types import RoundReport
from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.drafters import dspark
from specflow_llm.evaluation.prompts import ChosenPrompts, choose_prompts
from specflow_llm.evaluation.settings import find_prompts
from specflow_llm.hub import DEMO_MODEL, LoadedModel, load_model
from specflow_llm.provenance import provenance


class Claims:
    """Adds up what verified drafts claimed and what was accepted of them."""

    def __init__(self) -> None:
        self.claimed = self.accepted = self.verified = self.rounds = 0.0

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        for survival, admitted, accepted in zip(report.survival, report.admitted, report.accepted, strict=True):
            if survival is not None and admitted:
                self.claimed += sum(survival[:admitted])
                self.accepted += accepted
                self.verified += admitted
                self.rounds += 1


def measure(
    loaded: LoadedModel, prompts: ChosenPrompts, params: SamplingParams, speculation: Speculation, plain: list[Any]
) -> dict[str, Any]:
    """One row."""
    claims = Claims()
    llm = LLM(loaded.model, tokenizer=loaded.tokenizer, speculation=speculation, observers=[claims], max_batch_size=13)
    done = llm.generate([list(ids) for ids in prompts.token_ids], params)
    lengths: dict[str, list[float]] = {}
    for category, completion in zip(prompts.categories, done, strict=True):
        lengths.setdefault(category, []).append(completion.metrics.mean_accepted_length)
    return {
        "drafter": speculation.drafter,
        "tree": speculation.tree,
        "tokens": speculation.max_draft_tokens,
        "temperature": params.temperature,
        "tokens_per_round": fmean(map(fmean, lengths.values())),
        "verified_per_round": claims.verified / max(1.0, claims.rounds),
        "claimed_per_accepted": claims.claimed / max(1.0, claims.accepted),
        "equal": sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(done, plain, strict=True)),
    }


def main() -> None:
    """Print a table; ``--json FILE`` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--drafter", nargs="+", default=["dspark", "ngram+dspark"])
    parser.add_argument("--prompts", help="JSONL file, or spec-bench; the package's own by default")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--sizes", type=int, nargs="+", default=[7, 15, 31], help="drafted tokens of a tree")
    parser.add_argument("--chain", type=int, default=8, help="drafted tokens of a chain")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--trust", type=float)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.trust is not None:
        dspark._TRUST.update({True: arguments.trust, False: arguments.trust})  # noqa: SLF001 - what is measured
    loaded = load_model(arguments.model, tokenizer="auto", dtype="auto", device="auto", pack=True)
    prompts = choose_prompts(
        loaded, find_prompts(arguments.prompts), max_tokens=arguments.max_tokens,
        per_category=arguments.per_category, limit=None, seed=0,
    )  # fmt: skip
    rows = []
    for temperature in arguments.temperatures:
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, seed=arguments.seed)
        plain = LLM(loaded.model, tokenizer=loaded.tokenizer, speculation=None).generate(
            [list(ids) for ids in prompts.token_ids], params
        )
        for drafter in arguments.drafter:
            for size, tree in [(arguments.chain, False), *[(size, True) for size in arguments.sizes]]:
                setting = Speculation(drafter=drafter, max_draft_tokens=size, tree=tree, policy=Fixed(size))
                row = measure(loaded, prompts, params, setting, plain)
                rows.append(row)
                print(
                    f"T={temperature:g} {drafter:14} {'trees' if tree else 'chains'} of {size:2}: "
                    f"{row['tokens_per_round']:.3f} tokens per round, {row['verified_per_round']:.1f} verified, "
                    f"claimed {row['claimed_per_accepted']:.2f} per accepted, {row['equal']} of {len(plain)} equal",
                    flush=True,
                )
    if arguments.json is not None:
        origin = provenance(device=loaded.model.device, dtype=loaded.model.dtype, seed=arguments.seed)
        data = {"provenance": dict(origin), "prompts": prompts.source, "rows": rows}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
