"""Several drafters as one: which draft is taken, that taking it cannot change the output, and whose state is whose."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from specflow.errors import BackendContractError, InvalidSettingError
from specflow.testing import ScriptedPolicy
from specflow.types import Mode
from specflow_llm import Drafter, DrafterBase, DraftRequest, EngineConfig, Proposal, SamplingParams
from specflow_llm.architecture import inspect_model
from specflow_llm.checker import check_drafter
from specflow_llm.drafters import ModelDrafter, NGramDrafter, RowId
from specflow_llm.drafters.combined import CombinedDrafter
from specflow_llm.sampling import RowSampler
from specflow_llm.selfcheck import build_target
from tests.specflow_llm.harness import drive, make_engine
from tests.specflow_llm.models import VOCAB, near_copy, near_model, tiny_model
from tests.specflow_llm.test_checker import Bigram
from tests.specflow_llm.test_verification_enumeration import (
    EXACT,
    ONE_HOT,
    RULES,
    Law,
    Model,
    Tokens,
    distance,
    outcomes,
)


def request(token_ids: Sequence[int], limit: int = 4, *, row: int = 0, vocab_size: int = 16) -> DraftRequest:
    """A greedy request."""
    params = SamplingParams(temperature=0.0)
    sampler = RowSampler(params, vocab_size=vocab_size, num_prompt_tokens=1, seed=0, rule="greedy")
    return DraftRequest(RowId(row), list(token_ids), limit, sampler)


@dataclass
class Told(DrafterBase):
    """Proposes what it is told, notes what it is asked, and can be told to raise."""

    answer: Callable[[DraftRequest], Proposal]
    label: str = "told"
    gives_probs: bool = False
    feature_layers: Sequence[int] = ()
    asked: list[list[tuple[int, int]]] = field(default_factory=list)
    """Per call: row and number of committed tokens of every request."""
    released: list[int] = field(default_factory=list)
    held: int = 0
    error: Exception | None = None

    @property
    def name(self) -> str:
        """As labelled."""
        return self.label

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """As told."""
        self.asked.append([(item.row, len(item.token_ids)) for item in requests])
        if self.error is not None:
            raise self.error
        return [self.answer(item) for item in requests]

    def release(self, row: RowId) -> None:
        """Note it."""
        self.released.append(row)
        if self.error is not None:
            raise self.error

    def state_bytes(self) -> dict[str, int]:
        """As told."""
        return {"draft_kv": self.held}


def says(*token_ids: int, trust: float | None = None, sampled: bool = False) -> Callable[[DraftRequest], Proposal]:
    """The same tokens always, each claimed to be accepted with probability ``trust``."""

    def answer(item: DraftRequest) -> Proposal:
        tokens = token_ids[: item.limit]
        survival = None if trust is None else [trust ** (index + 1) for index in range(len(tokens))]
        probs = torch.full((len(tokens), 16), 1 / 16) if sampled and tokens else None
        return Proposal(tokens, probs, survival)

    return answer


def proposed(drafter: Drafter, token_ids: Sequence[int], limit: int = 4, *, row: int = 0) -> list[int]:
    """The tokens proposed for one request."""
    return list(drafter.propose([request(token_ids, limit, row=row)])[0].token_ids)


# --- Choice -----------------------------------------------------------------------------------------------------------


def test_the_draft_with_the_most_expected_tokens_is_taken() -> None:
    """A short sure draft loses to a long one that promises more tokens, and wins against a long doubtful one."""
    sure, doubtful = says(1, trust=0.99), says(2, 2, 2, 2, trust=0.3)
    promising = says(3, 3, 3, 3, trust=0.9)
    assert proposed(CombinedDrafter(Told(sure), Told(promising), costs=(0, 0)), [5]) == [3, 3, 3, 3]
    assert proposed(CombinedDrafter(Told(doubtful), Told(sure), costs=(0, 0)), [5]) == [1]
    assert proposed(CombinedDrafter(Told(sure), Told(doubtful), costs=(0, 0)), [5]) == [1]


def test_the_cheaper_of_equals_is_taken() -> None:
    """Where two drafts promise the same, the earlier drafter's is taken."""
    first, second = Told(says(1, 2, trust=0.5), "a"), Told(says(3, 4, trust=0.5), "b")
    drafter = CombinedDrafter(first, second, costs=(0, 0))
    assert proposed(drafter, [5]) == [1, 2]
    assert drafter.num_chosen == {"a": 1}


def test_each_request_gets_its_own_choice() -> None:
    """In one call, different requests get drafts of different drafters."""
    first = Told(lambda item: says(1, 1, trust=0.9 if item.row else 0.1)(item))
    drafter = CombinedDrafter(first, Told(says(2, 2, trust=0.5)), costs=(0, 0))
    proposals = drafter.propose([request([5], row=0), request([5], row=1), request([5], row=2)])
    assert [proposal.token_ids[0] for proposal in proposals] == [2, 1, 1]


def test_claims_are_corrected_by_what_comes_true() -> None:
    """A boaster is taken at first; once its claims have failed, the modest drafter that is right is preferred."""
    drafter = CombinedDrafter(Told(says(1, 1, trust=0.99)), Told(says(2, 2, trust=0.5)), costs=(0, 0))
    ids, taken = [5], []
    for _ in range(12):
        taken.append(proposed(drafter, ids)[0])
        ids = [*ids, 2, 2, 2]
    assert taken[0] == 1
    assert taken[-6:] == [2] * 6


def test_what_one_request_teaches_helps_the_next() -> None:
    """A new request starts from what is known of the drafters, not from their claims."""
    drafter = CombinedDrafter(Told(says(1, 1, trust=0.99)), Told(says(2, 2, trust=0.5)), costs=(0, 0))
    ids = [5]
    for _ in range(12):
        proposed(drafter, ids)
        ids = [*ids, 2, 2, 2]
    drafter.release(RowId(0))
    assert proposed(drafter, [5], row=1) == [2, 2]


def test_estimates_travel_with_the_draft_corrected() -> None:
    """The chosen draft carries one falling estimate per token, also where its drafter gives none."""
    for trust in (0.9, None):
        drafter = CombinedDrafter(Told(says(1, 2, 3, trust=trust)), Told(says()), costs=(0, 0))
        ids = [5]
        for _ in range(40):
            survival = drafter.propose([request(ids)])[0].survival
            ids = [*ids, 1, 2, 9]  # the third token never comes
        assert survival is not None
        assert 1.0 >= survival[0] >= survival[1] > 0.75
        assert survival[2] < 0.15


def test_probabilities_travel_with_the_draft() -> None:
    """The very tensor that a sampled draft came with is handed on, and none with a looked-up one."""
    drafter = CombinedDrafter(
        Told(says(trust=1.0)), Told(says(3, 3, trust=0.9, sampled=True), gives_probs=True), costs=(0, 0)
    )
    chosen = drafter.propose([request([5])])[0]
    assert drafter.gives_probs
    assert chosen.probs is not None
    assert chosen.probs.shape == (2, 16)
    looked_up = CombinedDrafter(Told(says(1, trust=1.0)), Told(says(3, trust=0.1, sampled=True)), costs=(0, 0))
    assert looked_up.propose([request([5])])[0].probs is None


# --- Who is asked -----------------------------------------------------------------------------------------------------


def test_a_costly_drafter_is_spared_where_the_cheap_one_wins_clearly() -> None:
    """Only the requests whose cheap draft promises little reach the costly drafter, in one call."""
    cheap = Told(lambda item: says(1, 1, 1, 1, trust=0.999)(item) if item.row == 1 else Proposal(()))
    costly = Told(says(2, 2, 2, 2, trust=0.7))
    drafter = CombinedDrafter(cheap, costly)
    ids = {row: [5] for row in range(3)}
    for _ in range(10):
        proposals = drafter.propose([request(ids[row], row=row) for row in ids])
        assert len(proposals) == 3
        ids = {row: [*ids[row], *([1] * 5 if row == 1 else [2, 3])] for row in ids}
    assert [row for row, _ in costly.asked[-1]] == [0, 2]
    assert all(len(call) == 3 for call in cheap.asked)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_drafter_out_of_favour_is_tried_again(sampled: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """A costly drafter that was not asked for long is asked; if its draft is sampled it is taken, to be judged."""
    costly = Told(says(2, 2, 2, 2, trust=0.1, sampled=sampled), gives_probs=sampled)
    drafter = CombinedDrafter(Told(says(1, 1, 1, 1, trust=0.999)), costly, probe_every=5)
    ids, taken = [5], []
    for _ in range(24):
        taken.append(proposed(drafter, ids)[0])
        ids = [*ids, 1, 1, 1, 1, 1]
    asked = [size // 5 for call in costly.asked for _, size in call]  # the rounds
    assert len(asked) >= 3
    assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= 6
    assert (2 in taken) == sampled


def test_a_model_catches_up_after_rounds_without_it() -> None:
    """What the draft model proposes after being passed over equals what a new one proposes for the same tokens."""
    model = near_copy(tiny_model())
    spied: list[tuple[list[int], list[int]]] = []

    class Spied(ModelDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            proposals = super().propose(requests)
            for item, proposal in zip(requests, proposals, strict=True):
                spied.append((list(item.token_ids), list(proposal.token_ids)))
            return proposals

    class Sometimes(NGramDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            sure = [len(item.token_ids) % 3 == 0 for item in requests]
            return [
                Proposal([7] * item.limit, survival=[1.0] * item.limit) if yes else Proposal(())
                for item, yes in zip(requests, sure, strict=True)
            ]

    drafter = CombinedDrafter(Sometimes(), Spied(model, target_vocab_size=VOCAB))
    for start in range(3):
        ids = [1, 2, 3, *range(start)]
        for turn in range(9):
            tokens = list(drafter.propose([request(ids, row=start, vocab_size=VOCAB)])[0].token_ids)
            ids = [*ids, *tokens[: turn % 3], 11 + turn]
    assert len(spied) >= 9
    for ids, tokens in spied:
        assert tokens == proposed(ModelDrafter(model, target_vocab_size=VOCAB), ids)


# --- Features ---------------------------------------------------------------------------------------------------------


def test_every_drafter_sees_its_own_features() -> None:
    """The union of the layers is asked for; each drafter gets its own side by side in layer order, or None."""
    seen: dict[str, torch.Tensor | None] = {}

    def note(label: str) -> Callable[[DraftRequest], Proposal]:
        def answer(item: DraftRequest) -> Proposal:
            seen[label] = item.features
            return Proposal(())

        return answer

    layers = {"pair": (4, 2), "apart": (9, 2), "none": (), "all": (2, 4, 9), "one": (4,)}
    parts = [Told(note(label), label, feature_layers=wanted) for label, wanted in layers.items()]
    drafter = CombinedDrafter(*parts, costs=(0.0,) * 5)
    assert list(drafter.feature_layers) == [2, 4, 9]
    # Column c of layer l holds 10 * l + c.
    features = torch.cat([10.0 * layer + torch.arange(3.0).expand(6, 3) for layer in (2, 4, 9)], dim=1)
    item = request(range(7))
    drafter.propose([DraftRequest(item.row, item.token_ids, 4, item.sampler, features)])
    for label, wanted in layers.items():
        found = seen[label]
        if not wanted:
            assert found is None
            continue
        assert found is not None
        assert found.tolist() == [[10.0 * layer + column for layer in sorted(wanted) for column in range(3)]] * 6
        shares = found.untyped_storage().data_ptr() == features.untyped_storage().data_ptr()
        assert shares == (label != "apart")


def test_features_arrive_through_the_engine() -> None:
    """In a real engine each drafter gets the same hidden states as if it were alone."""
    model = tiny_model()

    class Reader(DrafterBase):
        def __init__(self, layers: Sequence[int]) -> None:
            self.feature_layers = layers
            self.seen: dict[int, torch.Tensor] = {}

        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            for item in requests:
                assert item.features is not None
                self.seen[len(item.token_ids)] = item.features.clone()
            return [Proposal([3] * item.limit) for item in requests]

    def run(drafter: Drafter) -> None:
        target = build_target(
            model, inspect_model(model), feature_layers=drafter.feature_layers, check=False, prefill_chunk=64
        )
        engine = make_engine(model, drafter, num_draft=2)
        engine.backend._target = target
        drive(engine, [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8))])

    together = [Reader([0]), Reader([1]), Reader([0, 1])]
    run(CombinedDrafter(*together, costs=(0.0, 0.0, 0.0)))
    for reader in together:
        alone = Reader(reader.feature_layers)
        run(alone)
        assert len(alone.seen) >= 3
        assert all(torch.equal(reader.seen[size], states) for size, states in alone.seen.items())


# --- Contract and faults ----------------------------------------------------------------------------------------------


def test_limits_are_respected() -> None:
    """A limit of 0 asks nobody and keeps no state; other limits reach the drafters unchanged."""
    first, second = Told(says(1, 2, 3, 4)), Told(says(2, 3, 4, 5))
    drafter = CombinedDrafter(first, second, costs=(0, 0))
    proposals = drafter.propose([request([5], 0, row=0), request([5], 2, row=1), request([5], 0, row=2)])
    assert [len(proposal.token_ids) for proposal in proposals] == [0, 2, 0]
    assert first.asked == second.asked == [[(1, 1)]]
    before = drafter.state_bytes()
    assert drafter.propose([request([5], 0, row=3)]) == [Proposal(())]
    assert drafter.state_bytes() == before


@pytest.mark.parametrize("which", [0, 1])
def test_a_drafter_that_raises_leaves_the_others_in_order(which: int) -> None:
    """The error passes through; the next call, after the round was discarded, works as if nothing had happened."""
    parts = [Told(says(1, 2, trust=0.5)), Told(says(3, 4, trust=0.8))]
    drafter, untroubled = CombinedDrafter(*parts, costs=(0, 0)), CombinedDrafter(*parts, costs=(0, 0))
    ids = [5]
    for turn in range(6):
        if turn % 2:
            parts[which].error = RuntimeError("out of memory")
            with pytest.raises(RuntimeError, match="out of memory"):
                drafter.propose([request(ids)])
            parts[which].error = None
        assert drafter.propose([request(ids)])[0].token_ids == untroubled.propose([request(ids)])[0].token_ids
        ids = [*ids, 3, 9]


def test_a_drafter_that_forgets_a_request_is_named() -> None:
    """Too few proposals are reported under the name of the drafter that returned them."""

    class Short(Told):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            return []

    drafter = CombinedDrafter(Told(says(1)), Short(says(1), "short"), costs=(0, 0))
    with pytest.raises(BackendContractError, match=r"drafter short returned 0 proposals for 1 requests"):
        drafter.propose([request([5])])


def test_a_repeated_round_makes_the_same_choice() -> None:
    """A round that failed elsewhere is drafted again with the same noise: its first draft must not decide anything."""
    cheap, brief = Told(says(1, 1, trust=0.9)), Told(says(2, 2, trust=0.6, sampled=True), gives_probs=True)
    drafter = CombinedDrafter(cheap, brief, costs=(0, 0))
    once, *again = [drafter.propose([request([5], 6)])[0] for _ in range(8)]
    assert once.token_ids == (2, 2)  # drafts of this source may well be longer, as far as is known
    assert all((then.token_ids, then.survival) == (once.token_ids, once.survival) for then in again)
    assert proposed(drafter, [5, 9], 6) == [1, 1]  # when a round was committed, its length is known


def test_release_reaches_everyone() -> None:
    """All drafters forget a released request, also where one of them raises, and nothing is left behind."""
    parts = [Told(says(1), held=100), Told(says(2), held=20)]
    drafter = CombinedDrafter(*parts, costs=(0, 0))
    empty = drafter.state_bytes()
    assert empty["draft_kv"] == 120
    for row in range(5):
        proposed(drafter, [5], row=row)
    assert drafter.state_bytes()["source_rates"] > empty["source_rates"]
    parts[1].error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        drafter.release(RowId(0))
    parts[1].error = None
    for row in range(1, 5):
        drafter.release(RowId(row))
    drafter.release(RowId(77))
    assert parts[0].released == parts[1].released == [0, 1, 2, 3, 4, 77]
    assert drafter.state_bytes() == empty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one, two: CombinedDrafter(one), "two drafters"),
        (lambda one, two: CombinedDrafter(one, one), "every drafter once"),
        (lambda one, two: CombinedDrafter(one, two, costs=(0.0,)), "2 numbers"),
        (lambda one, two: CombinedDrafter(one, two, costs=(0.0, -1.0)), "2 numbers"),
        (lambda one, two: CombinedDrafter(one, two, costs=(0.0, math.nan)), "2 numbers"),
        (lambda one, two: CombinedDrafter(one, two, probe_every=0), "integer >= 1"),
    ],
    ids=["one", "one twice", "too few costs", "negative cost", "cost that is no number", "never probes"],
)
def test_wrong_settings_are_refused(make: Callable[[Drafter, Drafter], Drafter], message: str) -> None:
    """Settings that cannot work are refused with what is expected."""
    with pytest.raises(InvalidSettingError, match=message):
        make(Told(says(1)), Told(says(2)))


def test_a_name_for_metrics() -> None:
    """The name says who is inside."""
    assert CombinedDrafter(NGramDrafter(), Told(says(1))).name == "ngram+told"


# --- Exactness --------------------------------------------------------------------------------------------------------


@dataclass
class Drawn(DrafterBase):
    """A sampled draft whose draws a test enumerates: proposes ``draws`` with the laws of ``model``.

    Survival estimates are what a confident model would claim: known before the token, but not before the one ahead.
    """

    model: Model
    ends_early: bool = False
    """Stops before a token whose law has no favourite: legal, and makes the length depend on earlier draws."""
    draws: Tokens = ()
    prompt: int = 1
    gives_probs: bool = True

    @property
    def name(self) -> str:
        """As in a report."""
        return "drawn"

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The draws of this round."""
        (item,) = requests
        done = tuple(item.token_ids[self.prompt :])
        laws = [self.model((*done, *self.draws[:index])) for index in range(len(self.draws))]
        survival: list[float] = []
        alive = 1.0
        for law in laws:
            if self.ends_early and survival and float(law.max()) < 0.7:
                break
            alive *= float(law.max())
            survival.append(alive)
        count = len(survival)
        return [Proposal(self.draws[:count], torch.stack(laws[:count]), survival)]


def looked_up(trust: float) -> Told:
    """A deterministic draft: counts up from the number of committed tokens, over two ids."""
    return Told(lambda item: says(*[(len(item.token_ids) + index) % 2 for index in range(2)], trust=trust)(item))


Make = Callable[[Drawn], Drafter]


def law_of_rounds(
    make: Make, rule: str, target: Model, sampled: Drawn, *, length: int, rounds: int
) -> tuple[Law, dict[str, float]]:
    """The law of what ``rounds`` rounds emit, and how much probability went to sampled and to other drafts.

    Every draw, every outcome of the tests and every last token is enumerated; the drafter is the real one, built anew
    for each branch and taken through the rounds before.
    """
    law: Law = defaultdict(float)
    shares = {"sampled": 0.0, "other": 0.0}
    pending: list[tuple[Tokens, list[tuple[Tokens, Tokens]], float]] = [((), [], 1.0)]
    while pending:
        done, past, weight = pending.pop()
        if len(past) == rounds:
            law[done] += weight
            continue
        for draws, chance in draws_after(sampled.model, done, length):
            drawn = replace(sampled)
            drafter = make(drawn)
            for before, then in past:
                drawn.draws = then
                drafter.propose([sampled_request((0, *before), length)])
            drawn.draws = draws
            proposal = drafter.propose([sampled_request((0, *done), length)])[0]
            ids = tuple(proposal.token_ids)
            shares["other" if proposal.probs is None else "sampled"] += weight * chance / rounds
            target_rows = torch.stack([target((*done, *ids[:index])) for index in range(len(ids) + 1)])
            probs = torch.zeros(len(ids), target.vocab_size) if proposal.probs is None else proposal.probs
            used = ONE_HOT if proposal.probs is None else RULES[rule]
            for (accepted, last), part in outcomes(used, target_rows, probs, ids):
                for token, mass in enumerate(last.tolist()):
                    if mass > 0.0:
                        emitted = (*done, *ids[:accepted], token)
                        pending.append((emitted, [*past, (done, draws)], weight * chance * part * mass))
    return law, shares


def draws_after(model: Model, done: Tokens, length: int) -> Iterator[tuple[Tokens, float]]:
    """Every draft of ``length`` tokens after ``done``, with its probability."""
    for ids in itertools.product(range(model.vocab_size), repeat=length):
        yield ids, math.prod(float(model((*done, *ids[:index]))[token]) for index, token in enumerate(ids))


def sampled_request(token_ids: Tokens, limit: int) -> DraftRequest:
    """A request under a ratio rule, over two ids."""
    sampler = RowSampler(SamplingParams(temperature=1.0), vocab_size=2, num_prompt_tokens=1, seed=0, rule="block")
    return DraftRequest(RowId(0), list(token_ids), limit, sampler)


def combined(drawn: Drawn, trust: float) -> CombinedDrafter:
    """Lookup and a sampled draft."""
    return CombinedDrafter(looked_up(trust), drawn, costs=(0.0, 0.0), probe_every=2)


class LooksAhead(CombinedDrafter):
    """The naive choice: by all estimates, also those that depend on drawn tokens, and with probabilities."""

    @staticmethod
    def _value_of_sampled(source: Any, profile: Any, limit: int, survival: Sequence[float]) -> float:
        return sum(survival)


class CountsTokens(CombinedDrafter):
    """A subtler mistake: by the first estimate, but for as many tokens as were drawn."""

    @staticmethod
    def _value_of_sampled(source: Any, profile: Any, limit: int, survival: Sequence[float]) -> float:
        return CombinedDrafter._value_of_sampled(source, profile, len(survival), survival)


TRUSTS = (0.55, 0.65, 0.75, 0.85)


@pytest.mark.parametrize("ends_early", [False, True], ids=["whole", "ends early"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_choice_leaves_the_law_unchanged(rule: str, ends_early: bool) -> None:  # noqa: FBT001 -- a parameter
    """Over two rounds the emitted tokens follow the target's law to 1e-12, while both kinds of draft are taken."""
    total = {"sampled": 0.0, "other": 0.0}
    for seed, trust in enumerate(TRUSTS):
        target, draft = Model(2 * seed, 2), Model(2 * seed + 1, 2)
        make = functools.partial(combined, trust=trust)
        law, shares = law_of_rounds(make, rule, target, Drawn(draft, ends_early), length=2, rounds=2)
        assert distance(law, target, 5) < EXACT
        total = {kind: total[kind] + share for kind, share in shares.items()}
    assert min(total.values()) > 0.5  # of 4


@pytest.mark.parametrize("mistake", [LooksAhead, CountsTokens])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_choosing_by_what_was_drawn_changes_the_law(rule: str, mistake: type[CombinedDrafter]) -> None:
    """The same enumeration finds naive choices: whether a sampled draft is taken must not depend on its tokens."""
    shifts = []
    for seed, trust in itertools.product(range(8), (0.6, 0.7, 0.8, 0.9)):
        target, draft = Model(2 * seed, 2), Model(2 * seed + 1, 2)

        def make(drawn: Drawn, trust: float = trust) -> Drafter:
            return mistake(looked_up(trust), drawn, costs=(0.0, 0.0))

        sampled = Drawn(draft, ends_early=mistake is CountsTokens)
        law, _ = law_of_rounds(make, rule, target, sampled, length=2, rounds=1)
        shifts.append(distance(law, target, 2))
    assert max(shifts) > 0.03


def checked() -> CombinedDrafter:
    """Lookup and a table that draws, on the checker's target."""
    return CombinedDrafter(NGramDrafter(), Bigram())


def test_the_checker_finds_nothing() -> None:
    """Contract, parity, sampled laws and state hold for lookup with a sampling table; odds of a false alarm < 1e-6."""
    report = check_drafter(checked, samples=256, max_tokens=12, learns=True)
    assert report.ok, str(report)
    assert report.gives_probs


PROMPTS = ([1, 2, 3], [7, 7, 7, 7, 7, 7], [50, 4, 9, 4, 9, 4], [33])


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_ragged_batches_repeat_plain_decoding(temperature: float) -> None:
    """Greedy and seeded requests give the plain tokens in a batch that joins late, whatever is drafted and admitted."""
    params = [
        SamplingParams(temperature=temperature, seed=5 + index, max_tokens=9 + 5 * index)
        for index in range(len(PROMPTS))
    ]
    requests = list(zip(PROMPTS, params, strict=True))
    plain = [run.completion.token_ids for run in drive(make_engine(tiny_model()), requests)]
    taken: dict[str, int] = {}
    for policy in (None, ScriptedPolicy([5, 0, 1, 3, 2], [5, 1, 2, 0, 3])):
        drafter = CombinedDrafter(NGramDrafter(), ModelDrafter(near_model(), target_vocab_size=VOCAB, name="model"))
        engine = make_engine(tiny_model(), drafter, num_draft=5, policy=policy, config=EngineConfig(max_batch_size=3))
        runs = drive(engine, requests)
        assert [run.completion.token_ids for run in runs] == plain
        assert {run.completion.mode for run in runs} == {Mode.EXACT}
        assert not drafter._rows
        taken = dict(drafter.num_chosen)
    assert set(taken) == {"ngram", "model"}


def test_a_request_without_a_seed_uses_the_probabilities() -> None:
    """With a sampling drafter inside, requests without a seed are verified by the block rule."""
    drafter = CombinedDrafter(NGramDrafter(), ModelDrafter(near_model(), target_vocab_size=VOCAB))
    engine = make_engine(tiny_model(), drafter, num_draft=4)
    (run,) = drive(engine, [([1, 2, 3], SamplingParams(temperature=0.9, max_tokens=12))])
    assert run.completion.mode is Mode.DISTRIBUTION
