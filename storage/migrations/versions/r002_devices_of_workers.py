"""What a worker can run: its runners and its devices."""

import sqlalchemy as sa
from alembic import op

revision = "r002"
down_revision = "r001"


def upgrade() -> None:
    """Add the columns; a worker that writes neither of them is one of an earlier version."""
    for name in ("runners", "devices"):
        op.add_column("workers", sa.Column(name, sa.Text(), nullable=False, server_default=""))
