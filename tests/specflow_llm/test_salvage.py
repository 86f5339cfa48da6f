"""Leftovers of a draft: where they come from, that offering them again is exact, and keeping them unseen is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from specflow.errors import InvalidSettingError
from specflow.testing import ScriptedPolicy
from specflow.types import Mode
from specflow_llm import Drafter, DrafterBase, DraftRequest, EngineConfig, Proposal, SamplingParams
from specflow_llm.checker import check_drafter
from specflow_llm.drafters import ModelDrafter, NGramDrafter, RowId
from specflow_llm.drafters.salvage import Alignment, Leftovers, SalvageDrafter, leftovers
from tests.specflow_llm.drafters import ScriptedDrafter
from tests.specflow_llm.harness import drive, make_engine, scripted
from tests.specflow_llm.models import VOCAB, near_model, tiny_model
from tests.specflow_llm.test_checker import Bigram
from tests.specflow_llm.test_combined_drafter import Drawn, Told, law_of_rounds, proposed, request, says
from tests.specflow_llm.test_verification_enumeration import EXACT, ONE_HOT, Law, Model, distance, outcomes

UNUSED, REPLACED, INSERTED, MOVED = Alignment


# --- Alignments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([], {UNUSED: [1, 2, 3, 4, 5]}),
        ([1, 2], {UNUSED: [3, 4, 5]}),
        ([1, 2, 3, 4, 5], {}),
        ([1, 2, 3, 4, 5, 6], {}),
        ([1, 2, 9], {REPLACED: [4, 5], INSERTED: [3, 4, 5]}),
        ([9], {REPLACED: [2, 3, 4, 5], INSERTED: [1, 2, 3, 4, 5]}),
        ([1, 2, 4], {REPLACED: [4, 5], INSERTED: [3, 4, 5], MOVED: [5]}),
        ([1, 2, 5], {REPLACED: [4, 5], INSERTED: [3, 4, 5]}),
        ([1, 2, 9, 8], {REPLACED: [5], INSERTED: [3, 4, 5]}),
        ([1, 2, 9, 3], {REPLACED: [5], INSERTED: [3, 4, 5], MOVED: [4, 5]}),
        ([1, 2, 9, 9, 9, 9], {INSERTED: [3, 4, 5]}),
    ],
    ids=str,
)
def test_what_is_left_of_a_draft(committed: list[int], expected: dict[Alignment, list[int]]) -> None:
    """Of 1 2 3 4 5, every alignment with what was committed instead gives the tokens that may follow."""
    assert leftovers([1, 2, 3, 4, 5], committed) == expected


def test_a_short_draft_leaves_nothing_after_its_end() -> None:
    """A draft that was accepted whole, with a bonus token behind it, has nothing left; nor has an empty one."""
    assert leftovers([1, 2], [1, 2, 3]) == {}
    assert leftovers([], [1]) == {}


class Once(DrafterBase):
    """Proposes one draft at the beginning and nothing later."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.spent: set[RowId] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The draft, or nothing."""
        proposals = [
            Proposal(() if item.row in self.spent else self.token_ids[: item.limit], survival=None) for item in requests
        ]
        self.spent.update(item.row for item in requests)
        return proposals


def test_the_fourth_token_is_offered_after_the_third_was_replaced() -> None:
    """T1 T2 accepted, T3 replaced: T4 and T5 are proposed after the correction, and what is left of them after that."""
    drafter = SalvageDrafter(Once(1, 2, 3, 4, 5, 6))
    assert proposed(drafter, [7], 6) == [1, 2, 3, 4, 5, 6]
    assert proposed(drafter, [7, 1, 2, 9], 6) == [4, 5, 6]
    assert proposed(drafter, [7, 1, 2, 9, 4], 6) == [5, 6]  # a policy admitted one of them, or nothing
    assert proposed(drafter, [7, 1, 2, 9, 4, 5, 6, 3], 6) == []
    assert drafter.num_chosen == {"Once": 1, "salvage": 2}


def test_a_new_draft_wins_where_it_promises_more() -> None:
    """A leftover of a rejected draft gives way to a confident new draft."""
    drafter = SalvageDrafter(Told(says(3, 4, 5, 6, trust=0.99)))
    assert proposed(drafter, [7]) == [3, 4, 5, 6]
    assert proposed(drafter, [7, 9]) == [3, 4, 5, 6]


def test_alignments_are_learned() -> None:
    """Where corrections were inserted rather than put in place, that alignment comes first before long."""
    left = Leftovers()
    ids, offered = [0], []
    for turn in range(30):
        item = request(ids, 4)
        left.propose([item])
        left.remember([item], [Proposal((1, 2, 3, 4))])
        ids = [*ids, 9]  # inserted before the draft, which comes true next
        offered.append(list(left.propose([request(ids, 4)])[0].token_ids))
        ids = [*ids, 1, 2, 3, 4, 10 + turn % 2]
    assert offered[0] == [2, 3, 4]
    assert offered[-1] == [1, 2, 3, 4]


def test_estimates_become_true() -> None:
    """The estimates of an alignment that comes true four times in five approach 0.8; 200 rounds, no chance."""
    left = Leftovers()
    ids: list[int] = [0]
    for turn in range(200):
        item = request(ids, 2)
        left.propose([item])
        left.remember([item], [Proposal((1, 2, 3))])
        ids = [*ids, 9]
        survival = left.propose([request(ids, 2)])[0].survival
        ids = [*ids, *((2, 3) if turn % 5 else (8, 8)), 7]
    assert survival is not None
    assert survival[0] == pytest.approx(0.8, abs=0.05)
    assert survival[1] == pytest.approx(0.8, abs=0.06)


# --- Contract ---------------------------------------------------------------------------------------------------------


def test_limits_are_respected() -> None:
    """A leftover is cut to the limit, and a limit of 0 gets nothing and loses nothing."""
    drafter = SalvageDrafter(Once(1, 2, 3, 4, 5, 6))
    assert proposed(drafter, [7], 6) == [1, 2, 3, 4, 5, 6]
    assert proposed(drafter, [7, 9], 0) == []
    assert proposed(drafter, [7, 9], 2) == [2, 3]


def test_a_drafter_that_is_silent_for_some_rounds_keeps_its_leftover() -> None:
    """Rounds without any draft move the leftover on by what they committed."""
    drafter = SalvageDrafter(Once(1, 2, 3, 4, 5, 6))
    proposed(drafter, [7], 6)
    assert proposed(drafter, [7, 9], 0) == proposed(drafter, [7, 9, 2], 0) == []
    assert proposed(drafter, [7, 9, 2, 3], 6) == [4, 5, 6]


def test_a_failed_round_leaves_no_leftover() -> None:
    """A round that is drafted again because it failed does not get its own first draft back as a leftover."""
    drafter = SalvageDrafter(Once(1, 2, 3))
    assert proposed(drafter, [7]) == [1, 2, 3]
    assert proposed(drafter, [7]) == []


def test_rows_are_independent() -> None:
    """Leftovers of one request are never offered to another, in any order and company."""
    drafter = SalvageDrafter(Once(1, 2, 3, 4))
    drafter.propose([request([7], row=row) for row in range(3)])
    proposals = drafter.propose([request([7, 9], row=2), request([7, 1], row=0), request([7], row=5)])
    assert [list(proposal.token_ids) for proposal in proposals] == [[2, 3, 4], [2, 3, 4], [1, 2, 3, 4]]


def test_release_forgets() -> None:
    """A released request leaves nothing behind, and its number starts anew."""
    drafter = SalvageDrafter(Once(1, 2, 3, 4))
    empty = dict(drafter.state_bytes())
    for row in range(4):
        proposed(drafter, [7], row=row)
    assert drafter.state_bytes()["salvaged_drafts"] > empty["salvaged_drafts"]
    for row in range(4):
        drafter.release(RowId(row))
    drafter.release(RowId(99))
    assert {**drafter.state_bytes(), "salvage_hit_rates": empty["salvage_hit_rates"]} == empty
    assert proposed(drafter, [7, 9], row=0) == []


def test_a_drafter_that_raises_keeps_the_leftover() -> None:
    """An error passes through, and the next call, after the round was discarded, still has the leftover."""
    inner = Told(lambda item: says(1, 2, 3, 4)(item) if len(item.token_ids) == 1 else Proposal(()))
    drafter = SalvageDrafter(inner)
    proposed(drafter, [7])
    inner.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        proposed(drafter, [7, 9])
    inner.error = None
    assert proposed(drafter, [7, 9]) == [2, 3, 4]


def test_a_leftover_can_spare_a_draft() -> None:
    """Where asking costs something, the drafter is not asked while an unused remainder promises enough."""
    inner = Told(lambda item: Proposal(range(len(item.token_ids), len(item.token_ids) + item.limit)))
    drafter = SalvageDrafter(inner, cost=1.0)
    ids = [0]
    for _ in range(16):
        ids = [*ids, *proposed(drafter, ids, 8)[:4]]  # a policy admits three of them; the bonus is the fourth
    assert ids == list(range(65))
    assert len(inner.asked) <= 10
    with pytest.raises(InvalidSettingError):
        SalvageDrafter(inner, cost=-1.0)


def test_the_inner_drafter_shows_through() -> None:
    """Name, features and probabilities are announced as the inner drafter does."""
    drafter = SalvageDrafter(Told(says(1), "inner", gives_probs=True, feature_layers=(3, 1)))
    assert drafter.name == "inner+salvage"
    assert list(drafter.feature_layers) == [1, 3]
    assert drafter.gives_probs
    assert not SalvageDrafter(NGramDrafter()).gives_probs


# --- Exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
def test_salvage_leaves_the_law_unchanged(rule: str) -> None:
    """A round of sampled drafts and one of leftovers follow the target's law to 1e-12, every outcome enumerated."""
    salvaged = 0.0
    for seed in range(3):
        target, draft = Model(2 * seed, 2), Model(2 * seed + 1, 2)

        def make(drawn: Drawn) -> Drafter:
            return SalvageDrafter(Hesitant(drawn))

        law, shares = law_of_rounds(make, rule, target, Drawn(draft), length=2, rounds=2)
        assert distance(law, target, 5) < EXACT
        salvaged += shares["other"]
    assert salvaged > 0.1


class Hesitant(DrafterBase):
    """Drafts with probabilities in the first round and is silent afterwards."""

    gives_probs = True

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The draws, at the beginning."""
        return self._drawn.propose(requests) if len(requests[0].token_ids) == 1 else [Proposal(())] * len(requests)


class KeepsLaws(SalvageDrafter):
    """The mistake of offering leftovers with the probabilities they were once drawn from."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__(Hesitant(drawn))
        self.laws = torch.zeros(0, 2)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Leftovers are suffixes of the first draft."""
        (proposal,) = super().propose(requests)
        if proposal.probs is not None:
            self.laws = proposal.probs
        elif proposal.token_ids:
            return [Proposal(proposal.token_ids, self.laws[-len(proposal.token_ids) :], proposal.survival)]
        return [proposal]


def test_old_probabilities_change_the_law() -> None:
    """A leftover is not a new draw from the law it came with, and the enumeration shows it."""
    shifts = []
    for seed in range(4):
        target, draft = Model(2 * seed, 2), Model(2 * seed + 1, 2)
        law, _ = law_of_rounds(KeepsLaws, "token", target, Drawn(draft), length=2, rounds=2)
        shifts.append(distance(law, target, 5))
    assert max(shifts) > 0.01


def test_keeping_the_suffix_unverified_changes_the_law() -> None:
    """The shortcut "T3 is rejected, T4 stays" is found by the same enumeration, for drafts chosen in any way."""
    shifts = []
    for seed in range(4):
        target = Model(seed, 2)
        law: Law = defaultdict(float)
        ids = (0, 1, 0)
        rows = torch.stack([target(ids[:index]) for index in range(len(ids) + 1)])
        for (accepted, last), weight in outcomes(ONE_HOT, rows, torch.zeros(3, 2), ids):
            for token, mass in enumerate(last.tolist()):
                law[*ids[:accepted], token, *ids[accepted + 1 :]] += weight * mass
        shifts.append(distance(law, target, 3))
    assert min(shifts) > 0.04


def checked_lookup() -> Drafter:
    """Lookup with salvage."""
    return SalvageDrafter(NGramDrafter())


def checked_sampling() -> Drafter:
    """Sampled drafts with salvage."""
    return SalvageDrafter(Bigram(), cost=0.5)


@pytest.mark.parametrize("factory", [checked_lookup, checked_sampling])
def test_the_checker_finds_nothing(factory: type[Drafter]) -> None:
    """Contract, parity, sampled laws and state hold with salvage; odds of a false alarm below one in a million."""
    report = check_drafter(factory, samples=192, max_tokens=12, learns=True)
    assert report.ok, str(report)


PROMPTS = ([1, 2, 3], [7, 7, 7, 7, 7, 7], [50, 4, 9, 4, 9, 4], [33])


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_ragged_batches_repeat_plain_decoding(temperature: float) -> None:
    """Greedy and seeded requests give the plain tokens with salvage, whole drafts admitted or cut."""
    params = [
        SamplingParams(temperature=temperature, seed=5 + index, max_tokens=9 + 5 * index)
        for index in range(len(PROMPTS))
    ]
    requests = list(zip(PROMPTS, params, strict=True))
    plain = [run.completion.token_ids for run in drive(make_engine(tiny_model()), requests)]
    for policy in (None, ScriptedPolicy([5, 5, 5, 3, 5], [5, 1, 2, 0, 3])):
        drafter = SalvageDrafter(
            ModelDrafter(near_model(), target_vocab_size=VOCAB, name="model"), cost=0.0 if policy is None else 2.0
        )
        engine = make_engine(tiny_model(), drafter, num_draft=5, policy=policy, config=EngineConfig(max_batch_size=3))
        runs = drive(engine, requests)
        assert [run.completion.token_ids for run in runs] == plain
        assert {run.completion.mode for run in runs} == {Mode.EXACT}
        assert drafter.state_bytes()["salvaged_drafts"] == 0
    assert drafter.num_chosen["salvage"] > 0


def test_salvage_saves_rounds_where_one_token_was_wrong() -> None:
    """A draft of eight with one wrong token, and no other draft: with salvage the next round accepts the rest of it."""
    sequence = list(range(1, 16))
    rounds = []
    for wrap in (lambda inner: inner, SalvageDrafter):
        audited = make_engine(scripted(sequence, 20), wrap(ScriptedDrafter([sequence], 19, [[(8, 2)]])), num_draft=8)
        drive(audited, [(sequence[:3], SamplingParams(temperature=0.0, max_tokens=12))])
        rounds.append(audited.backend.target.num_forwards)
    # Three tokens, then one by one; three, then five salvaged ones and a bonus, then one by one.
    assert rounds == [10, 5]
