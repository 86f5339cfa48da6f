"""The calibration of a drafter: scales by regime, stored as ``calibration.json`` beside its weights.

Confidences learned at one sampling temperature are systematically off at another, on other text, or for other weights.
So a table says what it was fitted on, belongs to one checkpoint, and is applied to the matching kind of request only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from specflow.errors import InvalidSettingError

from ..errors import CheckpointError
from .fitting import Method, check_method
from .scaling import Scale

FILE_NAME = "calibration.json"
FORMAT = "specflow-calibration"
VERSION = 3
"""3 corrects confidences that pool the head's logit with the likeliest token's; 2 and 1 corrected the head alone."""

_GREEDY_BELOW = 1e-5  # as SamplingParams has it
_WHOLE = 256 * 2**20
"""Files up to this many bytes are hashed whole."""
_PIECE = 2**20
_PIECES = 64
_TRAINING_STATE = "training.pt"
"""Where training goes on from: optimiser and all; not weights that are drafted with."""
_REMEDY = "run `specflow-llm calibrate` for this checkpoint, or delete the file to use raw confidences"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """What a calibration was fitted on, and so what it is good for."""

    target: str
    """Name of the target model."""
    temperature: float
    """Of the requests; 0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: str = "auto"
    """Acceptance rule of sampled requests: block verification accepts longer prefixes than the token rule."""
    data: str
    """Name of the prompts."""
    data_sha256: str | None = None
    """Of the prompts' file."""
    requests: int
    """Requests in fit and test together."""
    rounds: int
    """Rounds in fit and test together."""

    @property
    def is_greedy(self) -> bool:
        """True for temperature 0."""
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationEntry:
    """Scales for one regime, and what they changed on requests that were not fitted on."""

    method: Method
    """How they were fitted: ``"temperature"`` leaves all shifts at 0."""
    scales: tuple[Scale, ...]
    """One per position."""
    fitted: tuple[bool, ...]
    """False where the data said too little: such a position has temperature 1 and shift 0."""
    regime: Regime
    counts: tuple[int, ...]
    """Known outcomes per position in the held-out part."""
    ece_before: tuple[float, ...]
    """Calibration error of the raw survival estimates, per position, held out."""
    ece_after: tuple[float, ...]
    """The same with the scales."""
    ece_noise: tuple[float, ...]
    """What perfect estimates would show in as many observations."""

    def __post_init__(self) -> None:
        """Validate every field."""
        for field in fields(self):
            if field.name not in {"method", "regime"}:
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        size = len(self.scales)
        check_method(self.method)
        if not size:
            raise InvalidSettingError("scales", self.scales, "one per position")
        if self.method == "temperature" and any(scale.shift for scale in self.scales):
            raise InvalidSettingError("scales", self.scales, "no shifts: temperatures alone were fitted")
        for name in ("fitted", "counts", "ece_before", "ece_after", "ece_noise"):
            if len(getattr(self, name)) != size:
                raise InvalidSettingError(name, getattr(self, name), f"one value for each of {size} scales")

    @property
    def is_identity(self) -> bool:
        """True when applying it changes nothing."""
        return all(scale.is_identity for scale in self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTable:
    """All calibrations of one checkpoint: at most one for greedy requests and one for sampled ones."""

    drafter: str
    """Fingerprint of the checkpoint, see :func:`fingerprint`."""
    entries: tuple[CalibrationEntry, ...] = ()

    def entry_for(self, *, is_greedy: bool) -> CalibrationEntry | None:
        """The calibration for greedy or for sampled requests; None where there is none."""
        return next((entry for entry in self.entries if entry.regime.is_greedy == is_greedy), None)

    def scales_for(self, is_greedy: bool) -> tuple[Scale, ...] | None:  # noqa: FBT001 - a fact about the request
        """What corrects the logits, position by position; None means that they stay raw."""
        entry = self.entry_for(is_greedy=is_greedy)
        return None if entry is None else entry.scales

    @property
    def is_identity(self) -> bool:
        """True when applying it changes nothing, for any request."""
        return all(entry.is_identity for entry in self.entries)

    def with_entry(self, entry: CalibrationEntry) -> CalibrationTable:
        """This table with a calibration in place of the one for the same kind of request."""
        others = [other for other in self.entries if other.regime.is_greedy != entry.regime.is_greedy]
        return replace(self, entries=tuple(sorted([*others, entry], key=lambda item: item.regime.temperature)))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write it beside the weights, whole or not at all.

        Returns:
            The file's path.
        """
        path = Path(folder) / FILE_NAME
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, allow_nan=False)
        try:
            partial.write_text(f"{text}\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, num_positions: int | None = None) -> Self | None:
        """Read the table that lies beside a checkpoint.

        Args:
            folder: the checkpoint.
            num_positions: tokens the drafter drafts at once; None does not check.

        Returns:
            None where the checkpoint has no calibration.

        Raises:
            CheckpointError: it belongs to other weights, has another number of positions, or cannot be read.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            return None
        table = cls._read(path)
        found = fingerprint(folder)
        if table.drafter != found:
            raise CheckpointError(
                path, f"it was fitted to other weights (fingerprint {table.drafter[:12]}, here {found[:12]})", _REMEDY
            )
        for entry in table.entries:
            if num_positions is not None and len(entry.scales) != num_positions:
                raise CheckpointError(
                    path,
                    f"it has scales for {len(entry.scales)} positions, the drafter has {num_positions}",
                    _REMEDY,
                )
        return table

    @classmethod
    def clear_stale(cls, folder: str | os.PathLike[str]) -> Path | None:
        """Move a table out of the way that this checkpoint refuses: a drafter with such a table cannot be loaded.

        Returns:
            Where it is now; None where there was none, or a good one.
        """
        try:
            cls.load(folder)
        except CheckpointError:
            path = Path(folder) / FILE_NAME
            return path.replace(path.with_name(f"{FILE_NAME}.stale"))
        return None

    @classmethod
    def _read(cls, path: Path) -> Self:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise CheckpointError(path, f"it is not of format {FORMAT!r}", _REMEDY)
            version = data.get("version")
            if version != VERSION:
                raise CheckpointError(path, f"it has version {version!r}, this program reads {VERSION}", _REMEDY)
            return cls(drafter=str(data["drafter"]), entries=tuple(map(_entry, data["entries"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(path, f"it cannot be read ({type(error).__name__}: {error})", _REMEDY) from error


@runtime_checkable
class CalibratedDrafter(Protocol):
    """**Protocol:** a drafter whose confidences a table can correct."""

    @property
    def num_positions(self) -> int:
        """Most tokens it drafts at once; a table has as many scales."""
        ...

    @property
    def calibration(self) -> CalibrationTable | None:
        """The table in use; None for raw confidences."""
        ...

    def use_calibration(self, table: CalibrationTable | None) -> None:
        """Correct confidences by this table from now on; None goes back to raw ones."""
        ...


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """What tells one checkpoint's weights and configuration from another's: a SHA-256 in hexadecimal.

    How a drafter was trained is not part of its configuration, and the state that training goes on from not of its
    weights: writing the same drafter again changes nothing.

    Files are hashed whole up to 256 MiB; of larger ones their size and 64 pieces of 1 MiB. That tells retrained
    weights apart, in a second; it is no protection against somebody who wants to deceive.

    Args:
        folder: a folder that holds ``config.json`` and weights, or one file.

    Raises:
        CheckpointError: there are no weights.
    """
    place = Path(folder)
    files = [place] if place.is_file() else _weights(place)
    if not files:
        raise CheckpointError(place, "it holds no weights", "give the folder of a saved drafter")
    digest = hashlib.sha256()
    if place.is_dir():
        digest.update(_configuration(place / "config.json"))
    for path in files:
        digest.update(f"{path.name if place.is_dir() else ''}\0{path.stat().st_size}\0".encode())
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    """Files of weights; where there are safetensors, other formats are copies of them, or something else."""
    for names in (("*.safetensors",), ("*.bin", "*.pt")):
        found = sorted(path for name in names for path in folder.glob(name) if path.name != _TRAINING_STATE)
        if found:
            return found
    return []


def _configuration(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return b""
    with contextlib.suppress(ValueError):
        values = json.loads(text)
        if isinstance(values, dict):
            values.pop("trained", None)
            return json.dumps(values, sort_keys=True).encode()
    return text


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            while piece := file.read(_PIECE):
                yield piece
            return
        for number in range(_PIECES):
            file.seek(number * (size - _PIECE) // (_PIECES - 1))
            yield file.read(_PIECE)


def _entry(data: Mapping[str, Any]) -> CalibrationEntry:
    values = {field.name: data[field.name] for field in fields(CalibrationEntry)}
    regime = Regime(**{field.name: data["regime"][field.name] for field in fields(Regime)})
    scales = tuple(Scale(**{field.name: item[field.name] for field in fields(Scale)}) for item in data["scales"])
    return CalibrationEntry(**{**values, "regime": regime, "scales": scales})


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
