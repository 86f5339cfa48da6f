"""Which drafted tokens stay, and the token after them. Pure functions.

Every rule here is exact: the emitted tokens follow the target's law, whatever the draft. What differs is how many
drafted tokens are accepted, and what a rule must know about the draft.

- *greedy*: a token stays while it is the target's most probable one.
- *sequential* (sample and match): the target draws its own token at each position, and a drafted token stays while the
  two agree. With noise keyed by position this is the *coupled* rule: the emitted tokens are then the same as without
  any draft. A draft that branches is checked the same way, each token followed by whichever alternative the target
  chose (*tree*).
- *token* (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", Algorithm 1; Chen et al.
  2023, "Accelerating large language model decoding with speculative sampling", Algorithm 2): accept with the ratio of
  target to draft probability. Needs the probabilities the tokens were drawn from.
- *block* (Sun et al. 2024, "Block verification accelerates speculative decoding", Algorithm 2): tests prefixes instead
  of tokens, and never accepts fewer on average. Needs the same probabilities.
- *one_hot*: the token rule for a draft that is certain. Exact for any way of choosing the tokens.

Shapes: ``K`` drafted tokens, ``V`` vocabulary size. Row k of ``target_probs`` [K + 1, V] is the target's law after k
drafted tokens; row k of ``draft_probs`` [K, V] is the law that drafted token k was drawn from. Both are processed laws:
after penalties, temperature and truncation.

A drafted id outside the vocabulary, or one to which its own law gives no probability, was not drawn from that law. The
ratio rules treat the draft as ending before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specflow.trees import HISTORY, continuations, depths
from specflow.types import AcceptPrefix

from .sampling import ACCEPT, RESIDUAL, RowSampler, gumbel_noise, gumbel_rows, lane, race, uniform

# --- Laws -------------------------------------------------------------------------------------------------------------
#
# Sums over the vocabulary are accumulated in fp64. Elementwise terms keep the dtype of the probabilities: one fp32
# rounding is about 6e-8 of a term, so a sum of terms that add up to at most 1 is off by no more than that.


def _probs_of(probs: torch.Tensor, draft_ids: Sequence[int]) -> list[float]:
    """The probability each row gives to its drafted id; 0 for ids outside the vocabulary.

    Args:
        probs: [>= K, V].
        draft_ids: K ids.
    """
    vocab_size = probs.shape[-1]
    safe = [token if 0 <= token < vocab_size else 0 for token in draft_ids]
    index = torch.tensor(safe, dtype=torch.int64, device=probs.device)
    values: list[float] = probs[: len(safe)].gather(-1, index[:, None]).flatten().tolist()
    return [value if token == known else 0.0 for value, token, known in zip(values, draft_ids, safe, strict=True)]


def _ratios(target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: Sequence[int]) -> list[float]:
    """Target over draft probability of the drafted ids, up to the first id that its law cannot have produced."""
    ratios = []
    target = _probs_of(target_probs, draft_ids)
    draft = _probs_of(draft_probs, draft_ids)
    for target_prob, draft_prob in zip(target, draft, strict=True):
        if not draft_prob > 0.0:
            break
        ratios.append(target_prob / draft_prob)
    return ratios


def _excess(target_row: torch.Tensor, draft_row: torch.Tensor, scale: float) -> torch.Tensor:
    """[V] max(scale * target - draft, 0)."""
    return (scale * target_row).sub_(draft_row).clamp_(min=0.0)


def _token_levels(ratios: Sequence[float]) -> list[float]:
    return [min(1.0, ratio) for ratio in ratios]


def _block_levels(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, ratios: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Levels and survival of :func:`block_acceptance` for a draft of ``len(ratios)`` tokens."""
    survival = [1.0]
    for ratio in ratios:
        survival.append(min(1.0, survival[-1] * ratio))
    inner = range(1, len(ratios))
    # Row by row: a temporary of one row stays in the cache of a CPU, one of all rows does not. One read-back for all.
    masses = [
        _excess(target_probs[index], draft_probs[index], survival[index]).sum(dtype=torch.float64) for index in inner
    ]
    levels = []
    for mass, kept in zip(torch.stack(masses).tolist() if masses else (), survival[1:], strict=False):
        missing = mass + 1.0 - kept
        # 0/0: the prefix survives for sure and the next two laws are equal, so it must pass.
        levels.append(mass / missing if missing > 0.0 else 1.0)
    return [*levels, *survival[len(levels) + 1 :]], survival


def _filled(values: Sequence[float], length: int) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (length - len(values))], dtype=torch.float64)


def token_acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: Sequence[int]) -> torch.Tensor:
    """Acceptance probability of each drafted token, given that those before it were accepted.

    Args:
        target_probs: [K + 1, V].
        draft_probs: [K, V].
        draft_ids: K ids.

    Returns:
        [K] fp64 on the CPU: min(1, target / draft), and 0 from the first id on that its law cannot have produced.
    """
    return _filled(_token_levels(_ratios(target_probs, draft_probs, draft_ids)), len(draft_ids))


def one_hot_acceptance(target_probs: torch.Tensor, draft_ids: Sequence[int]) -> torch.Tensor:
    """Acceptance probability of each drafted token when nothing is known about how it was chosen.

    Args:
        target_probs: [K + 1, V].
        draft_ids: K ids.

    Returns:
        [K] fp64 on the CPU: the target's probability of the token; 0 for ids outside the vocabulary.
    """
    return _filled(_probs_of(target_probs, draft_ids), len(draft_ids))


def block_acceptance(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The test levels of block verification and the joint ratios behind them (Sun et al. 2024, Algorithm 2).

    ``survival[k] = min(1, survival[k - 1] * target / draft)`` for the k-th token, from ``survival[0] = 1``. With
    ``mass[k]`` the sum over the vocabulary of ``max(survival[k] * target_probs[k] - draft_probs[k], 0)``, the prefix of
    k < K tokens passes with probability ``mass[k] / (mass[k] + 1 - survival[k])``, and the whole draft with
    ``survival[K]``.

    Args:
        target_probs: [K + 1, V].
        draft_probs: [K, V].
        draft_ids: K ids.

    Returns:
        ([K] levels, ``levels[k - 1]`` for the prefix of k tokens; [K + 1] survival), fp64 on the CPU. Both are 0 from
        the first id on that its law cannot have produced.
    """
    ratios = _ratios(target_probs, draft_probs, draft_ids)
    levels, survival = _block_levels(target_probs, draft_probs, ratios)
    return _filled(levels, len(draft_ids)), _filled(survival, len(draft_ids) + 1)


def residual(target_row: torch.Tensor, draft_row: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The law of the token after the accepted ones: what the target has left beyond the draft.

    Args:
        target_row: [V] the target's law at this position.
        draft_row: [V] the law the rejected token was drawn from.
        scale: weight of the target: 1 for the token rule, the accepted prefix's survival for the block rule.

    Returns:
        [V] max(scale * target - draft, 0), normalised; the target's law where nothing is left.
    """
    left = _excess(target_row, draft_row, scale)
    mass = float(left.sum(dtype=torch.float64))
    if not mass > 0.0:
        return target_row / float(target_row.sum(dtype=torch.float64))
    return left.div_(mass)


def one_hot_residual(target_row: torch.Tensor, draft_id: int) -> torch.Tensor:
    """The target's law without the rejected token.

    Args:
        target_row: [V] the target's law at this position.
        draft_id: the rejected token; ids outside the vocabulary take nothing away.

    Returns:
        [V] normalised; the target's law where nothing is left.
    """
    certain = torch.zeros_like(target_row)
    if 0 <= draft_id < len(target_row):
        certain[draft_id] = 1.0
    return residual(target_row, certain)


# --- Decisions --------------------------------------------------------------------------------------------------------
#
# A uniform lies in [0, 1). That it is strictly below a level happens with the level's probability: never at level 0,
# always at level 1.


def _first_failure(levels: Sequence[float], uniforms: Sequence[float]) -> int:
    """How many levels pass before the first that fails."""
    for index, level in enumerate(levels):
        if not uniforms[index] < level:
            return index
    return len(levels)


def _last_pass(levels: Sequence[float], uniforms: Sequence[float]) -> int:
    """The length of the longest prefix whose level passes; failures before it do not matter."""
    for index in reversed(range(len(levels))):
        if uniforms[index] < levels[index]:
            return index + 1
    return 0


def _decide_token(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, torch.Tensor]:
    """([K + 1, V], [K, V], K ids, K uniforms) -> (number accepted, [V] law of the next token) under the token rule."""
    ratios = _ratios(target_probs, draft_probs, draft_ids)
    accepted = _first_failure(_token_levels(ratios), uniforms)
    if accepted == len(ratios):
        return accepted, target_probs[accepted]
    return accepted, residual(target_probs[accepted], draft_probs[accepted])


def _decide_block(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, torch.Tensor]:
    """([K + 1, V], [K, V], K ids, K uniforms) -> (number accepted, [V] law of the next token) under the block rule."""
    ratios = _ratios(target_probs, draft_probs, draft_ids)
    levels, survival = _block_levels(target_probs, draft_probs, ratios)
    accepted = _last_pass(levels, uniforms)
    if accepted == len(ratios):
        return accepted, target_probs[accepted]
    return accepted, residual(target_probs[accepted], draft_probs[accepted], survival[accepted])


def _decide_one_hot(
    target_probs: torch.Tensor, draft_ids: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, torch.Tensor]:
    """([K + 1, V], K ids, K uniforms) -> (number accepted, [V] law of the next token) under the one-hot rule."""
    accepted = _first_failure(_probs_of(target_probs, draft_ids), uniforms)
    if accepted == len(draft_ids):
        return accepted, target_probs[accepted]
    return accepted, one_hot_residual(target_probs[accepted], draft_ids[accepted])


# --- Rules ------------------------------------------------------------------------------------------------------------


def verify_greedy(target_ids: Sequence[int], draft_ids: Sequence[int]) -> AcceptPrefix[int]:
    """Keep drafted tokens while they are the target's most probable ones.

    Args:
        target_ids: K + 1 ids, the most probable token after 0 .. K drafted ones.
        draft_ids: K ids.
    """
    accepted = 0
    while accepted < len(draft_ids) and draft_ids[accepted] == target_ids[accepted]:
        accepted += 1
    return AcceptPrefix(accepted, target_ids[accepted])


def verify_sequential(next_token: Callable[[int], int], draft_ids: Sequence[int]) -> AcceptPrefix[int]:
    """Keep drafted tokens while the target chooses the same ones.

    Args:
        next_token: the target's choice after ``t`` drafted tokens. Called for t = 0, 1, ... up to the first
            disagreement, so exactly once per emitted token.
        draft_ids: K ids.
    """
    for index, token in enumerate(draft_ids):
        chosen = next_token(index)
        if chosen != token:
            return AcceptPrefix(index, chosen)
    return AcceptPrefix(len(draft_ids), next_token(len(draft_ids)))


def verify_tree(
    next_token: Callable[[int, Sequence[int]], int], draft_ids: Sequence[int], parents: Sequence[int]
) -> AcceptPrefix[int]:
    """Walk a draft that branches along the target's own choices (SpecInfer, Miao et al. 2024, Algorithm 2, greedy).

    Args:
        next_token: the target's choice after an item (-1: after the history) that was reached through the given ids.
            Called once per emitted token, from the history on.
        draft_ids: K ids.
        parents: of each, as in :attr:`specflow.types.Draft.parents`.
    """
    following = continuations(parents)
    path: list[int] = []
    ids: list[int] = []
    node = HISTORY
    while True:
        chosen = next_token(node, ids)
        item = next((item for item in following.get(node, ()) if draft_ids[item] == chosen), None)
        if item is None:
            return AcceptPrefix(len(path), chosen, tuple(path))
        path.append(item)
        ids.append(chosen)
        node = item


def verify_token(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: Sequence[int],
    uniforms: Sequence[float],
    residual_noise: torch.Tensor,
) -> AcceptPrefix[int]:
    """The token rule (Leviathan et al. 2023; Chen et al. 2023).

    Args:
        target_probs: [K + 1, V].
        draft_probs: [K, V], the very tensor the tokens were drawn from.
        draft_ids: K ids.
        uniforms: K independent numbers in [0, 1).
        residual_noise: [V] Gumbel noise for the token after the accepted ones.
    """
    accepted, law = _decide_token(target_probs, draft_probs, draft_ids, uniforms)
    return AcceptPrefix(accepted, race(law, residual_noise))


def verify_block(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: Sequence[int],
    uniforms: Sequence[float],
    residual_noise: torch.Tensor,
) -> AcceptPrefix[int]:
    """Block verification (Sun et al. 2024, Algorithm 2): the *largest* prefix whose test passes.

    The uniforms must be fresh in every round, also for positions that were drafted before: unlike under the token rule,
    the outcome depends on all of them.

    Args:
        target_probs: [K + 1, V].
        draft_probs: [K, V], the very tensor the tokens were drawn from.
        draft_ids: K ids.
        uniforms: K independent numbers in [0, 1).
        residual_noise: [V] Gumbel noise for the token after the accepted ones.
    """
    accepted, law = _decide_block(target_probs, draft_probs, draft_ids, uniforms)
    return AcceptPrefix(accepted, race(law, residual_noise))


def verify_one_hot(
    target_probs: torch.Tensor, draft_ids: Sequence[int], uniforms: Sequence[float], residual_noise: torch.Tensor
) -> AcceptPrefix[int]:
    """The token rule for tokens chosen in any way: looked up, most probable, filtered or scheduled.

    Args:
        target_probs: [K + 1, V].
        draft_ids: K ids.
        uniforms: K independent numbers in [0, 1), independent of how the tokens were chosen.
        residual_noise: [V] Gumbel noise for the token after the accepted ones.
    """
    accepted, law = _decide_one_hot(target_probs, draft_ids, uniforms)
    return AcceptPrefix(accepted, race(law, residual_noise))


# --- One request ------------------------------------------------------------------------------------------------------


def _verify_matching(
    sampler: RowSampler, logits: torch.Tensor, history: Sequence[int], draft_ids: Sequence[int]
) -> AcceptPrefix[int]:
    """Greedy and coupled requests: the target's own choices, as far as the draft agrees with them.

    Args:
        sampler: the request's law.
        logits: [K + 1, V] raw logits.
        history: every committed token id.
        draft_ids: K ids.
    """
    position = len(history)
    law = sampler.scores if sampler.is_greedy else sampler.log_probs
    if sampler.is_sequential:

        def next_token(index: int) -> int:
            return sampler.choose(law(logits[index : index + 1], history, draft_ids, index)[0], position + index)

        return verify_sequential(next_token, draft_ids)
    rows = law(logits, history, draft_ids)
    if sampler.is_greedy:
        return verify_greedy(rows.argmax(-1).tolist(), draft_ids)
    if rows.device.type == "cpu":
        # Noise costs more than anything else here, so none is made beyond the first disagreement.
        return verify_sequential(lambda index: sampler.choose(rows[index], position + index), draft_ids)
    # Elsewhere one read-back for all positions is cheaper than one per token.
    noise = gumbel_rows(sampler.seed, range(position, position + len(rows)), rows.shape[-1], rows.device)
    return verify_greedy((rows + noise).argmax(-1).tolist(), draft_ids)


def verify_row_tree(
    sampler: RowSampler, logits: torch.Tensor, history: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int]
) -> AcceptPrefix[int]:
    """Verify one request's draft that branches; the request's rule is greedy or coupled.

    Args:
        sampler: the request's law and rule.
        logits: [K + 1, V] raw logits; row 0 follows the history, row k + 1 item k and all it continues.
        history: every committed token id.
        draft_ids: K ids.
        parents: of each, as in :attr:`specflow.types.Draft.parents`.
    """
    law = sampler.scores if sampler.is_greedy else sampler.log_probs
    if sampler.is_pointwise and (sampler.is_greedy or logits.device.type != "cpu"):
        # As for chains: all rows at once, one read-back. Noise is costly on CPUs, so there it is made along the path.
        rows = law(logits, history)
        if not sampler.is_greedy:
            positions = [len(history), *[len(history) + depth + 1 for depth in depths(parents)]]
            rows = rows + gumbel_rows(sampler.seed, positions, rows.shape[-1], rows.device)
        best = rows.argmax(-1).tolist()
        return verify_tree(lambda node, _: best[node + 1], draft_ids, parents)

    def next_token(node: int, ids: Sequence[int]) -> int:
        row = node + 1
        return sampler.choose(law(logits[row : row + 1], history, ids, len(ids))[0], len(history) + len(ids))

    return verify_tree(next_token, draft_ids, parents)


def verify_row(
    sampler: RowSampler,
    logits: torch.Tensor,
    history: Sequence[int],
    draft_ids: Sequence[int],
    draft_probs: torch.Tensor | None = None,
    anticipated: bool = False,  # noqa: FBT001, FBT002 - a fact about the draft that callers name
) -> AcceptPrefix[int]:
    """Verify one request's draft by its rule.

    The rule is the sampler's. Without ``draft_probs``, or where the length of the draft may have been chosen by looking
    at its tokens, the token and block rules give way to the one-hot rule for this round. With nothing drafted the token
    is the one plain decoding chooses.

    Args:
        sampler: the request's law and rule.
        logits: [K + 1, V] raw logits; row k follows the history and k drafted tokens.
        history: every committed token id, prompt and output.
        draft_ids: K ids.
        draft_probs: [K, V] fp32 the tokens were drawn from, or None if they were chosen in another way.
        anticipated: see :class:`specflow.types.Admission`.
    """
    if sampler.matches:
        return _verify_matching(sampler, logits, history, draft_ids)
    position = len(history)
    if not draft_ids:
        return AcceptPrefix(0, sampler.choose(sampler.log_probs(logits, history)[0], position))
    target_probs = sampler.scores(logits, history, draft_ids).softmax(-1)
    uniforms = [uniform(sampler.seed, position + index, lane(ACCEPT, index)) for index in range(len(draft_ids))]
    if draft_probs is None or anticipated or sampler.rule == "one_hot":
        accepted, law = _decide_one_hot(target_probs, draft_ids, uniforms)
    elif sampler.rule == "token":
        accepted, law = _decide_token(target_probs, draft_probs, draft_ids, uniforms)
    else:
        accepted, law = _decide_block(target_probs, draft_probs, draft_ids, uniforms)
    noise = gumbel_noise(sampler.seed, position + accepted, law.shape[-1], law.device, RESIDUAL)
    return AcceptPrefix(accepted, race(law, noise))
