"""Has a target write training text: many conversations at once, every token computed once.

A chat model that is shown the beginning of a user's turn goes on to write one, and answers it (Xu et al. 2024,
"Magpie", 2406.08464). Every forward gives each conversation under way one token, chosen or, where the chat template
says what comes next, given. So nothing that was written has to be read again, neither to answer it nor for its
features.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..architecture import inspect_model
from ..config import SamplingParams
from ..dspark.adapter import TargetAdapter
from ..engine import require_prompt
from ..llm import LLM
from ..sampling import RowSampler
from ..selfcheck import build_target
from .feature_cache import CACHE_DTYPE, FeatureCache
from .features import Features, log_totals
from .samples import OPENERS, ChatShape, Sample, SampleSettings, dropped_line, plain_ids, tried_indices

_SHORTEST_PROMPT = 4


@dataclass(frozen=True, slots=True)
class KeptFeatures:
    """Where features of text go while it is written."""

    adapter: TargetAdapter
    layers: Sequence[int]
    """Decoder layers to tap."""
    cache: FeatureCache


@dataclass(frozen=True, slots=True)
class Tried:
    """A conversation that ended, or came to nothing."""

    sample: Sample | None
    num_tokens: int


@dataclass(slots=True)
class _Row:
    """One conversation under way."""

    index: int
    token_ids: list[int]
    """All but the last were run."""
    first_own: int
    num_prompt: int
    """0 while the prompt is being written."""
    end: int
    """The length at which the turn being written is cut."""
    sampler: RowSampler
    given: deque[int] = field(default_factory=deque)
    """What the chat template says comes next."""
    is_complete: bool = False
    """Nothing is to be written any more; the last token may still have to be run, for its features."""
    states: list[torch.Tensor] = field(default_factory=list)
    """[n, F + D] each, of the tokens run."""


class SampleMaker:
    """Has a target ask and answer itself, or answer prompts; resumes from what a file already holds.

    Each conversation's text depends on its index, the seed and the target only, not on batch or order.

    Args:
        llm: the target.
        settings: what to make.
        prompts: prompts to answer, as token ids; None has the target ask itself.
        openers: beginnings of self-asked prompts.
        features: where to keep what the target thinks meanwhile.
        part: (which, of how many): several processes share the work by index.
        window: conversations under way at most; None is the target's ``max_batch_size``.

    Raises:
        TrainingError: the target has no chat template to ask itself through.
        PromptError: a prompt is empty, or holds ids outside the vocabulary.
        ContextLengthError: a prompt leaves no room for an answer.
    """

    def __init__(
        self,
        llm: LLM,
        settings: SampleSettings,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        openers: Sequence[str] = OPENERS,
        features: KeptFeatures | None = None,
        part: tuple[int, int] = (0, 1),
        window: int | None = None,
    ) -> None:
        architecture = inspect_model(llm.model)
        self._settings, self._prompts, self._tokenizer = settings, prompts, llm.tokenizer
        self._vocab, self._ends = architecture.vocab_size, frozenset(llm.eos_token_ids)
        self._context = architecture.context_length
        self._shape = ChatShape.of(llm.tokenizer) if prompts is None else ChatShape((), ())
        for number, prompt in enumerate(prompts or ()):
            require_prompt(prompt, number, architecture)
        self._openers = tuple(openers)
        self._features = features
        self._part, self._parts = part
        self._window = llm.max_batch_size if window is None else window
        self._target = build_target(
            llm.model,
            architecture,
            feature_layers=() if features is None else features.layers,
            tap_final=features is not None,
            check=llm.checks_model,
            prefill_chunk=llm.prefill_chunk,
        )
        self._rows: list[_Row] = []
        self.num_tokens = 0
        """Tokens written or read so far, also of conversations under way."""

    def run(self, path: Path, *, elsewhere: Collection[int] = ()) -> Iterator[Tried]:
        """Make what the file lacks, append each conversation when it is complete, and yield it.

        Args:
            path: a JSON-lines file; made if absent.
            elsewhere: conversations that need not be tried here.
        """
        done = set(elsewhere)
        if path.exists():
            _drop_torn_line(path)  # first: what is dropped is not done
            done |= tried_indices(path)
        count = self._settings.num_samples
        if self._prompts is not None:
            count = min(count, len(self._prompts))
        todo = iter([index for index in range(self._part, count, self._parts) if index not in done])
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("a", encoding="utf-8") as file:
                while self._fill(todo):
                    for row in self._step():
                        sample = self._sample(row)
                        file.write((dropped_line(row.index) if sample is None else sample.to_line()) + "\n")
                        file.flush()
                        yield Tried(sample, len(row.token_ids))
        finally:  # also when the caller stops early
            while self._rows:
                self._take_out(len(self._rows) - 1)
            if self._features is not None:
                self._features.cache.flush()

    # --- One step -----------------------------------------------------------------------------------------------------

    def _fill(self, todo: Iterator[int]) -> bool:
        """Begin conversations until as many as may be are under way; whether any are."""
        while len(self._rows) < self._window:
            index = next(todo, None)
            if index is None:
                break
            row = self._begin(index)
            states = self._target.open([row.token_ids])[0]
            if states is not None and self._features is not None:
                row.states.append(states.to(CACHE_DTYPE).cpu())
            self._rows.append(row)
            self.num_tokens += len(row.token_ids) - 1
        return bool(self._rows)

    @torch.inference_mode()
    def _step(self) -> list[_Row]:
        """One token for every row; those that ended, taken out."""
        output = self._target.forward([row.token_ids[-1:] for row in self._rows])
        self.num_tokens += len(self._rows)
        features = None if output.features is None else output.features[:, 0].to(CACHE_DTYPE).cpu()
        logits = output.logits[:, 0]
        best = logits.float().argmax(-1).tolist()
        over: list[int] = []
        for slot, row in enumerate(self._rows):
            self._target.keep(slot, 1)
            if features is not None:
                row.states.append(features[slot : slot + 1].clone())  # a view would keep all rows' alive
            if not row.is_complete:
                self._write(row, logits[slot : slot + 1], best[slot])
                if row.is_complete and features is not None and row.num_prompt:
                    continue  # its last token has not been run
            if row.is_complete:
                over.append(slot)
        return [self._take_out(slot) for slot in reversed(over)]

    def _take_out(self, slot: int) -> _Row:
        """Close a slot; the last one takes its place."""
        self._target.close(slot)
        row, last = self._rows[slot], self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last
        return row

    # --- One conversation ---------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> _Row:
        if self._prompts is not None:
            ids = list(self._prompts[index])
            return _Row(index, ids, len(ids), len(ids), *self._answer(index, len(ids)))
        chance = random.Random(f"{self._settings.seed}/{index}")  # noqa: S311 - repeatable, not secret
        ids = list(self._shape.before)
        if self._openers and chance.random() < self._settings.opened_fraction:
            ids += plain_ids(self._tokenizer, chance.choice(self._openers).rstrip())
        settings = self._settings
        turn = self._turn(index, len(ids), settings.max_prompt_tokens, settings.prompt_temperature, 0)
        return _Row(index, ids, len(ids), 0, *turn)

    def _answer(self, index: int, begin: int) -> tuple[int, RowSampler]:
        return self._turn(index, begin, self._settings.max_answer_tokens, self._temperature(index), 1)

    def _turn(self, index: int, begin: int, longest: int, temperature: float, stage: int) -> tuple[int, RowSampler]:
        """Where a turn that begins at a length is cut, and how its tokens are chosen."""
        end = begin + longest if self._context is None else min(begin + longest, self._context)
        seed = random.Random(f"{self._settings.seed}/{index}/{stage}").getrandbits(62)  # noqa: S311 - not secret
        params = SamplingParams(max_tokens=longest, temperature=temperature, seed=seed)
        sampler = RowSampler(params, vocab_size=self._vocab, num_prompt_tokens=begin, seed=seed, rule="coupled")
        return end, sampler

    def _temperature(self, index: int) -> float:
        return self._settings.temperatures[index % len(self._settings.temperatures)]

    def _write(self, row: _Row, logits: torch.Tensor, best: int) -> None:
        """Add a row's next token. ``logits`` [1, V], of which ``best`` is the most probable."""
        if row.given:
            row.token_ids.append(row.given.popleft())
            return
        chosen = best
        if not row.sampler.is_greedy:
            chosen = row.sampler.choose(row.sampler.log_probs(logits, row.token_ids)[0], len(row.token_ids))
        ended = chosen in self._ends
        if row.num_prompt:
            row.token_ids.append(chosen)
            row.is_complete = ended or len(row.token_ids) >= row.end
        elif ended and self._is_prompt(row):
            # The template's own end of the turn follows, not the one chosen.
            row.given.extend(self._shape.after)
            row.num_prompt = len(row.token_ids) + len(row.given)
            row.end, row.sampler = self._answer(row.index, row.num_prompt)
            self._write(row, logits, best)
        else:
            row.token_ids.append(chosen)
            row.is_complete = ended or len(row.token_ids) >= row.end  # a prompt without an end is no prompt

    def _is_prompt(self, row: _Row) -> bool:
        """Whether what was asked is long enough to be a prompt, and leaves room for an answer."""
        if len(row.token_ids) - row.first_own < _SHORTEST_PROMPT:
            return False
        return self._context is None or len(row.token_ids) + len(self._shape.after) < self._context

    @torch.inference_mode()  # or every kept text would hold on to its logits
    def _sample(self, row: _Row) -> Sample | None:
        """The conversation, its features filed; None where it came to nothing."""
        if not row.num_prompt:
            return None
        kept = self._features
        if kept is not None:
            states = torch.cat(row.states)
            hidden = states[:, -kept.adapter.hidden_size :]
            totals = log_totals(kept.adapter, hidden.to(kept.adapter.device))
            kept.cache.put(row.token_ids, Features(states[:, : -kept.adapter.hidden_size], hidden, totals))
        return Sample(row.index, tuple(row.token_ids), row.num_prompt, row.first_own, self._temperature(row.index))


def _drop_torn_line(path: Path) -> None:
    """Remove what a killed process wrote of a line it did not finish."""
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
