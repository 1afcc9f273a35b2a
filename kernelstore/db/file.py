"""The file itself: finding out what it is, making it, and bringing it to this release's revision."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from enum import Enum
from pathlib import Path

from kernelstore.db.connection import LOCK_TIMEOUT_S, PAGE_SIZE_BYTES, connect
from kernelstore.db.faults import is_locked, translate
from kernelstore.db.statements import REVISION
from kernelstore.errors import ForeignFile, NotADatabase, SchemaTooNew, SqliteTooOld, StoreLocked, StoreUnavailable
from kernelstore.locks import new_lock

__all__ = ["APPLICATION_ID", "SharedLock", "prepare"]

# "kstr" as a big-endian integer, in the header of every store (SQLite, "PRAGMA application_id").
APPLICATION_ID = int.from_bytes(b"kstr", "big")

# STRICT tables (SQLite 3.37); RETURNING came with 3.35.
_MINIMUM_SQLITE = (3, 37, 0)

_NEEDS_RECOVERY = frozenset({sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY})

# The smallest page that SQLite knows.
_MINIMUM_BYTES = 512

# Two threads of one process that make one file would race in alembic, whose context is a module global.
_preparing = new_lock()


class _State(Enum):
    EMPTY = "empty"
    OLDER = "older"
    CURRENT = "current"


def prepare(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Make sure that `path` is a store of this release's revision.

    A file that is up to date costs one connection and two pragmas, and writes nothing. An absent or older one is
    migrated in one transaction under the write lock; others that want the same wait for it.

    Raises
    ------
    NotADatabase, ForeignFile, SchemaTooNew
        The file was left byte for byte as it was.
    StoreUnavailable
        The file or its directory cannot be opened, made or locked.
    SqliteTooOld
        This Python's SQLite cannot hold the schema.
    """
    if sqlite3.sqlite_version_info < _MINIMUM_SQLITE:
        minimum = ".".join(map(str, _MINIMUM_SQLITE))
        raise SqliteTooOld(
            f"SQLite {sqlite3.sqlite_version} is too old, {minimum} is needed; use a Python built with a newer SQLite",
            path=path,
            version=sqlite3.sqlite_version,
            minimum=minimum,
        )
    with _preparing:
        try:
            size_bytes = path.stat().st_size if path.exists() else 0
            if 0 < size_bytes < _MINIMUM_BYTES:
                # SQLite takes so short a file for an empty database, and would write over it.
                raise NotADatabase(
                    f"{path} holds {size_bytes} bytes that are no database; it was left as it is", path=path
                )
            if size_bytes:
                # Read-only first: whatever this file turns out to be, looking at it must not change it.
                state = _look(path, timeout_s)
            else:
                _make_directory(path)
                state = _State.EMPTY
            if state is not _State.CURRENT:
                _migrate(path, timeout_s)
        except sqlite3.Error as error:
            raise translate(error, path) from error
        except OSError as error:
            if isinstance(error, StoreUnavailable):
                raise
            raise StoreUnavailable(
                f"{path}: {error.strerror or error}; choose another path (KERNELSTORE_PATH)", path=path
            ) from error


def _look(path: Path, timeout_s: float) -> _State:
    try:
        with contextlib.closing(connect(path, mode="ro", timeout_s=timeout_s)) as connection:
            return _classify(connection, path)
    except sqlite3.OperationalError as error:
        # A process died within a write and left its journal, which only one that may write can roll back. Whose file
        # it is tells the file alone.
        if getattr(error, "sqlite_errorcode", 0) not in _NEEDS_RECOVERY:
            raise
    with contextlib.closing(connect(path, mode="ro&immutable=1", timeout_s=timeout_s)) as connection:
        state = _classify(connection, path)
    with contextlib.closing(connect(path, timeout_s=timeout_s)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    return state


def _classify(connection: sqlite3.Connection, path: Path) -> _State:
    application_id = _pragma(connection, "application_id")
    revision = _pragma(connection, "user_version")
    if application_id == APPLICATION_ID:
        if revision > REVISION:
            raise SchemaTooNew(
                f"{path} has schema revision {revision:04}, this release knows {REVISION:04}; "
                "upgrade kernelstore, or choose another path",
                path=path,
                revision=revision,
                known_revision=REVISION,
            )
        return _State.CURRENT if revision == REVISION else _State.OLDER
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()[0][0]
    if application_id == 0 and revision == 0 and tables == 0:
        return _State.EMPTY
    raise ForeignFile(
        f"{path} is a database of another application (application_id {application_id}, {tables} schema entries); "
        "it was left as it is, choose another path",
        path=path,
        application_id=application_id,
    )


def _migrate(path: Path, timeout_s: float) -> None:
    fresh = not path.exists()
    connection = connect(path, mode="rwc", timeout_s=timeout_s)
    try:
        if fresh:
            # SQLite gives -wal and -shm the file's own mode. chmod opens nothing, so it drops nobody's locks.
            path.chmod(0o600)
        # Before the first table; on a file that has tables they do nothing.
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _use_wal(connection, timeout_s)
        # Migrations rebuild tables: with foreign keys on that would empty their children. No effect inside BEGIN.
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("PRAGMA legacy_alter_table = ON")
        connection.execute("BEGIN IMMEDIATE")
        # Again under the lock: of 32 processes on an absent file one imports alembic, the others find its work.
        if _classify(connection, path) is _State.CURRENT:
            connection.execute("ROLLBACK")
            return
        from kernelstore.db import migrate  # SQLAlchemy and alembic: 260 ms

        migrate.upgrade(connection, APPLICATION_ID)
    finally:
        connection.close()


def _use_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    # Two processes that change the mode at once: one is told "busy" without any wait (SQLite's handler is not asked
    # where waiting could deadlock), so it asks again.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            # Where shared memory is missing the mode stays as it was, which is slower and still right.
            return


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchall()[0][0]
    return value


def _make_directory(path: Path) -> None:
    missing = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


class SharedLock:
    """A shared ``flock`` on ``<path>.lock`` for the life of a store.

    Whoever sets a file aside or replaces it takes the lock exclusively, and so knows that nobody has it open. The
    kernel drops the lock with its process. Where the directory cannot be written there is no lock: nobody can
    replace the file there either.
    """

    def __init__(self, path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
                return
            raise StoreUnavailable(f"{self.path}: {error.strerror}", path=path) from error
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise StoreLocked(f"{path} is being replaced by another process", path=path) from None
                time.sleep(0.01)
            except OSError:
                # A file system without flock (some network mounts).
                os.close(descriptor)
                return
            else:
                self._descriptor = descriptor
                return

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
