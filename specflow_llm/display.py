"""How things look on a terminal: consoles, progress, small tables and figures.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Notify = Callable[[str], None]

_PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: a table in a log must not be squeezed into 80."""

_UNITS = ("B", "kB", "MB", "GB", "TB")

STATE_NAMES: Mapping[str, str] = {
    "target_weights": "target weights",
    "target_kv": "target keys and values",
    "draft_weights": "draft model weights",
    "draft_kv": "draft keys and values",
    "draft_context": "drafter's index of the text",
    "hidden_states": "hidden states",
    "confidences": "confidences (survival estimates)",
    "ngram_history": "n-gram index of the text",
    "ngram_corpus": "n-gram index of a corpus",
    "ngram_hit_rates": "n-gram hit rates",
}
"""Kinds of state in the words of a table; others are shown under their own name."""


def console(*, stderr: bool = False) -> Console:
    """A console that leaves numbers and brackets alone; wide enough for tables where it is no terminal."""
    found = Console(stderr=stderr, highlight=False, markup=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=_PLAIN_WIDTH)


def format_bytes(count: int) -> str:
    """``0``, ``512 B``, ``11.8 MB``: decimal units, three digits."""
    if count == 0:
        return "0"
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000.0
        unit += 1
    if unit == 0:
        return f"{count} B"
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def format_percent(share: float) -> str:
    """``62%``; one decimal below 10%."""
    return f"{share:.0%}" if share == 0.0 or share >= 0.0995 else f"{share:.1%}"


def state_rows(state_bytes: Mapping[str, int]) -> list[tuple[str, str]]:
    """(kind of state, bytes) in the table's order, the kinds this run did not have as 0."""
    kinds = dict.fromkeys([*STATE_NAMES, *state_bytes])
    return [(STATE_NAMES.get(kind, kind.replace("_", " ")), format_bytes(state_bytes.get(kind, 0))) for kind in kinds]


def generation_summary(*, tokens: int, seconds: float, rounds: int, forwards: int) -> str:
    """One line about finished work."""
    speed = tokens / seconds if seconds > 0 else 0.0
    per_round = tokens / rounds if rounds else 0.0
    return (
        f"{tokens} tokens in {seconds:.2f} s | {speed:.1f} tokens/s | {per_round:.2f} tokens per round (mean accepted "
        f"length) | {forwards} target forwards"
    )


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines, columns named in ``right`` aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def show_error(out: Console, message: str, *, hint: str = "") -> None:
    """One clear line, whatever characters the message holds."""
    out.print(
        Text.assemble(("error: ", "bold red"), " ".join(message.split()), (f" {hint}" if hint else "", "dim")),
        soft_wrap=True,
    )


@contextmanager
def loading(out: Console, message: str) -> Iterator[Notify]:
    """A spinner whose words change; plain lines where there is no terminal."""
    if not out.is_terminal:
        yield lambda text: out.print(text, soft_wrap=True)
        return
    with out.status(Text(message)) as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def counting(out: Console, description: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar that is told (finished items, what is going on); nothing where there is no terminal."""
    columns: Sequence[Any] = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
