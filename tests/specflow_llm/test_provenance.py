from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from specflow_llm import provenance as room
from specflow_llm.provenance import cpu_model, last_level_cache_bytes, provenance

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask git about this checkout."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_record_is_complete_and_plain() -> None:
    """The record survives JSON unchanged, names versions, machine, threads and settings, and says when it was made."""
    record = provenance(device="cpu", dtype=torch.bfloat16, seed=7, argv=["bench", "--quick"])
    assert json.loads(json.dumps(record)) == record
    assert record["packages"]["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert (record["dtype"], record["seed"], record["argv"]) == ("bfloat16", 7, ["bench", "--quick"])
    assert record["date"].endswith("+00:00")
    assert record["machine"]["cores"] >= record["machine"]["usable_cores"] >= 1


def test_what_is_unknown_is_said_to_be_unknown() -> None:
    """A distribution that is not installed is recorded as None, not left out."""
    assert set(provenance()["packages"]) == set(room.DISTRIBUTIONS)
    assert room._version("no-such-distribution-anywhere") is None


def test_the_commit_is_this_checkouts() -> None:
    """Inside a checkout that tracks the package, the commit is what git says; elsewhere there is none."""
    code = provenance()["code"]
    if git("ls-files", "--error-unmatch", "specflow_llm/provenance.py").returncode == 0:
        assert code["commit"] == git("rev-parse", "HEAD").stdout.strip()
        assert code["modified"] in {True, False}
    else:
        assert code == {"commit": None, "modified": None}


def test_git_answers_none_where_there_is_no_repository(tmp_path: Path) -> None:
    """A folder outside every repository, or one that does not exist, gives None instead of an error."""
    assert room._git(tmp_path, "rev-parse", "HEAD") is None
    assert room._git(tmp_path / "missing", "rev-parse", "HEAD") is None


def test_the_processor_is_read_from_the_systems_table(tmp_path: Path) -> None:
    """The first model name counts; a missing table falls back without an error."""
    table = tmp_path / "cpuinfo"
    table.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor : 1\nmodel name : Another\n")
    assert cpu_model(table) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "missing") in {None, room.platform.processor()}


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    """Sizes with units are compared in bytes, and odd entries are skipped."""
    for index, text in enumerate(("32K", "1024K", "32M", "huge")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text + "\n")
    assert last_level_cache_bytes(tmp_path) == 32 * 1024**2
    assert last_level_cache_bytes(tmp_path / "missing") is None
