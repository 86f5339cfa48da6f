"""The block drafter's network: who sees whom, at which positions, and what the serial heads add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specflow.errors import InvalidSettingError
from specflow_llm.dspark import DSparkConfig, DSparkModel, spread_layers
from specflow_llm.dspark import model as model_module
from specflow_llm.dspark.config import LAYOUTS
from specflow_llm.dspark.layers import BlockLayer, Rotary
from specflow_llm.dspark.model import block_mask, concatenated
from tests.specflow_llm.block_drafters import config, drafter_model, spread

SIZE = 9
"""Context positions."""
ANCHORS = torch.tensor([[2, 5, -1], [1, 7, 8]])
LENGTHS = torch.tensor([7, 9])


def inputs(model: DSparkModel, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random features [B, S, F] and slot embeddings [B, A, K, D]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, SIZE, model.config.feature_size, generator=generator)
    embedded = torch.randn(2, 3, model.config.num_slots, model.config.hidden_size, generator=generator)
    return features, embedded


def moved(model: DSparkModel, position: int, anchors: torch.Tensor = ANCHORS) -> torch.Tensor:
    """[B, A] how far the hidden states of each block move when the features at one position change."""
    features, embedded = inputs(model)
    changed = features.clone()
    changed[:, position] += 1.0
    with torch.no_grad():
        before = model(features, anchors, embedded, LENGTHS)
        after = model(changed, anchors, embedded, LENGTHS)
    return (after - before).abs().amax((-1, -2))


# --- Masks ------------------------------------------------------------------------------------------------------------


def strictly_before(model: DSparkModel) -> bool:
    """Whether each block sees the features before its anchor, and neither the anchor's own nor later ones."""
    for position in range(SIZE):
        moves = moved(model, position) > 1e-6
        for row in range(2):
            for block in range(3):
                anchor, length = int(ANCHORS[row, block]), int(LENGTHS[row])
                if anchor >= 0 and bool(moves[row, block]) != (position < min(anchor, length)):
                    return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_sees_features_strictly_before_its_anchor(layout: str) -> None:
    """Changing the anchor's own features, or any later ones, changes nothing in its block; all earlier ones count."""
    assert strictly_before(drafter_model(layout=layout))


def test_a_mask_that_lets_the_anchor_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known fault ``<=`` instead of ``<`` fails the test above."""

    def lenient(anchors: torch.Tensor, *rest: Any) -> torch.Tensor:
        return block_mask(anchors + (anchors >= 0).long(), *rest)

    monkeypatch.setattr(model_module, "block_mask", lenient)
    assert not strictly_before(drafter_model())


def test_blocks_never_see_each_other() -> None:
    """Another block's embeddings do not matter; a block's own do, in both directions."""
    model = drafter_model()
    features, embedded = inputs(model)
    with torch.no_grad():
        before = model(features, ANCHORS, embedded, LENGTHS)
        for block in range(3):
            for slot in (0, model.config.num_slots - 1):
                changed = embedded.clone()
                changed[:, block, slot] += 1.0
                moves = (model(features, ANCHORS, changed, LENGTHS) - before).abs().amax(-1)
                for other in range(3):
                    if other != block:
                        assert float(moves[:, other].max()) == 0.0
                assert float(moves[:, block].min()) > 1e-4  # the first slot sees the last, and the last the first


def test_padding_blocks_are_harmless() -> None:
    """Blocks that only pad give finite numbers and leave the others as they are; so does padding after a sequence."""
    model = drafter_model()
    features, embedded = inputs(model)
    with torch.no_grad():
        padded = model(features, ANCHORS, embedded, LENGTHS)
        alone = model(features[:1, :7], ANCHORS[:1, :2], embedded[:1, :2], LENGTHS[:1])
        empty = model(features, torch.full_like(ANCHORS, -1), embedded, LENGTHS)
    assert bool(padded.isfinite().all())
    assert bool(empty.isfinite().all())
    torch.testing.assert_close(padded[:1, :2], alone, rtol=0.0, atol=1e-5)


def test_gradients_through_padding_blocks_are_finite() -> None:
    """A block without any context, and a padding block, do not spoil gradients."""
    model = drafter_model()
    features, embedded = inputs(model)
    model(features, torch.tensor([[0, 3, -1]] * 2), embedded, LENGTHS).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("window", [1, 3])
def test_a_sliding_window_hides_what_is_further_back(window: int) -> None:
    """The last ``window`` positions before the anchor count, and no others."""
    model = drafter_model(sliding_window=window)
    for position in range(SIZE):
        moves = moved(model, position) > 1e-6
        for block, anchor in enumerate((1, 7, 8)):
            assert bool(moves[1, block]) == (anchor - window <= position < anchor)


def test_the_mask_is_what_its_definition_says() -> None:
    """The vectorised mask equals four loops over slots and keys."""
    slots = 3
    mask = block_mask(ANCHORS, SIZE, slots, LENGTHS, 4)
    assert mask.shape == (2, 9, SIZE + 9)
    for row in range(2):
        for query in range(9):
            anchor = int(ANCHORS[row, query // slots])
            for key in range(SIZE + 9):
                if key < SIZE:
                    seen = anchor - 4 <= key < anchor and key < int(LENGTHS[row])
                else:
                    seen = (key - SIZE) // slots == query // slots
                assert bool(mask[row, query, key]) == seen


# --- Positions --------------------------------------------------------------------------------------------------------


def test_only_distances_between_positions_count() -> None:
    """Shifting a context and its block together changes nothing; shifting the block alone does."""
    model = drafter_model()
    features, embedded = inputs(model)
    places = torch.arange(5)[None]
    slots = 5 + torch.arange(model.config.num_slots)[None]

    def hidden(context_shift: int, block_shift: int) -> torch.Tensor:
        context = model.context(model.fuse(features[:1, :5]), places + context_shift)
        return model.block(embedded[:1, 0], slots + block_shift, concatenated(context), None)

    with torch.no_grad():
        plain = hidden(0, 0)
        torch.testing.assert_close(hidden(40, 40), plain, rtol=0.0, atol=1e-5)
        assert float((hidden(0, -1) - plain).abs().max()) > 1e-2


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_angles_are_those_of_transformers(kind: str) -> None:
    """Frequencies and attention factor follow the target's rotary parameters."""
    made = config(rope=ROPES[kind])
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=256, rope_parameters=ROPES[kind]
        )
    )
    positions = torch.tensor([[0, 1, 17, 200]])
    for mine, expected in zip(Rotary(made)(positions, torch.float32), theirs(torch.zeros(1), positions), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.0, atol=1e-6)


def test_a_cast_to_bfloat16_keeps_the_frequencies() -> None:
    """Frequencies stay in float32 when the drafter is cast; rounded ones would turn position 3000 by half a radian."""
    made = config(head_dim=16, max_positions=8192)
    model = DSparkModel(made)
    positions = torch.tensor([[3000]])
    before = model.rotary(positions, torch.float32)
    after = model.to(torch.bfloat16).rotary(positions, torch.float32)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    frequencies = torch.tensor([10000.0 ** (-index / 8) for index in range(8)])
    lost = (frequencies.to(torch.bfloat16).float() - frequencies).abs().max() * 3000
    assert float(lost) > 0.5  # what the cast would have done
    hidden = model(
        torch.randn(1, 4, made.feature_size),
        torch.tensor([[3]]),
        torch.randn(1, 1, made.num_slots, 32),
        torch.tensor([4]),
    )
    assert hidden.dtype == torch.bfloat16


# --- Layers -----------------------------------------------------------------------------------------------------------


def test_a_layer_without_context_is_a_llama_layer() -> None:
    """With the same weights and everything visible, a block layer computes what transformers' layer computes."""
    made = config()
    mine = BlockLayer(made)
    spread(mine)
    theirs = LlamaDecoderLayer(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            rms_norm_eps=made.norm_eps,
            attn_implementation="eager",
        ),
        0,
    )
    theirs.load_state_dict(mine.state_dict())
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    angles = Rotary(made)(torch.arange(5).expand(2, 5), torch.float32)
    normed = mine.input_layernorm(states)
    with torch.no_grad():
        found = mine.finish(states, normed, angles, mine.self_attn.key_value(normed, angles), None)
        expected = theirs(states, position_embeddings=angles, attention_mask=torch.zeros(2, 1, 5, 5))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_weight_takes_part(qk_norm: bool) -> None:  # noqa: FBT001 - a parameter
    """No trained number is without effect on hidden states or heads."""
    model = drafter_model(qk_norm=qk_norm, markov="rnn")
    features, embedded = inputs(model)
    hidden = model(features, ANCHORS, embedded, LENGTHS)
    before = model.previous(torch.arange(24).view(2, 3, 4))
    assert model.markov_head is not None
    assert before is not None
    assert model.confidence_head is not None
    serial = model.markov_head.output(model.markov_head(before, hidden))
    (serial.square().sum() + model.confidence_head(hidden, before).square().sum()).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert silent == []


# --- Config -----------------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("vocab_size", 0),
    ("hidden_size", True),
    ("target_layer_ids", ()),
    ("target_layer_ids", (2, 0)),
    ("target_layer_ids", (0, 0)),
    ("target_layer_ids", (-1, 2)),
    ("target_layer_ids", (0, 3)),
    ("mask_token_id", 64),
    ("mask_token_id", -1),
    ("num_kv_heads", 3),
    ("head_dim", 7),
    ("layout", "other"),
    ("markov", "lstm"),
    ("markov_rank", 0),
    ("markov_top_k", -1),
    ("draft_vocab_size", 65),
    ("draft_vocab_size", 0),
    ("sliding_window", 0),
    ("block_size", 0),
    ("max_positions", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_settings_that_cannot_work_are_refused_by_name(name: str, value: Any) -> None:
    """The error names the field."""
    with pytest.raises(InvalidSettingError, match=name):
        config(**{name: value})


def test_the_last_target_layer_is_refused_with_the_reason() -> None:
    """Whether the last layer's output is normed differs between libraries, so it is not read."""
    with pytest.raises(InvalidSettingError, match="final norm"):
        config(target_layer_ids=(0, 3))


def test_configs_survive_json() -> None:
    """Plain data in, an equal config out; unknown and absent fields are named."""
    made = config(sliding_window=5, draft_vocab_size=8, markov="rnn", layout="mask_predicts")
    assert DSparkConfig.from_dict(made.to_dict()) == made
    with pytest.raises(InvalidSettingError, match="colour"):
        DSparkConfig.from_dict({**made.to_dict(), "colour": "red"})
    values = made.to_dict()
    del values["hidden_size"]
    with pytest.raises(InvalidSettingError, match="hidden_size"):
        DSparkConfig.from_dict(values)


def test_sizes_that_follow_from_others() -> None:
    """A block has one slot more where the anchor does not predict."""
    anchor, mask = config(), config(layout="mask_predicts")
    assert (anchor.num_slots, anchor.first_slot) == (4, 0)
    assert (mask.num_slots, mask.first_slot) == (5, 1)
    assert (anchor.feature_size, anchor.head_size, anchor.previous_size) == (64, 64, 8)
    assert config(markov="none").previous_size == 0
    assert config(draft_vocab_size=8).head_size == 8


def test_spread_layers_can_be_read_in_any_target() -> None:
    """The layers rise strictly and leave the last one out, however few layers a target has."""
    for num_layers in range(2, 41):
        for count in (1, 2, 5):
            ids = spread_layers(num_layers, count)
            assert 1 <= len(ids) <= count
            config(num_target_layers=num_layers, target_layer_ids=ids)


def test_spread_layers_are_those_of_the_paper() -> None:
    """Five layers of 36, as DSpark reads them in Qwen3-4B."""
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
