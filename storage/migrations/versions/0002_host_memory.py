"""What offloading holds in host memory, beside what a rank holds on its device."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; older measurements know nothing of it."""
    op.add_column("rank_measurements", sa.Column("host_memory_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop it again."""
    op.drop_column("rank_measurements", "host_memory_bytes")
