"""Connections to the file: one `connect` makes all of them, with every pragma."""

from __future__ import annotations

import os
import sqlite3
from typing import Any
from urllib.parse import quote

from kernelstore.db import forks

__all__ = ["LOCK_TIMEOUT_S", "PAGE_SIZE_BYTES", "Connection", "connect"]

# Blobs of 10 to 200 KB read and write best at 8 KiB (SQLite, "Internal Versus External BLOBs").
PAGE_SIZE_BYTES = 8192

# How long a write waits for the lock. Transactions here take well under a millisecond; a migration takes about one
# second, several where 32 processes share two cores.
LOCK_TIMEOUT_S = 30.0

# -shm and -wal are kept between 16 MiB and nothing after a checkpoint (SQLite, "Write-Ahead Logging", 6).
_WAL_LIMIT_BYTES = 16 * 2**20

_PRAGMAS = (
    # Two settings close the window of SQLite's WAL-reset bug (before 3.51.3): checkpoints only under guard, no mmap.
    "PRAGMA wal_autocheckpoint = 0",
    "PRAGMA mmap_size = 0",
    # Consistent after any crash of a process or of the machine; the newest commits may go with the machine.
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}",
    "PRAGMA cache_size = -8192",
    # Debian's SQLite overwrites deleted content by default: 35 times slower eviction, for compiled kernels in vain.
    "PRAGMA secure_delete = OFF",
    # The file may have been written by others: no functions from its schema, and cells are checked as they are read.
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA foreign_keys = ON",
    "PRAGMA temp_store = MEMORY",
)


class Connection(sqlite3.Connection):
    """A connection that no fork leaves open.

    Parameters
    ----------
    path : str
        The file.
    uri : str
        The same for SQLite, with its mode.
    nested : bool
        As `connect` takes it.
    """

    def __init__(self, path: str, uri: str, *, nested: bool, **options: Any) -> None:
        self.path = path
        forks.enter(self, nested=nested)
        super().__init__(uri, uri=True, **options)

    def close(self) -> None:
        """Close it; a second call does nothing."""
        super().close()
        forks.leave(self)


def connect(
    path: str | os.PathLike[str],
    *,
    mode: str = "rw",
    query_only: bool = False,
    timeout_s: float = LOCK_TIMEOUT_S,
    nested: bool = False,
) -> Connection:
    """Open a connection in autocommit mode; transactions are begun by hand.

    Parameters
    ----------
    path : str or path
        The file. Characters that mean something in a URI are quoted.
    mode : str
        ``"rw"``, ``"rwc"`` (make the file if it is absent), ``"ro"``, or ``"ro&immutable=1"`` (the file alone, without
        its journal or WAL).
    query_only : bool
        Whether statements that would write are refused.
    timeout_s : float
        How long a statement waits for a lock, ≥ 0.
    nested : bool
        Whether the thread has another connection in use meanwhile. Where none is, this waits while another thread
        forks.

    Raises
    ------
    sqlite3.Error
        The file cannot be opened; SQLite opens lazily, so damage shows at the first statement.
    StoreUnavailable
        In a forked child whose parent was using the file at the fork.
    """
    uri = f"file:{quote(os.fsencode(path))}?mode={mode}"
    # Threads take turns on a connection, guarded by its owner, so the module's own check is off.
    connection = Connection(
        os.fspath(path), uri, nested=nested, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(pragma)
        if query_only:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection
