"""What a service needs: who submitted a job, the queue, keys of submissions, API keys.

Jobs of before belong to nobody and wait in no queue: they were run by who opened them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns to jobs, and the tables of submissions and keys."""
    # Not in batch mode, which on SQLite makes the table anew: dropping the old one would delete the trials with it.
    op.add_column("jobs", sa.Column("submitter", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("queued", sa.DateTime(timezone=True), nullable=True))
    op.create_index("ix_jobs_submitter_created", "jobs", ["submitter", "created"], unique=False)
    op.create_table(
        "submissions",
        sa.Column("submitter", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_submissions_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("submitter", "key", name="pk_submissions"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )


def downgrade() -> None:
    """Drop them again."""
    op.drop_table("api_keys")
    op.drop_table("submissions")
    op.drop_index("ix_jobs_submitter_created", "jobs")
    for name in ("queued", "priority", "submitter"):
        op.drop_column("jobs", name)
