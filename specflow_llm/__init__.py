"""Exact speculative decoding for any Hugging Face causal language model, carried by specflow's block loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SamplingParams, Speculation
    from .drafters import Drafter, DrafterBase, DraftRequest, Proposal
    from .engine import Completion, Engine, EngineConfig
    from .errors import (
        ContextLengthError,
        DrafterError,
        EngineBusyError,
        ModelNotFoundError,
        PromptError,
        UnsupportedModelError,
    )
    from .llm import LLM, Stream, StreamChunk

__all__ = [
    "LLM",
    "Completion",
    "ContextLengthError",
    "DraftRequest",
    "Drafter",
    "DrafterBase",
    "DrafterError",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "ModelNotFoundError",
    "PromptError",
    "Proposal",
    "SamplingParams",
    "Speculation",
    "Stream",
    "StreamChunk",
    "UnsupportedModelError",
]

_ROOMS = {
    "Completion": ".engine",
    "ContextLengthError": ".errors",
    "DraftRequest": ".drafters",
    "Drafter": ".drafters",
    "DrafterBase": ".drafters",
    "DrafterError": ".errors",
    "Engine": ".engine",
    "EngineBusyError": ".errors",
    "EngineConfig": ".engine",
    "LLM": ".llm",
    "ModelNotFoundError": ".errors",
    "PromptError": ".errors",
    "Proposal": ".drafters",
    "SamplingParams": ".config",
    "Speculation": ".config",
    "Stream": ".llm",
    "StreamChunk": ".llm",
    "UnsupportedModelError": ".errors",
}
"""Where each name lives. Rooms are entered when a name is first used: the command line's help needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_ROOMS[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
