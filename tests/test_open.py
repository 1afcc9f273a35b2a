"""Opening a store: new, up to date, foreign, newer and broken files, and where they may lie."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelstore import Store
from kernelstore.db.connection import connect
from kernelstore.db.file import APPLICATION_ID
from kernelstore.db.statements import REVISION
from kernelstore.errors import (
    ForeignFile,
    InvalidArgument,
    InvalidType,
    NotADatabase,
    SchemaTooNew,
    SqliteTooOld,
    StoreClosed,
    StoreUnavailable,
    UnknownPlugin,
)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if not path.name.endswith(("-shm", ".lock"))
    }


def test_a_new_store_is_private_and_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "cache.db"

    with Store(path) as store:
        assert store.path == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(store) == 0

    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA page_size").fetchone() == (8192,)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (REVISION,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_opening_an_up_to_date_file_imports_no_sqlalchemy_and_writes_nothing(
    path: Path, run_python: Callable[..., str]
) -> None:
    before = digests(path.parent)

    printed = run_python(
        "import sys; from kernelstore import Store; store = Store(sys.argv[1]); store.get(bytes(32)); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in {'sqlalchemy', 'alembic', 'numpy', 'cuda'}))"
        "; store._tally.take(); store.close()",
        path,
    )

    assert printed.strip() == "[]"
    assert digests(path.parent) == before


@pytest.mark.parametrize(
    "content",
    [
        b"not a database at all, but a text file\n" * 40,
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\0" * 5000,
        b"x",
    ],
    ids=["text", "git-lfs pointer", "zeros", "one byte"],
)
def test_a_file_that_is_no_database_is_refused_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.db"
    path.write_bytes(content)
    before = digests(tmp_path)

    with pytest.raises(NotADatabase) as caught:
        Store(path)

    assert str(path) in str(caught.value)
    assert digests(tmp_path) == before


@pytest.mark.parametrize(("at", "content"), [(0, bytes(16)), (16, b"\x00\x03")], ids=["magic (F15)", "page size (F16)"])
def test_a_store_whose_header_is_overwritten_is_no_database_any_more(path: Path, at: int, content: bytes) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at : at + len(content)] = content
    path.write_bytes(damaged)

    with pytest.raises(NotADatabase):
        Store(path)

    assert path.read_bytes() == damaged


@pytest.mark.parametrize("wal", [False, True], ids=["rollback journal", "WAL with uncheckpointed pages"])
def test_another_applications_database_is_refused_and_stays_as_it_is(tmp_path: Path, wal: bool) -> None:
    """As with Firefox's places.db (F46)."""
    path = tmp_path / "places.sqlite"
    other = sqlite3.connect(path)
    if wal:
        other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE moz_places (id INTEGER PRIMARY KEY, url TEXT)")
    other.execute("INSERT INTO moz_places (url) VALUES ('https://example.org')")
    other.commit()
    before = digests(tmp_path)

    with pytest.raises(ForeignFile):
        Store(path)

    assert digests(tmp_path) == before
    other.close()


def test_a_database_without_application_id_but_with_tables_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE artifact (id INTEGER)")
    other.close()

    with pytest.raises(ForeignFile):
        Store(path)


def test_a_newer_file_is_refused_and_stays_as_it_is(path: Path) -> None:
    """C79, F44: an unknown revision."""
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {REVISION + 1}")
    newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.commit()
    before = digests(path.parent)

    with pytest.raises(SchemaTooNew) as caught:
        Store(path)

    assert (caught.value.revision, caught.value.known_revision) == (REVISION + 1, REVISION)
    assert "0002" in str(caught.value)
    assert f"{REVISION:04}" in str(caught.value)
    assert digests(path.parent) == before
    newer.close()


def test_an_old_process_never_writes_into_a_file_that_was_upgraded_meanwhile(path: Path, store: Store) -> None:
    """F47: every write transaction reads min_writer first."""
    newer = sqlite3.connect(path)
    newer.execute("UPDATE meta SET value = ? WHERE key = 'min_writer'", (str(REVISION + 1),))
    newer.commit()
    newer.close()

    with pytest.raises(SchemaTooNew):
        store.delete(bytes(32))


def test_an_empty_file_is_made_a_store(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    path.touch()

    with Store(path) as store:
        assert len(store) == 0


@pytest.mark.parametrize("name", ["per%cent.db", "quest?ion.db", "ha#sh.db", "spa ce.db", "snøh€.db", "a&mode=ro.db"])
def test_odd_characters_in_the_path_are_just_characters(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / name

    with Store(path) as store:
        assert store.path == path

    assert path.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_the_default_path_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_PATH", str(tmp_path / "elsewhere" / "kernels.db"))

    with Store() as store:
        assert store.path == tmp_path / "elsewhere" / "kernels.db"


def test_an_empty_environment_value_means_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C61: KERNELSTORE_PATH="" and an XDG_CACHE_HOME two levels deep that is absent."""
    monkeypatch.setenv("KERNELSTORE_PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x" / "y"))

    with Store() as store:
        assert store.path == tmp_path / "x" / "y" / "kernelstore" / "cache.db"
        assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_a_default_path_that_is_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_PATH", "off")

    with pytest.raises(InvalidArgument, match="KERNELSTORE_PATH"):
        Store()


@pytest.mark.parametrize("value", [b"cache.db", 3, 3.5, object()])
def test_a_path_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidType):
        Store(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_a_path_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument):
        Store(value)


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is a directory"):
        Store(tmp_path)


def test_a_parent_that_is_a_file_is_said(tmp_path: Path) -> None:
    """F14."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(StoreUnavailable):
        Store(tmp_path / "file" / "cache.db")


def test_a_link_leads_to_one_file_with_one_wal(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)

    with Store(link) as store:
        assert store.path == path


@pytest.mark.parametrize("value", [0, -1, float("nan"), "1", None, 1e9])
def test_a_lock_timeout_of_no_use_is_refused(path: Path, value: object) -> None:
    with pytest.raises((InvalidArgument, InvalidType)):
        Store(path, lock_timeout_s=value)  # type: ignore[arg-type]


def test_an_unknown_codec_lists_those_there_are(path: Path) -> None:
    with pytest.raises(UnknownPlugin, match="lz4"):
        Store(path, codec="zip")


def test_an_old_sqlite_is_said_with_the_minimum(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C72."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 22, 0))

    with pytest.raises(SqliteTooOld, match=r"3\.37\.0"):
        Store(path)


def test_use_after_close_is_said_and_closing_twice_is_fine(path: Path) -> None:
    store = Store(path)
    store.close()
    store.close()

    with pytest.raises(StoreClosed):
        store.get(bytes(32))
    with pytest.raises(StoreClosed):
        store.delete(bytes(32))


def test_closing_leaves_one_file_and_its_lock(path: Path) -> None:
    with Store(path) as store:
        store.delete(bytes(32))

    assert sorted(entry.name for entry in path.parent.iterdir()) == ["cache.db", "cache.db.lock"]


def test_every_connection_has_the_pragmas(path: Path) -> None:
    connection = connect(path, query_only=True)
    expected = {
        "wal_autocheckpoint": 0, "mmap_size": 0, "synchronous": 1, "secure_delete": 0, "trusted_schema": 0,
        "cell_size_check": 1, "foreign_keys": 1, "temp_store": 2, "query_only": 1, "busy_timeout": 30000,
    }  # fmt: skip

    assert {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in expected} == expected
    connection.close()


def test_a_directory_that_cannot_be_made_is_said(as_nobody: Callable[[Callable[[], object]], object]) -> None:
    """C61: HOME=/nonexistent."""
    error = as_nobody(lambda: Store("/nonexistent/x/cache.db"))

    assert isinstance(error, StoreUnavailable)
    assert "/nonexistent/x/cache.db" in str(error)


def test_a_journal_that_a_killed_process_left_is_rolled_back(tmp_path: Path) -> None:
    """F53: killed while the file was being made, before it was in WAL mode."""
    path = tmp_path / "cache.db"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA page_size = 8192")
    writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
    writer.execute("PRAGMA user_version = 0")
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("CREATE TABLE x (y)")
    writer.executemany("INSERT INTO x VALUES (zeroblob(8000))", [()] * 50)
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    writer.execute("ROLLBACK")
    writer.close()
    assert set(kept) == {"cache.db", "cache.db-journal"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)

    with Store(path) as store:
        assert len(store) == 0
    assert not (tmp_path / "cache.db-journal").exists()


def test_no_lock_file_is_left_beside_what_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE moz_places (id INTEGER)")
    other.close()

    with pytest.raises(ForeignFile):
        Store(path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["places.sqlite"]


@pytest.mark.parametrize("value", ["x\ud800", "~nobody-of-that-name/x.db", "loop/x.db"])
def test_a_path_that_leads_nowhere_is_a_typed_error(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises((InvalidArgument, StoreUnavailable)):
        Store(value)


def test_a_name_that_is_too_long_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises((InvalidArgument, StoreUnavailable)):
        Store(tmp_path / ("a" * 300))


def test_a_slip_in_the_log_level_does_not_stop_the_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_LOG", "bogus")
    logger = logging.getLogger("kernelstore")
    before = list(logger.handlers), logger.level

    Store(path).close()

    logger.handlers[:], logger.level = before
