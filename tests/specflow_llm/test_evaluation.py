from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console, RenderableType
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from specflow.errors import InvalidSettingError
from specflow_llm import DraftRequest, Proposal, SamplingParams
from specflow_llm.bench.candidates import Output
from specflow_llm.bench.measure import Trial
from specflow_llm.bench.prompts import Prompt
from specflow_llm.calibration import CalibratedDrafter, CalibrationEntry, CalibrationTable, Regime, Scale, fingerprint
from specflow_llm.cli import app
from specflow_llm.drafters import Drafter, DrafterBase, DSparkDrafter, ModelDrafter, NGramDrafter
from specflow_llm.dspark import DSparkConfig, DSparkModel, TargetAdapter
from specflow_llm.dspark.checkpoint import save_drafter
from specflow_llm.errors import CheckpointError, DataFileError, DrafterError
from specflow_llm.evaluation import EvaluationSettings, check_recording, count, fit_and_test, run_evaluation, store
from specflow_llm.evaluation.acceptance import by_category, macro_interval
from specflow_llm.evaluation.confidence import judge, with_live_correction
from specflow_llm.evaluation.lineup import line_up
from specflow_llm.evaluation.plot import save_plot, save_reliability
from specflow_llm.evaluation.prompts import choose_prompts, in_turns
from specflow_llm.evaluation.report import confidence_table, tables
from specflow_llm.evaluation.rollouts import Rollouts, can_branch, roll_out, rule_for
from specflow_llm.evaluation.settings import find_prompts
from specflow_llm.evaluation.speed import summarise_speed
from specflow_llm.hub import LoadedModel
from specflow_llm.metrics import RequestMetrics
from specflow_llm.records import RecordHeader, Recording, RoundRecord, read_rounds, write_rounds
from tests.specflow_llm.drafters import OracleDrafter, Truths
from tests.specflow_llm.models import VOCAB, generate, near_copy, tiny_model

PROMPTS = [[index + 1, 2 * index + 3, 5, 7] for index in range(6)]
CATEGORIES = ["a", "b", "a", "b", "a", "b"]


def record(
    drafted: int, accepted: int, emitted: int | None = None, *, request: int = 0, category: str = "a"
) -> RoundRecord:
    """A round; without ``emitted`` the request did not end inside it."""
    return RoundRecord(
        request=request,
        category=category,
        position=4,
        survival=tuple(0.5**n for n in range(1, drafted + 1)),
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
    )


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The target."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def loaded(model: PreTrainedModel) -> LoadedModel:
    """The target as commands have it; ids in, ids out."""
    return LoadedModel("tiny", model, None, 0)


@pytest.fixture(scope="module")
def near(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model that is often right."""
    return near_copy(model, noise=0.12)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Prompts for a model without a tokenizer."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"question_id": number, "category": category, "token_ids": prompt})
        for number, (prompt, category) in enumerate(zip(PROMPTS, CATEGORIES, strict=True))
    ]
    path.write_text("\n".join(lines))
    return path


def rolled(loaded: LoadedModel, drafter: Drafter, **options: Any) -> Rollouts:
    """Rollouts of the six prompts, greedy unless said otherwise."""
    params = options.pop("params", SamplingParams(max_tokens=20, seed=3))
    return roll_out(
        loaded,
        drafter,
        PROMPTS,
        [params] * len(PROMPTS),
        categories=CATEGORIES,
        check_model=False,
        **{"draft_tokens": 4, "batch_size": 3, **options},
    )


# --------------------------------------------------------------------------------------------------------- acceptance


def test_counts_of_known_rounds() -> None:
    """Every figure of four hand-made rounds: a rejection, a full acceptance, a short draft, an end inside a draft."""
    rounds = [record(3, 1), record(3, 3, request=1), record(1, 1, request=1), record(3, 3, 2, request=2)]
    found = count(rounds, max_draft=3)
    assert (found.requests, found.rounds, found.emitted) == (3, 4, 2 + 4 + 2 + 2)
    assert found.mean_accepted_length == 10 / 4
    assert (found.cut_rounds, found.whole_rounds) == (1, 2)
    assert found.mean_accepted_length_whole == (2 + 4) / 2
    assert found.accepted == 1 + 3 + 1 + 2  # the third token of the last round is behind the end
    assert found.drafted == 10
    assert found.drafted_by_position == (4, 3, 3)
    assert found.at_risk_by_position == (4, 3, 1)
    assert found.accepted_by_position == (4, 2, 1)
    assert found.conditional_acceptance == (1.0, 2 / 3, 1.0)
    assert found.survival == pytest.approx((1.0, 2 / 3, 2 / 3))


def test_conditional_acceptance_and_survival_are_not_confused() -> None:
    """With full drafts survival is the fraction of rounds that accept so far; neighbours' ratio is the conditional."""
    rng = np.random.default_rng(0)
    rounds = [record(4, int(accepted)) for accepted in rng.integers(0, 5, 500)]
    found = count(rounds, max_draft=4)
    fractions = [sum(item.accepted > position for item in rounds) / 500 for position in range(4)]
    assert found.survival == pytest.approx(fractions)
    ratios = [later / earlier for earlier, later in zip([1.0, *fractions], fractions, strict=False)]
    assert found.conditional_acceptance == pytest.approx(ratios)
    assert found.mean_accepted_length == pytest.approx(1 + sum(fractions))


def test_ends_do_not_bend_the_acceptance() -> None:
    """Where requests end inside drafts, the rates at risk are the true ones; counting behind the end is not.

    Tokens are accepted with probability 0.7, an accepted one ends its request with probability 0.2, and what is
    verified behind an end is always accepted (garbage that the drafter copies). 20,000 rounds; a rate at the last
    position has a standard error of 1.2 % (about 1,500 rounds at risk), so 6 % is five of those: fewer than one false
    alarm in a million. The seed is fixed besides.
    """
    rng = np.random.default_rng(1)
    rounds = []
    for _ in range(20_000):
        accepted, emitted = 0, None
        while accepted < 5 and (emitted is not None or rng.random() < 0.7):
            accepted += 1
            if emitted is None and rng.random() < 0.2:
                emitted = accepted
        rounds.append(record(5, accepted, emitted))
    found = count(rounds, max_draft=5)
    assert found.conditional_acceptance == pytest.approx([0.7] * 5, abs=0.06)
    naive = sum(item.accepted > 4 for item in rounds) / sum(item.accepted > 3 for item in rounds)
    assert naive > 0.85


def test_positions_that_no_round_reached_are_unknown() -> None:
    """A rate without rounds is None, not 0, and survival is unknown from there on."""
    found = count([record(3, 0), record(1, 1)], max_draft=3)
    assert found.conditional_acceptance == (0.5, None, None)
    assert found.survival == (0.5, None, None)
    assert count([], max_draft=2).mean_accepted_length == 0.0
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["survival"] == [0.5, None, None]


def test_categories_are_counted_apart_and_weigh_the_same() -> None:
    """Each category has its own counts; the interval is of their mean, and contains it."""
    rounds = [record(2, 2, request=number) for number in range(20)]
    rounds += [record(2, number % 2, request=100 + number, category="b") for number in range(4)]
    found = by_category(rounds, max_draft=2)
    assert list(found) == ["a", "b"]
    assert (found["a"].mean_accepted_length, found["b"].mean_accepted_length) == (3.0, 1.5)
    low, high = macro_interval(rounds, seed=0)
    assert low < (3.0 + 1.5) / 2 < high
    assert low >= (3.0 + 1.0) / 2
    assert macro_interval(rounds[:1], seed=0) == (3.0, 3.0)


# ----------------------------------------------------------------------------------------------------------- rollouts


def test_rollouts_verify_everything_and_miss_nothing(loaded: LoadedModel, near: PreTrainedModel) -> None:
    """Rounds of a request line up without gaps, add up to its tokens, and hold full drafts until the room ends."""
    found = rolled(loaded, ModelDrafter(near, target_vocab_size=VOCAB))
    assert found.gives_survival
    for request, completion in enumerate(found.completions):
        own = [item for item in found.rounds if item.request == request]
        position = len(PROMPTS[request])
        for item in own:
            assert item.position == position
            room = len(PROMPTS[request]) + 20 - position
            assert len(item.survival) == min(4, room - 1)
            assert item.category == CATEGORIES[request]
            position += item.emitted
        assert sum(item.emitted for item in own) == len(completion.token_ids) == 20
        assert len(own) == completion.metrics.rounds
        assert sum(item.accepted for item in own) == completion.metrics.accepted


def test_counts_agree_with_the_engines_own(loaded: LoadedModel, near: PreTrainedModel) -> None:
    """Accepted and emitted tokens, rounds and accepted length equal the sums of the requests' own metrics."""
    found = rolled(loaded, ModelDrafter(near, target_vocab_size=VOCAB))
    metrics = [completion.metrics for completion in found.completions]
    counts = count(found.rounds, max_draft=4)
    assert counts.rounds == sum(item.rounds for item in metrics)
    assert counts.accepted == sum(item.accepted for item in metrics)
    assert counts.drafted == sum(item.drafted for item in metrics) == sum(item.admitted for item in metrics)
    assert counts.mean_accepted_length == counts.emitted / counts.rounds


def test_a_perfect_drafter_reaches_one_more_than_it_drafts(loaded: LoadedModel, model: PreTrainedModel) -> None:
    """The target as its own drafter: every position is accepted, and whole rounds emit all drafts and a bonus."""
    found = count(rolled(loaded, ModelDrafter(model, target_vocab_size=VOCAB)).rounds, max_draft=4)
    assert found.conditional_acceptance == (1.0,) * 4
    assert found.mean_accepted_length_whole == 5.0


def test_an_end_inside_a_draft_is_noticed(model: PreTrainedModel) -> None:
    """An end-of-sequence token that is drafted and accepted cuts its round: nothing behind it is counted."""
    outputs = [generate(model, prompt, 20) for prompt in PROMPTS]
    end = outputs[0][6]
    place = outputs[0].index(end)
    ending = LoadedModel("tiny", tiny_model("llama", eos_token_id=end), None, 0)
    truths = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    found = rolled(ending, OracleDrafter(truths), draft_tokens=20)
    first = [item for item in found.rounds if item.request == 0]
    assert len(first) == 1
    assert first[0].emitted == place + 1 <= first[0].accepted
    counts = count(first, max_draft=20)
    assert counts.cut_rounds == 1
    assert counts.accepted == place + 1
    assert sum(counts.at_risk_by_position) == place + 1


def test_counts_do_not_depend_on_the_batch(loaded: LoadedModel, near: PreTrainedModel) -> None:
    """Requests decoded alone and together accept the same tokens, greedy and sampled."""
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0, seed=5)):
        alone, together = (
            rolled(loaded, ModelDrafter(near, target_vocab_size=VOCAB), batch_size=size, params=params)
            for size in (1, 6)
        )
        assert [(item.request, item.accepted, item.emitted) for item in alone.rounds] == [
            (item.request, item.accepted, item.emitted) for item in together.rounds
        ]


def test_sampled_requests_are_verified_as_most_users_have_it(near: PreTrainedModel) -> None:
    """Seeded measurements use block verification for drafters with probabilities, and matching for the others."""
    assert rule_for(ModelDrafter(near, target_vocab_size=VOCAB), "auto") == "block"
    assert rule_for(NGramDrafter(), "auto") == "coupled"
    assert rule_for(NGramDrafter(), "token") == "token"


class Hesitating(DrafterBase):
    """Drafts a wrong token; where it may branch, the right one stands beside it."""

    branches = True

    def __init__(self, truths: Sequence[Sequence[int]]) -> None:
        self._truths = Truths(truths)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """One place, one or two tokens."""
        found = []
        for item in requests:
            true = self._truths.continuation(item.token_ids, 1)
            tokens = [(token + 1) % VOCAB for token in true] + (true if item.may_branch else [])
            parents = [-1] * len(tokens[: item.limit]) if item.may_branch else None
            found.append(Proposal(tokens[: item.limit], survival=[0.4] * len(tokens[: item.limit]), parents=parents))
        return found


def test_trees_are_counted_beside_chains(loaded: LoadedModel, model: PreTrainedModel, prompt_file: Path) -> None:
    """Chains never hit and trees always do; calibration is about chains, each has a record. 0 leaves trees out."""
    truths = [[*prompt, *generate(model, prompt, 12)] for prompt in PROMPTS]
    for tokens in (6, 0):
        report = run_evaluation(
            EvaluationSettings(
                drafters=(Hesitating(truths),), prompts=prompt_file, temperatures=(0.0,), max_tokens=12, draft_tokens=4,
                tree_tokens=tokens, speed=False,
            ),
            loaded=loaded,
        )  # fmt: skip
        (result,) = report.results
        assert result.macro_accepted_length == 1.0
        assert {len(item.survival) for item in result.rounds} <= {0, 1}
        buffer = io.StringIO()
        console = Console(file=buffer, width=200)
        for table in tables(report):
            console.print(table)
        assert ("trees of 6" in buffer.getvalue()) is (tokens == 6)
        data = json.loads(json.dumps(report.as_dict()))
        if tokens == 0:
            assert result.tree is None
            assert data["results"][0]["tree"] is None
            continue
        assert result.tree is not None
        # Two tokens a round, but for the last two tokens: there is room for one drafted token only, the wrong one.
        assert result.tree.macro_accepted_length == pytest.approx(12 / 7)
        assert set(result.tree.categories.values()) == {12 / 7}
        assert data["results"][0]["tree"]["tokens"] == 6


def test_trees_have_a_record_of_their_own(
    loaded: LoadedModel, model: PreTrainedModel, prompt_file: Path, tmp_path: Path
) -> None:
    """Written beside that of the chains, with shape and path; a simulation reads it, a calibration does not."""
    truths = [[*prompt, *generate(model, prompt, 12)] for prompt in PROMPTS]
    settings = EvaluationSettings(
        drafters=(Hesitating(truths),), prompts=prompt_file, temperatures=(0.0,), max_tokens=12, draft_tokens=4,
        tree_tokens=6, speed=False,
    )  # fmt: skip
    report = run_evaluation(settings, loaded=loaded)
    (tree,) = [result.tree for result in report.results]
    chains, trees = report.write_rounds(tmp_path)
    assert trees.name == f"{chains.stem}-trees.jsonl"
    assert not read_rounds(chains).branches
    found = read_rounds(trees)
    assert tree is not None
    assert found.rounds == tree.rounds
    assert found.header.max_draft == 6
    hits = [item for item in found.rounds if item.accepted]
    assert len(hits) == 5 * len(PROMPTS)
    assert {(item.parents, item.path) for item in hits} == {((-1, -1), (1,))}
    with pytest.raises(DataFileError, match="branch"):
        check_recording(found, tmp_path)


def test_trees_are_tried_out_before_they_are_measured(loaded: LoadedModel) -> None:
    """Drafters that do not branch, and targets with one past, are measured with chains, under the rule for chains."""
    branching = Hesitating([])
    assert can_branch(loaded, branching)
    assert not can_branch(loaded, NGramDrafter())
    assert not can_branch(LoadedModel("tiny", tiny_model("mamba2"), None, 0), branching)
    branching.gives_probs = True
    assert rule_for(branching, "auto", tree=True) == "coupled"
    assert rule_for(branching, "auto", tree=False) == "block"
    assert rule_for(branching, "one_hot", tree=True) == "one_hot"


class Claiming(DrafterBase):
    """Drafts the last token again, with a claim that its calibration corrects; made for these tests."""

    num_positions = 4

    def __init__(self, table: CalibrationTable | None, *, fails: bool = False) -> None:
        self.calibration = table
        self.fails = fails

    def use_calibration(self, table: CalibrationTable | None) -> None:
        """See :class:`specflow_llm.calibration.CalibratedDrafter`."""
        self.calibration = table

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Raw: 0.8 at every position; with a calibration: 0.1."""
        if self.fails:
            raise RuntimeError("no memory")
        claim = 0.8 if self.calibration is None else 0.1
        return [
            Proposal(
                [request.token_ids[-1]] * min(4, request.limit),
                survival=[claim**n for n in range(1, min(4, request.limit) + 1)],
            )
            for request in requests
        ]


def table_of(*temperatures: float, temperature: float = 0.0, shift: float = 0.0) -> CalibrationTable:
    """A calibration for requests at one temperature, with the same shift at all positions."""
    size = len(temperatures)
    return CalibrationTable(drafter="x").with_entry(
        CalibrationEntry(
            method="platt",
            scales=tuple(Scale(value, shift) for value in temperatures),
            fitted=(True,) * size,
            regime=Regime(target="tiny", temperature=temperature, data="some", requests=2, rounds=9),
            counts=(1,) * size,
            ece_before=(0.0,) * size,
            ece_after=(0.0,) * size,
            ece_noise=(0.0,) * size,
        )
    )


def test_raw_confidences_are_recorded_and_the_calibration_comes_back(loaded: LoadedModel) -> None:
    """A drafter's own calibration is off while its rounds are recorded, and in use again afterwards."""
    table = table_of(2.0, 2.0, 2.0, 2.0)
    drafter = Claiming(table)
    assert isinstance(drafter, CalibratedDrafter)
    found = rolled(loaded, drafter)
    assert {item.survival[0] for item in found.rounds if item.survival} == {0.8}
    assert drafter.calibration is found.set_aside is table


def test_the_calibration_comes_back_when_decoding_fails(loaded: LoadedModel) -> None:
    """An error on the way does not leave the drafter raw."""
    table = table_of(2.0)
    drafter = Claiming(table, fails=True)
    with pytest.raises(RuntimeError, match="no memory"):
        rolled(loaded, drafter)
    assert drafter.calibration is table


# --------------------------------------------------------------------------------------------------------- confidence


def test_confidence_of_known_rounds() -> None:
    """Claims of 1/2 and 1/4 that come true in 3 of 4 and 1 of 4 rounds are off by 1/4 and not at all."""
    rounds = [record(2, 0), record(2, 1), record(2, 1), record(2, 2)]
    found = judge(rounds, None)
    assert found is not None
    assert found.corrected is None
    first, second = found.raw
    assert (first.position, first.count, first.mean_claimed) == (1, 4, pytest.approx(0.5))
    assert (first.mean_accepted, first.ece, first.brier) == (0.75, pytest.approx(0.25), pytest.approx(0.25))
    assert (second.mean_accepted, second.ece) == (0.25, pytest.approx(0.0))
    assert first.auc == 0.5


def test_a_calibration_is_judged_beside_the_raw_claims() -> None:
    """With scales both are reported; one that has too few positions is left out."""
    rounds = [replace(record(2, number % 3), survival=(0.9, 0.3)) for number in range(30)]
    found = judge(rounds, (Scale(), Scale(2.0, math.log(3.0)), Scale(3.0)))
    assert found is not None
    assert found.corrected is not None
    assert found.scales == (Scale(), Scale(2.0, math.log(3.0)))
    assert found.corrected[0] == found.raw[0]
    assert found.raw[1].mean_claimed == pytest.approx(0.3)
    assert found.corrected[1].mean_claimed == pytest.approx(0.9 / (1 + 2**0.5 / 3))
    # Odds of 1/2 became their square root, and then three times as much.
    assert judge(rounds, (Scale(2.0),)) == judge(rounds, None)
    assert judge([record(0, 0)], None) is None


def boasting(claim: float, rate: float, *, requests: int = 10, rounds: int = 60) -> list[RoundRecord]:
    """Rounds of a drafter whose every token claims to be accepted with ``claim`` and is with ``rate``."""
    rng = np.random.default_rng(3)
    found = []
    for request in range(requests):
        for _ in range(rounds):
            accepted = int(np.cumprod(rng.random(2) < rate).sum())
            made = record(2, accepted, request=request)
            found.append(replace(made, survival=(claim, claim**2)))
    return found


@pytest.mark.parametrize(("claim", "rate"), [(0.9, 0.4), (0.3, 0.6)])
def test_live_acceptance_corrects_what_no_table_can(claim: float, rate: float) -> None:
    """Text unlike the calibration data: claims are far off, the estimates that policies go by soon are not.

    The tolerance is three standard errors of the accepted fraction, 600 rounds of 60 that learn from each other.
    """
    found = judge(boasting(claim, rate), None)
    assert found is not None
    assert found.raw[0].ece > 0.2
    error = 3.0 * math.sqrt(rate * (1.0 - rate) / 600)
    assert abs(found.live[0].mean_claimed - rate) < error + 1 / 60  # one round of 60 has learned nothing yet
    assert found.live[0].ece < 0.08
    scaled = judge(boasting(claim, rate), (Scale(1.0, 0.5), Scale(1.0, 0.5)))
    assert scaled is not None
    assert scaled.corrected is not None
    assert scaled.corrected[0].mean_claimed > claim
    assert abs(scaled.live[0].mean_claimed - rate) < error + 1 / 60


def test_live_correction_does_not_look_ahead() -> None:
    """An estimate depends on earlier rounds only, not on its own nor on those beside it; the drafts stay in order."""
    rounds = boasting(0.9, 0.4, requests=3, rounds=5)
    before = list(with_live_correction(rounds, None))
    assert [item.request for item in before] == [0, 1, 2] * 5
    assert {item.survival for item in before[:3]} == {before[0].survival}
    for place in range(5):
        other = list(rounds)
        accepted = 0 if other[place].accepted else 2
        other[place] = replace(other[place], accepted=accepted, emitted=accepted + 1)
        after = list(with_live_correction(other, None))
        known = 3 * place + 3  # request 0's round of this place, and the other requests' beside it
        assert [item.survival for item in after[:known]] == [item.survival for item in before[:known]]
        if place < 4:
            assert after[known].survival != before[known].survival


# --------------------------------------------------------------------------------------------------- prompts, drafters


def test_a_limit_takes_from_the_categories_in_turns(loaded: LoadedModel, prompt_file: Path) -> None:
    """Three prompts of two categories are two of one and one of the other; the file's name and hash are kept."""
    found = choose_prompts(loaded, prompt_file, max_tokens=20, per_category=None, limit=3, seed=0)
    assert sorted(found.categories) == ["a", "a", "b"]
    assert found.source == "prompts.jsonl"
    assert found.sha256 is not None
    assert len(found.sha256) == 64
    everything = choose_prompts(loaded, prompt_file, max_tokens=20, per_category=None, limit=None, seed=0)
    assert sorted(everything.token_ids) == sorted(map(tuple, PROMPTS))
    one = choose_prompts(loaded, prompt_file, max_tokens=20, per_category=1, limit=None, seed=0)
    assert sorted(one.categories) == ["a", "b"]
    assert [prompt.question_id for prompt in in_turns([Prompt(str(n), "aab"[n], "") for n in range(3)])] == [
        "0",
        "2",
        "1",
    ]


def test_prompts_without_room_are_skipped(loaded: LoadedModel, prompt_file: Path) -> None:
    """Where the context cannot hold prompt and output a prompt is left out; with none left, that is the error."""
    longer = prompt_file.with_name("more.jsonl")
    longer.write_text(
        prompt_file.read_text() + "\n" + json.dumps({"question_id": 9, "category": "a", "token_ids": [1] * 200})
    )
    found = choose_prompts(loaded, longer, max_tokens=100, per_category=None, limit=None, seed=0)
    assert found.skipped == ("a 9: 200 tokens",)
    assert len(found.prompts) == 6
    with pytest.raises(InvalidSettingError, match="max_tokens"):
        choose_prompts(loaded, longer, max_tokens=300, per_category=None, limit=None, seed=0)


def test_spec_bench_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """``spec-bench`` names the file of SPECFLOW_BENCH_DATA; without it the message says what to do."""
    monkeypatch.setenv("SPECFLOW_BENCH_DATA", "question.jsonl")
    assert find_prompts("spec-bench") == Path("question.jsonl")
    assert find_prompts("own.jsonl") == Path("own.jsonl")
    assert find_prompts(None) is None
    monkeypatch.delenv("SPECFLOW_BENCH_DATA")
    with pytest.raises(InvalidSettingError, match="SPECFLOW_BENCH_DATA"):
        find_prompts("spec-bench")


def test_drafters_need_names_of_their_own(loaded: LoadedModel, near: PreTrainedModel, tmp_path: Path) -> None:
    """Two of one name would share rows and files; none at all is no drafter; folders give name and fingerprint."""
    for settings in (("ngram", NGramDrafter()), ("none",), (None,)):
        with pytest.raises(DrafterError):
            line_up(settings, loaded)
    near.save_pretrained(tmp_path / "near")
    found = line_up(("ngram", str(tmp_path / "near")), loaded)
    assert [entrant.name for entrant in found] == ["ngram", "near"]
    assert [entrant.fingerprint for entrant in found] == [None, fingerprint(tmp_path / "near")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafters": ()}, "drafters"),
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (0.0, 0.0)}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"draft_tokens": 0}, "draft_tokens"),
        ({"limit": 0}, "limit"),
        ({"repeats": 0}, "repeats"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"policy": "clever"}, "policy"),
        ({"verification": "hope"}, "verification"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_are_refused(settings: Mapping[str, Any], message: str) -> None:
    """A mistake is reported before anything is loaded, by name."""
    with pytest.raises(InvalidSettingError, match=message):
        EvaluationSettings(**settings)


# -------------------------------------------------------------------------------------------------------------- speed


def metrics(emitted: int, rounds: int) -> RequestMetrics:
    """Figures of one request."""
    return RequestMetrics(
        4, rounds, rounds, 3 * rounds, 2 * rounds, emitted - rounds, emitted, (), {"execute": 1.0}, {}
    )


def test_speed_of_known_runs() -> None:
    """Medians of the repeats, ratios per prompt, geometric means over categories; plain decoding is 1."""
    seconds = {
        ("plain", 0): [2.0, 2.0, 2.0], ("plain", 1): [4.0, 4.0, 9.0],
        ("fast", 0): [1.0, 0.5, 3.0], ("fast", 1): [1.0, 1.0, 1.0],
    }  # fmt: skip
    trials = [
        Trial(name, prompt, repeat, time, 0.0, Output((1,) * 20, 1, metrics(20, 20 if name == "plain" else 5)))
        for (name, prompt), times in seconds.items()
        for repeat, time in enumerate(times)
    ]
    plain, fast = summarise_speed(["plain", "fast"], trials, ["a", "b"], temperature=0.0)
    assert (plain.speedup, plain.worst_prompt) == (1.0, 1.0)
    assert fast.by_category == {"a": 2.0, "b": 4.0}
    assert fast.speedup == pytest.approx(8**0.5)
    assert fast.worst_prompt == 2.0
    assert fast.tokens_per_second == 40 / 2.0
    assert fast.mean_accepted_length == 4.0
    assert fast.mean_admitted == 2.0
    assert fast.milliseconds_per_round == {"execute": pytest.approx(200.0)}
    assert fast.spread == pytest.approx((2.5 / 1.0 + 0.0) / 2)


# -------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, near: PreTrainedModel) -> EvaluationSettings:
    """Two drafters, two temperatures, six prompts."""
    path = tmp_path_factory.mktemp("run") / "prompts.jsonl"
    lines = [
        json.dumps({"question_id": number, "category": CATEGORIES[number], "token_ids": prompt})
        for number, prompt in enumerate(PROMPTS)
    ]
    path.write_text("\n".join(lines))
    near.save_pretrained(path.parent / "near")
    return EvaluationSettings(
        drafters=("ngram", str(path.parent / "near")),
        prompts=path,
        max_tokens=24,
        draft_tokens=4,
        repeats=2,
        seed=1,
    )


@pytest.fixture(scope="module")
def report(settings: EvaluationSettings, loaded: LoadedModel) -> Any:
    """A whole evaluation."""
    return run_evaluation(settings, loaded=loaded, argv=["test"])


def test_a_run_measures_every_drafter_at_every_temperature(report: Any) -> None:
    """Counts for each pair, with the rule that was used; speeds for each pair and for plain decoding."""
    assert [(item.drafter, item.temperature, item.rule) for item in report.results] == [
        ("ngram", 0.0, "greedy"), ("near", 0.0, "greedy"), ("ngram", 1.0, "coupled"), ("near", 1.0, "block"),
    ]  # fmt: skip
    assert [(row.name, row.temperature) for row in report.speeds] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in ("plain", "ngram", "near")
    ]
    greedy = report.results[1]
    assert greedy.macro_accepted_length > 1.0
    assert greedy.confidence is not None
    assert {row.identical for row in report.speeds if row.temperature == 0.0} == {2}
    assert {row.identical for row in report.speeds if row.temperature == 1.0} == {None}
    assert all(row.speedup == 1.0 for row in report.speeds if row.name == "plain")


def printed(*items: RenderableType) -> str:
    """As a wide terminal shows it."""
    out = Console(width=200, record=True, file=io.StringIO())
    for item in items:
        out.print(item)
    return out.export_text()


def test_a_run_is_plain_data_and_tables(report: Any) -> None:
    """The report is strict JSON without paths of this machine, and every table can be drawn."""
    text = json.dumps({**report.as_dict(), "settings": None}, allow_nan=False)
    parsed = json.loads(text)
    assert parsed["schema"] == "specflow-llm evaluate 1"
    assert parsed["prompts"]["source"] == "prompts.jsonl"
    assert str(report.settings.prompts.parent) not in text
    shown = printed(*tables(report))
    for word in ("Accepted length", "conditional", "survival", "ECE", "noise", "vs plain", "at risk"):
        assert word in shown


def test_records_of_a_run_can_be_read(report: Any, tmp_path: Path) -> None:
    """Every drafter's rounds have a file of their own with where they come from, and come back as they were."""
    paths = report.write_rounds(tmp_path)
    assert [path.name for path in paths] == ["ngram-T0.jsonl", "near-T0.jsonl", "ngram-T1.jsonl", "near-T1.jsonl"]
    found = read_rounds(tmp_path / "near-T1.jsonl")
    assert found.rounds == report.results[3].rounds
    assert found.header.temperature == 1.0
    assert found.header.max_draft == 4
    origin = found.header.provenance
    assert origin["confidences"] == "raw"
    assert origin["verification"] == "block"
    assert origin["drafter_fingerprint"] == fingerprint(Path(report.settings.drafters[1]))
    assert read_rounds(tmp_path / "ngram-T0.jsonl").header.provenance["confidences"] == "as given"


def test_drafters_whose_names_look_alike_in_a_file_name_keep_their_own_files(report: Any, tmp_path: Path) -> None:
    """``a+b`` and ``a-b`` are two drafters."""
    one, other = report.results[:2]
    alike = replace(report, results=(replace(one, drafter="a+b", temperature=0.0), replace(other, drafter="a-b")))
    paths = alike.write_rounds(tmp_path)
    assert [path.name for path in paths] == ["a-b-T0.jsonl", "a-b-T0-2.jsonl"]
    assert [read_rounds(path).rounds for path in paths] == [one.rounds, other.rounds]


def test_a_run_is_repeated_by_its_seed(report: Any, settings: EvaluationSettings, loaded: LoadedModel) -> None:
    """The same settings give the same rounds, sampled ones too."""
    again = run_evaluation(
        EvaluationSettings(
            drafters=settings.drafters[1:], temperatures=(1.0,), prompts=settings.prompts, max_tokens=24,
            draft_tokens=4, seed=1, speed=False,
        ),
        loaded=loaded,
    )  # fmt: skip
    assert again.results[0].rounds == report.results[3].rounds
    assert again.speeds == ()


def test_pictures_are_drawn(report: Any, tmp_path: Path) -> None:
    """Both pictures are files of the asked-for kind; an unknown suffix is refused by name."""
    pytest.importorskip("matplotlib")
    save_plot(report, tmp_path / "evaluation.png")
    assert save_reliability(report.results[1:2], tmp_path / "reliability.png")
    for name in ("evaluation.png", "reliability.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidSettingError, match="suffix"):
        save_plot(report, tmp_path / "evaluation.xyz")


def test_a_drafter_without_estimates_has_no_calibration_and_no_record(
    loaded: LoadedModel, model: PreTrainedModel, prompt_file: Path, tmp_path: Path
) -> None:
    """Its acceptance is counted all the same; a record would claim certainty, so there is none."""
    truths = [[*prompt, *generate(model, prompt, 24)] for prompt in PROMPTS]
    found = run_evaluation(
        EvaluationSettings(
            drafters=(OracleDrafter(truths),), temperatures=(0.0,), prompts=prompt_file, max_tokens=16,
            draft_tokens=3, speed=False,
        ),
        loaded=loaded,
    )  # fmt: skip
    result = found.results[0]
    assert result.acceptance.conditional_acceptance == (1.0, 1.0, 1.0)
    assert result.confidence is None
    assert found.write_rounds(tmp_path) == []
    assert any("no survival estimates" in note for note in found.notes)
    assert not save_reliability(found.results, tmp_path / "reliability.png")


def test_a_drafters_own_calibration_is_judged(loaded: LoadedModel, prompt_file: Path) -> None:
    """Raw and corrected figures stand side by side for the regime that the table was fitted on, and for no other."""
    table = table_of(1.0, 0.5, 0.5, 0.5, temperature=0.7, shift=-math.log(2.0))
    settings = EvaluationSettings(
        drafters=(Claiming(table),), prompts=prompt_file, max_tokens=16, draft_tokens=8, speed=False
    )
    greedy, sampled = run_evaluation(settings, loaded=loaded).results
    assert greedy.confidence is not None
    assert greedy.confidence.corrected is None
    assert sampled.confidence is not None
    assert sampled.confidence.corrected is not None
    assert sampled.confidence.raw[0].mean_claimed == pytest.approx(0.8)
    # Odds of 4 are halved by the shift, at the second position after they were squared by the temperature.
    assert sampled.confidence.corrected[0].mean_claimed == pytest.approx(2 / 3)
    assert sampled.confidence.corrected[1].mean_claimed == pytest.approx(2 / 3 * 8 / 9)
    assert {"b_k", "-0.69", "0.50"} <= set(printed(confidence_table(sampled, sampled.confidence)).split())
    assert greedy.header.max_draft == 4  # it was asked for 8, and has 4 positions
    assert greedy.num_positions == 4
    notes = run_evaluation(settings, loaded=loaded).notes
    assert any("fitted at T=0.7" in note for note in notes)


# -------------------------------------------------------------------------------------------------------- calibration


def recording(rounds: Sequence[RoundRecord], **origin: Any) -> Recording:
    """A recording with some provenance."""
    header = RecordHeader(drafter="near", temperature=1.0, max_draft=3, provenance={"model": "tiny", **origin})
    return Recording(header, tuple(rounds))


def overconfident(count: int, *, seed: int = 0, bias: float = 0.0) -> list[RoundRecord]:
    """Rounds whose logits are 2.5 times the true ones plus a bias: three positions, four rounds a request."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.0, (count, 3))
    hits = rng.random((count, 3)) < 1 / (1 + np.exp(-true))
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    survival = np.cumprod(1 / (1 + np.exp(-2.5 * (true + bias))), axis=1)
    return [
        RoundRecord(
            request=number // 4, category="a", position=4, survival=tuple(survival[number].tolist()),
            accepted=int(accepted[number]), emitted=int(accepted[number]) + 1,
        )
        for number in range(count)
    ]  # fmt: skip


def test_scales_are_fitted_on_some_requests_and_tested_on_others() -> None:
    """Overconfident rounds are brought below the goal on requests that were not fitted on; the regime is kept."""
    found = fit_and_test(
        recording(overconfident(40_000), prompts="p.jsonl", prompts_sha256="ab", verification="block",
                  sampling={"top_p": 0.9, "max_tokens": 5})
    )  # fmt: skip
    assert [scale.temperature for scale in found.entry.scales] == pytest.approx([2.5] * 3, rel=0.15)
    assert [scale.shift for scale in found.entry.scales] == pytest.approx([0.0] * 3, abs=0.2)
    assert found.entry.method == found.as_dict()["method"] == "platt"
    assert min(item.ece for item in found.before) > 0.05
    assert found.is_met
    assert found.entry.ece_after == tuple(item.ece for item in found.after)
    assert found.fit_counts[0] == found.entry.counts[0] == 20_000
    regime = found.entry.regime
    assert (regime.target, regime.temperature, regime.top_p, regime.top_k) == ("tiny", 1.0, 0.9, 0)
    assert (regime.data, regime.data_sha256, regime.verification) == ("p.jsonl", "ab", "block")
    assert (regime.requests, regime.rounds) == (10_000, 40_000)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["is_met"] is True


def test_the_method_is_followed() -> None:
    """On biased rounds shifts are fitted and reported by one method, and left at 0 by the other, which stays worse.

    The seed is fixed; with seven others no shift was further than 0.23 from -1, and no error above 0.46 of the other's.
    """
    biased = recording(overconfident(8000, bias=1.0))
    platt, stretched = fit_and_test(biased), fit_and_test(biased, method="temperature")
    rows = platt.as_dict()["positions"]
    assert [(row["temperature"], row["shift"]) for row in rows] == [
        (scale.temperature, scale.shift) for scale in platt.entry.scales
    ]
    assert [row["shift"] for row in rows] == pytest.approx([-1.0] * 3, abs=0.4)
    assert stretched.entry.method == stretched.as_dict()["method"] == "temperature"
    assert [scale.shift for scale in stretched.entry.scales] == [0.0] * 3
    for better, worse in zip(platt.after, stretched.after, strict=True):
        assert better.ece < 0.5 * worse.ece


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with what looks like a drafter."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "drafter"


def test_calibrations_of_both_kinds_are_stored_side_by_side(checkpoint: Path) -> None:
    """A greedy calibration leaves the sampled one in place; other weights make both go."""
    found = fit_and_test(recording(overconfident(400))).entry
    store(found, checkpoint)
    greedy = table_of(1.0, 2.0, 3.0).entries[0]
    store(greedy, checkpoint, num_positions=3)
    table = CalibrationTable.load(checkpoint)
    assert table is not None
    assert table.entries == (greedy, found)
    (checkpoint / "model.safetensors").write_bytes(b"others")
    store(greedy, checkpoint)
    table = CalibrationTable.load(checkpoint)
    assert table is not None
    assert table.entries == (greedy,)


def test_a_calibration_needs_all_positions(checkpoint: Path, tmp_path: Path) -> None:
    """Three scales for a drafter of seven positions are refused before anything is written; so is an empty folder."""
    entry = fit_and_test(recording(overconfident(400))).entry
    with pytest.raises(InvalidSettingError, match="draft_tokens"):
        store(entry, checkpoint, num_positions=7)
    assert not (checkpoint / "calibration.json").exists()
    with pytest.raises(CheckpointError, match="no weights"):
        store(entry, tmp_path)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ({"confidences": "as given"}, "corrected already"),
        ({"gives_survival": False}, "no estimates"),
        ({"drafter_fingerprint": "1234"}, "other weights"),
    ],
)
def test_recordings_that_say_nothing_about_a_checkpoint_are_refused(
    checkpoint: Path, origin: dict[str, Any], message: str
) -> None:
    """Corrected confidences, none at all, or those of other weights cannot be calibrated with."""
    rounds = overconfident(8)
    check_recording(recording(rounds, drafter_fingerprint=fingerprint(checkpoint)), checkpoint)
    check_recording(recording(rounds), checkpoint)
    with pytest.raises(DataFileError, match=message):
        check_recording(recording(rounds, **origin), checkpoint)


# ------------------------------------------------------------------------------------------------------- command lines


def run(*arguments: object) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folders(tmp_path: Path, model: PreTrainedModel, near: PreTrainedModel) -> tuple[Path, Path]:
    """Target and drafter on disk."""
    model.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    return tmp_path / "target", tmp_path / "near"


def test_the_commands_work_together(folders: tuple[Path, Path], prompt_file: Path, tmp_path: Path) -> None:
    """``evaluate --out`` writes everything; ``calibrate --record`` fits to its rounds and stores the scales."""
    pytest.importorskip("matplotlib")
    target, near = folders
    out = tmp_path / "out"
    common = ("--target", target, "--prompts", prompt_file, "--max-tokens", 24)
    done = run(
        "evaluate", *common, "--drafter", near, "--temperature", "1", "--draft-tokens", 3, "--no-speed", "--out", out
    )
    assert done.exit_code == 0, done.output
    assert "Accepted length" in done.stdout
    assert {path.name for path in out.iterdir()} == {"evaluation.json", "evaluation.png", "reliability.png", "rounds"}
    assert json.loads((out / "evaluation.json").read_text())["results"][0]["drafter"] == "near"
    done = run("calibrate", "--drafter", near, "--record", out / "rounds" / "near-T1.jsonl", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert len(data["positions"]) == 3
    table = CalibrationTable.load(near)
    assert table is not None
    assert table.scales_for(is_greedy=True) is None
    fitted = tuple(Scale(row["temperature"], row["shift"]) for row in data["positions"])
    assert table.scales_for(is_greedy=False) == fitted
    assert table.entries[0].method == data["method"] == "platt"
    done = run("calibrate", *common, "--drafter", near, "--draft-tokens", 3, "--method", "temperature")
    assert done.exit_code == 0, done.output
    assert "goal: calibration error below 2%" in done.stdout
    assert "before and after calibration (temperature)" in done.stdout
    assert "b_k" in done.stdout
    both = CalibrationTable.load(near)
    assert both is not None
    assert [(entry.regime.is_greedy, entry.method) for entry in both.entries] == [
        (True, "temperature"),
        (False, "platt"),
    ]


def test_a_dry_run_stores_nothing(folders: tuple[Path, Path], prompt_file: Path) -> None:
    """``--dry-run`` shows what would be stored, and leaves the checkpoint as it is."""
    target, near = folders
    arguments = ("--target", target, "--drafter", near, "--prompts", prompt_file, "--max-tokens", 16)
    done = run("calibrate", *arguments, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "nothing stored" in done.stdout
    assert not (near / "calibration.json").exists()


def test_a_stale_calibration_does_not_stand_in_the_way(folders: tuple[Path, Path], prompt_file: Path) -> None:
    """Calibrating retrained weights again moves the old table aside and says so."""
    target, near = folders
    table_of(2.0, 2.0, 2.0).save(near)
    done = run("calibrate", "--target", target, "--drafter", near, "--prompts", prompt_file, "--max-tokens", 16)
    assert done.exit_code == 0, done.output
    assert "calibration.json.stale" in " ".join(done.stderr.split())
    assert CalibrationTable.load(near) is not None


def test_evaluate_prints_one_json_object(folders: tuple[Path, Path], prompt_file: Path) -> None:
    """``--json`` leaves standard output to the program that reads it."""
    target, _ = folders
    done = run(
        "evaluate",
        "--target",
        target,
        "--prompts",
        prompt_file,
        "--max-tokens",
        16,
        "--no-speed",
        "--limit",
        2,
        "--json",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    assert [item["temperature"] for item in json.loads(done.stdout)["results"]] == [0.0, 1.0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "--temperature", "warm"),
        ("evaluate", "--drafter", "none", "--no-speed"),
        ("evaluate", "--prompts", "spec-bench"),
        ("calibrate", "--drafter", "nowhere"),
        ("calibrate", "--drafter", ".", "--method", "isotonic"),
    ],
)
def test_requests_that_cannot_work_end_with_exit_code_2(
    arguments: tuple[str, ...], folders: tuple[Path, Path], prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes on the command line are one message and exit code 2."""
    monkeypatch.delenv("SPECFLOW_BENCH_DATA", raising=False)
    more = () if "spec-bench" in arguments else ("--prompts", prompt_file)
    assert run(*arguments, "--target", folders[0], *more).exit_code == 2


def test_a_recording_of_another_drafter_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Rounds of other weights end with exit code 2, and nothing is stored."""
    path = tmp_path / "other.jsonl"
    header = RecordHeader(drafter="x", temperature=0.0, max_draft=3, provenance={"drafter_fingerprint": "1234"})
    write_rounds(path, header, overconfident(8))
    done = run("calibrate", "--drafter", folders[1], "--record", path)
    assert done.exit_code == 2
    assert "other weights" in " ".join(done.stderr.split())
    assert not (folders[1] / "calibration.json").exists()


def test_the_default_prompts_are_the_packages_own() -> None:
    """Without a file the packaged prompts are used; they need a tokenizer, as the message says."""
    bare = LoadedModel("tiny", tiny_model("llama"), None, 0)
    with pytest.raises(InvalidSettingError, match="token_ids"):
        choose_prompts(bare, None, max_tokens=8, per_category=None, limit=None, seed=0)


def test_a_trained_drafter_is_evaluated_and_calibrated_from_its_folder(
    folders: tuple[Path, Path], model: PreTrainedModel, prompt_file: Path
) -> None:
    """A DSpark checkpoint goes through the same commands, and applies the scales that are stored beside it."""
    folder = folders[1].parent / "dspark"
    torch.manual_seed(0)
    config = DSparkConfig(
        target="tiny", vocab_size=VOCAB, hidden_size=32, num_target_layers=2, target_layer_ids=(0,), mask_token_id=63,
        block_size=3, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, max_positions=256,
        markov_rank=8,
    )  # fmt: skip
    save_drafter(DSparkModel(config), folder)
    arguments = ("--target", folders[0], "--drafter", folder, "--prompts", prompt_file, "--max-tokens", 16)
    done = run("calibrate", *arguments, "--temperature", 1, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["positions"]) == 3
    drafter = DSparkDrafter.load(folder, TargetAdapter(model))
    assert isinstance(drafter, CalibratedDrafter)
    assert drafter.calibration == CalibrationTable.load(folder, num_positions=3)
    assert run("calibrate", *arguments, "--draft-tokens", 2).exit_code == 2  # a table of 2 would be refused when loaded
    done = run("evaluate", *arguments, "--no-speed", "--json")
    assert done.exit_code == 0, done.output
    greedy, sampled = json.loads(done.stdout)["results"]
    assert greedy["confidence"]["corrected"] is None
    assert drafter.calibration is not None
    scales = drafter.calibration.scales_for(is_greedy=False) or ()
    assert sampled["confidence"]["scales"] == [asdict(scale) for scale in scales]
