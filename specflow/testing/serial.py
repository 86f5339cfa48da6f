"""The serial oracle: a program run one step at a time, with nothing predicted and nothing scheduled.

What every other way of running the program has to equal. It is written to be read: one loop that answers one request
after another, plain dictionaries for the state, and no code of the scheduler or the runtime. Branches of a gather and
steps of a pipeline run one after another in program order, each on its own copy of the state.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from immutables import Map

from ..chain import run_sync
from ..codec import decode, decode_error, encode, encode_error
from ..definitions import Attempt, Step, Workflow
from ..effects import Effect, idempotency_key
from ..errors import (
    CompensationError,
    DefinitionError,
    DivergenceError,
    ForeignAwaitError,
    MisuseError,
    SpecflowError,
    StateConflictError,
    SuspendedError,
    UnsupportedValueError,
)
from ..graph import Graph, Node, Pipeline
from ..history import Entry, EntryKind, Operation, Position, Write, format_position
from ..replay import CallRequest, Context, GatherRequest, PendingCall, Program, SleepRequest, call_alone, seed_of
from ..state import State
from ..stores.cells import apply

_UNDO_TRIES = 3
"""Tries of an undo whose step declares no retry of its own."""


@dataclass(frozen=True, slots=True)
class SerialEffect:
    """One thing the program did to the outside world."""

    action: Literal["do", "send", "undo"]
    """``do``: an external step ran; ``send``: a buffered one; ``undo``: a compensable one was undone."""
    step: str
    queue: str
    """The step's resource, or its name: effects of one queue have an order."""
    position: Position
    key: str
    """Idempotency key."""
    arguments: bytes
    """Encoded ``[args, kwargs]``."""
    result: bytes | None
    error: bytes | None


@dataclass(frozen=True, slots=True)
class SerialRun:
    """What a program does when it runs alone."""

    value: Any
    """What it returned; None when it raised."""
    error: BaseException | None
    """What it raised; None when it returned."""
    entries: tuple[Entry, ...]
    """Its history, as a store would keep it; durations are 0."""
    versions: tuple[Mapping[str, bytes], ...]
    """The state after each entry, encoded."""
    events: tuple[Any, ...]
    """What it emitted, in order."""
    effects: tuple[SerialEffect, ...]
    """What the outside world saw, in order."""

    @property
    def state(self) -> Mapping[str, bytes]:
        """Encoded value of every key at the end."""
        return self.versions[-1] if self.versions else {}

    def differences(
        self,
        *,
        entries: Sequence[Entry],
        state: Mapping[str, bytes] | None = None,
        events: Sequence[Any] | None = None,
        outcome: tuple[Any, BaseException | None] | None = None,
    ) -> tuple[str, ...]:
        """In what another run of the same program under the same run id differs from this one.

        Values are compared in canonical form. Times are not compared. Of a conflict between parallel branches only the
        key is compared, and of the entry where branches come together the state it leads to.

        Args:
            entries: the other run's history.
            state: its final state, encoded; None is not compared.
            events: its committed stream; None is not compared.
            outcome: the value it returned and the exception it raised; None is not compared.

        Returns:
            One sentence for each difference, beginning with the broken promise: ``state``, ``history``, ``stream`` or
            ``outcome``. Empty when there is none.
        """
        found: list[str] = []
        if outcome is not None:
            expected, seen = _outcome_key(self.value, self.error), _outcome_key(*outcome)
            if expected != seen:
                found.append(f"outcome: {seen!r} instead of {expected!r}")
        if state is not None and dict(state) != dict(self.state):
            found.append(f"state: {_shown(state)} instead of {_shown(self.state)}")
        found.extend(self._history_differences(entries))
        if events is not None:
            emitted = [encode(event) for event in events]
            expected_events = [encode(event) for event in self.events]
            if emitted != expected_events:
                found.append(f"stream: {emitted!r} instead of {expected_events!r}")
        return tuple(found)

    def _history_differences(self, entries: Sequence[Entry]) -> Iterable[str]:
        version: dict[str, bytes] = {}
        for number, (entry, expected) in enumerate(zip(entries, self.entries, strict=False), start=1):
            if _entry_key(entry) != _entry_key(expected):
                yield f"history: entry {number} is {_entry_key(entry)!r} instead of {_entry_key(expected)!r}"
                return
            _apply_all(version, entry.writes)
            if version != self.versions[number - 1]:
                yield f"history: version {number} is {_shown(version)} instead of {_shown(self.versions[number - 1])}"
                return
        if len(entries) != len(self.entries):
            yield f"history: {len(entries)} entries instead of {len(self.entries)}"


def run_serial(
    program: Workflow[..., Any] | Pipeline, /, *args: Any, run_id: str = "serial", at: float = 0.0, **kwargs: Any
) -> SerialRun:
    """Run a workflow or pipeline to its end, one step at a time.

    Steps may be plain or async functions; async ones must not really wait. They are called as they are: in this thread,
    without timeouts; a declared retry is made at once. A step that fails leaves no change of the state behind.

    Args:
        program: what to run.
        args: for the program.
        run_id: part of idempotency keys, and the seed of random draws: equal for runs that are to be compared.
        at: the constant wall-clock time that ``ctx.now()`` shows, in seconds since the epoch.
        kwargs: for the program.

    Raises:
        DefinitionError: the program or its arguments cannot work.
        SuspendedError: a step really waits.
    """
    program.bind(args, kwargs)
    arguments = encode([[*args], kwargs], f"the arguments of {program.name}")
    run = _Run(run_id, at)
    root = _Branch(run, {}, nested=False)
    if isinstance(program, Pipeline):
        _args, inputs = decode(arguments)
        run.finish(root, program.name, lambda: run.pipeline(root, program.freeze(), inputs))
    else:
        own_args, own_kwargs = decode(arguments)
        body = _body(program, own_args, own_kwargs)
        run.finish(root, program.name, lambda: run.drive(root, body, ()))
    return run.result()


class SerialState(State):
    """The state as a dictionary."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__(Map())
        self.values = values
        self.writes: list[Write] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or ``default``."""
        data = self.values.get(_checked(key))
        return default if data is None else decode(data)

    def __contains__(self, key: str) -> bool:
        return _checked(key) in self.values

    def scan(self, prefix: str = "") -> list[tuple[str, Any]]:
        """All keys that begin with ``prefix`` and their values, sorted by key."""
        return [(key, decode(data)) for key, data in sorted(self.values.items()) if key.startswith(prefix)]

    def put(self, key: str, value: Any) -> None:
        """Set a key."""
        self._change(key, Operation.PUT, encode(value, f"state {key!r}"))

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._change(key, Operation.DELETE, b"")

    def add(self, key: str, amount: Any) -> None:
        """Add a number."""
        self._change(key, Operation.ADD, encode(amount, f"state {key!r}"))

    def append(self, key: str, item: Any) -> None:
        """Append to a list."""
        self._change(key, Operation.APPEND, encode(item, f"state {key!r}"))

    def union(self, key: str, items: Iterable[Any]) -> None:
        """Add items to a set."""
        self._change(key, Operation.UNION, encode(set(items), f"state {key!r}"))

    def _change(self, key: str, operation: Operation, data: bytes) -> None:
        write = Write(_checked(key), operation, data)
        _apply_all(self.values, [write])
        self.writes.append(write)


class _Answer(NamedTuple):
    """What a request is answered with."""

    result: bytes | None
    error: bytes | None

    @property
    def failed(self) -> bool:
        return self.error is not None


_SILENT = _Answer(None, None)
"""Of entries that record no answer."""


class _Branch:
    """Stands where the engine has a program being driven: the workflow itself, or one parallel branch of it."""

    def __init__(self, run: _Run, values: dict[str, bytes], *, nested: bool) -> None:
        self.state = SerialState(values)
        self.at = run.at
        self.events: list[bytes] = []
        """Emitted since the entry before."""
        self.seed = seed_of(run.run_id)
        self.nested = nested
        self.all_writes: list[Write] = []
        """Every change so far, the program's own and those of its steps, in order."""

    def take_writes(self, more: Sequence[Write]) -> tuple[Write, ...]:
        """The program's changes since the entry before, and ``more``."""
        taken = (*self.state.writes, *more)
        self.state.writes.clear()
        self.all_writes.extend(taken)
        return taken


class _Run:
    def __init__(self, run_id: str, at: float) -> None:
        self.run_id = run_id
        self.at = at
        self.entries: list[Entry] = []
        self.versions: list[dict[str, bytes]] = []
        self.effects: list[SerialEffect] = []
        self.undos: list[Callable[[], BaseException | None]] = []
        """How to undo each compensable effect, oldest first."""
        self.answer = _Answer(encode(None), None)

    def result(self) -> SerialRun:
        """The finished account."""
        error = decode_error(self.answer.error) if self.answer.error is not None else None
        value = decode(self.answer.result) if self.answer.result is not None else None
        events = tuple(decode(data) for entry in self.entries for data in entry.events)
        return SerialRun(value, error, tuple(self.entries), tuple(self.versions), events, tuple(self.effects))

    def finish(self, root: _Branch, name: str, body: Callable[[], _Answer]) -> None:
        """Run the program, undo what a failure calls for, and write the end."""
        self.answer = body()
        if self.answer.failed:
            for undo in reversed(self.undos):
                problem = undo()
                if problem is not None:
                    self.answer = _Answer(None, encode_error(problem))
                    return
        self.record(root, (), EntryKind.END, name, answer=self.answer)

    def record(
        self,
        branch: _Branch,
        position: Position,
        kind: EntryKind,
        name: str | None = None,
        *,
        arguments: bytes = b"",
        answer: _Answer = _SILENT,
        step_writes: Sequence[Write] = (),
        late_events: Sequence[bytes] = (),
    ) -> None:
        """Add an entry, with the changes and events of its branch since the one before."""
        writes = branch.take_writes(step_writes)
        events = (*branch.events, *late_events)
        branch.events.clear()
        self.entries.append(
            Entry(
                position,
                kind,
                name if name is not None else kind.value,
                arguments,
                answer.result,
                answer.error,
                () if branch.nested else writes,
                writes if branch.nested else (),
                events,
                self.at,
                0.0,
            )
        )
        before = self.versions[-1] if self.versions else {}
        self.versions.append(dict(before if branch.nested else branch.state.values))

    # ------------------------------------------------------------------------------------------------------- programs

    def drive(self, branch: _Branch, body: Callable[[Context], Coroutine[Any, Any, Any]], prefix: Position) -> _Answer:
        """Run one coroutine to its end, answering its requests one after another."""
        context = Context(cast("Program", branch), prefix)
        coroutine = body(context)
        last = prefix
        send: Callable[[Any], Any] = coroutine.send
        value: Any = None
        try:
            while True:
                request = send(value)
                if isinstance(request, CallRequest):
                    answer = self.call(branch, request)
                elif isinstance(request, GatherRequest):
                    answer = self.gather(branch, request)
                elif isinstance(request, SleepRequest):
                    answer = _Answer(encode(None), None)
                    self.record(branch, request.position, EntryKind.SLEEP)
                else:
                    coroutine.close()
                    raise ForeignAwaitError(format_position(last) or "the start", repr(request))  # noqa: TRY301
                last = request.position
                if answer.error is not None:
                    send, value = coroutine.throw, decode_error(answer.error)
                else:
                    send, value = coroutine.send, decode(answer.result or b"")
        except StopIteration as done:
            return self._returned(context, done.value)
        except SuspendedError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a program raises is its outcome
            return _Answer(None, encode_error(error))

    def _returned(self, context: Context, value: Any) -> _Answer:
        try:
            context.close()
            return _Answer(encode(value, "the workflow's result"), None)
        except (DefinitionError, MisuseError) as error:
            return _Answer(None, encode_error(error))

    def gather(self, branch: _Branch, request: GatherRequest) -> _Answer:
        """Run the branches one after another, each on the state as it was, then merge what they changed."""
        self.record(branch, request.position, EntryKind.FORK)
        base = dict(branch.state.values)
        # Every branch gets its arguments as they were when the gather began.
        bodies = [_isolated(pending) for pending in request.calls]
        answers: list[_Answer] = []
        changes: list[tuple[str, Sequence[Write]]] = []
        late_events: list[bytes] = []
        for index, (pending, body) in enumerate(zip(request.calls, bodies, strict=True)):
            prefix = (*request.position, index)
            own = _Branch(self, dict(base), nested=True)
            answers.append(self.drive(own, body, prefix))
            own.take_writes(())
            changes.append((f"{pending.target.name} ({format_position(prefix)})", own.all_writes))
            late_events += own.events
        answer = _joined(answers, return_exceptions=request.return_exceptions)
        return self._join(branch, request.position, lambda: _merge(base, changes), answer, late_events)

    def _join(
        self,
        branch: _Branch,
        position: Position,
        merge: Callable[[], Sequence[Write]],
        answer: _Answer,
        late_events: Sequence[bytes],
    ) -> _Answer:
        """Branches came together: their changes become those of the branch that started them."""
        writes: Sequence[Write] = ()
        try:
            writes = merge()
        except StateConflictError as conflict:
            answer = _Answer(None, encode_error(conflict))
        _apply_all(branch.state.values, writes)
        self.record(branch, position, EntryKind.JOIN, step_writes=writes, late_events=late_events)
        return answer

    # ------------------------------------------------------------------------------------------------------ pipelines

    def pipeline(self, root: _Branch, graph: Graph, inputs: Mapping[str, Any]) -> _Answer:
        """Run the steps in program order, each on the changes of those it reads, directly or through others."""
        self.record(root, (0,), EntryKind.FORK)
        index = {node.name: place for place, node in enumerate(graph.nodes)}
        before: list[set[int]] = []
        for node in graph.nodes:
            direct = {index[name] for name in node.reads}
            before.append(direct.union(*(before[place] for place in direct)))
        base = dict(root.state.values)
        answers: list[_Answer] = []
        changes: list[tuple[str, Sequence[Write]]] = []
        for place, node in enumerate(graph.nodes):
            own = _Branch(self, dict(base), nested=True)
            try:
                inherited = _ordered(base, changes, before, before[place])
                _apply_all(own.state.values, inherited)
                answers.append(self._node(own, (0, place), node, inputs, answers, index))
            except StateConflictError as conflict:
                answers.append(_Answer(None, encode_error(conflict)))
            changes.append((node.name, own.all_writes))
        answer = _joined(answers, return_exceptions=False)
        answer = self._join(root, (0,), lambda: _ordered(base, changes, before, set(range(len(changes)))), answer, ())
        if answer.failed:
            return answer
        results = {node.name: decode(one.result or b"") for node, one in zip(graph.nodes, answers, strict=True)}
        if graph.output is not None:
            return _Answer(encode(results[graph.output]), None)
        read = {name for node in graph.nodes for name in node.reads}
        return _Answer(encode({name: value for name, value in results.items() if name not in read}), None)

    def _node(
        self,
        branch: _Branch,
        prefix: Position,
        node: Node,
        inputs: Mapping[str, Any],
        answers: Sequence[_Answer],
        index: Mapping[str, int],
    ) -> _Answer:
        read = [answers[index[name]] for name in node.reads]
        failed = next((answer for answer in read if answer.failed), None)
        if failed is not None:
            return failed
        known = {name: decode(answer.result or b"") for name, answer in zip(node.reads, read, strict=True)}
        if any(known[name] not in allowed for name, allowed in node.when):
            return _Answer(encode(None), None)
        available = {**decode(encode(dict(inputs))), **known}
        chosen = {name: available[name] for name in node.step.signature.parameters if name in available}
        position = (*prefix, 1 if node.reads else 0)
        return self.call(branch, CallRequest(position, node.step, (), chosen))

    # ---------------------------------------------------------------------------------------------------------- steps

    def call(self, branch: _Branch, request: CallRequest) -> _Answer:
        """Run one step."""
        step = request.step
        try:
            arguments = encode([[*request.args], request.kwargs], f"the arguments of {step.name}")
        except SpecflowError as error:
            answer = _Answer(None, encode_error(error))
            self.record(branch, request.position, EntryKind.CALL, step.name, answer=answer)
            return answer
        key = idempotency_key(self.run_id, request.position, step.name, arguments)
        if step.effect is Effect.BUFFERED:
            sent, _writes = self._try(step, request.position, arguments, key, {})
            self._note("send", step, request.position, key, arguments, sent)
            answer, writes = _Answer(encode(None), None), list[Write]()
        else:
            answer, writes = self._try(step, request.position, arguments, key, branch.state.values)
            if step.effect.is_external:
                self._note("do", step, request.position, key, arguments, answer)
            if step.effect is Effect.COMPENSABLE and not answer.failed:
                self.undos.append(lambda: self._undo(step, request.position, arguments, answer))
        _apply_all(branch.state.values, writes)
        self.record(
            branch, request.position, EntryKind.CALL, step.name, arguments=arguments, answer=answer, step_writes=writes
        )
        return answer

    def _note(
        self,
        action: Literal["do", "send", "undo"],
        step: Step[..., Any],
        position: Position,
        key: str,
        arguments: bytes,
        answer: _Answer,
    ) -> None:
        queue = step.resource or step.name
        self.effects.append(
            SerialEffect(action, step.name, queue, position, key, arguments, answer.result, answer.error)
        )

    def _try(
        self, step: Step[..., Any], position: Position, arguments: bytes, key: str, values: Mapping[str, bytes]
    ) -> tuple[_Answer, list[Write]]:
        for number in range(1, step.retry.attempts + 1):
            state = SerialState(dict(values))
            args, kwargs = decode(arguments)
            if step.state_parameter is not None:
                kwargs[step.state_parameter] = state
            if step.attempt_parameter is not None:
                kwargs[step.attempt_parameter] = Attempt(self.run_id, position, key, number)
            try:
                result = encode(_plain(step.function(*args, **kwargs)), f"the result of {step.name}")
            except SuspendedError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - what a step raises is its outcome
                if number == step.retry.attempts or not isinstance(error, step.retry.on):
                    return _Answer(None, encode_error(error)), []
            else:
                return _Answer(result, None), state.writes
        raise DivergenceError(format_position(position), "a try that ends", "none")  # attempts >= 1: not reached

    def _undo(self, step: Step[..., Any], position: Position, arguments: bytes, done: _Answer) -> BaseException | None:
        undo = step.undo
        if undo is None:
            return None
        key = idempotency_key(self.run_id, position, step.name, arguments, "undo")
        tries = step.retry.attempts if step.retry.attempts > 1 else _UNDO_TRIES
        problem: BaseException | None = None
        for _number in range(tries):
            args, kwargs = decode(arguments)
            try:
                result = encode(_plain(undo(decode(done.result or b""), *args, **kwargs)))
            except SuspendedError:
                raise
            except Exception as error:  # noqa: BLE001 - tried again, then reported
                problem = error
            else:
                self._note("undo", step, position, key, arguments, _Answer(result, None))
                return None
        return CompensationError(self.run_id, step.name, format_position(position), repr(problem))


def _plain(value: Any) -> Any:
    """What a step returned; a coroutine is run, and must not wait."""

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return run_sync(wait(value)) if inspect.isawaitable(value) else value


def _body(
    target: Step[..., Any] | Workflow[..., Any], args: Any, kwargs: Any
) -> Callable[[Context], Coroutine[Any, Any, Any]]:
    return lambda context: call_alone(context, target, args, kwargs)


def _isolated(pending: PendingCall[Any]) -> Callable[[Context], Coroutine[Any, Any, Any]]:
    """The body of a branch, on copies of its arguments."""
    args = tuple(_copied(value) for value in pending.args)
    return _body(pending.target, args, {name: _copied(value) for name, value in pending.kwargs.items()})


def _copied(value: Any) -> Any:
    try:
        return decode(encode(value))
    except UnsupportedValueError:
        return value  # a step refuses it when it is called; a workflow may take a function or a step


def _joined(answers: Sequence[_Answer], *, return_exceptions: bool) -> _Answer:
    failed = next((answer for answer in answers if answer.failed), None)
    if failed is not None and not return_exceptions:
        return failed
    values = [(decode(answer.result) if answer.result is not None else None, answer.error) for answer in answers]
    return _Answer(encode(values), None)


def _merge(base: Mapping[str, bytes], branches: Sequence[tuple[str, Sequence[Write]]]) -> list[Write]:
    """Changes of branches that started from the same state, in their order."""
    changed: dict[str, tuple[str, Operation | None]] = {}
    merged: list[Write] = []
    for name, writes in branches:
        for key in dict.fromkeys(write.key for write in writes):
            own = [write for write in writes if write.key == key]
            kinds = {write.operation for write in own}
            kind = own[0].operation if len(kinds) == 1 and own[0].operation.is_blind else None
            after = dict(base)
            _apply_all(after, own)
            if kind is None and after.get(key) == base.get(key):
                continue  # left as it was
            if key in changed and (kind is None or changed[key][1] is not kind):
                raise StateConflictError(key, (changed[key][0], name))
            changed[key] = (name, kind)
            merged.extend(own)
    _check_together(base, merged, changed)
    return merged


def _check_together(base: Mapping[str, bytes], merged: Sequence[Write], changed: Mapping[str, tuple[str, Any]]) -> None:
    """Numbers that fit the state one by one need not fit each other."""
    values = dict(base)
    for write in merged:
        try:
            _apply_all(values, [write])
        except UnsupportedValueError:
            raise StateConflictError(write.key, (changed[write.key][0], changed[write.key][0])) from None


def _ordered(
    base: Mapping[str, bytes],
    changes: Sequence[tuple[str, Sequence[Write]]],
    before: Sequence[set[int]],
    chosen: set[int],
) -> list[Write]:
    """Changes of steps of a pipeline in program order; two that no dependency orders must not touch the same key.

    A step has changed what it left different from how it found it, after the steps before it.
    """
    kept: dict[int, list[Write]] = {}
    for place in sorted(chosen):
        found = dict(base)
        for earlier in sorted(before[place]):
            _apply_all(found, kept[earlier])
        own = changes[place][1]
        kept[place] = [write for write in own if _merge(found, [("", [w for w in own if w.key == write.key])])]
    for earlier, later in itertools.combinations(kept, 2):
        if earlier in before[later]:
            continue
        both = [*kept[earlier], *kept[later]]
        for key in sorted({write.key for write in kept[earlier]} & {write.key for write in kept[later]}):
            kinds = {write.operation for write in both if write.key == key}
            if len(kinds) > 1 or not next(iter(kinds)).is_blind:
                raise StateConflictError(key, (changes[earlier][0], changes[later][0]))
    merged = [write for writes in kept.values() for write in writes]
    _check_together(base, merged, {write.key: ("several branches", None) for write in merged})
    return merged


def _apply_all(values: dict[str, bytes], writes: Iterable[Write]) -> None:
    for write in writes:
        data = apply(values.get(write.key), write)
        if data is None:
            values.pop(write.key, None)
        else:
            values[write.key] = data


def _checked(key: str) -> str:
    if type(key) is not str or not key:
        raise UnsupportedValueError("the state", f"key {key!r}", "use a non-empty str as key")
    return key


def _entry_key(entry: Entry) -> tuple[Any, ...]:
    """What has to be equal of an entry."""
    is_join = entry.kind is EntryKind.JOIN
    error = _error_key(decode_error(entry.error)) if entry.error is not None else None
    return (
        entry.position,
        entry.kind.value,
        entry.step,
        b"" if entry.kind is EntryKind.END else entry.arguments,
        entry.result,
        error,
        () if is_join else entry.writes,
        () if is_join else entry.branch_writes,
        entry.events,
    )


def _outcome_key(value: Any, error: BaseException | None) -> Any:
    return ("returned", encode(value)) if error is None else ("raised", _error_key(error))


def _error_key(error: BaseException) -> Any:
    if isinstance(error, StateConflictError):
        return ("StateConflictError", error.key)
    notes = getattr(error, "__notes__", None)
    if notes is not None:  # the runtime notes the run's name on what it raises
        error = decode_error(encode_error(error))
        del error.__notes__
    return encode_error(error)


def _shown(state: Mapping[str, bytes]) -> str:
    return ", ".join(f"{key}={data.decode('utf-8', 'replace')}" for key, data in sorted(state.items())) or "nothing"


__all__ = ["SerialEffect", "SerialRun", "SerialState", "run_serial"]
