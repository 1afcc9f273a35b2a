"""Questions: what people ask of a store, with this process's own uses written before they are answered."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernelstore import plugins
from kernelstore.artifact import ArtifactInfo, Program
from kernelstore.db import flusher, programs
from kernelstore.db.pool import Pool
from kernelstore.errors import InvalidArgument, InvalidType, KeyNotFound, StoreError
from kernelstore.explanation import Difference
from kernelstore.key import Key

if TYPE_CHECKING:
    import sqlalchemy

    from kernelstore.db.adhoc import SqlResult
    from kernelstore.db.stats import StoreStats

__all__ = ["Questions"]

# How long a search waits for the write lock, to have this process's own uses in the file first.
_READING_TIMEOUT_S = 0.2

_logger = logging.getLogger("kernelstore.store")


class Questions:
    """The part of `Store` that people ask. SQLAlchemy is imported by the first question that needs it.

    Parameters
    ----------
    pool : Pool
        The store's connections.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def search(
        self, *, symbol: str | None = None, arch: str | None = None, kind: str | None = None, limit: int | None = None
    ) -> Iterator[ArtifactInfo]:
        """Yield what matches all conditions, newest use first, without payloads.

        Parameters
        ----------
        symbol : str, optional
            Case-sensitive glob over name expressions and lowered names, such as ``"saxpy*"``.
        arch, kind : str, optional
            Exactly these.
        limit : int, optional
            At most so many, ≥ 0.

        Raises
        ------
        InvalidArch, UnknownPlugin, InvalidArgument
            A condition is of no use.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: one indexed read for 200 results; no transaction is open between two pages.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidArgument(f"limit is a whole number from 0 on, not {limit!r}")
        if kind is not None:
            plugins.load("kinds", kind)
        self._flush_for_reading()
        return self._with_own_uses(queries.search(self._engine(), queries.matches(symbol, arch, kind), limit))

    def find(self, prefix: str) -> Key:
        """Return the one key whose hex form begins with `prefix`.

        Raises
        ------
        InvalidArgument
            `prefix` is not 1 to 64 hex digits, or several keys begin with it.
        KeyNotFound
            None does.

        Notes
        -----
        Cost: one indexed read.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        digits = prefix.lower() if isinstance(prefix, str) else ""
        if re.fullmatch(r"[0-9a-f]{1,64}", digits) is None:
            raise InvalidArgument(f"{prefix!r} begins no key; a key is 64 hex digits")
        keys = queries.with_prefix(self._engine(), digits, 2)
        if not keys:
            raise KeyNotFound(f"{self._pool.path} has no artifact {digits}...", key=digits)
        if len(keys) > 1:
            raise InvalidArgument(f"several keys begin with {digits}: {keys[0]}, {keys[1]}, ...; give more digits")
        return keys[0]

    def info(self, key: Key | bytes | str) -> ArtifactInfo:
        """Return what is known of one artifact, without its payload.

        Raises
        ------
        KeyNotFound
            There is none.

        Notes
        -----
        Cost: one indexed read.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        key = Key(key)
        self._flush_for_reading()
        for info in self._with_own_uses(queries.search(self._engine(), [queries.has_key(key)], 1)):
            return info
        raise KeyNotFound(f"{self._pool.path} has no artifact {key}", key=key)

    def program(self, key: Key | bytes | str) -> Program | None:
        """Return the stored program with that key, with its source, or ``None``.

        Notes
        -----
        Cost: one indexed read.
        """
        return programs.with_key(self._pool, Key(key))

    def find_program(self, program: Key | bytes | str) -> Key:
        """Return the key of the one program that is meant: by its name, its key, or the key of one of its artifacts.

        Parameters
        ----------
        program : Key, bytes or str
            Of a key given as text the first digits will do.

        Raises
        ------
        InvalidType, InvalidArgument
            `program` is neither, or several are meant.
        KeyNotFound
            None is.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: one or two indexed reads.
        """
        return programs.find(self._pool, program)

    def compare(self, first: Key | bytes | str, second: Key | bytes | str) -> tuple[Difference, ...]:
        """Tell in which parts two artifacts, or two programs, differ: what `first` has and `second` has not.

        Parameters
        ----------
        first, second : Key, bytes or str
            Keys of artifacts or of programs.

        Raises
        ------
        InvalidType, InvalidArgument
            One is no key.
        KeyNotFound
            One is not there.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: two indexed reads for each.
        """
        return programs.compare(self._pool, Key(first), Key(second))

    def best_for(
        self,
        program: Key | bytes | str,
        compute_capability: tuple[int, int],
        driver_version: int | None = None,
    ) -> ArtifactInfo | None:
        """Return the stored artifact of a program that would serve a device, or ``None``. Needs no GPU.

        Parameters
        ----------
        program : Key, bytes or str
            Key of the program, or its name: then the newest program of that name.
        compute_capability : tuple[int, int]
            The device's, such as ``(9, 0)``.
        driver_version : int, optional
            Such as 13000. ``None`` leaves the driver out of the choice.

        Raises
        ------
        InvalidType, InvalidArgument
            A parameter is of no use.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: two or three indexed reads, no transaction; no use is counted. Cubins that a driver made of PTX are not
        considered, as they serve that driver alone.
        """
        _check_device(compute_capability, driver_version)
        return programs.best_for(self._pool, program, compute_capability, driver_version)

    def sql(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = (), *, timeout_s: float = 10.0
    ) -> SqlResult:
        """Run one statement that reads, over the tables of ``docs/schema.md``.

        Parameters
        ----------
        statement : str
            One SELECT.
        parameters : sequence or mapping
            For its placeholders.
        timeout_s : float
            After so long it is interrupted, > 0.

        Raises
        ------
        SqlError
            The statement is wrong, would write, is more than one, or took too long.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: the statement's own, on a connection that cannot write.
        """
        from kernelstore.db import adhoc

        if not isinstance(statement, str):
            raise InvalidType(f"a statement is text, not {type(statement).__name__}")
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InvalidArgument(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
        self._flush_for_reading()
        return adhoc.run(self._pool.path, statement, parameters, timeout_s)

    def stats(self) -> StoreStats:
        """Return the store's figures; those of this process that wait to be written are included.

        Notes
        -----
        Cost: a scan of the artifacts' index and a few small reads.
        """
        from kernelstore.db import stats  # SQLAlchemy: 160 ms

        return stats.collect(self._engine(), self._pool.path, self._pool.tally.counters())

    def _engine(self) -> sqlalchemy.Engine:
        self._pool.check_open()
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        return queries.engine(self._pool.path, self._pool.timeout_s)

    def _flush_for_reading(self) -> None:
        self._pool.check_open()
        # So that people see this process's own hits, in SQL too. While another process writes, the file is as it is.
        try:
            flusher.flush(self._pool, timeout_s=_READING_TIMEOUT_S)
        except StoreError as error:
            _logger.debug("uses not written before a search: %s", error)

    def _with_own_uses(self, found: Iterable[ArtifactInfo]) -> Iterator[ArtifactInfo]:
        for info in found:
            uses, last_access_ns = self._pool.tally.use_of(info.key)
            yield dataclasses.replace(
                info,
                usage_count=info.usage_count + uses,
                last_access_ns=max(info.last_access_ns, last_access_ns),
            )


def _check_device(compute_capability: object, driver_version: object) -> None:
    is_pair = isinstance(compute_capability, tuple) and len(compute_capability) == 2
    if not is_pair or not all(type(part) is int and part >= 0 for part in compute_capability):  # type: ignore[attr-defined]
        raise InvalidArgument(f"a compute capability is a pair such as (9, 0), not {compute_capability!r:.100}")
    if driver_version is not None and (type(driver_version) is not int or driver_version <= 0):
        raise InvalidArgument(f"a driver version is a number such as 13000, not {driver_version!r:.100}")
