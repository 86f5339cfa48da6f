"""Drafters with a known fate: they are given the true outputs, so a test decides what will be accepted.

*Truths* are whole sequences, prompt and output. A drafter finds a request's truth by its committed tokens; a request
that left every truth is not drafted for, which a parity test notices anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from specflow_llm import DrafterBase, DraftRequest, Proposal


class Truths:
    """True sequences, looked up by a committed prefix."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]

    def continuation(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` true tokens after the committed ones; empty where no truth begins like that."""
        committed = list(token_ids)
        size = len(committed)
        for sequence in self._sequences:
            if len(sequence) > size and sequence[:size] == committed:
                return sequence[size : size + limit]
        return []


class OracleDrafter(DrafterBase):
    """Always right: proposes the true continuation."""

    def __init__(self, truths: Iterable[Sequence[int]]) -> None:
        self._truths = Truths(truths)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The true tokens, as many as are allowed and known."""
        return [Proposal(self._truths.continuation(request.token_ids, request.limit)) for request in requests]


class AdversaryDrafter(DrafterBase):
    """Always wrong and always sure: every proposed token differs from the true one, every survival estimate is 1."""

    def __init__(self, truths: Iterable[Sequence[int]], vocab_size: int) -> None:
        self._truths = Truths(truths)
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Each true token plus one."""
        proposals = []
        for request in requests:
            true = self._truths.continuation(request.token_ids, request.limit)
            proposals.append(Proposal([(token + 1) % self._vocab_size for token in true], survival=(1.0,) * len(true)))
        return proposals


class NearDrafter(DrafterBase):
    """Right with a given probability at each position; what follows a wrong token is true again.

    Which tokens are spoilt depends on the seed and the request's length only: a request meets its fate in any batch.
    """

    def __init__(self, truths: Iterable[Sequence[int]], vocab_size: int, *, hit_rate: float, seed: int = 0) -> None:
        self._truths = Truths(truths)
        self._vocab_size = vocab_size
        self._hit_rate = hit_rate
        self._seed = seed

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """True tokens, some of them spoilt."""
        proposals = []
        for request in requests:
            true = self._truths.continuation(request.token_ids, request.limit)
            generator = torch.Generator().manual_seed(self._seed + 1009 * len(request.token_ids))
            misses = (torch.rand(len(true), generator=generator) >= self._hit_rate).tolist()
            tokens = [(token + missed) % self._vocab_size for token, missed in zip(true, misses, strict=True)]
            proposals.append(Proposal(tokens))
        return proposals


class RandomDrafter(DrafterBase):
    """Random tokens, as many as allowed or fewer; some outside the vocabulary when ``stray`` is set."""

    def __init__(self, vocab_size: int, *, seed: int = 0, stray: bool = False) -> None:
        self._low = -2 if stray else 0
        self._high = vocab_size + 3 if stray else vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """A random number of random tokens for each request."""
        proposals = []
        for request in requests:
            count = int(torch.randint(request.limit + 1, (), generator=self._generator))
            tokens: list[int] = torch.randint(self._low, self._high, (count,), generator=self._generator).tolist()
            proposals.append(Proposal(tokens))
        return proposals


class ScriptedDrafter(DrafterBase):
    """Forces how many tokens are drafted and how many of them are accepted, per request and round.

    Args:
        truths: the true sequences.
        vocab_size: of the target.
        script: ``script[r][i]`` is (drafted, accepted) for request i (in order of submission) the r-th time it is
            asked. After the last entry nothing is drafted. Near the end of a request its limit shortens the draft.
    """

    def __init__(
        self, truths: Iterable[Sequence[int]], vocab_size: int, script: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self._truths = Truths(truths)
        self._vocab_size = vocab_size
        self._script = script
        self._asked: dict[int, int] = {}
        self._order: dict[int, int] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The scripted number of true tokens, the first of those to be rejected replaced by a wrong one."""
        return [Proposal(self._tokens(request)) for request in requests]

    def _tokens(self, request: DraftRequest) -> list[int]:
        turn = self._asked.get(request.row, 0)
        self._asked[request.row] = turn + 1
        if turn >= len(self._script):
            return []
        drafted, accepted = self._script[turn][self._order.setdefault(request.row, len(self._order))]
        tokens = self._truths.continuation(request.token_ids, min(drafted, request.limit))
        if accepted < len(tokens):
            tokens[accepted] = (tokens[accepted] + 1) % self._vocab_size
        return tokens
