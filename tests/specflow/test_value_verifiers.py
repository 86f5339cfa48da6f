"""Verifiers of whole values: what each accepts, what a run may claim afterwards, and which settings cannot work."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from specflow.errors import BackendContractError, InvalidSettingError
from specflow.protocols import Verifier
from specflow.speculation import Verdict
from specflow.types import Mode
from specflow.verifiers import Equal, Judge, Predicate, SameFields, Tolerance
from tests.specflow.samples import SPECIMENS, Bag, Colour, Item, Level, Opaque, Open, Order, Page, Point, Slotted


class Answer(BaseModel):
    """What a model said."""

    text: str
    score: float = 0.0
    sources: list[str] = []


class Report(BaseModel):
    """A model of models."""

    id: str
    answers: list[Answer]


def accepts(verifier: Verifier, predicted: Any, actual: Any) -> bool:
    """The verdict of a verifier that does not wait."""
    verdict = verifier.verify(predicted, actual)
    assert isinstance(verdict, Verdict)
    assert not verdict.replaces
    return verdict.accepted


async def ask(verifier: Verifier, predicted: Any, actual: Any) -> Verdict:
    """The verdict of a verifier that waits."""
    verdict = verifier.verify(predicted, actual)
    assert inspect.isawaitable(verdict)
    found = await verdict
    assert isinstance(found, Verdict)
    return found


def same(predicted: Any, actual: Any) -> bool:
    """The simplest predicate."""
    return bool(predicted == actual)


async def agree(predicted: Any, actual: Any) -> bool:
    """The simplest judge."""
    await anyio.lowlevel.checkpoint()
    return bool(predicted == actual)


# ---------------------------------------------------------------------------------------------------------------------
# Equality


@pytest.mark.parametrize("value", SPECIMENS.values(), ids=SPECIMENS)
def test_equality_accepts_every_supported_value(value: Any) -> None:
    """A value equals itself for each verifier that compares, NaN included."""
    for verifier in (Equal(), Equal(ignore_order=True), Tolerance(0.1, 0.1), Tolerance(), SameFields()):
        assert accepts(verifier, value, value)


@pytest.mark.parametrize(
    ("predicted", "actual"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Level.LOW, 1),
        (Decimal("1.0"), Decimal("1.00")),
        (Item("a"), {"name": "a", "price": 0}),
        (Open(known=0), Open()),
        (Page[int](items=[]), Page[str](items=[])),
        (defaultdict(list), {}),
        (deque([1], 2), deque([1])),
        (OrderedDict(a=1), {"a": 1}),
    ],
    ids=reprlib.repr,
)
def test_equality_rejects_what_a_program_can_tell_apart(predicted: Any, actual: Any) -> None:
    """Another type or a visible difference of content is a wrong guess, also inside containers and both ways round."""
    assert not accepts(Equal(), predicted, actual)
    assert not accepts(Equal(), actual, predicted)
    assert not accepts(Equal(), {"x": [predicted]}, {"x": [actual]})


def test_equality_compares_sets_by_content() -> None:
    """The order in which a set was filled is not part of it."""
    left, right = set(), set()
    for number in range(0, 1000, 8):
        left.add(number)
        right.add(992 - number)
    assert accepts(Equal(), left, right)


def test_ignoring_order_is_opted_into_and_declared() -> None:
    """Dictionaries of another order are accepted if asked for, and the run is then called LOSSY."""
    predicted, actual = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert accepts(Equal(ignore_order=True), predicted, actual)
    assert not accepts(Equal(ignore_order=True), predicted, {"b": {"d": 3, "c": 2}, "a": 2})
    assert Equal().mode is Mode.EXACT
    assert Equal(ignore_order=True).mode is Mode.LOSSY


@pytest.mark.parametrize("verifier", [Equal(), Tolerance(1.0), SameFields()], ids=repr)
def test_a_guess_that_cannot_be_encoded_is_a_wrong_guess(verifier: Verifier) -> None:
    """A verdict, not an exception, whatever a predictor made up."""
    assert not accepts(verifier, Opaque(), 1)
    assert not accepts(verifier, [Opaque()], [1])
    assert not accepts(verifier, {"a": Opaque()}, {"a": Opaque()})


# ---------------------------------------------------------------------------------------------------------------------
# Tolerance

NESTINGS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda number: number,
    "list": lambda number: [1, [number]],
    "tuple": lambda number: (number, "x"),
    "dict": lambda number: {"a": {"b": number}},
    "odd keys": lambda number: {1: number, (2,): None},
    "deque": lambda number: deque([number], 3),
    "Counter": lambda number: Counter({"a": number}),
    "OrderedDict": lambda number: OrderedDict(a=number),
    "defaultdict": lambda number: defaultdict(list, a=number),
    "named tuple": lambda number: Point("x", number),
    "dataclass": lambda number: Item("tea", number),
    "slots": lambda number: Slotted(number, number),
    "model": lambda number: Bag(content=[number]),
    "extra fields": lambda number: Open(other=number),
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_close_numbers_are_accepted_wherever_they_stand(nest: Callable[[Any], Any]) -> None:
    """A number inside equal structures may differ by the tolerance and by no more."""
    tolerance = Tolerance(absolute=0.25)
    assert accepts(tolerance, nest(10.25), nest(10.0))
    assert accepts(tolerance, nest(9.75), nest(10.0))
    assert not accepts(tolerance, nest(10.26), nest(10.0))
    assert not accepts(tolerance, nest(math.nan), nest(10.0))
    assert not accepts(tolerance, nest("10.0"), nest(10.0))


@pytest.mark.parametrize(
    ("predicted", "actual", "close"),
    [
        (100, 101, True),
        (100, 102, False),
        (-100, 100, False),
        (10**400, 10**400 + 10**397, True),
        (10**400, 10**400 + 10**399, False),
        (-(10**1000), -(10**1000) - 10**997, True),
        (10**1000, 10**999, False),
        (Decimal(100), Decimal(101), True),
        (Decimal(100), Decimal(102), False),
        (Decimal("1E+999999"), Decimal("1.001E+999999"), True),
        (Decimal("1E+999999"), Decimal("1E-999999"), False),
        (Decimal("NaN"), Decimal(1), False),
        (Decimal("Infinity"), Decimal("-Infinity"), False),
        (Fraction(1, 3), Fraction(100, 301), True),
        (Fraction(1, 3), Fraction(1, 2), False),
        (complex(100, 1), complex(101, 1), True),
        (complex(100, 1), complex(100, 5), False),
        (1e300, 1.001e300, True),
        (math.inf, 1e308, False),
        (math.inf, -math.inf, False),
        (100, 100.0, False),
        (Decimal(100), 100, False),
        (True, False, False),
        (1, True, False),
    ],
    ids=reprlib.repr,
)
def test_relative_tolerance_of_every_kind_of_number(predicted: Any, actual: Any, close: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """Within one percent of the larger one, exactly computed, and only between numbers of one type."""
    assert accepts(Tolerance(relative=0.01), predicted, actual) is close
    assert accepts(Tolerance(relative=0.01), actual, predicted) is close


@pytest.mark.parametrize(
    ("predicted", "actual"),
    [
        ({1.0}, {1.001}),
        ({1.0: "a"}, {1.001: "a"}),
        ([1.0, 2.0], [1.0]),
        ([1.0], (1.0,)),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": 1.0, "b": 1}, {"b": 1, "a": 1.0}),
        (Item("a", 1.0), Slotted("a", 1.0)),
        (Item("a", 1.0), Item("b", 1.0)),
        (deque([1.0], 3), deque([1.0], 4)),
        (defaultdict(int, a=1.0), defaultdict(float, a=1.0)),
        (datetime(2024, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 1)),  # noqa: DTZ001 -- naive on purpose
        (range(3), range(4)),
        (b"a", b"b"),
        (Colour.RED, Colour.BLUE),
        (Open(known=0), Open()),
    ],
    ids=reprlib.repr,
)
def test_tolerance_is_for_numbers_only(predicted: Any, actual: Any) -> None:
    """Structure, keys, members of sets, dates and everything else have to be equal."""
    assert not accepts(Tolerance(absolute=5.0, relative=0.5), predicted, actual)


def test_no_tolerance_is_equality() -> None:
    """With both tolerances 0 the run stays EXACT, and the zeros differ."""
    assert Tolerance().mode is Mode.EXACT
    assert not accepts(Tolerance(), 0.0, -0.0)
    assert not accepts(Tolerance(), 2**53, 2**53 + 1)
    assert not accepts(Tolerance(), [2.0**53], [2.0**53 + 2])
    assert Tolerance(absolute=1e-9).mode is Mode.LOSSY
    assert Tolerance(relative=1e-9).mode is Mode.LOSSY
    assert accepts(Tolerance(absolute=1e-9), [0.0], [-0.0])


@given(st.integers(), st.integers(), st.integers(0, 100))
def test_integers_are_compared_exactly(left: int, right: int, allowed: int) -> None:
    """No rounding to floats decides about integers."""
    assert accepts(Tolerance(absolute=allowed + 0.5), left, right) is (abs(left - right) <= allowed)


WRONG_SETTINGS: dict[str, tuple[str, Callable[[], object]]] = {
    "negative": ("absolute", lambda: Tolerance(absolute=-1.0)),
    "infinite": ("absolute", lambda: Tolerance(absolute=math.inf)),
    "nan": ("absolute", lambda: Tolerance(absolute=math.nan)),
    "text": ("absolute", lambda: Tolerance(absolute="1")),  # type: ignore[arg-type]
    "bool": ("absolute", lambda: Tolerance(absolute=True)),
    "all of it": ("relative", lambda: Tolerance(relative=1.0)),
    "negative share": ("relative", lambda: Tolerance(relative=-0.1)),
    "nan as share": ("relative", lambda: Tolerance(relative=math.nan)),
    "predicate without function": ("function", lambda: Predicate("no function")),  # type: ignore[arg-type]
    "async predicate": ("function", lambda: Predicate(agree)),  # type: ignore[arg-type]
    "mode by name": ("mode", lambda: Predicate(same, mode="exact")),  # type: ignore[arg-type]
    "judge without function": ("function", lambda: Judge(None)),  # type: ignore[arg-type]
    "judge without mode": ("mode", lambda: Judge(agree, mode=None)),  # type: ignore[arg-type]
    "number as field": ("fields", lambda: SameFields("a", 1)),  # type: ignore[arg-type]
    "number to ignore": ("ignore", lambda: SameFields(ignore=(1,))),  # type: ignore[arg-type]
    "one name to ignore": ("ignore", lambda: SameFields(ignore="id")),  # type: ignore[arg-type]
    "both kinds": ("ignore", lambda: SameFields("a", ignore=("b",))),
}


@pytest.mark.parametrize(("setting", "make"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_settings_that_cannot_work_are_refused(setting: str, make: Callable[[], object]) -> None:
    """Each wrong setting is an error when the verifier is made, and names the setting."""
    with pytest.raises(InvalidSettingError) as caught:
        make()
    assert caught.value.setting == setting


# ---------------------------------------------------------------------------------------------------------------------
# Chosen fields


def test_named_fields_are_compared_and_no_others() -> None:
    """Only the fields that matter decide, for every type that has fields."""
    verifier = SameFields("text", "score")
    assert accepts(verifier, Answer(text="a", score=1, sources=["x"]), Answer(text="a", score=1.0))
    assert not accepts(verifier, Answer(text="a", score=1), Answer(text="a", score=2))
    assert not accepts(verifier, Answer(text="a"), Answer(text="b"))
    assert accepts(verifier, {"text": 1, "score": 2, "x": 3}, {"score": 2, "text": 1})
    assert accepts(SameFields("name"), Item("a", 1), Item("a", 2))
    assert not accepts(SameFields("name"), Item("a", 1), Item("b", 1))
    assert accepts(SameFields("first"), Slotted(1, 2), Slotted(1, 3))
    assert accepts(SameFields("x"), Point(1, 2), Point(1, 3))
    assert not accepts(SameFields("x"), Point(1, 2), Point(1.0, 2))
    assert accepts(SameFields("other"), Open(other=1, known=2), Open(other=1))


def test_all_fields_are_compared_when_none_is_named() -> None:
    """A guess that was built in another way than the result is accepted when all its fields are equal."""
    predicted = Report(id="1", answers=[Answer(text="a", score=0.0, sources=[])])
    actual = Report.model_validate_json('{"id": "1", "answers": [{"text": "a"}]}')
    assert not accepts(Equal(), predicted, actual)
    assert accepts(SameFields(), predicted, actual)
    assert not accepts(SameFields(), predicted, Report(id="1", answers=[Answer(text="a", score=0.5)]))
    touched = Order(number=1)
    touched._touched = 3
    assert accepts(SameFields(), touched, Order(number=1))
    assert not accepts(SameFields(), Order(number=1), Order(number=2))
    assert not accepts(SameFields(), Open(a=1), Open(b=1))
    assert not accepts(SameFields(), Open(a=1), Open())


def test_ignored_fields_do_not_decide() -> None:
    """Ids and timestamps may differ; everything else may not."""
    verifier = SameFields(ignore=("id",))
    answers = [Answer(text="a")]
    assert accepts(verifier, Report(id="1", answers=answers), Report(id="2", answers=answers))
    assert not accepts(verifier, Report(id="1", answers=answers), Report(id="1", answers=[]))
    assert accepts(verifier, {"id": 1, "x": 2}, {"x": 2})
    assert not accepts(verifier, {"id": 1, "x": 2}, {"x": 2, "y": 3})


def test_a_misspelt_field_accepts_nothing() -> None:
    """A name that is missing can never make two values the same."""
    assert not accepts(SameFields("txt"), Answer(text="a"), Answer(text="a"))
    assert not accepts(SameFields("x"), {"y": 1}, {"y": 1})
    assert not accepts(SameFields("x"), {"y": 1, "x": 1}, {"y": 1})


def test_values_of_other_types_differ() -> None:
    """A dictionary is no model, and a value without fields is compared whole."""
    assert not accepts(SameFields("text"), Answer(text="a"), {"text": "a"})
    assert not accepts(SameFields("name"), Item("a"), Bag(content="a"))
    assert accepts(SameFields("text"), None, None)
    assert not accepts(SameFields("text"), "a", "b")
    assert accepts(SameFields(), {1: 2}, {1: 2})
    assert not accepts(SameFields(), {1: 2}, {1: 3})


def test_comparing_fields_is_lossy() -> None:
    """A program can see what is not compared, so the run says so."""
    assert SameFields("a").mode is Mode.LOSSY
    assert SameFields().mode is Mode.LOSSY
    assert repr(SameFields("a", "b")) == "SameFields('a', 'b')"
    assert repr(SameFields(ignore={"b", "a"})) == "SameFields(ignore=['a', 'b'])"


# ---------------------------------------------------------------------------------------------------------------------
# Predicates and judges


def test_a_predicate_decides() -> None:
    """The function gets the guess first and the result second, and its answer is the verdict."""
    seen: list[tuple[Any, Any]] = []

    def longer(predicted: Any, actual: Any) -> bool:
        seen.append((predicted, actual))
        return len(predicted) > len(actual)

    verifier = Predicate(longer)
    assert accepts(verifier, "aa", "b")
    assert not accepts(verifier, "a", "b")
    assert seen == [("aa", "b"), ("a", "b")]
    assert verifier.mode is Mode.LOSSY
    assert Predicate(longer, mode=Mode.EXACT).mode is Mode.EXACT


@pytest.mark.parametrize("answer", [None, 1, "yes", Verdict(accepted=True)], ids=repr)
def test_a_predicate_that_does_not_answer_is_an_error(answer: Any) -> None:
    """Anything but True and False is a mistake in the predicate, and no verdict is guessed from it."""
    with pytest.raises(BackendContractError, match=r"predicate .*lambda"):
        Predicate(lambda predicted, actual: answer).verify(1, 1)


@pytest.mark.anyio
async def test_a_judge_decides_in_its_own_time() -> None:
    """The verdict comes when the judge is done; other work goes on meanwhile."""
    asked, done = anyio.Event(), anyio.Event()
    verdicts: list[Verdict] = []

    async def slow(predicted: Any, actual: Any) -> bool:
        asked.set()
        await done.wait()
        return bool(predicted == actual)

    async def judge(verifier: Judge) -> None:
        verdicts.append(await ask(verifier, 1, 1))

    async with anyio.create_task_group() as group:
        group.start_soon(judge, Judge(slow))
        await asked.wait()
        assert verdicts == []
        done.set()
    assert verdicts == [Verdict(accepted=True)]


@pytest.mark.anyio
async def test_a_judge_may_replace_the_value() -> None:
    """A judge that returns a verdict of its own is taken at its word, whichever way it decides."""
    for verdict in (
        Verdict(accepted=False, replacement="better", replaces=True),
        Verdict(accepted=True),
        Verdict(accepted=False),
    ):

        async def decided(predicted: Any, actual: Any, verdict: Verdict = verdict) -> Verdict:
            await anyio.lowlevel.checkpoint()
            return verdict

        assert await ask(Judge(decided), "guess", "result") is verdict
    assert (await ask(Judge(agree), 1, 1)).accepted
    assert not (await ask(Judge(agree), 1, 2)).accepted


@pytest.mark.anyio
async def test_a_judge_that_is_no_judge_is_an_error() -> None:
    """A plain function, and an answer that is no verdict, are mistakes that the message names."""

    async def unsure(predicted: Any, actual: Any) -> Any:
        await anyio.lowlevel.checkpoint()

    with pytest.raises(BackendContractError, match="make it async"):
        await ask(Judge(same), 1, 1)  # type: ignore[arg-type]
    with pytest.raises(BackendContractError, match="unsure returned None"):
        await ask(Judge(unsure), 1, 1)


def test_judges_are_known_as_async() -> None:
    """A runtime can tell before the first call whether a verifier takes its time."""
    assert inspect.iscoroutinefunction(Judge(agree).verify)
    assert not inspect.iscoroutinefunction(Equal().verify)
    assert Judge(agree).mode is Mode.LOSSY
    assert Judge(agree, mode=Mode.DISTRIBUTION).mode is Mode.DISTRIBUTION


@pytest.mark.anyio
async def test_every_verifier_keeps_the_protocol() -> None:
    """All of them have a mode and accept an equal value, so that any of them can be given to a step."""
    verifiers: list[Verifier] = [Equal(), Tolerance(0.5), Predicate(same), SameFields(), Judge(agree)]
    for verifier in verifiers:
        assert isinstance(verifier.mode, Mode)
        verdict = verifier.verify({"a": 1}, {"a": 1})
        if inspect.isawaitable(verdict):
            verdict = await verdict
        assert verdict.accepted
