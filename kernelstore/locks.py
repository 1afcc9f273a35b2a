"""Locks that a forked child finds free, whichever thread of its parent held them."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["new_lock"]

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a lock that is free in every forked child: the thread that held it is not there to give it back."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_after_fork_in_child)
