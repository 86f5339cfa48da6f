from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_example(name: str, *arguments: str) -> str:
    """What an example prints, run as a user runs it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_saga_charges_once_although_its_process_was_killed() -> None:
    """After a real SIGKILL between the charge and its answer, the money is taken once and the stock comes back."""
    printed = run_example("order_saga.py")
    before, _, after = printed.partition("resumed in another process: parcel 1")
    assert "killed (exit code -9)" in before
    charged_again = after.split("order 2 failed")[0]
    assert charged_again.count("charge 30 for order 1") == 1
    assert "put a lamp of order 2 back" in after
    assert "reserve    compensated" in after


def test_the_router_of_the_pipeline_is_predicted_from_its_history() -> None:
    """Most answers of the router are guessed right, and the replies are those without any guess."""
    printed = run_example("triage_pipeline.py")
    assert "guessed right 13 times and wrong 2 times" in printed
    assert "route -->|billing| account" in printed


@pytest.mark.parametrize("question", ["How does the slot cache roll back rejected tokens?", "What is packing?"])
def test_the_agent_answers_the_same_when_it_runs_ahead(question: str) -> None:
    """The example compares both answers itself; here its guesses are known to be right."""
    printed = run_example("research_agent.py", "--stand-in", question)
    assert "0 wrong" in printed
    assert "CommittedEvent" in printed
