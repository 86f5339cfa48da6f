"""What rounds cost here: seconds of executing and of drafting, per batch size and width, measured and kept.

A round is timed as the engine runs it: the forward, the verification and the commit, with drafts that nobody believes
in. Scheduling by cost (:class:`specflow.policies.CostScheduled`) and ``specflow-llm simulate`` rest on such a profile.
It is worth something only for the model, drafter, device, dtype and thread count it was measured with, so a saved one
says which these were, and :meth:`CostProfile.require` refuses it elsewhere.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specflow.admission import Frontier
from specflow.errors import InvalidSettingError
from specflow.policies import CostTable, RoundCosts
from specflow.protocols import Clock
from specflow.types import ChainView, PhaseSeconds, RoundReport

from .config import SamplingParams
from .drafters.base import Drafter, DrafterBase, DraftRequest, Proposal
from .engine import Engine, EngineConfig
from .errors import DataFileError
from .provenance import provenance
from .target import Target

FORMAT = "specflow-costs"
VERSION = 1

DEFAULT_BATCHES = (1, 2, 4, 8, 16)
IDENTITY = ("model", "drafter", "device", "dtype", "threads")
"""What a profile belongs to."""

_WARM_UP = 1
"""Rounds of each shape that are run before any is timed: the first is slow."""
_ENDLESS = 1_000_000
"""Tokens that a timed request may generate; it never gets there."""
_LEAST_REPEATS = 2
"""A shape seen once is provisional to :class:`~specflow.policies.CostTable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Timed rounds of one shape."""

    batch: int
    """Requests in the round."""
    draft: int
    """Drafted tokens per request: executed ones, or asked-for ones."""
    seconds: tuple[float, ...]
    """One entry per repetition, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Measured seconds of rounds, with where they come from."""

    provenance: Mapping[str, Any]
    """As :func:`specflow_llm.provenance.provenance` gives it, with ``model`` and ``drafter`` (a name, or None)."""
    padded: bool
    """True when the target pads every block to the longest of the round."""
    context: int
    """Tokens of each request's prompt while it was measured."""
    execute: tuple[Shape, ...]
    """Rounds without the drafting: admit, execute, verify and commit."""
    draft: tuple[Shape, ...]
    """Drafting alone; empty without a drafter."""

    def costs(self) -> RoundCosts:
        """The profile as policies want it: medians, not falling with the width."""
        return RoundCosts(
            _tables(self.execute, offset=1),
            _tables([shape for shape in self.draft if shape.draft], offset=0),
            padded=self.padded,
        )

    def require(self, identity: Mapping[str, Any], source: object = "cost profile") -> None:
        """Refuse to serve another model, drafter, device, dtype or thread count.

        Args:
            identity: what it would serve, as :func:`identity_of` gives it.
            source: the file it was read from, for the message.

        Raises:
            DataFileError: one of them differs.
        """
        for name, (theirs, ours) in differences(self.provenance, identity).items():
            raise DataFileError(
                source,
                f"it was measured with {name} {theirs!r}, this is {name} {ours!r}",
                "measure again: specflow-llm profile",
            )


def identity_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a provenance that costs belong to."""
    return {name: origin.get(name) for name in IDENTITY}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Entries of :data:`IDENTITY` that both say something about, and not the same."""
    return {
        name: (one[name], other[name])
        for name in IDENTITY
        if one.get(name) is not None and other.get(name) is not None and one[name] != other[name]
    }


def draft_lengths(max_draft: int) -> tuple[int, ...]:
    """Lengths worth timing: all up to 4, then in steps of about a half, and the longest."""
    lengths, step = [], 0
    while step < max_draft:
        lengths.append(step)
        step = step + 1 if step < 4 else step + step // 2
    return (*lengths, max_draft)


def profile_costs(  # noqa: PLR0913 - settings of one measurement, all but three by keyword
    target: Target,
    drafter: Drafter | None,
    max_draft: int,
    *,
    model: str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    batches: Sequence[int] = DEFAULT_BATCHES,
    context: int = 128,
    temperature: float = 0.0,
    repeats: int = 5,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    notify: Callable[[str], None] = lambda _message: None,
) -> CostProfile:
    """Time rounds of every batch size and draft length.

    Shapes take turns, so that a slow minute of the machine falls on all of them. Prompts are random tokens; what a
    forward costs does not depend on which. The target must have no slots open, and has none afterwards.

    Args:
        target: the target model.
        drafter: None measures execution alone.
        max_draft: longest draft.
        model: the target's name, for the record.
        dtype: of the target's weights, for the record.
        device: where it runs, for the record.
        batches: numbers of requests decoded together.
        context: tokens of each prompt; shortened where the model's context is short.
        temperature: of the requests: verification of sampled requests costs more.
        repeats: timed rounds of each shape; the median counts.
        seed: of the prompts.
        clock: seconds; replace it in tests.
        notify: told about each batch size.

    Raises:
        InvalidSettingError: a setting is out of its range.
    """
    if not max_draft >= 1:
        raise InvalidSettingError("max_draft", max_draft, "an integer >= 1")
    if not batches or any(batch < 1 for batch in batches):
        raise InvalidSettingError("batches", tuple(batches), "at least one number of requests >= 1")
    if repeats < _LEAST_REPEATS:
        raise InvalidSettingError("repeats", repeats, f"an integer >= {_LEAST_REPEATS}")
    lengths = draft_lengths(max_draft)
    longest = target.architecture.context_length
    if longest is not None:
        # Every round emits one token at least; what does not fit is started anew.
        context = min(context, longest - 2 * (max_draft + 1))
    if context < 1:
        raise InvalidSettingError("context", context, f"room for a prompt and drafts in a context of {longest}")
    rng = random.Random(seed)  # noqa: S311 - prompts and junk, no secrets
    runner = _Runner(target, context, temperature, repeats, rng, clock)
    junk = _Junk(target.architecture.vocab_size, rng)
    execute: list[Shape] = []
    draft: list[Shape] = []
    for batch in sorted(set(batches)):
        notify(f"timing rounds of {batch} request(s)")
        rounds = runner.run(junk, batch, lengths, admit=True)
        execute += [
            Shape(batch=batch, draft=length, seconds=tuple([_without_drafting(seconds) for seconds in found]))
            for length, found in rounds.items()
        ]
        if drafter is not None:
            rounds = runner.run(drafter, batch, lengths[1:], admit=False)
            draft += [
                Shape(batch=batch, draft=length, seconds=tuple([seconds.predict for seconds in found]))
                for length, found in rounds.items()
            ]
    return CostProfile(
        provenance={
            **provenance(device=device, dtype=dtype, seed=seed),
            "model": model,
            "drafter": None if drafter is None else drafter.name,
        },
        padded=target.architecture.pads_blocks,
        context=context,
        execute=tuple(execute),
        draft=tuple(draft),
    )


def measure_round_costs(
    target: Target,
    drafter: Drafter,
    max_draft: int,
    max_batch_size: int,
    *,
    notify: Callable[[str], None] = lambda _message: None,
) -> RoundCosts:
    """A short profile for use at once: three batch sizes at most, three rounds of each shape, prompts of 64 tokens."""
    batches = [batch for batch in (1, 4, 16) if batch <= max_batch_size]
    room = target.architecture.context_length
    if room is not None:
        max_draft = max(1, min(max_draft, room // 4))  # longer ones are extrapolated
    profile = profile_costs(target, drafter, max_draft, model="", batches=batches, context=64, repeats=3, notify=notify)
    return profile.costs()


def save_profile(profile: CostProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as one JSON object."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "version": VERSION, **asdict(profile)}
    target.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_profile(path: str | os.PathLike[str], *, require: Mapping[str, Any] | None = None) -> CostProfile:
    """Read a profile.

    Args:
        path: a file written by :func:`save_profile`.
        require: what it will serve (see :meth:`CostProfile.require`); None takes it as it is.

    Raises:
        DataFileError: it cannot be read, is something else, or was measured with something else.
    """
    source = Path(path)
    remedy = "give a file written by specflow-llm profile"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataFileError(source, f"it cannot be read ({error})", remedy) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise DataFileError(source, f"it is not a cost profile of version {VERSION}", remedy)
    try:
        profile = CostProfile(
            provenance=dict(data["provenance"]),
            padded=bool(data["padded"]),
            context=int(data["context"]),
            execute=tuple(map(_shape, data["execute"])),
            draft=tuple(map(_shape, data["draft"])),
        )
        profile.costs()
    except (KeyError, TypeError, ValueError) as error:
        raise DataFileError(source, f"its contents are damaged ({error!r})", remedy) from error
    if require is not None:
        profile.require(require, source)
    return profile


def _shape(data: Mapping[str, Any]) -> Shape:
    return Shape(
        batch=int(data["batch"]),
        draft=int(data["draft"]),
        seconds=tuple(float(value) for value in data["seconds"]),
    )


def _tables(shapes: Sequence[Shape], offset: int) -> dict[int, CostTable]:
    """One table per batch size, by draft length + ``offset``."""
    tables: dict[int, CostTable] = {}
    for shape in shapes:
        table = tables.setdefault(shape.batch, CostTable(window=max(9, len(shape.seconds))))
        for seconds in shape.seconds:
            table.observe(shape.draft + offset, seconds)
    return tables


def _without_drafting(seconds: PhaseSeconds) -> float:
    return seconds.total - seconds.predict


class _Runner:
    """Runs an engine through shapes and collects the seconds of their rounds."""

    def __init__(
        self, target: Target, context: int, temperature: float, repeats: int, rng: random.Random, clock: Clock
    ) -> None:
        self._target = target
        self._context = context
        self._temperature = temperature
        self._repeats = repeats
        self._rng = rng
        self._clock = clock

    def run(
        self, drafter: Drafter, batch: int, lengths: Sequence[int], *, admit: bool
    ) -> Mapping[int, Sequence[PhaseSeconds]]:
        """Seconds of ``repeats`` rounds by draft length.

        Args:
            drafter: drafts.
            batch: requests in each round.
            lengths: draft lengths asked for.
            admit: execute what is drafted.
        """
        script = _Script(admit=admit)
        engine = Engine(
            self._target,
            drafter,
            script,
            EngineConfig(max_batch_size=batch),
            observers=[script],
            clock=self._clock,
        )
        found: dict[int, list[PhaseSeconds]] = {length: [] for length in lengths}
        try:
            for repeat in range(_WARM_UP + self._repeats):
                for length in lengths:
                    self._fill(engine, script, batch, length)
                    script.length = length
                    engine.step()
                    if repeat >= _WARM_UP:
                        found[length].append(script.seconds)
        finally:
            for row in list(engine.backend.rows):
                engine.withdraw(row.row_id)
        return found

    def _fill(self, engine: Engine, script: _Script, batch: int, length: int) -> None:
        """Replace requests without room for such a draft, and let the drafter see the new ones' prompts."""
        for row in list(engine.backend.rows):
            if row.max_output - row.num_output - 1 < max(length, 1):
                engine.withdraw(row.row_id)
        missing = batch - engine.num_unfinished
        for _ in range(missing):
            prompt = [self._rng.randrange(self._target.architecture.vocab_size) for _ in range(self._context)]
            engine.submit(
                prompt, SamplingParams(max_tokens=_ENDLESS, temperature=self._temperature, ignore_eos=True, seed=0)
            )
        if missing:
            script.length = min(length, 1)
            engine.step()


class _Script:
    """A policy that drafts as told, and the observer of its rounds."""

    def __init__(self, *, admit: bool) -> None:
        self.length = 0
        self.seconds = PhaseSeconds()
        self._admit = admit

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """As told."""
        return [self.length] * len(chains)

    def admit(self, frontier: Frontier) -> None:
        """All or nothing."""
        if self._admit:
            frontier.admit_all()

    def observe(self, report: RoundReport) -> None:
        """Learns nothing."""

    def on_round(self, report: RoundReport) -> None:
        """Keep the seconds."""
        self.seconds = report.seconds


class _Junk(DrafterBase):
    """Proposes random tokens: as many as asked for, and nearly always wrong."""

    def __init__(self, vocab_size: int, rng: random.Random) -> None:
        self._vocab_size = vocab_size
        self._rng = rng

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """See :class:`~specflow_llm.drafters.base.Drafter`."""
        return [Proposal([self._rng.randrange(self._vocab_size) for _ in range(request.limit)]) for request in requests]
