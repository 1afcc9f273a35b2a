"""One read-only statement of the caller's, with a time limit, on a connection that cannot write."""

from __future__ import annotations

import contextlib
import difflib
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelstore.db.connection import connect
from kernelstore.db.faults import translate
from kernelstore.errors import SqlError

__all__ = ["SqlResult", "run"]

# Virtual-machine steps between two looks at the clock: some 0.1 ms.
_STEPS_BETWEEN_CHECKS = 10_000

# What a statement may do. ATTACH, PRAGMA with a value and every write are not among it.
_ALLOWED = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    }
)

# Pragmas that only tell.
_TELLING_PRAGMAS = frozenset(
    {
        "application_id",
        "compile_options",
        "database_list",
        "freelist_count",
        "index_info",
        "index_list",
        "index_xinfo",
        "page_count",
        "page_size",
        "table_info",
        "table_list",
        "table_xinfo",
        "user_version",
    }
)


@dataclass(frozen=True, slots=True)
class SqlResult:
    """Rows of an ad-hoc statement; iterating gives the rows.

    Parameters
    ----------
    columns : tuple of str
        Names of the columns.
    rows : list of tuple
        Values as SQLite has them: int, float, str, bytes or ``None``.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def run(path: Path, statement: str, parameters: Sequence[Any] | Mapping[str, Any], timeout_s: float) -> SqlResult:
    """Run one statement.

    Raises
    ------
    SqlError
        The statement is wrong, would write, is more than one, or ran past `timeout_s`.
    StoreError
        The file cannot be read.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with contextlib.closing(connect(path, query_only=True, timeout_s=timeout_s)) as connection:
            names = _names(connection)
            connection.set_authorizer(_authorize)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS)
            try:
                cursor = connection.execute(statement, parameters)
                rows = cursor.fetchall()
            except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError) as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
                if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR}:
                    raise
                raise SqlError(_explain(error, code, names, timeout_s), statement=statement) from error
            return SqlResult(tuple(column[0] for column in cursor.description or ()), rows)
    except sqlite3.Error as error:
        raise translate(error, path) from error


def _authorize(action: int, argument: str | None, *_: object) -> int:
    if action in _ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and argument in _TELLING_PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _names(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') UNION "
        "SELECT field.name FROM sqlite_schema AS held, pragma_table_info(held.name) AS field "
        "WHERE held.type IN ('table', 'view')"
    ).fetchall()
    return [name for (name,) in rows]


def _explain(error: Exception, code: int, names: list[str], timeout_s: float) -> str:
    if code == sqlite3.SQLITE_INTERRUPT:
        return f"the statement ran longer than {timeout_s:g} s; narrow it, or allow more time"
    if code in {sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY}:
        return f"only one statement that reads is run here ({error}); use the methods of Store to write"
    message = str(error)
    missing = re.fullmatch(r"no such (?:table|column): (?:\w+\.)?(\w+)", message)
    if missing is None:
        return message
    near = difflib.get_close_matches(missing[1], names, n=1)
    return f"{message}; did you mean {near[0]!r}?" if near else f"{message}; `docs/schema.md` lists what there is"
