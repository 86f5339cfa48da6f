"""The commands: each takes the parsed command line and answers with plain data and a text."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from ..codec import encode
from ..definitions import Workflow, load
from ..errors import DefinitionError, ProgramChangedError, SpecflowError, StoreUnavailableError, VersionGoneError
from ..graph import Pipeline
from ..history import EffectRecord, Entry, EntryKind, RunRecord, format_position
from ..outbox import NotSent, Sent
from ..predictors import ByArguments, LastValue, Majority, Markov, TraceReplay
from ..protocols import Predictor, Store
from ..recorded import Recording, plain, plain_arguments
from ..runtime import fork as fork_run
from ..runtime import resume as resume_run
from ..stores import SQLiteStore
from ..synctest import Finding
from ..synctest import synctest as run_synctest
from ..whatif import StepFigures, WhatIf, step_figures, train, what_if
from .inputs import read_arguments
from .output import Answer, compact, moment, seconds, share, table
from .specs import parse_assignments, parse_json, parse_policy, parse_predictors

YARDSTICKS: Mapping[str, Callable[[], Predictor]] = {
    "last": LastValue,
    "majority": Majority,
    "markov:1": lambda: Markov(1),
    "markov:2": lambda: Markov(2),
    "arguments": ByArguments,
    "trace": TraceReplay,
}
"""Predictors whose hit rates ``stats`` works out."""

# ---------------------------------------------------------------------------------------------------------------------
# Programs


def synctest(arguments: argparse.Namespace) -> Answer:
    """``specflow synctest``."""
    program = _program(arguments.program)
    positional, inputs = read_arguments(program, arguments.args)
    test = functools.partial(
        run_synctest,
        program,
        *positional,
        inputs=inputs,
        seed=arguments.seed,
        rounds=arguments.rounds,
        stub=_stubs(arguments.stub),
        allow_effects=arguments.allow_effects,
        unstable=arguments.unstable,
    )
    report = anyio.run(test, backend=arguments.backend)
    data = {
        "program": report.program,
        "ok": report.ok,
        "runs": report.runs,
        "calls": report.calls,
        "findings": [_finding(finding) for finding in report.findings],
        "notes": list(report.notes),
    }
    return Answer(data, str(report), 0 if report.ok else 1)


def draw(arguments: argparse.Namespace) -> Answer:
    """``specflow draw``."""
    pipeline = _load(arguments.pipeline)
    if not isinstance(pipeline, Pipeline):
        raise DefinitionError(f"{arguments.pipeline} is not a Pipeline, but {pipeline!r}")
    graph = pipeline.freeze()
    steps = [
        {"name": node.name, "effect": node.step.effect.value, "reads": [*node.inputs, *node.reads]}
        for node in graph.nodes
    ]
    text = pipeline.draw()
    data = {"pipeline": pipeline.name, "mermaid": text, "inputs": list(graph.inputs), "steps": steps}
    return Answer({**data, "output": graph.output}, text)


# ---------------------------------------------------------------------------------------------------------------------
# Stores


def runs(arguments: argparse.Namespace) -> Answer:
    """``specflow runs``."""
    with _store(arguments.store) as store:
        found = store.list_runs()
    rows = [
        (run.run_id, run.program, run.status.value, run.head, moment(run.created_at), _origin(run)) for run in found
    ]
    text = table(("run", "program", "status", "version", "created (UTC)", "forked from"), rows)
    return Answer({"runs": [_run(run) for run in found]}, text if found else "no runs")


def show(arguments: argparse.Namespace) -> Answer:
    """``specflow show``."""
    version: int | None = arguments.version
    with _store(arguments.store) as store:
        run = store.get_run(arguments.run)
        entries = _kept_entries(store, run, version)
        with_state = arguments.state or version is not None
        state = dict(store.state(run.run_id, version)) if with_state else None
        effects = store.effects(run.run_id) if arguments.effects else None
    data: dict[str, Any] = {"run": _run(run), "entries": [_entry(number, entry) for number, entry in entries]}
    args, kwargs = plain_arguments(run.arguments)
    text = [
        f"run      {run.run_id}",
        f"program  {run.program}",
        f"called   ({_call_text(args, kwargs)})",
        f"status   {run.status.value}, version {run.head}" + (f", forked from {_origin(run)}" if run.parent else ""),
        f"created  {moment(run.created_at)} UTC",
        "",
        table(
            ("version", "position", "kind", "step", "arguments", "result", "seconds"),
            [_entry_row(number, entry) for number, entry in entries],
        ),
    ]
    wanted = run.head if version is None else version
    if len(entries) < wanted:
        text.append(f"({wanted - len(entries)} of {wanted} entries were collected)")
    if state is not None:
        data["version"] = wanted
        data["state"] = {key: plain(value) for key, value in state.items()}
        rows = [(key, compact(value)) for key, value in data["state"].items()]
        text += ["", f"state at version {wanted}", table(("key", "value"), rows) if rows else "empty"]
    if effects is not None:
        data["effects"] = [_effect(row) for row in effects]
        rows_of = [
            (format_position(row.position), row.step, row.status.value, row.tries, _outcome_text(row), row.key)
            for row in effects
        ]
        headers = ("position", "step", "status", "tries", "result", "idempotency key")
        text += ["", "effects", table(headers, rows_of) if rows_of else "none"]
    return Answer(data, "\n".join(text))


def stats(arguments: argparse.Namespace) -> Answer:
    """``specflow stats``."""
    with _store(arguments.store) as store:
        chosen = [store.get_run(arguments.run)] if arguments.run is not None else list(store.list_runs())
        histories = [[entry for _number, entry in _kept_entries(store, run, None)] for run in chosen]
    figures = step_figures(histories, YARDSTICKS)
    rows = [
        (
            one.step,
            one.calls,
            one.failed,
            seconds(one.median_seconds),
            seconds(one.seconds),
            *(share(one.hit_rates[name].rate) for name in YARDSTICKS),
        )
        for one in figures
    ]
    headers = ("step", "calls", "failed", "median s", "total s", *YARDSTICKS)
    lines = [f"{_count(len(chosen), 'run')}; the last columns say how often each predictor is right"]
    text = "\n".join([*lines, "", table(headers, rows)]) if rows else "no calls"
    return Answer({"runs": [run.run_id for run in chosen], "steps": [_figures(one) for one in figures]}, text)


def gc(arguments: argparse.Namespace) -> Answer:
    """``specflow gc``."""
    with _store(arguments.store) as store:
        names = [arguments.run] if arguments.run is not None else [run.run_id for run in store.list_runs()]
        dropped = {name: store.collect(name) for name in names}
    total = sum(dropped.values())
    text = f"dropped {_count(total, 'item')} of {_count(len(names), 'run')}"
    return Answer({"dropped": dropped, "total": total}, text)


def fork(arguments: argparse.Namespace) -> Answer:
    """``specflow fork``."""
    with _store(arguments.store) as store:
        new = fork_run(
            arguments.run, arguments.version, store=store, new_run_id=arguments.run_id, effects=arguments.effects
        )
    text = f"{new} shares the first {arguments.version} entries of {arguments.run}; `specflow resume` goes on with it"
    return Answer({"run": new, "parent": arguments.run, "version": arguments.version}, text)


def _answers(arguments: argparse.Namespace) -> dict[str, Sent | NotSent]:
    """What became of unknown effects, from ``--sent``, ``--wrote`` and ``--not-sent``."""
    answers: dict[str, Sent | NotSent] = {key: NotSent() for key in arguments.not_sent}
    for text in arguments.sent:
        key, is_assignment, value = text.partition("=")
        if not is_assignment or key in answers:
            raise DefinitionError(f"--sent {text!r} is not valid: write KEY=JSON, and one answer for each key")
        answers[key] = Sent(parse_json("sent", value))
    for text in arguments.wrote:
        key, is_assignment, value = text.partition("=")
        sent = answers.get(key)
        if not is_assignment or not isinstance(sent, Sent) or sent.writes is not None:
            raise DefinitionError(f"--wrote {text!r} is not valid: write KEY=JSON once for a key that has a --sent")
        writes = parse_json("wrote", value)
        if not isinstance(writes, dict):
            raise DefinitionError(f"--wrote {text!r} is not valid: write an object of values by state key")
        answers[key] = Sent(sent.result, writes)
    return answers


def resume(arguments: argparse.Namespace) -> Answer:
    """``specflow resume``."""
    resolve = _answers(arguments)
    policy = parse_policy(arguments.policy) if arguments.policy is not None else None
    limits = parse_assignments("limit", arguments.limit, int)
    with _store(arguments.store) as store:
        record = store.get_run(arguments.run)
        go_on = functools.partial(
            resume_run,
            arguments.run,
            store=store,
            program=_program(arguments.program or record.program),
            policy=policy,
            limits=limits,
            resolve=resolve,
            take_over=arguments.take_over,
            allow_changed=arguments.allow_changed,
        )
        try:
            result = anyio.run(go_on, backend=arguments.backend)
        except SpecflowError:
            raise
        except Exception as error:
            raise _ProgramError(arguments.run, error) from error
    value = plain(encode(result.value, "the result"))
    report = dataclasses.asdict(result.report)
    report["effects"] = [_effect(row) for row in result.report.effects]
    data = {"run": result.run_id, "value": value, "mode": result.mode.value, "report": report}
    return Answer(data, f"{compact(value)}\n{result.report}")


def replay(arguments: argparse.Namespace) -> Answer:
    """``specflow replay``."""
    policies = arguments.policy or ["fixed:1"]
    for text in policies:
        parse_policy(text)
    makers = parse_predictors(arguments.predictor)
    money = parse_assignments("money", arguments.money, float)
    limits = parse_assignments("limit", arguments.limit, int)
    with _store(arguments.store) as store:
        record = store.get_run(arguments.run)
        program = _program(arguments.program or record.program)
        if program.fingerprint != record.fingerprint and not arguments.allow_changed:
            raise ProgramChangedError(record.run_id, record.program)
        entries = store.entries(record.run_id)
        earlier = _earlier(store, record, program.fingerprint) if arguments.train else []
        seed = _first_of_line(store, record)
        origins = {run.run_id: _first_of_line(store, run) for run, _entries in earlier}
    recording = Recording(entries)
    results: list[tuple[str, WhatIf]] = []
    for text in policies:
        predictors = {step: make(recording) for step, make in makers.items()}
        for run, history in earlier:
            train(program, run, history, predictors, seed=origins[run.run_id])
        result = what_if(
            program,
            record,
            entries,
            policy=parse_policy(text),
            predictors=predictors,
            money=money,
            limits=limits,
            seed=seed,
        )
        results.append((text, result))
    return Answer(
        {
            "run": record.run_id,
            "program": record.program,
            "predictor": arguments.predictor or ["as declared"],
            "trained_on": [run.run_id for run, _entries in earlier],
            "results": [_what_if(text, result) for text, result in results],
        },
        _replay_text(record, results),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


class _ProgramError(SpecflowError):
    """A program raised something, and that is how its run ended."""

    def __init__(self, run_id: str, error: BaseException) -> None:
        self.run_id = run_id
        super().__init__(f"the program of run {run_id} raised {type(error).__name__}: {error}")


@contextmanager
def _store(path: str) -> Generator[SQLiteStore]:
    """A store that exists: looking for runs must not make a file.

    Raises:
        StoreUnavailableError: there is no such file, or it is no store.
    """
    if not Path(path).is_file():
        raise StoreUnavailableError(path, "there is no such file")
    store = SQLiteStore(path)
    try:
        yield store
    finally:
        store.close()


def _load(target: str) -> Any:
    try:
        return load(target)
    except SpecflowError:
        raise
    except Exception as error:
        raise DefinitionError(
            f"{target!r} cannot be loaded: importing it raised {type(error).__name__}: {error}"
        ) from error


def _program(target: str) -> Workflow[..., Any] | Pipeline:
    program = _load(target)
    if not isinstance(program, Workflow | Pipeline):
        raise DefinitionError(f"{target} is not a @workflow or a Pipeline, but {program!r}")
    return program


def _stubs(texts: Sequence[str]) -> dict[str, Callable[..., Any]]:
    stubs: dict[str, Callable[..., Any]] = {}
    for text in texts:
        step, is_assignment, target = text.partition("=")
        if not is_assignment:
            raise DefinitionError(f"--stub {text!r} is not valid: write STEP=MODULE:FUNCTION")
        stubs[step] = _load(target)
        if not callable(stubs[step]):
            raise DefinitionError(f"--stub {text!r} is not valid: {target} is not a function")
    return stubs


def _earlier(store: Store, record: RunRecord, fingerprint: str) -> list[tuple[RunRecord, Sequence[Entry]]]:
    """Ended runs of the same program from before a run, oldest first."""
    found: list[tuple[RunRecord, Sequence[Entry]]] = []
    for run in store.list_runs():
        same = run.program == record.program and run.fingerprint == fingerprint
        if same and run.run_id != record.run_id and run.created_at <= record.created_at:
            entries = [entry for _number, entry in _kept_entries(store, run, None)]
            if len(entries) == run.head and entries and entries[-1].kind is EntryKind.END:
                found.append((run, entries))
    return found


def _first_of_line(store: Store, record: RunRecord) -> str:
    """The run that a fork comes from in the end: its draws of random numbers depend on that one's name."""
    while record.parent is not None:
        record = store.get_run(record.parent)
    return record.run_id


def _kept_entries(store: Store, run: RunRecord, version: int | None) -> list[tuple[int, Entry]]:
    """Entries with their versions, without those that were collected."""
    until = run.head if version is None else version
    try:
        return list(enumerate(store.entries(run.run_id, 0, until), start=1))
    except VersionGoneError:
        if not 0 <= until <= run.head:
            raise
    found = []
    for number in range(1, until + 1):
        try:
            found.append((number, store.entries(run.run_id, number - 1, number)[0]))
        except VersionGoneError:
            continue
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _origin(run: RunRecord) -> str:
    return f"{run.parent} at {run.parent_version}" if run.parent is not None else ""


def _call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(compact, args), *(f"{name}={compact(value)}" for name, value in kwargs.items())])


def _outcome_text(item: Entry | EffectRecord) -> str:
    if item.error is not None:
        match plain(item.error):
            case {"$error": {"type": str() as kind, "message": str() as message}}:
                return f"raised {kind.rpartition(':')[2]}: {message}"
            case other:
                return f"raised {compact(other)}"
    return compact(plain(item.result)) if item.result is not None else ""


def _entry_row(number: int, entry: Entry) -> tuple[object, ...]:
    place = format_position(entry.position)
    called = _call_text(*plain_arguments(entry.arguments))
    spent = seconds(entry.seconds) if entry.kind is EntryKind.CALL else "-"
    return number, place, entry.kind.value, entry.step, called, _outcome_text(entry), spent


def _entry(number: int, entry: Entry) -> dict[str, Any]:
    args, kwargs = plain_arguments(entry.arguments)
    return {
        "version": number,
        "position": format_position(entry.position),
        "kind": entry.kind.value,
        "step": entry.step,
        "args": args,
        "kwargs": kwargs,
        "result": plain(entry.result) if entry.result is not None else None,
        "error": plain(entry.error) if entry.error is not None else None,
        "writes": [
            {"key": write.key, "operation": write.operation.value, "value": plain(write.data) if write.data else None}
            for write in (*entry.writes, *entry.branch_writes)
        ],
        "events": [plain(event) for event in entry.events],
        "at": entry.at,
        "seconds": entry.seconds,
    }


def _effect(row: EffectRecord) -> dict[str, Any]:
    args, kwargs = plain_arguments(row.arguments)
    return {
        "key": row.key,
        "position": format_position(row.position),
        "step": row.step,
        "status": row.status.value,
        "args": args,
        "kwargs": kwargs,
        "result": plain(row.result) if row.result is not None else None,
        "error": plain(row.error) if row.error is not None else None,
        "tries": row.tries,
    }


def _run(run: RunRecord) -> dict[str, Any]:
    args, kwargs = plain_arguments(run.arguments)
    return {
        "run": run.run_id,
        "program": run.program,
        "status": run.status.value,
        "version": run.head,
        "created_at": run.created_at,
        "parent": run.parent,
        "parent_version": run.parent_version if run.parent is not None else None,
        "owner": run.owner,
        "args": args,
        "kwargs": kwargs,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause.value,
        "step": finding.step,
        "position": format_position(finding.position),
        "detail": finding.detail,
        "run": finding.run,
    }


def _figures(figures: StepFigures) -> dict[str, Any]:
    rates = {name: {**dataclasses.asdict(rate), "rate": rate.rate} for name, rate in figures.hit_rates.items()}
    return {
        "step": figures.step,
        "calls": figures.calls,
        "failed": figures.failed,
        "seconds": figures.seconds,
        "median_seconds": figures.median_seconds,
        "hit_rates": rates,
    }


def _what_if(policy: str, result: WhatIf) -> dict[str, Any]:
    report = result.report
    return {
        "policy": policy,
        "seconds": result.seconds,
        "plain_seconds": result.plain_seconds,
        "recorded_seconds": result.recorded_seconds,
        "saved_seconds": result.saved_seconds,
        "speedup": result.speedup,
        "complete": result.is_complete,
        "attempts": report.attempts,
        "ahead": report.ahead,
        "squashed": report.squashed,
        "not_on_record": result.not_on_record,
        "predictions": report.predictions,
        "hits": report.hits,
        "misses": report.misses,
        "wasted_seconds": report.wasted_seconds,
        "money": report.money,
        "wasted_money": report.wasted_money,
        "tokens": report.tokens,
        "wasted_tokens": report.wasted_tokens,
        "steps": [{**dataclasses.asdict(step), "hit_rate": step.hit_rate} for step in report.steps],
    }


def _replay_text(record: RunRecord, results: Sequence[tuple[str, WhatIf]]) -> str:
    first = results[0][1]
    lines = [
        f"run {record.run_id} of {record.program}: {seconds(first.plain_seconds)} s without guesses"
        + (f", {seconds(first.recorded_seconds)} s by the clock" if first.recorded_seconds is not None else "")
        + ("" if first.is_complete else "; it has not ended, and is followed to the end of its record"),
        "",
        table(
            ("policy", "seconds", "saved s", "speedup", "hits", "misses", "wasted s", "money", "wasted money"),
            [
                (
                    text,
                    seconds(result.seconds),
                    seconds(result.saved_seconds),
                    f"{result.speedup:.3g}",
                    result.report.hits,
                    result.report.misses,
                    seconds(result.report.wasted_seconds),
                    f"{result.report.money:.4g}",
                    f"{result.report.wasted_money:.4g}",
                )
                for text, result in results
            ],
        ),
    ]
    unknown = max(result.not_on_record for _text, result in results)
    if unknown:
        lines += ["", f"up to {unknown} attempts on wrong guesses are not on record: their cost is an estimate"]
    return "\n".join(lines)


__all__ = ["draw", "fork", "gc", "replay", "resume", "runs", "show", "stats", "synctest"]
