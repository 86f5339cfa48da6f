"""Runs all checks on a drafter and measures what it gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from specflow.errors import InvalidSettingError

from ..config import SamplingParams
from ..drafters.base import Drafter
from ..llm import Prompt
from .contract import ANNOUNCES, ContractLog
from .exactness import Finding, SampledRuns, check_parity
from .gain import DEFAULT_TEXTS, measure_gain
from .harness import GREEDY, Desk, Setup, tiny_target
from .report import Check, Concern, DrafterReport, Gain, Outcome
from .state import LEARNS, check_release, check_repeatable, check_rollback, check_rows_apart

MIN_VOCAB = 8
"""The checks' prompts use ids 0 to 7."""

NO_TREES = "its drafts do not branch"
NO_PROBS = "no probabilities, so drafts are verified by a rule that is exact for any way of choosing tokens"


def check_drafter(  # noqa: PLR0913 - settings of one run, all but the first by keyword
    factory: Callable[[], Drafter],
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    prompts: Sequence[Prompt] | None = None,
    check_model: PreTrainedModel | None = None,
    max_draft_tokens: int = 5,
    max_tokens: int = 64,
    samples: int = 2000,
    learns: bool = False,
    notify: Callable[[str], None] = lambda _message: None,
) -> DrafterReport:
    """Say whether a drafter is exact, whether it keeps its state in order, and what it gains.

    The engine verifies every draft, so most faults cannot change the output; what can is a proposal that breaks the
    protocol, or probabilities that are not those the tokens were drawn from. Both are looked for on a tiny random
    model, where laws can be enumerated. The gain is measured on ``model``.

    Statistical checks fail below p=1e-8 and use fixed seeds: a correct drafter is refused with odds below one in a
    million, and one that draws through the request's sampler gets the same answer every time.

    Args:
        factory: makes a new drafter, without state, on every call; a class will do. Many are made.
        model: the target to measure the gain on. None: the tiny random one, where counts mean something but seconds do
            not.
        tokenizer: of ``model``. None: prompts are ids.
        prompts: what to complete for the gain. None: a few built-in ones.
        check_model: the target to run the checks on. None: the tiny random one; see :func:`tiny_target`. Give one for a
            drafter that works for one vocabulary or one model only.
        max_draft_tokens: longest draft asked for; >= 1.
        max_tokens: tokens of the longest completion; >= 1.
        samples: sampled completions per law; more find smaller faults. Used only where the drafter gives probabilities.
        learns: the drafter's guesses depend, on purpose, on what it saw in other requests or on what was rejected. The
            checks that compare it with a fresh one are then skipped.
        notify: told which check begins.

    Raises:
        DrafterError: ``factory`` returns something that is no drafter.
        InvalidSettingError: a number is too small, or the model to check on has fewer than 8 token ids.
    """
    for setting, value in (("max_draft_tokens", max_draft_tokens), ("max_tokens", max_tokens), ("samples", samples)):
        if value < 1:
            raise InvalidSettingError(setting, value, "an integer >= 1")
    setup = Setup(
        factory=factory,
        model=tiny_target() if check_model is None else check_model.eval(),
        max_draft_tokens=max_draft_tokens,
        max_tokens=max_tokens,
        samples=samples,
        learns=learns,
    )
    if setup.vocab_size < MIN_VOCAB:
        raise InvalidSettingError("check_model", setup.vocab_size, f"a model with at least {MIN_VOCAB} token ids")
    drafter = setup.drafter()
    runner = _Runner(setup, notify)
    checks = runner.run(gives_probs=drafter.gives_probs, branches=drafter.branches)
    gain: Gain | None = None
    if not runner.broken:
        notify("measuring the gain")
        reads_text = model is not None and tokenizer is not None
        gain = measure_gain(
            setup.drafter(),
            setup.model if model is None else model,
            tokenizer if reads_text else None,
            prompts if prompts is not None else _default_prompts(tokenizer) if reads_text else setup.prompts()[1:5],
            max_tokens=max_tokens,
            max_draft_tokens=max_draft_tokens,
            is_real_model=model is not None,
            tree=drafter.branches,
        )
    return DrafterReport(drafter.name, drafter.gives_probs, tuple(checks), gain)


def _default_prompts(tokenizer: Any) -> list[Prompt]:
    if tokenizer.chat_template:
        return [[{"role": "user", "content": text}] for text in DEFAULT_TEXTS]
    return list(DEFAULT_TEXTS)


class _Runner:
    """Runs the checks in order; an error inside the drafter is a failed check, not the end."""

    def __init__(self, setup: Setup, notify: Callable[[str], None]) -> None:
        self._setup = setup
        self._notify = notify
        self._checks: list[Check] = []
        self._desk = Desk(setup)
        self.broken = False
        """A check ended with an error: the drafter cannot be measured."""

    def run(self, *, gives_probs: bool, branches: bool) -> list[Check]:
        """All checks, the contract first, although it is judged last: it watches every other run."""
        setup = self._setup
        self._run("limit 0 and mixed limits", Concern.CONTRACT, self._limits)
        self._run("greedy parity", Concern.EXACTNESS, lambda: check_parity(setup, seeded=False))
        self._run("seeded parity", Concern.EXACTNESS, lambda: check_parity(setup, seeded=True))
        for name, seeded in (("greedy parity, trees", False), ("seeded parity, trees", True)):
            if branches:
                self._run(name, Concern.EXACTNESS, partial(check_parity, setup, seeded=seeded, tree=True))
            else:
                self._skip(name, Concern.EXACTNESS, NO_TREES)
        self._run_sampled(gives_probs=gives_probs)
        self._run_state()
        return [self._contract(setup.log), *self._checks]

    def _run(self, name: str, concern: Concern, check: Callable[[], Finding]) -> Finding:
        self._notify(name)
        try:
            outcome, reason = check()
        except Exception as error:  # noqa: BLE001 - whatever a stranger's drafter raises is what the check found
            self.broken = True
            outcome, reason = Outcome.FAILED, f"raised {type(error).__name__}: {error}"
        self._checks.append(Check(name, concern, outcome, reason))
        return outcome, reason

    def _skip(self, name: str, concern: Concern, reason: str) -> None:
        self._checks.append(Check(name, concern, Outcome.SKIPPED, reason))

    def _limits(self) -> Finding:
        """Requests with different limits in one call, 0 among them."""
        desk, drafter = self._desk, self._setup.drafter()
        log, before = self._setup.log, dict(self._setup.log.violations)
        rows = dict(enumerate([*desk.texts, desk.texts[1]]))
        limits = {0: 0, 1: 1, 2: self._setup.max_draft_tokens, 3: 0, 4: 3}
        for params in (GREEDY, SamplingParams(temperature=1.0)):
            desk.ask(drafter, rows, limits, params)
            rows = {row: [*ids, ids[-2]] for row, ids in rows.items()}
        if any(count != before.get(rule, 0) for rule, count in log.violations.items() if rule != ANNOUNCES):
            return Outcome.FAILED, _first_example(log)
        return Outcome.OK, "empty where nothing may be drafted, within the limit elsewhere"

    def _run_sampled(self, *, gives_probs: bool) -> None:
        names = (
            "drawn from the reported probabilities",
            "output law",
            "survival blind to its token",
            "output law, drafts cut by survival",
        )
        if not gives_probs:
            for name in names:
                self._skip(name, Concern.EXACTNESS, NO_PROBS)
            return
        found: list[SampledRuns] = []

        def sample() -> Finding:
            found.append(SampledRuns(self._setup))
            return found[0].draws()

        self._run(names[0], Concern.EXACTNESS, sample)
        if not found:
            for name in names[1:]:
                self._skip(name, Concern.EXACTNESS, "sampling failed")
            return
        self._run(names[1], Concern.EXACTNESS, found[0].law)
        self._run(names[2], Concern.EXACTNESS, found[0].survival)
        self._run(names[3], Concern.EXACTNESS, found[0].truncated_law)

    def _run_state(self) -> None:
        setup, desk = self._setup, self._desk
        names = ("forgets rejected tokens", "rows are independent")
        if setup.learns:
            reason = LEARNS
        else:
            outcome, reason = self._run("repeatable", Concern.STATE, lambda: check_repeatable(setup, desk))
            reason = "" if outcome is Outcome.OK else reason
        if reason:
            for name in names:
                self._skip(name, Concern.STATE, reason)
        else:
            self._run(names[0], Concern.STATE, lambda: check_rollback(setup, desk))
            self._run(names[1], Concern.STATE, lambda: check_rows_apart(setup, desk))
        self._run("release", Concern.STATE, lambda: check_release(setup, desk, repeatable=not reason))

    @staticmethod
    def _contract(log: ContractLog) -> Check:
        if log.violations:
            return Check("contract", Concern.CONTRACT, Outcome.FAILED, _first_example(log))
        seen = f"{log.proposals} proposals with {log.tokens} tokens keep every rule"
        return Check("contract", Concern.CONTRACT, Outcome.OK, seen)


def _first_example(log: ContractLog) -> str:
    """The broken rules, with how often and the first example of each."""
    return "; ".join(f"{rule}: {log.examples[rule]} ({count} times)" for rule, count in log.violations.items())
