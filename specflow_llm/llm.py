"""The front door: load a model once, then generate, stream and chat."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel

from specflow.errors import InvalidSettingError
from specflow.policies import PID, Adaptive, CostScheduled, Estimated, Fixed
from specflow.protocols import Observer, Policy

from .architecture import inspect_model
from .config import SamplingParams, Speculation
from .drafters import Drafter, TargetFacts, build_drafter
from .drafters.base import BranchingDrafter, RowId
from .engine import Completion, Engine, EngineConfig, Update
from .errors import PromptError, require
from .hub import DEMO_MODEL, ignored_generation_settings, load_model
from .profile import measure_round_costs
from .selfcheck import build_target
from .target import DEFAULT_PREFILL_CHUNK, Target

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages (``{"role": ..., "content": ...}``)."""

_KINDS = "give text, a list of token ids, or a list of chat messages"


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of one streamed completion; the pieces' texts add up to the completion's text."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None
    """The whole completion, on the last chunk."""


class Stream:
    """The pieces of one completion, as they are settled.

    Closing it, leaving its ``with`` block or dropping it cancels the request and frees its state.
    """

    def __init__(self, chunks: Iterator[StreamChunk], close: Callable[[], None]) -> None:
        self._chunks = chunks
        self._close = close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel the request, unless it is finished."""
        self._close()
        self._chunks, self._close = iter(()), _nothing  # a closed stream holds on to no model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LLM:
    """A causal language model that decodes speculatively, with the same output as plain decoding.

    Args:
        model: the built-in demo model's name, a folder, a ``.gguf`` file, a hub id, or a loaded ``PreTrainedModel``.
        tokenizer: ``"auto"`` takes the model's own; None means ids in, ids out; or a tokenizer, or its path or id.
        dtype: ``"auto"`` is the checkpoint's (float32 on CPUs without bfloat16 instructions), or a torch dtype or its
            name.
        device: ``"auto"`` is the first GPU, else the CPU.
        speculation: whether and how to draft ahead; None decodes plainly.
        max_batch_size: most requests decoded together; the rest wait their turn.
        prefill_chunk: prompt tokens per forward.
        pack: move linear layers to a CPU layout in which short blocks are cheap. None does so for models
            loaded here, and never to a model handed in.
        check_model: compare the model with itself through the rollback state before any work.
        observers: told about every round.
        notify: told about loading steps that take long.

    Raises:
        InvalidSettingError: a setting has a value that cannot work.
        ModelNotFoundError: there is no such model, or its tokenizer cannot be loaded.
        UnsupportedModelError: the model cannot be decoded exactly here.
        DrafterError: the drafter cannot serve this target.
    """

    def __init__(  # noqa: PLR0913 - settings of one object, all but the first by keyword
        self,
        model: str | os.PathLike[str] | PreTrainedModel = DEMO_MODEL,
        *,
        tokenizer: Any = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        speculation: Speculation | None = Speculation(),  # noqa: B008 - frozen, so sharing it is safe
        max_batch_size: int = 32,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        pack: bool | None = None,
        check_model: bool = True,
        observers: Sequence[Observer] = (),
        notify: Callable[[str], None] = lambda _message: None,
    ) -> None:
        require(
            speculation is None or isinstance(speculation, Speculation),
            "speculation", speculation, "a Speculation, for example Speculation(drafter='ngram'), or None",
        )  # fmt: skip
        for setting, number in (("max_batch_size", max_batch_size), ("prefill_chunk", prefill_chunk)):
            require(type(number) is int and number >= 1, setting, number, "an integer >= 1")
        loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, pack=pack, notify=notify)
        self.name = loaded.name
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.packed_layers = loaded.packed_layers
        self.max_batch_size = max_batch_size
        self.prefill_chunk = prefill_chunk
        self.checks_model = check_model
        self.eos_token_ids = _eos_token_ids(loaded.model, loaded.tokenizer)
        ignored = ignored_generation_settings(loaded.model)
        if ignored:
            notify(f"the model's generation_config asks for {ignored}; here SamplingParams alone decide")
        architecture = inspect_model(loaded.model)
        self._speculation = speculation
        self._inbox: dict[RowId, list[Update]] = {}
        facts = TargetFacts(
            architecture.vocab_size,
            loaded.tokenizer,
            loaded.model.dtype,
            loaded.model.device,
            model=loaded.model,
            name=loaded.name,
        )
        drafter = build_drafter(None if speculation is None else speculation.drafter, facts)
        target = build_target(
            loaded.model,
            architecture,
            feature_layers=() if drafter is None else drafter.feature_layers,
            check=check_model,
            prefill_chunk=prefill_chunk,
            trees=_tree(speculation) and isinstance(drafter, BranchingDrafter) and drafter.branches,
            notify=notify,
        )
        self._policy = _build_policy(speculation, target, drafter, max_batch_size, notify)
        self.engine = Engine(
            target,
            drafter,
            self._policy,
            EngineConfig(
                eos_token_ids=self.eos_token_ids,
                verification="auto" if speculation is None else speculation.verification,
                max_batch_size=max_batch_size,
            ),
            tokenizer=loaded.tokenizer,
            encode=None if loaded.tokenizer is None else _plain_encoder(loaded.tokenizer),
            observers=observers,
        )

    @property
    def policy(self) -> Policy:
        """The policy in use; ``policy.explain()`` of the adaptive one says why it drafts as it does."""
        return self._policy

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_update: Callable[[Update], None] = lambda _update: None,
    ) -> list[Completion]:
        """Complete one or many prompts, decoded together as one ragged batch.

        Args:
            prompts: one prompt or a list; each is text, token ids, or a list of chat messages.
            params: settings for all prompts, or one per prompt.
            on_update: told about every step's new tokens, for progress displays.

        Returns:
            One completion per prompt, in order.

        Raises:
            PromptError: a prompt cannot be decoded; nothing was started.
            ContextLengthError: a prompt is too long; nothing was started.
        """
        batch = self._batch(prompts)
        settings = _settings(params, len(batch))
        requests: list[RowId] = []
        done: dict[RowId, Completion] = {}
        try:
            for index, (prompt, setting) in enumerate(zip(batch, settings, strict=True)):
                requests.append(self._submit(self.encode(prompt, index), setting, index))
            while len(done) < len(requests):
                self._pump()
                for request in requests:
                    for update in self._take(request):
                        on_update(update)
                        if update.error is not None:
                            raise update.error
                        if update.completion is not None:
                            done[request] = update.completion
        finally:
            self._forget(requests)
        return [done[request] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, yielding text as soon as it is settled.

        Several streams may be read in turns. Closing or dropping the stream early cancels the request.

        Raises:
            PromptError: the prompt cannot be decoded.
            ContextLengthError: the prompt is too long.
        """
        (setting,) = _settings(params, 1)
        request = self._submit(self.encode(prompt), setting, 0)
        return Stream(self._chunks(request), lambda: self._forget([request]))

    def _chunks(self, request: RowId) -> Iterator[StreamChunk]:
        try:
            while True:
                for update in self._take(request):
                    if update.error is not None:
                        raise update.error
                    if update.text or update.token_ids or update.completion is not None:
                        yield StreamChunk(update.text, update.token_ids, update.completion)
                    if update.completion is not None:
                        return
                self._pump()
        finally:
            self._forget([request])

    # One engine serves every caller of this object. Whoever steps it files the others' updates in their inboxes.

    def _submit(self, token_ids: list[int], params: SamplingParams, index: int) -> RowId:
        request = self.engine.submit(token_ids, params, index=index)
        self._inbox[request] = []
        return request

    def _pump(self) -> None:
        for update in self.engine.step():
            if update.request_id in self._inbox:
                self._inbox[update.request_id].append(update)

    def _take(self, request: RowId) -> list[Update]:
        updates, self._inbox[request] = self._inbox[request], []
        return updates

    def _forget(self, requests: Sequence[RowId]) -> None:
        with contextlib.ExitStack() as stack:  # all of them, whatever one of them raises
            for request in requests:
                self._inbox.pop(request, None)
                stack.callback(self.engine.withdraw, request)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation through the model's chat template."""
        return self.generate([messages], params)[0]

    def encode(self, prompt: Prompt, index: int = 0) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: it is neither text, ids nor chat messages, or it needs a tokenizer (or chat template) that is
                not there.
        """
        if isinstance(prompt, (bytes, bytearray)):
            raise PromptError(index, "it is bytes", "decode it to text, or give a list of token ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(index, "text needs a tokenizer", "load the model with one, or give token ids")
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        items = _items(prompt, index)
        if items and all(isinstance(item, Mapping) for item in items):
            return self._encode_chat(items, index)
        return [_token_id(item, index) for item in items]

    def _encode_chat(self, messages: list[Any], index: int) -> list[int]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise PromptError(
                index, "chat messages need a tokenizer with a chat template", "give text or token ids instead"
            )
        if not all("role" in message for message in messages):
            raise PromptError(
                index, "a chat message has no 'role'", "give messages like {'role': 'user', 'content': 'some text'}"
            )
        if any(message.get("content") is None and not message.get("tool_calls") for message in messages):
            raise PromptError(
                index, "a chat message has no 'content'", "give messages like {'role': 'user', 'content': 'some text'}"
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except TemplateError as error:
            raise PromptError(
                index, f"the model's chat template refuses it ({error})", "give messages as the template wants them"
            ) from error
        ids: list[int] = encoded["input_ids"]
        return ids

    def _batch(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, (str, bytes, bytearray)):
            return [prompts]
        items = _items(prompts, 0)
        # Ids or messages are one prompt; texts, lists of ids and lists of messages are prompts.
        is_one = bool(items) and not isinstance(items[0], Sequence)
        return [items] if is_one else items


def _nothing() -> None:
    pass


def _plain_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids without special tokens.

    It knows the tokenizer only: an engine that knew its LLM, which knows its engine, would keep both and their state
    until the garbage collector comes round.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode


def _items(values: Any, index: int) -> list[Any]:
    """The items of a list, tensor or array, and tensors and arrays among them as lists."""
    values = _without_arrays(values)
    # Iterating over a mapping, one chat message for example, would take its keys for prompts.
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise PromptError(index, f"it is of type {type(values).__name__}", _KINDS)
    return [_without_arrays(item) for item in values]


def _without_arrays(value: Any) -> Any:
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def _token_id(item: Any, index: int) -> int:
    if not isinstance(item, (bool, float)):
        try:
            return operator.index(item)
        except TypeError:
            pass
    raise PromptError(index, f"it holds {item!r}, which is not a token id", _KINDS)


def _settings(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    settings = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(setting, SamplingParams) for setting in settings):
        raise InvalidSettingError("params", params, "a SamplingParams, or a list of them with one per prompt")
    if len(settings) != count:
        raise PromptError(
            len(settings),
            f"{count} prompts came with {len(settings)} SamplingParams",
            "give one for all, or one per prompt",
        )
    return settings


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids where ``generate`` finds them: generation config, else config, else tokenizer."""
    for source in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def _tree(speculation: Speculation | None) -> bool:
    """Whether drafts may branch. PID judges one item after another by a threshold that no alternative reaches."""
    if speculation is None or speculation.policy == "pid" or isinstance(speculation.policy, PID):
        return False
    return speculation.tree


def _build_policy(
    speculation: Speculation | None,
    target: Target,
    drafter: Drafter | None,
    max_batch_size: int,
    notify: Callable[[str], None],
) -> Policy:
    if speculation is None or drafter is None or speculation.max_draft_tokens == 0:
        return Fixed(0)
    longest = speculation.max_draft_tokens
    if speculation.policy == "fixed":
        return Fixed(longest)
    if speculation.policy == "adaptive":
        return Adaptive(longest)
    if speculation.policy == "pid":
        return PID(longest)
    if speculation.policy == "cost_scheduled":
        costs = measure_round_costs(target, drafter, longest, max_batch_size, notify=notify)
        # Estimates are corrected by what is accepted: a drafter may have none, or may not be calibrated.
        return Estimated(CostScheduled(longest, costs), longest)
    policy: Policy = speculation.policy
    return policy
