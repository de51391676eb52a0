"""Micro-benchmarks of clusters, which predictions are calibrated by."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "calibrations",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fingerprint", sa.String(length=16), nullable=False),
        sa.Column("cluster", sa.JSON(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=False),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("context_bytes", sa.BigInteger(), nullable=True),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=True),
        sa.Column("rows", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_calibrations"),
    )
    op.create_index("ix_calibrations_fingerprint_created", "calibrations", ["fingerprint", "created"], unique=False)


def downgrade() -> None:
    """Drop it again."""
    op.drop_table("calibrations")
