"""Prompts about text that the target wrote: summaries, translations, questions on passages, rewriting, extraction.

A model that asks itself asks short questions. What it is used for also has long prompts, whose answers repeat parts of
them. This script makes such prompts from answers in a file of samples, for ``specflow-llm train --prompts``:

    python benchmarks/drafter/derived_prompts.py --samples samples.jsonl --out prompts.jsonl --count 2000 --seed 3

``--passages 6`` puts two to six answers into every prompt, as one document or as passages to search: prompts of some
hundred tokens, where the drafter has to find what the target finds.

No text of a benchmark is used.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specflow_llm.hub import BUILTIN_MODELS, DEMO_MODEL, ensure_builtin
from specflow_llm.training.samples import ChatShape, Sample, read_samples

ABOUT_ONE = (
    "Summarize the following text in two or three sentences:\n\n{text}",
    "{text}\n\nSummarize the text above in one paragraph.",
    "Give the main points of this text as a list:\n\n{text}",
    "Translate the following text into German:\n\n{text}",
    "Translate this text into French: {text}",
    "Rewrite the following text so that a child can understand it:\n\n{text}",
    "Rewrite this in a more formal tone:\n\n{text}",
    "Extract all names, places and numbers from the text below.\n\n{text}",
    "Write a title and a short introduction for the following text:\n\n{text}",
    "Correct all mistakes in the following text:\n\n{text}",
    "Write three questions that the following text answers:\n\n{text}",
    "Continue the following text:\n\n{text}",
    "What is the main idea of the text below? Explain.\n\n{text}",
)
ABOUT_QUESTION = (
    "Use the passage to answer the question.\n\nPassage: {text}\n\nQuestion: {question}",
    "Answer the question using the passages.\n\n1: {other}\n\n2: {text}\n\nQuestion: {question}\nAnswer:",
    "Context: {text}\n\nContext: {other}\n\nBased on the context, answer briefly: {question}",
    "Here is an answer to the question '{question}':\n\n{text}\n\nIs it right? What is missing?",
)
ABOUT_DOCUMENT = (
    "Summarize the following article in three or four sentences.\n\n{document}",
    "Article:\n\n{document}\n\nWrite a summary of this article.",
    "{document}\n\nTL;DR:",
    "Write a short abstract of this report:\n\n{document}",
    "List the most important facts of the following document:\n\n{document}",
)
ABOUT_PASSAGES = (
    "Answer the question with the help of these passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "Question: {question}\n\nSearch results:\n\n{passages}\n\nAnswer the question in one or two sentences.",
    "{passages}\n\nWhich of these passages helps with '{question}'? Answer with what it says.",
)
MIN_TOKENS, MAX_TOKENS = 30, 180
"""Answers that are shorter or longer are passed over; so are sampled ones, which make little sense in a small model."""
MAX_QUESTION = 60


def _text(tokenizer: Any, ids: tuple[int, ...]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def _answer(tokenizer: Any, sample: Sample) -> str:
    return _text(tokenizer, sample.token_ids[sample.num_prompt :])


def _about_many(
    tokenizer: Any, usable: Sequence[Sample], number: int, question: str | None, most: int, chance: random.Random
) -> str:
    """A prompt about answer ``number`` and others after it: a question that it answers, or a task about all."""
    chosen = [usable[(number + step) % len(usable)] for step in range(chance.randint(2, most))]
    if question is None:
        document = "\n\n".join(_answer(tokenizer, sample) for sample in chosen)
        return chance.choice(ABOUT_DOCUMENT).format(document=document)
    chance.shuffle(chosen)
    passages = "\n\n".join(f"Passage {place}: {_answer(tokenizer, sample)}" for place, sample in enumerate(chosen, 1))
    return chance.choice(ABOUT_PASSAGES).format(passages=passages, question=question)


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, nargs="+", required=True, help="files that specflow-llm train wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--passages", type=int, default=1, help="most answers in a prompt; above 1 at least two")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ensure_builtin(BUILTIN_MODELS[DEMO_MODEL]))
    shape = ChatShape.of(tokenizer)
    chance = random.Random(arguments.seed)
    usable = [
        sample
        for path in arguments.samples
        for sample in read_samples(path)
        if sample.temperature == 0.0 and MIN_TOKENS <= len(sample.token_ids) - sample.num_prompt <= MAX_TOKENS
    ]
    chance.shuffle(usable)
    with arguments.out.open("w", encoding="utf-8") as file:
        for number, sample in enumerate(usable[: arguments.count]):
            other = usable[(number + 1) % len(usable)]
            text = _answer(tokenizer, sample)
            asked = sample.token_ids[len(shape.before) : sample.num_prompt - len(shape.after)]
            question = _text(tokenizer, asked)
            asks = sample.num_prompt <= MAX_QUESTION + 40 and chance.random() < 0.4
            if arguments.passages > 1:
                prompt = _about_many(tokenizer, usable, number, question if asks else None, arguments.passages, chance)
            else:
                prompt = chance.choice(ABOUT_QUESTION if asks else ABOUT_ONE).format(
                    text=text, question=question, other=_answer(tokenizer, other)
                )
            file.write(json.dumps({"prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
