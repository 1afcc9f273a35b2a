"""What may grow stays bounded: the WAL under a reader that never ends, open files, what an interrupt leaves."""

from __future__ import annotations

import contextlib
import linecache
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sharing import other_key

from kernelstore import Artifact, Store
from kernelstore.db import pool
from kernelstore.errors import WalTooLong


def test_a_reader_that_never_ends_stops_writes_at_the_limit_and_no_longer_than_it_reads(
    path: Path, store: Store, cubin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CHECKPOINT_BYTES", 2**16)
    monkeypatch.setattr(pool, "_MAX_WAL_BYTES", 2**20)
    wal = Path(f"{path}-wal")
    store.put(cubin)
    put = 0

    def put_for_ever() -> None:
        nonlocal put
        for put in range(1, 10_000):
            store.put(other_key(cubin, put))

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM artifact").fetchone()
        with pytest.raises(WalTooLong):
            put_for_ever()
        assert 2**20 < wal.stat().st_size < 2**21
        # Hits go on, and are counted for later.
        assert store.get(cubin.key) is not None
        with pytest.raises(WalTooLong):
            store.flush()
        reader.execute("COMMIT")

    store.put(other_key(cubin, put))
    store.flush()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*), sum(usage_count) FROM artifact").fetchone() == (put + 1, 1)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    size = wal.stat().st_size
    for number in range(put):
        store.put(other_key(cubin, 20_000 + number))
    assert wal.stat().st_size <= 2 * size


def test_an_interrupt_at_any_line_of_a_write_leaves_it_whole(path: Path, store: Store, cubin: Artifact) -> None:
    """C-c comes between any two lines: the row is there or not, the next write works, and uses are counted once."""
    store.put(cubin)
    interrupted, uses, kept = 0, 0, 0
    while True:
        assert store.get(cubin.key) is not None
        uses += 1
        other = other_key(cubin, interrupted + 1)
        done = _interrupt_at_line(interrupted, lambda other=other: store.put(other))
        # By another thread: a lock that was not given back would be free for this one.
        thread = threading.Thread(target=_flush_and_open, args=(store, path), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            count, used = connection.execute("SELECT count(*), sum(usage_count) FROM artifact").fetchone()
        assert used == uses
        assert count - 1 - kept in ((1,) if done else (0, 1))
        kept = count - 1
        if done:
            break
        interrupted += 1
    assert interrupted > 50


def _flush_and_open(store: Store, path: Path) -> None:
    store.flush()
    Store(path).close()


def _interrupt_at_line(number: int, work: Any) -> bool:
    """Raise KeyboardInterrupt at one line of the package's database layer; whether the work ended before it."""
    left = number
    directory = os.path.dirname(pool.__file__)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if os.path.dirname(frame.f_code.co_filename) != directory:
            return None
        if event == "line" and not _leaves_with(frame):
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


def _leaves_with(frame: FrameType) -> bool:
    """Whether a `with` is about to call `__exit__`: Python runs no signal handler between its block and that call."""
    code, line = frame.f_code, frame.f_lineno
    entry = next(start for start, _, its_line in code.co_lines() if its_line == line)
    return frame.f_lasti > entry and linecache.getline(code.co_filename, line).lstrip().startswith("with ")


def test_200_stores_leave_no_file_and_no_thread(path: Path, cubin: Artifact) -> None:
    with Store(path) as store:
        store.put(cubin)
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list a process's open files")
    files, threads = len(list(descriptors.iterdir())), threading.active_count()
    for _ in range(200):
        with Store(path) as store:
            assert store.get(cubin.key) is not None
    assert len(list(descriptors.iterdir())) <= files
    assert threading.active_count() <= threads + 1  # the flusher, for all stores


def test_nothing_opens_the_file_but_sqlite(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """F29: whoever opens the file by other means drops SQLite's locks when closing it."""
    assert run_python(AUDITED, tmp_path / "a" / "cache.db").endswith("0 0 0 0 0\n")


AUDITED = """
import sys
path = sys.argv[1]
own = {path, path + "-wal", path + "-shm", path + "-journal"}
def audit(event, arguments):
    assert event != "open" or str(arguments[0]) not in own, arguments
sys.addaudithook(audit)

from kernelstore import Compiler, Store, cli
statuses = []
with Store(path) as store, Compiler(store) as compiler:
    artifact = compiler.compile("__global__ void k() {}", "ptx", arch="compute_90", name_expressions=("k",))
    store.put(artifact)
    assert store.get(artifact.key) and list(store.search()) and store.stats() and store.sql("SELECT 1")
    compiler.explain("__global__ void j() {}", "ptx", arch="compute_90")
    for command in (["stats"], ["ls"], ["show", str(artifact.key)], ["sql", "SELECT 1"], ["doctor"]):
        sys.argv = ["kernelstore", *command, "--db", path]
        try:
            cli.main()
        except SystemExit as end:
            statuses.append(end.code)
    store.delete(artifact.key)
print(*statuses)
"""
