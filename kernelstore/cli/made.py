"""How commands tell what a compile made or found."""

from __future__ import annotations

from collections.abc import Iterable

import click

from kernelstore.artifact import Artifact
from kernelstore.cli import text

__all__ = ["dump", "show"]


def show(artifact: Artifact, took_ms: float) -> None:
    """Print one line on an artifact, and the compiler's log on stderr."""
    how = "hit" if artifact.from_cache else "compiled"
    names = text.names(artifact.symbols) or "no kernels: name templates with --name-expression"
    click.echo(
        f"{text.short(artifact.key)}  {artifact.kind}  {artifact.arch}  {text.size(artifact.size_bytes)}  "
        f"{how} in {took_ms:.1f} ms  {names}"
    )
    if artifact.log.strip():
        click.echo(artifact.log.rstrip(), err=True)


def dump(made: Iterable[tuple[Artifact, float]]) -> None:
    """Print artifacts, each with the milliseconds it took, as JSON."""
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
