"""Recorded rounds as a backend: the real loop and the real policies run on them, in the time that costs say.

**The model.** A number of requests is decoded together, always the same number: a request that ends makes room for the
next, and after the last comes the first again. In every round each of them presents its next recorded draft. The policy
says how much to draft (at most what was recorded) and what to execute of it; of ``l`` executed tokens the first
``min(accepted, l)`` are accepted (of a draft that branches, those of the accepted path that are among them), and one
more is emitted. The clock advances by what the costs say, and by nothing else.

**What it cannot know.** A round that executes less emits less, and the next real round would then begin at an earlier
token, with another draft. The replay goes on with the next recorded round all the same: it takes the recorded rounds
for a fair sample of the rounds that the policy would have met. That is exact for a policy that executes everything,
and good where the chance of acceptance does not hang on where the round before was cut. A round cut short in truth
leaves an easy stretch unfinished, so its next round is easier than the replay says: gains of cutting are understated a
little rather than overstated. Shorter drafts than recorded ones are prefixes of these, which holds for drafters whose
draft does not change with its limit, and for trees, whose items stand in order of survival. Prefill, arrivals and
contexts of unequal cost are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specflow.chain import ChainLoop, run_sync
from specflow.errors import InvalidSettingError
from specflow.policies import RoundCosts
from specflow.protocols import Policy
from specflow.testing import ManualClock
from specflow.types import AcceptPrefix, Admission, ChainId, ChainView, Draft, RoundReport

from ..records import Recording, RoundRecord

_LEAST_ROUNDS = 256
"""Rounds that are replayed at least: policies that learn need some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy achieved at one load."""

    policy: str
    concurrency: int
    """Requests decoded together."""
    rounds: int
    """Rounds of the batch."""
    seconds: float
    """Of all rounds, by the costs."""
    emitted: int
    drafted: int
    admitted: int
    accepted: int

    @property
    def throughput(self) -> float:
        """Tokens per second, over all requests."""
        return self.emitted / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per round and request, the correction or bonus token included."""
        return self.emitted / (self.rounds * self.concurrency)

    @property
    def mean_draft_length(self) -> float:
        """Drafted tokens executed per round and request."""
        return self.admitted / (self.rounds * self.concurrency)

    @property
    def pass_rate(self) -> float:
        """Accepted per executed token; 0 where none was executed."""
        return self.accepted / self.admitted if self.admitted else 0.0


def replay(
    recording: Recording, costs: RoundCosts, policy: Policy, *, name: str, concurrency: int, rounds: int | None = None
) -> Outcome:
    """Run a policy over recorded rounds.

    Args:
        recording: rounds in which everything drafted was verified.
        costs: seconds of a round.
        policy: a fresh one; it sees what it would see in a real run, seconds by the same costs included.
        name: the policy's, for the outcome.
        concurrency: requests decoded together.
        rounds: how many rounds; None plays every recorded round once, and 256 rounds at least.

    Raises:
        InvalidSettingError: nothing is recorded, or there is no request to decode.
    """
    if concurrency < 1:
        raise InvalidSettingError("concurrency", concurrency, "an integer >= 1")
    if not recording.rounds:
        raise InvalidSettingError("recording", "no rounds", "a recording of at least one round")
    if rounds is None:
        rounds = max(_LEAST_ROUNDS, -(-len(recording.rounds) // concurrency))
    clock = ManualClock()
    tally = _Tally()
    loop = ChainLoop(_RecordedRounds(recording, costs, concurrency, clock), policy, (tally,), clock)

    async def run() -> None:
        for _ in range(rounds):
            await loop.round()

    run_sync(run())
    return Outcome(
        policy=name,
        concurrency=concurrency,
        rounds=rounds,
        seconds=clock(),
        emitted=tally.emitted,
        drafted=tally.drafted,
        admitted=tally.admitted,
        accepted=tally.accepted,
    )


class _Tally:
    """Counts what rounds did."""

    def __init__(self) -> None:
        self.emitted = 0
        self.drafted = 0
        self.admitted = 0
        self.accepted = 0

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        self.emitted += sum(report.emitted)
        self.drafted += sum(report.drafted)
        self.admitted += sum(report.admitted)
        self.accepted += sum(report.accepted)


class _Slot:
    """A place in the batch: the request in it, and how far it has got."""

    __slots__ = ("chain_id", "place", "request")

    def __init__(self, chain_id: int, request: int) -> None:
        self.chain_id = ChainId(chain_id)
        self.request = request
        self.place = 0


class _RecordedRounds:
    """Recorded rounds as :class:`specflow.protocols.ChainBackend`."""

    def __init__(self, recording: Recording, costs: RoundCosts, concurrency: int, clock: ManualClock) -> None:
        self._requests = [rounds for rounds in recording.by_request().values() if rounds]
        self._max_draft = recording.header.max_draft
        self._costs = costs
        self._clock = clock
        # Spread over the recording, so that copies of one request are never in step with each other for long.
        count = len(self._requests)
        self._slots = [_Slot(slot, slot * count // concurrency % count) for slot in range(concurrency)]
        self._waiting = concurrency
        self._next = self._slots[-1].request + 1

    @property
    def pads_blocks(self) -> bool:
        """As in the costs."""
        return self._costs.is_padded

    def chains(self) -> Sequence[ChainView]:
        """One per slot. The recorded draft bounds how far a policy can draft, not ``max_draft``."""
        return [ChainView(slot.chain_id, self._round(slot).position, self._max_draft) for slot in self._slots]

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[int]]:
        """The recorded drafts, cut to the limits."""
        self._clock.advance(self._costs.drafting(len(limits), max(limits)))
        drafts = []
        for slot, limit in zip(self._slots, limits, strict=True):
            recorded = self._round(slot)
            survival, parents = recorded.survival[:limit], recorded.parents
            shape = None if parents is None else parents[: len(survival)]
            drafts.append(Draft(range(len(survival)), survival, parents=shape))
        return drafts

    async def execute(self, drafts: Sequence[Draft[int]], admission: Admission) -> object:
        """Takes time."""
        del drafts
        self._clock.advance(self._costs.round(admission.lengths, 0))
        return None

    async def verify(
        self, drafts: Sequence[Draft[int]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[int]]:
        """What was accepted when everything was verified, as far as it is executed."""
        del outcome
        verdicts = []
        for slot, draft, length in zip(self._slots, drafts, admission.lengths, strict=True):
            path = self._round(slot).kept(length)
            verdicts.append(AcceptPrefix(len(path), 0, None if draft.parents is None else path))
        return verdicts

    async def commit(self, verdicts: Sequence[AcceptPrefix[int]]) -> Sequence[Sequence[int]]:
        """As many items as each chain emits; then every slot moves on."""
        emitted = []
        for slot, verdict in zip(self._slots, verdicts, strict=True):
            # A stop inside the recorded block cuts the shorter block there too.
            emitted.append(range(min(self._round(slot).emitted, verdict.num_accepted + 1)))
            self._advance(slot)
        return emitted

    def discard(self) -> None:
        """Nothing is half done."""

    def _round(self, slot: _Slot) -> RoundRecord:
        return self._requests[slot.request][slot.place]

    def _advance(self, slot: _Slot) -> None:
        slot.place += 1
        if slot.place == len(self._requests[slot.request]):
            slot.place, slot.request = 0, self._next % len(self._requests)
            slot.chain_id = ChainId(self._waiting)
            self._waiting += 1
            self._next += 1
