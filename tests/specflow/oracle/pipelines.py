"""Random pipelines: a graph of steps that read each other, the input and the state."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from specflow.definitions import Attempt
from specflow.effects import Effect
from specflow.graph import Pipeline
from specflow.history import Position
from specflow.state import State
from tests.specflow.oracle.programs import BANK, SIZE, Dice, Predictors, Receiver, at_once, number

EFFECTS: dict[str, Effect] = {
    "plus": Effect.PURE,
    "kind": Effect.PURE,
    "odd": Effect.PURE,
    "look": Effect.READONLY,
    "read": Effect.READONLY,
    "scan": Effect.READONLY,
    "own": Effect.READONLY,
    "write": Effect.READONLY,
    "add": Effect.READONLY,
    "append": Effect.READONLY,
    "charge": Effect.IRREVERSIBLE,
    "reserve": Effect.COMPENSABLE,
    "mail": Effect.BUFFERED,
}
"""What a node may do."""
HARMLESS = ("plus", "kind", "look", "read", "scan", "own", "add", "append")


@dataclass(frozen=True)
class NodeSpec:
    """One step of a random pipeline."""

    does: str
    reads: tuple[int, ...]
    """Earlier nodes."""
    when: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Runs only if these earlier nodes returned one of these numbers."""
    takes_input: bool = False


@dataclass(frozen=True)
class Graph:
    """A random pipeline."""

    nodes: tuple[NodeSpec, ...]

    @property
    def takes_input(self) -> bool:
        """Some node reads the pipeline's input."""
        return any(node.takes_input for node in self.nodes)

    def before(self, index: int) -> set[int]:
        """Nodes that a node depends on, directly or through others."""
        node = self.nodes[index]
        direct = {*node.reads, *(source for source, _values in node.when)}
        return direct.union(*(self.before(source) for source in direct))

    def unordered(self, pipeline: Pipeline) -> Callable[[Position, Position], bool]:
        """Whether two places belong to nodes that no dependency orders."""
        order = [int(node.name[1:]) for node in pipeline.freeze().nodes]

        def parallel(one: Position, other: Position) -> bool:
            left, right = order[one[1]], order[other[1]]
            return left not in self.before(right) and right not in self.before(left)

        return parallel


class Plant:
    """A pipeline with fresh steps, and the world they act on."""

    def __init__(self, graph: Graph, predictors: Predictors, pause: Callable[[str], Awaitable[None]] = at_once) -> None:
        self.receiver = Receiver()
        self._pause = pause
        self.pipeline = Pipeline("random")
        for index, node in enumerate(graph.nodes):
            self._add(index, node, predictors)

    def _add(self, index: int, node: NodeSpec, predictors: Predictors) -> None:
        act = _ACTS[node.does]
        receiver, pause = self.receiver, self._pause

        async def function(**values: Any) -> Any:
            state, attempt = values.pop("state", None), values.pop("attempt", None)
            await pause(f"n{index}")
            x = (index + sum(number(value) for value in values.values())) % SIZE
            return act(x, index, state, attempt, receiver)

        async def undo(receipt: Any, **values: Any) -> None:
            receiver.undo(f"n{index}", receipt)

        names = [f"n{source}" for source in node.reads] + (["start"] if node.takes_input else [])
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        effect = EFFECTS[node.does]
        if effect.is_external:
            parameters.append(inspect.Parameter("attempt", inspect.Parameter.KEYWORD_ONLY, annotation=Attempt))
        else:
            parameters.append(inspect.Parameter("state", inspect.Parameter.KEYWORD_ONLY, annotation=State))
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__name__ = f"n{index}"
        self.pipeline.step(
            when={f"n{source}": list(values) for source, values in node.when},
            name=f"n{index}",
            effect=effect,
            undo=undo if effect is Effect.COMPENSABLE else None,
            resource=BANK if node.does == "charge" else None,
            predict=None if effect is Effect.BUFFERED else predictors(f"n{index}"),
        )(function)


Act = Callable[[int, int, State, Attempt, Receiver], Any]


def _odd(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    if x % 2 == 0:
        raise ValueError(f"node {index}: {x} is even")
    return x


def _write(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    state.put("shared", x)
    return x


def _own(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    state.put(f"own{index}", x)
    return 1


def _add(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    state.add("sum", x)
    return 1


def _append(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    state.append("list", [index, x])
    return 2


def _charge(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> int:
    receiver.see("do", BANK, f"n{index}", attempt, x)
    return (x + 1) % SIZE


def _reserve(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> list[Any]:
    receiver.see("do", f"n{index}", f"n{index}", attempt, x)
    return [x, list(attempt.position), attempt.idempotency_key]


def _mail(x: int, index: int, state: State, attempt: Attempt, receiver: Receiver) -> None:
    receiver.see("send", f"n{index}", f"n{index}", attempt, x)


_ACTS: dict[str, Act] = {
    "plus": lambda x, index, state, attempt, receiver: (x + 1) % SIZE,
    "look": lambda x, index, state, attempt, receiver: (3 * x) % SIZE,
    "kind": lambda x, index, state, attempt, receiver: (1, True, 1.0, "1")[x],
    "odd": _odd,
    "read": lambda x, index, state, attempt, receiver: state.get("sum", 0) % SIZE,
    "scan": lambda x, index, state, attempt, receiver: (len(state.scan("own")) + x) % SIZE,
    "own": _own,
    "write": _write,
    "add": _add,
    "append": _append,
    "charge": _charge,
    "reserve": _reserve,
    "mail": _mail,
}


def read_graph(dice: Dice) -> Graph:
    """A graph of up to eight nodes, each of which reads up to three of those before it."""
    does = (*HARMLESS, *dice.some(sorted(EFFECTS), 0, 3) * 2)
    nodes: list[NodeSpec] = []
    for index in range(2 + dice.below(7)):
        reads = tuple(dict.fromkeys(dice.some(range(index), 0, 3))) if index else ()
        when: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if index and dice.below(4) == 3:
            when = ((dice.below(index), dice.some(range(SIZE), 1, 3)),)
        nodes.append(NodeSpec(dice.pick(does), reads, when, bool(dice.below(2))))
    return Graph(tuple(nodes))
