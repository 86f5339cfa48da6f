"""What the checks run on: a tiny target, a watched drafter, and two ways to ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specflow.protocols import Observer, Policy

from ..architecture import inspect_model
from ..config import SamplingParams, Speculation, Verification
from ..drafters.base import BranchingDrafter, Drafter, DraftRequest, Proposal, RowId
from ..errors import DrafterError
from ..llm import LLM
from ..sampling import RowSampler
from ..selfcheck import build_target
from .contract import ContractLog

TINY_VOCAB = 16
"""Ids of the built-in target. Few, so that laws can be enumerated and lookups find matches."""

TINY_CONTEXT = 512
"""Positions of the built-in target."""

GREEDY = SamplingParams(temperature=0.0)
"""Settings of a request whose drafts should not depend on chance."""

Watch = Callable[[DraftRequest, Proposal], None]


def tiny_target(seed: int = 3, *, vocab_size: int = TINY_VOCAB) -> PreTrainedModel:
    """A two-layer Llama with random weights in float32.

    ``initializer_range=0.3``: with transformers' default of 0.02 all logits are nearly equal and the output is
    constant, so that every comparison would hold for no reason.

    Args:
        seed: of the weights. The default's greedy output is diverse.
        vocab_size: number of token ids.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):  # weights are drawn from the global generator; the caller's stays as it was
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(config)
    return model.eval()


class WatchedDrafter:
    """Passes everything on to a drafter, notes what breaks the contract, and lets others watch.

    Proposals that break the contract are cut to a legal form, so that one fault does not hide the others.
    """

    def __init__(self, drafter: Drafter, log: ContractLog) -> None:
        self._drafter = drafter
        self._log = log
        self.watchers: list[Watch] = []
        self.seconds = 0.0
        """Spent inside the drafter."""

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self._drafter.name

    @property
    def feature_layers(self) -> Sequence[int]:
        """The drafter's."""
        return self._drafter.feature_layers

    @property
    def gives_probs(self) -> bool:
        """The drafter's."""
        return self._drafter.gives_probs

    @property
    def branches(self) -> bool:
        """Whether the drafter's proposals may be trees."""
        return isinstance(self._drafter, BranchingDrafter) and self._drafter.branches

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """The drafter's proposals, judged and made legal."""
        before = [tuple(request.token_ids) for request in requests]
        started = time.perf_counter()
        proposals = list(self._drafter.propose(requests))
        self.seconds += time.perf_counter() - started
        self._log.judge_batch(requests, before, len(proposals))
        legal = [
            self._log.judge(request, proposal, gives_probs=self.gives_probs)
            for request, proposal in zip(requests, proposals, strict=False)
        ]
        legal += [Proposal(())] * (len(requests) - len(legal))
        for request, proposal in zip(requests, legal, strict=True):
            for watch in self.watchers:
                watch(request, proposal)
        return legal

    def release(self, row: RowId) -> None:
        """Pass on."""
        self._drafter.release(row)

    def state_bytes(self) -> Mapping[str, int]:
        """The drafter's."""
        return self._drafter.state_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a check needs."""

    factory: Callable[[], Drafter]
    model: PreTrainedModel
    """The target that checks run on."""
    max_draft_tokens: int
    max_tokens: int
    """Longest completion."""
    samples: int
    """Sampled completions per law."""
    learns: bool
    """The drafter's guesses depend, on purpose, on what it saw in other requests."""
    log: ContractLog = field(default_factory=ContractLog)

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    def drafter(self) -> WatchedDrafter:
        """A new drafter.

        Raises:
            DrafterError: the factory returns something else.
        """
        made = self.factory()
        if not isinstance(made, Drafter):
            raise DrafterError(
                type(made).__name__,
                "it lacks methods of the Drafter protocol",
                "subclass specflow_llm.DrafterBase, or implement all of specflow_llm.Drafter",
            )
        return WatchedDrafter(made, self.log)

    def llm(
        self,
        drafter: Drafter | None,
        policy: Policy | None = None,
        *,
        verification: Verification = "auto",
        tree: bool = False,
        max_batch_size: int = 4,
        observers: Sequence[Observer] = (),
    ) -> LLM:
        """The target with a drafter under a policy; plain decoding without one. Drafts branch only with ``tree``."""
        speculation = None
        if drafter is not None:
            speculation = Speculation(
                drafter=drafter,
                max_draft_tokens=self.max_draft_tokens,
                policy="fixed" if policy is None else policy,
                verification=verification,
                tree=tree,
            )
        return LLM(
            self.model,
            tokenizer=None,
            speculation=speculation,
            max_batch_size=max_batch_size,
            check_model=False,
            observers=observers,
        )

    def prompts(self) -> list[list[int]]:
        """Prompts of different lengths over few ids, with repetitions, the first of a single token."""
        generator = torch.Generator().manual_seed(11)
        few = min(8, self.vocab_size)
        lengths = (3, 20, 7, 12, 5, 30)
        noise = [torch.randint(few, (length,), generator=generator).tolist() for length in lengths]
        motif = [1, 4, 2, 6, 3]
        return [[1], *noise, [*motif, *motif, 7, *motif[:3]]]


class Desk:
    """Asks a drafter directly, one round at a time, for rows whose committed tokens are given."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._architecture = inspect_model(setup.model)
        noise, motif = setup.prompts()[-2:]
        own = setup.llm(None).generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids
        self.texts: list[list[int]] = [noise, motif * 2, [1, 2, 3, *own], [2, 5]]
        """Token ids that lookups and models can continue: noise over few ids, a motif, the target's own output."""

    def ask(
        self,
        drafter: WatchedDrafter,
        rows: Mapping[int, Sequence[int]],
        limits: Mapping[int, int],
        params: SamplingParams = GREEDY,
    ) -> dict[int, list[int]]:
        """The tokens proposed for every row.

        Args:
            drafter: who is asked.
            rows: committed token ids by row.
            limits: draft limit by row.
            params: settings of all rows.
        """
        requests = [self.request(drafter, row, ids, limits[row], params) for row, ids in rows.items()]
        proposals = drafter.propose(requests)
        return {row: list(proposal.token_ids) for row, proposal in zip(rows, proposals, strict=True)}

    def request(
        self, drafter: WatchedDrafter, row: int, token_ids: Sequence[int], limit: int, params: SamplingParams = GREEDY
    ) -> DraftRequest:
        """One request as the engine would make it."""
        sampler = RowSampler(
            params,
            vocab_size=self._setup.vocab_size,
            num_prompt_tokens=min(2, len(token_ids)),
            seed=row,
            rule="greedy" if params.is_greedy else "block",
        )
        return DraftRequest(RowId(row), list(token_ids), limit, sampler, self._features(drafter, token_ids))

    def _features(self, drafter: WatchedDrafter, token_ids: Sequence[int]) -> torch.Tensor | None:
        """[n - 1, F] of the executed tokens, where the drafter wants them, from a forward of their own."""
        if not drafter.feature_layers:
            return None
        target = build_target(
            self._setup.model,
            self._architecture,
            feature_layers=drafter.feature_layers,
            check=False,
            prefill_chunk=TINY_CONTEXT,
        )
        return target.open([list(token_ids)])[0]
