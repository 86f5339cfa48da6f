"""Drafters on disk: what is written comes back, and what is damaged or foreign is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.dspark import DSparkModel, TargetAdapter
from specflow_llm.dspark.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_fits,
    is_drafter,
    load_drafter,
    save_drafter,
)
from specflow_llm.errors import CheckpointError
from tests.specflow_llm.block_drafters import config, drafter_model, target


def saved(folder: Path, **changes: Any) -> Path:
    """A folder with a drafter in float32."""
    save_drafter(drafter_model(draft_vocab_size=24, **changes), folder, dtype=torch.float32)
    return folder


def rewrite_config(folder: Path, change: Any) -> None:
    """Edit ``config.json``."""
    path = folder / CONFIG_FILE
    described = json.loads(path.read_text(encoding="utf-8"))
    changed = change(described)
    path.write_text(json.dumps(described if changed is None else changed), encoding="utf-8")


def rewrite_weights(folder: Path, change: Any) -> None:
    """Edit ``model.safetensors``."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


@pytest.mark.parametrize(
    "changes",
    [{}, {"markov": "rnn"}, {"markov": "none", "confidence": False}, {"qk_norm": True}],
    ids=["vanilla", "rnn", "heads-off", "qk-norm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_config_come_back(tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit by bit in the type they were written in; the draft vocabulary too."""
    for size in (None, 24):
        model = drafter_model(draft_vocab_size=size, **changes)
        save_drafter(model, tmp_path / "deep" / "folder", dtype=dtype, extra={"trained": {"steps": 3}})
        found = load_drafter(tmp_path / "deep" / "folder")
        assert found.config == model.config
        expected = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
        loaded = {name: tensor for name, tensor in found.state_dict().items() if tensor is not None}
        assert set(loaded) == set(expected)
        for name, tensor in expected.items():
            wanted = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], wanted), name
        assert is_drafter(tmp_path / "deep" / "folder")
    assert json.loads((tmp_path / "deep" / "folder" / CONFIG_FILE).read_text())["trained"] == {"steps": 3}


def test_embedding_and_head_are_not_stored(tmp_path: Path) -> None:
    """They are the target's: no tensor has as many rows as the vocabulary but the Markov embedding of tokens before."""
    tensors = load_file(saved(tmp_path) / WEIGHTS_FILE)
    assert [name for name, tensor in tensors.items() if 64 in tensor.shape[:1]] == ["markov_head.previous.weight"]


def test_saving_twice_leaves_two_files_and_the_second_drafter(tmp_path: Path) -> None:
    """Files are replaced whole; nothing unfinished stays."""
    save_drafter(drafter_model(1), tmp_path)
    save_drafter(drafter_model(2), tmp_path, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert torch.equal(load_drafter(tmp_path).fc.weight, drafter_model(2).fc.weight)


def removed(entries: dict[str, Any], name: str) -> None:
    """Take an entry out."""
    del entries[name]


CONFIG_FAULTS: dict[str, tuple[Any, str]] = {
    "another format": (lambda described: described.update(format="other"), "layout"),
    "a list": (lambda _described: ["a", "list"], "layout"),
    "a later version": (lambda described: described.update(version=2), "version 2"),
    "no config": (lambda described: removed(described, "config"), "config"),
    "an empty config": (lambda described: described.update(config=None), "config is wrong"),
    "a field absent": (lambda described: removed(described["config"], "head_dim"), "head_dim"),
    "a field unknown": (lambda described: described["config"].update(colour="red"), "colour"),
    "a field impossible": (lambda described: described["config"].update(block_size=0), "block_size"),
    "no such activation": (lambda described: described["config"].update(activation="step"), "step"),
    "no such rotary kind": (lambda described: described["config"].update(rope={"rope_type": "spiral"}), "is wrong"),
    "another width": (lambda described: described["config"].update(hidden_size=48), "fc.weight"),
    "more layers": (lambda described: described["config"].update(num_layers=3), "layers.2"),
    "fewer layers": (lambda described: described["config"].update(num_layers=1), "unknown.*layers.1"),
    "another head": (lambda described: described["config"].update(markov="rnn"), "markov_head.cell"),
    "fewer ids": (lambda described: described["config"].update(draft_vocab_size=23), "draft_ids|markov_head.output"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_does_not_fit_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    """Foreign formats, later versions, absent and impossible fields, sizes that differ from the weights'."""
    change, said = CONFIG_FAULTS[fault]
    rewrite_config(saved(tmp_path), change)
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path)


WEIGHT_FAULTS: dict[str, tuple[Any, str]] = {
    "absent": (lambda tensors: removed(tensors, "norm.weight"), r"absent \(norm.weight\)"),
    "unknown": (lambda tensors: tensors.update(extra=torch.zeros(2)), r"unknown \(extra\)"),
    "another shape": (lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 4)}), r"fc.weight.*\(3, 4\)"),
    "ids repeated": (lambda tensors: tensors["draft_ids"].fill_(3), "draft_ids"),
    "ids too high": (lambda tensors: tensors["draft_ids"].add_(60), "draft_ids"),
    "ids below zero": (lambda tensors: tensors["draft_ids"].sub_(1), "draft_ids"),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    """Absent, unknown and mis-shaped tensors; a draft vocabulary with repetitions or ids that do not exist."""
    change, said = WEIGHT_FAULTS[fault]
    rewrite_weights(saved(tmp_path), change)
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path)


def test_files_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    """At any length, in either file; and so is a folder without one of them, or no folder."""
    whole = saved(tmp_path / "whole")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        data = (whole / name).read_bytes()
        for size in (0, 5, len(data) // 2, len(data) - 2):
            cut = tmp_path / "cut"
            shutil.copytree(whole, cut, dirs_exist_ok=True)
            (cut / name).write_bytes(data[:size])
            with pytest.raises(CheckpointError, match="cannot be read"):
                load_drafter(cut)
        (cut / name).unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_drafter(cut)
        shutil.rmtree(cut)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "nowhere")
    assert not is_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 80}, "vocabulary is 80; this target's is 64"),
        ({"hidden_size": 40}, "hidden size is 40"),
        ({"num_target_layers": 5}, "number of layers is 5"),
    ],
    ids=["vocabulary", "width", "layers"],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, Any], said: str) -> None:
    """The error says which size differs, and what the target's is."""
    adapter = TargetAdapter(target())
    check_fits(config(), adapter, "here")
    with pytest.raises(CheckpointError, match=said):
        check_fits(config(**changes), adapter, "here")


def test_a_drafter_is_loaded_by_its_folder(tmp_path: Path) -> None:
    """Named after it, unless named otherwise; a folder for another target is refused before it is used."""
    adapter = TargetAdapter(target())
    folder = saved(tmp_path / "mine")
    assert DSparkDrafter.load(folder, adapter).name == "mine"
    assert DSparkDrafter.load(str(folder), adapter, name="yours").name == "yours"
    with pytest.raises(CheckpointError, match="mine"):
        DSparkDrafter.load(saved(tmp_path / "mine", num_target_layers=7), adapter)


def test_a_packed_model_is_not_written(tmp_path: Path) -> None:
    """Its weights stand in an opaque layout; a file without them would be found broken much later."""
    adapter = TargetAdapter(target(hidden_size=64))
    model: DSparkModel = drafter_model(hidden_size=64, head_dim=16, intermediate_size=96)
    DSparkDrafter(model, adapter)
    with pytest.raises(CheckpointError, match="packed"):
        save_drafter(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
