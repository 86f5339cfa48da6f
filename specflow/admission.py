"""The frontier: how a policy chooses which drafted items to execute without looking ahead.

Sampling stays exact only if the event "item k is sent to verification" does not depend on item k itself or on anything
computed from it (DSpark, arXiv:2607.05147, appendix A; the classic counter-example turns a .70/.30 law into .85/.15). A
policy therefore never receives whole drafts. It receives a :class:`Frontier`, which shows, per chain, the survival
estimate of the *next* item only; admitting that item reveals the following estimate. A policy that insists on seeing
everything may call :meth:`Frontier.reveal`; the draft is then marked *anticipated* and the backend verifies it with a
rule that is exact for any way of choosing the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import AdmissionClosedError
from .trees import depths
from .types import Admission, Draft


class Frontier:
    """The next not yet admitted item of every draft in a round."""

    __slots__ = ("_anticipated", "_closed", "_depths", "_drafts", "_lengths", "_sizes")

    def __init__(self, drafts: Sequence[Draft[Any]]) -> None:
        self._drafts = drafts
        self._sizes = [len(draft.values) for draft in drafts]
        self._lengths = [0] * len(drafts)
        self._closed = [False] * len(drafts)
        self._anticipated = [False] * len(drafts)
        self._depths: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Number of chains in the round."""
        return len(self._sizes)

    def admitted(self, index: int) -> int:
        """How many items of draft ``index`` have been admitted so far."""
        return self._lengths[index]

    def available(self, index: int) -> int:
        """How many more items of draft ``index`` can be admitted (0 once closed).

        Use it to bound ``count``, not to judge a draft: where a draft ends may depend on the values in it, so that "is
        it long enough?" looks ahead just as an estimate of a later item would.
        """
        return 0 if self._closed[index] else self._sizes[index] - self._lengths[index]

    def survival(self, index: int) -> float | None:
        """Estimated probability that draft ``index`` survives through its next item.

        None where nothing is left to admit. 1.0 where the drafter offers no estimate.
        """
        length = self._lengths[index]
        if self._closed[index] or length >= self._sizes[index]:
            return None
        estimates = self._drafts[index].survival
        return 1.0 if estimates is None else estimates[length]

    def parents(self, index: int) -> Sequence[int] | None:
        """The shape of draft ``index`` (:attr:`specflow.types.Draft.parents`); None for a chain."""
        return self._drafts[index].parents

    def depth(self, index: int) -> int:
        """How many items the next item of draft ``index`` continues; in a chain, all that were admitted."""
        parents = self._drafts[index].parents
        length = self._lengths[index]
        if parents is None:
            return length
        if index not in self._depths:
            self._depths[index] = depths(parents)
        known = self._depths[index]
        return known[length] if length < len(known) else length

    def admit(self, index: int, count: int = 1) -> None:
        """Execute the next ``count`` items of draft ``index``.

        A ``count`` above 1 is a decision taken on the current estimate alone, which is always allowed.

        Raises:
            AdmissionClosedError: the draft is closed or has fewer items left.
        """
        available = self.available(index)
        if not 0 <= count <= available:
            raise AdmissionClosedError(index, count, available)
        self._lengths[index] += count

    def admit_all(self) -> None:
        """Execute every item of every draft."""
        self._lengths = [
            length if closed else size
            for size, length, closed in zip(self._sizes, self._lengths, self._closed, strict=True)
        ]

    def close(self, index: int) -> None:
        """Admit nothing more of draft ``index``; its next estimate is not shown any longer."""
        self._closed[index] = True

    def reveal(self, index: int) -> Sequence[float] | None:
        """All survival estimates of draft ``index``: look ahead, at the price of one-hot verification for it."""
        self._anticipated[index] = True
        return self._drafts[index].survival

    def decision(self) -> Admission:
        """The admission as decided so far."""
        return Admission(tuple(self._lengths), tuple(self._anticipated))
