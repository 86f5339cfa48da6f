"""The simulator: what replayed rounds come to, and what the command shows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specflow.errors import InvalidSettingError
from specflow.policies import CostScheduled, Fixed, Threshold
from specflow_llm.cli.app import app
from specflow_llm.profile import CostProfile, Shape, save_profile
from specflow_llm.records import RecordHeader, Recording, RoundRecord, write_rounds
from specflow_llm.simulate import DEFAULT_POLICIES, policy_names, replay, save_plot, simulate, tables

LONGEST = 5


def profile(
    seconds: Callable[[int, int], float], drafting: float = 0.0, *, padded: bool = False, model: str = "tiny"
) -> CostProfile:
    """Costs by (requests, width)."""
    return CostProfile(
        provenance={"model": model, "drafter": "made up", "threads": 1},
        padded=padded,
        context=8,
        execute=tuple(
            Shape(batch=batch, draft=draft, seconds=(seconds(batch, draft + 1),) * 3)
            for batch in (1, 2, 4, 8)
            for draft in range(LONGEST + 1)
        ),
        draft=tuple(
            Shape(batch=batch, draft=draft, seconds=(drafting,) * 3)
            for batch in (1, 2, 4, 8)
            for draft in range(1, LONGEST + 1)
        ),
    )


def linear(batch: int, width: int) -> float:
    """A second, and a twentieth of one per token."""
    return 1.0 + 0.05 * batch * width


def header(**changes: Any) -> RecordHeader:
    """Where the rounds come from."""
    fields = {"drafter": "made up", "temperature": 0.0, "max_draft": LONGEST, "provenance": {"model": "tiny"}}
    return RecordHeader(**{**fields, **changes})


def recorded(request: int, *rounds: tuple[tuple[float, ...], int]) -> list[RoundRecord]:
    """Rounds of one request."""
    position, found = 10, []
    for survival, accepted in rounds:
        found.append(
            RoundRecord(
                request=request, category="x", position=position, survival=survival, accepted=accepted,
                emitted=accepted + 1,
            )
        )  # fmt: skip
        position += accepted + 1
    return found


def calibrated(count: int, seed: int = 1) -> Recording:
    """Rounds whose estimates are true; ease varies from round to round."""
    rng = random.Random(seed)
    rounds = []
    for index in range(count):
        ease = rng.choice([0.2, 0.6, 0.95])
        survival = tuple(ease ** (place + 1) for place in range(LONGEST))
        accepted = next((place for place in range(LONGEST) if rng.random() >= ease), LONGEST)
        rounds += recorded(index // 25, (survival, accepted))
    return Recording(header(), tuple(rounds))


SMALL = Recording(
    header(),
    (
        *recorded(0, ((0.9, 0.8, 0.7), 3), ((0.6, 0.5), 0)),
        *recorded(1, ((0.3, 0.2, 0.1, 0.05), 1), ((), 0)),
    ),
)


@pytest.mark.parametrize("length", range(LONGEST + 1))
def test_a_replay_is_the_sum_over_its_rounds(length: int) -> None:
    """Tokens and seconds of a fixed length at one request equal what the records and costs add up to."""
    costs = profile(linear, drafting=0.25).costs()
    outcome = replay(SMALL, costs, Fixed(length), name="fixed", concurrency=1, rounds=4)
    executed = [min(length, len(item.survival)) for item in SMALL.rounds]
    assert outcome.emitted == sum(min(item.accepted, n) + 1 for item, n in zip(SMALL.rounds, executed, strict=True))
    assert outcome.admitted == sum(executed)
    assert outcome.seconds == pytest.approx(sum(1.0 + 0.05 * (1 + n) for n in executed) + 4 * 0.25 * (length > 0))
    assert outcome.mean_accepted_length == outcome.emitted / 4
    assert outcome.throughput == pytest.approx(outcome.emitted / outcome.seconds)


BRANCHING = Recording(
    header(),
    (
        RoundRecord(
            request=0, category="", position=9, survival=(0.5, 0.3, 0.25, 0.2, 0.1), accepted=2, emitted=3,
            parents=(-1, -1, 1, 0, 2), path=(1, 2),
        ),
        RoundRecord(
            request=0, category="", position=12, survival=(0.9, 0.8), accepted=0, emitted=1, parents=(-1, 0), path=(),
        ),
        RoundRecord(request=0, category="", position=13, survival=(0.9, 0.8), accepted=1, emitted=2),
    ),
)  # fmt: skip
"""Two trees and a chain."""


@pytest.mark.parametrize(("length", "emitted"), [(0, 3), (1, 1 + 1 + 2), (2, 2 + 1 + 2), (3, 3 + 1 + 2), (5, 6)])
def test_of_trees_the_accepted_path_is_replayed(length: int, emitted: int) -> None:
    """The best items of a tree emit what the path holds of them; they cost what as many items of a chain cost."""
    costs = profile(linear).costs()
    outcome = replay(BRANCHING, costs, Fixed(length), name="f", concurrency=1, rounds=3)
    assert outcome.emitted == emitted
    assert outcome.admitted == sum(min(length, len(item.survival)) for item in BRANCHING.rounds)
    assert outcome.seconds == pytest.approx(3 * 1.05 + 0.05 * outcome.admitted)


def test_every_policy_replays_trees() -> None:
    """All of them run, and it is said which of them no engine would run on trees."""
    found = simulate(BRANCHING, profile(linear), concurrency=[1, 3])
    assert all(outcome.emitted >= outcome.rounds for outcome in found.outcomes)
    assert any("pid" in warning for warning in found.warnings)
    assert not any("pid" in warning for warning in simulate(SMALL, profile(linear)).warnings)


def test_policies_decide_on_the_recorded_estimates() -> None:
    """A threshold executes the recorded items that reach it; accepted ones among them count."""
    outcome = replay(SMALL, profile(linear).costs(), Threshold(LONGEST, 0.55), name="t", concurrency=1, rounds=4)
    assert outcome.admitted == 3 + 1 + 0 + 0
    assert outcome.accepted == 3
    assert outcome.drafted == 9
    assert outcome.pass_rate == pytest.approx(3 / 4)


def test_loads_share_rounds() -> None:
    """Two requests at once: a round costs what both blocks cost, and the batch stays full as requests end."""
    outcome = replay(SMALL, profile(linear).costs(), Fixed(2), name="f", concurrency=2, rounds=2)
    assert outcome.emitted == (2 + 1) + (1 + 1) + (0 + 1) + (0 + 1)
    assert outcome.seconds == pytest.approx((1.0 + 0.05 * 6) + (1.0 + 0.05 * 4))
    full = replay(SMALL, profile(linear).costs(), Fixed(2), name="f", concurrency=2, rounds=100)
    assert full.mean_accepted_length == pytest.approx(outcome.mean_accepted_length)


def test_padding_is_paid_for() -> None:
    """With padded costs a round of unequal drafts costs its longest one twice."""
    outcome = replay(SMALL, profile(linear, padded=True).costs(), Fixed(5), name="f", concurrency=2, rounds=1)
    assert outcome.seconds == pytest.approx(1.0 + 0.05 * 2 * 5)


def test_more_requests_than_recorded_are_decoded_over_again() -> None:
    """Sixteen at once from two recorded requests: all take part in every round."""
    outcome = replay(SMALL, profile(linear).costs(), Fixed(0), name="f", concurrency=16, rounds=10)
    assert outcome.emitted == 160


def test_a_stop_inside_a_block_cuts_it() -> None:
    """A recorded round that ended its request early emits no more than it did, however much is executed."""
    ending = RoundRecord(request=0, category="", position=5, survival=(0.9, 0.9, 0.9), accepted=3, emitted=2)
    recording = Recording(header(), (ending,))
    costs = profile(linear).costs()
    for length, emitted in ((0, 1), (1, 2), (3, 2)):
        assert replay(recording, costs, Fixed(length), name="f", concurrency=1, rounds=1).emitted == emitted


def test_nothing_to_replay_is_refused() -> None:
    """No rounds, no requests, no policy, no load and unknown names are refused."""
    costs = profile(linear)
    with pytest.raises(InvalidSettingError, match="recording"):
        replay(Recording(header(), ()), costs.costs(), Fixed(0), name="f", concurrency=1)
    with pytest.raises(InvalidSettingError, match="concurrency"):
        replay(SMALL, costs.costs(), Fixed(0), name="f", concurrency=0)
    mistakes: list[dict[str, Any]] = [
        {"policies": ["fastest"]},
        {"policies": []},
        {"concurrency": []},
        {"policies": ["fixed-9"]},
    ]
    for wrong in mistakes:
        with pytest.raises(InvalidSettingError):
            simulate(SMALL, costs, **wrong)


def test_scheduling_wins_where_ease_varies_and_never_loses_much() -> None:
    """On calibrated records cost scheduling is within 2 % of the best fixed length at each load, and ahead at some."""
    for padded in (False, True):
        found = simulate(
            calibrated(1000), profile(lambda b, w: 0.3 + 0.1 * b * w, padded=padded),
            policies=("plain", "fixed", "cost_scheduled"), concurrency=(1, 4, 8),
        )  # fmt: skip
        ratios = [found.relative(found.at("cost_scheduled", load)) or 0.0 for load in (1, 4, 8)]
        assert min(ratios) >= 0.98
        assert max(ratios) > 1.05


def test_a_simulation_is_deterministic() -> None:
    """The same records and costs give the same figures: no clock, no randomness."""
    runs = [simulate(calibrated(60), profile(linear), concurrency=(1, 4)).as_dict() for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_best_fixed_length_is_found_by_trying_all() -> None:
    """Every length has a row, the best one is named per load, and plain decoding counts as length 0."""
    found = simulate(SMALL, profile(linear), policies=("plain", "fixed"), concurrency=(1,))
    assert found.policies == ("plain", *[f"fixed-{length}" for length in range(1, LONGEST + 1)])
    best = max(found.outcomes, key=lambda outcome: outcome.throughput)
    assert found.best_fixed(1) is best
    assert found.relative(best) == 1.0
    nothing_pays = simulate(SMALL, profile(lambda b, w: float(b * w**3)), policies=("plain", "fixed"), concurrency=(1,))
    assert nothing_pays.as_dict()["best_fixed"] == {"1": "plain"}
    alone = simulate(SMALL, profile(linear), policies=("pid",), concurrency=(1,))
    assert alone.best_fixed(1) is None
    assert alone.relative(alone.outcomes[0]) is None
    with pytest.raises(KeyError):
        alone.at("plain", 1)


def test_what_does_not_fit_is_said() -> None:
    """Records of another model, loads and lengths that were not measured are named."""
    assert simulate(SMALL, profile(linear), policies=("plain",), concurrency=(1,)).warnings == []
    recording = Recording(header(max_draft=LONGEST + 2), SMALL.rounds)
    found = simulate(recording, profile(linear, model="other"), policies=("plain",), concurrency=(1, 32))
    assert len(found.warnings) == 3
    for words, warning in zip(
        ("'tiny'", "up to 8 requests", f"drafts of up to {LONGEST}"), found.warnings, strict=True
    ):
        assert words in warning
    others = Recording(header(drafter="other"), SMALL.rounds)
    (warning,) = simulate(others, profile(linear), policies=("plain",), concurrency=(1,)).warnings
    assert "drafter 'other'" in warning


def test_every_policy_has_a_name() -> None:
    """All named policies run, and the defaults are among them."""
    names = [name for name in policy_names() if name != "fixed-N"]
    assert set(DEFAULT_POLICIES) <= set(names)
    found = simulate(SMALL, profile(linear), policies=names, concurrency=(2,))
    assert {"plain", "fixed-1", "cost_scheduled", "stale_budget", "estimated", "threshold", "adaptive", "pid"} <= set(
        found.policies
    )
    assert len(list(tables(found))) == 3
    assert isinstance(CostScheduled(LONGEST, profile(linear).costs()), CostScheduled)


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A recording and a cost profile on disk."""
    recording = calibrated(100)
    write_rounds(tmp_path / "rounds.jsonl", recording.header, recording.rounds)
    save_profile(profile(linear), tmp_path / "costs.json")
    return str(tmp_path / "rounds.jsonl"), str(tmp_path / "costs.json")


def run(*arguments: str) -> Any:
    """The command line."""
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_the_command_prints_tables(files: tuple[str, str]) -> None:
    """Throughput with the best fixed length marked, tokens per round, and draft lengths, by policy and load."""
    result = run("--record", files[0], "--costs", files[1], "--concurrency", "1,4")
    assert result.exit_code == 0, result.stderr
    for words in ("tokens per second", "4 at once", "cost_scheduled", "fixed-5", " *", "tokens emitted per round"):
        assert words in result.stdout


def test_the_command_prints_json(files: tuple[str, str]) -> None:
    """One JSON object with a row per policy and load, and where both files come from."""
    result = run("--record", files[0], "--costs", files[1], "--policy", "plain, fixed-2,pid", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["outcomes"]) == 3 * 5
    assert {row["policy"] for row in answer["outcomes"]} == {"plain", "fixed-2", "pid"}
    assert answer["provenance"]["costs"]["model"] == "tiny"
    assert all(row["throughput"] > 0 for row in answer["outcomes"])


def test_the_command_draws(files: tuple[str, str], tmp_path: Path) -> None:
    """A picture appears where it is asked for; a format that nobody knows is refused."""
    pytest.importorskip("matplotlib", reason="drawing needs the bench extra")
    picture = tmp_path / "deep" / "load.png"
    result = run("--record", files[0], "--costs", files[1], "--concurrency", "1,2", "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidSettingError, match="suffix"):
        save_plot(simulate(SMALL, profile(linear), policies=("plain",), concurrency=(1,)), tmp_path / "x.xyz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "fastest"), "fastest"),
        (("--concurrency", "1,zero"), "whole numbers"),
        (("--concurrency", "0"), "0"),
    ],
)
def test_the_command_refuses_what_cannot_work(files: tuple[str, str], options: tuple[str, ...], message: str) -> None:
    """Unknown policies and loads that are none end with code 2 and name what was wrong."""
    result = run("--record", files[0], "--costs", files[1], *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_swapped_files_are_noticed(files: tuple[str, str]) -> None:
    """Costs given as records, and records as costs, are refused by name."""
    result = run("--record", files[1], "--costs", files[0])
    assert result.exit_code == 2
    assert "costs.json" in result.stderr
