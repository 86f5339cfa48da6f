"""Exactness and speed on a GPU, in one run of at most eight minutes.

    PYTHONPATH=. python benchmarks/gpu.py --out gpu_bench.json      # on a GPU
    PYTHONPATH=. python benchmarks/gpu.py --device cpu --small      # a rehearsal: the same code with tiny shapes

Parts, in this order; what the time does not allow is skipped and listed:

* parity: tiny models of several architectures in float32, token for token against transformers' generate;
* the memory bandwidth, and for 1B- and 8B-shaped Llama models in bfloat16 with batches of 1, 8 and 32:
  forward cost by block width, plain decoding, speculation with 2, 4 and 8 drafts, and generate;
* host synchronisations and milliseconds per round by phase; kernel time against wall time (the launch overhead);
* the same decoding with static shapes, replayed as CUDA graphs.

Speed needs no trained weights, but an exact comparison in bfloat16 needs decisive logits. So the output head of the
large models is the embedding moved on by one row: the token after t is t + 1, by a margin that no rounding reaches, at
the full cost of every layer. An oracle drafter knows that output and spoils each token with a set probability, which
fixes the acceptance rate, so that the measured speedup can be held against tau * T(1) / (T_draft + T(k + 1)).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from static_target import StaticTarget
from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow.types import PhaseSeconds, RoundReport
from specflow_llm import LLM, DrafterBase, DraftRequest, Engine, EngineConfig, Proposal, SamplingParams, Speculation
from specflow_llm.architecture import Architecture, inspect_model
from specflow_llm.provenance import provenance
from specflow_llm.target import SlotTarget

SEED = 0
SPEC_SHEET_BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100-SXM4-80GB": 2.04e12}
"""Bytes per second on the vendors' data sheets, by a part of the device's name."""


# -------------------------------------------------------------------------------------------------- sizes and settings


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    shapes: Mapping[str, Mapping[str, int]]
    """Llama shapes by name."""
    batches: Sequence[int]
    draft_lengths: Sequence[int]
    acceptances: Sequence[float]
    """Probability that the oracle leaves a draft token as it is."""
    prompt: int
    tokens: int
    widths: Sequence[int]
    cost_repeats: int
    stream_bytes: int
    parity_tokens: int


FULL = Sizes(
    shapes={
        "llama-1b": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
        },
        "llama-8b": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    },
    batches=(1, 8, 32),
    draft_lengths=(2, 4, 8),
    acceptances=(0.7, 0.9),
    prompt=128,
    tokens=96,
    widths=(1, 2, 3, 4, 5, 8, 9, 12, 16),
    cost_repeats=5,
    stream_bytes=8 * 2**30,
    parity_tokens=40,
)
SMALL = Sizes(
    shapes={
        "tiny-2-layers": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
        },
        "tiny-3-layers": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
        },
    },
    batches=(1, 3),
    draft_lengths=(2, 4),
    acceptances=(0.7,),
    prompt=12,
    tokens=16,
    widths=(1, 3, 5),
    cost_repeats=2,
    stream_bytes=2**26,
    parity_tokens=12,
)
VOCABULARY = {"full": 128256, "small": 512}


class Run:
    """The state of one run: results so far, the time left, and what was skipped or failed."""

    def __init__(self, device: torch.device, sizes: Sizes, out: Path, seconds: float) -> None:
        self.device = device
        self.sizes = sizes
        self.results: dict[str, Any] = {}
        self._out = out
        self._ends = time.monotonic() + seconds

    def part(self, name: str, seconds: float, work: Callable[[], Any]) -> Any:
        """Do a part if the time allows, keep its result under ``name``, and save; None if it was skipped or failed.

        A failed part costs its own result only: the machine is lent for minutes, and the other parts are worth having.
        """
        left = self._ends - time.monotonic()
        if left < seconds:
            self._note("skipped", f"{name}: needs about {seconds:.0f} s, {left:.0f} s are left")
            return None
        print(f"[{left:5.0f} s left] {name}", flush=True)
        started = time.monotonic()
        try:
            result = work()
        except Exception:  # noqa: BLE001 - reported, see above
            self._note("failed", f"{name}: {traceback.format_exc(limit=-6)}")
            return None
        finally:
            self.results.setdefault("seconds", {})[name] = round(time.monotonic() - started, 2)
        self.results[name] = result
        self.save()
        return result

    def _note(self, kind: str, text: str) -> None:
        print(f"{kind}: {text}", flush=True)
        self.results.setdefault(kind, []).append(text)
        self.save()

    def save(self) -> None:
        """Write what there is: a run that is cut off leaves its results behind."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of an action, the device's work included."""
    synchronise(device)
    started = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------------- drafters


class Oracle(DrafterBase):
    """Knows the plain output, and spoils each of its tokens with probability ``1 - acceptance``.

    Whether a token is spoiled depends on seed, sequence and position alone, so runs can be repeated and compared.

    Args:
        known: whole sequences, prompt and output.
        prompt: length of every prompt.
        acceptance: probability that a token is left as it is.
        vocab_size: of the target.
    """

    def __init__(self, known: Sequence[Sequence[int]], prompt: int, acceptance: float, vocab_size: int) -> None:
        self._known = {tuple(sequence[:prompt]): list(sequence) for sequence in known}
        self._prompt = prompt
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The known continuation, spoiled here and there."""
        return [Proposal(self._continuation(request)) for request in requests]

    def knows(self, token_ids: Sequence[int]) -> bool:
        """True for a sequence that begins with a known prompt."""
        return tuple(token_ids[: self._prompt]) in self._known

    def _continuation(self, request: DraftRequest) -> list[int]:
        start = len(request.token_ids)
        key = tuple(request.token_ids[: self._prompt])
        tokens = self._known[key][start : start + request.limit]
        return [
            token
            if uniform(key, start + offset) < self._acceptance
            else (token + self._vocab_size // 2) % self._vocab_size
            for offset, token in enumerate(tokens)
        ]


def uniform(key: tuple[int, ...], position: int) -> float:
    """A number in [0, 1) that depends on seed, sequence and position alone."""
    digest = hashlib.blake2b(f"{SEED} {key[-3:]} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def expected_length(acceptance: float, drafts: int) -> float:
    """Tokens per round for independent acceptance: (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return float(drafts + 1) if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


# --------------------------------------------------------------------------------------------------------------- parity

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral, sliding window": ("MistralConfig", {"sliding_window": 12, "head_dim": 8}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma3, alternating": (
        "Gemma3TextConfig",
        {
            "head_dim": 8, "sliding_window": 12, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2, absolute positions": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "mixtral, experts": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "falcon, one key head": ("FalconConfig", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "mamba2, recurrent": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
}  # fmt: skip


def tiny_model(name: str, device: torch.device) -> PreTrainedModel:
    """A random model in float32 whose logits are far enough apart for an equality to mean something."""
    class_name, fields = ARCHITECTURES[name]
    base = {key: TINY[key] for key in ("vocab_size", "initializer_range")} if class_name == "GPT2Config" else TINY
    config = getattr(transformers, class_name)(**{**base, **fields, "bos_token_id": None, "eos_token_id": None})
    torch.manual_seed(3)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and float(parameter.std()) < 0.1:
                parameter.normal_(0.0, 0.3)
    return model.to(device).eval()


def greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What transformers' greedy generate adds to prompts of one length."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    added: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return added


def parity_of(name: str, run: Run) -> dict[str, Any]:
    """Outputs of every drafter for a ragged batch, against generate's for each prompt alone."""
    model = tiny_model(name, run.device)
    tokens = run.sizes.parity_tokens
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [11]]
    wanted = [greedy(model, [prompt], tokens)[0] for prompt in prompts]
    oracles = {
        f"oracle {acceptance}": [
            Oracle([[*prompt, *output]], len(prompt), acceptance, 64)
            for prompt, output in zip(prompts, wanted, strict=True)
        ]
        for acceptance in (0.0, 0.7, 1.0)
    }
    drafters: dict[str, Any] = {"none": None, "ngram": "ngram", **{name: Team(team) for name, team in oracles.items()}}
    found: dict[str, Any] = {"distinct_tokens": len({token for output in wanted for token in output})}
    for label, drafter in drafters.items():
        llm = LLM(model, speculation=Speculation(drafter=drafter, max_draft_tokens=5, policy="fixed"))
        done = llm.generate(prompts, SamplingParams(max_tokens=tokens))
        outputs = [list(completion.token_ids) for completion in done]
        found[label] = {
            "equal": outputs == wanted,
            "mean_accepted_length": round(sum(map(len, outputs)) / sum(item.metrics.rounds for item in done), 3),
        }
        if outputs != wanted:
            found[label]["differences"] = [
                gap_at_difference(model, prompt, left, right)
                for prompt, left, right in zip(prompts, wanted, outputs, strict=True)
                if left != right
            ]
    return found


class Team(DrafterBase):
    """Asks the first oracle that knows a request's prompt."""

    def __init__(self, oracles: Sequence[Oracle]) -> None:
        self._oracles = oracles

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Each request's proposal from its own oracle."""
        return [
            next(oracle for oracle in self._oracles if oracle.knows(request.token_ids)).propose([request])[0]
            for request in requests
        ]


def gap_at_difference(
    model: PreTrainedModel, prompt: Sequence[int], left: Sequence[int], right: Sequence[int]
) -> dict[str, float]:
    """Where two outputs part, and how far apart the two best logits are there: rounding can only swap near ties."""
    place = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    ids = torch.tensor([[*prompt, *left[:place]]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1].float()
    best = logits.topk(2).values
    return {"position": place, "top_two_gap": float(best[0] - best[1]), "logit_std": float(logits.std())}


# -------------------------------------------------------------------------------------------------------- large models


def counting_model(
    shape: Mapping[str, int], vocab_size: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A Llama of the given shape whose next token is always the last one plus one (modulo the vocabulary)."""
    config = transformers.LlamaConfig(
        **shape,
        vocab_size=vocab_size,
        num_key_value_heads=shape["num_attention_heads"] // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0) * shape["hidden_size"] ** -0.5)
        embedding.mul_(100.0)  # so large that the layers' additions hardly turn the direction
    return model.eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes a forward over one token reads: everything but the embedding, of which it reads a row."""
    embedding = model.get_input_embeddings().weight
    return sum(item.numel() * item.element_size() for item in model.parameters() if item is not embedding)


def memory_bandwidth(run: Run) -> dict[str, Any]:
    """Bytes per second of streaming a large buffer, by several kernels, and the data sheet's figure where known."""
    columns = run.sizes.stream_bytes // 2 // 4096
    matrix = torch.ones(4096, columns, dtype=torch.bfloat16, device=run.device)
    vector = torch.ones(columns, dtype=torch.bfloat16, device=run.device)
    twin = torch.empty_like(matrix)
    size = matrix.numel() * 2
    kernels: dict[str, tuple[Callable[[], object], int]] = {
        "sum of rows": (lambda: matrix.sum(dim=1), size),
        "matrix x vector": (lambda: matrix @ vector, size),
        "copy (read and write)": (lambda: twin.copy_(matrix), 2 * size),
    }
    rates = {}
    for name, (kernel, moved) in kernels.items():
        kernel()
        rates[name] = moved / min(seconds_of(kernel, run.device) for _ in range(5))
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
    sheet = next((rate for part, rate in SPEC_SHEET_BANDWIDTH.items() if part in name), None)
    return {"kernels": rates, "best": max(rates.values()), "data_sheet": sheet}


def starts(run: Run, vocab_size: int, batch: int) -> list[list[int]]:
    """Prompts of random tokens; the last token of each decides its output."""
    generator = torch.Generator().manual_seed(SEED)
    table: list[list[int]] = torch.randint(
        vocab_size, (max(run.sizes.batches), run.sizes.prompt), generator=generator
    ).tolist()
    return table[:batch]


@dataclass(slots=True)
class Rounds:
    """An observer that adds up what rounds did."""

    count: int = 0
    emitted: int = 0
    row_rounds: int = 0
    """Rounds times the rows that took part."""
    seconds: dict[str, float] = field(default_factory=dict)

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        self.count += 1
        self.emitted += sum(report.emitted)
        self.row_rounds += len(report.emitted)
        for name in PhaseSeconds.__slots__:
            self.seconds[name] = self.seconds.get(name, 0.0) + getattr(report.seconds, name)

    def reset(self) -> None:
        """Forget the warm-up."""
        self.count = self.emitted = self.row_rounds = 0
        self.seconds = {}

    @property
    def decode_seconds(self) -> float:
        """Seconds of all rounds; prefill is not among them."""
        return sum(self.seconds.values())

    def figures(
        self, batch: int, tokens: int, outputs: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Plain data about a run that decoded ``batch`` rows of ``tokens`` tokens."""
        return {
            "tokens_per_second": batch * tokens / self.decode_seconds,
            "decode_seconds": self.decode_seconds,
            "rounds": self.count,
            "mean_accepted_length": self.emitted / self.row_rounds,
            "milliseconds_per_round": {name: 1e3 * value / self.count for name, value in self.seconds.items()},
            "equal_to_generate": [list(output) for output in outputs] == [list(output) for output in wanted],
        }


class Bench:
    """Everything that is measured with one model.

    Args:
        run: sizes, device and results.
        name: of the shape.
        vocab_size: of the model.
    """

    def __init__(self, run: Run, name: str, vocab_size: int) -> None:
        self.run = run
        self.name = name
        self.vocab_size = vocab_size
        dtype = torch.bfloat16
        self.model = counting_model(run.sizes.shapes[name], vocab_size, run.device, dtype)
        self.architecture: Architecture = inspect_model(self.model)
        self.bytes = weight_bytes(self.model)
        self.costs: dict[int, dict[int, float]] = {}
        self.wanted: dict[int, list[list[int]]] = {}

    def describe(self) -> dict[str, Any]:
        """Sizes, and the check of the model against itself that LLM does on loading."""
        started = time.perf_counter()
        LLM(self.model, speculation=None)
        return {
            "parameters": sum(item.numel() for item in self.model.parameters()),
            "weight_bytes": self.bytes,
            "self_check_seconds": time.perf_counter() - started,
        }

    def forward_costs(self) -> dict[str, dict[str, float]]:
        """Median milliseconds of a target forward by batch and block width, with a prompt in the cache."""
        for batch in self.run.sizes.batches:
            target = SlotTarget(self.model, self.architecture)
            target.open(starts(self.run, self.vocab_size, batch))
            table = {}
            for width in self.run.sizes.widths:
                blocks = [list(range(width))] * batch
                target.forward(blocks)
                table[width] = statistics.median(
                    seconds_of(lambda target=target, blocks=blocks: target.forward(blocks), self.run.device)  # type: ignore[misc]
                    for _ in range(self.run.sizes.cost_repeats)
                )
            self.costs[batch] = table
        return {
            str(batch): {str(width): 1e3 * cost for width, cost in table.items()} for batch, table in self.costs.items()
        }

    def generate(self, batch: int) -> dict[str, Any]:
        """Transformers' generate; its time for one token is taken as the prefill."""
        prompts, tokens = starts(self.run, self.vocab_size, batch), self.run.sizes.tokens
        greedy(self.model, prompts, 2)
        prefill = seconds_of(lambda: greedy(self.model, prompts, 1), self.run.device)
        self.wanted[batch] = []
        whole = seconds_of(lambda: self.wanted[batch].extend(greedy(self.model, prompts, tokens)), self.run.device)
        counted = [[(prompt[-1] + 1 + step) % self.vocab_size for step in range(tokens)] for prompt in prompts]
        return {
            "tokens_per_second": batch * (tokens - 1) / (whole - prefill),
            "seconds": whole,
            "prefill_seconds": prefill,
            "counts_as_built": self.wanted[batch] == counted,
        }

    def known(self, batch: int) -> list[list[int]]:
        """Prompts and plain outputs, one after the other."""
        prompts = starts(self.run, self.vocab_size, batch)
        return [[*prompt, *output] for prompt, output in zip(prompts, self.wanted[batch], strict=True)]

    def oracle(self, batch: int, acceptance: float) -> Oracle:
        """An oracle for the batch's prompts."""
        return Oracle(self.known(batch), self.run.sizes.prompt, acceptance, self.vocab_size)

    def decode(self, batch: int, drafts: int, acceptance: float) -> dict[str, Any]:
        """This library's decoding through LLM; 0 drafts is plain."""
        rounds = Rounds()
        speculation = None
        if drafts:
            speculation = Speculation(drafter=self.oracle(batch, acceptance), max_draft_tokens=drafts, policy="fixed")
        llm = LLM(self.model, speculation=speculation, check_model=False, observers=[rounds])
        prompts, tokens = starts(self.run, self.vocab_size, batch), self.run.sizes.tokens
        llm.generate(prompts, SamplingParams(max_tokens=min(8, tokens)))
        rounds.reset()
        synchronise(self.run.device)
        done = llm.generate(prompts, SamplingParams(max_tokens=tokens))
        return rounds.figures(batch, tokens, [item.token_ids for item in done], self.wanted[batch])

    def speeds(self, batch: int) -> dict[str, Any]:
        """Generate, plain decoding and every speculation setting at one batch size, and the formula's prediction."""
        found: dict[str, Any] = {"generate": self.generate(batch), "plain": self.decode(batch, 0, 0.0)}
        plain = found["plain"]
        for drafts in self.run.sizes.draft_lengths:
            for acceptance in self.run.sizes.acceptances:
                row = self.decode(batch, drafts, acceptance)
                row["speedup_over_plain"] = plain["decode_seconds"] / row["decode_seconds"]
                row["expected_length"] = expected_length(acceptance, drafts)
                draft_seconds = row["milliseconds_per_round"]["predict"] / 1e3
                costs = self.costs.get(batch, {})
                if 1 in costs and drafts + 1 in costs:
                    # tau as it came out: the formula's own tau needs an endless output and full blocks to its end.
                    row["predicted_speedup"] = (
                        row["mean_accepted_length"] * costs[1] / (draft_seconds + costs[drafts + 1])
                    )
                    row["measured_over_predicted"] = row["speedup_over_plain"] / row["predicted_speedup"]
                found[f"{drafts} drafts, acceptance {acceptance}"] = row
        rate = self.run.results.get("bandwidth", {}).get("best")
        for row in found.values():
            if rate:
                # Each round reads the weights once, whatever the batch and the block; keys and values come on top.
                row["limit_tokens_per_second"] = row.get("mean_accepted_length", 1.0) * batch * rate / self.bytes
                row["of_limit"] = row["tokens_per_second"] / row["limit_tokens_per_second"]
        return found

    def synchronisations(self) -> dict[str, Any]:
        """Host synchronisations per round, and the lines that cause them."""
        drafts = self.run.sizes.draft_lengths[-1]
        return {
            f"batch {batch}, {label}": self._synchronisations(batch, speculation)
            for batch in self.run.sizes.batches[:2]
            for label, speculation in (
                ("plain", None),
                (
                    f"{drafts} drafts",
                    Speculation(drafter=self.oracle(batch, 0.7), max_draft_tokens=drafts, policy="fixed"),
                ),
            )
        }

    def _synchronisations(self, batch: int, speculation: Speculation | None) -> dict[str, Any]:
        if self.run.device.type != "cuda":
            return {"per_round": None, "why": "only CUDA tells"}
        rounds = Rounds()
        llm = LLM(self.model, speculation=speculation, check_model=False, observers=[rounds])
        for prompt in starts(self.run, self.vocab_size, batch):
            llm.engine.submit(prompt, SamplingParams(max_tokens=64))
        llm.engine.step()
        before = rounds.count
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(8):
                    llm.engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        calls = [item for item in caught if "synchronizing" in str(item.message)]
        lines = Counter(f"{Path(item.filename).name}:{item.lineno}" for item in calls)
        count = rounds.count - before
        return {
            "per_round": len(calls) / count,
            "rounds": count,
            "lines": {line: number / count for line, number in lines.items()},
        }

    def launch_overhead(self) -> dict[str, Any]:
        """Wall milliseconds of a forward against the milliseconds its kernels run: the rest is launching."""
        found = {}
        for batch in self.run.sizes.batches:
            target = SlotTarget(self.model, self.architecture)
            target.open(starts(self.run, self.vocab_size, batch))
            blocks = [[1]] * batch
            target.forward(blocks)
            wall = min(seconds_of(lambda: target.forward(blocks), self.run.device) for _ in range(3))  # noqa: B023 - used at once
            kernels, launches = kernel_seconds(lambda: target.forward(blocks), self.run.device)  # noqa: B023
            found[str(batch)] = {"wall_ms": 1e3 * wall, "kernel_ms": 1e3 * kernels, "kernels": launches}
        return found

    def graphs(self, batch: int) -> dict[str, Any]:
        """Decoding with static shapes; on a GPU every forward is one replayed graph."""
        sizes = self.run.sizes
        prompts = starts(self.run, self.vocab_size, batch)
        capacity = sizes.prompt + sizes.tokens + max(sizes.draft_lengths) + 1
        found: dict[str, Any] = {}
        settings = [(0, 0.0), *[(drafts, sizes.acceptances[-1]) for drafts in sizes.draft_lengths]]
        target = StaticTarget(self.model, self.architecture, rows=batch, capacity=capacity)
        for drafts, acceptance in settings:
            rounds = Rounds()
            drafter = self.oracle(batch, acceptance) if drafts else None
            target.prepare([1, drafts + 1])
            engine = Engine(target, drafter, Fixed(drafts), EngineConfig(max_batch_size=batch), observers=[rounds])
            outputs = drain(engine, prompts, sizes.tokens)
            label = f"{drafts} drafts, acceptance {acceptance}" if drafts else "plain"
            found[label] = rounds.figures(batch, sizes.tokens, outputs, self.wanted[batch])
            found[label]["speedup_over_plain"] = found["plain"]["decode_seconds"] / found[label]["decode_seconds"]
        found["forward_ms"] = {
            str(width): 1e3 * min(seconds_of(partial(target.replay, width), self.run.device) for _ in range(5))
            for width in target.widths
        }
        found["graphs"] = target.uses_graphs
        return found


def drain(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Decode all prompts with an engine; outputs in order."""
    order = [engine.submit(prompt, SamplingParams(max_tokens=tokens)) for prompt in prompts]
    outputs: dict[int, list[int]] = {request: [] for request in order}
    while engine.num_unfinished:
        for update in engine.step():
            outputs[update.request_id].extend(update.token_ids)
    return [outputs[request] for request in order]


def kernel_seconds(action: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds that kernels run on the device during an action, and how many there are; zeros on a CPU."""
    if device.type != "cuda":
        return 0.0, 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        synchronise(device)
    events = profile.key_averages()
    return sum(event.self_device_time_total for event in events) / 1e6, sum(event.count for event in events)


# ---------------------------------------------------------------------------------------------------------- the script


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without advice about generation flags and missing kernels."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def measure(run: Run, vocab_size: int) -> None:
    """All parts. The seconds are what each is expected to take at most on an H200."""
    for name in ARCHITECTURES:
        run.part(f"parity/{name}", 20, partial(parity_of, name, run))
    run.part("bandwidth", 10, partial(memory_bandwidth, run))
    for name in run.sizes.shapes:
        measure_model(run, name, vocab_size)
        if run.device.type == "cuda":
            run.results.setdefault("peak_bytes", {})[name] = torch.cuda.max_memory_allocated(run.device)
            torch.cuda.empty_cache()


def measure_model(run: Run, name: str, vocab_size: int) -> None:
    """All parts about one large model, which is gone afterwards."""
    built: list[Bench] = []

    def build() -> dict[str, Any]:
        built.append(Bench(run, name, vocab_size))
        return built[0].describe()

    if run.part(f"{name}/model", 60, build) is None:
        return
    bench = built[0]
    run.part(f"{name}/forward_ms", 20, bench.forward_costs)
    for batch in run.sizes.batches:
        run.part(f"{name}/batch {batch}", 40, partial(bench.speeds, batch))
    run.part(f"{name}/launch", 15, bench.launch_overhead)
    run.part(f"{name}/synchronisations", 15, bench.synchronisations)
    for batch in run.sizes.batches:
        run.part(f"{name}/static, batch {batch}", 25, partial(bench.graphs, batch))


def show(results: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    parity = {name: row for name, row in results.items() if name.startswith("parity/")}
    for name, row in parity.items():
        verdicts = [
            f"{label} {'equal' if item['equal'] else 'DIFFERENT'}"
            for label, item in row.items()
            if isinstance(item, dict)
        ]
        print(f"{name:32} {', '.join(verdicts)}")
    if "bandwidth" in results:
        sheet = results["bandwidth"]["data_sheet"]
        print(
            f"\nbandwidth {results['bandwidth']['best'] / 1e9:.0f} GB/s"
            + (f", data sheet {sheet / 1e9:.0f}" if sheet else "")
        )
    for name, row in results.items():
        if "/batch " in name or "/static" in name:
            print(f"\n{name}")
            print(
                f"  {'':28} {'tokens/s':>9} {'limit':>8} {'tau':>6} {'vs plain':>8} {'formula':>8} {'ms/round':>9} same"
            )
            for label, item in row.items():
                if isinstance(item, dict) and "tokens_per_second" in item:
                    print_row(label, item)
        elif name.endswith(("/forward_ms", "/launch", "/synchronisations")):
            print(f"\n{name}: {json.dumps(row)}")
    for kind in ("skipped", "failed"):
        for text in results.get(kind, []):
            print(f"\n{kind}: {text}")


def print_row(label: str, item: Mapping[str, Any]) -> None:
    """One decoder at one batch size."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    phases = item.get("milliseconds_per_round")
    same = item.get("equal_to_generate", item.get("counts_as_built"))
    print(
        f"  {label:28} {item['tokens_per_second']:9.1f} {number(item.get('limit_tokens_per_second'), '8.0f'):>8} "
        f"{number(item.get('mean_accepted_length'), '6.2f'):>6} "
        f"{number(item.get('speedup_over_plain'), '8.2f'):>8} {number(item.get('predicted_speedup'), '8.2f'):>8} "
        f"{number(None if phases is None else sum(phases.values()), '9.2f'):>9} {same}"
    )


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to rehearse")
    parser.add_argument("--minutes", type=float, default=7.5, help="parts that would end later are skipped")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_bench.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu" and not options.small:
        parser.error("the full shapes are for a GPU; add --small")
    torch.set_float32_matmul_precision("highest")  # parity is in float32, not in TF32
    run = Run(device, SMALL if options.small else FULL, options.out, 60 * options.minutes)
    run.results["provenance"] = provenance(device=device, dtype=torch.bfloat16, seed=SEED)
    run.results["sizes"] = asdict(run.sizes)
    with quiet_transformers():
        measure(run, VOCABULARY["small" if options.small else "full"])
    run.save()
    show(run.results)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
