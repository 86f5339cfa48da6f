"""Faults that users of other workflow engines reported, tried here.

Each test names where the fault was reported; all are public issues. Those about crashes, owners and cancellation are in
the files about these.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from specflow.definitions import Retry, Workflow, step, workflow
from specflow.effects import Effect
from specflow.errors import StateConflictError, VersionGoneError
from specflow.graph import Pipeline
from specflow.history import Commit, EntryKind, Lease
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import CommittedEvent, RetractedEvent, SpeculativeEvent, fork, resume, run
from specflow.state import State
from specflow.stores import MemoryStore, SQLiteStore
from tests.specflow.runtime.support import (
    DyingStore,
    Gate,
    Guesses,
    PowerCutError,
    WrappedStore,
    has_entry,
    history,
    settle,
    values_of,
)

pytestmark = pytest.mark.anyio


@step(effect=Effect.PURE)
async def last(value: Any) -> Any:
    """The step at whose commit a run dies in tests of recovery."""
    return value


# ------------------------------------------------------------------------------------------------- parallel branches


@step(effect=Effect.READONLY)
async def put_all(values: dict[str, int], state: State) -> None:
    """Write the whole state, as programs do that return it."""
    for key, value in values.items():
        state[key] = value


@pytest.mark.parametrize("nested", [True, False])
async def test_branches_that_return_the_whole_state_merge(nested: bool) -> None:  # noqa: FBT001
    """Two branches write all keys, each with its own one changed: both changes stay (langgraph #6446)."""
    store = MemoryStore()

    @workflow
    async def branch(ctx: Context, own: str) -> None:
        values = dict(ctx.state.scan())
        for key, value in {**values, own: values[own] + 1}.items():
            ctx.state[key] = value

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.call(put_all, {"a": 1, "b": 1})
        if nested:
            await ctx.gather(ctx.call(branch, "a"), ctx.call(branch, "b"))
        else:
            await ctx.gather(ctx.call(put_all, {"a": 2, "b": 1}), ctx.call(put_all, {"a": 1, "b": 2}))
        return dict(ctx.state.scan())

    assert (await run(program, store=store, run_id="r")).value == {"a": 2, "b": 2}
    assert values_of(store, "r") == {"a": 2, "b": 2}


async def test_branches_that_change_one_key_are_a_conflict_with_both_names() -> None:
    """A true conflict names the key and both writers, and can be handled (langgraph #6446)."""

    @step(effect=Effect.READONLY)
    async def other(state: State) -> None:
        state["a"] = 3

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.call(put_all, {"a": 1})
        try:
            await ctx.gather(ctx.call(put_all, {"a": 2}), ctx.call(other))
        except StateConflictError as error:
            return error.key, error.writers, ctx.state["a"]
        return None

    key, writers, value = (await run(program)).value
    assert key == "a"
    assert "put_all" in writers[0]
    assert "other" in writers[1]
    assert value == 1


async def test_branches_that_append_merge_in_program_order() -> None:
    """Appending, adding and joining sets merge, in the order of the program, whoever is quicker (langgraph #6446)."""
    gates = [Gate() for _ in range(3)]

    @step(effect=Effect.READONLY)
    async def work(index: int, state: State) -> None:
        state.append("log", index)
        await gates[index].pass_through()
        state.append("log", -index)
        state.add("count", 1)
        state.union("seen", [index])

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.map(work, range(3))
        return ctx.state["log"], ctx.state["count"], ctx.state["seen"]

    results: list[Any] = []

    async def drive() -> None:
        results.append((await run(program)).value)

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        for gate in reversed(gates):
            await gate.reached.wait()
            gate.open()
            await settle()
    assert results == [([0, 0, 1, -1, 2, -2], 3, {0, 1, 2})]


async def test_a_fast_branch_does_not_wait_for_its_slow_sibling() -> None:
    """What follows a fast branch starts while a slow one is at work: no barrier (langgraph #6320)."""
    slow, after = Gate(), anyio.Event()
    pipeline = Pipeline("race")

    @pipeline.step(effect=Effect.READONLY)
    async def fast(value: int) -> int:
        return value + 1

    @pipeline.step(effect=Effect.READONLY)
    async def sluggish(value: int) -> int:
        await slow.pass_through()
        return value + 2

    @pipeline.step(effect=Effect.READONLY)
    async def follow(fast: int) -> int:
        after.set()
        return fast * 10

    @pipeline.step(effect=Effect.READONLY)
    async def both(follow: int, sluggish: int) -> int:
        return follow + sluggish

    results: list[Any] = []

    async def drive() -> None:
        results.append(await run(pipeline, value=1))

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await slow.reached.wait()
        await after.wait()
        slow.open()
    assert "23" in str(results[0].value)


async def test_an_exception_that_a_branch_handles_stays_handled_beside_others() -> None:
    """A branch with a fallback does the same beside other branches as it does alone (langgraph #8277)."""
    calls: Counter[str] = Counter()

    @step(effect=Effect.READONLY)
    async def fail() -> str:
        calls["fail"] += 1
        raise ConnectionError("down")

    @step(effect=Effect.READONLY)
    async def fallback() -> str:
        calls["fallback"] += 1
        return "fallback"

    @step(effect=Effect.READONLY)
    async def fine() -> str:
        return "fine"

    @workflow
    async def guarded(ctx: Context) -> str:
        try:
            return await ctx.call(fail)
        except ConnectionError:
            return await ctx.call(fallback)

    @workflow
    async def program(ctx: Context) -> Any:
        alone = await ctx.call(guarded)
        return alone, await ctx.gather(ctx.call(fine), ctx.call(guarded), ctx.call(fine))

    assert (await run(program)).value == ("fallback", ["fine", "fallback", "fine"])
    assert calls == {"fail": 2, "fallback": 2}


async def test_the_first_exception_in_branch_order_is_raised_and_none_is_lost() -> None:
    """Whichever branch fails first in time, the program sees the first in its own order; all run to their end."""
    gate = Gate()
    ended: list[int] = []

    @step(effect=Effect.READONLY)
    async def work(index: int) -> int:
        if index == 0:
            await gate.pass_through()
        if index == 2:
            gate.open()
        ended.append(index)
        if index != 1:
            raise ValueError(f"branch {index}")
        return index

    @workflow
    async def program(ctx: Context) -> Any:
        try:
            await ctx.map(work, range(3))
        except ValueError as error:
            found = await ctx.gather(*[ctx.call(work, index) for index in range(3)], return_exceptions=True)
            return str(error), [str(item) for item in found]
        return None

    assert (await run(program)).value == ("branch 0", ["branch 0", "1", "branch 2"])
    assert sorted(ended) == [0, 0, 1, 1, 2, 2]


async def test_an_error_handler_runs_once_over_a_crash() -> None:
    """After a crash in the step that follows, the handler whose write was committed does not run again (#9002)."""
    store = MemoryStore()
    calls: Counter[str] = Counter()

    @step(effect=Effect.READONLY)
    async def fail() -> None:
        calls["fail"] += 1
        raise ConnectionError

    @step(effect=Effect.READONLY)
    async def handle(state: State) -> None:
        calls["handle"] += 1
        state.append("handled", calls["handle"])

    @workflow
    async def program(ctx: Context) -> Any:
        try:
            await ctx.call(fail)
        except ConnectionError:
            await ctx.call(handle)
        await ctx.call(last, 1)
        return ctx.state["handled"]

    with pytest.raises(PowerCutError):
        await run(program, store=DyingStore(has_entry("last"), inner=store), run_id="r")
    assert (await resume("r", store=store, program=program)).value == [1]
    assert calls == {"fail": 1, "handle": 1}


@pytest.mark.parametrize("effect", [Effect.IDEMPOTENT, Effect.IRREVERSIBLE])
async def test_only_the_branch_that_was_cut_off_runs_again(effect: Effect) -> None:
    """Three parallel steps, the middle one at work when the process dies: after it, 1, 2, 1 (agent-framework #2075)."""
    store = MemoryStore()
    calls: Counter[int] = Counter()
    gate = Gate()

    @step(effect=Effect.READONLY)
    async def middle(index: int) -> int:
        calls[index] += 1
        await gate.pass_through()
        return index

    @step(effect=effect)
    async def work(index: int) -> int:
        calls[index] += 1
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.gather(ctx.call(work, 0), ctx.call(middle, 1), ctx.call(work, 2))

    dying = DyingStore(has_entry("middle"), inner=store)

    async def drive() -> None:
        with pytest.raises(PowerCutError):
            await run(program, store=dying, run_id="r")

    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await gate.reached.wait()
        await settle()
        gate.open()
    assert (await resume("r", store=store, program=program)).value == [0, 1, 2]
    assert calls == {0: 1, 1: 2, 2: 1}


async def test_a_branch_that_fails_first_and_is_tried_again_does_not_repeat_its_siblings() -> None:
    """The same with a retry instead of a crash (agent-framework #2075)."""
    calls: Counter[int] = Counter()

    @step(retry=Retry(attempts=2, wait=0.0, on=(ConnectionError,), not_sent=True))
    async def work(index: int) -> int:
        calls[index] += 1
        if index == 1 and calls[index] == 1:
            raise ConnectionError
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(work, range(3))

    assert (await run(program)).value == [0, 1, 2]
    assert calls == {0: 1, 1: 2, 2: 1}


async def test_a_hundred_and_twenty_effects_happen_once_each() -> None:
    """Many undeclared steps under a limit run exactly once each (dask/distributed #847)."""
    calls: Counter[int] = Counter()

    @step(resource="workers")
    async def work(index: int) -> int:
        calls[index] += 1
        await anyio.lowlevel.checkpoint()
        return index

    @workflow
    async def program(ctx: Context) -> list[int]:
        return await ctx.map(work, range(120))

    assert (await run(program, limits={"workers": 6}, policy=Fixed(4, width=2))).value == list(range(120))
    assert set(calls.values()) == {1}


async def test_joins_wait_for_their_own_inputs() -> None:
    """A diamond of joins, each started exactly once with both of its inputs, in any order (pydantic-ai #3296)."""
    for seed in range(8):
        generator = random.Random(seed)
        waits = {name: generator.randrange(6) for name in ("left", "middle", "right", "first", "second")}
        starts: list[str] = []
        pipeline = Pipeline("diamond")

        async def work(name: str, starts: list[str] = starts, waits: dict[str, int] = waits) -> None:
            starts.append(name)
            for _ in range(waits.get(name, 0)):
                await anyio.lowlevel.checkpoint()

        @pipeline.step(effect=Effect.READONLY)
        async def left(value: int, work: Any = work) -> int:
            await _work("left")
            return value + 1

        @pipeline.step(effect=Effect.READONLY)
        async def middle(value: int) -> int:
            await _work("middle")
            return value + 2

        @pipeline.step(effect=Effect.READONLY)
        async def right(value: int) -> int:
            await _work("right")
            return value + 3

        @pipeline.step(effect=Effect.READONLY)
        async def first(left: int, middle: int) -> int:
            await _work("first")
            return left * middle

        @pipeline.step(effect=Effect.READONLY)
        async def second(middle: int, right: int) -> int:
            await _work("second")
            return middle * right

        @pipeline.step(effect=Effect.READONLY)
        async def whole(first: int, second: int) -> int:
            await _work("whole")
            return first + second

        _WORK[:] = [work]
        result = await run(pipeline, value=1)
        assert "18" in str(result.value)
        assert Counter(starts) == dict.fromkeys(("left", "middle", "right", "first", "second", "whole"), 1)


_WORK: list[Any] = []


async def _work(name: str) -> None:
    await _WORK[0](name)


async def test_every_snapshot_while_branches_are_at_work_is_a_serial_one() -> None:
    """Whenever the store is looked at while 8 branches write, it holds a state of the plain run (pydantic-ai #704)."""
    generator = random.Random(5)
    plain = MemoryStore()
    waits = [generator.randrange(5) for _ in range(8)]

    @step(effect=Effect.READONLY, predict=Guesses("x", "y"))
    async def look(index: int) -> str:
        for _ in range(waits[index]):
            await anyio.lowlevel.checkpoint()
        return "xyz"[index % 3]

    @step(effect=Effect.READONLY)
    async def note(index: int, text: str, state: State) -> None:
        state[f"{index}/{text}"] = state.get("base")
        state.append("log", text)

    @workflow
    async def branch(ctx: Context, index: int) -> None:
        await ctx.call(note, index, await ctx.call(look, index))
        ctx.state.add("count", index)

    @workflow
    async def program(ctx: Context) -> None:
        for base in range(3):
            ctx.state["base"] = base
            await ctx.map(branch, range(8))

    await run(program, store=plain, run_id="r", policy=Fixed(0))
    serial = [dict(plain.state("r", version)) for version in range(plain.get_run("r").head + 1)]
    assert len({str(sorted(state.items())) for state in serial}) > 3
    seen: list[tuple[int, dict[str, bytes]]] = []

    class Watched(WrappedStore):
        """Looks at the state after each commit."""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Commit and look."""
            head: int = self.inner.commit(lease, commit)
            seen.append((head, dict(self.inner.state("r"))))
            return head

    await run(program, store=Watched(), run_id="r", policy=Fixed(3, width=2))
    assert len(seen) > 3
    assert all(state == serial[head] for head, state in seen)
    assert seen[-1][0] == len(serial) - 1


# --------------------------------------------------------------------------------------------------- going back in time


async def test_going_back_into_a_nested_flow_finds_its_exact_state() -> None:
    """A fork before, inside and after a nested flow resumes there; an approval is asked again, not reused (#7038)."""
    store = MemoryStore()
    asked: list[str] = []
    answers = iter(["yes", "no", "no", "no", "no", "no"])

    @step
    async def approve(what: str) -> str:
        asked.append(what)
        return next(answers)

    @step(effect=Effect.READONLY)
    async def draft(text: str, state: State) -> str:
        state.append("drafts", text)
        return text

    @workflow
    async def nested(ctx: Context) -> str:
        text = await ctx.call(draft, "inner")
        answer = await ctx.call(approve, text)
        await ctx.call(draft, f"inner {answer}")
        return answer

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.call(draft, "outer")
        answer = await ctx.call(nested)
        await ctx.call(draft, f"outer {answer}")
        return answer, ctx.state["drafts"]

    original = (await run(program, store=store, run_id="r")).value
    assert original == ("yes", ["outer", "inner", "inner yes", "outer yes"])
    before = history(store, "r")
    for version in range(len(before) + 1):
        mode: Any = "resend" if version < 3 else None  # the approval is entry 3
        new = fork("r", version, store=store, effects=mode)
        assert values_of(store, new) == {key: value for key, value in _drafts(version).items() if value}
        count = len(asked)
        value = (await resume(new, store=store, program=program)).value
        again = version < 3
        assert len(asked) - count == again
        answer = "no" if again else "yes"
        assert value == (answer, ["outer", "inner", f"inner {answer}", f"outer {answer}"])
        assert history(store, new)[:version] == before[:version]
    assert history(store, "r") == before  # whoever went back has appended to a run of its own
    assert values_of(store, "r") == {"drafts": original[1]}


def _drafts(version: int) -> dict[str, list[str]]:
    return {"drafts": ["outer", "inner", "inner yes", "outer yes"][: version - (version >= 3) - (version >= 6)]}


async def test_what_a_program_holds_is_not_what_history_holds() -> None:
    """Values changed after they were stored, sent, read or returned change nothing on record (pydantic-ai #1684)."""
    store = MemoryStore()

    @step(effect=Effect.READONLY)
    async def change(items: list[Any], state: State) -> list[Any]:
        items.append("changed by the step")
        mine = state["kept"]
        mine.append("changed by the step")
        state["stepped"] = items
        items.append("later")
        return items

    @workflow
    async def program(ctx: Context) -> Any:
        items: list[Any] = ["one", ["deep"]]
        ctx.state["kept"] = items
        items[1].append("after put")
        result = await ctx.call(change, items)
        seen = list(items)
        result.append("changed by the program")
        read = ctx.state["kept"]
        read.append("changed by the program")
        ctx.emit(read)
        read.append("after emit")
        await ctx.call(last, read)
        read.append("after call")
        return seen, ctx.state["kept"], ctx.state["stepped"]

    events: list[Any] = []
    value = (await run(program, store=store, run_id="r", on_event=lambda event: events.append(event.value))).value
    assert value == (
        ["one", ["deep", "after put"]],
        ["one", ["deep"]],
        ["one", ["deep", "after put"], "changed by the step"],
    )
    assert events == [["one", ["deep"], "changed by the program"]]
    assert values_of(store, "r")["kept"] == ["one", ["deep"]]


async def test_a_world_that_falls_has_changed_nothing_of_its_parent() -> None:
    """A squashed branch that edits nested objects edits copies (strands-agents #2275)."""
    store = MemoryStore()

    @step(effect=Effect.READONLY, predict=Guesses("wrong"))
    async def ask(messages: list[dict[str, str]]) -> str:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        return "right"

    @step(effect=Effect.READONLY)
    async def use(messages: list[dict[str, str]], state: State) -> int:
        messages[-1]["content"] = "spoiled"
        shared = state["messages"]
        shared[-1]["content"] = "spoiled"
        return len(messages)

    @workflow
    async def program(ctx: Context, messages: list[dict[str, str]]) -> Any:
        ctx.state["messages"] = messages
        answer = await ctx.call(ask, messages)
        messages[-1]["content"] = answer
        await ctx.call(use, messages)
        return messages, ctx.state["messages"]

    original = [{"content": str(index)} for index in range(100)]
    value = (await run(program, original, store=store, run_id="r", policy=Fixed(3))).value
    assert original == [{"content": str(index)} for index in range(100)]
    assert value[0][:-1] == original[:-1]
    assert value[0][-1] == {"content": "right"}
    assert value[1] == original


async def test_what_is_saved_is_what_was_put_however_big() -> None:
    """A big value that is changed while the run goes on is stored whole, as it was when put (langgraph #4168)."""
    store = MemoryStore()
    torn: list[int] = []

    class Looking(WrappedStore):
        """Looks at what is being saved, and lets the program's object change meanwhile."""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Change the program's object, then commit."""
            for item in big:
                item.append(-1)
            head: int = self.inner.commit(lease, commit)
            kept = values_of(self.inner, "r").get("big", [])
            torn.extend(len(item) for item in kept if len(item) != 1)
            return head

    big = [[index] for index in range(2000)]

    @workflow
    async def program(ctx: Context) -> int:
        for item in big:
            del item[1:]
        ctx.state["big"] = big
        await ctx.call(last, 1)
        await ctx.call(last, 2)
        return len(ctx.state["big"])

    assert (await run(program, store=Looking(store), run_id="r")).value == 2000
    assert torn == []


async def test_appending_costs_the_same_however_much_is_there(tmp_path: Path) -> None:
    """The file grows by the same bytes for every appended item, and old versions can be dropped (langgraph #7714)."""
    path = tmp_path / "runs.db"
    store = SQLiteStore(path)
    sizes: list[int] = []

    def size() -> int:
        with store._transaction("BEGIN") as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (page,) = connection.execute("PRAGMA page_size").fetchone()
        return int(pages * page)

    @step(effect=Effect.PURE)
    async def work(index: int) -> int:
        return index

    @workflow
    async def program(ctx: Context) -> int:
        for index in range(1500):
            if index % 500 == 0:
                sizes.append(size())
            ctx.state.append("log", await ctx.call(work, index))
        sizes.append(size())
        await ctx.call(last, 1)
        return len(ctx.state["log"])

    assert (await run(program, store=store, run_id="r")).value == 1500
    growth = [later - earlier for earlier, later in pairwise(sizes)]
    assert growth[2] < 1.3 * growth[0]  # copying the list at every version would cost five times as much
    store.pin("r", 700)
    assert store.collect("r") >= 0
    assert len(values_of(store, "r")["log"]) == 1500
    new = fork("r", 700, store=store)
    assert len(values_of(store, new)["log"]) == 699
    with pytest.raises(VersionGoneError):
        store.state("r", 650)
    assert (await resume(new, store=store, program=program)).value == 1500
    store.close()


# --------------------------------------------------------------------------------------------------------------- stream


async def test_a_retried_step_says_things_once() -> None:
    """Three notes and then two failures: the stream and the state have what the last try said (dbos #770)."""
    store = MemoryStore()
    tries = 0

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, wait=0.0))
    async def work(state: State) -> str:
        nonlocal tries
        tries += 1
        for index in range(3):
            state.append("stream", f"{tries}.{index}")
        if tries < 3:
            raise ConnectionError
        return "done"

    @workflow
    async def program(ctx: Context) -> Any:
        await ctx.call(work)
        for text in ctx.state["stream"]:
            ctx.emit(text)
        await ctx.call(last, 1)
        return ctx.state["stream"]

    events: list[Any] = []
    result = await run(program, store=store, run_id="r", on_event=events.append)
    assert result.value == ["3.0", "3.1", "3.2"]
    assert events == [CommittedEvent(text) for text in ("3.0", "3.1", "3.2")]


@pytest.mark.parametrize("guesses", [(), ("right",), ("wrong",), ("wrong", "right")])
async def test_the_stream_is_the_plain_one_whatever_was_guessed(guesses: tuple[str, ...]) -> None:
    """Committed events are those of the plain run in its order; what was shown too early is taken back (I4)."""

    @step(effect=Effect.READONLY, predict=Guesses(*guesses))
    async def ask() -> str:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        return "right"

    @step(effect=Effect.READONLY)
    async def look(text: str) -> str:
        return text

    @workflow
    async def branch(ctx: Context, index: int) -> None:
        ctx.emit(f"{index} begins")
        ctx.emit(await ctx.call(look, f"{index} {await ctx.call(ask)}"))

    @workflow
    async def program(ctx: Context) -> None:
        ctx.emit("begin")
        ctx.emit(await ctx.call(look, await ctx.call(ask)))
        await ctx.map(branch, range(2))
        ctx.emit("end")

    plain: list[Any] = []
    await run(program, on_event=lambda event: plain.append(event.value), policy=Fixed(0))
    assert plain[:2] == ["begin", "right"]
    for index in range(2):  # what a branch says after its last call comes with the end of all branches
        assert [text for text in plain if text.startswith(str(index))] == [f"{index} begins", f"{index} right"]
    assert plain[-1] == "end"
    events: list[Any] = []
    await run(program, on_event=events.append, policy=Fixed(3, width=2))
    committed = [event.value for event in events if isinstance(event, CommittedEvent)]
    assert committed == plain
    shown = {event.number: event.value for event in events if isinstance(event, SpeculativeEvent)}
    retracted = [event.number for event in events if isinstance(event, RetractedEvent)]
    assert len(retracted) == len(set(retracted))
    assert set(retracted) <= set(shown)
    assert all("wrong" not in value for number, value in shown.items() if number not in retracted)
    assert bool(shown) is bool(guesses)


async def test_events_are_not_repeated_after_a_crash() -> None:
    """A resumed run goes on with the stream where it was committed."""
    store = MemoryStore()
    events: list[Any] = []

    @workflow
    async def program(ctx: Context) -> None:
        ctx.emit("one")
        await ctx.call(last, 0)
        ctx.emit("two")
        await ctx.gather(ctx.call(last, 1))
        ctx.emit("three")

    dying = DyingStore(lambda commit: any(entry.kind is EntryKind.END for entry in commit.entries), inner=store)
    with pytest.raises(PowerCutError):
        await run(program, store=dying, run_id="r", on_event=lambda event: events.append(event.value))
    before = list(events)
    assert before in (["one"], ["one", "two"])
    await resume("r", store=store, program=program, on_event=lambda event: events.append(event.value))
    assert events == ["one", "two", "three"]


async def test_two_runs_of_one_program_share_nothing() -> None:
    """State, draws and history of runs on one store are their own."""
    store = MemoryStore()

    async def body(ctx: Context, name: str) -> Any:
        for _ in range(3):
            ctx.state.append("log", await ctx.call(last, name))
        return ctx.state["log"], ctx.random().random()

    program = Workflow(body, name="program")
    values: dict[str, Any] = {}

    async def drive(name: str) -> None:
        values[name] = (await run(program, name, store=store, run_id=name)).value

    async with anyio.create_task_group() as group:
        for name in "abcd":
            group.start_soon(drive, name)
    assert {name: log for name, (log, _draw) in values.items()} == {name: [name] * 3 for name in "abcd"}
    assert len({draw for _log, draw in values.values()}) == 4
