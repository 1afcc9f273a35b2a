"""``kernelstore compile``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kernelstore.artifact import Artifact
from kernelstore.cli import made
from kernelstore.cli.options import db_option, json_option, request_options, source_of, store_for_compiling
from kernelstore.compiler import Compiler

__all__ = ["command"]


@click.command("compile")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- NVRTC_OPTION...]")
@db_option
@request_options
@json_option
def command(
    file: Path,
    options: tuple[str, ...],
    db: Path | None,
    archs: tuple[str, ...],
    kind: str,
    name_expressions: tuple[str, ...],
    include_dirs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compile a CUDA C++ FILE into the store, or find it there. What follows `--` goes to NVRTC.

    Without --arch it is compiled for the current device; with it no GPU is needed.

    \b
    Examples:
      kernelstore compile saxpy.cu --arch sm_90 --name-expression 'saxpy<float>'
      kernelstore compile saxpy.cu --arch sm_80 --arch sm_120 -- -std=c++17 -DN=8
    """
    done: list[tuple[Artifact, float]] = []
    source = source_of(file)
    with store_for_compiling(db) as store, Compiler(store) as compiler:
        for arch in archs or (None,):
            started = time.perf_counter()
            artifact = compiler.compile(
                source,
                kind,
                arch=arch,
                name=str(file),
                options=options,
                name_expressions=name_expressions,
                include_dirs=include_dirs,
            )
            done.append((artifact, (time.perf_counter() - started) * 1000))
            if not as_json:
                made.show(*done[-1])
    if as_json:
        made.dump(done)
