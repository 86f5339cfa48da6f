"""Random programs: a small language that one generic workflow interprets, and the world its steps act on.

A program is a nested tuple, so that it can be an argument of a run, printed in a failure and shrunk by hypothesis. It
computes on four small integers (many guesses of them are right by chance, and loops end), a list that it shares with
what steps returned, and the state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specflow.definitions import Attempt, Retry, Step, Workflow
from specflow.effects import Effect
from specflow.history import Position
from specflow.protocols import Predictor
from specflow.speculation import Verdict
from specflow.state import State
from specflow.types import Mode

SIZE = 4
"""Numbers are 0 .. SIZE - 1."""
BANK = "bank"

Predictors = Callable[[str], Predictor | None]
Program = tuple[Any, ...]


@dataclass(frozen=True)
class Sight:
    """One thing that the outside world saw."""

    action: str
    queue: str
    step: str
    position: Position
    key: str
    value: Any


@dataclass
class Receiver:
    """The outside world: it writes down what reaches it, and believes nobody."""

    log: list[Sight] = field(default_factory=list)

    def see(self, action: str, queue: str, step: str, attempt: Attempt, value: Any) -> None:
        """Something reached the outside world."""
        self.log.append(Sight(action, queue, step, attempt.position, attempt.idempotency_key, value))

    def undo(self, step: str, receipt: Any) -> None:
        """Something was taken back."""
        self.log.append(Sight("undo", step, step, tuple(receipt[1]), receipt[2], receipt[0]))


class SlowEqual:
    """Equality that takes its time: a judge."""

    mode = Mode.EXACT

    async def verify(self, predicted: Any, actual: Any) -> Verdict:
        """Accept an equal value of the same type."""
        return Verdict(accepted=type(predicted) is type(actual) and predicted == actual)


def no_predictors(step: str) -> None:
    """For the plain run."""


async def at_once(step: str) -> None:
    """For runs whose steps take no time of their own."""


class Lab:
    """Fresh steps, the workflow that interprets programs, and the world they act on.

    Args:
        predictors: gives the predictor of each step.
        pause: awaited by every step.
        resource: class that READONLY steps count against.
        receiver: the outside world; default: a new one.
        wait: seconds before a step is tried again.
        threads: one of the steps is a plain function, which the runtime calls in a thread.
    """

    def __init__(
        self,
        predictors: Predictors = no_predictors,
        pause: Callable[[str], Awaitable[None]] = at_once,
        *,
        prices: Mapping[str, float] | None = None,
        resource: str | None = None,
        receiver: Receiver | None = None,
        wait: float = 0.5,
        threads: bool = False,
    ) -> None:
        self.receiver = receiver or Receiver()
        self._predictors = predictors
        self._pause = pause
        self._prices = dict(prices or {})
        self._resource = resource
        self._wait = wait
        self._threads = threads
        self.steps: dict[str, Step[..., Any]] = {}
        self._make_pure()
        self._make_stateful()
        self._make_repeatable()
        self._make_final()
        self.workflow: Workflow[..., Any] = Workflow(self._interpret, name="interpret")

    # ---------------------------------------------------------------------------------------------------------- steps

    def _add(self, name: str, function: Callable[..., Any], effect: Effect, **settings: Any) -> None:
        predictor = None if effect is Effect.BUFFERED else self._predictors(name)
        money = self._prices.get(name, 0.0)
        self.steps[name] = Step(function, name=name, effect=effect, predict=predictor, money=money, **settings)

    def _make_pure(self) -> None:
        pause = self._pause

        async def triple(x: int) -> int:
            await pause("triple")
            return (3 * x + 1) % SIZE

        async def look_up(x: int) -> int:
            await pause("look_up")
            return (x + 2) % SIZE

        async def kind(x: int) -> Any:
            await pause("kind")
            return (1, True, 1.0, "1")[x % SIZE]

        async def odd(x: int) -> int:
            await pause("odd")
            if x % 2 == 0:
                raise ValueError(f"{x} is even")
            return x

        async def items(x: int) -> list[int]:
            await pause("items")
            return [x, (x + 1) % SIZE]

        async def total(numbers: list[int]) -> int:
            await pause("total")
            found = sum(numbers) % SIZE
            numbers.append(1)  # its own copy: nobody else may notice
            return found

        async def judged(x: int) -> int:
            await pause("judged")
            return (x + 3) % SIZE

        def triple_in_a_thread(x: int) -> int:
            return (3 * x + 1) % SIZE

        self._add("triple", triple_in_a_thread if self._threads else triple, Effect.PURE)
        self._add("look_up", look_up, Effect.READONLY, resource=self._resource)
        self._add("kind", kind, Effect.PURE)
        self._add("odd", odd, Effect.PURE)
        self._add("items", items, Effect.READONLY)
        self._add("total", total, Effect.PURE)
        self._add("judged", judged, Effect.READONLY, verify=SlowEqual())

    def _make_stateful(self) -> None:
        pause = self._pause

        async def read(x: int, state: State) -> int:
            await pause("read")
            return int((state.get(f"n{x % 3}", 0) + len(state.scan("n"))) % SIZE)

        async def write(x: int, state: State) -> int:
            await pause("write")
            state.put(f"n{x % 3}", x)
            return x

        async def swap(x: int, state: State) -> int:
            before = state.get(f"n{x % 3}", 0)
            await pause("swap")
            state.put(f"n{x % 3}", (before + 1) % SIZE)
            state.delete(f"n{(x + 1) % 3}")
            return int(before)

        async def count(x: int, state: State) -> int:
            await pause("count")
            state.add("a0", x)
            state.append("l0", x)
            return 1  # easily guessed right: then what it wrote has to reach those who ran ahead

        async def retried(x: int, state: State, attempt: Attempt) -> int:
            await pause("retried")
            state.put(f"n{x % 3}", attempt.number % SIZE)
            if x % 2 and attempt.number == 1:
                raise ConnectionError("try again")
            return int(state.get("n0", 0))

        self._add("read", read, Effect.READONLY)
        self._add("write", write, Effect.READONLY)
        self._add("swap", swap, Effect.READONLY)
        self._add("count", count, Effect.READONLY)
        self._add("retried", retried, Effect.READONLY, retry=Retry(attempts=2, wait=self._wait))

    def _make_repeatable(self) -> None:
        receiver, pause = self.receiver, self._pause

        async def post(x: int, attempt: Attempt) -> int:
            receiver.see("do", "post", "post", attempt, x)
            await pause("post")
            return x

        async def reserve(x: int, attempt: Attempt) -> list[Any]:
            receiver.see("do", "reserve", "reserve", attempt, x)
            await pause("reserve")
            return [x, list(attempt.position), attempt.idempotency_key]

        async def release(receipt: list[Any], x: int) -> None:
            receiver.undo("reserve", receipt)

        async def hold(x: int, state: State, attempt: Attempt) -> list[Any]:
            receiver.see("do", "hold", "hold", attempt, x)
            await pause("hold")
            state.put(f"n{x % 3}", (state.get("n0", 0) + x) % SIZE)
            return [x, list(attempt.position), attempt.idempotency_key]

        async def let_go(receipt: list[Any], x: int) -> None:
            receiver.undo("hold", receipt)

        self._add("post", post, Effect.IDEMPOTENT)
        self._add("reserve", reserve, Effect.COMPENSABLE, undo=release)
        self._add("hold", hold, Effect.COMPENSABLE, undo=let_go)

    def _make_final(self) -> None:
        receiver, pause = self.receiver, self._pause

        async def charge(x: int, attempt: Attempt) -> int:
            if x % SIZE == SIZE - 1:
                raise PermissionError("refused")
            receiver.see("do", BANK, "charge", attempt, x)
            await pause("charge")
            return (2 * x) % SIZE

        async def sign(x: int, state: State, attempt: Attempt) -> int:
            receiver.see("do", "sign", "sign", attempt, x)
            await pause("sign")
            state.put(f"n{x % 3}", (x + 1) % SIZE)
            return int(len(state.scan("n")) % SIZE)

        async def mail(x: int, attempt: Attempt) -> None:
            receiver.see("send", "mail", "mail", attempt, x)
            await pause("mail")

        async def remit(x: int, attempt: Attempt) -> None:
            receiver.see("send", BANK, "remit", attempt, x)
            await pause("remit")

        self._add("charge", charge, Effect.IRREVERSIBLE, resource=BANK)
        self._add("sign", sign, Effect.IRREVERSIBLE)
        self._add("mail", mail, Effect.BUFFERED)
        self._add("remit", remit, Effect.BUFFERED, resource=BANK)

    # ---------------------------------------------------------------------------------------------------- interpreter

    async def _interpret(self, context: Any, program: Program, numbers: list[int]) -> dict[str, Any]:
        machine = _Machine(self, context, numbers)  # not copied: a branch of a gather must not see another change it
        await machine.block(program)
        return {"numbers": machine.numbers, "items": machine.items}


class _Machine:
    def __init__(self, lab: Lab, context: Any, numbers: list[int]) -> None:
        self.lab = lab
        self.context = context
        self.numbers = numbers
        self.items: list[int] = []

    async def block(self, program: Program) -> None:
        for operation, *operands in program:
            await getattr(self, f"do_{operation}")(*operands)

    async def do_call(self, step: str, source: int, target: int) -> None:
        self.numbers[target] = number(await self.context.call(self.lab.steps[step], self.numbers[source]))

    async def do_show(self, step: str, source: int) -> None:
        self.context.emit(await self.context.call(self.lab.steps[step], self.numbers[source]))

    async def do_items(self, source: int) -> None:
        self.items = await self.context.call(self.lab.steps["items"], self.numbers[source])
        self.items.append(len(self.items))  # its own now: what is on record stays as it was

    async def do_push(self, source: int) -> None:
        self.items.append(self.numbers[source])

    async def do_total(self, target: int) -> None:
        self.numbers[target] = await self.context.call(self.lab.steps["total"], self.items)

    async def do_if(self, source: int, then: Program, otherwise: Program) -> None:
        await self.block(then if self.numbers[source] % 2 else otherwise)

    async def do_while(self, source: int, body: Program) -> None:
        turns = 0
        while self.numbers[source] and turns < 3:
            await self.block(body)
            turns += 1

    async def do_try(self, body: Program, handler: Program) -> None:
        try:
            await self.block(body)
        except Exception as error:  # noqa: BLE001 - whatever the program does
            self.numbers[0] = len(type(error).__name__) % SIZE
            await self.block(handler)

    async def do_raise(self, source: int) -> None:
        if self.numbers[source] == SIZE - 1:
            raise SystemExit(5)  # it passes the handlers of the program, but may not pass those of the engine
        raise RuntimeError(f"{self.numbers[source]}")

    async def do_put(self, key: int, source: int) -> None:
        self.context.state.put(f"n{self.numbers[key] % 3}", self.numbers[source])

    async def do_get(self, key: int, target: int) -> None:
        self.numbers[target] = number(self.context.state.get(f"n{self.numbers[key] % 3}", 0))

    async def do_has(self, key: int, target: int) -> None:
        self.numbers[target] = int(f"n{self.numbers[key] % 3}" in self.context.state)

    async def do_delete(self, key: int) -> None:
        self.context.state.delete(f"n{self.numbers[key] % 3}")

    async def do_scan(self, target: int) -> None:
        self.numbers[target] = number(self.context.state.scan("n"))

    async def do_add(self, key: int, source: int) -> None:
        self.context.state.add(f"a{self.numbers[key] % 2}", self.numbers[source])

    async def do_append(self, key: int, source: int) -> None:
        self.context.state.append(f"l{self.numbers[key] % 2}", self.numbers[source])

    async def do_confuse(self, key: int, source: int) -> None:
        self.context.state.append(f"n{self.numbers[key] % 3}", self.numbers[source])  # a number may stand there

    async def do_union(self, key: int, source: int) -> None:
        self.context.state.union(f"s{self.numbers[key] % 2}", {self.numbers[source]})

    async def do_measure(self, target: int) -> None:
        state = self.context.state
        self.numbers[target] = (state.get("a0", 0) + len(state.get("l0", [])) + len(state.get("s0", set()))) % SIZE

    async def do_emit(self, source: int) -> None:
        self.context.emit(["emitted", self.numbers[source], list(self.items)])

    async def do_random(self, target: int) -> None:
        self.numbers[target] = self.context.random().randrange(SIZE)

    async def do_uuid(self, target: int) -> None:
        self.numbers[target] = self.context.uuid().int % SIZE

    async def do_now(self, target: int) -> None:
        self.numbers[target] = int(self.context.now().timestamp()) % SIZE

    async def do_sleep(self, source: int) -> None:
        await self.context.sleep(self.numbers[source] / 2)

    async def do_nested(self, program: Program) -> None:
        found = await self.context.call(self.lab.workflow, program, self.numbers)
        self.numbers[:] = found["numbers"]

    async def do_gather(self, branches: Program, return_exceptions: bool) -> None:  # noqa: FBT001
        calls = [self._branch(*branch) for branch in branches]
        found = await self.context.gather(*calls, return_exceptions=return_exceptions)
        for index, value in enumerate(found):
            self.numbers[index % SIZE] = number(value)

    def _branch(self, kind: str, what: Any, source: int) -> Any:
        if kind == "step":
            return self.context.call(self.lab.steps[what], self.numbers[source])
        if kind == "total":
            return self.context.call(self.lab.steps["total"], self.items)
        return self.context.call(self.lab.workflow, what, self.numbers)

    async def do_map(self, step: str) -> None:
        found = await self.context.map(self.lab.steps[step], self.numbers)
        self.numbers[:] = [number(value) for value in found]


def number(value: Any) -> int:
    """Any result as one of the numbers; tells 1, True, 1.0 and "1" apart."""
    if type(value) is int:
        return value % SIZE
    if isinstance(value, Exception):
        return len(str(value)) % SIZE
    return sum(repr(value).encode()) % SIZE


# ---------------------------------------------------------------------------------------------------------- strategies

PLAIN = ("triple", "look_up", "kind", "odd", "judged")
STATEFUL = ("read", "write", "swap", "count", "retried")
EXTERNAL = ("post", "reserve", "hold", "charge", "sign", "mail", "remit")
STATEMENTS: dict[str, str] = {
    "push": "n",
    "raise": "n",
    "emit": "n",
    "sleep": "n",
    "delete": "n",
    "total": "n",
    "scan": "n",
    "measure": "n",
    "random": "n",
    "uuid": "n",
    "now": "n",
    "items": "n",
    "put": "nn",
    "get": "nn",
    "has": "nn",
    "add": "nn",
    "append": "nn",
    "confuse": "nn",
    "union": "nn",
}
"""Statements that call no step, or always the same, and their operands."""
BLOCKS = ("if", "while", "try", "nested", "gather", "map")


class Dice:
    """Choices read off bytes: hypothesis draws and shrinks bytes fast, and zeros are the simplest choices."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    def below(self, bound: int) -> int:
        """A number below ``bound``; 0 when the bytes are used up."""
        if self._next >= len(self._data):
            return 0
        self._next += 1
        return self._data[self._next - 1] % bound

    def pick(self, options: Sequence[Any]) -> Any:
        """One of these."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[Any], least: int, most: int) -> tuple[Any, ...]:
        """A few of these."""
        return tuple(self.pick(options) for _number in range(least + self.below(most - least + 1)))


class _Writer:
    """Writes a program of few different words: such programs reach deeper than those of all of them."""

    def __init__(self, dice: Dice, steps: Sequence[str], statements: Sequence[str], blocks: Sequence[str]) -> None:
        self._dice = dice
        self._steps = dice.some(steps, 1, 4)
        self._statements = dice.some(statements, 1, 5)
        self._blocks = dice.some(blocks, 0, 3) if blocks else ()

    def block(self, depth: int, least: int, most: int) -> Program:
        length = least + self._dice.below(most - least + 1)
        return tuple(self._statement(depth) for _number in range(length))

    def _place(self) -> int:
        return self._dice.below(SIZE)

    def _statement(self, depth: int) -> tuple[Any, ...]:
        dice = self._dice
        kind = dice.below(8)
        if kind >= 6 and depth and self._blocks:
            return self._big(dice.pick(self._blocks), depth - 1)
        if kind in (4, 5):
            name = dice.pick(self._statements)
            return (name, *(self._place() for _operand in STATEMENTS[name]))
        if kind == 3:
            return ("show", dice.pick(self._steps), self._place())
        return ("call", dice.pick(self._steps), self._place(), self._place())

    def _big(self, name: str, depth: int) -> tuple[Any, ...]:
        if name == "if":
            return (name, self._place(), self.block(depth, 1, 3), self.block(depth, 0, 3))
        if name == "while":
            return (name, self._place(), self.block(depth, 1, 3))
        if name == "try":
            return (name, self.block(depth, 1, 3), self.block(depth, 0, 2))
        if name == "nested":
            return (name, self.block(depth, 1, 4))
        if name == "map":
            return (name, self._dice.pick(self._steps))
        branches = tuple(self._branch(depth) for _number in range(1 + self._dice.below(3)))
        return (name, branches, bool(self._dice.below(2)))

    def _branch(self, depth: int) -> tuple[Any, ...]:
        kind = self._dice.below(5)
        if kind < 2:
            return ("step", self._dice.pick(self._steps), self._place())
        if kind < 4:
            return ("flow", self.block(depth, 1, 4), 0)
        return ("total", "", 0)


STEPS = (*PLAIN, *STATEFUL, *STATEFUL, *EXTERNAL)
"""All of them; those that use the state twice as often."""


def read_program(
    dice: Dice,
    steps: Sequence[str] = STEPS,
    statements: Sequence[str] = tuple(sorted(STATEMENTS)),
    blocks: Sequence[str] = BLOCKS,
) -> tuple[Program, list[int]]:
    """A program of up to ten statements, nested two deep, and the numbers it starts from."""
    program = _Writer(dice, steps, statements, blocks).block(2, 4, 10)
    return program, [dice.below(SIZE) for _place in range(SIZE)]
