"""Putting and getting: one self-sufficient row, verified against the key before it is decoded."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sharing import other_key

from kernelstore import Artifact, Key, Store, Symbol
from kernelstore.db import rows as rows_module
from kernelstore.db import statements
from kernelstore.errors import (
    InvalidArgument,
    InvalidType,
    KeyNotFound,
    PayloadRejected,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreLocked,
    UnknownPlugin,
)

Rows = Callable[..., list[tuple[Any, ...]]]


def damage(path: Path, statement: str, *parameters: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, parameters)
    connection.commit()
    connection.close()


def test_an_artifact_comes_back_as_it_was_put(store: Store, cubin: Artifact) -> None:
    store.put(cubin)

    found = store.get(cubin.key)

    assert found == dataclasses.replace(cubin, program=None, from_cache=True)
    assert found is not None
    assert found.payload == cubin.payload


def test_the_next_process_reads_what_was_put(
    path: Path, store: Store, cubin: Artifact, run_python: Callable[..., str]
) -> None:
    store.put(cubin)

    printed = run_python(
        "import sys; from kernelstore import Store; store = Store(sys.argv[1]); a = store[sys.argv[2]]; "
        "print(a.kind, a.arch, len(a.payload), [s.name for s in a.symbols])",
        path,
        cubin.key,
    )

    assert printed.strip() == f"cubin sm_90 {cubin.size_bytes} ['saxpy<float>']"


def test_a_key_may_be_bytes_or_hex(store: Store, cubin: Artifact) -> None:
    store.put(cubin)

    assert store[cubin.key] == store[bytes(cubin.key)] == store[str(cubin.key)]


def test_the_mapping_form_puts_gets_and_deletes(store: Store, cubin: Artifact, ptx: Artifact) -> None:
    store[cubin.key] = cubin
    store[str(ptx.key)] = ptx

    assert list(store) == [cubin.key, ptx.key]
    assert len(store) == 2
    del store[cubin.key]
    assert list(store) == [ptx.key]
    with pytest.raises(KeyNotFound) as caught:
        store[cubin.key]
    assert caught.value.key == cubin.key
    with pytest.raises(KeyError):
        del store[cubin.key]


def test_an_artifact_is_not_stored_under_another_key(store: Store, cubin: Artifact) -> None:
    with pytest.raises(InvalidArgument, match="own key"):
        store[bytes(32)] = cubin


def test_membership_is_not_asked_because_it_would_be_out_of_date(store: Store) -> None:
    with pytest.raises(TypeError):
        bytes(32) in store  # noqa: B015


def test_a_hit_is_one_statement_that_reads_one_row_through_the_key_index(
    path: Path, store: Store, cubin: Artifact
) -> None:
    store.put(cubin)
    store.get(cubin.key)
    seen: list[str] = []
    (connection,) = store._pool._idle
    connection.set_trace_callback(seen.append)

    store.get(cubin.key)

    assert len(seen) == 1
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statements.BLOB_OF_KEY}", {"key": cubin.key})]
    assert plan == [
        "SEARCH artifact USING COVERING INDEX sqlite_autoindex_artifact_1 (key=?)",
        "SEARCH blob USING INTEGER PRIMARY KEY (rowid=?)",
    ]


def test_a_hit_needs_no_write_lock(path: Path, store: Store, cubin: Artifact) -> None:
    """C58: another process holds the lock; counting waits, the hit does not."""
    store.put(cubin)
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")

    for _ in range(3):
        assert store.get(cubin.key) is not None

    other.rollback()
    other.close()
    assert store.stats().hits == 3


def test_cubin_and_ptx_are_put_together_or_not_at_all(path: Path, cubin: Artifact, ptx: Artifact, rows: Rows) -> None:
    with Store(path) as store:
        wrong = dataclasses.replace(ptx, payload=b"\x7fELF")
        with pytest.raises(PayloadRejected):
            store.put(cubin, wrong)
        assert len(store) == 0

        store.put(cubin, ptx)

    assert rows("SELECT count(*) FROM program") == [(1,)]
    assert rows("SELECT count(*) FROM artifact") == [(2,)]


def test_putting_an_equal_key_again_changes_nothing(store: Store, cubin: Artifact, rows: Rows) -> None:
    store.put(cubin)
    store.put(dataclasses.replace(cubin, log="another"))

    assert store[cubin.key].log == cubin.log
    assert rows("SELECT count(*) FROM symbol") == [(1,)]


def test_a_program_goes_with_its_last_artifact(store: Store, cubin: Artifact, ptx: Artifact, rows: Rows) -> None:
    store.put(cubin, ptx)

    assert store.delete(cubin.key)
    assert rows("SELECT count(*) FROM program") == [(1,)]
    assert store.delete(ptx.key)
    assert not store.delete(ptx.key)

    for table in ("program", "artifact", "blob", "symbol"):
        assert rows(f"SELECT count(*) FROM {table}") == [(0,)]


def test_columns_tell_people_what_is_stored(store: Store, cubin: Artifact, ptx: Artifact, rows: Rows) -> None:
    store.put(cubin, ptx)

    assert rows(
        "SELECT kind, arch, arch_major, arch_minor, arch_suffix, origin, relocatable, size_bytes, ptx_version, "
        "usage_count, pinned FROM artifact ORDER BY id"
    ) == [
        ("cubin", "sm_90", 9, 0, "", "nvrtc", 0, cubin.size_bytes, None, 0, 0),
        ("ptx", "compute_90", 9, 0, "", "nvrtc", 0, ptx.size_bytes, ptx.ptx_version, 0, 0),
    ]
    (toolchain, major, minor, build) = rows(
        "SELECT toolchain, toolchain_major, toolchain_minor, toolchain_build FROM artifact WHERE kind = 'cubin'"
    )[0]
    assert toolchain == f"nvrtc {major}.{minor}.{build}"
    assert rows("SELECT name_expression, parameters FROM symbol WHERE registers > 0") == [
        ("saxpy<float>", '["f32", "u64", "u64", "u32"]')
    ]
    assert (
        rows("SELECT symbols, hex(key) FROM (SELECT symbols, x'00' AS key FROM kernel_usage)")[0][0] == "saxpy<float>"
    )


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"payload": b""}, PayloadRejected),
        ({"payload": b"hello"}, PayloadRejected),
        ({"payload": b".version 8.0\n.target sm_90\n\0"}, PayloadRejected),
        ({"arch": "sm_80"}, PayloadRejected),
        ({"arch": "90"}, ValueError),
        ({"kind": "cubins"}, UnknownPlugin),
        ({"kind": "ptx"}, PayloadRejected),
        ({"log": "lone \udc80"}, InvalidArgument),
        ({"compile_ms": "long"}, InvalidType),
        ({"compile_ms": float("nan")}, InvalidArgument),
        ({"payload": "text"}, InvalidType),
        ({"key": b"short"}, InvalidArgument),
    ],
)
def test_an_artifact_that_is_not_what_it_says_is_refused_and_nothing_is_written(
    store: Store, cubin: Artifact, changes: dict[str, Any], error: type[Exception]
) -> None:
    """C42 and its kind."""
    with pytest.raises(error):
        store.put(dataclasses.replace(cubin, **changes))

    assert len(store) == 0


def test_a_payload_above_what_sqlite_holds_is_refused(
    store: Store, cubin: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F38, with a smaller limit than 1 GB."""
    monkeypatch.setattr(rows_module, "MAX_PAYLOAD_BYTES", cubin.size_bytes - 1)

    with pytest.raises(InvalidArgument, match="too large"):
        store.put(cubin)


def test_only_artifacts_are_put(store: Store) -> None:
    with pytest.raises(InvalidType):
        store.put(b"cubin")  # type: ignore[arg-type]


def test_a_full_database_is_said_and_earlier_rows_stay(store: Store, cubin: Artifact) -> None:
    """C63: SQLITE_FULL, here by SQLite's own page limit."""
    store.put(cubin)
    # SQLite makes that the pages there are.
    store._pool.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))

    with pytest.raises(StoreFull):
        store.put(*(other_key(cubin, number) for number in range(100)))

    assert list(store) == [cubin.key]
    assert store.get(cubin.key) is not None


def test_a_put_that_cannot_get_the_lock_says_so(path: Path, cubin: Artifact) -> None:
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")

    with Store(path, lock_timeout_s=0.05) as store:
        with pytest.raises(StoreLocked):
            store.put(cubin)
        other.rollback()
        store.put(cubin)

        assert store.get(cubin.key) is not None
    other.close()


# -- damage -------------------------------------------------------------------------------------------------------

DAMAGES = {
    "a flipped byte (C73)": "UPDATE blob SET data = CAST(substr(data, 1, 400) || x'55' || substr(data, 402) AS BLOB)",
    "half the blob (C40, C74)": "UPDATE blob SET data = substr(data, 1, length(data) / 2)",
    "all but one byte (C74)": "UPDATE blob SET data = substr(data, 1, length(data) - 1)",
    "ten bytes (C74)": "UPDATE blob SET data = substr(data, 1, 10)",
    "no bytes (C74)": "UPDATE blob SET data = x''",
    "trailing bytes": "UPDATE blob SET data = CAST(data || x'00' AS BLOB)",
    "another size": "UPDATE blob SET size_bytes = size_bytes + 1",
    "a huge size (F39)": "UPDATE blob SET size_bytes = 9223372036854775807",
    "no size (F40)": "UPDATE blob SET size_bytes = 0",
    "another codec": "UPDATE blob SET codec = 'none'",
    "another header": "UPDATE blob SET header = replace(header, 'sm_90', 'sm_91')",
    "no header": "UPDATE blob SET header = ''",
    "another checksum": "UPDATE blob SET checksum = x'00112233445566778899aabbccddeeff'",
}  # fmt: skip


@pytest.mark.parametrize("statement", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_row_is_a_miss_is_dropped_and_can_be_put_again(
    path: Path, store: Store, cubin: Artifact, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(cubin)
    damage(path, statement)

    with caplog.at_level(logging.WARNING, "kernelstore"):
        assert store.get(cubin.key) is None

    assert len(caplog.records) == 1
    assert len(store) == 0
    assert store.stats().corrupt == 1
    store.put(cubin)
    assert store.get(cubin.key) is not None


def test_a_blob_of_another_row_is_a_miss(path: Path, store: Store, cubin: Artifact) -> None:
    """C40, F20: valid in itself, but not this key's."""
    other = other_key(cubin, 1)
    store.put(cubin, other)
    damage(
        path,
        "UPDATE blob SET (codec, size_bytes, checksum, header, data) = "
        "(SELECT codec, size_bytes, checksum, header, data FROM blob WHERE artifact_id = 2) WHERE artifact_id = 1",
    )

    assert store.get(cubin.key) is None
    assert store.get(other.key) is not None


def test_keys_swapped_between_rows_are_misses(path: Path, store: Store, cubin: Artifact) -> None:
    other = other_key(cubin, 1)
    store.put(cubin, other)
    damage(path, "UPDATE artifact SET key = CAST(x'77' || substr(key, 2) AS BLOB) WHERE id = 1")

    assert store.get(Key(b"\x77" + cubin.key[1:])) is None
    assert store.get(other.key) is not None


def test_a_repaired_row_is_not_dropped_by_one_who_saw_it_damaged(path: Path, store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    (good,) = store.sql("SELECT data FROM blob").rows[0]
    damage(path, DAMAGES["a flipped byte (C73)"])
    rows = store._pool.read(statements.BLOB_OF_KEY, {"key": cubin.key})
    damage(path, "UPDATE blob SET data = ?, checksum = checksum", good)
    damage(path, "UPDATE blob SET checksum = x'00112233445566778899aabbccddeeff'")

    damaged = {"artifact_id": rows[0][0], "checksum": rows[0][3]}
    assert not store._pool.write(lambda connection: connection.execute(statements.DELETE_DAMAGED, damaged).fetchall())

    assert len(store) == 1


def test_an_artifact_row_without_a_blob_is_a_miss(path: Path, store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    damage(path, "DELETE FROM blob")

    assert store.get(cubin.key) is None


# -- use, threads, logging ----------------------------------------------------------------------------------------


def test_hits_are_counted_and_written_at_close(path: Path, cubin: Artifact, rows: Rows) -> None:
    with Store(path) as store:
        store.put(cubin)
        for _ in range(5):
            store.get(cubin.key)
        store.get(bytes(32))

    assert rows("SELECT usage_count FROM artifact") == [(5,)]
    assert rows("SELECT last_access_ns > created_at_ns, abs(rank - last_access_ns) < 1000 FROM artifact") == [(1, 1)]
    assert dict(rows("SELECT name, value FROM counter WHERE name IN ('hit', 'miss')")) == {"hit": 5, "miss": 1}


def test_peeking_counts_no_use(store: Store, cubin: Artifact) -> None:
    store.put(cubin)

    assert store.peek(cubin.key) is not None
    assert store.stats().hits == 0


def test_a_use_of_a_deleted_row_is_not_another_rows_use(path: Path, store: Store, cubin: Artifact, rows: Rows) -> None:
    store.put(cubin)
    store.get(cubin.key)
    assert store._pool.tally.uses()
    with Store(path) as other:
        other.delete(cubin.key)
        other.put(other_key(cubin, 1))
    store.flush()

    assert rows("SELECT usage_count FROM artifact") == [(0,)]


def test_threads_share_a_store(store: Store, cubin: Artifact) -> None:
    """C56: 16 threads put and get at once."""
    barrier = threading.Barrier(16)

    def work(number: int) -> None:
        artifact = other_key(cubin, number)
        barrier.wait()
        store.put(artifact)
        for _ in range(20):
            assert store[artifact.key].payload == cubin.payload

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))

    assert len(store) == 16
    assert store.stats().hits == 320


def test_a_store_can_be_sent_to_another_process(store: Store, cubin: Artifact) -> None:
    store.put(cubin)

    with pickle.loads(pickle.dumps(store)) as again:
        assert again.path == store.path
        assert again.get(cubin.key) is not None


def test_the_log_tells_hit_miss_and_reason(store: Store, cubin: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kernelstore"):
        store.get(cubin.key)
        store.put(cubin)
        store.get(cubin.key)

    messages = [record.getMessage().split(":")[0] for record in caplog.records]
    assert messages == [f"miss {cubin.key}", f"put {cubin.key}", f"hit {cubin.key}"]


def test_the_environment_switches_the_log_on(path: Path, run_python: Callable[..., str]) -> None:
    script = "import sys; from kernelstore import Store; sys.stderr = sys.stdout; Store(sys.argv[1]).get(bytes(32))"

    assert "miss 0000" in run_python(script, path, KERNELSTORE_LOG="debug")
    assert run_python(script, path, KERNELSTORE_LOG="") == ""


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_each_row_keeps_its_own_codec(path: Path, cubin: Artifact, codec: str, rows: Rows) -> None:
    with Store(path, codec=codec) as store:
        store.put(cubin)
    with Store(path, codec="lz4" if codec == "none" else "none") as store:
        assert store[cubin.key].payload == cubin.payload

    assert rows("SELECT codec FROM blob") == [(codec,)]
    (stored, size) = rows("SELECT stored_size_bytes, size_bytes FROM artifact")[0]
    assert (stored == size) == (codec == "none")


# -- what heals, and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["header", "codec"])
def test_text_that_is_no_utf_8_any_more_is_damage(path: Path, store: Store, cubin: Artifact, column: str) -> None:
    store.put(cubin)
    (text,) = store.sql(f"SELECT CAST({column} AS BLOB) FROM blob").rows[0]
    damage(path, f"UPDATE blob SET {column} = CAST(? AS TEXT)", bytes([text[0] | 0x80]) + text[1:])

    assert store.get(cubin.key) is None
    store.put(cubin)
    assert store.get(cubin.key) is not None


def test_an_artifact_that_lost_its_blob_is_put_again(path: Path, store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    damage(path, "DELETE FROM blob")
    assert store.get(cubin.key) is None

    store.put(cubin)

    assert store.get(cubin.key) is not None
    assert len(store) == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"driver_version": 2**70}, InvalidArgument),
        ({"ptx_version": object()}, InvalidType),
        ({"compile_ms": 1e308}, InvalidArgument),
        ({"relocatable": "x"}, InvalidType),
        ({"origin": "x"}, InvalidArgument),
        ({"symbols": None}, InvalidType),
        ({"symbols": ("x",)}, InvalidType),
        ({"symbols": (Symbol("k", registers=-1),)}, InvalidArgument),
        ({"symbols": (Symbol("k", registers=2**80),)}, InvalidArgument),
        ({"symbols": (Symbol("k", registers="x"),)}, InvalidType),  # type: ignore[arg-type]
        ({"symbols": (Symbol("k", what="x"),)}, InvalidArgument),
        ({"symbols": (Symbol("k", parameters=("\udc80",)),)}, InvalidArgument),
        ({"program": "x"}, InvalidType),
    ],
)
def test_values_that_the_columns_cannot_hold_are_refused(
    store: Store, cubin: Artifact, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        store.put(dataclasses.replace(cubin, **changes))

    assert len(store) == 0


def test_a_toolchain_with_a_number_beyond_all_bounds_is_only_text(store: Store, cubin: Artifact) -> None:
    store.put(dataclasses.replace(cubin, toolchain="nvrtc 99999999999999999999.1.1"))

    assert store.info(cubin.key).toolchain == "nvrtc 99999999999999999999.1.1"


@pytest.mark.parametrize("value", [2**70, -1, "y", 1.5])
def test_a_counter_takes_whole_numbers_only(store: Store, value: object) -> None:
    with pytest.raises((InvalidArgument, InvalidType)):
        store.count("x", value=value)  # type: ignore[arg-type]


def test_a_closed_store_answers_nothing(path: Path) -> None:
    store = Store(path)
    store.close()

    for ask in (store.stats, lambda: list(store.search()), lambda: store.sql("SELECT 1"), lambda: store.info(bytes(32)),
                lambda: store.program(bytes(32)), lambda: store.find("ab"), store.__enter__, lambda: len(store)):  # fmt: skip
        with pytest.raises(StoreClosed):
            ask()


def test_a_store_whose_file_is_gone_says_so(tmp_path: Path, made_file: bytes) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    (place / "cache.db").write_bytes(made_file)
    store = Store(place / "cache.db")
    shutil.rmtree(place)

    for ask in (store.stats, lambda: list(store.search()), lambda: store.sql("SELECT 1")):
        with pytest.raises(StoreError):
            ask()
    store.close()
