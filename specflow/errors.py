"""Every error the core raises, as one tree.

::

    SpecflowError
    ├── DefinitionError (ValueError)        something the user declared is wrong; raised before work starts
    │   └── InvalidSettingError             a setting has a value that cannot work
    ├── ExecutionError                      a step, store or effect failed while running
    │   └── BackendContractError            a backend, drafter or policy broke its protocol
    └── MisuseError (RuntimeError)          the library was called in an order it cannot serve
        ├── AdmissionClosedError            a policy admitted items from a draft it had already closed
        └── SuspendedError                  run_sync() met a coroutine that really waits

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


class ExecutionError(SpecflowError):
    """A step, store or effect failed while running."""


class BackendContractError(ExecutionError):
    """A backend, drafter or policy broke its protocol."""

    def __init__(self, who: str, problem: str, rule: str) -> None:
        self.who = who
        self.problem = problem
        self.rule = rule
        super().__init__(f"{who} {problem}; {rule}")


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
