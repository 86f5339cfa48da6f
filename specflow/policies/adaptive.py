"""Draft lengths from measured costs and live acceptance, zero included."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..admission import Frontier
from ..errors import InvalidSettingError, MisuseError
from ..trees import Fate, fate
from ..types import ChainId, ChainView, RoundReport
from .acceptance import Calibration, Profile
from .costs import CostTable
from .explanation import ChainStatus, Explanation, predicted_gain
from .paying import Item, Paying, reach
from .ranks import Ranks
from .switch import Experience, Switch

_FREE = 0.02
"""Drafting that costs less than this fraction of a plain round is not planned: as much as allowed is asked for."""
_AS_GOOD = 0.995
"""The longest draft that promises this fraction of the most is asked for, where drafts branch."""
_TRIAL = 16
"""Drafts that are asked for, at first and after each resumption, before the plan may give drafting up: a few bad ones
say nothing."""
_LASTING = 32
"""Drafts after which giving up is a new finding, and the chains wait no longer than the first time."""
_DOUBTFUL_GAIN = 1.25
_REFRESH = 64
"""Below this gain, the plain cost is measured again after so many rounds without a plain one."""
_MIN_TRUST = 0.25
"""Bounds how long a weak drafter may go on without an acceptance."""
_OFFER_FADE = 0.05
"""Weight of the newest round in the estimate of how often a request for a draft is answered with one."""
_SPARE_CHAINS = 64
"""Chains that may be absent from a round without being forgotten, beyond as many as are present."""


class Adaptive:
    """Chooses how many items to draft and execute, per chain and round, so that the most items are emitted per second.

    **Admission** takes the item with the largest estimated survival, over all chains, as long as that raises the
    expected number of emitted items per second of the round. With E items expected so far, B items in the execution
    and a round of T seconds (drafting included) it admits an item of survival a when ``a > E * (cost(B + 1) -
    cost(B)) / T``, which is the scheduler of DSpark (arXiv:2607.05147, algorithm 1). Measured costs have steps, so an
    item that does not pay alone is admitted when it and up to seven items after it would, if they were claimed
    like it. Only revealed estimates are used: sampling stays exact.

    Where blocks are padded to the longest, an item at a new depth is paid for by all chains, and others at that depth
    cost nothing more. Then the step is one more item of every chain that has a likely one, in place of the one with the
    largest estimate, and a width counts what is executed with the padding. Widths never tried are approached in steps
    (:attr:`CostTable.reach`).

    **Estimates.** The drafter's survival estimates are corrected by live acceptance (:class:`Calibration`); a drafter
    without estimates gets its own acceptance profile by position.

    **Draft lengths.** Drafting that costs nothing measurable is asked for ``max_draft`` items. Costly drafting is
    planned: the common length with the most expected items per second, 0 included; where drafts branch, the longest
    that is as good within half a per cent.

    **Switch.** A chain whose drafts are not accepted is switched off and probed with single items after 16, 32, 64,
    ... rounds (:class:`Switch`). A drafter that is always wrong therefore costs a handful of items, however sure it
    claims to be. A chain that is on but has only drafts of low survival executes none of them and resumes with the
    first good one. Chains that the plan switched off together are switched on together, with the first whose probe is
    accepted: drafting and padding are paid for by all of them. Then at least 16 drafts are looked at before the plan
    gives up again, for twice as long as the last time unless it took more than 32 to find out.

    Decisions are pure functions of the reports seen: no clock, no randomness. A policy may serve one loop after another
    and keeps what it learned, as long as chain ids are not reused.

    Args:
        max_draft: most items drafted per chain and round.
        min_survival: items less likely to be accepted than this are never executed, whatever they cost; half of it
            where drafts branch, because many alternatives share what one item claims in a chain.
        first_wait: rounds a chain is off before it is probed for the first time.
        max_wait: longest wait between two probes, in rounds.
        costs: what is known about the cost of executing a number of items (chains + admitted drafts, and what pads
            them); measured further. None starts from nothing: the first two rounds are then plain ones, to have
            something to compare with.
        padded: every chain's block is padded to the longest of the round, as in :class:`RoundCosts`. None takes the
            backend's word for it (:attr:`RoundReport.padded <specflow.types.RoundReport>`), after the first round.

    Raises:
        InvalidSettingError: a setting is out of its range.
    """

    def __init__(
        self,
        max_draft: int,
        *,
        min_survival: float = 0.0625,
        first_wait: int = 16,
        max_wait: int = 256,
        costs: CostTable | None = None,
        padded: bool | None = None,
    ) -> None:
        if max_draft < 0:
            raise InvalidSettingError("max_draft", max_draft, "an integer >= 0")
        if not 0.0 < min_survival <= 1.0:
            raise InvalidSettingError("min_survival", min_survival, "a probability in (0, 1]")
        if not 1 <= first_wait <= max_wait:
            raise InvalidSettingError("first_wait", first_wait, f"an integer in [1, max_wait={max_wait}]")
        self._max_draft = max_draft
        self._min_survival = min_survival
        self._waits = (first_wait, max_wait)
        self._costs = CostTable() if costs is None else costs
        self._told_padded = padded
        self._padded = bool(padded)
        self._drafting = CostTable()
        self._calibration = Calibration(max_draft)
        self._chains: dict[ChainId, _Chain] = {}
        self._experience = Experience(first_wait)
        self._round: list[_Chain] = []
        self._limits: list[int] = []
        self._drafting_seconds = 0.0
        self._is_baseline = False
        self._rounds_since_plain = 0
        self._offer_rate = 1.0
        self._gain = 1.0
        self._ranks: Ranks | None = None
        self._asked = 0
        """Drafts asked for since the start, or since the chains resumed together."""
        self._pause = first_wait
        """Rounds without drafting when the plan gives it up next."""

    @property
    def costs(self) -> CostTable:
        """Seconds of a round without drafting, by items executed (with padding); save it with ``costs.to_dict()``."""
        return self._costs

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """How many items to draft for each chain."""
        self._round = [self._chain(view.chain_id) for view in chains]
        if len(self._chains) > 2 * len(chains) + _SPARE_CHAINS:
            self._chains = {view.chain_id: self._chains[view.chain_id] for view in chains}
        self._drafting_seconds = 0.0
        self._is_baseline = self._needs_baseline(len(chains))
        self._limits = [0] * len(chains)
        if not self._is_baseline and self._max_draft > 0:
            self._limits = self._affordable(
                [min(chain.switch.limit, view.max_draft) for chain, view in zip(self._round, chains, strict=True)]
            )
        return self._limits

    def admit(self, frontier: Frontier) -> None:
        """Admit the items that raise the expected items per second, best first.

        Raises:
            MisuseError: the frontier is not of the chains that ``limits`` was called for.
        """
        if len(frontier) != len(self._round):
            raise MisuseError(f"admit() got {len(frontier)} drafts after limits() for {len(self._round)} chains")
        waiting = self._first_items(frontier)
        num_probes = sum([chain.was_probed for chain in self._round])
        paying = Paying(
            frontier,
            self._calibration,
            [chain.profile for chain in self._round],
            [chain.ranks is not None for chain in self._round],
            self._limits,
            self._costs,
            self._drafting_seconds,
            self._max_draft,
            self._min_survival,
        )
        if self._padded:
            waiting = paying.depth_by_depth(waiting, min(1, num_probes))
            due = waiting if any(self._is_due(item) for item in waiting) else []
            if due:  # Nothing was admitted, then; what one chain's item costs is paid for all, so all are probed.
                paying.depth_by_depth(waiting, 1)
        else:
            due = [item for item in paying.one_by_one(waiting, num_probes) if self._is_due(item)]
            for item in due:
                frontier.admit(item[1])
        for item in due:
            self._round[item[1]].was_probed = True
        self._gain = paying.gain

    def observe(self, report: RoundReport) -> None:
        """Learn costs, acceptance and the state of every switch from a finished round."""
        if self._told_padded is None:
            self._padded = report.padded
        seconds = report.seconds
        num_admitted = sum(report.admitted)
        num_chains = len(report.admitted)
        width = num_chains * (1 + max(report.admitted)) if self._padded else num_chains + num_admitted
        self._costs.observe(width, seconds.admit + seconds.execute + seconds.verify + seconds.commit)
        longest = max(report.limits)
        if longest:
            self._drafting.observe(longest, seconds.predict)
        self._rounds_since_plain = self._rounds_since_plain + 1 if num_admitted else 0
        if self._is_baseline:
            return
        if not num_admitted:
            self._experience.rested()
        chains = [self._chain(chain_id) for chain_id in report.chain_ids]
        on = [chain.switch.is_on for chain in chains]
        for index, chain in enumerate(chains):
            if report.limits[index]:
                self._asked += not chain.was_probed
                offered = 1.0 if report.drafted[index] else 0.0
                self._offer_rate += _OFFER_FADE * (offered - self._offer_rate)
            if report.drafted[index]:
                self._rank(chain, report, index)
            if report.admitted[index]:
                self._learn(chain, fate(report, index))
            else:
                self._rest(chain, report.survival[index], report.limits[index], report.drafted[index])
        if any(chain.switch.is_on and not was_on for chain, was_on in zip(chains, on, strict=True)):  # by its probe
            self._resume(chains)

    def explain(self) -> Explanation:
        """What is believed now, and why: acceptance, costs, expected gain and the switch of every known chain."""
        newcomer = Profile(self._max_draft)
        acceptance: list[float] = []
        for position in range(self._max_draft):
            rate = self._calibration.rate(newcomer, position)
            acceptance.append(rate * acceptance[-1] if acceptance else rate)
        items = acceptance if self._ranks is None else list(map(self._ranks.promise, range(self._max_draft)))
        gain, length = predicted_gain(items, self._costs, self._drafting, self._offer_rate)
        return Explanation(
            acceptance=tuple(acceptance),
            claim_ratio=tuple([self._calibration.ratio(newcomer, position) for position in range(self._max_draft)]),
            offer_rate=self._offer_rate,
            execute_seconds=self._costs.points(),
            draft_seconds=self._drafting.points(),
            predicted_gain=gain,
            best_length=length,
            last_round_gain=self._gain,
            chains=tuple(
                ChainStatus(
                    chain_id=chain_id,
                    state=chain.switch.state,
                    reason=chain.switch.reason,
                    max_length=chain.switch.limit,
                    rounds_to_probe=max(0, chain.switch.wait - chain.switch.idle),
                )
                for chain_id, chain in self._chains.items()
            ),
        )

    def _chain(self, chain_id: ChainId) -> _Chain:
        chain = self._chains.get(chain_id)
        if chain is None:
            chain = self._chains[chain_id] = _Chain(self._max_draft, self._waits)
            chain.ranks = None if self._ranks is None else self._ranks.for_chain()
            self._experience.introduce(chain.switch)
        return chain

    def _needs_baseline(self, num_chains: int) -> bool:
        """True when the cost of a plain round is unknown, or old while the gain is in doubt."""
        if not self._costs.is_grounded(num_chains):
            return True
        return self._rounds_since_plain >= _REFRESH and self._gain < _DOUBTFUL_GAIN

    def _drafting_is_free(self, num_chains: int) -> bool:
        """True when drafting needs no plan. Also true until a length was timed twice: first calls are often slow."""
        if not self._drafting.is_grounded(self._max_draft):
            return True
        return self._drafting_seconds <= _FREE * self._costs.seconds(num_chains)

    def _affordable(self, limits: list[int]) -> list[int]:
        """Keep the limits where drafting is free, plan them where it is not."""
        if any(limits):
            self._drafting_seconds = self._drafting.seconds(max(limits))
            if not self._drafting_is_free(len(limits)):
                limits = self._planned(limits)
                self._drafting_seconds = self._drafting.seconds(max(limits)) if any(limits) else 0.0
        return limits

    def _planned(self, limits: list[int]) -> list[int]:
        """Cut the limits to the common length with the most expected items per second; switch off where that is 0.

        Chains that are probing keep their single item: the plan rests on estimates that a probe is there to renew.
        """
        num_chains = len(limits)
        active = [
            (limit, chain) for limit, chain in zip(limits, self._round, strict=True) if limit and chain.switch.is_on
        ]
        if not active:
            return limits
        curve = self._costs.curve(num_chains * (1 + max(limits)))
        widest = reach(self._costs, num_chains)
        # Where no draft is offered the round is a plain one, except that asking was paid for.
        drafted = 1.0 - (1.0 - self._offer_rate) ** len(active) if self._padded else self._offer_rate
        survival = [self._offer_rate] * len(active)
        expected, width = float(num_chains), num_chains
        rounds = [(expected, curve[width])]
        for length in range(1, max(limit for limit, _ in active) + 1):
            for index, (limit, chain) in enumerate(active):
                if limit >= length:
                    if chain.ranks is None:
                        survival[index] *= self._calibration.rate(chain.profile, length - 1)
                        expected += survival[index]
                    else:
                        expected += self._offer_rate * chain.ranks.promise(length - 1)
                    width += 1
            if self._padded:
                width = num_chains * (1 + length)
            if width > widest and length > 1:
                break
            rounds.append((expected, drafted * curve[width] + (1.0 - drafted) * curve[num_chains]))
        best_length = self._best_length(rounds, branching=any(chain.ranks is not None for _, chain in active))
        if best_length == 0:
            self._give_up([chain for _, chain in active])
        return [
            min(limit, best_length) if chain.switch.is_on else min(limit, chain.switch.limit)
            for limit, chain in zip(limits, self._round, strict=True)
        ]

    def _give_up(self, chains: Sequence[_Chain]) -> None:
        """Switch chains off together; for twice as long as the last time, unless drafting went on for a while."""
        if self._asked >= _LASTING:
            self._pause = self._waits[0]
        wait = max(self._experience.wait, self._pause)
        self._pause = min(2 * self._pause, self._waits[1])
        for chain in chains:
            chain.off_together = True
            chain.switch.turn_off("drafting would cost more than it saves", wait, self._experience.idle)

    def _best_length(self, rounds: Sequence[tuple[float, float]], *, branching: bool) -> int:
        """How many items to ask for.

        Where drafts branch, a draft of more items has better ones first, so it is worth its best number of executed
        items; and the longest that is as good as any is asked for, as some drafts are better than the mean.

        Args:
            rounds: expected items, and seconds but for drafting, by how many items of each chain are executed.
            branching: whether drafts branch.
        """
        rates = [_rate(*rounds[0], 0.0)]
        for length in range(1, len(rounds)):
            drafting = self._drafting.seconds(length)
            first = 1 if branching else length
            rates.append(max(_rate(*rounds[executed], drafting) for executed in range(first, length + 1)))
        if self._asked < _TRIAL and _rate(2.0 * rounds[0][0], rounds[1][1], self._drafting.seconds(1)) > rates[0]:
            rates[0] = 0.0  # Nothing is known yet, and if all first items were right it would pay.
        best = max(rates)
        if rates[0] >= best or not branching:
            return rates.index(best)
        return max(length for length, rate in enumerate(rates) if rate >= max(_AS_GOOD * best, rates[0]))

    def _first_items(self, frontier: Frontier) -> list[Item]:
        """The first item of every chain that is on and has a likely one; chains that are off are probed when due."""
        found: list[Item] = []
        for index, chain in enumerate(self._round):
            chain.was_probed = False
            claim = frontier.survival(index)
            if claim is None:
                continue
            if chain.switch.is_on:
                estimate = min(1.0, claim * self._calibration.ratio(chain.profile, 0))
                if estimate >= self._min_survival:
                    found.append((-estimate, index, 0, claim, claim))
                    continue
            if chain.switch.probe_due and claim >= self._min_survival:
                frontier.admit(index)
                chain.was_probed = True
        return found

    def _is_due(self, item: Item) -> bool:
        """Whether a first item that does not pay is executed to keep the estimates alive: there was none for long."""
        _, index, position, claim, _ = item
        return position == 0 and self._round[index].switch.probe_due and claim >= self._min_survival

    def _rank(self, chain: _Chain, report: RoundReport, index: int) -> None:
        """Take in what a draft that branches promises, by the rank of its items; of a chain, depths say it all."""
        tree, claims = report.tree(index), report.survival[index]
        if tree is None:
            chain.ranks = None
            return
        claims = [1.0] * report.drafted[index] if claims is None else claims
        promised = self._calibration.corrected(chain.profile, claims, tree.parents)
        if self._ranks is None:
            self._ranks = Ranks.unseen(self._max_draft)
        if chain.ranks is None:
            chain.ranks = self._ranks.for_chain()
        for ranks in (chain.ranks, self._ranks):
            ranks.learn(promised, report.limits[index])

    def _learn(self, chain: _Chain, known: Fate) -> None:
        """Take in a verified draft."""
        switch, survival, admitted, accepted = chain.switch, known.survival, known.admitted, known.accepted
        if chain.was_probed:
            if accepted:
                self._calibration.forgive(chain.profile)
                self._expect_anything(chain)
            switch.probed(accepted=accepted > 0)
            self._experience.probed(switch.wait, accepted=accepted > 0)
        elif accepted:
            switch.won()
            self._experience.won()
        else:
            if switch.debt == 0.0:
                # Held for the whole streak: an estimate that falls with every miss would never be called in.
                chain.trust = min(1.0, max(_MIN_TRUST, self._calibration.ratio(chain.profile, 0)))
            charge = chain.trust * (1.0 if survival is None else survival[0])
            switch.lost(charge)
            self._experience.lost(charge)
        self._calibration.record(chain.profile, survival, admitted, accepted)

    def _resume(self, chains: Sequence[_Chain]) -> None:
        """Turn chains on together that were turned off together: what one alone saves need not pay for drafting."""
        self._asked = 0
        for chain in chains:
            if chain.off_together:
                chain.switch.join()
                self._expect_anything(chain)
                chain.off_together = False

    def _expect_anything(self, chain: _Chain) -> None:
        """Where drafts branch: forget what they promised. A probe of one item says nothing of others."""
        if chain.ranks is not None:
            chain.ranks = Ranks.unseen(self._max_draft).for_chain()

    def _rest(self, chain: _Chain, survival: Sequence[float] | None, limit: int, drafted: int) -> None:
        """Take in a round in which nothing was executed for the chain."""
        switch = chain.switch
        if drafted and (survival is None or survival[0] >= self._min_survival):
            switch.rested()
        elif not switch.is_on:
            if limit == 0:
                switch.rested()
            elif not self._drafting_is_free(len(self._round)):
                # A probe that is paid for and brings nothing likely has failed; a free one stays due until it does.
                switch.probed(accepted=False)
                self._experience.probed(switch.wait, accepted=False)


def _rate(items: float, seconds: float, drafting: float) -> float:
    seconds += drafting
    return items / seconds if seconds > 0.0 else math.inf


class _Chain:
    """What the policy remembers about one chain."""

    __slots__ = ("off_together", "profile", "ranks", "switch", "trust", "was_probed")

    def __init__(self, max_draft: int, waits: tuple[int, int]) -> None:
        self.profile = Profile(max_draft)
        self.switch = Switch(max_draft, *waits)
        self.trust = 1.0
        self.was_probed = False
        self.off_together = False
        """Whether it was the plan of a round that turned it off, with all chains that were on."""
        self.ranks: Ranks | None = None
        """What items promise, where drafts branch."""
