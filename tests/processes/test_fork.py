"""Forked children: their own connections, their own counts, and a parent that notices nothing."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from kernelstore import Artifact, Store


def _in_child(work: object) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_parent_and_children_read_and_write_over_one_store(path: Path, store: Store, cubin: Artifact) -> None:
    """C55: eight children, each on connections of its own."""
    store.put(cubin)
    inherited = list(store._pool._idle), store._pool._writer

    def work() -> None:
        assert store.get(cubin.key) is not None
        assert store._pool._idle[0] not in inherited[0]
        store.flush()
        assert store._pool._writer is not inherited[1]

    for _ in range(8):
        assert _in_child(work) == 0
        assert store.get(cubin.key) is not None

    store.flush()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT usage_count FROM artifact").fetchone() == (16,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_child_does_not_count_what_its_parent_counted(path: Path, store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    store.get(cubin.key)

    assert _in_child(store.close) == 0
    store.flush()

    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT usage_count FROM artifact").fetchone() == (1,)
    connection.close()
