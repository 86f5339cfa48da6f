"""Classes and values that the tests of the codec encode: every supported type, and some that are refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum, auto
from fractions import Fraction
from functools import cached_property
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, computed_field, field_validator

ItemT = TypeVar("ItemT")


class Colour(Enum):
    """Values of any kind, and an alias."""

    RED = "red"
    BLUE = (0, 0, 255)
    CRIMSON = "red"  # noqa: PIE796 -- an alias


class Level(IntEnum):
    """Members that are integers."""

    LOW = 1
    HIGH = 2


class Tone(StrEnum):
    """Members that are strings."""

    KIND = "kind"
    CURT = "curt"


class Access(Flag):
    """Combinations have no name of their own."""

    READ = auto()
    WRITE = auto()
    RUN = auto()


class Mask(IntFlag):
    """Keeps bits it does not know."""

    A = 1
    B = 4


class Point(NamedTuple):
    """A typed named tuple."""

    x: Any
    y: Any = 0


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 -- both kinds must work


@dataclass
class Item:
    """The plainest dataclass."""

    name: Any
    price: Any = 0


@dataclass(frozen=True)
class Frozen:
    """Hashable."""

    key: Any


@dataclass(slots=True)
class Slotted:
    """Without a ``__dict__``."""

    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlotted:
    """All switches on."""

    content: Any


@dataclass
class Computed:
    """Fields that the constructor does not take, and an attribute that is no field."""

    width: int
    area: int = field(init=False)
    tags: list[str] = field(init=False, default_factory=list)
    note: str = field(init=False, default="none")

    def __post_init__(self) -> None:
        self.area = self.width**2
        self._seen = [self.width]


@dataclass
class Late:
    """A field that is not set yet."""

    later: int = field(init=False)


@dataclass(slots=True)
class LateSlotted:
    """As above, in a slot."""

    later: int = field(init=False)


@dataclass
class Child(Item):
    """A dataclass that inherits fields."""

    size: Any = None


class Undecorated(Slotted):
    """Inherits being a dataclass, and adds a slot and a ``__dict__`` of its own."""

    __slots__ = ("__dict__", "extra")


@dataclass
class Scaled:
    """Its InitVar is used up by the constructor."""

    value: float
    factor: InitVar[float] = 2.0

    def __post_init__(self, factor: float) -> None:
        self.value *= factor


@dataclass
class Cached:
    """A cached property is no content."""

    number: int

    @cached_property
    def square(self) -> int:
        """Computed on demand."""
        return self.number**2


@dataclass
class Typed(Generic[ItemT]):
    """A generic dataclass."""

    item: ItemT


class Outer:
    """A namespace."""

    @dataclass
    class Inner:
        """A nested class."""

        value: Any


@dataclass
class Link:
    """For chains and cycles."""

    next: Any = None


class Order(BaseModel):
    """A model whose validators would change what is stored if they ran again."""

    number: int
    total: Decimal = Decimal(0)
    items: list[Any] = Field(default_factory=list, alias="lines")
    _touched: int = PrivateAttr(default=0)
    _unset: int

    @field_validator("number")
    @classmethod
    def _next(cls, value: int) -> int:
        return value + 1


class Bag(BaseModel):
    """Anything."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    content: Any = None


class Open(BaseModel):
    """Takes fields it does not know."""

    model_config = ConfigDict(extra="allow")

    known: int = 0


class Numbers(RootModel[list[int]]):
    """A model of one value."""


class Page(BaseModel, Generic[ItemT]):
    """A generic model."""

    items: list[ItemT]
    number: int = 1


class TextPage(Page[str]):
    """A named model of a generic one."""


class Square(BaseModel):
    """A model with a cached computed field."""

    side: int

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def area(self) -> int:
        """Computed on demand."""
        return self.side**2


class Text(str):
    """Would come back as a plain string."""

    __slots__ = ()


class Rows(list[Any]):
    """Would come back as a plain list."""


class Number(int):
    """Would come back as a plain integer."""


class Opaque:
    """Nobody knows what it holds."""

    def __init__(self) -> None:
        self.content = 1


@dataclass
class Table(dict[str, Any]):
    """A dataclass that is also a dictionary: its entries are no fields."""

    name: str = ""


class TeapotError(Exception):
    """Its constructor takes other arguments than it hands on."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        super().__init__(f"short and stout at {temperature} degrees")


class ConnectionLostError(OSError):
    """A built-in error with a constructor of its own."""

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(104, f"lost {host}", "socket")


class SilentError(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class NeedsPartError(Exception):
    """Its text needs an attribute that cannot be encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Opaque()

    def __str__(self) -> str:
        return f"part {self.part.content} broke"


def make_local_error() -> Exception:
    """An exception whose class cannot be found by name."""

    class LocalError(Exception):
        pass

    return LocalError("here only")


def make_local_value() -> Any:
    """A dataclass instance whose class cannot be found by name."""

    @dataclass
    class Local:
        value: int

    return Local(1)


def computed() -> Computed:
    """An instance that differs from what its constructor makes."""
    value = Computed(3)
    value.tags.append("changed")
    value.area = -1
    return value


def order() -> Order:
    """A model with private state and a list that was changed later."""
    value = Order.model_validate({"number": "1", "lines": [1, (2, 3)]})
    value.items.append({4})
    value._touched = 5
    return value


def undecorated() -> Undecorated:
    """An instance with content in a slot and in a dictionary, besides its fields."""
    value = Undecorated(1)
    value.extra = [2]
    value.other = {3}  # type: ignore[attr-defined]
    return value


def cached() -> Cached:
    """An instance whose cached property was computed."""
    value = Cached(4)
    assert value.square == 16
    return value


SPECIMENS: dict[str, Any] = {
    "none": None,
    "true": True,
    "zero": 0,
    "one": 1,
    "negative": -17,
    "long": 2**64,
    "longest plain": 2**2048 - 1,
    "longer": -(2**2048),
    "very long": 3**20000,
    "float": 1.0,
    "minus zero": -0.0,
    "tiny": 5e-324,
    "infinite": -float("inf"),
    "nan": float("nan"),
    "complex": complex(-0.0, float("inf")),
    "empty text": "",
    "text": 'a "quoted" \\ line\n\x00\x1f\x7f \u2028 and \U0001f600',
    "lone surrogates": "\ud83d\ude00 \udcff",
    "tag-like text": '{"$tuple":[]}',
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "bytearray": bytearray(b"\x00\xff"),
    "list": [1, "a", None, 2.5, True],
    "nested list": [[], [[]], [1, [2, (3,)]]],
    "list with long integers": [1, 2**3000, "x"],
    "tuple": (1, (2, ()), [3]),
    "dict": {"b": 1, "a": [2], "": None},
    "dict with long integers": {"a": 2**3000, "b": -1},
    "tag-like dict": {"$tuple": [1]},
    "dict with a dollar": {"$ref": 1, "other": 2},
    "dict with odd keys": {1: "int", "1": "str", None: 0, (1, 2): [3], 2.5: {}, b"k": {4}, frozenset({5}): 6},
    "set": {"b", "a", 3, None, (1, 2), frozenset({"x", "y"})},
    "empty set": set(),
    "set of numbers": {*range(100), *(text * 3 for text in "abcdefgh")},
    "set of nans": {float("nan"), float("nan")},
    "frozenset": frozenset({1, "a", Frozen(2)}),
    "range": range(10, -5, -3),
    "deque": deque([1, [2]], maxlen=3),
    "endless deque": deque("abc"),
    "Counter": Counter({"a": 2, "b": 0, "c": -1.5}),
    "OrderedDict": OrderedDict([("z", 1), (2, "a")]),
    "defaultdict": defaultdict(list, {"a": [1], 2: []}),
    "defaultdict without factory": defaultdict(None, {"a": 1}),
    "datetime": datetime(2024, 2, 29, 23, 59, 59, 999999),  # noqa: DTZ001 -- naive on purpose
    "early datetime": datetime(1, 1, 1),  # noqa: DTZ001
    "aware datetime": datetime(2024, 1, 1, tzinfo=UTC),
    "zoned datetime": datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "folded datetime": datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001
    "named offset": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, seconds=7), "here")),
    "tiny offset": datetime(2024, 1, 1, tzinfo=timezone(timedelta(microseconds=1))),
    "offset of seconds": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-1, seconds=1))),
    "date": date(9999, 12, 31),
    "time": time(1, 2, 3, 4),
    "aware time": time(1, tzinfo=timezone(timedelta(hours=1)), fold=1),
    "timedelta": timedelta(-1, 5, 7),
    "timezone": timezone(timedelta(minutes=90)),
    "ZoneInfo": ZoneInfo("America/New_York"),
    "Decimal": Decimal("1.10"),
    "Decimal exponent": Decimal("-0E+7"),
    "Decimal nan": Decimal("sNaN12"),
    "Decimal infinity": Decimal("-Infinity"),
    "Fraction": Fraction(-22, 7),
    "long Fraction": Fraction(1, 7**1000),
    "UUID": UUID(int=2**127 + 5),
    "safe UUID": UUID(int=7, is_safe=SafeUUID.safe),
    "posix path": PurePosixPath("a/../b/\udcff"),
    "windows path": PureWindowsPath("c:\\x\\y"),
    "Enum": [Colour.RED, Colour.BLUE, Colour.CRIMSON],
    "IntEnum": {"level": Level.HIGH},
    "StrEnum": {Tone.KIND: Tone.CURT},
    "Flag": [Access.READ, Access.READ | Access.RUN, Access(0)],
    "IntFlag": [Mask.A, Mask.A | 8, ~Mask.B],
    "named tuple": Point([1], Point(2)),
    "old named tuple": Pair("l", {"r"}),
    "dataclass": Item("tea", Decimal("2.50")),
    "frozen dataclass": Frozen((1, 2)),
    "slotted dataclass": Slotted([1], {"a": Slotted(2)}),
    "all switches": FrozenSlotted(content=Frozen(1)),
    "computed fields": computed(),
    "unset field": Late(),
    "unset slot": LateSlotted(),
    "inherited fields": Child("a", 1, (2,)),
    "undecorated subclass": undecorated(),
    "InitVar": Scaled(1.5, 4.0),
    "generic dataclass": Typed[int](3),
    "nested class": Outer.Inner(Link(Link())),
    "model": order(),
    "model with defaults": Order(number=1),
    "model made without validation": Order.model_construct(number="text", nonsense=1),
    "partial model": Order.model_construct(_fields_set={"total"}, total=Decimal(1)),
    "frozen model": Bag(content=(Bag(), {1: Bag(content=b"x")})),
    "open model": Open(known=1, other=[2], another={"$ref": (3,)}),
    "model with one odd field": Open.model_validate({"$id": 1}),
    "root model": Numbers([1, 2]),
    "anonymous root model": RootModel[int](3),
    "generic model": Page[int](items=[1, 2]),
    "nested generic model": Page[Page[str]](items=[Page[str](items=["a"])], number=2),
    "unparametrised generic model": Page(items=[1, "a"]),
    "derived generic model": TextPage(items=["a"]),
    "classes": [int, Colour, Item, Order, Page[int], type(None), Outer.Inner, dict],
}
"""A value of every supported type, by a name that says what is special about it."""


def digests() -> str:
    """One line per specimen: its digest and its name. Run in other processes, too."""
    from specflow.codec import digest  # noqa: PLC0415 -- the module of samples does not need it

    return "\n".join(f"{digest(value)} {name}" for name, value in SPECIMENS.items())
