"""Training text: what a target asks itself, what it answers, and what is left after a crash."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import InvalidSettingError
from specflow_llm import LLM, SamplingParams
from specflow_llm.errors import TrainingError
from specflow_llm.training.run import TrainingPlan, TrainingRun
from specflow_llm.training.samples import (
    ChatShape,
    Sample,
    SampleMaker,
    SampleSettings,
    read_samples,
)
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.tokenizers import ALPHABET, ByteTokenizer, CharTokenizer, byte_level_bpe

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


def make(
    path: Path,
    settings: SampleSettings = SETTINGS,
    *,
    window: int = 128,
    prompts: list[list[int]] | None = None,
    on_sample: Callable[[Sample], None] = lambda _sample: None,
) -> list[Sample]:
    """Make a file of samples; what was yielded, in order."""
    maker = SampleMaker(llm(), settings, prompts=prompts, openers=OPENERS)
    return list(maker.run(path, window=window, on_sample=on_sample))


@functools.cache
def whole(folder: Path) -> list[Sample]:
    """All samples of the settings, made in one go."""
    make(folder / "samples.jsonl")
    return read_samples(folder / "samples.jsonl")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """All samples of the settings, made in one go."""
    return whole(tmp_path_factory.mktemp("whole"))


def test_samples_are_conversations_in_the_targets_own_template(samples: list[Sample]) -> None:
    """User's turn asked by the target, template around it, answer by the target: each part where it should be."""
    shape = ChatShape.of(ChatTokenizer())
    assert shape == ChatShape((ALPHABET.index("U"),), (END, ALPHABET.index("A")))
    assert len(samples) >= 5  # prompts that did not end, or were too short, are left out
    opened = 0
    for entry in samples:
        ids = list(entry.token_ids)
        prompt, answer = ids[: entry.num_prompt], ids[entry.num_prompt :]
        assert tuple(prompt[:1]) == shape.before
        assert tuple(prompt[-2:]) == shape.after
        assert 1 <= len(answer) <= 20
        assert END not in answer[:-1]
        assert END in answer or len(answer) == 20
        head = ChatTokenizer().decode(ids[1 : entry.first_own])
        assert head in {"", *(opener.rstrip() for opener in OPENERS)}
        opened += bool(head)
        asked = ids[entry.first_own : entry.num_prompt - 2]
        assert len(asked) >= 4
        assert END not in asked
        assert entry.temperature == (0.0, 1.0)[entry.index % 2]
    assert 0 < opened < len(samples)


def test_answers_are_the_targets(samples: list[Sample]) -> None:
    """Greedy answers are what the target says greedily, and prompts differ from each other."""
    greedy = [entry for entry in samples if entry.temperature == 0.0]
    prompts = [list(entry.token_ids[: entry.num_prompt]) for entry in greedy]
    outs = llm().generate(prompts, SamplingParams(max_tokens=20))
    assert [out.token_ids for out in outs] == [entry.token_ids[entry.num_prompt :] for entry in greedy]
    assert len({entry.token_ids for entry in samples}) == len(samples)


def test_a_sample_depends_on_seed_and_index_only(samples: list[Sample], tmp_path: Path) -> None:
    """Neither the number under way together nor how many are wanted changes one; another seed does."""
    make(tmp_path / "few.jsonl", window=2)
    assert read_samples(tmp_path / "few.jsonl") == samples
    fewer = SampleSettings(num_samples=6, max_prompt_tokens=60, max_answer_tokens=20, seed=5)
    make(tmp_path / "fewer.jsonl", fewer, window=3)
    assert read_samples(tmp_path / "fewer.jsonl") == [entry for entry in samples if entry.index < 6]
    other = SampleSettings(num_samples=6, max_prompt_tokens=60, max_answer_tokens=20, seed=6)
    assert not {entry.token_ids for entry in make(tmp_path / "other.jsonl", other)} & {
        entry.token_ids for entry in samples
    }


def test_no_more_conversations_than_the_window_are_under_way(tmp_path: Path) -> None:
    """New ones begin only as others end."""
    under_way: list[int] = []
    make(tmp_path / "samples.jsonl", window=3, on_sample=lambda _sample: under_way.append(llm().engine.num_unfinished))
    assert max(under_way) <= 3


@pytest.mark.parametrize("cut", ["in a line", "before the line break", "between lines"])
def test_a_file_that_a_crash_cut_short_is_completed(samples: list[Sample], tmp_path: Path, cut: str) -> None:
    """Wherever the file ends, what is missing is made again, and the result is that of one go; nothing is doubled."""
    path = tmp_path / "samples.jsonl"
    lines = [entry.to_line() + "\n" for entry in reversed(samples)]
    kept = {"in a line": lines[2][:25], "before the line break": lines[2][:-1], "between lines": ""}[cut]
    path.write_text(lines[0] + lines[1] + kept, encoding="utf-8")
    made = make(path)
    assert read_samples(path) == samples
    assert sorted(entry.index for entry in made) == sorted(entry.index for entry in samples[:-2])
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(samples)
    assert make(path) == []  # and a complete file is left alone


def test_what_is_yielded_is_on_disk(tmp_path: Path) -> None:
    """A sample is written before anyone hears of it, so a kill right after loses nothing."""
    path = tmp_path / "deep" / "samples.jsonl"
    maker = SampleMaker(
        LLM(target(), tokenizer=ChatTokenizer(), speculation=None, check_model=False), SETTINGS, openers=OPENERS
    )
    for number, entry in enumerate(maker.run(path), 1):
        assert entry in read_samples(path)
        assert len(read_samples(path)) == number
        if number == 3:
            break


def test_given_prompts_are_answered(tmp_path: Path) -> None:
    """Only the answer is the target's own; no more are made than there are prompts, and no chat template is needed."""
    prompts = [[1, 2, 3], [40], [5] * 9]
    made = sorted(make(tmp_path / "samples.jsonl", prompts=prompts), key=lambda entry: entry.index)
    assert [list(entry.token_ids[: entry.num_prompt]) for entry in made] == prompts
    assert all(entry.first_own == entry.num_prompt for entry in made)
    plain = LLM(target(), tokenizer=None, speculation=None, check_model=False)
    again = sorted(
        SampleMaker(plain, SETTINGS, prompts=prompts).run(tmp_path / "plain.jsonl"), key=lambda entry: entry.index
    )
    assert [len(entry.token_ids) >= len(prompt) + 1 for entry, prompt in zip(again, prompts, strict=True)] == [True] * 3


def test_prompts_are_read_from_a_file(tmp_path: Path) -> None:
    """``prompt`` or the first of ``turns``, in the chat template; blank lines are passed over, others are named."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n\n{"turns": ["de", "f"]}\n', encoding="utf-8")
    run = TrainingRun(llm(), TrainingPlan(out=tmp_path / "out", prompts=path))
    tokenizer = ChatTokenizer()
    assert run._read_prompts(path) == [tokenizer("Uabc.A")["input_ids"], tokenizer("Ude.A")["input_ids"]]
    for text, said in (('{"prompt": "a"}\n{"other": 1}\n', "line 2"), ("nonsense\n", "line 1"), ("\n", "no prompts")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TrainingError, match=said):
            run._read_prompts(path)
    with pytest.raises(TrainingError, match="cannot be read"):
        run._read_prompts(tmp_path / "nowhere.jsonl")


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
    assert Sample.from_line(entry.to_line()) == entry
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


def test_two_recipes_never_share_a_file(tmp_path: Path) -> None:
    """A folder whose text was made with other settings is refused; more of the same is welcome."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("abc", "de", "fgh")), encoding="utf-8")

    def run(**changes: Any) -> TrainingRun:
        data = SampleSettings(**{"num_samples": 2, "max_answer_tokens": 24, "temperatures": (1.0,), **changes})
        return TrainingRun(llm(), TrainingPlan(out=tmp_path / "out", prompts=path, data=data))

    first = run()
    first._make(tmp_path / "out" / "samples.jsonl")
    run(num_samples=3)._make(tmp_path / "out" / "samples.jsonl")
    assert len(read_samples(tmp_path / "out" / "samples.jsonl")) == 3
    with pytest.raises(TrainingError, match="other seed"):
        run(seed=9)._make(tmp_path / "out" / "samples.jsonl")
