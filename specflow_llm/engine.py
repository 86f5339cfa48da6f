"""Requests in, tokens out: admission of waiting requests, one round at a time, stops, deadlines and cancellation.

Continuous batching: requests join between rounds as rows become free, and each row accepts its own number of tokens
every round.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType

from specflow.chain import ChainLoop, run_sync
from specflow.errors import InvalidSettingError
from specflow.protocols import Clock, Observer, Policy
from specflow.types import Mode

from .architecture import Architecture
from .backend import DecodingBackend, Row
from .config import SamplingParams, Verification
from .detokenizer import Decoder, Detokenizer
from .drafters.base import Drafter, RowId
from .errors import ContextLengthError, EngineBusyError, PromptError, require
from .metrics import MetricsBuilder, RequestMetrics
from .sampling import RowSampler, Rule, TokenLogprob
from .stopping import FinishReason, Stop, Stopper
from .target import Target

_STATEFUL_PROCESSORS = frozenset(
    {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
)


_ROW_IDS = itertools.count()
"""One count for all engines: drafters keep their state by row, and one may serve several engines of one target."""


def require_prompt(token_ids: Sequence[int], index: int, architecture: Architecture) -> int | None:
    """Refuse a prompt that the model cannot continue.

    Args:
        token_ids: the prompt.
        index: its number in the caller's list, for messages.
        architecture: of the model.

    Returns:
        Tokens that the model's context leaves, at least 1; None where it has no end.

    Raises:
        PromptError: it is empty or holds ids outside the vocabulary.
        ContextLengthError: it leaves no room for a new token.
    """
    if not token_ids:
        raise PromptError(index, "it is empty", "give at least one token, for example the beginning-of-sequence token")
    wrong = next((token for token in token_ids if not 0 <= token < architecture.vocab_size), None)
    if wrong is not None:
        raise PromptError(
            index,
            f"token id {wrong} is outside the model's vocabulary of {architecture.vocab_size}",
            "use this model's tokenizer",
        )
    if architecture.context_length is None:
        return None
    if len(token_ids) >= architecture.context_length:
        raise ContextLengthError(index, len(token_ids), architecture.context_length)
    return architecture.context_length - len(token_ids)


def _may_keep_state(item: object) -> bool:
    """False for functions and for transformers' own processors and criteria, but for the few that keep a state."""
    if isinstance(item, (FunctionType, BuiltinFunctionType)):
        return False
    kind = type(item)
    return not kind.__module__.startswith("transformers.") or kind.__name__ in _STATEFUL_PROCESSORS


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished (or cancelled) request."""

    request_id: RowId
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ids, the stopping token included."""
    text: str
    """Generated text, without the stop string: what the tokenizer makes of these ids alone, so a tokenizer that writes
    no space at the beginning of a text writes none here. Empty without a tokenizer."""
    finish_reason: str
    """``stop``, ``length``, ``deadline`` or ``cancelled``."""
    stop_detail: int | str | None
    """The token id or string that stopped it."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One entry per generated id, where asked for."""
    seed: int
    """The seed used: the request's own, or the one drawn for it. Repeating the request with it repeats its tokens,
    unless ``mode`` is ``distribution``: then the drafter and the batch's policy take part in the draw."""
    mode: Mode
    """How the result relates to plain decoding: the same tokens, or the same distribution."""
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Update:
    """What a step did for one request."""

    request_id: RowId
    token_ids: tuple[int, ...]
    """Newly generated ids."""
    text: str
    """Newly settled text: never half a character, never part of a stop string that is forming."""
    completion: Completion | None
    """Present on the request's last update, unless it failed."""
    error: Exception | None = None
    """What the request's own logits processor or stopping criterion raised. The request is over and freed; others are
    not affected."""


@dataclass(slots=True)
class _Waiting:
    row: Row
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings an engine is built with."""

    eos_token_ids: Sequence[int] = ()
    verification: Verification = "auto"
    max_batch_size: int = 32
    """Most requests decoded together; the rest wait."""

    def __post_init__(self) -> None:
        """Validate what would make an engine wait for ever."""
        size = self.max_batch_size
        require(type(size) is int and size >= 1, "max_batch_size", size, "an integer >= 1")


class Engine:
    """Decodes many requests over one target model.

    Args:
        target: the target model.
        drafter: proposes tokens; None decodes plainly.
        policy: how far to run ahead.
        config: see :class:`EngineConfig`.
        tokenizer: None means ids in, ids out.
        observers: told about every round.
        clock: seconds; replace it in tests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        config: EngineConfig,
        *,
        tokenizer: Decoder | None = None,
        encode: Callable[[str], list[int]] | None = None,
        observers: Sequence[Observer] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._backend = DecodingBackend(target, drafter)
        self._loop: ChainLoop[int] = ChainLoop(self._backend, policy, observers, clock)
        self._config = config
        self._tokenizer = tokenizer
        self._encode = encode
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._deadlines: dict[RowId, float] = {}
        self._cancelled: set[RowId] = set()
        self._undelivered: list[Update] = []
        self._is_stepping = False
        self._abandoned: list[RowId] = []

    @property
    def backend(self) -> DecodingBackend:
        """The five phases, for inspection."""
        return self._backend

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._backend.rows) + len(self._waiting)

    def submit(self, token_ids: Sequence[int], params: SamplingParams, *, index: int = 0) -> RowId:
        """Queue a request.

        Args:
            token_ids: the prompt.
            params: its settings.
            index: the prompt's number in the caller's list, for messages.

        Raises:
            PromptError: the prompt is empty or holds ids outside the vocabulary, or text settings lack a tokenizer.
            ContextLengthError: the prompt leaves no room for a new token.
            InvalidSettingError: settings that contradict each other.
        """
        self._refuse_shared_state(params)
        row_id = RowId(next(_ROW_IDS))
        row = self._row(row_id, [int(token) for token in token_ids], params, index)
        deadline = None if params.max_time is None else self._clock() + params.max_time
        self._waiting.append(_Waiting(row, deadline))
        return row_id

    def _row(self, row_id: RowId, token_ids: list[int], params: SamplingParams, index: int) -> Row:
        architecture = self._backend.target.architecture
        room = require_prompt(token_ids, index, architecture)
        room = params.max_tokens if room is None else min(params.max_tokens, room)
        if params.stop_strings and self._tokenizer is None:
            raise PromptError(index, "stop strings need a tokenizer", "load the model with one, or use stop_token_ids")
        sampler = RowSampler(
            params,
            vocab_size=architecture.vocab_size,
            eos_token_ids=self._config.eos_token_ids,
            bad_word_ids=self._bad_word_ids(params, index),
            num_prompt_tokens=len(token_ids),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            rule=self._rule(params),
        )
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        stopper = Stopper(
            params,
            eos_token_ids=self._config.eos_token_ids,
            prompt_ids=token_ids,
            detokenizer=detokenizer,
            max_output=room,
        )
        return Row(
            row_id=row_id,
            params=params,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_output=room,
            sampler=sampler,
            stopper=stopper,
            metrics=MetricsBuilder(prompt_tokens=len(token_ids)),
        )

    def _refuse_shared_state(self, params: SamplingParams) -> None:
        """Refuse a processor or criterion that may keep state and serves another unfinished request.

        Calls for two requests would interleave as their drafts happen to be accepted.
        """
        rows = [*self._backend.rows, *(item.row for item in self._waiting)]
        for name in ("logits_processors", "stopping_criteria"):
            in_use = [id(other) for row in rows for other in getattr(row.params, name)]
            for item in getattr(params, name):
                if id(item) in in_use and _may_keep_state(item):
                    raise InvalidSettingError(
                        name,
                        type(item).__name__,
                        "an object of its own for every request that is decoded at the same time, because it may keep "
                        "state (functions and transformers' stateless processors can be shared)",
                    )

    def _rule(self, params: SamplingParams) -> Rule:
        """The best exact rule for the drafter.

        Matching gives the plain run's own tokens, and accepts a token that was not drawn from a known law as often as
        any exact rule can. A drafter that gives the probabilities it drew from is accepted more often by block
        verification; one whose drafts branch, more often still by matching (docs/log.md, 2026-11-30).
        """
        if params.is_greedy:
            return "greedy"
        if self._config.verification != "auto":
            return self._config.verification
        drafter = self._backend.drafter
        plain = drafter is None or not drafter.gives_probs or self._backend.branches
        matches = plain or params.seed is not None or bool(params.logits_processors)
        return "coupled" if matches else "block"

    def _bad_word_ids(self, params: SamplingParams, index: int) -> list[list[int]]:
        words: list[list[int]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(list(word))
            elif self._encode is None:
                raise PromptError(index, "bad_words given as strings need a tokenizer", "give token ids instead")
            else:
                # A word is written with and without a space before it; both must be caught.
                words.extend(self._encode(form) for form in dict.fromkeys((word, f" {word.lstrip()}")))
        return words

    def cancel(self, request_id: RowId) -> None:
        """End a request at the next step, which returns what it has. Unknown and finished requests are ignored."""
        self._cancelled.add(request_id)

    def step(self) -> list[Update]:
        """Admit waiting requests, run one round, and report what it did for each request.

        If anything raises, no round was half done: every unfinished request is as it was before. What the code of one
        request raises (its logits processors and stopping criteria) ends that request only; see :attr:`Update.error`.

        Raises:
            EngineBusyError: a step is running already.
        """
        if self._is_stepping:
            raise EngineBusyError
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            while self._abandoned:
                self.withdraw(self._abandoned.pop())

    def _step(self) -> list[Update]:
        # Whatever raises below, updates wait here for the next step: a request that is gone cannot be asked again.
        self._expire()
        self._report()  # rows that an earlier step committed, and then raised
        self._admit()
        result = run_sync(self._loop.round())
        if result is not None:
            for row in self._backend.rows:
                row.metrics.add_seconds(result.report.seconds)
            self._report()
        updates, self._undelivered = self._undelivered, []
        return updates

    def _report(self) -> None:
        """File an update for every row that has news, and take out those that ended."""
        for row in list(self._backend.rows):
            if row.failure is not None:
                self._undelivered.append(Update(row.row_id, (), "", None, row.failure))
                self._drop(row)
            elif row.stop is not None or row.num_reported < row.num_output:
                self._file(row, row.stop)

    def withdraw(self, request_id: RowId) -> None:
        """Drop a request now, without an update, and free its state. Unknown and finished requests are ignored.

        Called during a step (an abandoned stream can be collected at any time) it takes effect when the step is over.
        """
        if self._is_stepping:
            self._abandoned.append(request_id)
            return
        for item in list(self._waiting):
            if item.row.row_id == request_id:
                self._waiting.remove(item)
        self._deadlines.pop(request_id, None)
        self._cancelled.discard(request_id)
        if any(row.row_id == request_id for row in self._backend.rows):
            self._backend.remove(request_id)

    def _admit(self) -> None:
        while self._waiting and len(self._backend.rows) < self._config.max_batch_size:
            waiting = self._waiting[0]
            started = self._clock()
            try:
                self._backend.add([waiting.row])
            except Exception as error:  # noqa: BLE001 - a prompt that cannot be run must not block those behind it
                self._waiting.popleft()
                self._undelivered.append(Update(waiting.row.row_id, (), "", None, error))
                continue
            self._waiting.popleft()
            waiting.row.metrics.seconds["prefill"] = self._clock() - started
            if waiting.deadline is not None:
                self._deadlines[waiting.row.row_id] = waiting.deadline

    def _expire(self) -> None:
        """End cancelled requests and those past their deadline, running or waiting."""
        if not self._cancelled and not self._deadlines and all(item.deadline is None for item in self._waiting):
            return
        now = self._clock()
        for item in list(self._waiting):
            stop = self._overdue(item.row.row_id, item.deadline, now)
            if stop is not None:
                self._waiting.remove(item)
                item.row.stopper.finish()
                self._undelivered.append(Update(item.row.row_id, (), "", self._completion(item.row, stop)))
        for row in list(self._backend.rows):
            stop = self._overdue(row.row_id, self._deadlines.get(row.row_id), now)
            if stop is not None:
                self._file(row, row.stop or stop)
        self._cancelled.clear()

    def _overdue(self, row_id: RowId, deadline: float | None, now: float) -> Stop | None:
        if row_id in self._cancelled:
            return Stop(FinishReason.CANCELLED)
        if deadline is not None and now >= deadline:
            return Stop(FinishReason.DEADLINE)
        return None

    def _file(self, row: Row, stop: Stop | None) -> None:
        """File what is new of a row, and with a stop its completion; then the row goes."""
        completion = None
        if stop is not None:
            row.stopper.finish()
            completion = self._completion(row, stop)
        tokens = tuple(row.token_ids[row.num_prompt + row.num_reported :])
        self._undelivered.append(Update(row.row_id, tokens, row.stopper.take_delta(), completion))
        row.num_reported = row.num_output
        if stop is not None:
            self._drop(row)

    def _drop(self, row: Row) -> None:
        self._deadlines.pop(row.row_id, None)
        self._backend.remove(row.row_id)

    def _completion(self, row: Row, stop: Stop) -> Completion:
        return Completion(
            request_id=row.row_id,
            prompt_token_ids=tuple(row.token_ids[: row.num_prompt]),
            token_ids=tuple(row.token_ids[row.num_prompt :]),
            text=row.stopper.text,
            finish_reason=stop.reason.value,
            stop_detail=stop.detail,
            logprobs=None if row.params.logprobs is None else tuple(row.logprobs),
            seed=row.sampler.seed,
            mode=self._mode(row),
            metrics=row.metrics.build(self._backend.state_bytes()),
        )

    def _mode(self, row: Row) -> Mode:
        plain = self._backend.drafter is None or not row.params.speculate
        exact = plain or row.sampler.matches
        return Mode.EXACT if exact else Mode.DISTRIBUTION
