"""``kernelstore rebuild``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kernelstore.artifact import Artifact
from kernelstore.cli import made
from kernelstore.cli.options import KIND, db_option, existing, json_option
from kernelstore.compiler import Compiler
from kernelstore.store import Store

__all__ = ["command"]


@click.command("rebuild")
@click.argument("program")
@db_option
@click.option(
    "--arch", "archs", multiple=True, required=True, metavar="ARCH", help="Such as sm_100a; may be given several times."
)
@click.option("--kind", type=KIND, default="cubin", show_default=True, help="What to make.")
@json_option
def command(program: str, db: Path | None, archs: tuple[str, ...], kind: str, as_json: bool) -> None:
    """Compile a stored program for another GPU, from what is stored of it. No GPU is needed.

    PROGRAM is its name, its key, or the key of one of its artifacts; of a key the first digits will do. The artifact
    gets the key that compiling the sources would give it. Where a header has changed, the rebuild is refused.

    \b
    Examples:
      kernelstore rebuild saxpy.cu --arch sm_100a --arch sm_120
      kernelstore rebuild 9f31c2 --arch sm_80 --kind ptx
    """
    done: list[tuple[Artifact, float]] = []
    with Store(existing(db)) as store, Compiler(store) as compiler:
        for arch in archs:
            started = time.perf_counter()
            artifact = compiler.rebuild(program, arch, kind=kind)
            done.append((artifact, (time.perf_counter() - started) * 1000))
            if not as_json:
                made.show(*done[-1])
    if as_json:
        made.dump(done)
