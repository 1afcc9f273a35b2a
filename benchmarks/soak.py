"""Random readers, writers, deleters, checkers, compactors, compilers and forkers on one file, killed at any instant.

Every process notes in a journal of its own what the store has acknowledged to it; a journal outlives `kill -9`. Some
are stopped for a moment instead. At the end the file has to agree with all journals:

- each artifact that was put, and that nobody began to delete, is there with its bytes; what was deleted is not;
- at no time has a read returned bytes of another artifact, and no process met an error;
- uses of artifacts that are never deleted: at least those whose flush returned, at most those that began;
- the file is whole, the WAL stayed short, and no claim of a living process is left.

    python benchmarks/soak.py --seconds 600 --save soak
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import parser, report

from kernelstore import Artifact, Compiler, Key, Store
from kernelstore.db.connection import connect

_KERNEL = 'extern "C" __global__ void k{0}(float* x) {{ x[threadIdx.x] = x[threadIdx.x + {0}] * {0}.f; }}'
_PROGRAMS = [_KERNEL.format(number) for number in range(6)]

# Artifacts that are never deleted, on which uses are counted.
_FIXED = 10

# Writers let the store grow to about so many.
_MAX_ARTIFACTS = 3000

# At 64 MiB writes stop; several compactions may be under way then, each as long as the file.
_MAX_WAL_BYTES = 128 * 2**20

_RECORD = struct.Struct("<cQ")


def main() -> None:
    """Run, print what happened, and end with status 1 if anything is not as it must be."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--processes", type=int, default=8)
    options.add_argument("--seed", type=int, default=None)
    given = options.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory() as place:
        soak = _Soak(Path(place), seed)
        soak.run(given.seconds, given.processes)
        results = soak.results()
    for name, value in results.items():
        print(f"{name:<24}{value}")
    report(given.save, "Random processes on one file, killed at any instant", results)
    for fault in soak.faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    sys.exit(1 if soak.faults else 0)


def _key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def _number(key: Key) -> int:
    return int.from_bytes(bytes(key), "big")


class _Soak:
    """One run: its processes, and what they noted."""

    def __init__(self, place: Path, seed: int) -> None:
        self.faults: list[str] = []
        self._place = place
        self._path = place / "cache.db"
        self._seed = seed
        self._random = random.Random(seed)
        self._living: dict[int, str] = {}
        self._stopped: dict[int, float] = {}
        self._started = 0
        self._counts: Counter[str] = Counter()
        self._longest_wal_bytes = 0
        with Store(place / "made.db") as store, Compiler(store) as compiler:
            self._artifacts = [compiler.compile(source, arch="sm_90") for source in _PROGRAMS]
        with Store(self._path) as store:
            store.put(*[self._artifact(number) for number in range(_FIXED)])

    def _artifact(self, number: int) -> Artifact:
        return dataclasses.replace(self._artifacts[number % len(self._artifacts)], key=_key(number), from_cache=False)

    # -- the killer -----------------------------------------------------------------------------------------------

    def run(self, seconds: float, processes: int) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        while time.monotonic() < self._until:
            while len(self._living) < processes:
                self._start()
            time.sleep(self._random.uniform(0.0, 0.1))
            self._reap(os.WNOHANG)
            with contextlib.suppress(OSError):
                self._longest_wal_bytes = max(self._longest_wal_bytes, Path(f"{self._path}-wal").stat().st_size)
            for pid, until in list(self._stopped.items()):
                if time.monotonic() > until:
                    del self._stopped[pid]
                    os.kill(pid, signal.SIGCONT)
            pid = self._random.choice(list(self._living) or [0])
            if pid and pid not in self._stopped:
                if self._random.random() < 0.7:
                    os.kill(pid, signal.SIGKILL)
                    self._counts["killed"] += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self._stopped[pid] = time.monotonic() + self._random.uniform(0.0, 0.5)
                    self._counts["stopped"] += 1
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        signal.alarm(120)  # whoever hangs now hangs for ever
        self._reap(0)
        signal.alarm(0)

    def _start(self) -> None:
        self._started += 1
        kind = self._random.choice(list(_KINDS))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(int(self._seconds) + 100)
                _Worker(self, self._started, kind).run()
                status = 0
            except BaseException:
                (self._place / f"{self._started}.error").write_text(f"{kind}\n{traceback.format_exc()}")
            finally:
                os._exit(status)
        self._living[pid] = kind
        self._counts[kind] += 1

    def _reap(self, how: int) -> None:
        for pid, kind in list(self._living.items()):
            done, status = os.waitpid(pid, how)
            if done:
                del self._living[pid]
                self._stopped.pop(pid, None)
                code = os.waitstatus_to_exitcode(status)
                if code not in (0, 1, -signal.SIGKILL):  # 1 has left an error
                    self.faults.append(f"a {kind} ended with {code}")

    # -- the end --------------------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """Compare the file with the journals; what does not agree is added to `faults`."""
        self.faults += [path.read_text() for path in self._place.glob("*.error")]
        put, doomed, deleted, begun, flushed = set(), set(), set(), 0, 0
        for journal in self._place.glob("*.journal"):
            for what, number in _RECORD.iter_unpack(journal.read_bytes()):
                self._counts[_NOTES[what]] += number if what in b"fFh" else 1
                if what == b"p":
                    put.add(number)
                elif what == b"d":
                    doomed.add(number)
                elif what == b"D":
                    deleted.add(number)
                elif what == b"f":
                    begun += number
                elif what == b"F":
                    flushed += number
        with Store(self._path) as store:
            for number in put - doomed:
                found = store.peek(_key(number))
                if found is None or found.payload != self._artifact(number).payload:
                    self.faults.append(f"artifact {number} was put, and {'is lost' if found is None else 'is another'}")
            for number in deleted:
                if store.peek(_key(number)) is not None:
                    self.faults.append(f"artifact {number} was deleted, and is there")
            uses = sum(store.info(_key(number)).usage_count for number in range(_FIXED))
            if not flushed <= uses <= begun:
                self.faults.append(f"{flushed} uses were written, {begun} were begun, {uses} are in the file")
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            for statement in ("PRAGMA integrity_check", "PRAGMA foreign_key_check", *_HALVES):
                if (rows := connection.execute(statement).fetchall()) not in ([], [("ok",)]):
                    self.faults.append(f"{statement}: {rows[:5]}")
            for pid, owner in connection.execute("SELECT pid, owner FROM claim WHERE state = 'running'"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 0)
                    self.faults.append(f"a claim of {owner} is left")
        if self._longest_wal_bytes > _MAX_WAL_BYTES:
            self.faults.append(f"the WAL was {self._longest_wal_bytes} bytes long")
        return {
            "seconds": self._seconds,
            "seed": self._seed,
            "processes started": self._started,
            **dict(sorted(self._counts.items())),
            "uses in the file": uses,
            "longest WAL, MiB": round(self._longest_wal_bytes / 2**20, 1),
            "file, MiB": round(self._path.stat().st_size / 2**20, 1),
            "faults": len(self.faults),
        }


# What a journal's records tell, each with the number of an artifact, or how many.
_NOTES = {
    b"p": "puts acknowledged",
    b"d": "deletes begun",
    b"D": "deletes acknowledged",
    b"f": "uses begun",
    b"F": "uses written",
    b"h": "hits checked",
    b"c": "checks",
    b"v": "compactions",
    b"k": "kernels compiled",
    b"K": "kernels found",
    b"o": "forks",
}

_HALVES = (
    "SELECT id FROM artifact WHERE id NOT IN (SELECT artifact_id FROM blob)",
    "SELECT id FROM artifact WHERE id NOT IN (SELECT artifact_id FROM symbol)",
    "SELECT id FROM program WHERE id NOT IN (SELECT program_id FROM artifact)",
)


class _Worker:
    """One process of one kind, from its start to the end of the run, or to its own."""

    def __init__(self, soak: _Soak, number: int, kind: str) -> None:
        self._artifact = soak._artifact
        self._expected = [artifact.payload for artifact in soak._artifacts]
        self._path, self._until = soak._path, soak._until
        self._work = _KINDS[kind]
        self._random = random.Random(f"{soak._seed} {number}")
        self._next = number * 2**32
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._journal = os.open(soak._place / f"{number}.journal", flags, 0o600)

    def run(self) -> None:
        while time.monotonic() < self._until:
            with Store(self._path) as self.store:
                for _ in range(self._random.randrange(1, 200)):
                    if time.monotonic() < self._until:
                        self._work(self)

    def _note(self, what: bytes, number: int) -> None:
        os.write(self._journal, _RECORD.pack(what, number))

    def read(self) -> None:
        keys = list(self.store)
        hits = 0
        for key in self._random.choices(keys, k=200):
            # The fixed ones' uses are counted by `use`; compiled kernels have keys of another kind.
            if not _FIXED <= (number := _number(key)) < 2**64:
                continue
            found = self.store.get(key)
            if found is not None:
                assert found.payload == self._artifact(number).payload, f"other bytes than those of {number}"
                hits += 1
        self._note(b"h", hits)

    def use(self) -> None:
        count = self._random.randrange(1, 200)
        self._note(b"f", count)
        for _ in range(count):
            number = self._random.randrange(_FIXED)
            found = self.store.get(_key(number))
            assert found is not None, f"fixed artifact {number} is lost"
            assert found.payload == self._artifact(number).payload, f"other bytes than those of {number}"
        self._note(b"h", count)
        self.store.flush()
        self._note(b"F", count)

    def write(self) -> None:
        if len(self.store) > _MAX_ARTIFACTS:
            self.delete()
        for _ in range(50):
            numbers = range(self._next, self._next + self._random.randrange(1, 5))
            self._next = numbers.stop
            self.store.put(*[self._artifact(number) for number in numbers])
            for number in numbers:
                self._note(b"p", number)
            found = self.store.peek(_key(numbers[0]))
            assert found is None or found.payload == self._artifact(numbers[0]).payload

    def delete(self) -> None:
        for key in self._random.choices(list(self.store), k=100):
            if _FIXED <= (number := _number(key)) < 2**64:
                self._note(b"d", number)
                self.store.delete(key)
                self._note(b"D", number)

    def check(self) -> None:
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.execute("BEGIN")
            for statement in _HALVES:
                assert connection.execute(statement).fetchall() == [], statement
            connection.execute("COMMIT")
        self.store.stats()
        for _ in zip(range(20), self.store.search(), strict=False):
            pass
        self._note(b"c", 1)

    def compact(self) -> None:
        with contextlib.closing(connect(self._path)) as connection:
            connection.executescript("VACUUM" if self._random.random() < 0.05 else "PRAGMA incremental_vacuum(100)")
        self.store._pool.write(lambda _: None)  # whose checkpoint takes what the compaction wrote
        self._note(b"v", 1)

    def compile(self) -> None:
        number = self._random.randrange(len(_PROGRAMS))
        with Compiler(self.store) as compiler:
            artifact = compiler.compile(_PROGRAMS[number], arch="sm_90")
        assert artifact.payload == self._expected[number], f"another kernel than program {number}"
        self._note(b"K" if artifact.from_cache else b"k", 1)
        if self._random.random() < 0.2:
            self.store.delete(artifact.key)

    def fork(self) -> None:
        number = self._random.randrange(_FIXED)
        child = os.fork()
        if child == 0:
            found = self.store.peek(_key(number))
            os._exit(0 if found is not None and found.payload == self._artifact(number).payload else 1)
        assert os.waitpid(child, 0)[1] == 0, "a child did not find a fixed artifact"
        self._note(b"o", 1)


_KINDS: dict[str, Callable[[_Worker], None]] = {
    "reader": _Worker.read,
    "user": _Worker.use,
    "writer": _Worker.write,
    "deleter": _Worker.delete,
    "checker": _Worker.check,
    "compactor": _Worker.compact,
    "compiler": _Worker.compile,
    "forker": _Worker.fork,
}


if __name__ == "__main__":
    main()
