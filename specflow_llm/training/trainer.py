"""The training loop: batches in, a better drafter out, resumable exactly.

Everything random is drawn from (seed, step, sample number), so a run that was killed and goes on from its last
checkpoint computes what it would have computed, and several processes draw what one would.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafters.context_bias import ContextBias
from ..dspark.adapter import TargetAdapter
from ..errors import TrainingError
from ..packing import supports_bfloat16
from .batches import Batch, epoch_order
from .context import ContextObservations
from .features import FeatureSource
from .objective import LossParts, LossWeights, chunked_loss, logit_pieces, reference_loss
from .samples import Sample, samples_digest
from .settings import TrainSettings
from .students import Trainee, build_student
from .world import World

STATE_FILE = "training.pt"
_MIX = 1_000_003


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over supervised slots."""

    loss: float
    ce: float
    kl: float
    tv: float
    """Total variation distance between draft and target law."""
    confidence: float
    accept: tuple[float, ...]
    """By slot: probability that the drafted token is accepted, given that those before it were."""
    match: tuple[float, ...]
    """By slot: how often draft and target agree on the most probable token."""
    sampled_length: float
    """Estimated emitted tokens per round at temperature 1, with drafts as long as the blocks measured."""
    greedy_length: float
    """The same at temperature 0."""


@dataclass(frozen=True, slots=True)
class Report:
    """Progress."""

    step: int
    num_steps: int
    rate: float
    tokens_per_second: float
    seconds_left: float
    recent: Measured


class Totals:
    """Sums over slots, from which means are taken."""

    def __init__(self, block: int, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._slots = torch.zeros(3, block, dtype=torch.float64, device=device)
        self._blocks = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, parts: LossParts, batch: Batch, weights: torch.Tensor) -> None:
        """Add one batch's parts; the batch's blocks are taken in order."""
        kept = batch.supervised.to(parts.accept.device)
        total = weights.sum().double()
        for place, part in enumerate((parts.ce, parts.kl, parts.tv, parts.confidence)):
            self._sums[place] += part.double()
        self._sums[4] += total
        accept = torch.zeros(kept.shape, dtype=torch.float64, device=kept.device)
        match = torch.zeros_like(accept)
        accept[kept], match[kept] = parts.accept.double(), parts.matches.double()
        size = kept.shape[-1]
        self._slots[0, :size] += accept.sum((0, 1))
        self._slots[1, :size] += match.sum((0, 1))
        self._slots[2, :size] += kept.sum((0, 1))
        whole = kept[..., -1]  # only blocks with all slots: a cut block would count as rejected
        self._blocks[0] += (1.0 + accept.cumprod(-1).sum(-1))[whole].sum()
        self._blocks[1] += (1.0 + match.cumprod(-1).sum(-1))[whole].sum()
        self._blocks[2] += whole.sum()

    def means(self, world: World, loss: LossWeights) -> Measured:
        """Means over all processes."""
        for tensor in (self._sums, self._slots, self._blocks):
            world.sum(tensor)
        ce, kl, tv, sure = (self._sums[:4] / self._sums[4].clamp(min=1e-9)).tolist()
        seen = max(1, int((self._slots[2] > 0.0).sum()))  # short blocks have no later slots
        accept, match = (self._slots[:2] / self._slots[2].clamp(min=1.0))[:, :seen].tolist()
        sampled, greedy = (self._blocks[:2] / self._blocks[2].clamp(min=1.0)).tolist()
        if not self._blocks[2]:  # blocks longer than any answer: what the slots say
            sampled, greedy = _length_of(accept), _length_of(match)
        return Measured(
            loss.ce * ce + loss.kl * kl + loss.tv * tv + loss.confidence * sure,
            ce, kl, 0.5 * tv, sure, tuple(accept), tuple(match), sampled, greedy,
        )  # fmt: skip


def _length_of(rates: Sequence[float]) -> float:
    """Tokens per round where each slot is accepted at its rate, whatever became of those before it."""
    return 1.0 + math.fsum(itertools.accumulate(rates, operator.mul))


class Trainer:
    """Trains one drafter.

    Args:
        adapter: the target.
        model: the drafter, on the target's device, in float32.
        samples: training text.
        source: features of ``samples`` by number.
        settings: how.
        folder: where checkpoints go.
        world: the processes that train together.
        num_held: samples at the end that are held out; None takes the share that ``settings`` says.

    Raises:
        TrainingError: there is nothing to learn from.
    """

    def __init__(
        self,
        adapter: TargetAdapter,
        model: Trainee,
        samples: Sequence[Sample],
        source: FeatureSource,
        settings: TrainSettings,
        folder: Path,
        world: World = World(),  # noqa: B008 - frozen
        *,
        num_held: int | None = None,
    ) -> None:
        self._adapter, self._model, self._samples, self._source = adapter, model, samples, source
        self._settings, self._folder, self._world = settings, folder, world
        self._student = build_student(adapter, model, settings)
        self._head = self._student.head
        held = round(len(samples) * settings.held_out) if num_held is None else num_held
        self._held = range(len(samples) - held, len(samples))
        self._train = range(len(samples) - held)
        if not self._train:
            raise TrainingError("there are no conversations to learn from", "make more samples, or hold out fewer")
        self.num_steps = max(1, round(settings.epochs * len(self._train) / settings.batch_size))
        self.step = 0
        self._optimizer = torch.optim.AdamW(
            _groups(model, settings), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self._precision = _precision(settings.precision, adapter.device)

    def run(
        self,
        on_report: Callable[[Report], None] = lambda _report: None,
        *,
        until: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Train from :attr:`step` to the end, or to step ``until``, writing checkpoints."""
        settings = self._settings
        last = self.num_steps if until is None else min(until, self.num_steps)
        totals = self._totals()
        begun, began_at, tokens = clock(), self.step, 0
        for numbers in self._batches(self.step, last):
            if settings.block(self.step, self.num_steps) != settings.block(self.step - 1, self.num_steps):
                totals = self._totals()  # figures of blocks of different sizes are not averaged
            tokens += sum(len(self._samples[number].token_ids) for number in numbers)
            self._learn(numbers, totals)
            self.step += 1
            if self.step % settings.report_steps == 0 or self.step == last:
                spent = max(clock() - begun, 1e-9)
                on_report(
                    Report(
                        self.step, self.num_steps, settings.rate(self.step - 1, self.num_steps), tokens / spent,
                        spent / (self.step - began_at) * (self.num_steps - self.step),
                        totals.means(self._world, settings.loss),
                    )
                )  # fmt: skip
                totals = self._totals()
            if self.step % settings.checkpoint_steps == 0 or self.step == last:
                self.save()

    def _totals(self) -> Totals:
        return Totals(self._student.num_slots, self._adapter.device)

    def _batches(self, first: int, last: int) -> Iterator[list[int]]:
        """Sample numbers of the steps ``first .. last - 1``."""
        settings, step, epoch = self._settings, 0, 0
        lengths = [len(self._samples[number].token_ids) for number in self._train]
        while step < last:
            order = epoch_order(len(self._train), settings.batch_size, lengths, settings.seed * _MIX + epoch)
            for numbers in order:
                if first <= step < last:
                    yield numbers
                step += 1
            epoch += 1

    def _learn(self, numbers: list[int], totals: Totals) -> None:
        settings, model = self._settings, self._model
        for group in self._optimizer.param_groups:
            group["lr"] = group["multiple"] * settings.rate(self.step, self.num_steps)
        model.train()
        self._optimizer.zero_grad(set_to_none=True)
        mine = self._world.share(numbers)
        weight = torch.zeros((), device=self._adapter.device)
        if mine:
            batch = self._batch(mine, self.step, settings.block(self.step, self.num_steps))
            found = self._source.of(batch.indices)  # the target keeps its own precision
            with torch.autocast(self._adapter.device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
                slots, teacher = self._student.forward(batch, found)
                parts = chunked_loss(slots, self._head, teacher, settings.loss, chunk=settings.loss_chunk)
            weight = slots.weights.sum()
            totals.add(parts, batch, slots.weights)
        total = self._world.sum(weight.clone()).clamp(min=1e-9)
        if mine:
            (parts.total / total).backward()
        self._world.sum_gradients(model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        if not bool(norm.isfinite()):  # one such step would make every weight NaN; the last checkpoint is still good
            raise TrainingError(
                f"the loss or its gradient is not a finite number at step {self.step}",
                "go on from the last checkpoint with a lower learning rate, or look for what is wrong with the samples "
                f"{numbers[:8]}...",
            )
        self._optimizer.step()

    def _batch(self, numbers: Sequence[int], step: int, block: int | None = None) -> Batch:
        settings = self._settings
        chosen = [(number, _cut(self._samples[number], settings.max_length)) for number in numbers]
        return self._student.batch(chosen, settings.seed * _MIX + step, block)

    @torch.no_grad()
    def measure(self, numbers: Sequence[int] | None = None, *, limit: int = 64) -> Measured:
        """Figures on held-out text (or on these samples); the draws are the same at every call.

        Raises:
            TrainingError: nothing was held out.
        """
        chosen = list(self._held if numbers is None else numbers)[:limit]
        if not chosen:
            raise TrainingError("no conversations were held out", "set held_out above 0")
        self._model.eval()
        totals = self._totals()
        for begin in range(0, len(chosen), self._settings.batch_size):
            mine = self._world.share(chosen[begin : begin + self._settings.batch_size])
            if mine:
                batch = self._batch(mine, -1)
                slots, teacher = self._student.forward(batch, self._source.of(batch.indices))
                parts = reference_loss(slots, self._head, teacher, self._settings.loss)
                totals.add(parts, batch, slots.weights)
        return totals.means(self._world, self._settings.loss)

    @torch.no_grad()
    def fit_context_bias(self, *, limit: int = 256) -> tuple[float, ...]:
        """What tokens that followed the last 1, 2, ... tokens before should gain, by held-out text (:mod:`.context`).

        As many orders as the drafter's config has biases, which are what is expected beforehand. The work of one
        process: nothing is exchanged.

        Raises:
            TrainingError: nothing was held out.
        """
        chosen, settings = list(self._held)[:limit], self._settings
        if not chosen:
            raise TrainingError("no conversations were held out", "set held_out above 0")
        self._model.eval()
        model, vocab_size = self._model, self._adapter.vocab_size
        seen = ContextObservations(ContextBias(model.config.context_bias, vocab_size=vocab_size, ids=model.draft_ids))
        size = max(1, settings.batch_size // self._world.size)
        for begin in range(0, len(chosen), size):
            batch = self._batch(chosen[begin : begin + size], -1)
            slots, _ = self._student.forward(batch, self._source.of(batch.indices))
            seen.add(batch, logit_pieces(slots, self._head, settings.loss_chunk), slots.labels)
        return seen.fit()

    @property
    def held_out(self) -> range:
        """Numbers of the samples kept for measuring."""
        return self._held

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _identity(self) -> dict[str, str]:
        """What a checkpoint must agree on for training to go on exactly; none of it changes while training goes on."""
        shape = self._model.config.to_dict()
        del shape["context_bias"]  # it takes no part in training, and is fitted when that ends
        return {
            "drafter": json.dumps(shape, sort_keys=True),
            "training": json.dumps(self._settings.to_dict(), sort_keys=True),
            "data": samples_digest(self._samples),
            "precision": self._precision,
        }

    def save(self) -> None:
        """Write a checkpoint; a crash at any moment leaves the one before it, or this one."""
        if not self._world.is_first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{STATE_FILE}.{os.getpid()}.tmp"
        state = {
            "identity": self._identity,
            "step": self.step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, unfinished)
        unfinished.replace(self._folder / STATE_FILE)

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; false when there is none.

        Raises:
            TrainingError: the checkpoint is of another drafter, other settings or other data.
        """
        path = self._folder / STATE_FILE
        if not path.exists():
            return False
        state = torch.load(path, map_location=self._adapter.device, weights_only=True)
        mine = self._identity
        differing = [name for name in mine if state["identity"].get(name) != mine[name]]
        if not _same_ids(state["model"].get("draft_ids"), self._model.draft_ids):
            differing.append("draft vocabulary")
        if differing:
            raise TrainingError(
                f"{path} was made with other {' and '.join(differing)}",
                "use another --out folder, or go on from its weights with --start-from",
            )
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        return True


def _groups(model: nn.Module, settings: TrainSettings) -> list[dict[str, Any]]:
    """What is learned at which multiple of the learning rate."""
    serial = {name: weight for name, weight in model.named_parameters() if name.startswith("markov_head.")}
    others = [weight for name, weight in model.named_parameters() if name not in serial]
    groups: list[dict[str, Any]] = [{"params": others, "multiple": 1.0}]
    if serial:
        groups.append({"params": list(serial.values()), "multiple": settings.markov_rate})
    return groups


def _precision(wanted: str, device: torch.device) -> str:
    if wanted == "auto":
        return "bfloat16" if supports_bfloat16(device) else "float32"
    return wanted


def _cut(sample: Sample, longest: int) -> Sample:
    if len(sample.token_ids) <= longest:
        return sample
    return Sample(sample.index, sample.token_ids[:longest], sample.num_prompt, sample.first_own, sample.temperature)


def _same_ids(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.to(other.device), other)
