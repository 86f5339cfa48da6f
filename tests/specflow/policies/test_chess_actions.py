"""The trace-driven benchmark computes what its model says, and lets no policy see the future."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from specflow.policies import ExpectedValue, Fixed
from specflow.speculation import Opportunity, Resolution

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "chess_actions.py"))
MAIN = BENCHMARK["main"]
Move = BENCHMARK["Move"]
replay = BENCHMARK["replay"]


def move(actual: str, actor_s: float, guess: str, guess_s: float = 2.0) -> Any:
    """A move for which all three questions had the same first answer; the other answers are wrong."""
    return Move(actual, actor_s, ((guess,), (guess, "x"), (guess, "x", "y")), (guess_s,) * 3)


def run(games: list[list[Any]], policy: object, guesser: str = "Recorded", price: float = 1.0) -> Any:
    """Replay with one of the benchmark's guessers."""
    return replay(games, policy, BENCHMARK[guesser](), price)


def test_a_head_start_is_what_is_left_of_the_running_call() -> None:
    """Hand-computed: calls of 10, 6, 4 and 5 seconds, guesses after 2 seconds, the first and second of them right.

    Call 0 is known at 10. Call 1 began at 2 and is known at 10 (its 6 seconds were over at 8). So nobody is asked to
    guess its result; call 2 runs from 10 to 14. Its guess is wrong; call 3 runs from 14 to 19.
    """
    game = [move("a", 10.0, "a"), move("b", 6.0, "b"), move("c", 4.0, "z"), move("d", 5.0, "d")]
    tally = run([game], Fixed(1))
    assert tally.seconds == 19.0
    assert (tally.guess_calls, tally.speculative_calls, tally.hits, tally.wasted_calls) == (2, 2, 1, 1)
    assert tally.wasted_seconds == 2.0


def test_a_chain_of_hits_overlaps_call_by_call() -> None:
    """With 10-second calls and guesses after 2 seconds: known at 10, 12, 22, 24 and 34 for five calls.

    Call 1 began at 2 and is known at 12. The guess of its result, asked for at 10, comes at 12 and is too late, so call
    2 starts at 12 and is known at 22; call 3 began at 14 and is known at 24; call 4 starts at 24 and ends at 34.
    """
    game = [move(name, 10.0, name) for name in "abcde"]
    assert run([game], Fixed(1)).seconds == 34.0
    assert run([game, game], Fixed(1)).seconds == 68.0


def test_without_speculation_the_calls_follow_each_other() -> None:
    """Depth 0 asks nobody and takes the sum of the recorded times."""
    tally = run([[move("a", 10.0, "a"), move("b", 6.5, "b")], [move("c", 4.0, "c")]], Fixed(0))
    assert (tally.seconds, tally.guess_calls, tally.speculative_calls) == (20.5, 0, 0)


def test_width_follows_more_guesses_and_wastes_more() -> None:
    """Three guesses for each of two calls, the first of each right: two hits, four wasted calls of 8 seconds."""
    game = [move("a", 10.0, "a"), move("b", 12.0, "b"), move("c", 30.0, "c")]
    tally = run([game], Fixed(1, width=3))
    # Known at 10 and 14. Guess of the second: asked at 10, there at 12. The third call began at 12: 42.
    assert tally.seconds == 42.0
    assert (tally.speculative_calls, tally.hits, tally.wasted_calls) == (6, 2, 4)
    assert tally.wasted_seconds == 2 * 8.0 + 2 * 2.0


def test_the_adversary_costs_money_and_no_time() -> None:
    """Wrong guesses leave the virtual time as it is; the expected-value policy stops paying for them."""
    games = [[move("a", 10.0, "a") for _ in range(100)]]
    fixed = run(games, Fixed(1, width=3), "Adversary", 0.01)
    valued = run(games, ExpectedValue(depth=1, value_of_second=0.01), "Adversary", 0.01)
    assert fixed.seconds == valued.seconds == 1000.0
    assert fixed.wasted_calls == 3 * 99
    assert valued.wasted_calls < 10


class Diary(ExpectedValue):
    """Writes down what it was asked and told, and what it answered."""

    def __init__(self) -> None:
        super().__init__(depth=1, value_of_second=0.05)
        self.lines: list[object] = []

    def allows(self, opportunity: Opportunity) -> bool:
        """Answer as the policy does."""
        answer = super().allows(opportunity)
        self.lines.append((opportunity, answer))
        return answer

    def learn(self, resolution: Resolution) -> None:
        """Learn as the policy does."""
        self.lines.append(resolution)
        super().learn(resolution)


def test_nothing_is_known_before_it_happened() -> None:
    """Whatever the later moves are, a policy is asked and told the same up to them, and answers the same."""
    early = [move("a", 10.0 + number % 3, "a" if number % 2 else "z") for number in range(20)]
    diaries = []
    for later, seconds in (("a", 99.0), ("q", 55.0)):
        diary = Diary()
        run([[*early, *[move(later, seconds, "q") for _ in range(20)]]], diary)
        diaries.append(diary.lines)
    same = next(index for index, (one, other) in enumerate(zip(*diaries, strict=False)) if one != other)
    assert same > 40
    first = diaries[0][same]
    assert isinstance(first, Resolution)  # they part where the first later move is resolved, and no sooner
    assert first.assumption.position == (20,)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small recorded trace."""
    rows = []
    for number in range(40):
        actual = "acbc"[number % 4]
        answer = {f"guess{width}": ["a", "b", "b"][:width] for width in (1, 2, 3)}
        times = {f"guess{width}_s": 1.0 + width for width in (1, 2, 3)}
        rows.append({"game": number // 20, "move": number % 20, "actor_s": 50.0, "actual": actual, **answer, **times})
    path = tmp_path / "moves.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_the_benchmark_prints_json_with_provenance(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with all rows: the plain one saves nothing, the shadow costs guesses only, none is left out."""
    MAIN(["--trace", str(trace), "--json", "--values", "0.001", "0.1"])
    report = json.loads(capsys.readouterr().out)
    assert {"argv", "commit", "python", "trace", "sha256"} <= set(report["provenance"])
    rows = {(row["guesser"], row["policy"]): row for row in report["results"]}
    assert rows["recorded", "none"]["saved"] == rows["recorded", "none"]["extra_money"] == 0.0
    assert rows["recorded", "none"]["seconds"] == 40 * 50.0
    shadow = rows["recorded", "Shadow(ExpectedValue(0.1/s))"]
    assert (shadow["saved"], shadow["speculative_calls"]) == (0.0, 0)
    assert shadow["extra_money"] == pytest.approx(38 * 0.001)
    assert rows["recorded", "Fixed(1, width=2)"]["saved"] > rows["recorded", "Fixed(1, width=1)"]["saved"] > 0.0
    # The third guess repeats the second: it is not followed twice.
    wide, wider = rows["recorded", "Fixed(1, width=2)"], rows["recorded", "Fixed(1, width=3)"]
    assert wide["speculative_calls"] == wider["speculative_calls"]
    assert rows["adversary", "Fixed(1, width=3)"]["saved"] == 0.0
    assert rows["oracle", "Fixed(1)"]["wasted_calls"] == 0


def test_the_table_has_a_line_for_each_row(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losing rows are printed like the others."""
    MAIN(["--trace", str(trace)])
    printed = capsys.readouterr().out
    assert sum(line.startswith(("recorded", "oracle", "adversary")) for line in printed.splitlines()) == 21
    assert "Fixed(1, width=3)" in printed


def test_a_missing_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which file is missing and how to give another."""
    with pytest.raises(SystemExit):
        MAIN(["--trace", str(tmp_path / "nowhere.jsonl")])
    message = capsys.readouterr().err
    assert "nowhere.jsonl" in message
    assert "--trace" in message


@pytest.mark.parametrize("line", ["{", '{"game": 0}', '{"game": 0, "actual": "a", "actor_s": "soon"}', ""])
def test_a_damaged_trace_is_refused_with_its_line(trace: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    """The first line that is not a recorded move is named."""
    trace.write_text(f"{trace.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        MAIN(["--trace", str(trace)])
    assert "line 41 is not a recorded move" in capsys.readouterr().err


def test_negative_prices_are_refused() -> None:
    """A price below zero is a mistake."""
    with pytest.raises(SystemExit):
        MAIN(["--actor-price", "-1"])
