"""What guesses are really worth: calibrated probabilities, learned from how guesses turned out."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidSettingError
from ..speculation import Assumption
from .odds import beta_quantile

_BUCKETS = 10
"""Equal-width intervals of confidence that are told apart."""
_MARGIN = 0.001
"""What is assumed before own observations keeps this distance from 0 and 1, so that it can be corrected."""


@dataclass(frozen=True, slots=True)
class Belief:
    """A Beta distribution over the probability that a guess holds."""

    alpha: float
    """Hits seen, faded, and those assumed."""
    beta: float
    """Misses seen, faded, and those assumed."""

    @property
    def mean(self) -> float:
        """Expected probability."""
        return self.alpha / (self.alpha + self.beta)

    def quantile(self, probability: float) -> float:
        """The value that the probability is below, with the given probability. Costs about a millisecond when new."""
        return beta_quantile(probability, self.alpha, self.beta)


@dataclass(frozen=True, slots=True)
class Prior:
    """What is assumed of guesses nobody has seen the like of.

    Raises:
        InvalidSettingError: a setting is out of its range.
    """

    trust: float = 0.5
    """Hits assumed per hit that is claimed: below 1, since predictors tend to claim too much; in (0, 1]."""
    weight: float = 2.0
    """Observations that an assumption counts for; > 0."""

    def __post_init__(self) -> None:
        if not 0.0 < self.trust <= 1.0:
            raise InvalidSettingError("trust", self.trust, "a ratio in (0, 1]")
        if not 0.0 < self.weight < float("inf"):
            raise InvalidSettingError("weight", self.weight, "a number > 0")


PESSIMISTIC = Prior()
"""Half of what is claimed, as if two guesses had been seen."""


def claim(assumption: Assumption) -> float:
    """What a predictor claims by naming a guess: its confidence, as far as it can be true.

    Guesses of one result exclude each other and come likeliest first, so the one of rank r holds with probability
    1 / (r + 1) at most. This gives guesses of predictors without estimates, who claim 1.0 for each, a sensible order.
    """
    return min(assumption.confidence, 1.0 / (assumption.rank + 1))


class _Counts:
    """Faded counts of one kind of guess."""

    __slots__ = ("claims", "hits", "misses")

    def __init__(self) -> None:
        self.hits = 0.0
        self.misses = 0.0
        self.claims = 0.0


_NOTHING = _Counts()


class Beliefs:
    """Calibrated probabilities that guesses hold: Beta-Binomial posteriors with forgetting.

    Each (step, source, rank, confidence bucket) has a cell that counts hits and misses; with each observation what the
    cell held before fades by ``forgetting``. The posterior of a cell is Beta(hits + weight * m, misses + weight *
    (1 - m)), by conjugacy (Raiffa and Schlaifer 1961, "Applied Statistical Decision Theory"), where m is what is
    assumed without the cell's own observations: what the guess claims (:func:`claim`) times the hits per claimed hit
    of the other cells of the same step and source. Where those have seen little, the other steps of the same source
    are asked in the same way, and last the prior. So a new cell starts from what is known of its relatives, raw
    confidence counts as far as it proved true, and no observation counts twice. After many observations only the cell
    itself counts.

    Memory is one small record per kind of guess seen.

    Args:
        forgetting: what is left of an observation's weight after the next one of its kind; the memory is about
            1 / (1 - ``forgetting``) observations. 1 never forgets.
        prior: what is assumed at first.

    Raises:
        InvalidSettingError: ``forgetting`` is not in (0, 1].
    """

    def __init__(self, forgetting: float = 0.98, prior: Prior = PESSIMISTIC) -> None:
        if not 0.0 < forgetting <= 1.0:
            raise InvalidSettingError("forgetting", forgetting, "a factor in (0, 1]")
        self._forgetting = forgetting
        self._prior = prior
        self._cells: dict[tuple[str, str, int, int], _Counts] = {}
        self._steps: dict[tuple[str, str], _Counts] = {}
        self._sources: dict[str, _Counts] = {}

    def about(self, assumption: Assumption) -> Belief:
        """The posterior probability that a guess holds, given that the guesses before it hold."""
        prior = self._prior
        step, source = assumption.step, assumption.source
        own = self._cells.get(_cell(assumption), _NOTHING)
        near = self._steps.get((step, source), _NOTHING)
        far = self._sources.get(source, _NOTHING)
        ratio = _ratio(far, near, prior.trust, prior.weight)
        ratio = _ratio(near, own, ratio, prior.weight)
        mean = min(max(claim(assumption) * ratio, _MARGIN), 1.0 - _MARGIN)
        return Belief(prior.weight * mean + own.hits, prior.weight * (1.0 - mean) + own.misses)

    def learn(self, assumption: Assumption, *, hit: bool) -> None:
        """Take in how a guess turned out."""
        step, source = assumption.step, assumption.source
        own = self._cells.setdefault(_cell(assumption), _Counts())
        keep = self._forgetting
        hits = own.hits * keep + hit
        misses = own.misses * keep + (not hit)
        claims = own.claims * keep + claim(assumption)
        # The pools are the sums of their cells, fading included, so that a cell can be taken out again.
        for pool in (self._steps.setdefault((step, source), _Counts()), self._sources.setdefault(source, _Counts())):
            pool.hits += hits - own.hits
            pool.claims += claims - own.claims
        own.hits, own.misses, own.claims = hits, misses, claims


def _cell(assumption: Assumption) -> tuple[str, str, int, int]:
    bucket = min(int(assumption.confidence * _BUCKETS), _BUCKETS - 1)
    return assumption.step, assumption.source, assumption.rank, bucket


def _ratio(pool: _Counts, part: _Counts, assumed: float, weight: float) -> float:
    """Hits per claimed hit in a pool without one of its parts, starting from an assumption."""
    hits = max(0.0, pool.hits - part.hits)
    claims = max(0.0, pool.claims - part.claims)
    return (weight * assumed + hits) / (weight + claims)
