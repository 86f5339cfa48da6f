"""The engine: requests join, run, end and are dropped in any order, and each gets what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specflow.errors import BackendContractError, InvalidSettingError
from specflow_llm import (
    ContextLengthError,
    DrafterBase,
    DraftRequest,
    Engine,
    EngineConfig,
    PromptError,
    Proposal,
    SamplingParams,
)
from specflow_llm.drafters import NGramDrafter
from specflow_llm.drafters.base import RowId
from specflow_llm.engine import Update
from tests.specflow_llm.drafters import OracleDrafter, ScriptedDrafter
from tests.specflow_llm.harness import SURE, LawTarget, collect, decode, drive, make_engine, scripted
from tests.specflow_llm.tokenizers import ByteTokenizer

VOCAB = 32
END = 31


def next_token(ids: Sequence[int]) -> int:
    """A reproducible walk over the vocabulary that meets ``END`` now and then."""
    return (ids[-1] * 7 + (ids[-2] if len(ids) > 1 else 0) * 3 + len(ids)) % VOCAB


def walk_law(ids: tuple[int, ...]) -> torch.Tensor:
    """The walk as a law."""
    logits = torch.zeros(VOCAB)
    logits[next_token(ids)] = SURE
    return logits


def walk(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = (END,)) -> list[int]:
    """What a request must give, computed token by token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


class WalkDrafter(DrafterBase):
    """Knows the walk, forgets some of it: drafts of random length with random mistakes, some outside the vocabulary."""

    def __init__(self, seed: int = 0) -> None:
        self._choose = random.Random(seed)
        self.live: set[int] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """A proposal for each request."""
        return [Proposal(self._tokens(request)) for request in requests]

    def _tokens(self, request: DraftRequest) -> list[int]:
        self.live.add(request.row)
        ids = list(request.token_ids)
        for _ in range(self._choose.randint(0, request.limit)):
            ids.append(next_token(ids))
        tokens = ids[len(request.token_ids) :]
        if tokens and self._choose.random() < 0.5:
            tokens[self._choose.randrange(len(tokens))] = self._choose.choice((-1, 0, 5, VOCAB, VOCAB + 7))
        return tokens

    def release(self, row: RowId) -> None:
        """Forget the request."""
        self.live.discard(row)


def walk_engine(drafter: Any = None, *, num_draft: int = 6, max_batch_size: int = 32, tokenizer: Any = None) -> Engine:
    """An engine over the walk."""
    config = EngineConfig(eos_token_ids=(END,), max_batch_size=max_batch_size)
    return make_engine(LawTarget(walk_law, VOCAB), drafter, num_draft=num_draft, config=config, tokenizer=tokenizer)


class Engines(RuleBasedStateMachine):
    """Any sequence of submitting, stepping, cancelling and withdrawing, against lists of ids."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.drafter = WalkDrafter()
        self.engine = walk_engine(self.drafter, max_batch_size=3)
        self.expected: dict[int, list[int]] = {}
        self.updates: dict[int, list[Update]] = {}
        self.cancelled: set[int] = set()

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        max_tokens=st.integers(1, 12),
        speculate=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, speculate: bool) -> int:  # noqa: FBT001
        """A new request joins the queue."""
        params = SamplingParams(max_tokens=max_tokens, speculate=speculate, logprobs=0)
        request = self.engine.submit(prompt, params)
        self.expected[request] = walk(prompt, max_tokens)
        self.updates[request] = []
        return request

    @rule()
    def step(self) -> None:
        """One round."""
        for update in self.engine.step():
            self.updates[update.request_id].append(update)
            if update.completion is not None:
                self.check(update.request_id)

    @rule(request=requests)
    def cancel(self, request: int) -> None:
        """A request is to end at the next step."""
        self.cancelled.add(request)
        self.engine.cancel(RowId(request))

    @rule(request=consumes(requests))
    def withdraw(self, request: int) -> None:
        """A request is dropped without a word."""
        self.engine.withdraw(RowId(request))
        self.expected.pop(request, None)

    def check(self, request: int) -> None:
        """A completion is the walk, or a beginning of it if the request was cancelled."""
        done = collect(self.updates[request]).completion
        expected = self.expected.pop(request)
        if done.finish_reason == "cancelled":
            assert request in self.cancelled
            assert list(done.token_ids) == expected[: len(done.token_ids)]
        else:
            assert list(done.token_ids) == expected
            assert done.finish_reason == ("stop" if expected[-1] == END else "length")

    @invariant()
    def nothing_is_left_of_the_dead(self) -> None:
        """Rows, target slots and draft state belong to live requests; every committed id is on the walk."""
        rows = self.engine.backend.rows
        live = {row.row_id for row in rows}
        target: Any = self.engine.backend.target
        assert len(target.held) == len(rows) <= 3
        assert self.drafter.live <= live
        assert live <= set(self.expected)
        for row in rows:
            output = row.token_ids[row.num_prompt :]
            assert output == self.expected[row.row_id][: len(output)]

    def teardown(self) -> None:
        """Whatever is left can be finished."""
        for _ in range(400):
            if not self.engine.num_unfinished:
                break
            self.step()
        assert self.engine.num_unfinished == 0
        assert self.expected == {}
        assert self.drafter.live == set()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_waiting_requests_join_as_rows_become_free(max_batch_size: int) -> None:
    """Never more rows than allowed, first come first served, and each request gets its own tokens."""
    engine = walk_engine(WalkDrafter(), max_batch_size=max_batch_size)
    prompts = [[index, index + 1] for index in range(9)]
    rows = [engine.submit(prompt, SamplingParams(max_tokens=10)) for prompt in prompts]
    started: list[int] = []
    done: dict[int, list[int]] = {}
    while engine.num_unfinished:
        for update in engine.step():
            if update.request_id not in started:
                started.append(update.request_id)
            if update.completion is not None:
                done[update.request_id] = list(update.completion.token_ids)
        assert len(engine.backend.rows) <= max_batch_size
    assert started == sorted(started)
    assert [done[row] for row in rows] == [walk(prompt, 10) for prompt in prompts]


def test_each_row_accepts_its_own_number_every_round() -> None:
    """Acceptances (0,4,1,3), then (4,0,0,2), are what each row emits that round plus one (transformers#32165)."""
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    truths = [[*prompt, *walk(prompt, 24, stop_ids=())] for prompt in prompts]
    script = [[(4, 0), (4, 4), (4, 1), (4, 3)], [(4, 4), (4, 0), (4, 0), (4, 2)]]
    engine = make_engine(LawTarget(walk_law, VOCAB), ScriptedDrafter(truths, VOCAB, script), num_draft=4)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=24))
    emitted = [[len(update.token_ids) for update in engine.step()] for _ in range(3)]
    assert emitted == [[1, 5, 2, 4], [5, 1, 1, 3], [1, 1, 1, 1]]


def test_the_same_prompt_again_is_the_same_again() -> None:
    """Repeated and prefix-sharing prompts give the tokens and acceptance of a cold start (vLLM#41838, sglang#8726)."""
    prompts = [[5, 6, 7], [5, 6, 7], [5, 6, 7, 8], [5, 6], [5, 6, 7]]

    def once(prompt: list[int]) -> tuple[tuple[int, ...], int]:
        done = decode(make_engine(LawTarget(walk_law, VOCAB), NGramDrafter(), num_draft=4), prompt, params)
        return done.token_ids, done.metrics.accepted

    params = SamplingParams(max_tokens=60)
    engine = make_engine(LawTarget(walk_law, VOCAB), NGramDrafter(), num_draft=4)
    warm = [drive(engine, [(prompt, params)])[0].completion for prompt in prompts]
    assert [(done.token_ids, done.metrics.accepted) for done in warm] == [once(prompt) for prompt in prompts]


def test_an_idle_engine_does_nothing() -> None:
    """Stepping without requests returns nothing and runs no model."""
    engine = walk_engine(WalkDrafter())
    assert engine.step() == []
    assert engine.backend.target.num_forwards == 0


def test_unknown_requests_are_ignored() -> None:
    """Cancelling or withdrawing what does not exist, or is finished, changes nothing for anyone."""
    engine = walk_engine(WalkDrafter())
    done = decode(engine, [1, 2], SamplingParams(max_tokens=5))
    for request in (done.request_id, RowId(done.request_id + 99)):
        engine.cancel(request)
        engine.withdraw(request)
    assert decode(engine, [1, 2], SamplingParams(max_tokens=5)).token_ids == done.token_ids
    engine.cancel(RowId(done.request_id + 2))  # not submitted yet: it must not be cancelled later
    engine.step()
    assert decode(engine, [1, 2], SamplingParams(max_tokens=5)).finish_reason != "cancelled"


@pytest.mark.parametrize("where", ["stopping_criteria", "logits_processors"])
def test_a_request_whose_own_code_raises_is_over(where: str) -> None:
    """Its last update carries the error and no tokens of that round, its row is free, and its neighbour goes on."""
    error = RuntimeError("broken")

    def breaks(ids: torch.Tensor, scores: torch.Tensor | None) -> Any:
        if ids.shape[1] >= 7:
            raise error
        return False if scores is None else scores

    drafter = WalkDrafter()
    engine = walk_engine(drafter)
    settings: dict[str, Any] = {where: [breaks]}
    broken = engine.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True, **settings))
    neighbour = engine.submit([3, 4], SamplingParams(max_tokens=20))
    updates: dict[int, list[Update]] = {broken: [], neighbour: []}
    while not updates[broken] or updates[broken][-1].error is None:
        for update in engine.step():
            updates[update.request_id].append(update)
    assert updates[broken][-1] == Update(broken, (), "", None, error)
    tokens = [token for update in updates[broken] for token in update.token_ids]
    assert tokens == walk([1, 2], 20, stop_ids=())[: len(tokens)]
    assert broken not in drafter.live
    assert broken not in {row.row_id for row in engine.backend.rows}
    while engine.num_unfinished:
        updates[neighbour].extend(engine.step())
    assert list(collect(updates[neighbour]).completion.token_ids) == walk([3, 4], 20)


# --- Figures ----------------------------------------------------------------------------------------------------------


def test_figures_say_what_happened() -> None:
    """Rounds, drafted, admitted, accepted, emitted and acceptance by position follow from a scripted run."""
    truth = [1, 2, *walk([1, 2], 30, stop_ids=())]
    drafter = ScriptedDrafter([truth], VOCAB, [[(4, 4)], [(4, 1)], [(0, 0)], [(3, 0)]])
    engine = make_engine(LawTarget(walk_law, VOCAB), drafter, num_draft=4)
    figures = decode(engine, [1, 2], SamplingParams(max_tokens=10)).metrics
    # Emitted by round: 5, 2, 1, 1, 1.
    assert (figures.rounds, figures.drafted, figures.admitted) == (5, 9, 9)
    assert (figures.accepted, figures.emitted) == (5, 10)
    # The fourth round had room for two tokens only: its draft of 3 was cut to 1.
    assert figures.prompt_tokens == 2
    assert figures.acceptance_by_position == (2 / 3, 1 / 2, 1 / 2, 1 / 2)
    assert figures.mean_accepted_length == 2.0
    assert figures.verification_pass_rate == figures.draft_utilisation == 5 / 9


def test_tokens_behind_a_stop_are_not_counted_as_accepted() -> None:
    """A block cut by a stop counts only the accepted tokens that were emitted, so the figures add up to the output."""
    truth = [1, *range(2, 20)]
    engine = make_engine(scripted(truth, VOCAB), OracleDrafter([truth]), num_draft=10)
    figures = decode(engine, [1], SamplingParams(max_tokens=15, stop_token_ids=[4])).metrics
    assert (figures.rounds, figures.admitted, figures.accepted, figures.emitted) == (1, 10, 3, 3)
    assert figures.acceptance_by_position == (1.0, 1.0, 1.0, *(0.0,) * 7)


def test_figures_are_plain_data() -> None:
    """``as_dict`` holds every figure and the derived rates, ready for JSON."""
    figures = decode(walk_engine(WalkDrafter()), [1, 2], SamplingParams(max_tokens=9)).metrics.as_dict()
    assert figures["mean_accepted_length"] == figures["emitted"] / figures["rounds"]
    assert set(figures["phase_seconds"]) == {"prefill", "predict", "admit", "execute", "verify", "commit"}
    assert figures["target_forwards"] == figures["rounds"]  # the fake target prefills without a forward


# --- Requests that cannot work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "problem", "remedy"),
    [
        ([], {}, "empty", "at least one token"),
        ([1, VOCAB], {}, f"token id {VOCAB} is outside", "this model's tokenizer"),
        ([-1], {}, "token id -1 is outside", "this model's tokenizer"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer", "stop_token_ids"),
        ([1], {"bad_words": ["x"]}, "bad_words given as strings need a tokenizer", "token ids"),
    ],
)
def test_a_prompt_that_cannot_work_is_refused(
    prompt: list[int], params: dict[str, Any], problem: str, remedy: str
) -> None:
    """The message names the prompt and the problem, and says what to do; nothing is queued."""
    engine = walk_engine()
    with pytest.raises(PromptError, match="prompt 3") as caught:
        engine.submit(prompt, SamplingParams(**params), index=3)
    assert problem in str(caught.value)
    assert remedy in str(caught.value)
    assert engine.num_unfinished == 0


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """The longest possible prompt leaves room for one token; one more is refused with both numbers."""
    engine = make_engine(LawTarget(walk_law, VOCAB, context_length=8), WalkDrafter(), num_draft=4)
    assert len(decode(engine, [1] * 7, SamplingParams()).token_ids) == 1
    with pytest.raises(ContextLengthError, match="prompt 0 has 8 tokens, but the model's context holds 8"):
        engine.submit([1] * 8, SamplingParams())


@pytest.mark.parametrize(
    ("params", "setting"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_words": [[VOCAB]]}, "bad_words"),
        ({"stop_token_ids": [0, VOCAB]}, "stop_token_ids"),
    ],
)
def test_settings_that_name_foreign_ids_are_refused(params: dict[str, Any], setting: str) -> None:
    """Ids outside the vocabulary in a setting are reported with the setting's name and the legal range."""
    with pytest.raises(InvalidSettingError, match=rf"{setting}=.*0 to {VOCAB - 1}"):
        walk_engine().submit([1], SamplingParams(**params))


def test_processors_need_a_rule_that_goes_token_by_token() -> None:
    """An engine bound to a ratio rule refuses sampled requests with processors, and says which rules work."""
    config = EngineConfig(verification="block")
    engine = make_engine(LawTarget(walk_law, VOCAB), WalkDrafter(), config=config)
    params = SamplingParams(temperature=1.0, logits_processors=[lambda _ids, scores: scores])
    with pytest.raises(InvalidSettingError, match="'coupled' or 'auto'"):
        engine.submit([1], params)


# --- Drafters that break their protocol -------------------------------------------------------------------------------


class Broken(DrafterBase):
    """Answers with whatever it was given."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        """The answer."""
        return self._answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "0 proposals for 1 requests"),
        ([Proposal([1] * 9)], "drafted 9 items where 6 were allowed"),
        ([Proposal([1, 2], survival=[1.0])], "1 survival estimates for 2 items"),
        ([Proposal([1, 2], probs=torch.ones(2, VOCAB + 1))], r"shape \(2, 33\) for 2 tokens"),
        ([Proposal([1, 2], probs=torch.ones(1, VOCAB))], r"must have shape \(2, 32\)"),
    ],
)
def test_a_drafter_that_breaks_its_protocol_is_named(answer: Any, message: str) -> None:
    """What is wrong is said, and the request is as it was: it can be finished with drafting switched off."""
    engine = walk_engine(Broken(answer))
    engine.submit([1, 2], SamplingParams(max_tokens=12))
    with pytest.raises(BackendContractError, match=message):
        engine.step()
    assert [row.token_ids for row in engine.backend.rows] == [[1, 2]]
    plain = SamplingParams(max_tokens=12, speculate=False)
    engine.withdraw(engine.backend.rows[0].row_id)
    assert list(decode(engine, [1, 2], plain).token_ids) == walk([1, 2], 12)


def test_drafted_ids_may_be_tensors() -> None:
    """Ids that a drafter leaves in a tensor come out of a completion as plain integers."""

    class Tensors(WalkDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            drafts: Any = [torch.tensor(proposal.token_ids) for proposal in super().propose(requests)]
            return [Proposal(draft.long()) for draft in drafts]

    done = decode(walk_engine(Tensors()), [3, 4], SamplingParams(max_tokens=20))
    assert list(done.token_ids) == walk([3, 4], 20)
    assert {type(token) for token in done.token_ids} == {int}


def test_a_drafter_sees_committed_tokens_only() -> None:
    """What a drafter is shown grows by what was emitted and never holds a rejected token."""

    class Watching(WalkDrafter):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, list[int]] = {}

        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            for request in requests:
                before, now = self.seen.get(request.row, []), list(request.token_ids)
                assert now[: len(before)] == before
                assert len(now) > len(before)
                assert request.limit >= 1
                self.seen[request.row] = now
            return super().propose(requests)

        def state_bytes(self) -> Mapping[str, int]:
            return {"watched": 8 * len(self.seen)}

    drafter = Watching()
    engine = walk_engine(drafter)
    runs = drive(engine, [([index, 2], SamplingParams(max_tokens=20)) for index in range(4)])
    for index, run in enumerate(runs):
        ids, seen = [index, 2, *run.completion.token_ids], drafter.seen[run.completion.request_id]
        assert ids[: len(seen)] == seen
    assert engine.backend.state_bytes()["watched"] == 32


def test_texts_of_requests_do_not_mix() -> None:
    """Each request has its own detokeniser, stop strings and special-token setting."""
    tokenizer = ByteTokenizer()
    truths = [[number, *tokenizer(text)["input_ids"], 256, 256] for number, text in enumerate(["日本 one", "two 😀"])]

    def law(ids: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(257)
        logits[(truths[ids[0]] + [256] * 99)[len(ids)]] = SURE
        return logits

    engine = make_engine(
        LawTarget(law, 257),
        OracleDrafter(truths),
        num_draft=5,
        config=EngineConfig(eos_token_ids=(256,)),
        tokenizer=tokenizer,
    )
    wanted = [
        ([0], SamplingParams(stop=" o")),
        ([1], SamplingParams(skip_special_tokens=False)),
        ([0], SamplingParams()),
        ([1], SamplingParams(stop="😀", include_stop_str=True)),
    ]
    texts = [run.completion.text for run in drive(engine, wanted)]
    assert texts == ["日本", "two 😀<end>", "日本 one", "two 😀"]
