"""``kernelstore put``."""

from __future__ import annotations

from pathlib import Path

import click

from kernelstore.artifact import Artifact
from kernelstore.cli import text
from kernelstore.cli.options import db_option, json_option
from kernelstore.store import Store

__all__ = ["command"]


@click.command("put")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@db_option
@click.option("--kind", help="cubin, ptx, ltoir or fatbin. [default: told by the bytes]")
@click.option("--arch", help="Such as sm_90. [default: told by the file]")
@json_option
def command(files: tuple[Path, ...], db: Path | None, kind: str | None, arch: str | None, as_json: bool) -> None:
    """Store kernels that nvcc or another compiler made: all of them, or none.

    \b
    Examples:
      kernelstore put saxpy.cubin saxpy.ptx
      kernelstore put kernels.fatbin --arch sm_80
    """
    artifacts = [Artifact.from_file(file, kind=kind, arch=arch) for file in files]
    with Store(db) as store:
        store.put(*artifacts)
        infos = [store.info(artifact.key) for artifact in artifacts]
    if as_json:
        text.dump_json(infos)
        return
    for file, info in zip(files, infos, strict=True):
        names = text.names(info.symbols) or "no symbols known"
        click.echo(f"{text.short(info.key)}  {info.kind}  {info.arch}  {text.size(info.size_bytes)}  {file}: {names}")
