"""The overhead benchmark runs and says where its numbers come from. The numbers themselves are not judged here."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

MAIN = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "chain_overhead.py"))["main"]


def test_the_benchmark_prints_json_with_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    """One object: costs of each policy by number of chains, the cost of a further chain, budgets, and provenance."""
    MAIN(["--rounds", "200", "--repeats", "1", "--chains", "1", "4"])
    report = json.loads(capsys.readouterr().out)
    assert set(report["results"]) == {"fixed", "threshold", "adaptive", "adaptive, padded"}
    for result in report["results"].values():
        assert set(result["us_per_round"]) == {"1", "4"}
        assert result["us_per_round"]["1"] > 0.0
        assert "us_per_chain" in result
    assert {"argv", "commit", "date", "python", "machine"} <= set(report["provenance"])


def test_a_single_number_of_chains_is_refused() -> None:
    """The cost of a further chain needs two numbers to compare."""
    with pytest.raises(SystemExit):
        MAIN(["--chains", "4"])
