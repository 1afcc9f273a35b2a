"""Options that many commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kernelstore import settings
from kernelstore.store import Store

__all__ = ["db_option", "existing", "json_option", "store_for_compiling"]

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


def store_for_compiling(db: Path | None) -> contextlib.AbstractContextManager[Store | None]:
    """Open the store, or say that ``KERNELSTORE_DISABLE`` is set and give ``None``."""
    if settings.flag("DISABLE"):
        click.echo("kernelstore: KERNELSTORE_DISABLE is set, nothing is looked up or stored", err=True)
        return contextlib.nullcontext()
    return Store(db)


def json_option(function: _Function) -> _Function:
    """Add ``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)
