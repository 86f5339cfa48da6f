"""A tiny chat model that asks and answers itself, and settings with which it does so quickly."""

from __future__ import annotations

import functools
from typing import Any

from specflow_llm import LLM
from specflow_llm.training.samples import SampleSettings
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.tokenizers import ALPHABET, CharTokenizer

OPENERS = ("Why do ", "Explain ", "How many ")
SETTINGS = SampleSettings(num_samples=14, max_prompt_tokens=60, max_answer_tokens=20, seed=5)
END = ALPHABET.index(".")


class ChatTokenizer(CharTokenizer):
    """Characters, with a chat template: ``U``, the user's text, ``.A``, the answer; a full stop ends a turn."""

    eos_token_id = END
    chat_template = "U{text}.A"

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **_settings: Any) -> Any:
        """One turn."""
        text = f"U{messages[0]['content']}.A"
        return self(text) if tokenize else text


@functools.cache
def llm() -> LLM:
    """A tiny chat model."""
    return LLM(target(), tokenizer=ChatTokenizer(), speculation=None, max_batch_size=8, check_model=False)
