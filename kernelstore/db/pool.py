"""The connections of one process to one file: a few for reads, one locked for writes, none across a fork."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kernelstore.db import flusher, forks, statements
from kernelstore.db.connection import LOCK_TIMEOUT_S, Connection, connect
from kernelstore.db.faults import is_locked, translate
from kernelstore.db.tally import Tally
from kernelstore.errors import SchemaTooNew, StoreClosed, StoreLocked, WalTooLong

__all__ = ["Pool"]

_T = TypeVar("_T")

# Idle read connections that are kept; each holds up to 8 MiB of page cache.
_MAX_IDLE = 8

# A checkpoint follows the commit that leaves the WAL above this; some 1,000 puts of small cubins.
_CHECKPOINT_BYTES = 4 * 2**20

# Above this nothing more is written until a checkpoint gets through: a reader that never ends holds it up. Others end
# soon, and are waited for.
_MAX_WAL_BYTES = 64 * 2**20
_READER_TIMEOUT_S = 1.0

# SQLite waits for the lock no longer at a time, so that a thread that waits lets go for a fork.
_SLICE_S = 0.05


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
        self.start_anew()
        forks.register(self)

    def start_anew(self) -> None:
        """Begin without connections and with free locks, also in a forked child."""
        self.tally.start_anew()
        self._idle: list[Connection] = []
        self._writer: Connection | None = None
        # Held by the thread that writes. Reentrant only so that giving it back tells whether one has it.
        self._lock = threading.RLock()
        self._lock_holder: int | None = None
        self._writing_threads: set[int] = set()

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
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        # Only now: whoever closes or forks from here on finds it among the idle ones.
        if self._closed or forks.is_pending():
            self._close_idle()
        return rows

    def write(self, work: Callable[[sqlite3.Connection], _T], *, timeout_s: float | None = None) -> _T:
        """Do some work in one transaction, with the tally: all of it is in the file on return, or nothing on an error.

        Parameters
        ----------
        work : callable
            Is given the connection, within BEGIN IMMEDIATE.
        timeout_s : float, optional
            How long the lock is waited for; ``None``: as long as the pool's.

        Returns
        -------
        object
            What `work` returned.

        Raises
        ------
        StoreClosed, StoreLocked, StoreFull, StoreReadOnly, WalTooLong, SchemaTooNew, StoreError
            Nothing was written; the tally goes on waiting.
        """
        me = threading.get_ident()
        if me in self._writing_threads:
            raise StoreLocked(
                f"{self.path}: this thread is within a write already, which a finalizer or a signal handler cannot "
                "wait for",
                path=self.path,
            )
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        failed = False
        # A KeyboardInterrupt may come between any two steps, those of `_end` too: it runs twice, and does each once.
        try:
            try:
                self._writing_threads.add(me)
                writer = self._begin(deadline)
                done = work(writer)
                writer.execute("COMMIT")
                # Before the checkpoint begins a transaction of its own, which `_end` could take for this one.
                self.tally.written()
                self._checkpoint_if_long(writer)
            except sqlite3.Error as error:
                failed = True
                raise translate(error, self.path) from error
            finally:
                self._end(failed)
        finally:
            self._end(failed)
        return done

    def check_open(self) -> None:
        """Raise `StoreClosed` after `close`."""
        if self._closed:
            raise StoreClosed(f"the store {self.path} is closed; open it again", path=self.path)

    def close(self) -> None:
        """Close all connections; a second call does nothing. The last one of all processes folds the WAL in."""
        self._closed = True
        flusher.forget(self)
        self._close_idle()
        # Within its own write, as a finalizer may be: the end of the write closes the writer.
        if threading.get_ident() not in self._writing_threads:
            with self._lock:
                self._close_writer()

    def close_unused(self) -> None:
        """Close the connections that are not in use, without waiting for the others."""
        self._close_idle()
        if threading.get_ident() not in self._writing_threads and self._lock.acquire(blocking=False):
            try:
                self._close_writer()
            finally:
                self._lock.release()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _wake(self) -> None:
        # A closed store still counts, for nobody: its callers need not care.
        if not self._closed:
            flusher.wake(self)

    def _connect(self, *, query_only: bool) -> Connection:
        self.check_open()
        try:
            return connect(self.path, query_only=query_only, timeout_s=self.timeout_s)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error

    def _begin(self, deadline: float) -> Connection:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreLocked(f"{self.path}: another thread is writing; try again later", path=self.path)
        self._lock_holder = threading.get_ident()
        reader_deadline = min(deadline, time.monotonic() + _READER_TIMEOUT_S)
        while True:
            writer = self._begin_immediate(deadline)
            self._check_min_writer(writer)
            if self._wal_bytes() <= _MAX_WAL_BYTES or self._checkpoint():
                break
            writer.execute("ROLLBACK")
            if forks.is_pending():
                self._close_writer()
            if time.monotonic() >= reader_deadline:
                raise WalTooLong(
                    f"{self.path}-wal is longer than {_MAX_WAL_BYTES >> 20} MiB and a reader holds up its clean-up; "
                    "end the process or the transaction that reads the file for so long",
                    path=self.path,
                )
            time.sleep(_SLICE_S)
        self.tally.take().write(writer)
        return writer

    def _check_min_writer(self, writer: Connection) -> None:
        rows = writer.execute(statements.MIN_WRITER).fetchall()
        min_writer = int(rows[0][0]) if rows else 0
        if min_writer > statements.REVISION:
            raise SchemaTooNew(
                f"{self.path} was upgraded meanwhile and takes writes from schema revision {min_writer:04} on only; "
                "upgrade kernelstore",
                path=self.path,
                revision=min_writer,
                known_revision=statements.REVISION,
            )

    def _begin_immediate(self, deadline: float) -> Connection:
        while True:
            if self._writer is None:
                self._writer = self._connect(query_only=False)
            left_s = max(0.0, deadline - time.monotonic())
            self._writer.execute(f"PRAGMA busy_timeout = {round(min(left_s, _SLICE_S) * 1000)}")
            try:
                self._writer.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if left_s == 0.0 or not is_locked(error):
                    raise
            else:
                return self._writer
            if forks.is_pending():
                self._close_writer()

    def _end(self, failed: bool) -> None:
        """End this thread's write, wherever it stands. A second call does nothing."""
        me = threading.get_ident()
        if self._lock_holder == me:
            # SQLite rolls back by itself on some errors (full disk, I/O). Otherwise who is in no transaction any more
            # has committed.
            if failed or (self._writer is not None and self._writer.in_transaction):
                self.tally.restore()
                self._roll_back()
            else:
                self.tally.written()
            if self._closed or forks.is_pending():
                self._close_writer()
            self._lock_holder = None
        with contextlib.suppress(RuntimeError):
            self._lock.release()
        self._writing_threads.discard(me)

    def _roll_back(self) -> None:
        if self._writer is not None and self._writer.in_transaction:
            try:
                self._writer.execute("ROLLBACK")
            except sqlite3.Error:
                self._close_writer()

    def _checkpoint_if_long(self, writer: sqlite3.Connection) -> None:
        if self._wal_bytes() > _CHECKPOINT_BYTES:
            # A failure costs only a longer WAL.
            with contextlib.suppress(sqlite3.Error):
                writer.execute("BEGIN IMMEDIATE")
                try:
                    self._checkpoint()
                finally:
                    writer.execute("ROLLBACK")

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size  # noqa: PTH116 - the path's text, with a suffix
        except OSError:
            return 0

    def _checkpoint(self) -> bool:
        """Copy the WAL into the file, within a transaction of the writer; whether all of it could be copied.

        Before SQLite 3.51.3 a commit that resets the WAL during a checkpoint can lose committed rows. The writer's
        lock keeps all commits out meanwhile (docs/how-it-works.md).
        """
        with contextlib.closing(connect(self.path, timeout_s=0, nested=True)) as other:
            ((is_busy, frames, copied),) = other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return not is_busy and copied == frames
