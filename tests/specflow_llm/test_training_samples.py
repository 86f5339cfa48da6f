"""Training text: conversations, files of them, and how many of which kind are wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import InvalidSettingError
from specflow_llm.errors import TrainingError
from specflow_llm.training.samples import ChatShape, Sample, SampleSettings, read_samples
from tests.specflow_llm.chat import ChatTokenizer
from tests.specflow_llm.tokenizers import ByteTokenizer, CharTokenizer, byte_level_bpe


def test_a_tokenizer_without_a_usable_template_is_refused() -> None:
    """None at all, one that changes the text, and one with nothing before the text; each error points to a file."""

    class Changing(ChatTokenizer):
        """Shouts."""

        def apply_chat_template(self, messages: Any, **_settings: Any) -> str:
            """The text in capitals."""
            return f"U{messages[0]['content'].upper()}.A"

    class Bare(ChatTokenizer):
        """Begins with the user's text."""

        def apply_chat_template(self, messages: Any, **_settings: Any) -> str:
            """The text, and a full stop."""
            return f"{messages[0]['content']}."

    for tokenizer in (None, CharTokenizer(), ByteTokenizer(), Changing(), Bare()):
        with pytest.raises(TrainingError, match="--prompts"):
            ChatShape.of(tokenizer)
    shape = ChatShape.of(byte_level_bpe())
    assert byte_level_bpe().decode(list(shape.before)) == "user: "
    assert byte_level_bpe().decode(list(shape.after)) == "\n"


def test_samples_survive_json() -> None:
    """One line each."""
    entry = Sample(3, (1, 2, 3), 2, 1, 0.5)
    assert Sample.from_fields(json.loads(entry.to_line())) == entry
    assert "\n" not in entry.to_line()


def test_a_file_of_something_else_is_refused_by_line(tmp_path: Path) -> None:
    """A line that is no sample is an error unless it is the last and unfinished; of equal indices the last counts."""
    path = tmp_path / "samples.jsonl"
    good = Sample(0, (1, 2), 1, 1, 0.0)
    for line in ("nonsense", "[1]", '{"index": 1}', "12"):
        path.write_text(f"{good.to_line()}\n{line}\n{good.to_line()}\n", encoding="utf-8")
        with pytest.raises(TrainingError, match="line 2"):
            read_samples(path)
    twice = Sample(0, (5, 6), 1, 1, 0.0)
    path.write_text(f'{good.to_line()}\n{twice.to_line()}\n{{"index": 7', encoding="utf-8")
    assert read_samples(path) == [twice]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", 0),
        ("max_prompt_tokens", 0),
        ("max_answer_tokens", 0),
        ("temperatures", ()),
        ("temperatures", (0.5, -1.0)),
        ("opened_fraction", 1.5),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(name: str, value: Any) -> None:
    """The error names the field."""
    with pytest.raises(InvalidSettingError, match=name):
        SampleSettings(**{name: value})
