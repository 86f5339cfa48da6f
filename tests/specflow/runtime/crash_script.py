"""What the processes of the crash tests run: programs with every kind of effect, and a driver that kills them.

The driver forks one child for each life of a run. A child passes labelled points (before and after every commit, every
effect ...) and kills itself with SIGKILL at the one it was told; the next child resumes the run from the
file. Effects go to a receiver that knows nothing of specflow: a file that is only appended to, one line for each.

Run as ``python -c "from tests.specflow.runtime.crash_script import main; main()" FOLDER JSON``; prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from specflow.codec import decode
from specflow.definitions import Attempt, Retry, step, workflow
from specflow.effects import Effect
from specflow.errors import EffectUnknownError
from specflow.history import Commit, EffectStatus, Entry, Lease, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import NotSent, Sent, resume, run
from specflow.speculation import Call, Prediction
from specflow.state import State
from specflow.stores import SQLiteStore
from specflow.stores.leases import is_alive

RUN = "run"
POLICY = Fixed(3, width=2, effects=set(Effect) - {Effect.IRREVERSIBLE})
ONCE = {"book", "reserve", "pay", "mail"}
"""Effects that must never be seen twice. The others may be repeated under their key."""


class Life:
    """One process: where it writes, where it dies, which points it passed."""

    def __init__(self) -> None:
        self.folder = Path()
        self.kill_at = -1
        self.points: list[str] = []

    def point(self, label: str) -> None:
        """Pass a labelled point; die here if told so."""
        if len(self.points) == self.kill_at:
            with (self.folder / "died").open("a") as file:
                file.write(f"{label}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        self.points.append(label)

    def receive(self, name: str, key: str, *args: Any) -> None:
        """The outside world sees an effect."""
        self.point(f"before effect {name}")
        line = json.dumps([name, key, list(args)]) + "\n"
        receiver = os.open(self.folder / "receiver", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(receiver, line.encode())
        os.close(receiver)
        self.point(f"after effect {name}")

    def received(self) -> list[list[Any]]:
        """What the outside world has seen, in order."""
        try:
            return [json.loads(line) for line in (self.folder / "receiver").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def was_received(self, key: str) -> bool:
        """Did an effect with this key arrive?"""
        return any(seen == key for _name, seen, _args in self.received())


LIFE = Life()


class Guesses:
    """Always the same guesses."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def predict(self, call: Call) -> list[Prediction]:
        """The guesses."""
        return [Prediction(value, 0.9) for value in self._values]


# ------------------------------------------------------------------------------------------------------------- programs


@step(effect=Effect.READONLY, predict=Guesses(5, 3))
async def price(item: str) -> int:
    """Guessed wrong and right."""
    for _ in range(4):
        await anyio.lowlevel.checkpoint()
    return {"a": 3, "b": 4}[item]


@step(effect=Effect.READONLY)
async def count(item: str, state: State) -> int:
    """Reads outside, writes the state."""
    for _ in range(6):  # slower than the branches after it
        await anyio.lowlevel.checkpoint()
    state.append("counted", item)
    state.add("number", 1)
    return len(item)


@step(effect=Effect.BUFFERED, resource="mail")
async def mail(text: str, attempt: Attempt) -> None:
    """Not to be repeated."""
    LIFE.point("start of delivery")
    LIFE.receive("mail", attempt.idempotency_key, text)


@step(effect=Effect.BUFFERED, resource="mail", idempotent=True)
async def note(text: str, attempt: Attempt) -> None:
    """May be repeated."""
    LIFE.point("start of delivery")
    LIFE.receive("note", attempt.idempotency_key, text)


async def unbook(result: str, value: int) -> None:
    """Undo a booking."""
    LIFE.point("start of undo")
    LIFE.receive("unbook", result, value)


@step(effect=Effect.COMPENSABLE, undo=unbook, retry=Retry(attempts=2, wait=0.0))
async def book(value: int, attempt: Attempt) -> str:
    """Can be undone; its result is its key."""
    LIFE.point("start of effect")
    LIFE.receive("book", attempt.idempotency_key, value)
    return attempt.idempotency_key


async def was_reserved(key: str, item: str) -> Sent | NotSent:
    """Find out after a crash."""
    LIFE.point("start of probe")
    return Sent(f"reserved {item}", writes={"reserved": item}) if LIFE.was_received(key) else NotSent()


@step(probe=was_reserved)
async def reserve(item: str, attempt: Attempt, state: State) -> str:
    """Irreversible, with a probe, and writes the state."""
    LIFE.point("start of effect")
    LIFE.receive("reserve", attempt.idempotency_key, item)
    state["reserved"] = item
    return f"reserved {item}"


@step(effect=Effect.IDEMPOTENT)
def put(item: str, value: int, attempt: Attempt) -> int:
    """Idempotent, in a thread."""
    LIFE.point("start of effect")
    LIFE.receive("put", attempt.idempotency_key, item, value)
    return value + 1


@step
async def pay(value: int, booking: str, attempt: Attempt) -> str:
    """Irreversible, and nobody can tell afterwards."""
    LIFE.point("start of effect")
    await anyio.lowlevel.checkpoint()
    LIFE.receive("pay", attempt.idempotency_key, value)
    return f"paid {value}"


@workflow
async def part(ctx: Context, item: str) -> int:
    """A branch."""
    await ctx.call(mail, f"part {item}")
    value = await ctx.call(put, item, 1)
    ctx.state.add("number", value)
    return await ctx.call(put, item, value)


async def _body(ctx: Context, *, fails: bool) -> Any:
    quote = await ctx.call(price, "a")
    ctx.state["quote"] = quote
    ctx.emit(f"quote {quote}")
    await ctx.call(mail, f"quote {quote}")
    booking = await ctx.call(book, quote)
    found = await ctx.gather(ctx.call(count, "c"), ctx.call(reserve, "b"), ctx.call(part, "d"))
    await ctx.sleep(0)
    ctx.emit(found)
    second = await ctx.call(book, quote + 1)
    if fails:
        await ctx.call(mail, "sorry")
        raise RuntimeError("out of stock")
    receipt = await ctx.call(pay, quote, booking)
    await ctx.call(note, receipt)
    await ctx.call(mail, "bye")
    return [found, receipt, booking != second]


@workflow
async def order(ctx: Context) -> Any:
    """Goes well."""
    return await _body(ctx, fails=False)


@workflow
async def refused(ctx: Context) -> Any:
    """Fails in the end: what was booked is undone."""
    return await _body(ctx, fails=True)


PROGRAMS: dict[str, Any] = {"order": order, "refused": refused}


# ------------------------------------------------------------------------------------------------------------ the store


class LabelledStore:
    """Passes a point before and after everything that writes; may be broken in one way."""

    def __init__(self, inner: SQLiteStore, broken: str) -> None:
        self.inner = inner
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create(self, *args: Any) -> Lease:
        """Create between two points."""
        return self._between("create", lambda: self.inner.create(*args))

    def acquire(self, *args: Any, **settings: Any) -> Lease:
        """Acquire between two points."""
        return self._between("acquire", lambda: self.inner.acquire(*args, **settings))

    def release(self, lease: Lease) -> None:
        """Release between two points."""
        self._between("release", lambda: self.inner.release(lease))

    def commit(self, lease: Lease, commit: Commit) -> int:
        """Commit between two points."""
        if self._broken == "drops sent rows":
            kept = tuple(row for row in commit.effects if row.status is not EffectStatus.SENT)
            commit = replace(commit, effects=kept)
        if self._broken == "commits in two parts" and commit.entries and commit.effects:
            self._between("commit", lambda: self.inner.commit(lease, replace(commit, effects=())))
            rest = Commit(commit.parent + len(commit.entries), (), commit.effects)
            return self._between("commit", lambda: self.inner.commit(lease, rest))
        if self._broken == "acknowledges early":
            rows = tuple(
                replace(row, status=EffectStatus.ACKED) if row.status is EffectStatus.SENT else row
                for row in commit.effects
            )
            commit = replace(commit, effects=rows)
        return self._between("commit", lambda: self.inner.commit(lease, commit))

    def _between(self, what: str, act: Callable[[], Any]) -> Any:
        LIFE.point(f"before {what}")
        result = act()
        LIFE.point(f"after {what}")
        return result


# -------------------------------------------------------------------------------------------------------------- a life


async def live(program: str, broken: str, *, ahead: bool) -> dict[str, Any]:
    """Begin the run, or go on with it; a person looks at the receiver for what is unknown."""
    store: Any = LabelledStore(SQLiteStore(LIFE.folder / "runs.db"), broken)
    policy = POLICY if ahead else Fixed(0)
    resolve: dict[str, Sent | NotSent] = {}
    unknown: list[str] = []
    outcome: dict[str, Any] = {}
    while True:
        try:
            if not store.list_runs():
                result = await run(PROGRAMS[program], store=store, policy=policy, run_id=RUN)
            else:
                result = await resume(RUN, store=store, policy=policy, resolve=resolve)
            outcome = {"value": result.value}
        except EffectUnknownError as error:
            name = error.step.partition(":")[2]
            results = {"pay": "paid 3", "book": error.key, "mail": None}
            resolve[error.key] = Sent(results[name]) if LIFE.was_received(error.key) else NotSent()
            unknown.append(name)
            if len(unknown) > 20:
                raise
            continue
        except RuntimeError as error:
            outcome = {"error": str(error)}
        break
    store.close()
    return {**outcome, "unknown": unknown, "points": LIFE.points}


def in_a_child(
    folder: Path, program: str, backend: str, *, kill_at: int = -1, ahead: bool = True, broken: str = "",
    line: int = -1, delay: float | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """One life in a process of its own. None if it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            LIFE.folder, LIFE.kill_at, LIFE.points = folder, kill_at, []
            if line >= 0:
                _die_at_line(line)
            report = anyio.run(_live, program, broken, ahead, backend=backend)
            report["lines"] = _LINES[0]
            (folder / "report").write_text(json.dumps(report))
            status = 0
        except BaseException:  # noqa: BLE001 -- the parent shows it
            (folder / "report").write_text(json.dumps({"crash": traceback.format_exc()}))
        finally:
            os._exit(status)
    if delay is not None:
        select.select([], [], [], delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    report: dict[str, Any] = json.loads((folder / "report").read_text())
    return report


async def _live(program: str, broken: str, ahead: bool) -> dict[str, Any]:  # noqa: FBT001 -- anyio.run takes no keywords
    return await live(program, broken, ahead=ahead)


_LINES = [0]


def _die_at_line(line: int) -> None:
    """Die when this many lines of the library have run: an instant that nobody chose."""
    here = str(Path(__file__).parents[3] / "specflow") + os.sep

    def in_frame(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            _LINES[0] += 1
            if _LINES[0] == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return in_frame

    def on_call(frame: Any, event: str, arg: Any) -> Any:
        return in_frame if frame.f_code.co_filename.startswith(here) else None

    sys.settrace(on_call)


# ------------------------------------------------------------------------------------------------------------ checking


def story(entry: Entry) -> list[Any]:
    """An entry without times."""
    return [
        entry.position, entry.kind.value, entry.step, entry.arguments, entry.result, entry.error,
        tuple((write.key, write.operation.value, write.data) for write in (*entry.writes, *entry.branch_writes)),
        entry.events,
    ]  # fmt: skip


def look(folder: Path) -> tuple[list[Any], dict[str, Any], Any, list[Any]]:
    """History, state, status and outbox of the run as it is in the file."""
    store = SQLiteStore(folder / "runs.db")
    try:
        if not store.list_runs():
            return [], {}, None, []
        state = {key: decode(data) for key, data in store.state(RUN).items()}
        record = store.get_run(RUN)
        return [story(entry) for entry in store.entries(RUN)], state, record, list(store.effects(RUN))
    finally:
        store.close()


def net_effects(received: list[list[Any]]) -> Counter[str]:
    """Effects that were not undone, without repetitions of those that may be repeated."""
    seen: set[tuple[str, str]] = set()
    net: Counter[str] = Counter()
    undone = {key for name, key, _args in received if name == "unbook"}
    for name, key, args in received:
        if name == "unbook" or key in undone or (name not in ONCE and (name, key) in seen):
            continue
        seen.add((name, key))
        net[json.dumps([name, key, args])] += 1
    return net


def check_whole(folder: Path, plain: Any, report: dict[str, Any] | None) -> list[str]:  # noqa: C901 -- one line for each promise
    """What is wrong with a run that was taken to its end?"""
    if report is None:
        return ["the last life was killed"]
    if "crash" in report:
        return [report["crash"]]
    problems: list[str] = []
    history, state, record, rows = look(folder)
    LIFE.folder = folder
    received = LIFE.received()
    if history != plain["history"]:
        problems.append(f"history differs: {[row[:3] for row in history]}")
    if state != plain["state"]:
        problems.append(f"state is {state}")
    if {key: report.get(key) for key in ("value", "error")} != plain["outcome"]:
        problems.append(f"outcome is {report}")
    if record.status is not plain["status"] or (record.owner is not None and is_alive(record.owner) is not False):
        problems.append(f"record is {record}")
    for (name, key), number in Counter((name, key) for name, key, _args in received).items():
        if name in ONCE and number > 1:
            problems.append(f"{name} {key} was seen {number} times")
    if net_effects(received) != plain["net"]:
        problems.append(f"effects are {received}")
    if _mail(received) != _mail(plain["received"]):
        problems.append(f"mail came in the order {_mail(received)}")
    undone = list(dict.fromkeys(key for name, key, _args in received if name == "unbook"))
    expected = list(dict.fromkeys(key for name, key, _args in plain["received"] if name == "unbook"))
    if [key for key in undone if key in expected] != expected:
        problems.append(f"undone in the order {undone}")
    open_rows = [row for row in rows if row.status in (EffectStatus.SENT, EffectStatus.UNKNOWN, EffectStatus.PREPARED)]
    # An idempotent effect of a wrong guess may stay open: whether it happened makes no difference to anybody.
    open_rows = [row for row in open_rows if not row.step.endswith(":put")]
    if open_rows:
        problems.append(f"the outbox says {open_rows}")
    return problems


def _mail(received: list[list[Any]]) -> list[str]:
    """What the mail resource saw, in order, without repetitions."""
    return list(dict.fromkeys(args[0] for name, _key, args in received if name in ("mail", "note")))


def check_prefix(folder: Path, plain: Any) -> list[str]:
    """I9: is what a killed process left a prefix of the plain history, with no effect of anything that is not in it?"""
    history, _state, record, rows = look(folder)
    problems: list[str] = []
    if history != plain["history"][: len(history)]:
        problems.append(f"not a prefix: {[row[:3] for row in history]}")
    is_unknown = any(row.status is EffectStatus.UNKNOWN for row in rows)
    fitting = {RunStatus.RUNNING, plain["status"], *((RunStatus.BLOCKED,) if is_unknown else ())}
    if record is not None and record.status not in fitting:
        problems.append(f"status is {record.status}")
    LIFE.folder = folder
    on_record = {row.key for row in rows}
    for name, key, args in LIFE.received():
        if name != "unbook" and key not in on_record:
            problems.append(f"{name}{args} is not on record")
    if record is not None and record.owner is not None and is_alive(record.owner) is not False:
        problems.append(f"{record.owner} is taken for alive")
    return problems


def prepare(root: Path, program: str, backend: str) -> dict[str, Any]:
    """The run that nobody disturbs and that guesses nothing."""
    folder = root / f"plain {program}"
    folder.mkdir(parents=True)
    report = in_a_child(folder, program, backend, ahead=False)
    if report is None or "crash" in report:
        raise RuntimeError(f"the plain run failed: {report}")
    history, state, record, _rows = look(folder)
    LIFE.folder = folder
    received = LIFE.received()
    return {
        "history": history, "state": state, "status": record.status, "received": received,
        "net": net_effects(received), "outcome": {key: report.get(key) for key in ("value", "error")},
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- driver


def matrix(root: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Kill a run at every labelled point, or at random lines or moments; then again while it is resumed."""
    program, backend, broken = task["program"], task["backend"], task.get("broken", "")
    generator = random.Random(task.get("seed", 0))
    plain = prepare(root, program, backend)
    whole = root / "whole"
    whole.mkdir()
    report = in_a_child(whole, program, backend, broken=broken, line=0 if task["kind"] == "lines" else -1)
    if report is None or "crash" in report:
        return {"problems": [f"undisturbed: {report}"], "labels": [], "kills": 0}
    found: list[str] = [] if broken else [f"undisturbed: {problem}" for problem in check_whole(whole, plain, report)]
    points, lines = report["points"], report["lines"]
    if task["kind"] == "points":
        kills: list[dict[str, Any]] = [{"kill_at": number} for number in range(len(points) + 3)]
        kills = kills[task.get("first", 0) :: task.get("every", 1)]
    elif task["kind"] == "lines":
        kills = [{"line": generator.randrange(1, lines)} for _ in range(task["number"])]
    else:
        kills = [{"delay": generator.uniform(0.0, 0.06)} for _ in range(task["number"])]
    number = unknown = 0
    labels: Counter[str] = Counter()
    for kill in kills:
        folder = root / f"{number}"
        folder.mkdir()
        number += 1
        lives: list[dict[str, Any]] = [kill, *_further(task, generator, lines)]
        report = None
        for life in lives:
            report = in_a_child(folder, program, backend, broken=broken, **life)
            if report is not None:
                break
            if not broken:
                found += [f"{lives}: {problem}" for problem in check_prefix(folder, plain)]
        if report is None:
            report = in_a_child(folder, program, backend, broken=broken, ahead=generator.random() < 0.7)
        died = (folder / "died").read_text().splitlines() if (folder / "died").exists() else []
        labels.update(died)
        unknown += len((report or {}).get("unknown", ()))
        found += [f"{lives} {died}: {problem}" for problem in check_whole(folder, plain, report)]
    return {"problems": found, "labels": labels, "kills": number, "unknown": unknown, "lines": lines}


def _further(task: dict[str, Any], generator: random.Random, lines: int) -> list[dict[str, Any]]:
    """How the lives after the first end: as many as the task says are killed as well."""
    again = range(task.get("again", 0))
    if task["kind"] == "points":
        return [{"kill_at": generator.randrange(60)} for _ in again]
    if task["kind"] == "lines":
        return [{"line": generator.randrange(1, lines)} for _ in again]
    return [{"delay": generator.uniform(0.0, 0.06)} for _ in again]


def main() -> None:
    """Do one task and print what was found."""
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    print(json.dumps(matrix(root, json.loads(sys.argv[2]))))  # noqa: T201 -- its output is read by the test
