"""The exactness checker passes exact backends and names what is wrong with the others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
import pytest
import trio

from specflow.policies import Adaptive, Fixed
from specflow.protocols import ChainBackend
from specflow.testing import (
    DEFAULT_POLICIES,
    WRONG,
    AdversaryBackend,
    OracleBackend,
    ScriptedBackend,
    SequenceBackend,
    check_exact,
)
from specflow.types import AcceptPrefix, Admission, ChainView, Draft

SEQUENCES = ["the quick brown fox", "jumps", "over the lazy dog"]
SCRIPT = [[3, 0, -1, 2, 8], [1, 0], [5, -1]]


def spoil(draft: Draft[Any]) -> Draft[Any]:
    """Replace the second item by a wrong one."""
    values = list(draft.values)
    values[1:2] = [WRONG] * len(values[1:2])
    return Draft(values, draft.survival)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OracleBackend(SEQUENCES),
        lambda: OracleBackend(SEQUENCES, survival=0.6),
        lambda: AdversaryBackend(SEQUENCES),
        lambda: ScriptedBackend(SEQUENCES, SCRIPT),
        lambda: OracleBackend([]),
    ],
    ids=["oracle", "modest oracle", "adversary", "scripted", "no chains"],
)
def test_exact_backends_pass(make: Callable[[], ChainBackend[str]]) -> None:
    """Whatever the drafter is worth, a backend that keeps its promises is exact under every policy and failure."""
    report = check_exact(make, spoil=spoil)
    assert report.ok, report
    assert report.first_problem is None
    assert len(report.runs) == 2 * len(DEFAULT_POLICIES) + 2 * 7
    assert str(report).startswith("exact")


def test_the_gain_is_rounds_saved() -> None:
    """An oracle saves rounds, an adversary none, and spoiled drafts lie between."""
    oracle = check_exact(lambda: OracleBackend(SEQUENCES), spoil=spoil)
    assert oracle.plain.rounds == max(len(sequence) for sequence in SEQUENCES)
    assert oracle.gain["fixed 8"] > oracle.gain["fixed 8, spoiled"] > 1.0
    assert check_exact(lambda: AdversaryBackend(SEQUENCES)).gain["fixed 4"] == 1.0


def test_policies_and_failures_can_be_chosen() -> None:
    """Only the given policies run, and no failure is injected where no round is named."""
    report = check_exact(
        lambda: OracleBackend(SEQUENCES), {"mine": lambda: Fixed(2), "other": lambda: Adaptive(3)}, fault_rounds=()
    )
    assert [run.name for run in report.runs] == ["mine", "other"]
    assert report.ok


# ------------------------------------------------------------------------------------------------ what must be caught


class AcceptsTooMuch(ScriptedBackend[str]):
    """Accepts every executed item without looking, as a broken verifier would."""

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Emit one item wrong wherever a draft was executed."""
        items = await super().commit(verdicts)
        return [["?", *list(emitted)[1:]] if len(emitted) > 1 else emitted for emitted in items]


class KeepsLeftovers(ScriptedBackend[str]):
    """Advances during execution and does not go back when the round is discarded."""

    async def execute(self, drafts: Sequence[Draft[str]], admission: Admission) -> Any:
        """Advance at once."""
        outcome = await super().execute(drafts, admission)
        self._positions = [position + 1 for position in self._positions]
        return outcome

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Go back before committing, so that all is well as long as nothing fails."""
        self._positions = [position - 1 for position in self._positions]
        return await super().commit(verdicts)


class LosesAnItem(ScriptedBackend[str]):
    """Emits an item less than it advances when three were accepted."""

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Drop the bonus item."""
        items = await super().commit(verdicts)
        return [emitted[:-1] if len(emitted) == 4 else emitted for emitted in items]


class StopsMoving(ScriptedBackend[str]):
    """Emits nothing for a chain whose draft is wrong at once, and says so consistently."""

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Hold the first chain back."""
        before = list(self._positions)
        items = await super().commit(verdicts)
        if verdicts[0].num_accepted == 1:
            self._positions[0] = before[0] + 1
            return [items[0][:1], *items[1:]]
        return items


class ForgetsAChain(ScriptedBackend[str]):
    """Drops the last chain when anything is accepted."""

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Drop it."""
        items = await super().commit(verdicts)
        if any(verdict.num_accepted for verdict in verdicts):
            self._live = self._live[:1]
        return items


class NegativeRoom(ScriptedBackend[str]):
    """Reports less than no room after a draft was accepted."""

    def chains(self) -> Sequence[ChainView]:
        """Wrong once something was executed speculatively."""
        views = super().chains()
        if self.num_executed > 3 * self.num_executions:
            return [ChainView(view.chain_id, view.position, -1) for view in views]
        return views


class BreaksContract(ScriptedBackend[str]):
    """Drafts more than it was asked for."""

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[str]]:
        """One item too many, where any are wanted."""
        drafts = await super().predict(limits)
        return [
            Draft([*draft.values, "!"]) if limit and len(draft.values) == limit else draft
            for draft, limit in zip(drafts, limits, strict=True)
        ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (AcceptsTooMuch, r"is '\?', plain execution has"),
        (KeepsLeftovers, r"failure .*: discard\(\) left the chains"),
        (LosesAnItem, "is at position"),
        (StopsMoving, "only a chain that ends may emit fewer"),
        (ForgetsAChain, "items, plain execution has"),
        (NegativeRoom, "negative"),
        (BreaksContract, r"predict\(\) drafted"),
    ],
)
def test_broken_backends_are_caught(broken: type[ScriptedBackend[str]], message: str) -> None:
    """Wrong items, leftovers of failed rounds, lost items or chains and broken contracts are all named."""
    report = check_exact(lambda: broken(SEQUENCES, [[8, 3, 1, 0, -1]] * 3))
    assert not report.ok
    assert report.plain.problem is None, "the plain run of each is right"
    assert report.first_problem is not None
    assert any(re.search(message, f"{run.name}: {run.problem}") for run in report.runs), report
    assert str(report).startswith("NOT exact")


def test_a_backend_with_more_chains_when_it_speculates_is_caught() -> None:
    """The number of chains must be that of the plain run."""
    made: list[int] = []

    def make() -> ChainBackend[str]:
        made.append(1)
        return OracleBackend(SEQUENCES[: min(len(made), 2)])

    assert "ran 2 chains where plain execution ran 1" in str(check_exact(make, fault_rounds=()).first_problem)


class Endless(OracleBackend[str]):
    """Never ends."""

    async def commit(self, verdicts: Sequence[AcceptPrefix[str]]) -> Sequence[Sequence[str]]:
        """Start again at the end."""
        items = await super().commit(verdicts)
        self._live = [0]
        self._sequences = [f"{self._sequences[0]}a"]
        return items


def test_a_run_that_does_not_end_is_given_up() -> None:
    """After max_rounds a run counts as never ending instead of running on."""
    report = check_exact(lambda: Endless(["a"]), {}, fault_rounds=(), max_rounds=20)
    assert report.first_problem == "plain: did not end within 20 rounds"


def test_errors_of_the_backend_are_passed_on() -> None:
    """An exception that is no contract violation is the backend's own and reaches the caller."""

    def fails(chain: int, position: int, future: Sequence[str]) -> Draft[str]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_exact(lambda: SequenceBackend(SEQUENCES, fails))


class Waiting(OracleBackend[str]):
    """An oracle whose executions really wait."""

    async def execute(self, drafts: Sequence[Draft[str]], admission: Admission) -> Any:
        """Let every other task run first."""
        await anyio.lowlevel.checkpoint()
        return await super().execute(drafts, admission)


def under_trio(coroutine: Coroutine[Any, Any, Any], /) -> Any:
    """Run a coroutine under trio."""

    async def wait() -> Any:
        return await coroutine

    return trio.run(wait)


@pytest.mark.parametrize("drive", [asyncio.run, under_trio], ids=["asyncio", "trio"])
def test_backends_that_wait_are_checked_under_an_event_loop(drive: Any) -> None:
    """With a driver the same checker runs backends that really suspend."""
    assert check_exact(lambda: Waiting(SEQUENCES), drive=drive).ok
