"""What a list shows of a job's request, beside the request, which may be a megabyte."""

import sqlalchemy as sa
from alembic import op

from storage.records import summary_of

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_JOBS = sa.table("jobs", sa.column("id", sa.String), sa.column("request", sa.JSON), sa.column("summary", sa.JSON))


def upgrade() -> None:
    """Add the column, and fill it job by job."""
    op.add_column("jobs", sa.Column("summary", sa.JSON(), nullable=False, server_default="{}"))
    connection = op.get_bind()
    for job_id in connection.scalars(sa.select(_JOBS.c.id)).all():
        row = sa.select(_JOBS.c.request).where(_JOBS.c.id == job_id)
        summary = summary_of(connection.scalar(row))
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == job_id).values(summary=summary))


def downgrade() -> None:
    """Drop it again."""
    op.drop_column("jobs", "summary")
