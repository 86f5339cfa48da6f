"""What a step costs when the step itself does nothing: specflow beside other workflow engines.

    python benchmarks/workflow_overhead.py --json benchmarks/results/workflow_overhead.json

Two programs: a loop that counts to N, and a graph of three parallel branches. Engines that are not installed are named
and left out. All are measured in one process, in turns; the median of the rounds is given, in microseconds of
wall-clock time per step.

For ours the number of function calls per step is given as well, those written in C included: it depends neither on the
machine nor on what else it does.

Nothing of this measures what the engines are for; it measures what they add to each step.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specflow import Context, Effect, Fixed, run, step, workflow
from specflow.stores import MemoryStore, SQLiteStore

PEERS = {
    "langgraph": "langgraph",
    "langgraph.checkpoint.sqlite": "langgraph-checkpoint-sqlite",
    "pydantic_graph": "pydantic-graph",
    "burr": "apache-burr",
    "dbos": "dbos",
    "prefect": "prefect",
}

Program = Callable[[int], Awaitable[int]]
"""Runs a program of that many steps, and returns how many it ran."""


@dataclass(frozen=True)
class Engine:
    """One row of the table."""

    name: str
    store: str
    """``memory`` or ``sqlite``: what is written per step."""
    loop: Program
    branches: Program | None = None
    most_steps: int = 1000
    """Fewer steps are timed for engines that are very slow."""
    is_ours: bool = False


# --------------------------------------------------------------------------------------------------------------- ours


@step(effect=Effect.PURE)
async def add_one(value: int) -> int:
    """The smallest step."""
    return value + 1


@workflow
async def count_to(ctx: Context, limit: int) -> int:
    """A loop of steps."""
    value = 0
    while value < limit:
        value = await ctx.call(add_one, value)
    return value


@workflow
async def three_at_a_time(ctx: Context, rounds: int) -> int:
    """Parallel branches."""
    total = 0
    for index in range(rounds):
        total += len(await ctx.gather(*[ctx.call(add_one, index + branch) for branch in range(3)]))
    return total


def ours(name: str, kind: str, make: Callable[[], Any]) -> Engine:
    """Ours, on one of its stores."""

    async def loop(steps: int) -> int:
        return (await run(count_to, steps, store=make(), policy=Fixed(0))).value

    async def branches(steps: int) -> int:
        return (await run(three_at_a_time, steps // 3, store=make(), policy=Fixed(0))).value

    return Engine(name, kind, loop, branches, is_ours=True)


def fresh_file() -> Path:
    """A path for a database, in a folder that goes with the process."""
    return Path(tempfile.mkdtemp(dir=SCRATCH.name)) / "runs.db"


SCRATCH = tempfile.TemporaryDirectory()


def own_engines() -> list[Engine]:
    """Ours, in memory and on SQLite."""
    return [
        ours("specflow, memory", "memory", MemoryStore),
        ours("specflow, SQLite NORMAL", "sqlite", lambda: SQLiteStore(fresh_file())),
        ours("specflow, SQLite FULL", "sqlite", lambda: SQLiteStore(fresh_file(), synchronous="FULL")),
    ]


# -------------------------------------------------------------------------------------------------------------- peers


def langgraph_engines() -> list[Engine]:
    """LangGraph without a checkpointer, with its memory saver, and with its SQLite saver."""
    from langgraph.checkpoint.memory import InMemorySaver  # noqa: PLC0415 - optional
    from langgraph.graph import END, START, StateGraph  # noqa: PLC0415

    def loop_graph(saver: Any) -> Any:
        graph = StateGraph(dict[str, int])  # type: ignore[type-var,unused-ignore]
        graph.add_node("add", lambda state: {"value": state["value"] + 1, "limit": state["limit"]})
        graph.add_edge(START, "add")
        graph.add_conditional_edges("add", lambda state: "add" if state["value"] < state["limit"] else END)
        return graph.compile(checkpointer=saver)

    def engine(name: str, kind: str, make: Callable[[], Any]) -> Engine:
        async def loop(steps: int) -> int:
            saver = make()
            config: Any = {"recursion_limit": steps + 10, "configurable": {"thread_id": "one"}}
            result = loop_graph(saver).invoke({"value": 0, "limit": steps}, config)
            return int(result["value"])

        return Engine(name, kind, loop, most_steps=200)

    engines = [
        engine("LangGraph, no checkpointer", "none", lambda: None),
        engine("LangGraph, memory", "memory", InMemorySaver),
    ]
    if importlib.util.find_spec("langgraph.checkpoint.sqlite") is not None:
        import sqlite3  # noqa: PLC0415

        from langgraph.checkpoint.sqlite import SqliteSaver  # noqa: PLC0415

        engines.append(
            engine(
                "LangGraph, SQLite",
                "sqlite",
                lambda: SqliteSaver(sqlite3.connect(fresh_file(), check_same_thread=False)),
            )
        )
    return engines


def pydantic_graph_engines() -> list[Engine]:
    """pydantic-graph: a step and a decision whether to go round again."""
    from pydantic_graph import GraphBuilder, StepContext  # noqa: PLC0415 - optional

    async def add(ctx: Any) -> int:
        return int(ctx.inputs) + 1

    add.__annotations__.update({"ctx": StepContext[None, None, int], "return": int})

    async def loop(steps: int) -> int:
        builder = GraphBuilder(input_type=int, output_type=int)
        one = builder.step(add)
        more = builder.decision()
        more = more.branch(builder.match(int, matches=lambda value: value >= steps).to(builder.end_node))
        more = more.branch(builder.match(int).to(one))
        builder.add(builder.edge_from(builder.start_node).to(one), builder.edge_from(one).to(more))
        return int(await builder.build().run(inputs=0))

    return [Engine("pydantic-graph", "none", loop)]


def burr_engines() -> list[Engine]:
    """Burr: actions over an immutable state."""
    from burr.core import ApplicationBuilder, State, action, expr  # noqa: PLC0415 - optional

    @action(reads=["value"], writes=["value"])
    def add(state: State) -> State:
        return state.update(value=state["value"] + 1)

    @action(reads=["value"], writes=[])
    def done(state: State) -> State:
        return state

    async def loop(steps: int) -> int:
        application = (
            ApplicationBuilder()
            .with_actions(add=add, done=done)
            .with_transitions(("add", "add", expr(f"value < {steps}")), ("add", "done"))
            .with_state(value=0)
            .with_entrypoint("add")
            .build()
        )
        _action, _result, state = application.run(halt_after=["done"])
        return int(state["value"])

    return [Engine("Burr", "none", loop)]


def dbos_engines() -> list[Engine]:
    """DBOS on SQLite."""
    from dbos import DBOS  # noqa: PLC0415 - optional

    DBOS(
        config={
            "name": "overhead",
            "system_database_url": f"sqlite:///{fresh_file()}",
            "run_admin_server": False,
            "log_level": "ERROR",
        }
    )

    @DBOS.step()
    async def add(value: int) -> int:
        return value + 1

    @DBOS.workflow()
    async def count(limit: int) -> int:
        value = 0
        while value < limit:
            value = await add(value)
        return value

    DBOS.launch()

    async def loop(steps: int) -> int:
        return int(await count(steps))

    return [Engine("DBOS, SQLite", "sqlite", loop, most_steps=100)]


def prefect_engines() -> list[Engine]:
    """Prefect with its ephemeral server on SQLite."""
    from prefect import flow, task  # noqa: PLC0415 - optional

    @task
    async def add(value: int) -> int:
        return value + 1

    @flow(log_prints=False)
    async def count(limit: int) -> int:
        value = 0
        while value < limit:
            value = await add(value)
        return value

    async def loop(steps: int) -> int:
        return int(await count(steps))

    return [Engine("Prefect, ephemeral server", "sqlite", loop, most_steps=20)]


MAKERS: dict[str, Callable[[], list[Engine]]] = {
    "langgraph": langgraph_engines,
    "pydantic_graph": pydantic_graph_engines,
    "burr": burr_engines,
    "dbos": dbos_engines,
    "prefect": prefect_engines,
}


# ------------------------------------------------------------------------------------------------------------ measuring


async def time_once(program: Program, steps: int) -> float:
    """Microseconds per step of one run."""
    started = time.perf_counter()
    ran = await program(steps)
    seconds = time.perf_counter() - started
    assert ran == steps, f"{ran} steps instead of {steps}"
    return seconds / steps * 1e6


async def count_calls(program: Program, few: int = 99, many: int = 297) -> float:
    """Function calls per step, without those that a run takes whatever its length."""
    calls = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    counts = []
    await program(few)  # what is imported or remembered the first time
    for steps in (few, many):
        before = calls
        sys.setprofile(note)
        try:
            await program(steps)
        finally:
            sys.setprofile(None)
        counts.append(calls - before)
    return (counts[1] - counts[0]) / (many - few)


async def measure(steps: int, rounds: int, only: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """All engines in turns."""
    engines = own_engines()
    missing: list[str] = []
    for module, make in MAKERS.items():
        if only and module not in only:
            continue
        if importlib.util.find_spec(module) is None:
            missing.append(PEERS[module])
            continue
        engines += make()
    shapes: list[tuple[str, Engine, Program]] = [("loop", engine, engine.loop) for engine in engines]
    shapes += [("3 branches", engine, engine.branches) for engine in engines if engine.branches is not None]
    times: dict[int, list[float]] = {index: [] for index in range(len(shapes))}
    for round_number in range(rounds + 1):
        for index, (_shape, engine, program) in enumerate(shapes):
            taken = await time_once(program, min(steps, engine.most_steps) // 3 * 3)
            if round_number:  # the first is for warming up
                times[index].append(taken)
    rows = [
        {
            "program": shape,
            "engine": engine.name,
            "store": engine.store,
            "microseconds_per_step": statistics.median(times[index]),
            "lowest": min(times[index]),
            "highest": max(times[index]),
            "steps": min(steps, engine.most_steps) // 3 * 3,
            "calls_per_step": await count_calls(program) if engine.is_ours else None,
        }
        for index, (shape, engine, program) in enumerate(shapes)
    ]
    return rows, missing


def provenance() -> dict[str, Any]:
    """Machine, versions and date."""
    versions: dict[str, str | None] = {}
    for name in ("anyio", "immutables", *PEERS.values()):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": versions,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=999)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], choices=list(MAKERS), help="these peers only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # other people's deprecations
    logging.disable(logging.WARNING)
    info = provenance()
    rows, missing = asyncio.run(measure(options.steps, options.rounds, options.only))
    print(f"{'program':12}{'engine':32}{'us/step':>10}{'lowest':>10}{'highest':>10}{'steps':>8}{'calls':>8}")
    for row in rows:
        print(
            f"{row['program']:12}{row['engine']:32}{row['microseconds_per_step']:10.1f}"
            f"{row['lowest']:10.1f}{row['highest']:10.1f}{row['steps']:8}"
            + (f"{row['calls_per_step']:8.0f}" if row["calls_per_step"] is not None else "")
        )
    for name in missing:
        print(f"not installed, left out: {name}")
    if options.json:
        options.json.write_text(json.dumps({"provenance": info, "rows": rows, "missing": missing}, indent=1) + "\n")


if __name__ == "__main__":
    main()
