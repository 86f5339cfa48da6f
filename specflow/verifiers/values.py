"""Verifiers of whole values: equality, tolerance, chosen fields, a predicate, a judge.

A run may claim the mode of the least strict verifier that accepted a guess. Only equality of the encoded values is
:attr:`~specflow.types.Mode.EXACT`: then no step that runs on the guess can tell it from the real result.
"""

from __future__ import annotations

import cmath
import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

from ..codec import equal
from ..errors import BackendContractError, InvalidSettingError, UnsupportedValueError
from ..speculation import Verdict
from ..types import Mode

_REJECTED = Verdict(accepted=False)
_ACCEPTED = Verdict(accepted=True)
_MISSING = object()

_DECIMALS = Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""For differences of Decimals: more digits and larger exponents than data has."""


def _verdict(accepted: bool) -> Verdict:  # noqa: FBT001 -- the one thing it is made of
    return _ACCEPTED if accepted else _REJECTED


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _equal(predicted: Any, actual: Any, **how: Any) -> bool:
    """Equality of encodings. A guess that cannot be encoded is a wrong guess."""
    try:
        return equal(predicted, actual, **how)
    except UnsupportedValueError:
        return False


@dataclass(frozen=True, slots=True)
class Equal:
    """The guess equals the result: same types, same content, all the way down (:func:`specflow.codec.equal`).

    NaN equals NaN, sets are equal by content, ``1``, ``1.0`` and ``True`` differ. Two pydantic models with equal fields
    differ when not the same fields were set explicitly; :class:`SameFields` ignores that.
    """

    ignore_order: bool = False
    """Let the order of dictionary keys differ. A program can see that order, so such a run is LOSSY."""

    @property
    def mode(self) -> Mode:
        """EXACT, or LOSSY when order is ignored."""
        return Mode.LOSSY if self.ignore_order else Mode.EXACT

    def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Accept an equal value."""
        return _verdict(_equal(predicted, actual, ignore_order=self.ignore_order))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers may differ a little, wherever they stand in values that are equal otherwise.

    Two numbers of the same type (int, float, complex, Decimal or Fraction; a bool is not a number) hold for equal when
    ``|predicted - actual| <= max(absolute, relative * max(|predicted|, |actual|))`` (PEP 485). Members of sets, keys of
    dictionaries, and the parts of dates and durations have to be equal.

    Raises:
        InvalidSettingError: ``absolute`` is not a finite number >= 0, or ``relative`` not one in [0, 1).
    """

    absolute: float = 0.0
    """In the unit of the numbers."""
    relative: float = 0.0
    """As a share of the larger of the two."""

    def __post_init__(self) -> None:
        if not _is_number(self.absolute) or not 0.0 <= self.absolute < math.inf:
            raise InvalidSettingError("absolute", self.absolute, "a finite number >= 0")
        if not _is_number(self.relative) or not 0.0 <= self.relative < 1.0:
            raise InvalidSettingError("relative", self.relative, "a number in [0, 1)")

    @property
    def mode(self) -> Mode:
        """LOSSY, or EXACT when both tolerances are 0."""
        return Mode.LOSSY if self.absolute or self.relative else Mode.EXACT

    def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Accept a value whose numbers are close enough."""
        close = self._close if self.absolute or self.relative else None
        return _verdict(_equal(predicted, actual, close=close))

    def _close(self, predicted: Any, actual: Any) -> bool:
        if isinstance(predicted, float):
            return math.isclose(predicted, actual, rel_tol=self.relative, abs_tol=self.absolute)
        if isinstance(predicted, complex):
            return cmath.isclose(predicted, actual, rel_tol=self.relative, abs_tol=self.absolute)
        if isinstance(predicted, Decimal):
            with localcontext(_DECIMALS):
                is_finite = predicted.is_finite() and actual.is_finite()
                return is_finite and self._within(predicted, actual, Decimal)
        return self._within(Fraction(predicted), Fraction(actual), Fraction)

    def _within(self, predicted: Any, actual: Any, kind: Callable[[float], Any]) -> bool:
        scale = max(abs(predicted), abs(actual))
        return bool(abs(predicted - actual) <= max(kind(self.absolute), kind(self.relative) * scale))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Predicate:
    """The guess holds when ``function(predicted, actual)`` says so.

    The run goes on with the guess, so this is LOSSY unless the function accepts nothing but values that no later step
    can tell apart; then say ``mode=Mode.EXACT``.

    Raises:
        InvalidSettingError: ``function`` cannot be called or is async, or ``mode`` is not a :class:`Mode`.
    """

    function: Callable[[Any, Any], bool]
    """Quick and pure; returns True or False."""
    mode: Mode = Mode.LOSSY
    """What a run whose guesses are accepted by it may claim."""

    def __post_init__(self) -> None:
        _check(self.function, self.mode)
        if inspect.iscoroutinefunction(self.function):
            raise InvalidSettingError("function", self.function, "a plain function; Judge takes an async one")

    def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Ask the function.

        Raises:
            BackendContractError: it returned something else than True or False.
        """
        answer: object = self.function(predicted, actual)
        if not isinstance(answer, bool):
            raise BackendContractError(
                f"predicate {_name(self.function)}", f"returned {answer!r}", "return True or False"
            )
        return _verdict(answer)


class SameFields:
    """Guess and result are of one type, and some of their fields are equal.

    For pydantic models, dataclasses, named tuples and dictionaries whose keys are strings. Of models inside the fields
    all fields are compared. Which fields of a model were set explicitly, and its private attributes, never decide. A
    field that is named here and missing in either value counts as different, so a misspelt name accepts nothing.
    Values without fields, such as None, are compared whole.

    Args:
        fields: names of the fields to compare; none for all.
        ignore: instead, names of the fields to leave out, such as ids and timestamps.

    Raises:
        InvalidSettingError: a name is not a string, or both kinds of names are given.
    """

    __slots__ = ("_fields", "_ignore")

    def __init__(self, *fields: str, ignore: tuple[str, ...] | list[str] | set[str] | frozenset[str] = ()) -> None:
        if isinstance(ignore, str):
            raise InvalidSettingError("ignore", ignore, "a collection of names, such as ('id',)")
        for setting, names in (("fields", fields), ("ignore", ignore)):
            if not all(isinstance(name, str) for name in names):
                raise InvalidSettingError(setting, names, "names of fields")
        if fields and ignore:
            raise InvalidSettingError("ignore", ignore, "nothing, because the fields to compare are named")
        self._fields = fields
        self._ignore = frozenset(ignore)

    @property
    def mode(self) -> Mode:
        """LOSSY: a program can see what is not compared."""
        return Mode.LOSSY

    def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Accept a value whose compared fields are equal."""
        if type(predicted) is not type(actual):
            return _REJECTED
        left, right = _fields_of(predicted), _fields_of(actual)
        if left is None or right is None:
            return _verdict(_equal(predicted, actual, fields_only=True))
        if self._fields:
            if not all(name in left and name in right for name in self._fields):
                return _REJECTED
            wanted = set(self._fields)
        else:
            wanted = (left.keys() | right.keys()) - self._ignore
        left, right = ({name: side[name] for name in sorted(wanted & side.keys())} for side in (left, right))
        return _verdict(_equal(left, right, fields_only=True))

    def __repr__(self) -> str:
        names = [repr(name) for name in self._fields]
        if self._ignore:
            names.append(f"ignore={sorted(self._ignore)!r}")
        return f"SameFields({', '.join(names)})"


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The named parts of a value; None when it has none."""
    kind = type(value)
    if kind is dict:
        return value if all(isinstance(key, str) for key in value) else None
    names: Any = getattr(kind, "model_fields", None)
    if isinstance(names, dict) and isinstance(getattr(value, "__pydantic_fields_set__", None), set):
        extra: dict[str, Any] = getattr(value, "__pydantic_extra__", None) or {}
        return _set_attributes(value, names) | extra
    if dataclasses.is_dataclass(value):
        return _set_attributes(value, (field.name for field in dataclasses.fields(value)))
    names = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple):
        return dict(zip(names, value, strict=False))
    return None


def _set_attributes(value: object, names: Iterable[str]) -> dict[str, Any]:
    found = {name: getattr(value, name, _MISSING) for name in names}
    return {name: item for name, item in found.items() if item is not _MISSING}


@dataclass(frozen=True, slots=True)
class Judge:
    """An expensive check, such as a model that compares two answers. The world goes on running ahead meanwhile.

    ``await function(predicted, actual)`` returns True or False, or a :class:`~specflow.speculation.Verdict`, which may
    also replace the value by a better one.

    Raises:
        InvalidSettingError: ``function`` cannot be called, or ``mode`` is not a :class:`Mode`.
    """

    function: Callable[[Any, Any], Awaitable[bool | Verdict]]
    mode: Mode = Mode.LOSSY
    """What a run whose guesses are accepted by it may claim."""

    def __post_init__(self) -> None:
        _check(self.function, self.mode)

    async def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Ask the function.

        Raises:
            BackendContractError: it is not async, or returned something else than a bool or a Verdict.
        """
        answer: object = self.function(predicted, actual)
        who = f"judge {_name(self.function)}"
        if not inspect.isawaitable(answer):
            raise BackendContractError(who, f"returned {answer!r} at once", "make it async, or use Predicate")
        answer = await answer
        if isinstance(answer, bool):
            return _verdict(answer)
        if isinstance(answer, Verdict):
            return answer
        raise BackendContractError(who, f"returned {answer!r}", "return True, False or a Verdict")


def _check(function: object, mode: object) -> None:
    if not callable(function):
        raise InvalidSettingError("function", function, "a function of the guess and the result")
    if not isinstance(mode, Mode):
        raise InvalidSettingError("mode", mode, "a Mode")
