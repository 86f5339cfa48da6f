"""Measured costs: every shape is timed as it is run, kept with where it comes from, and refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specflow.errors import InvalidSettingError
from specflow.policies import PID, CostScheduled, Estimated
from specflow.testing import ManualClock
from specflow_llm import LLM, DrafterBase, DraftRequest, Proposal, SamplingParams, Speculation
from specflow_llm.architecture import StateKind
from specflow_llm.cli.app import app
from specflow_llm.errors import DataFileError
from specflow_llm.profile import (
    CostProfile,
    Shape,
    differences,
    draft_lengths,
    identity_of,
    load_profile,
    measure_round_costs,
    profile_costs,
    save_profile,
)
from specflow_llm.target import TargetOutput
from tests.specflow_llm.harness import LawTarget
from tests.specflow_llm.models import tiny_model

VOCAB = 16


class TimedTarget(LawTarget):
    """A target whose forwards take a second, and a tenth of one per padded position, on a manual clock."""

    def __init__(self, clock: ManualClock, context_length: int | None = None) -> None:
        super().__init__(lambda _ids: torch.arange(VOCAB).float(), VOCAB, context_length=context_length)
        self.clock = clock
        self.prompts: list[int] = []

    def open(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Note how long the prompts are; running them takes long."""
        self.prompts += [len(prompt) for prompt in prompts]
        self.clock.advance(50.0)
        return super().open(prompts)

    def forward(self, blocks: Sequence[Sequence[int]]) -> TargetOutput:
        """Takes its time."""
        self.clock.advance(1.0 + 0.1 * len(blocks) * max(map(len, blocks)))
        return super().forward(blocks)


class TimedDrafter(DrafterBase):
    """Drafting takes a hundredth of a second per token of the longest draft; a new request costs ten seconds."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.known: set[int] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """As long as asked for."""
        for request in requests:
            if request.row not in self.known:
                self.known.add(request.row)
                self.clock.advance(10.0)
        self.clock.advance(0.01 * max(request.limit for request in requests))
        return [Proposal([0] * request.limit) for request in requests]

    def release(self, row: int) -> None:
        """Forget it."""
        self.known.discard(row)


def measured(**options: Any) -> tuple[CostProfile, TimedTarget, TimedDrafter]:
    """A profile on a manual clock."""
    clock = ManualClock()
    target, drafter = TimedTarget(clock, options.pop("context_length", None)), TimedDrafter(clock)
    settings = {"model": "timed", "batches": (1, 3), "repeats": 3, "context": 5, "clock": clock, **options}
    return profile_costs(target, drafter, settings.pop("max_draft", 4), **settings), target, drafter


def test_every_shape_is_timed_as_it_runs() -> None:
    """Seconds of execution and drafting are those of the shape; prompts and the first round of a request are not."""
    profile, target, drafter = measured()
    assert profile.padded
    assert [(shape.batch, shape.draft) for shape in profile.execute] == [
        (batch, draft) for batch in (1, 3) for draft in range(5)
    ]
    for shape in profile.execute:
        assert shape.seconds == pytest.approx([1.0 + 0.1 * shape.batch * (1 + shape.draft)] * 3)
    assert [(shape.batch, shape.draft) for shape in profile.draft] == [
        (batch, draft) for batch in (1, 3) for draft in range(1, 5)
    ]
    for shape in profile.draft:
        assert shape.seconds == pytest.approx([0.01 * shape.draft] * 3)
    assert target.held == []
    assert drafter.known == set()
    assert set(target.prompts) == {5}


def test_the_table_answers_for_rounds() -> None:
    """What policies are given predicts rounds that were measured, and those in between."""
    costs = measured()[0].costs()
    assert costs.is_padded
    assert costs.round((2, 4, 0), 4) == pytest.approx(1.0 + 0.1 * 3 * 5 + 0.04)
    assert costs.round((2, 2), 4) == pytest.approx(1.0 + 0.1 * 2 * 3 + 0.04)


def test_short_contexts_are_respected() -> None:
    """Prompts are shortened and requests replaced before they run out of room; the figures are the same."""
    profile, target, _ = measured(context_length=16, context=100, repeats=8)
    assert set(target.prompts) == {6}
    assert len(target.prompts) > 8
    for shape in profile.execute:
        assert shape.seconds == pytest.approx([1.0 + 0.1 * shape.batch * (1 + shape.draft)] * 8)
    with pytest.raises(InvalidSettingError, match="context"):
        measured(context_length=10)


def test_targets_that_run_slots_apart_are_not_padded() -> None:
    """A recurrent target's round costs its items, not its longest block."""
    clock = ManualClock()
    target = TimedTarget(clock)
    target.architecture = replace(target.architecture, state_kind=StateKind.RECURRENT)
    assert not profile_costs(target, None, 1, model="m", batches=(1,), repeats=2, context=4, clock=clock).padded


def test_draft_lengths_grow_in_steps() -> None:
    """All short lengths, then wider steps, and always none and the longest."""
    assert draft_lengths(1) == (0, 1)
    assert draft_lengths(7) == (0, 1, 2, 3, 4, 6, 7)
    assert draft_lengths(16) == (0, 1, 2, 3, 4, 6, 9, 13, 16)


def test_settings_are_checked() -> None:
    """No drafts, no batch and single repetitions are refused."""
    for setting, value in (("max_draft", 0), ("batches", ()), ("batches", (0,)), ("repeats", 1)):
        with pytest.raises(InvalidSettingError, match=setting):
            measured(**{setting: value})


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    """Read back it is equal, provenance included."""
    profile = measured()[0]
    save_profile(profile, tmp_path / "deep" / "costs.json")
    found = load_profile(tmp_path / "deep" / "costs.json")
    assert found == replace(profile, provenance=dict(profile.provenance))
    assert found.provenance["model"] == "timed"
    assert found.provenance["drafter"] == "TimedDrafter"
    assert found.provenance["threads"] == torch.get_num_threads()


def test_profiles_of_something_else_are_refused(tmp_path: Path) -> None:
    """Another model, drafter, device, dtype or thread count is named, with both values and what to do."""
    profile = measured(dtype=torch.float32)[0]
    path = tmp_path / "costs.json"
    save_profile(profile, path)
    own = identity_of(profile.provenance)
    assert load_profile(path, require=own).provenance == profile.provenance
    others = {"model": "another", "drafter": "ngram", "device": {"type": "tpu"}, "dtype": "bfloat16", "threads": 99}
    assert set(others) == set(own)
    for name, value in others.items():
        with pytest.raises(DataFileError, match=rf"{name} .*measure again"):
            load_profile(path, require={**own, name: value})
    assert differences(own, {**own, "threads": None}) == {}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """A missing file, another format, a missing part and a profile of nothing are refused."""
    path = tmp_path / "costs.json"
    with pytest.raises(DataFileError, match="cannot be read"):
        load_profile(path)
    for text in ("no json", "[]", json.dumps({"format": "specflow-rounds", "version": 1})):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataFileError, match=r"cannot be read|not a cost profile"):
            load_profile(path)
    save_profile(measured()[0], path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    damages: list[dict[str, Any]] = [{"execute": []}, {"execute": [{"batch": 1}]}, {"draft": None}]
    for damage in damages:
        path.write_text(json.dumps({**whole, **damage}), encoding="utf-8")
        with pytest.raises(DataFileError, match="damaged"):
            load_profile(path)


def test_medians_do_not_fall_with_the_width() -> None:
    """One slow repetition does not count, and a wider round is never cheaper than a narrower one."""
    shapes = (
        Shape(batch=1, draft=0, seconds=(1.0, 9.0, 1.0)),
        Shape(batch=1, draft=1, seconds=(2.0, 2.0, 2.0)),
        Shape(batch=1, draft=2, seconds=(1.8, 1.8, 1.8)),
    )
    profile = CostProfile(provenance={}, padded=False, context=1, execute=shapes, draft=())
    assert list(profile.costs().execution(1, 2)[:3]) == pytest.approx([1.0, 1.9, 1.9])


def test_the_name_builds_a_measured_schedule() -> None:
    """``cost_scheduled`` times the model when it is loaded, and decodes to the same tokens as plain decoding."""
    model = tiny_model("llama")
    policy = Speculation(policy="cost_scheduled", max_draft_tokens=3)
    llm = LLM(model, tokenizer=None, speculation=policy, max_batch_size=2)
    assert isinstance(llm.policy, Estimated)
    assert isinstance(llm.policy.policy, CostScheduled)
    params = SamplingParams(max_tokens=24)
    plain = LLM(model, tokenizer=None, speculation=None).generate([1, 2, 3, 1, 2, 3], params)[0]
    assert llm.generate([1, 2, 3, 1, 2, 3], params)[0].token_ids == plain.token_ids


def test_the_controller_has_a_name() -> None:
    """``pid`` builds a controller, measures nothing, and decodes to the same tokens as plain decoding."""
    model, params = tiny_model("llama"), SamplingParams(max_tokens=24)
    llm = LLM(model, tokenizer=None, speculation=Speculation(policy="pid", max_draft_tokens=3), check_model=False)
    assert isinstance(llm.policy, PID)
    plain = LLM(model, tokenizer=None, speculation=None, check_model=False).generate([1, 2, 1, 2], params)[0]
    assert llm.generate([1, 2, 1, 2], params)[0].token_ids == plain.token_ids


def test_a_quick_measurement_fits_any_context() -> None:
    """The profile made while loading clamps its drafts to a quarter of the context."""
    clock = ManualClock()
    costs = measure_round_costs(TimedTarget(clock, 24), TimedDrafter(clock), 200, 4)
    assert costs.round((6,), 6) >= 0.0


def test_the_command_measures_and_keeps(tmp_path: Path) -> None:
    """``specflow-llm profile`` writes a profile of the model and drafter that it loaded, and prints a table."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    out = tmp_path / "costs.json"
    words = ["profile", str(out), "-m", str(tmp_path / "model"), "--draft-tokens", "2", "--batch", "2,1"]
    result = CliRunner().invoke(app, [*words, "--repeats", "2", "--context", "8"])
    assert result.exit_code == 0, result.stderr
    assert "2 at once" in result.stdout
    found = load_profile(out)
    assert {(shape.batch, shape.draft) for shape in found.execute} == {(b, d) for b in (1, 2) for d in range(3)}
    assert found.provenance["drafter"] == "ngram"
    assert all(seconds > 0.0 for shape in found.execute for seconds in shape.seconds)
    assert CliRunner().invoke(app, ["profile", str(out), "--batch", "x"]).exit_code == 2
