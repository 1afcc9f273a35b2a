"""``kernelstore ls``."""

from __future__ import annotations

from pathlib import Path

import click

from kernelstore.artifact import ArtifactInfo
from kernelstore.cli import text
from kernelstore.cli.options import db_option, existing, json_option
from kernelstore.store import Store

__all__ = ["command"]


@click.command("ls")
@db_option
@click.option("--arch", help="Only this arch, such as sm_90a.")
@click.option("--kind", help="Only this kind: cubin, ptx, ltoir, fatbin.")
@click.option("--symbol", metavar="GLOB", help="Only with a kernel or variable of that name, such as 'saxpy*'.")
@click.option("--limit", type=click.IntRange(0), default=None, help="At most so many. [default: all]")
@json_option
def command(
    db: Path | None, arch: str | None, kind: str | None, symbol: str | None, limit: int | None, as_json: bool
) -> None:
    """List what is stored, newest use first.

    \b
    Examples:
      kernelstore ls --limit 20
      kernelstore ls --arch sm_90 --kind cubin --symbol 'saxpy*'
    """
    with Store(existing(db)) as store:
        found = list(store.search(arch=arch, kind=kind, symbol=symbol, limit=limit))
    if as_json:
        text.dump_json(found)
        return
    if not found:
        click.echo("nothing found", err=True)
        return
    text.table(
        [
            ("KEY", "left"),
            ("KIND", "left"),
            ("ARCH", "left"),
            ("SIZE", "right"),
            ("STORED", "right"),
            ("HITS", "right"),
            ("USED", "right"),
            ("COMPILE", "right"),
            ("SYMBOLS", "left"),
        ],
        [_row(info) for info in found],
    )


def _row(info: ArtifactInfo) -> list[str]:
    return [
        text.short(info.key),
        info.kind,
        info.arch,
        text.size(info.size_bytes),
        text.size(info.stored_size_bytes),
        str(info.usage_count),
        text.ago(info.last_access_ns),
        text.duration(info.compile_ms),
        text.names(info.symbols),
    ]
