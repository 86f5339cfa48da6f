"""The oracle itself, against histories worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specflow.codec import decode, encode
from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect, idempotency_key
from specflow.errors import CompensationError, DefinitionError, ForeignAwaitError, StateConflictError, SuspendedError
from specflow.graph import Pipeline
from specflow.history import EntryKind
from specflow.state import State
from specflow.testing import run_serial


@step(effect=Effect.PURE)
async def double(x: int) -> int:
    """Twice as much."""
    return 2 * x


@step(effect=Effect.PURE)
def fail(text: str) -> None:
    """Always raises."""
    raise ValueError(text)


@step(effect=Effect.READONLY)
async def note(key: str, value: Any, state: State) -> int:
    """Write the state, and tell how much there is."""
    state.put(key, value)
    return len(state.scan())


def places(run: Any) -> list[tuple[tuple[int, ...], str, str]]:
    """Position, kind and step of every entry."""
    return [(entry.position, entry.kind.value, entry.step) for entry in run.entries]


def final(run: Any) -> dict[str, Any]:
    """The state at the end."""
    return {key: decode(data) for key, data in run.state.items()}


@workflow
async def straight(ctx: Any, x: int) -> int:
    """Calls, state and events one after another."""
    ctx.emit("begin")
    ctx.state.put("x", x)
    y = await ctx.call(double, x)
    await ctx.sleep(1000)
    ctx.emit(y)
    ctx.state.add("sum", y)
    await ctx.call(note, "y", y)
    ctx.emit("end")
    ctx.state.delete("x")
    return int(y + 1)


def test_a_straight_program() -> None:
    """Entries, versions, events and the result of a program without branches are those worked out by hand."""
    run = run_serial(straight, 3)
    assert run.value == 7
    assert run.error is None
    assert places(run) == [
        ((0,), "call", double.name),
        ((1,), "sleep", "sleep"),
        ((2,), "call", note.name),
        ((), "end", straight.name),
    ]
    assert [{key: decode(data) for key, data in version.items()} for version in run.versions] == [
        {"x": 3},
        {"x": 3},
        {"x": 3, "sum": 6, "y": 6},
        {"sum": 6, "y": 6},
    ]
    assert run.events == ("begin", 6, "end")
    assert [entry.events for entry in run.entries] == [(b'"begin"',), (), (b"6",), (b'"end"',)]
    assert run.entries[0].arguments == encode([[3], {}])


@workflow
async def child(ctx: Any, key: str, values: list[int]) -> int:
    """Changes what it was given."""
    values.append(await ctx.call(double, len(values)))
    ctx.emit(key)
    ctx.state.put(key, values)
    ctx.state.append("all", key)
    return len(values)


@workflow
async def parallel(ctx: Any) -> Any:
    """Branches that share an argument and part of the state."""
    values = [1]
    ctx.state.put("before", 1)
    found = await ctx.gather(ctx.call(child, "a", values), ctx.call(child, "b", values), ctx.call(double, 5))
    return [found, values, await ctx.call(child, "c", values), values]


def test_parallel_branches() -> None:
    """Branches work on copies of their arguments and of the state; a nested call is an ordinary call."""
    run = run_serial(parallel)
    assert run.value == [[2, 2, 10], [1, 2], 2, [1, 2]]
    assert places(run)[:6] == [
        ((0,), "fork", "fork"),
        ((0, 0, 0), "call", double.name),
        ((0, 1, 0), "call", double.name),
        ((0, 2, 0), "call", double.name),
        ((0,), "join", "join"),
        ((1, 0), "call", double.name),
    ]
    assert final(run) == {"before": 1, "a": [1, 2], "b": [1, 2], "c": [1, 2], "all": ["a", "b", "c"]}
    assert run.versions[1].keys() == run.versions[3].keys() == {"before"}
    assert run.events == ("a", "b", "c")
    assert run.entries[4].events == (b'"a"', b'"b"')


@workflow
async def conflicting(ctx: Any, same: int) -> Any:
    """Two branches put the same key."""
    ctx.state.put("k", 1)
    try:
        await ctx.gather(ctx.call(note, "k", 2), ctx.call(note, "k", same), ctx.call(note, "other", 1))
    except StateConflictError as conflict:
        return conflict.writers
    return None


def test_conflicts_between_branches() -> None:
    """Two writers of one key conflict and leave nothing behind; one that leaves it as it was is no writer."""
    run = run_serial(conflicting, 3)
    assert run.value == (f"{note.name} (0.0)", f"{note.name} (0.1)")
    assert final(run) == {"k": 1}
    run = run_serial(conflicting, 1)
    assert run.value is None
    assert final(run) == {"k": 2, "other": 1}


@workflow
async def failing(ctx: Any) -> None:
    """One branch raises, the others finish."""
    await ctx.gather(ctx.call(double, 1), ctx.call(fail, "first"), ctx.call(note, "k", 1), ctx.call(fail, "second"))


def test_a_failing_branch() -> None:
    """All branches run to their end, their changes are kept, and the first exception in their order is raised."""
    run = run_serial(failing)
    assert repr(run.error) == "ValueError('first')"
    assert final(run) == {"k": 1}
    assert run.entries[-1].kind is EntryKind.END
    assert run.entries[-1].result is None


def test_effects_are_undone_newest_first() -> None:
    """A failing program takes its compensable effects back in reverse, and keeps what it sent and did otherwise."""
    log: list[tuple[str, Any]] = []

    @step(effect=Effect.COMPENSABLE, undo=lambda receipt, x: log.append(("undo", receipt)))
    async def reserve(x: int) -> str:
        log.append(("reserve", x))
        return f"receipt {x}"

    @step(effect=Effect.BUFFERED, resource="post")
    async def mail(x: int) -> None:
        log.append(("mail", x))

    @step
    async def charge(x: int, attempt: Attempt) -> int:
        log.append(("charge", attempt.idempotency_key))
        return x

    @workflow
    async def order(ctx: Any) -> None:
        assert await ctx.call(mail, 1) is None
        await ctx.call(reserve, 1)
        await ctx.call(charge, 5)
        await ctx.call(reserve, 2)
        await ctx.call(fail, "too late")

    run = run_serial(order, run_id="r")
    key = idempotency_key("r", (2,), charge.name, encode([[5], {}]))
    assert log == [
        ("mail", 1),
        ("reserve", 1),
        ("charge", key),
        ("reserve", 2),
        ("undo", "receipt 2"),
        ("undo", "receipt 1"),
    ]
    assert [(effect.action, effect.queue) for effect in run.effects] == [
        ("send", "post"),
        ("do", reserve.name),
        ("do", charge.name),
        ("do", reserve.name),
        ("undo", reserve.name),
        ("undo", reserve.name),
    ]
    assert isinstance(run.error, ValueError)


def test_an_undo_that_keeps_failing() -> None:
    """It is tried three times, then reported; the program has no end then."""
    tries: list[int] = []

    def undo(receipt: Any, x: int) -> None:
        tries.append(x)
        raise OSError

    @step(effect=Effect.COMPENSABLE, undo=undo)
    async def reserve(x: int) -> None: ...

    @workflow
    async def order(ctx: Any) -> None:
        await ctx.call(reserve, 1)
        await ctx.call(fail, "")

    run = run_serial(order)
    assert isinstance(run.error, CompensationError)
    assert tries == [1, 1, 1]
    assert run.entries[-1].kind is EntryKind.CALL


def test_retries_leave_nothing_behind() -> None:
    """A step is tried as often as it declares, on these errors only, and a failed try changes no state."""

    @step(effect=Effect.READONLY, retry=Retry(attempts=3, on=(ConnectionError,)))
    async def flaky(fails: int, error: str, state: State, attempt: Attempt) -> int:
        state.add("tries", 1)
        if attempt.number <= fails:
            raise {"connection": ConnectionError, "value": ValueError}[error]
        return attempt.number

    @workflow
    async def run_flaky(ctx: Any, fails: int, error: str) -> int:
        result: int = await ctx.call(flaky, fails, error)
        return result

    assert run_serial(run_flaky, 2, "connection").value == 3
    assert final(run_serial(run_flaky, 2, "connection")) == {"tries": 1}
    assert isinstance(run_serial(run_flaky, 3, "connection").error, ConnectionError)
    assert isinstance(run_serial(run_flaky, 1, "value").error, ValueError)


def test_draws_are_those_of_the_run() -> None:
    """Random numbers, UUIDs and the time depend on run and place only."""

    @workflow
    async def drawing(ctx: Any) -> list[Any]:
        first = [ctx.random().random(), ctx.random().random(), str(ctx.uuid()), ctx.now().timestamp()]
        await ctx.call(double, 1)
        return [*first, ctx.random().random()]

    one, other = run_serial(drawing, run_id="a", at=5.0).value, run_serial(drawing, run_id="b", at=5.0).value
    assert run_serial(drawing, run_id="a", at=5.0).value == one != other
    assert one[3] == 5.0
    assert len({one[0], one[1], one[4]}) == 3


def test_a_pipeline() -> None:
    """Steps run in program order on what they read; a skipped one gives None; a failure passes to its readers only."""
    pipeline = Pipeline("hand", output="total")

    @pipeline.step(effect=Effect.PURE)
    async def kind(order: int) -> str:
        return "big" if order > 10 else "small"

    @pipeline.step(effect=Effect.READONLY, when={"kind": "big"})
    async def review(order: int, state: State) -> int:
        state.put("reviewed", order)
        return order

    @pipeline.step(effect=Effect.READONLY)
    async def total(kind: str, review: int | None, state: State) -> Any:
        return [kind, review, state.get("reviewed")]

    run = run_serial(pipeline, order=20)
    assert run.value == ["big", 20, 20]
    assert places(run) == [
        ((0,), "fork", "fork"),
        ((0, 0, 0), "call", kind.name),
        ((0, 1, 1), "call", review.name),
        ((0, 2, 1), "call", total.name),
        ((0,), "join", "join"),
        ((), "end", pipeline.name),
    ]
    assert run_serial(pipeline, order=5).value == ["small", None, None]


def test_steps_of_a_pipeline_that_conflict() -> None:
    """Two steps that no dependency orders may not change the same key; ordered ones may."""

    def build(*, ordered: bool) -> Pipeline:
        pipeline = Pipeline("pair")

        @pipeline.step(effect=Effect.READONLY, name="one")
        async def one(state: State) -> int:
            state.put("k", 1)
            return 1

        async def after(one: int, state: State) -> int:
            state.put("k", 2)
            return 2

        async def beside(state: State) -> int:
            state.put("k", 2)
            return 2

        pipeline.step(effect=Effect.READONLY, name="two")(after if ordered else beside)
        return pipeline

    assert isinstance(run_serial(build(ordered=False)).error, StateConflictError)
    assert final(run_serial(build(ordered=True))) == {"k": 2}


def test_programs_that_cannot_be_run() -> None:
    """Steps that wait, foreign awaits and wrong arguments are reported as what they are."""

    class Wait:
        def __await__(self) -> Any:
            yield "something"

    @step(effect=Effect.PURE)
    async def waits() -> None:
        await Wait()

    @workflow
    async def calls(ctx: Any) -> None:
        await ctx.call(waits)

    @workflow
    async def strays(ctx: Any) -> None:
        await Wait()

    with pytest.raises(SuspendedError):
        run_serial(calls)
    assert isinstance(run_serial(strays).error, ForeignAwaitError)
    with pytest.raises(DefinitionError):
        run_serial(straight)


def test_differences_are_told() -> None:
    """Each kind of difference is noticed, and none where there is none."""
    run = run_serial(straight, 3)
    same: dict[str, Any] = {
        "entries": [replace(entry, at=99.0, seconds=5.0) for entry in run.entries],
        "state": run.state,
        "events": run.events,
        "outcome": (7, None),
    }
    assert run.differences(**same) == ()
    first, second, *rest = run.entries
    changed: dict[str, tuple[str, Any]] = {
        "another result": ("entries", [replace(first, result=b"7"), second, *rest]),
        "another type": ("entries", [replace(first, result=b"6.0"), second, *rest]),
        "another order": ("entries", [second, first, *rest]),
        "one less": ("entries", [first, second, *rest[:-1]]),
        "one more": ("entries", [*run.entries, first]),
        "other writes": ("entries", [replace(first, writes=()), second, *rest]),
        "other events": ("entries", [replace(first, events=()), second, *rest]),
        "another state": ("state", {**run.state, "sum": b"7"}),
        "another key": ("state", {**run.state, "z": b"7"}),
        "another event": ("events", ("begin", 6.0, "end")),
        "another value": ("outcome", (True, None)),
        "an exception": ("outcome", (None, ValueError())),
    }
    for label, (name, value) in changed.items():
        found = run.differences(**{**same, name: value})
        assert len(found) == 1, label
        promise = {"entries": "history", "events": "stream"}.get(name, name)
        assert found[0].startswith(promise), label
