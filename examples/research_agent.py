"""An agent that answers questions from documents, running ahead of its own model.

    python examples/research_agent.py "Why does packing matter?"

The agent thinks (a local language model chooses search words), searches (BM25 over the paragraphs of this project's
documentation), reads, and thinks again. Thinking is slow, and a cheap guess of what it will search for is often right:
while the model thinks, the search and the reading for the guessed words are already done.

With ``specflow_llm`` and its demo model the thinking is real, and its decoding is speculative as well: two levels of
running ahead. Without them, or with ``--stand-in``, a scripted thinker takes the model's place and waits as long.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from specflow import Context, Effect, Fixed, RunResult, run, step, workflow
from specflow.predictors import Fn

DOCUMENTS = Path(__file__).parents[1]
WORD = re.compile(r"[a-z][a-z_]{2,}")
NUM_WORDS = 3
MAX_SEARCHES = 2
STAND_IN_SECONDS = 0.3


@dataclass(frozen=True)
class Action:
    """What the agent does next: search for words, or answer."""

    kind: str
    words: tuple[str, ...] = ()


class Index:
    """BM25 over paragraphs (Robertson and Zaragoza 2009, with k1 = 1.2 and b = 0.75)."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        self.paragraphs = list(paragraphs)
        self.counts = [Counter(WORD.findall(text.lower())) for text in paragraphs]
        self.mean_length = sum(map(Counter.total, self.counts)) / max(1, len(self.counts))
        found = Counter(word for counts in self.counts for word in counts)
        self.idf = {word: math.log(1 + (len(paragraphs) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def rarest(self, text: str) -> tuple[str, ...]:
        """The words of a text that say most about where to look."""
        words = {word for word in WORD.findall(text.lower()) if word in self.idf}
        return tuple(sorted(sorted(words, key=lambda word: (-self.idf[word], word))[:NUM_WORDS]))

    def search(self, words: Sequence[str]) -> int:
        """Number of the best paragraph."""

        def score(index: int) -> float:
            counts = self.counts[index]
            length = 1.2 * (0.25 + 0.75 * counts.total() / self.mean_length)
            return sum(self.idf.get(word, 0.0) * counts[word] * 2.2 / (counts[word] + length) for word in words)

        return max(range(len(self.paragraphs)), key=score)


@functools.cache
def index() -> Index:
    """The project's documentation, by paragraph."""
    files = [DOCUMENTS / "README.md", *sorted((DOCUMENTS / "docs").glob("*.md"))]
    paragraphs = [part.strip() for file in files for part in file.read_text(encoding="utf-8").split("\n\n")]
    return Index([part for part in paragraphs if len(part) > 80 and not part.startswith(("```", "|", "!"))])


@functools.cache
def model() -> Any:
    """The demo model, decoding speculatively; None for the stand-in."""
    if STAND_IN or importlib.util.find_spec("torch") is None:
        return None
    from specflow_llm import LLM, ModelNotFoundError, Speculation  # noqa: PLC0415 - optional

    try:
        return LLM("smollm2-135m-instruct", speculation=Speculation(drafter="ngram"))
    except ModelNotFoundError as error:
        print(f"no demo model ({error}); a scripted thinker takes its place")
        return None


STAND_IN = False


def ask(prompt: str, max_tokens: int) -> str:
    """One greedy answer of the model."""
    from specflow_llm import SamplingParams  # noqa: PLC0415 - optional

    messages = [{"role": "user", "content": prompt}]
    text: str = model().generate([messages], SamplingParams(max_tokens=max_tokens))[0].text
    return text


def guess(question: str, notes: list[str]) -> Action:
    """The cheap guess: the rarest words of the question that the notes do not have yet."""
    if len(notes) >= MAX_SEARCHES:
        return Action("answer")
    known = set(WORD.findall(" ".join(notes).lower()))
    left = " ".join(word for word in WORD.findall(question.lower()) if word not in known)
    return Action("search", index().rarest(left or question))


@step(effect=Effect.PURE, predict=Fn(guess, confidence=0.5), resource="model")
def think(question: str, notes: list[str]) -> Action:
    """Decide what to do next."""
    if len(notes) >= MAX_SEARCHES:
        return Action("answer")
    if model() is None:
        time.sleep(STAND_IN_SECONDS)  # noqa: TID251 - stands for a model that thinks as long
        return guess(question, notes)
    known = f"\nAlready known: {notes[-1][:300]}" if notes else ""
    said = ask(f"Repeat the most important words of this question, separated by commas.\n{question}{known}", 24)
    return Action("search", index().rarest(said) or index().rarest(question))


@step(effect=Effect.READONLY)
async def search(words: tuple[str, ...]) -> int:
    """Find the best paragraph."""
    return index().search(words)


@step(effect=Effect.READONLY)
async def read(paragraph: int) -> str:
    """Fetch a paragraph."""
    return index().paragraphs[paragraph]


@step(effect=Effect.PURE, resource="model")
def write(question: str, notes: list[str]) -> str:
    """Answer from what was read."""
    context = "\n".join(note[:500] for note in notes)
    if model() is None:
        time.sleep(STAND_IN_SECONDS)  # noqa: TID251 - as above
        wanted = set(WORD.findall(question.lower()))
        sentences = re.split(r"(?<=[.:])\s+", context)
        return max(sentences, key=lambda sentence: len(wanted & set(WORD.findall(sentence.lower()))))
    return ask(f"{context}\n\nAnswer in one sentence: {question}", 48)


@workflow
async def agent(ctx: Context, question: str) -> str:
    """Think, search, read, think again; then answer."""
    notes: list[str] = []
    while (action := await ctx.call(think, question, notes)).kind == "search":
        paragraph = await ctx.call(search, action.words)
        notes.append(await ctx.call(read, paragraph))
        ctx.emit(f"searched for {', '.join(action.words)}; read paragraph {paragraph}")
    return await ctx.call(write, question, notes)


async def main(question: str) -> None:
    """Answer one question in order, then running ahead, and compare."""
    index()
    model()
    # One model on this machine: a guess never takes it from real work. A remote one would serve several calls at once.
    limits = {"model": 1} if model() is not None else {}
    plain: RunResult[str] = await run(agent, question, policy=Fixed(0), limits=limits)
    ahead: RunResult[str] = await run(agent, question, policy=Fixed(2), limits=limits, on_event=print)
    assert ahead.value == plain.value, "running ahead changes time, never results"
    print(f"\n{ahead.value.strip()}\n")
    print(ahead.report)
    print(f"in order {plain.report.seconds:.2f} s, running ahead {ahead.report.seconds:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default="How does the slot cache roll back rejected tokens?")
    parser.add_argument("--stand-in", action="store_true", help="a scripted thinker instead of the model")
    options = parser.parse_args()
    STAND_IN = options.stand_in
    anyio.run(main, options.question)
