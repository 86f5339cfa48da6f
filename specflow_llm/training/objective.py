"""What a block drafter is trained for: being accepted.

L = ce * CE + kl * KL(p_target || p_draft) + tv * ||p_draft - p_target||_1 + confidence * BCE(confidence, accept rate),
each a mean over supervised slots weighted by ``exp(-k / decay)`` for slot k (DSpark, arXiv:2607.05147, section 3.4; the
KL term is ours). The probability that a drafted token is accepted is ``sum_v min(p_draft, p_target) = 1 - TV``
(Leviathan et al. 2023, theorem 3.5), so the third term is twice the rejection rate, and its complement is what the
confidence head learns.

Two computations of the same: :func:`reference_loss` holds all logits at once and is plain PyTorch;
:func:`chunked_loss` never holds more than a chunk's, forwards or backwards.

Letters in shapes: N supervised slots, D hidden size, r Markov rank, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from specflow.errors import InvalidSettingError

_LOWEST_LOG = -100.0

Teacher = Callable[[torch.Tensor], torch.Tensor]
"""[n] row numbers -> [n, Vd] fp32 log-probabilities of the target, normalised over the whole vocabulary V."""
Head = Callable[[torch.Tensor], torch.Tensor]
"""[n, D] hidden -> [n, Vd] fp32 base logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How the terms are weighed.

    Raises:
        InvalidSettingError: a field has a value that cannot work.
    """

    ce: float = 0.1
    kl: float = 1.0
    """Weight of KL(p_target || p_draft). DSpark has none; in few steps it teaches far more than the L1 distance, whose
    gradient vanishes where the two laws do not overlap yet (``docs/log.md``)."""
    tv: float = 0.9
    """Weight of the L1 distance, which is twice the total variation."""
    confidence: float = 1.0
    decay: float = 4.0
    """Slot k weighs exp(-k / decay), k from 0."""

    def __post_init__(self) -> None:
        """Validate every field."""
        for name in ("ce", "kl", "tv", "confidence"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0.0):
                raise InvalidSettingError(name, value, "a number >= 0")
        if not (isinstance(self.decay, int | float) and self.decay > 0.0):
            raise InvalidSettingError("decay", self.decay, "a number > 0")

    def of_terms(self, like: torch.Tensor) -> torch.Tensor:
        """[3] weights of cross entropy, KL and L1 distance."""
        return like.new_tensor([self.ce, self.kl, self.tv])

    def of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """[N] slot numbers -> [N] fp32 weights."""
        return torch.exp(-slots.float() / self.decay)


@dataclass(frozen=True, slots=True)
class Slots:
    """The supervised slots of one step, in a row."""

    hidden: torch.Tensor
    """[N, D] backbone states; gradients pass."""
    markov: torch.Tensor | None
    """[N, r] Markov activations z; gradients pass. None without a Markov head."""
    markov_output: torch.Tensor | None
    """[Vd, r] W2; gradients pass."""
    confidence: torch.Tensor | None
    """[N] confidence logits; gradients pass."""
    labels: torch.Tensor
    """[N] column of the token that came, or -1 where it is outside the draft vocabulary."""
    weights: torch.Tensor
    """[N] fp32 weights."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """Sums over slots, to be divided by the summed weights (of all processes)."""

    total: torch.Tensor
    """Scalar with a gradient: all terms, weighted and summed."""
    ce: torch.Tensor
    kl: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    """Scalars without gradient: the unweighted terms, summed with the slots' weights."""
    accept: torch.Tensor
    """[N] probability that the drafted token is accepted, no gradient."""
    matches: torch.Tensor
    """[N] bool: draft and target agree on the most probable token."""


def draft_logits(slots: Slots, head: Head) -> torch.Tensor:
    """[N, Vd] fp32: base logits plus the Markov bias."""
    logits = head(slots.hidden)
    if slots.markov is not None and slots.markov_output is not None:
        logits = logits + functional.linear(slots.markov, slots.markov_output).to(logits.dtype)
    return logits


def logit_pieces(slots: Slots, head: Head, chunk: int) -> Iterator[torch.Tensor]:
    """:func:`draft_logits`, [n, Vd] for at most ``chunk`` slots at a time, in order."""
    for begin in range(0, len(slots.hidden), chunk):
        part = slice(begin, begin + chunk)
        markov = None if slots.markov is None else slots.markov[part]
        yield draft_logits(replace(slots, hidden=slots.hidden[part], markov=markov), head)


def _terms(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per slot: ([3, n] cross entropy, KL and L1 distance, [n] accept rate, [n] same most probable token)."""
    log_draft = torch.log_softmax(logits, dim=-1)
    draft, target = log_draft.exp(), teacher.exp()
    outside = (1.0 - target.sum(-1)).clamp(min=0.0)  # the target's mass on ids that cannot be drafted
    distance = (draft - target).abs().sum(-1) + outside
    # Over what can be drafted; the rest is a constant. 0 log 0 is 0, and log p of an impossible token is -inf.
    divergence = (target * (teacher.clamp(min=_LOWEST_LOG) - log_draft)).sum(-1)
    entropy = -log_draft.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = torch.where(labels >= 0, entropy, torch.zeros_like(entropy))
    accept = (1.0 - 0.5 * distance).detach().clamp(0.0, 1.0)
    matches = (logits.argmax(-1) == teacher.argmax(-1)) & (teacher.amax(-1).exp() >= outside)
    return torch.stack([entropy, divergence, distance]), accept, matches


def _terms_and_slope(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, weights: LossWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`_terms`, and the derivative of their weighted sum with respect to the logits, [n, Vd].

    With p the draft law, t the target's and s = sign(p - t), the three derivatives are ``p - onehot(label)``,
    ``p * sum(t) - t`` and ``p * (s - <p, s>)``. Written out because it needs fewer passes over
    [n, Vd] than autograd. ``teacher`` is overwritten.
    """
    known = labels >= 0
    places = labels.clamp(min=0).unsqueeze(-1)
    best, expected = teacher.max(-1)
    log_draft = torch.log_softmax(logits, dim=-1)
    matches = log_draft.argmax(-1) == expected
    entropy = torch.where(known, -log_draft.gather(-1, places).squeeze(-1), 0.0)
    target = teacher.exp()
    mass = target.sum(-1)
    outside = (1.0 - mass).clamp(min=0.0)
    divergence = torch.linalg.vecdot(target, teacher.clamp_(min=_LOWEST_LOG).sub_(log_draft))
    draft = log_draft.exp_()
    gap = torch.sub(draft, target, out=teacher)
    distance = gap.abs().sum(-1) + outside
    sign = gap.sign_()
    lean = torch.linalg.vecdot(draft, sign)
    scale = weights.ce * known + weights.kl * mass - weights.tv * lean
    slope = sign.mul_(weights.tv).add_(scale.unsqueeze(-1)).mul_(draft).sub_(target, alpha=weights.kl)
    slope.scatter_add_(-1, places, (-weights.ce * known.to(slope.dtype)).unsqueeze(-1))
    accept = (1.0 - 0.5 * distance).clamp(0.0, 1.0)
    return torch.stack([entropy, divergence, distance]), accept, matches & (best.exp() >= outside), slope


def reference_loss(slots: Slots, head: Head, teacher: Teacher, weights: LossWeights) -> LossParts:
    """The objective in plain PyTorch, all [N, Vd] logits at once."""
    rows = torch.arange(len(slots.hidden), device=slots.hidden.device)
    terms, accept, matches = _terms(draft_logits(slots, head), teacher(rows), slots.labels)
    sums = (terms * slots.weights).sum(-1)
    sure = _confidence_loss(slots, accept)
    total = torch.dot(sums, weights.of_terms(sums)) + weights.confidence * sure
    ce, kl, tv = sums.detach()
    return LossParts(total, ce, kl, tv, sure.detach(), accept, matches)


def chunked_loss(slots: Slots, head: Head, teacher: Teacher, weights: LossWeights, *, chunk: int = 512) -> LossParts:
    """The same, with logits of at most ``chunk`` slots alive at any time.

    Gradients are taken chunk by chunk in the forward pass, as in fused linear cross entropy (Hsu et al. 2024, "Liger
    kernel", arXiv:2410.10989), in closed form up to the logits, and handed on in the backward pass.
    """
    if chunk < 1:
        raise InvalidSettingError("chunk", chunk, "an integer >= 1")
    combined, sums, accept, matches = _Chunked.apply(  # type: ignore[no-untyped-call]
        slots.hidden, slots.markov, slots.markov_output, slots.labels, slots.weights, head, teacher, weights, chunk
    )
    sure = _confidence_loss(slots, accept)
    ce, kl, tv = sums
    return LossParts(combined + weights.confidence * sure, ce, kl, tv, sure.detach(), accept, matches)


def _confidence_loss(slots: Slots, accept: torch.Tensor) -> torch.Tensor:
    if slots.confidence is None:
        return slots.weights.new_zeros(())
    losses = functional.binary_cross_entropy_with_logits(slots.confidence.to(accept.dtype), accept, reduction="none")
    return (losses * slots.weights).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - one argument per tensor that autograd must see
        ctx: Any,
        hidden: torch.Tensor,
        markov: torch.Tensor | None,
        markov_output: torch.Tensor | None,
        labels: torch.Tensor,
        slot_weights: torch.Tensor,
        head: Head,
        teacher: Teacher,
        weights: LossWeights,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        """Losses, and their gradients on the side."""
        count = len(hidden)
        hidden_grad = torch.zeros_like(hidden)
        markov_grad = None if markov is None else torch.zeros_like(markov)
        output = None if markov_output is None else markov_output.detach().requires_grad_()
        output_grad = None if output is None else torch.zeros_like(output)
        sums = slot_weights.new_zeros(3)
        accept = slot_weights.new_zeros(count)
        matches = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        for begin in range(0, count, chunk):
            part = slice(begin, min(begin + chunk, count))
            rows = torch.arange(part.start, part.stop, device=hidden.device)
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_()
                serial = None if markov is None else markov[part].detach().requires_grad_()
                piece = Slots(states, serial, output, None, labels[part], slot_weights[part])
                logits = draft_logits(piece, head)
            terms, accept[part], matches[part], slope = _terms_and_slope(
                logits.detach(), teacher(rows), piece.labels, weights
            )
            wanted = [tensor for tensor in (states, serial, output) if tensor is not None]
            grads = torch.autograd.grad(logits, wanted, slope.mul_(piece.weights.unsqueeze(-1)))
            sums += (terms * piece.weights).sum(-1)
            hidden_grad[part] = grads[0]
            if markov_grad is not None and output_grad is not None:
                markov_grad[part] = grads[1]
                output_grad += grads[2]
        ctx.save_for_backward(hidden_grad, markov_grad, output_grad)
        ctx.mark_non_differentiable(sums, accept, matches)
        return torch.dot(sums, weights.of_terms(sums)), sums, accept, matches

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that were taken in the forward pass."""
        scaled = [None if saved is None else saved * grads[0] for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None, None)


def expected_length(accept_by_slot: torch.Tensor) -> float:
    """1 + the sum over k of the product of the first k accept rates: emitted tokens per round, bonus included.

    Args:
        accept_by_slot: [gamma] mean accept rates, taken as independent.
    """
    return 1.0 + float(accept_by_slot.double().cumprod(0).sum())
