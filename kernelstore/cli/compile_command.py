"""``kernelstore compile``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kernelstore.artifact import Artifact
from kernelstore.cli import text
from kernelstore.cli.options import db_option, json_option, store_for_compiling
from kernelstore.compiler import Compiler

__all__ = ["command"]


@click.command("compile", context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- NVRTC_OPTION...]")
@db_option
@click.option("--arch", "archs", multiple=True, metavar="ARCH", help="Such as sm_90a; may be given several times.")
@click.option(
    "--kind", type=click.Choice(["cubin", "ptx", "ltoir"]), default="cubin", show_default=True, help="What to make."
)
@click.option("--name-expression", "name_expressions", multiple=True, metavar="NAME", help="Such as 'saxpy<float>'.")
@click.option("--include-dir", "include_dirs", multiple=True, metavar="DIR", help="Directory of user headers.")
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
    made: list[tuple[Artifact, float]] = []
    try:
        source = file.read_text()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{file} is no UTF-8 text at byte {error.start}") from None
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
            made.append((artifact, (time.perf_counter() - started) * 1000))
            if not as_json:
                _print(artifact, made[-1][1])
    if as_json:
        text.dump_json(
            [
                {
                    "key": artifact.key,
                    "kind": artifact.kind,
                    "arch": artifact.arch,
                    "size_bytes": artifact.size_bytes,
                    "from_cache": artifact.from_cache,
                    "took_ms": took_ms,
                    "log": artifact.log,
                    "symbols": artifact.symbols,
                }
                for artifact, took_ms in made
            ]
        )


def _print(artifact: Artifact, took_ms: float) -> None:
    how = "hit" if artifact.from_cache else "compiled"
    click.echo(
        f"{text.short(artifact.key)}  {artifact.kind}  {artifact.arch}  {text.size(artifact.size_bytes)}  "
        f"{how} in {took_ms:.1f} ms  {', '.join(symbol.name for symbol in artifact.symbols)}"
    )
    if artifact.log.strip():
        click.echo(artifact.log.rstrip(), err=True)
