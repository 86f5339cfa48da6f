"""What commands answer with, and how it is printed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

_WIDEST = 60
"""Characters of a cell."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found."""

    data: Mapping[str, Any]
    """For ``--json``: plain JSON values."""
    text: str
    """For a person."""
    code: int = 0
    """The exit code."""


def write(text: str, stream: TextIO | None = None) -> None:
    """One piece of text and a line end; characters that the stream cannot show are escaped."""
    stream = stream if stream is not None else sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def as_json(data: Mapping[str, Any]) -> str:
    """One JSON object in ASCII. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns, wide enough for their cells; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(header), *(len(row[column]) for row in cells)]) for column, header in enumerate(headers)]
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    lines = [_line(list(headers), widths, numeric), _line(["-" * width for width in widths], widths, numeric)]
    lines += [_line(row, widths, numeric) for row in cells]
    return "\n".join(lines)


def compact(value: Any) -> str:
    """A plain JSON value on one line."""
    return json.dumps(value, ensure_ascii=False)


def seconds(value: float | None) -> str:
    """Seconds to four digits; ``-`` for none."""
    return "-" if value is None else f"{value:.4g}"


def share(value: float | None) -> str:
    """A rate in percent; ``-`` for none."""
    return "-" if value is None else f"{value:.0%}"


def moment(value: float) -> str:
    """Seconds since the epoch as date and time, UTC."""
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(value)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    text = text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _is_number(value: object) -> bool:
    text = str(value).rstrip("%")
    try:
        float(text)
    except ValueError:
        return text == "-"
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


__all__ = ["Answer", "as_json", "compact", "moment", "seconds", "share", "table", "write"]
