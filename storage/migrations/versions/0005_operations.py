"""What running a service needs: what submitters use, workers that tell of themselves, webhooks, events that were removed."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

JOB_COLUMNS = ("devices", "charged_seconds", "events_removed")


def upgrade() -> None:
    """Add columns to jobs, and the tables of usage, workers, webhooks and deliveries."""
    op.add_column("jobs", sa.Column("devices", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("charged_seconds", sa.Double(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("events_removed", sa.Integer(), nullable=False, server_default="0"))
    # What was used before belongs to no day.
    op.execute("UPDATE jobs SET charged_seconds = active_seconds")
    op.create_table(
        "usage",
        sa.Column("submitter", sa.String(length=64), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("device_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("submitter", "day", name="pk_usage"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=True),
        sa.Column("runner", sa.String(length=16), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    _webhooks()


def _webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner"], unique=False)
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("webhook_id", sa.String(length=16), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("tries", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_deliveries_webhook_id_webhooks", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deliveries_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_state_due", "deliveries", ["state", "due"], unique=False)
    op.create_index("ix_deliveries_webhook_id_created", "deliveries", ["webhook_id", "created"], unique=False)


def downgrade() -> None:
    """Drop them again."""
    for table in ("deliveries", "webhooks", "workers", "usage"):
        op.drop_table(table)
    for name in JOB_COLUMNS:
        op.drop_column("jobs", name)
