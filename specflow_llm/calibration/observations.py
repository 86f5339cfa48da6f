"""What recorded rounds say about confidences: logits, and whether the prefix they speak of was accepted.

Letters in shapes: N rounds, G positions (most tokens drafted in a round).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specflow.errors import InvalidSettingError

from ..records import RoundRecord
from .metrics import Bools, Floats
from .scaling import Scale, calibrated

EPSILON = 1e-6
"""Conditional probabilities are kept this far from 0 and 1 before their logit is taken."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Confidences of many rounds and their outcomes, as arrays."""

    logits: Floats
    """[N, G] ``z[n, k]``, logit of the claimed P(token k is accepted | tokens before it are); nan where not drafted."""
    accepted: Bools
    """[N, G] whether tokens 0..k were all accepted; only meaningful where ``observed``."""
    observed: Bools
    """[N, G] whether that is known: the token was drafted and verified, and the request had not ended before it."""
    requests: tuple[int, ...]
    """[N] which request each round belongs to: rounds of one request are alike, so they are split together."""

    @property
    def num_positions(self) -> int:
        """G."""
        return int(self.logits.shape[1])

    @property
    def counts(self) -> tuple[int, ...]:
        """[G] known outcomes at each position."""
        return tuple(int(count) for count in self.observed.sum(axis=0))

    def survival(self, scales: Sequence[Scale] | None = None) -> Floats:
        """[N, G] claimed P(tokens 0..k are all accepted), corrected by ``scales`` [G] if given."""
        return calibrated(self.logits, scales)

    def at(self, position: int, scales: Sequence[Scale] | None = None) -> tuple[Floats, Bools]:
        """([n] claimed survival, [n] prefix accepted) of the rounds with a known outcome at a position (from 0)."""
        rows = self.observed[:, position]
        return self.survival(scales)[rows, position], self.accepted[rows, position]

    def only(self, requests: frozenset[int]) -> Observations:
        """The rounds of some requests."""
        rows = np.array([request in requests for request in self.requests], dtype=np.bool_)
        return Observations(
            self.logits[rows],
            self.accepted[rows],
            self.observed[rows],
            tuple(request for request in self.requests if request in requests),
        )

    def split(self, fraction: float, *, seed: int) -> tuple[Observations, Observations]:
        """Cut in two by request, at random: (about ``fraction`` of the requests, the rest).

        Raises:
            InvalidSettingError: ``fraction`` is not in (0, 1), or there are fewer than two requests.
        """
        if not 0.0 < fraction < 1.0:
            raise InvalidSettingError("fraction", fraction, "a number in (0, 1)")
        names = sorted(set(self.requests))
        if len(names) < 2:
            raise InvalidSettingError(
                "rounds", f"{len(names)} request(s)", "two or more, to fit on some and test on others"
            )
        order = np.random.default_rng(seed).permutation(len(names))
        cut = min(max(1, round(fraction * len(names))), len(names) - 1)
        first = frozenset(names[index] for index in order[:cut])
        return self.only(first), self.only(frozenset(names) - first)


def conditional_logits(survival: Sequence[float]) -> list[float]:
    """Logits of the conditional acceptance probabilities that survival estimates are products of.

    Ratios of recorded products lose digits where the product is tiny; they are kept within :data:`EPSILON` of 0 and 1.

    Args:
        survival: ``survival[k]`` = P(tokens 0..k are all accepted).
    """
    values = np.asarray(survival, dtype=np.float64)
    before = np.concatenate([[1.0], values[:-1]])
    ratio = np.divide(values, before, out=np.zeros_like(values), where=before > 0.0)
    ratio = np.clip(ratio, EPSILON, 1.0 - EPSILON)
    return [float(logit) for logit in np.log(ratio) - np.log1p(-ratio)]


def outcomes(record: RoundRecord) -> tuple[int, int]:
    """(tokens known to be accepted, positions whose outcome is known), leaving out what lies behind an end.

    Where a request ends inside the accepted prefix (an end-of-sequence token, a stop string), the tokens behind its
    end were verified against a text that nobody asked for: counting them over-counts acceptance. Their outcome is
    unknown. Where a draft is rejected, the outcome of all its later prefixes is known: not accepted.
    """
    drafted = len(record.survival)
    if record.emitted <= record.accepted:
        return record.emitted, record.emitted
    return record.accepted, drafted


def observe(rounds: Sequence[RoundRecord], *, num_positions: int | None = None) -> Observations:
    """Turn recorded rounds into arrays. Rounds in which nothing was drafted say nothing and are left out.

    Args:
        rounds: recorded with everything that was drafted verified.
        num_positions: G; None takes the longest draft.

    Raises:
        InvalidSettingError: nothing was drafted in any round, or a draft is longer than ``num_positions``.
    """
    drafting = [record for record in rounds if record.survival]
    longest = max((len(record.survival) for record in drafting), default=0)
    width = longest if num_positions is None else num_positions
    if not drafting:
        raise InvalidSettingError("rounds", f"{len(rounds)} without a draft", "rounds in which something was drafted")
    if longest > width:
        raise InvalidSettingError("rounds", f"longest draft {longest}", f"drafts of 1 to {width} tokens")
    logits = np.full((len(drafting), width), np.nan)
    accepted = np.zeros((len(drafting), width), dtype=np.bool_)
    observed = np.zeros((len(drafting), width), dtype=np.bool_)
    for row, record in enumerate(drafting):
        known_accepted, known = outcomes(record)
        logits[row, : len(record.survival)] = conditional_logits(record.survival)
        accepted[row, :known_accepted] = True
        observed[row, :known] = True
    return Observations(logits, accepted, observed, tuple(record.request for record in drafting))
