"""The connections of one process to one file: a few for reads, one locked for writes, none across a fork."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from kernelstore.db import flusher, statements
from kernelstore.db.connection import LOCK_TIMEOUT_S, connect
from kernelstore.db.faults import translate
from kernelstore.db.tally import Taken, Tally
from kernelstore.errors import SchemaTooNew, StoreClosed, StoreLocked

__all__ = ["Pool"]

# Idle read connections that are kept; each holds up to 8 MiB of page cache.
_MAX_IDLE = 8

# A checkpoint follows the commit that leaves the WAL above this; some 1,000 puts of small cubins.
_CHECKPOINT_BYTES = 4 * 2**20

# Connections that a child inherited. Closing them would run SQLite's clean-up on the parent's locks and files
# (SQLite, "How To Corrupt", 2.6), so they are kept referenced and unused.
_inherited: list[object] = []

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """Connections to one prepared file, safe for threads; a forked child starts with its own.

    Parameters
    ----------
    path : Path
        A file that `kernelstore.db.file.prepare` has seen.
    timeout_s : float
        How long a write waits for the lock.

    Attributes
    ----------
    tally : Tally
        What waits to be written; every write takes it along.
    """

    def __init__(self, path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.path = path
        self.tally = Tally(self._wake)
        self.timeout_s = timeout_s
        self._closed = False
        self._start()
        _pools.add(self)

    def _start(self) -> None:
        self._idle: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._write_lock = threading.Lock()

    def read(self, statement: str, parameters: dict[str, Any]) -> list[Any]:
        """Run one SELECT outside any transaction and return all rows.

        Takes no write lock and waits for none.

        Raises
        ------
        StoreClosed, StoreError
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect(query_only=True)
        try:
            rows = connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            connection.close()
            raise translate(error, self.path) from error
        if len(self._idle) < _MAX_IDLE and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return rows

    def write(self, *, timeout_s: float | None = None) -> Transaction:
        """Return a transaction to be entered; it waits up to `timeout_s` (``None``: the pool's) for the lock."""
        return Transaction(self, self.timeout_s if timeout_s is None else timeout_s)

    def check_open(self) -> None:
        """Raise `StoreClosed` after `close`."""
        if self._closed:
            raise StoreClosed(f"the store {self.path} is closed; open it again", path=self.path)

    def close(self) -> None:
        """Close all connections; a second call does nothing. The last one of all processes folds the WAL in."""
        self._closed = True
        flusher.forget(self)
        with self._write_lock:
            while self._idle:
                self._idle.pop().close()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _wake(self) -> None:
        # A closed store still counts, for nobody: its callers need not care.
        if not self._closed:
            flusher.wake(self)

    def _connect(self, *, query_only: bool) -> sqlite3.Connection:
        self.check_open()
        try:
            return connect(self.path, query_only=query_only, timeout_s=self.timeout_s)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error

    def _checkpoint_if_long(self, writer: sqlite3.Connection) -> None:
        try:
            wal_bytes = os.stat(f"{self.path}-wal").st_size  # noqa: PTH116 - the path's text, with a suffix
        except OSError:
            return
        if wal_bytes <= _CHECKPOINT_BYTES:
            return
        # Before SQLite 3.51.3 a commit that resets the WAL during a checkpoint can lose committed rows; holding the
        # write lock meanwhile keeps all commits out (docs/how-it-works.md). A failure costs only a longer WAL.
        with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(self.path, timeout_s=0)) as other:
            writer.execute("BEGIN IMMEDIATE")
            try:
                other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                writer.execute("ROLLBACK")

    def _forget_inherited(self) -> None:
        _inherited.append((self._idle, self._writer))
        self._start()


class Transaction:
    """One write transaction: BEGIN IMMEDIATE, the check of ``min_writer``, the tally, COMMIT or ROLLBACK.

    Entering gives the connection. What the tally held goes back to it when the transaction does not commit.
    """

    __slots__ = ("_connection", "_pool", "_taken", "_timeout_s")

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._taken: Taken | None = None

    def __enter__(self) -> sqlite3.Connection:
        pool = self._pool
        if not pool._write_lock.acquire(timeout=self._timeout_s):
            raise StoreLocked(f"{pool.path}: another thread is writing; try again later", path=pool.path)
        try:
            if pool._writer is None:
                pool._writer = pool._connect(query_only=False)
            self._connection = pool._writer
            self._begin()
        except BaseException as error:
            self._abandon()
            pool._write_lock.release()
            if isinstance(error, sqlite3.Error):
                raise translate(error, pool.path) from error
            raise
        return self._connection

    def _begin(self) -> None:
        connection, pool = self._connection, self._pool
        connection.execute(f"PRAGMA busy_timeout = {round(self._timeout_s * 1000)}")
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute(statements.MIN_WRITER).fetchall()
        min_writer = int(rows[0][0]) if rows else 0
        if min_writer > statements.REVISION:
            raise SchemaTooNew(
                f"{pool.path} was upgraded meanwhile and takes writes from schema revision {min_writer:04} on only; "
                "upgrade kernelstore",
                path=pool.path,
                revision=min_writer,
                known_revision=statements.REVISION,
            )
        self._taken = pool.tally.take()
        self._taken.write(connection)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pool = self._pool
        try:
            if error is None:
                try:
                    self._connection.execute("COMMIT")
                except sqlite3.Error as failure:
                    error = failure
            if error is None:
                pool._checkpoint_if_long(self._connection)
                return
            self._abandon()
            if isinstance(error, sqlite3.Error):
                raise translate(error, pool.path) from error
        finally:
            pool._write_lock.release()

    def _abandon(self) -> None:
        connection = self._pool._writer
        # SQLite rolls back by itself on some errors (full disk, I/O), not on others.
        if connection is not None and connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        if self._taken is not None:
            self._pool.tally.restore(self._taken)
            self._taken = None


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._forget_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)
