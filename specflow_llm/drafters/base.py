"""The seam for drafters: one required method, and a base class that supplies the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, runtime_checkable

import torch

from ..sampling import RowSampler

RowId = NewType("RowId", int)
"""Names one request for as long as it lives; never reused within an engine."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know about one request."""

    row: RowId
    """Key for per-request state."""
    token_ids: Sequence[int]
    """Every committed token, prompt and output; the last one is the anchor the draft continues. It only ever grows
    between calls. Read-only, and valid during the call only."""
    limit: int
    """Propose at most this many tokens; 0 asks for an empty proposal."""
    sampler: RowSampler
    """The request's law: turn draft logits into a token with ``sampler.draft(...)``."""
    features: torch.Tensor | None = None
    """[n - 1, F] hidden states of the committed, already executed tokens, where ``feature_layers`` asked for them."""
    may_branch: bool = False
    """The proposal may be a tree of alternatives (:attr:`Proposal.parents`): the target can run one, and the request is
    verified by matching, which is exact for any of them."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's guess for one request."""

    token_ids: Sequence[int]
    """At most ``limit`` ids of the target's vocabulary; empty is always legal."""
    probs: torch.Tensor | None = None
    """[K, V] fp32: the very tensor each token was sampled from. None for tokens chosen in any other way (argmax,
    lookup); they are verified by a rule that is exact for any way of choosing."""
    survival: Sequence[float] | None = None
    """``survival[k]`` estimates P(tokens 0..k all accepted); computable before token k is drawn. In a tree, P(token k
    and all it continues are accepted), which may well depend on token k."""
    parents: Sequence[int] | None = None
    """Only where :attr:`DraftRequest.may_branch` allows it: ``parents[k]`` is the token that token k continues, one
    before it, or -1 for the anchor. The most promising first: policies execute a prefix. None: a chain."""


@runtime_checkable
class Drafter(Protocol):
    """**Protocol:** proposes continuations. Any failure to guess is an empty proposal, not an error."""

    @property
    def name(self) -> str:
        """Short name for logs and metrics."""
        ...

    @property
    def feature_layers(self) -> Sequence[int]:
        """Indices into the target's decoder layers whose output the drafter wants; empty for none."""
        ...

    @property
    def gives_probs(self) -> bool:
        """True when proposals for sampled requests carry the probabilities their tokens were drawn from.

        A drafter with several sources may leave them out where its tokens were looked up.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Guess the next tokens of every request, in order.

        What was proposed before may have been rejected: state kept for it must be dropped when the committed tokens
        turn out different.
        """
        ...

    def release(self, row: RowId) -> None:
        """Forget a finished or cancelled request. Unknown rows are ignored."""
        ...

    def state_bytes(self) -> Mapping[str, int]:
        """Bytes held, by kind (``"draft_weights"``, ``"draft_kv"``, ...)."""
        ...


@runtime_checkable
class BranchingDrafter(Drafter, Protocol):
    """**Protocol:** a drafter whose proposals may be trees of alternatives."""

    @property
    def branches(self) -> bool:
        """Whether they are, for requests that allow it (:attr:`DraftRequest.may_branch`)."""
        ...


class DrafterBase(ABC):
    """Supplies everything but :meth:`propose` for drafters without per-request state."""

    feature_layers: Sequence[int] = ()
    gives_probs: bool = False

    @property
    def name(self) -> str:
        """The class name, unless overridden."""
        return type(self).__name__

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Guess the next tokens of every request, in order."""

    def release(self, row: RowId) -> None:
        """Nothing to forget."""

    def state_bytes(self) -> Mapping[str, int]:
        """Nothing held."""
        return {}
