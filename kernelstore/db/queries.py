"""What people ask: searches and statistics, in SQLAlchemy Core."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import ColumnElement, Row, and_, func, or_, select

from kernelstore.arch import Arch
from kernelstore.artifact import ArtifactInfo, Symbol
from kernelstore.db.connection import connect
from kernelstore.db.faults import translate
from kernelstore.db.schema import artifact, counter, program, symbol
from kernelstore.key import Key

__all__ = ["counters", "engine", "has_key", "kinds", "matches", "search", "sizes", "with_prefix"]

# Rows per page of a search: no read transaction is open between two pages, so a slow reader holds up no checkpoint.
_PAGE_ROWS = 200


def engine(path: Path, timeout_s: float) -> sqlalchemy.Engine:
    """Return an engine whose connections are `connect`'s, read-only, in autocommit mode."""
    made = sqlalchemy.create_engine(
        "sqlite://",
        creator=lambda: connect(path, query_only=True, timeout_s=timeout_s),
        poolclass=sqlalchemy.NullPool,
    )

    @sqlalchemy.event.listens_for(made, "handle_error")
    def _(context: sqlalchemy.engine.ExceptionContext) -> None:
        if isinstance(context.original_exception, sqlite3.Error):
            raise translate(context.original_exception, path) from context.original_exception

    return made


def matches(symbol_glob: str | None, arch: str | None, kind: str | None) -> list[ColumnElement[bool]]:
    """Return the conditions of a search.

    Parameters
    ----------
    symbol_glob : str, optional
        Case-sensitive glob over name expressions and lowered names: ``"saxpy*"``.
    arch : str, optional
        Exactly this arch: ``"sm_90a"``.
    kind : str, optional
        ``"cubin"`` and so on.
    """
    conditions: list[ColumnElement[bool]] = []
    if symbol_glob is not None:
        named = or_(symbol.c.name_expression.op("GLOB")(symbol_glob), symbol.c.lowered_name.op("GLOB")(symbol_glob))
        conditions.append(artifact.c.id.in_(select(symbol.c.artifact_id).where(named)))
    if arch is not None:
        wanted = Arch.parse(arch)
        conditions += [
            artifact.c.arch_major == wanted.major,
            artifact.c.arch_minor == wanted.minor,
            artifact.c.arch_suffix == wanted.suffix,
            artifact.c.arch == str(wanted),
        ]
    if kind is not None:
        conditions.append(artifact.c.kind == kind)
    return conditions


def has_key(key: Key) -> ColumnElement[bool]:
    """Return the condition that finds one artifact."""
    return artifact.c.key == key


def search(
    read: sqlalchemy.Engine, conditions: Sequence[ColumnElement[bool]], limit: int | None
) -> Iterator[ArtifactInfo]:
    """Yield what matches, newest use first, page by page with no transaction in between."""
    after: tuple[int, int] | None = None
    left = limit
    while left is None or left > 0:
        size = _PAGE_ROWS if left is None else min(_PAGE_ROWS, left)
        page = _page(read, conditions, after, size)
        yield from page.values()
        if len(page) < size:
            return
        last_id, last = list(page.items())[-1]
        after = last.last_access_ns, last_id
        left = None if left is None else left - size


def _page(
    read: sqlalchemy.Engine, conditions: Sequence[ColumnElement[bool]], after: tuple[int, int] | None, size: int
) -> dict[int, ArtifactInfo]:
    query = (
        select(artifact, program.c.key.label("program_key"), program.c.name.label("program_name"))
        .outerjoin(program, program.c.id == artifact.c.program_id)
        .where(*conditions)
        .order_by(artifact.c.last_access_ns.desc(), artifact.c.id.desc())
        .limit(size)
    )
    if after is not None:
        time_ns, row_id = after
        older = artifact.c.last_access_ns < time_ns
        query = query.where(or_(older, and_(artifact.c.last_access_ns == time_ns, artifact.c.id < row_id)))
    with read.connect() as connection:
        rows = connection.execute(query).all()
        by_artifact: dict[int, list[Symbol]] = {row.id: [] for row in rows}
        named = select(symbol).where(symbol.c.artifact_id.in_(list(by_artifact))).order_by(symbol.c.id)
        for row in connection.execute(named):
            by_artifact[row.artifact_id].append(_symbol(row))
    return {row.id: _info(row, by_artifact[row.id]) for row in rows}


def _symbol(row: Row[Any]) -> Symbol:
    values = {name: getattr(row, name) for name in Symbol.__slots__}
    if values["parameters"] is not None:
        values["parameters"] = tuple(json.loads(values["parameters"]))
    return Symbol(**values)


def _info(row: Row[Any], symbols: list[Symbol]) -> ArtifactInfo:
    values = {name: getattr(row, name) for name in ArtifactInfo.__slots__ if name != "symbols"}
    values |= {"key": Key(row.key), "relocatable": bool(row.relocatable), "pinned": bool(row.pinned)}
    values["program_key"] = None if row.program_key is None else Key(row.program_key)
    return ArtifactInfo(symbols=tuple(symbols), **values)


def with_prefix(read: sqlalchemy.Engine, prefix: str, limit: int) -> list[Key]:
    """Return up to `limit` keys whose hex form begins with `prefix` (lower-case hex digits)."""
    low = bytes.fromhex(prefix.ljust(64, "0"))
    high = bytes.fromhex(prefix.ljust(64, "f"))
    query = select(artifact.c.key).where(artifact.c.key.between(low, high)).order_by(artifact.c.key).limit(limit)
    with read.connect() as connection:
        return [Key(key) for key in connection.execute(query).scalars()]


def kinds(read: sqlalchemy.Engine) -> list[tuple[str, int, int, int]]:
    """Return (kind, artifacts, payload bytes, stored bytes) for each kind."""
    query = (
        select(
            artifact.c.kind,
            func.count(),
            func.sum(artifact.c.size_bytes),
            func.sum(artifact.c.stored_size_bytes),
        )
        .group_by(artifact.c.kind)
        .order_by(artifact.c.kind)
    )
    with read.connect() as connection:
        return [(kind, count, size, stored) for kind, count, size, stored in connection.execute(query)]


def counters(read: sqlalchemy.Engine) -> Counter[tuple[str, str]]:
    """Return the counters of all days by (name, reason)."""
    query = select(counter.c.name, counter.c.reason, func.sum(counter.c.value)).group_by(
        counter.c.name, counter.c.reason
    )
    with read.connect() as connection:
        return Counter({(name, reason): value for name, reason, value in connection.execute(query)})


def sizes(read: sqlalchemy.Engine) -> tuple[int, int]:
    """Return the number of programs, and the bytes of the file's pages in use."""
    with read.connect() as connection:
        programs = connection.execute(select(func.count()).select_from(program)).scalar_one()
        pages, free, page_bytes = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("page_count", "freelist_count", "page_size")
        )
        return programs, (pages - free) * page_bytes
