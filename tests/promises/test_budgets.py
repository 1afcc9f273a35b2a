"""Budgets that can be counted: what an import loads, how many statements a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelstore import Artifact, Store


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import kernelstore", set()),
        ("from kernelstore import Store", {"sqlite3", "lz4", "xxhash"}),
        ("from kernelstore import Compiler", {"sqlite3", "lz4", "xxhash"}),
        ("from kernelstore import load", set()),
    ],
)
def test_an_import_loads_no_more_than_it_says(
    statement: str, allowed: set[str], run_python: Callable[..., str]
) -> None:
    heavy = {"sqlite3", "lz4", "xxhash", "sqlalchemy", "alembic", "numpy", "platformdirs", "click", "rich", "asyncio"}
    printed = run_python(
        "import sys\nbefore = set(sys.modules)\n"
        f"{statement}\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"print(sorted(names & {heavy!r}), [n for n in sys.modules if n.startswith('cuda.')])"
    )
    loaded, cuda = eval(f"[{printed.replace('] [', '], [')}]")

    assert set(loaded) <= allowed
    assert cuda == []


def _statements(store: Store, call: Callable[[], object]) -> list[str]:
    seen: list[str] = []
    connections = [*store._pool._idle, store._pool._writer]
    for connection in connections:
        if connection is not None:
            connection.set_trace_callback(seen.append)
    call()
    for connection in connections:
        if connection is not None:
            connection.set_trace_callback(None)
    return seen


def test_a_put_is_one_transaction_of_few_statements(store: Store, cubin: Artifact, ptx: Artifact) -> None:
    store.delete(bytes(32))  # opens the connection that writes

    seen = _statements(store, lambda: store.put(cubin, ptx))

    # Pragma, BEGIN, min_writer, counters of the delete; program twice; artifact, blob and symbols of each; COMMIT.
    assert seen[1] == "BEGIN IMMEDIATE"
    assert seen[-1] == "COMMIT"
    assert len(seen) <= 14


def test_opening_a_file_that_is_up_to_date_costs_the_same_however_much_it_holds(path: Path, cubin: Artifact) -> None:
    with Store(path) as store:
        store.put(cubin)

    assert "SELECT" not in " ".join(_statements(Store(path), lambda: None))


def test_python_is_one_that_is_supported() -> None:
    assert sys.version_info >= (3, 11)
