"""``kernelstore demo``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kernelstore import settings
from kernelstore.artifact import Artifact
from kernelstore.cli import text
from kernelstore.cli.demo import DEMO_ARCHS, DEMOS, Demo
from kernelstore.cli.options import db_option, json_option
from kernelstore.compiler import Compiler
from kernelstore.cuda import driver
from kernelstore.key import Key
from kernelstore.store import Store

__all__ = ["command"]


@click.command("demo")
@db_option
@click.option(
    "--arch", "archs", multiple=True, default=DEMO_ARCHS, show_default=True, metavar="ARCH", help="Such as sm_90."
)
@json_option
def command(db: Path | None, archs: tuple[str, ...], as_json: bool) -> None:
    """Compile a set of real kernels into the store for several GPU generations; run it twice to see hits.

    The kernels: saxpy, CUB block sort, reduce and scan, cuda::std, half precision, cooperative groups. Where there is
    a GPU they are loaded and launched too, and checked against numpy.

    \b
    Example:
      kernelstore demo --db cache.db
    """
    if settings.flag("DISABLE"):
        raise click.UsageError("KERNELSTORE_DISABLE is set, and the demo shows the store; unset it")
    with Store(db) as store, Compiler(store) as compiler:
        results = list(_compile_all(compiler, archs, quiet=as_json))
        device = _check_on_device(compiler) if driver.device_count() else None
        store.flush()
        stored = {info.key: info.stored_size_bytes for info in store.search()}
        path = store.path
    if as_json:
        text.dump_json({"path": path, "kernels": [result.to_json(stored) for result in results], "device": device})
    else:
        _print(results, stored, path)
        _print_device(device)
    if device is not None and device.mismatches:
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class _Result:
    """One program for one arch."""

    demo: Demo
    artifact: Artifact
    took_ms: float

    def to_json(self, stored: dict[Key, int]) -> dict[str, object]:
        artifact = self.artifact
        return {
            "program": self.demo.file,
            "arch": artifact.arch,
            "key": artifact.key,
            "from_cache": artifact.from_cache,
            "took_ms": self.took_ms,
            "compile_ms": artifact.compile_ms,
            "size_bytes": artifact.size_bytes,
            "stored_size_bytes": stored.get(artifact.key),
        }


@dataclass(frozen=True, slots=True)
class _Device:
    """What launching on the current device gave."""

    name: str
    arch: str
    launches: int
    mismatches: list[str]


def _compile_all(compiler: Compiler, archs: tuple[str, ...], *, quiet: bool) -> Iterator[_Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = text.console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("", total=len(DEMOS) * len(archs))
        for demo in DEMOS:
            for arch in archs:
                progress.update(task, description=f"{demo.file} for {arch}")
                started = time.perf_counter()
                artifact = compiler.compile(
                    demo.source,
                    "cubin",
                    arch=arch,
                    name=demo.file,
                    options=demo.options,
                    name_expressions=demo.name_expressions,
                )
                yield _Result(demo, artifact, (time.perf_counter() - started) * 1000)
                progress.advance(task)


def _check_on_device(compiler: Compiler) -> _Device:
    from kernelstore.cli.demo import device  # imports numpy and the driver's bindings: only where there is a GPU

    mismatches = []
    launches = 0
    for demo in DEMOS:
        module = compiler.module(
            demo.source, name=demo.file, options=demo.options, name_expressions=demo.name_expressions
        )
        for launch in demo.launches:
            mismatches += device.run(module, launch)
            launches += 1
    major, minor = driver.compute_capability()
    return _Device(driver.device_name(), f"sm_{major}{minor}", launches, mismatches)


def _print(results: list[_Result], stored: dict[Key, int], path: Path) -> None:
    headings = [
        ("PROGRAM", "left"),
        ("ARCH", "left"),
        ("", "left"),
        ("TOOK", "right"),
        ("SIZE", "right"),
        ("STORED", "right"),
        ("WHAT", "left"),
    ]
    rows = []
    for result in results:
        artifact = result.artifact
        rows.append(
            [
                result.demo.file,
                artifact.arch,
                "hit" if artifact.from_cache else "compiled",
                f"{result.took_ms:.1f} ms",
                text.size(artifact.size_bytes),
                text.size(stored.get(artifact.key, 0)),
                result.demo.title,
            ]
        )
    text.table(headings, rows)
    hits = [result for result in results if result.artifact.from_cache]
    compiled = [result for result in results if not result.artifact.from_cache]
    click.echo("")
    if compiled:
        spent = sum(result.took_ms for result in compiled)
        click.echo(f"compiled {len(compiled)} cubins, each with its PTX, in {text.duration(spent)}")
    if hits:
        took = sum(result.took_ms for result in hits)
        saved = sum(result.artifact.compile_ms for result in hits) - took
        click.echo(
            f"{len(hits)} hits in {text.duration(took)}; they saved {text.duration(max(saved, 0.0))} of compiling"
        )
    raw = sum(result.artifact.size_bytes for result in results)
    kept = sum(stored.get(result.artifact.key, 0) for result in results)
    click.echo(f"cubins: {text.size(raw)}, stored in {text.size(kept)}; all of it is in {path}")
    if not hits:
        click.echo("run it again: everything will be a hit")


def _print_device(device: _Device | None) -> None:
    if device is None:
        click.echo("no GPU here: nothing was loaded or launched")
        return
    for line in device.mismatches:
        click.echo(line, err=True)
    verdict = "all agree with numpy" if not device.mismatches else f"{len(device.mismatches)} differ from numpy"
    click.echo(f"launched {device.launches} kernels on {device.name} ({device.arch}): {verdict}")
