"""Acceptance in counts. They do not depend on the machine, and every denominator is written down.

*Conditional acceptance* at position k: of the rounds that drafted a k-th token, had all earlier ones accepted and had
not ended, the fraction that accepted it. *Survival* at k: the fraction of rounds whose first k tokens are all accepted.
The two are often confused; DeepSpec's ``accept_rate@k`` is the second.

Not every round tells about every position: drafts are shorter near the end of a request or where a lookup finds
nothing, and a request may end inside its accepted prefix. Survival is therefore the product of conditional rates, each
over the rounds at risk (Kaplan and Meier 1958); with full drafts throughout that is the plain fraction.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..calibration import outcomes
from ..records import RoundRecord

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over some rounds."""

    requests: int
    rounds: int
    emitted: int
    """Tokens that became output. There is no prefill token among them: the first round yields the first token."""
    drafted: int
    accepted: int
    """Accepted and emitted: what was accepted behind the end of a request is not counted."""
    mean_accepted_length: float
    """Emitted per round, correction or bonus token included, over all rounds: what a user gets."""
    whole_rounds: int
    """Rounds with a full draft in which the request did not end inside the accepted prefix."""
    mean_accepted_length_whole: float
    """The same over whole rounds only: not shortened by the ends of requests. 0.0 without any."""
    cut_rounds: int
    """Rounds whose request ended inside the accepted prefix."""
    drafted_by_position: tuple[int, ...]
    at_risk_by_position: tuple[int, ...]
    """Rounds that drafted a k-th token, had the earlier ones accepted and had not ended."""
    accepted_by_position: tuple[int, ...]

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """P(token k is accepted | those before it are); None where no round was at risk."""
        return tuple(
            accepted / at_risk if at_risk else None
            for accepted, at_risk in zip(self.accepted_by_position, self.at_risk_by_position, strict=True)
        )

    @property
    def survival(self) -> tuple[float | None, ...]:
        """P(tokens 1..k are all accepted); None from the first position that no round reached at risk."""
        found: list[float | None] = []
        product: float | None = 1.0
        for rate in self.conditional_acceptance:
            product = None if product is None or rate is None else product * rate
            found.append(product)
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the derived numbers included."""
        return {
            **asdict(self),
            "conditional_acceptance": list(self.conditional_acceptance),
            "survival": list(self.survival),
        }


def count(rounds: Sequence[RoundRecord], *, max_draft: int) -> Acceptance:
    """Count rounds in which everything drafted was verified.

    Args:
        rounds: of any number of requests.
        max_draft: tokens asked for in every round.
    """
    drafted_at, at_risk, accepted_at = [0] * max_draft, [0] * max_draft, [0] * max_draft
    kinds: Counter[str] = Counter()
    emitted = accepted_in_all = whole_emitted = 0
    for record in rounds:
        drafted = len(record.survival)
        accepted, known = outcomes(record)
        is_cut = record.emitted <= record.accepted
        is_whole = drafted == max_draft and not is_cut
        kinds["cut"] += is_cut
        kinds["whole"] += is_whole
        whole_emitted += record.emitted if is_whole else 0
        emitted += record.emitted
        accepted_in_all += accepted
        for position in range(drafted):
            drafted_at[position] += 1
            at_risk[position] += position < min(known, accepted + 1)
            accepted_at[position] += position < accepted
    return Acceptance(
        requests=len({record.request for record in rounds}),
        rounds=len(rounds),
        emitted=emitted,
        drafted=sum(drafted_at),
        accepted=accepted_in_all,
        mean_accepted_length=emitted / len(rounds) if rounds else 0.0,
        whole_rounds=kinds["whole"],
        mean_accepted_length_whole=whole_emitted / kinds["whole"] if kinds["whole"] else 0.0,
        cut_rounds=kinds["cut"],
        drafted_by_position=tuple(drafted_at),
        at_risk_by_position=tuple(at_risk),
        accepted_by_position=tuple(accepted_at),
    )


def by_category(rounds: Sequence[RoundRecord], *, max_draft: int) -> dict[str, Acceptance]:
    """Counts of each category, in order of first appearance."""
    groups: dict[str, list[RoundRecord]] = {}
    for record in rounds:
        groups.setdefault(record.category, []).append(record)
    return {category: count(group, max_draft=max_draft) for category, group in groups.items()}


def macro_interval(rounds: Sequence[RoundRecord], *, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over categories of the mean accepted length.

    Requests are drawn anew within each category: rounds of one request are alike.

    Args:
        rounds: at least one.
        seed: of the resampling.
    """
    totals: dict[str, dict[int, tuple[int, int]]] = {}
    for record in rounds:
        requests = totals.setdefault(record.category, {})
        emitted, number = requests.get(record.request, (0, 0))
        requests[record.request] = emitted + record.emitted, number + 1
    rng = random.Random(seed)  # noqa: S311 - resampling, no secret
    groups = [list(requests.values()) for requests in totals.values()]
    means = sorted(
        statistics.fmean(_ratio(rng.choices(group, k=len(group))) for group in groups) for _ in range(_RESAMPLES)
    )
    return means[math.floor(0.025 * _RESAMPLES)], means[math.ceil(0.975 * _RESAMPLES) - 1]


def _ratio(requests: Sequence[tuple[int, int]]) -> float:
    return sum(emitted for emitted, _ in requests) / sum(number for _, number in requests)
