"""A smaller model as drafter: other vocabularies and contexts than the target's, and a cache that keeps up with it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from specflow.policies import Fixed
from specflow_llm import DrafterError, DraftRequest, Proposal, SamplingParams
from specflow_llm.drafters import CombinedDrafter, ModelDrafter, TargetFacts, build_drafter
from specflow_llm.drafters.base import DrafterBase, RowId
from specflow_llm.sampling import RowSampler
from tests.specflow_llm.decoding import decode, make_engine
from tests.specflow_llm.models import RECURRENT_CONFIGS, VOCAB, generate, near_copy, tiny_model

PROMPTS = [[1, 2, 3], [60, 5, 63, 7, 8, 9, 10], [33]]
BUDGETS = [24, 17, 20]


def sampler(**fields: object) -> RowSampler:
    """A request's law."""
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    rule = "greedy" if params.is_greedy else "block"
    return RowSampler(params, vocab_size=VOCAB, num_prompt_tokens=1, seed=5, rule=rule)  # type: ignore[arg-type]


def request(row: int, tokens: Sequence[int], limit: int, **fields: object) -> DraftRequest:
    """What the engine would ask."""
    return DraftRequest(RowId(row), tokens, limit, sampler(**fields))


def argmax_continuation(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of plain forwards, ids the target lacks left out."""
    ids = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, :VOCAB].argmax()))
    return ids[len(tokens) :]


# --- Vocabularies -----------------------------------------------------------------------------------------------------


def embeddings_of_other_size(vocab_size: int) -> PreTrainedModel:
    """The target's own weights behind a vocabulary that is cut short, or padded with ids that never mean anything."""
    target, draft = tiny_model("llama"), copy.deepcopy(tiny_model("llama", vocab_size=vocab_size))
    shared = min(vocab_size, VOCAB)
    weights = {name: tensor for name, tensor in target.state_dict().items() if "embed_tokens" not in name}
    weights.pop("lm_head.weight")
    draft.load_state_dict(weights, strict=False)
    with torch.no_grad():
        draft.model.embed_tokens.weight[:shared] = target.model.embed_tokens.weight[:shared]
        draft.lm_head.weight.zero_()
        draft.lm_head.weight[:shared] = target.lm_head.weight[:shared]
    return draft


def wants_id_70() -> PreTrainedModel:
    """A draft model of 80 ids for which id 70 is always the most probable one, by far."""
    draft = embeddings_of_other_size(80)
    head = torch.nn.Linear(draft.lm_head.in_features, 80)
    with torch.no_grad():
        head.weight.copy_(draft.lm_head.weight)
        head.bias.zero_()
        head.bias[70] = 1000.0
    draft.lm_head = head
    return draft


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab_size", [48, 64, 65, 80])
def test_vocabularies_of_other_sizes_just_work(vocab_size: int, temperature: float) -> None:
    """Draft models of 48, 64, 65 and 80 ids serve a target of 64: same tokens as without, seeded or greedy."""
    model = tiny_model("llama")
    params = {"temperature": temperature, "seed": 4}
    plain = decode(model, PROMPTS, BUDGETS, params)
    drafter = ModelDrafter(embeddings_of_other_size(vocab_size), target_vocab_size=VOCAB)
    run = decode(model, PROMPTS, BUDGETS, params, drafter=drafter, policy=Fixed(4))
    assert run.outputs == plain.outputs
    assert any(token >= 48 for output in run.outputs for token in output)  # ids the smallest one has never seen
    assert run.accepted > 0
    assert (run.accepted == run.admitted) is (vocab_size >= VOCAB)  # padding changes nothing, missing ids do


@pytest.mark.parametrize("verification", ["token", "block", "one_hot", "coupled"])
def test_unseeded_sampling_works_with_every_rule(verification: str) -> None:
    """Probabilities over a draft vocabulary of another size reach the ratio rules in the target's."""
    for vocab_size in (48, 80):
        drafter = ModelDrafter(embeddings_of_other_size(vocab_size), target_vocab_size=VOCAB)
        params = {"temperature": 0.7}
        run = decode(
            tiny_model("llama"), PROMPTS, BUDGETS, params, drafter=drafter, policy=Fixed(4), verification=verification
        )
        assert [len(output) for output in run.outputs] == BUDGETS
        assert all(0 <= token < VOCAB for output in run.outputs for token in output)
        assert run.admitted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_the_target_lacks_are_never_proposed(temperature: float) -> None:
    """A draft model that wants nothing but id 70 proposes what it likes best among the target's 64 ids."""
    draft = wants_id_70()
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    proposal = drafter.propose([request(0, [1, 2, 3], 6, temperature=temperature)])[0]
    assert len(proposal.token_ids) == 6
    assert all(0 <= token < VOCAB for token in proposal.token_ids)
    if temperature:
        assert proposal.probs is not None
        assert proposal.probs.shape == (6, VOCAB)
        assert torch.allclose(proposal.probs.sum(dim=-1), torch.ones(6), atol=1e-5)
    else:
        assert list(proposal.token_ids) == argmax_continuation(draft, [1, 2, 3], 6)
    run = decode(tiny_model("llama"), PROMPTS, BUDGETS, drafter=drafter, policy=Fixed(4))
    assert run.outputs == [generate(tiny_model("llama"), *pair) for pair in zip(PROMPTS, BUDGETS, strict=True)]
    assert run.accepted == run.admitted > 0  # with id 70 out of the way it is the target itself


def test_ids_the_drafter_lacks_have_no_probability() -> None:
    """Nothing is drafted, and no mass is given, beyond the draft model's own 48 ids."""
    drafter = ModelDrafter(embeddings_of_other_size(48), target_vocab_size=VOCAB)
    proposal = drafter.propose([request(0, [60, 61, 62], 8, temperature=1.0)])[0]
    assert all(token < 48 for token in proposal.token_ids)
    assert proposal.probs is not None
    assert proposal.probs.shape == (8, VOCAB)
    assert not proposal.probs[:, 48:].any()


# --- Contexts ---------------------------------------------------------------------------------------------------------


def test_a_shorter_context_ends_the_drafting_not_the_request() -> None:
    """A request that outgrows the draft model's context goes on without drafts; the others are still drafted for."""
    model = tiny_model("llama")
    draft = tiny_model("llama", max_position_embeddings=20)
    draft.load_state_dict(model.state_dict())
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    prompts, budgets = [[1, 2, 3], list(range(1, 16)), list(range(1, 31))], [40, 24, 12]
    run = decode(model, prompts, budgets, drafter=drafter, policy=Fixed(4))
    assert run.outputs == [generate(model, *pair) for pair in zip(prompts, budgets, strict=True)]
    inside, crossing, outside = (completion.metrics for completion in run.completions)
    assert inside.drafted > crossing.drafted > outside.drafted == 0
    assert inside.accepted == inside.admitted
    assert 40 - 17 <= inside.rounds < 40  # plain rounds beyond position 20


@pytest.mark.parametrize(("held", "limit", "expected"), [(19, 8, 1), (15, 8, 5), (15, 2, 2), (20, 8, 0), (33, 8, 0)])
def test_drafts_end_where_the_draft_context_ends(held: int, limit: int, expected: int) -> None:
    """No drafted position lies outside the draft model's context."""
    drafter = ModelDrafter(tiny_model("gpt2", n_positions=20), target_vocab_size=VOCAB)
    assert len(drafter.propose([request(0, [1] * held, limit)])[0].token_ids) == expected


# --- The draft cache --------------------------------------------------------------------------------------------------


class WrongOnce(ModelDrafter):
    """Takes its second-best token once, as second of its third draft of four; notes the cache after every call."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, target_vocab_size=VOCAB)
        self.lengths: list[tuple[int, int]] = []
        """(committed tokens, positions in the draft cache) after each proposal."""
        self._steps = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Draft, then look at the cache."""
        proposals = super().propose(requests)
        self.lengths.append((len(requests[0].token_ids), self._state.length(0)))
        return proposals

    def _to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps == 4 + 4 + 2:
            logits = logits.clone()
            logits[logits.argmax()] = -torch.inf
        return super()._to_target_vocab(logits)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt2"])
def test_one_rejection_costs_one_rejection(name: str) -> None:
    """A draft model equal to the target is accepted in full for 200 tokens, except in the one round that went wrong.

    A cache rewound too far, or not far enough, would show as acceptance that decays from then on.
    """
    model = tiny_model(name)
    drafter = WrongOnce(model)
    run = decode(model, [[1, 2, 3]], [200], drafter=drafter, policy=Fixed(4))
    accepted = [report.accepted[0] for report in run.reports[:-1]]
    assert accepted == [4, 4, 1, *[4] * (len(accepted) - 3)]
    assert len(accepted) > 30
    # The last drafted token is never run: n committed tokens and 3 drafted ones.
    assert all(held == committed + 3 for committed, held in drafter.lengths[:-1])


class RewoundTooFar(WrongOnce):
    """Known-wrong: from its wrong draft on, loses two more entries than it should, and does not run them again."""

    def _unrun(self, request, row) -> list[int]:  # type: ignore[no-untyped-def] # noqa: ANN001
        """Cut the cache, and the record of what it holds, by two."""
        unrun = super()._unrun(request, row)
        if len(self.lengths) >= 3:
            del row.held[-2:]
            row.confirmed = len(row.held)
            self._state.truncate(0, row.confirmed)
        return unrun


class CountsReruns(ModelDrafter):
    """Notes how many committed tokens it has to run at the beginning of each draft."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, target_vocab_size=VOCAB)
        self.unrun: list[int] = []

    def _unrun(self, request, row) -> list[int]:  # type: ignore[no-untyped-def] # noqa: ANN001
        unrun = super()._unrun(request, row)
        self.unrun.append(len(unrun))
        return unrun


def test_no_committed_token_is_run_twice() -> None:
    """A draft begins with the anchor alone, and with the last draft before it where all of them were accepted."""
    model = tiny_model("llama")
    drafter = CountsReruns(near_copy(model, noise=0.05))
    run = decode(model, [[1, 2, 3]], [60], drafter=drafter, policy=Fixed(3))
    assert 0 < run.accepted < run.admitted
    expected = [2 if report.accepted == report.drafted else 1 for report in run.reports]
    assert drafter.unrun == [1, *expected[: len(drafter.unrun) - 1]]


def test_a_draft_cache_rewound_too_far_is_noticed() -> None:
    """The test above notices a draft cache that loses two entries a round: output stays right, acceptance falls."""
    model = tiny_model("llama")
    run = decode(model, [[1, 2, 3]], [100], drafter=RewoundTooFar(model), policy=Fixed(4))
    assert run.outputs == [generate(model, [1, 2, 3], 100)]
    accepted = [report.accepted[0] for report in run.reports[:-1]]
    assert sum(accepted[3:]) < 2 * len(accepted[3:])


@pytest.mark.parametrize("length", [5, 50, 200])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt2"])
def test_draft_logits_equal_those_from_scratch(name: str, length: int) -> None:
    """After any accepted and rejected drafts, the next draft's law is that of a forward over the committed tokens."""
    draft = tiny_model(name)
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(VOCAB, (3,), generator=generator).tolist()
    limits = itertools.cycle([4, 1, 3, 0, 5])
    while len(tokens) < length:
        proposal = drafter.propose([request(0, tokens, next(limits), temperature=1.0)])[0]
        most = min(len(proposal.token_ids), length - len(tokens) - 1)
        kept = int(torch.randint(most + 1, (), generator=generator))
        tokens = [*tokens, *proposal.token_ids[:kept], int(torch.randint(VOCAB, (), generator=generator))]
    proposal = drafter.propose([request(0, tokens, 3, temperature=1.0)])[0]
    assert proposal.probs is not None
    with torch.inference_mode():
        ids = torch.tensor([[*tokens, *proposal.token_ids[:-1]]])
        expected = draft(input_ids=ids, use_cache=False).logits[0, -3:].softmax(dim=-1)
    assert (proposal.probs - expected).abs().max() < 1e-5
    fresh = ModelDrafter(draft, target_vocab_size=VOCAB).propose([request(1, tokens, 3, temperature=1.0)])[0]
    assert fresh.token_ids == proposal.token_ids


def test_survival_is_a_falling_product() -> None:
    """Estimates lie in [0, 1] and never rise along a draft."""
    drafter = ModelDrafter(tiny_model("llama"), target_vocab_size=VOCAB)
    proposal = drafter.propose([request(0, [1, 2, 3], 8)])[0]
    assert proposal.survival is not None
    assert len(proposal.survival) == 8
    assert all(1 >= left >= right >= 0 for left, right in itertools.pairwise(proposal.survival))


@pytest.mark.parametrize("quality", ["same", "other"])
def test_survival_follows_what_is_accepted(quality: str) -> None:
    """Estimates end near 1 for a draft model that is always right, and low for one that is almost never right."""
    model = tiny_model("llama")
    draft = model if quality == "same" else tiny_model("llama", seed=77)
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    run = decode(model, [[1, 2, 3]], [120], drafter=drafter, policy=Fixed(2))
    last = [report.survival[0][0] for report in run.reports[-10:] if report.survival[0]]
    mean = sum(last) / len(last)
    assert mean > 0.7 if quality == "same" else mean < 0.3


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_rows_with_different_limits_are_drafted_together() -> None:
    """Every request gets its own limit and the draft it gets alone; forwards are those of the longest draft."""
    draft = tiny_model("llama")
    requests = [request(row, tokens, limit) for row, (tokens, limit) in enumerate(zip(PROMPTS, [2, 0, 5], strict=True))]
    together = ModelDrafter(draft, target_vocab_size=VOCAB)
    proposals = together.propose(requests)
    assert [len(proposal.token_ids) for proposal in proposals] == [2, 0, 5]
    assert list(proposals[0].token_ids) == argmax_continuation(draft, PROMPTS[0], 2)
    assert list(proposals[2].token_ids) == argmax_continuation(draft, PROMPTS[2], 5)
    before = together.num_forwards
    grown = [
        request(row, [*tokens, 9], limit) for row, (tokens, limit) in enumerate(zip(PROMPTS, [4, 3, 6], strict=True))
    ]
    again = together.propose(grown)
    assert together.num_forwards - before <= 6 + 1  # and the prompt of the request that was not drafted for before
    for proposal, tokens, limit in zip(again, PROMPTS, [4, 3, 6], strict=True):
        assert list(proposal.token_ids) == argmax_continuation(draft, [*tokens, 9], limit)


def test_requests_in_any_order_and_subset() -> None:
    """Which requests are asked for together, and in which order, does not change any draft."""
    draft = tiny_model("llama")
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    tokens = {0: [1, 2, 3], 1: [4, 5], 2: [6, 7, 8, 9], 3: [10]}
    for rows in ([0, 1, 2, 3], [2, 0], [3, 1], [1, 3, 2], [0, 3]):
        proposals = drafter.propose([request(row, tokens[row], 3) for row in rows])
        for row, proposal in zip(rows, proposals, strict=True):
            assert list(proposal.token_ids) == argmax_continuation(draft, tokens[row], 3)
            tokens[row] = [*tokens[row], *proposal.token_ids[: row % 3], 50 + row]


def test_release_frees_rows() -> None:
    """Released rows are used again instead of new ones, whichever goes first; unknown rows are ignored."""
    draft = tiny_model("llama")
    drafter = ModelDrafter(draft, target_vocab_size=VOCAB)
    drafter.propose([request(row, [row + 1, 2, 3], 2) for row in range(4)])
    held = drafter.state_bytes()["draft_kv"]
    for row in (1, 3, 99, 0, 2):
        drafter.release(RowId(row))
        left = [other for other in range(4) if other in drafter._rows]
        proposals = drafter.propose([request(other, [other + 1, 2, 3, 4], 2) for other in left])
        for other, proposal in zip(left, proposals, strict=True):
            assert list(proposal.token_ids) == argmax_continuation(draft, [other + 1, 2, 3, 4], 2)
    assert drafter._rows == {}
    drafter.propose([request(row, [5, 6], 2) for row in range(10, 14)])
    assert drafter.state_bytes()["draft_kv"] == held


def test_a_finished_batch_leaves_nothing_behind() -> None:
    """After a run with early finishers the drafter holds no request, and its storage is that of the largest batch."""
    model = tiny_model("llama")
    drafter = ModelDrafter(near_copy(model, noise=0.05), target_vocab_size=VOCAB)
    decode(model, PROMPTS, BUDGETS, drafter=drafter, policy=Fixed(3))
    held = drafter.state_bytes()
    decode(model, PROMPTS * 2, BUDGETS * 2, drafter=drafter, policy=Fixed(3), max_batch_size=3)
    assert drafter._rows == {}
    assert len(drafter._order) == 0
    assert drafter.state_bytes() == held


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_recurrent_models_are_refused_as_drafters(name: str) -> None:
    """The refusal names the model and says what would do."""
    with pytest.raises(DrafterError, match="recurrent models cannot draft yet; use an attention-only draft model"):
        ModelDrafter(tiny_model(name), target_vocab_size=VOCAB)


def test_a_loaded_model_becomes_a_drafter() -> None:
    """A model given as the drafter setting is wrapped; something that is no drafter is refused with what would do."""
    facts = TargetFacts(vocab_size=VOCAB, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(build_drafter(tiny_model("llama"), facts), ModelDrafter)
    with pytest.raises(DrafterError, match=r"subclass specflow_llm\.DrafterBase"):
        build_drafter(3, facts)


class Silent(DrafterBase):
    """Never has a draft."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Nothing."""
        return [Proposal(()) for _ in requests]


@pytest.mark.parametrize("combined", [False, True])
def test_one_drafter_serves_two_engines(combined: bool) -> None:  # noqa: FBT001 - a parameter
    """Two engines of one target that take turns share a draft model: its rows are told apart, and drafts stay good.

    If both engines numbered their rows from 0, the drafter would be asked to go on from the other one's tokens.
    """
    target = tiny_model("llama")
    shared = ModelDrafter(near_copy(target), target_vocab_size=VOCAB)
    prompts = [[1, 2, 3], [9, 8, 7, 6]]
    engines = [
        make_engine(target, drafter=CombinedDrafter(Silent(), shared) if combined else shared, policy=Fixed(3))
        for _ in prompts
    ]
    rows = [
        engine.submit(prompt, SamplingParams(max_tokens=12)) for engine, prompt in zip(engines, prompts, strict=True)
    ]
    assert len(set(rows)) == 2
    found: dict[RowId, list[int]] = {row: [] for row in rows}
    accepted = 0
    while any(engine.num_unfinished for engine in engines):
        for engine in engines:
            for update in engine.step():
                assert update.error is None
                found[update.request_id] += update.token_ids
                accepted += 0 if update.completion is None else update.completion.metrics.accepted
    assert [found[row] for row in rows] == [generate(target, prompt, 12) for prompt in prompts]
    apart = [
        decode(
            target, [prompt], [12], drafter=ModelDrafter(near_copy(target), target_vocab_size=VOCAB), policy=Fixed(3)
        )
        for prompt in prompts
    ]
    assert accepted == sum(run.accepted for run in apart) > 0
