"""How a drafter is trained: one frozen object, one file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError

from ..errors import TrainingError
from .objective import LossWeights

PRECISIONS = ("auto", "float32", "bfloat16")
SHORT_BLOCK = 4
_SHORT_FRACTION = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Optimisation; the defaults are DSpark's (arXiv:2607.05147, section 4.1) where they fit one small machine.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    epochs: float = 4.0
    """Passes over the data."""
    batch_size: int = 16
    """Sequences per step, over all processes."""
    num_anchors: int = 64
    """Blocks per sequence and step; other ones in every epoch."""
    short_blocks: float | None = None
    """Fraction of the steps, the first ones, in which blocks have at most :data:`SHORT_BLOCK` slots: they cost less,
    all slots share the same weights, and late slots are seldom reached before the early ones are good. None is 0.75, or
    0 for a drafter that has been trained already."""
    learning_rate: float = 6e-4
    markov_rate: float = 4.0
    """Learning rate of the Markov head, as a multiple. It is all that tells later slots what was drafted before them,
    and starts from nothing where the layers start from the target's."""
    warmup: float = 0.04
    """Fraction of the steps in which the rate rises; it falls along a cosine to ``final_rate`` afterwards."""
    final_rate: float = 0.0
    """Fraction of the learning rate at the end."""
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: LossWeights = field(default_factory=LossWeights)
    loss_chunk: int = 512
    """Slots whose logits exist at the same time."""
    precision: str = "auto"
    """What matrices are multiplied in while learning: one of :data:`PRECISIONS`. Weights, norms, softmax and optimiser
    stay in float32, and so does everything measured. ``"auto"`` is bfloat16 where the device multiplies it in
    hardware."""
    max_length: int = 1024
    """Longer conversations are cut."""
    held_out: float = 0.05
    """Fraction of the conversations kept for measuring."""
    checkpoint_steps: int = 100
    """Steps between checkpoints."""
    report_steps: int = 10
    seed: int = 42

    def __post_init__(self) -> None:
        """Validate every field."""
        self._check_types()
        counts = ("batch_size", "num_anchors", "loss_chunk", "checkpoint_steps", "report_steps")
        for name, least in (*((name, 1) for name in counts), ("seed", 0), ("max_length", 8)):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise InvalidSettingError(name, value, f"an integer >= {least}")
        for name in ("epochs", "learning_rate", "markov_rate", "grad_clip"):
            if not getattr(self, name) > 0.0:
                raise InvalidSettingError(name, getattr(self, name), "a number > 0")
        for name in ("warmup", "final_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidSettingError(name, getattr(self, name), "a fraction in [0, 1]")
        for name, fits, wanted in (
            ("short_blocks", 0.0 <= (self.short_blocks or 0.0) <= 1.0, "None or a fraction in [0, 1]"),
            ("held_out", 0.0 <= self.held_out < 1.0, "a fraction in [0, 1)"),
            ("weight_decay", self.weight_decay >= 0.0, "a number >= 0"),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        ):
            if not fits:
                raise InvalidSettingError(name, getattr(self, name), wanted)

    def _check_types(self) -> None:
        for name in (entry.name for entry in fields(self) if entry.name not in ("loss", "precision")):
            value = getattr(self, name)
            if name == "short_blocks" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidSettingError(name, value, "a finite number")
        if not isinstance(self.loss, LossWeights):
            raise InvalidSettingError("loss", self.loss, "weights by term, for example {'ce': 0.1}")
        if not (self.loss.ce or self.loss.kl or self.loss.tv):
            raise InvalidSettingError("loss", self.loss, "a weight above 0 for 'ce', 'kl' or 'tv', to learn from")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Read :meth:`to_dict` back; absent fields have their defaults.

        Raises:
            InvalidSettingError: a field is unknown, or has a value that cannot work.
        """
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidSettingError("training settings", unknown, f"no fields but {', '.join(sorted(known))}")
        given = dict(values)
        if isinstance(given.get("loss"), Mapping):
            terms = {entry.name for entry in fields(LossWeights)}
            unknown = sorted(set(given["loss"]) - terms)
            if unknown:
                raise InvalidSettingError("loss", unknown, f"no terms but {', '.join(sorted(terms))}")
            given["loss"] = LossWeights(**given["loss"])
        return cls(**given)

    def with_(self, **changes: Any) -> TrainSettings:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def block(self, step: int, num_steps: int) -> int | None:
        """Most slots of a block in a step, from 0; None for all of the drafter's."""
        fraction = _SHORT_FRACTION if self.short_blocks is None else self.short_blocks
        return SHORT_BLOCK if step < fraction * num_steps else None

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, from 0: linear warm-up, then a cosine (Loshchilov and Hutter 2017)."""
        rising = max(1, round(self.warmup * num_steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, num_steps - rising)
        return self.learning_rate * (
            self.final_rate + (1.0 - self.final_rate) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        )


def read_settings(path: Path) -> Mapping[str, Any]:
    """A settings file: JSON with the sections ``data``, ``drafter`` and ``training``, each optional.

    Raises:
        TrainingError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read ({error})", "give a JSON file") from error
    wanted = {"data", "drafter", "training"}
    if not isinstance(found, dict) or set(found) - wanted or not all(isinstance(part, dict) for part in found.values()):
        raise TrainingError(
            f"{path} does not hold training settings",
            "give an object with the objects 'data', 'drafter' and 'training'",
        )
    return found
