"""The exactness checker: does a backend commit the same history with speculation as without?"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..chain import ChainLoop, run_sync
from ..errors import BackendContractError
from ..policies import Adaptive, Fixed, Threshold
from ..protocols import ChainBackend, PaddingBackend, Policy
from ..types import AcceptPrefix, Admission, ChainId, ChainView, Draft, Round
from .fakes import ScriptedPolicy

ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")

PHASES = ("predict", "execute", "verify", "commit")
"""Phases in which a failure can be injected, in the order of a round."""
DEFAULT_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fixed 1": lambda: Fixed(1),
    "fixed 4": lambda: Fixed(4),
    "fixed 8": lambda: Fixed(8),
    "threshold": lambda: Threshold(8, 0.5),
    "adaptive": lambda: Adaptive(8),
    "adaptive, padded": lambda: Adaptive(8, padded=True),
    "ragged": lambda: ScriptedPolicy(limits=(4, 0, 3, 0, 0, 5, 8, 1), admits=(2, 8, 0, 8, 1, 3)),
}
"""What :func:`check_exact` runs by default. ``ragged`` mixes empty, cut and full drafts within each round."""


class Driver(Protocol):
    """**Protocol:** runs a coroutine to its end: ``run_sync``, ``asyncio.run``, or a function around ``trio.run``."""

    def __call__(self, coroutine: Coroutine[Any, Any, ResultT], /) -> ResultT:
        """The coroutine's result."""
        ...


class InjectedFaultError(RuntimeError):
    """The failure that :class:`FaultyBackend` raises on purpose."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Where a failure is injected."""

    phase: str
    """One of :data:`PHASES`."""
    after: bool
    """False fails before the phase ran, True after it has run and its result is lost."""
    round_index: int
    """In which round, from 0."""

    def __str__(self) -> str:
        return f"failure {'after' if self.after else 'before'} {self.phase} of round {self.round_index}"


class _PassOn(Generic[ValueT]):
    """Passes every phase on to a backend."""

    def __init__(self, backend: ChainBackend[ValueT]) -> None:
        self._backend = backend

    def chains(self) -> Sequence[ChainView]:
        """Those of the backend."""
        return self._backend.chains()

    @property
    def pads_blocks(self) -> bool:
        """See :class:`specflow.protocols.PaddingBackend`."""
        return isinstance(self._backend, PaddingBackend) and self._backend.pads_blocks

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[ValueT]]:
        """The backend's drafts."""
        return await self._backend.predict(limits)

    async def execute(self, drafts: Sequence[Draft[ValueT]], admission: Admission) -> object:
        """The backend's outcome."""
        return await self._backend.execute(drafts, admission)

    async def verify(
        self, drafts: Sequence[Draft[ValueT]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[ValueT]]:
        """The backend's verdicts."""
        return await self._backend.verify(drafts, admission, outcome)

    async def commit(self, verdicts: Sequence[AcceptPrefix[ValueT]]) -> Sequence[Sequence[ValueT]]:
        """The backend's items."""
        return await self._backend.commit(verdicts)

    def discard(self) -> None:
        """The backend's round."""
        self._backend.discard()


class FaultyBackend(_PassOn[ValueT]):
    """Passes every phase on to a backend and fails once.

    Args:
        backend: does the work.
        fault: where to fail.
    """

    def __init__(self, backend: ChainBackend[ValueT], fault: Fault) -> None:
        super().__init__(backend)
        self._fault = fault
        self._round = 0
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        """True once the failure was raised."""
        return self._has_failed

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[ValueT]]:
        """Predict, or fail."""
        self._trip("predict", after=False)
        drafts = await super().predict(limits)
        self._trip("predict", after=True)
        return drafts

    async def execute(self, drafts: Sequence[Draft[ValueT]], admission: Admission) -> object:
        """Execute, or fail."""
        self._trip("execute", after=False)
        outcome = await super().execute(drafts, admission)
        self._trip("execute", after=True)
        return outcome

    async def verify(
        self, drafts: Sequence[Draft[ValueT]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[ValueT]]:
        """Verify, or fail."""
        self._trip("verify", after=False)
        verdicts = await super().verify(drafts, admission, outcome)
        self._trip("verify", after=True)
        return verdicts

    async def commit(self, verdicts: Sequence[AcceptPrefix[ValueT]]) -> Sequence[Sequence[ValueT]]:
        """Commit, or fail before anything is committed: what is committed is history, nothing fails after it."""
        self._trip("commit", after=False)
        items = await super().commit(verdicts)
        self._round += 1
        return items

    def _trip(self, phase: str, *, after: bool) -> None:
        if not self._has_failed and self._fault == Fault(phase, after, self._round):
            self._has_failed = True
            raise InjectedFaultError(str(self._fault))


class MispredictingBackend(_PassOn[ValueT]):
    """Passes every phase on to a backend, but spoils the drafts of rounds 0, 2, 4, ...

    Args:
        backend: does the work.
        spoil: turns a draft into a wrong one.
    """

    def __init__(self, backend: ChainBackend[ValueT], spoil: Callable[[Draft[ValueT]], Draft[ValueT]]) -> None:
        super().__init__(backend)
        self._spoil = spoil
        self._predictions = 0

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[ValueT]]:
        """The backend's drafts, spoiled every second time."""
        drafts = await super().predict(limits)
        self._predictions += 1
        return [self._spoil(draft) for draft in drafts] if self._predictions % 2 else drafts


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """One run of the backend under one policy."""

    name: str
    rounds: int
    items: int
    problem: str | None
    """The first thing that is wrong, or None."""


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """What :func:`check_exact` found."""

    plain: CheckedRun
    """The serial run everything is compared with."""
    runs: tuple[CheckedRun, ...]

    @property
    def ok(self) -> bool:
        """True when every run committed the serial history and kept its state in order."""
        return self.first_problem is None

    @property
    def first_problem(self) -> str | None:
        """The first run that went wrong and how, or None."""
        for run in (self.plain, *self.runs):
            if run.problem is not None:
                return f"{run.name}: {run.problem}"
        return None

    @property
    def gain(self) -> Mapping[str, float]:
        """Rounds of the plain run over rounds of each run: how much is gained where a round costs the same."""
        return {run.name: self.plain.rounds / run.rounds for run in self.runs if run.rounds}

    def __str__(self) -> str:
        head = "exact" if self.ok else f"NOT exact: {self.first_problem}"
        lines = [f"{run.name}: {run.rounds} rounds, {run.problem or 'ok'}" for run in (self.plain, *self.runs)]
        return "\n  ".join([head, *lines])


def check_exact(
    make_backend: Callable[[], ChainBackend[ValueT]],
    policies: Mapping[str, Callable[[], Policy]] | None = None,
    *,
    spoil: Callable[[Draft[ValueT]], Draft[ValueT]] | None = None,
    fault_rounds: Sequence[int] = (0, 2),
    drive: Driver = run_sync,
    max_rounds: int = 100_000,
) -> ExactnessReport:
    """Run a backend plainly and under several policies, with mispredictions and failures, and compare the histories.

    The serial oracle is the backend itself with no drafts. Every other run must commit the same items, chain by chain.
    After each round positions must have advanced by what was emitted, every chain must have moved, and after an
    injected failure the chains must stand where they stood before the round.

    Args:
        make_backend: makes a fresh backend with the same chains, in the same order, each time it is called.
        policies: what to run; None runs :data:`DEFAULT_POLICIES`.
        spoil: turns a draft into a wrong one; each policy is then run once more with every second round's drafts
            spoiled.
        fault_rounds: rounds in which a failure is injected, once in every phase, before and after it ran.
        drive: runs the coroutines; a backend that really waits needs an event loop.
        max_rounds: a run longer than this counts as never ending.

    Returns:
        A report; a backend that is not exact is a finding, not an exception. Exceptions raised by the backend are
        passed on.
    """
    chosen = DEFAULT_POLICIES if policies is None else policies
    checker = _Checker(drive, max_rounds)
    plain, truth = checker.run("plain", make_backend(), Fixed(0))
    runs: list[CheckedRun] = []
    for name, policy in chosen.items():
        runs.append(checker.compare(name, make_backend(), policy(), truth))
        if spoil is not None:
            spoiled = MispredictingBackend(make_backend(), spoil)
            runs.append(checker.compare(f"{name}, spoiled", spoiled, policy(), truth))
    for index in fault_rounds:
        for phase in PHASES:
            for after in (False, True) if phase != "commit" else (False,):
                fault = Fault(phase, after, index)
                faulty = FaultyBackend(make_backend(), fault)
                runs.append(checker.compare(str(fault), faulty, Fixed(4), truth))
    return ExactnessReport(plain, tuple(runs))


_Histories = Mapping[int, Sequence[object]]
"""Committed items by order of first appearance: two backends may name their chains differently."""


class _Checker:
    """Runs backends and looks after every round."""

    def __init__(self, drive: Driver, max_rounds: int) -> None:
        self._drive = drive
        self._max_rounds = max_rounds

    def compare(self, name: str, backend: ChainBackend[Any], policy: Policy, truth: _Histories) -> CheckedRun:
        run, histories = self.run(name, backend, policy)
        if run.problem is not None:
            return run
        return CheckedRun(name, run.rounds, run.items, _first_difference(truth, histories))

    def run(self, name: str, backend: ChainBackend[Any], policy: Policy) -> tuple[CheckedRun, _Histories]:
        return self._drive(self._run(name, backend, policy))

    async def _run(self, name: str, backend: ChainBackend[Any], policy: Policy) -> tuple[CheckedRun, _Histories]:
        loop = ChainLoop(backend, policy)
        order: dict[ChainId, int] = {}
        histories: dict[int, list[object]] = {}
        problem: str | None = None
        while problem is None:
            before = {view.chain_id: view for view in backend.chains()}
            try:
                finished = await loop.round()
            except InjectedFaultError:
                problem = _moved(before, backend)
                continue
            except BackendContractError as error:
                problem = str(error)
                continue
            if finished is None:
                break
            for chain_id, items in zip(finished.report.chain_ids, finished.items, strict=True):
                histories.setdefault(order.setdefault(chain_id, len(order)), []).extend(items)
            problem = _disorder(before, finished, backend)
            if loop.num_rounds >= self._max_rounds:
                problem = problem or f"did not end within {self._max_rounds} rounds"
        total = sum(len(history) for history in histories.values())
        return CheckedRun(name, loop.num_rounds, total, problem), histories


def _moved(before: Mapping[ChainId, ChainView], backend: ChainBackend[Any]) -> str | None:
    """A failed round must leave every chain where it was."""
    after = {view.chain_id: view for view in backend.chains()}
    if after == before:
        return None
    left, expected = (sorted(views.values(), key=_by_id) for views in (after, before))
    return f"discard() left the chains as {left} instead of {expected}"


def _disorder(before: Mapping[ChainId, ChainView], finished: Round[Any], backend: ChainBackend[Any]) -> str | None:
    """After a round every chain must have moved on, by exactly what it emitted."""
    after = {view.chain_id: view for view in backend.chains()}
    report = finished.report
    for chain_id, emitted, accepted in zip(report.chain_ids, report.emitted, report.accepted, strict=True):
        live = after.get(chain_id)
        if live is None:
            continue
        expected = before[chain_id].position + emitted
        if live.position != expected:
            return f"chain {chain_id} is at position {live.position} after round {report.index}, expected {expected}"
        if emitted != accepted + 1:
            return (
                f"chain {chain_id} goes on after round {report.index}, which emitted {emitted} items "
                f"where {accepted} were accepted; only a chain that ends may emit fewer than accepted + 1"
            )
        if live.max_draft < 0:
            return (
                f"chain {chain_id} has max_draft={live.max_draft} after round {report.index}; it must not be negative"
            )
    return None


def _first_difference(truth: _Histories, histories: _Histories) -> str | None:
    if len(truth) != len(histories):
        return f"ran {len(histories)} chains where plain execution ran {len(truth)}"
    for chain, expected in truth.items():
        got = histories[chain]
        for index, (wanted, item) in enumerate(zip(expected, got, strict=False)):
            if wanted != item:
                return f"item {index} of chain {chain} is {item!r}, plain execution has {wanted!r}"
        if len(expected) != len(got):
            return f"chain {chain} has {len(got)} items, plain execution has {len(expected)}"
    return None


def _by_id(view: ChainView) -> int:
    return view.chain_id
