"""When a request ends: the block is cut where plain decoding stops, and every part of the state agrees about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from specflow.testing.fakes import ManualClock
from specflow_llm import Completion, Drafter, Engine, EngineConfig, SamplingParams
from specflow_llm.detokenizer import Detokenizer
from specflow_llm.drafters import NGramDrafter
from specflow_llm.stopping import FinishReason, Stop, Stopper
from tests.specflow_llm.drafters import AdversaryDrafter, NearDrafter, OracleDrafter
from tests.specflow_llm.harness import Run, decode, drive, make_engine, scripted
from tests.specflow_llm.tokenizers import ByteTokenizer

VOCAB = 64
PROMPT = (1, 2, 3)
SCRIPT = tuple((7 * index + 11) % 61 for index in range(40))
"""What the target generates: 40 ids, all of 0..60 at most once."""

DRAFTING = ("plain", "oracle", "near", "adversary")


def drafter_for(kind: str, truth: Sequence[int], vocab_size: int) -> Drafter | None:
    """A drafter of a known kind for one true sequence."""
    match kind:
        case "plain":
            return None
        case "oracle":
            return OracleDrafter([truth])
        case "near":
            return NearDrafter([truth], vocab_size, hit_rate=0.7)
        case _:
            return AdversaryDrafter([truth], vocab_size)


def decode_ids(params: SamplingParams, drafting: str = "oracle", *, num_draft: int = 16, **settings: Any) -> Completion:
    """Decode ``SCRIPT`` under some settings."""
    truth = [*PROMPT, *SCRIPT]
    context = settings.pop("context_length", None)
    engine = make_engine(
        scripted(truth, VOCAB, context_length=context),
        drafter_for(drafting, truth, VOCAB),
        num_draft=num_draft,
        config=EngineConfig(**settings),
    )
    return decode(engine, PROMPT, params)


def run_text(text: str, params: SamplingParams, drafting: str = "oracle", *, num_draft: int = 16) -> Run:
    """Let the target generate the UTF-8 bytes of ``text``, then the special token for ever."""
    tokenizer = ByteTokenizer()
    truth = [*PROMPT, *tokenizer(text)["input_ids"], *[tokenizer.SPECIAL] * 8]
    engine = make_engine(
        scripted(truth, tokenizer.vocab_size),
        drafter_for(drafting, truth, tokenizer.vocab_size),
        num_draft=num_draft,
        config=EngineConfig(eos_token_ids=(tokenizer.SPECIAL,)),
        tokenizer=tokenizer,
    )
    return drive(engine, [(PROMPT, params)])[0]


# --- End-of-sequence and stop ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("place", [1, 2, 3, 5, 8, 13])
def test_the_end_of_sequence_is_honoured_inside_a_block(place: int, drafting: str) -> None:
    """The output ends with the end-of-sequence token wherever in a block it lies (transformers#47912, #31301)."""
    done = decode_ids(SamplingParams(max_tokens=40), drafting, eos_token_ids=(SCRIPT[place - 1],))
    assert done.token_ids == SCRIPT[:place]
    assert (done.finish_reason, done.stop_detail) == ("stop", SCRIPT[place - 1])


def test_an_oracle_block_really_is_cut() -> None:
    """The end at the 5th token falls inside the first round, so the test above looks at a cut block."""
    done = decode_ids(SamplingParams(max_tokens=40), eos_token_ids=(SCRIPT[4],))
    assert (done.metrics.rounds, done.metrics.admitted, done.metrics.accepted, done.metrics.emitted) == (1, 16, 5, 5)


@pytest.mark.parametrize("drafting", DRAFTING)
def test_the_first_of_several_end_ids_ends(drafting: str) -> None:
    """With several end-of-sequence ids the one generated first ends the output, in whatever order they are listed."""
    done = decode_ids(SamplingParams(max_tokens=40), drafting, eos_token_ids=(SCRIPT[9], 63, SCRIPT[6]))
    assert done.token_ids == SCRIPT[:7]
    assert done.stop_detail == SCRIPT[6]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_ignored_end_ids_are_ordinary_tokens(drafting: str) -> None:
    """With ``ignore_eos`` decoding goes on past the end-of-sequence token, but not past a stop id."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert decode_ids(params, drafting, eos_token_ids=(SCRIPT[4],)).token_ids == SCRIPT[:20]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(SCRIPT[7],))
    assert decode_ids(params, drafting, eos_token_ids=(SCRIPT[4],)).token_ids == SCRIPT[:8]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_stop_ids_end_like_the_end_of_sequence(drafting: str) -> None:
    """A stop id ends the output, stays in it, and is named; the model's own end id still counts."""
    params = SamplingParams(max_tokens=20, stop_token_ids=(SCRIPT[5], SCRIPT[8]))
    done = decode_ids(params, drafting)
    assert (done.token_ids, done.finish_reason, done.stop_detail) == (SCRIPT[:6], "stop", SCRIPT[5])
    assert decode_ids(params, drafting, eos_token_ids=(SCRIPT[2],)).token_ids == SCRIPT[:3]


@pytest.mark.parametrize("drafter", [None, "ngram", "oracle"])
def test_no_end_id_at_all_is_fine(drafter: str | None) -> None:
    """A model without an end-of-sequence id decodes to the length limit (transformers#46790)."""
    truth = [*PROMPT, *SCRIPT]
    built = {None: None, "ngram": NGramDrafter(), "oracle": OracleDrafter([truth])}[drafter]
    done = decode(make_engine(scripted(truth, VOCAB), built), PROMPT, SamplingParams(max_tokens=30))
    assert (done.token_ids, done.finish_reason, done.stop_detail) == (SCRIPT[:30], "length", None)


# --- Length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("limit", [1, 2, 3, 17, 18])
def test_never_more_than_the_tokens_asked_for(limit: int, drafting: str) -> None:
    """``max_tokens`` of 1, 2 and 3 hold with drafts of 10, and around one full block (transformers#46993, #47195)."""
    done = decode_ids(SamplingParams(max_tokens=limit), drafting, num_draft=10)
    assert (done.token_ids, done.finish_reason) == (SCRIPT[:limit], "length")


def test_nothing_is_drafted_that_could_never_be_emitted() -> None:
    """The last block is no wider than the room that is left, so no work is thrown away by the length limit."""
    done = decode_ids(SamplingParams(max_tokens=3), num_draft=10)
    assert (done.metrics.rounds, done.metrics.drafted, done.metrics.accepted) == (1, 2, 2)
    assert decode_ids(SamplingParams(max_tokens=1), num_draft=10).metrics.drafted == 0


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("room", [1, 2, 9, 16, 17, 18])
def test_the_context_limit_ends_inside_a_block(room: int, drafting: str) -> None:
    """A full context ends the output with reason ``length``, also where the drafter could go on."""
    done = decode_ids(SamplingParams(max_tokens=40), drafting, context_length=len(PROMPT) + room)
    assert (done.token_ids, done.finish_reason) == (SCRIPT[:room], "length")


@pytest.mark.parametrize("drafting", DRAFTING)
def test_an_end_at_the_very_last_place_is_a_stop(drafting: str) -> None:
    """Where the end-of-sequence token is also the last one allowed, the reason is ``stop``."""
    done = decode_ids(SamplingParams(max_tokens=6), drafting, eos_token_ids=(SCRIPT[5],))
    assert (done.token_ids, done.finish_reason) == (SCRIPT[:6], "stop")


# --- min_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", DRAFTING)
def test_no_end_before_the_minimum(drafting: str) -> None:
    """With the end id most probable at place 3 and drafted there, 10 tokens come first (vLLM#21987, #26317)."""
    end = 62
    script = [*SCRIPT[:2], end, *SCRIPT[3:11], end, *SCRIPT[12:]]
    truth = [*PROMPT, *script]
    # The drafts hold the end id at place 3, as the model without min_tokens would have it.
    engine = make_engine(
        scripted(truth, VOCAB), drafter_for(drafting, truth, VOCAB), config=EngineConfig(eos_token_ids=(end,))
    )
    done = decode(engine, PROMPT, SamplingParams(max_tokens=30, min_tokens=10))
    assert end not in done.token_ids[:-1]
    assert (len(done.token_ids), done.stop_detail) == (12, end)
    plain = make_engine(scripted(truth, VOCAB), config=EngineConfig(eos_token_ids=(end,)))
    assert done.token_ids == decode(plain, PROMPT, SamplingParams(max_tokens=30, min_tokens=10)).token_ids


@pytest.mark.parametrize("drafting", DRAFTING)
def test_stop_strings_before_the_minimum_do_not_count(drafting: str) -> None:
    """A stop string that is complete before ``min_tokens`` is passed over for good, a later one is honoured."""
    params = SamplingParams(max_tokens=30, min_tokens=6, stop=("bc", "a long one that never comes"))
    done = run_text("abcdefgabcdefg", params, drafting).completion
    assert (done.text, len(done.token_ids)) == ("abcdefga", 10)
    assert done.stop_detail == "bc"


def test_a_stop_string_across_the_minimum_counts() -> None:
    """A stop string that begins before ``min_tokens`` and is completed after it ends the output."""
    params = SamplingParams(max_tokens=30, min_tokens=5, stop="def")
    for drafting in DRAFTING:
        assert run_text("abcdefgabcdefg", params, drafting).completion.text == "abc"


# --- Stop strings -----------------------------------------------------------------------------------------------------

TEXT = "She said: 日本語 😀 is fun. The end.\n\nAnd then some more."

STOPS: dict[str, tuple[str | tuple[str, ...], str | None]] = {
    "inside one block": ("said", "said"),
    "across two rounds": ("fun. The", "fun. The"),
    "at the first token": ("S", "S"),
    "at the first two": ("Sh", "Sh"),
    "a whole wide character": ("日", "日"),
    "wide characters": ("本語 😀", "本語 😀"),
    "after a wide character": ("😀 i", "😀 i"),
    "earliest of several": (("end", "The", "fun"), "fun"),
    "overlapping, the earlier start": (("aid: 日", "id:"), "id:"),
    "one within the other, shorter first": (("The end.", "end"), "end"),
    "same start": (("The", "The end"), "The"),
    "not at all": (("never", "日日", "fun!"), None),
    "nearly, several times": ("The end?", None),
}


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("case", STOPS)
def test_the_text_ends_before_the_first_stop_string(case: str, include: bool, drafting: str) -> None:  # noqa: FBT001
    """Text, ids, reason and detail are those of decoding token by token, for every kind of stop string."""
    stop, expected = STOPS[case]
    params = SamplingParams(max_tokens=100, stop=stop, include_stop_str=include, logprobs=0)
    done = run_text(TEXT, params, drafting).completion
    if expected is None:
        assert (done.text, done.finish_reason, done.stop_detail) == (TEXT, "stop", ByteTokenizer.SPECIAL)
        return
    begin = TEXT.index(expected)
    end = begin + len(expected)
    assert done.text == (TEXT[:end] if include else TEXT[:begin])
    assert (done.finish_reason, done.stop_detail) == ("stop", expected)
    # The ids end with the token that completed the string, and log-probabilities with them (vLLM#47616).
    assert bytes(done.token_ids) == TEXT[:end].encode()
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids) == done.metrics.emitted


def test_a_match_early_in_a_long_run_is_found() -> None:
    """A string complete at token 2 of an accepted run of 17 is not missed behind a short tail (sglang#23802)."""
    run = run_text("xab" + "c" * 30, SamplingParams(max_tokens=40, stop="xa"), num_draft=16)
    assert run.completion.metrics.rounds == 1
    assert (run.completion.text, run.completion.token_ids) == ("", (ord("x"), ord("a")))


def test_drafters_cannot_switch_stops_off() -> None:
    """Lookup drafts of text that repeats itself stop where plain decoding stops (ArcticInference#161)."""
    text = "one two three. " * 5
    tokenizer = ByteTokenizer()
    truth = [*tokenizer("one two three. ")["input_ids"], *tokenizer(text)["input_ids"]]
    engine = make_engine(scripted(truth, tokenizer.vocab_size), NGramDrafter(), tokenizer=tokenizer)
    done = decode(engine, truth[:15], SamplingParams(max_tokens=60, stop="three. one"))
    assert done.text == "one two "
    assert done.metrics.accepted > 5


def test_a_text_that_ends_with_a_broken_character_is_released() -> None:
    """At the length limit the bytes of an incomplete character appear as the tokenizer shows them."""
    done = run_text("ab😀", SamplingParams(max_tokens=4)).completion
    assert (done.text, done.finish_reason) == ("ab\ufffd", "length")


# --- Custom criteria --------------------------------------------------------------------------------------------------


class EveryCall(StoppingCriteria):
    """Remembers what it was shown and stops at a token."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """True for the row when its last token is the one waited for."""
        self.calls.append(input_ids[0].tolist())
        return input_ids[:, -1] == self.stop_at


@pytest.mark.parametrize("drafting", DRAFTING)
def test_criteria_are_asked_after_every_token(drafting: str) -> None:
    """A Hugging Face criterion sees each prefix once, in order, also inside blocks, and cuts where it says so."""
    criterion = EveryCall(SCRIPT[10])
    done = decode_ids(SamplingParams(max_tokens=40, stopping_criteria=(criterion,)), drafting)
    assert (done.token_ids, done.finish_reason, done.stop_detail) == (SCRIPT[:11], "stop", "criterion")
    assert criterion.calls == [[*PROMPT, *SCRIPT[:count]] for count in range(1, 12)]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_criteria_lists_and_plain_functions_work(drafting: str) -> None:
    """A ``StoppingCriteriaList``, and a function that returns a bool, end the request."""
    given = StoppingCriteriaList([MaxLengthCriteria(max_length=len(PROMPT) + 7)])
    assert decode_ids(SamplingParams(max_tokens=40, stopping_criteria=given), drafting).token_ids == SCRIPT[:7]
    function = (lambda ids, _scores: ids.shape[1] >= 9,)
    assert decode_ids(SamplingParams(max_tokens=40, stopping_criteria=function), drafting).token_ids == SCRIPT[:6]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_a_stateful_criterion_ends_where_plain_decoding_ends(drafting: str) -> None:
    """A criterion that counts its own calls is not fooled by blocks: it is asked once per emitted token."""
    calls = []

    def tenth_call(ids: torch.Tensor, _scores: None) -> bool:
        calls.append(ids.shape[1])
        return len(calls) == 10

    assert decode_ids(SamplingParams(max_tokens=40, stopping_criteria=(tenth_call,)), drafting).token_ids == SCRIPT[:10]


# --- Deadline and cancellation ----------------------------------------------------------------------------------------


def timed_engine(clock: ManualClock, *, max_batch_size: int = 32) -> Engine:
    """An engine on a manual clock that emits four tokens a step."""
    truth = [*PROMPT, *SCRIPT]
    return make_engine(
        scripted(truth, VOCAB),
        OracleDrafter([truth]),
        num_draft=3,
        config=EngineConfig(max_batch_size=max_batch_size),
        clock=clock,
    )


def test_a_deadline_ends_with_what_there_is() -> None:
    """Past ``max_time`` the request ends before the next round, keeps its tokens, and says ``deadline``."""
    clock = ManualClock()
    engine = timed_engine(clock)
    engine.submit(PROMPT, SamplingParams(max_tokens=40, max_time=10.0))
    engine.step()
    clock.advance(9.99)
    engine.step()
    clock.advance(0.01)
    (update,) = engine.step()
    assert update.completion is not None
    assert (update.completion.finish_reason, update.completion.token_ids) == ("deadline", SCRIPT[:8])
    assert engine.num_unfinished == 0


def test_a_deadline_can_pass_in_the_queue() -> None:
    """Time spent waiting for a free row counts; the other request is not disturbed."""
    clock = ManualClock()
    engine = timed_engine(clock, max_batch_size=1)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=12))
    second = engine.submit(PROMPT, SamplingParams(max_tokens=12, max_time=5.0))
    engine.step()
    clock.advance(5.0)
    updates = engine.step()
    assert [update.request_id for update in updates] == [second, first]
    assert updates[0].completion is not None
    assert (updates[0].completion.finish_reason, updates[0].completion.token_ids) == ("deadline", ())
    assert updates[1].token_ids == SCRIPT[4:8]


def test_cancelling_before_admission_does_nothing_else() -> None:
    """A request cancelled while it waits is returned empty, and was never run."""
    engine = timed_engine(ManualClock(), max_batch_size=1)
    engine.submit(PROMPT, SamplingParams(max_tokens=8))
    waiting = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=1))
    engine.cancel(waiting)
    done = {update.request_id: update.completion for update in engine.step()}[waiting]
    assert done is not None
    assert (done.finish_reason, done.token_ids, done.text, done.logprobs) == ("cancelled", (), "", ())
    assert (done.metrics.rounds, done.metrics.target_forwards) == (0, 0)


def test_cancelling_in_the_middle_keeps_what_was_emitted() -> None:
    """A running request that is cancelled returns its tokens; its row is free, and the others go on unchanged."""
    engine = timed_engine(ManualClock())
    first = engine.submit(PROMPT, SamplingParams(max_tokens=40, logprobs=0))
    second = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    engine.step()
    engine.cancel(first)
    updates = {update.request_id: update for update in engine.step()}
    done = updates[first].completion
    assert done is not None
    assert (done.finish_reason, done.token_ids) == ("cancelled", SCRIPT[:4])
    assert done.logprobs is not None
    assert len(done.logprobs) == 4
    assert updates[second].token_ids == SCRIPT[4:8]
    assert [row.row_id for row in engine.backend.rows] == [second]
    engine.cancel(first)  # finished: ignored
    assert [update.request_id for update in engine.step()] == [second]


def test_a_cancelled_text_releases_what_was_held() -> None:
    """Text held back for a stop string that was forming, or for half a character, is part of the final text."""
    tokenizer = ByteTokenizer()
    truth = [*PROMPT, *b"abST", 0xF0, *b"zzzz"]
    engine = make_engine(scripted(truth, 257), OracleDrafter([truth]), num_draft=4, tokenizer=tokenizer)
    request = engine.submit(PROMPT, SamplingParams(max_tokens=9, stop="STOP"))
    (update,) = engine.step()
    assert update.text == "ab"
    engine.cancel(request)
    (update,) = engine.step()
    assert update.text == "ST\ufffd"
    assert update.completion is not None
    assert update.completion.text == "abST\ufffd"


# --- The stopper alone ------------------------------------------------------------------------------------------------


def stopper(tokenizer: Any = None, **settings: Any) -> Stopper:
    """A stopper without an engine."""
    detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
    params = SamplingParams(**settings)
    return Stopper(params, eos_token_ids=(9,), prompt_ids=PROMPT, detokenizer=detokenizer, max_output=params.max_tokens)


def test_every_way_of_cutting_the_output_into_blocks_stops_alike() -> None:
    """One token at a time, in pairs, or all at once: kept tokens, stop, text and deltas add up to the same."""
    ids = list(TEXT.encode())
    results = set()
    for size in (1, 2, 3, 7, len(ids)):
        watched = stopper(ByteTokenizer(), max_tokens=200, stop=("The end", "語 X"), ignore_eos=True)
        kept, deltas, stop = 0, "", None
        for begin in range(0, len(ids), size):
            count, stop = watched.accept(ids[begin : begin + size])
            kept += count
            if stop is not None:
                watched.finish()
            deltas += watched.take_delta()
            if stop is not None:
                break
        results.add((kept, stop, deltas, watched.text))
    text = TEXT[: TEXT.index("The end")]
    assert results == {(len((text + "The end").encode()), Stop(FinishReason.STOP, "The end"), text, text)}


@pytest.mark.parametrize("settings", [{}, {"stop": "cd"}, {"stopping_criteria": (EveryCall(-1),)}])
def test_rewinding_forgets_what_came_after_the_mark(settings: dict[str, Any]) -> None:
    """After a rewind the same tokens give the same stop, text and counts as if nothing had been accepted between."""
    watched = stopper(ByteTokenizer(), max_tokens=7, **settings)
    expected = stopper(ByteTokenizer(), max_tokens=7, **settings)
    for one in (watched, expected):
        one.accept(b"ab\xe6\x97")
    mark = watched.mark()
    for wrong in (b"cdxyzzz", b"\xa5!", b""):
        watched.accept(wrong)
        watched.rewind(mark)
    assert watched.text == expected.text == "ab"
    for token in b"\xa5cde":
        assert watched.accept([token]) == expected.accept([token])
        assert watched.text == expected.text


def test_rewinding_takes_tokens_back_from_criteria() -> None:
    """After a rewind a criterion is shown the sequence without the tokens that were taken back."""
    criterion = EveryCall(-1)
    watched = stopper(max_tokens=9, stopping_criteria=(criterion,))
    watched.accept([4])
    mark = watched.mark()
    watched.accept([5, 6])
    watched.rewind(mark)
    watched.accept([7])
    assert criterion.calls[-1] == [*PROMPT, 4, 7]


def test_end_ids_before_the_minimum_do_not_stop() -> None:
    """An end id that comes too early all the same (nothing else was possible) is an ordinary token."""
    watched = stopper(max_tokens=9, min_tokens=2)
    assert watched.accept([9, 9]) == (2, None)
    assert watched.accept([9, 9]) == (1, Stop(FinishReason.STOP, 9))


def test_the_audit_notices_a_cache_that_is_not_cut() -> None:
    """The auditor of these tests fails when the target holds positions behind the stop."""
    truth = [*PROMPT, *SCRIPT]
    target = scripted(truth, VOCAB)
    engine = make_engine(target, OracleDrafter([truth]))
    engine.submit(PROMPT, SamplingParams(max_tokens=40))
    engine.step()
    target.held[0].append(0)
    with pytest.raises(AssertionError):
        engine.step()
