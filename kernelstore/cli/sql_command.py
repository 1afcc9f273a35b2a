"""``kernelstore sql``."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click

from kernelstore.cli import text
from kernelstore.cli.options import db_option, existing
from kernelstore.store import Store

__all__ = ["command"]


@click.command("sql")
@click.argument("statement")
@click.argument("parameters", nargs=-1)
@db_option
@click.option(
    "--format",
    "output",
    type=click.Choice(["table", "csv", "json", "jsonl"]),
    default="table",
    show_default=True,
    help="How rows are printed.",
)
@click.option("--json", "output", flag_value="json", help="The same as --format json.")
@click.option("--timeout", "timeout_s", type=float, default=10.0, show_default=True, help="Seconds it may take.")
def command(statement: str, parameters: tuple[str, ...], db: Path | None, output: str, timeout_s: float) -> None:
    """Run one SELECT over the store; PARAMETERS are for its `?` placeholders.

    docs/schema.md describes the tables and the view kernel_usage. The file is opened so that nothing can be written.

    \b
    Examples:
      kernelstore sql "SELECT arch, count(*) FROM artifact GROUP BY arch"
      kernelstore sql "SELECT * FROM kernel_usage WHERE arch = ?" sm_90 --format csv
    """
    with Store(existing(db)) as store:
        result = store.sql(statement, parameters, timeout_s=timeout_s)
    if output == "table":
        headings = [(column, "left") for column in result.columns]
        text.table(headings, [[_cell(value) for value in row] for row in result])
    elif output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(result.columns)
        writer.writerows([_plain(value) for value in row] for row in result)
    elif output == "json":
        text.dump_json([dict(zip(result.columns, map(_plain, row), strict=True)) for row in result])
    else:
        for row in result:
            click.echo(json.dumps(dict(zip(result.columns, map(_plain, row), strict=True)), ensure_ascii=False))


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(_plain(value))
