"""The serial heads: one slot at a time is all at once, and each sees what it may see."""

from __future__ import annotations

import pytest
import torch

from specflow_llm.dspark import DSparkModel
from specflow_llm.dspark.config import MARKOV_KINDS
from specflow_llm.dspark.heads import ConfidenceHead, build_markov_head
from specflow_llm.dspark.model import parameter_count
from tests.specflow_llm.block_drafters import config, drafter_model


@pytest.mark.parametrize("kind", [kind for kind in MARKOV_KINDS if kind != "none"])
def test_one_slot_at_a_time_equals_all_at_once(kind: str) -> None:
    """Drafting walks through the head step by step; training runs all slots; both give the same activations."""
    model = drafter_model(markov=kind)
    head = model.markov_head
    assert head is not None
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 5, 32, generator=generator)
    previous = torch.randn(3, 5, 8, generator=generator)
    with torch.no_grad():
        together = head(previous, hidden)
        state = head.initial_state(hidden[:, 0])
        for slot in range(5):
            row, state = head.step(previous[:, slot], hidden[:, slot], state)
            torch.testing.assert_close(row, together[:, slot], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "sees_hidden", "sees_far"), [("vanilla", False, False), ("gated", True, False), ("rnn", True, True)]
)
def test_what_each_kind_of_markov_head_sees(kind: str, sees_hidden: bool, sees_far: bool) -> None:  # noqa: FBT001
    """Vanilla: the last token. Gated: and the slot's hidden state. RNN: and all tokens before."""
    head = drafter_model(markov=kind).markov_head
    assert head is not None
    generator = torch.Generator().manual_seed(3)
    hidden, previous = torch.randn(1, 4, 32, generator=generator), torch.randn(1, 4, 8, generator=generator)
    with torch.no_grad():
        plain = head(previous, hidden)[0, 3]
        for name, slot, expected in (("p", 3, True), ("p", 0, sees_far), ("h", 3, sees_hidden), ("h", 0, sees_far)):
            other = {"p": previous.clone(), "h": hidden.clone()}
            other[name][0, slot] += 1.0
            moved_by = float((head(other["p"], other["h"])[0, 3] - plain).abs().max())
            assert (moved_by > 1e-6) == expected, (name, slot)


def test_confidence_sees_the_token_before_and_never_its_own() -> None:
    """Its inputs are the slot's hidden state and the previous token's embedding, and either can be switched off."""
    for with_markov, kind, width in ((True, "vanilla", 40), (False, "vanilla", 32), (True, "none", 32)):
        head = ConfidenceHead(config(markov=kind, confidence_with_markov=with_markov))
        assert head.linear.in_features == width
    assert build_markov_head(config(markov="none")) is None
    assert drafter_model(markov="none").previous(torch.tensor([1])) is None


def test_a_fresh_drafter_is_sure_of_nothing_and_corrects_nothing() -> None:
    """Training starts at a confidence of one half and a Markov bias of zero."""
    model = DSparkModel(config())
    assert model.markov_head is not None
    assert model.confidence_head is not None
    hidden, ids = torch.randn(2, 4, 32), torch.arange(8).view(2, 4)
    before = model.previous(ids)
    assert before is not None
    assert not bool(model.markov_head.output(model.markov_head(before, hidden)).any())
    assert not bool(model.confidence_head(hidden, before).any())
    assert parameter_count(model) == sum(p.numel() for p in model.parameters())
