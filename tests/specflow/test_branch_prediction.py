"""The branch prediction example: the same loop, another world, the same history."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from specflow.chain import ChainLoop, run_sync
from specflow.policies import Adaptive, Fixed
from specflow.predictors import GShare, TwoBit
from specflow.protocols import ChainBackend
from specflow.testing import ManualClock, check_exact

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "branch_prediction.py"))
SIZE = 80


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines the example prints."""
    EXAMPLE["main"](["--size", str(SIZE), *arguments])
    return capsys.readouterr().out.splitlines()


def processor() -> ChainBackend[Any]:
    """The toy machine with its four threads."""
    backend: ChainBackend[Any] = EXAMPLE["Processor"](EXAMPLE["machines"](SIZE), GShare(), ManualClock())
    return backend


def test_the_machine_is_an_exact_backend() -> None:
    """Under every policy and after a failure in any phase the machine retires the branches of the serial run."""
    report = check_exact(processor)
    assert report.ok, report
    assert report.gain["fixed 8"] > 2.0


@pytest.mark.parametrize("policy", ["fixed", "threshold", "adaptive"])
def test_one_table_is_printed_and_checked(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    """A row per predictor and thread, and the statement that the serial run retired the same branches."""
    lines = run(capsys, "--policy", policy)
    assert lines[0].split() == ["predictor", "thread", "branches", "accuracy", "run", "rounds", "plain", "squashed"]
    assert len(lines) == 1 + 2 * (4 + 1) + 1
    assert lines[-1] == "retired branches equal the serial run"


def test_the_output_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in the example depends on time or chance."""
    assert run(capsys) == run(capsys)


def test_a_recorded_trace_can_be_speculated_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The recorded branches are those retired, and running over the record retires them again."""
    trace = tmp_path / "branches.txt"
    recorded = run(capsys, "--record", str(trace))
    branches = [line for line in trace.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    retired = sum(int(line.split()[-6]) for line in recorded[1:5])
    assert len(branches) == retired
    replayed = run(capsys, "--trace", str(trace))
    assert replayed[-1] == "retired branches equal the serial run"
    assert sum(int(line.split()[-6]) for line in replayed[1:5]) == retired


def test_traces_of_other_tools_are_read(tmp_path: Path) -> None:
    """Addresses may be hexadecimal, directions T/N or 1/0, and names are optional."""
    trace = tmp_path / "trace.txt"
    trace.write_text("0x40 T\n64 0\n# second\n7 1\n", encoding="utf-8")
    threads = EXAMPLE["read_traces"](trace)
    assert threads == {"trace": [(64, True), (64, False)], "second": [(7, True)]}


def test_a_machine_that_does_not_undo_is_noticed() -> None:
    """Without its undo log the machine keeps what wrong paths wrote, and retires other branches than the serial run."""
    machine_type: Any = EXAMPLE["Machine"]

    class Forgetful(machine_type):  # type: ignore[misc]
        """Goes back to the right instruction, but not to the right registers and memory."""

        def roll_back(self, mark: Any) -> None:
            """Only the program counter."""
            self.pc = mark.pc

    def forgetful() -> ChainBackend[Any]:
        code = EXAMPLE["assemble"](EXAMPLE["PROGRAMS"]["insertion sort"])
        machine = Forgetful(code, [5, 3, 9, 1, 7, 2, 8, 4], 8)
        backend: ChainBackend[Any] = EXAMPLE["Processor"]([machine], GShare(), ManualClock())
        return backend

    report = check_exact(forgetful, {"fixed": lambda: Fixed(8)}, fault_rounds=(), max_rounds=500)
    assert report.plain.problem is None
    assert not report.ok


def test_a_fault_on_a_wrong_path_stays_there() -> None:
    """A guessed path that runs out of memory is squashed; the same fault on the real path is an error."""
    source = """
        li r1 5
        bne r1 r0 good
        load r2 r7
        load r2 r1
        beq r2 r0 good
    good:
        beq r1 r1 good2
    good2:
        halt
    """
    machine = EXAMPLE["Machine"](EXAMPLE["assemble"](source), [], 0)
    backend = EXAMPLE["Processor"]([machine], TwoBit(), ManualClock())
    assert run_sync(ChainLoop(backend, Fixed(4)).run()) > 0
    broken = EXAMPLE["Machine"](EXAMPLE["assemble"]("load r1 r0\nbeq r1 r0 end\nend:\nhalt"), [], 0)
    with pytest.raises(EXAMPLE["MachineFault"]):
        run_sync(ChainLoop(EXAMPLE["Processor"]([broken], TwoBit(), ManualClock()), Adaptive(4)).run())
