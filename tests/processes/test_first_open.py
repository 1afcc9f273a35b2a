"""Many processes that open one absent file at once."""

from __future__ import annotations

import multiprocessing
import sqlite3
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from kernelstore import Store
from kernelstore.db.statements import REVISION

_SPAWN = multiprocessing.get_context("spawn")


def _open(path: str, barrier: Barrier, results: multiprocessing.Queue[str]) -> None:
    barrier.wait(120)
    try:
        with Store(path) as store:
            results.put(f"ok {len(store)}")
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.parametrize("processes", [8, pytest.param(32, marks=pytest.mark.long)])
@pytest.mark.parametrize("deep", [False, True], ids=["file absent", "directories absent too"])
def test_all_succeed_and_one_migrates(tmp_path: Path, processes: int, deep: bool) -> None:
    """C49, C78, F05."""
    path = tmp_path / "a" / "b" / "cache.db" if deep else tmp_path / "cache.db"
    barrier = _SPAWN.Barrier(processes)
    results: multiprocessing.Queue[str] = _SPAWN.Queue()
    children = [_SPAWN.Process(target=_open, args=(str(path), barrier, results)) for _ in range(processes)]
    for child in children:
        child.start()
    found = [results.get(timeout=240) for _ in children]
    for child in children:
        child.join()

    assert found == ["ok 0"] * processes
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(f"{REVISION:04}",)]
        assert connection.execute("SELECT count(*) FROM meta WHERE key = 'store_uuid'").fetchone() == (1,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
