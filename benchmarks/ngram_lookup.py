"""Replay recorded text through prompt lookup: how many tokens a round would emit, and whether survival is calibrated.

No model runs here. A record holds the ids of a prompt and of what a model answered; a draft is right as far as it
agrees with the answer, which is what greedy verification would find. Settings are compared with each other and with
the usual rule (search the last two tokens, then the last one, and continue like the *first* place they occur at).

    python benchmarks/ngram_lookup.py                          # synthetic text with known repetition
    python benchmarks/ngram_lookup.py --traces traces.json     # [{"prompt_ids": [...], "output_ids": [...]}, ...]
    python benchmarks/ngram_lookup.py --json > result.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from specflow_llm.drafters.base import DraftRequest, Proposal, RowId
from specflow_llm.drafters.ngram import NGramDrafter
from specflow_llm.drafters.suffix_automaton import SuffixAutomaton
from specflow_llm.sampling import RowSampler

BINS = 10
"""Equal-width bins of the reliability table."""

Propose = Callable[[RowId, Sequence[int], int], Proposal]


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt and its answer."""

    category: str
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(slots=True)
class Tally:
    """What a replay counted."""

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    forecasts: list[tuple[float, bool]] = field(default_factory=list)
    """Estimated survival of each drafted position, and whether it survived."""
    emitted_per_round: dict[str, float] = field(default_factory=dict)
    """By category."""


def first_match(row: RowId, token_ids: Sequence[int], limit: int) -> Proposal:
    """The baseline: for n = 2, then 1, continue like the first earlier occurrence of the last n tokens."""
    del row
    for size in (2, 1):
        tail = list(token_ids[-size:])
        for start in range(len(token_ids) - size):
            if list(token_ids[start : start + size]) == tail:
                return Proposal(list(token_ids[start + size : start + size + limit]))
    return Proposal(())


def with_drafter(drafter: NGramDrafter) -> Propose:
    """Ask a drafter for one proposal at a time."""
    unused = cast("RowSampler", None)  # lookup draws nothing

    def propose(row: RowId, token_ids: Sequence[int], limit: int) -> Proposal:
        return drafter.propose([DraftRequest(row, token_ids, limit, unused)])[0]

    return propose


def replay(records: Sequence[Record], propose: Propose, limit: int) -> Tally:
    """Decode every record greedily with drafts of up to ``limit`` tokens. The first token comes from the prefill."""
    tally = Tally()
    by_category: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        committed = record.prompt_ids + record.output_ids[:1]
        answer = record.output_ids[1:]
        rounds = 0
        while answer:
            started = time.perf_counter()
            proposal = propose(RowId(number), committed, min(limit, len(answer)))
            tally.seconds += time.perf_counter() - started
            accepted = 0
            while accepted < len(proposal.token_ids) and proposal.token_ids[accepted] == answer[accepted]:
                accepted += 1
            if proposal.survival is not None:
                tally.forecasts += [(estimate, k < accepted) for k, estimate in enumerate(proposal.survival)]
            rounds += 1
            tally.drafted += len(proposal.token_ids)
            tally.accepted += accepted
            committed += answer[: accepted + 1]
            answer = answer[accepted + 1 :]
        tally.rounds += rounds
        tally.emitted += len(record.output_ids) - 1
        totals = by_category.setdefault(record.category, [0, 0])
        totals[0] += len(record.output_ids) - 1
        totals[1] += rounds
    tally.emitted_per_round = {name: emitted / max(rounds, 1) for name, (emitted, rounds) in by_category.items()}
    return tally


def reliability(forecasts: Sequence[tuple[float, bool]]) -> tuple[list[dict[str, float]], float]:
    """The reliability table and the expected calibration error: mean |estimate - frequency| over equal-width bins."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for estimate, survived in forecasts:
        bins[min(int(estimate * BINS), BINS - 1)].append((estimate, survived))
    table, error = [], 0.0
    for index, members in enumerate(bins):
        if not members:
            continue
        mean = sum(estimate for estimate, _ in members) / len(members)
        frequency = sum(survived for _, survived in members) / len(members)
        error += abs(mean - frequency) * len(members) / len(forecasts)
        table.append({"from": index / BINS, "drafted": len(members), "mean_survival": mean, "survived": frequency})
    return table, error


def read_traces(path: Path) -> list[Record]:
    """Records from a JSON list, or from the list under ``"records"``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = data if isinstance(data, list) else data["records"]
    return [Record(row.get("category", "all"), row["prompt_ids"], row["output_ids"]) for row in rows]


def synthetic(seed: int, count: int = 12, prompt: int = 300, output: int = 128) -> list[Record]:
    """Text with known repetition: fresh tokens from a Zipf-like law, and copies of earlier spans.

    Records alternate between little copying (a tenth of the tokens), much (eight tenths), and a loop.
    """
    rng = random.Random(seed)
    records = []
    for number in range(count):
        category, copying = (("fresh", 0.1), ("copied", 0.8), ("loop", 0.0))[number % 3]
        text = [next(fresh_tokens(rng)) for _ in range(prompt)]
        loop = text[-7:]
        while len(text) < prompt + output:
            if category == "loop":
                text += loop
            elif rng.random() < copying / 12:  # a span has 12 tokens on average
                start = rng.randrange(len(text) - 24)
                text += text[start : start + rng.randrange(1, 24)]
            else:
                text.append(next(fresh_tokens(rng)))
        records.append(Record(category, text[:prompt], text[prompt : prompt + output]))
    return records


def fresh_tokens(rng: random.Random) -> Iterator[int]:
    """Token ids below 5000, small ones often."""
    while True:
        yield int(rng.paretovariate(0.7)) % 5000


def settings() -> Iterator[tuple[str, Callable[[], Propose]]]:
    """Everything that is compared, by name."""
    yield "first match, n <= 2", lambda: first_match
    for selection in ("recent", "frequent"):
        for min_match in (1, 2, 3):
            yield (
                f"{selection}, min_match={min_match}",
                lambda selection=selection, min_match=min_match: with_drafter(  # type: ignore[misc]
                    NGramDrafter(selection=selection, min_match=min_match)
                ),
            )
    for max_match in (2, 4, 8, 32, 64):
        yield (
            f"recent, max_match={max_match}",
            lambda max_match=max_match: with_drafter(NGramDrafter(max_match=max_match)),  # type: ignore[misc]
        )


def microseconds_per_token(records: Sequence[Record], repeats: int = 5) -> float:
    """Fastest of several builds of an automaton over all records, per token."""
    text = [token for record in records for token in record.prompt_ids + record.output_ids]
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        SuffixAutomaton(16).extend_many(text)
        best = min(best, time.perf_counter() - started)
    return best / len(text) * 1e6


def provenance(traces: Path | None, seed: int) -> dict[str, Any]:
    """What someone needs to repeat this run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "argv": sys.argv[1:],
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "traces": None if traces is None else hashlib.sha256(traces.read_bytes()).hexdigest(),
        "seed": seed if traces is None else None,
    }


def measure(records: Sequence[Record], limits: Sequence[int]) -> list[dict[str, Any]]:
    """One result per setting and limit."""
    results = []
    for limit in limits:
        for name, make in settings():
            tally = replay(records, make(), limit)
            table, error = reliability(tally.forecasts) if tally.forecasts else ([], None)
            results.append(
                {
                    "setting": name,
                    "limit": limit,
                    "mean_accepted_length": tally.emitted / max(tally.rounds, 1),
                    "rounds": tally.rounds,
                    "drafted": tally.drafted,
                    "accepted": tally.accepted,
                    "microseconds_per_round": tally.seconds / max(tally.rounds, 1) * 1e6,
                    "expected_calibration_error": error,
                    "reliability": table,
                    "mean_accepted_length_by_category": tally.emitted_per_round,
                }
            )
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the comparison, then the reliability of the default setting."""
    print(
        f"{'setting':26} {'limit':>5} {'emitted/round':>13} {'drafted':>8} {'accepted':>8} {'us/round':>8} {'ECE':>6}"
    )
    for result in results:
        error = result["expected_calibration_error"]
        print(
            f"{result['setting']:26} {result['limit']:5} {result['mean_accepted_length']:13.3f} {result['drafted']:8} "
            f"{result['accepted']:8} {result['microseconds_per_round']:8.0f} {'' if error is None else f'{error:6.3f}'}"
        )
    for result in results:
        if result["setting"] == "recent, min_match=1":
            print(f"\nreliability of survival, recent, min_match=1, limit {result['limit']}")
            print(f"{'survival':>9} {'drafted':>8} {'mean':>6} {'survived':>8}")
            for row in result["reliability"]:
                print(f"{row['from']:9.1f} {row['drafted']:8} {row['mean_survival']:6.3f} {row['survived']:8.3f}")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="recorded prompts and answers; synthetic text by default")
    parser.add_argument("--limits", type=int, nargs="+", default=[8, 16], help="draft lengths to try")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    records = synthetic(options.seed) if options.traces is None else read_traces(options.traces)
    results = measure(records, options.limits)
    if options.json:
        report = {
            "provenance": provenance(options.traces, options.seed),
            "microseconds_per_token": microseconds_per_token(records),
            "results": results,
        }
        print(json.dumps(report, indent=2))
    else:
        show(results)
        print(f"\nextending the automaton: {microseconds_per_token(records):.2f} us per token")


if __name__ == "__main__":
    main()
