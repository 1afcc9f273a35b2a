"""``kernelstore stats``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from kernelstore.cli import text
from kernelstore.cli.options import db_option, existing, json_option
from kernelstore.store import Store

__all__ = ["command"]


@click.command("stats")
@db_option
@json_option
def command(db: Path | None, as_json: bool) -> None:
    """Tell hit rate, time saved and sizes, of all processes since the file was made.

    \b
    Example:
      kernelstore stats --json
    """
    with Store(existing(db)) as store:
        stats = store.stats()
    if as_json:
        text.dump_json(dataclasses.asdict(stats) | {"hit_rate": stats.hit_rate})
        return
    ratio = stats.size_bytes / stats.stored_size_bytes if stats.stored_size_bytes else 1.0
    lines = [
        ("store", stats.path),
        ("hits", f"{stats.hits} ({stats.hit_rate:.1%} of {stats.hits + stats.misses} lookups)"),
        ("time saved", text.duration(stats.saved_ms)),
        ("misses", str(stats.misses)),
        ("compiles", f"{stats.compiles} in {text.duration(stats.compile_ms)}"),
        *((f"uncacheable: {reason}", str(count)) for reason, count in sorted(stats.uncacheable.items())),
        ("corrupt", str(stats.corrupt)),
        ("not stored", str(stats.not_stored)),
        ("programs", str(stats.programs)),
        ("artifacts", str(stats.artifacts)),
        *(
            (f"  {kind}", f"{count}, {text.size(size_bytes)} ({text.size(stored)} stored)")
            for kind, (count, size_bytes, stored) in stats.kinds.items()
        ),
        ("payloads", f"{text.size(stats.size_bytes)}, stored in {text.size(stats.stored_size_bytes)} ({ratio:.1f} x)"),
        ("file", f"{text.size(stats.file_bytes)}, in use {text.size(stats.live_bytes)}"),
        ("WAL", text.size(stats.wal_bytes)),
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")
