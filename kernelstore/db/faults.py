"""Errors of SQLite, told apart by their codes and raised as kernelstore's own."""

from __future__ import annotations

import os
import sqlite3

from kernelstore.errors import (
    NotADatabase,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
    StoreUnavailable,
)

__all__ = ["is_locked", "translate"]

# Primary result codes (SQLite, "Result and Error Codes"); the extended code's low byte.
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_READ_ONLY = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})


def is_locked(error: sqlite3.Error) -> bool:
    """Return whether another one holds the lock that was asked for."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKED


def translate(error: sqlite3.Error, path: str | os.PathLike[str]) -> StoreError:
    """Return the error that says what `error` means for the store at `path`.

    Codes decide, never messages. An error without a code (a value SQLite cannot take, a closed connection) is
    `StoreUnavailable`.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    told = f"{os.fspath(path)}: {error} ({name})"
    if is_locked(error):
        return StoreLocked(f"{told}; another process holds the write lock, try again later", path=path)
    if code in _READ_ONLY:
        return StoreReadOnly(f"{told}; make the file and its directory writable for this user", path=path)
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"{told}; free space on the disk, or move the store (KERNELSTORE_PATH)", path=path)
    if code == sqlite3.SQLITE_NOTADB:
        return NotADatabase(f"{told}; the file was left as it is, choose another path", path=path)
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreCorrupt(f"{told}; move the file away, a new one will be made", path=path)
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreUnavailable(f"{told}; check that the directory exists and can be written", path=path)
    return StoreUnavailable(told, path=path)
