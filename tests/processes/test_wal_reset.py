"""SQLite's WAL-reset bug: before 3.51.3 a commit that resets the WAL during a checkpoint can lose committed rows.

The schedule: a checkpointer has read the WAL's header and not yet taken its lock; another process, whose rows are all
in the file already, begins the WAL anew. The step between the two unmaps the file, which takes long where much of it
is mapped. Source: sqlite.org/wal.html#walresetbug.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sharing import other_key

from kernelstore import Artifact, Store
from kernelstore.db import pool

_BALLAST_BYTES = 48 * 2**20

# SQLite that has the mend: 3.51.3 and later, and two earlier lines that got it.
_version = sqlite3.sqlite_version_info
_IS_MENDED = _version >= (3, 51, 3) or (3, 50, 7) <= _version < (3, 51) or (3, 44, 6) <= _version < (3, 45)

# Takes a checkpoint in every round, on a connection that has the whole file mapped.
CHECKPOINTER = """
import sys
from kernelstore import Store
from kernelstore.db import connection, pool

path, how = sys.argv[1:]
pool._CHECKPOINT_BYTES = 0

def tell(step):
    print(step, flush=True)

def mapped_connection(*_, **how):
    tell("checkpoint")
    return mapped

connect, pool.connect = pool.connect, mapped_connection
store = Store(path)
writer = connect(path)
while sys.stdin.readline():
    mapped = connect(path)
    mapped.execute("PRAGMA mmap_size = 67108864").fetchall()
    mapped.execute("SELECT max(substr(content, -1)) FROM ballast").fetchall()
    tell("mapped")
    sys.stdin.readline()
    if how == "guarded":
        store._pool._checkpoint_if_long(writer)
    else:
        store._pool._checkpoint()
    tell("done")
"""


def _loses(path: Path, artifact: Artifact, how: str, rounds: int) -> bool:
    """Run the schedule until something that was put is not there; whether that happened."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE ballast (content BLOB)")
        for _ in range(_BALLAST_BYTES // 2**17):
            connection.execute("INSERT INTO ballast VALUES (zeroblob(131072))")

    with (
        subprocess.Popen(
            [sys.executable, "-c", CHECKPOINTER, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as checkpointer,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as own,
        Store(path, codec="none") as store,
    ):
        assert checkpointer.stdin is not None
        assert checkpointer.stdout is not None
        lines = checkpointer.stdout

        count = 0

        def go_on() -> None:
            checkpointer.stdin.write("\n")
            checkpointer.stdin.flush()

        def put(number: int) -> None:
            nonlocal count
            for _ in range(number):
                count += 1
                store.put(other_key(artifact, count))

        try:
            for _ in range(rounds):
                go_on()
                assert lines.readline() == "mapped\n"
                put(3)
                own.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                go_on()
                assert lines.readline() == "checkpoint\n"
                own.execute("INSERT INTO ballast VALUES (NULL)")  # begins the WAL anew, sooner than a put would
                put(8)
                assert lines.readline() == "done\n"
                own.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                put(1)  # begins the WAL anew
                try:
                    whole = own.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                    found = own.execute("SELECT count(*) FROM artifact JOIN blob ON artifact_id = id").fetchone()
                except sqlite3.DatabaseError:
                    whole = False
                if not whole or found != (count,):
                    return True
            return False
        finally:
            checkpointer.kill()


@pytest.fixture(autouse=True)
def _no_checkpoint_but_the_schedule_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CHECKPOINT_BYTES", 2**40)


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_guarded_checkpoint_loses_no_row(path: Path, cubin: Artifact, rounds: int) -> None:
    assert not _loses(path, cubin, "guarded", rounds)


@pytest.mark.skipif(_IS_MENDED, reason="this SQLite has no WAL-reset bug")
def test_the_schedule_loses_rows_without_the_guard(path: Path, cubin: Artifact) -> None:
    """So that the test above proves something; most often within ten rounds."""
    assert _loses(path, cubin, "bare", 2000)
