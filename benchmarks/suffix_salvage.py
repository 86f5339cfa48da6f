"""Does offering rejected and unused draft tokens again gain anything? Counts only, so a busy machine does no harm.

A small model answers the packaged prompts greedily, once. Then every drafter is replayed over the answers with and
without salvage: a drafted token is accepted as far as it agrees with the answer, as greedy verification would find. The
draft model is the target with noise in its weights: no small model of the same family is needed, and the scale of the
noise sets how often it is right.

    python benchmarks/suffix_salvage.py --prompts 12 --tokens 64
    python benchmarks/suffix_salvage.py --answers answers.json --json > result.json   # writes, then reads the answers
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from specflow_llm import LLM, SamplingParams
from specflow_llm.drafters.base import Drafter, DrafterBase, DraftRequest, Proposal, RowId
from specflow_llm.drafters.combined import CombinedDrafter
from specflow_llm.drafters.model import ModelDrafter
from specflow_llm.drafters.ngram import NGramDrafter
from specflow_llm.drafters.salvage import SalvageDrafter
from specflow_llm.hub import load_model
from specflow_llm.provenance import provenance
from specflow_llm.sampling import RowSampler

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and what the model says to it."""

    category: str
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(slots=True)
class Result:
    """What a replay counted."""

    drafter: str
    limit: int
    min_survival: float
    """Drafts are executed as far as their estimates reach this, as a policy would."""
    rounds: int = 0
    emitted: int = 0
    executed: int = 0
    """Drafted tokens that were verified."""
    accepted: int = 0
    draft_forwards: int = 0
    salvaged: int = 0
    """Rounds whose draft was salvaged."""

    @property
    def tokens_per_round(self) -> float:
        """The correction or bonus included."""
        return self.emitted / max(1, self.rounds)


def replay(answers: Sequence[Answer], drafter: Drafter, result: Result, vocab_size: int) -> Result:
    """Decode every answer again with drafts of up to ``result.limit`` tokens."""
    for number, answer in enumerate(answers):
        row = RowId(number)
        greedy = SamplingParams(temperature=0.0)
        sampler = RowSampler(
            greedy, vocab_size=vocab_size, num_prompt_tokens=len(answer.prompt_ids), seed=0, rule="greedy"
        )
        committed, coming = answer.prompt_ids + answer.output_ids[:1], answer.output_ids[1:]
        while coming:
            limit = min(result.limit, len(coming) - 1)
            tokens: Sequence[int] = ()
            if limit > 0:
                tokens = admitted(drafter.propose([DraftRequest(row, committed, limit, sampler)])[0], result)
            hits = 0
            while hits < len(tokens) and tokens[hits] == coming[hits]:
                hits += 1
            result.rounds += 1
            result.executed += len(tokens)
            result.accepted += hits
            result.emitted += hits + 1
            committed = committed + coming[: hits + 1]
            coming = coming[hits + 1 :]
        drafter.release(row)
    return result


def admitted(proposal: Proposal, result: Result) -> Sequence[int]:
    """The tokens whose survival estimates reach ``result.min_survival``."""
    tokens, survival = proposal.token_ids, proposal.survival
    if survival is None:
        return tokens
    return tokens[: sum(estimate >= result.min_survival for estimate in survival)]


def answers_of(model: Any, count: int, tokens: int) -> list[Answer]:
    """The greedy answers to ``count`` of the packaged prompts, spread over the file."""
    text = files("specflow_llm").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines()]
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    llm = LLM(model.model, tokenizer=model.tokenizer, speculation=None, max_batch_size=4, check_model=False)
    completions = llm.generate(
        [[{"role": "user", "content": prompt["turns"][0]}] for prompt in chosen],
        SamplingParams(temperature=0.0, max_tokens=tokens),
    )
    return [
        Answer(prompt["category"], list(completion.prompt_token_ids), list(completion.token_ids))
        for prompt, completion in zip(chosen, completions, strict=True)
    ]


def noisy_copy(model: Any, scale: float) -> Any:
    """The model with noise of ``scale`` standard deviations in every matrix."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(scale * parameter.std() * noise)
    return twin


class Remembered(DrafterBase):
    """The drafts of a model, each computed once: greedy replays ask for the same continuations again and again.

    Args:
        inner: the drafter.
        limit: longest draft.
        known: drafts by request and number of committed tokens; filled here.
    """

    def __init__(self, inner: ModelDrafter, limit: int, known: dict[tuple[int, int], Proposal]) -> None:
        self._inner = inner
        self._limit = limit
        self._known = known
        self.num_forwards = 0
        """Draft-model calls that a drafter without this memory would have made."""

    @property
    def name(self) -> str:
        """The drafter's."""
        return self._inner.name

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The drafts, cut to the limits."""
        proposals = []
        for request in requests:
            key = (request.row, len(request.token_ids))
            if key not in self._known:
                (self._known[key],) = self._inner.propose([replace(request, limit=self._limit)])
            whole, limit = self._known[key], request.limit
            self.num_forwards += limit
            proposals.append(Proposal(whole.token_ids[:limit], survival=(whole.survival or ())[:limit]))
        return proposals

    def release(self, row: RowId) -> None:
        """Pass on."""
        self._inner.release(row)


Factory = Callable[[], tuple[Drafter, Remembered | None, SalvageDrafter | None]]


def settings(draft_model: Any, vocab_size: int, limit: int) -> Iterator[tuple[str, Factory]]:
    """Everything that is compared, by name: the drafter, and the parts of it whose counts are reported."""
    known: dict[tuple[int, int], Proposal] = {}

    def model() -> Remembered:
        return Remembered(ModelDrafter(draft_model, target_vocab_size=vocab_size, name="model"), limit, known)

    def salvaged(inner: Drafter, drafting: Remembered | None, cost: float) -> tuple[Any, Any, Any]:
        wrapped = SalvageDrafter(inner, cost=cost)
        return wrapped, drafting, wrapped

    def mixed() -> tuple[CombinedDrafter, Remembered]:
        drafting = model()
        return CombinedDrafter(NGramDrafter(), drafting), drafting

    yield "ngram", lambda: (NGramDrafter(), None, None)
    yield "ngram+salvage", lambda: salvaged(NGramDrafter(), None, 0.0)
    if draft_model is None:
        return
    for cost in (None, 0.0, 0.25):
        label = "" if cost is None else f"+salvage, draft cost {cost}"

        def alone(cost: float | None = cost) -> tuple[Any, Any, Any]:
            drafting = model()
            return (drafting, drafting, None) if cost is None else salvaged(drafting, drafting, cost)

        def both(cost: float | None = cost) -> tuple[Any, Any, Any]:
            drafter, drafting = mixed()
            return (drafter, drafting, None) if cost is None else salvaged(drafter, drafting, cost)

        yield f"model{label}", alone
        yield f"ngram or model{label}", both


def measure(
    answers: Sequence[Answer], draft_model: Any, limits: Sequence[int], thresholds: Sequence[float], vocab_size: int
) -> list[Result]:
    """One result per setting, limit and threshold."""
    results = []
    for limit, threshold in itertools.product(limits, thresholds):
        for name, make in settings(draft_model, vocab_size, limit):
            drafter, drafting, salvaging = make()
            result = replay(answers, drafter, Result(name, limit, threshold), vocab_size)
            result.draft_forwards = 0 if drafting is None else drafting.num_forwards
            result.salvaged = 0 if salvaging is None else salvaging.num_chosen.get("salvage", 0)
            results.append(result)
            line = f"{name:38} {limit:5} {threshold:8} {result.tokens_per_round:12.3f}"
            line = f"{line} {result.accepted:8} {result.executed:8}"
            print(f"{line} {result.draft_forwards:8} {result.salvaged:8} of {result.rounds}", file=sys.stderr)
    return results


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="name or path of the target")
    parser.add_argument("--prompts", type=int, default=12, help="how many of the packaged prompts")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--limits", type=int, nargs="+", default=[7], help="draft lengths to try")
    parser.add_argument(
        "--min-survival", type=float, nargs="+", default=[0.0], help="execute drafts as far as estimates reach this"
    )
    parser.add_argument("--noise", type=float, default=0.1, help="of the draft model; 0 leaves the draft model out")
    parser.add_argument("--answers", type=Path, help="file for the answers: read if it is there, else written")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.manual_seed(0)
    loaded = load_model(options.model, pack=False)  # noise is added to plain matrices
    if options.answers is not None and options.answers.exists():
        answers = [Answer(**record) for record in json.loads(options.answers.read_text(encoding="utf-8"))]
    else:
        answers = answers_of(loaded, options.prompts, options.tokens)
        if options.answers is not None:
            options.answers.write_text(json.dumps([asdict(answer) for answer in answers]), encoding="utf-8")
    vocab_size = int(loaded.model.config.vocab_size)
    draft_model = noisy_copy(loaded.model, options.noise) if options.noise > 0.0 else None
    heads = f"{'accepted':>8} {'executed':>8} {'forwards':>8} {'salvaged':>8}"
    print(f"{'drafter':38} {'limit':>5} {'survival':>8} {'tokens/round':>12} {heads}", file=sys.stderr)
    results = measure(answers, draft_model, options.limits, options.min_survival, vocab_size)
    if options.json:
        rows = [{**asdict(result), "tokens_per_round": result.tokens_per_round} for result in results]
        print(json.dumps({"provenance": provenance(), "noise": options.noise, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
