"""What a training run does: one object, one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from .samples import SampleSettings
from .settings import TrainSettings


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
    """Training text made before, files or folders; without any it is made in ``out``."""
    start_from: Path | None = None
    """A drafter to go on from; its config is kept, but for the fields in ``drafter``, of which few can change."""
    fresh: bool = False
    """Start from random weights even where the target's layers could be copied."""
    cache: Path | None = None
    """Where to keep features, from the moment text is written; None runs the target in every epoch."""


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
