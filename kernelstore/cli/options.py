"""Options that many commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kernelstore import settings
from kernelstore.store import Store

__all__ = ["KIND", "db_option", "existing", "json_option", "request_options", "source_of", "store_for_compiling"]

# What NVRTC makes.
KIND = click.Choice(["cubin", "ptx", "ltoir"])

_Function = TypeVar("_Function", bound=Callable[..., Any])


def db_option(function: _Function) -> _Function:
    """Add ``--db PATH``; the command gets ``db``, which `Store` takes."""
    return click.option(
        "--db",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="The store's file. [default: $KERNELSTORE_PATH, else cache.db in your cache directory]",
    )(function)


def existing(db: Path | None) -> Path:
    """Return the path of a store that is there: looking at one must not make one by a slip of the pen.

    Raises
    ------
    click.ClickException
        There is no file.
    """
    path = settings.default_path() if db is None else db
    if not path.exists():
        raise click.ClickException(f"there is no store at {path}; compile, put, demo and upgrade make one")
    return path


def source_of(file: Path) -> str:
    """Return a source file's text.

    Raises
    ------
    click.ClickException
        It is no UTF-8 text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{file} is no UTF-8 text at byte {error.start}") from None


def store_for_compiling(db: Path | None) -> contextlib.AbstractContextManager[Store | None]:
    """Open the store, or say that ``KERNELSTORE_DISABLE`` is set and give ``None``."""
    if settings.flag("DISABLE"):
        click.echo("kernelstore: KERNELSTORE_DISABLE is set, nothing is looked up or stored", err=True)
        return contextlib.nullcontext()
    return Store(db)


def json_option(function: _Function) -> _Function:
    """Add ``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def request_options(function: _Function) -> _Function:
    """Add what a compile request has besides its file: ``archs``, ``kind``, ``name_expressions``, ``include_dirs``."""
    for option in (
        click.option(
            "-I", "--include-dir", "include_dirs", multiple=True, metavar="DIR", help="Directory of user headers."
        ),
        click.option(
            "--name-expression", "name_expressions", multiple=True, metavar="NAME", help="Such as 'saxpy<float>'."
        ),
        click.option("--kind", type=KIND, default="cubin", show_default=True, help="What to make."),
        click.option(
            "--arch", "archs", multiple=True, metavar="ARCH", help="Such as sm_90a; may be given several times."
        ),
    ):
        function = option(function)
    return function
