"""What ranks print, and what they did when they were heard last."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table, and add the columns."""
    op.create_table(
        "trial_logs",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"],
            ["trials.job_id", "trials.number"],
            name="fk_trial_logs_job_id_trial_number_trials",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "trial_number", "sequence", name="pk_trial_logs"),
    )
    op.add_column("attempts", sa.Column("progress", sa.JSON(), nullable=True))
    op.add_column("attempts", sa.Column("progress_time", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Drop them again."""
    op.drop_column("attempts", "progress_time")
    op.drop_column("attempts", "progress")
    op.drop_table("trial_logs")
