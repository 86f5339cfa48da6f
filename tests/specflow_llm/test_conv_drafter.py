"""The convolutional drafter: one model in two forms, a state of fixed size, drafts that equal those from scratch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from specflow.errors import InvalidSettingError
from specflow_llm import DrafterError, DraftRequest, Proposal, SamplingParams
from specflow_llm.checker import check_drafter
from specflow_llm.drafters import RowId
from specflow_llm.drafters.conv import ConvConfig, ConvDrafter, ConvModel, SharedTables
from specflow_llm.sampling import RowSampler, Rule
from tests.specflow_llm.harness import drive, make_engine
from tests.specflow_llm.models import VOCAB, tiny_model

SMALL = ConvConfig(vocab_size=16, hidden_size=12, num_layers=3, kernel_size=4, embedding_size=8)


def lively(
    config: ConvConfig = SMALL,
    shared: SharedTables | None = None,
    *,
    seed: int = 0,
    draft_ids: torch.Tensor | None = None,
) -> ConvModel:
    """A model with random weights large enough that its predictions differ from token to token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ConvModel(config, shared, draft_ids)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape) * 2.0 / weight[0].numel() ** 0.5)
                else:
                    weight.add_(0.2 * torch.randn(weight.shape))
    return model.eval()


def tables(*, tied: bool) -> SharedTables:
    """A target's embedding and head."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(16, 10, generator=generator)
    return SharedTables(embedding, embedding if tied else torch.randn(16, 10, generator=generator))


def some_ids(batch: int, length: int, *, seed: int = 5) -> torch.Tensor:
    """[batch, length] random ids."""
    return torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- Model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["32", "64"])
@pytest.mark.parametrize("kind", ["own", "tied", "untied"])
@torch.inference_mode()
def test_steps_equal_the_whole(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Token by token, in chunks, and as a whole, the logits are the same to 1e-5 of the largest one."""
    model = lively(shared=None if kind == "own" else tables(tied=kind == "tied")).to(dtype)
    ids = some_ids(3, 30)
    whole = model(ids)
    atol = tolerance * float(whole.abs().max())
    assert whole.shape == (3, 30, 16)
    assert len(set(whole.argmax(-1).flatten().tolist())) > 4  # an equality of constants would mean nothing
    ragged, behind = model.extend(model.empty_state(3), ids[:, :20], torch.tensor([20, 3, 1]))
    for row, length in enumerate((20, 3, 1)):
        _, exact = model.extend(model.empty_state(1), ids[row : row + 1, :length])
        torch.testing.assert_close(behind[:, row], exact[:, 0], rtol=0.0, atol=atol)
        torch.testing.assert_close(model.logits(ragged[row, :length]), whole[row, :length], rtol=0.0, atol=atol)
    state = model.empty_state(3)
    for index in range(30):
        logits, state = model.step(state, ids[:, index])
        torch.testing.assert_close(logits, whole[:, index], rtol=0.0, atol=atol)
    state, start = model.empty_state(3), 0
    for size in (1, 7, 2, 16, 4):
        hidden, state = model.extend(state, ids[:, start : start + size])
        torch.testing.assert_close(model.logits(hidden), whole[:, start : start + size], rtol=0.0, atol=atol)
        start += size


@torch.inference_mode()
def test_a_step_leaves_the_old_state_alone() -> None:
    """An old state can be gone back to: reading from it twice gives the same."""
    model = lively()
    _, state = model.extend(model.empty_state(2), some_ids(2, 9))
    before = state.clone()
    first, _ = model.step(state, torch.tensor([3, 4]))
    model.step(state, torch.tensor([5, 6]))
    again, _ = model.step(state, torch.tensor([3, 4]))
    assert torch.equal(state, before)
    assert torch.equal(first, again)


@torch.inference_mode()
def test_predictions_depend_on_the_receptive_field_only() -> None:
    """A later token never matters, the oldest one within reach does, and the one before it does not."""
    model, ids = lively(), some_ids(1, 40)
    whole = model(ids)
    reach = SMALL.receptive_field
    assert reach == 10
    for place in (3, 20):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % 16
        differs = (model(changed) != whole).any(-1)[0].nonzero().flatten().tolist()
        assert differs == list(range(place, min(40, place + reach)))


def test_shared_tables_stay_the_targets() -> None:
    """The target's tables are neither trained nor saved nor copied nor counted."""
    shared = tables(tied=False)
    model = lively(shared=shared)
    assert not {"embedding", "head"} & set(model.state_dict())
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.embedding.data_ptr() == shared.embedding.data_ptr()
    assert model.head is not None
    assert model.head.data_ptr() == shared.head.data_ptr()
    assert model.num_own_bytes == 4 * sum(weight.numel() for weight in model.state_dict().values())
    again = ConvModel(SMALL, shared).eval()
    again.load_state_dict(model.state_dict())
    ids = some_ids(2, 11)
    assert torch.equal(again(ids), model(ids))


def test_it_learns() -> None:
    """Trained for some steps on a text with period 5, the drafter continues that text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ConvModel(SMALL)
    text = torch.tensor([[1, 4, 2, 6, 3] * 8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    drafter = ConvDrafter(model, target_vocab_size=16)
    assert proposed(drafter, [1, 4, 2, 6, 3, 1, 4, 2, 6], 6) == [3, 1, 4, 2, 6, 3]


@pytest.mark.parametrize(
    "setting",
    ["vocab_size", "hidden_size", "num_layers", "kernel_size", "embedding_size", "draft_vocab_size", "block_size"],
)
def test_sizes_are_checked(setting: str) -> None:
    """A size that makes no model is refused by name."""
    with pytest.raises(InvalidSettingError, match=setting):
        ConvConfig(**cast("Any", {"vocab_size": 16, setting: 0}))


def test_another_vocabulary_is_refused() -> None:
    """Tables and targets of another vocabulary are refused, with both sizes in the message."""
    wide = torch.zeros(17, 10)
    with pytest.raises(DrafterError, match=r"embedding has shape \(17, 10\) for a vocabulary of 16"):
        ConvModel(SMALL, SharedTables(wide, wide))
    with pytest.raises(DrafterError, match="trained for 16 token ids, the target has 17"):
        ConvDrafter(lively(), target_vocab_size=17)


# --- Drafter ----------------------------------------------------------------------------------------------------------


def request(token_ids: Sequence[int], limit: int, *, row: int = 0, rule: Rule = "greedy") -> DraftRequest:
    """A request, greedy unless another rule is given."""
    params = SamplingParams(temperature=0.0 if rule == "greedy" else 1.0)
    sampler = RowSampler(params, vocab_size=16, num_prompt_tokens=1, seed=0, rule=rule)
    return DraftRequest(RowId(row), list(token_ids), limit, sampler)


def proposed(drafter: ConvDrafter, token_ids: Sequence[int], limit: int) -> list[int]:
    """The tokens proposed for one request."""
    return list(drafter.propose([request(token_ids, limit)])[0].token_ids)


@torch.inference_mode()
def continuation(model: ConvModel, token_ids: Sequence[int], count: int) -> list[int]:
    """The most probable tokens, each from a forward over the whole text."""
    ids = list(token_ids)
    for _ in range(count):
        column = int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(column if model.draft_ids is None else int(model.draft_ids[column]))
    return ids[len(token_ids) :]


def restricted(kind: str) -> ConvModel:
    """A model that can draft 13 of the 16 ids, in an order that is not theirs."""
    ids = torch.tensor([14, 3, 5, 0, 9, 11, 2, 8, 7, 15, 1, 12, 4])
    config = SMALL.with_(draft_vocab_size=13, hidden_size=6 if kind == "folded" else 48)
    return lively(config, None if kind == "own" else tables(tied=False), draft_ids=ids, seed=2)


@pytest.mark.parametrize("kind", ["whole", "own", "shared", "folded"])
def test_drafts_equal_those_from_scratch(kind: str) -> None:
    """In a ragged batch, after rejections, pauses, gaps longer than the receptive field and repeated rounds."""
    model = lively() if kind == "whole" else restricted(kind)
    drafter = ConvDrafter(model, target_vocab_size=16)
    assert (drafter._head._module is not None) == (kind == "folded")
    texts = {row: some_ids(1, length, seed=row)[0].tolist() for row, length in enumerate((1, 3, 40, 9))}
    extra = some_ids(8, 30, seed=99).tolist()
    drafted: set[int] = set()
    for turn in range(8):
        rows = sorted(texts, key=lambda row: (row + turn) % 4)
        limits = {row: (row + 2 * turn) % 5 for row in rows}  # 0 among them
        for _ in range(2 if turn == 3 else 1):  # the third round is drafted twice
            proposals = drafter.propose([request(texts[row], limits[row], row=row) for row in rows])
            for row, proposal in zip(rows, proposals, strict=True):
                assert list(proposal.token_ids) == continuation(model, texts[row], limits[row]), (turn, row)
                drafted.update(proposal.token_ids)
        for row, proposal in zip(rows, proposals, strict=True):
            more = extra[turn][: 25 if (turn, row) == (4, 1) else 1 + row % 2]
            texts[row] = [*texts[row], *proposal.token_ids[: turn % 3], *more]
    assert len(drafted) > 4


def test_greedy_and_other_rows_share_a_batch() -> None:
    """Rows of one call are drafted as they are alone, whatever their laws."""
    model = restricted("folded")
    rules: list[Rule] = ["block", "greedy", "coupled", "greedy"]
    requests = [request([1, 2, 3 + row], 5, row=row, rule=rule) for row, rule in enumerate(rules)]
    together = ConvDrafter(model, target_vocab_size=16).propose(requests)
    for one, proposal in zip(requests, together, strict=True):
        alone = ConvDrafter(model, target_vocab_size=16).propose([one])[0]
        assert alone.token_ids == proposal.token_ids
        assert alone.survival == pytest.approx(proposal.survival)
        assert (alone.probs is None) == (proposal.probs is None)


def test_what_cannot_be_drafted_is_never_drafted() -> None:
    """Laws over the target's vocabulary have no mass outside the draft vocabulary."""
    model = restricted("folded")
    proposal = ConvDrafter(model, target_vocab_size=16).propose([request([1, 2, 3], 6, rule="block")])[0]
    assert proposal.probs is not None
    assert model.draft_ids is not None
    inside = torch.zeros(16, dtype=torch.bool)
    inside[model.draft_ids] = True
    assert float(proposal.probs[:, ~inside].sum()) == 0.0
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(6))


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 16], [-1, 0, 1, 2]])
def test_a_wrong_draft_vocabulary_is_refused(ids: list[int]) -> None:
    """Too few, twice the same, or outside the target's."""
    with pytest.raises(DrafterError, match="not 4 different ids of a vocabulary of 16"):
        ConvModel(SMALL.with_(draft_vocab_size=4), None, torch.tensor(ids))
    with pytest.raises(DrafterError, match="does not have"):
        ConvModel(SMALL, None, torch.tensor(ids))


def test_sampled_drafts_carry_their_laws() -> None:
    """Under a ratio rule every token comes with the law it was drawn from; estimates never rise."""
    drafter = ConvDrafter(lively(), target_vocab_size=16)
    proposal: Proposal = drafter.propose([request([1, 2, 3], 5, rule="block")])[0]
    assert proposal.probs is not None
    assert proposal.probs.shape == (5, 16)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(5))
    assert proposal.survival is not None
    assert list(proposal.survival) == sorted(proposal.survival, reverse=True)


def test_the_state_has_a_fixed_size() -> None:
    """A long text holds as much as a short one, and a released one nothing."""
    drafter = ConvDrafter(lively(), target_vocab_size=16)
    drafter.propose([request([1], 3)])
    short = drafter.state_bytes()["draft_state"]
    assert short == 4 * SMALL.num_layers * (SMALL.kernel_size - 1) * SMALL.hidden_size
    drafter.propose([request([1, *range(16)] * 20, 3)])
    assert drafter.state_bytes()["draft_state"] == short
    drafter.release(RowId(0))
    drafter.release(RowId(5))
    assert drafter.state_bytes()["draft_state"] == 0


def test_a_long_prompt_costs_no_more_than_its_end() -> None:
    """Of a new text only the receptive field is read."""
    read: list[int] = []

    class Counting(ConvModel):
        def extend(
            self, state: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            read.append(token_ids.numel())
            return super().extend(state, token_ids, lengths)

    drafter = ConvDrafter(Counting(SMALL), target_vocab_size=16)
    drafter.propose([request(some_ids(1, 500)[0].tolist(), 3)])
    assert read == [SMALL.receptive_field, 1, 1]


@functools.cache
def checked_model() -> ConvModel:
    """One model for all drafters of a check; it drafts 13 ids of 16."""
    return restricted("folded")


def test_the_checker_finds_nothing() -> None:
    """Contract, parity, sampled laws, rollback and release; odds of a false alarm below one in a million."""
    report = check_drafter(lambda: ConvDrafter(checked_model(), target_vocab_size=16), samples=192, max_tokens=12)
    assert report.ok, str(report)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_it_shares_a_real_targets_tables(temperature: float) -> None:
    """Over a model whose embedding and head it shares, a batch gives the tokens of plain decoding."""
    target: Any = tiny_model()
    shared = SharedTables(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    model = lively(ConvConfig(vocab_size=VOCAB, hidden_size=12, num_layers=2, kernel_size=3), shared)
    requests = [
        (prompt, SamplingParams(temperature=temperature, seed=3, max_tokens=10 + len(prompt)))
        for prompt in ([1, 2, 3], [7] * 8, [33])
    ]
    plain = [run.completion.token_ids for run in drive(make_engine(target), requests)]
    drafted = drive(make_engine(target, ConvDrafter(model, target_vocab_size=VOCAB), num_draft=4), requests)
    assert [run.completion.token_ids for run in drafted] == plain
    assert sum(run.completion.metrics.admitted for run in drafted) > 20
