"""How the command line writes sizes, times, keys and tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernelstore.artifact import Symbol
from kernelstore.key import Key

__all__ = ["ago", "console", "dump_json", "duration", "names", "short", "size", "table", "timestamp"]

# Twelve digits tell a million keys apart; four more would only widen the listing.
_SHORT_DIGITS = 12

# Columns up to this are never cut.
_WHOLE_WIDTH = 18

_MAX_NAMES = 3


def console(*, stderr: bool = False) -> Console:
    """Return a console that colours on a terminal only, and never cuts lines that go into a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, width=None if stream.isatty() else 1000, soft_wrap=not stream.isatty()
    )


def short(key: Key) -> str:
    """The first digits of a key, which every command takes for the whole."""
    return str(key)[:_SHORT_DIGITS]


def size(size_bytes: int) -> str:
    """``"3.2 KiB"``, as `ls -h` and people write it."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(milliseconds: float) -> str:
    """``"85 ms"``, ``"1.65 s"``, ``"12 min"``, ``"3.1 h"``."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def ago(time_ns: int) -> str:
    """``"2 min ago"``."""
    seconds = max(0.0, (time.time_ns() - time_ns) / 1e9)
    for limit, unit, length in ((60, "s", 1), (3600, "min", 60), (86400, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"


def timestamp(time_ns: int) -> str:
    """Local date and time, to the second."""
    return datetime.datetime.fromtimestamp(time_ns / 1e9).astimezone().isoformat(sep=" ", timespec="seconds")


def names(symbols: Sequence[Symbol]) -> str:
    """The first kernels and variables, kernels first, and how many more there are."""
    ordered = sorted(symbols, key=lambda symbol: symbol.what)
    shown = [symbol.name for symbol in ordered[:_MAX_NAMES]]
    more = len(symbols) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def table(headings: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """Print a plain table.

    Parameters
    ----------
    headings : sequence of (text, justify)
        Justify is ``"left"`` or ``"right"``.
    rows : iterable of sequence of str
        One text per heading.
    """
    grid = Table(box=None, pad_edge=False, header_style="bold")
    rows = [[str(cell) for cell in row] for row in rows]
    for number, (heading, justify) in enumerate(headings):
        width = max(len(heading), *(len(row[number]) for row in rows)) if rows else len(heading)
        # On a narrow terminal only the last column is cut; a few digits of the others would tell nothing.
        least = width if number < len(headings) - 1 and width <= _WHOLE_WIDTH else min(width, _WHOLE_WIDTH)
        grid.add_column(heading, justify=justify, no_wrap=True, min_width=least)  # type: ignore[arg-type]
    for row in rows:
        # Text, not markup: a symbol such as `f<int[2]>` is no style.
        grid.add_row(*(Text(cell) for cell in row))
    console().print(grid)


def dump_json(value: object) -> None:
    """Print a value as JSON: keys and bytes as hex, dataclasses as objects."""
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False, indent=2))


def _plain(value: Any) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)
