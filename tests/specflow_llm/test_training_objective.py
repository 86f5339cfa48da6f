"""The objective: two computations of one loss, and the identities it stands on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specflow.errors import InvalidSettingError
from specflow_llm.training.objective import (
    LossParts,
    LossWeights,
    Slots,
    chunked_loss,
    draft_logits,
    expected_length,
    reference_loss,
)

COUNT, WIDTH, RANK, VOCAB = 23, 6, 4, 11
WEIGHTS = LossWeights(ce=0.3, kl=0.7, tv=0.9, confidence=0.5)


class Problem:
    """Random slots, a head and a teacher.

    Args:
        size: columns that can be drafted; fewer than ``VOCAB`` leave mass outside.
        markov: with a Markov head.
        confidence: with a confidence head.
        dtype: of everything.
    """

    def __init__(
        self, *, size: int = VOCAB, markov: bool = True, confidence: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.weight = draw(VOCAB, WIDTH)[:size]
        self.law = torch.log_softmax(1.5 * draw(COUNT, VOCAB), dim=-1)
        labels = torch.randint(VOCAB, (COUNT,), generator=generator)
        self.slots = Slots(
            hidden=draw(COUNT, WIDTH).requires_grad_(),
            markov=draw(COUNT, RANK).requires_grad_() if markov else None,
            markov_output=draw(size, RANK).requires_grad_() if markov else None,
            confidence=draw(COUNT).requires_grad_() if confidence else None,
            labels=torch.where(labels < size, labels, -1),
            weights=torch.rand(COUNT, generator=generator, dtype=dtype) + 0.1,
        )
        self.size = size
        self.alive: list[int] = []
        """Rows of logits the head was asked for, call by call."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] -> [n, Vd]."""
        self.alive.append(len(hidden))
        return hidden @ self.weight.T

    def teacher(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, Vd]."""
        return self.law[rows, : self.size]

    def leaves(self) -> list[torch.Tensor]:
        """What gradients are wanted for."""
        found = (self.slots.hidden, self.slots.markov, self.slots.markov_output, self.slots.confidence)
        return [tensor for tensor in found if tensor is not None]

    def draft(self) -> torch.Tensor:
        """[N, Vd] the draft law, computed here."""
        logits = self.slots.hidden @ self.weight.T
        if self.slots.markov is not None and self.slots.markov_output is not None:
            logits = logits + self.slots.markov @ self.slots.markov_output.T
        return logits.softmax(-1).detach()


def with_grads(
    problem: Problem, compute: Callable[..., LossParts], **settings: Any
) -> tuple[LossParts, list[torch.Tensor]]:
    """Parts, and the gradients of three times the total."""
    parts = compute(problem.slots, problem.head, problem.teacher, WEIGHTS, **settings)
    return parts, list(torch.autograd.grad(3.0 * parts.total, problem.leaves()))


SHAPES: list[dict[str, Any]] = [
    {},
    {"markov": False},
    {"size": 7},
    {"size": 7, "markov": False, "confidence": False},
    {"confidence": False},
]


# --- Two computations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "whole")
@pytest.mark.parametrize("chunk", [1, 7, COUNT, 100])
def test_chunks_change_no_value_and_no_gradient(shape: dict[str, Any], chunk: int) -> None:
    """The chunked loss equals the plain one to 1e-6 in every part, whatever the size of a chunk."""
    problem = Problem(**shape)
    parts, grads = with_grads(problem, chunked_loss, chunk=chunk)
    expected, expected_grads = with_grads(problem, reference_loss)
    for name in ("total", "ce", "kl", "tv", "confidence", "accept"):
        torch.testing.assert_close(
            getattr(parts, name) / COUNT, getattr(expected, name) / COUNT, rtol=0.0, atol=1e-6, msg=name
        )
    assert torch.equal(parts.matches, expected.matches)
    for mine, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        assert bool(other.any())


@pytest.mark.parametrize("chunk", [1, 5, COUNT])
def test_no_more_logits_than_a_chunk_are_asked_for(chunk: int) -> None:
    """Forwards and backwards, the head sees at most ``chunk`` rows at a time; the plain loss sees all."""
    problem = Problem()
    with_grads(problem, chunked_loss, chunk=chunk)
    assert max(problem.alive) == chunk
    assert sum(problem.alive) == COUNT  # each row once: nothing is recomputed
    problem.alive.clear()
    with_grads(problem, reference_loss)
    assert problem.alive == [COUNT]


@pytest.mark.parametrize("shape", [{}, {"size": 7, "markov": False}], ids=["markov", "part"])
def test_gradients_of_the_chunked_loss_are_derivatives(shape: dict[str, Any]) -> None:
    """Finite differences in float64 agree (the accept rate is a constant to the confidence head, as it should be)."""
    problem = Problem(dtype=torch.float64, confidence=False, **shape)

    def total(*leaves: torch.Tensor) -> torch.Tensor:
        names = ("hidden", "markov", "markov_output")[: len(leaves)]
        slots = replace(problem.slots, **dict(zip(names, leaves, strict=True)))
        return chunked_loss(slots, problem.head, problem.teacher, WEIGHTS, chunk=5).total

    assert torch.autograd.gradcheck(total, tuple(problem.leaves()), eps=1e-7, atol=1e-6)


def test_the_accept_rate_teaches_the_confidence_head_and_not_the_other_way_round() -> None:
    """With only the confidence term, no gradient reaches hidden states through the label."""
    problem = Problem()
    for compute in (reference_loss, chunked_loss):
        parts = compute(
            problem.slots, problem.head, problem.teacher, LossWeights(ce=0.0, kl=0.0, tv=0.0, confidence=1.0)
        )
        grads = torch.autograd.grad(parts.total, problem.leaves(), allow_unused=True)
        assert all(grad is None or not bool(grad.any()) for grad in grads[:-1])
        assert problem.slots.confidence is not None
        expected = (problem.slots.confidence.sigmoid() - parts.accept) * problem.slots.weights
        torch.testing.assert_close(grads[-1], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("markov", [True, False])
def test_no_slots_give_a_loss_of_zero_and_gradients_of_zero(markov: bool) -> None:  # noqa: FBT001 - a parameter
    """A batch in which nothing is supervised is not an error."""
    slots = Slots(
        torch.zeros(0, WIDTH, requires_grad=True),
        torch.zeros(0, RANK, requires_grad=True) if markov else None,
        torch.ones(VOCAB, RANK, requires_grad=True) if markov else None,
        torch.zeros(0, requires_grad=True),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
    )
    problem = Problem()
    for compute in (reference_loss, chunked_loss):
        parts = compute(slots, problem.head, problem.teacher, WEIGHTS)
        assert float(parts.total.detach()) == 0.0
        parts.total.backward()  # type: ignore[no-untyped-call]
        assert parts.accept.shape == (0,)


# --- Identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [VOCAB, 7])
def test_the_accept_rate_is_the_overlap_of_the_two_laws(size: int) -> None:
    """``sum_v min(p, q)``, where what cannot be drafted has q = 0; and TV and KL are what they are called."""
    problem = Problem(size=size)
    parts = reference_loss(problem.slots, problem.head, problem.teacher, WEIGHTS)
    draft = torch.zeros(COUNT, VOCAB)
    draft[:, :size] = problem.draft()
    target = problem.law.exp()
    overlap = torch.minimum(draft, target).sum(-1)
    torch.testing.assert_close(parts.accept, overlap, rtol=0.0, atol=1e-6)
    distance = (draft - target).abs().sum(-1)
    torch.testing.assert_close(parts.tv, (distance * problem.slots.weights).sum(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(1.0 - 0.5 * distance, overlap, rtol=0.0, atol=1e-6)
    inside = target[:, :size]
    divergence = (inside * (inside.log() - draft[:, :size].log())).sum(-1)
    torch.testing.assert_close(parts.kl, (divergence * problem.slots.weights).sum(), rtol=1e-5, atol=1e-5)
    known = problem.slots.labels >= 0
    assert bool(known.all()) == (size == VOCAB)
    chosen = draft[torch.arange(COUNT)[known], problem.slots.labels[known]]
    torch.testing.assert_close(parts.ce, (-chosen.log() * problem.slots.weights[known]).sum(), rtol=1e-5, atol=1e-5)


def test_the_accept_rate_is_what_the_rejection_rule_accepts() -> None:
    """Drawing from q and accepting with min(1, p / q) accepts that often; 4e5 draws, false alarm odds below 1e-8."""
    problem = Problem(size=7)
    parts = reference_loss(problem.slots, problem.head, problem.teacher, WEIGHTS)
    draft, target = problem.draft(), problem.law.exp()[:, :7]
    generator = torch.Generator().manual_seed(8)
    draws = 400_000 // COUNT
    tokens = draft.multinomial(draws, replacement=True, generator=generator)
    ratio = (target / draft).gather(-1, tokens)
    accepted = (torch.rand(ratio.shape, generator=generator) < ratio).double().mean()
    deviation = math.sqrt(0.25 / (draws * COUNT))
    assert abs(float(accepted - parts.accept.double().mean())) < 6.0 * deviation


def test_a_perfect_draft_is_always_accepted() -> None:
    """Where the draft law is the target's, accept rates are 1, distances 0, and a block emits gamma + 1."""
    problem = Problem(markov=False)
    law = problem.law.clone()
    parts = reference_loss(
        replace(problem.slots, hidden=torch.zeros(COUNT, WIDTH, requires_grad=True)),
        lambda hidden: law + 0.0 * hidden.sum(-1, keepdim=True) + 17.0,
        problem.teacher,
        WEIGHTS,
    )
    torch.testing.assert_close(parts.accept, torch.ones(COUNT), rtol=0.0, atol=1e-5)
    assert float(parts.tv) == pytest.approx(0.0, abs=1e-4)
    assert float(parts.kl) == pytest.approx(0.0, abs=1e-4)
    assert bool(parts.matches.all())
    assert expected_length(torch.ones(7)) == 8.0
    assert expected_length(torch.zeros(7)) == 1.0
    assert expected_length(torch.tensor([0.5, 0.5])) == 1.75


def test_drafts_that_share_nothing_with_the_target_are_never_accepted() -> None:
    """Disjoint laws: accept rate 0, distance 2, and all numbers stay finite."""
    law = torch.full((1, 4), -math.inf)
    law[0, 0] = 0.0
    slots = Slots(torch.zeros(1, 2, requires_grad=True), None, None, torch.zeros(1), torch.tensor([0]), torch.ones(1))
    logits = torch.tensor([[-200.0, 0.0, 0.0, 0.0]])
    for compute in (reference_loss, chunked_loss):
        parts = compute(slots, lambda hidden: logits + 0.0 * hidden.sum(), lambda rows: law[rows], WEIGHTS)
        assert float(parts.accept[0]) == pytest.approx(0.0, abs=1e-6)
        assert float(parts.tv) == pytest.approx(2.0, abs=1e-6)
        assert bool(parts.total.isfinite())
        (grad,) = torch.autograd.grad(parts.total, slots.hidden)
        assert bool(grad.isfinite().all())


def test_a_label_outside_the_draft_vocabulary_costs_no_cross_entropy() -> None:
    """It cannot be drafted; its mass is rejected, and the other terms say so."""
    problem = Problem(size=7)
    slots = replace(problem.slots, labels=torch.full((COUNT,), -1))
    parts = reference_loss(slots, problem.head, problem.teacher, WEIGHTS)
    assert float(parts.ce) == 0.0
    outside = problem.law.exp()[:, 7:].sum(-1)
    assert bool((parts.accept <= 1.0 - outside + 1e-6).all())


def test_a_most_probable_token_outside_the_draft_vocabulary_is_no_match() -> None:
    """Draft and target agree on the best of what can be drafted, yet greedy decoding takes another."""
    law = torch.tensor([[0.2, 0.1, 0.7], [0.6, 0.1, 0.3]]).log()
    slots = Slots(torch.zeros(2, 2), None, None, None, torch.tensor([-1, 0]), torch.ones(2))
    head = lambda hidden: torch.tensor([[2.0, 0.0], [2.0, 0.0]])  # noqa: E731
    parts = reference_loss(slots, head, lambda rows: law[rows, :2], WEIGHTS)
    assert parts.matches.tolist() == [False, True]


def test_weights_of_slots_decay() -> None:
    """Slot k weighs exp(-k / decay); DSpark's figures for 4."""
    found = LossWeights().of_slots(torch.arange(7)).tolist()
    assert found == pytest.approx([1.0, 0.78, 0.61, 0.47, 0.37, 0.29, 0.22], abs=0.005)
    assert LossWeights(decay=1.0).of_slots(torch.tensor([2])).item() == pytest.approx(math.exp(-2.0))


def test_terms_are_weighed_as_asked() -> None:
    """The total is the weighted sum of the parts, and a slot of weight 0 does not exist."""
    problem = Problem()
    for compute in (reference_loss, chunked_loss):
        parts = compute(problem.slots, problem.head, problem.teacher, WEIGHTS)
        expected = 0.3 * parts.ce + 0.7 * parts.kl + 0.9 * parts.tv + 0.5 * parts.confidence
        torch.testing.assert_close(parts.total.detach(), expected, rtol=1e-6, atol=1e-5)
        silent = problem.slots.weights.clone()
        silent[3:] = 0.0
        some = compute(replace(problem.slots, weights=silent), problem.head, problem.teacher, WEIGHTS)
        (grad,) = torch.autograd.grad(some.total, problem.slots.hidden)
        assert bool(grad[:3].any())
        assert not bool(grad[3:].any())


def test_the_markov_bias_is_added_to_the_base_logits() -> None:
    """Logits are the head's plus ``W2 z``."""
    problem = Problem()
    logits = draft_logits(problem.slots, problem.head)
    torch.testing.assert_close(logits.softmax(-1).detach(), problem.draft(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"), [("ce", -1.0), ("kl", math.inf), ("tv", math.nan), ("confidence", -0.1), ("decay", 0.0)]
)
def test_weights_that_cannot_work_are_refused_by_name(name: str, value: float) -> None:
    """The error names the field."""
    with pytest.raises(InvalidSettingError, match=name):
        LossWeights(**{name: value})


def test_a_chunk_holds_at_least_one_slot() -> None:
    """A chunk of nothing would never end."""
    problem = Problem()
    with pytest.raises(InvalidSettingError, match="chunk"):
        chunked_loss(problem.slots, problem.head, problem.teacher, WEIGHTS, chunk=0)
