"""Migrations: alembic run on a connection that already holds the write lock."""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config

from kernelstore import __version__

__all__ = ["config", "scripts_directory", "upgrade"]


def scripts_directory() -> Path:
    """Return where the migrations lie: inside the installed package, else at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "migrations"
    return installed if (installed / "env.py").exists() else package.parent / "migrations"


def config() -> Config:
    """Return alembic's configuration, independent of any ``alembic.ini`` and of the working directory."""
    configuration = Config()
    # alembic expands % in every option.
    configuration.set_main_option("script_location", str(scripts_directory()).replace("%", "%%"))
    return configuration


def upgrade(connection: sqlite3.Connection, application_id: int) -> None:
    """Bring the file to the newest revision and commit; a failure leaves it as it was.

    Parameters
    ----------
    connection : sqlite3.Connection
        In a transaction begun with BEGIN IMMEDIATE, foreign keys off. It is closed afterwards.
    application_id : int
        Written into the file's header in the same transaction, with the revision as ``user_version``.
    """

    def finish(connected: sqlalchemy.Connection) -> None:
        revision = int(connected.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())
        connected.exec_driver_sql(f"PRAGMA application_id = {application_id}")
        connected.exec_driver_sql(f"PRAGMA user_version = {revision}")
        connected.exec_driver_sql(
            "INSERT INTO meta (key, value) VALUES ('store_uuid', ?), ('made_by', ?) ON CONFLICT (key) DO NOTHING",
            (uuid.uuid4().hex, f"kernelstore {__version__}"),
        )
        damaged = connected.exec_driver_sql("PRAGMA foreign_key_check").all()
        if damaged:
            raise sqlite3.IntegrityError(f"{len(damaged)} rows lost their parents in the migration")

    configuration = config()
    configuration.attributes["finish"] = finish
    # An engine looks at its first connection and rolls it back, which would drop the lock: a spare one takes that.
    connections = [connection, sqlite3.connect(":memory:")]
    engine = sqlalchemy.create_engine("sqlite://", creator=connections.pop, poolclass=sqlalchemy.NullPool)
    engine.connect().close()
    with engine.connect() as connected:
        configuration.attributes["connection"] = connected
        command.upgrade(configuration, "head")
