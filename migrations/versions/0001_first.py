"""The first schema.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import sqlite

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_INTEGER64 = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL: sa.types.TypeEngine[float] = sa.Double().with_variant(sqlite.REAL(), "sqlite")

# group_concat orders as it finds; the subquery gives it the names in order.
_KERNEL_USAGE = """
CREATE VIEW kernel_usage AS
SELECT
    lower(hex(artifact.key)) AS key,
    program.name AS program,
    (SELECT group_concat(name, ', ') FROM (
        SELECT coalesce(symbol.name_expression, symbol.lowered_name) AS name
        FROM symbol WHERE symbol.artifact_id = artifact.id ORDER BY symbol.id
    )) AS symbols,
    artifact.kind AS kind,
    artifact.arch AS arch,
    artifact.toolchain AS toolchain,
    artifact.driver_version AS driver_version,
    artifact.origin AS origin,
    artifact.size_bytes AS size_bytes,
    artifact.stored_size_bytes AS stored_size_bytes,
    artifact.compile_ms AS compile_ms,
    artifact.usage_count AS usage_count,
    artifact.usage_count * artifact.compile_ms AS saved_ms,
    datetime(artifact.created_at_ns / 1000000000, 'unixepoch') AS created_at,
    datetime(artifact.last_access_ns / 1000000000, 'unixepoch') AS last_access,
    artifact.pinned AS pinned
FROM artifact LEFT JOIN program ON program.id = artifact.program_id
"""


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "program",
        sa.Column("id", _INTEGER64, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.LargeBinary(), nullable=False),
        sa.Column("source_codec", sa.Text(), nullable=False),
        sa.Column("source_size_bytes", _INTEGER64, nullable=False),
        sa.Column("source_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("name_expressions", sa.Text(), nullable=False),
        sa.Column("part_digests", sa.Text(), nullable=False),
        sa.Column("dependencies", sa.LargeBinary(), nullable=False),
        sa.Column("dependencies_size_bytes", _INTEGER64, nullable=False),
        sa.Column("created_at_ns", _INTEGER64, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_program"),
        sa.UniqueConstraint("key", name="uq_program_key"),
        sa.CheckConstraint("length(key) = 32", name=op.f("ck_program_key_length")),
        sqlite_strict=True,
    )
    op.create_index("ix_program_name", "program", ["name"])
    op.create_table(
        "artifact",
        sa.Column("id", _INTEGER64, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("program_id", _INTEGER64),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("arch_major", sa.Integer(), nullable=False),
        sa.Column("arch_minor", sa.Integer(), nullable=False),
        sa.Column("arch_suffix", sa.Text(), nullable=False),
        sa.Column("toolchain", sa.Text()),
        sa.Column("toolchain_major", sa.Integer()),
        sa.Column("toolchain_minor", sa.Integer()),
        sa.Column("toolchain_build", sa.Integer()),
        sa.Column("driver_version", sa.Integer()),
        sa.Column("ptx_version", sa.Integer()),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("relocatable", sa.Integer(), nullable=False),
        sa.Column("size_bytes", _INTEGER64, nullable=False),
        sa.Column("stored_size_bytes", _INTEGER64, nullable=False),
        sa.Column("payload_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("compile_ms", _REAL, nullable=False),
        sa.Column("created_at_ns", _INTEGER64, nullable=False),
        sa.Column("last_access_ns", _INTEGER64, nullable=False),
        sa.Column("usage_count", _INTEGER64, nullable=False),
        sa.Column("rank", _REAL, nullable=False),
        sa.Column("pinned", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_artifact"),
        sa.UniqueConstraint("key", name="uq_artifact_key"),
        sa.ForeignKeyConstraint(["program_id"], ["program.id"], name="fk_artifact_program_id_program"),
        sa.CheckConstraint("length(key) = 32", name=op.f("ck_artifact_key_length")),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_artifact_size_bytes")),
        sa.CheckConstraint("usage_count >= 0", name=op.f("ck_artifact_usage_count")),
        sa.CheckConstraint("pinned IN (0, 1)", name=op.f("ck_artifact_pinned")),
        sa.CheckConstraint("relocatable IN (0, 1)", name=op.f("ck_artifact_relocatable")),
        sqlite_strict=True,
    )
    op.create_index("ix_artifact_arch", "artifact", ["arch_major", "arch_minor", "arch_suffix"])
    op.create_index("ix_artifact_driver_version", "artifact", ["driver_version"])
    op.create_index("ix_artifact_usage_count", "artifact", ["usage_count"])
    op.create_index("ix_artifact_last_access_ns", "artifact", ["last_access_ns"])
    op.create_index("ix_artifact_program", "artifact", ["program_id", "kind", "arch"])
    op.create_index(
        "ix_artifact_rank",
        "artifact",
        ["rank", "stored_size_bytes"],
        sqlite_where=sa.text("pinned = 0"),
        postgresql_where=sa.text("pinned = 0"),
    )
    op.create_table(
        "blob",
        sa.Column("artifact_id", _INTEGER64, nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("size_bytes", _INTEGER64, nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("header", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("artifact_id", name="pk_blob"),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifact.id"], name="fk_blob_artifact_id_artifact", ondelete="CASCADE"
        ),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_blob_size_bytes")),
        sa.CheckConstraint("length(checksum) = 16", name=op.f("ck_blob_checksum_length")),
        sqlite_strict=True,
    )
    op.create_table(
        "symbol",
        sa.Column("id", _INTEGER64, nullable=False),
        sa.Column("artifact_id", _INTEGER64, nullable=False),
        sa.Column("lowered_name", sa.Text(), nullable=False),
        sa.Column("name_expression", sa.Text()),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("parameters", sa.Text()),
        sa.Column("registers", sa.Integer()),
        sa.Column("shared_bytes", sa.Integer()),
        sa.Column("local_bytes", sa.Integer()),
        sa.Column("stack_bytes", sa.Integer()),
        sa.Column("constant_bytes", sa.Integer()),
        sa.Column("spill_store_bytes", sa.Integer()),
        sa.Column("spill_load_bytes", sa.Integer()),
        sa.PrimaryKeyConstraint("id", name="pk_symbol"),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifact.id"], name="fk_symbol_artifact_id_artifact", ondelete="CASCADE"
        ),
        sqlite_strict=True,
    )
    op.create_index("ix_symbol_artifact", "symbol", ["artifact_id"])
    op.create_index("ix_symbol_lowered_name", "symbol", ["lowered_name"])
    op.create_index("ix_symbol_name_expression", "symbol", ["name_expression"])
    op.create_table(
        "claim",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("nonce", sa.LargeBinary(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("pid_namespace", sa.Text(), nullable=False),
        sa.Column("pid", _INTEGER64, nullable=False),
        sa.Column("process_start", _INTEGER64, nullable=False),
        sa.Column("beat", _INTEGER64, nullable=False),
        sa.Column("claimed_at_ns", _INTEGER64, nullable=False),
        sa.Column("log", sa.Text()),
        sa.PrimaryKeyConstraint("key", name="pk_claim"),
        sa.CheckConstraint("length(key) = 32", name=op.f("ck_claim_key_length")),
        sa.CheckConstraint("state IN ('running', 'failed', 'not_stored')", name=op.f("ck_claim_state")),
        sqlite_strict=True,
    )
    op.create_table(
        "header",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("device", _INTEGER64, nullable=False),
        sa.Column("inode", _INTEGER64, nullable=False),
        sa.Column("size_bytes", _INTEGER64, nullable=False),
        sa.Column("mtime_ns", _INTEGER64, nullable=False),
        sa.Column("ctime_ns", _INTEGER64, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("includes", sa.Text(), nullable=False),
        sa.Column("last_access_ns", _INTEGER64, nullable=False),
        sa.PrimaryKeyConstraint("path", name="pk_header"),
        sqlite_strict=True,
    )
    op.create_index("ix_header_last_access_ns", "header", ["last_access_ns"])
    op.create_table(
        "toolchain_memo",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.Column("build", sa.Text(), nullable=False),
        sa.Column("header_unit", sa.Text()),
        sa.Column("created_at_ns", _INTEGER64, nullable=False),
        sa.PrimaryKeyConstraint("path", name="pk_toolchain_memo"),
        sqlite_strict=True,
    )
    op.create_table(
        "counter",
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("value", _INTEGER64, nullable=False),
        sa.PrimaryKeyConstraint("day", "name", "reason", name="pk_counter"),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    meta = sa.table("meta", sa.column("key", sa.Text()), sa.column("value", sa.Text()))
    op.bulk_insert(meta, [{"key": "min_reader", "value": "1"}, {"key": "min_writer", "value": "1"}])
    if op.get_context().dialect.name == "sqlite":
        op.execute(_KERNEL_USAGE)


def downgrade() -> None:
    """For tests alone: users' files are never taken back."""
    if op.get_context().dialect.name == "sqlite":
        op.execute("DROP VIEW kernel_usage")
    for table in ("counter", "toolchain_memo", "header", "claim", "symbol", "blob", "artifact", "program", "meta"):
        op.drop_table(table)
