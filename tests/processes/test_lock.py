"""What another process does to the file for long: hits go on, and a kernel is returned unstored where it must."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharing import check_whole, other_key

from kernelstore import Artifact, Compiler, Store
from kernelstore.errors import StoreWarning

K = 'extern "C" __global__ void k() {}'

# Does something to the file, and stops within it until it is told to go on.
HOLDER = """
import sqlite3, sys
path, within, *statements = sys.argv[1:]
connection = sqlite3.connect(path, isolation_level=None)
connection.execute("PRAGMA foreign_keys = ON")

def wait():
    connection.set_progress_handler(None, 0)
    print("holding", flush=True)
    sys.stdin.readline()

if within:
    connection.set_progress_handler(wait, int(within))
for statement in statements:
    connection.execute(statement).fetchall()
if not within:
    wait()
    connection.execute("COMMIT")
print("done", flush=True)
"""

# After how many steps of SQLite's machine a statement waits; none where it is the transaction that is left open.
HOLDS = {
    "writes": ("", "BEGIN IMMEDIATE", "UPDATE artifact SET usage_count = usage_count + 0"),
    "migrates": ("", "BEGIN EXCLUSIVE", "ALTER TABLE artifact ADD COLUMN note TEXT", "CREATE TABLE further (x)"),
    "evicts": ("", "BEGIN IMMEDIATE", "DELETE FROM artifact", "DELETE FROM program"),
    "gives pages back": ("", "BEGIN IMMEDIATE", "PRAGMA incremental_vacuum"),
    "compacts": ("2000", "VACUUM"),
    "checks": ("50", "PRAGMA integrity_check"),
}
WRITES = [name for name in HOLDS if name != "checks"]


@pytest.fixture
def hold(path: Path) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Have another process do something to the file; returns what lets it end."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> Callable[[], None]:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, path, *HOLDS[name]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"

        def let_go() -> None:
            assert holder.communicate("\n")[0] == "done\n"
            assert holder.returncode == 0

        return let_go

    yield start
    for holder in started:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("hold_s", [0, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HOLDS)
def test_hits_go_on(
    path: Path,
    store: Store,
    cubin: Artifact,
    hold: Callable[[str], Callable[[], None]],
    count_compiles: Callable[[], int],
    name: str,
    hold_s: float,
) -> None:
    """C58: in this process, in one that opens the file meanwhile, of artifacts and of programs."""
    store.put(cubin, *[other_key(cubin, number) for number in range(200)])
    for number in range(100):
        store.delete(other_key(cubin, number).key)
    with Compiler(store) as compiler:
        compiler.compile(K, arch="sm_90")
    compiled = count_compiles()

    let_go = hold(name)
    until = time.monotonic() + hold_s
    hits = 0
    while hits < 100 or time.monotonic() < until:
        assert store.get(cubin.key) is not None
        hits += 1
    with Store(path) as other, Compiler(other) as another:
        assert other.get(cubin.key) is not None
        assert another.compile(K, arch="sm_90").from_cache
        other._pool.tally.take()  # its use would wait for the lock when it is closed
    let_go()

    assert count_compiles() == compiled
    assert (store.get(cubin.key) is None) == (name == "evicts")
    store.flush()
    check_whole(path)


def test_a_write_has_the_lock_before_it_reads(path: Path, store: Store) -> None:
    """C50, F35: one that reads first and is overtaken would fail at once, whatever it would have waited."""

    def work(connection: sqlite3.Connection) -> None:
        with (
            contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("BEGIN IMMEDIATE")
        connection.execute("SELECT count(*) FROM artifact").fetchall()

    store._pool.write(work)


@pytest.mark.parametrize("name", WRITES)
def test_a_kernel_that_cannot_be_stored_is_returned_and_counted(
    path: Path,
    store: Store,
    cubin: Artifact,
    hold: Callable[[str], Callable[[], None]],
    name: str,
) -> None:
    store.put(*[other_key(cubin, number) for number in range(200)])
    for number in range(100):
        store.delete(other_key(cubin, number).key)

    let_go = hold(name)
    with (
        Store(path, lock_timeout_s=0.05) as impatient,
        Compiler(impatient) as compiler,
        pytest.warns(StoreWarning, match="locked"),
    ):
        artifact = compiler.compile(K, arch="sm_90")
        assert artifact.payload.startswith(b"\x7fELF")
        assert impatient.stats().not_stored == 1
        let_go()

    assert store.stats().not_stored == 1
    with Compiler(store) as compiler:
        assert [compiler.compile(K, arch="sm_90").from_cache for _ in range(2)] == [False, True]
