"""Single flight: of all that want one cold kernel one compiles, and no owner's end delays the others for long."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sharing import write_lock

from kernelstore import Compiler, Store, build, flight
from kernelstore.db import claims
from kernelstore.errors import CompileError, StoreWarning
from kernelstore.key import Key

K = 'extern "C" __global__ void k(float* a) { a[threadIdx.x] += 1.f; }'
Rows = Callable[..., list[tuple[Any, ...]]]

# A process that tells each of its steps in a line, and compiles when it is told to.
ASKER = """
import logging, sys
from kernelstore import Compiler, Store, build, flight
from kernelstore.errors import CompileError

path, source, how, stale_s = sys.argv[1:]
flight._STALE_S, flight._BEAT_S = float(stale_s), 0.1

class Tell(logging.Handler):
    def emit(self, record):
        if record.msg.startswith("waiting for"):
            print("waiting", flush=True)

logging.getLogger("kernelstore").addHandler(Tell())
logging.getLogger("kernelstore").setLevel(logging.INFO)
run = build.run

def told(request, toolchain):
    print("compiling", flush=True)
    if how != "at once" and sys.stdin.readline() == "interrupt\\n":
        raise KeyboardInterrupt
    return run(request, toolchain)

build.run = told
with Compiler(Store(path)) as compiler:
    print("asking", flush=True)
    if how == "at the barrier":
        how = "at once"
        sys.stdin.readline()
    try:
        artifact = compiler.compile(source, "ptx", arch="compute_90")
    except CompileError as error:
        print("failed", repr(error.log), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        print("found" if artifact.from_cache else "compiled", flush=True)
    compiler.store.close()
"""


class Asker:
    def __init__(self, path: Path, source: str, how: str, stale_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASKER, str(path), source, how, str(stale_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> list[str]:
        return self.process.communicate(timeout=120)[0].split("\n")[:-1]

    def tell(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def compiles(self) -> Asker:
        """Return when it is within its compile."""
        assert [self.line(), self.line()] == ["asking", "compiling"]
        return self

    def waits(self) -> Asker:
        """Return when it waits for another one's compile."""
        assert [self.line(), self.line()] == ["asking", "waiting"]
        return self


@pytest.fixture
def ask(path: Path) -> Iterator[Callable[..., Asker]]:
    askers: list[Asker] = []

    def start(source: str = K, how: str = "when told", stale_s: float = 60.0) -> Asker:
        askers.append(Asker(path, source, how, stale_s))
        return askers[-1]

    yield start
    for asker in askers:
        asker.process.kill()
        asker.process.communicate()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_BEAT_S", 0.1)


def compile_k(compiler: Compiler) -> bool:
    return compiler.compile(K, "ptx", arch="compute_90").from_cache


def counted(rows: Rows, name: str) -> int:
    return int(rows("SELECT coalesce(sum(value), 0) FROM counter WHERE name = ?", name)[0][0])


@pytest.mark.parametrize("number", [6, pytest.param(32, marks=pytest.mark.long)])
def test_many_processes_that_want_one_kernel_compile_once(ask: Callable[..., Asker], rows: Rows, number: int) -> None:
    """C52, F33."""
    askers = [ask(how="at the barrier") for _ in range(number)]
    for asker in askers:
        assert asker.line() == "asking"
    for asker in askers:
        asker.tell()

    ends = sorted(asker.rest()[-1] for asker in askers)

    assert ends == ["compiled"] + ["found"] * (number - 1)
    assert rows("SELECT count(*) FROM artifact") == [(1,)]
    assert rows("SELECT count(*) FROM claim") == [(0,)]
    assert counted(rows, "compile") == 1


def test_many_threads_that_want_one_kernel_compile_once(
    path: Path, rows: Rows, count_compiles: Callable[[], int]
) -> None:
    stores = [Store(path), Store(path)]
    compilers = [Compiler(store) for store in stores]
    barrier = threading.Barrier(16)

    def asked(number: int) -> bool:
        barrier.wait()
        return compile_k(compilers[number % 2])

    with ThreadPoolExecutor(16) as pool:
        found = sorted(pool.map(asked, range(16)))
    for store in stores:
        store.close()

    assert found == [False] + [True] * 15
    assert count_compiles() == 1
    assert rows("SELECT count(*) FROM claim") == [(0,)]


def test_other_kernels_compile_meanwhile(ask: Callable[..., Asker], compiler: Compiler, rows: Rows) -> None:
    """C53: no lock is held while NVRTC runs."""
    owner = ask().compiles()

    started = time.monotonic()
    compiler.compile(K.replace("1.f", "2.f"), "ptx", arch="compute_90")
    took_s = time.monotonic() - started

    assert took_s < 20, "waited for another kernel's compile"
    assert rows("SELECT state, pid FROM claim") == [("running", owner.process.pid)]
    owner.tell()
    assert owner.rest() == ["compiled"]


def test_the_claims_say_who_compiles_what(ask: Callable[..., Asker], rows: Rows) -> None:
    owner = ask().compiles()

    ((key, who, host, pid, claimed_at_ns),) = rows("SELECT key, owner, host, pid, claimed_at_ns FROM claim")
    owner.tell()
    owner.rest()

    assert rows("SELECT key FROM artifact") == [(key,)]
    assert f"process {owner.process.pid} on {os.uname().nodename}" in who
    assert (host, pid) == (os.uname().nodename, owner.process.pid)
    assert abs(time.time_ns() - claimed_at_ns) < 10**12


def test_a_killed_owner_delays_nobody(ask: Callable[..., Asker], rows: Rows) -> None:
    """C54: known by its pid, long before its beat would be missed."""
    owner = ask().compiles()
    waiter = ask(how="at once").waits()

    owner.process.kill()
    owner.process.wait()

    assert waiter.rest() == ["compiling", "compiled"]
    assert rows("SELECT count(*) FROM artifact") == [(1,)]
    assert rows("SELECT count(*) FROM claim") == [(0,)]


def test_a_stopped_owner_delays_nobody_beyond_the_bound(ask: Callable[..., Asker], rows: Rows) -> None:
    owner = ask().compiles()
    waiter = ask(how="at once", stale_s=1.0).waits()

    owner.process.send_signal(signal.SIGSTOP)
    assert waiter.rest() == ["compiling", "compiled"]
    owner.process.send_signal(signal.SIGCONT)
    owner.tell()

    assert owner.rest() == ["compiled"]
    assert rows("SELECT count(*) FROM artifact") == [(1,)]
    assert rows("SELECT count(*) FROM claim") == [(0,)]


def test_an_owner_that_compiles_for_long_is_waited_for(ask: Callable[..., Asker], rows: Rows) -> None:
    """Its beats say that it lives."""
    owner = ask().compiles()
    waiter = ask(how="at once", stale_s=1.0).waits()

    while rows("SELECT beat FROM claim")[0][0] < 25:
        time.sleep(0.05)
    owner.tell()

    assert owner.rest() == ["compiled"]
    assert waiter.rest() == ["found"]


def test_an_interrupted_owner_frees_those_that_wait(ask: Callable[..., Asker]) -> None:
    owner = ask().compiles()
    waiter = ask(how="at once").waits()

    owner.tell("interrupt")

    assert owner.rest() == ["interrupted"]
    assert waiter.rest() == ["compiling", "compiled"]


def test_an_error_reaches_those_that_waited_and_is_not_remembered(
    ask: Callable[..., Asker], compiler: Compiler, rows: Rows, count_compiles: Callable[[], int]
) -> None:
    """C21."""
    wrong = K.replace("a[", "b[")
    owner = ask(wrong).compiles()
    waiters = [ask(wrong, how="at once").waits() for _ in range(2)]

    owner.tell()
    (told,) = owner.rest()

    assert told.startswith("failed")
    assert "identifier" in told
    assert [waiter.rest() for waiter in waiters] == [[told], [told]]
    with pytest.raises(CompileError):
        compiler.compile(wrong, "ptx", arch="compute_90")
    assert count_compiles() == 1
    while rows("SELECT count(*) FROM claim") != [(0,)]:
        time.sleep(0.05)


def test_an_error_in_one_thread_reaches_the_others(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, count_compiles: Callable[[], int]
) -> None:
    class Flights(dict[Any, Any]):
        asked = 0

        def setdefault(self, place: Any, own: Any = None) -> Any:
            flight = super().setdefault(place, own)
            self.asked += 1
            return flight

    flights = Flights()
    run = build.run
    wrong = K.replace("a[", "b[")

    def late(*arguments: Any) -> Any:
        while flights.asked < 8:
            time.sleep(0.001)
        return run(*arguments)

    def asked(_: int) -> object:
        try:
            return compiler.compile(wrong, "ptx", arch="compute_90")
        except CompileError as error:
            return error

    monkeypatch.setattr(flight, "_flights", flights)
    monkeypatch.setattr(build, "run", late)
    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(asked, range(8)))

    assert {type(error) for error in errors} == {CompileError}
    assert len({id(error) for error in errors}) == 8
    assert len({str(error) for error in errors}) == 1
    assert count_compiles() == 1


def test_what_is_in_doubt_is_for_the_one_that_compiled_it(
    ask: Callable[..., Asker], compiler: Compiler, rows: Rows, tmp_path: Path
) -> None:
    """A header that changes during the compile: nothing is stored, and those that waited compile for themselves."""
    header = tmp_path / "q.h"
    header.write_text("#define Q 1\n")
    source = f'#include "{header}"\nextern "C" __global__ void k(int* a) {{ a[0] = Q; }}'
    owner = ask(source).compiles()
    waiter = ask(source, how="at once").waits()

    header.write_text("#define Q 22\n")
    owner.tell()

    assert owner.rest() == ["compiled"]
    assert waiter.rest() == ["compiling", "compiled"]
    assert rows("SELECT count(*) FROM artifact") == [(0,)]
    artifact = compiler.compile(source, "ptx", arch="compute_90")
    assert b", 22;" in artifact.payload


def plant(path: Path, key: Key, **columns: object) -> None:
    """Leave a claim as another process would have left it."""
    own = {**claims._self(os.getpid()), "state": "running", "nonce": b"n" * 16, "beat": 7, "claimed_at_ns": 1} | columns
    names = ", ".join(own)
    with sqlite3.connect(path) as connection:
        connection.execute(f"INSERT INTO claim (key, {names}) VALUES (?{', ?' * len(own)})", (key, *own.values()))
    connection.close()


@pytest.fixture
def key_of_k(tmp_path: Path) -> Key:
    with Store(tmp_path / "other.db") as store:
        return Compiler(store).compile(K, "ptx", arch="compute_90").key


@pytest.mark.parametrize(
    "left",
    [{"process_start": 1}, {"pid": 2**22 + 1}, {"boot": "before the last reboot"}, {"state": "failed", "log": "{}"}, {"state": "not_stored"}],
    ids=["pid reused", "process ended", "rebooted", "failed", "not stored"],
)  # fmt: skip
def test_what_a_dead_owner_left_is_taken_over_at_once(
    path: Path, compiler: Compiler, key_of_k: Key, rows: Rows, left: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C54."""
    plant(path, key_of_k, **left)
    monkeypatch.setattr(flight, "_end_of", None)

    assert not compile_k(compiler)
    assert rows("SELECT count(*) FROM claim") == [(0,)]


@pytest.mark.parametrize(
    "left",
    [{"pid_namespace": "pid:[1]", "pid": 1}, {"host": "another", "boot": "another"}, {"claimed_at_ns": 2**62}],
    ids=["container", "another host", "clock set back"],
)
def test_an_owner_that_cannot_be_seen_is_known_by_its_beat(
    path: Path, compiler: Compiler, key_of_k: Key, rows: Rows, left: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(path, key_of_k, **left)
    monkeypatch.setattr(flight, "_STALE_S", 0.3)

    started = time.monotonic()
    assert not compile_k(compiler)

    assert time.monotonic() - started > 0.3
    assert rows("SELECT count(*) FROM claim") == [(0,)]


def test_nobody_waits_for_ever(
    path: Path, compiler: Compiler, key_of_k: Key, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that beats and never ends."""
    plant(path, key_of_k)
    monkeypatch.setattr(flight, "_MAX_WAIT_S", 0.3)

    assert not compile_k(compiler)
    assert rows("SELECT nonce FROM claim") == [(b"n" * 16,)]


def test_what_was_left_behind_goes_with_the_next_claim(
    path: Path, compiler: Compiler, key_of_k: Key, rows: Rows
) -> None:
    for number in range(3):
        plant(path, Key(bytes([number]) * 32), process_start=1)
    plant(path, Key(b"4" * 32), state="failed", log="{}")
    plant(path, Key(b"5" * 32))

    compile_k(compiler)

    assert rows("SELECT key FROM claim") == [(b"5" * 32,)]


def test_who_cannot_claim_compiles_alone(path: Path) -> None:
    """A store whose write lock another process holds: the kernel is returned, nothing is stored, and that is counted."""
    with Store(path, lock_timeout_s=0.1) as store:
        compiler = Compiler(store)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.warns(StoreWarning, match="locked"):
            assert not compile_k(compiler)
        other.execute("ROLLBACK")
        other.close()

        assert len(store) == 0
        assert store.stats().not_stored == 1
        assert not compile_k(compiler)
        assert len(store) == 1


@pytest.mark.parametrize("source", [K, "no kernel"], ids=["a kernel", "an error"])
def test_no_step_of_a_compile_waits_long_for_the_lock(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Another process takes it after the claim: the kernel or the error comes within seconds, not `lock_timeout_s`."""
    write, run = store._pool.write, build.run
    given_s: list[float | None] = []
    held = contextlib.ExitStack()

    def write_impatiently(work: Callable[[sqlite3.Connection], Any], *, timeout_s: float | None = None) -> Any:
        if threading.current_thread() is threading.main_thread():  # and not that of the beats
            given_s.append(timeout_s)
        return write(work, timeout_s=timeout_s if len(given_s) == 1 else 0.05)

    def run_and_lock(*arguments: Any) -> Any:
        held.enter_context(write_lock(path))
        return run(*arguments)

    monkeypatch.setattr(store._pool, "write", write_impatiently)
    monkeypatch.setattr(build, "run", run_and_lock)
    with held, warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        with contextlib.nullcontext() if source == K else pytest.raises(CompileError):
            Compiler(store).compile(source, "ptx", arch="compute_90")

    assert len(given_s) >= 2
    assert sum(seconds or 30 for seconds in given_s) <= 11
