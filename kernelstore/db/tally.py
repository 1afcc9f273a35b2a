"""Tally: uses, counters and memos that wait in the process until a write carries them along."""

from __future__ import annotations

import datetime
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kernelstore.db import statements
from kernelstore.key import Key

__all__ = ["Batch", "HeaderRow", "ScanRow", "Tally"]

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


class Tally:
    """Uses by key, counters by (day, name, reason), toolchain and header memos, kept in memory.

    Counting takes one short lock and no SQL. One writer at a time moves everything out with `take`, and ends with
    either `written` or `restore`; both do nothing where nothing is out, so that they may be called again after an
    interrupt. A forked child starts with nothing.

    Parameters
    ----------
    wake : callable, optional
        Called when something begins to wait for a write. Memos wait for others' writes, and wake nobody.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self.start_anew()

    def start_anew(self) -> None:
        """Begin with nothing, and a free lock; also in a forked child, as the parent writes what it counted."""
        # Reentrant: a finalizer that hits may run while its thread is counting.
        self._lock = threading.RLock()
        self._waiting = Batch()
        # Taken out and not yet known to be written. It changes together with what waits, in one assignment, so that an
        # interrupt neither loses nor doubles anything.
        self._out: Batch | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def use(self, key: Key, saved_ms: float) -> None:
        """Count one hit served from the file."""
        now_ns = time.time_ns()
        day = _day(now_ns)
        with self._lock:
            waiting = self._waiting
            first = not waiting.counters
            waiting.counters[day, "hit", ""] += 1
            waiting.counters[day, "saved_us", ""] += round(saved_ms * 1000)
            if len(waiting.uses) < _MAX_USES or key in waiting.uses:
                waiting.last_access_ns[key] = now_ns
                waiting.uses[key] += 1
            else:
                waiting.counters[day, "use_lost", ""] += 1
        if first and self._wake is not None:
            self._wake()

    def count(self, name: str, reason: str = "", value: int = 1) -> None:
        """Add to the counter `name`."""
        day = _day(time.time_ns())
        with self._lock:
            counters = self._waiting.counters
            first = not counters
            counters[day, name, reason] += value
        if first and self._wake is not None:
            self._wake()

    def uses(self) -> Counter[Key]:
        """Return the uses that wait."""
        with self._lock:
            return self._waiting.uses.copy()

    def use_of(self, key: Key) -> tuple[int, int]:
        """Return one artifact's uses that wait, and the time of the last in ns; (0, 0) where there is none."""
        with self._lock:
            return self._waiting.uses.get(key, 0), self._waiting.last_access_ns.get(key, 0)

    def counters(self) -> Counter[tuple[str, str, str]]:
        """Return the counters that wait, by (day, name, reason)."""
        with self._lock:
            return self._waiting.counters.copy()

    def toolchain(self, library: str) -> tuple[str, str] | None:
        """Return the (signature, build) that waits for that library."""
        with self._lock:
            return self._waiting.toolchains.get(library)

    def remember_toolchain(self, library: str, signature: str, build: str) -> None:
        """Keep the build of a compiler library."""
        with self._lock:
            self._waiting.toolchains[library] = signature, build

    def headers(self, paths: Sequence[str]) -> dict[str, HeaderRow]:
        """Return the rows that wait for those paths."""
        with self._lock:
            headers = self._waiting.headers
            return {path: headers[path] for path in paths if path in headers}

    def remember_headers(self, rows: Mapping[str, HeaderRow]) -> None:
        """Keep what was read in headers, by path; of more than fit into the table, the newest."""
        with self._lock:
            headers = self._waiting.headers
            headers.update(rows)
            for path in list(headers)[: max(0, len(headers) - _MAX_HEADERS)]:
                del headers[path]

    def scan(self, key: bytes) -> ScanRow | None:
        """Return the row that waits for that key."""
        with self._lock:
            return self._waiting.scans.get(key)

    def remember_scan(self, key: bytes, row: ScanRow) -> None:
        """Keep a scan; of more than fit into the table, the newest."""
        with self._lock:
            scans = self._waiting.scans
            scans[key] = row
            if len(scans) > _MAX_SCANS:
                del scans[next(iter(scans))]

    def take(self) -> Batch:
        """Return all that waits, to be written; it is out from now on."""
        with self._lock:
            taken = self._waiting
            self._out, self._waiting = taken, Batch()
            return taken

    def written(self) -> None:
        """Drop what is out: it is in the file."""
        self._out = None

    def restore(self) -> None:
        """Let what is out wait again: it did not get into the file."""
        with self._lock:
            out = self._out
            if out is None:
                return
            self._waiting, self._out = out | self._waiting, None
        if out.counters and self._wake is not None:
            self._wake()


@dataclass(frozen=True, slots=True)
class Batch:
    """What is written at once."""

    uses: Counter[Key] = field(default_factory=Counter)
    last_access_ns: dict[Key, int] = field(default_factory=dict)
    counters: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    toolchains: dict[str, tuple[str, str]] = field(default_factory=dict)
    headers: dict[str, HeaderRow] = field(default_factory=dict)
    scans: dict[bytes, ScanRow] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.uses or self.counters or self.toolchains or self.headers or self.scans)

    def __or__(self, later: Batch) -> Batch:
        last_access_ns = dict(self.last_access_ns)
        for key, time_ns in later.last_access_ns.items():
            last_access_ns[key] = max(time_ns, last_access_ns.get(key, 0))
        return Batch(
            self.uses + later.uses,
            last_access_ns,
            self.counters + later.counters,
            self.toolchains | later.toolchains,
            self.headers | later.headers,
            self.scans | later.scans,
        )

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
