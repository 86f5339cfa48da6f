"""What the items of drafts that branch promise, by their rank in the draft."""

from __future__ import annotations

from collections.abc import Sequence

_FIRST, _NEXT = 0.5, 0.8
"""What the first item promises before anything was seen, and each as a share of the one before."""
_CHAIN_FADE, _POOL_FADE = 0.1, 0.02
"""Weight of the newest draft, for one chain and for what new chains start from: one bad draft says nothing."""
_FORGET = 0.1
"""How much slower what was not asked for goes back to what the items before it suggest."""


class Ranks:
    """By rank, the corrected survival that items are drafted with: means that fade.

    In a chain the rate at each place says what a draft of any length promises. A tree's items stand side by side, and
    what its n best promise has to be learned as such.

    Args:
        means: what is expected at first.
        fade: weight of the newest draft.
    """

    __slots__ = ("_fade", "_means")

    def __init__(self, means: Sequence[float], fade: float) -> None:
        self._means = list(means)
        self._fade = fade

    @classmethod
    def unseen(cls, size: int) -> Ranks:
        """Before the first draft that branches, for all chains together."""
        return cls([_FIRST * _NEXT**rank for rank in range(size)], _POOL_FADE)

    def for_chain(self) -> Ranks:
        """The same expectations, for one chain to go on from."""
        return Ranks(self._means, _CHAIN_FADE)

    def learn(self, promised: Sequence[float], asked: int) -> None:
        """Take in a draft of ``asked`` items, which came with these estimates; what did not come promised nothing.

        What was not asked for goes back, slowly, to what the items before it suggest: as long as smaller drafts promise
        much, a larger one is tried now and then.
        """
        means = self._means
        for rank in range(asked):
            new = promised[rank] if rank < len(promised) else 0.0
            means[rank] += self._fade * (new - means[rank])
        for rank in range(max(asked, 1), len(means)):
            means[rank] += _FORGET * self._fade * (_NEXT * means[rank - 1] - means[rank])

    def promise(self, rank: int) -> float:
        """What an item of this rank promises."""
        return self._means[rank]
