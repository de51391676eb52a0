"""Marks of commits, so that a client whose connection broke can tell whether its transaction took place."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "commits",
        sa.Column("mark", sa.String(length=32), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("mark", name="pk_commits"),
    )
    op.create_index("ix_commits_time", "commits", ["time"], unique=False)


def downgrade() -> None:
    """Drop it again."""
    op.drop_table("commits")
