"""How often predictions of each kind come true: hit rates that are learned while decoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from specflow.errors import InvalidSettingError


def even_prior(bucket: int) -> float:
    """Expect every kind of prediction to come true half of the time."""
    del bucket
    return 0.5


_CONFIDENCE_BUCKETS = 16
"""Top probabilities are binned this finely to learn how often a draft at that confidence is accepted."""


def confidence_bucket(confidence: float) -> int:
    """The bucket of a top probability in [0, 1], for a table with :func:`confidence_prior`."""
    return min(int(confidence * _CONFIDENCE_BUCKETS), _CONFIDENCE_BUCKETS - 1)


def confidence_prior(bucket: int) -> float:
    """Before anything is known, a draft is expected to be accepted as often as the drafter is confident."""
    return (bucket + 0.5) / _CONFIDENCE_BUCKETS


class HitTable:
    """Hit rates by bucket, with a prior and exponential forgetting. Every operation is O(1).

    A rate is the posterior mean of a Beta-Binomial model (Gelman et al., "Bayesian Data Analysis", section 2.4) whose
    observations lose weight with age: the i-th last record of a bucket weighs ``decay ** i``, so that a bucket
    remembers about ``1 / (1 - decay)`` records. The prior does not fade, so a rate never reaches 0 or 1 by chance.

    What a bucket means is the caller's choice; any integer is one. Where drafts are sampled it must not depend on the
    token whose fate the rate predicts, or scheduling by it would bias the output; see
    :attr:`specflow.types.Draft.survival`.

    Args:
        prior: expected hit rate of a bucket, in [0, 1], before anything is recorded.
        strength: how many records the prior is worth; > 0.
        decay: weight that a record keeps with each later record of its bucket, in (0, 1].

    Raises:
        InvalidSettingError: an argument is out of range.
    """

    __slots__ = ("_decay", "_hits", "_prior", "_rates", "_records", "_strength")

    def __init__(
        self, prior: Callable[[int], float] = even_prior, *, strength: float = 4.0, decay: float = 0.995
    ) -> None:
        if not strength > 0.0:
            raise InvalidSettingError("strength", strength, "a number > 0")
        if not 0.0 < decay <= 1.0:
            raise InvalidSettingError("decay", decay, "a number in (0, 1]")
        self._prior = prior
        self._strength = strength
        self._decay = decay
        self._hits: dict[int, float] = {}
        self._records: dict[int, float] = {}
        self._rates: dict[int, float] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held: three dicts and their floats."""
        return sum(sys.getsizeof(table) + len(table) * sys.getsizeof(0.5) for table in self._tables)

    @property
    def _tables(self) -> tuple[dict[int, float], ...]:
        return self._hits, self._records, self._rates

    def record(self, bucket: int, hit: bool) -> None:  # noqa: FBT001 -- the outcome is what is recorded
        """Note whether a prediction of this kind came true.

        Raises:
            InvalidSettingError: ``prior(bucket)`` is not in [0, 1].
        """
        expected = self._expected(bucket)
        hits = self._hits[bucket] = self._hits.get(bucket, 0.0) * self._decay + hit
        records = self._records[bucket] = self._records.get(bucket, 0.0) * self._decay + 1.0
        self._rates[bucket] = (self._strength * expected + hits) / (self._strength + records)

    def score(self, guesses: Sequence[int], buckets: Sequence[int], true: Sequence[int]) -> None:
        """Note what became of a draft: hits, and the first miss. Behind it, and behind what is known, nothing is said.

        Args:
            guesses: the drafted tokens.
            buckets: the kind of each.
            true: the tokens that came.
        """
        for token, guess, bucket in zip(true, guesses, buckets, strict=False):
            self.record(bucket, token == guess)
            if token != guess:
                break

    def rate(self, bucket: int) -> float:
        """Expected probability that the next prediction of this kind comes true.

        Raises:
            InvalidSettingError: ``prior(bucket)`` is not in [0, 1].
        """
        rate = self._rates.get(bucket)
        return self._expected(bucket) if rate is None else rate

    def weight(self, bucket: int) -> float:
        """How many records stand behind a rate, after forgetting and without the prior."""
        return self._records.get(bucket, 0.0)

    def survival(self, buckets: Iterable[int]) -> list[float]:
        """``survival[k]``: probability that predictions 0..k all come true, given the kind of each.

        The rate of each kind is taken as conditional on the success of the earlier ones.
        """
        survival, product = [], 1.0
        for bucket in buckets:
            product *= self.rate(bucket)
            survival.append(product)
        return survival

    def _expected(self, bucket: int) -> float:
        expected = self._prior(bucket)
        if not 0.0 <= expected <= 1.0:
            raise InvalidSettingError("prior", expected, f"a rate in [0, 1] for bucket {bucket}")
        return expected
