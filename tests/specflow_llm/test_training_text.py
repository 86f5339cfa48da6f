"""The text of a training run: made once, shared out, completed after crashes, and parted the same way every time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specflow_llm import LLM
from specflow_llm.cli import app
from specflow_llm.errors import ContextLengthError, TrainingError
from specflow_llm.training.feature_cache import FeatureCache
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.samples import Sample, SampleSettings, read_samples
from specflow_llm.training.text import TextStage, Written
from specflow_llm.training.world import World
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.chat import SETTINGS, ChatTokenizer, llm
from tests.specflow_llm.small_training import writing
from tests.specflow_llm.tokenizers import CharTokenizer, byte_level_bpe


def stage(
    out: Path,
    world: World = World(),  # noqa: B008 - frozen
    told: list[Written] | None = None,
    **changes: Any,
) -> TextStage:
    """The text stage of a plan without openers, which this alphabet could not spell."""
    data = dataclasses.replace(SETTINGS, opened_fraction=0.0)
    plan = TrainingPlan(**{"out": out, "data": data, **changes})
    return TextStage(llm(), plan, world, on_written=(told if told is not None else []).append)


def test_work_that_was_shared_is_finished_by_one(tmp_path: Path) -> None:
    """Whoever goes on takes all files of a folder into account: nothing is made twice, nothing is left out."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    stage(out, World(1, 2)).make()
    told: list[Written] = []
    stage(out, told=told).make()
    theirs, mine = read_samples(out / "samples-1.jsonl"), read_samples(out / "samples.jsonl")
    assert theirs
    assert mine
    assert not {entry.index for entry in theirs} & {entry.index for entry in mine}
    assert told[-1].made == len(theirs) + len(mine)
    assert [entry.tried for entry in told] == list(range(8, 15))
    stage(alone).make()
    assert stage(out).read() == stage(alone).read()
    (out / "samples-old.jsonl").write_text("somebody else's", encoding="utf-8")
    (out / "samples-2.jsonl").write_text((out / "samples.jsonl").read_text("utf-8"), encoding="utf-8")
    assert stage(out).read() == stage(alone).read()
    assert stage(tmp_path, samples=(out,)).read() == stage(alone).read()
    told.clear()
    stage(out, told=told).make()
    assert told == []


@pytest.mark.parametrize("cut", ["in a line", "before the line break"])
def test_a_folder_that_a_crash_cut_short_is_completed(tmp_path: Path, cut: str) -> None:
    """A line without its end is made again, not passed over as if it were there."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    stage(alone).make()
    out.mkdir()
    (out / "samples.json").write_bytes((alone / "samples.json").read_bytes())
    lines = (alone / "samples.jsonl").read_text("utf-8").splitlines(keepends=True)
    kept = lines[2][:9] if cut == "in a line" else lines[2][:-1]
    (out / "samples.jsonl").write_text("".join([*lines[:2], kept]), encoding="utf-8")
    stage(out).make()
    assert stage(out).read() == stage(alone).read()


def test_progress_says_how_fast_and_how_long(tmp_path: Path) -> None:
    """Tokens a second, and how long what is left takes at that rate, by a clock that ticks at every look."""
    told: list[Written] = []
    stage(tmp_path, told=told).make(clock=itertools.count().__next__)
    assert [entry.tried for entry in told] == list(range(1, 15))
    assert {entry.wanted for entry in told} == {14}
    assert told[-1].seconds_left == 0.0
    run = told[-1].tokens_per_second * 14
    dropped = 14 * 64  # no conversation that came to nothing is longer
    whole = sum(len(sample.token_ids) - 1 for sample in read_samples(tmp_path / "samples.jsonl"))
    assert whole < run < whole + dropped
    halfway = told[6]
    assert 1.0 < halfway.seconds_left < 14.0


def texts(path: Path, lengths: Sequence[int], first: int = 0) -> Path:
    """A file of conversations of these lengths."""
    lines = [
        Sample(first + index, tuple(range(2, 2 + length)), 2, 2, 0.0).to_line() for index, length in enumerate(lengths)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("short", [0, 80])
@pytest.mark.parametrize(("old", "new"), [(40, 100), (30, 30), (7, 1000)])
def test_what_is_held_out_of_a_file_stays_held_out_beside_others(
    tmp_path: Path, old: int, new: int, short: int
) -> None:
    """The last twentieth of each file, whatever else is given and however many of its texts are too short."""
    first = texts(tmp_path / "old.jsonl", [20] * old)
    second = texts(tmp_path / "new.jsonl", [5] * short + [20] * new, first=10**6)

    def held(*files: Path) -> set[int]:
        text = stage(tmp_path / "out", samples=files).read()
        assert len({sample.index for sample in text.samples}) == len(text.samples)
        return {sample.index for sample in text.samples[len(text.samples) - text.num_held :]}

    alone = held(first), held(second)
    assert alone[0] == set(range(old - round(old / 20), old))
    assert held(first, second) == alone[0] | alone[1]
    trainer_sees = stage(tmp_path / "out", samples=(first, second)).read()
    aside = [
        sample.index < 10**6 for sample in trainer_sees.samples[len(trainer_sees.samples) - trainer_sees.num_held :]
    ]
    if old == new:
        assert aside == [True, False] * round(old / 20)  # mixed, so that a part of them stands for both


def test_an_errors_advice_can_be_followed_in_the_same_folder(tmp_path: Path) -> None:
    """A run that was refused leaves no recipe behind that would refuse the next one."""
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    plain = LLM(target(), tokenizer=CharTokenizer(), speculation=None, check_model=False)
    data = dataclasses.replace(SETTINGS, num_samples=2)
    with pytest.raises(TrainingError, match="--prompts"):
        TextStage(plain, TrainingPlan(out=out, data=data), World()).make()
    prompts.write_text(
        json.dumps({"prompt": "abc"}) + "\n\n" + json.dumps({"prompt": "a" * 999}) + "\n", encoding="utf-8"
    )
    with pytest.raises(ContextLengthError, match="prompt 3"):
        TextStage(plain, TrainingPlan(out=out, data=data, prompts=prompts), World()).make()
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n", encoding="utf-8")
    TextStage(plain, TrainingPlan(out=out, data=data, prompts=prompts), World()).make()
    assert len(read_samples(out / "samples.jsonl")) == 1


def test_the_most_tokens_are_told_before_and_not_exceeded(tmp_path: Path) -> None:
    """Template, opener, prompt and answer; with prompts, their own lengths."""
    asked: list[int] = []

    def keep(tokens: int) -> None:
        asked.append(tokens)

    stage(tmp_path / "own").make(keep)
    own = read_samples(tmp_path / "own" / "samples.jsonl")
    assert asked[0] == 14 * (1 + 2 + 60 + 20)
    assert max(len(sample.token_ids) for sample in own) <= 1 + 2 + 60 + 20
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in (90, 5)), encoding="utf-8")
    stage(tmp_path / "given", prompts=prompts).make(keep)
    assert asked[1] == (90 + 3) + (5 + 3) + 2 * 20


@pytest.mark.slow
def test_text_whose_writer_was_killed_goes_on(tmp_path: Path) -> None:
    """Killed after any number of conversations, again and again, the text and its features are those of one go."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.specflow_llm.small_training", "write", str(tmp_path / "out")]
    for lines in (1, 4, 2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(lines):
                assert process.stdout.readline().startswith("tried")
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    found = writing(tmp_path / "out").prepare()
    stage(tmp_path / "alone").make()
    assert found == stage(tmp_path / "alone").read()
    cache = FeatureCache(
        tmp_path / "out" / "cache", json.loads((tmp_path / "out" / "cache" / "cache.json").read_text())
    )
    assert all(sample.token_ids in cache for sample in found.samples)


def test_processes_make_text_together(tmp_path: Path) -> None:
    """Two processes leave what one leaves, features of everything included, and each computed its own."""
    command = [sys.executable, "-m", "tests.specflow_llm.small_training", "text", str(tmp_path)]
    port = {"MASTER_PORT": str(31500 + os.getpid() % 2000)}
    environment = {**os.environ, **port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["samples-1.jsonl", "samples.jsonl"]
    stage(tmp_path / "alone").make()
    assert stage(tmp_path).read() == stage(tmp_path / "alone").read()
    assert "features: " not in done.stdout  # nothing was left to compute afterwards
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2


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
        assert "features: " not in done.stderr  # kept while the text was written
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
    run = TextStage(llm(), TrainingPlan(out=tmp_path / "out", prompts=path), World())
    tokenizer = ChatTokenizer()
    assert run._read_prompts(path) == [tokenizer("Uabc.A")["input_ids"], tokenizer("Ude.A")["input_ids"]]
    for text, said in (('{"prompt": "a"}\n{"other": 1}\n', "line 2"), ("nonsense\n", "line 1"), ("\n", "no prompts")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TrainingError, match=said):
            run._read_prompts(path)
    with pytest.raises(TrainingError, match="cannot be read"):
        run._read_prompts(tmp_path / "nowhere.jsonl")


def test_two_recipes_never_share_a_file(tmp_path: Path) -> None:
    """A folder whose text was made with other settings is refused; more of the same is welcome."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("abc", "de", "fgh")), encoding="utf-8")

    def run(**changes: Any) -> TextStage:
        data = SampleSettings(**{"num_samples": 2, "max_answer_tokens": 24, "temperatures": (1.0,), **changes})
        return TextStage(llm(), TrainingPlan(out=tmp_path / "out", prompts=path, data=data), World())

    first = run()
    first.make()
    run(num_samples=3).make()
    assert len(read_samples(tmp_path / "out" / "samples.jsonl")) == 3
    with pytest.raises(TrainingError, match="other seed"):
        run(seed=9).make()
