"""Training text from nothing but the target: prompts it asks itself, answers it gives.

A chat model that is shown the beginning of a user's turn goes on to write one (Xu et al. 2024, "Magpie", 2406.08464).
Its answers, at the temperatures it will be served at, are the law a drafter has to learn: text from elsewhere trains
drafters that are accepted less (on-policy data; see ``docs/train-a-drafter.md``).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..config import SamplingParams
from ..drafters.base import RowId
from ..engine import Completion, Engine
from ..errors import TrainingError
from ..llm import LLM

_MARK = "\x00specflow\x00"
_SHORTEST_PROMPT = 4


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
        for name in ("num_samples", "max_prompt_tokens", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise InvalidSettingError(name, getattr(self, name), "an integer >= 1")
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise InvalidSettingError("temperatures", self.temperatures, "one or more numbers >= 0")
        if not 0.0 <= self.opened_fraction <= 1.0:
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
    def from_line(cls, line: str) -> Sample:
        """Read :meth:`to_line` back."""
        fields: dict[str, Any] = json.loads(line)
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
        shape = cls(_ids(tokenizer, before), _ids(tokenizer, after))
        if not shape.before:
            raise TrainingError(
                "the chat template puts nothing before the user's text, so a prompt cannot begin",
                "give prompts in a file (--prompts)",
            )
        return shape


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file (``.xz`` is unpacked), by index; a last line that a crash cut short is ignored.

    Raises:
        TrainingError: the file cannot be read, or holds something else.
    """
    samples: dict[int, Sample] = {}
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise TrainingError(f"{path} cannot be read ({error})", "give a file that specflow-llm train wrote") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            sample = Sample.from_line(line)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"line {number} of {path} is not a training sample ({error})", "delete the file to make it anew"
            ) from error
        samples[sample.index] = sample
    return [samples[index] for index in sorted(samples)]


def samples_digest(samples: Iterable[Sample]) -> str:
    """SHA-256 of conversations, in hexadecimal: what tells one data set from another."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.to_line().encode())
    return digest.hexdigest()


class SampleMaker:
    """Has a target ask and answer itself, many conversations at once; resumes from what a file already holds.

    Each conversation's text depends on its index, the seed and the target only, not on batch or order.

    Args:
        llm: the target.
        settings: what to make.
        prompts: prompts to answer, as token ids; None has the target ask itself.
        openers: beginnings of self-asked prompts.
    """

    def __init__(
        self,
        llm: LLM,
        settings: SampleSettings,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        openers: Sequence[str] = OPENERS,
    ) -> None:
        self._engine: Engine = llm.engine
        self._settings = settings
        self._prompts = prompts
        self._tokenizer = llm.tokenizer
        self._shape = ChatShape.of(llm.tokenizer) if prompts is None else None
        self._openers = tuple(openers)
        self._asking: dict[RowId, tuple[int, list[int]]] = {}
        self._answering: dict[RowId, tuple[int, int]] = {}

    def run(
        self, path: Path, *, on_sample: Callable[[Sample], None] = lambda _sample: None, window: int = 128
    ) -> Iterator[Sample]:
        """Make what the file lacks, append each conversation when it is complete, and yield it.

        Args:
            path: a JSON-lines file; made if absent.
            on_sample: told about each new sample.
            window: conversations under way at most.
        """
        done: set[int] = set()
        if path.exists():
            _drop_torn_line(path)  # first: what is dropped is not done
            done = {sample.index for sample in read_samples(path)}
        count = self._settings.num_samples
        if self._prompts is not None:
            count = min(count, len(self._prompts))
        todo = iter([index for index in range(count) if index not in done])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            self._fill(todo, window)
            while self._asking or self._answering:
                for update in self._engine.step():
                    if update.error is not None:
                        raise update.error
                    if update.completion is not None:
                        sample = self._advance(update.request_id, update.completion)
                        if sample is not None:
                            file.write(sample.to_line() + "\n")
                            file.flush()
                            on_sample(sample)
                            yield sample
                self._fill(todo, window)

    def _fill(self, todo: Iterator[int], window: int) -> None:
        while len(self._asking) + len(self._answering) < window:
            index = next(todo, None)
            if index is None:
                return
            self._begin(index)

    def _begin(self, index: int) -> None:
        if self._shape is None:
            self._answer(index, list((self._prompts or ())[index]), None)
            return
        chance = random.Random(f"{self._settings.seed}/{index}")  # noqa: S311 - repeatable, not secret
        ids = list(self._shape.before)
        if self._openers and chance.random() < self._settings.opened_fraction:
            ids += _ids(self._tokenizer, chance.choice(self._openers).rstrip())
        params = SamplingParams(
            max_tokens=self._settings.max_prompt_tokens,
            temperature=self._settings.prompt_temperature,
            seed=self._seed(index, 0),
        )
        self._asking[self._engine.submit(ids, params, index=index)] = (index, ids)

    def _answer(self, index: int, ids: list[int], first_own: int | None) -> None:
        temperatures = self._settings.temperatures
        params = SamplingParams(
            max_tokens=self._settings.max_answer_tokens,
            temperature=temperatures[index % len(temperatures)],
            seed=self._seed(index, 1),
        )
        own = len(ids) if first_own is None else first_own
        self._answering[self._engine.submit(ids, params, index=index)] = (index, own)

    def _advance(self, request: RowId, completion: Completion) -> Sample | None:
        if request in self._asking:
            index, ids = self._asking.pop(request)
            asked = list(completion.token_ids[:-1])
            # A prompt that never ended, or is empty, is no prompt; the index stays without a sample.
            if completion.finish_reason == "stop" and len(asked) >= _SHORTEST_PROMPT and self._shape is not None:
                self._answer(index, [*ids, *asked, *self._shape.after], len(ids))
            return None
        index, own = self._answering.pop(request)
        temperatures = self._settings.temperatures
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        return Sample(index, tuple(ids), len(completion.prompt_token_ids), own, temperatures[index % len(temperatures)])

    def _seed(self, index: int, stage: int) -> int:
        return random.Random(f"{self._settings.seed}/{index}/{stage}").getrandbits(62)  # noqa: S311 - not secret


def _drop_torn_line(path: Path) -> None:
    """Remove what a killed process wrote of a line it did not finish."""
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
