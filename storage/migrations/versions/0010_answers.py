"""What a job has found so far, for lists of many."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("answer", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop it again."""
    op.drop_column("jobs", "answer")
