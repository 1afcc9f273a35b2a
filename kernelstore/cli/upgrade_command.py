"""``kernelstore upgrade``."""

from __future__ import annotations

from pathlib import Path

import click

from kernelstore.cli import text
from kernelstore.cli.options import db_option, json_option
from kernelstore.db.statements import REVISION
from kernelstore.store import Store

__all__ = ["command"]


@click.command("upgrade")
@db_option
@json_option
def command(db: Path | None, as_json: bool) -> None:
    """Make the file, or bring it to this release's schema. Opening a store does the same by itself.

    \b
    Example:
      kernelstore upgrade --db cache.db
    """
    with Store(db) as store:
        path = store.path
    if as_json:
        text.dump_json({"path": path, "revision": REVISION})
    else:
        click.echo(f"{path} is at schema revision {REVISION:04}")
