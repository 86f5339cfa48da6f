"""One prompt, decoded plainly and speculatively in turns: what ``make demo`` shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specflow.policies import Adaptive

from .config import SamplingParams
from .engine import Completion
from .llm import LLM, Prompt
from .metrics import RequestMetrics
from .provenance import provenance

PROMPT = (
    "Write this text again as a list, one sentence per line. Keep the words as they are.\n\n"
    "A river begins as a small spring in the hills. Rain and melting snow make it wider. On its way to the sea it "
    "carries sand and stones, turns the wheels of mills, and gives water to fields and towns. Boats follow it with "
    "wood and grain. In dry summers it grows thin and slow, and in spring it floods the meadows. Where it meets the "
    "sea, it slows down and builds a delta of fertile mud."
)
"""Asks for copying, where looking up the prompt's own words works best. Free text gains less: see ``bench``."""


UNSTEADY = 1.5
"""Runs of the same work that differ by this factor were disturbed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Timed runs of one way of decoding, and the run whose time is the median."""

    seconds: tuple[float, ...]
    """Wall-clock seconds of each run, prompt included."""
    completion: Completion
    """Of the median run."""

    @property
    def median_seconds(self) -> float:
        """Seconds of the median run."""
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the median run's seconds, prompt included."""
        return len(self.completion.token_ids) / self.median_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """The same without the seconds that the prompt took."""
        seconds = self.median_seconds - self.completion.metrics.phase_seconds.get("prefill", 0.0)
        return len(self.completion.token_ids) / seconds if seconds > 0 else 0.0

    @property
    def metrics(self) -> RequestMetrics:
        """Figures of the median run."""
        return self.completion.metrics

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "seconds": list(self.seconds),
            "median_seconds": self.median_seconds,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "token_ids": list(self.completion.token_ids),
            "text": self.completion.text,
            "metrics": self.metrics.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Both ways of decoding, compared."""

    plain: Trial
    speculative: Trial
    state_bytes: Mapping[str, int]
    """Bytes of every kind of state at the end of the speculative run."""
    identical: bool
    """Whether every speculative run gave the tokens of every plain run."""
    explanation: str
    """What the policy believes about drafting, in a sentence."""
    provenance: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Speculative over plain tokens per second, prompt included."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def decode_ratio(self) -> float:
        """The same without the prompt."""
        plain = self.plain.decode_tokens_per_second
        return self.speculative.decode_tokens_per_second / plain if plain else 0.0

    @property
    def conclusion(self) -> str:
        """What to make of it, honestly."""
        tau = self.speculative.metrics.mean_accepted_length
        if self.ratio >= 1.02:
            told = f"Speculation was {self.ratio:.2f} times as fast: {tau:.2f} tokens per target forward instead of 1."
        elif self.ratio >= 0.98:
            told = f"Speculation made no difference in time here ({self.ratio:.2f}). {self.explanation}"
        else:
            told = (
                f"Speculation was NOT faster here: {self.ratio:.2f} times the speed of plain decoding, although a "
                f"target forward gave {tau:.2f} tokens. {self.explanation}"
            )
        return " ".join(part for part in (told, self._doubt, "" if self.identical else self._difference) if part)

    @property
    def _doubt(self) -> str:
        """A caution where runs of one kind took very different times."""
        if all(max(trial.seconds) < UNSTEADY * min(trial.seconds) for trial in (self.plain, self.speculative)):
            return ""
        fastest = min(self.plain.seconds) / min(self.speculative.seconds)
        return (
            "Equal runs took very different times, so the machine was busy with other work: do not trust these seconds "
            f"(the ratio of the fastest runs is {fastest:.2f}). The counts are not affected."
        )

    @property
    def _difference(self) -> str:
        dtype = self.provenance.get("dtype")
        if dtype == "float32":
            return "The outputs DIFFER, which must not happen in float32: please report it."
        return (
            f"The outputs differ: in {dtype} a forward over one token and one over several round differently, so two "
            "nearly equal logits can swap; use --dtype float32 to rule that out."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "plain": self.plain.as_dict(),
            "speculative": self.speculative.as_dict(),
            "ratio": self.ratio,
            "decode_ratio": self.decode_ratio,
            "identical": self.identical,
            "state_bytes": dict(self.state_bytes),
            "explanation": self.explanation,
            "conclusion": self.conclusion,
            "provenance": dict(self.provenance),
        }


def run_demo(
    llm: LLM,
    prompt: Prompt,
    *,
    max_tokens: int = 160,
    runs: int = 3,
    on_text: Callable[[str], None] = lambda _text: None,
    on_run: Callable[[int, str], None] = lambda _done, _what: None,
) -> DemoReport:
    """Stream an answer with speculation, then time plain and speculative decoding in turns.

    Both share the loaded weights. The streamed answer and a plain run before the timed ones are the warm-up: they also
    give the policy its first measurements, as any earlier request would.

    Args:
        llm: the model, loaded with a drafter.
        prompt: what to complete, greedily.
        max_tokens: most tokens to generate; >= 1.
        runs: timed runs of each way, >= 1.
        on_text: given the streamed answer piece by piece.
        on_run: told (finished timed runs, what runs next).
    """
    params = SamplingParams(max_tokens=max_tokens)
    for chunk in llm.stream(prompt, params):
        on_text(chunk.text)
    plain_llm = LLM(llm.model, tokenizer=llm.tokenizer, speculation=None, check_model=False)
    on_run(0, "warming up")
    plain_llm.generate([prompt], params)
    timed: dict[str, list[tuple[float, Completion]]] = {"plain": [], "speculative": []}
    ways = [("plain", plain_llm), ("speculative", llm)]
    for index in range(runs):
        # Each way goes first every second time, so that neither always runs on the warmer or the hotter machine.
        for way, decoder in ways if index % 2 == 0 else reversed(ways):
            on_run(sum(map(len, timed.values())), f"timing {way} decoding")
            started = time.perf_counter()
            completion = decoder.generate([prompt], params)[0]
            timed[way].append((time.perf_counter() - started, completion))
    on_run(2 * runs, "done")
    outputs = {completion.token_ids for entries in timed.values() for _, completion in entries}
    return DemoReport(
        plain=_trial(timed["plain"]),
        speculative=_trial(timed["speculative"]),
        state_bytes=timed["speculative"][-1][1].metrics.state_bytes,
        identical=len(outputs) == 1,
        explanation=_explanation(llm),
        provenance=provenance(device=llm.model.device, dtype=llm.model.dtype),
    )


def _trial(entries: Sequence[tuple[float, Completion]]) -> Trial:
    middle = sorted(entries, key=_seconds)[(len(entries) - 1) // 2]
    return Trial(tuple(seconds for seconds, _ in entries), middle[1])


def _seconds(entry: tuple[float, Completion]) -> float:
    return entry[0]


def _explanation(llm: LLM) -> str:
    """The adaptive policy's own words; other policies have none."""
    policy = llm.policy
    if isinstance(policy, Adaptive):
        return policy.explain().reason
    return f"The policy ({type(policy).__name__}) drafts without asking whether it pays."
