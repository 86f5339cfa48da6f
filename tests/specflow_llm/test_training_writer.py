"""A target that writes training text: what it writes, what it keeps of it, and what is left after a crash."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch

from specflow_llm import LLM, SamplingParams
from specflow_llm.dspark import TargetAdapter
from specflow_llm.errors import ContextLengthError, PromptError
from specflow_llm.training.feature_cache import FeatureCache
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.samples import ChatShape, Sample, SampleSettings, dropped_line, read_samples, tried_indices
from specflow_llm.training.writer import KeptFeatures, SampleMaker, _Row
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.chat import END, OPENERS, SETTINGS, ChatTokenizer, llm
from tests.specflow_llm.models import tiny_model
from tests.specflow_llm.tokenizers import ALPHABET


def make(
    path: Path,
    settings: SampleSettings = SETTINGS,
    *,
    window: int | None = None,
    prompts: list[list[int]] | None = None,
    part: tuple[int, int] = (0, 1),
) -> list[Sample]:
    """Make a file of samples; what was yielded, in order."""
    return made_by(SampleMaker(llm(), settings, prompts=prompts, openers=OPENERS, part=part, window=window), path)


def made_by(maker: SampleMaker, path: Path) -> list[Sample]:
    """The conversations that a maker yields, in order."""
    return [tried.sample for tried in maker.run(path) if tried.sample is not None]


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
    maker = SampleMaker(llm(), SETTINGS, openers=OPENERS, window=3)
    under_way = [len(maker._rows) for _tried in maker.run(tmp_path / "samples.jsonl")]
    assert under_way[0] == 2  # the third has just ended
    assert max(under_way) == 2
    assert under_way[-1] == 0
    assert len(under_way) == 14
    other = SampleMaker(llm(), SETTINGS, openers=OPENERS)
    assert other._window == llm().max_batch_size == 8
    run = other.run(tmp_path / "other.jsonl")
    next(run)
    run.close()
    assert other._rows == []
    assert len(list(other.run(tmp_path / "other.jsonl"))) == 13


def test_every_token_is_counted_once(samples: list[Sample], tmp_path: Path) -> None:
    """What was written or read adds up to the conversations, but for the last token of each, which nobody runs."""
    maker = SampleMaker(llm(), SETTINGS, openers=OPENERS)
    tried = list(maker.run(tmp_path / "samples.jsonl"))
    assert maker.num_tokens == sum(entry.num_tokens - 1 for entry in tried)
    assert sum(entry.num_tokens for entry in tried if entry.sample) == sum(len(entry.token_ids) for entry in samples)


def test_several_processes_share_the_work(samples: list[Sample], tmp_path: Path) -> None:
    """By index: together they make what one makes."""
    parts = [make(tmp_path / f"{rank}.jsonl", part=(rank, 3)) for rank in range(3)]
    assert all(entry.index % 3 == rank for rank, part in enumerate(parts) for entry in part)
    assert sorted((entry for part in parts for entry in part), key=lambda entry: entry.index) == samples


def test_what_came_to_nothing_is_not_tried_again(samples: list[Sample], tmp_path: Path) -> None:
    """Prompts that did not end are noted: a rerun does nothing at all, and reading passes them over."""
    path = tmp_path / "samples.jsonl"
    make(path)
    assert tried_indices(path) == set(range(14))
    assert len(samples) < 14
    text = path.read_text(encoding="utf-8")
    assert list(SampleMaker(llm(), SETTINGS, openers=OPENERS).run(path)) == []
    assert path.read_text(encoding="utf-8") == text
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
    for number, tried in enumerate(maker.run(path), 1):
        assert tried.sample is None or tried.sample in read_samples(path)
        assert len(tried_indices(path)) == number
        if number == 3:
            break


def test_given_prompts_are_answered(tmp_path: Path) -> None:
    """Only the answer is the target's own; no more are made than there are prompts, and no chat template is needed."""
    prompts = [[1, 2, 3], [40], [5] * 9]
    made = sorted(make(tmp_path / "samples.jsonl", prompts=prompts), key=lambda entry: entry.index)
    assert [list(entry.token_ids[: entry.num_prompt]) for entry in made] == prompts
    assert all(entry.first_own == entry.num_prompt for entry in made)
    plain = LLM(target(), tokenizer=None, speculation=None, check_model=False)
    again = made_by(SampleMaker(plain, SETTINGS, prompts=prompts), tmp_path / "plain.jsonl")
    again.sort(key=lambda entry: entry.index)
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
    made = made_by(SampleMaker(short, settings, openers=()), tmp_path / "samples.jsonl")
    assert made
    assert max(len(entry.token_ids) for entry in made) == 24
    assert len(tried_indices(tmp_path / "samples.jsonl")) == 20


def test_a_prompt_must_leave_room_for_one_token_of_an_answer() -> None:
    """Template included; and four tokens are the least that can be asked."""
    short = LLM(target(max_position_embeddings=24), tokenizer=ChatTokenizer(), speculation=None, check_model=False)
    maker = SampleMaker(short, SETTINGS, openers=())
    end = len(ChatShape.of(ChatTokenizer()).after)
    fits = {length: maker._is_prompt(_Row(0, [1] * length, 1, 0, *maker._answer(0, length))) for length in range(2, 24)}
    assert fits == {length: 1 + 4 <= length < 24 - end for length in range(2, 24)}


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
    kept = KeptFeatures(adapter, (0, 1), cache)
    made = made_by(SampleMaker(own, SETTINGS, openers=OPENERS, features=kept, window=5), tmp_path / "samples.jsonl")
    assert made
    plainly = made_by(SampleMaker(own, SETTINGS, openers=OPENERS, window=5), tmp_path / "plain.jsonl")
    assert sorted(made, key=lambda entry: entry.index) == sorted(plainly, key=lambda entry: entry.index)
    cache = FeatureCache(tmp_path / "features", {"target": name}, shard_size=4)  # what is on disk
    for number, expected in enumerate(LiveFeatures(adapter, (0, 1), made).of(range(len(made)))):
        found = cache.get(made[number].token_ids)
        for mine, other in ((found.features, expected.features), (found.hidden, expected.hidden)):
            assert mine.shape == other.shape
            assert (mine.float() - other).abs().max() < 0.01 * other.abs().max()
            shifted = (mine.float()[1:] - other[:-1]).abs().max()
            assert shifted > 0.05 * other.abs().max()  # a token's features in its neighbour's place would be noticed
        torch.testing.assert_close(found.log_total, expected.log_total, rtol=0.01, atol=0.05)


def test_what_waits_to_be_written_holds_on_to_nothing(tmp_path: Path) -> None:
    """Features that wait for their shard know nothing of the logits they were computed with."""
    own = LLM(tiny_model("llama", vocab_size=64), tokenizer=ChatTokenizer(), speculation=None, check_model=False)
    assert any(weight.requires_grad for weight in own.model.parameters())
    cache = FeatureCache(tmp_path / "features", {"target": "tiny"}, shard_size=1000)
    kept = KeptFeatures(TargetAdapter(own.model), (0,), cache)
    for _tried in SampleMaker(own, SETTINGS, openers=OPENERS, features=kept).run(tmp_path / "samples.jsonl"):
        waiting = [
            tensor for found in cache._waiting.values() for tensor in (found.features, found.hidden, found.log_total)
        ]
        assert not any(tensor.requires_grad for tensor in waiting)
    assert cache._waiting == {}
    assert len(list((tmp_path / "features").glob("*.safetensors"))) == 1
