"""Fixtures for all tests: paths, stores, and real payloads made by a real NVRTC."""

from __future__ import annotations

import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelstore import Artifact, Compiler, Store
from kernelstore.db import file

SAXPY = """
template<class T> __global__ void saxpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the stress and fuzz runs that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; give --long"))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's settings or touches the user's cache."""
    for name in [name for name in os.environ if name.startswith("KERNELSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KERNELSTORE_PATH", str(tmp_path / "default" / "cache.db"))


@pytest.fixture
def path(tmp_path: Path, made_file: bytes) -> Path:
    """A path with an empty store, whose making took no time."""
    path = tmp_path / "cache.db"
    path.write_bytes(made_file)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def made_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of an empty store of this release."""
    path = tmp_path_factory.mktemp("made") / "cache.db"
    file.prepare(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.read_bytes()


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


@pytest.fixture
def compiler(store: Store) -> Iterator[Compiler]:
    with Compiler(store) as compiler:
        yield compiler


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """The cubin and the PTX of one real program, as `Compiler` makes them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KERNELSTORE_")]:
            patch.delenv(name)
        kept: list[tuple[Artifact, ...]] = []
        with Store(tmp_path_factory.mktemp("compiled") / "cache.db") as store:
            put = store.put_compiled
            patch.setattr(store, "put_compiled", lambda claim, *made, codec: kept.append(made) or put(claim, *made))
            Compiler(store).compile(SAXPY, "cubin", arch="sm_90", name_expressions=("saxpy<float>",))
    cubin, ptx = kept[0]
    return cubin, ptx


@pytest.fixture
def cubin(compiled: tuple[Artifact, Artifact]) -> Artifact:
    return compiled[0]


@pytest.fixture
def ptx(compiled: tuple[Artifact, Artifact]) -> Artifact:
    return compiled[1]


@pytest.fixture
def count_compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the runs of NVRTC from here on."""
    from kernelstore.cuda import nvrtc

    nvrtc.build()  # finds the build by compiling, once per process
    runs: list[str] = []
    compile_program = nvrtc.compile_program

    def counted(source: str, **arguments: object) -> object:
        runs.append(source)
        return compile_program(source, **arguments)

    monkeypatch.setattr(nvrtc, "compile_program", counted)
    return lambda: len(runs)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run a script in a new Python process and return what it printed."""

    def run(script: str, *arguments: object, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_killed(tmp_path: Path) -> Callable[..., None]:
    """Run a script in a new Python process that dies within it, with exit status 9."""

    def run(script: str, *arguments: object) -> None:
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 9, done.stderr

    return run


@pytest.fixture
def as_nobody(tmp_path: Path) -> Callable[[Callable[[], object]], object]:
    """Run a function in a child that belongs to another user, and return what it returned or raised."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)

    def run(function: Callable[[], object]) -> object:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                result: object = function()
            except Exception as error:
                result = error
            os.write(writing, pickle.dumps(result))
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
            content = stream.read()
        os.waitpid(child, 0)
        return pickle.loads(content)

    return run


@pytest.fixture
def rows(path: Path) -> Callable[..., list[tuple[object, ...]]]:
    """Read the file with plain sqlite3, as a user would."""

    def read(statement: str, *parameters: object) -> list[tuple[object, ...]]:
        with sqlite3.connect(path) as connection:
            found = connection.execute(statement, parameters).fetchall()
        connection.close()
        return found

    return read
