"""Usage accounting: exact after orderly exits, written by no hit, and lost by nothing but kills, with a warning."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from sharing import write_lock

from kernelstore import Artifact, Store
from kernelstore.db import flusher

HITS = 200


@pytest.fixture
def stored(store: Store, cubin: Artifact) -> Artifact:
    store.put(cubin)
    return cubin


def uses(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        count: int = connection.execute("SELECT sum(usage_count) FROM artifact").fetchone()[0]
        return count


def hit(path: Path | str, key: bytes, count: int) -> None:
    # As people leave them: never closed, never flushed.
    global _left_open
    _left_open = Store(path)
    for _ in range(count):
        assert _left_open.get(key) is not None


_left_open: Store


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing_lose_no_use(path: Path, stored: Artifact, method: str) -> None:
    """C51: also those forked ones that end without `atexit`."""
    context = multiprocessing.get_context(method)
    children = [context.Process(target=hit, args=(path, bytes(stored.key), HITS)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()

    assert [child.exitcode for child in children] == [0] * 4
    assert uses(path) == 4 * HITS


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_80000_uses_by_8_processes_are_80000(path: Path, stored: Artifact, method: str) -> None:
    context = multiprocessing.get_context(method)
    children = [context.Process(target=hit, args=(path, bytes(stored.key), 10_000)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join()

    assert uses(path) == 80_000


def test_a_child_that_uses_its_parents_store_loses_no_use(path: Path, store: Store, stored: Artifact) -> None:
    store.get(stored.key)

    child = multiprocessing.get_context("fork").Process(target=lambda: [store.get(stored.key) for _ in range(HITS)])
    child.start()
    child.join()
    store.flush()

    assert uses(path) == HITS + 1


def test_a_process_that_just_ends_loses_no_use(path: Path, stored: Artifact) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from kernelstore import Store; s = Store(sys.argv[1])\nfor _ in range(7): s.get(sys.argv[2])",
            path,
            str(stored.key),
        ],
        check=True,
    )

    assert uses(path) == 7


def test_the_flusher_writes_and_ends(
    path: Path, store: Store, stored: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "INTERVAL_S", 0.01)
    store.get(stored.key)

    deadline = time.monotonic() + 60
    while uses(path) != 1 or flusher._flusher._thread is not None:
        assert time.monotonic() < deadline


def test_the_flusher_comes_again_where_the_lock_is_taken(
    path: Path, store: Store, stored: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "INTERVAL_S", 0.01)
    monkeypatch.setattr(flusher, "_RETRY_S", 0.01)
    failed = threading.Event()
    flush = flusher.flush

    def told(*args: object, **how: object) -> None:
        try:
            flush(*args, **how)  # type: ignore[arg-type]
        except Exception:
            failed.set()
            raise

    monkeypatch.setattr(flusher, "flush", told)
    with write_lock(path):
        store.get(stored.key)
        assert failed.wait(60)
    deadline = time.monotonic() + 60
    while uses(path) != 1:
        assert time.monotonic() < deadline


def test_while_another_process_writes_a_hit_is_served_and_seen(path: Path, store: Store, stored: Artifact) -> None:
    """C58: a hit takes no write lock; who asks in this process sees its uses before they are in the file."""
    with write_lock(path):
        for _ in range(3):
            assert store.get(stored.key) is not None
        assert store.info(stored.key).usage_count == 3
        assert [info.usage_count for info in store.search()] == [3]
        assert store.stats().hits == 3
        assert store.info(stored.key).last_access_ns > store.info(stored.key).created_at_ns
        assert uses(path) == 0

    assert store.info(stored.key).usage_count == 3
    assert uses(path) == 3


def test_uses_of_a_deleted_row_reach_no_other(path: Path, store: Store, stored: Artifact, ptx: Artifact) -> None:
    store.get(stored.key)
    with Store(path) as other:
        other.delete(stored.key)
        other.put(ptx)  # takes the row id that came free

    store.flush()

    assert uses(path) == 0


def test_the_end_has_a_deadline_and_tells_what_is_lost(path: Path, store: Store, stored: Artifact) -> None:
    script = (
        "import sys\n"
        "from kernelstore import Store\n"
        "from kernelstore.db import flusher\n"
        "flusher.EXIT_TIMEOUT_S = 0.2\n"
        "stores = [Store(sys.argv[1]) for _ in range(3)]\n"
        "for s in stores: s.get(sys.argv[2])\n"
    )
    with write_lock(path):
        ended = subprocess.run(
            [sys.executable, "-c", script, path, str(stored.key)], check=True, capture_output=True, text=True
        )

    assert ended.stderr.count("1 uses and the counters of this process are lost") == 3
    assert uses(path) == 0


def test_a_fork_finds_no_thread_and_leaves_the_counts_to_the_parent(
    path: Path, store: Store, stored: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.get(stored.key)
    assert flusher._flusher._thread is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        child = os.fork()
        if child == 0:
            os._exit(0 if threading.active_count() == 1 and not store._pool.tally else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert flusher._flusher._thread is not None

    store.flush()
    assert uses(path) == 1


def test_a_fork_does_not_wait_for_the_file(path: Path, store: Store, stored: Artifact) -> None:
    with write_lock(path):
        store.get(stored.key)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_what_waits_is_bounded(store: Store, stored: Artifact, ptx: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelstore.db.tally._MAX_USES", 1)
    store.put(ptx)
    store.get(stored.key)
    store.get(stored.key)
    store.get(ptx.key)

    assert store._pool.tally.uses() == {stored.key: 2}
    assert store.stats().hits == 3


def test_a_hit_on_a_damaged_row_does_not_wait_for_the_lock(path: Path, store: Store, stored: Artifact) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE blob SET data = zeroblob(length(data))")
    with write_lock(path):
        assert store.get(stored.key) is None
    assert store.get(stored.key) is None
    assert len(store) == 0
