"""Statistics of a store: sizes, and counters of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy

from kernelstore.db import queries

__all__ = ["StoreStats", "collect"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store; counts are since the file was made, of all processes.

    Parameters
    ----------
    path : str
        The file.
    artifacts, programs : int
        Rows.
    size_bytes, stored_size_bytes : int
        Sums of the payloads, uncompressed and as stored.
    file_bytes, wal_bytes, live_bytes : int
        The file, its WAL, and the file's pages in use.
    hits, misses, compiles, corrupt, not_stored : int
        Hits served from the file; misses; NVRTC runs; damaged rows dropped; results that could not be stored.
    compile_ms, saved_ms : float
        Time spent in NVRTC, and time that hits saved.
    uncacheable : mapping of str to int
        Compiles that could not be keyed, by reason.
    kinds : mapping of str to (int, int, int)
        For each kind: artifacts, payload bytes, stored bytes.
    """

    path: str
    artifacts: int
    programs: int
    size_bytes: int
    stored_size_bytes: int
    file_bytes: int
    wal_bytes: int
    live_bytes: int
    hits: int
    misses: int
    compiles: int
    corrupt: int
    not_stored: int
    compile_ms: float
    saved_ms: float
    uncacheable: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits as a share of hits and misses, 0 to 1; 0 where there was neither."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


def collect(read: sqlalchemy.Engine, path: Path, waiting: Mapping[tuple[str, str, str], int]) -> StoreStats:
    """Read the figures of the store at `path`.

    Parameters
    ----------
    waiting : mapping of (day, name, reason) to int
        Counters of this process that are not in the file yet.
    """
    counters = queries.counters(read)
    for (_, name, reason), value in waiting.items():
        counters[name, reason] += value
    totals: Counter[str] = Counter()
    for (name, _), value in counters.items():
        totals[name] += value
    kinds = {kind: (count, size, stored) for kind, count, size, stored in queries.kinds(read)}
    programs, live_bytes = queries.sizes(read)
    return StoreStats(
        path=str(path),
        artifacts=sum(count for count, _, _ in kinds.values()),
        programs=programs,
        size_bytes=sum(size for _, size, _ in kinds.values()),
        stored_size_bytes=sum(stored for _, _, stored in kinds.values()),
        file_bytes=_size_bytes(path),
        wal_bytes=_size_bytes(path.with_name(f"{path.name}-wal")),
        live_bytes=live_bytes,
        hits=totals["hit"],
        misses=totals["miss"],
        compiles=totals["compile"],
        corrupt=totals["corrupt"],
        not_stored=totals["not_stored"],
        compile_ms=totals["compile_us"] / 1000,
        saved_ms=totals["saved_us"] / 1000,
        uncacheable={reason: value for (name, reason), value in counters.items() if name == "uncacheable"},
        kinds=kinds,
    )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
