"""The front door: every kind of prompt, settings for one or all, clear refusals, and where generation ends."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specflow.errors import InvalidSettingError
from specflow.policies import Adaptive, Fixed
from specflow.types import RoundReport
from specflow_llm import (
    LLM,
    ContextLengthError,
    DrafterError,
    DraftRequest,
    ModelNotFoundError,
    PromptError,
    Proposal,
    SamplingParams,
    Speculation,
)
from specflow_llm.drafters import ModelDrafter, NGramDrafter
from specflow_llm.target import SlotTarget
from tests.specflow_llm.models import VOCAB, generate, near_copy, tiny_model
from tests.specflow_llm.tokenizers import CharTokenizer, byte_level_bpe

PARAMS = SamplingParams(max_tokens=8)
FIXED = Speculation(policy="fixed", max_draft_tokens=4)


def ids_llm(**settings: Any) -> LLM:
    """A tiny model without a tokenizer."""
    return LLM(tiny_model(), **{"check_model": False, "speculation": FIXED, **settings})


def char_llm(**settings: Any) -> LLM:
    """A tiny model whose ids are characters."""
    return ids_llm(tokenizer=CharTokenizer(), **settings)


def chat_llm() -> LLM:
    """A tiny model with a byte-level tokenizer and a chat template."""
    return LLM(tiny_model(vocab_size=340), tokenizer=byte_level_bpe(), speculation=FIXED, check_model=False)


# --- Prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        torch.tensor([5, 6, 7]),
        np.array([5, 6, 7]),
        [torch.tensor(5), torch.tensor(6), torch.tensor(7)],
        [np.int64(5), np.int32(6), 7],
        range(5, 8),
    ],
    ids=["list", "tuple", "tensor", "array", "list of tensors", "list of numpy integers", "range"],
)
def test_one_prompt_of_ids_in_any_shape(prompt: Any) -> None:
    """Ids as list, tuple, tensor, array or range are one prompt, for ``generate`` as for ``stream``."""
    (done,) = ids_llm().generate(prompt, PARAMS)
    assert done.prompt_token_ids == (5, 6, 7)
    assert list(done.token_ids) == generate(tiny_model(), [5, 6, 7], 8)
    assert {type(token) for token in done.prompt_token_ids + done.token_ids} == {int}
    streamed = [token for chunk in ids_llm().stream(prompt, PARAMS) for token in chunk.token_ids]
    assert streamed == list(done.token_ids)


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6], [7, 8]],
        ((5, 6), (7, 8)),
        torch.tensor([[5, 6], [7, 8]]),
        np.array([[5, 6], [7, 8]]),
        [torch.tensor([5, 6]), [7, 8]],
        (ids for ids in ([5, 6], [7, 8])),
    ],
    ids=["lists", "tuples", "tensor", "array", "mixed", "generator"],
)
def test_several_prompts_of_ids_in_any_shape(prompts: Any) -> None:
    """Lists of ids, and two-dimensional tensors, are several prompts, answered in order."""
    done = ids_llm().generate(prompts, PARAMS)
    assert [one.prompt_token_ids for one in done] == [(5, 6), (7, 8)]
    assert [list(one.token_ids) for one in done] == [generate(tiny_model(), ids, 8) for ids in ([5, 6], [7, 8])]


def test_text_goes_in_and_out() -> None:
    """A string is one prompt, a list of strings several; the output text is the decoded output ids."""
    llm = char_llm()
    (one,) = llm.generate("hello", PARAMS)
    two, three = llm.generate(["hello", "z"], PARAMS)
    assert one.token_ids == two.token_ids
    assert one.prompt_token_ids == tuple(CharTokenizer()("hello")["input_ids"])
    assert one.text == CharTokenizer().decode(one.token_ids)
    assert three.prompt_token_ids == tuple(CharTokenizer()("z")["input_ids"])


def test_texts_and_ids_can_be_mixed() -> None:
    """One call takes prompts of different kinds."""
    llm = char_llm()
    done = llm.generate(["hello", CharTokenizer()("hello")["input_ids"]], PARAMS)
    assert done[0].token_ids == done[1].token_ids


def test_chat_messages_go_through_the_template() -> None:
    """A conversation is one prompt, also through ``chat``; a list of conversations is several."""
    llm = chat_llm()
    talk = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "the fox"}]
    expected = byte_level_bpe()("system: the dog\nuser: the fox\n", add_special_tokens=False)["input_ids"]
    assert llm.encode(talk)[-len(expected) :] == expected
    (one,) = llm.generate(talk, PARAMS)
    assert llm.chat(talk, PARAMS).token_ids == one.token_ids
    both = llm.generate([talk, talk[1:]], PARAMS)
    assert both[0].token_ids == one.token_ids
    assert both[1].prompt_token_ids != one.prompt_token_ids
    assert "".join(chunk.text for chunk in llm.stream(talk, PARAMS)) == one.text


def test_special_tokens_of_the_tokenizer_are_added_once() -> None:
    """A text gets the tokenizer's beginning-of-sequence token; stop strings and bad words do not."""
    llm = chat_llm()
    assert llm.encode("the dog")[0] == byte_level_bpe().bos_token_id
    (done,) = llm.generate("the dog", SamplingParams(max_tokens=8, bad_words=["the", "x"]))
    assert "the" not in done.text


def test_no_prompts_no_answers() -> None:
    """An empty list of prompts is answered with an empty list."""
    assert ids_llm().generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([[5], []], "prompt 1: it is empty"),
        ([[5], [6, VOCAB]], f"prompt 1: token id {VOCAB} is outside"),
        ([[5, -3]], "prompt 0: token id -3 is outside"),
        ([5, True], "it holds True, which is not a token id"),
        ([True, False], "it holds True"),
        ([5, 1.0], "it holds 1.0"),
        ([5, "x"], "it holds 'x'"),
        ([5, None], "it holds None"),
        ([[5, 6], [7, "x"]], "prompt 1: it holds 'x'"),
        ([[[5]]], r"it holds \[5\]"),
        (np.array([0.5]), "it holds 0.5"),
        (torch.tensor([True]), "it holds True"),
        (5, "of type int"),
        (None, "of type NoneType"),
        (torch.tensor(5), "of type int"),
        ({"role": "user", "content": "hi"}, "of type dict"),
        ({"input_ids": [5]}, "of type dict"),
        (b"abc", "it is bytes"),
        ([b"abc"], "it is bytes"),
        ("text", "text needs a tokenizer"),
        (["text"], "text needs a tokenizer"),
        ([{"role": "user", "content": "hi"}], "need a tokenizer with a chat template"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: Any, problem: str) -> None:
    """The message says which prompt, what is wrong with it, and what to give; nothing is started."""
    llm = ids_llm()
    with pytest.raises(PromptError, match=problem) as caught:
        llm.generate(prompt, PARAMS)
    assert caught.value.remedy in str(caught.value)
    assert llm.engine.num_unfinished == 0
    with contextlib.closing(llm.stream([1], PARAMS)) as stream:
        next(stream)  # the engine still works


def test_chat_without_a_role_is_refused() -> None:
    """Messages without roles would make the template fail with a message of its own."""
    with pytest.raises(PromptError, match="no 'role'"):
        chat_llm().generate([{"content": "hi"}], PARAMS)
    with pytest.raises(PromptError, match="chat template"):
        char_llm().generate([{"role": "user", "content": "hi"}], PARAMS)


def test_an_empty_text_is_refused() -> None:
    """A tokenizer that makes nothing of an empty text leaves an empty prompt."""
    with pytest.raises(PromptError, match="it is empty"):
        char_llm().generate("", PARAMS)


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs() -> None:
    """One prompt beyond the context stops the whole call at once, and the others are not left in the queue."""
    llm = ids_llm()
    with pytest.raises(ContextLengthError, match="prompt 1 has 256 tokens"):
        llm.generate([[1], [2] * 256], PARAMS)
    assert llm.engine.num_unfinished == 0
    assert llm.engine.backend.target.num_forwards == 0


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    """Without text there is nothing to find them in; the message names the alternative."""
    with pytest.raises(PromptError, match="stop_token_ids"):
        ids_llm().generate([1], SamplingParams(stop="x"))
    with pytest.raises(PromptError, match="token ids"):
        ids_llm().generate([1], SamplingParams(bad_words=["x"]))


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_settings_for_all_or_one_each() -> None:
    """One ``SamplingParams`` serves all prompts; a list serves one each; none means the defaults."""
    llm = ids_llm()
    prompts = [[1, 2], [3, 4], [5, 6]]
    assert [len(done.token_ids) for done in llm.generate(prompts, SamplingParams(max_tokens=3))] == [3, 3, 3]
    each = [SamplingParams(max_tokens=count) for count in (1, 5, 2)]
    assert [len(done.token_ids) for done in llm.generate(prompts, each)] == [1, 5, 2]
    assert len(llm.generate([1, 2])[0].token_ids) == SamplingParams().max_tokens


@pytest.mark.parametrize("count", [0, 1, 3])
def test_settings_must_match_the_prompts(count: int) -> None:
    """A list of another length than the prompts' is refused with both numbers."""
    with pytest.raises(PromptError, match=f"2 prompts came with {count} SamplingParams"):
        ids_llm().generate([[1], [2]], [PARAMS] * count)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, [None], "greedy"])
def test_settings_must_be_settings(params: Any) -> None:
    """A dict, a None in a list, or a string is not a ``SamplingParams``."""
    with pytest.raises(InvalidSettingError, match="a SamplingParams"):
        ids_llm().generate([1], params)


def test_settings_that_do_not_exist_cannot_be_passed() -> None:
    """There is no beam search, no guidance and no embedding input to be ignored in silence: the names do not exist."""
    for name in ("num_beams", "guidance_scale", "num_return_sequences", "inputs_embeds", "assistant_model"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: 2})  # type: ignore[arg-type]


def test_speculation_can_be_switched_off_per_request() -> None:
    """``speculate=False`` drafts nothing for that prompt, and the tokens are the same."""
    llm = ids_llm()
    prompt = [3, 4] * 6
    on, off = llm.generate([prompt, prompt], [SamplingParams(max_tokens=20, speculate=flag) for flag in (True, False)])
    assert on.token_ids == off.token_ids
    assert on.metrics.drafted > 0
    assert off.metrics.drafted == 0


@pytest.mark.parametrize(
    "speculation",
    [None, Speculation(drafter=None), Speculation(max_draft_tokens=0)],
    ids=["none", "no drafter", "no tokens"],
)
def test_plain_decoding_drafts_nothing(speculation: Speculation | None) -> None:
    """Three ways of saying no give plain decoding: one forward per token."""
    (done,) = ids_llm(speculation=speculation).generate([3, 4] * 6, SamplingParams(max_tokens=10))
    assert (done.metrics.drafted, done.metrics.rounds) == (0, 10)
    assert list(done.token_ids) == generate(tiny_model(), [3, 4] * 6, 10)


# --- Drafters and policies --------------------------------------------------------------------------------------------


class Own:
    """A drafter that implements the protocol and inherits nothing."""

    name = "own"
    feature_layers: Sequence[int] = ()
    gives_probs = False

    def __init__(self) -> None:
        self.released: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Always the same token."""
        return [Proposal([7] * request.limit) for request in requests]

    def release(self, row: Any) -> None:
        """Note it."""
        self.released.append(row)

    def state_bytes(self) -> Mapping[str, int]:
        """Nothing."""
        return {}


def test_a_drafter_can_be_given_in_every_way() -> None:
    """By name, as a model, as an object of this library, or as an object with the right methods: same tokens."""
    expected = generate(tiny_model(), [1, 2, 3], 12)
    own = Own()
    for drafter in ("ngram", near_copy(tiny_model()), NGramDrafter(), own):
        (done,) = ids_llm(speculation=Speculation(drafter=drafter, policy="fixed", max_draft_tokens=3)).generate(
            [1, 2, 3], SamplingParams(max_tokens=12)
        )
        assert list(done.token_ids) == expected
    assert own.released == [done.request_id]


def test_a_drafter_can_be_a_path(tmp_path: Path) -> None:
    """The folder of a smaller model, as a string or a ``Path``, is loaded with the target's dtype."""
    near_copy(tiny_model()).save_pretrained(tmp_path)
    for place in (tmp_path, str(tmp_path)):
        llm = ids_llm(speculation=Speculation(drafter=place, policy="fixed", max_draft_tokens=3))
        assert isinstance(llm.engine.backend.drafter, ModelDrafter)
        (done,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=12))
        assert done.metrics.accepted > 0


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        ("n-gram", ModelNotFoundError, "for a drafter, give 'ngram'"),
        (7, DrafterError, "neither a name, a model nor an object"),
        (NGramDrafter, DrafterError, r"give an instance: NGramDrafter\("),
        (object(), DrafterError, "DrafterBase"),
    ],
)
def test_a_drafter_that_is_none_is_refused(drafter: Any, error: type[Exception], message: str) -> None:
    """Wrong names, classes and other objects are refused when the model is loaded, with what to give instead."""
    with pytest.raises(error, match=message):
        ids_llm(speculation=Speculation(drafter=drafter))


def test_policies_can_be_named_or_given() -> None:
    """``adaptive`` and ``fixed`` build policies, an object is used as it is, and ``policy`` shows which."""
    assert isinstance(ids_llm(speculation=Speculation()).policy, Adaptive)
    assert isinstance(ids_llm().policy, Fixed)
    own = Fixed(2)
    llm = ids_llm(speculation=Speculation(policy=own, drafter=Own()))
    assert llm.policy is own
    assert llm.generate([1, 2], SamplingParams(max_tokens=4))[0].metrics.drafted > 0


def test_adaptive_speculation_gives_the_same_tokens() -> None:
    """The default setting decodes a ragged batch like ``generate``."""
    prompts = [[1, 2, 3], [4] * 9, [9, 8]]
    done = ids_llm(speculation=Speculation()).generate(prompts, SamplingParams(max_tokens=30))
    assert [list(one.token_ids) for one in done] == [generate(tiny_model(), prompt, 30) for prompt in prompts]


@pytest.mark.parametrize(("name", "padded"), [("llama", True), ("mamba", False)])
def test_reports_say_whether_blocks_were_padded(name: str, *, padded: bool) -> None:
    """A slot cache runs all blocks as far as the longest; recurrent targets run requests one by one."""
    reports: list[RoundReport] = []
    observer = SimpleNamespace(on_round=reports.append)
    llm = LLM(tiny_model(name), check_model=False, speculation=FIXED, observers=[observer])
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4))
    assert [report.padded for report in reports] == [padded] * len(reports) != []


def test_observers_see_every_round() -> None:
    """An observer gets one report per round, and their emitted counts add up to the output."""

    class Counting:
        def __init__(self) -> None:
            self.reports: list[RoundReport] = []

        def on_round(self, report: RoundReport) -> None:
            self.reports.append(report)

    observer = Counting()
    done = ids_llm(observers=[observer]).generate([[1, 2], [3]], SamplingParams(max_tokens=10))
    assert sum(sum(report.emitted) for report in observer.reports) == sum(len(one.token_ids) for one in done)
    assert [report.index for report in observer.reports] == list(range(len(observer.reports)))


# --- Where generation ends --------------------------------------------------------------------------------------------


def with_eos(change: Callable[[Any], None]) -> Any:
    """A copy of the tiny model whose configuration was changed."""
    model = copy.deepcopy(tiny_model())
    model.generation_config = GenerationConfig()
    change(model)
    return model


OUTPUT = (1, 2, 3)


@pytest.mark.parametrize("where", ["generation_config", "list", "config", "tokenizer", "nowhere", "both"])
def test_end_ids_are_found_where_generate_finds_them(where: str) -> None:
    """Generation config (an integer or a list), else config, else tokenizer; the first that has one decides."""
    plain = generate(tiny_model(), [1, 2, 3], 20)
    fourth, seventh = plain[3], plain[6]
    assert fourth not in plain[:3]
    assert seventh not in plain[:6]
    tokenizer = CharTokenizer()

    def change(model: Any) -> None:
        match where:
            case "generation_config":
                model.generation_config.eos_token_id = fourth
            case "list":
                model.generation_config.eos_token_id = [seventh, fourth]
            case "config":
                model.config.eos_token_id = fourth
            case "tokenizer":
                tokenizer.eos_token_id = fourth
            case "both":
                model.generation_config.eos_token_id = seventh
                model.config.eos_token_id = fourth

    llm = LLM(with_eos(change), tokenizer=tokenizer, speculation=FIXED, check_model=False)
    (done,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=20))
    length = {"nowhere": 20, "both": 7}.get(where, 4)
    assert list(done.token_ids) == plain[:length]
    assert done.finish_reason == ("length" if where == "nowhere" else "stop")


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_explained() -> None:
    """The message says what to give instead of an unknown name."""
    with pytest.raises(ModelNotFoundError, match=r"a \.gguf file.*built-in model"):
        LLM("no-such-model")


def test_a_folder_decodes_like_the_model_it_was_saved_from(tmp_path: Path) -> None:
    """Model and tokenizer are found in a folder."""
    model = tiny_model(vocab_size=340)
    model.save_pretrained(tmp_path)
    byte_level_bpe().save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32", device="cpu", speculation=FIXED)
    assert llm.name == str(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = byte_level_bpe()("the dog")["input_ids"]
    (done,) = llm.generate("the dog", SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(done.token_ids) == generate(reference, prompt, 12)
    assert done.text == byte_level_bpe().decode(done.token_ids, skip_special_tokens=True)


def test_a_model_left_in_training_mode_is_put_into_evaluation_mode() -> None:
    """Dropout would make decoding random, so a loaded model is set to evaluation."""
    model = copy.deepcopy(tiny_model()).train()
    LLM(model, check_model=False)
    assert not model.training


@pytest.mark.parametrize(("name", "drafted"), [("llama", True), ("llama", False), ("qwen3-next", True)])
def test_a_model_that_is_let_go_frees_its_state_at_once(name: str, *, drafted: bool) -> None:
    """Keys and values go with the last reference, not when the garbage collector comes round: they may fill a GPU."""
    speculation = Speculation(drafter=NGramDrafter()) if drafted else None
    llm = LLM(tiny_model(name), tokenizer=CharTokenizer(), speculation=speculation, check_model=False)
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8))
    with llm.stream([1, 2, 3]) as stream:
        next(stream)
    target = llm.engine.backend.target
    kept: list[weakref.ref[Any]] = [weakref.ref(item) for item in (llm, llm.engine, target)]
    if isinstance(target, SlotTarget):
        kept += [weakref.ref(target.cache), weakref.ref(target.cache.layers[0])]
    gc.collect()
    gc.disable()
    try:
        del llm, target
        assert [item() for item in kept] == [None] * len(kept)
    finally:
        gc.enable()
