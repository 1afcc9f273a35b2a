"""Flusher: one lazy thread for a process, which writes what was counted, so that no hit ever does."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from kernelstore.errors import StoreClosed, StoreError

if TYPE_CHECKING:
    from kernelstore.db.pool import Pool

__all__ = ["EXIT_TIMEOUT_S", "INTERVAL_S", "flush", "flush_all", "forget", "wake", "warn_of_loss"]

# A killed process loses the counts of so long. 64 ranks then make some 13 short transactions a second.
INTERVAL_S = 5.0

# The thread waits for the file's lock for no longer, as it holds this process's own lock meanwhile; it comes again.
_LOCK_TIMEOUT_S = 0.05
_RETRY_S = 0.5

# How long a process's end waits for the lock, over all its stores, and a fork for the thread to end.
EXIT_TIMEOUT_S = 5.0
_FORK_TIMEOUT_S = 1.0

_logger = logging.getLogger("kernelstore.store")


def flush(pool: Pool, *, timeout_s: float | None = None) -> None:
    """Write what waits in a pool's tally, in one transaction; none where nothing waits. May raise `StoreError`."""
    if pool.tally:
        pool.write(lambda _: None, timeout_s=timeout_s)


class _Flusher:
    """The thread, which is there only while something waits."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        # Reentrant, as a finalizer or a signal handler may count while its thread is in here.
        self._condition = threading.Condition()
        self._pools: set[Pool] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._has_finalizer = False

    def wake(self, pool: Pool) -> None:
        with self._condition:
            self._pools.add(pool)
            self._start()
            has_finalizer, self._has_finalizer = self._has_finalizer, True
        if not has_finalizer:
            _flush_at_end_of_child()

    def forget(self, pool: Pool) -> None:
        with self._condition:
            self._pools.discard(pool)
            self._condition.notify_all()

    def pools(self) -> list[Pool]:
        with self._condition:
            return list(self._pools)

    def stop(self) -> None:
        """End the thread; what waits goes on waiting."""
        with self._condition:
            thread, self._stopping = self._thread, True
            self._condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FORK_TIMEOUT_S)

    def resume(self) -> None:
        with self._condition:
            self._stopping = False
            self._start()

    def _start(self) -> None:
        if self._thread is not None or self._stopping or not self._pools:
            return
        thread = threading.Thread(target=self._run, name="kernelstore-flusher", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # The interpreter is ending, or the process has all its threads; close and exit write as well.
        self._thread = thread

    def _run(self) -> None:
        wait_s = INTERVAL_S
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or not self._pools, wait_s)
                if self._stopping or not self._pools:
                    self._thread = None
                    return
                pools = list(self._pools)
            written = [self._flush(pool) for pool in pools]
            wait_s = INTERVAL_S if all(written) else _RETRY_S

    def _flush(self, pool: Pool) -> bool:
        try:
            flush(pool, timeout_s=_LOCK_TIMEOUT_S)
        except StoreClosed:
            self.forget(pool)
            return True
        except StoreError as error:
            _logger.debug("uses wait on: %s", error)
            return False
        with self._condition:
            # Whoever counts first from now on wakes the thread again.
            if not pool.tally:
                self._pools.discard(pool)
        return True


_flusher = _Flusher()


def wake(pool: Pool) -> None:
    """Have the pool's tally written within some seconds. Called once for the first thing that waits."""
    _flusher.wake(pool)


def forget(pool: Pool) -> None:
    """Leave a pool alone, as it is closed."""
    _flusher.forget(pool)


def flush_all() -> None:
    """Write the tallies of all pools; what cannot be written in 5 s is lost with the process, and told."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for pool in _flusher.pools():
        try:
            flush(pool, timeout_s=max(0.0, deadline - time.monotonic()))
        except StoreError as error:
            warn_of_loss(pool, error)


def warn_of_loss(pool: Pool, error: StoreError) -> None:
    """Tell that what was counted is lost."""
    _logger.warning("%d uses and the counters of this process are lost: %s", pool.tally.uses().total(), error)


def _flush_at_end_of_child() -> None:
    # The children of multiprocessing end without `atexit`, after these finalizers. Last of all: others may hit.
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(None, flush_all, exitpriority=-100)


# Before a fork, as Python warns of a fork with threads; and a child has none but the one that forked.
os.register_at_fork(before=_flusher.stop, after_in_parent=_flusher.resume, after_in_child=_flusher.start_anew)
