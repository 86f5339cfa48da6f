"""The acceptance rules: against plain references, at their borders, for one request, and as draws.

Statistical tests use fixed seeds and state the odds that a correct program would have failed for the seeds chosen.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.types import AcceptPrefix
from specflow_llm import verification
from specflow_llm.config import SamplingParams
from specflow_llm.sampling import ACCEPT, RESIDUAL, RowSampler, Rule, gumbel_noise, gumbel_rows, lane, race, uniform
from specflow_llm.verification import (
    block_acceptance,
    one_hot_acceptance,
    one_hot_residual,
    residual,
    token_acceptance,
    verify_block,
    verify_greedy,
    verify_one_hot,
    verify_row,
    verify_sequential,
    verify_token,
)

RATIO_RULES = {"token": verify_token, "block": verify_block}
SAMPLED_RULES: tuple[Rule, ...] = ("token", "block", "one_hot", "coupled")


def random_laws(vocab_size: int, length: int, seed: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """([K + 1, V] target, [K, V] draft) fp64 probabilities, related as a draft model's are to its target's."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(length + 1, vocab_size, generator=generator, dtype=torch.float64)
    noise = torch.randn(length, vocab_size, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits[:-1] + noise).softmax(-1)


def sampled_ids(draft_probs: torch.Tensor, seed: int) -> list[int]:
    """One id from each row."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = (
        torch.multinomial(draft_probs, 1, generator=generator).flatten().tolist() if len(draft_probs) else []
    )
    return ids


# --- Plain references: the papers' pseudocode over lists, one scalar at a time ----------------------------------------

Outcome = tuple[int, list[float]]
Matrix = list[list[float]]


def normalised(values: Sequence[float]) -> list[float]:
    """Divide by the sum."""
    total = math.fsum(values)
    return [value / total for value in values]


def reference_token(target: Matrix, draft: Matrix, ids: Sequence[int], uniforms: Sequence[float]) -> Outcome:
    """Leviathan et al. 2023, Algorithm 1."""
    for index, token in enumerate(ids):
        if uniforms[index] >= target[index][token] / draft[index][token]:
            left = [max(0.0, t - d) for t, d in zip(target[index], draft[index], strict=True)]
            return index, normalised(left)
    return len(ids), target[len(ids)]


def reference_block(target: Matrix, draft: Matrix, ids: Sequence[int], uniforms: Sequence[float]) -> Outcome:
    """Sun et al. 2024, Algorithm 2, in the order of the paper."""
    accepted, joint, joint_accepted = 0, 1.0, 1.0
    for index, token in enumerate(ids):
        joint = min(joint * target[index][token] / draft[index][token], 1.0)
        if index + 1 == len(ids):
            level = joint
        else:
            mass = math.fsum(max(0.0, joint * t - d) for t, d in zip(target[index + 1], draft[index + 1], strict=True))
            level = mass / (mass + 1.0 - joint)
        if uniforms[index] < level:
            accepted, joint_accepted = index + 1, joint
    if accepted == len(ids):
        return accepted, target[accepted]
    left = [max(0.0, joint_accepted * t - d) for t, d in zip(target[accepted], draft[accepted], strict=True)]
    return accepted, normalised(left)


def reference_one_hot(target: Matrix, ids: Sequence[int], uniforms: Sequence[float]) -> Outcome:
    """The token rule for a draft law that is certain."""
    for index, token in enumerate(ids):
        if uniforms[index] >= target[index][token]:
            return index, normalised([0.0 if other == token else t for other, t in enumerate(target[index])])
    return len(ids), target[len(ids)]


@pytest.mark.parametrize("vocab_size", [4, 127, 1013])
@pytest.mark.parametrize("length", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decisions_equal_the_plain_references(vocab_size: int, length: int, dtype: torch.dtype) -> None:
    """Number accepted and law of the next token equal the papers' pseudocode, in fp64 and in fp32."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    counts: Counter[int] = Counter()
    for seed in range(12):
        target, draft = random_laws(vocab_size, length, seed)
        ids = sampled_ids(draft, seed)
        uniforms = [uniform(seed, index, ACCEPT) for index in range(length)]
        expected = {
            "token": reference_token(target.tolist(), draft.tolist(), ids, uniforms),
            "block": reference_block(target.tolist(), draft.tolist(), ids, uniforms),
            "one_hot": reference_one_hot(target.tolist(), ids, uniforms),
        }
        found = {
            "token": verification._decide_token(target.to(dtype), draft.to(dtype), ids, uniforms),
            "block": verification._decide_block(target.to(dtype), draft.to(dtype), ids, uniforms),
            "one_hot": verification._decide_one_hot(target.to(dtype), ids, uniforms),
        }
        for rule, (accepted, law) in found.items():
            assert accepted == expected[rule][0]
            assert law.tolist() == pytest.approx(expected[rule][1], abs=tolerance)
        counts[expected["block"][0]] += 1
    assert length == 0 or len(counts) > 1


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_rules_draw_from_the_law_they_decided_on(rule: str) -> None:
    """A rule's verdict is its decision plus a race over the decided law."""
    decide = {"token": verification._decide_token, "block": verification._decide_block}[rule]
    for seed in range(20):
        target, draft = random_laws(64, 4, seed)
        ids, uniforms = sampled_ids(draft, seed), [uniform(seed, index, ACCEPT) for index in range(4)]
        noise = gumbel_noise(seed, 0, 64, "cpu", RESIDUAL)
        accepted, law = decide(target, draft, ids, uniforms)
        assert RATIO_RULES[rule](target, draft, ids, uniforms, noise) == AcceptPrefix(accepted, race(law, noise))
        accepted, law = verification._decide_one_hot(target, ids, uniforms)
        assert verify_one_hot(target, ids, uniforms, noise) == AcceptPrefix(accepted, race(law, noise))


# --- Borders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_uniforms_at_the_levels_decide(seed: int) -> None:
    """A uniform just below a level passes, the level itself fails, for every rule and every position."""
    target, draft = random_laws(8, 3, seed)
    ids = sampled_ids(draft, seed)
    noise = torch.zeros(8)
    sequential: dict[str, tuple[list[float], Callable[[Sequence[float]], AcceptPrefix[int]]]] = {
        "token": (token_acceptance(target, draft, ids).tolist(), lambda u: verify_token(target, draft, ids, u, noise)),
        "one_hot": (one_hot_acceptance(target, ids).tolist(), lambda u: verify_one_hot(target, ids, u, noise)),
    }
    for levels, verify in sequential.values():
        for index, level in enumerate(levels):
            before = [math.nextafter(value, -1.0) for value in levels[:index]]
            after = [0.999999] * (len(ids) - index - 1)
            assert verify([*before, math.nextafter(level, -1.0), *after]).num_accepted >= index + 1
            if level < 1.0:
                assert verify([*before, level, *after]).num_accepted == index
    block_levels = block_acceptance(target, draft, ids)[0].tolist()
    for index, level in enumerate(block_levels):
        if level > 0.0:
            uniforms = [1.0] * len(ids)
            uniforms[index] = math.nextafter(level, -1.0)
            assert verify_block(target, draft, ids, uniforms, noise).num_accepted == index + 1
            uniforms[index] = level
            assert verify_block(target, draft, ids, uniforms, noise).num_accepted == 0


def test_block_rule_takes_the_last_passing_prefix() -> None:
    """A failed test before a passed one does not end the block."""
    target, draft = random_laws(8, 4, 3, spread=0.5)
    ids = sampled_ids(draft, 3)
    assert verify_block(target, draft, ids, [1.0, 1.0, 0.0, 1.0], torch.zeros(8)).num_accepted == 3


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_impossible_tokens_are_never_accepted(rule: str) -> None:
    """A token of target probability exactly 0 is rejected even at uniform 0, and never drawn."""
    target = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    draft = torch.tensor([[0.6, 0.2, 0.2], [0.2, 0.3, 0.5]])
    for noise in itertools.permutations([-2.0, 0.0, 20.0]):
        verdict = RATIO_RULES[rule](target, draft, [0, 2], [0.0, 0.0], torch.tensor(noise))
        assert verdict.num_accepted == 0
        assert verdict.replacement in {1, 2}
        assert verify_one_hot(target, [0, 2], [0.0, 0.0], torch.tensor(noise)).num_accepted == 0


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**40)])
def test_ids_outside_the_vocabulary_are_rejected(bad: int) -> None:
    """Placeholder ids are rejected where they stand, at any uniform (vLLM issue 46533)."""
    target, draft = random_laws(5, 3, 0)
    good = sampled_ids(draft, 0)
    noise = gumbel_noise(0, 0, 5, "cpu")
    for place in range(3):
        ids = [*good[:place], bad, *good[place + 1 :]]
        accept_all = [0.0] * 3
        assert token_acceptance(target, draft, ids)[place:].tolist() == [0.0] * (3 - place)
        assert block_acceptance(target, draft, ids)[0][place:].tolist() == [0.0] * (3 - place)
        assert one_hot_acceptance(target, ids)[place] == 0.0
        for verify in RATIO_RULES.values():
            verdict = verify(target, draft, ids, accept_all, noise)
            assert verdict == AcceptPrefix(place, race(target[place], noise))
        assert verify_one_hot(target, ids, accept_all, noise) == AcceptPrefix(place, race(target[place], noise))
        assert verify_greedy([1, 1, 1, 1], [1] * place + [bad]) == AcceptPrefix(place, 1)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_tokens_their_own_law_excludes_end_the_draft(rule: str) -> None:
    """A token of draft probability 0 was not drawn from that law: it is rejected and replaced by the target's law."""
    target, draft = random_laws(5, 2, 1)
    draft[1] = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])
    noise = gumbel_noise(0, 0, 5, "cpu")
    verdict = RATIO_RULES[rule](target, draft, [2, 0], [0.0, 0.0], noise)
    assert verdict == AcceptPrefix(1, race(target[1], noise))


def test_nothing_drafted_draws_from_the_target() -> None:
    """With no draft every rule emits one token of the target's law."""
    target, draft = random_laws(16, 0, 0)
    noise = gumbel_noise(3, 0, 16, "cpu")
    expected = AcceptPrefix(0, race(target[0], noise))
    assert verify_token(target, draft, [], [], noise) == expected
    assert verify_block(target, draft, [], [], noise) == expected
    assert verify_one_hot(target, [], [], noise) == expected
    assert verify_greedy([7], []) == AcceptPrefix(0, 7)
    assert verify_sequential(lambda _: 7, []) == AcceptPrefix(0, 7)
    assert [len(part) for part in block_acceptance(target, draft, [])] == [0, 1]


def test_residual_of_nothing_is_the_target() -> None:
    """Where the draft covers all of the target, or the weight is 0, the residual is the target's law."""
    row = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    assert residual(row, row).tolist() == row.tolist()
    assert residual(row, torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), 0.0).tolist() == row.tolist()
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert one_hot_residual(certain, 1).tolist() == certain.tolist()
    assert one_hot_residual(row, -1).tolist() == row.tolist()
    assert one_hot_residual(row, 1).tolist() == [1.0, 0.0, 0.0]


def test_equal_certain_laws_pass_the_block_rule() -> None:
    """Where both laws are the same and certain, 0/0 counts as passed and the whole draft is accepted."""
    row = torch.tensor([0.0, 1.0])
    levels, survival = block_acceptance(row.repeat(4, 1), row.repeat(3, 1), [1, 1, 1])
    assert levels.tolist() == [1.0] * 3
    assert survival.tolist() == [1.0] * 4


def test_laws_leave_their_arguments_alone() -> None:
    """No rule writes to the probabilities it is given."""
    target, draft = random_laws(32, 3, 2)
    copies = target.clone(), draft.clone()
    ids, noise = sampled_ids(draft, 2), gumbel_noise(0, 0, 32, "cpu")
    for uniforms in ([0.0] * 3, [0.99] * 3):
        verify_token(target, draft, ids, uniforms, noise)
        verify_block(target, draft, ids, uniforms, noise)
        verify_one_hot(target, ids, uniforms, noise)
    assert torch.equal(target, copies[0])
    assert torch.equal(draft, copies[1])


def test_an_argmax_draft_needs_the_one_hot_rule() -> None:
    """Target (.6, .4) and an always-first draft: one-hot gives (.6, .4), a ratio with (.75, .25) gives (.8, .2)."""
    target = torch.tensor([[0.6, 0.4], [0.6, 0.4]], dtype=torch.float64)
    draft = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    level = float(one_hot_acceptance(target, [0])[0])
    assert level + (1 - level) * float(one_hot_residual(target[0], 0)[0]) == pytest.approx(0.6, abs=1e-15)
    wrong = float(token_acceptance(target, draft, [0])[0])
    assert wrong + (1 - wrong) * float(residual(target[0], draft[0])[0]) == pytest.approx(0.8, abs=1e-15)


@pytest.mark.parametrize(
    ("target_ids", "draft_ids", "expected"),
    [
        ([5], [], (0, 5)),
        ([5, 6], [5], (1, 6)),
        ([5, 6], [4], (0, 5)),
        ([5, 6, 7], [5, 9], (1, 6)),
        ([5, 6, 7], [9, 6], (0, 5)),
        ([5, 6, 7], [5, 6], (2, 7)),
    ],
)
def test_greedy_keeps_the_matching_prefix(
    target_ids: list[int], draft_ids: list[int], expected: tuple[int, int]
) -> None:
    """The greedy rule keeps exactly the matching prefix and adds the target's token after it."""
    assert verify_greedy(target_ids, draft_ids) == AcceptPrefix(*expected)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.lists(st.integers(0, 2), max_size=7))
def test_sequential_asks_once_per_emitted_token(choices: list[int], draft_ids: list[int]) -> None:
    """Sample-and-match asks for positions 0, 1, ... in order, as many as it emits, and agrees with the greedy rule."""
    draft_ids = draft_ids[: len(choices) - 1]
    asked: list[int] = []

    def next_token(index: int) -> int:
        asked.append(index)
        return choices[index]

    verdict = verify_sequential(next_token, draft_ids)
    assert asked == list(range(verdict.num_accepted + 1))
    assert verdict == verify_greedy(choices[: len(draft_ids) + 1], draft_ids)


# --- One request ------------------------------------------------------------------------------------------------------


def make_sampler(
    rule: Rule, vocab_size: int, *, seed: int = 1, num_prompt_tokens: int = 1, **params: Any
) -> RowSampler:
    """A sampler over a small vocabulary; temperature 1 unless greedy."""
    settings_ = SamplingParams(**{"temperature": 0.0 if rule == "greedy" else 1.0, **params})
    return RowSampler(settings_, vocab_size=vocab_size, num_prompt_tokens=num_prompt_tokens, seed=seed, rule=rule)


def toy_logits(vocab_size: int, seed: int) -> torch.Tensor:
    """[V, V]: row v is the law after token v."""
    return 2.0 * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))


def rows_after(table: torch.Tensor, history: Sequence[int], draft_ids: Sequence[int]) -> torch.Tensor:
    """[K + 1, V] logits after the history and each drafted token; any row will do after ids outside the vocabulary."""
    last = [history[-1], *draft_ids]
    return table[[token if 0 <= token < len(table) else 0 for token in last]]


def plain_tokens(sampler: RowSampler, table: torch.Tensor, history: Sequence[int], count: int) -> list[int]:
    """Decode without speculation, by the sampler's own choices."""
    ids = list(history)
    for _ in range(count):
        ids.append(sampler.choose(sampler.log_probs(table[ids[-1]][None], ids)[0], len(ids)))
    return ids[len(history) :]


PROCESSING: dict[str, dict[str, Any]] = {
    "pointwise": {},
    "truncated": {"top_k": 7, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "processors": {"logits_processors": (lambda ids, scores: scores - 0.1 * (ids.shape[1] % 3) * torch.arange(12),)},
}


@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_matching_rules_emit_the_plain_tokens(rule: Rule, processing: str, data: st.DataObject) -> None:
    """Greedy and coupled requests emit the tokens of plain decoding, for any draft of any length, round after round."""
    table = toy_logits(12, 0)
    sampler = make_sampler(rule, 12, seed=data.draw(st.integers(0, 5)), **PROCESSING[processing])
    expected = plain_tokens(sampler, table, [3], 12)
    ids = [3]
    while len(ids) < 10:
        guess = expected[len(ids) - 1 :] + [0] * 8
        draft_ids = [
            data.draw(st.sampled_from([token, token, token, -1, 5, 99]))
            for token in guess[: data.draw(st.integers(0, 8))]
        ]
        verdict = verify_row(sampler, rows_after(table, ids, draft_ids), ids, draft_ids)
        assert verdict.replacement is not None
        ids += [*draft_ids[: verdict.num_accepted], verdict.replacement]
    assert ids[1:10] == expected[:9]


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_matching_rules_accept_a_perfect_draft(rule: Rule) -> None:
    """A draft equal to plain decoding is accepted in full, with the next plain token as bonus."""
    table = toy_logits(12, 1)
    sampler = make_sampler(rule, 12)
    expected = plain_tokens(sampler, table, [3], 9)
    verdict = verify_row(sampler, rows_after(table, [3], expected[:8]), [3], expected[:8])
    assert verdict == AcceptPrefix(8, expected[8])


def test_all_noise_at_once_equals_noise_as_needed() -> None:
    """The path for devices where read-backs are dear makes the choices of the path for CPUs."""
    sampler = make_sampler("coupled", 300)
    log_probs = sampler.log_probs(torch.randn(9, 300, generator=torch.Generator().manual_seed(0)), [1, 2])
    noise = gumbel_rows(sampler.seed, range(2, 11), 300, log_probs.device)
    together = (log_probs + noise).argmax(-1).tolist()
    assert together == [sampler.choose(row, 2 + index) for index, row in enumerate(log_probs)]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["greedy", "token", "block", "one_hot", "coupled"])
def test_rows_on_a_gpu_equal_rows_on_a_cpu(rule: Rule) -> None:
    """The same logits give the same verdicts on both devices: the numbers behind them are the same."""
    table, draft_table, history = toy_logits(500, 3), toy_logits(500, 4), [3, 4]
    for seed in range(20):
        sampler = make_sampler(rule, 500, seed=seed, top_k=50, frequency_penalty=0.5)
        draft_ids, draft_probs = drafted(sampler, draft_table, history, 4)
        logits = rows_after(table, history, draft_ids)
        there = None if draft_probs is None else draft_probs.cuda()
        expected = verify_row(sampler, logits, history, draft_ids, draft_probs)
        assert verify_row(sampler, logits.cuda(), history, draft_ids, there) == expected


def test_a_request_does_not_depend_on_others() -> None:
    """A seeded request emits the same tokens alone, after other requests, and in any order (vLLM issue 6038)."""
    table = toy_logits(12, 2)

    def run(seeds: Sequence[int]) -> dict[int, list[int]]:
        samplers = {seed: make_sampler("coupled", 12, seed=seed) for seed in seeds}
        ids: dict[int, list[int]] = {seed: [3] for seed in seeds}
        for _ in range(12):
            for seed, sampler in samplers.items():
                verdict = verify_row(sampler, rows_after(table, ids[seed], []), ids[seed], [])
                assert verdict.replacement is not None
                ids[seed].append(verdict.replacement)
        return ids

    together = run([1, 2, 3])
    assert together == run([3, 1, 2])
    assert together[1] == run([1])[1]
    assert together[1] != together[2]


def test_rows_fall_back_to_the_one_hot_rule() -> None:
    """Without probabilities, or with a length that looked ahead, token and block requests use the one-hot rule."""
    table, history, vocab_size = toy_logits(12, 3), [3, 4], 12
    differs = Counter[str]()
    for seed in range(40):
        one_hot = make_sampler("one_hot", vocab_size, seed=seed)
        for rule in ("token", "block"):
            sampler = make_sampler(rule, vocab_size, seed=seed)
            draft_ids, draft_rows = drafted(sampler, toy_logits(vocab_size, 4), history, 3)
            logits = rows_after(table, history, draft_ids)
            expected = verify_row(one_hot, logits, history, draft_ids)
            assert verify_row(sampler, logits, history, draft_ids) == expected
            assert verify_row(sampler, logits, history, draft_ids, draft_rows, anticipated=True) == expected
            differs[rule] += verify_row(sampler, logits, history, draft_ids, draft_rows) != expected
    assert differs["token"] > 0
    assert differs["block"] > 0


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_rows_use_keyed_numbers(rule: Rule) -> None:
    """A row's verdict is its rule with uniforms keyed by position and round, and noise keyed by the last position."""
    table, history = toy_logits(12, 5), [3, 4]
    for seed in range(20):
        sampler = make_sampler(rule, 12, seed=seed)
        draft_ids, draft_probs = drafted(sampler, toy_logits(12, 6), history, 3)
        assert draft_probs is not None
        logits = rows_after(table, history, draft_ids)
        uniforms = [uniform(seed, 2 + index, lane(ACCEPT, index)) for index in range(3)]
        verdict = verify_row(sampler, logits, history, draft_ids, draft_probs)
        noise = gumbel_noise(seed, 2 + verdict.num_accepted, 12, "cpu", RESIDUAL)
        assert verdict == RATIO_RULES[rule](logits.softmax(-1), draft_probs, draft_ids, uniforms, noise)


@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_plain_rows_choose_by_the_position_alone(rule: Rule) -> None:
    """With nothing drafted, all sampled rules emit the token of plain decoding."""
    table = toy_logits(12, 7)
    sampler = make_sampler(rule, 12, seed=9)
    ids = [3]
    for _ in range(12):
        verdict = verify_row(sampler, rows_after(table, ids, []), ids, [])
        assert verdict.replacement is not None
        ids.append(verdict.replacement)
    assert ids[1:] == plain_tokens(make_sampler("coupled", 12, seed=9), table, [3], 12)


@pytest.mark.parametrize("rule", ["greedy", *SAMPLED_RULES])
def test_rows_survive_any_ids(rule: Rule) -> None:
    """Drafts of ids outside the vocabulary are rejected at their place under every rule, penalties included."""
    table = toy_logits(12, 8)
    sampler = make_sampler(rule, 12, frequency_penalty=0.5, repetition_penalty=1.2)
    logits = rows_after(table, [3], [-1, 12, 10**9])
    verdict = verify_row(sampler, logits, [3], [-1, 12, 10**9])
    assert verdict.num_accepted == 0
    draft_probs = torch.full((3, 12), 1 / 12)
    assert verify_row(sampler, logits, [3], [-1, 12, 10**9], draft_probs).num_accepted == 0


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_processors_run_once_per_emitted_token(rule: Rule) -> None:
    """A stateful processor sees every emitted position once, in order, with the true history, whatever is drafted."""
    seen: list[list[int]] = []

    def record(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        scores[:, len(seen) % 12] += 0.5  # depends on the number of calls
        return scores

    table = toy_logits(12, 9)
    plain = plain_tokens(make_sampler(rule, 12, logits_processors=(record,)), table, [3], 12)
    calls = list(seen)
    seen.clear()
    sampler = make_sampler(rule, 12, logits_processors=(record,))
    ids = [3]
    for length in (0, 4, 1, 8, 0, 3):
        draft_ids = [*plain[len(ids) - 1 :][: length // 2], *[5] * (length - length // 2)]
        before = len(seen)
        verdict = verify_row(sampler, rows_after(table, ids, draft_ids), ids, draft_ids)
        assert verdict.replacement is not None
        assert len(seen) - before == verdict.num_accepted + 1
        ids += [*draft_ids[: verdict.num_accepted], verdict.replacement]
    assert ids[1:13] == plain[: len(ids) - 1]
    assert seen == [[3, *ids[1:n]] for n in range(1, len(ids))]
    assert seen[: len(calls)] == calls[: len(seen)]


def test_penalties_see_tokens_accepted_in_the_block() -> None:
    """With drafts [1, 1, 1] the second 1 is already penalised for the first (vLLM's own unit case)."""
    logits = torch.tensor([[0.0, 1.0, 0.2, 0.1]]).repeat(4, 1)
    sampler = make_sampler("greedy", 4, frequency_penalty=1.5)
    assert verify_row(sampler, logits, [0], [1, 1, 1]) == AcceptPrefix(1, 2)
    assert verify_row(make_sampler("greedy", 4), logits, [0], [1, 1, 1]) == AcceptPrefix(3, 1)


def test_min_tokens_rejects_drafted_ends() -> None:
    """End tokens drafted before ``min_tokens`` are rejected, and accepted from there on (vLLM issue 21987)."""
    logits = torch.tensor([[0.0, 5.0, 0.2, 0.1]]).repeat(4, 1)
    settings_ = SamplingParams(min_tokens=3)
    sampler = RowSampler(settings_, vocab_size=4, eos_token_ids=(1,), num_prompt_tokens=2, seed=0, rule="greedy")
    assert verify_row(sampler, logits, [0, 0], [1, 1, 1]) == AcceptPrefix(0, 2)
    assert verify_row(sampler, logits, [0, 0], [2, 2, 1]) == AcceptPrefix(2, 2)
    assert verify_row(sampler, logits, [0, 0, 2], [2, 2, 1]) == AcceptPrefix(3, 1)
    assert verify_row(sampler, logits, [0, 0, 2, 2, 2], [1, 1, 1]) == AcceptPrefix(3, 1)


# --- Draws ------------------------------------------------------------------------------------------------------------
#
# Whole requests over a vocabulary of 4: one to three rounds of drafts and verdicts with keyed randomness, one request
# per seed. The joint counts of the first three tokens are compared with the target's law by Pearson's chi-square.

VOCAB = 4
LENGTH = 3
REQUESTS = 700
FALSE_ALARM = 1e-7
"""Per test; five tests use it, so that a correct program fails any of them with odds below 1e-6."""


def markov(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """[V, V] logits of a law that depends on the last token."""
    return torch.tensor(rows, dtype=torch.float64).log().float()


TARGET_TABLE = markov([[0.01, 0.34, 0.4, 0.25], [0.3, 0.01, 0.29, 0.4], [0.4, 0.39, 0.01, 0.2], [0.3, 0.3, 0.39, 0.01]])
DRAFT_TABLE = markov([[0.1, 0.5, 0.2, 0.2], [0.2, 0.1, 0.5, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.1, 0.3, 0.5]])


def drafted(
    sampler: RowSampler, table: torch.Tensor, history: Sequence[int], length: int
) -> tuple[list[int], torch.Tensor | None]:
    """A neural drafter's round: tokens one by one and, where the rule wants them, the laws they were drawn from."""
    ids: list[int] = []
    laws: list[torch.Tensor] = []
    for _ in range(length):
        last = ids[-1] if ids else history[-1]
        token, probs, _ = sampler.draft(table[last], history, ids, len(history) + len(ids))
        ids.append(token)
        if probs is not None:
            laws.append(probs)
    return ids, torch.stack(laws) if laws else None


def emit(rule: Rule, target: torch.Tensor, seed: int, *, anticipated: bool = False) -> tuple[int, ...]:
    """The first tokens of one request."""
    sampler = make_sampler(rule, len(target), seed=seed)
    ids = [0]
    while len(ids) <= LENGTH:
        draft_ids, draft_probs = drafted(sampler, DRAFT_TABLE, ids, 2)
        verdict = verify_row(sampler, rows_after(target, ids, draft_ids), ids, draft_ids, draft_probs, anticipated)
        assert verdict.replacement is not None
        ids += [*draft_ids[: verdict.num_accepted], verdict.replacement]
    return tuple(ids[1 : LENGTH + 1])


def p_value(counts: Counter[tuple[int, ...]], target: torch.Tensor) -> float:
    """Pearson's chi-square of the joint counts against the target's law; cells expecting fewer than 5 are pooled."""
    laws = target.double().softmax(-1)
    total = counts.total()
    statistic, cells, pooled = 0.0, 0, [0.0, 0.0]
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        path = itertools.pairwise((0, *tokens))
        expected = total * math.prod(float(laws[last, token]) for last, token in path)
        if expected < 5.0:
            pooled = [pooled[0] + expected, pooled[1] + counts[tokens]]
        else:
            statistic += (counts[tokens] - expected) ** 2 / expected
            cells += 1
    if pooled[0] > 0.0:
        statistic += (pooled[1] - pooled[0]) ** 2 / pooled[0]
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_requests_follow_the_targets_law(rule: Rule) -> None:
    """Sampled requests, drafted and verified over several rounds, follow the target's law (false alarm below 1e-7)."""
    assert p_value(Counter(emit(rule, TARGET_TABLE, seed) for seed in range(REQUESTS)), TARGET_TABLE) > FALSE_ALARM


def test_requests_with_anticipated_lengths_follow_the_targets_law() -> None:
    """The one-hot rule on sampled drafts follows the target's law too (false alarm below 1e-7)."""
    counts = Counter(emit("block", TARGET_TABLE, seed, anticipated=True) for seed in range(REQUESTS))
    assert p_value(counts, TARGET_TABLE) > FALSE_ALARM


def test_the_chi_square_sees_a_bias_of_two_percent() -> None:
    """Requests of a target whose rarest token gained 2% at the expense of the commonest are told from the true law."""
    biased = TARGET_TABLE.double().softmax(-1)
    for row in biased:
        row[row.argmin()] += 0.02
        row[row.argmax()] -= 0.02
    counts = Counter(emit("coupled", biased.log().float(), seed) for seed in range(REQUESTS))
    assert p_value(counts, TARGET_TABLE) < FALSE_ALARM
