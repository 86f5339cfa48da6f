from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from specflow.errors import InvalidSettingError
from specflow_llm import DrafterBase, DrafterError, DraftRequest, Proposal, SamplingParams
from specflow_llm.checker import DrafterReport, Outcome, check_drafter, tiny_target
from specflow_llm.checker.contract import ContractLog
from specflow_llm.checker.exactness import SampledRuns
from specflow_llm.checker.gain import measure_gain
from specflow_llm.checker.harness import Setup
from specflow_llm.checker.statistics import DrawTest, chi_square_tail, detectable_shift, goodness_of_fit
from specflow_llm.drafters import Drafter, ModelDrafter, NGramDrafter, RowId
from specflow_llm.sampling import RowSampler, Rule


def quick_check(factory: Callable[[], Drafter], *, samples: int = 128, learns: bool = False) -> DrafterReport:
    """A check with few samples: enough for the faults below, which are large; the default sees smaller ones."""
    return check_drafter(factory, samples=samples, max_tokens=8, learns=learns)


@functools.cache
def target() -> PreTrainedModel:
    """The target that the checks run on."""
    return tiny_target()


@functools.cache
def near_target() -> PreTrainedModel:
    """A model that often agrees with the target."""
    twin = copy.deepcopy(target())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return twin


@functools.cache
def bigram_logits() -> torch.Tensor:
    """[V, V] what the target says after each single token: a cheap drafter that is sometimes right."""
    with torch.inference_mode():
        logits: torch.Tensor = target()(input_ids=torch.arange(16)[:, None]).logits[:, 0]
    return logits


# --- Good drafters ----------------------------------------------------------------------------------------------------


class Bigram(DrafterBase):
    """Draws from a table, through the request's sampler, and estimates survival before it draws."""

    gives_probs = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One token after another."""
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Proposal:
        """One request's draft."""
        history = request.token_ids
        tokens: list[int] = []
        probs: list[torch.Tensor] = []
        survival: list[float] = []
        last, alive = history[-1], 1.0
        for index in range(request.limit):
            token, law, confidence = request.sampler.draft(bigram_logits()[last], history, tokens, len(history) + index)
            alive *= confidence
            tokens.append(token)
            survival.append(alive)
            if law is not None:
                probs.append(law)
            last = token
        return self.finished(request, tokens, torch.stack(probs) if probs else None, survival)

    def finished(
        self, request: DraftRequest, tokens: list[int], probs: torch.Tensor | None, survival: list[float]
    ) -> Proposal:
        """Where the faulty ones differ."""
        return Proposal(tokens, probs, survival)


class Lookup(DrafterBase):
    """Continues as after the last occurrence of the last token; remembers nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One lookup per request."""
        return [Proposal(continuation(request.token_ids, request.limit)) for request in requests]


def continuation(token_ids: Sequence[int], limit: int) -> list[int]:
    """What followed the last token last time."""
    *past, anchor = token_ids
    for index in range(len(past) - 1, -1, -1):
        if past[index] == anchor:
            return [*past[index + 1 :], anchor][:limit]
    return []


class HiddenStates(DrafterBase):
    """Maps the target's hidden states to guesses: shows that features reach a drafter under check."""

    feature_layers = (0, 1)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A function of the last feature."""
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Proposal:
        """One request's draft."""
        features = request.features
        assert features is not None
        assert features.shape == (len(request.token_ids) - 1, 64)
        guess = int(features[-1].argmax()) % 16 if len(features) else 0
        return Proposal([guess] * min(2, request.limit))


class Branching(DrafterBase):
    """Where it may, the three likeliest tokens after the last one, and what is likeliest after the first of them."""

    branches = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One tree or chain per request."""
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Proposal:
        """One request's draft."""
        first = bigram_logits()[request.token_ids[-1]].topk(3).indices.tolist()
        second = int(bigram_logits()[first[0]].argmax())
        if not request.may_branch:
            return Proposal([first[0], second][: request.limit])
        return self.finished([first[0], second, *first[1:]], [-1, 0, -1, -1], [0.4, 0.2, 0.15, 0.1], request.limit)

    def finished(self, tokens: list[int], parents: list[int], survival: list[float], limit: int) -> Proposal:
        """Where the faulty ones differ."""
        return Proposal(tokens[:limit], survival=survival[:limit], parents=parents[:limit])


class SecondIsRight(Branching):
    """A wrong token and, where it may branch, the target's own beside it."""

    def draft(self, request: DraftRequest) -> Proposal:
        """One place."""
        with torch.inference_mode():
            right = int(target()(input_ids=torch.tensor([list(request.token_ids)])).logits[0, -1].argmax())
        tokens, parents = [(right + 1) % 16, right], [-1, -1]
        if not request.may_branch:
            return Proposal(tokens[: min(1, request.limit)])
        return self.finished(tokens, parents, [0.5, 0.4], request.limit)


GOOD: dict[str, Callable[[], Drafter]] = {
    "branching": Branching,
    "bigram": Bigram,
    "lookup": Lookup,
    "ngram": NGramDrafter,
    "model": lambda: ModelDrafter(near_target(), target_vocab_size=16),
    "hidden states": HiddenStates,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "model" else name for name in GOOD]
)
def test_good_drafters_pass(name: str) -> None:
    """A drafter that keeps the rules passes every check; a false alarm has odds below one in a million."""
    report = quick_check(GOOD[name], samples=192 if name == "bigram" else 1)
    assert report.ok, str(report)
    assert report.is_exact
    assert report.gain is not None
    assert report.gain.mean_accepted_length >= 1.0
    if name == "bigram":
        skipped = [check.name for check in report.checks if check.outcome is Outcome.SKIPPED]
        assert skipped == ["greedy parity, trees", "seeded parity, trees"]


# --- Faulty drafters --------------------------------------------------------------------------------------------------


class TooMany(Lookup):
    """Ignores the limit."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One token too many."""
        return [Proposal([*continuation(request.token_ids, request.limit), 1]) for request in requests]


class OutsideVocabulary(Lookup):
    """Proposes an id that the target lacks."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """The first id that does not exist."""
        return [Proposal([request.sampler.vocab_size][: request.limit]) for request in requests]


class SoftArgmax(Bigram):
    """Proposes the most probable token and reports the soft law."""

    def draft(self, request: DraftRequest) -> Proposal:
        """Argmax, with probabilities."""
        history = request.token_ids
        tokens: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(request.limit):
            logits = bigram_logits()[tokens[-1] if tokens else history[-1]]
            tokens.append(int(logits.argmax()))
            probs.append(logits.softmax(-1))
        return Proposal(tokens, torch.stack(probs) if probs else None)


class ShiftedLaws(Bigram):
    """Reports the laws one position late."""

    def finished(
        self, request: DraftRequest, tokens: list[int], probs: torch.Tensor | None, survival: list[float]
    ) -> Proposal:
        """Rows rotated by one; mixed with a uniform law so that no drawn token has probability 0."""
        if probs is None:
            return Proposal(tokens, None, survival)
        mixed = 0.9 * probs.roll(1, dims=0) + 0.1 / probs.shape[1]
        return Proposal(tokens, mixed, survival)


class DropsUnlikely(Bigram):
    """Ends a draft before the first token whose own probability is low."""

    def finished(
        self, request: DraftRequest, tokens: list[int], probs: torch.Tensor | None, survival: list[float]
    ) -> Proposal:
        """Look at the token, then decide whether to send it."""
        if probs is None:
            return Proposal(tokens, None, survival)
        keep = 0
        while keep < len(tokens) and float(probs[keep, tokens[keep]]) > 0.3:
            keep += 1
        return Proposal(tokens[:keep], probs[:keep], survival[:keep])


class SurvivalOfTheToken(Bigram):
    """Estimates survival by the probability of the very token it drew."""

    def finished(
        self, request: DraftRequest, tokens: list[int], probs: torch.Tensor | None, survival: list[float]
    ) -> Proposal:
        """The product of the drawn tokens' probabilities."""
        if probs is None:
            return Proposal(tokens, None, survival)
        alive, estimates = 1.0, []
        for index, token in enumerate(tokens):
            alive *= float(probs[index, token])
            estimates.append(alive)
        return Proposal(tokens, probs, estimates)


class OneMemoryForAll(Lookup):
    """Looks things up in its own text, then in whatever text it read before."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Each request reads what the one before it wrote."""
        proposals = []
        for request in requests:
            proposals.append(Proposal(continuation([*self.text, *request.token_ids], request.limit)))
            self.text = list(request.token_ids)
        return proposals


class TrustsItsDrafts(Lookup):
    """Keeps its own drafts as if all had been accepted."""

    def __init__(self) -> None:
        self.texts: dict[RowId, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Only what lies beyond the text it believes in is read."""
        proposals = []
        for request in requests:
            text = self.texts.setdefault(request.row, [])
            text += request.token_ids[len(text) :]
            guess = continuation(text, request.limit)
            text += guess
            proposals.append(Proposal(guess))
        return proposals

    def release(self, row: RowId) -> None:
        """Forget."""
        self.texts.pop(row, None)


class NeverForgets(Lookup):
    """Keeps the text of every request for ever, and says so."""

    def __init__(self) -> None:
        self.texts: dict[RowId, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Right guesses, from a copy of the text."""
        for request in requests:
            self.texts[request.row] = list(request.token_ids)
        return super().propose(requests)

    def state_bytes(self) -> Mapping[str, int]:
        """Eight bytes a token."""
        return {"texts": 8 * sum(len(text) for text in self.texts.values())}


class KnowsOldRows(Lookup):
    """Takes a row number that it has seen for the same request."""

    def __init__(self) -> None:
        self.texts: dict[RowId, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Reads only the tokens beyond those it knows."""
        proposals = []
        for request in requests:
            text = self.texts.setdefault(request.row, [])
            text += request.token_ids[len(text) :]
            proposals.append(Proposal(continuation(text, request.limit)))
        return proposals


class Raises(Lookup):
    """Fails on long texts."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """An error of its own."""
        if any(len(request.token_ids) > 10 for request in requests):
            raise IndexError("table is too short")
        return super().propose(requests)


class WritesToTheRequest(Lookup):
    """Appends its guess to the committed tokens."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """The list is the engine's own."""
        proposals = []
        for request in requests:
            guess = continuation(request.token_ids, request.limit)
            request.token_ids.extend(guess)  # type: ignore[attr-defined]
            proposals.append(Proposal(guess))
        return proposals


FAULTY: dict[type[Drafter], tuple[str, str, bool]] = {
    TooMany: ("contract", "at most `limit` tokens", False),
    OutsideVocabulary: ("contract", "ids of the target's vocabulary", False),
    WritesToTheRequest: ("contract", "read-only", False),
    SoftArgmax: ("drawn from the reported probabilities", "do not follow the reported probabilities", False),
    ShiftedLaws: ("drawn from the reported probabilities", "do not follow the reported probabilities", False),
    SurvivalOfTheToken: ("survival blind to its token", "moves with the probability of token k", False),
    OneMemoryForAll: ("rows are independent", "in a batch", True),
    TrustsItsDrafts: ("forgets rejected tokens", "from scratch", True),
    NeverForgets: ("release", "finished requests left", True),
    KnowsOldRows: ("release", "after release, a request of the same number gets", True),
    Raises: ("greedy parity", "raised IndexError: table is too short", False),
}
"""Faulty drafter -> the check that catches it, words of its reason, and whether the output is nevertheless exact."""


@pytest.mark.parametrize("faulty", FAULTY)
def test_faulty_drafters_are_caught(faulty: Callable[[], Drafter]) -> None:
    """Each known fault fails the check that is there for it, with a reason that names it."""
    name, words, exact = FAULTY[faulty]  # type: ignore[index]
    report = quick_check(faulty)
    check = report.check(name)
    assert check.outcome is Outcome.FAILED, str(report)
    assert words in check.reason
    assert not report.ok
    assert report.is_exact is exact
    assert name in report.verdict


class BranchesAnywhere(Branching):
    """Known-wrong: a tree whether it may or not."""

    def draft(self, request: DraftRequest) -> Proposal:
        """Always branching."""
        return super().draft(replace(request, may_branch=True))


class WrongParents(Branching):
    """Known-wrong: tokens that continue later ones."""

    def finished(self, tokens: list[int], parents: list[int], survival: list[float], limit: int) -> Proposal:
        """Parents in reverse."""
        del parents
        return super().finished(tokens, [3, 2, 1, 0], survival, limit)


class WorstFirst(Branching):
    """Known-wrong: the least promising alternative first."""

    def finished(self, tokens: list[int], parents: list[int], survival: list[float], limit: int) -> Proposal:
        """Estimates in reverse."""
        return super().finished(tokens, parents, survival[::-1], limit)


@pytest.mark.parametrize(
    ("faulty", "rule"),
    [
        (BranchesAnywhere, "trees only where they may be"),
        (WrongParents, "a parent before every token of a tree"),
        (WorstFirst, "survival never rises"),
    ],
)
def test_faulty_trees_are_caught(faulty: type[Branching], rule: str) -> None:
    """Each by the rule it breaks; the output is right all the same, and what cannot be a tree is not run."""
    report = quick_check(faulty)
    assert report.check("contract").outcome is Outcome.FAILED
    assert rule in report.check("contract").reason
    assert report.check("greedy parity, trees").outcome is not Outcome.FAILED


def test_trees_are_checked_and_measured_as_trees() -> None:
    """Both parities see trees, and what is accepted of them is counted by depth, beside chains of the same drafter."""
    report = quick_check(Branching)
    for name in ("greedy parity", "seeded parity"):
        assert report.check(f"{name}, trees").outcome is Outcome.OK
        assert "drafted tokens accepted" in report.check(f"{name}, trees").reason
    assert report.gain is not None
    assert report.gain.trees
    assert len(report.gain.acceptance_by_position) == 2  # a tree of four tokens is two deep
    hesitating = quick_check(SecondIsRight)
    assert hesitating.gain is not None
    assert hesitating.gain.acceptance_by_position == (0.75,)  # at the end there is room for one token, the wrong one
    accepted, admitted = re.findall(r"(\d+) of (\d+) drafted", hesitating.check("greedy parity, trees").reason)[0]
    assert 0 < 2 * int(accepted) <= int(admitted)
    assert re.search(r"; 0 of \d+ drafted", hesitating.check("greedy parity").reason)
    assert quick_check(Lookup).check("greedy parity, trees").outcome is Outcome.SKIPPED


def test_a_biased_law_shows_in_the_output() -> None:
    """Dropping tokens because they are unlikely changes the output's law enough to be seen end to end."""
    runs = SampledRuns(setup_for(DropsUnlikely, samples=500))
    assert runs.law()[0] is Outcome.FAILED
    outcome, reason = runs.draws()
    assert outcome is Outcome.FAILED
    assert "dropped because of what they are" in reason


def test_estimates_that_know_their_token_bias_the_cut_output() -> None:
    """Cutting drafts by an estimate that saw its token changes the output's law, which uncut runs cannot show."""
    runs = SampledRuns(setup_for(SurvivalOfTheToken, samples=500))
    assert runs.law()[0] is Outcome.OK
    assert runs.truncated_law()[0] is Outcome.FAILED


def setup_for(factory: Callable[[], Drafter], *, samples: int = 1) -> Setup:
    """What the checks are given."""
    return Setup(factory=factory, model=target(), max_draft_tokens=5, max_tokens=8, samples=samples, learns=False)


def test_a_drafter_with_its_own_generator_is_not_compared_with_itself() -> None:
    """Where the same request gets different proposals, the checks that need a fresh twin say so and are skipped."""
    generator = torch.Generator().manual_seed(0)

    class Dice(DrafterBase):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
            return [Proposal(torch.randint(16, (request.limit,), generator=generator).tolist()) for request in requests]

    report = quick_check(Dice)
    assert report.ok
    assert report.check("forgets rejected tokens").outcome is Outcome.SKIPPED
    assert "generator of its own" in report.check("rows are independent").reason


def test_declared_learning_is_respected() -> None:
    """A drafter that learns across requests on purpose is not blamed for it when that is declared."""
    report = quick_check(OneMemoryForAll, learns=True)
    assert report.ok
    assert report.check("rows are independent").outcome is Outcome.SKIPPED


def test_a_silent_drafter_is_exact_and_gains_nothing() -> None:
    """A drafter that never proposes passes, its state checks are skipped, and one token a round is all it gets."""

    class Silent(DrafterBase):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
            return [Proposal([]) for _ in requests]

    report = quick_check(Silent)
    assert report.ok
    assert report.check("forgets rejected tokens").outcome is Outcome.SKIPPED
    assert report.gain is not None
    assert report.gain.mean_accepted_length == 1.0
    assert report.gain.acceptance_by_position == ()
    assert report.gain.verification_pass_rate == 0.0


def test_a_perfect_drafter_gains_a_whole_block_per_round() -> None:
    """The target as its own drafter has every token accepted, so the mean accepted length nears the block size."""
    drafter = setup_for(lambda: ModelDrafter(target(), target_vocab_size=16)).drafter()
    gain = measure_gain(
        drafter, target(), None, [[1, 2, 3], [4]], max_tokens=20, max_draft_tokens=4, is_real_model=False
    )
    assert gain.mean_accepted_length > 3.5
    assert set(gain.acceptance_by_position) == {1.0}
    assert gain.draft_utilisation == 1.0
    assert gain.rounds < gain.emitted == 40


def test_reports_are_plain_data_and_text() -> None:
    """A report becomes JSON and text that both name the verdict, every check and the gain."""
    report = quick_check(Lookup)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["ok"] is True
    assert data["verdict"] == report.verdict
    assert [check["name"] for check in data["checks"]] == [check.name for check in report.checks]
    assert data["gain"]["estimated_speedup"] == pytest.approx(
        data["gain"]["mean_accepted_length"] / (1 + data["gain"]["draft_overhead"] + data["gain"]["verify_overhead"])
    )
    assert str(report).splitlines()[0] == report.verdict
    with pytest.raises(KeyError):
        report.check("no such check")


def test_wrong_arguments_are_refused_before_any_work() -> None:
    """A factory of something else, a number below 1 and a model with too few ids are refused by name."""
    with pytest.raises(DrafterError, match="lacks methods"):
        check_drafter(object)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="samples"):
        check_drafter(Lookup, samples=0)
    with pytest.raises(InvalidSettingError, match="token ids"):
        check_drafter(Lookup, check_model=tiny_target(vocab_size=4))


def test_the_global_generator_is_left_alone() -> None:
    """Building the tiny target draws its weights without moving anyone's random numbers."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_target()
    assert torch.equal(torch.rand(1), expected)


# --- The contract, proposal by proposal -------------------------------------------------------------------------------


def request(rule: Rule = "block", limit: int = 2) -> DraftRequest:
    """A request over 4 ids."""
    sampler = RowSampler(SamplingParams(temperature=1.0), vocab_size=4, num_prompt_tokens=1, seed=0, rule=rule)
    return DraftRequest(RowId(0), [1, 2], limit, sampler)


EVEN = torch.full((2, 4), 0.25)
BROKEN: dict[str, Proposal] = {
    "at most `limit` tokens": Proposal([0, 1, 2], torch.full((3, 4), 0.25)),
    "ids are plain integers": Proposal(list(torch.tensor([0, 1])), EVEN),
    "ids of the target's vocabulary": Proposal([0, 4], EVEN),
    "one survival estimate per token": Proposal([0, 1], EVEN, [0.5]),
    "survival is a probability": Proposal([0, 1], EVEN, [1.5, 0.5]),
    "survival never rises": Proposal([0, 1], EVEN, [0.5, 0.6]),
    "probs is [K, V]": Proposal([0, 1], torch.full((2, 5), 0.2)),
    "probabilities are not negative": Proposal([0, 1], torch.tensor([[0.5, 0.7, -0.2, 0.0], [0.25] * 4])),
    "probabilities of a row add up to 1": Proposal([0, 1], EVEN * 1.001),
    "a drawn token has a positive probability": Proposal([0, 1], torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]])),
    "gives_probs announces probabilities": Proposal([0, 1]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_of_the_contract_is_checked(rule: str) -> None:
    """A proposal that breaks one rule is recorded under that rule and under no other."""
    log = ContractLog()
    log.judge(request(), BROKEN[rule], gives_probs=True)
    assert list(log.violations) == [rule]


@pytest.mark.parametrize("odd", [math.nan, -0.1])
def test_estimates_must_be_probabilities(odd: float) -> None:
    """NaN and negative numbers are no survival estimates."""
    log = ContractLog()
    log.judge(request(), Proposal([0], EVEN[:1], [odd]), gives_probs=True)
    assert "survival is a probability" in log.violations


def test_unannounced_probabilities_break_the_contract() -> None:
    """A drafter that says it gives no probabilities must give none."""
    log = ContractLog()
    log.judge(request(), Proposal([0, 1], EVEN), gives_probs=False)
    assert list(log.violations) == ["gives_probs announces probabilities"]


def test_legal_proposals_pass_and_illegal_ones_are_cut() -> None:
    """A legal proposal is passed on as it is; of an illegal one only what the engine can take."""
    log = ContractLog()
    good = log.judge(request(), Proposal([0, 1], EVEN, [0.9, 0.5]), gives_probs=True)
    assert not log.violations
    assert (good.token_ids, good.survival) == ([0, 1], [0.9, 0.5])
    cut = log.judge(request(), Proposal([0, 1, 2], torch.full((3, 4), 0.25), [0.9, 0.8, 0.7]), gives_probs=True)
    assert (cut.token_ids, cut.survival) == ([0, 1], [0.9, 0.8])
    assert cut.probs is not None
    assert cut.probs.shape == (2, 4)
    assert log.judge(request(), Proposal([0], EVEN, [math.nan]), gives_probs=True).survival is None


def test_a_missing_proposal_breaks_the_contract() -> None:
    """Two requests must get two proposals."""
    log = ContractLog()
    log.judge_batch([request(), request()], [(1, 2), (1, 2)], 1)
    assert list(log.violations) == ["one proposal per request"]


# --- Statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"), [(3.841459, 1, 0.05), (23.209251, 10, 0.01), (149.449253, 100, 0.001)]
)
def test_chi_square_tails_are_those_of_the_tables(statistic: float, degrees: int, tail: float) -> None:
    """The tail probability agrees with printed tables to five digits."""
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-5)


def test_an_impossible_observation_contradicts_by_itself() -> None:
    """A single observation in a cell of probability 0 refutes the law."""
    law = {"a": 1.0}
    assert goodness_of_fit({"a": 10, "b": 1}, law).contradicts
    assert not goodness_of_fit({"a": 11}, law).contradicts


def test_goodness_of_fit_sees_the_shift_it_promises() -> None:
    """Counts shifted by twice the detectable distance are refused, unshifted ones are not."""
    samples, cells = 4000, 16
    law = dict.fromkeys(range(cells), 1.0 / cells)
    shift = 2.0 * detectable_shift(samples, cells - 1)
    fair = dict.fromkeys(range(cells), samples // cells)
    assert not goodness_of_fit(fair, law).contradicts
    moved = {cell: round(samples / cells * (1.0 + 2.0 * shift * (1 if cell % 2 else -1))) for cell in range(cells)}
    assert goodness_of_fit(moved, law).contradicts


@pytest.mark.parametrize("seed", range(5))
def test_honest_draws_are_not_accused(seed: int) -> None:
    """Draws from changing laws pass, with estimates that know the law but not the draw; odds of an alarm: 1e-7."""
    generator = torch.Generator().manual_seed(seed)
    test = DrawTest()
    for _ in range(600):
        probs = (2.0 * torch.randn(2, 40, generator=generator)).softmax(-1)
        tokens = torch.multinomial(probs, 1, generator=generator).flatten().tolist()
        test.add(probs, tokens, probs.amax(-1).tolist())
    for evidence in (test.by_rank(), test.by_id(), test.survival_knows_token()):
        assert evidence.degrees > 0
        assert not evidence.contradicts


def test_a_permuted_law_is_seen_by_id_where_ranks_are_right() -> None:
    """Tokens with the right ranks but the wrong ids are found: the two ways of counting need each other."""
    generator = torch.Generator().manual_seed(0)
    base = (torch.arange(8) * 0.5).softmax(-1)
    test = DrawTest()
    for _ in range(400):
        token = int(torch.multinomial(base, 1, generator=generator))
        test.add(base.flip(0)[None], [7 - token], None)
        test.add(base[None], [7 - token], None)
    assert test.by_id().contradicts


def test_certain_laws_prove_nothing_and_accuse_nobody() -> None:
    """One-hot laws leave no room for chance: no degrees of freedom, and no alarm unless another token was drawn."""
    certain = torch.zeros(1, 8)
    certain[0, 3] = 1.0
    test = DrawTest()
    for _ in range(300):
        test.add(certain, [3], [1.0])
    assert test.by_rank().degrees == 0
    assert not test.by_rank().contradicts
    for _ in range(300):
        test.add(certain * 0.9999 + 0.0001 / 8, [4], [1.0])
    assert test.by_rank().contradicts
