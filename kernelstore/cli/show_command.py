"""``kernelstore show``."""

from __future__ import annotations

from pathlib import Path

import click

from kernelstore.artifact import ArtifactInfo, Program, Symbol
from kernelstore.cli import text
from kernelstore.cli.options import db_option, existing, json_option
from kernelstore.store import Store

__all__ = ["command"]


@click.command("show")
@click.argument("key")
@db_option
@click.option("--source", is_flag=True, help="Print the source too.")
@click.option("--log", is_flag=True, help="Print the compiler's log too.")
@json_option
def command(key: str, db: Path | None, source: bool, log: bool, as_json: bool) -> None:
    """Tell everything about one artifact. KEY is its key, or the first digits of it.

    \b
    Example:
      kernelstore show 9f31c2 --source
    """
    with Store(existing(db)) as store:
        found = store.find(key)
        info = store.info(found)
        program = None if info.program_key is None else store.program(info.program_key)
        artifact = store.peek(found) if log or as_json else None
    compile_log = "" if artifact is None else artifact.log
    if as_json:
        text.dump_json({"artifact": info, "program": program, "log": compile_log})
        return
    for name, value in _facts(info, program):
        click.echo(f"{name:<16}{value}")
    for symbol in info.symbols:
        click.echo("")
        _print_symbol(symbol)
    if log:
        click.echo(f"\n{compile_log.rstrip() or 'the log is empty'}")
    if source:
        click.echo(f"\n{program.source.rstrip() if program is not None else 'imported: the source is not known'}")


def _facts(info: ArtifactInfo, program: Program | None) -> list[tuple[str, str]]:
    facts = [
        ("key", str(info.key)),
        ("kind", info.kind + (", relocatable" if info.relocatable else "")),
        ("arch", info.arch),
        ("toolchain", info.toolchain or "not known"),
        ("origin", info.origin),
    ]
    if info.ptx_version is not None:
        facts.append(("PTX version", f"{info.ptx_version // 100}.{info.ptx_version % 100}"))
    if info.driver_version is not None:
        facts.append(("driver version", str(info.driver_version)))
    facts += [
        ("size", f"{text.size(info.size_bytes)}, stored in {text.size(info.stored_size_bytes)}"),
        ("payload SHA-256", info.payload_sha256.hex()),
        ("compile time", text.duration(info.compile_ms)),
        ("stored", text.timestamp(info.created_at_ns)),
        ("last used", f"{text.timestamp(info.last_access_ns)} ({text.ago(info.last_access_ns)})"),
        ("hits", f"{info.usage_count}, which saved {text.duration(info.saved_ms)}"),
    ]
    if program is not None:
        facts += [
            ("program", f"{program.name or '(no name)'}  {program.key}"),
            ("options", " ".join(program.options) or "none"),
            ("own headers", ", ".join(program.headers) or "none"),
            ("toolkit headers", ", ".join(program.external_includes) or "none"),
        ]
    return facts


def _print_symbol(symbol: Symbol) -> None:
    signature = "" if symbol.parameters is None else f"({', '.join(symbol.parameters)})"
    click.echo(f"{symbol.what} {symbol.name}{signature}")
    click.echo(f"  lowered name  {symbol.lowered_name}")
    usage = [
        (symbol.registers, "registers"),
        (symbol.shared_bytes, "B shared"),
        (symbol.local_bytes, "B local"),
        (symbol.stack_bytes, "B stack"),
        (symbol.constant_bytes, "B constant"),
        (symbol.spill_store_bytes, "B spill stores"),
        (symbol.spill_load_bytes, "B spill loads"),
    ]
    known = ", ".join(f"{value} {unit}" for value, unit in usage if value is not None)
    if known:
        click.echo(f"  uses          {known}")
