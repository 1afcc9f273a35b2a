"""What tests of one file shared by several users need: rows under other keys, and a lock that somebody else holds."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
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
