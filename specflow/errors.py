"""Every error the core raises, as one tree.

::

    SpecflowError
    ├── DefinitionError (ValueError)        something the user declared is wrong; raised before work starts
    │   ├── InvalidSettingError             a setting has a value that cannot work
    │   ├── DuplicateStepError              two different steps of one run have one name
    │   ├── GraphError                      a pipeline has a cycle, an unknown name, a missing input
    │   ├── UnsupportedValueError           a value of a type that cannot be stored exactly
    │   ├── UnknownRunError                 a store has no such run
    │   └── RunExistsError                  the run id is taken
    ├── ExecutionError                      a step, store or effect failed while running
    │   ├── BackendContractError            a backend, drafter or policy broke its protocol
    │   ├── ReplayError                     a workflow cannot be rebuilt from its history
    │   │   ├── ProgramChangedError         its code is not the one the run began with
    │   │   ├── DivergenceError             it made another request than its history says
    │   │   └── ForeignAwaitError           it awaited something that is not a request to its context
    │   ├── StateConflictError              two parallel branches changed the same key
    │   ├── StepTimeoutError (TimeoutError)  a step took longer than it may
    │   ├── DecodingError                   stored bytes do not give a value: unknown type, changed class, damage
    │   ├── EffectUnknownError              a crash left it unknown whether an effect reached the outside world
    │   ├── CompensationError               an effect could not be undone
    │   └── StoreError                      a store could not do what was asked
    │       ├── StoreUnavailableError       its file or folder cannot be used
    │       ├── StoreVersionError           it was written by a newer version of specflow
    │       ├── StaleOwnerError             the run belongs to another process by now
    │       ├── VersionConflictError        the run's head is not the expected one
    │       └── VersionGoneError            that version does not exist, or was collected
    └── MisuseError (RuntimeError)          the library was called in an order it cannot serve
        ├── AdmissionClosedError            a policy admitted items from a draft it had already closed
        ├── SuspendedError                  run_sync() met a coroutine that really waits
        └── RunBusyError                    another live process owns the run

A wrong prediction is not an error: it is a verdict value.
Errors carry facts as attributes, build their own message, and survive pickling.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[SpecflowError], args: tuple[Any, ...], state: dict[str, Any]) -> SpecflowError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class SpecflowError(Exception):
    """Base of every error raised by specflow and its backends."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by attributes, so that subclasses are free to choose their constructor."""
        return _rebuild, (type(self), self.args, self.__dict__)


class DefinitionError(SpecflowError, ValueError):
    """Something the user declared is wrong; raised before work starts."""


class InvalidSettingError(DefinitionError):
    """A setting has a value that cannot work."""

    def __init__(self, setting: str, value: object, expected: str) -> None:
        self.setting = setting
        self.value = value
        self.expected = expected
        super().__init__(f"{setting}={value!r} is not valid: expected {expected}")


class DuplicateStepError(DefinitionError):
    """Two different steps of one run have one name: history, keys and guesses could not tell them apart."""

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        self.first = first
        self.second = second
        super().__init__(
            f"two different steps of one run are named {name!r}: {first} and {second}; give one of them another name "
            "with @step(name=...)"
        )


class GraphError(DefinitionError):
    """A pipeline has a cycle, an unknown name or a missing input."""

    def __init__(self, pipeline: str, problem: str, remedy: str) -> None:
        self.pipeline = pipeline
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"pipeline {pipeline!r}: {problem}; {remedy}")


class UnsupportedValueError(DefinitionError):
    """A value of a type that cannot be stored exactly."""

    def __init__(self, where: str, kind: str, remedy: str) -> None:
        self.where = where
        self.kind = kind
        self.remedy = remedy
        super().__init__(f"{where} holds a value of type {kind}, which cannot be stored exactly; {remedy}")


class UnknownRunError(DefinitionError):
    """A store has no such run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"there is no run {run_id!r} in this store; list_runs() names those there are")


class RunExistsError(DefinitionError):
    """The run id is taken."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"a run {run_id!r} exists already; resume it, or choose another id")


class ExecutionError(SpecflowError):
    """A step, store or effect failed while running."""


class BackendContractError(ExecutionError):
    """A backend, drafter or policy broke its protocol."""

    def __init__(self, who: str, problem: str, rule: str) -> None:
        self.who = who
        self.problem = problem
        self.rule = rule
        super().__init__(f"{who} {problem}; {rule}")


class ReplayError(ExecutionError):
    """A workflow cannot be rebuilt from its history."""


class ProgramChangedError(ReplayError):
    """The code of a program is not the one its run began with."""

    def __init__(self, run_id: str, program: str) -> None:
        self.run_id = run_id
        self.program = program
        super().__init__(
            f"the code of {program} has changed since run {run_id} began; run it under the old code, start a new run, "
            "or resume with allow_changed=True: a difference that shows in its history is still an error"
        )


class DivergenceError(ReplayError):
    """A workflow made another request than its history says."""

    def __init__(self, position: str, recorded: str, made: str) -> None:
        self.position = position
        self.recorded = recorded
        self.made = made
        super().__init__(
            f"at position {position} the history says {recorded}, but the program asked for {made}; either its code "
            "changed since (start a new run, or fork before this position), or it depends on something outside its "
            "arguments and context (use ctx.now, ctx.random, ctx.uuid, or a step)"
        )


class ForeignAwaitError(ReplayError):
    """A workflow awaited something that is not a request to its context."""

    def __init__(self, position: str, awaited: str) -> None:
        self.position = position
        self.awaited = awaited
        super().__init__(
            f"after position {position} the workflow awaited {awaited}; a workflow may await its context only "
            "(ctx.call, ctx.gather, ctx.map, ctx.sleep): move other waiting into a @step"
        )


class StateConflictError(ExecutionError):
    """Two parallel branches changed the same key."""

    def __init__(self, key: str, writers: tuple[str, str]) -> None:
        self.key = key
        self.writers = writers
        super().__init__(
            f"parallel branches {writers[0]} and {writers[1]} both changed state key {key!r}; let one of them write "
            "it, or let all use one operation that merges (add of numbers of one kind, append, union)"
        )


class StepTimeoutError(ExecutionError, TimeoutError):
    """A step took longer than it may."""

    def __init__(self, step: str, seconds: float) -> None:
        self.step = step
        self.seconds = seconds
        super().__init__(f"step {step} took longer than its timeout of {seconds} s")


class DecodingError(ExecutionError):
    """Stored bytes do not give a value."""

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        self.problem = problem
        super().__init__(f"{where} cannot be decoded: {problem}")


class EffectUnknownError(ExecutionError):
    """A crash left it unknown whether an effect reached the outside world."""

    def __init__(self, run_id: str, step: str, position: str, key: str) -> None:
        self.run_id = run_id
        self.step = step
        self.position = position
        self.key = key
        super().__init__(
            f"run {run_id}: step {step} at position {position} was started before a crash and may have changed the "
            f"outside world; find out (idempotency key {key}), then resume with resolve={{{key!r}: Sent(result)}}, "
            "with writes= where it writes the state, or NotSent(); or give the step a probe"
        )


class CompensationError(ExecutionError):
    """An effect could not be undone."""

    def __init__(self, run_id: str, step: str, position: str, reason: str) -> None:
        self.run_id = run_id
        self.step = step
        self.position = position
        self.reason = reason
        super().__init__(f"run {run_id}: the undo of step {step} at position {position} kept failing: {reason}")


class StoreError(ExecutionError):
    """A store could not do what was asked."""


class StoreUnavailableError(StoreError):
    """A store's file or folder cannot be used."""

    def __init__(self, place: str, problem: str) -> None:
        self.place = place
        self.problem = problem
        super().__init__(f"the store at {place} cannot be used: {problem}")


class StoreVersionError(StoreError):
    """A store was written by a newer version of specflow."""

    def __init__(self, place: str, found: int, known: int) -> None:
        self.place = place
        self.found = found
        self.known = known
        super().__init__(
            f"the store at {place} has schema version {found}, this specflow knows up to {known}; update specflow"
        )


class StaleOwnerError(StoreError):
    """The run belongs to another process by now."""

    def __init__(self, run_id: str, owner: str, fence: int) -> None:
        self.run_id = run_id
        self.owner = owner
        self.fence = fence
        super().__init__(
            f"{owner} no longer owns run {run_id} (its lease {fence} was superseded); nothing was written, stop here"
        )


class VersionConflictError(StoreError):
    """The run's head is not the expected one."""

    def __init__(self, run_id: str, expected: int, found: int) -> None:
        self.run_id = run_id
        self.expected = expected
        self.found = found
        super().__init__(f"run {run_id} is at version {found}, not {expected}; nothing was written")


class VersionGoneError(StoreError):
    """That version does not exist, or was collected."""

    def __init__(self, run_id: str, version: int, problem: str) -> None:
        self.run_id = run_id
        self.version = version
        self.problem = problem
        super().__init__(f"version {version} of run {run_id} is not available: {problem}")


class MisuseError(SpecflowError, RuntimeError):
    """The library was called in an order it cannot serve."""


class AdmissionClosedError(MisuseError):
    """A policy admitted items from a draft it had already closed, or past its end."""

    def __init__(self, index: int, asked: int, available: int) -> None:
        self.index = index
        self.asked = asked
        self.available = available
        super().__init__(
            f"cannot admit {asked} more item(s) of draft {index}: {available} can still be admitted; "
            "check frontier.available(index) first"
        )


class SuspendedError(MisuseError):
    """run_sync() met a coroutine that really waits."""

    def __init__(self, awaited: object) -> None:
        self.awaited = repr(awaited)
        super().__init__(
            f"run_sync() drives coroutines that never suspend, but this one waits on {self.awaited}; "
            "await it inside an event loop instead"
        )


class RunBusyError(MisuseError):
    """Another live process owns the run."""

    def __init__(self, run_id: str, owner: str) -> None:
        self.run_id = run_id
        self.owner = owner
        super().__init__(
            f"run {run_id} is owned by {owner}, which seems alive; wait for it, or take over with take_over=True"
        )
