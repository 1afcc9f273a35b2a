"""Forks: no connection stays open across one, as a child would believe in locks that it does not have.

SQLite notes in the memory of a process which locks it holds on a file, and the kernel passes no lock on to a child. A
child with an open connection takes none of its own, and its parent's close deletes the WAL under it
(docs/decisions/0009-fork.md).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from kernelstore.errors import StoreUnavailable

if TYPE_CHECKING:
    from kernelstore.db.connection import Connection

__all__ = ["Owner", "enter", "is_pending", "leave", "register"]

# How long a fork waits for other threads' statements. They take microseconds, a commit on a busy disk some 10 ms; who
# waits for another process's write lets go (`is_pending`).
_TIMEOUT_S = 1.0
_POLL_S = 0.0005


class Owner(Protocol):
    """Who keeps connections open between two uses."""

    def close_unused(self) -> None:
        """Close what is not in use at this moment, without waiting for anything."""

    def start_anew(self) -> None:
        """Forget all connections and locks: this is a forked child, and none of the parent's threads is here."""


class _Gate:
    """What a connection passes before it opens; shut for all but the thread that forks."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        # Reentrant: a finalizer or a signal handler may close a connection while its thread is in here.
        self.lock = threading.RLock()
        # Held from before a fork until after it.
        self.fork_lock = threading.RLock()
        self.is_clear = threading.Event()
        self.forking_thread: int | None = None
        self.open: weakref.WeakSet[Connection] = weakref.WeakSet()


_gate = _Gate()
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()

# In a child: connections that its parent was in, never to be closed here (SQLite, "How To Corrupt", 2.6); and their
# files, by device and inode.
_kept: list[Connection] = []
_lost: set[tuple[int, int]] = set()


def register(owner: Owner) -> None:
    """Have an owner's connections closed before every fork. It is held weakly."""
    with _gate.lock:
        _owners.add(owner)


def enter(connection: Connection, *, nested: bool = False) -> None:
    """Note that a connection is about to open; waits while another thread forks.

    Parameters
    ----------
    nested : bool
        Whether the thread has another connection in use, so that the fork waits for it: it does not wait then.

    Raises
    ------
    StoreUnavailable
        This is a forked child, and the parent was using the file at the fork.
    """
    if _lost and _identity(connection.path) in _lost:
        raise StoreUnavailable(
            f"{connection.path} was in use by another thread when this process was forked, so it is not safe to open "
            'here; fork while no thread uses the store, or start processes with "spawn" or "forkserver"',
            path=connection.path,
        )
    while True:
        with _gate.lock:
            if nested or _gate.forking_thread in (None, threading.get_ident()):
                _gate.open.add(connection)
                return
        _gate.is_clear.wait()


def leave(connection: Connection) -> None:
    """Note that a connection is closed."""
    with _gate.lock:
        _gate.open.discard(connection)


def is_pending() -> bool:
    """Whether a thread waits to fork: connections are to be closed, not kept."""
    return _gate.forking_thread is not None


def _before() -> None:
    _gate.fork_lock.acquire()
    _gate.is_clear.clear()
    _gate.forking_thread = threading.get_ident()
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        with _gate.lock:
            owners = list(_owners)
        for owner in owners:
            owner.close_unused()
        if not _gate.open or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)


def _after_in_parent() -> None:
    _gate.forking_thread = None
    _gate.is_clear.set()
    _gate.fork_lock.release()


def _after_in_child() -> None:
    inherited = list(_gate.open)
    _gate.start_anew()
    _kept.extend(inherited)
    _lost.update(identity for connection in inherited if (identity := _identity(connection.path)) is not None)
    for owner in list(_owners):
        owner.start_anew()


def _identity(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)  # noqa: PTH116 - as it was given to SQLite
        return status.st_dev, status.st_ino
    return None


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
