"""Exact speculative decoding for any Hugging Face causal language model, carried by specflow's block loop."""

from __future__ import annotations

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
