"""The tables as SQLAlchemy Core sees them; `migrations/` makes them, a test holds the two together."""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import BigInteger, Double, TypeEngine

__all__ = [
    "METADATA",
    "artifact",
    "blob",
    "claim",
    "counter",
    "header",
    "meta",
    "program",
    "scan",
    "symbol",
    "toolchain_memo",
]

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)

# STRICT tables take INTEGER, REAL, TEXT and BLOB; PostgreSQL's INTEGER has 32 bits.
_Integer64 = BigInteger().with_variant(Integer(), "sqlite")
_Real: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")

meta = Table(
    "meta",
    METADATA,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)

program = Table(
    "program",
    METADATA,
    Column("id", _Integer64, primary_key=True),
    Column("key", LargeBinary, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("source", LargeBinary, nullable=False),
    Column("source_codec", Text, nullable=False),
    Column("source_size_bytes", _Integer64, nullable=False),
    Column("source_sha256", LargeBinary, nullable=False),
    Column("options", Text, nullable=False),
    Column("name_expressions", Text, nullable=False),
    Column("part_digests", Text, nullable=False),
    Column("dependencies", LargeBinary, nullable=False),
    Column("dependencies_size_bytes", _Integer64, nullable=False),
    Column("created_at_ns", _Integer64, nullable=False),
    CheckConstraint("length(key) = 32", name="key_length"),
    Index("ix_program_name", "name"),
    sqlite_strict=True,
)

artifact = Table(
    "artifact",
    METADATA,
    Column("id", _Integer64, primary_key=True),
    Column("key", LargeBinary, nullable=False, unique=True),
    Column("program_id", _Integer64, ForeignKey("program.id")),
    Column("kind", Text, nullable=False),
    Column("arch", Text, nullable=False),
    Column("arch_major", Integer, nullable=False),
    Column("arch_minor", Integer, nullable=False),
    Column("arch_suffix", Text, nullable=False),
    Column("toolchain", Text),
    Column("toolchain_major", Integer),
    Column("toolchain_minor", Integer),
    Column("toolchain_build", Integer),
    Column("driver_version", Integer),
    Column("ptx_version", Integer),
    Column("origin", Text, nullable=False),
    Column("relocatable", Integer, nullable=False),
    Column("size_bytes", _Integer64, nullable=False),
    Column("stored_size_bytes", _Integer64, nullable=False),
    Column("payload_sha256", LargeBinary, nullable=False),
    Column("compile_ms", _Real, nullable=False),
    Column("created_at_ns", _Integer64, nullable=False),
    Column("last_access_ns", _Integer64, nullable=False),
    Column("usage_count", _Integer64, nullable=False),
    Column("rank", _Real, nullable=False),
    Column("pinned", Integer, nullable=False),
    CheckConstraint("length(key) = 32", name="key_length"),
    CheckConstraint("size_bytes >= 0", name="size_bytes"),
    CheckConstraint("usage_count >= 0", name="usage_count"),
    CheckConstraint("pinned IN (0, 1)", name="pinned"),
    CheckConstraint("relocatable IN (0, 1)", name="relocatable"),
    Index("ix_artifact_arch", "arch_major", "arch_minor", "arch_suffix"),
    Index("ix_artifact_driver_version", "driver_version"),
    Index("ix_artifact_usage_count", "usage_count"),
    Index("ix_artifact_last_access_ns", "last_access_ns"),
    Index("ix_artifact_program", "program_id", "kind", "arch"),
    Index(
        "ix_artifact_rank",
        "rank",
        "stored_size_bytes",
        # The migration gives PostgreSQL the same condition; naming its dialect here would import it, 140 ms.
        sqlite_where=text("pinned = 0"),
    ),
    sqlite_strict=True,
)

blob = Table(
    "blob",
    METADATA,
    Column("artifact_id", _Integer64, ForeignKey("artifact.id", ondelete="CASCADE"), primary_key=True),
    Column("codec", Text, nullable=False),
    Column("size_bytes", _Integer64, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Column("header", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    CheckConstraint("size_bytes >= 0", name="size_bytes"),
    CheckConstraint("length(checksum) = 16", name="checksum_length"),
    sqlite_strict=True,
)

symbol = Table(
    "symbol",
    METADATA,
    Column("id", _Integer64, primary_key=True),
    Column("artifact_id", _Integer64, ForeignKey("artifact.id", ondelete="CASCADE"), nullable=False),
    Column("lowered_name", Text, nullable=False),
    Column("name_expression", Text),
    Column("what", Text, nullable=False),
    Column("parameters", Text),
    Column("registers", Integer),
    Column("shared_bytes", Integer),
    Column("local_bytes", Integer),
    Column("stack_bytes", Integer),
    Column("constant_bytes", Integer),
    Column("spill_store_bytes", Integer),
    Column("spill_load_bytes", Integer),
    Index("ix_symbol_artifact", "artifact_id"),
    Index("ix_symbol_lowered_name", "lowered_name"),
    Index("ix_symbol_name_expression", "name_expression"),
    sqlite_strict=True,
)

claim = Table(
    "claim",
    METADATA,
    Column("key", LargeBinary, primary_key=True),
    Column("state", Text, nullable=False),
    Column("nonce", LargeBinary, nullable=False),
    Column("owner", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("boot", Text, nullable=False),
    Column("pid_namespace", Text, nullable=False),
    Column("pid", _Integer64, nullable=False),
    Column("process_start", _Integer64, nullable=False),
    Column("beat", _Integer64, nullable=False),
    Column("claimed_at_ns", _Integer64, nullable=False),
    Column("log", Text),
    CheckConstraint("length(key) = 32", name="key_length"),
    CheckConstraint("state IN ('running', 'failed', 'not_stored')", name="state"),
    sqlite_strict=True,
)

header = Table(
    "header",
    METADATA,
    Column("path", Text, primary_key=True),
    Column("device", _Integer64, nullable=False),
    Column("inode", _Integer64, nullable=False),
    Column("size_bytes", _Integer64, nullable=False),
    Column("mtime_ns", _Integer64, nullable=False),
    Column("ctime_ns", _Integer64, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("includes", Text, nullable=False),
    Column("last_access_ns", _Integer64, nullable=False),
    Index("ix_header_last_access_ns", "last_access_ns"),
    sqlite_strict=True,
)

scan = Table(
    "scan",
    METADATA,
    Column("key", LargeBinary, primary_key=True),
    Column("found", LargeBinary, nullable=False),
    Column("found_codec", Text, nullable=False),
    Column("found_size_bytes", _Integer64, nullable=False),
    Column("last_access_ns", _Integer64, nullable=False),
    CheckConstraint("length(key) = 32", name="key_length"),
    Index("ix_scan_last_access_ns", "last_access_ns"),
    sqlite_strict=True,
)

toolchain_memo = Table(
    "toolchain_memo",
    METADATA,
    Column("path", Text, primary_key=True),
    Column("signature", Text, nullable=False),
    Column("build", Text, nullable=False),
    Column("header_unit", Text),
    Column("created_at_ns", _Integer64, nullable=False),
    sqlite_strict=True,
)

counter = Table(
    "counter",
    METADATA,
    Column("day", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("value", _Integer64, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)
