"""Faults of other engines, reported by their users, as tests of this one. Each test names the report it comes from.

Faults that belong to a room of their own are tested there: stops in ``test_stopping.py``, laws and seeds in
``test_sampled_decoding.py``, streams and text in ``test_streaming.py`` and ``test_detokenizer.py``, rollback and parity
in ``test_parity.py``, ``test_recurrent.py``, ``test_kv_cache.py`` and ``test_model_drafter.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specflow.policies import Adaptive
from specflow.types import Mode
from specflow_llm import (
    LLM,
    Completion,
    Drafter,
    DrafterBase,
    DrafterError,
    DraftRequest,
    EngineConfig,
    Proposal,
    SamplingParams,
    Speculation,
)
from specflow_llm.drafters import ModelDrafter, NGramDrafter
from tests.specflow_llm.drafters import AdversaryDrafter, NearDrafter, OracleDrafter, RandomDrafter
from tests.specflow_llm.harness import SURE, Audit, LawTarget, decode, drive, make_engine
from tests.specflow_llm.models import VOCAB, generate, near_copy, tiny_model
from tests.specflow_llm.tokenizers import ALPHABET, CharTokenizer, byte_level_bpe

PROMPT = (0, 7, 3)
"""After it the tiny model emits ten different tokens."""


class Fixed(DrafterBase):
    """Always proposes the same tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """As many of them as are allowed."""
        return [Proposal(self._tokens[: request.limit]) for request in requests]


def plain(params: SamplingParams, prompt: Sequence[int] = PROMPT, **settings: Any) -> Completion:
    """Decode with the tiny model without drafting."""
    return decode(make_engine(tiny_model(), **settings), prompt, params)


@functools.cache
def greedy_ids() -> tuple[int, ...]:
    """What the tiny model says after the prompt."""
    return plain(SamplingParams(max_tokens=30)).token_ids


def drafter_for(name: str, truth: Sequence[int]) -> Drafter:
    """A drafter of a known quality for one true sequence."""
    match name:
        case "oracle":
            return OracleDrafter([truth])
        case "near":
            return NearDrafter([truth], VOCAB, hit_rate=0.75)
        case "adversary":
            return AdversaryDrafter([truth], VOCAB)
        case "random":
            return RandomDrafter(VOCAB, stray=True)
        case "model":
            return ModelDrafter(near_model(), target_vocab_size=VOCAB)
        case _:
            return NGramDrafter()


@functools.cache
def near_model() -> Any:
    """A model that often agrees with the tiny one; not to be changed."""
    return near_copy(tiny_model(), noise=0.1)


DRAFTERS = ("oracle", "near", "adversary", "random", "model", "ngram")


# --- Committed tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token", "block", "one_hot"])
def test_ids_outside_the_vocabulary_are_rejected(rule: str) -> None:
    """Placeholder ids of -1 and ids beyond the vocabulary are never accepted or looked up (vLLM#46533)."""
    config = EngineConfig(verification="auto" if rule == "greedy" else rule)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=12, temperature=0.0 if rule == "greedy" else 1.0, seed=4)
    for tokens in ([-1, -1], [VOCAB, 3], [3, -1, VOCAB + 9]):
        engine = make_engine(tiny_model(), Fixed(tokens), num_draft=3, config=config)
        done = decode(engine, PROMPT, params)
        assert all(0 <= token < VOCAB for token in done.token_ids)
        if done.mode is Mode.EXACT:
            assert done.token_ids == plain(params).token_ids


def test_scheduler_cache_and_stream_agree_after_every_round() -> None:
    """Ids kept by the scheduler, ids run by the model and ids streamed are the same (vLLM#20247, openvino.genai#4190).

    The auditor compares them after each round; here it is shown to look, and to see a model that kept one id too many.
    """
    truth = [*PROMPT, *plain(SamplingParams(max_tokens=40)).token_ids]

    def law(ids: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[truth[len(ids)] if len(ids) < len(truth) else 0] = SURE
        return logits

    class KeepsTooMany(LawTarget):
        def keep(self, slot: int, count: int) -> None:
            super().keep(slot, min(count + 1, len(self._blocks[slot])))

    drafter = NearDrafter([truth], VOCAB, hit_rate=0.6)
    params = SamplingParams(max_tokens=40)
    assert decode(make_engine(LawTarget(law, VOCAB), drafter), PROMPT, params).token_ids == tuple(truth[3:])
    with pytest.raises(AssertionError):
        decode(make_engine(KeepsTooMany(law, VOCAB), drafter), PROMPT, params)


def test_features_of_accepted_tokens_are_the_targets_own() -> None:
    """Hidden states shown to a drafter are those of committed tokens, not of drafted guesses (vLLM#14649)."""
    model = tiny_model()
    shown: list[tuple[list[int], torch.Tensor]] = []

    class Watching(NearDrafter):
        feature_layers = (0, 1)

        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            for request in requests:
                assert request.features is not None
                shown.append((list(request.token_ids), request.features.clone()))
            return super().propose(requests)

    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    truths = [prompt + generate(model, prompt, 24) for prompt in prompts]
    drafter = Watching(truths, VOCAB, hit_rate=0.7)
    llm = LLM(model, speculation=Speculation(drafter=drafter, policy="fixed", max_draft_tokens=5), check_model=False)
    llm.generate(prompts, SamplingParams(max_tokens=24))
    assert len(shown) > 8
    for ids, features in shown:
        with torch.inference_mode():
            states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        # transformers reports the last layer's state after the final norm, so only layer 0 is compared.
        assert features.shape == (len(ids) - 1, 64)
        torch.testing.assert_close(features[:, :32], states[1][0], atol=1e-5, rtol=1e-4)


# --- Penalties, biases and bad words ----------------------------------------------------------------------------------


def constant_law(logits: Sequence[float]) -> LawTarget:
    """A target with the same logits everywhere."""
    row = torch.zeros(VOCAB)
    row[: len(logits)] = torch.tensor(logits)
    return LawTarget(lambda _ids: row, VOCAB)


def test_a_penalty_sees_tokens_accepted_earlier_in_the_block() -> None:
    """Of drafts 1, 1, 1 under a frequency penalty the second is penalised and rejected (vLLM#18902, sglang#22049)."""
    engine = make_engine(constant_law([0.0, 2.0, 1.0]), Fixed([1, 1, 1]), num_draft=3)
    params = SamplingParams(max_tokens=6, frequency_penalty=1.5)
    request = engine.submit([5], params)
    (update,) = engine.step()
    assert (update.request_id, update.token_ids) == (request, (1, 2))
    engine.withdraw(request)
    done = decode(engine, [5], params)
    # By hand: 2.0, 1.0 | 0.5, 1.0 | 0.5, -0.5 | -1.0, -0.5, other tokens at 0.
    assert done.token_ids[:3] == (1, 2, 1)
    assert done.token_ids == decode(make_engine(constant_law([0.0, 2.0, 1.0])), [5], params).token_ids


LOOKING_BACK: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence and repetition": {"presence_penalty": 1.2, "repetition_penalty": 1.3},
    "bad words": {"bad_words": [[30], [51, 34]]},
    "min_p": {"min_p": 0.2, "temperature": 0.9, "seed": 3},
    "frequency, sampled": {"frequency_penalty": 0.8, "temperature": 1.1, "seed": 3, "top_k": 7},
}


@functools.cache
def looking_back(case: str) -> tuple[int, ...]:
    """Plain output under such settings."""
    return plain(SamplingParams(max_tokens=24, **LOOKING_BACK[case])).token_ids


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("case", LOOKING_BACK)
def test_settings_that_look_back_hold_inside_blocks(case: str, name: str) -> None:
    """Drafters that know the *unpenalised* text do not change the output (vLLM#42744, sglang#10617)."""
    truth = [*PROMPT, *greedy_ids()]
    assert list(looking_back(case)) != truth[3:27]
    engine = make_engine(tiny_model(), drafter_for(name, truth), num_draft=5)
    done = decode(engine, PROMPT, SamplingParams(max_tokens=24, **LOOKING_BACK[case]))
    assert done.token_ids == looking_back(case)


def test_a_forbidden_oracle_token_is_not_emitted() -> None:
    """A bias of -100 on tokens the drafter insists on keeps all of them out (vLLM#22987, sglang#11555)."""
    truth = [*PROMPT, *greedy_ids()]
    banned = sorted({truth[3], truth[5], truth[9]})
    params = SamplingParams(max_tokens=24, logit_bias=dict.fromkeys(banned, -100.0))
    expected = plain(params).token_ids
    assert not set(banned) & set(expected)
    for name in DRAFTERS:
        done = decode(make_engine(tiny_model(), drafter_for(name, truth), num_draft=6), PROMPT, params)
        assert done.token_ids == expected


@pytest.mark.parametrize("as_strings", [True, False])
@pytest.mark.parametrize("name", DRAFTERS)
def test_bad_words_hold_across_the_border_of_a_block(name: str, as_strings: bool) -> None:  # noqa: FBT001
    """Words that the model would say inside a block and across two blocks, given as text or ids, are never said."""
    tokenizer = CharTokenizer()
    truth = [*PROMPT, *greedy_ids()]
    words = [truth[3:6], truth[7:9], truth[11:13]]
    given = [tokenizer.decode(word) for word in words] if as_strings else words
    params = SamplingParams(max_tokens=24, bad_words=given)
    engine = make_engine(tiny_model(), drafter_for(name, truth), num_draft=4, tokenizer=tokenizer)
    done = decode(engine, PROMPT, params)
    assert not any(tokenizer.decode(word) in done.text for word in words)
    assert done.token_ids == plain(params, tokenizer=tokenizer).token_ids
    if not as_strings:
        assert list(done.token_ids) == generate(tiny_model(), list(PROMPT), 24, bad_words_ids=words)


# --- Logits processors ------------------------------------------------------------------------------------------------


STUTTERING = (1, 2, 3)
"""After this prompt the tiny model repeats itself at once: 28, 28, 28, 47, 55, 28."""


def hugging_face_processors() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Processors, and the arguments of ``generate`` that stand for them."""
    return {
        "no repeated n-gram": ([NoRepeatNGramLogitsProcessor(2)], {"no_repeat_ngram_size": 2}),
        "repetition": ([RepetitionPenaltyLogitsProcessor(1.4)], {"repetition_penalty": 1.4}),
        "suppressed": ([SuppressTokensLogitsProcessor([28, 55])], {"suppress_tokens": [28, 55]}),
        "bad words": ([NoBadWordsLogitsProcessor([[55], [28, 28]])], {"bad_words_ids": [[55], [28, 28]]}),
        "a list of two": (
            LogitsProcessorList(
                [NoRepeatNGramLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(3, 9, [8], device="cpu")]
            ),
            {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": 8},
        ),
    }


@functools.cache
def unprocessed_by_generate() -> tuple[int, ...]:
    """What ``generate`` gives without."""
    return tuple(generate(tiny_model(), list(STUTTERING), 24))


@functools.cache
def processed_by_generate(case: str) -> tuple[int, ...]:
    """What ``generate`` gives with its own arguments for these processors."""
    return tuple(generate(tiny_model(), list(STUTTERING), 24, **hugging_face_processors()[case][1]))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("case", hugging_face_processors())
def test_hugging_face_processors_work_inside_blocks(case: str, name: str) -> None:
    """Processors of transformers give what ``generate`` gives with them, whatever is drafted (sglang#26330, #21724)."""
    processors, arguments = hugging_face_processors()[case]
    truth = [*STUTTERING, *unprocessed_by_generate()]
    config = EngineConfig(eos_token_ids=(8,) if "eos_token_id" in arguments else ())
    engine = make_engine(tiny_model(), drafter_for(name, truth), num_draft=5, config=config)
    done = decode(engine, STUTTERING, SamplingParams(max_tokens=24, logits_processors=processors))
    assert done.token_ids == processed_by_generate(case)
    assert done.token_ids != unprocessed_by_generate()


class Counting:
    """A processor with a state: it forbids every seventh choice's favourite, counted in calls."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Remember the sequence; spoil the favourite now and then."""
        self.seen.append(input_ids[0].tolist())
        if len(self.seen) % 7 == 0:
            scores[0, scores[0].argmax()] = -torch.inf
        return scores


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_processor_is_called_once_per_emitted_token(name: str, sampled: dict[str, Any]) -> None:
    """A processor that counts its calls sees each prefix once, in order, and gives what plain decoding gives.

    Engines that call processors on rejected positions, or not at all for accepted ones, get this wrong without a word:
    so did ``generate`` with classifier-free guidance, which keeps a cache of its own.
    """
    reference, processor = Counting(), Counting()
    expected = plain(SamplingParams(max_tokens=24, logits_processors=[reference], **sampled))
    truth = [*PROMPT, *expected.token_ids]
    engine = make_engine(tiny_model(), drafter_for(name, truth), num_draft=5)
    done = decode(engine, PROMPT, SamplingParams(max_tokens=24, logits_processors=[processor], **sampled))
    assert done.token_ids == expected.token_ids
    assert processor.seen == reference.seen == [[*PROMPT, *expected.token_ids[:count]] for count in range(24)]
    if name == "oracle":
        assert done.metrics.accepted >= 18


@pytest.mark.parametrize("stop", ["eos", "stop id", "stop string", "criterion", "length"])
def test_no_processor_is_called_behind_the_stop(stop: str) -> None:
    """In a block that is cut, tokens behind the stop are not shown to processors: a grammar may have ended there."""
    tokenizer = CharTokenizer()
    truth = [*PROMPT, *greedy_ids()]
    sixth = truth[8]
    assert sixth not in truth[3:8]
    settings: dict[str, Any] = {
        "eos": {},
        "stop id": {"stop_token_ids": [sixth]},
        "stop string": {"stop": ALPHABET[sixth]},
        "criterion": {"stopping_criteria": [lambda ids, _scores: ids[0, -1] == sixth]},
        "length": {"max_tokens": 6},
    }[stop]
    config = EngineConfig(eos_token_ids=(sixth,) if stop == "eos" else ())
    processor = Counting()
    engine = make_engine(tiny_model(), OracleDrafter([truth]), num_draft=12, config=config, tokenizer=tokenizer)
    params = SamplingParams(**{"max_tokens": 30, "logits_processors": [processor], **settings})
    done = decode(engine, PROMPT, params)
    assert list(done.token_ids) == truth[3:9]
    assert (done.metrics.rounds, len(processor.seen)) == (1, 6)


# --- Grammars ---------------------------------------------------------------------------------------------------------

DIGITS, LETTERS, SIGNS, END = range(10), range(10, 40), range(40, 63), 63
ALLOWED: dict[str, tuple[range, str]] = {
    "digit": (DIGITS, "letter"),
    "letter": (LETTERS, "sign"),
    "sign": (SIGNS, "digit"),
}


class Grammar:
    """A matcher as a logits processor: digit, letter, sign, over and over; after ``repeats`` signs only ``END``.

    Like real matchers it is advanced by one token per call, keeps its state, and must not be asked once it has ended.
    """

    def __init__(self, repeats: int = 10**6) -> None:
        self.repeats = repeats
        self.state = "digit"
        self.signs = 0
        self.length: int | None = None

    def advance(self, token: int) -> None:
        """Take one generated token."""
        assert token in self.allowed(), "the matcher was advanced by a token it does not allow"
        self.signs += self.state == "sign"
        self.state = "done" if token == END else ALLOWED[self.state][1]
        if self.state == "digit" and self.signs == self.repeats:
            self.state = "end"

    def allowed(self) -> Sequence[int]:
        """Ids that may come next."""
        assert self.state != "done", "the matcher was asked after its end"
        return (END,) if self.state == "end" else ALLOWED[self.state][0]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Advance by the newest token, then mask."""
        ids = input_ids[0].tolist()
        if self.length is not None:
            assert len(ids) == self.length + 1, "the matcher must see one more token at each call"
            self.advance(ids[-1])
        self.length = len(ids)
        mask = torch.full_like(scores, -torch.inf)
        mask[0, list(self.allowed())] = 0.0
        return scores + mask

    @classmethod
    def replay(cls, tokens: Sequence[int], repeats: int) -> Grammar:
        """A matcher that was shown these tokens and nothing else."""
        matcher = cls(repeats)
        for token in tokens:
            matcher.advance(token)
        return matcher


def violating(place: int) -> Callable[[Sequence[int]], Drafter]:
    """Drafts of five right tokens, of which the one at ``place`` breaks the grammar."""

    class Violating(OracleDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            proposals = []
            for proposal in super().propose(requests):
                tokens = list(proposal.token_ids)
                if place < len(tokens):
                    tokens[place] = (tokens[place] + 20) % VOCAB
                proposals.append(Proposal(tokens))
            return proposals

    return lambda truth: Violating([truth])


def beyond_the_end(truth: Sequence[int]) -> Drafter:
    """An oracle that does not know when to stop."""
    return OracleDrafter([[*truth, *DIGITS]])


GRAMMAR_DRAFTERS: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "right": lambda truth: OracleDrafter([truth]),
    "wrong at the first": violating(0),
    "wrong in the middle": violating(2),
    "wrong at the last": violating(4),
    "invalid only": lambda _truth: Fixed([END, END, END, END]),
    "outside the vocabulary": lambda _truth: Fixed([-1, 64, 99]),
    "beyond the end": beyond_the_end,
    "random": lambda _truth: RandomDrafter(VOCAB, stray=True),
    "model": lambda _truth: ModelDrafter(near_model(), target_vocab_size=VOCAB),
    "lookup": lambda _truth: NGramDrafter(),
}


@functools.cache
def grammatical(repeats: int, temperature: float) -> Completion:
    """Plain output under a grammar."""
    params = SamplingParams(max_tokens=26, temperature=temperature, seed=3, logits_processors=[Grammar(repeats)])
    return plain(params, config=EngineConfig(eos_token_ids=(END,)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repeats", [3, 100])
@pytest.mark.parametrize("name", GRAMMAR_DRAFTERS)
def test_a_grammar_is_obeyed_inside_blocks(name: str, repeats: int, temperature: float) -> None:
    """Drafts that break the grammar or go on after its end change nothing (vLLM#44006, #46118, sglang#21723).

    The matcher ends in the state that the committed tokens lead to: it was never advanced by a rejected one (vLLM#9423,
    #53777, #54437, sglang#9187, #24283).
    """
    expected = grammatical(repeats, temperature)
    matcher = Grammar(repeats)
    drafter = GRAMMAR_DRAFTERS[name]([*PROMPT, *expected.token_ids])
    engine = make_engine(tiny_model(), drafter, num_draft=5, config=EngineConfig(eos_token_ids=(END,)))
    params = SamplingParams(max_tokens=26, temperature=temperature, seed=3, logits_processors=[matcher])
    done = decode(engine, PROMPT, params)
    assert done.token_ids == expected.token_ids
    assert len(set(done.token_ids)) > (5 if repeats == 3 else 12)
    assert done.finish_reason == ("stop" if repeats == 3 else "length")
    # The last token is not shown to a processor any more; the state before it is the state of a replay.
    replayed = Grammar.replay(done.token_ids[:-1], repeats)
    assert (matcher.state, matcher.signs) == (replayed.state, replayed.signs)
    assert matcher.length == len(PROMPT) + len(done.token_ids) - 1
    if name == "right":
        assert done.metrics.verification_pass_rate == 1.0


def test_a_grammar_that_ends_inside_a_block_ends_the_request() -> None:
    """The block that completes the grammar is cut at its end, and the matcher is not asked again (vLLM#46272)."""
    config = EngineConfig(eos_token_ids=(END,))
    expected = plain(SamplingParams(max_tokens=26, logits_processors=[Grammar(2)]), config=config)
    engine = make_engine(tiny_model(), beyond_the_end([*PROMPT, *expected.token_ids]), num_draft=16, config=config)
    done = decode(engine, PROMPT, SamplingParams(max_tokens=26, logits_processors=[Grammar(2)]))
    assert (len(done.token_ids), done.token_ids[-1], done.metrics.rounds) == (7, END, 1)
    assert done.token_ids == expected.token_ids


def test_matchers_of_different_requests_do_not_mix() -> None:
    """In one batch, one request with a grammar, one with another, and one without give what each gives alone."""
    config = EngineConfig(eos_token_ids=(END,))

    def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
        choices: list[list[Any]] = [[Grammar(2)], [], [Grammar(4)], [Counting()]]
        return [(PROMPT, SamplingParams(max_tokens=20, logits_processors=each)) for each in choices]

    alone = [decode(make_engine(tiny_model(), config=config), *request).token_ids for request in requests()]
    truths = [[*PROMPT, *ids] for ids in alone]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        engine = make_engine(tiny_model(), NearDrafter(truths, VOCAB, hit_rate=0.8), num_draft=5, config=config)
        batch = requests()
        runs = drive(engine, [batch[index] for index in order])
        assert [run.completion.token_ids for run in runs] == [alone[index] for index in order]


# --- Text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", range(2, 8))
def test_stop_strings_work_with_a_draft_model(begin: int) -> None:
    """Stop strings and a draft model go together; ``generate`` raises "could not locate a tokenizer" for the pair."""
    tokenizer = CharTokenizer()
    llm = LLM(
        tiny_model(),
        tokenizer=tokenizer,
        speculation=Speculation(drafter=near_model(), policy="fixed", max_draft_tokens=6),
        check_model=False,
    )
    text = tokenizer.decode(generate(tiny_model(), list(PROMPT), 24))
    stop = text[begin : begin + 3]
    (done,) = llm.generate(list(PROMPT), SamplingParams(max_tokens=24, stop=stop))
    assert done.text == text[: text.index(stop)]
    assert done.stop_detail == stop
    assert done.metrics.drafted > 0


def test_a_drafter_with_other_token_ids_is_refused(tmp_path: Path) -> None:
    """Ids of a draft model with another tokenizer would be nonsense (transformers#46936, llama.cpp#17480).

    Equal tokenizers are accepted. The message shows a token that differs.
    """
    model = tiny_model(vocab_size=340)
    model.save_pretrained(tmp_path / "same")
    byte_level_bpe().save_pretrained(tmp_path / "same")
    settings = {"tokenizer": byte_level_bpe(), "check_model": False}
    LLM(model, speculation=Speculation(drafter=tmp_path / "same"), **settings)

    model.save_pretrained(tmp_path / "other")
    byte_level_bpe().save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    a, b = (byte_level_bpe().convert_tokens_to_ids(token) for token in "ab")
    swapped = (
        text.replace(f'"a": {a},', '"a": -1,').replace(f'"b": {b},', f'"b": {a},').replace('"a": -1,', f'"a": {b},')
    )
    assert swapped != text
    file.write_text(swapped, encoding="utf-8")
    with pytest.raises(DrafterError, match=r"2 tokens other ids than the target's \(for example '[ab]'\)"):
        LLM(model, speculation=Speculation(drafter=tmp_path / "other"), **settings)


# --- Waste ------------------------------------------------------------------------------------------------------------


def test_a_drafter_that_is_always_wrong_is_switched_off() -> None:
    """Over 512 tokens an always-wrong, always-sure drafter wastes under 5 % verification (vLLM#15025, #27379)."""
    length = 512

    def law(ids: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[(3 * len(ids)) % VOCAB] = SURE
        return logits

    truth = [*PROMPT, *((3 * place) % VOCAB for place in range(3, 3 + length))]
    ticks = iter(range(10**9))  # every reading of the clock is a millisecond later
    engine = make_engine(
        LawTarget(law, VOCAB),
        AdversaryDrafter([truth], VOCAB),
        policy=Adaptive(8, padded=True),
        clock=lambda: next(ticks) * 1e-3,
    )
    done = decode(engine, PROMPT, SamplingParams(max_tokens=length))
    assert list(done.token_ids) == truth[3:]
    assert done.metrics.rounds == length
    assert 0 < done.metrics.admitted < 0.05 * length
    assert done.metrics.accepted == 0


def test_the_audit_is_on() -> None:
    """Every engine of these tests is watched: the auditor gets a report per round."""
    engine = make_engine(constant_law([1.0]), Fixed([0, 0]), num_draft=2)
    (audit,) = (observer for observer in engine._loop._observers if isinstance(observer, Audit))
    decode(engine, [5], SamplingParams(max_tokens=6))
    assert [report.emitted for report in audit.reports] == [(3,), (3,)]
