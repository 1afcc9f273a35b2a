"""How alembic runs the revisions: on the connection it is given, in one transaction with the version row.

`kernelstore.db.migrate` passes its own connection, with the write lock already held. The ``alembic`` command, for
contributors, names a file: ``alembic -x db=some.db current``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine

from kernelstore.db.schema import METADATA


def run(connection: Connection, finish: Callable[[Connection], None] | None = None) -> None:
    """Run the revisions, then `finish`, in one transaction."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        transactional_ddl=True,
        render_as_batch=True,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()
        if finish is not None:
            finish(connection)


attributes: dict[str, Any] = context.config.attributes
if context.is_offline_mode():
    dialect = context.get_x_argument(as_dictionary=True).get("dialect", "sqlite")
    context.configure(dialect_name=dialect, target_metadata=METADATA, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif "connection" in attributes:
    run(attributes["connection"], attributes.get("finish"))
else:
    with create_engine(f"sqlite:///{context.get_x_argument(as_dictionary=True)['db']}").connect() as own_connection:
        run(own_connection)
