"""``kernelstore explain``."""

from __future__ import annotations

import re
from pathlib import Path

import click

from kernelstore.cli import text
from kernelstore.cli.options import db_option, existing, json_option, request_options, source_of
from kernelstore.compiler import Compiler
from kernelstore.errors import KeyNotFound
from kernelstore.explanation import Difference, Explanation
from kernelstore.key import Key
from kernelstore.store import Store

__all__ = ["command"]


@click.command("explain")
@click.argument("what", metavar="FILE|KEY")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[KEY] [-- NVRTC_OPTION...]")
@db_option
@request_options
@json_option
def command(
    what: str,
    rest: tuple[str, ...],
    db: Path | None,
    archs: tuple[str, ...],
    kind: str,
    name_expressions: tuple[str, ...],
    include_dirs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tell why a compile would miss: which parts differ from the nearest stored program. Nothing is compiled.

    With a CUDA C++ FILE, everything else is as in `kernelstore compile`. With two keys of artifacts or programs, or
    the first digits of them, tell what the first has and the second has not.

    \b
    Examples:
      kernelstore explain saxpy.cu --arch sm_90 --name-expression 'saxpy<float>' -- -DN=8
      kernelstore explain 9f31c2 c97c87

    Exit status: 0 for a hit or no difference, 1 otherwise.
    """
    path = Path(what)
    with Store(existing(db)) as store:
        if path.is_file():
            with Compiler(store) as compiler:
                told = [
                    compiler.explain(
                        source_of(path),
                        kind,
                        arch=arch,
                        name=str(path),
                        options=rest,
                        name_expressions=name_expressions,
                        include_dirs=include_dirs,
                    )
                    for arch in archs or (None,)
                ]
            _print_explanations(told, as_json=as_json)
            status = int(any(explanation.hit is None for explanation in told))
        elif len(rest) == 1 and all(re.fullmatch("[0-9a-fA-F]{1,64}", key) for key in (what, *rest)):
            differences = store.compare(_key(store, what), _key(store, rest[0]))
            _print_differences(differences, as_json=as_json)
            status = int(bool(differences))
        else:
            raise click.UsageError(f"{what!r} is no file; give a CUDA C++ file, or two keys")
    raise SystemExit(status)


def _key(store: Store, digits: str) -> Key:
    try:
        return store.find(digits)
    except KeyNotFound:
        return store.find_program(digits)


def _print_explanations(told: list[Explanation], *, as_json: bool) -> None:
    if as_json:
        text.dump_json(told)
        return
    for explanation in told:
        click.echo(str(explanation))


def _print_differences(differences: tuple[Difference, ...], *, as_json: bool) -> None:
    if as_json:
        text.dump_json(differences)
    elif not differences:
        click.echo("no difference")
    else:
        for difference in differences:
            click.echo(str(difference))
