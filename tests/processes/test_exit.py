"""Stores as programs leave them: closed twice, collected, used afterwards, by many threads, and at the very end."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sharing import check_whole, other_key

from kernelstore import Artifact, Compiler, Store
from kernelstore.errors import StoreClosed, StoreLocked, StoreWarning

Rows = Callable[..., list[tuple[Any, ...]]]


def test_64_threads_use_one_store(path: Path, store: Store, cubin: Artifact, rows: Rows) -> None:
    """C56: each reads, puts, deletes, searches; nothing is lost and every use is counted."""
    store.put(cubin)
    barrier = threading.Barrier(64)

    def work(number: int) -> None:
        own, passing = other_key(cubin, 2 * number + 1), other_key(cubin, 2 * number + 2)
        barrier.wait()
        for _ in range(10):
            assert store.get(cubin.key) is not None
        store.put(own, passing)
        assert store.get(own.key) is not None
        assert store.delete(passing.key)
        assert store.info(own.key).usage_count == 1

    with ThreadPoolExecutor(64) as threads:
        for done in [threads.submit(work, number) for number in range(64)]:
            done.result()
    store.flush()

    check_whole(path)
    assert rows("SELECT count(*), sum(usage_count) FROM artifact") == [(65, 704)]


def test_callers_in_asyncio_and_those_that_are_cancelled(path: Path, store: Store, cubin: Artifact, rows: Rows) -> None:
    """F56: what a thread has begun it ends, whether or not somebody waits for it."""
    served = threading.Semaphore(0)

    def put_and_get(number: int) -> bytes:
        artifact = other_key(cubin, number)
        store.put(artifact)
        found = store.get(artifact.key)
        served.release()
        assert found is not None
        return found.payload

    async def main() -> None:
        assert await asyncio.gather(*[asyncio.to_thread(put_and_get, number) for number in range(50)]) == (
            [cubin.payload] * 50
        )
        abandoned = [asyncio.create_task(asyncio.to_thread(put_and_get, 100 + number)) for number in range(8)]
        await asyncio.to_thread(lambda: [served.acquire() for _ in range(51)])  # one of those eight, at least
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        assert await asyncio.to_thread(put_and_get, 1000) == cubin.payload

    asyncio.run(main())
    store.flush()

    check_whole(path)
    ((count, uses),) = rows("SELECT count(*), sum(usage_count) FROM artifact")
    assert count == uses
    assert count > 51


def test_a_collected_store_has_written_its_uses(path: Path, store: Store, cubin: Artifact, rows: Rows) -> None:
    store.put(cubin)
    passing = Store(path)
    passing.get(cubin.key)
    del passing
    gc.collect()

    assert rows("SELECT usage_count FROM artifact") == [(1,)]


def test_a_store_that_is_collected_within_a_write_of_its_own_kind(path: Path, store: Store, cubin: Artifact) -> None:
    """A cycle with a store in it may be collected at any instant, also within another store's write."""

    def collect(_: sqlite3.Connection) -> None:
        passing = Store(path)
        passing.get(cubin.key)
        cycle = [passing]
        cycle.append(cycle)  # type: ignore[arg-type]
        del passing, cycle
        gc.collect()

    store.put(cubin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernelstore.db.flusher.EXIT_TIMEOUT_S", 0.1)
        store._pool.write(collect)

    store.put(other_key(cubin, 1))
    check_whole(path)


def test_a_second_close_does_nothing(path: Path, cubin: Artifact) -> None:
    store = Store(path)
    store.put(cubin)
    store.close()
    store.close()
    with Store(path) as other:
        other.close()
        store.close()


USES: dict[str, Callable[[Store, Artifact], object]] = {
    "get": lambda store, artifact: store.get(artifact.key),
    "peek": lambda store, artifact: store.peek(artifact.key),
    "put": lambda store, artifact: store.put(artifact),
    "delete": lambda store, artifact: store.delete(artifact.key),
    "[]": lambda store, artifact: store[artifact.key],
    "len": lambda store, _: len(store),
    "iter": lambda store, _: list(store),
    "info": lambda store, artifact: store.info(artifact.key),
    "search": lambda store, _: list(store.search()),
    "sql": lambda store, _: store.sql("SELECT 1"),
    "stats": lambda store, _: store.stats(),
    "with": lambda store, _: store.__enter__(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_use_after_close_says_so(path: Path, cubin: Artifact, use: Callable[[Store, Artifact], object]) -> None:
    store = Store(path)
    store.put(cubin)
    store.close()

    with pytest.raises(StoreClosed, match=f"the store {path} is closed; open it again"):
        use(store, cubin)


def test_a_compiler_goes_on_over_a_closed_store(path: Path) -> None:
    store = Store(path)
    with Compiler(store) as compiler:
        store.close()
        with pytest.warns(StoreWarning, match="closed"):
            artifact = compiler.compile('extern "C" __global__ void k() {}', "ptx", arch="compute_90")

    assert artifact.payload


def test_a_write_within_a_write_is_refused_at_once(store: Store, cubin: Artifact) -> None:
    """A signal handler that runs within a write of its thread would wait for itself."""
    refused: list[StoreLocked] = []

    def put_another(*_: object) -> None:
        try:
            store.put(other_key(cubin, 2))
        except StoreLocked as error:
            refused.append(error)

    def work(_: sqlite3.Connection) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, put_another)
    try:
        store._pool.write(work)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert "within a write already" in str(refused[0])
    store.put(other_key(cubin, 2))
    assert len(store) == 1


DAEMONS = """
import sys, threading
from kernelstore import Artifact, Store
store = Store(sys.argv[1])
artifact = store.peek(sys.argv[2])
begun = threading.Semaphore(0)

def work(n):
    import dataclasses
    from kernelstore import Key
    while True:
        store.get(artifact.key)
        store.put(dataclasses.replace(artifact, key=Key(n.to_bytes(32, "big"))))
        begun.release()
        n += 1

for n in range(8):
    threading.Thread(target=work, args=(10**6 * (n + 1),), daemon=True).start()
for _ in range(100):
    begun.acquire()
"""


@pytest.mark.parametrize("how", ["", "raise SystemExit(0)"], ids=["end", "exit"])
def test_daemon_threads_that_write_at_the_end(path: Path, store: Store, cubin: Artifact, rows: Rows, how: str) -> None:
    """F55: the process ends, without a word, and the file is whole."""
    store.put(cubin)
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", DAEMONS + how, path, str(cubin.key)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    check_whole(path)
    assert rows("SELECT count(*) > 100 FROM artifact") == [(1,)]


def test_an_idle_store_holds_no_lock(path: Path, store: Store, cubin: Artifact) -> None:
    """Others write at once, and the WAL can be emptied under it."""
    store.put(cubin)
    store.get(cubin.key)
    store.flush()
    list(store.search())
    store.stats()
    store.sql("SELECT count(*) FROM artifact")
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
    busy, frames, copied = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.close()

    assert (busy, frames, copied) == (0, 0, 0)
