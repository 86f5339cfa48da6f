"""A training run of seconds: a tiny target, text that it wrote, and a drafter that can learn from it.

Also a program, for tests that need processes of their own::

    python -m tests.specflow_llm.small_training alone FOLDER     train, and say when a checkpoint is written
    python -m tests.specflow_llm.small_training together FOLDER  train in two processes that share every batch
    python -m tests.specflow_llm.small_training text FOLDER      make text and its features in two processes
    python -m tests.specflow_llm.small_training write FOLDER     make text and its features, and say so line by line
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from specflow_llm.dspark import DSparkModel, TargetAdapter
from specflow_llm.training.design import new_drafter
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.run import TrainingRun
from specflow_llm.training.samples import Sample
from specflow_llm.training.settings import TrainSettings
from specflow_llm.training.trainer import Trainer
from specflow_llm.training.world import World
from tests.specflow_llm.block_drafters import config, target
from tests.specflow_llm.chat import SETTINGS as SELF_ASKED
from tests.specflow_llm.chat import llm

SETTINGS = TrainSettings(  # float32: what is compared must not depend on the machine
    epochs=4,
    batch_size=8,
    num_anchors=16,
    learning_rate=3e-3,
    held_out=0.2,
    checkpoint_steps=3,
    report_steps=4,
    precision="float32",
)
TOGETHER = {7: 6, 1: 2}
"""Steps that two processes train together, by batch size. Not many: Adam makes rounding grow."""


@functools.cache
def adapter() -> TargetAdapter:
    """A tiny target that can be learned from little text: its next token depends on the last one most of all."""
    model = copy.deepcopy(target())
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.3)
        model.lm_head.weight.mul_(3.0)
    return TargetAdapter(model)


@functools.cache
def texts(count: int = 60, length: int = 40) -> tuple[Sample, ...]:
    """Text that the target wrote, one half greedily and one half at temperature 1, of different lengths."""
    model, generator = adapter().model, torch.Generator().manual_seed(1)
    ids = torch.randint(63, (count, 3), generator=generator)
    greedy = torch.arange(count) % 2 == 0
    with torch.inference_mode():
        while ids.shape[1] < length:
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            drawn = logits.softmax(-1).multinomial(1, generator=generator)
            ids = torch.cat([ids, torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)], dim=1)
    return tuple(
        Sample(index, tuple(row[: length - index % 7]), 3, 3, float(index % 2))
        for index, row in enumerate(ids.tolist())
    )


def fresh_model(**changes: Any) -> DSparkModel:
    """The same new drafter at every call."""
    return new_drafter(config(**changes), texts(), adapter(), 0)


def trainer(
    folder: Path,
    *,
    settings: TrainSettings = SETTINGS,
    samples: tuple[Sample, ...] | None = None,
    world: World | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of a new drafter."""
    chosen = texts() if samples is None else samples
    model = fresh_model(**changes)
    source = LiveFeatures(adapter(), model.config.target_layer_ids, chosen)
    return Trainer(adapter(), model, chosen, source, settings, folder, world or World())


def _alone(folder: Path) -> None:
    run = trainer(folder)
    while run.step < run.num_steps:
        run.run(until=run.step + SETTINGS.checkpoint_steps)
        print(f"saved {run.step}", flush=True)  # noqa: T201 - the parent waits for it


def _two() -> None:
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["RANK"] = "0" if os.fork() else "1"


def writing(folder: Path) -> TrainingRun:
    """A run that makes text and features, and says what it does."""
    data = dataclasses.replace(SELF_ASKED, opened_fraction=0.0)
    drafter = {"num_features": 2, "num_layers": 1}
    plan = TrainingPlan(out=folder, data=data, drafter=drafter, cache=folder / "cache")
    return TrainingRun(
        llm(),
        plan,
        on_written=lambda written: print(f"tried: {written.tried}", flush=True),  # noqa: T201 - the parent waits for it
        on_featured=lambda done, _all: print(f"features: {done}", flush=True),  # noqa: T201
    )


def _write(folder: Path) -> None:
    writing(folder).prepare()


def _text(folder: Path) -> None:
    _two()
    writing(folder).prepare()
    world = World.join(torch.device("cpu"))
    world.wait()
    world.leave()
    if world.is_first:
        os.wait()


def _together(folder: Path) -> None:
    _two()
    world = World.join(torch.device("cpu"))
    for size, steps in TOGETHER.items():
        run = trainer(folder, settings=SETTINGS.with_(batch_size=size), world=world)
        run.run(until=steps)
        measured = run.measure()
        found = {"model": run._model.state_dict(), "accept": measured.accept, "loss": measured.loss}
        torch.save(found, folder / f"{size}-{world.rank}.pt")
    world.wait()
    world.leave()
    if world.is_first:
        os.wait()


if __name__ == "__main__":
    {"alone": _alone, "together": _together, "text": _text, "write": _write}[sys.argv[1]](Path(sys.argv[2]))
