"""What a training run must know of the kind of drafter it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..samples import Sample
from ..students import Trainee

Config = TypeVar("Config")
Model = TypeVar("Model", bound=Trainee)


class Kind(Protocol[Config, Model]):
    """**Protocol:** makes, reads, writes and describes the drafters of one kind for one target."""

    def design(self, changes: Mapping[str, Any]) -> Config:
        """The target's default drafter, with some fields set otherwise.

        Raises:
            InvalidSettingError: a field is unknown or cannot work.
        """
        ...

    def load(self, folder: Path, changes: Mapping[str, Any], *, seed: int, fresh: bool) -> Model:
        """A trained drafter to go on from, on the target's device, in float32.

        One without context biases gets those of a new drafter, unless the changes say otherwise.

        Args:
            folder: where it is.
            changes: fields of its config to set otherwise.
            seed: of weights that are new.
            fresh: use random ones even where the target's could be copied.

        Raises:
            CheckpointError: the folder holds none of this kind for this target.
            InvalidSettingError: a field of a trained drafter cannot change, or cannot have that value.
        """
        ...

    def new(
        self, config: Config, samples: Sequence[Sample], *, seed: int, fresh: bool, notify: Callable[[str], None]
    ) -> Model:
        """A drafter that has learned nothing yet.

        Args:
            config: its sizes.
            samples: the text whose frequent tokens it will be able to draft.
            seed: of its weights.
            fresh: use random weights even where the target's could be copied.
            notify: told what it starts from.
        """
        ...

    def layers(self, config: Config) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        ...

    def describe(self, model: Model, samples: Sequence[Sample]) -> str:
        """One line about its size and what it can draft."""
        ...

    def save(self, model: Model, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write it, and in its config what else is to be noted."""
        ...

    def card(self, config: Config, trained: Mapping[str, Any]) -> str:
        """Its model card, in Markdown."""
        ...
