"""Recorded rounds: what a drafter claimed and what became of it, one JSON object a line.

The first line says where the rounds come from, every other line is one round of one request::

    {"format": "specflow-rounds", "version": 2, "drafter": "dspark", "temperature": 0.0, "max_draft": 7,
     "provenance": {...}}
    {"request": 0, "category": "qa", "position": 41, "survival": [0.91, 0.74], "accepted": 1, "emitted": 2}

A draft that branches also has ``"parents"`` and ``"path"`` (version 2; version 1 knows chains only).

They are recorded with *all* drafted tokens verified. Whatever a policy would have admitted, the accepted tokens among
what it admits would then have been accepted, and calibration and replay see what was rejected too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from specflow.errors import InvalidSettingError
from specflow.trees import path_problem, shape_problem

from .errors import DataFileError

FORMAT = "specflow-rounds"
VERSION = 2
_READABLE = (1, 2)

_TOLERANCE = 1e-6
"""Estimates may rise by this much: they are products of fp32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """Where recorded rounds come from.

    Raises:
        InvalidSettingError: a field has a value that cannot be.
    """

    drafter: str
    """Name of the drafter."""
    temperature: float
    """Of the recorded requests; 0 is greedy. Confidences are calibrated per temperature, so a file has one."""
    max_draft: int
    """Most tokens drafted in a round; >= 1."""
    provenance: Mapping[str, Any]
    """As :func:`specflow_llm.provenance.provenance` gives it, and whatever else describes the run (model, data)."""

    def __post_init__(self) -> None:
        """Validate every field."""
        _check("drafter", self.drafter, "a name", ok=isinstance(self.drafter, str) and self.drafter != "")
        _check("temperature", self.temperature, "a number >= 0", ok=_is_number(self.temperature, 0.0, math.inf))
        _check("max_draft", self.max_draft, "an integer >= 1", ok=_is_count(self.max_draft) and self.max_draft >= 1)
        _check("provenance", self.provenance, "a mapping", ok=isinstance(self.provenance, Mapping))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round of one request.

    Raises:
        InvalidSettingError: a field has a value that cannot be.
    """

    request: int
    """Which request, from 0; rounds of a request are in order, those of several may alternate."""
    category: str
    """Kind of the request's prompt; may be empty."""
    position: int
    """Committed tokens (prompt and output) before the round."""
    survival: tuple[float, ...]
    """One estimate per drafted token: P(tokens 0..k are all accepted), as proposed. 1.0 everywhere where the drafter
    gives none; empty where it had no draft."""
    accepted: int
    """Drafted tokens accepted when all of them were verified, before a stop truncated the block."""
    emitted: int
    """Tokens that became output: accepted + 1, or fewer where the request ended inside the block."""
    parents: tuple[int, ...] | None = None
    """Of a draft that branches, as in :attr:`specflow.types.Draft.parents`; None for a chain."""
    path: tuple[int, ...] | None = None
    """The accepted items of a draft that branches."""

    def __post_init__(self) -> None:
        """Validate every field; ``survival`` becomes a tuple."""
        object.__setattr__(self, "survival", tuple(self.survival))
        _check("request", self.request, "an integer >= 0", ok=_is_count(self.request))
        _check("category", self.category, "a string", ok=isinstance(self.category, str))
        _check("position", self.position, "an integer >= 0", ok=_is_count(self.position))
        estimates = self.survival
        falls = all(_is_number(estimate, 0.0, 1.0) for estimate in estimates) and all(
            later <= earlier + _TOLERANCE for earlier, later in itertools.pairwise(estimates)
        )
        _check("survival", estimates, "probabilities that do not rise (running products, not conditionals)", ok=falls)
        bound = len(estimates)
        _check(
            "accepted",
            self.accepted,
            f"an integer in [0, {bound}], the number of drafted tokens",
            ok=_is_count(self.accepted) and self.accepted <= bound,
        )
        _check(
            "emitted",
            self.emitted,
            f"an integer in [0, {self.accepted + 1}], at most one more than were accepted",
            ok=_is_count(self.emitted) and self.emitted <= self.accepted + 1,
        )
        if self.parents is not None:
            object.__setattr__(self, "parents", tuple(self.parents))
            problem = shape_problem(self.parents, bound)
            _check("parents", self.parents, f"the items that {bound} items continue", ok=problem is None)
            object.__setattr__(self, "path", tuple(self.path or ()))
            fits = len(self.path or ()) == self.accepted and path_problem(self.parents, self.path or (), bound) is None
            _check("path", self.path, f"the {self.accepted} accepted items, each continuing the one before", ok=fits)
        else:
            _check("path", self.path, "None for a chain, whose first items are accepted", ok=self.path is None)

    def kept(self, length: int) -> tuple[int, ...]:
        """The accepted items among the first ``length`` drafted ones."""
        if self.path is None:
            return tuple(range(min(self.accepted, length)))
        return tuple([item for item in self.path if item < length])


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of recorded rounds."""

    header: RecordHeader
    rounds: tuple[RoundRecord, ...]

    @property
    def branches(self) -> bool:
        """Whether some drafts branch."""
        return any(item.parents is not None for item in self.rounds)

    def by_request(self) -> Mapping[int, tuple[RoundRecord, ...]]:
        """The rounds of each request, in order."""
        found: dict[int, list[RoundRecord]] = {}
        for item in self.rounds:
            found.setdefault(item.request, []).append(item)
        return {request: tuple(rounds) for request, rounds in found.items()}


_RecordT = TypeVar("_RecordT", RecordHeader, RoundRecord)


def write_rounds(path: str | os.PathLike[str], header: RecordHeader, rounds: Iterable[RoundRecord]) -> int:
    """Write a file of recorded rounds; it appears under its name only when it is complete.

    Args:
        path: the file; its folder is made if need be, an existing file is replaced.
        header: where the rounds come from.
        rounds: consumed once, so a generator can record as it goes.

    Returns:
        Number of rounds written.

    Raises:
        InvalidSettingError: a round drafts more than ``header.max_draft`` tokens.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(_line({"format": FORMAT, "version": VERSION, **asdict(header)}))
            for item in rounds:
                _check_length(header, item)
                file.write(_line({name: value for name, value in asdict(item).items() if value is not None}))
                count += 1
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def read_rounds(path: str | os.PathLike[str]) -> Recording:
    """Read a file of recorded rounds.

    Raises:
        DataFileError: it cannot be read, is of another format or version, or a line is not what it should be.
    """
    source = Path(path)
    try:
        with source.open(encoding="utf-8") as file:
            lines = _objects(source, file)
            _, first = next(lines, (0, {}))
            header = _header(source, first)
            return Recording(header, tuple(_round(source, header, number, data) for number, data in lines))
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(source, f"it cannot be read ({error})", "give a file of recorded rounds") from error


def _header(source: Path, data: Mapping[str, Any]) -> RecordHeader:
    if data.get("format") != FORMAT:
        raise DataFileError(
            source,
            f"its first line is not the header of recorded rounds (format {data.get('format')!r})",
            f"give a JSON-lines file that begins with an object of format {FORMAT!r}",
        )
    if data.get("version") not in _READABLE:
        raise DataFileError(
            source,
            f"it has version {data.get('version')!r}, this program reads versions up to {VERSION}",
            "record the rounds again, or use the program that wrote them",
        )
    return _built(source, 1, RecordHeader, data)


def _round(source: Path, header: RecordHeader, number: int, data: Mapping[str, Any]) -> RoundRecord:
    item = _built(source, number, RoundRecord, data)
    try:
        _check_length(header, item)
    except InvalidSettingError as error:
        raise DataFileError(source, f"line {number}: {error}", "record the rounds again") from error
    return item


def _built(source: Path, number: int, cls: type[_RecordT], data: Mapping[str, Any]) -> _RecordT:
    """A record from a line's object; fields that are not known are ignored, so that writers may add some."""
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in data]
    if missing:
        raise DataFileError(
            source, f"line {number} has no {', '.join(missing)}", "record the rounds again, or complete the line"
        )
    try:
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})
    except (InvalidSettingError, TypeError) as error:
        raise DataFileError(source, f"line {number}: {error}", "record the rounds again") from error


def _objects(source: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataFileError(
                source, f"line {number} is not JSON ({error})", "was it cut off? record the rounds again"
            ) from error
        if not isinstance(data, dict):
            raise DataFileError(source, f"line {number} is not a JSON object", "each line must be one object")
        yield number, data


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"


def _check_length(header: RecordHeader, item: RoundRecord) -> None:
    drafted = len(item.survival)
    _check("survival", item.survival, f"at most max_draft={header.max_draft} items", ok=drafted <= header.max_draft)


def _check(setting: str, value: object, expected: str, *, ok: bool) -> None:
    if not ok:
        raise InvalidSettingError(setting, value, expected)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
