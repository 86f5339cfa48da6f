"""Run ahead where it is expected to pay: seconds saved, at their price, against what a wrong guess wastes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ..effects import RUN_AHEAD, Effect
from ..errors import InvalidSettingError
from ..speculation import Budget, Opportunity, Resolution
from .beliefs import PESSIMISTIC, Beliefs, Prior
from .reach import UNLIMITED, Reach


class Finding(Enum):
    """What an appraisal came to."""

    WORTH_IT = "it is expected to pay"
    UNLIKELY = "the guesses hold too seldom"
    UNTIMED = "its times are not known, and enough was started without knowing"
    NOTHING_TO_SAVE = "there is no time to save"
    LOSS = "it is expected to cost more than it saves"


@dataclass(frozen=True, slots=True)
class Appraisal:
    """What starting a step on guesses is worth, in numbers."""

    step: str
    finding: Finding
    value: float
    """Expected net gain in money: ``gain - waste - interference``."""
    gain: float
    """Money: probability * saved seconds * value of a second."""
    waste: float
    """Money: probability of a miss * what the attempt costs."""
    interference: float
    """Money: seconds by which authoritative work is slowed down * value of a second."""
    probability: float
    """That all guesses hold: the product of ``probabilities``."""
    probabilities: tuple[float, ...]
    """One for each guess, oldest first."""
    is_pessimistic: bool
    """True when the probabilities are lower quantiles, because a miss costs money or has to be undone."""
    saved_seconds: float
    """What is saved when all guesses hold."""
    is_timed: bool
    """True when the wait and the length of the step are known from earlier calls."""

    @property
    def allowed(self) -> bool:
        """Whether the step may start."""
        return self.finding is Finding.WORTH_IT

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        return (
            f"{self.step} {'may' if self.allowed else 'may not'} start on {len(self.probabilities)} guess(es): "
            f"{self.finding.value} ({self.probability:.1%} to save {self.saved_seconds:.3g} s; "
            f"gain {self.gain:.3g}, waste {self.waste:.3g}, interference {self.interference:.3g})."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, JSON-safe."""
        return {**asdict(self), "finding": self.finding.value, "allowed": self.allowed, "reason": self.reason}


class ExpectedValue(Reach):
    """Starts a step on guesses when that is expected to pay.

    With P the probability that all its guesses hold, a step starts when::

        P * saved_seconds * value_of_second
            - (1 - P) * (money + tokens * price_per_token)
            - interference * (running + 1) * value_of_second  >  0

    This is expected-value speculation with a price on time, as in Ye et al. 2025, "Speculative Actions"
    (arXiv:2510.04371), who trade latency against the cost of wrong calls. An attempt that is confirmed wastes nothing:
    the plain run would have paid for it too.

    **P** is the product of calibrated posteriors, one per guess (:class:`~specflow.policies.beliefs.Beliefs`); a
    guess made in a world that rests on others is only scored when those held, so the factors are the conditional
    probabilities that a product needs. Where a miss is not free (money, priced tokens, or an effect other than PURE,
    READONLY and BUFFERED) each factor is the lower ``quantile`` of its posterior: what is not known is not paid for.

    **saved_seconds** is the smaller of the wait that is left and the length of the step. A time that is not known yet
    counts as ``assumed_seconds``, and only while the run has made fewer than ``explorations`` speculative attempts:
    the first authoritative calls bring the times soon enough. Times are point estimates: where they vary widely the
    smaller of two means exceeds the mean of the smaller, so at the edge a second may cost a little more than its value.

    **A useless source is given up.** Guesses are scored whether or not anything was started on them, so learning costs
    nothing, and a source that becomes good again is noticed. Work that costs nothing would pay at any P > 0; the
    floor ``min_probability`` ends it. With the default settings a predictor that is always wrong and always sure has
    at most 23 guesses of a rank followed.

    Decisions are pure functions of the opportunity and the resolutions learned: no clock, no randomness. A policy may
    serve one run after another and keeps what it learned.

    Args:
        value_of_second: what a second saved is worth, in the unit that steps declare money in; 0.01 is 36 an hour.
        depth: most unresolved guesses that one world may rest on.
        width: most guesses of one result that are followed at the same time.
        budget: hard limits on what speculation may use up in one run; the scheduler enforces them.
        effects: effects that may run on a guess.
        quantile: which lower quantile of the posterior counts where a miss is not free; in (0, 0.5].
        interference: seconds by which an attempt slows authoritative work down, for each speculative attempt then
            under way, itself included; 0 where there are idle slots.
        forgetting: what is left of an observation's weight after the next one of its kind; in (0, 1].
        prior: what is assumed of guesses nobody has seen the like of.
        price_per_token: money per token.
        min_probability: nothing starts below this P, however cheap; in [0, 1). 0 is no floor.
        assumed_seconds: what an unknown time counts as.
        explorations: speculative attempts of a run from which on nothing starts without known times.

    Raises:
        InvalidSettingError: a setting is out of its range, ``effects`` lists IRREVERSIBLE, or ``forgetting`` is so
            short that a source that is always wrong would never fall below ``min_probability``.
    """

    def __init__(  # noqa: PLR0913 - settings of one object, all by keyword
        self,
        *,
        value_of_second: float = 0.01,
        depth: int = 4,
        width: int = 3,
        budget: Budget = UNLIMITED,
        effects: Collection[Effect] = RUN_AHEAD,
        quantile: float = 0.2,
        interference: float = 0.0,
        forgetting: float = 0.98,
        prior: Prior = PESSIMISTIC,
        price_per_token: float = 0.0,
        min_probability: float = 0.05,
        assumed_seconds: float = 1.0,
        explorations: int = 4,
    ) -> None:
        super().__init__(depth=depth, width=width, effects=effects, budget=budget)
        for name, amount in (
            ("value_of_second", value_of_second),
            ("interference", interference),
            ("price_per_token", price_per_token),
            ("assumed_seconds", assumed_seconds),
            ("explorations", explorations),
        ):
            if not 0.0 <= amount < math.inf:
                raise InvalidSettingError(name, amount, "a finite number >= 0")
        if not 0.0 < quantile <= 0.5:
            raise InvalidSettingError("quantile", quantile, "a probability in (0, 0.5]")
        if not 0.0 <= min_probability < 1.0:
            raise InvalidSettingError("min_probability", min_probability, "a probability in [0, 1)")
        self._beliefs = Beliefs(forgetting, prior)
        # All that a cell remembers are misses, and the rest is what its relatives made it assume: 1 at most.
        if min_probability > 0.0 and forgetting < 1.0:
            lowest = prior.weight / (prior.weight + 1.0 / (1.0 - forgetting))
            if lowest >= min_probability:
                raise InvalidSettingError(
                    "forgetting",
                    forgetting,
                    f"a longer memory: an always wrong source would still be believed at {lowest:.3f}, "
                    f"which is not below min_probability={min_probability}",
                )
        self._value_of_second = value_of_second
        self._quantile = quantile
        self._interference = interference
        self._price_per_token = price_per_token
        self._min_probability = min_probability
        self._assumed_seconds = assumed_seconds
        self._explorations = explorations

    def allows(self, opportunity: Opportunity) -> bool:
        """Whether starting the step is expected to pay."""
        return self.explain(opportunity).allowed

    def learn(self, resolution: Resolution) -> None:
        """Calibrate the source of the guess."""
        self._beliefs.learn(resolution.assumption, hit=resolution.hit)

    def explain(self, opportunity: Opportunity) -> Appraisal:
        """Why a step may start on its guesses or not, in numbers. Changes nothing."""
        cost = opportunity.money + opportunity.tokens * self._price_per_token
        is_pessimistic = cost > 0.0 or opportunity.effect not in RUN_AHEAD
        beliefs = [self._beliefs.about(assumption) for assumption in opportunity.assumptions]
        probabilities = tuple(
            [belief.quantile(self._quantile) if is_pessimistic else belief.mean for belief in beliefs]
        )
        probability = math.prod(probabilities)
        wait, length = opportunity.wait_seconds, opportunity.step_seconds
        is_timed = wait is not None and length is not None
        saved_seconds = max(
            0.0,
            min(
                self._assumed_seconds if wait is None else wait,
                self._assumed_seconds if length is None else length,
            ),
        )
        gain = probability * saved_seconds * self._value_of_second
        waste = (1.0 - probability) * cost
        interference = self._interference * (opportunity.running + 1) * self._value_of_second
        value = gain - waste - interference
        if probability < self._min_probability:
            finding = Finding.UNLIKELY
        elif not is_timed and opportunity.spent.attempts >= self._explorations:
            finding = Finding.UNTIMED
        elif value > 0.0:
            finding = Finding.WORTH_IT
        else:
            finding = Finding.LOSS if saved_seconds > 0.0 else Finding.NOTHING_TO_SAVE
        return Appraisal(
            step=opportunity.step,
            finding=finding,
            value=value,
            gain=gain,
            waste=waste,
            interference=interference,
            probability=probability,
            probabilities=probabilities,
            is_pessimistic=is_pessimistic,
            saved_seconds=saved_seconds,
            is_timed=is_timed,
        )
