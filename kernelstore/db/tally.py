"""Tally: uses, counters and memos that wait in the process until a write carries them along."""

from __future__ import annotations

import datetime
import os
import sqlite3
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernelstore.db import statements
from kernelstore.key import Key

__all__ = ["HeaderRow", "ScanRow", "Taken", "Tally"]

HeaderRow = tuple[int, int, int, int, int, bytes, str]
"""Columns of the table `header` behind its path, in their order, without the time of the last access."""

ScanRow = tuple[bytes, str, int]
"""Columns of the table `scan` behind its key, in their order, without the time of the last access."""

# Some 400 bytes each. Reached only where so many kernels were hit and the file could not be written all the while.
_MAX_USES = 100_000

# Some 600 bytes a row. One more program's headers take the place of those that were not asked for the longest.
_MAX_HEADERS = 20_000

# Some 20 KB a row for 400 headers.
_MAX_SCANS = 1000

_tallies: weakref.WeakSet[Tally] = weakref.WeakSet()


class Tally:
    """Uses by key, counters by (day, name, reason), toolchain and header memos, kept in memory.

    Counting takes one short lock and no SQL. `take` moves everything out, into an open transaction; what a failed
    transaction did not keep is given back with `restore`. A forked child starts with nothing.

    Parameters
    ----------
    wake : callable, optional
        Called when something begins to wait for a write. Memos wait for others' writes, and wake nobody.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self._start()
        _tallies.add(self)

    def _start(self) -> None:
        # Reentrant: a finalizer that hits may run while its thread is counting.
        self._lock = threading.RLock()
        self._uses: Counter[Key] = Counter()
        self._last_access_ns: dict[Key, int] = {}
        self._counters: Counter[tuple[str, str, str]] = Counter()
        self._toolchains: dict[str, tuple[str, str]] = {}
        self._headers: dict[str, HeaderRow] = {}
        self._scans: dict[bytes, ScanRow] = {}

    def __bool__(self) -> bool:
        return bool(self._uses or self._counters or self._toolchains or self._headers or self._scans)

    def use(self, key: Key, saved_ms: float) -> None:
        """Count one hit served from the file."""
        now_ns = time.time_ns()
        day = _day(now_ns)
        with self._lock:
            first = not self._counters
            self._counters[day, "hit", ""] += 1
            self._counters[day, "saved_us", ""] += round(saved_ms * 1000)
            if len(self._uses) < _MAX_USES or key in self._uses:
                self._uses[key] += 1
                self._last_access_ns[key] = now_ns
            else:
                self._counters[day, "use_lost", ""] += 1
        if first and self._wake is not None:
            self._wake()

    def count(self, name: str, reason: str = "", value: int = 1) -> None:
        """Add to the counter `name`."""
        day = _day(time.time_ns())
        with self._lock:
            first = not self._counters
            self._counters[day, name, reason] += value
        if first and self._wake is not None:
            self._wake()

    def uses(self) -> Counter[Key]:
        """Return the uses not yet written."""
        with self._lock:
            return self._uses.copy()

    def use_of(self, key: Key) -> tuple[int, int]:
        """Return one artifact's uses not yet written, and the time of the last in ns; (0, 0) where there is none."""
        with self._lock:
            return self._uses.get(key, 0), self._last_access_ns.get(key, 0)

    def counters(self) -> Counter[tuple[str, str, str]]:
        """Return the counters not yet written, by (day, name, reason)."""
        with self._lock:
            return self._counters.copy()

    def toolchain(self, library: str) -> tuple[str, str] | None:
        """Return the (signature, build) that waits for that library."""
        with self._lock:
            return self._toolchains.get(library)

    def remember_toolchain(self, library: str, signature: str, build: str) -> None:
        """Keep the build of a compiler library."""
        with self._lock:
            self._toolchains[library] = signature, build

    def headers(self, paths: Sequence[str]) -> dict[str, HeaderRow]:
        """Return the rows that wait for those paths."""
        with self._lock:
            return {path: self._headers[path] for path in paths if path in self._headers}

    def remember_headers(self, rows: Mapping[str, HeaderRow]) -> None:
        """Keep what was read in headers, by path; of more than fit into the table, the newest."""
        with self._lock:
            self._headers.update(rows)
            for path in list(self._headers)[: max(0, len(self._headers) - _MAX_HEADERS)]:
                del self._headers[path]

    def scan(self, key: bytes) -> ScanRow | None:
        """Return the row that waits for that key."""
        with self._lock:
            return self._scans.get(key)

    def remember_scan(self, key: bytes, row: ScanRow) -> None:
        """Keep a scan; of more than fit into the table, the newest."""
        with self._lock:
            self._scans[key] = row
            if len(self._scans) > _MAX_SCANS:
                del self._scans[next(iter(self._scans))]

    def take(self) -> Taken:
        """Take everything out, to be written or restored."""
        with self._lock:
            taken = Taken(
                self._uses, self._last_access_ns, self._counters, self._toolchains, self._headers, self._scans
            )
            self._uses, self._last_access_ns, self._counters = Counter(), {}, Counter()
            self._toolchains, self._headers, self._scans = {}, {}, {}
            return taken

    def restore(self, taken: Taken) -> None:
        """Give back what a failed transaction did not keep."""
        with self._lock:
            self._uses.update(taken.uses)
            self._counters.update(taken.counters)
            self._toolchains = taken.toolchains | self._toolchains
            self._headers = taken.headers | self._headers
            self._scans = taken.scans | self._scans
            for key, last_access_ns in taken.last_access_ns.items():
                self._last_access_ns[key] = max(last_access_ns, self._last_access_ns.get(key, 0))
        if taken.counters and self._wake is not None:
            self._wake()


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken out of a tally at once."""

    uses: Counter[Key]
    last_access_ns: dict[Key, int]
    counters: Counter[tuple[str, str, str]]
    toolchains: dict[str, tuple[str, str]]
    headers: dict[str, HeaderRow]
    scans: dict[bytes, ScanRow]

    def write(self, connection: sqlite3.Connection) -> None:
        """Write everything within the transaction that is open on `connection`."""
        connection.executemany(
            statements.TOUCH,
            [{"key": key, "uses": uses, "last_access_ns": self.last_access_ns[key]} for key, uses in self.uses.items()],
        )
        connection.executemany(
            statements.ADD_TO_COUNTER,
            [
                {"day": day, "name": name, "reason": reason, "value": value}
                for (day, name, reason), value in self.counters.items()
            ],
        )
        connection.executemany(
            statements.REMEMBER_TOOLCHAIN,
            [
                {"path": path, "signature": signature, "build": build, "created_at_ns": time.time_ns()}
                for path, (signature, build) in self.toolchains.items()
            ],
        )
        if self.headers:
            self._write_headers(connection)
        if self.scans:
            self._write_scans(connection)

    def _write_headers(self, connection: sqlite3.Connection) -> None:
        now_ns = time.time_ns()
        columns = ("device", "inode", "size_bytes", "mtime_ns", "ctime_ns", "digest", "includes")
        connection.executemany(
            statements.REMEMBER_HEADER,
            [
                {"path": path, "last_access_ns": now_ns, **dict(zip(columns, row, strict=True))}
                for path, row in self.headers.items()
            ],
        )
        connection.execute(statements.DROP_OLD_HEADERS, {"limit": _MAX_HEADERS})

    def _write_scans(self, connection: sqlite3.Connection) -> None:
        now_ns = time.time_ns()
        columns = ("found", "found_codec", "found_size_bytes")
        connection.executemany(
            statements.REMEMBER_SCAN,
            [
                {"key": key, "last_access_ns": now_ns, **dict(zip(columns, row, strict=True))}
                for key, row in self.scans.items()
            ],
        )
        connection.execute(statements.DROP_OLD_SCANS, {"limit": _MAX_SCANS})


def _after_fork_in_child() -> None:
    # The parent writes what it counted; its lock may have been held by a thread that the child does not have.
    for tally in list(_tallies):
        tally._start()


os.register_at_fork(after_in_child=_after_fork_in_child)

_DAY_NS = 86_400 * 10**9
_days: dict[int, str] = {}


def _day(time_ns: int) -> str:
    # The UTC day as text, made once a day: strftime would cost a hit 2 us.
    number = time_ns // _DAY_NS
    day = _days.get(number)
    if day is None:
        day = datetime.datetime.fromtimestamp(number * 86_400, datetime.UTC).date().isoformat()
        _days.clear()
        _days[number] = day
    return day
