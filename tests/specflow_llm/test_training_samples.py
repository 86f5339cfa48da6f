"""Training text: what a target asks itself, what it answers, and what is left after a crash."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specflow.errors import InvalidSettingError
from specflow_llm import LLM, SamplingParams
from specflow_llm.cli import app
from specflow_llm.dspark import TargetAdapter
from specflow_llm.errors import ContextLengthError, PromptError, TrainingError
from specflow_llm.training.feature_cache import FeatureCache
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.run import TrainingPlan, TrainingRun, Written
from specflow_llm.training.samples import ChatShape, Sample, SampleSettings, dropped_line, read_samples, tried_indices
from specflow_llm.training.writer import KeptFeatures, SampleMaker
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.models import tiny_model
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
    part: tuple[int, int] = (0, 1),
    on_tried: Callable[[int, int], None] = lambda _index, _tokens: None,
) -> list[Sample]:
    """Make a file of samples; what was yielded, in order."""
    maker = SampleMaker(llm(), settings, prompts=prompts, openers=OPENERS, part=part)
    return list(maker.run(path, window=window, on_tried=on_tried))


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


def test_everything_written_is_what_plain_decoding_writes(samples: list[Sample]) -> None:
    """Prompts and answers are those of requests of their own with the same seeds, each read from its beginning.

    What follows the template's tokens would differ if one were run twice, or at another position.
    """
    for entry in samples:
        for stage, begin, temperature in ((0, entry.first_own, 1.0), (1, entry.num_prompt, entry.temperature)):
            seed = random.Random(f"{SETTINGS.seed}/{entry.index}/{stage}").getrandbits(62)
            longest = (SETTINGS.max_prompt_tokens, SETTINGS.max_answer_tokens)[stage]
            params = SamplingParams(max_tokens=longest, temperature=temperature, seed=seed)
            out = llm().generate(list(entry.token_ids[:begin]), params)[0]
            asked = entry.token_ids[begin : entry.num_prompt - 1] if stage == 0 else entry.token_ids[begin:]
            assert out.token_ids == asked


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
    """New ones begin only as others end; a caller that stops early leaves none behind."""
    maker = SampleMaker(llm(), SETTINGS, openers=OPENERS)
    under_way = [len(maker._rows) for _sample in maker.run(tmp_path / "samples.jsonl", window=3)]
    assert under_way[0] == 2  # the third has just ended
    assert max(under_way) <= 2
    assert maker._rows == []
    other = SampleMaker(llm(), SETTINGS, openers=OPENERS)
    run = other.run(tmp_path / "other.jsonl", window=3)
    next(run)
    run.close()
    assert other._rows == []
    assert len(list(other.run(tmp_path / "other.jsonl"))) == len(under_way) - 1


def test_several_processes_share_the_work(samples: list[Sample], tmp_path: Path) -> None:
    """By index: together they make what one makes."""
    parts = [make(tmp_path / f"{rank}.jsonl", part=(rank, 3)) for rank in range(3)]
    assert all(entry.index % 3 == rank for rank, part in enumerate(parts) for entry in part)
    assert sorted((entry for part in parts for entry in part), key=lambda entry: entry.index) == samples


def test_work_that_was_shared_is_finished_by_one(tmp_path: Path) -> None:
    """Whoever goes on takes all files of a folder into account: nothing is made twice, nothing is left out."""
    out = tmp_path / "out"
    settings = dataclasses.replace(SETTINGS, opened_fraction=0.0)
    make(out / "samples-1.jsonl", settings, part=(1, 2))
    told: list[Written] = []
    TrainingRun(llm(), TrainingPlan(out=out, data=settings), on_written=told.append)._make()
    theirs, mine = read_samples(out / "samples-1.jsonl"), read_samples(out / "samples.jsonl")
    assert not {entry.index for entry in theirs} & {entry.index for entry in mine}
    assert told[-1].made == len(theirs) + len(mine)
    assert 7 < told[-1].tried <= told[-1].wanted == 14
    (out / "samples-2.jsonl").write_text((out / "samples.jsonl").read_text("utf-8"), encoding="utf-8")
    usable = TrainingRun(llm(), TrainingPlan(out=out, data=settings)).samples()
    assert len({entry.index for entry in usable}) == len(usable)


def test_what_came_to_nothing_is_not_tried_again(samples: list[Sample], tmp_path: Path) -> None:
    """Prompts that did not end are noted: a rerun does nothing at all, and reading passes them over."""
    path = tmp_path / "samples.jsonl"
    tried: list[int] = []
    make(path, on_tried=lambda index, _tokens: tried.append(index))
    assert sorted(tried) == list(range(14))
    assert tried_indices(path) == set(tried)
    assert len(samples) < len(tried)
    again: list[int] = []
    make(path, on_tried=lambda index, _tokens: again.append(index))
    assert again == []
    assert read_samples(path) == samples
    path.write_text(dropped_line(4) + "\n" + samples[0].to_line() + '\n{"index":9,"dro', encoding="utf-8")
    assert read_samples(path) == samples[:1]
    assert tried_indices(path) == {4, samples[0].index}


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
    assert len(path.read_text(encoding="utf-8").splitlines()) == 14
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


def test_prompts_that_cannot_be_answered_are_refused_before_any_work() -> None:
    """By number: empty ones, foreign ids, and those that leave no room for an answer."""
    short = LLM(target(max_position_embeddings=32), tokenizer=None, speculation=None, check_model=False)
    for bad, said in (([], "empty"), ([1, 99], "99"), ([1] * 32, "32")):
        with pytest.raises((PromptError, ContextLengthError), match=said):
            SampleMaker(short, SETTINGS, prompts=[[1, 2], bad])


def test_text_ends_where_the_context_does(tmp_path: Path) -> None:
    """Answers are cut there, and prompts that leave no room for one come to nothing."""
    short = LLM(target(max_position_embeddings=24), tokenizer=ChatTokenizer(), speculation=None, check_model=False)
    settings = SampleSettings(num_samples=20, max_prompt_tokens=60, max_answer_tokens=60, seed=5)
    made = list(SampleMaker(short, settings, openers=()).run(tmp_path / "samples.jsonl"))
    assert made
    assert max(len(entry.token_ids) for entry in made) == 24
    assert len(tried_indices(tmp_path / "samples.jsonl")) == 20


@functools.cache
def family(name: str) -> LLM:
    """A tiny chat model of a family."""
    return LLM(tiny_model(name, vocab_size=64), tokenizer=ChatTokenizer(), speculation=None, max_batch_size=8)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-alternating", "falcon-rotary", "mamba2", "qwen3-next"])
def test_features_kept_while_writing_are_those_of_reading(name: str, tmp_path: Path) -> None:
    """Every token's, the last one's included: as if the finished text were run by itself."""
    own = family(name)
    adapter = TargetAdapter(own.model)
    cache = FeatureCache(tmp_path / "features", {"target": name}, shard_size=4)
    maker = SampleMaker(own, SETTINGS, openers=OPENERS, features=KeptFeatures(adapter, (0, 1), cache))
    made = list(maker.run(tmp_path / "samples.jsonl", window=5))
    assert made
    assert made == make_plainly(own, tmp_path / "plain.jsonl", window=5)
    cache = FeatureCache(tmp_path / "features", {"target": name}, shard_size=4)  # what is on disk
    for number, expected in enumerate(LiveFeatures(adapter, (0, 1), made).of(range(len(made)))):
        found = cache.get(made[number].token_ids)
        for mine, other in ((found.features, expected.features), (found.hidden, expected.hidden)):
            assert mine.shape == other.shape
            assert (mine.float() - other).abs().max() < 0.01 * other.abs().max()
            shifted = (mine.float()[1:] - other[:-1]).abs().max()
            assert shifted > 0.05 * other.abs().max()  # a token's features in its neighbour's place would be noticed
        torch.testing.assert_close(found.log_total, expected.log_total, rtol=0.01, atol=0.05)


def make_plainly(own: LLM, path: Path, window: int) -> list[Sample]:
    """The same without features."""
    return list(SampleMaker(own, SETTINGS, openers=OPENERS).run(path, window=window))


def test_several_files_are_mixed_so_that_what_is_held_out_stays_held_out(tmp_path: Path) -> None:
    """The last twentieth of two files' text is the last twentieth of each, also when one comes later."""
    sizes = {"old": 40, "new": 100}
    for name, size in sizes.items():
        entries = [Sample(index, tuple(range(20)), 2, 2, 0.0) for index in range(1000 * size, 1001 * size)]
        (tmp_path / name).write_text("".join(entry.to_line() + "\n" for entry in entries), encoding="utf-8")

    def held(*names: str) -> set[int]:
        plan = TrainingPlan(out=tmp_path / "out", samples=tuple(tmp_path / name for name in names))
        found = [entry.index for entry in TrainingRun(llm(), plan).samples()]
        assert len(set(found)) == len(found) == sum(sizes[name] for name in names)
        return set(found[-round(0.05 * len(found)) :])

    assert held("old") == {40038, 40039}
    assert held("old", "new") == held("old") | held("new")


def test_the_command_makes_text_and_stops(tmp_path: Path) -> None:
    """``--text-only``: text and features, no drafter; the same command does nothing more, a longer one adds."""
    tokenizer = byte_level_bpe()
    target(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": word * 9}) + "\n" for word in ("abc", "de", "fgh")]
    prompts.write_text("".join(lines), encoding="utf-8")
    options = ["train", "--target", str(tmp_path / "model"), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    options += ["--cache", str(tmp_path / "cache"), "--text-only", "--json"]
    told = []
    for wanted in ("2", "2", "3"):
        done = CliRunner().invoke(app, [*options, "--samples", wanted])
        assert done.exit_code == 0, done.stderr
        told.append((json.loads(done.stdout)["num_samples"], done.stderr))
    assert [count for count, _ in told] == [2, 2, 3]
    assert "2 of 2 tried" in told[0][1]
    assert "tried" not in told[1][1]
    assert "at most" in told[0][1]
    assert not (tmp_path / "out" / "config.json").exists()
    assert list((tmp_path / "cache").glob("*.safetensors"))


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
    first._make()
    run(num_samples=3)._make()
    assert len(read_samples(tmp_path / "out" / "samples.jsonl")) == 3
    with pytest.raises(TrainingError, match="other seed"):
        run(seed=9)._make()
