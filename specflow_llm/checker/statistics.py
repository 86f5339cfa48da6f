"""Tests of hypotheses, without a statistics library.

All of them compare sums of observations with their expectation under the null hypothesis and report a p-value. A
:data:`SIGNIFICANCE` this small keeps the odds of a false alarm of a whole check run below one in a million, although
the chi-square law is an approximation (cells with few expected counts are pooled). The seeds of the runs are fixed, so
a drafter that draws through :meth:`~specflow_llm.sampling.RowSampler.draft` gets the same answer every time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

CellT = TypeVar("CellT", bound=Hashable)

SIGNIFICANCE = 1e-8
"""A test fails below this p-value."""

MIN_EXPECTED = 10.0
"""Cells with fewer expected counts are pooled: the chi-square law is poor for them, most of all in its tail."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The outcome of one test."""

    samples: int
    statistic: float
    degrees: int
    """Degrees of freedom; 0 where nothing could be compared."""
    p_value: float

    @property
    def contradicts(self) -> bool:
        """True when the null hypothesis is rejected."""
        return self.p_value < SIGNIFICANCE

    def __str__(self) -> str:
        """Figures for a person."""
        freedom = f"{self.degrees} degrees of freedom"
        return f"chi-square {self.statistic:.1f}, {freedom}, p={self.p_value:.2g}, n={self.samples}"


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with ``degrees`` degrees of freedom exceeds ``statistic``); 1 for no degrees of freedom."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(counts: Mapping[CellT, int], law: Mapping[CellT, float]) -> Evidence:
    """Pearson's chi-square test of independent observations against a law that is known exactly.

    Args:
        counts: observations per cell.
        law: probability per cell. An observation in a cell of probability 0 is a contradiction by itself.
    """
    samples = sum(counts.values())
    if any(law.get(cell, 0.0) <= 0.0 for cell in counts):
        return Evidence(samples, math.inf, 1, 0.0)
    pooled_count, pooled_mass = 0, 0.0
    terms: list[tuple[int, float]] = []
    for cell, mass in law.items():
        if mass * samples < MIN_EXPECTED:
            pooled_count += counts.get(cell, 0)
            pooled_mass += mass
        else:
            terms.append((counts.get(cell, 0), mass * samples))
    if pooled_mass * samples >= MIN_EXPECTED:
        terms.append((pooled_count, pooled_mass * samples))
    statistic = sum((count - expected) ** 2 / expected for count, expected in terms)
    degrees = len(terms) - 1
    return Evidence(samples, statistic, degrees, chi_square_tail(statistic, degrees))


def detectable_shift(samples: int, degrees: int) -> float:
    """Total variation distance that a goodness-of-fit test of this size notices about every second time.

    A shift of total variation d moves the statistic by about ``4 d^2 n`` where it is spread evenly over the mass.
    """
    if samples < 1 or degrees < 1:
        return 1.0
    low, high = float(degrees), degrees + 40.0 * math.sqrt(degrees) + 400.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if chi_square_tail(middle, degrees) > SIGNIFICANCE else (low, middle)
    return math.sqrt((high - degrees) / (4.0 * samples))


class DrawTest:
    """Were tokens drawn from the probabilities they were reported with?

    Each observation has its own law, so counts are compared with summed expectations, and their covariance is summed as
    well (the score of a sequence of multinomials). That stays right when a later law depends on an earlier draw,
    because the differences form a martingale. Tokens are put into cells in two ways:

    - by rank within their own law, which shows tokens that are too often likely (argmax) or unlikely ones,
    - by id, which shows laws that belong to another position or are permuted.

    A third figure asks whether the survival estimate of a position knew the token that was drawn there.
    """

    ID_CELLS = 24
    _RANK_BORDERS = (1, 2, 3, 5, 9)
    _FLUSH = 256
    _FLOOR = 1e-4

    def __init__(self) -> None:
        self._rank = _Score(len(self._RANK_BORDERS) + 1)
        self._id = _Score(self.ID_CELLS)
        self._rows: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._trust: list[float] = []
        self._seen: list[tuple[float, float, float]] = []

    @property
    def num_observations(self) -> int:
        """Tokens seen so far."""
        return self._rank.samples + len(self._tokens)

    def add(self, probs: torch.Tensor, token_ids: list[int], trust: list[float] | None) -> None:
        """Note one proposal.

        Args:
            probs: [K, V] the laws.
            token_ids: K ids inside the vocabulary.
            trust: K conditional survival estimates, or None.
        """
        self._rows.extend(probs.detach().double().cpu().unbind(0))
        self._tokens.extend(token_ids)
        self._trust.extend([math.nan] * len(token_ids) if trust is None else trust)
        if len(self._tokens) >= self._FLUSH:
            self._flush()

    def by_rank(self) -> Evidence:
        """Test of the ranks of the drawn tokens."""
        self._flush()
        return self._rank.evidence()

    def by_id(self) -> Evidence:
        """Test of the ids of the drawn tokens."""
        self._flush()
        return self._id.evidence()

    def survival_knows_token(self) -> Evidence:
        """Test whether the estimates move with the log-probability of the very token they are about."""
        self._flush()
        known = torch.tensor([entry for entry in self._seen if not math.isnan(entry[0])], dtype=torch.float64)
        if len(known) < 2:
            return Evidence(len(known), 0.0, 0, 1.0)
        weight = known[:, 0] - known[:, 0].mean()
        variance = float((weight.square() * known[:, 2]).sum())
        if not variance > 1e-9:  # the same estimate everywhere knows nothing
            return Evidence(len(known), 0.0, 0, 1.0)
        statistic = float((weight * known[:, 1]).sum()) ** 2 / variance
        return Evidence(len(known), statistic, 1, chi_square_tail(statistic, 1))

    def _flush(self) -> None:
        if not self._tokens:
            return
        probs = torch.stack(self._rows)
        probs = probs / probs.sum(-1, keepdim=True)
        tokens = torch.tensor(self._tokens)[:, None]
        order = probs.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(probs.shape[1]).expand_as(order))
        borders = torch.tensor(self._RANK_BORDERS)
        self._rank.add(probs, torch.bucketize(ranks, borders, right=True), tokens)
        self._id.add(probs, torch.arange(probs.shape[1]).expand_as(order) % self.ID_CELLS, tokens)
        surprise = probs.clamp(min=self._FLOOR).log()
        mean = (probs * surprise).sum(-1)
        variance = (probs * surprise.square()).sum(-1) - mean.square()
        difference = surprise.gather(-1, tokens)[:, 0] - mean
        self._seen.extend(zip(self._trust, difference.tolist(), variance.clamp(min=0.0).tolist(), strict=True))
        self._rows, self._tokens, self._trust = [], [], []


class _Score:
    """Counts per cell minus their expectation, with the covariance of that difference."""

    def __init__(self, cells: int) -> None:
        self.samples = 0
        self._difference = torch.zeros(cells, dtype=torch.float64)
        self._expected = torch.zeros(cells, dtype=torch.float64)
        self._covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, probs: torch.Tensor, cells: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add N observations: their laws [N, V], the cell of every token [N, V], and the tokens drawn [N, 1]."""
        masses = torch.zeros(len(probs), len(self._expected), dtype=torch.float64).scatter_add_(-1, cells, probs)
        drawn = torch.zeros_like(masses).scatter_(-1, cells.gather(-1, tokens), 1.0)
        self.samples += len(probs)
        self._difference += (drawn - masses).sum(0)
        self._expected += masses.sum(0)
        self._covariance += masses.sum(0).diag() - masses.T @ masses

    def evidence(self) -> Evidence:
        """The quadratic form of the difference, cells with small expectation pooled."""
        large = self._expected >= MIN_EXPECTED
        pool = torch.cat((torch.eye(len(large), dtype=torch.float64)[large], (~large).double()[None]))
        difference, covariance = pool @ self._difference, pool @ self._covariance @ pool.T
        # The cells sum to a constant, so the covariance is singular by one dimension at least.
        values, vectors = torch.linalg.eigh(covariance)
        kept = values > 1e-6 * max(1.0, float(values.max()))
        if self.samples == 0 or not bool(kept.any()):
            return Evidence(self.samples, 0.0, 0, 1.0)
        statistic = float(((vectors.T @ difference)[kept].square() / values[kept]).sum())
        lost = float((vectors.T @ difference)[~kept].abs().max()) if bool((~kept).any()) else 0.0
        if lost > 0.5:  # a difference where there can be none: a token to which its law gives (almost) no probability
            return Evidence(self.samples, math.inf, int(kept.sum()), 0.0)
        degrees = int(kept.sum())
        return Evidence(self.samples, statistic, degrees, chi_square_tail(statistic, degrees))
