"""Declared pipelines: steps whose parameters name the steps they read. Built, validated, frozen and drawn here.

The only room that knows networkx, and only while a graph is built: at run time a pipeline is parallel branches, one per
step, each of which waits for the results it reads.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, get_type_hints, is_typeddict, overload

from .codec import Box, encode
from .definitions import RESERVED, Step, StepDecorator, fingerprint
from .errors import GraphError, UnsupportedValueError
from .replay import Context, InputsRequest, PipelineRequest, Suspend

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Node:
    """One step of a frozen pipeline."""

    name: str
    step: Step[..., Any]
    reads: tuple[str, ...]
    """Steps it waits for: those its parameters name, and those its condition looks at."""
    inputs: tuple[str, ...]
    """Inputs of the pipeline that its parameters name."""
    when: tuple[tuple[str, tuple[Any, ...]], ...]
    """Runs only if each of these steps returned one of these values."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A pipeline that was found to be sound; nodes are in program order."""

    nodes: tuple[Node, ...]
    inputs: Mapping[str, Any]
    """Name of every input and the type it is declared with (``object`` where it is not)."""
    optional: frozenset[str]
    """Inputs that may be left out: every step that reads one has a default for it."""
    output: str | None
    """The step whose result is the pipeline's; None: a dict of the results that no step reads."""


class Pipeline:
    """A declared graph of steps. Add steps with :meth:`step`, run it with :func:`specflow.run`.

    A step starts as soon as everything it reads is known, or guessed. A step that is skipped by its condition has the
    result None. The pipeline's result is that of its ``output`` step, by default of the one step that no other reads;
    if there are several such steps, a dict of their results by name.

    Args:
        name: for reports and the store.
        output: name of the step whose result is the pipeline's.
    """

    def __init__(self, name: str, *, output: str | None = None) -> None:
        self._label = name
        self._module: str = sys._getframe(1).f_globals.get("__name__", "__main__")  # noqa: SLF001 - where it is declared
        self._output = output
        self._steps: dict[str, Step[..., Any]] = {}
        self._conditions: dict[str, Mapping[str, Any]] = {}
        self._graph: Graph | None = None

    def __repr__(self) -> str:
        return f"<pipeline {self._label}: {', '.join(self._steps)}>"

    @overload
    def step(self, function: Callable[ParametersT, Awaitable[ResultT]], /) -> Step[ParametersT, ResultT]: ...
    @overload
    def step(self, function: Callable[ParametersT, ResultT], /) -> Step[ParametersT, ResultT]: ...
    @overload
    def step(
        self, function: None = None, /, *, when: Mapping[str, Any] | None = None, **settings: Any
    ) -> StepDecorator: ...
    def step(
        self, function: Callable[..., Any] | None = None, /, *, when: Mapping[str, Any] | None = None, **settings: Any
    ) -> Any:
        """Add a step; its parameters name the steps and inputs it reads.

        Args:
            function: as in :func:`specflow.step`.
            when: ``{"route": "refund"}`` runs the step only if step ``route`` returned ``"refund"``; a list, tuple or
                set allows any of its members.
            settings: as in :func:`specflow.step`.

        Raises:
            GraphError: the name is taken.
            InvalidSettingError: a setting cannot work.
        """
        if function is None:
            return lambda inner: self._add(inner, when or {}, settings)
        return self._add(function, when or {}, settings)

    def _add(self, function: Callable[..., Any], when: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        if isinstance(function, Step) and settings:
            raise GraphError(self._label, f"{function.name} is a step already", "give it its settings where it is made")
        if not isinstance(when, Mapping):
            raise GraphError(self._label, f"the condition is {when!r}", "give a mapping from step to value(s)")
        added = function if isinstance(function, Step) else Step(function, **settings)
        name = added.function.__name__
        if name in self._steps:
            raise GraphError(self._label, f"there are two steps named {name}", "rename one of them")
        self._steps[name] = added
        self._conditions[name] = when
        self._graph = None
        return added

    @property
    def name(self) -> str:
        """``module:label``, the module being the one that declares the pipeline."""
        return f"{self._module}:{self._label}"

    @property
    def fingerprint(self) -> str:
        """Digest of the code of all steps, of how they are connected, and of what the result is."""
        digest = hashlib.blake2b(digest_size=16)
        graph = self.freeze()
        for node in graph.nodes:
            when = [(source, [_digestible(value) for value in allowed]) for source, allowed in node.when]
            digest.update(repr((node.name, node.reads, node.inputs, when)).encode())
            digest.update(fingerprint(node.step.function).encode())
        digest.update(repr(graph.output).encode())
        return digest.hexdigest()

    def freeze(self) -> Graph:
        """Check the graph and put its steps into program order: dependencies first, then order of declaration.

        Raises:
            GraphError: it is empty, has a cycle, or names a step that does not exist.
        """
        if self._graph is None:
            self._graph = self._build()
        return self._graph

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the inputs of a run.

        Raises:
            GraphError: an input is missing, unknown, or not of its declared type.
        """
        graph = self.freeze()
        if args:
            raise GraphError(
                self._label, "its inputs are named", f"write run(pipeline, {next(iter(graph.inputs), 'x')}=...)"
            )
        missing = [name for name in graph.inputs if name not in kwargs and name not in graph.optional]
        if missing:
            readers = [node.name for node in graph.nodes if missing[0] in node.inputs]
            raise GraphError(
                self._label,
                f"{missing[0]!r} is missing; step {readers[0]} reads it",
                f"pass {missing[0]}=..., or add a step of that name",
            )
        for name, value in kwargs.items():
            if name not in graph.inputs:
                known = ", ".join(graph.inputs) or "none"
                raise GraphError(self._label, f"no step reads the input {name!r}", f"its inputs are: {known}")
            for declared in {id(hint): hint for hint in self._declared(graph, name)}.values():
                _check_type(self._label, name, value, declared)

    def _declared(self, graph: Graph, name: str) -> list[Any]:
        """Types with which steps read an input."""
        return [_hint(node.step, name) for node in graph.nodes if name in node.inputs]

    def body(self, arguments: Box) -> Callable[[Context], Coroutine[Any, Any, Any]]:
        """The program to run with these encoded ``((), inputs)``."""
        graph = self.freeze()
        index = {node.name: position for position, node in enumerate(graph.nodes)}

        def branch(node: Node) -> Callable[[Context], Coroutine[Any, Any, Any]]:
            async def run_node(context: Context) -> Any:
                known: dict[str, Any] = {}
                if node.reads:
                    positions = tuple(index[name] for name in node.reads)
                    values = await Suspend(InputsRequest(context.next_position(), positions))
                    known = dict(zip(node.reads, values, strict=True))
                if any(known[name] not in allowed for name, allowed in node.when):
                    return None
                _args, inputs = arguments.fresh()
                names = node.step.signature.parameters
                chosen = {
                    name: known[name] if name in known else inputs[name]
                    for name in names
                    if name in known or name in inputs
                }
                return await context.call(node.step, **chosen)

            return run_node

        branches = tuple((node.name, branch(node)) for node in graph.nodes)

        async def run_all(context: Context) -> Any:
            pairs = await Suspend(PipelineRequest(context.next_position(), branches))
            results = {node.name: value for node, (value, _error) in zip(graph.nodes, pairs, strict=True)}
            if graph.output is not None:
                return results[graph.output]
            read = {name for node in graph.nodes for name in node.reads}
            return {name: value for name, value in results.items() if name not in read}

        return run_all

    def draw(self) -> str:
        """The graph as a Mermaid flowchart, which many Markdown viewers show as a picture.

        Raises:
            GraphError: as :meth:`freeze`.
        """
        graph = self.freeze()
        lines = ["flowchart LR"]
        lines += [f"    {name}([{name}])" for name in graph.inputs]
        lines += [f"    {node.name}[{node.name}]" for node in graph.nodes]
        for node in graph.nodes:
            conditions = dict(node.when)
            for source in (*node.inputs, *node.reads):
                label = f"|{' or '.join(map(str, conditions[source]))}|" if source in conditions else ""
                lines.append(f"    {source} -->{label} {node.name}")
        return "\n".join(lines)

    def _build(self) -> Graph:
        import networkx as nx  # noqa: PLC0415 - not needed to import specflow

        if not self._steps:
            raise GraphError(self._label, "it has no steps", "add one with @pipeline.step")
        order = {name: position for position, name in enumerate(self._steps)}
        nodes: dict[str, Node] = {}
        inputs: dict[str, Any] = {}
        graph: nx.DiGraph[str] = nx.DiGraph()
        for name, one in self._steps.items():
            node = nodes[name] = self._node(name, one)
            graph.add_node(name)
            graph.add_edges_from((source, name) for source in node.reads)
            for parameter in node.inputs:
                if inputs.get(parameter, object) is object:
                    inputs[parameter] = _hint(one, parameter)
        cycle = next(iter(nx.simple_cycles(graph)), None)
        if cycle is not None:
            path = " -> ".join([*cycle, cycle[0]])
            raise GraphError(self._label, f"its steps wait for each other: {path}", "remove one of these parameters")
        for node in nodes.values():
            self._check_edges(node, nodes)
        if self._output is not None and self._output not in nodes:
            raise GraphError(self._label, f"its output {self._output!r} is not one of its steps", "name one of them")
        sorted_names = nx.lexicographical_topological_sort(graph, key=order.__getitem__)
        ordered = tuple(nodes[name] for name in sorted_names)
        sinks = [name for name in graph if graph.out_degree(name) == 0]
        output = self._output or (sinks[0] if len(sinks) == 1 else None)
        reserved = RESERVED & inputs.keys()
        if reserved:
            raise GraphError(self._label, f"{min(reserved)!r} is a setting of run()", "rename this input")
        return Graph(ordered, inputs, frozenset(inputs) - self._required(nodes), output)

    def _required(self, nodes: Mapping[str, Node]) -> frozenset[str]:
        return frozenset(
            name
            for node in nodes.values()
            for name in node.inputs
            if node.step.signature.parameters[name].default is inspect.Signature.empty
        )

    def _node(self, name: str, step: Step[..., Any]) -> Node:
        """What a step reads, by the names of its parameters and of its condition."""
        when = tuple((source, self._allowed(name, source, value)) for source, value in self._conditions[name].items())
        for source, _values in when:
            if source not in self._steps:
                raise GraphError(
                    self._label, f"the condition of {name} looks at {source!r}", "name a step of this pipeline"
                )
        parameters = step.signature.parameters.values()
        if any(one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in parameters):
            raise GraphError(self._label, f"{name} has parameters without a name", "name what it reads")
        named = [one.name for one in parameters if one.name in self._steps]
        reads = tuple(dict.fromkeys([*named, *(source for source, _values in when)]))
        inputs = tuple(one.name for one in parameters if one.name not in self._steps)
        return Node(name, step, reads, inputs, when)

    def _allowed(self, name: str, source: str, value: Any) -> tuple[Any, ...]:
        """The results of a step that let another one run, members of sets in an order that every process finds."""
        if callable(value) and not isinstance(value, type):
            raise GraphError(
                self._label,
                f"the condition of {name} on {source!r} is a function",
                "name the values that let it run, or test for them in a step of its own",
            )
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return (value,)
        if not value:
            raise GraphError(
                self._label, f"{name} never runs: no result of {source!r} lets it", "name one value at least"
            )
        return tuple(sorted(value, key=repr)) if isinstance(value, set | frozenset) else tuple(value)

    def _check_edges(self, node: Node, nodes: Mapping[str, Node]) -> None:
        """A result declared as one class cannot be read as an unrelated one."""
        for source in node.reads:
            if source not in node.step.signature.parameters:
                continue
            wanted, given = _hint(node.step, source), _hint(nodes[source].step, "return")
            plain = isinstance(wanted, type) and isinstance(given, type) and object not in (wanted, given)
            numeric = wanted in (float, complex) and given in (int, float)
            if plain and not numeric and not _may_be(given, wanted) and not _may_be(wanted, given):
                raise GraphError(
                    self._label,
                    f"{node.name} reads {source} as {wanted.__name__}, but {source} returns {given.__name__}",
                    "change one of the annotations",
                )


def _digestible(value: Any) -> Any:
    """What stands for a value in a digest: the same in every process."""
    try:
        return encode(value)
    except UnsupportedValueError:
        return f"{type(value).__module__}.{type(value).__qualname__}"


def _may_be(one: type, other: type) -> bool:
    """Can an object of one class be of another? Classes that cannot be compared (protocols, typed dicts) may."""
    try:
        return issubclass(one, other)
    except TypeError:
        return True


def _hint(step: Step[..., Any], name: str) -> Any:
    try:
        return get_type_hints(step.function).get(name, object)
    except (NameError, TypeError, AttributeError):
        return object  # annotations that exist for type checkers only


def _check_type(pipeline: str, name: str, value: Any, declared: Any) -> None:
    if declared is object or declared is Any:
        return
    if is_typeddict(declared):
        declared = dict  # its fields cannot be checked on every version of Python
    if isinstance(declared, type):
        if not _has_instances(declared):
            return
        if declared is float and type(value) is int:
            return
        if not isinstance(value, declared) or (type(value) is bool and declared is int):
            raise GraphError(
                pipeline, f"input {name!r} is {value!r}, which is not of type {declared.__name__}", "pass one that is"
            )
        return
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError  # noqa: PLC0415 - rarely needed

    try:
        TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        detail = error.errors()[0]["msg"]
        raise GraphError(pipeline, f"input {name!r} is not {declared}: {detail}", "pass one that is") from None
    except PydanticUserError:
        return  # an annotation that says nothing at run time


def _has_instances(declared: type) -> bool:
    """Can objects be compared with this class? Not with a protocol that only exists for type checkers."""
    try:
        isinstance(None, declared)
    except TypeError:
        return False
    return True


__all__ = ["Graph", "Node", "Pipeline"]
