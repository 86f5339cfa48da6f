from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from specflow.errors import InvalidSettingError
from specflow_llm.bench import BenchReport, BenchSettings, bench_command, run_bench
from specflow_llm.bench.candidates import CandidateInfo, Output
from specflow_llm.bench.differences import diagnose, first_difference
from specflow_llm.bench.limits import cost_at, forward_costs, memory_bandwidth, weight_bytes
from specflow_llm.bench.load import CpuUse, cpu_use, others_cores
from specflow_llm.bench.measure import Trial, order_of_runs, run_trials
from specflow_llm.bench.plot import save_plot
from specflow_llm.bench.prompts import PACKAGED, Prompt, choose, load_prompts
from specflow_llm.bench.report import tables
from specflow_llm.bench.run import conclude, warnings_about
from specflow_llm.bench.summary import Summary, geometric_mean, predict, summarise, typical_trials
from specflow_llm.hub import LoadedModel
from specflow_llm.metrics import RequestMetrics
from tests.specflow_llm.models import generate, tiny_config, tiny_model
from tests.specflow_llm.tokenizers import byte_level_bpe

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GENERATE = CandidateInfo(name="generate", is_ours=False, is_packed=False, speculates=False)


def quiet(done: int, total: int, label: str) -> None:
    """No progress display."""


# ------------------------------------------------------------------------------------------------------------ prompts


def test_the_package_carries_three_prompts_of_each_category() -> None:
    """Without a file there are 13 categories of three prompts, each with text and a number of its own."""
    found = load_prompts(None)
    assert found.source == PACKAGED
    assert set(Counter(prompt.category for prompt in found.prompts).values()) == {3}
    assert len(found.categories) == 13
    assert len({prompt.question_id for prompt in found.prompts}) == 39
    assert all(prompt.text for prompt in found.prompts)


def test_a_file_gives_first_turns_or_token_ids(tmp_path: Path) -> None:
    """Spec-Bench's layout gives the first turn; token ids stand in for text; blank lines do not count."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question_id": 5, "category": "qa", "turns": ["one", "two"]}\n\n'
        '{"question_id": "b", "category": "ids", "token_ids": [3, 4]}\n'
    )
    assert load_prompts(path).prompts == (Prompt("5", "qa", "one"), Prompt("b", "ids", None, (3, 4)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a JSONL file"),
        ("", "at least one prompt"),
        ('{"question_id": 1, "category": "a", "turns": ["x"]}\n{"question_id": 2, "turns": ["x"]}\n', "line 2"),
        ('{"question_id": 1, "category": "a", "turns": []}\n', "line 1"),
        ("not json\n", "line 1"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, text: str | None, message: str) -> None:
    """A missing, empty or malformed file is an error that says where."""
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidSettingError, match=message):
        load_prompts(path)


def test_the_choice_within_a_category_depends_on_seed_and_category_alone() -> None:
    """Equal seeds choose equally, whatever other categories there are; never more than asked, in the file's order."""
    many = [Prompt(str(number), "ab"[number % 2], "text") for number in range(40)]
    chosen = choose(many, per_category=5, max_categories=None, seed=3)
    assert [prompt.category for prompt in chosen] == ["a"] * 5 + ["b"] * 5
    only_b = [prompt for prompt in many if prompt.category == "b"]
    assert choose(only_b, per_category=5, max_categories=None, seed=3) == chosen[5:]
    assert choose(many, per_category=5, max_categories=1, seed=3) == chosen[:5]
    assert choose(many, per_category=5, max_categories=None, seed=4) != chosen
    assert len(choose(many, per_category=99, max_categories=None, seed=3)) == 40


# ------------------------------------------------------------------------------------------------------------- timing


def test_every_candidate_runs_everywhere_once_and_begins_equally_often() -> None:
    """Each (candidate, prompt, repeat) runs once, those of a prompt in one piece; all begin equally often."""
    runs = list(order_of_runs("abc", num_prompts=6, repeats=2))
    assert sorted(runs) == sorted(
        (repeat, prompt, name) for repeat in range(2) for prompt in range(6) for name in "abc"
    )
    groups = [runs[start : start + 3] for start in range(0, len(runs), 3)]
    assert all(len({(repeat, prompt) for repeat, prompt, _ in group}) == 1 for group in groups)
    assert Counter(group[0][2] for group in groups) == {"a": 4, "b": 4, "c": 4}
    assert {group[0][2] for group in groups if group[0][1] == 0} != {"a"}  # nor always on the same prompt


def test_the_use_of_cores_by_others_is_what_is_left() -> None:
    """Busy seconds of all cores, less this process's own, over elapsed seconds; never negative; None where unknown."""
    before = CpuUse(wall=10.0, own=1.0, everyone=100.0)
    assert others_cores(before, CpuUse(wall=14.0, own=3.0, everyone=108.0)) == pytest.approx(1.5)
    assert others_cores(before, CpuUse(wall=14.0, own=9.0, everyone=108.0)) == 0.0
    assert others_cores(before, CpuUse(wall=14.0, own=3.0, everyone=None)) is None
    assert others_cores(before, before) is None
    now = cpu_use()
    assert now.everyone is None or now.everyone > now.own


class Scripted:
    """A candidate that answers from a table and counts its runs."""

    def __init__(self, name: str, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.info = CandidateInfo(name=name, is_ours=False, is_packed=False, speculates=False)
        self.answers = answers

    def run(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """The table's answer, cut."""
        return Output(self.answers[tuple(prompt)][:max_tokens], target_forwards=max_tokens)


def test_trials_hold_what_the_candidates_said() -> None:
    """Each trial carries its candidate's output, a positive time and its place; progress counts every run."""
    answers = {(1,): (5, 6), (2,): (7, 8)}
    seen: list[int] = []
    trials = run_trials(
        [Scripted("generate", answers), Scripted("liar", dict.fromkeys(answers, (9, 9)))],
        [[1], [2]],
        max_tokens=2,
        repeats=3,
        device=CPU,
        progress=lambda done, total, label: seen.append(done),
    )
    assert seen == list(range(13))
    assert all(trial.seconds > 0 for trial in trials)
    honest = [trial for trial in trials if trial.candidate == "generate"]
    assert {(trial.prompt, trial.output.token_ids) for trial in honest} == {(0, (5, 6)), (1, (7, 8))}
    infos = [GENERATE, CandidateInfo(name="liar", is_ours=False, is_packed=False, speculates=False)]
    assert [row.identical for row in summarise(infos, trials, ["a", "b"], seed=0)] == [2, 0]


# -------------------------------------------------------------------------------------------------------- differences


def test_the_first_difference_is_found() -> None:
    """The first unequal token, or the place where one output ends before the other; None for equal outputs."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_a_wrong_token_is_not_called_rounding() -> None:
    """A token far below the best logit is a bug, and so is an output that ends too early; the gap is reported."""
    model = tiny_model()
    reference = generate(model, [1, 2, 3], 12)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3, *reference[:4]]])).logits[0, -1].float()
    wrong = int(logits.argmin())
    found = diagnose(model, [1, 2, 3], reference, [*reference[:4], wrong, *reference[5:]])
    assert found is not None
    assert (found.position, found.reference_token, found.other_token) == (4, reference[4], wrong)
    assert found.top_tokens is not None
    assert found.top_tokens[0] == reference[4]
    assert found.contested_gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)
    assert not found.explained_by_rounding
    early = diagnose(model, [1, 2, 3], reference, reference[:7])
    assert early is not None
    assert (early.position, early.other_token, early.explained_by_rounding) == (7, None, False)
    assert diagnose(model, [1, 2, 3], reference, reference) is None


def test_two_equal_logits_are_called_rounding() -> None:
    """Where the two best logits are equal, either token is explained; a third token is not."""
    torch.manual_seed(0)
    model: Any = type(tiny_model())(tiny_config("llama")).eval()
    reference = generate(model, [1, 2, 3], 6)
    with torch.no_grad():
        twin = next(token for token in range(64) if token not in reference)
        model.lm_head.weight[twin] = model.lm_head.weight[reference[3]]
        third = next(token for token in range(64) if token not in {twin, *reference})
    tie = diagnose(model, [1, 2, 3], reference, [*reference[:3], twin])
    assert tie is not None
    assert tie.explained_by_rounding
    assert tie.top_gap == pytest.approx(0.0, abs=1e-6)
    bug = diagnose(model, [1, 2, 3], reference, [*reference[:3], third])
    assert bug is not None
    assert not bug.explained_by_rounding


# ------------------------------------------------------------------------------------------------------------- limits


def test_weight_bytes_leave_out_an_embedding_that_is_only_looked_up() -> None:
    """A tied embedding is read in full by the output head; one of its own is not; nothing is counted twice."""
    untied, tied = tiny_model(), tiny_model(tie_word_embeddings=True)
    total = sum(parameter.numel() for parameter in untied.parameters()) * 4
    embedding = 64 * 32 * 4
    assert weight_bytes(untied) == total - embedding
    assert weight_bytes(tied) == total - embedding  # the head's own weights are gone, the embedding takes their place


def test_costs_are_read_off_a_line_between_measured_widths() -> None:
    """Measured widths are returned as they are, others by interpolation, wider ones along the last two."""
    costs = {1: 1.0, 2: 1.2, 4: 2.0}
    assert [cost_at(costs, width) for width in (1, 2, 4)] == pytest.approx([1.0, 1.2, 2.0])
    assert cost_at(costs, 3) == pytest.approx(1.6)
    assert cost_at(costs, 1.5) == pytest.approx(1.1)
    assert cost_at(costs, 6) == pytest.approx(2.8)
    assert cost_at({1: 0.5}, 9) == 0.5


def test_bandwidth_and_forward_costs_are_measured() -> None:
    """Every kernel and every width of every model has a positive figure; the best kernel counts."""
    bandwidth = memory_bandwidth(CPU, buffer_bytes=2**20, repeats=2)
    assert bandwidth.best == max(bandwidth.kernels.values())
    assert min(bandwidth.kernels.values()) > 0
    assert abs(bandwidth.buffer_bytes - 2**20) < 2**15
    costs = forward_costs({"plain": tiny_model(), "other": tiny_model("gpt2")}, context=10, widths=[1, 3], repeats=2)
    assert {name: list(table) for name, table in costs.items()} == {"plain": [1, 3], "other": [1, 3]}
    assert all(cost > 0 for table in costs.values() for cost in table.values())


# ------------------------------------------------------------------------------------------------------------ summary


def metrics(
    *,
    rounds: int,
    emitted: int,
    rates: tuple[float, ...] = (),
    admitted: int = 0,
    execute: float = 0.0,
    predict: float = 0.0,
) -> RequestMetrics:
    """Figures of a request that took these seconds in forwards and drafts, 0.5 in its prefill and nothing elsewhere."""
    return RequestMetrics(
        prompt_tokens=5,
        target_forwards=rounds + 1,
        rounds=rounds,
        drafted=2 * admitted,
        admitted=admitted,
        accepted=emitted - rounds,
        emitted=emitted,
        acceptance_by_position=rates,
        phase_seconds={"prefill": 0.5, "execute": execute, "predict": predict},
        state_bytes={},
    )


def trial(name: str, prompt: int, seconds: float, tokens: int = 10, *, repeat: int = 0, **extra: Any) -> Trial:
    """A timed run that emitted the tokens 0..tokens-1."""
    return Trial(name, prompt, repeat, seconds, 0.0, Output(tuple(range(tokens)), target_forwards=tokens, **extra))


OURS_PLAIN = CandidateInfo(name="specflow plain", is_ours=True, is_packed=False, speculates=False)
OURS_NGRAM = CandidateInfo(
    name="specflow ngram", is_ours=True, is_packed=False, speculates=True, baseline="specflow plain"
)


def hand_made() -> list[Summary]:
    """Three rows over three prompts of two categories, with times that are easy to check."""
    plain = {"metrics": metrics(rounds=10, emitted=10, execute=3.5), "block_widths": {1: 10}}
    quick = {
        "metrics": metrics(rounds=4, emitted=10, rates=(0.75, 1.0), admitted=7, execute=1.1, predict=0.4),
        "block_widths": {2: 1, 3: 3},
    }
    trials = [
        *[trial("generate", prompt, seconds) for prompt, seconds in enumerate((4.0, 4.0, 8.0))],
        *[trial("specflow plain", prompt, 4.0, **plain) for prompt in range(3)],
        *[trial("specflow ngram", prompt, 2.0, **quick) for prompt in range(3)],
    ]
    return summarise([GENERATE, OURS_PLAIN, OURS_NGRAM], trials, ["a", "a", "b"], seed=0)


def test_speedups_are_geometric_means_over_categories() -> None:
    """Ratios are taken per prompt, averaged geometrically within and then over categories of any size."""
    reference, plain, ngram = hand_made()
    assert (reference.speedup, reference.interval) == (1.0, (1.0, 1.0))
    assert plain.by_category == pytest.approx({"a": 1.0, "b": 2.0})
    assert plain.speedup == pytest.approx(math.sqrt(2.0))
    assert ngram.by_category == pytest.approx({"a": 2.0, "b": 4.0})
    assert (ngram.worst_prompt, ngram.best_prompt) == pytest.approx((2.0, 4.0))
    assert ngram.interval[0] <= ngram.speedup <= ngram.interval[1]
    assert reference.tokens_per_second == pytest.approx(30 / 16)
    assert math.isnan(geometric_mean([]))


def test_counts_and_phases_add_up() -> None:
    """Counts are sums over prompts, acceptance is weighted by how often a position was verified, phases sum to all."""
    _, _, ngram = hand_made()
    counts = ngram.counts
    assert counts is not None
    assert (counts.rounds, counts.admitted, counts.accepted, counts.emitted) == (12, 21, 18, 30)
    assert counts.mean_accepted_length == pytest.approx(2.5)
    assert (counts.verification_pass_rate, counts.draft_utilisation) == pytest.approx((18 / 21, 18 / 42))
    assert counts.verified_by_position == (12, 9)
    assert counts.acceptance_by_position == pytest.approx((0.75, 1.0))
    assert counts.block_widths == {2: 3, 3: 9}
    assert ngram.phase_seconds is not None
    assert sum(ngram.phase_seconds.values()) == pytest.approx(ngram.seconds)
    assert ngram.outside_forward == pytest.approx(0.2)
    assert ngram.decode_seconds == pytest.approx(4.5)


def test_the_prediction_is_accepted_length_over_mean_cost() -> None:
    """Predicted: tau over drafting and the widths that really occurred; measured: time per token, without prefill."""
    costs = {"plain": {1: 1.0, 2: 1.1, 3: 1.5}}
    (prediction,) = predict(hand_made(), costs)
    assert prediction.candidate == "specflow ngram"
    assert prediction.mean_width == pytest.approx(2.75)
    assert prediction.cost_ratio == pytest.approx((1.1 + 3 * 1.5) / 4)
    assert prediction.draft_ratio == pytest.approx(0.1)
    assert prediction.predicted == pytest.approx(2.5 / 1.5)
    assert prediction.measured == pytest.approx((3 * 3.5) / (3 * 1.5))


def test_of_repeats_the_median_counts() -> None:
    """One slow repeat changes neither speed nor ratio, but shows in the spread; a wrong repeat is not forgiven."""
    rows = [trial("generate", 0, seconds, repeat=repeat) for repeat, seconds in enumerate((2.0, 9.0, 2.2))]
    assert typical_trials(rows)["generate", 0].seconds == 2.2
    assert typical_trials(rows[:2])["generate", 0].seconds == 2.0
    other = [
        trial("other", 0, 1.1, repeat=0),
        trial("other", 0, 1.1, repeat=1),
        trial("other", 0, 1.1, tokens=9, repeat=2),
    ]
    infos = [GENERATE, CandidateInfo(name="other", is_ours=False, is_packed=False, speculates=True)]
    reference, second = summarise(infos, [*rows, *other], ["a"], seed=0)
    assert second.speedup == pytest.approx(2.0)
    assert reference.spread == pytest.approx(7.0 / 2.2)
    assert (reference.identical, second.identical) == (1, 0)


def test_goals_are_judged_on_what_users_get() -> None:
    """Without packed rows the plain ones are judged; a goal that is missed says so."""
    goals = {(item.candidate, item.goal): item for item in conclude(hand_made())}
    assert goals["specflow plain", "at least as fast as generate"].is_met
    assert goals["specflow ngram", "slowest category"].measured == pytest.approx(2.0)
    packed = CandidateInfo(name="specflow plain + packing", is_ours=True, is_packed=True, speculates=False)
    slow = summarise([GENERATE, packed], [trial("generate", 0, 1.0), trial(packed.name, 0, 2.0)], ["a"], seed=0)
    (only,) = conclude([*hand_made(), slow[1]])
    assert (only.candidate, only.measured, only.is_met) == (packed.name, 0.5, False)


def test_a_busy_machine_is_not_passed_over() -> None:
    """High load before the run and other processes' work during it each give a warning; a quiet run gives none."""
    settings = BenchSettings(per_category=4)
    calm = [trial("generate", 0, 1.0)] * 20
    assert warnings_about(calm, 0.1, 13, settings) == []
    assert "load average 3.00" in warnings_about(calm, 3.0, 13, settings)[0]
    disturbed = [Trial("generate", 0, 0, 1.0, 0.9, Output((1,), 1))] * 3
    assert "3 of 23" in warnings_about([*calm, *disturbed], 0.1, 13, settings)[0]
    unknown = [Trial("generate", 0, 0, 1.0, None, Output((1,), 1))]
    assert "nobody knows" in warnings_about(unknown, None, 13, settings)[0]
    assert "too few" in warnings_about(calm, 0.1, 2, settings)[0]


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"per_category": 0}, "per_category"),
        ({"threads": 0}, "threads"),
        ({"baselines": ("generate", "magic")}, "baselines"),
        ({"baselines": ("assisted",)}, "assistant"),
        ({"lookup_tokens": (3, 0)}, "lookup_tokens"),
        ({"policy": "hasty"}, "policy"),
        ({"draft_tokens": -1}, "max_draft_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], name: str) -> None:
    """A setting out of its range is refused by name before anything is loaded."""
    with pytest.raises(InvalidSettingError, match=name):
        BenchSettings(**fields)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    """A whole run over a tiny model without a tokenizer: two categories, one of them with text that repeats itself."""
    path = tmp_path_factory.mktemp("bench") / "ids.jsonl"
    rows = [
        {"question_id": 1, "category": "loop", "token_ids": [7, 8, 9, 10] * 4},
        {"question_id": 2, "category": "other", "token_ids": [1, 2, 3]},
        {"question_id": 3, "category": "other", "token_ids": list(range(1, 64)) * 4},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = BenchSettings(
        data=path,
        max_tokens=12,
        draft_tokens=3,
        baselines=("generate", "generate-again", "prompt-lookup"),
        lookup_tokens=(2,),
        cost_widths=2,
        cost_repeats=1,
    )
    loaded = LoadedModel("tiny", tiny_model("llama", hidden_size=64, intermediate_size=64), None, 0)
    return run_bench(settings, loaded=loaded, argv=["bench"])


def test_every_candidate_of_a_run_says_what_generate_says(report: BenchReport) -> None:
    """All rows are there, packed ones too, and every output equals generate's; what does not fit is skipped."""
    assert [row.info.name for row in report.summaries] == [
        "generate", "generate again", "prompt lookup 2", "generate + packing", "prompt lookup 2 + packing",
        "specflow plain", "specflow plain + packing", "specflow ngram", "specflow ngram + packing",
    ]  # fmt: skip
    assert all(row.identical == row.prompts == 2 for row in report.summaries)
    assert report.differences == []
    assert report.skipped == ["other 3: 252 tokens"]
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    outputs = [entry["output_ids"] for entry in report.as_dict()["prompts"]["chosen"]]
    assert outputs == [generate(model, [7, 8, 9, 10] * 4, 12), generate(model, [1, 2, 3], 12)]


def test_counts_of_a_run_agree_with_each_other(report: BenchReport) -> None:
    """Forwards of generate are one per token; ours are rounds plus prefills; widths tell the admitted drafts."""
    assert report.row("generate").target_forwards == 24
    ngram = report.row("specflow ngram").counts
    assert ngram is not None
    assert ngram.emitted == 24
    assert report.row("specflow ngram").target_forwards == ngram.rounds + 2
    assert sum(ngram.block_widths.values()) == ngram.rounds
    assert sum((width - 1) * number for width, number in ngram.block_widths.items()) == ngram.admitted
    assert set(report.costs) == {"plain", "packed"}
    assert set(report.costs["plain"]) == {1, 2, 4}  # and the widest block that drafting can ask for
    assert [item.candidate for item in report.predictions] == ["specflow ngram", "specflow ngram + packing"]


def test_the_model_handed_in_is_left_as_it_was(report: BenchReport) -> None:
    """Packing is done on a copy: the model's own layers are still plain linear ones."""
    del report
    model: Any = tiny_model("llama", hidden_size=64, intermediate_size=64)
    assert type(model.lm_head) is torch.nn.Linear
    assert not model._forward_pre_hooks


def test_a_report_is_plain_data_with_its_provenance(report: BenchReport) -> None:
    """The report is strict JSON (no NaN) and names versions, prompts, limits and every timed run."""
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["provenance"]["packages"]["torch"] == torch.__version__
    assert data["provenance"]["argv"] == ["bench"]
    assert set(data["provenance"]["load_average"]) == {"before", "after"}
    assert len(data["trials"]) == 9 * 2
    assert data["limits"]["read_seconds"] == pytest.approx(
        data["limits"]["weight_bytes"] / data["limits"]["bandwidth"]["best"]
    )


def test_tables_name_every_row_and_doubt_the_times(report: BenchReport) -> None:
    """The printed tables hold every candidate and category, losing ones too, and repeat every warning."""
    console = Console(width=200, file=io.StringIO())
    for table in tables(report):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("specflow ngram + packing", "prompt lookup 2", "loop", "other", "v(n)", "geometric mean", "too few"):
        assert word in text
    assert "A BUG" not in text


def test_the_picture_is_written(report: BenchReport, tmp_path: Path) -> None:
    """A PNG file is drawn; a suffix that means nothing is refused."""
    pytest.importorskip("matplotlib", reason="pictures need an optional extra: pip install matplotlib")
    save_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidSettingError, match="suffix"):
        save_plot(report, tmp_path / "bench.nonsense")


def test_the_command_measures_a_model_in_a_folder(tmp_path: Path) -> None:
    """``bench --quick`` on a saved model prints tables and writes a JSON file about the built-in prompts."""
    model = type(tiny_model())(tiny_config("llama", vocab_size=352, max_position_embeddings=1024))
    model.save_pretrained(tmp_path / "model")
    byte_level_bpe().save_pretrained(tmp_path / "model")
    app = Typer()
    app.command()(bench_command)
    arguments = ["--model", str(tmp_path / "model"), "--quick", "--max-tokens", "4", "--draft-tokens", "2"]
    result = CliRunner().invoke(
        app, [*arguments, "--baselines", "generate", "--json", str(tmp_path / "out" / "bench.json")]
    )
    assert result.exit_code == 0, result.output
    assert "specflow ngram" in result.stdout
    data = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert data["prompts"]["source"] == PACKAGED
    assert data["settings"]["max_tokens"] == 4
    assert data["provenance"]["model"] == str(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_gpu_script_can_be_rehearsed_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    """On a CPU, with tiny shapes and few libraries, every part of the script works and every output is right."""
    code = (
        "import runpy, sys\n"
        "for name in ('structlog', 'pydantic', 'anyio', 'typer'): sys.modules[name] = None\n"
        "sys.path.insert(0, 'benchmarks')\n"
        "sys.argv = ['gpu.py', '--device', 'cpu', '--small', '--out', sys.argv[1]]\n"
        "runpy.run_path('benchmarks/gpu.py', run_name='__main__')\n"
    )
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert "failed" not in results
    assert "skipped" not in results
    parity = [row for name, row in results.items() if name.startswith("parity/")]
    assert len(parity) == 9
    assert all(item["equal"] for row in parity for item in row.values() if isinstance(item, dict))
    rows = [
        row for name, part in results.items() if "batch" in name and isinstance(part, dict) for row in part.values()
    ]
    decoded = [row for row in rows if isinstance(row, dict) and "rounds" in row]
    assert len(decoded) == 24
    assert all(row["equal_to_generate"] for row in decoded)


def test_a_list_that_is_no_list_is_a_usage_error() -> None:
    """``--lookup-tokens 3,x`` is refused with a usage message, not a traceback."""
    app = Typer()
    app.command()(bench_command)
    result = CliRunner().invoke(app, ["--lookup-tokens", "3,x"])
    assert result.exit_code == 2
    assert "lookup-tokens" in result.output
