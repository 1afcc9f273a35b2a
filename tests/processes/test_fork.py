"""Forked children: their own connections, their own counts, and a parent that notices nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharing import exit_code, other_key, start_child, write_lock

from kernelstore import Artifact, Compiler, Store
from kernelstore.db import forks
from kernelstore.db.connection import Connection
from kernelstore.errors import StoreUnavailable

Rows = Callable[..., list[tuple[object, ...]]]


def _in_child(work: Callable[[], object]) -> int:
    return exit_code(start_child(work))


@contextlib.contextmanager
def _threads(*works: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run each again and again in a thread of its own; yields what went wrong."""
    stop, wrong = threading.Event(), []

    def run(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_parent_and_children_read_and_write_over_one_store(path: Path, store: Store, cubin: Artifact) -> None:
    """C55: eight children, each on connections of its own."""
    store.put(cubin)

    def work() -> None:
        assert store.get(cubin.key) is not None
        store.flush()

    for _ in range(8):
        assert _in_child(work) == 0
        assert store.get(cubin.key) is not None

    store.flush()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT usage_count FROM artifact").fetchone() == (16,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_child_has_no_connection_of_its_parent(path: Path, store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    store.get(cubin.key)
    descriptors = Path("/proc/self/fd")
    files = (str(path), f"{path}-wal", f"{path}-shm")

    def names() -> list[str]:
        return [str(link.readlink()) for link in descriptors.iterdir() if link.is_symlink()]

    def work() -> None:
        assert not [name for name in names() if name in files]

    assert [name for name in names() if name in files]
    assert _in_child(work) == 0


def test_what_a_child_puts_after_its_parent_has_closed_is_there(
    path: Path, store: Store, cubin: Artifact, rows: Rows
) -> None:
    """With an inherited connection the child would take no lock, and write into the WAL that its parent deleted."""
    store.put(cubin)
    reading, writing = os.pipe()

    def work() -> None:
        os.read(reading, 1)
        store.put(other_key(cubin, 1))

    child = start_child(work)
    store.close()
    with Store(path) as another:
        another.get(cubin.key)
    os.write(writing, b"!")

    assert exit_code(child) == 0
    os.close(reading)
    os.close(writing)
    assert rows("SELECT count(*) FROM artifact") == [(2,)]
    assert rows("PRAGMA integrity_check") == [("ok",)]


def test_a_child_does_not_count_what_its_parent_counted(path: Path, store: Store, cubin: Artifact, rows: Rows) -> None:
    store.put(cubin)
    store.get(cubin.key)

    assert _in_child(store.close) == 0
    store.flush()

    assert rows("SELECT usage_count FROM artifact") == [(1,)]


def test_forks_while_threads_write_and_read(store: Store, cubin: Artifact, rows: Rows) -> None:
    """No child is without the store, no put is lost, and no thread meets an error."""
    numbers = iter(range(1, 10**6))
    counting = threading.Lock()

    def put() -> None:
        with counting:
            number = next(numbers)
        store.put(other_key(cubin, number))

    def get() -> None:
        assert store.get(cubin.key) is not None

    def work(child: int) -> Callable[[], object]:
        def run() -> None:
            assert store.get(cubin.key) is not None
            store.put(other_key(cubin, 10**6 + child))

        return run

    store.put(cubin)
    with _threads(put, put, get, lambda: store.sql("SELECT count(*) FROM blob")) as wrong:
        statuses = [_in_child(work(child)) for child in range(40)]

    assert wrong == []
    assert statuses == [0] * 40
    put_by_threads = next(numbers) - 1
    assert rows("SELECT count(*) FROM artifact") == [(1 + put_by_threads + 40,)]
    assert rows("PRAGMA integrity_check") == [("ok",)]


def test_forks_in_two_threads_at_once(store: Store, cubin: Artifact) -> None:
    store.put(cubin)

    def fork() -> None:
        assert _in_child(lambda: store.get(cubin.key)) == 0

    with _threads(fork, fork) as wrong:
        for _ in range(20):
            fork()

    assert wrong == []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_store_goes_into_the_children_of_multiprocessing(
    store: Store, cubin: Artifact, rows: Rows, method: str
) -> None:
    """As an argument: it is pickled, and opened there."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        numbers = pool.starmap(_put, [(store, other_key(cubin, number)) for number in range(10)])
        pool.close()
        pool.join()

    assert sorted(numbers) == list(range(10))
    assert rows("SELECT count(*) FROM artifact") == [(10,)]


def _put(store: Store, artifact: Artifact) -> int:
    store.put(artifact)
    found = store.get(artifact.key)
    assert found is not None
    assert found.payload == artifact.payload
    return int.from_bytes(bytes(artifact.key), "big")


def test_a_fork_lets_go_of_a_write_that_waits_for_the_lock(path: Path, store: Store, cubin: Artifact) -> None:
    """The child has the store, and the thread gets its turn afterwards."""
    waiting = threading.Event()
    begin = store._pool._begin_immediate

    def begin_and_tell(deadline: float) -> Connection:
        waiting.set()
        return begin(deadline)

    store._pool._begin_immediate = begin_and_tell  # type: ignore[method-assign]
    with write_lock(path):
        thread = threading.Thread(target=store.put, args=(cubin,))
        thread.start()
        waiting.wait()
        assert _in_child(lambda: store.get(cubin.key)) == 0
    thread.join()

    assert store.get(cubin.key) is not None


@contextlib.contextmanager
def _in_use(path: Path) -> Iterator[None]:
    """Another thread within a statement that takes long."""
    started, stop = threading.Event(), threading.Event()

    def wait() -> int:
        started.set()
        stop.wait()
        return 1

    def use() -> None:
        with contextlib.closing(Connection(str(path), f"file:{path}", nested=False, check_same_thread=False)) as other:
            other.create_function("wait", 0, wait)
            other.execute("SELECT wait() FROM artifact").fetchall()

    thread = threading.Thread(target=use)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_child_whose_parent_was_using_the_file_does_without_it(
    path: Path, tmp_path: Path, store: Store, cubin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks cannot be had: an error that says so, in the child alone; other files are as they were."""
    monkeypatch.setattr(forks, "_TIMEOUT_S", 0.05)
    store.put(cubin)
    other = Store(tmp_path / "other.db")
    other.put(cubin)

    def work() -> None:
        for use in (lambda: store.get(cubin.key), lambda: store.put(cubin), lambda: Store(path)):
            with pytest.raises(StoreUnavailable, match="was in use by another thread when this process was forked"):
                use()
        assert other.get(cubin.key) is not None
        with Compiler(store) as compiler, pytest.warns(match="was forked"):
            compiler.compile("__global__ void k() {}", arch="sm_90")
        # A child of the child knows it too, and waits for nobody.
        started = time.monotonic()
        assert _in_child(lambda: other.get(cubin.key)) == 0
        assert time.monotonic() - started < 1
        with pytest.raises(StoreUnavailable):
            store.get(cubin.key)

    with _in_use(path):
        assert _in_child(work) == 0
        assert store.get(cubin.key) is not None
        store.put(other_key(cubin, 1))
    other.close()

    assert _in_child(lambda: store.put(other_key(cubin, 2))) == 0
    assert len(store) == 3


def test_a_lock_that_another_thread_held_is_free_in_the_child(store: Store, cubin: Artifact) -> None:
    compiler = Compiler(store)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with compiler._keeping._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert _in_child(compiler.close) == 0
    done.set()
    thread.join()
    compiler.close()
