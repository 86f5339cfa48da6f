"""From a target to a trained drafter in a folder: text, features, training, figures. Every stage can be interrupted.

The folder holds ``samples.jsonl`` (text; where several processes write it, a file of each), ``training.pt`` (where
training is), and at the end ``config.json`` and ``model.safetensors`` (the drafter) and ``README.md`` (its model card).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..dspark import TargetAdapter
from ..errors import TrainingError
from ..llm import LLM
from ..provenance import provenance
from .feature_cache import CACHE_DTYPE, CachedFeatures, FeatureCache, cache_bytes, cached_layers
from .features import FeatureSource, LiveFeatures
from .kinds import build_kind
from .plan import TrainingPlan
from .students import Trainee
from .text import TextStage, TrainingText, Written
from .trainer import STATE_FILE, Measured, Report, Trainer
from .world import World
from .writer import KeptFeatures

CARD_FILE = "README.md"


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out."""

    folder: Path
    held_out: Measured | None
    num_samples: int
    """Conversations, those held out included."""
    num_tokens: int
    """Of all of them."""
    num_held: int
    """Conversations that were only measured on."""
    seconds: float


def _refuse_foreign(plan: TrainingPlan) -> None:
    """A folder with a model that this plan has not made is no place for its result.

    Raises:
        TrainingError: there is one.
    """
    is_ours = (plan.out / STATE_FILE).exists() or plan.out == plan.start_from
    if (plan.out / "config.json").exists() and not is_ours:
        raise TrainingError(
            f"{plan.out} holds a model that would be overwritten (a config.json, and no training to go on with)",
            "choose another --out folder, or move what is there",
        )


class TrainingRun:
    """Carries out a plan.

    Args:
        llm: the target, loaded without a drafter.
        plan: what to do.
        notify: told what begins.
        on_written: told about progress while text is made.
        on_featured: told (texts done, texts in all) while features are computed for the cache.
        on_report: told about progress in training.
    """

    def __init__(
        self,
        llm: LLM,
        plan: TrainingPlan,
        *,
        notify: Callable[[str], None] = lambda _message: None,
        on_written: Callable[[Written], None] = lambda _written: None,
        on_featured: Callable[[int, int], None] = lambda _done, _all: None,
        on_report: Callable[[Report], None] = lambda _report: None,
    ) -> None:
        self._llm, self._plan = llm, plan
        self._notify, self._on_report = notify, on_report
        self._on_featured = on_featured
        self._adapter = TargetAdapter(llm.model)
        self._kind = build_kind(plan.kind, self._adapter, llm.tokenizer)
        self._world = World.join(llm.model.device)
        self._text = TextStage(llm, plan, self._world, notify=notify, on_written=on_written)

    @property
    def is_first(self) -> bool:
        """True in the process that talks, and writes what one process writes."""
        return self._world.is_first

    def run(self) -> Trained:
        """All stages; those that are done already are passed over.

        Raises:
            TrainingError: the plan cannot work, or what the folder holds belongs to another one.
        """
        started = time.perf_counter()
        plan = self._plan
        _refuse_foreign(plan)
        start, config = self._start  # refused before hours of making text
        text, source = self._prepared()
        samples = text.samples
        model: Trainee = start or self._kind.new(
            config, samples, seed=plan.training.seed, fresh=plan.fresh, notify=self._notify
        )
        self._notify(self._kind.describe(model, samples))
        training = plan.training
        if training.short_blocks is None and start is not None:
            training = training.with_(short_blocks=0.0)
        trainer = Trainer(
            self._adapter, model, samples, source, training, plan.out, self._world, num_held=text.num_held
        )
        if trainer.resume():
            self._notify(f"going on from step {trainer.step} of {trainer.num_steps}")
        trainer.run(self._on_report)
        held_out = trainer.measure(limit=256) if trainer.held_out else None
        seconds = time.perf_counter() - started
        result = Trained(plan.out, held_out, len(samples), text.num_tokens, text.num_held, seconds)
        if self._world.is_first:
            self._export(self._with_context_bias(model, trainer), result, trainer.num_steps)
        self._world.wait()
        return result

    def prepare(self) -> TrainingText:
        """The first stages only: the training text, and with a cache its features; what is absent is made.

        Raises:
            TrainingError: as :meth:`run`.
        """
        return self._prepared()[0]

    def _prepared(self) -> tuple[TrainingText, FeatureSource]:
        if not self._plan.samples:
            self._text.make(self._kept_features)
        self._world.wait()
        text = self._text.read()
        return text, self._source(text)

    @functools.cached_property
    def _start(self) -> tuple[Trainee | None, Any]:
        """The drafter to go on from, if there is one, and the config of the drafter to train."""
        plan = self._plan
        if plan.start_from is None:
            return None, self._kind.design(plan.drafter)
        seed = plan.training.seed
        model: Trainee = self._kind.load(plan.start_from, plan.drafter, seed=seed, fresh=plan.fresh)
        return model, model.config

    # --- Features -----------------------------------------------------------------------------------------------------

    def _kept_features(self, most_tokens: int) -> KeptFeatures | None:
        """Where to keep features of text that is being made."""
        cache, layers = self._cache
        if cache is None:
            return None
        self._tell_size(most_tokens, layers, "at most ")
        return KeptFeatures(self._adapter, layers, cache)

    def _source(self, text: TrainingText) -> FeatureSource:
        cache, layers = self._cache
        if cache is None:
            return LiveFeatures(self._adapter, layers, text.samples)
        self._tell_size(text.num_tokens, layers)
        live = LiveFeatures(self._adapter, layers, text.samples, dtype=CACHE_DTYPE)
        source = CachedFeatures(cache, live, text.samples)
        if self._world.is_first:
            cache.refresh()  # others may have written text and features meanwhile
            source.build(self._on_featured)
        self._world.wait()
        cache.refresh()
        return source

    @functools.cached_property
    def _cache(self) -> tuple[FeatureCache | None, tuple[int, ...]]:
        """The cache, where one is wanted, and the layers tapped."""
        layers, folder = tuple(self._kind.layers(self._start[1])), self._plan.cache
        if folder is None:
            return None, layers
        layers = layers or cached_layers(folder)  # a cache with features serves who needs none, too
        return FeatureCache.of_target(folder, self._adapter, layers), layers

    def _tell_size(self, tokens: int, layers: Sequence[int], bound: str = "") -> None:
        size = cache_bytes(tokens, len(layers), self._adapter.hidden_size)
        self._notify(f"features of all text take {bound}{size / 1e9:.2f} GB in {self._plan.cache}")

    # --- Result -------------------------------------------------------------------------------------------------------

    def _with_context_bias(self, model: Trainee, trainer: Trainer) -> Trainee:
        """The drafter with what its request's own text adds, as held-out text says (:mod:`.context`)."""
        if trainer.held_out and model.config.context_bias:
            fitted = trainer.fit_context_bias()
            model.config = model.config.with_(context_bias=tuple(round(bias, 3) for bias in fitted))
        return model

    def _export(self, model: Trainee, result: Trained, steps: int) -> None:
        plan = self._plan
        details = {
            "trained": {
                "samples": result.num_samples,
                "tokens": result.num_tokens,
                "held_out_samples": result.num_held,
                "steps": steps,
                "start_from": None if plan.start_from is None else plan.start_from.name,
                "data": {**asdict(plan.data), "temperatures": list(plan.data.temperatures)},
                "settings": plan.training.to_dict(),
                "held_out": None if result.held_out is None else asdict(result.held_out),
                "provenance": dict(provenance(device=self._adapter.device, dtype=self._adapter.dtype)),
            }
        }
        self._kind.save(model, plan.out, details)
        card = self._kind.card(model.config, details["trained"])
        (plan.out / CARD_FILE).write_text(card, encoding="utf-8")
