"""Drafts that branch, on targets: one forward over alternatives equals plain forwards, and output never changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import BackendContractError
from specflow.policies import PID, Adaptive, Fixed
from specflow.testing import ScriptedPolicy
from specflow.trees import HISTORY, continuations, depths
from specflow.types import Mode
from specflow_llm import LLM, DrafterBase, DraftRequest, Proposal, SamplingParams, Speculation
from specflow_llm.architecture import inspect_model
from specflow_llm.drafters import CombinedDrafter, NGramDrafter, SalvageDrafter
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.drafters.growing import ALTERNATIVES, GrowingTree, merged
from specflow_llm.dspark import TargetAdapter
from specflow_llm.kv_cache import SlotCache
from specflow_llm.recurrent import RecurrentTarget
from specflow_llm.selfcheck import build_target, tree_difference
from specflow_llm.target import SlotTarget
from tests.specflow_llm.block_drafters import make_drafter, random_ids, request, target
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.drafters import Truths
from tests.specflow_llm.models import CONFIGS, VOCAB, tiny_model

CPU = torch.device("cpu")
PROMPTS = [random_ids(length, seed=length) for length in (9, 4, 17)]
BUDGETS = [24, 17, 20]
SLOT_FAMILIES = [*CONFIGS, "gptj", "llama4-chunked", "gpt-oss-sinks", "deepseek-v3-latent", "cohere2"]
TREE = [HISTORY, HISTORY, 0, 1, 3, 1]
"""Two branches; the second forks again and is the longer one."""


class TreeDrafter(DrafterBase):
    """Random trees in which the true continuation is hidden, or most of it.

    Args:
        truths: whole sequences.
        hit_rate: how often the next true token is among the alternatives.
        seed: of everything.
    """

    branches = True

    def __init__(self, truths: Sequence[Sequence[int]], *, hit_rate: float = 0.8, seed: int = 0) -> None:
        self._truths = Truths(truths)
        self._hit_rate = hit_rate
        self._random = torch.Generator().manual_seed(seed)
        self.allowed: set[bool] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """A tree for each request that may have one, a chain of the truth for the others."""
        found = []
        for item in requests:
            self.allowed.add(item.may_branch)
            true = self._truths.continuation(item.token_ids, item.limit)
            found.append(self._tree(true, item.limit) if item.may_branch else Proposal(true))
        return found

    def _tree(self, true: Sequence[int], limit: int) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        on_path = HISTORY
        reached = 0
        while len(tokens) < limit:
            pick = int(torch.randint(-1, len(tokens), (), generator=self._random)) if tokens else HISTORY
            hits = float(torch.rand((), generator=self._random)) < self._hit_rate
            if hits and reached < len(true):
                pick, token = on_path, true[reached]
                on_path, reached = len(tokens), reached + 1
            else:
                token = int(torch.randint(VOCAB, (), generator=self._random))
                siblings = {tokens[index] for index in range(len(tokens)) if parents[index] == pick}
                if token in siblings or (pick == on_path and reached < len(true) and token == true[reached]):
                    continue
            tokens.append(token)
            parents.append(pick)
        survival: list[float] = []
        for parent in parents:
            before = survival[parent] if parent != HISTORY else 0.9
            survival.append(min(0.98 * before, survival[-1] if survival else 1.0))
        return Proposal(tokens, survival=survival, parents=parents)


def truths(params: dict[str, Any] | None = None, name: str = "llama") -> tuple[list[list[int]], list[list[int]]]:
    """What plain decoding gives: (outputs, whole sequences)."""
    outputs = decode(tiny_model(name), PROMPTS, BUDGETS, params).outputs
    return outputs, [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]


# --- Targets ----------------------------------------------------------------------------------------------------------


def plain(name: str, tokens: Sequence[int]) -> torch.Tensor:
    """[n, V] logits of one whole forward."""
    with torch.inference_mode():
        logits: torch.Tensor = tiny_model(name)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float()


def path_tokens(tokens: Sequence[int], parents: Sequence[int], item: int) -> list[int]:
    """The tokens up to an item."""
    found: list[int] = []
    while item != HISTORY:
        found.append(tokens[item])
        item = parents[item]
    return found[::-1]


@pytest.mark.parametrize("name", SLOT_FAMILIES)
def test_a_tree_s_logits_are_those_of_its_paths(name: str) -> None:
    """Ragged rows, of which one is a chain; then the longest path is kept, and what follows is right, too."""
    model = tiny_model(name)
    run = SlotTarget(model, inspect_model(model))
    run.open(PROMPTS)
    drafts = [random_ids(6, seed=30), random_ids(3, seed=31), random_ids(5, seed=32)]
    shapes: list[list[int] | None] = [TREE, None, TREE[:5]]
    blocks = [[prompt[-1], *draft] for prompt, draft in zip(PROMPTS, drafts, strict=True)]
    logits = run.forward_trees(blocks, shapes).logits.float()
    chain = list(range(HISTORY, 2))
    for row, (prompt, draft) in enumerate(zip(PROMPTS, drafts, strict=True)):
        parents = shapes[row] or chain
        for item in range(HISTORY, len(draft)):
            expected = plain(name, [*prompt, *path_tokens(draft, parents, item)])[-1]
            torch.testing.assert_close(logits[row, item + 1], expected, rtol=1e-3, atol=2e-3)
    for row in (0, 2):
        run.arrange(row, [0, 2, 4, 5])  # the anchor, then items 1, 3 and 4
        run.keep(row, 4)
    run.keep(1, 2)
    after = random_ids(2, seed=33)
    logits = run.forward([after, after, after]).logits.float()
    for row, (prompt, draft) in enumerate(zip(PROMPTS, drafts, strict=True)):
        kept = [draft[0]] if row == 1 else [draft[1], draft[3], draft[4]]
        expected = plain(name, [*prompt, *kept, *after])[-2:]
        torch.testing.assert_close(logits[row, :2], expected, rtol=1e-3, atol=2e-3)


class SlotPositions(SlotTarget):
    """A wrong target: positions count slots of the block, not depths."""

    def _run(self, first_row: int, blocks: Any, parents: Any = (), *, last_logits_only: bool) -> Any:
        del parents
        return super()._run(first_row, blocks, last_logits_only=last_logits_only)


class KeepsInOrder(SlotTarget):
    """A wrong target: what was kept stays where it was written."""

    def arrange(self, slot: int, offsets: Sequence[int]) -> None:
        """Nothing moves."""


class SeesAll(SlotTarget):
    """A wrong target: alternatives see each other."""

    def _masks(self, positions: Any, used: int, branching: Any) -> Any:
        if branching is not None:
            branching.seen[:] = True
        return super()._masks(positions, used, branching)


@pytest.mark.parametrize("wrong", [SlotPositions, KeepsInOrder, SeesAll])
def test_the_self_check_catches_wrong_targets(wrong: type[SlotTarget]) -> None:
    """Each known fault moves the logits by far more than rounding does."""
    model = tiny_model("llama")
    architecture = inspect_model(model)
    assert tree_difference(model, architecture, SlotTarget(model, architecture)) < 1e-4
    assert tree_difference(model, architecture, wrong(model, architecture)) > 0.05


def test_a_model_that_fails_on_trees_runs_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused: chains are exact."""
    model = tiny_model("llama")
    made = build_target(model, inspect_model(model), prefill_chunk=64, trees=True)
    assert isinstance(made, SlotTarget)
    assert made.runs_trees

    right = SlotTarget._masks

    def masks(self: SlotTarget, positions: Any, used: int, branching: Any) -> Any:
        if branching is not None:
            branching.seen[:] = True
        return right(self, positions, used, branching)

    monkeypatch.setattr(SlotTarget, "_masks", masks)
    told: list[str] = []
    made = build_target(model, inspect_model(model), prefill_chunk=64, trees=True, notify=told.append)
    assert isinstance(made, SlotTarget)
    assert not made.runs_trees
    assert "will not branch" in told[0]


def test_recurrent_targets_run_no_trees() -> None:
    """Their state has one past."""
    model = tiny_model("mamba2")
    made = build_target(model, inspect_model(model), prefill_chunk=64, trees=True)
    assert isinstance(made, RecurrentTarget)
    drafter = TreeDrafter([[1, 2, 3]])
    decode(model, [[1, 2, 3]], [4], drafter=drafter, policy=Fixed(2), target=made)
    assert drafter.allowed == {False}


@given(
    st.integers(1, 7).flatmap(lambda width: st.tuples(st.just(width), st.sets(st.integers(1, width), max_size=width)))
)
@settings(max_examples=60)
def test_a_kept_path_moves_together(case: tuple[int, set[int]]) -> None:
    """Any rising places of a block, behind what was there, in every layer; other rows stay."""
    width, places = case
    offsets = [0, *sorted(places)]
    cache = SlotCache(2, rows=2, capacity=4, max_capacity=64)
    for count, keeps in ((3, [0, 1, 2]), (width + 1, offsets)):
        plan = cache.begin(0, [count, count], CPU)
        base = torch.arange(count).float() + 100.0 * cache.lengths[0]
        for layer in cache.layers:
            layer.update(
                base[None, None, :, None].expand(2, 1, count, 2), base[None, None, :, None].expand(2, 1, count, 3)
            )
        assert plan.width == count
        cache.arrange(0, keeps, CPU)
        cache.advance(0, len(keeps))
        cache.advance(1, count)
    for layer in cache.layers:
        assert layer.keys[0, 0, 3 : 3 + len(offsets), 0].tolist() == [300.0 + offset for offset in offsets]
        assert layer.values[0, 0, :3, 2].tolist() == [0.0, 1.0, 2.0]
        assert layer.keys[1, 0, 3 : 4 + width, 0].tolist() == [300.0 + offset for offset in range(width + 1)]
    assert cache.lengths == [3 + len(offsets), 4 + width]


# --- The engine -------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "truncated": {"temperature": 0.9, "seed": 11, "top_k": 12, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "greedy penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    "bad phrases": {"bad_words": [[3, 4], [9]], "temperature": 1.1, "seed": 2},
    "stops": {"stop_token_ids": [7, 21, 40]},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["fixed", "adaptive", "scripted"])
def test_output_equals_plain_decoding(kind: str, policy: str) -> None:
    """Ids, reasons and log-probabilities, in a ragged batch with requests that join later."""
    params = KINDS[kind]
    expected = decode(tiny_model("llama"), PROMPTS, BUDGETS, params)
    whole = [prompt + output for prompt, output in zip(PROMPTS, expected.outputs, strict=True)]
    policies: dict[str, Any] = {
        "fixed": Fixed(9), "adaptive": Adaptive(9, padded=True), "scripted": ScriptedPolicy([9, 3, 0, 7], [6, 3, 0, 1])
    }  # fmt: skip
    drafter = TreeDrafter(whole)
    run = decode(
        tiny_model("llama"), PROMPTS, BUDGETS, params, drafter=drafter, policy=policies[policy], max_batch_size=2
    )
    assert run.outputs == expected.outputs
    assert drafter.allowed == {True}
    for ours, theirs in zip(run.completions, expected.completions, strict=True):
        assert ours.mode is Mode.EXACT
        assert ours.finish_reason == theirs.finish_reason
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert run.accepted > 8
    assert any(
        tree is not None and tree.path and admitted > 1
        for report in run.reports
        for tree, admitted in zip(report.trees, report.admitted, strict=False)
    )
    if policy == "fixed":
        assert any(
            tree is not None and tree.path != tuple(range(len(tree.path)))
            for report in run.reports
            for tree in report.trees
        )


@pytest.mark.parametrize("name", ["gemma3-alternating", "mistral-sliding", "gpt2", "qwen3-moe"])
def test_other_families_keep_their_output(name: str) -> None:
    """Sliding windows shorter than the text, learned positions, experts."""
    outputs, whole = truths(name=name)
    run = decode(tiny_model(name), PROMPTS, BUDGETS, drafter=TreeDrafter(whole, seed=3), policy=Fixed(8))
    assert run.outputs == outputs
    assert run.accepted > 8


def test_a_logits_processor_sees_every_emitted_token_once() -> None:
    """And none behind the stop, in order, though alternatives are verified together."""

    class Counting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.seen.append(ids.shape[1])
            scores[0, (3 * len(self.seen)) % VOCAB] -= 5.0
            return scores

    plain_one, branching_one = Counting(), Counting()
    (expected,) = decode(tiny_model("llama"), PROMPTS[:1], [20], {"logits_processors": [plain_one]}).outputs
    drafter = TreeDrafter([PROMPTS[0] + expected])
    run = decode(
        tiny_model("llama"), PROMPTS[:1], [20], {"logits_processors": [branching_one]}, drafter=drafter, policy=Fixed(8)
    )
    assert run.outputs == [expected]
    assert branching_one.seen == plain_one.seen
    assert run.accepted > 4


def test_only_matching_requests_get_trees() -> None:
    """Under a ratio rule a tree would change the law, so it is not allowed, and refused where it comes all the same."""
    _, whole = truths()
    drafter = TreeDrafter(whole)
    decode(
        tiny_model("llama"),
        PROMPTS,
        BUDGETS,
        {"temperature": 0.9},
        drafter=drafter,
        policy=Fixed(4),
        verification="one_hot",
    )
    assert drafter.allowed == {False}

    class Stubborn(TreeDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            return [Proposal([1, 2], parents=[-1, -1]) for _ in requests]

    with pytest.raises(BackendContractError, match="allows none"):
        decode(
            tiny_model("llama"), PROMPTS, BUDGETS, {"temperature": 0.9}, drafter=Stubborn(whole), policy=Fixed(4),
            verification="one_hot",
        )  # fmt: skip


def test_positions_of_metrics_are_depths() -> None:
    """Accepted at position k means the path went so deep."""
    _, whole = truths()
    run = decode(tiny_model("llama"), PROMPTS, BUDGETS, drafter=TreeDrafter(whole, hit_rate=1.0), policy=Fixed(3))
    assert all(rate == 1.0 for done in run.completions for rate in done.metrics.acceptance_by_position)
    assert all(len(done.metrics.acceptance_by_position) == 3 for done in run.completions)


# --- Drafters ---------------------------------------------------------------------------------------------------------


def dspark(**changes: Any) -> tuple[DSparkDrafter, torch.Tensor, list[int]]:
    """A tiny block drafter, features of a text, and the text."""
    adapter = TargetAdapter(target())
    drafter = make_drafter(adapter, pack=False, **changes)
    text = random_ids(20, seed=1)
    features = torch.randn(19, drafter.config.feature_size, generator=torch.Generator().manual_seed(2))
    return drafter, features, text


def proposed(
    drafter: DSparkDrafter, features: torch.Tensor, text: Sequence[int], limit: int, **settings: Any
) -> Proposal:
    """One proposal; the request may branch unless told otherwise."""
    branch = settings.pop("may_branch", True)
    asked = request(0, text, limit, features, **settings)
    asked = DraftRequest(asked.row, asked.token_ids, limit, asked.sampler, asked.features, branch)
    (found,) = drafter.propose([asked])
    return found


RULES: list[dict[str, Any]] = [
    {},
    {"params": SamplingParams(temperature=0.9, seed=3), "rule": "coupled"},
    {"params": SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3), "rule": "coupled"},
]


@pytest.mark.parametrize("settings_of_rule", RULES)
@pytest.mark.parametrize("markov", ["vanilla", "rnn", "none"])
@pytest.mark.parametrize("draft_vocab", [None, 24])
def test_a_drafted_tree_is_well_formed(settings_of_rule: dict[str, Any], markov: str, draft_vocab: int | None) -> None:
    """Best first, parents before children, siblings differ, no deeper than a block, and as large as allowed."""
    drafter, features, text = dspark(markov=markov, draft_vocab_size=draft_vocab)
    found = proposed(drafter, features, text, 11, **settings_of_rule)
    assert found.parents is not None
    assert found.survival is not None
    assert found.probs is None
    assert len(found.token_ids) == len(found.parents) == len(found.survival) == 11
    assert list(found.survival) == sorted(found.survival, reverse=True)
    assert all(HISTORY <= parent < item for item, parent in enumerate(found.parents))
    assert max(depths(found.parents)) < drafter.config.block_size
    for options in continuations(found.parents).values():
        assert len({found.token_ids[item] for item in options}) == len(options)


@pytest.mark.parametrize("settings_of_rule", RULES)
@pytest.mark.parametrize("markov", ["vanilla", "rnn", "none"])
def test_the_likeliest_path_is_the_chain(settings_of_rule: dict[str, Any], markov: str) -> None:
    """Following the first alternative each time gives what the same drafter drafts without branches."""
    drafter, features, text = dspark(markov=markov)
    tree = proposed(drafter, features, text, 200, **settings_of_rule)
    chain = proposed(drafter, features, text, 4, may_branch=False, **settings_of_rule)
    following = continuations(tree.parents or ())
    path, node = [], HISTORY
    while node in following:
        node = following[node][0]
        path.append(tree.token_ids[node])
    assert path == list(chain.token_ids)


def test_a_tree_holds_the_best_of_all_paths() -> None:
    """Compared with every path of up to four tokens, worked out one by one from the weights."""
    drafter, features, text = dspark(draft_vocab_size=ALTERNATIVES)
    model, limit = drafter._model, 12
    tree = proposed(drafter, features, text, limit)
    asked = request(1, text, limit, features)
    drafter._absorb([asked])
    with torch.inference_mode():
        hidden = drafter._backbone([asked])[0]
        base = drafter._head(hidden[None])[0]
        head, ids = model.markov_head, drafter._ids
        assert head is not None
        assert ids is not None
        scored: dict[tuple[int, ...], float] = {}
        for depth in range(1, 4):
            for columns in itertools.product(range(ALTERNATIVES), repeat=depth):
                chance, before = 1.0, text[-1]
                for slot, column in enumerate(columns):
                    embedded = model.previous(torch.tensor([before]))
                    assert embedded is not None
                    serial, _ = head.step(embedded, hidden[slot : slot + 1], None)
                    law = (base[slot] + head.output(serial)[0]).softmax(-1)
                    chance *= float(law[column])
                    before = int(ids[column])
                scored[tuple(ids[list(columns)].tolist())] = chance
    paths = [tuple(path_tokens(tree.token_ids, tree.parents or (), item)) for item in range(limit)]
    shallow = [(path, claim) for path, claim in zip(paths, tree.survival or (), strict=True) if len(path) < 4]
    assert len(shallow) >= 6
    for path, claim in shallow:
        assert claim == pytest.approx(scored[path], rel=1e-3)
    # Every path that is better than the worst one kept is kept.
    worst = min(tree.survival or ())
    assert {path for path, chance in scored.items() if chance > worst * (1 + 1e-3)} == {
        path for path, claim in shallow if claim > worst * (1 + 1e-3)
    }


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 0.8}])
@pytest.mark.parametrize("both", [False, True])
def test_block_drafters_branch_in_the_engine(params: dict[str, Any], *, both: bool) -> None:
    """Alone and beside n-gram, output is plain decoding's; unseeded requests repeat with their reported seed."""
    model = target()
    block = make_drafter(TargetAdapter(model), pack=False)
    drafter = CombinedDrafter(NGramDrafter(), block, costs=(0.0, 0.0)) if both else block
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], PROMPTS[2]]
    run = decode(model, prompts, [30, 30], params, drafter=drafter, policy=Fixed(9))
    assert any(report.trees for report in run.reports)
    for prompt, done in zip(prompts, run.completions, strict=True):
        assert done.mode is Mode.EXACT
        settings_of_run = {**params, "seed": done.seed} if params else params
        assert decode(model, [prompt], [30], settings_of_run).outputs == [list(done.token_ids)]


def test_the_setting_switches_trees_off() -> None:
    """``Speculation(tree=False)``: chains, and block verification for unseeded requests."""
    model = target()
    block = make_drafter(TargetAdapter(model), pack=False)
    for tree, mode in ((True, Mode.EXACT), (False, Mode.DISTRIBUTION)):
        llm = LLM(model, tokenizer=None, speculation=Speculation(drafter=block, tree=tree, policy="fixed"))
        assert llm.engine.backend.branches is tree
        (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.9))
        assert done.mode is mode
    assert not LLM(model, tokenizer=None).engine.backend.branches, "n-gram does not branch"


def test_salvage_stays_with_chains() -> None:
    """What is left of a tree has no order to be offered again in, also where it is one source of several."""
    model = target()
    block = make_drafter(TargetAdapter(model), pack=False)
    run = decode(model, PROMPTS, BUDGETS, drafter=SalvageDrafter(block), policy=Fixed(4))
    assert not any(report.trees for report in run.reports)

    allowed: set[bool] = set()

    class Watched(SalvageDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
            allowed.update(item.may_branch for item in requests)
            return super().propose(requests)

    watched = Watched(NGramDrafter())
    both = CombinedDrafter(watched, make_drafter(TargetAdapter(model), pack=False), costs=(0.0, 0.0))
    run = decode(model, PROMPTS, BUDGETS, drafter=both, policy=Fixed(4))
    assert any(report.trees for report in run.reports)
    assert allowed == {False}


def test_a_combined_draft_of_one_source_is_sorted_too() -> None:
    """Corrections change the order of a tree's items; policies and records rely on it."""
    model = target()
    both = CombinedDrafter(NGramDrafter(), make_drafter(TargetAdapter(model), pack=False), costs=(0.0, 0.0))
    run = decode(model, PROMPTS, BUDGETS, drafter=both, policy=Fixed(9))
    for report in run.reports:
        for tree, drafted in zip(report.trees, report.drafted, strict=False):
            assert tree is not None or not drafted
        for survival in report.survival:
            assert list(survival or ()) == sorted(survival or (), reverse=True)


def test_pid_gets_chains() -> None:
    """No single alternative reaches its threshold."""
    model = target()
    block = make_drafter(TargetAdapter(model), pack=False)
    for policy, branches in (("pid", False), (PID(4), False), ("adaptive", True)):
        llm = LLM(model, tokenizer=None, speculation=Speculation(drafter=block, policy=policy))
        assert llm.engine.backend.branches is branches


def test_merging_keeps_the_larger_estimate_and_shares_what_is_left() -> None:
    """Drafts that agree are one; alternatives never claim more than there is."""
    chain = Proposal([5, 6, 7], survival=(0.8, 0.6, 0.3))
    tree = Proposal([5, 9, 6, 8], survival=(0.5, 0.4, 0.3, 0.2), parents=[-1, -1, 0, 1])
    found = merged([chain, tree], 10)
    parents, survival = found.parents or [], found.survival or ()
    by_path = {
        tuple(path_tokens(found.token_ids, parents, item)): survival[item] for item in range(len(found.token_ids))
    }
    assert by_path == pytest.approx({(5,): 0.8, (5, 6): 0.6, (5, 6, 7): 0.3, (9,): 0.2, (9, 8): 0.1})
    assert list(survival) == sorted(survival, reverse=True)
    assert len(merged([chain, tree], 3).token_ids) == 3


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0)), max_size=6), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_a_merged_draft_is_well_formed(chains: list[list[tuple[int, float]]], limit: int) -> None:
    """Of any chains: best first, parents first, siblings differ, at most what they continue."""
    proposals = []
    for chain in chains:
        alive, survival = 1.0, []
        for _, rate in chain:
            alive *= rate
            survival.append(alive)
        proposals.append(Proposal([token for token, _ in chain], survival=survival))
    found = merged(proposals, limit)
    parents, survival = list(found.parents or ()), list(found.survival or ())
    assert survival == sorted(survival, reverse=True)
    for node, options in continuations(parents).items():
        assert all(option > node for option in options)
        assert len({found.token_ids[option] for option in options}) == len(options)
        before = 1.0 if node == HISTORY else survival[node]
        assert sum(survival[option] for option in options) <= before + 1e-5


def test_a_growing_tree_drops_what_cannot_be_among_the_best() -> None:
    """Only tips that may still have a continuation in the finished tree are followed."""
    tree = GrowingTree(2)
    tree.extend(HISTORY, 0, [1, 2, 3], [0.5, 0.3, 0.1])
    assert [tip.token for tip in tree.tips(0, 0)] == [1, 2]
    tree.extend(0, 1, [4], [0.9])
    assert [tip.token for tip in tree.tips(0, 1)] == [4]
    found = tree.proposal()
    assert (list(found.token_ids), list(found.parents or ())) == ([1, 4], [-1, 0])


class Misshapen(DrafterBase):
    """Answers with one given tree."""

    branches = True

    def __init__(self, answer: Proposal) -> None:
        self._answer = answer

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The tree, whatever was asked for."""
        return [self._answer if item.limit >= 3 else Proposal(()) for item in requests]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Proposal([1, 2, 3], parents=[-1, 2, 0]), "item 1 continues item 2"),
        (Proposal([1, 2, 3], parents=[-1, -2, 0]), "item 1 continues item -2"),
        (Proposal([1, 2, 3], parents=[-1, 0]), "2 parents for 3"),
        (Proposal([1, 2, 3], parents=[-1, -1, 0], survival=(0.2, 0.5, 0.1)), "estimates rise"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_trees_that_are_none_are_refused_by_name(answer: Proposal, message: str, *, both: bool) -> None:
    """Alone and as one of several sources."""
    drafter = CombinedDrafter(NGramDrafter(), Misshapen(answer), costs=(0.0, 0.0)) if both else Misshapen(answer)
    with pytest.raises(BackendContractError, match=message):
        decode(tiny_model("llama"), [[1, 2, 3]], [12], drafter=drafter, policy=Fixed(4))
