"""The memo of whole scans.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_INTEGER64 = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "scan",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("found", sa.LargeBinary(), nullable=False),
        sa.Column("found_codec", sa.Text(), nullable=False),
        sa.Column("found_size_bytes", _INTEGER64, nullable=False),
        sa.Column("last_access_ns", _INTEGER64, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_scan"),
        sa.CheckConstraint("length(key) = 32", name=op.f("ck_scan_key_length")),
        sqlite_strict=True,
    )
    op.create_index("ix_scan_last_access_ns", "scan", ["last_access_ns"])


def downgrade() -> None:
    """For tests alone: users' files are never taken back."""
    op.drop_table("scan")
