"""From a target to a trained drafter in a folder: text, features, training, figures. Every stage can be interrupted.

The folder holds ``samples.jsonl`` (text; where several processes write it, a file of each), ``training.pt`` (where
training is), and at the end ``config.json`` and ``model.safetensors`` (the drafter) and ``README.md`` (its model card).
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..dspark import TargetAdapter
from ..errors import TrainingError
from ..llm import LLM
from ..provenance import provenance
from .feature_cache import CACHE_DTYPE, CachedFeatures, FeatureCache, cache_bytes, cached_layers
from .features import FeatureSource, LiveFeatures
from .kinds import build_kind
from .samples import OPENERS, Sample, SampleSettings, read_samples, tried_indices
from .settings import TrainSettings
from .students import Trainee
from .trainer import Measured, Report, Trainer
from .world import World
from .writer import KeptFeatures, SampleMaker

SAMPLES_FILE = "samples.jsonl"
CARD_FILE = "README.md"
_LEAST_ANSWER = 14  # conversations in which less is to be learned are left out, as DeepSpec does


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train, from what, and where to put it."""

    out: Path
    kind: str = "dspark"
    """One of :data:`.kinds.KINDS`."""
    data: SampleSettings = field(default_factory=SampleSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the drafter's config (:class:`~specflow_llm.dspark.DSparkConfig`,
    :class:`~specflow_llm.drafters.ConvConfig`) to set otherwise than the kind's ``design`` does."""
    prompts: Path | None = None
    """JSON lines with ``prompt`` or ``turns``; None has the target ask itself."""
    samples: Sequence[Path] = ()
    """Files of training text made before; without them it is made in ``out``."""
    start_from: Path | None = None
    """A drafter to go on from; its config is kept, but for the fields in ``drafter``, of which few can change."""
    fresh: bool = False
    """Start from random weights even where the target's layers could be copied."""
    cache: Path | None = None
    """Where to keep features, from the moment text is written; None runs the target in every epoch."""


@dataclass(frozen=True, slots=True)
class Written:
    """Progress in making text."""

    made: int
    """Conversations there are."""
    tried: int
    """With those that came to nothing."""
    wanted: int
    tokens_per_second: float
    """Written or read since this process began, by this process."""
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out."""

    folder: Path
    held_out: Measured | None
    num_samples: int
    num_tokens: int
    seconds: float


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
        self._on_written, self._on_featured = on_written, on_featured
        self._adapter = TargetAdapter(llm.model)
        self._kind = build_kind(plan.kind, self._adapter, llm.tokenizer)
        self._world = World.join(llm.model.device)

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and talks."""
        return self._world.is_first

    def run(self) -> Trained:
        """All stages; those that are done already are passed over.

        Raises:
            TrainingError: the plan cannot work, or what the folder holds belongs to another one.
        """
        started = time.perf_counter()
        plan = self._plan
        start, config = self._start  # refused before hours of making text
        samples, source = self._prepared()
        model: Trainee = start or self._kind.new(
            config, samples, seed=plan.training.seed, fresh=plan.fresh, notify=self._notify
        )
        self._notify(self._kind.describe(model, samples))
        training = plan.training
        if training.short_blocks is None and start is not None:
            training = training.with_(short_blocks=0.0)
        trainer = Trainer(self._adapter, model, samples, source, training, plan.out, self._world)
        if trainer.resume():
            self._notify(f"going on from step {trainer.step} of {trainer.num_steps}")
        trainer.run(self._on_report)
        held_out = trainer.measure(limit=256) if trainer.held_out else None
        tokens = sum(len(sample.token_ids) for sample in samples)
        result = Trained(plan.out, held_out, len(samples), tokens, time.perf_counter() - started)
        if self._world.is_first:
            self._export(model, result, trainer.num_steps)
        self._world.wait()
        return result

    def prepare(self) -> list[Sample]:
        """The first stages only: the training text, and with a cache its features; what is absent is made.

        Raises:
            TrainingError: as :meth:`run`.
        """
        return self._prepared()[0]

    def _prepared(self) -> tuple[list[Sample], FeatureSource]:
        samples = self.samples()
        return samples, self._source(samples)

    @functools.cached_property
    def _start(self) -> tuple[Trainee | None, Any]:
        """The drafter to go on from, if there is one, and the config of the drafter to train."""
        plan = self._plan
        if plan.start_from is None:
            return None, self._kind.design(plan.drafter)
        seed = plan.training.seed
        model: Trainee = self._kind.load(plan.start_from, plan.drafter, seed=seed, fresh=plan.fresh)
        return model, model.config

    # --- Text ---------------------------------------------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """The training text; what is absent is made first.

        Raises:
            TrainingError: prompts or text cannot be read, or nothing is left to learn from.
        """
        plan = self._plan
        if not plan.samples:
            self._make()
        self._world.wait()
        if plan.samples:
            found = _interleaved([self._read(path) for path in plan.samples])
        else:
            by_index = {sample.index: sample for path in self._parts() for sample in self._read(path)}
            found = [by_index[index] for index in sorted(by_index)]
        usable = [sample for sample in found if len(sample.token_ids) - sample.first_own >= _LEAST_ANSWER]
        if not usable:
            names = ", ".join(map(str, plan.samples or [plan.out]))
            raise TrainingError(f"{names} holds no conversation long enough to learn from", "make more samples")
        return usable

    def _parts(self) -> Sequence[Path]:
        """The files of text in ``out``: one of each process that ever wrote there."""
        return sorted(self._plan.out.glob(f"{Path(SAMPLES_FILE).stem}*.jsonl"))

    def _read(self, path: Path) -> list[Sample]:
        found = read_samples(path)
        if any(max(sample.token_ids) >= self._adapter.vocab_size for sample in found):
            raise TrainingError(f"{path} holds token ids that this target does not know", "make the text anew")
        return found

    def _make(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Make this process's part of what is absent."""
        plan, world = self._plan, self._world
        prompts = None if plan.prompts is None else self._read_prompts(plan.prompts)
        wanted = plan.data.num_samples if prompts is None else min(plan.data.num_samples, len(prompts))
        if world.is_first:
            self._check_recipe(prompts)
        world.wait()
        mine = set(range(world.rank, wanted, world.size))
        elsewhere = {index for part in self._parts() for index in tried_indices(part)}
        tried = before = len(mine & elsewhere)
        made = len(mine & {sample.index for part in self._parts() for sample in read_samples(part)})
        if tried == len(mine):
            return
        features = self._kept_features(wanted)
        maker = SampleMaker(self._llm, plan.data, prompts=prompts, features=features, part=(world.rank, world.size))
        self._notify(f"making training text: {made} of {len(mine)} conversations are there")
        begun, tokens = clock(), 0

        def note(_index: int, length: int) -> None:
            nonlocal tokens, tried
            tokens, tried = tokens + length, tried + 1

        path = plan.out / (SAMPLES_FILE if world.is_first else f"{Path(SAMPLES_FILE).stem}-{world.rank}.jsonl")
        for _sample in maker.run(path, elsewhere=elsewhere, on_tried=note):
            made += 1
            spent = max(clock() - begun, 1e-9)
            left = spent / (tried - before) * (len(mine) - tried)
            self._on_written(Written(made, tried, len(mine), tokens / spent, left))

    def _check_recipe(self, prompts: Sequence[Sequence[int]] | None) -> None:
        """Text of two recipes must not end up in one file."""
        plan = self._plan
        recipe = {
            "target": self._adapter.name,
            "vocab_size": self._adapter.vocab_size,
            "prompts": None if prompts is None else hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "openers": hashlib.sha256("\0".join(OPENERS).encode()).hexdigest() if prompts is None else None,
            **{name: value for name, value in asdict(plan.data).items() if name != "num_samples"},
            "temperatures": list(plan.data.temperatures),
        }
        path = plan.out / "samples.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(name for name in recipe if found.get(name) != recipe[name])
            if differing:
                raise TrainingError(
                    f"the text in {plan.out} was made with other {', '.join(differing)}",
                    "use another --out folder, or the settings it was made with",
                )
            return
        plan.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")

    def _read_prompts(self, path: Path) -> list[list[int]]:
        prompts: list[list[int]] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{path} cannot be read ({error})", "give a UTF-8 file with JSON lines") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise TrainingError(
                    f"line {number} of {path} has no prompt ({error})", 'write {"prompt": "..."} on every line'
                ) from error
            chat = getattr(self._llm.tokenizer, "chat_template", None)
            prompts.append(self._llm.encode([{"role": "user", "content": text}] if chat else text, number))
        if not prompts:
            raise TrainingError(f"{path} holds no prompts", 'write {"prompt": "..."} on every line')
        return prompts

    # --- Features -----------------------------------------------------------------------------------------------------

    def _kept_features(self, wanted: int) -> KeptFeatures | None:
        """Where to keep features of text that is being made."""
        cache, layers = self._cache()
        if cache is None:
            return None
        data = self._plan.data
        self._tell_size(wanted * (data.max_prompt_tokens + data.max_answer_tokens), layers, "at most ")
        return KeptFeatures(self._adapter, layers, cache)

    def _source(self, samples: Sequence[Sample]) -> FeatureSource:
        cache, layers = self._cache()
        if cache is None:
            return LiveFeatures(self._adapter, layers, samples)
        self._tell_size(sum(len(sample.token_ids) for sample in samples), layers)
        source = CachedFeatures(cache, LiveFeatures(self._adapter, layers, samples, dtype=CACHE_DTYPE), samples)
        if self._world.is_first:
            source.build(self._on_featured)
        self._world.wait()
        cache.refresh()
        return source

    def _cache(self) -> tuple[FeatureCache | None, tuple[int, ...]]:
        """The cache, where one is wanted, and the layers tapped."""
        layers, folder = tuple(self._kind.layers(self._start[1])), self._plan.cache
        if folder is None:
            return None, layers
        layers = layers or cached_layers(folder)  # a cache with features serves who needs none, too
        identity = {"target": self._adapter.name, "dtype": str(self._adapter.dtype), "layers": list(layers)}
        return FeatureCache(folder, identity), layers

    def _tell_size(self, tokens: int, layers: Sequence[int], bound: str = "") -> None:
        size = cache_bytes(tokens, len(layers), self._adapter.hidden_size)
        self._notify(f"features of all text take {bound}{size / 1e9:.2f} GB in {self._plan.cache}")

    # --- Result -------------------------------------------------------------------------------------------------------

    def _export(self, model: Trainee, result: Trained, steps: int) -> None:
        plan = self._plan
        details = {
            "trained": {
                "samples": result.num_samples,
                "tokens": result.num_tokens,
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


def _interleaved(files: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Conversations of several files, in the order of how far into its file each stands.

    So any share at the end, which is held out, holds that share of every file, and a file's own part of it is the same
    with other files beside it: going on with more text does not train on what was held out before.
    """
    placed = [
        ((place + 0.5) / len(file), number, sample)
        for number, file in enumerate(files)
        for place, sample in enumerate(file)
    ]
    return [sample for _share, _number, sample in sorted(placed, key=lambda entry: entry[:2])]


def plan_from_file(values: Mapping[str, Any], plan: TrainingPlan) -> TrainingPlan:
    """A plan with the sections of a settings file put in.

    Raises:
        InvalidSettingError: a setting is unknown, or cannot work.
    """
    try:
        data = SampleSettings(**dict(values.get("data", {})))
    except TypeError as error:
        raise InvalidSettingError("data", values.get("data"), f"fields of SampleSettings ({error})") from error
    training = TrainSettings.from_dict(values.get("training", {}))
    return TrainingPlan(**{**plan.__dict__, "data": data, "training": training, "drafter": values.get("drafter", {})})


__all__ = ["Trained", "TrainingPlan", "TrainingRun", "Written", "plan_from_file"]
