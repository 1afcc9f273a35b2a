"""`kill -9` at random instants: the file is whole, what was acknowledged is there, and nothing half-made is.

The instants are 2 to 200 ms after the fork of a child, the short ones as likely as the long: before it opens the file,
within opening and recovery, and after many steps of its work.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sharing import check_whole, exit_code, other_key, start_child, take_back_to_0001

from kernelstore import Artifact, Store
from kernelstore.db import migrate as _imported_once_for_all_children  # noqa: F401
from kernelstore.db import pool
from kernelstore.db.connection import connect
from kernelstore.db.statements import REVISION

Tell = Callable[[int], object]

# A fresh file after so many kills, as checking takes the longer the more it holds.
_KILLS_PER_FILE = 10

kills = pytest.mark.parametrize("kills", [25, pytest.param(1000, marks=pytest.mark.long)])


def _killed(work: Callable[[Tell], object]) -> int | None:
    """Do some work in a child that is killed; returns the last number that it told."""
    reading, writing = os.pipe()
    child = start_child(lambda: work(lambda number: os.write(writing, number.to_bytes(4, "little"))))
    os.close(writing)
    select.select([], [], [], 10 ** random.uniform(-2.7, -0.7))
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
        told = stream.read()
    return int.from_bytes(told[-4:], "little") if told else None


def _sql(path: Path, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


@pytest.fixture(params=["checkpoints are rare", "every write checkpoints"])
def _checkpoints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "every write checkpoints":
        monkeypatch.setattr(pool, "_CHECKPOINT_BYTES", 0)


@pytest.fixture
def fresh(path: Path, made_file: bytes) -> Callable[[], None]:
    """Put an empty store in the place of the file."""

    def make() -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.write_bytes(made_file)

    return make


@kills
@pytest.mark.usefixtures("_checkpoints")
def test_put(path: Path, fresh: Callable[[], None], cubin: Artifact, ptx: Artifact, kills: int) -> None:
    """F01: three artifacts a put, all or none."""

    def batch(number: int) -> list[Artifact]:
        return [other_key(cubin, 3 * number), other_key(ptx, 3 * number + 1), other_key(cubin, 3 * number + 2)]

    done = 0
    for kill in range(kills):
        if kill % _KILLS_PER_FILE == 0:
            fresh()
            done = 0

        def work(tell: Tell, first: int = done) -> None:
            with Store(path) as store:
                for number in range(first, 10**6):
                    store.put(*batch(number))
                    tell(number + 1)

        acknowledged = _killed(work) or done
        check_whole(path)
        ((count,),) = _sql(path, "SELECT count(*) FROM artifact")
        assert count in (3 * acknowledged, 3 * acknowledged + 3)
        with Store(path) as store:
            for artifact in [artifact for number in range(done, count // 3) for artifact in batch(number)]:
                found = store.get(artifact.key)
                assert found is not None
                assert found.payload == artifact.payload
        done = count // 3
    assert done > 0


@kills
@pytest.mark.usefixtures("_checkpoints")
def test_flush(path: Path, cubin: Artifact, kills: int) -> None:
    """Seven uses a flush, all or none."""
    with Store(path) as store:
        store.put(cubin)
    done = 0
    for _ in range(kills):

        def work(tell: Tell, first: int = done) -> None:
            with Store(path) as store:
                for number in range(first, 10**6):
                    for _ in range(7):
                        store.get(cubin.key)
                    store.flush()
                    tell(number + 1)

        acknowledged = _killed(work) or done
        check_whole(path)
        ((uses,),) = _sql(path, "SELECT usage_count FROM artifact")
        assert uses in (7 * acknowledged, 7 * acknowledged + 7)
        done = uses // 7
    assert done > 0


@kills
@pytest.mark.usefixtures("_checkpoints")
def test_delete(path: Path, fresh: Callable[[], None], cubin: Artifact, kills: int) -> None:
    """What was deleted stays deleted, also with the program that goes with the last artifact."""
    counts = set()
    for _ in range(kills):
        fresh()
        with Store(path) as store:
            store.put(*[other_key(cubin, number) for number in range(30)])

        def work(tell: Tell) -> None:
            with Store(path) as store:
                for number in range(30):
                    assert store.delete(other_key(cubin, number).key)
                    tell(number + 1)
                signal.pause()

        deleted = _killed(work) or 0
        check_whole(path)
        ((count,),) = _sql(path, "SELECT count(*) FROM artifact")
        counts.add(count)
        assert count in (30 - deleted, 30 - deleted - 1)
        assert _sql(path, "SELECT count(*) FROM program") == [(1 if count else 0,)]
    assert len(counts) > 2


@kills
@pytest.mark.parametrize("statement", ["VACUUM", "PRAGMA incremental_vacuum", "PRAGMA wal_checkpoint(TRUNCATE)"])
def test_compaction(path: Path, fresh: Callable[[], None], cubin: Artifact, kills: int, statement: str) -> None:
    """While it frees what was deleted, nothing that is there is lost."""
    kept = [other_key(cubin, 10**6 + number) for number in range(10)]
    cycles = 0
    for kill in range(kills):
        if kill % _KILLS_PER_FILE == 0:
            fresh()
            with Store(path) as store:
                store.put(*kept)

        def work(tell: Tell) -> None:
            with Store(path) as store, contextlib.closing(connect(path)) as connection:
                for number in range(10**6):
                    passing = [other_key(cubin, number) for number in range(10)]
                    store.put(*passing)
                    for artifact in passing:
                        store.delete(artifact.key)
                    connection.executescript(statement)
                    tell(number)

        cycles += _killed(work) or 0
        check_whole(path)
        with Store(path) as store:
            for artifact in kept:
                found = store.get(artifact.key)
                assert found is not None
                assert found.payload == artifact.payload
        assert _sql(path, f"SELECT count(*) FROM artifact WHERE key >= x'{kept[0].key.hex()}'") == [(10,)]
    assert cycles > 0


@kills
def test_migration(path: Path, fresh: Callable[[], None], cubin: Artifact, kills: int) -> None:
    """F03: the file is of the older revision with all its rows, or of this one."""
    revisions = set()
    for _ in range(kills):
        fresh()
        with Store(path) as store:
            store.put(cubin)
        take_back_to_0001(path)

        def work(tell: Tell) -> None:
            with Store(path):
                signal.pause()

        _killed(work)
        check_whole(path)
        ((revision,),) = _sql(path, "PRAGMA user_version")
        revisions.add(revision)
        assert _sql(path, "SELECT version_num FROM alembic_version") == [(f"{revision:04}",)]
        has_scan = _sql(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'scan'") == [(1,)]
        assert has_scan == (revision == REVISION)
        with Store(path) as store:
            assert store.get(cubin.key) is not None
    assert revisions == {1, REVISION}


@kills
def test_making(path: Path, fresh: Callable[[], None], cubin: Artifact, kills: int) -> None:
    """The next that opens the file makes it, whatever is there."""
    for _ in range(kills):
        fresh()
        path.unlink()

        def work(tell: Tell) -> None:
            with Store(path):
                signal.pause()

        _killed(work)
        with Store(path) as store:
            store.put(cubin)
            assert store.get(cubin.key) is not None
        check_whole(path)


@kills
def test_the_wal_stays_short_where_every_process_dies(
    path: Path, cubin: Artifact, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ever closes the file, which would fold the WAL in."""
    monkeypatch.setattr(pool, "_CHECKPOINT_BYTES", 2**18)
    done = longest = 0
    for _ in range(kills):

        def work(tell: Tell, first: int = done) -> None:
            store = Store(path)
            for number in range(first, 10**6):
                store.put(other_key(cubin, number))
                tell(number + 1)

        done = _killed(work) or done
        longest = max(longest, os.stat(f"{path}-wal").st_size if done else 0)  # noqa: PTH116 - not the file itself
    assert done > 100
    assert longest < 2**19
    check_whole(path)
