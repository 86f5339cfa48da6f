"""The command line ``specflow``, used as a person or a script uses it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from datetime import date
from pathlib import Path
from typing import Any

import anyio
import pytest

from specflow.cli import main
from specflow.cli.output import table
from specflow.cli.specs import parse_assignments, parse_policy, parse_predictor, parse_predictors
from specflow.definitions import given, step, workflow
from specflow.effects import Effect
from specflow.errors import InvalidSettingError
from specflow.graph import Pipeline
from specflow.history import RunStatus
from specflow.policies import ExpectedValue, Fixed, Threshold
from specflow.predictors import LastValue
from specflow.recorded import Recording
from specflow.replay import Context
from specflow.runtime import run
from specflow.speculation import Call
from specflow.state import State
from specflow.stores import SQLiteStore
from specflow.testing.virtual import simulate

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.specflow.test_cli_workflows"
"""This module, as ``module:program`` names it."""


@step(effect=Effect.PURE, money=0.5)
async def follow(number: int) -> int:
    """The next number; refuses negative ones."""
    if number < 0:
        raise ValueError("negative")
    return number + 1


@step(effect=Effect.IDEMPOTENT)
async def announce(number: int) -> str:
    """Tells somebody."""
    return f"told {number}"


@workflow
async def counting(ctx: Context, length: int, start: int = 0) -> dict[str, int]:
    """Counts, remembers and announces."""
    number = start
    for _ in range(length):
        number = await ctx.call(follow, number)
        ctx.state.put("number", number)
        ctx.emit(number)
    await ctx.call(announce, number)
    return {"number": number}


@workflow
async def plain_chain(ctx: Context, length: int) -> int:
    """Nothing but calls."""
    number = 0
    for _ in range(length):
        number = await ctx.call(follow, number)
    return number


@workflow
async def shared(ctx: Context) -> None:
    """Changes an argument of its own making through a step."""
    await ctx.call(spoil, [1])


@step(effect=Effect.PURE)
async def spoil(items: list[int]) -> None:
    """Changes its argument."""
    items.append(2)


async def told(number: int) -> str:
    """A stub."""
    return f"stub {number}"


routing = Pipeline("routing")


@routing.step(effect=Effect.PURE)
async def route(ticket: str) -> str:
    """Where to."""
    return ticket[:1]


@routing.step(effect=Effect.PURE, when={"route": "a"})
async def answer(ticket: str, route: str) -> str:
    """What to say."""
    return ticket + route


# ----------------------------------------------------------------------------------------------------------- the tools


class Tool:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *words: str) -> str:
        """Standard output of a command that works."""
        code = main(words)
        out, err = self._capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    def json(self, *words: str, code: int = 0) -> Any:
        """The one JSON object that a command prints."""
        assert main([*words, "--json"]) == code
        out, _err = self._capsys.readouterr()
        found = json.loads(out)
        assert isinstance(found, dict)
        return found

    def error(self, *words: str) -> str:
        """What a command that fails tells a person; it says the same with ``--json``, and no traceback."""
        assert main(words) == 1
        out, err = self._capsys.readouterr()
        assert out == ""
        assert err.startswith("specflow: ")
        assert "Traceback" not in err
        found = self.json(*words, code=1)
        assert err == f"specflow: {found['error']['message']}\n"
        return err

    def usage(self, *words: str) -> str:
        """What a command line that cannot be read is told."""
        with pytest.raises(SystemExit) as exit_of:
            main(words)
        assert exit_of.value.code == 2
        return self._capsys.readouterr().err


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """The command line in this process."""
    return Tool(capsys)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is going to be."""
    return str(tmp_path / "runs.db")


@pytest.fixture
def make(path: str) -> Iterator[Callable[..., Any]]:
    """Runs programs on the store."""
    store = SQLiteStore(path)

    def run_it(program: Any, *args: Any, **kwargs: Any) -> Any:
        return anyio.run(lambda: run(program, *args, store=store, policy=Fixed(0), **kwargs))

    yield run_it
    store.close()


def spawn(folder: Path, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` in a folder, as a user would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **settings,
    )


# ------------------------------------------------------------------------------------------------------------- looking


def test_runs_are_listed(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """Oldest first, with program, status, version and arguments."""
    make(counting, 2, run_id="one")
    with pytest.raises(ValueError, match="negative"):
        make(counting, 1, start=-5, run_id="two")
    found = tool.json("runs", path)["runs"]
    assert [(one["run"], one["status"], one["version"]) for one in found] == [
        ("one", "completed", 4),
        ("two", "failed", 2),
    ]
    assert (found[1]["program"], found[1]["args"], found[1]["kwargs"]) == (counting.name, [1], {"start": -5})
    lines = tool.text("runs", path).splitlines()
    assert lines[0].split()[:3] == ["run", "program", "status"]
    assert [line.split()[0] for line in lines[2:]] == ["one", "two"]


def test_an_empty_store_has_no_runs(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """Nothing is not an error."""
    assert tool.text("runs", path) == "no runs\n"
    assert tool.json("stats", path) == {"runs": [], "steps": []}
    assert tool.text("stats", path) == "no calls\n"
    assert tool.json("gc", path) == {"dropped": {}, "total": 0}


def test_a_run_is_shown_with_history_state_and_effects(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """What each version holds, what was written, emitted and sent."""
    make(counting, 2, run_id="one")
    found = tool.json("show", path, "one", "--state", "--effects")
    entries = found["entries"]
    assert [(one["version"], one["position"], one["kind"], one["step"]) for one in entries] == [
        (1, "0", "call", follow.name),
        (2, "1", "call", follow.name),
        (3, "2", "call", announce.name),
        (4, "", "end", counting.name),
    ]
    assert (entries[1]["args"], entries[1]["result"], entries[1]["events"]) == ([1], 2, [1])
    assert entries[1]["writes"] == [{"key": "number", "operation": "put", "value": 1}]
    assert (found["version"], found["state"]) == (4, {"number": 2})
    (effect,) = found["effects"]
    assert (effect["step"], effect["status"], effect["args"], effect["result"]) == (
        announce.name,
        "acked",
        [2],
        "told 2",
    )
    text = tool.text("show", path, "one", "--state", "--effects")
    assert "called   (2)" in text
    assert "state at version 4" in text
    assert effect["key"] in text


def test_an_earlier_version_is_shown(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """History up to the version, and the state at it."""
    make(counting, 3, run_id="one")
    found = tool.json("show", path, "one", "--version", "2")
    assert (len(found["entries"]), found["version"], found["state"]) == (2, 2, {"number": 1})
    assert tool.json("show", path, "one", "--version", "0")["state"] == {}
    assert "empty" in tool.text("show", path, "one", "--version", "0")
    assert "version 9 of run one" in tool.error("show", path, "one", "--version", "9")
    assert "version -1 of run one" in tool.error("show", path, "one", "--version", "-1")


def test_errors_and_odd_values_are_shown(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """Whatever a run holds can be printed: errors, long texts, line breaks, lone surrogates, tagged types."""

    @step(effect=Effect.PURE)
    async def give(value: Any) -> Any:
        return value

    @workflow
    async def giving(ctx: Context, values: list[Any]) -> None:
        for value in values:
            await ctx.call(give, value)
        await ctx.call(follow, -1)

    values = ["a\nb\tc", "\ud800", "x" * 5000, float("nan"), (1, {2}), b"\x00", {"$tuple": 1}, 10**400]
    with pytest.raises(ValueError, match="negative"):
        make(giving, values, run_id="odd")
    text = tool.text("show", path, "odd", "--state", "--effects")
    assert "raised ValueError: negative" in text
    assert "\\nb" in text
    assert max(map(len, text.splitlines()[5:])) < 400
    entries = tool.json("show", path, "odd")["entries"]
    assert entries[4]["result"] == {"$tuple": [1, {"$set": [2]}]}
    assert "negative" in json.dumps(entries[-1]["error"])


def test_figures_of_steps(tool: Tool, path: str) -> None:
    """Calls, seconds and hit rates over one run, or all."""
    store = SQLiteStore(path)
    simulate(plain_chain, 4, policy=Fixed(0), durations=10.0, store=store, run_id="one")
    simulate(plain_chain, 2, policy=Fixed(0), durations=1.0, store=store, run_id="two")
    store.close()
    (figures,) = tool.json("stats", path, "one")["steps"]
    assert (figures["step"], figures["calls"], figures["failed"]) == (follow.name, 4, 0)
    assert (figures["seconds"], figures["median_seconds"]) == (40.0, 10.0)
    assert figures["hit_rates"]["last"] == {"calls": 4, "guesses": 3, "hits": 0, "rate": 0.0}
    found = tool.json("stats", path)
    assert found["runs"] == ["one", "two"]
    assert found["steps"][0]["calls"] == 6
    assert found["steps"][0]["hit_rates"]["arguments"] == {"calls": 6, "guesses": 2, "hits": 2, "rate": 1.0}
    text = tool.text("stats", path)
    assert "2 runs" in text
    assert "100%" in text


# ------------------------------------------------------------------------------------------------------------- what if


@pytest.fixture
def timed(path: str) -> str:
    """A store with a run of four calls of 10 s."""
    store = SQLiteStore(path)
    simulate(plain_chain, 4, policy=Fixed(0), durations=10.0, store=store, run_id="one")
    store.close()
    return path


def test_a_recorded_run_is_followed_under_other_policies(tool: Tool, timed: str) -> None:
    """Forty seconds; with right guesses one deep twenty, three deep ten; wrong guesses cost money only."""
    words = ("replay", timed, "one", "--policy", "none", "--policy", "fixed:1", "--policy", "fixed:3")
    found = tool.json(*words, "--predictor", "oracle")
    assert [(one["seconds"], one["hits"], one["money"]) for one in found["results"]] == [
        (40, 0, 2),
        (20, 4, 2),
        (10, 4, 2),
    ]
    assert [one["speedup"] for one in found["results"]] == [1, 2, 4]
    assert (found["program"], found["predictor"], found["trained_on"]) == (plain_chain.name, ["oracle"], [])
    (wrong,) = tool.json("replay", timed, "one", "--predictor", "adversary", "--money", "follow=2")["results"]
    assert (wrong["policy"], wrong["seconds"], wrong["misses"]) == ("fixed:1", 40, 4)
    assert (wrong["money"], wrong["wasted_money"], wrong["wasted_seconds"]) == (8 + 6, 6, 30)
    text = tool.text(*words, "--predictor", "oracle")
    assert "40 s without guesses, 40 s by the clock" in text
    assert text.splitlines()[-1].split()[:4] == ["fixed:3", "10", "30", "4"]


def test_predictors_are_given_by_step_and_trained_on_earlier_runs(tool: Tool, timed: str) -> None:
    """A trace of an equal run makes every guess right; a step may be left without a predictor."""
    store = SQLiteStore(timed)
    simulate(plain_chain, 4, policy=Fixed(0), durations=10.0, store=store, run_id="two", wall=lambda now: 2e9 + now)
    store.close()
    found = tool.json("replay", timed, "two", "--policy", "fixed:3", "--predictor", "trace", "--train")
    assert found["trained_on"] == ["one"]
    assert found["results"][0]["seconds"] == 10
    untrained = tool.json("replay", timed, "two", "--policy", "fixed:3", "--predictor", "trace")
    assert untrained["results"][0]["hits"] == 0
    assert tool.json("replay", timed, "one", "--train")["trained_on"] == []
    words = ("--predictor", "oracle", "--predictor", "follow=none")
    assert tool.json("replay", timed, "one", *words)["results"][0]["seconds"] == 40


def test_the_program_of_a_run_may_have_another_name_or_other_code(tool: Tool, timed: str) -> None:
    """Code that has changed is refused unless allowed; then divergence is an error that names the place."""
    assert "not a @workflow" in tool.error("replay", timed, "one", "--program", f"{HERE}:follow")
    assert "has changed since" in tool.error("replay", timed, "one", "--program", f"{HERE}:counting")
    words = ("replay", timed, "one", "--program", f"{HERE}:counting", "--allow-changed")
    assert "at position 4 the history says no call" in tool.error(*words)
    (found,) = tool.json("replay", timed, "one", "--program", f"{HERE}:plain_chain")["results"]
    assert found["plain_seconds"] == 40


@pytest.mark.parametrize(
    ("text", "kind", "reach"),
    [
        ("none", Fixed, (0, 1)),
        ("fixed:2", Fixed, (2, 1)),
        ("fixed:2:width=3", Fixed, (2, 3)),
        ("threshold:2:0.7", Threshold, (2, 1)),
        ("threshold:4:0.5:width=2:money=1.5:slots=3:effects=idempotent+compensable", Threshold, (4, 2)),
        ("expected", ExpectedValue, (4, 3)),
        ("expected:depth=2:width=1:value_of_second=0.5:explorations=3", ExpectedValue, (2, 1)),
    ],
)
def test_policies_can_be_written_down(text: str, kind: type, reach: tuple[int, int]) -> None:
    """Kind, depth and width are those that the text says."""
    policy = parse_policy(text)
    assert isinstance(policy, kind)
    assert (policy.depth, policy.width) == reach
    assert (Effect.COMPENSABLE in policy.effects) == ("compensable" in text)
    assert policy.budget.money == (1.5 if "money=1.5" in text else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "fixed",
        "fixed:two",
        "fixed:-1",
        "fixed:1:2",
        "fixed:1:depth=2",
        "fixed:1:width=0",
        "fixed:width=2:1",
        "fixed:1:width=2:width=3",
        "none:width=2",
        "threshold:2",
        "threshold:2:1.5",
        "threshold:1.5:0.5",
        "expected:0.5",
        "expected:value_of_second=much",
        "expected:prior=0.5",
        "fixed:1:effects=irreversible",
        "fixed:1:slots=2.5",
        "fixed:1:money=-1",
    ],
)
def test_policies_that_make_no_sense_are_refused(text: str, tool: Tool, timed: str) -> None:
    """The error says what can be written."""
    with pytest.raises(InvalidSettingError):
        parse_policy(text)
    assert "is not valid" in tool.error("replay", timed, "one", "--policy", text)


def test_predictors_can_be_written_down() -> None:
    """Every word of the help makes a predictor."""
    recording = Recording(())
    words = "last,majority,markov,markov:3,arguments,trace,trace:2,twobit,gshare,perceptron,tage,oracle,adversary"
    for text in [*words.split(","), "flaky:0.5", "flaky:1:7", "constant:1", 'constant:{"a":[1]}']:
        predictor = parse_predictor(text)(recording)
        assert predictor is not None, text
        predictor.predict(Call("m:f", ()))
    assert parse_predictor("none")(recording) is None
    makers = parse_predictors(["last", "m:f=markov:1"])
    assert list(makers) == ["*", "m:f"]
    assert isinstance(makers["*"](recording), LastValue)
    assert list(parse_predictors(['constant:"a=b"'])) == ["*"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "best",
        "markov:x",
        "markov:-1",
        "last:1",
        "trace:-1",
        "flaky",
        "flaky:2",
        "flaky:0.5:1:2",
        "constant:{",
        "constant:",
    ],
)
def test_predictors_that_make_no_sense_are_refused(text: str) -> None:
    """Before any run is looked at."""
    with pytest.raises(InvalidSettingError):
        parse_predictor(text)


def test_what_is_given_twice_or_is_no_number_is_refused(tool: Tool, timed: str) -> None:
    """Prices, limits and predictors by name."""
    assert parse_assignments("money", ["a:b=0.5", "*=1"], float) == {"a:b": 0.5, "*": 1.0}
    for texts in (["a"], ["a=x"], ["a=-1"], ["a=1", "a=2"], ["=1"]):
        with pytest.raises(InvalidSettingError):
            parse_assignments("money", texts, float)
    with pytest.raises(InvalidSettingError):
        parse_predictors(["last", "majority"])
    assert "folow" in tool.error("replay", timed, "one", "--predictor", "folow=last")
    assert "api=1.5" in tool.error("replay", timed, "one", "--limit", "api=1.5")


# ------------------------------------------------------------------------------------------------- going on and sorting


def test_a_fork_goes_on_from_an_earlier_version(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """It has its own name, its parent is listed, and resuming it runs the rest."""
    make(counting, 3, run_id="one")
    told_so = tool.error("fork", path, "one", "2")
    assert "effects" in told_so
    found = tool.json("fork", path, "one", "2", "--effects", "resend", "--run-id", "two")
    assert found == {"run": "two", "parent": "one", "version": 2}
    assert "two" in tool.json("runs", path)["runs"][1]["run"]
    assert "one at 2" in tool.text("runs", path)
    result = tool.json("resume", path, "two")
    assert (result["run"], result["value"], result["mode"]) == ("two", {"number": 3}, "exact")
    assert result["report"]["attempts"] == 2
    assert tool.json("replay", path, "two")["results"][0]["complete"]
    assert tool.text("fork", path, "one", "1", "--effects", "replay").endswith("`specflow resume` goes on with it\n")
    assert "version 99" in tool.error("fork", path, "one", "99")
    assert "run 'two' exists" in tool.error("fork", path, "one", "1", "--effects", "replay", "--run-id", "two")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_run_that_has_not_ended_is_resumed(tool: Tool, path: str, backend: str) -> None:
    """A run that stopped in the middle goes on, on either event loop, and prints its value."""
    store = SQLiteStore(path)
    simulate(counting, 3, policy=Fixed(0), store=store, run_id="one", crash_after=4)
    assert store.get_run("one").status is RunStatus.RUNNING
    store.close()
    words = ("resume", path, "one", "--backend", backend, "--policy", "fixed:2", "--take-over")
    assert tool.json(*words)["value"] == {"number": 3}
    assert tool.text(*words).startswith('{"number": 3}\n')  # an ended run gives its recorded result


def test_what_a_program_raises_is_told_as_its_error(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """It is the program that failed, not the command."""
    with pytest.raises(ValueError, match="negative"):
        make(counting, 1, start=-5, run_id="one")
    assert "the program of run one raised ValueError: negative" in tool.error("resume", path, "one")


def test_unknown_effects_are_resolved(tool: Tool, path: str) -> None:
    """After a crash within a step that cannot be repeated, a person says what became of it."""

    def crashed(run_id: str) -> str:
        store = SQLiteStore(path)
        number = 1
        while True:  # the point at which the outcome is unknown: asked to stop later and later
            simulate(paying, 7, policy=Fixed(0), store=store, run_id=f"{run_id}{number}", crash_after=number)
            effects = store.effects(f"{run_id}{number}")
            if effects:
                break
            number += 1
        store.close()
        return f"{run_id}{number}"

    one, two = crashed("one"), crashed("two")
    words = ("--program", f"{HERE}:paying", "--take-over")
    message = tool.error("resume", path, one, *words)
    (row,) = tool.json("show", path, one, "--effects")["effects"]
    assert row["status"] == "unknown"
    assert row["key"] in message
    assert "one answer for each key" in tool.error("resume", path, one, *words, "--sent", "x")
    assert "JSON" in tool.error("resume", path, one, *words, "--sent", "x={")
    assert tool.json("resume", path, one, *words, "--sent", f'{row["key"]}="by hand"')["value"] == "by hand"
    tool.error("resume", path, two, *words)
    (row,) = tool.json("show", path, two, "--effects")["effects"]
    assert tool.json("resume", path, two, *words, "--not-sent", row["key"])["value"] == "paid 7"


def test_what_an_effect_wrote_is_said_with_its_result(tool: Tool, path: str) -> None:
    """A step that declares a State is not resolved without its changes; --wrote gives them, as values by key."""
    for number in range(1, 20):
        store = SQLiteStore(path)
        simulate(booking, 7, policy=Fixed(0), store=store, run_id=f"run{number}", crash_after=number)
        effects = store.effects(f"run{number}")
        store.close()
        if effects:
            break
    words = ("resume", path, f"run{number}", "--program", f"{HERE}:booking", "--take-over")
    tool.error(*words)
    key = effects[0].key
    assert "writes={}" in tool.error(*words, "--sent", f'{key}="by hand"')
    for wrong in ("x={}", f"{key}=7", key):
        assert "--wrote" in tool.error(*words, "--sent", f'{key}="by hand"', "--wrote", wrong)
    assert "once for a key" in tool.error(*words, "--not-sent", key, "--wrote", f"{key}={{}}")
    found = tool.json(*words, "--sent", f'{key}="by hand"', "--wrote", f'{key}={{"paid": 7}}')
    assert found["value"] == ["by hand", 7]


@step
async def book(amount: int, state: State = given) -> str:
    """Cannot be repeated, and writes the state."""
    state["paid"] = amount
    return f"booked {amount}"


@workflow
async def booking(ctx: Context, amount: int) -> Any:
    """One effect."""
    return [await ctx.call(book, amount), ctx.state.get("paid")]


@step
async def pay(amount: int) -> str:
    """Cannot be repeated."""
    return f"paid {amount}"


@workflow
async def paying(ctx: Context, amount: int) -> str:
    """One payment."""
    return await ctx.call(pay, amount)


def test_garbage_is_collected_and_what_is_left_is_shown(tool: Tool, path: str, make: Callable[..., Any]) -> None:
    """Of an ended run the last entry and the last state stay."""
    make(counting, 3, run_id="one")
    make(counting, 2, run_id="two")
    found = tool.json("gc", path, "one")
    assert list(found["dropped"]) == ["one"]
    assert found["total"] > 0
    assert "dropped" in tool.text("gc", path)
    shown = tool.json("show", path, "one", "--state")
    assert [entry["version"] for entry in shown["entries"]] == [5]
    assert shown["state"] == {"number": 3}
    assert "(4 of 5 entries were collected)" in tool.text("show", path, "one")
    assert tool.json("stats", path)["steps"] == []
    assert "collected" in tool.error("replay", path, "one")


# --------------------------------------------------------------------------------------------------- testing, drawing


def test_synctest_says_what_it_found_by_exit_code(tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for nothing, 1 for findings; effects need a stub or permission."""
    target = f"{HERE}:counting"
    words = ("synctest", target, "--args", "[3]", "--rounds", "3", "--seed", "5")
    assert "would change the outside world" in tool.error(*words)
    found = tool.json(*words, "--allow-effects")
    assert (found["ok"], found["calls"], found["findings"], found["notes"]) == (True, 4, [], [])
    assert tool.json(*words, "--stub", f"announce={HERE}:told", "--backend", "trio")["ok"]
    assert tool.json("synctest", target, "--args", '{"length": 1, "start": 5}', "--rounds", "0", "--allow-effects")[
        "ok"
    ]
    assert tool.json("synctest", f"{HERE}:plain_chain", "--args", "2", "--rounds", "0")["calls"] == 2
    assert "nothing found" in tool.text("synctest", f"{HERE}:routing", "--args", '{"ticket": "abc"}')
    found = tool.json("synctest", f"{HERE}:shared", "--rounds", "0", code=1)
    assert [(one["cause"], one["step"], one["position"]) for one in found["findings"]] == [
        ("mutated input", spoil.name, "0")
    ]
    assert main(["synctest", f"{HERE}:shared", "--rounds", "0"]) == 1
    out, err = capsys.readouterr()
    assert (err, "position 0" in out) == ("", True)


@dataclasses.dataclass
class Item:
    """What a typed program takes."""

    name: str
    size: tuple[int, int]


@workflow
async def typed(ctx: Context, item: Item, day: date, anything: Any = None, *more: int, **named: Opaque) -> int:
    """Needs more than JSON has."""
    assert (type(item), type(item.size), type(day)) == (Item, tuple, date)
    return await ctx.call(follow, sum(item.size))


class Opaque:
    """Something that JSON cannot be made into."""


def test_arguments_are_made_what_the_program_declares(tool: Tool) -> None:
    """Dataclasses, tuples and dates from JSON; a value that does not fit is named."""
    item = {"name": "a", "size": [1, 2]}
    words = ("synctest", f"{HERE}:typed", "--rounds", "0", "--args")
    assert tool.json(*words, json.dumps([item, "2024-02-29", {"x": 1}, 7]))["ok"]
    assert tool.json(*words, json.dumps({"item": item, "day": "2024-02-29", "other": 1}))["ok"]
    assert "item.size.1 is not what the program declares" in tool.error(*words, '[{"name": "a", "size": [1, "x"]}, 1]')
    assert "day is not what" in tool.error(*words, json.dumps({"item": item, "day": "yesterday"}))
    assert "ticket is not what" in tool.error("synctest", f"{HERE}:routing", "--args", '{"ticket": 5}')


def test_programs_that_cannot_be_tested_are_told(tool: Tool) -> None:
    """Wrong names, wrong kinds and wrong arguments."""
    assert "write module:name" in tool.error("synctest", "nothing")
    assert "cannot be loaded" in tool.error("synctest", "no.such.module:program")
    assert "has no nothing" in tool.error("synctest", f"{HERE}:nothing")
    assert "not a @workflow or a Pipeline" in tool.error("synctest", f"{HERE}:follow")
    assert "cannot be called like this" in tool.error("synctest", f"{HERE}:counting")
    assert "args='[1'" in tool.error("synctest", f"{HERE}:counting", "--args", "[1")
    assert "rounds=-1" in tool.error("synctest", f"{HERE}:plain_chain", "--args", "[1]", "--rounds", "-1")
    assert "STEP=MODULE:FUNCTION" in tool.error("synctest", f"{HERE}:counting", "--args", "[1]", "--stub", "announce")
    assert "not a function" in tool.error("synctest", f"{HERE}:counting", "--args", "[1]", "--stub", f"a={HERE}:HERE")


def test_a_pipeline_is_drawn(tool: Tool) -> None:
    """As Mermaid text, or with its steps and what they read."""
    assert tool.text("draw", f"{HERE}:routing").startswith("flowchart LR\n")
    found = tool.json("draw", f"{HERE}:routing")
    assert (found["pipeline"], found["inputs"], found["output"]) == (f"{HERE}:routing", ["ticket"], "answer")
    assert found["steps"][1] == {"name": "answer", "effect": "pure", "reads": ["ticket", "route"]}
    assert "not a Pipeline" in tool.error("draw", f"{HERE}:counting")


# ----------------------------------------------------------------------------------------------------------- bad input


def test_stores_that_cannot_be_used_are_told_and_not_made(tool: Tool, tmp_path: Path, path: str) -> None:
    """A missing file stays missing; a folder and a file of another kind are refused; so is an unknown run."""
    for words in (("runs",), ("show", "x"), ("stats",), ("gc",), ("replay", "x"), ("resume", "x"), ("fork", "x", "1")):
        assert "there is no such file" in tool.error(words[0], path, *words[1:])
    assert not Path(path).exists()
    assert "there is no such file" in tool.error("runs", str(tmp_path))
    other = tmp_path / "notes.txt"
    other.write_text("These are notes, not a store. " * 100)
    assert "cannot be used" in tool.error("runs", str(other))
    SQLiteStore(path).close()
    for words in (("show", "x"), ("stats", "x"), ("gc", "x"), ("replay", "x"), ("resume", "x"), ("fork", "x", "1")):
        assert "no run 'x'" in tool.error(words[0], path, *words[1:])


def test_command_lines_that_cannot_be_read_exit_with_two(tool: Tool) -> None:
    """Unknown commands and options, missing and malformed words."""
    for words in ([], ["fly"], ["runs"], ["show", "x.db"], ["fork", "x.db", "r", "two"], ["runs", "x.db", "--fast"]):
        assert "usage: specflow" in tool.usage(*words)
    assert "invalid choice" in tool.usage("fork", "x.db", "r", "1", "--effects", "maybe")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is described."""
    for words in (["--help"], ["replay", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as exit_of:
            main(words)
        assert exit_of.value.code == 0
    out = capsys.readouterr().out
    names = ("synctest", "runs", "show", "stats", "replay", "resume", "fork", "gc", "draw")
    assert all(name in out for name in names)


def test_an_interruption_ends_with_130(tool: Tool, tmp_path: Path) -> None:
    """As shells have it, and without a traceback."""
    (tmp_path / "interrupted_program.py").write_text("raise KeyboardInterrupt\n")
    with chdir(tmp_path):
        assert main(["draw", "interrupted_program:x"]) == 130


def test_tables_line_up() -> None:
    """Columns are as wide as their cells; numbers stand to the right; long cells are cut."""
    text = table(("name", "number"), [("a", 1), ("bcdef", 23), ("x" * 100, "-")])
    lines = text.splitlines()
    assert lines[0] == "name" + " " * 58 + "number"
    assert lines[2].endswith("     1")
    assert lines[3].endswith("    23")
    assert lines[4].startswith("x" * 57 + "...")
    assert table(("only",), []) == "only\n----"


# ------------------------------------------------------------------------------------------------------ as a subprocess


PROGRAM = """
import dataclasses, os, sys
import anyio
from specflow import Effect, run, step, workflow
from specflow.stores import SQLiteStore

@dataclasses.dataclass
class Order:
    number: int

@step(effect=Effect.PURE)
async def price(order: Order) -> Order:
    return Order(order.number * 2)

@workflow
async def ordering(ctx, numbers):
    orders = []
    for number in numbers:
        orders.append(await ctx.call(price, Order(number)))
        if number == 3 and os.path.exists("crash"):
            os._exit(9)
    return orders

async def main():
    await run(ordering, [1, 2, 3, 4], store=SQLiteStore("runs.db"), run_id="one")

if __name__ == "__main__":
    import shop
    anyio.run(shop.main)
"""


def test_a_killed_run_is_looked_at_resumed_and_tested_from_the_shell(tmp_path: Path) -> None:
    """Programs are found in the current folder; looking at values needs none of their classes."""
    (tmp_path / "shop.py").write_text(PROGRAM)
    (tmp_path / "crash").touch()
    assert spawn(tmp_path, "shop").returncode == 9
    listed = spawn(tmp_path, "specflow", "runs", "runs.db", "--json")
    assert (listed.returncode, listed.stderr) == (0, "")
    (found,) = json.loads(listed.stdout)["runs"]
    assert (found["run"], found["program"], found["status"], found["version"]) == ("one", "shop:ordering", "running", 2)
    (tmp_path / "shop.py").rename(tmp_path / "gone.txt")
    shown = spawn(tmp_path, "specflow", "show", "runs.db", "one")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "shop:Order" in shown.stdout
    failed = spawn(tmp_path, "specflow", "resume", "runs.db", "one", "--json")
    assert failed.returncode == 1
    assert "cannot be loaded" in json.loads(failed.stdout)["error"]["message"]
    assert "Traceback" not in failed.stderr
    (tmp_path / "gone.txt").rename(tmp_path / "shop.py")
    (tmp_path / "crash").unlink()
    resumed = spawn(tmp_path, "specflow", "resume", "runs.db", "one", "--json")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert result["report"]["attempts"] == 2
    assert len(result["value"]) == 4
    tested = spawn(tmp_path, "specflow", "synctest", "shop:ordering", "--args", "[[1, 2]]", "--rounds", "2")
    assert (tested.returncode, tested.stderr) == (0, "")
    assert "nothing found" in tested.stdout


def test_errors_from_the_shell_are_one_line(tmp_path: Path) -> None:
    """A module that cannot be imported, and a usage error."""
    (tmp_path / "broken.py").write_text("this is no Python\n")
    failed = spawn(tmp_path, "specflow", "draw", "broken:pipeline")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("specflow: 'broken:pipeline' cannot be loaded: importing it raised SyntaxError")
    assert failed.stderr.count("\n") == 1
    assert spawn(tmp_path, "specflow", "fly").returncode == 2


def test_a_reader_that_goes_away_is_no_accident(tmp_path: Path, path: str, make: Callable[..., Any]) -> None:
    """``specflow show ... | head``: no traceback, neither from the command nor from the interpreter as it ends."""
    make(plain_chain, 3, run_id="one")
    process = subprocess.Popen(
        [sys.executable, "-m", "specflow", "show", path, "one"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything is written: the interpreter is still starting
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == b""


def test_the_front_door_does_not_load_the_command_line() -> None:
    """``import specflow`` stays light."""
    names = "('argparse', 'specflow.cli', 'specflow.synctest', 'specflow.whatif')"
    code = f"import sys, specflow; print([name for name in sys.modules if name in {names}])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
