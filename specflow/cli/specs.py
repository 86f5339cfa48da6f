"""Policies, predictors and prices as they are written on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..effects import RUN_AHEAD, Effect
from ..errors import InvalidSettingError
from ..policies import ExpectedValue, Fixed, Threshold
from ..predictors import (
    TAGE,
    Branch,
    ByArguments,
    Constant,
    GShare,
    LastValue,
    Majority,
    Markov,
    Perceptron,
    TraceReplay,
    TwoBit,
)
from ..protocols import Predictor, RunAheadPolicy
from ..recorded import FromRecord, Recording, coin, place_of
from ..speculation import Budget, Call

NumberT = TypeVar("NumberT", int, float)

POLICY_HELP = (
    "none | fixed:DEPTH | threshold:DEPTH:MIN_SURVIVAL | expected, then any of :width=N, "
    ":effects=idempotent+compensable, a budget (:money=, :tokens=, :seconds=, :slots=) and, for expected, its settings "
    "(:value_of_second=0.01, :depth=4, :quantile=, :interference=, :forgetting=, :price_per_token=, "
    ":min_probability=, :assumed_seconds=, :explorations=)"
)
PREDICTOR_HELP = (
    "last | majority | markov[:ORDER] | arguments | trace[:AHEAD] | twobit | gshare | perceptron | tage | "
    "constant:JSON | oracle (always right) | adversary (always wrong) | flaky:PROBABILITY[:SEED] | none; for one step: "
    "STEP=PREDICTOR"
)

_BUDGET = ("money", "tokens", "seconds", "slots")
_EXPECTED: dict[str, type[int | float]] = {
    "value_of_second": float,
    "depth": int,
    "quantile": float,
    "interference": float,
    "forgetting": float,
    "price_per_token": float,
    "min_probability": float,
    "assumed_seconds": float,
    "explorations": int,
}
_ASSIGNMENT = re.compile(r"""^([^={}\[\]"]+)=(.+)$""", re.DOTALL)

PredictorMaker = Callable[[Recording], Predictor | None]
"""Makes a new predictor for a recorded run; None for no guesses at all."""


def parse_policy(text: str) -> RunAheadPolicy:
    """A new policy.

    Raises:
        InvalidSettingError: the text does not describe one.
    """
    name, positional, settings = _split("policy", text)
    reach = _reach(text, settings)
    own: dict[str, Any] = {
        key: _number("policy", text, settings.pop(key), kind) for key, kind in _EXPECTED.items() if key in settings
    }
    if settings:
        raise InvalidSettingError("policy", text, f"no setting named {next(iter(settings))}: {POLICY_HELP}")
    match name, positional:
        case "none", [] if not reach and not own:
            return Fixed(0)
        case "fixed", [depth] if not own:
            return Fixed(_number("policy", text, depth, int), **reach)
        case "threshold", [depth, least] if not own:
            return Threshold(_number("policy", text, depth, int), _number("policy", text, least, float), **reach)
        case "expected", []:
            return ExpectedValue(**reach, **own)
    raise InvalidSettingError("policy", text, POLICY_HELP)


def parse_predictors(texts: Sequence[str]) -> dict[str, PredictorMaker]:
    """Makers of predictors, by step; under ``"*"`` the one for all steps that are not named.

    Raises:
        InvalidSettingError: a text does not describe one, or two are given for the same steps.
    """
    makers: dict[str, PredictorMaker] = {}
    for text in texts:
        match = _ASSIGNMENT.match(text)
        step, spec = match.groups() if match is not None else ("*", text)
        if step in makers:
            raise InvalidSettingError("predictor", text, "one predictor for each step, and one for all others")
        makers[step] = parse_predictor(spec)
    return makers


def parse_predictor(text: str) -> PredictorMaker:
    """A maker of predictors.

    Raises:
        InvalidSettingError: the text does not describe one.
    """
    name, _, rest = text.partition(":")
    if name == "constant" and rest:
        value = parse_json("predictor", rest)
        return lambda _recording: Constant(value)
    words = rest.split(":") if rest else []
    numbers: list[Any] = [
        _number("predictor", text, word, float if name == "flaky" and index == 0 else int)
        for index, word in enumerate(words)
    ]
    simple: dict[tuple[str, int], Callable[..., Predictor | None]] = {
        ("none", 0): lambda: None,
        ("last", 0): LastValue,
        ("majority", 0): Majority,
        ("markov", 0): Markov,
        ("markov", 1): Markov,
        ("arguments", 0): ByArguments,
        ("trace", 0): TraceReplay,
        ("trace", 1): lambda ahead: TraceReplay(ahead=ahead),
        ("twobit", 0): lambda: Branch(TwoBit()),
        ("gshare", 0): lambda: Branch(GShare()),
        ("perceptron", 0): lambda: Branch(Perceptron()),
        ("tage", 0): lambda: Branch(TAGE()),
    }
    make = simple.get((name, len(numbers)))
    if make is not None:
        make(*numbers)  # a setting that cannot work is refused here
        return lambda _recording: make(*numbers)
    if name in ("oracle", "adversary") and not numbers:
        right = (name == "oracle",)
        return lambda recording: FromRecord(recording, lambda _call: right)
    if name == "flaky" and len(numbers) in (1, 2) and 0.0 <= numbers[0] <= 1.0:
        return _flaky(numbers[0], int(numbers[1]) if len(numbers) == 2 else 0)
    raise InvalidSettingError("predictor", text, PREDICTOR_HELP)


def parse_assignments(setting: str, texts: Sequence[str], number: type[NumberT]) -> dict[str, NumberT]:
    """``name=number`` for each text.

    Raises:
        InvalidSettingError: a text is something else, the number negative, or a name is given twice.
    """
    table: dict[str, NumberT] = {}
    for text in texts:
        match = _ASSIGNMENT.match(text)
        if match is None or match[1] in table:
            raise InvalidSettingError(setting, text, "NAME=NUMBER, once for each name")
        value = _number(setting, text, match[2], number)
        if not value >= 0:
            raise InvalidSettingError(setting, text, "a number >= 0")
        table[match[1]] = value
    return table


def parse_json(setting: str, text: str) -> Any:
    """A JSON value.

    Raises:
        InvalidSettingError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSettingError(setting, text, f"JSON ({error})") from None


def _flaky(probability: float, seed: int) -> PredictorMaker:
    def make(recording: Recording) -> Predictor:
        def choose(call: Call) -> Sequence[bool]:
            return (coin(seed, *place_of(call)) < probability,)

        return FromRecord(recording, choose, confidence=probability)

    return make


def _split(setting: str, text: str) -> tuple[str, list[str], dict[str, str]]:
    name, *words = text.split(":")
    positional: list[str] = []
    settings: dict[str, str] = {}
    for word in words:
        key, is_setting, value = word.partition("=")
        if not is_setting and not settings:
            positional.append(word)
        elif is_setting and key not in settings:
            settings[key] = value
        else:
            raise InvalidSettingError(setting, text, POLICY_HELP)
    return name, positional, settings


def _reach(text: str, settings: dict[str, str]) -> dict[str, Any]:
    """Takes out the settings that all policies have."""
    reach: dict[str, Any] = {}
    if "width" in settings:
        reach["width"] = _number("policy", text, settings.pop("width"), int)
    if "effects" in settings:
        reach["effects"] = _effects(text, settings.pop("effects"))
    limits: dict[str, Any] = {
        key: _number("policy", text, settings.pop(key), int if key == "slots" else float)
        for key in _BUDGET
        if key in settings
    }
    if limits:
        reach["budget"] = Budget(**limits)
    return reach


def _effects(text: str, value: str) -> frozenset[Effect]:
    known = {effect.value: effect for effect in Effect if effect is not Effect.IRREVERSIBLE}
    names = value.split("+")
    if not all(name in known for name in names):
        raise InvalidSettingError("policy", text, f"effects among {', '.join(known)}, joined by +")
    return RUN_AHEAD | {known[name] for name in names}


def _number(setting: str, text: str, word: str, kind: type[NumberT]) -> NumberT:
    try:
        return kind(word)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise InvalidSettingError(setting, text, f"{what} in place of {word!r}") from None


__all__ = [
    "POLICY_HELP",
    "PREDICTOR_HELP",
    "PredictorMaker",
    "parse_assignments",
    "parse_json",
    "parse_policy",
    "parse_predictor",
    "parse_predictors",
]
