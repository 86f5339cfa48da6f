"""The block loop: order of phases, reports, contract checks, discarding, and every way of driving it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.admission import Frontier
from specflow.chain import ChainLoop, run_sync
from specflow.errors import BackendContractError, SuspendedError
from specflow.instrumentation import Recorder
from specflow.policies import Adaptive, Fixed, Threshold
from specflow.protocols import Policy
from specflow.testing import (
    PHASES,
    AdversaryBackend,
    Fault,
    FaultyBackend,
    InjectedFaultError,
    ManualClock,
    OracleBackend,
    ScriptedBackend,
    ScriptedPolicy,
    SequenceBackend,
    Timing,
)
from specflow.types import AcceptPrefix, Admission, ChainView, Draft, PhaseSeconds, RoundReport


def histories(backend: SequenceBackend[Any], count: int) -> list[list[Any]]:
    """What each chain has committed."""
    return [list(backend.history(chain)) for chain in range(count)]


# ---------------------------------------------------------------------------------------------------------- the rounds


def test_no_chains_is_no_round() -> None:
    """With nothing left to do a round is None and nothing is counted."""
    nothing: list[str] = []
    loop = ChainLoop(OracleBackend(nothing), Fixed(4))
    assert run_sync(loop.round()) is None
    assert run_sync(loop.run()) == 0
    assert loop.num_rounds == 0


def test_a_round_reports_what_it_did_per_chain() -> None:
    """Limits, drafted, admitted, accepted and emitted are those of the script, chain by chain."""
    backend = ScriptedBackend(["abcdefgh", "klmnop", "xy"], [[3], [1], [-1]])
    loop = ChainLoop(backend, ScriptedPolicy(limits=[5], admits=[2]))
    finished = run_sync(loop.round())
    assert finished is not None
    report = finished.report
    assert report.index == 0
    assert report.limits == (5, 5, 1)
    assert report.drafted == (5, 5, 0)
    assert report.admitted == (2, 2, 0)
    assert report.accepted == (2, 1, 0)
    assert report.emitted == (3, 2, 1)
    assert report.survival == (None, None, None)
    assert [list(items) for items in finished.items] == [["a", "b", "c"], ["k", "l"], ["x"]]


@pytest.mark.parametrize("padded", [True, False])
def test_a_round_reports_whether_its_blocks_were_padded(*, padded: bool) -> None:
    """As the backend says, through whatever stands before it; one that says nothing pads nothing."""
    timing = Timing(ManualClock(), float, padded=padded)
    fault = Fault("predict", after=False, round_index=9)
    for backend in (OracleBackend(["abcd"], None, timing), FaultyBackend(OracleBackend(["abcd"], None, timing), fault)):
        finished = run_sync(ChainLoop(backend, Fixed(2)).round())
        assert finished is not None
        assert finished.report.padded is padded


def test_limits_are_clamped_to_the_room_a_chain_has() -> None:
    """A policy may ask for more than can ever be committed; the drafter never sees that."""
    finished = run_sync(ChainLoop(OracleBackend(["abc"]), Fixed(100)).round())
    assert finished is not None
    assert finished.report.limits == (2,)
    assert [list(items) for items in finished.items] == [["a", "b", "c"]]


def test_chains_leave_when_they_end_and_the_rest_goes_on() -> None:
    """Chains of different lengths end in different rounds, and each report names the chains of its round."""
    recorder = Recorder()
    loop = ChainLoop(OracleBackend(["a", "bcd", "efghij"]), Fixed(1), [recorder])
    assert run_sync(loop.run()) == 3
    assert [report.chain_ids for report in recorder.reports] == [(0, 1, 2), (1, 2), (2,)]
    assert loop.num_rounds == 3


def test_the_clock_is_read_between_phases() -> None:
    """Seconds are attributed to the phase in which they passed."""
    clock = ManualClock(100.0)
    timing = Timing(clock, execute=lambda width: 10.0 * width, predict=lambda longest: 0.5 * longest)
    finished = run_sync(ChainLoop(OracleBackend(["abcdefgh"], timing=timing), Fixed(3), clock=clock).round())
    assert finished is not None
    assert finished.report.seconds == PhaseSeconds(predict=1.5, execute=40.0)


def test_policy_and_observers_see_each_round_once_and_in_order() -> None:
    """The policy learns first, then the observers in the order given, then the caller gets the round."""
    seen: list[str] = []

    class Watcher:
        """Writes down who was told."""

        def __init__(self, name: str) -> None:
            self._name = name

        def on_round(self, report: RoundReport) -> None:
            seen.append(f"{self._name} {report.index}")

    class Learner(Fixed):
        """Writes down that it learned."""

        def observe(self, report: RoundReport) -> None:
            seen.append(f"policy {report.index}")

    loop = ChainLoop(OracleBackend(["abcd"]), Learner(1), [Watcher("first"), Watcher("second")])
    run_sync(loop.run())
    assert seen == ["policy 0", "first 0", "second 0", "policy 1", "first 1", "second 1"]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    script=st.lists(st.integers(-1, 6), min_size=1, max_size=6),
    limits=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    admits=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_any_mix_of_drafts_and_verdicts_commits_the_serial_history(
    lengths: list[int], script: list[int], limits: list[int], admits: list[int]
) -> None:
    """Drafts right for any number of items, admitted to any length, change the rounds and never the history."""
    sequences = [list(range(100 * chain, 100 * chain + length)) for chain, length in enumerate(lengths)]
    backend = ScriptedBackend(sequences, [script] * len(sequences))
    recorder = Recorder()
    rounds = run_sync(ChainLoop(backend, ScriptedPolicy(limits, admits), [recorder]).run())
    assert histories(backend, len(sequences)) == sequences
    assert rounds <= max(lengths)
    for report in recorder.reports:
        assert list(report.emitted) == [accepted + 1 for accepted in report.accepted]


# -------------------------------------------------------------------------------------------------------- the contract


class Limits(Fixed):
    """A policy that returns the limits it is given, right or wrong."""

    def __init__(self, limits: list[int]) -> None:
        super().__init__(0)
        self._wrong = limits

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As given."""
        return self._wrong


class Broken(OracleBackend[str]):
    """A backend whose phases can be replaced one by one; it counts discards."""

    def __init__(self, **phases: Callable[..., Any]) -> None:
        super().__init__(["abcdefgh", "klmnopqr"], survival=0.5)
        self._phases = phases
        self.discards = 0

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[str]]:
        """Replaced or right."""
        drafts = await super().predict(limits)
        return self._phases["predict"](drafts) if "predict" in self._phases else drafts

    async def verify(
        self, drafts: Sequence[Draft[str]], admission: Admission, outcome: Any
    ) -> Sequence[AcceptPrefix[str]]:
        """Replaced or right."""
        verdicts = await super().verify(drafts, admission, outcome)
        return self._phases["verify"](verdicts) if "verify" in self._phases else verdicts

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Replaced or right."""
        items = await super().commit(verdicts)
        return self._phases["commit"](items) if "commit" in self._phases else items

    def discard(self) -> None:
        """Count."""
        super().discard()
        self.discards += 1


@pytest.mark.parametrize(
    ("policy", "backend", "message"),
    [
        (Limits([1]), Broken(), "Limits returned 1 limits for 2 chains"),
        (Limits([1, -2]), Broken(), r"negative limit \(-2\)"),
        (Fixed(2), Broken(predict=lambda drafts: drafts[:1]), r"predict\(\) returned 1 drafts for 2 chains"),
        (Fixed(2), Broken(predict=lambda drafts: [Draft("abc"), *drafts[1:]]), "drafted 3 items where 2 were allowed"),
        (
            Fixed(2),
            Broken(predict=lambda drafts: [Draft("ab", [0.5]), *drafts[1:]]),
            "gave 1 survival estimates for 2 items",
        ),
        (Fixed(2), Broken(verify=lambda verdicts: verdicts[:1]), r"verify\(\) returned 1 verdicts for 2 chains"),
        (
            Fixed(2),
            Broken(verify=lambda verdicts: [AcceptPrefix(3, "x"), *verdicts[1:]]),
            "accepted 3 items of 2 executed",
        ),
        (
            Fixed(2),
            Broken(verify=lambda verdicts: [AcceptPrefix(-1, "x"), *verdicts[1:]]),
            "accepted -1 items of 2 executed",
        ),
        (Fixed(2), Broken(commit=lambda items: items[:1]), r"commit\(\) returned items of 1 chains for 2"),
        (Fixed(2), Broken(commit=lambda items: ["abcd", *items[1:]]), "emitted 4 items where 2 were accepted"),
    ],
)
def test_a_broken_contract_is_named_and_the_round_discarded(policy: Policy, backend: Broken, message: str) -> None:
    """Each violation says who did what, and the backend is told to drop the round."""
    loop = ChainLoop(backend, policy)
    with pytest.raises(BackendContractError, match=message):
        run_sync(loop.round())
    assert backend.discards == 1
    assert loop.num_rounds == 0


FAULTS = [Fault(phase, after, round_index=1) for phase in PHASES for after in (False, True)]


@pytest.mark.parametrize("fault", FAULTS[:-1], ids=str)  # without the last: what is committed is history
def test_a_failing_phase_discards_the_round_and_loses_nothing(fault: Fault) -> None:
    """Whichever phase raises, the chains stand where they stood, and the loop goes on to the full history."""
    inner = OracleBackend(["abcdefgh", "klmn"])
    backend = FaultyBackend(inner, fault)
    loop = ChainLoop(backend, Fixed(1))
    run_sync(loop.round())
    before = inner.chains()
    with pytest.raises(InjectedFaultError):
        run_sync(loop.round())
    assert not inner.in_flight
    assert inner.chains() == before
    run_sync(loop.run())
    assert histories(inner, 2) == [list("abcdefgh"), list("klmn")]


class Unwilling(Fixed):
    """A policy that fails in admit()."""

    def admit(self, frontier: Frontier) -> None:
        """Fail."""
        raise ArithmeticError


def test_a_failing_policy_discards_the_round_too() -> None:
    """An error in the policy's decision leaves the backend as it was."""
    backend = Broken()
    with pytest.raises(ArithmeticError):
        run_sync(ChainLoop(backend, Unwilling(2)).round())
    assert backend.discards == 1


# --------------------------------------------------------------------------------------------------------- the driving


class Device:
    """Runs executions in another task, one at a time, and answers through events: a backend that really waits."""

    def __init__(self) -> None:
        self.executions = 0
        self.idle = anyio.Event()
        self._wanted = anyio.Event()
        self._done = anyio.Event()

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            self.executions += 1
            self._done.set()

    async def run(self) -> None:
        """Hand over a request and wait for its end."""
        self._done = anyio.Event()
        self._wanted.set()
        self.idle.set()
        await self._done.wait()


class WaitingBackend(OracleBackend[str]):
    """An oracle whose executions run on a device."""

    def __init__(self, sequences: Sequence[str], device: Device) -> None:
        super().__init__(sequences)
        self._device = device
        self.discards = 0

    async def execute(self, drafts: Sequence[Draft[str]], admission: Admission) -> Any:
        """Wait for the device, then answer."""
        outcome = await super().execute(drafts, admission)
        await self._device.run()
        return outcome

    def discard(self) -> None:
        """Count."""
        super().discard()
        self.discards += 1


@pytest.mark.anyio
@pytest.mark.parametrize("policy", [Fixed(3), Threshold(3, 0.5), Adaptive(3)], ids=["fixed", "threshold", "adaptive"])
async def test_a_backend_that_waits_runs_under_any_event_loop(policy: Policy) -> None:
    """The same loop, unchanged, commits the same history when execution really suspends."""
    device = Device()
    backend = WaitingBackend(["abcdefgh", "klm"], device)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(device.serve)
        rounds = await ChainLoop(backend, policy).run()
        tasks.cancel_scope.cancel()
    assert device.executions == rounds
    assert histories(backend, 2) == [list("abcdefgh"), list("klm")]


@pytest.mark.anyio
async def test_cancelling_a_waiting_round_discards_it() -> None:
    """A round cancelled while it waits leaves the committed state alone, and a later round completes it."""
    device = Device()
    backend = WaitingBackend(["abcdef"], device)
    loop = ChainLoop(backend, Fixed(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.round)
        await device.idle.wait()  # the round has asked the device, which nobody serves
        assert backend.in_flight
        tasks.cancel_scope.cancel()
    assert backend.discards == 1
    assert (loop.num_rounds, backend.in_flight, histories(backend, 1)) == (0, False, [[]])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(device.serve)
        await loop.run()
        tasks.cancel_scope.cancel()
    assert histories(backend, 1) == [list("abcdef")]


def test_a_waiting_backend_cannot_be_driven_without_an_event_loop() -> None:
    """run_sync() refuses a coroutine that really waits, says so, and the round is discarded as it is closed."""
    backend = SuspendingBackend(["abc"])
    with pytest.raises(SuspendedError, match="a letter from the device"):
        run_sync(ChainLoop(backend, Fixed(1)).round())
    assert not backend.in_flight


class Letter:
    """Something to wait for."""

    def __await__(self) -> Any:
        """Suspend."""
        yield self

    def __repr__(self) -> str:
        return "a letter from the device"


class SuspendingBackend(OracleBackend[str]):
    """An oracle whose verification waits for a letter."""

    async def verify(
        self, drafts: Sequence[Draft[str]], admission: Admission, outcome: Any
    ) -> Sequence[AcceptPrefix[str]]:
        """Wait."""
        await Letter()
        return await super().verify(drafts, admission, outcome)


def test_run_sync_returns_the_result_and_passes_errors_on() -> None:
    """A coroutine that never suspends is driven to its result or its exception."""

    async def seven() -> int:
        return 7

    async def fails() -> int:
        raise LookupError

    assert run_sync(seven()) == 7
    with pytest.raises(LookupError):
        run_sync(fails())


def test_a_wrong_drafter_costs_rounds_only() -> None:
    """The always-wrong drafter leaves as many rounds as items, and the right history."""
    backend = AdversaryBackend(["abcdef"])
    assert run_sync(ChainLoop(backend, Fixed(3)).run()) == 6
    assert histories(backend, 1) == [list("abcdef")]
