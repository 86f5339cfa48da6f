"""Does speculation with this drafter change the output?

Greedy and coupled requests are compared token by token with plain decoding. A drafter that reports probabilities is
also tested for what the ratio rules rest on: that its tokens were drawn from those very probabilities, and that neither
the length of a draft nor a survival estimate depended on the token it is about. No test can prove the last for
arbitrary code; each one says what it would have noticed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

from specflow.policies import Fixed, Threshold
from specflow.protocols import Policy
from specflow.testing import ScriptedPolicy

from ..config import SamplingParams, Verification
from ..drafters.base import DraftRequest, Proposal
from ..sampling import RowSampler
from .harness import Setup
from .report import Outcome
from .statistics import DrawTest, Evidence, detectable_shift, goodness_of_fit

PARITY_SHARES = (1.0, 0.7, 0.3, 0.6, 0.5, 0.0, 0.8, 0.9)
"""Lengths of the compared completions, as shares of the longest; rows of a batch end at different times."""
LAW_PROMPT = [1]
"""A single token: it needs no forward of its own, and there are many requests."""
LAW_LENGTH = 3
"""Tokens of the joint law that is compared."""
LAW_TOP_K = 3
"""Tokens that stay possible at each position, so that the joint law can be enumerated with any vocabulary."""
LAW_BATCH = 256
"""Requests decoded together."""
MIN_DRAWS = 200
"""Fewer drawn tokens than this prove nothing."""

Finding = tuple[Outcome, str]


def check_parity(setup: Setup, *, seeded: bool, tree: bool = False) -> Finding:
    """Tokens with and without the drafter, over ragged batches and several policies.

    Args:
        setup: what to run.
        seeded: sample with a seed per request (coupled verification) instead of decoding greedily.
        tree: let drafts branch.
    """
    prompts = setup.prompts()
    settings = [
        SamplingParams(
            max_tokens=max(1, int(setup.max_tokens * PARITY_SHARES[index % len(PARITY_SHARES)])),
            temperature=1.0 if seeded else 0.0,
            seed=100 + index,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    plain = [completion.token_ids for completion in setup.llm(None).generate(prompts, settings)]
    longest = setup.max_draft_tokens
    policies: list[tuple[str, Policy]] = [
        (f"{longest} tokens a round", Fixed(longest)),
        ("changing lengths", ScriptedPolicy([longest, 0, 1, 3, 2], [longest, 1, 2, 0, 3])),
    ]
    accepted = admitted = 0
    for label, policy in policies:
        completions = setup.llm(setup.drafter(), policy, tree=tree).generate(prompts, settings)
        for index, (completion, expected) in enumerate(zip(completions, plain, strict=True)):
            accepted += completion.metrics.accepted
            admitted += completion.metrics.admitted
            if completion.token_ids != expected:
                difference = _first_difference(completion.token_ids, expected)
                return Outcome.FAILED, f"with {label}, prompt {index}: {difference}"
    equal = f"{len(prompts)} prompts, {len(policies)} policies: equal"
    if not admitted:
        return Outcome.OK, f"{equal}, but nothing was ever drafted"
    return Outcome.OK, f"{equal}; {accepted} of {admitted} drafted tokens accepted"


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> str:
    same = 0
    while same < min(len(found), len(expected)) and found[same] == expected[same]:
        same += 1
    return f"token {same} is {_at(found, same)} instead of {_at(expected, same)}"


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "the end"


# --- Sampled requests ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watching:
    """Takes in the proposals of sampled runs."""

    draws: DrawTest
    first_survivals: list[float]
    """Estimates of first tokens."""

    def __call__(self, request: DraftRequest, proposal: Proposal) -> None:
        tokens = list(proposal.token_ids)
        if proposal.survival:
            self.first_survivals.append(proposal.survival[0])
        inside = all(0 <= token < request.sampler.vocab_size for token in tokens)
        if proposal.probs is not None and tokens and inside:
            self.draws.add(proposal.probs, tokens, _conditional(proposal.survival))


def _conditional(survival: Sequence[float] | None) -> list[float] | None:
    """P(token k accepted | those before it), as claimed."""
    if survival is None:
        return None
    before = [1.0, *survival[:-1]]
    return [value / earlier if earlier > 0.0 else math.nan for value, earlier in zip(survival, before, strict=True)]


class SampledRuns:
    """Samples completions under the ratio rules, once, for all statistical checks.

    Args:
        setup: what to run.
    """

    RULES: tuple[Verification, ...] = ("token", "block")

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._watching = _Watching(DrawTest(), [])
        self._law = exact_law(setup.model, LAW_PROMPT, self._params(0), LAW_LENGTH)
        self._evidence = {
            rule: goodness_of_fit(self._sample(Fixed(setup.max_draft_tokens), rule, first_seed), self._law)
            for rule, first_seed in zip(self.RULES, (0, 10**6), strict=True)
        }

    @staticmethod
    def _params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=LAW_LENGTH, temperature=1.0, top_k=LAW_TOP_K, seed=seed, ignore_eos=True)

    def _sample(self, policy: Policy, rule: Verification, first_seed: int) -> Counter[tuple[int, ...]]:
        """Completions by token ids. Seeds only make the run repeatable: the rule is a ratio rule, not the coupled."""
        drafter = self._setup.drafter()
        drafter.watchers.append(self._watching)
        llm = self._setup.llm(drafter, policy, verification=rule, max_batch_size=LAW_BATCH)
        counts: Counter[tuple[int, ...]] = Counter()
        seeds = range(first_seed, first_seed + self._setup.samples)
        for begin in range(0, len(seeds), LAW_BATCH):
            chunk = seeds[begin : begin + LAW_BATCH]
            completions = llm.generate([LAW_PROMPT] * len(chunk), [self._params(seed) for seed in chunk])
            counts.update(completion.token_ids for completion in completions)
        return counts

    def draws(self) -> Finding:
        """Were the tokens drawn from the probabilities they were reported with?"""
        test = self._watching.draws
        if test.num_observations < MIN_DRAWS:
            return Outcome.SKIPPED, f"only {test.num_observations} tokens came with probabilities; too few to judge"
        by_rank, by_id = test.by_rank(), test.by_id()
        for label, evidence in (("ranks", by_rank), ("ids", by_id)):
            if evidence.contradicts:
                return Outcome.FAILED, (
                    f"the {label} of drafted tokens do not follow the reported probabilities ({evidence}): tokens were "
                    "chosen in another way, or dropped because of what they are; give probs=None, or decide before "
                    "drawing"
                )
        p_values = f"p={by_rank.p_value:.2g}, {by_id.p_value:.2g}, n={by_rank.samples}"
        return Outcome.OK, f"ranks and ids follow the reported probabilities ({p_values})"

    def law(self) -> Finding:
        """Does the output follow the target's law, under the token and the block rule?"""
        for rule, evidence in self._evidence.items():
            if evidence.contradicts:
                return Outcome.FAILED, f"the {rule} rule's output differs from the target's law ({evidence})"
        worst = min(self._evidence.values(), key=_p_value)
        if worst.degrees == 0:
            return Outcome.SKIPPED, f"{worst.samples} samples are too few to compare {len(self._law)} sequences"
        return Outcome.OK, (
            f"{len(self._law)} sequences under {len(self._evidence)} rules (smallest p={worst.p_value:.2g}); "
            f"a shift of {_shift(worst):.0%} would show"
        )

    def survival(self) -> Finding:
        """Did an estimate know the token it is about?"""
        if not self._watching.first_survivals:
            return Outcome.SKIPPED, "the drafter gives no survival estimates"
        evidence = self._watching.draws.survival_knows_token()
        if evidence.contradicts:
            return Outcome.FAILED, (
                f"survival[k] moves with the probability of token k itself ({evidence}); compute it before drawing"
            )
        if evidence.degrees == 0:
            return Outcome.OK, "the estimates do not vary, so they know nothing"
        return Outcome.OK, f"no trace of the token in its estimate (p={evidence.p_value:.2g}, n={evidence.samples})"

    def truncated_law(self) -> Finding:
        """Does the output keep its law when drafts are cut where the estimates fall?"""
        if not self._watching.first_survivals:
            return Outcome.SKIPPED, "the drafter gives no survival estimates"
        # Half of the drafts are refused whole, where an estimate that knows its token does the most harm.
        border = min(1.0, max(0.0, median(self._watching.first_survivals)))
        policy = Threshold(self._setup.max_draft_tokens, border)
        evidence = goodness_of_fit(self._sample(policy, "block", 2 * 10**6), self._law)
        if evidence.degrees == 0:
            return Outcome.SKIPPED, f"{evidence.samples} samples are too few to compare {len(self._law)} sequences"
        cut = f"cut at a survival of {border:.2f}"
        if evidence.contradicts:
            return Outcome.FAILED, f"{cut}, the output differs from the target's law ({evidence})"
        return Outcome.OK, f"{cut} (p={evidence.p_value:.2g}); a shift of {_shift(evidence):.0%} would show"


def _p_value(evidence: Evidence) -> float:
    return evidence.p_value


def _shift(evidence: Evidence) -> float:
    return detectable_shift(evidence.samples, evidence.degrees)


@torch.inference_mode()
def exact_law(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every completion of ``length`` tokens, by enumeration with plain forwards.

    Args:
        model: the target.
        prompt: token ids.
        params: the request's settings; they should leave few tokens possible at each position.
        length: tokens; the number of forwards grows with it, their batch exponentially.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    sampler = RowSampler(params, vocab_size=vocab_size, num_prompt_tokens=len(prompt), seed=0, rule="coupled")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        histories = [[*prompt, *prefix] for prefix in law]
        logits = model(input_ids=torch.tensor(histories, device=model.device), use_cache=False).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, mass), history, row in zip(law.items(), histories, logits, strict=True):
            probs = sampler.log_probs(row[None], history)[0].double().exp()
            for token in probs.nonzero().flatten().tolist():
                longer[(*prefix, token)] = mass * float(probs[token])
        law = longer
    return law
