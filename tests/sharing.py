"""What tests of one file shared by several users need: other keys, others who hold a lock, and forked children."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from kernelstore import Artifact, Key


def other_key(artifact: Artifact, number: int) -> Artifact:
    """Return the artifact under a key made of a number."""
    return dataclasses.replace(artifact, key=Key(number.to_bytes(32, "big")))


@contextlib.contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the lock as another process would."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def take_back_to_0001(path: Path) -> None:
    """Make a store's file one of the first revision, whatever it holds."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE scan")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
        connection.execute("PRAGMA user_version = 1")


def start_child(work: Callable[[], object]) -> int:
    """Do some work in a forked child that ends with status 0, or 1 where it raised; returns its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def exit_code(child: int) -> int:
    """Wait for a child's end; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_whole(path: Path) -> None:
    """Check with plain sqlite3 that a store is undamaged and holds no half of an entry."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement, expected in (
            ("PRAGMA integrity_check", [("ok",)]),
            ("PRAGMA foreign_key_check", []),
            ("SELECT id FROM artifact WHERE id NOT IN (SELECT artifact_id FROM blob)", []),
            ("SELECT id FROM artifact WHERE id NOT IN (SELECT artifact_id FROM symbol)", []),
            ("SELECT id FROM program WHERE id NOT IN (SELECT program_id FROM artifact)", []),
        ):
            assert connection.execute(statement).fetchall() == expected, statement
