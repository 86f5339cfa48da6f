"""Rounds with everything verified that was drafted: what acceptance and calibration are counted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specflow.policies import Fixed
from specflow.types import RoundReport, Tree

from ..architecture import inspect_model
from ..calibration import CalibratedDrafter, CalibrationTable
from ..config import SamplingParams, Speculation, Verification
from ..drafters import BranchingDrafter, Drafter
from ..engine import Completion, Update
from ..hub import LoadedModel
from ..llm import LLM
from ..records import RoundRecord
from ..selfcheck import build_target
from ..target import DEFAULT_PREFILL_CHUNK, TreeTarget


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What one drafter did for one list of requests."""

    rounds: tuple[RoundRecord, ...]
    """By request, in order."""
    gives_survival: bool
    """False where the drafter made no estimates: the rounds say 1.0 everywhere then."""
    completions: tuple[Completion, ...]
    set_aside: CalibrationTable | None
    """The drafter's own calibration, which was switched off meanwhile: rounds hold raw confidences."""


class _Recorder:
    """Keeps what calibration and acceptance need of every round."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[tuple[int, Sequence[float] | None, int, int, Tree | None]]] = {}

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        entries = zip(report.chain_ids, report.drafted, report.survival, report.accepted, report.emitted, strict=True)
        for index, (chain, drafted, survival, accepted, emitted) in enumerate(entries):
            found = (drafted, survival, accepted, emitted, report.tree(index))
            self.rounds.setdefault(int(chain), []).append(found)


def roll_out(  # noqa: PLR0913 - one measurement, by keyword
    loaded: LoadedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    categories: Sequence[str],
    draft_tokens: int,
    batch_size: int,
    verification: Verification = "auto",
    tree: bool = False,
    check_model: bool = True,
    on_token: Callable[[int], None] = lambda _count: None,
) -> Rollouts:
    """Decode requests with ``Fixed(draft_tokens)``: whatever is drafted is verified.

    A drafter's own calibration is switched off meanwhile, and on again: scales fitted to corrected confidences
    would correct them twice.

    Args:
        loaded: the target.
        drafter: drafts.
        prompts: token ids.
        params: settings, one per prompt.
        categories: of each prompt.
        draft_tokens: asked for in every round.
        batch_size: requests decoded together.
        verification: see :func:`rule_for`.
        tree: let drafts branch; the estimates of a round are then those of the tree's items, best first.
        check_model: see :class:`~specflow_llm.llm.LLM`.
        on_token: told how many tokens came with every update.
    """
    recorder = _Recorder()
    llm = LLM(
        loaded.model,
        tokenizer=loaded.tokenizer,
        speculation=Speculation(
            drafter=drafter,
            max_draft_tokens=draft_tokens,
            tree=tree,
            policy=Fixed(draft_tokens),
            verification=rule_for(drafter, verification, tree=tree),
        ),
        max_batch_size=batch_size,
        check_model=check_model,
        observers=[recorder],
    )
    corrects = isinstance(drafter, CalibratedDrafter)
    table = drafter.calibration if isinstance(drafter, CalibratedDrafter) else None
    if isinstance(drafter, CalibratedDrafter):
        drafter.use_calibration(None)
    try:
        completions = llm.generate(
            [list(prompt) for prompt in prompts], list(params), on_update=lambda update: on_token(_tokens(update))
        )
    finally:
        if isinstance(drafter, CalibratedDrafter):
            drafter.use_calibration(table)
    rounds: list[RoundRecord] = []
    gives_survival = True
    for index, completion in enumerate(completions):
        position = len(completion.prompt_token_ids)
        for drafted, survival, accepted, emitted, shape in recorder.rounds[int(completion.request_id)]:
            gives_survival &= not drafted or survival is not None
            rounds.append(
                RoundRecord(
                    request=index,
                    category=categories[index],
                    position=position,
                    survival=(1.0,) * drafted if survival is None else tuple(map(float, survival)),
                    accepted=accepted,
                    emitted=emitted,
                    parents=None if shape is None else tuple(shape.parents),
                    path=None if shape is None else shape.path,
                )
            )
            position += emitted
    return Rollouts(tuple(rounds), gives_survival, tuple(completions), table if corrects else None)


def can_branch(loaded: LoadedModel, drafter: Drafter) -> bool:
    """Whether this drafter's drafts may branch on this target, which is tried out."""
    if not (isinstance(drafter, BranchingDrafter) and drafter.branches):
        return False
    target = build_target(loaded.model, inspect_model(loaded.model), prefill_chunk=DEFAULT_PREFILL_CHUNK, trees=True)
    return isinstance(target, TreeTarget) and target.runs_trees


def rule_for(drafter: Drafter, verification: Verification, *, tree: bool = False) -> Verification:
    """The acceptance rule of sampled requests.

    Requests of a measurement are seeded, and ``auto`` would match seeded requests to the plain run. Requests without a
    seed get block verification where the drafter gives probabilities and its drafts are chains, and that is measured.

    Args:
        drafter: the drafter.
        verification: asked for.
        tree: its drafts may branch.
    """
    if verification != "auto":
        return verification
    return "block" if drafter.gives_probs and not tree else "coupled"


def _tokens(update: Update) -> int:
    return len(update.token_ids)
