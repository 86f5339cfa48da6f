"""The block loop: predict, admit, execute, verify, commit, for many chains at once.

One coroutine that only awaits its backend. A backend that never suspends is driven by :func:`run_sync` without an
event loop; an asynchronous one runs under asyncio or trio unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from .admission import Frontier
from .errors import BackendContractError, SuspendedError
from .protocols import ChainBackend, Clock, Observer, PaddingBackend, Policy
from .trees import path_problem, shape_problem
from .types import AcceptPrefix, Admission, ChainView, Draft, PhaseSeconds, Round, RoundReport, Tree

ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")


def run_sync(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Drive a coroutine that never suspends and return its result.

    Raises:
        SuspendedError: the coroutine waits on something; it is closed first.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as done:
        result: ResultT = done.value
        return result
    coroutine.close()
    raise SuspendedError(awaited)


class ChainLoop(Generic[ValueT]):
    """Runs rounds of a :class:`~specflow.protocols.ChainBackend` under a policy.

    Args:
        backend: the five phases.
        policy: how many items to draft and which to execute.
        observers: told about every round, in order.
        clock: seconds; replace it in tests.
    """

    def __init__(
        self,
        backend: ChainBackend[ValueT],
        policy: Policy,
        observers: Sequence[Observer] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._policy = policy
        self._observers = tuple(observers)
        self._clock = clock
        self._rounds = 0
        self._padded = isinstance(backend, PaddingBackend) and backend.pads_blocks

    @property
    def num_rounds(self) -> int:
        """Rounds finished so far."""
        return self._rounds

    async def round(self) -> Round[ValueT] | None:
        """Run one round over the live chains; None when there are none.

        If a phase raises, the backend discards the round first: committed state is never lost or half-written.

        Raises:
            BackendContractError: the policy, drafter or backend returned something its protocol forbids.
        """
        chains = self._backend.chains()
        if not chains:
            return None
        try:
            result = await self._run(chains)
        except BaseException:
            self._backend.discard()
            raise
        self._rounds += 1
        self._policy.observe(result.report)
        for observer in self._observers:
            observer.on_round(result.report)
        return result

    async def run(self) -> int:
        """Run rounds until no chain is left; returns how many this call ran."""
        before = self._rounds
        while await self.round() is not None:
            pass
        return self._rounds - before

    async def _run(self, chains: Sequence[ChainView]) -> Round[ValueT]:
        backend, clock = self._backend, self._clock
        started = clock()
        limits = _clamped(self._policy, self._policy.limits(chains), chains)
        drafts = await backend.predict(limits)
        _check_drafts(drafts, limits)
        predicted = clock()
        frontier = Frontier(drafts)
        self._policy.admit(frontier)
        admission = frontier.decision()
        admitted = clock()
        outcome = await backend.execute(drafts, admission)
        executed = clock()
        verdicts = await backend.verify(drafts, admission, outcome)
        _check_verdicts(verdicts, admission, drafts)
        verified = clock()
        items = await backend.commit(verdicts)
        _check_items(items, verdicts)
        committed = clock()
        report = RoundReport(
            index=self._rounds,
            chain_ids=tuple([chain.chain_id for chain in chains]),
            limits=tuple(limits),
            drafted=tuple([len(draft.values) for draft in drafts]),
            admitted=admission.lengths,
            accepted=tuple([verdict.num_accepted for verdict in verdicts]),
            emitted=tuple([len(emitted) for emitted in items]),
            survival=tuple([draft.survival for draft in drafts]),
            seconds=PhaseSeconds(
                predicted - started,
                admitted - predicted,
                executed - admitted,
                verified - executed,
                committed - verified,
            ),
            trees=_trees(drafts, verdicts),
            padded=self._padded,
        )
        return Round(report, items)


def _clamped(policy: Policy, limits: Sequence[int], chains: Sequence[ChainView]) -> list[int]:
    if len(limits) != len(chains):
        raise BackendContractError(
            type(policy).__name__,
            f"returned {len(limits)} limits for {len(chains)} chains",
            "Policy.limits() must return one limit per chain",
        )
    if min(limits) < 0:
        raise BackendContractError(
            type(policy).__name__, f"returned a negative limit ({min(limits)})", "0 means plain execution"
        )
    return [min(chain.max_draft, limit) for limit, chain in zip(limits, chains, strict=True)]


def _check_drafts(drafts: Sequence[Draft[Any]], limits: Sequence[int]) -> None:
    if len(drafts) != len(limits):
        raise BackendContractError(
            "predict()", f"returned {len(drafts)} drafts for {len(limits)} chains", "return one draft per chain"
        )
    for draft, limit in zip(drafts, limits, strict=True):
        size = len(draft.values)
        if size > limit:
            raise BackendContractError("predict()", f"drafted {size} items where {limit} were allowed", "draft fewer")
        if draft.survival is not None and len(draft.survival) != size:
            raise BackendContractError(
                "predict()",
                f"gave {len(draft.survival)} survival estimates for {size} items",
                "give one estimate per item, or None",
            )
        problem = None if draft.parents is None else shape_problem(draft.parents, size)
        if problem is not None:
            raise BackendContractError(
                "predict()", problem, "give one parent per item: an item before it, or -1 for the history"
            )


def _trees(drafts: Sequence[Draft[Any]], verdicts: Sequence[AcceptPrefix[Any]]) -> tuple[Tree | None, ...]:
    if all(draft.parents is None for draft in drafts):
        return ()
    return tuple(
        [
            None if draft.parents is None else Tree(draft.parents, verdict.path or ())
            for draft, verdict in zip(drafts, verdicts, strict=True)
        ]
    )


def _check_verdicts(verdicts: Sequence[AcceptPrefix[Any]], admission: Admission, drafts: Sequence[Draft[Any]]) -> None:
    if len(verdicts) != len(admission.lengths):
        raise BackendContractError(
            "verify()",
            f"returned {len(verdicts)} verdicts for {len(admission.lengths)} chains",
            "return one verdict per chain",
        )
    for verdict, length, draft in zip(verdicts, admission.lengths, drafts, strict=True):
        if not 0 <= verdict.num_accepted <= length:
            raise BackendContractError(
                "verify()",
                f"accepted {verdict.num_accepted} items of {length} executed ones",
                "num_accepted must lie between 0 and the admitted length",
            )
        if draft.parents is None:
            continue
        path = verdict.path or ()
        problem = path_problem(draft.parents, path, length)
        if problem is None and len(path) != verdict.num_accepted:
            problem = f"accepted {verdict.num_accepted} items of a tree, but its path has {len(path)}"
        if problem is not None:
            raise BackendContractError("verify()", problem, "give the accepted items of a tree in AcceptPrefix.path")


def _check_items(items: Sequence[Sequence[Any]], verdicts: Sequence[AcceptPrefix[Any]]) -> None:
    if len(items) != len(verdicts):
        raise BackendContractError(
            "commit()", f"returned items of {len(items)} chains for {len(verdicts)}", "return one sequence per chain"
        )
    for emitted, verdict in zip(items, verdicts, strict=True):
        if len(emitted) > verdict.num_accepted + 1:
            raise BackendContractError(
                "commit()",
                f"emitted {len(emitted)} items where {verdict.num_accepted} were accepted",
                "a chain emits the accepted items and one more at most",
            )
