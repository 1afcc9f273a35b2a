"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["db_option", "json_option"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def db_option(function: _Function) -> _Function:
    """Add ``--db PATH``; the command gets ``db``, which `Store` takes."""
    return click.option(
        "--db",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="The store's file. [default: $KERNELSTORE_PATH, else cache.db in your cache directory]",
    )(function)


def json_option(function: _Function) -> _Function:
    """Add ``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)
