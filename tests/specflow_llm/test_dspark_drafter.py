"""The drafter at work: what it computes round by round is what training computed, and it never changes the output."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specflow.policies import Fixed, Threshold
from specflow.testing import ScriptedPolicy
from specflow_llm import Drafter, DrafterError, DraftRequest, Proposal, SamplingParams
from specflow_llm.calibration import CalibrationEntry, CalibrationTable, Regime, Scale
from specflow_llm.checker import Outcome, check_drafter, tiny_target
from specflow_llm.checker.exactness import SampledRuns
from specflow_llm.checker.harness import Setup
from specflow_llm.drafters.base import RowId
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.dspark import DSparkModel, TargetAdapter
from specflow_llm.errors import CheckpointError
from specflow_llm.sampling import Rule
from specflow_llm.training.batches import Batch
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.objective import Slots, draft_logits
from specflow_llm.training.settings import TrainSettings
from specflow_llm.training.trainer import Trainer
from tests.specflow_llm.block_drafters import (
    MASK,
    drafter_model,
    make_drafter,
    random_ids,
    request,
    sample,
    target,
)
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.models import VOCAB

CLOSE = 1e-5
PROMPTS = [[5], random_ids(9, 1), random_ids(3, 2), random_ids(17, 3)]
BUDGETS = [14, 6, 11, 8]


@functools.cache
def adapter() -> TargetAdapter:
    """The tiny target, adapted."""
    return TargetAdapter(target())


def features_of(token_ids: Sequence[int]) -> torch.Tensor:
    """[n, F] features of a text, from one forward without any cache."""
    return LiveFeatures(adapter(), (0, 2), [sample(token_ids)]).of([0])[0].features


# --- Training and inference agree -------------------------------------------------------------------------------------


@dataclass
class Round:
    """What the drafter computed for one request in one round."""

    history: list[int]
    tokens: list[int]
    hidden: torch.Tensor
    """[G, D]."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[Vd] per slot, Markov bias included."""
    confidence: list[float] = field(default_factory=list)
    """The confidence head's logits."""
    pooled: list[float] = field(default_factory=list)
    """With the likeliest token's log-odds."""


class Recorder(DSparkDrafter):
    """Notes what it computes; its drafts are chains."""

    branches = False
    rounds: list[Round]

    def _draft(self, drafts: Any, hidden: torch.Tensor) -> None:
        self._now = [
            Round(list(draft.request.token_ids), draft.tokens, hidden[index]) for index, draft in enumerate(drafts)
        ]
        super()._draft(drafts, hidden)
        self.rounds = [*getattr(self, "rounds", []), *self._now]

    def _choose(self, drafts: Any, slot: int, logits: torch.Tensor) -> list[int]:
        for index, entry in enumerate(self._now):
            if slot < drafts[index].limit:
                entry.logits.append(logits[index].clone())
        return super()._choose(drafts, slot, logits)

    def _pooled(self, drafts: Any, opinions: torch.Tensor) -> list[float]:
        pooled = super()._pooled(drafts, opinions)
        for entry, draft, head, logit in zip(self._now, drafts, opinions[:, 0].tolist(), pooled, strict=True):
            if len(entry.tokens) < draft.limit:
                entry.confidence.append(head)
                entry.pooled.append(logit)
        return pooled


def played(drafter: Recorder, *, params: dict[str, Any] | None = None, policy: Any = None) -> list[Round]:
    """The rounds of an engine run: ragged prompts, rows that end at different times, two at once, new ones joining."""
    policy = policy or ScriptedPolicy([4, 2, 4, 3], [4, 1, 4, 3])
    decode(target(), PROMPTS, BUDGETS, params, drafter=drafter, policy=policy, max_batch_size=3)
    assert len(drafter.rounds) > 8
    return drafter.rounds


def trained_view(model: DSparkModel, rounds: Sequence[Round], folder: Path) -> tuple[Slots, torch.Tensor]:
    """The same blocks as training sees them: whole texts, teacher forced; and their logits."""
    texts = [sample([*entry.history, *entry.tokens]) for entry in rounds]
    source = LiveFeatures(adapter(), model.config.target_layer_ids, texts)
    trainer = Trainer(adapter(), model, texts, source, TrainSettings(held_out=0.0), folder)
    longest = max(len(text.token_ids) for text in texts)
    block = model.config.block_size
    supervised = torch.zeros(len(texts), 1, block, dtype=torch.bool)
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    for row, entry in enumerate(rounds):
        ids[row, : len(texts[row].token_ids)] = torch.tensor(texts[row].token_ids)
        supervised[row, 0, : len(entry.tokens)] = True
    batch = Batch(
        ids,
        torch.tensor([len(text.token_ids) for text in texts]),
        torch.tensor([[len(entry.history) - 1] for entry in rounds]),
        supervised,
        tuple(range(len(texts))),
    )
    with torch.no_grad():
        slots, _ = trainer._student.forward(batch, source.of(batch.indices))
        return slots, draft_logits(slots, adapter().head(model.draft_ids))


def differences(model: DSparkModel, rounds: Sequence[Round], folder: Path) -> dict[str, float]:
    """The largest difference between drafting and training, by what is compared."""
    slots, logits = trained_view(model, rounds, folder)
    hidden = torch.cat([entry.hidden[: len(entry.tokens)] for entry in rounds])
    found = {
        "hidden": (hidden, slots.hidden),
        "logits": (torch.stack([row for entry in rounds for row in entry.logits]), logits),
    }
    if slots.confidence is not None:
        drafted = torch.tensor([value for entry in rounds for value in entry.confidence])
        found["confidence"] = (drafted, slots.confidence)
    return {name: relative(value, expected) for name, (value, expected) in found.items()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; where numbers exceed 1 (a random model's logits reach 50), relative to the largest."""
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


VARIANTS: list[dict[str, Any]] = [
    {"layout": layout, "markov": markov, **extra}
    for layout in ("anchor_predicts", "mask_predicts")
    for markov in ("none", "vanilla", "gated", "rnn")
    for extra in (
        {},
        {"sliding_window": 4},
        {"draft_vocab_size": 24},
        {"sliding_window": 3, "draft_vocab_size": 24, "qk_norm": True},
    )
]
DEFAULT_VARIANTS = VARIANTS[3::5]
"""Every fifth: all kinds, both layouts, window and draft vocabulary on and off; the slow set has all."""


def variant_params(variants: Sequence[dict[str, Any]]) -> list[Any]:
    """Test parameters with readable names; those outside the default set are slow."""
    return [
        pytest.param(
            variant,
            id="-".join(str(value) for value in variant.values()),
            marks=() if variant in DEFAULT_VARIANTS else pytest.mark.slow,
        )
        for variant in variants
    ]


@pytest.mark.parametrize("variant", variant_params(VARIANTS))
def test_drafting_round_by_round_computes_what_training_computes(variant: dict[str, Any], tmp_path: Path) -> None:
    """Hidden states, logits with the Markov bias and confidence logits agree, though context came in piece by piece."""
    model = drafter_model(**variant)
    rounds = played(Recorder(drafter_model(**variant), adapter()))
    found = differences(model, rounds, tmp_path)
    assert max(found.values()) < CLOSE, found
    assert sum(len(entry.tokens) for entry in rounds) > 20


@pytest.mark.parametrize("variant", variant_params(VARIANTS))
def test_drafting_round_by_round_equals_drafting_from_scratch(variant: dict[str, Any]) -> None:
    """A new drafter that is shown a whole history at once computes what one that followed the request computed."""
    rounds = played(Recorder(drafter_model(**variant), adapter()))
    for entry in rounds[::3]:
        fresh = Recorder(drafter_model(**variant), adapter())
        asked = request(0, entry.history, len(entry.tokens), features_of(entry.history))
        assert list(fresh.propose([asked])[0].token_ids) == entry.tokens
        assert relative(fresh.rounds[0].hidden, entry.hidden) < CLOSE
        for mine, other in zip(fresh.rounds[0].logits, entry.logits, strict=True):
            assert relative(mine, other) < CLOSE


def shifted_positions(drafter: Recorder) -> None:
    """The known fault of ik_llama.cpp#2296: the block starts at the position before its anchor's."""
    original = drafter._model.block
    drafter._model.block = lambda embedded, positions, *rest: original(embedded, positions - 1, *rest)  # type: ignore[method-assign]


def shifted_previous(drafter: Recorder) -> None:
    """The known fault of speculators#806: the Markov head is given the token before the previous one."""
    original, seen = drafter._model.previous, [torch.tensor([0])]

    def late(token_ids: torch.Tensor) -> torch.Tensor | None:
        before = seen[0]
        seen[0] = token_ids
        return original(before if before.shape == token_ids.shape else token_ids.roll(1))

    drafter._model.previous = late  # type: ignore[method-assign]


def anchor_in_context(drafter: Recorder) -> None:
    """The draft's own keys and values stay in the context, in place of the committed features'."""
    original = drafter._block

    def keeping(first: int, anchors: Sequence[int]) -> torch.Tensor:
        hidden = original(first, anchors)
        for offset in range(len(anchors)):
            drafter._cache.advance(first + offset, 1)
        return hidden

    drafter._block = keeping  # type: ignore[method-assign]


FAULTS: list[tuple[Callable[[Recorder], None], str]] = [
    (shifted_positions, "hidden"),
    (shifted_previous, "logits"),
    (anchor_in_context, "hidden"),
]


@pytest.mark.parametrize(("fault", "shows_in"), FAULTS)
def test_known_faults_break_the_agreement(fault: Callable[[Recorder], None], shows_in: str, tmp_path: Path) -> None:
    """Each fault that public implementations had is seen by the comparison above, a thousand times its tolerance."""
    drafter = Recorder(drafter_model(), adapter())
    fault(drafter)
    found = differences(drafter_model(), played(drafter), tmp_path)
    assert found[shows_in] > 1000 * CLOSE, found


def test_only_committed_tokens_enter_the_context() -> None:
    """After rejections the context holds the keys of the committed features, and one position less than tokens."""
    drafter = make_drafter(adapter())
    ids = random_ids(6, 4)
    for turn in range(5):
        text = [*ids, *random_ids(2 * turn, 5)]
        drafter.propose([request(0, text, 4, features_of(text))])
        assert drafter._cache.lengths[0] == len(text) - 1
        with torch.no_grad():
            fused = drafter._model.fuse(features_of(text)[None, :-1])
            expected = drafter._model.context(fused, torch.arange(len(text) - 1)[None])
        for layer, (keys, values) in zip(drafter._cache.layers, expected, strict=True):
            torch.testing.assert_close(layer.keys[:1, :, : len(text) - 1], keys, rtol=0.0, atol=CLOSE)
            torch.testing.assert_close(layer.values[:1, :, : len(text) - 1], values, rtol=0.0, atol=CLOSE)


# --- State ------------------------------------------------------------------------------------------------------------


def proposed(drafter: DSparkDrafter, asked: Sequence[DraftRequest]) -> list[list[int]]:
    """Proposed tokens, request by request."""
    return [list(proposal.token_ids) for proposal in drafter.propose(asked)]


def test_requests_in_any_order_and_subset_get_what_they_get_alone() -> None:
    """Which slots requests have, who is asked in a round, and who left, changes no proposal."""
    together = make_drafter(adapter())
    texts = {row: random_ids(4 + 5 * row, row) for row in range(5)}
    features = {row: features_of([*text, *random_ids(6, 50 + row)]) for row, text in texts.items()}
    grown = {row: [*text, *random_ids(6, 50 + row)] for row, text in texts.items()}
    for turn, rows in enumerate(([0, 1, 2, 3], [3, 1], [2, 0, 3], [4, 3, 0], [0, 2, 4], [3, 4])):
        if turn == 3:
            together.release(RowId(1))
            texts.pop(1)
        asked = [
            request(row, grown[row][: len(texts[row]) + turn], 1 + (row + turn) % 4, features[row]) for row in rows
        ]
        alone = [proposed(make_drafter(adapter()), [single])[0] for single in asked]
        assert proposed(together, asked) == alone
    assert len(together._order) == 4


@pytest.mark.parametrize("first", [0, 1], ids=["first slot", "last slot"])
def test_a_slot_that_is_used_again_is_clean(first: int) -> None:
    """Features that are not numbers spoil their own request only, not the one that gets its slot."""
    drafter = make_drafter(adapter())
    poisoned = request(0, random_ids(31), 4, torch.full((30, 64), math.nan))
    good = request(1, random_ids(20, 1), 4, features_of(random_ids(20, 1)))
    drafter.propose([poisoned, good] if first == 0 else [good, poisoned])
    drafter.release(RowId(0))
    short, long = random_ids(5, 6), [*random_ids(20, 1), 3, 4]
    asked = [request(2, short, 4, features_of(short)), request(1, long, 4, features_of(long))]
    assert proposed(drafter, asked) == [proposed(make_drafter(adapter()), [single])[0] for single in asked]


def test_a_request_may_ask_for_nothing() -> None:
    """Limit 0 gives an empty proposal, costs nothing, and leaves nothing behind that a later round could miss."""
    drafter = make_drafter(adapter())
    text = random_ids(12, 7)
    features = features_of(text)
    for length in (4, 6, 7):
        assert proposed(drafter, [request(0, text[:length], 0, features)]) == [[]]
    assert drafter._cache.lengths[0] == 0
    asked = [request(0, text, 4, features)]
    assert proposed(drafter, asked) == proposed(make_drafter(adapter()), asked)
    assert drafter.propose([]) == []


def test_a_prompt_of_one_token_is_not_drafted_for() -> None:
    """No token was executed, so there is nothing to look at; the next round has one feature and is drafted for."""
    drafter = make_drafter(adapter())
    features = features_of([5, 6])
    assert proposed(drafter, [request(0, [5], 4, features)]) == [[]]
    assert len(proposed(drafter, [request(0, [5, 6], 4, features)])[0]) == 4


@pytest.mark.parametrize("layout", ["anchor_predicts", "mask_predicts"])
def test_a_limit_below_the_block_cuts_the_draft(layout: str) -> None:
    """The tokens that remain are those of the whole draft, and there are never more than the block has."""
    text = random_ids(8, 8)
    drafts = [
        proposed(make_drafter(adapter(), layout=layout), [request(0, text, limit, features_of(text))])[0]
        for limit in range(1, 7)
    ]
    assert [len(draft) for draft in drafts] == [1, 2, 3, 4, 4, 4]
    assert all(draft == drafts[-1][: len(draft)] for draft in drafts)


def test_a_full_context_ends_drafting_without_an_error() -> None:
    """Where a block would pass the drafter's last position, nothing is proposed."""
    drafter = make_drafter(adapter(), max_positions=16)
    text = random_ids(20, 9)
    features = features_of(text)
    lengths = [len(proposed(drafter, [request(0, text[:size], 4, features)])[0]) for size in range(10, 18)]
    assert lengths == [4, 4, 4, 4, 0, 0, 0, 0]  # a block of 4 after 12 positions fills 16


@pytest.mark.parametrize("features", [None, torch.zeros(3, 64), torch.zeros(5, 32)])
def test_features_that_do_not_fit_are_refused(features: torch.Tensor | None) -> None:
    """Missing, too few or too narrow features are an error that says what is due."""
    asked = request(0, random_ids(6), 4, torch.zeros(5, 64))
    wrong = DraftRequest(asked.row, asked.token_ids, 4, asked.sampler, features)
    with pytest.raises(DrafterError, match=r"\[5, 64\]"):
        make_drafter(adapter()).propose([wrong])


def test_a_drafter_for_another_target_is_refused() -> None:
    """Sizes are compared before anything runs."""
    with pytest.raises(CheckpointError, match="number of layers is 6"):
        make_drafter(adapter(), num_target_layers=6)


def test_what_it_holds_is_reported() -> None:
    """Weights count always, keys and values once there are some."""
    drafter = make_drafter(adapter())
    assert drafter.state_bytes()["draft_kv"] == 0
    text = random_ids(6)
    drafter.propose([request(0, text, 4, features_of(text))])
    held = drafter.state_bytes()
    assert held["draft_kv"] > 0
    assert held["draft_weights"] == 4 * sum(p.numel() for p in drafter_model().parameters())
    assert drafter.name == "dspark"
    assert drafter.num_positions == 4


# --- Choosing tokens --------------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=1.0, top_k=8)


def test_mixed_requests_of_a_batch_get_what_they_get_alone() -> None:
    """Greedy and sampled requests, penalties and different limits, in one call."""
    text = random_ids(9, 10)
    features = features_of(text)
    kinds: list[tuple[SamplingParams, Rule, int]] = [
        (SamplingParams(), "greedy", 4),
        (SAMPLED, "block", 3),
        (SamplingParams(repetition_penalty=1.5), "greedy", 4),
        (SAMPLED, "coupled", 4),
        (SamplingParams(temperature=0.5), "token", 1),
        (SamplingParams(), "greedy", 2),
    ]
    asked = [request(row, text, limit, features, params, rule=rule) for row, (params, rule, limit) in enumerate(kinds)]
    for single, proposal in zip(asked, make_drafter(adapter()).propose(asked), strict=True):
        alone = make_drafter(adapter()).propose([single])[0]
        assert list(proposal.token_ids) == list(alone.token_ids)
        assert proposal.survival == pytest.approx(alone.survival, abs=1e-5)
        assert (proposal.probs is None) == (single.sampler.rule not in {"token", "block"})
        if proposal.probs is not None and alone.probs is not None:
            torch.testing.assert_close(proposal.probs, alone.probs, rtol=0.0, atol=1e-5)


def test_ids_outside_the_draft_vocabulary_are_impossible() -> None:
    """Sampled drafts stay inside it, their probabilities are zero elsewhere, and greedy ones are mapped back."""
    drafter = make_drafter(adapter(), draft_vocab_size=24)
    text = random_ids(9, 11)
    features = features_of(text)
    asked = [request(row, text, 4, features, SAMPLED, rule="block") for row in range(20)]
    asked.append(request(20, text, 4, features))
    allowed = set(range(0, 48, 2))
    for proposal in drafter.propose(asked):
        assert set(proposal.token_ids) <= allowed
        if proposal.probs is not None:
            outside = [token for token in range(VOCAB) if token not in allowed]
            assert float(proposal.probs[:, outside].max()) == 0.0


@pytest.mark.parametrize("count", [1, 3, 24, 64, 100])
def test_a_correction_of_the_likeliest_logits_only(count: int) -> None:
    """The Markov bias reaches the ``k`` best base logits and no other; with all of them it is the whole correction."""
    text = random_ids(9, 12)
    asked = [request(0, text, 4, features_of(text))]
    whole, some = Recorder(drafter_model(), adapter()), Recorder(drafter_model(markov_top_k=count), adapter())
    none = Recorder(drafter_model(markov="none"), adapter())
    for drafter in (whole, some, none):
        drafter.propose(asked)
    base, full, part = none.rounds[0].logits[0], whole.rounds[0].logits[0], some.rounds[0].logits[0]
    best = base.topk(min(count, VOCAB)).indices
    expected = base.clone()
    expected[best] = full[best]
    torch.testing.assert_close(part, expected, rtol=0.0, atol=1e-4)
    assert float((full - base).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("top_k", [0, 7])
def test_packed_layers_draft_the_same(kind: str, top_k: int) -> None:
    """The layout for short blocks on CPUs changes the order of sums, not the tokens."""
    model = target(hidden_size=64, intermediate_size=96)
    wide = TargetAdapter(model)
    text = random_ids(9, 13)
    features = LiveFeatures(wide, (0, 2), [sample(text)]).of([0])[0].features
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "markov": kind, "markov_top_k": top_k}
    for extra in ({"markov_rank": 64}, {"draft_vocab_size": 32, "markov_rank": 64}):
        recorders = [Recorder(drafter_model(**changes, **extra), wide, pack=pack) for pack in (True, False)]
        for drafter in recorders:
            drafter.propose([request(0, text, 4, features)])
        packed, plain = (drafter.rounds[0] for drafter in recorders)
        assert packed.tokens == plain.tokens
        for mine, other in zip(packed.logits, plain.logits, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"markov": "rnn"}, {"markov_top_k": 5, "draft_vocab_size": 24}], ids=["rnn", "top-k"]
)
def test_low_precision_targets_are_drafted_for(changes: dict[str, Any]) -> None:
    """In bfloat16 weights follow the target's type, probabilities stay float32 and add up to one."""
    half = TargetAdapter(copy.deepcopy(target()).to(torch.bfloat16))
    text = random_ids(9, 17)
    features = LiveFeatures(half, (0, 2), [sample(text)]).of([0])[0].features
    drafter = make_drafter(half, **changes)
    greedy, sampled = drafter.propose(
        [request(0, text, 4, features), request(1, text, 4, features, SAMPLED, rule="block")]
    )
    assert len(greedy.token_ids) == len(sampled.token_ids) == 4
    assert drafter._model.rotary._frequencies.dtype == torch.float32
    assert sampled.probs is not None
    assert sampled.probs.dtype == torch.float32
    torch.testing.assert_close(sampled.probs.sum(-1), torch.ones(4), rtol=0.0, atol=1e-5)
    outs = decode(half.model, PROMPTS, [5] * 4, drafter=drafter, policy=Fixed(4))
    assert all(len(ids) == 5 for ids in outs.outputs)


# --- Confidence -------------------------------------------------------------------------------------------------------


def test_survival_is_the_product_of_confidences() -> None:
    """Estimate k is the product of the first k sigmoids of the pooled logits."""
    drafter = Recorder(drafter_model(), adapter())
    text = random_ids(9, 14)
    proposal = drafter.propose([request(0, text, 4, features_of(text))])[0]
    rates = torch.tensor(drafter.rounds[0].pooled).sigmoid()
    assert proposal.survival == pytest.approx(rates.cumprod(0).tolist(), abs=1e-6)


def test_scales_of_a_calibration_correct_the_logits() -> None:
    """Greedy requests use the greedy scales, sampled ones theirs; without a table raw confidences are used."""
    text = random_ids(9, 15)
    features = features_of(text)
    temperatures, shifts = (2.0, 3.0, 4.0, 5.0), (0.5, -1.0, 1.5, -2.0)

    class Table:
        """Stands in for a table with a regime each."""

        def scales_for(self, is_greedy: bool) -> tuple[Scale, ...] | None:  # noqa: FBT001
            """Per position."""
            return tuple(map(Scale, temperatures, shifts)) if is_greedy else None

    drafter = Recorder(drafter_model(), adapter())
    table: Any = Table()
    drafter.use_calibration(table)
    assert drafter.calibration is table
    greedy, sampled = drafter.propose(
        [request(0, text, 4, features), request(1, text, 4, features, SAMPLED, rule="block")]
    )
    raw, other = (torch.tensor(entry.pooled) for entry in drafter.rounds)
    for proposal, logits in (
        (greedy, raw / torch.tensor(temperatures) + torch.tensor(shifts)),
        (sampled, other),
    ):
        assert proposal.survival == pytest.approx(logits.sigmoid().cumprod(0).tolist(), abs=1e-6)


def test_without_a_confidence_head_survival_is_learned() -> None:
    """Estimates start at the draft's top probability and follow what was accepted."""
    drafter = make_drafter(adapter(), confidence=False)
    text = random_ids(9, 16)
    first = drafter.propose([request(0, text, 4, features_of(text))])[0]
    assert first.survival is not None
    assert all(earlier >= later for earlier, later in zip(first.survival, first.survival[1:], strict=False))
    for turn in range(30):  # always wrong: the token after the committed ones is never the proposed one
        proposal = drafter.propose([request(0, text, 4, features_of(text))])[0]
        text = [*text, (proposal.token_ids[0] + 1) % MASK]
        assert len(text) == 10 + turn
    last = drafter.propose([request(0, text, 4, features_of(text))])[0]
    assert last.survival is not None
    assert last.survival[0] < 0.5 * first.survival[0]


# --- Exactness --------------------------------------------------------------------------------------------------------


def shifted_table(size: int = 4) -> CalibrationTable:
    """A calibration for both kinds of requests, far from the identity."""
    entries = [
        CalibrationEntry(
            method="platt",
            scales=(Scale(2.0, shift), Scale(0.5, -shift), Scale(1.0, 2 * shift), Scale(3.0), Scale(1.0, -1.0))[:size],
            fitted=(True,) * size,
            regime=Regime(target="tiny", temperature=temperature, data="some", requests=2, rounds=9),
            counts=(1,) * size, ece_before=(0.0,) * size, ece_after=(0.0,) * size, ece_noise=(0.0,) * size,
        )
        for temperature, shift in ((0.0, 1.5), (1.0, -1.5))
    ]  # fmt: skip
    return CalibrationTable(drafter="x", entries=tuple(entries))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"calibration": shifted_table()},
        {"markov": "rnn", "draft_vocab_size": 24},
        {"layout": "mask_predicts", "markov": "none", "confidence": False},
    ],
    ids=["plain", "calibrated", "rnn", "mask predicts"],
)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_output_is_that_of_plain_decoding(changes: dict[str, Any], params: dict[str, Any]) -> None:
    """Greedy and seeded requests emit the same tokens with the drafter as without, in ragged batches."""
    plain = decode(target(), PROMPTS, BUDGETS, params)
    for policy in (Fixed(4), ScriptedPolicy([4, 0, 1, 3], [4, 1, 0, 3]), Threshold(4, 0.3)):
        drafted = decode(
            target(),
            PROMPTS,
            BUDGETS,
            params,
            drafter=make_drafter(adapter(), **changes),
            policy=policy,
            max_batch_size=3,
        )
        assert drafted.outputs == plain.outputs
        assert drafted.admitted > 0


@functools.cache
def checked_target() -> tuple[PreTrainedModel, TargetAdapter]:
    """The checker's tiny model."""
    model = tiny_target()
    return model, TargetAdapter(model)


@functools.cache
def bigram_logits() -> torch.Tensor:
    """[V, V] what that model says after each single token."""
    with torch.inference_mode():
        logits = checked_target()[0](input_ids=torch.arange(16)[:, None], use_cache=False).logits[:, 0]
    return logits.clone()


def checked_model() -> DSparkModel:
    """A drafter for it that is often right: its Markov head holds the target's law after single tokens.

    With a drafter whose tokens are hardly ever accepted, statistical checks would see nothing.
    """
    model = drafter_model(
        3, vocab_size=16, mask_token_id=15, num_target_layers=2, target_layer_ids=(0,), block_size=5, markov_rank=16
    )
    head = model.markov_head
    assert head is not None
    with torch.no_grad():
        model.norm.weight.mul_(0.1)
        head.previous.weight.copy_(torch.eye(16))
        head.output.weight.copy_(bigram_logits().T)
    return model


class Anticipating(DSparkDrafter):
    """A fault: its confidence looks at the very token it is about."""

    def _choose(self, drafts: Any, slot: int, logits: torch.Tensor) -> list[int]:
        chosen = super()._choose(drafts, slot, logits)
        for draft in drafts:
            if slot < draft.limit:
                draft.survival[slot] *= 0.05 if draft.tokens[slot] % 2 else 1.0
        return chosen


class GreedyLaw(DSparkDrafter):
    """A fault: draws the most probable token, and reports the softmax as if it had drawn from it."""

    def _take(self, draft: Any, token: int, probs: torch.Tensor | None, top: float) -> None:
        super()._take(draft, token if probs is None else int(probs.argmax()), probs, top)


class Calibrated(DSparkDrafter):
    """Corrects its confidence by position."""

    def __init__(self, model: DSparkModel, adapter: TargetAdapter) -> None:
        super().__init__(model, adapter, calibration=shifted_table(5))


def drafter_report(kind: Callable[..., DSparkDrafter], samples: int) -> dict[str, tuple[Outcome, str]]:
    """The checker's answers by check."""

    def fresh() -> Drafter:
        return kind(checked_model(), checked_target()[1])

    report = check_drafter(fresh, check_model=checked_target()[0], samples=samples, max_tokens=8)
    return {check.name: (check.outcome, check.reason) for check in report.checks}


@pytest.mark.parametrize("kind", [DSparkDrafter, Calibrated])
@pytest.mark.parametrize("samples", [192, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_checker_finds_the_drafter_exact_and_tidy(samples: int, kind: Callable[..., DSparkDrafter]) -> None:
    """Laws under token and block rules, drafts cut by survival, draws, state: a false alarm has odds below 1e-6."""
    found = drafter_report(kind, samples)
    assert {name: entry for name, entry in found.items() if entry[0] is not Outcome.OK} == {}


@pytest.mark.parametrize("kind", [DSparkDrafter, Anticipating, GreedyLaw])
def test_the_checker_catches_what_is_not_exact(kind: type[DSparkDrafter]) -> None:
    """A confidence that knows its token, and tokens not drawn from the reported law, are found out; nothing else is."""
    model, shared = checked_target()
    setup = Setup(
        factory=lambda: kind(checked_model(), shared),
        model=model, max_draft_tokens=5, max_tokens=8, samples=192, learns=False,
    )  # fmt: skip
    runs = SampledRuns(setup)
    assert (runs.draws()[0] is Outcome.FAILED) == (kind is GreedyLaw)
    assert (runs.survival()[0] is Outcome.FAILED) == (kind is Anticipating)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_confidence_that_knows_its_token_bends_the_output() -> None:
    """Where drafts are cut by such estimates, the output's law itself is seen to be wrong."""
    model, shared = checked_target()
    setup = Setup(
        factory=lambda: Anticipating(checked_model(), shared),
        model=model, max_draft_tokens=5, max_tokens=8, samples=4000, learns=False,
    )  # fmt: skip
    assert SampledRuns(setup).truncated_law()[0] is Outcome.FAILED


def test_the_drafter_does_not_change_its_target() -> None:
    """Neither packing nor drafting touches the target's weights."""
    model = copy.deepcopy(target())
    before = copy.deepcopy(model.state_dict())
    shared = TargetAdapter(model)
    drafter = make_drafter(shared)
    text = random_ids(6)
    proposals: Sequence[Proposal] = drafter.propose([request(0, text, 4, features_of(text))])
    assert len(proposals[0].token_ids) == 4
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
