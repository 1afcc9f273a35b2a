"""Claims: rows that say who is compiling what, so that of many processes that want one kernel one compiles it."""

from __future__ import annotations

import functools
import os
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelstore.db import statements
from kernelstore.db.pool import Pool
from kernelstore.key import Key

__all__ = ["Claim", "beat", "end", "look", "take"]

# How long the write lock is waited for. Who cannot claim compiles alone, which costs a compile and harms nobody.
_TIMEOUT_S = 5.0

# Rows of compiles that failed or were not stored are for those that waited meanwhile, and poll 10 times a second.
_ENDED_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Claim:
    """How one kernel's compile stands.

    Parameters
    ----------
    key : Key
        Of the artifact.
    state : str
        ``"won"``: the caller is to compile; ``"stored"``: the artifact is there; ``"running"``: another one compiles;
        ``"failed"`` and ``"not_stored"``: it has ended so.
    nonce : bytes
        Another one for each compile, 16 bytes.
    beat : int
        Counts up while the owner lives.
    owner : str
        Who compiles, for people; empty where it is the caller.
    log : str or None
        What a failed compile left: its error as JSON.
    process : tuple of str, str, str, int, int
        Host, its boot, pid namespace, pid, and start in clock ticks since boot.
    """

    key: Key
    state: str
    nonce: bytes = b""
    beat: int = 0
    owner: str = ""
    log: str | None = None
    process: tuple[str, str, str, int, int] | None = None

    def is_gone(self) -> bool:
        """Whether the owner has certainly ended; what cannot be known from here is told by its beat."""
        return self.process is not None and _is_gone(*self.process)


def take(pool: Pool, key: Key, dead: bytes | None = None) -> Claim:
    """Claim a compile, unless the artifact is there or another process is at it.

    Parameters
    ----------
    dead : bytes, optional
        Nonce of a claim whose owner the caller has given up: it is taken over, unless another one was faster.

    Raises
    ------
    StoreError
        Nothing was claimed.

    Notes
    -----
    Cost: one short write transaction, which waits up to 5 s for the lock.
    """

    def claim_or_look(connection: sqlite3.Connection) -> Claim:
        if connection.execute(statements.ARTIFACT_WITH_KEY, {"key": key}).fetchall():
            return Claim(key, "stored")
        found = connection.execute(statements.CLAIM_WITH_KEY, {"key": key}).fetchall()
        running = _claim(key, found[0]) if found and found[0][0] == "running" else None
        if running is not None and running.nonce != dead and not running.is_gone():
            return running
        _sweep(connection)
        nonce = os.urandom(16)
        own = {"key": key, "nonce": nonce, "claimed_at_ns": time.time_ns(), **_self(os.getpid())}
        connection.execute(statements.TAKE_CLAIM, own)
        return Claim(key, "won", nonce)

    return pool.write(claim_or_look, timeout_s=min(_TIMEOUT_S, pool.timeout_s))


def look(pool: Pool, key: Key) -> Claim | None:
    """Return how a compile stands; ``None`` where nobody claims it any more. One indexed read."""
    found = pool.read(statements.CLAIM_WITH_KEY, {"key": key})
    return _claim(key, found[0]) if found else None


def beat(pool: Pool, claim: Claim) -> bool:
    """Tell those who wait that the owner lives; ``False`` where another one has taken over. One short transaction."""

    def count_up(connection: sqlite3.Connection) -> bool:
        return bool(connection.execute(statements.BEAT_CLAIM, {"key": claim.key, "nonce": claim.nonce}).fetchall())

    return pool.write(count_up, timeout_s=min(_TIMEOUT_S, pool.timeout_s))


def end(connection: sqlite3.Connection, claim: Claim, state: str | None = None, log: str | None = None) -> None:
    """Give a claim back within a transaction; with a state the row stays for those who wait."""
    if state is None:
        connection.execute(statements.DROP_CLAIM, {"key": claim.key, "nonce": claim.nonce})
    else:
        connection.execute(statements.END_CLAIM, {"key": claim.key, "nonce": claim.nonce, "state": state, "log": log})


def _claim(key: Key, row: Sequence[Any]) -> Claim:
    state, nonce, beats, owner, log, *process = row
    return Claim(key, state, nonce, beats, owner, log, tuple(process))


def _sweep(connection: sqlite3.Connection) -> None:
    # There are as many rows as compiles at this moment, and what ended within the last minute or was killed.
    now_ns = time.time_ns()
    for key, nonce, state, claimed_at_ns, *process in connection.execute(statements.CLAIMS).fetchall():
        # A clock that was set back makes rows of the future.
        has_ended = state != "running" and abs(now_ns - claimed_at_ns) > _ENDED_NS
        if has_ended or (state == "running" and _is_gone(*process)):
            connection.execute(statements.DROP_CLAIM, {"key": key, "nonce": nonce})


@functools.lru_cache(maxsize=1)
def _self(pid: int) -> dict[str, object]:
    """Return who this process is; made anew in a forked child."""
    host = socket.gethostname()
    return {
        "owner": f"{Path(sys.argv[0]).name if sys.argv else 'python'}, process {pid} on {host}",
        "host": host,
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "pid": pid,
        "process_start": _process_start(pid) or 0,
    }


def _is_gone(host: str, boot: str, pid_namespace: str, pid: int, process_start: int) -> bool:
    here = _self(os.getpid())
    if host == here["host"] and boot != here["boot"]:
        return True
    if not boot or (boot, pid_namespace) != (here["boot"], here["pid_namespace"]):
        return False
    # A later process with the same pid has another start.
    return _process_start(pid) != process_start


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; ``None`` where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # The name in parentheses may hold anything. Source: proc(5), /proc/pid/stat.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""
