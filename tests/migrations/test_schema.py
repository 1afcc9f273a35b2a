"""The schema: made by the migration alone, equal to the models, whole or not at all."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy
from alembic import autogenerate, command
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sharing import take_back_to_0001
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from kernelstore import Artifact, Store
from kernelstore.db import file, migrate, statements
from kernelstore.db.connection import connect
from kernelstore.db.schema import METADATA

MIGRATIONS = migrate.scripts_directory()


def test_the_revision_of_this_release_is_alembics_head() -> None:
    assert int(ScriptDirectory.from_config(migrate.config()).get_current_head() or 0) == statements.REVISION


def test_models_and_migrations_make_the_same_schema(path: Path) -> None:
    """What `alembic check` asks."""
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: connect(path))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert autogenerate.compare_metadata(context, METADATA) == []


def test_every_table_is_strict_and_every_constraint_is_named(path: Path) -> None:
    with connect(path) as connection:
        tables = connection.execute(
            "SELECT name, strict FROM pragma_table_list WHERE schema = 'main' AND type = 'table' "
            "AND name NOT IN ('sqlite_schema', 'alembic_version')"
        ).fetchall()
        texts = [text for (text,) in connection.execute("SELECT sql FROM sqlite_schema WHERE type = 'table'")]
    connection.close()

    assert {name for name, _ in tables} == set(METADATA.tables)
    assert all(strict for _, strict in tables)
    for text in texts:
        constraints = re.findall(r"(?:CONSTRAINT \w+ )?(?:PRIMARY KEY|UNIQUE|FOREIGN KEY|CHECK) \(", text)
        assert all(constraint.startswith("CONSTRAINT ") for constraint in constraints)


def test_the_hot_statements_fit_the_schema(path: Path) -> None:
    """The literal SQL is held against the file, with indexes where a hit or a touch looks for a key."""
    with connect(path) as connection:
        for name in statements.__all__:
            text = getattr(statements, name)
            if isinstance(text, str):
                plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", dict.fromkeys(re.findall(r":(\w+)", text)))
                plan = [str(row[3]) for row in plan.fetchall()]
                assert not [step for step in plan if step.startswith("SCAN artifact") and "COVERING" not in step], name
    connection.close()


def test_the_indexes_people_search_by_are_used(path: Path) -> None:
    searches = {
        "SELECT key FROM artifact WHERE arch_major = 9 AND arch_minor = 0": "ix_artifact_arch",
        "SELECT key FROM artifact WHERE driver_version = 13000": "ix_artifact_driver_version",
        "SELECT key FROM artifact ORDER BY usage_count DESC LIMIT 5": "ix_artifact_usage_count",
        "SELECT key FROM artifact ORDER BY last_access_ns DESC LIMIT 5": "ix_artifact_last_access_ns",
        "SELECT sum(stored_size_bytes) FROM artifact WHERE pinned = 0 AND rank < 5": "ix_artifact_rank",
        "SELECT artifact_id FROM symbol WHERE name_expression = 'f'": "ix_symbol_name_expression",
        "SELECT artifact_id FROM symbol WHERE lowered_name = 'f'": "ix_symbol_lowered_name",
    }
    with connect(path) as connection:
        for text, index in searches.items():
            plan = connection.execute(f"EXPLAIN QUERY PLAN {text}").fetchall()
            assert any(index in row[3] for row in plan), text
    connection.close()


def test_archs_and_driver_versions_are_ordered_as_numbers(store: Store) -> None:
    """C14: '12040' < '9000' and 'sm_100' < 'sm_90' as text."""

    def insert(connection: sqlite3.Connection) -> None:
        for number, (arch, driver_version) in enumerate(
            [("sm_100", 13000), ("sm_90a", 12040), ("sm_75", 9000), ("sm_120", 12090), ("sm_90", 9010)]
        ):
            digits = arch[3:].rstrip("af")
            connection.execute(
                "INSERT INTO artifact (key, kind, arch, arch_major, arch_minor, arch_suffix, driver_version, origin, "
                "relocatable, size_bytes, stored_size_bytes, payload_sha256, compile_ms, created_at_ns, last_access_ns, "
                "usage_count, rank, pinned) VALUES (?, 'cubin', ?, ?, ?, ?, ?, 'import', 0, 1, 1, x'', 0, 0, 0, 0, 0, 0)",
                (
                    number.to_bytes(32, "big"),
                    arch,
                    int(digits[:-1]),
                    int(digits[-1]),
                    arch[3 + len(digits) :],
                    driver_version,
                ),
            )

    store._pool.write(insert)
    at_least_90 = store.sql(
        "SELECT arch FROM artifact WHERE arch_major * 10 + arch_minor >= 90 ORDER BY arch_major, arch_minor, arch_suffix"
    )
    drivers = store.sql("SELECT driver_version FROM artifact ORDER BY driver_version")

    assert [arch for (arch,) in at_least_90] == ["sm_90", "sm_90a", "sm_100", "sm_120"]
    assert [version for (version,) in drivers] == [9000, 9010, 12040, 12090, 13000]


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C77, F04: DDL and version row are one transaction."""
    path = tmp_path / "cache.db"
    upgrade = migrate.upgrade

    def failing(connection: sqlite3.Connection, application_id: int) -> None:
        class Failing(sqlite3.Connection):
            pass

        monkeypatch.setattr(migrate.uuid, "uuid4", lambda: (_ for _ in ()).throw(RuntimeError("halfway")))
        upgrade(connection, application_id)

    monkeypatch.setattr(migrate, "upgrade", failing)
    with pytest.raises(RuntimeError, match="halfway"):
        Store(path)
    monkeypatch.undo()

    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    connection.close()
    with Store(path) as store:
        assert len(store) == 0


def test_a_process_killed_within_the_migration_leaves_nothing(tmp_path: Path, run_killed: Callable[..., None]) -> None:
    """F03."""
    path = tmp_path / "cache.db"
    run_killed(
        "import os, sys; from kernelstore.db import migrate; from kernelstore import Store\n"
        "migrate.uuid.uuid4 = lambda: os._exit(9)\n"
        "Store(sys.argv[1])",
        path,
    )

    with Store(path) as store:
        assert len(store) == 0


def test_a_batch_migration_keeps_the_children(path: Path, store: Store, cubin: Artifact) -> None:
    """C76: with foreign keys on, copying a parent table empties its children without an error."""
    store.put(cubin)
    store.close()
    connection = connect(path)
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA legacy_alter_table = ON")
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: connection, poolclass=sqlalchemy.StaticPool)
    from alembic.operations import Operations

    with engine.connect() as connected:
        connected.exec_driver_sql("BEGIN IMMEDIATE")
        connected.exec_driver_sql("DROP VIEW kernel_usage")
        operations = Operations(MigrationContext.configure(connected))
        with operations.batch_alter_table("artifact", recreate="always") as batch:
            batch.add_column(sqlalchemy.Column("note", sqlalchemy.Text))
        assert connected.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        connected.commit()

    counts = [
        connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("artifact", "blob", "symbol")
    ]
    connection.close()
    assert counts == [1, 1, 1]


def test_a_file_of_revision_0001_is_upgraded_in_place(path: Path, store: Store, cubin: Artifact) -> None:
    """F45."""
    store.put(cubin)
    store.close()
    take_back_to_0001(path)

    with Store(path) as upgraded:
        found = upgraded.get(cubin.key)
        assert found is not None
        assert found.payload == cubin.payload
        assert upgraded.recall_scan(bytes(32)) is None


def test_up_and_down_agree(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    configuration = migrate.config()
    with engine.connect() as connection:
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, "head")
        command.downgrade(configuration, "base")
        left = (
            connection.exec_driver_sql("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'").scalars().all()
        )

    assert left == ["alembic_version"]


def test_models_and_migrations_compile_for_postgresql(capsys: pytest.CaptureFixture[str]) -> None:
    """A shared second tier will stand on them."""
    dialect = postgresql.dialect()
    for table in METADATA.sorted_tables:
        assert str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=dialect))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "from alembic.config import main; main()", "-x", "dialect=postgresql",
         "upgrade", "head", "--sql"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not (root / "pyproject.toml").exists():
        pytest.skip("the alembic command is configured in a checkout's pyproject.toml")

    assert done.returncode == 0, done.stderr
    assert "DOUBLE PRECISION" in done.stdout
    assert "STRICT" not in done.stdout


def test_a_landed_migration_imports_nothing_of_the_package() -> None:
    for script in (MIGRATIONS / "versions").glob("*.py"):
        assert "kernelstore" not in re.sub(r'""".*?"""', "", script.read_text(), flags=re.DOTALL), script.name


def test_the_scripts_are_found_from_any_directory(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """C82."""
    script = "import os, sys; os.chdir('/'); from kernelstore import Store; print(len(Store(sys.argv[1])))"

    assert run_python(script, tmp_path / "new.db") == "0\n"


def test_threads_that_open_one_absent_file_all_succeed(tmp_path: Path) -> None:
    """C56, F06: alembic's context is a module global."""
    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(lambda _: Store(tmp_path / "cache.db"), range(8)))

    assert [len(store) for store in stores] == [0] * 8
    for store in stores:
        store.close()


def test_a_file_prepared_twice_is_migrated_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "upgrade", None)

    file.prepare(path)


@pytest.mark.skipif(os.name != "posix", reason="needs chmod")
def test_upgrading_leaves_the_applications_logging_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    before = [logging.getLogger(name).level for name in (None, "alembic", "sqlalchemy")]

    Store(tmp_path / "cache.db").close()

    assert [logging.getLogger(name).level for name in (None, "alembic", "sqlalchemy")] == before
