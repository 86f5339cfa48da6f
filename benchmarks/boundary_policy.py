"""Is it worth drafting less across the end of a sentence? `Boundary` around `Adaptive`, against `Adaptive` alone.

Two questions, on the packaged prompts, decoded greedily one at a time:

* Are drafts that begin at a sentence end accepted less far? Counted with everything verified that is drafted (`Fixed`).
* What does a cap of so many tokens there change: rounds, verified tokens, and time, with the two policies in turns?

    python benchmarks/boundary_policy.py --drafter ngram+dspark --tokens 96 --json boundary.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specflow.policies import Adaptive, Boundary, Fixed
from specflow.types import RoundReport
from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.bench.prompts import load_prompts
from specflow_llm.boundaries import SentenceEnds
from specflow_llm.hub import DEMO_MODEL
from specflow_llm.provenance import provenance

DRAFT_TOKENS = 8


@dataclass(slots=True)
class Side:
    """Drafts that begin at a boundary, or elsewhere."""

    drafts: int = 0
    accepted: int = 0
    first_accepted: int = 0

    def as_dict(self) -> dict[str, float]:
        """Means per draft."""
        return {
            "drafts": self.drafts,
            "accepted_tokens": self.accepted / max(1, self.drafts),
            "first_token_accepted": self.first_accepted / max(1, self.drafts),
        }


class Watched(Fixed):
    """Verifies everything, and counts what was accepted at sentence ends and elsewhere."""

    def __init__(self, ends: SentenceEnds) -> None:
        super().__init__(DRAFT_TOKENS)
        self._ends = ends
        self._at_end: list[bool] = []
        self.sides = {True: Side(), False: Side()}

    def limits(self, chains: Any) -> Any:
        """As ``Fixed``, noting where the chains stand."""
        self._at_end = [self._ends(view) == 0 for view in chains]
        return super().limits(chains)

    def observe(self, report: RoundReport) -> None:
        """Count."""
        for at_end, admitted, accepted in zip(self._at_end, report.admitted, report.accepted, strict=True):
            if admitted:
                side = self.sides[at_end]
                side.drafts += 1
                side.accepted += accepted
                side.first_accepted += accepted > 0
        super().observe(report)


def watching(drafter: str, make: Any, loaded: LLM | None = None) -> tuple[LLM, Any]:
    """An LLM whose policy knows where sentences end."""
    ends = SentenceEnds()
    policy = make(ends)
    source: Any = DEMO_MODEL if loaded is None else loaded.model
    tokenizer: Any = "auto" if loaded is None else loaded.tokenizer
    llm = LLM(source, tokenizer=tokenizer, speculation=Speculation(drafter=drafter, policy=policy))
    ends.watch(llm.engine.backend, llm.tokenizer)
    return llm, policy


def answer(llm: LLM, text: str, tokens: int) -> tuple[Any, float]:
    """(completion, seconds) of one prompt."""
    started = time.perf_counter()
    done = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=tokens))
    return done, time.perf_counter() - started


def drafts_by_place(llm: LLM, policy: Watched, prompts: Sequence[str], tokens: int) -> dict[str, dict[str, float]]:
    """What becomes of drafts that begin at sentence ends, and of the others."""
    for text in prompts:
        answer(llm, text, tokens)
    return {("at a sentence end" if at_end else "elsewhere"): side.as_dict() for at_end, side in policy.sides.items()}


def compare(llms: Mapping[str, LLM], prompts: Sequence[str], tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Counts and speed of every policy; the first is the baseline. They take turns, in rotating order."""
    times: dict[str, dict[int, list[float]]] = {name: {} for name in llms}
    counts = {name: Counter[str]() for name in llms}
    for text in prompts[:2]:  # warm-up
        for llm in llms.values():
            answer(llm, text, tokens)
    for repeat in range(repeats):
        for number, text in enumerate(prompts):
            names = list(llms)
            turn = (repeat + number) % len(names)
            for name in names[turn:] + names[:turn]:
                done, seconds = answer(llms[name], text, tokens)
                times[name].setdefault(number, []).append(seconds / len(done.token_ids))
                for count in ("rounds", "admitted", "emitted"):
                    counts[name][count] += getattr(done.metrics, count)
    baseline = next(iter(times.values()))
    rows = {}
    for name, found in times.items():
        logs = [math.log(statistics.median(baseline[at]) / statistics.median(found[at])) for at in found]
        rows[name] = {
            "tokens_per_round": counts[name]["emitted"] / counts[name]["rounds"],
            "verified_per_token": counts[name]["admitted"] / counts[name]["emitted"],
            "speed": math.exp(statistics.mean(logs)),
        }
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="ngram+dspark")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--short", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = [prompt.text or "" for prompt in load_prompts(None).prompts]
    first, watched = watching(options.drafter, Watched)
    drafts = drafts_by_place(first, watched, prompts, options.tokens)
    for name, side in drafts.items():
        print(
            f"{name:18} {side['drafts']:5.0f} drafts, {side['accepted_tokens']:.3f} tokens accepted per draft, first "
            f"token {side['first_token_accepted']:.3f}"
        )
    llms = {"adaptive": watching(options.drafter, lambda _ends: Adaptive(DRAFT_TOKENS, padded=True), first)[0]}
    for short in options.short:
        llms[f"boundary, {short} there"] = watching(
            options.drafter,
            lambda ends, short=short: Boundary(Adaptive(DRAFT_TOKENS, padded=True), ends, short=short),
            first,
        )[0]
    rows = compare(llms, prompts, options.tokens, options.repeats)
    for name, row in rows.items():
        print(
            f"{name:18} {row['tokens_per_round']:.3f} tokens per round, {row['verified_per_token']:.3f} verified per "
            f"token, speed {row['speed']:.3f}"
        )
    if options.json is not None:
        described = {"provenance": dict(provenance(dtype=first.model.dtype)), "drafts": drafts, "policies": rows}
        options.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
