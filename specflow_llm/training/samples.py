"""Training text: what a conversation is, how many of which kind are wanted, and files of them.

:mod:`.writer` makes it from nothing but the target: prompts it asks itself, and its answers at the temperatures it will
be served at. Those are the law a drafter has to learn: text from elsewhere trains drafters that are accepted less
(on-policy data; see ``docs/train-a-drafter.md``).
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..errors import TrainingError

_MARK = "\x00specflow\x00"
_DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """How training text is made.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    num_samples: int = 4000
    """Conversations to make."""
    temperatures: Sequence[float] = (0.0, 1.0)
    """Temperatures of the answers, dealt out in turns."""
    prompt_temperature: float = 1.0
    """Temperature of the prompts a model asks itself."""
    max_prompt_tokens: int = 256
    """Self-asked prompts that do not end within this many tokens are dropped."""
    max_answer_tokens: int = 256
    opened_fraction: float = 0.5
    """Fraction of self-asked prompts that begin with one of ``openers``."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate every field."""
        for name, least in (("num_samples", 1), ("max_prompt_tokens", 1), ("max_answer_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidSettingError(name, value, f"an integer >= {least}")
        listed = self.temperatures if isinstance(self.temperatures, list | tuple) else ()
        if not listed or not all(isinstance(value, int | float) and value >= 0.0 for value in listed):
            raise InvalidSettingError("temperatures", self.temperatures, "one or more numbers >= 0")
        if not (isinstance(self.prompt_temperature, int | float) and self.prompt_temperature >= 0.0):
            raise InvalidSettingError("prompt_temperature", self.prompt_temperature, "a number >= 0")
        if not isinstance(self.opened_fraction, int | float) or not 0.0 <= self.opened_fraction <= 1.0:
            raise InvalidSettingError("opened_fraction", self.opened_fraction, "a fraction in [0, 1]")


OPENERS: tuple[str, ...] = (
    "Summarize the following article in a few sentences.\n\n",
    "Summarize: ",
    "Write a short summary of this report:\n\n",
    "Translate the following German text into English: ",
    "Translate into English: ",
    "Translate this sentence into French: ",
    "Read the passages below and answer the question.\n\nPassage 1: ",
    "Answer the question using the context.\n\nContext: ",
    "Based on the following document, ",
    "Solve this problem step by step: ",
    "A farmer has ",
    "How many ",
    "What is the value of ",
    "If a train ",
    "Who was ",
    "When did ",
    "Where is ",
    "What is the name of ",
    "Why do ",
    "How does ",
    "Explain ",
    "Describe ",
    "Compare ",
    "Write a Python function that ",
    "Write a program in C++ that ",
    "Given an array of integers, ",
    "Implement ",
    "Write a story about ",
    "Write an email to ",
    "Write a blog post about ",
    "Write a poem about ",
    "Imagine you are ",
    "Pretend to be ",
    "You are a ",
    "Give me a list of ",
    "Extract the following information from the text: ",
    "Rewrite this paragraph so that it is easier to read:\n\n",
    "Correct the grammar of this text: ",
    "Classify the sentiment of the following review: ",
    "Suggest ",
    "What would happen if ",
    "Identify ",
    "Can you help me ",
    "I need advice about ",
    "Create a plan for ",
)
"""Beginnings of prompts, to spread self-asked prompts over kinds of work; general, and taken from no benchmark."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation, as token ids."""

    index: int
    token_ids: tuple[int, ...]
    num_prompt: int
    """Tokens before the answer."""
    first_own: int
    """The first token that the target wrote itself: text before it is nobody's to learn."""
    temperature: float

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Sample:
        """Of what :meth:`to_line` wrote, as plain data."""
        return cls(**{**fields, "token_ids": tuple(fields["token_ids"])})


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The fixed parts of a one-turn conversation in a model's chat template, as token ids."""

    before: tuple[int, ...]
    """Up to where the user's text begins."""
    after: tuple[int, ...]
    """From the end of the user's text to where the answer begins."""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatShape:
        """Read it off a tokenizer's template.

        Raises:
            TrainingError: there is no chat template, it changes the user's text, or it puts nothing before it.
        """
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                "the target has no chat template to ask itself through",
                "give prompts in a file (--prompts), one JSON object with 'prompt' or 'turns' per line",
            )
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
        )
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise TrainingError("the chat template changes the user's text", "give prompts in a file (--prompts)")
        shape = cls(plain_ids(tokenizer, before), plain_ids(tokenizer, after))
        if not shape.before:
            raise TrainingError(
                "the chat template puts nothing before the user's text, so a prompt cannot begin",
                "give prompts in a file (--prompts)",
            )
        return shape


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of text that continues other text."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def dropped_line(index: int) -> str:
    """A line for a conversation that came to nothing, so that nobody tries it again."""
    return json.dumps({"index": index, _DROPPED: True}, separators=(",", ":"))


def tried_indices(path: Path) -> set[int]:
    """Conversations of a file that need not be tried again: those in it, and those that came to nothing.

    Raises:
        TrainingError: as :func:`read_samples`.
    """
    return {index for index, _sample in read_entries(path)}


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file (``.xz`` is unpacked), by index; a last line that a crash cut short is ignored.

    Raises:
        TrainingError: the file cannot be read, or holds something else.
    """
    samples = {index: sample for index, sample in read_entries(path) if sample is not None}
    return [samples[index] for index in sorted(samples)]


def read_entries(path: Path) -> Iterator[tuple[int, Sample | None]]:
    """Index and conversation of every line; None for one that came to nothing.

    Raises:
        TrainingError: the file cannot be read, or holds something else.
    """
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise TrainingError(f"{path} cannot be read ({error})", "give a file that specflow-llm train wrote") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            entry = fields["index"], None if fields.get(_DROPPED) else Sample.from_fields(fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"line {number} of {path} is not a training sample ({error})", "delete the file to make it anew"
            ) from error
        yield entry


def samples_digest(samples: Iterable[Sample]) -> str:
    """SHA-256 of conversations, in hexadecimal: what tells one data set from another."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.to_line().encode())
    return digest.hexdigest()
