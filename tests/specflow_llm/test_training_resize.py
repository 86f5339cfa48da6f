"""Drafters of other sizes that go on from a trained one, and what they compute at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specflow.errors import InvalidSettingError
from specflow_llm import LLM
from specflow_llm.dspark import DSparkModel, TargetAdapter
from specflow_llm.dspark.checkpoint import load_drafter, save_drafter
from specflow_llm.training.design import design
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.resize import resized
from specflow_llm.training.run import TrainingRun
from specflow_llm.training.settings import TrainSettings
from tests.specflow_llm.block_drafters import random_ids, sample, spread
from tests.specflow_llm.models import tiny_model

RANK = 6


@pytest.fixture
def adapter() -> TargetAdapter:
    """A target with layers to spare."""
    return TargetAdapter(tiny_model("llama", num_hidden_layers=5))


def trained(adapter: TargetAdapter, **changes: Any) -> DSparkModel:
    """A drafter in which no weight is zero, as after training."""
    fields = {"num_layers": 2, "block_size": 4, "markov_rank": RANK, "target_layer_ids": (0, 2), **changes}
    made = design(adapter, **fields)
    model = DSparkModel(made, None if made.draft_vocab_size is None else torch.arange(made.draft_vocab_size))
    spread(model)
    return model


@torch.no_grad()
def outputs(model: DSparkModel, adapter: TargetAdapter, block: int) -> dict[str, torch.Tensor]:
    """Hidden states of two blocks, Markov biases of all pairs of tokens, and confidences."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(1, 12, model.config.feature_size, generator=generator)
    inputs = torch.full((1, 2, block), model.config.mask_token_id)
    inputs[:, :, 0] = 3
    hidden = model(features, torch.tensor([[4, 9]]), adapter.embed(inputs), torch.tensor([12]))
    head, sure = model.markov_head, model.confidence_head
    assert head is not None
    assert sure is not None
    bias = head.output(head.previous.weight)
    return {"hidden": hidden, "bias": bias, "confidence": sure(hidden[0, 0, :1], head.previous.weight[7:8])}


def test_more_layers_change_nothing_at_first_and_can_learn(adapter: TargetAdapter) -> None:
    """New layers pass everything through; their output projections get gradients, so they do not stay that way."""
    old = trained(adapter)
    new = resized(old, {"num_layers": 4}, adapter)
    assert new.config.num_layers == 4
    before, after = outputs(old, adapter, 4), outputs(new, adapter, 4)
    for name, expected in before.items():
        torch.testing.assert_close(after[name], expected)
    features = torch.randn(1, 9, new.config.feature_size)
    inputs = torch.full((1, 1, 4), new.config.mask_token_id)
    new(features, torch.tensor([[5]]), adapter.embed(inputs), torch.tensor([9])).square().sum().backward()
    for index in range(2):
        layer: Any = new.layers[index]
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert module.weight.grad is not None
            assert module.weight.grad.abs().max() > 0.0
    front: Any = new.layers[0]
    assert isinstance(front.self_attn.q_proj, nn.Linear)
    theirs = adapter.model.get_decoder().layers[1].self_attn.q_proj.weight  # a copy of the target's, norm included
    scale = adapter.model.get_decoder().layers[1].input_layernorm.weight
    torch.testing.assert_close(front.self_attn.q_proj.weight, theirs * scale)


def test_another_block_size_keeps_every_weight(adapter: TargetAdapter) -> None:
    """The slots of a block share all weights, so blocks of any size can go on from them."""
    old = trained(adapter)
    new = resized(old, {"block_size": 6, "sliding_window": 8}, adapter)
    assert (new.config.block_size, new.config.sliding_window, new.config.num_slots) == (6, 8, 6)
    for name, weight in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], weight)


def test_a_lower_rank_is_the_closest_one(adapter: TargetAdapter) -> None:
    """The Markov bias of all pairs is off by the singular values that were left out and no more; higher ranks by none.

    Truncating columns instead, the known-wrong variant, is further off.
    """
    old = trained(adapter)
    before = outputs(old, adapter, 4)
    assert old.markov_head is not None
    sizes = torch.linalg.svdvals(before["bias"])
    for rank in (2, 4):
        new = resized(old, {"markov_rank": rank}, adapter)
        after = outputs(new, adapter, 4)
        torch.testing.assert_close(after["hidden"], before["hidden"])
        off = torch.linalg.matrix_norm(after["bias"] - before["bias"])
        torch.testing.assert_close(off, sizes[rank:].square().sum().sqrt(), rtol=1e-4, atol=1e-4)
        first, second = old.markov_head.previous.weight[:, :rank], old.markov_head.output.weight[:, :rank]
        assert torch.linalg.matrix_norm(first @ second.T - before["bias"]) > 1.01 * off
    grown = outputs(resized(old, {"markov_rank": RANK + 3}, adapter), adapter, 4)
    for name, expected in before.items():
        torch.testing.assert_close(grown[name], expected, rtol=1e-4, atol=1e-4)


def test_a_head_of_a_lower_rank_than_it_has_columns_loses_nothing(adapter: TargetAdapter) -> None:
    """If W1 has rank 3, columns beyond the third say nothing: bias and confidence stay what they are."""
    old = trained(adapter)
    assert old.markov_head is not None
    with torch.no_grad():
        old.markov_head.previous.weight.copy_(
            old.markov_head.previous.weight[:, :3] @ torch.randn(3, RANK, generator=torch.Generator().manual_seed(1))
        )
    before, after = outputs(old, adapter, 4), outputs(resized(old, {"markov_rank": 3}, adapter), adapter, 4)
    for name, expected in before.items():
        torch.testing.assert_close(after[name], expected, rtol=1e-3, atol=1e-3)


def test_a_rank_above_the_draft_vocabulary_s_is_filled_up(adapter: TargetAdapter) -> None:
    """A product has no more singular values than its smaller side: columns beyond say nothing, and nothing breaks."""
    old = trained(adapter, draft_vocab_size=4)
    new = resized(old, {"markov_rank": 5}, adapter)
    torch.testing.assert_close(outputs(new, adapter, 4)["bias"], outputs(old, adapter, 4)["bias"], rtol=1e-4, atol=1e-4)


def test_new_weights_depend_on_the_seed_only(adapter: TargetAdapter) -> None:
    """Several processes resize alike, whatever random numbers they drew before; another seed gives other weights."""
    old = trained(adapter)
    changes = {"markov_rank": RANK + 2, "num_layers": 3}
    found = []
    for seed in (1, 1, 2):
        torch.rand(3)
        found.append(resized(old, changes, adapter, seed=seed, fresh=True).state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for name in ("markov_head.output.weight", "layers.0.self_attn.q_proj.weight"):
        assert not torch.equal(found[0][name], found[2][name])
    copied: Any = resized(old, changes, adapter).layers[0]
    assert not torch.equal(copied.self_attn.q_proj.weight, found[0]["layers.0.self_attn.q_proj.weight"])


def test_what_stays_the_same_is_no_change(adapter: TargetAdapter) -> None:
    """Naming a field with the value it has, also one that cannot change, is not refused."""
    old = trained(adapter)
    assert resized(old, {"markov": "vanilla", "num_layers": 2}, adapter) is old


@pytest.mark.parametrize(
    ("fields", "changes", "complaint"),
    [
        ({}, {"hidden_size": 8}, "no fields but block_size"),
        ({}, {"num_layers": 1}, "at least 2"),
        ({}, {"block_size": 0}, "block_size"),
        ({"markov": "gated"}, {"markov_rank": 3}, "only a vanilla"),
    ],
)
def test_what_cannot_change_is_refused(
    adapter: TargetAdapter, fields: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    """The message names what can."""
    with pytest.raises(InvalidSettingError, match=complaint):
        resized(trained(adapter, **fields), changes, adapter)


def test_a_run_goes_on_with_other_sizes(adapter: TargetAdapter, tmp_path: Path) -> None:
    """``start_from`` with a drafter section: the trained drafter's weights, the new sizes."""
    save_drafter(trained(adapter), tmp_path / "old")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(sample(random_ids(30), index=number).to_line() + "\n" for number in range(8)))
    llm = LLM(adapter.model, tokenizer=None, check_model=False)
    plan = TrainingPlan(
        out=tmp_path / "new", samples=(text,), start_from=tmp_path / "old", drafter={"num_layers": 3, "block_size": 5},
        training=TrainSettings(epochs=1.0, batch_size=4, num_anchors=4, held_out=0.2, precision="float32"),
    )  # fmt: skip
    TrainingRun(llm, plan).run()
    config = load_drafter(tmp_path / "new").config
    assert (config.num_layers, config.block_size, config.markov_rank) == (3, 5, RANK)
