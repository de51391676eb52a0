"""What jobs knew before their first trial."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "priors",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("prior", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_priors_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_priors"),
    )


def downgrade() -> None:
    """Drop it again."""
    op.drop_table("priors")
