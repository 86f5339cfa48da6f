"""What a request's own text adds to a drafter's logits: which tokens, how much, and that it changes no output."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.policies import Fixed, Threshold
from specflow.testing import ScriptedPolicy
from specflow_llm import DraftRequest, Proposal, SamplingParams
from specflow_llm.checker import check_drafter
from specflow_llm.drafters.base import RowId
from specflow_llm.drafters.context_bias import Context, ContextBias
from specflow_llm.drafters.conv import ConvConfig, ConvDrafter
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.drafters.suffix_automaton import SuffixAutomaton
from specflow_llm.dspark import DSparkConfig, TargetAdapter
from specflow_llm.packing import pack_linears
from specflow_llm.sampling import Rule
from specflow_llm.training.features import LiveFeatures
from tests.specflow_llm import test_dspark_drafter as base
from tests.specflow_llm.block_drafters import config, drafter_model, make_drafter, request, sample, target
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.models import VOCAB
from tests.specflow_llm.test_conv_drafter import lively

UNTIMED = settings(deadline=None)
BIASES = (1.0, -2.0, 4.0)
TEXT = [5, 9, 2, 7, 5, 9, 3, 8, 9, 2, 6, 5, 9]
"""After ``5 9`` came 2 and 3, after ``9`` alone 2 (twice) and 3."""
SAMPLED = SamplingParams(temperature=0.8, top_k=20)


def context_of(text: Sequence[int], orders: int) -> Context:
    """A text, read."""
    context = Context(SuffixAutomaton(orders))
    context.automaton.extend_many(text)
    return context


def orders_after(text: Sequence[int], drafted: Sequence[int], most: int) -> dict[int, int]:
    """By looking everywhere: what followed the end of text and draft in the text, and how much of that end."""
    whole, found = [*text, *drafted], {}
    for size in range(1, min(most, len(whole)) + 1):
        end = whole[-size:]
        for start in range(len(text) - size):
            if list(text[start : start + size]) == end:
                found[text[start + size]] = size
    return found


# --- Which tokens -----------------------------------------------------------------------------------------------------


@UNTIMED
@given(
    st.integers(1, 4).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(0, size), min_size=1, max_size=40), st.lists(st.integers(0, size), max_size=6)
        )
    ),
    st.integers(1, 5),
)
def test_what_followed_before_is_found_with_its_order(texts: tuple[list[int], list[int]], most: int) -> None:
    """At the end of the text and along any draft, tokens and orders are those found by searching the whole text."""
    text, drafted = texts
    context = context_of(text, most)
    place = context.start
    for count in range(len(drafted) + 1):
        pairs = list(context.after(place))
        assert dict(pairs) == orders_after(text, drafted[:count], most)
        assert len(dict(pairs)) == len(pairs)
        if count < len(drafted):
            place = context.follow(place, drafted[count])


def test_the_example_by_hand() -> None:
    """After ``5 9`` both followed that pair; after a drafted 2, what followed ``9 2`` counts twice as long as that."""
    context = context_of(TEXT, 3)
    assert dict(context.after(context.start)) == {2: 2, 3: 2}
    assert dict(context.after(context.follow(context.start, 2))) == {7: 3, 6: 2}
    assert dict(context.after(context.follow(context.start, 50))) == {}


def test_of_many_continuations_the_last_seen_are_looked_at() -> None:
    """What followed a common token is bounded: the 64 whose first occurrence is the most recent."""
    context = context_of([token for other in range(1, 101) for token in (0, other)] + [0], 2)
    assert sorted(token for token, _ in context.after(context.start)) == list(range(37, 101))


# --- How much ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, [9, 2, 3, 5]])
def test_biases_reach_the_columns_of_those_tokens(ids: list[int] | None) -> None:
    """Each row gets the biases of its place; other columns stay as they are, and unknown ids have none."""
    table = None if ids is None else torch.tensor(ids)
    bias = ContextBias(BIASES, vocab_size=10, ids=table, extends=ids is not None)
    context = bias.read(request(0, TEXT, 4, torch.zeros(len(TEXT), 1), vocab=10))
    drafted: list[list[int]] = [[], [2], [4]]
    places = [context.start, context.follow(context.start, 2), context.follow(context.start, 4)]
    logits = torch.randn(3, 10 if ids is None else len(ids) + len(context.extra))
    expected = logits.clone()
    names = list(range(10)) if ids is None else [*ids, *context.extra]
    assert ids is None or context.extra == [7, 8, 6]  # in the order in which they came
    for row, before in enumerate(drafted):
        for token, order in orders_after(TEXT, before, 3).items():
            expected[row, names.index(token)] += BIASES[order - 1]
    bias.apply(logits, [bias.continuations(context, place) for place in places])
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-6)
    assert not torch.equal(expected[0], expected[1])


def test_a_request_is_read_once_and_forgotten() -> None:
    """Only new tokens are read, requests do not mix, and nothing stays behind."""
    bias = ContextBias(BIASES, vocab_size=10, ids=None)
    features = torch.zeros(len(TEXT), 1)
    first = bias.read(request(0, TEXT[:6], 4, features))
    assert bias.read(request(0, TEXT, 4, features)) is first
    assert first.automaton.tokens == TEXT
    other = bias.read(request(1, TEXT[:3], 4, features))
    assert other.automaton.tokens == TEXT[:3]
    assert bias.num_bytes > 0
    bias.release(RowId(0))
    bias.release(RowId(1))
    bias.release(RowId(2))
    assert bias.num_bytes == 0


def test_no_biases_read_nothing() -> None:
    """Switched off, texts are not read and nothing is held."""
    bias = ContextBias((), vocab_size=10, ids=torch.tensor([5]), extends=True)
    context = bias.read(request(0, TEXT, 4, torch.zeros(len(TEXT), 1)))
    assert list(context.after(context.start)) == []
    assert context.extra == []
    assert bias.num_bytes == 0


@pytest.mark.parametrize("biases", [(float("nan"),), (1e39, 1.0), (True,), ("1",), (0.0,) * 17, None, 2.5, {}, "12"])
def test_biases_that_cannot_work_are_refused(biases: Any) -> None:
    """In the config of either kind of drafter."""
    with pytest.raises(InvalidSettingError, match="context_bias"):
        config(context_bias=biases)
    with pytest.raises(InvalidSettingError, match="context_bias"):
        ConvConfig(vocab_size=4, context_bias=biases)


def test_configs_keep_them() -> None:
    """As plain data and back; older ones, which have none, are read with none."""
    mine = config(context_bias=(1, 2.5))
    assert DSparkConfig.from_dict(mine.to_dict()) == mine
    assert mine.context_bias == (1.0, 2.5)
    older = {name: value for name, value in mine.to_dict().items() if name != "context_bias"}
    assert DSparkConfig.from_dict(older).context_bias == ()
    conv = ConvConfig(vocab_size=4, context_bias=(1, 2.5))
    assert ConvConfig.from_dict(conv.to_dict()) == conv


# --- The block drafter ------------------------------------------------------------------------------------------------


def repeated(seed: int, length: int = 24) -> list[int]:
    """A text that takes up its own words again."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(7, (length,), generator=generator).tolist()
    return [5 * token + 2 for token in found]


def expected_logits(drafter: base.Recorder, entry: base.Round, unbiased: torch.Tensor) -> list[torch.Tensor]:
    """[G, Vd] logits of training -> those of drafting, worked out token by token."""
    model = drafter._model
    ids = list(range(VOCAB)) if model.draft_ids is None else model.draft_ids.tolist()
    extra = [token for token in dict.fromkeys(entry.history) if token not in ids]
    weight = base.adapter().head_rows(torch.tensor(extra, dtype=torch.int64))[0]
    found = []
    for slot in range(len(entry.tokens)):
        row = torch.cat((unbiased[slot], weight @ entry.hidden[slot]))
        for token, order in orders_after(entry.history, entry.tokens[:slot], len(model.config.context_bias)).items():
            row[[*ids, *extra].index(token)] += model.config.context_bias[order - 1]
        found.append(row)
    return found


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 24}])
@pytest.mark.parametrize("seeded", [False, True])
def test_logits_are_those_of_training_and_the_biases(
    changes: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, seeded: bool
) -> None:
    """Slot by slot along ragged rounds; ids of the text that cannot be drafted get the target's head, and a bias."""
    prompts = [repeated(seed, 12 + 5 * seed) for seed in range(3)]
    monkeypatch.setattr(base, "PROMPTS", prompts)
    monkeypatch.setattr(base, "BUDGETS", [12, 12, 12])
    drafter = base.Recorder(drafter_model(context_bias=BIASES, **changes), base.adapter())
    params = {"temperature": 0.8, "seed": 3} if seeded else None
    rounds = base.played(drafter, params=params)
    moved = 0
    for entry in rounds:
        _, logits = base.trained_view(drafter_model(**changes), [entry], tmp_path)
        for mine, other in zip(entry.logits, expected_logits(drafter, entry, logits), strict=True):
            assert base.relative(mine[: len(other)], other) < base.CLOSE
            assert not mine[len(other) :].isfinite().any()
            moved += base.relative(mine[: logits.shape[1]], logits[0]) > 0.1
    assert moved > 20


def propose(drafter: DSparkDrafter, text: Sequence[int], rule: Rule = "greedy", *, tree: int = 0) -> Proposal:
    """One proposal of four tokens, or a tree of so many."""
    params = SamplingParams() if rule == "greedy" else SAMPLED
    asked = request(0, text, tree or 4, base.features_of(text), params, rule=rule)
    asked = DraftRequest(asked.row, asked.token_ids, asked.limit, asked.sampler, asked.features, tree > 0)
    return drafter.propose([asked])[0]


@pytest.mark.parametrize(("rule", "tree"), [("greedy", 0), ("block", 0), ("coupled", 0), ("greedy", 9), ("coupled", 9)])
def test_large_biases_copy_the_text(rule: Rule, tree: int) -> None:
    """A text of ids that the draft vocabulary lacks is copied, in chains and in trees, under every rule."""
    text = [1, 3, 5, 7, 9, 11, 1, 3]  # the draft vocabulary has even ids
    proposal = propose(
        make_drafter(base.adapter(), draft_vocab_size=24, context_bias=(200.0,) * 3), text, rule, tree=tree
    )
    parents = proposal.parents or range(-1, 3)
    path, node = [], -1
    while node in parents and len(path) < 4:
        node = list(parents).index(node)
        path.append(proposal.token_ids[node])
    assert path == [5, 7, 9, 11]
    without = propose(make_drafter(base.adapter(), draft_vocab_size=24), text, rule, tree=tree)
    assert all(token % 2 == 0 for token in without.token_ids)


def test_sampled_drafts_carry_the_biased_law() -> None:
    """The probabilities are the processed softmax of the biased logits, and tokens are drawn from them."""
    drafter = base.Recorder(drafter_model(context_bias=BIASES, draft_vocab_size=24), base.adapter())
    text = [1, 3, 2, 4, 1, 3, 5, 1, 3]
    asked = [request(row, text, 4, base.features_of(text), SAMPLED, rule="block") for row in range(300)]
    proposals = drafter.propose(asked)
    entry, first = drafter.rounds[0], proposals[0]
    ids = [*range(0, 48, 2), 1, 3, 5]
    for slot, logits in enumerate(entry.logits):
        scores = torch.full((VOCAB,), -torch.inf)
        scores[ids] = logits[: len(ids)]
        law = asked[0].sampler.scores(scores[None], text, entry.tokens[:slot], slot)[0].softmax(-1)
        assert first.probs is not None
        torch.testing.assert_close(first.probs[slot], law, rtol=0.0, atol=1e-6)
        assert float(law[1::2].sum()) > 0.0
    assert first.probs is not None
    law = first.probs[0]
    drawn = torch.bincount(torch.tensor([proposal.token_ids[0] for proposal in proposals]), minlength=VOCAB)
    # Pearson's statistic over the tokens of the law has at most 19 degrees of freedom; above 75 has odds of 1e-8.
    kept = law > 0.0
    assert int(drawn[~kept].sum()) == 0
    assert float(((drawn[kept] - 300 * law[kept]).square() / (300 * law[kept])).sum()) < 75.0


@pytest.mark.parametrize(("rule", "weights"), [("greedy", (0.4, 0.3, 0.4)), ("block", (0.5, 0.0, 0.3))])
@pytest.mark.parametrize("biases", [(4.0, 5.0, 6.0), ()])
def test_confidence_pools_the_head_with_the_likeliest_tokens_odds(
    rule: Rule, weights: tuple[float, float, float], biases: tuple[float, ...], tmp_path: Any
) -> None:
    """Three log-odds, weighted: the head's, and those of the top probability without and with the biases."""
    drafter = base.Recorder(drafter_model(context_bias=biases), base.adapter())
    propose(drafter, repeated(4), rule)
    (entry,) = drafter.rounds
    slots, logits = base.trained_view(drafter_model(), [entry], tmp_path)
    assert slots.confidence is not None

    def log_odds(rows: torch.Tensor) -> torch.Tensor:
        top = rows.softmax(-1).amax(-1).clamp(0.01, 0.99)
        return (top / (1 - top)).log()

    biased = torch.stack(expected_logits(drafter, entry, logits)) if biases else logits
    opinions = (slots.confidence, log_odds(logits), log_odds(biased))
    expected = sum(weight * opinion for weight, opinion in zip(weights, opinions, strict=True))
    assert base.relative(torch.tensor(entry.pooled), torch.as_tensor(expected)) < 1e-4
    assert bool(biases) == (float((opinions[2] - opinions[1]).abs().max()) > 0.1)


def test_a_trees_claims_are_the_biased_laws() -> None:
    """At the root: the probabilities of the biased softmax."""
    text = repeated(5)
    recorder = base.Recorder(drafter_model(context_bias=BIASES), base.adapter())
    propose(recorder, text)
    law = recorder.rounds[0].logits[0].softmax(-1)
    tree = propose(make_drafter(base.adapter(), context_bias=BIASES), text, tree=30)
    assert tree.parents is not None
    assert tree.survival is not None
    root = {tree.token_ids[item]: tree.survival[item] for item, parent in enumerate(tree.parents) if parent == -1}
    assert len(root) >= 3
    for token, claim in root.items():
        assert claim == pytest.approx(float(law[token]), rel=1e-3)
    noisy = propose(make_drafter(base.adapter(), context_bias=BIASES), text, "coupled", tree=30)
    sampler = request(0, text, 4, base.features_of(text), SAMPLED, rule="coupled").sampler
    tokens, shares = sampler.alternatives(recorder.rounds[0].logits[0], text, (), 8)
    assert noisy.parents is not None
    assert noisy.survival is not None
    for token, share in zip(tokens[:3], shares, strict=False):
        item = next(i for i, parent in enumerate(noisy.parents) if parent == -1 and noisy.token_ids[i] == token)
        assert noisy.survival[item] == pytest.approx(0.9 * share, rel=1e-3)  # what such claims are worth


CHANGES: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 24, "markov": "rnn"},
    {"confidence": False, "markov": "none", "layout": "mask_predicts"},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("pack", [False, True])
def test_output_is_that_of_plain_decoding(changes: dict[str, Any], params: dict[str, Any], *, pack: bool) -> None:
    """In ragged batches, with chains of every length and with trees."""
    prompts, budgets = [repeated(seed, 9 + 4 * seed) for seed in range(4)], [14, 6, 11, 8]
    plain = decode(target(), prompts, budgets, params)
    for policy in (Fixed(7), ScriptedPolicy([4, 0, 1, 3], [4, 1, 0, 3]), Threshold(4, 0.3)):
        drafter = make_drafter(base.adapter(), context_bias=BIASES, pack=pack, **changes)
        drafted = decode(target(), prompts, budgets, params, drafter=drafter, policy=policy, max_batch_size=3)
        assert drafted.outputs == plain.outputs
        assert drafted.admitted > 0
        assert drafter._bias.num_bytes == 0  # finished requests are forgotten


def test_requests_of_a_batch_get_what_they_get_alone() -> None:
    """Greedy, sampled, and ones whose law needs a column for every id; texts that add different numbers of ids."""
    texts = [[1, 3, 2, 4, 1, 3, 5, 1, 3], [2, 4, 6, 2, 4], [7, 9, 11, 13, 15, 7, 9], [8, 9, 8, 9, 8]]
    kinds: list[tuple[SamplingParams, Rule]] = [
        (SamplingParams(), "greedy"),
        (SAMPLED, "block"),
        (SamplingParams(repetition_penalty=1.5), "greedy"),
        (SamplingParams(temperature=0.9, logit_bias={9: 5.0, 3: -5.0}), "coupled"),
        (SamplingParams(temperature=0.9), "coupled"),
    ]
    asked = []
    for row, (text, (params, rule)) in enumerate((text, kind) for text in texts for kind in kinds):
        made = request(row, text, 6, base.features_of(text), params, rule=rule)
        branch = row % 2 == 0 and rule != "block"
        asked.append(DraftRequest(made.row, made.token_ids, 6, made.sampler, made.features, branch))

    def fresh() -> DSparkDrafter:
        return make_drafter(base.adapter(), draft_vocab_size=24, context_bias=(2.0, 4.0), markov_top_k=9)

    odd = 0
    for single, proposal in zip(asked, fresh().propose(asked), strict=True):
        (alone,) = fresh().propose([single])
        assert list(proposal.token_ids) == list(alone.token_ids)
        assert proposal.parents == alone.parents
        assert proposal.survival == pytest.approx(alone.survival, abs=1e-5)
        if proposal.probs is not None and alone.probs is not None:
            torch.testing.assert_close(proposal.probs, alone.probs, rtol=0.0, atol=1e-5)
        odd += sum(token % 2 for token in proposal.token_ids)
    assert odd > 10


def test_a_tiny_vocabulary_pads_no_tree() -> None:
    """Columns that a batch mate adds are no alternatives of a request with fewer ids."""
    texts = [[2, 4, 2], [1, 3, 5, 7, 9, 11, 13, 1]]
    drafter = make_drafter(base.adapter(), draft_vocab_size=3, context_bias=BIASES)
    asked = [request(row, text, 9, base.features_of(text)) for row, text in enumerate(texts)]
    first, _ = drafter.propose([replace(single, may_branch=True) for single in asked])
    assert set(first.token_ids) <= {0, 2, 4}
    siblings = list(zip(first.parents or (), first.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)


def test_a_packed_head_of_its_own_adds_no_ids() -> None:
    """Rows of a weight in the blocked layout cannot be read: biases work, the draft vocabulary stays what it is."""
    model = target(hidden_size=64, intermediate_size=96, tie_word_embeddings=False)
    pack_linears(model)
    wide = TargetAdapter(model)
    assert wide.rows_at_hand() is None
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "draft_vocab_size": 24}
    drafter = make_drafter(wide, context_bias=(200.0,) * 3, **changes)
    text = [1, 3, 2, 4, 6, 2, 4]
    features = torch.randn(6, drafter.config.feature_size)
    (proposal,) = drafter.propose([request(0, text, 4, features)])
    assert list(proposal.token_ids[:3]) == [6, 2, 4]
    assert all(token % 2 == 0 for token in proposal.token_ids)


def test_half_precision_targets_are_copied_from() -> None:
    """In bfloat16 the columns of other ids are made in the target's type and finished in float32."""
    half = TargetAdapter(copy.deepcopy(target()).to(torch.bfloat16))
    text = [1, 3, 5, 7, 9, 11, 1, 3]
    features = LiveFeatures(half, (0, 2), [sample(text)]).of([0])[0].features
    drafter = make_drafter(half, draft_vocab_size=24, context_bias=(200.0,) * 3)
    (proposal,) = drafter.propose([request(0, text, 4, features, SAMPLED, rule="block")])
    assert list(proposal.token_ids) == [5, 7, 9, 11]
    assert proposal.probs is not None
    assert proposal.probs.dtype == torch.float32
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(4), rtol=0.0, atol=1e-5)


def test_repeated_text_is_accepted_further() -> None:
    """Where greedy output repeats itself, a drafter of random weights that copies is accepted, and else is not."""
    prompts = [repeated(seed, 20) for seed in range(6)]
    accepted = []
    for biases in ((), (10.0, 20.0, 40.0)):
        drafter = make_drafter(base.adapter(), context_bias=biases)
        run = decode(target(), prompts, [80] * 6, drafter=drafter, policy=Fixed(4))
        accepted.append(sum(sum(report.accepted) for report in run.reports))
    assert accepted[1] > accepted[0] + 20


def test_the_checker_finds_nothing() -> None:
    """Contract, parity, sampled laws, rollback and release; odds of a false alarm below one in a million."""
    model = base.checked_model()
    model.config = model.config.with_(context_bias=(1.0, 2.0, 3.0))
    report = check_drafter(
        lambda: DSparkDrafter(model, base.checked_target()[1], pack=False),
        check_model=base.checked_target()[0],
        samples=192,
        max_tokens=10,
    )
    assert report.ok, str(report)


# --- The convolutional drafter ----------------------------------------------------------------------------------------


def conv(biases: tuple[float, ...], ids: torch.Tensor | None = None) -> ConvDrafter:
    """One over a target of 16 ids, all or some of which can be drafted."""
    shape = ConvConfig(vocab_size=16, hidden_size=12, num_layers=3, kernel_size=4, embedding_size=8)
    size = None if ids is None else len(ids)
    model = lively(shape.with_(context_bias=biases, draft_vocab_size=size), draft_ids=ids)
    return ConvDrafter(model, target_vocab_size=16)


def test_the_convolutional_drafter_copies_too() -> None:
    """With large biases it repeats the text; without, its random weights say something else."""
    text = [1, 3, 5, 7, 9, 11, 1, 3]
    asked = request(0, text, 4, torch.zeros(len(text), 1), vocab=16)
    assert list(conv((200.0,) * 3).propose([asked])[0].token_ids) == [5, 7, 9, 11]
    assert list(conv(()).propose([asked])[0].token_ids) != [5, 7, 9, 11]
    some = torch.tensor([11, 7, 5, 3, 0])  # 9 cannot be drafted
    assert list(conv((200.0,) * 3, some).propose([asked])[0].token_ids)[:2] == [5, 7]


def test_the_checker_finds_nothing_in_the_convolutional_drafter() -> None:
    """As for the block drafter."""
    report = check_drafter(lambda: conv((1.0, 2.0, 3.0)), samples=192, max_tokens=10)
    assert report.ok, str(report)
