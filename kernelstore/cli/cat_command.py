"""``kernelstore cat``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernelstore import plugins
from kernelstore.cli.options import db_option, existing
from kernelstore.store import Store

__all__ = ["command"]


@click.command("cat")
@click.argument("key")
@db_option
@click.option("--source", is_flag=True, help="Write the CUDA C++ source it was compiled from.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
def command(key: str, db: Path | None, source: bool, output: Path | None) -> None:
    """Write an artifact's payload: PTX as text, a cubin as bytes. KEY is its key, or the first digits of it.

    \b
    Examples:
      kernelstore cat 9f31c2 | cuobjdump -sass -
      kernelstore cat 9f31c2 --source
      kernelstore cat 9f31c2 -o saxpy.cubin
    """
    with Store(existing(db)) as store:
        found = store.find(key)
        if source:
            info = store.info(found)
            program = None if info.program_key is None else store.program(info.program_key)
            if program is None:
                raise click.ClickException(f"{found} was imported: its source is not known")
            content = program.source.encode()
        else:
            artifact = store.peek(found)
            if artifact is None:
                raise click.ClickException(f"{found} was damaged and has been dropped")
            is_text = plugins.load("kinds", artifact.kind).is_text
            content = artifact.payload.rstrip(b"\0") if is_text else artifact.payload
            if output is None and not is_text and sys.stdout.isatty():
                raise click.UsageError(f"a {artifact.kind} is no text; give --output FILE, or pipe it")
    if output is None:
        sys.stdout.buffer.write(content)
    else:
        output.write_bytes(content)
