"""Streams: pieces add up to the final text, streams do not disturb each other, and leaving one frees what it held."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specflow_llm import LLM, Completion, EngineBusyError, SamplingParams, Speculation, Stream
from specflow_llm.engine import Update
from tests.specflow_llm.drafters import NearDrafter, RandomDrafter
from tests.specflow_llm.models import VOCAB, generate, tiny_model
from tests.specflow_llm.tokenizers import ALPHABET, CharTokenizer

PROMPTS = ("abc", "hello there", "z", "The end")
LENGTH = 32


def char_llm(**settings: Any) -> LLM:
    """A tiny model whose 64 ids are characters."""
    settings.setdefault("speculation", Speculation(policy="fixed", max_draft_tokens=6))
    settings.setdefault("check_model", False)  # done once elsewhere; here it would be most of the time
    return LLM(tiny_model(), tokenizer=CharTokenizer(), **settings)


@functools.cache
def truth(prompt: str) -> list[int]:
    """Prompt and greedy output as ids; not to be changed."""
    ids = CharTokenizer()(prompt)["input_ids"]
    return ids + generate(tiny_model(), ids, LENGTH)


def near_llm(**settings: Any) -> LLM:
    """The same with a drafter that is often right, so that blocks of all sizes are accepted."""
    drafter = NearDrafter([truth(prompt) for prompt in PROMPTS], VOCAB, hit_rate=0.8)
    return char_llm(speculation=Speculation(drafter=drafter, policy="fixed", max_draft_tokens=8), **settings)


def read(stream: Stream) -> tuple[str, list[int], Completion]:
    """Read a stream to its end: text, ids, and the completion of the last chunk."""
    chunks = list(stream)
    assert all(chunk.completion is None for chunk in chunks[:-1])
    completion = chunks[-1].completion
    assert completion is not None
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), ids, completion


def settings_to_stream() -> dict[str, dict[str, Any]]:
    """Settings under which text is held back, cut or changed."""
    text = "".join(ALPHABET[token] for token in truth("abc")[3:])
    return {
        "plain": {},
        "sampled": {"temperature": 1.0, "seed": 3},
        "stop string inside": {"stop": text[12:15]},
        "stop string kept": {"stop": text[12:15], "include_stop_str": True},
        "stop string at once": {"stop": text[0]},
        "stop string that nearly comes": {"stop": [text[20:24] + "@", text[31] + "@", "@"]},
        "stop string on the last token": {"stop": text[30:32]},
        "stop id": {"stop_token_ids": [ALPHABET.index(text[17])]},
        "minimum": {"stop": text[3], "min_tokens": 10},
        "one token": {"max_tokens": 1},
    }


@pytest.mark.parametrize("case", settings_to_stream())
def test_chunks_add_up_to_the_completion(case: str) -> None:
    """Concatenated chunk texts and ids are the completion's, which is what ``generate`` returns (vLLM#55082)."""
    params = SamplingParams(**{"max_tokens": LENGTH, **settings_to_stream()[case]})
    llm = near_llm()
    text, ids, completion = read(llm.stream("abc", params))
    assert (text, tuple(ids)) == (completion.text, completion.token_ids)
    (plain,) = char_llm(speculation=None).generate("abc", params)
    assert (completion.text, completion.token_ids) == (plain.text, plain.token_ids)
    assert (completion.finish_reason, completion.stop_detail) == (plain.finish_reason, plain.stop_detail)


def test_a_forming_stop_string_is_held_back() -> None:
    """No chunk shows a part of the stop string that the final text leaves out."""
    text = "".join(ALPHABET[token] for token in truth("abc")[3:])
    stop = text[10:14]
    params = SamplingParams(max_tokens=LENGTH, stop=stop)
    for llm in (char_llm(speculation=None), near_llm()):
        shown = "".join(chunk.text for chunk in llm.stream("abc", params))
        assert shown == text[: text.index(stop)]


def test_streams_read_in_turns_do_not_disturb_each_other() -> None:
    """Four interleaved streams give what each prompt gives alone, at any reading speed."""
    llm = near_llm(max_batch_size=3)
    params = SamplingParams(max_tokens=LENGTH)
    streams = [llm.stream(prompt, params) for prompt in PROMPTS]
    texts = [""] * len(streams)
    open_streams = set(range(len(streams)))
    for turn in itertools.count():
        if not open_streams:
            break
        index = sorted(open_streams)[(turn * 7) % len(open_streams)]
        for _ in range(1 + turn % 3):
            chunk = next(streams[index], None)
            if chunk is None:
                open_streams.discard(index)
                break
            texts[index] += chunk.text
    expected = [done.text for done in char_llm(speculation=None).generate(list(PROMPTS), params)]
    assert texts == expected
    assert llm.engine.num_unfinished == 0


def test_generate_works_while_a_stream_is_open() -> None:
    """A call of ``generate`` in the middle of a stream returns its results, and the stream loses nothing."""
    llm = near_llm()
    params = SamplingParams(max_tokens=LENGTH)
    stream = llm.stream(PROMPTS[0], params)
    first = next(stream)
    others = llm.generate(list(PROMPTS[1:]), params)
    rest = list(stream)
    expected = char_llm(speculation=None).generate(list(PROMPTS), params)
    assert [done.text for done in others] == [done.text for done in expected[1:]]
    assert first.text + "".join(chunk.text for chunk in rest) == expected[0].text
    assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize("way", ["close", "with", "drop", "drop unread", "close unread"])
def test_leaving_a_stream_early_frees_its_row(way: str) -> None:
    """Closed, left or dropped, read or not: the request is gone and the next one runs alone."""
    llm = char_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=LENGTH))
    if "unread" not in way:
        next(stream)
    assert llm.engine.num_unfinished == 1
    if way.startswith("close"):
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with stream:
            pass
    del stream
    gc.collect()
    assert llm.engine.num_unfinished == 0
    assert llm.engine.backend.rows == []
    assert len(llm.generate("abc", SamplingParams(max_tokens=5))[0].token_ids) == 5


def test_closing_a_finished_stream_is_harmless() -> None:
    """Closing after the end, twice, disturbs neither the engine nor another stream."""
    llm = char_llm()
    done, other = llm.stream("abc", SamplingParams(max_tokens=3)), llm.stream("z", SamplingParams(max_tokens=9))
    read(done)
    done.close()
    done.close()
    assert len(read(other)[1]) == 9


# --- Exceptions in the user's own code --------------------------------------------------------------------------------


class TroubleError(Exception):
    """Raised by the user's code."""


def raises_at(length: int) -> Any:
    """A criterion, or a logits processor, that raises when the sequence has this many ids."""

    def trouble(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor | bool:
        if ids.shape[1] == length:
            raise TroubleError
        return False if scores is None else scores

    return trouble


@pytest.mark.parametrize("where", ["stopping_criteria", "logits_processors"])
@pytest.mark.parametrize("length", [4, 7, 12])
def test_an_exception_reaches_its_caller_and_leaks_nothing(where: str, length: int) -> None:
    """What a criterion or processor raises comes out of ``generate``; afterwards the engine is empty and works."""
    llm = near_llm()
    bad: Any = {where: [raises_at(length)]}
    with pytest.raises(TroubleError):
        llm.generate(
            list(PROMPTS), [SamplingParams(max_tokens=LENGTH, **(bad if index == 0 else {})) for index in range(4)]
        )
    assert llm.engine.num_unfinished == 0
    assert llm.engine.backend.target.num_forwards > 0
    expected = char_llm(speculation=None).generate(list(PROMPTS), SamplingParams(max_tokens=LENGTH))
    again = llm.generate(list(PROMPTS), SamplingParams(max_tokens=LENGTH))
    assert [done.token_ids for done in again] == [done.token_ids for done in expected]


@pytest.mark.parametrize("where", ["stopping_criteria", "logits_processors"])
def test_an_exception_stays_in_its_own_request(where: str) -> None:
    """Another stream, which happens to step the engine when the exception occurs, does not lose a token."""
    llm = near_llm()
    bad: Any = {where: [raises_at(9)]}
    params = SamplingParams(max_tokens=LENGTH, logprobs=0)
    good_stream = llm.stream("hello there", params)
    bad_stream = llm.stream("abc", SamplingParams(max_tokens=LENGTH, **bad))
    text, ids, completion = read(good_stream)
    (expected,) = char_llm(speculation=None).generate("hello there", params)
    assert (text, tuple(ids)) == (expected.text, expected.token_ids)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == LENGTH
    with pytest.raises(TroubleError):
        list(bad_stream)
    assert llm.engine.num_unfinished == 0


def test_a_stream_shows_what_was_settled_before_the_exception() -> None:
    """Chunks of rounds before the exception are delivered; then it is raised, once, and the stream is over."""
    llm = char_llm(speculation=None)
    stream = llm.stream("abc", SamplingParams(max_tokens=LENGTH, stopping_criteria=[raises_at(9)]))
    chunks = []
    with pytest.raises(TroubleError):
        chunks.extend(stream)
    shown = "".join(chunk.text for chunk in chunks)
    assert shown == "".join(ALPHABET[token] for token in truth("abc")[3:8])
    assert list(stream) == []


def test_a_drafter_that_fails_once_loses_no_token() -> None:
    """If the drafter raises, the round never happened: stepping again gives the output of an undisturbed run."""

    class FailsOnce(RandomDrafter):
        calls = 0

        def propose(self, requests: Sequence[Any]) -> Sequence[Any]:
            self.calls += 1
            if self.calls == 3:
                raise TroubleError
            return super().propose(requests)

    llm = char_llm(speculation=Speculation(drafter=FailsOnce(VOCAB), policy="fixed", max_draft_tokens=4))
    request = llm.engine.submit(truth("abc")[:3], SamplingParams(max_tokens=20, stop="@@"))
    tokens: list[int] = []
    failures = 0
    while llm.engine.num_unfinished:
        try:
            updates = llm.engine.step()
        except TroubleError:
            failures += 1
            continue
        tokens.extend(token for update in updates if update.request_id == request for token in update.token_ids)
    assert failures == 1
    assert tokens == truth("abc")[3:23]


def test_an_interrupted_round_leaves_the_others_as_they_were() -> None:
    """An interrupt in the middle of verification undoes what other rows had settled: nothing is lost or doubled."""
    llm = near_llm()
    params = SamplingParams(max_tokens=LENGTH, stop="@@", logprobs=0)

    def interrupt(ids: torch.Tensor, _scores: None) -> bool:
        if ids.shape[1] == 9:
            raise KeyboardInterrupt
        return False

    before = llm.stream("hello there", params)
    next(before)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", SamplingParams(max_tokens=LENGTH, stopping_criteria=[interrupt]))
    text = "".join(chunk.text for chunk in llm.stream("z", params))
    rest = list(before)
    expected = char_llm(speculation=None).generate(["hello there", "z"], params)
    completion = rest[-1].completion
    assert completion is not None
    assert completion.text == expected[0].text
    assert completion.token_ids == expected[0].token_ids
    assert text == expected[1].text
    assert llm.engine.num_unfinished == 0


def test_a_cancelled_request_is_reported_even_if_the_round_raises() -> None:
    """The update of a request that ended before a failing round is delivered by the next step."""

    class AlwaysFails(RandomDrafter):
        def propose(self, requests: Sequence[Any]) -> Sequence[Any]:
            raise TroubleError

    llm = char_llm(speculation=Speculation(drafter=AlwaysFails(VOCAB), policy="fixed", max_draft_tokens=4))
    cancelled = llm.engine.submit([1, 2], SamplingParams())
    failing = llm.engine.submit([3, 4], SamplingParams())
    llm.engine.cancel(cancelled)
    for _ in range(2):
        with pytest.raises(TroubleError):
            llm.engine.step()
    llm.engine.withdraw(failing)
    (update,) = llm.engine.step()
    assert update.request_id == cancelled
    assert update.completion is not None
    assert update.completion.finish_reason == "cancelled"
    assert llm.engine.step() == []


def test_generating_from_inside_a_step_is_refused() -> None:
    """A criterion that uses the model it runs in fails with a message, and the engine survives."""
    llm = char_llm()

    def judge(_ids: torch.Tensor, _scores: None) -> bool:
        return bool(llm.generate("z", SamplingParams(max_tokens=1)))

    with pytest.raises(EngineBusyError, match="one caller at a time"):
        llm.generate("abc", SamplingParams(max_tokens=5, stopping_criteria=[judge]))
    assert llm.engine.num_unfinished == 0
    assert len(llm.generate("abc", SamplingParams(max_tokens=5))[0].token_ids) == 5


def test_a_stream_closed_inside_a_step_is_freed_after_it() -> None:
    """Closing a stream from a criterion of another request (as the garbage collector may) corrupts nothing."""
    llm = near_llm()
    params = SamplingParams(max_tokens=LENGTH)
    victim = llm.stream("z", params)

    def close_victim(ids: torch.Tensor, _scores: None) -> bool:
        if ids.shape[1] == 14:
            victim.close()
        return False

    watching = SamplingParams(max_tokens=LENGTH, stopping_criteria=[close_victim])
    (done,) = llm.generate("hello there", watching)
    (expected,) = char_llm(speculation=None).generate("hello there", params)
    assert done.token_ids == expected.token_ids
    assert llm.engine.num_unfinished == 0


def test_on_update_sees_every_token_of_every_prompt() -> None:
    """The callback of ``generate`` gets all updates of its prompts; what it raises ends the call and frees the rows."""
    llm = near_llm()
    seen: list[Update] = []
    done = llm.generate(list(PROMPTS), SamplingParams(max_tokens=LENGTH), on_update=seen.append)
    for completion in done:
        own = [update for update in seen if update.request_id == completion.request_id]
        assert "".join(update.text for update in own) == completion.text

    def interrupt(update: Update) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(list(PROMPTS), SamplingParams(max_tokens=LENGTH), on_update=interrupt)
    assert llm.engine.num_unfinished == 0
