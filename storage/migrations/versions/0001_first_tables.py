"""Jobs, trials, attempts, rank measurements and events.

The types are written out, not taken from the models: those move on, this revision does not.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("reference_losses", sa.JSON(), nullable=True),
        sa.Column("active_seconds", sa.Double(), nullable=False),
        sa.Column("trial_count", sa.Integer(), nullable=False),
        sa.Column("event_count", sa.Integer(), nullable=False),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("lease_host", sa.Text(), nullable=True),
        sa.Column("lease_pid", sa.Integer(), nullable=True),
        sa.Column("lease_started", sa.Double(), nullable=True),
        sa.Column("lease_expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_seen", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_id", "jobs", ["created", "id"], unique=False)
    op.create_index("ix_jobs_state", "jobs", ["state"], unique=False)
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "sequence", name="pk_events"),
    )
    op.create_table(
        "trials",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_hash", sa.String(length=16), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("fidelity", sa.String(length=64), nullable=False),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("samples_per_second_mean", sa.Double(), nullable=True),
        sa.Column("samples_per_second_low", sa.Double(), nullable=True),
        sa.Column("samples_per_second_high", sa.Double(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("refusal", sa.JSON(), nullable=True),
        sa.Column("attempt_count", sa.Integer(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_trials_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_trials"),
        sa.UniqueConstraint(
            "job_id",
            "config_hash",
            "purpose",
            "fidelity",
            "repeat",
            name="uq_trials_job_id_config_hash_purpose_fidelity_repeat",
        ),
    )
    op.create_index("ix_trials_config_hash", "trials", ["config_hash"], unique=False)
    op.create_index("ix_trials_job_id_outcome", "trials", ["job_id", "outcome"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"],
            ["trials.job_id", "trials.number"],
            name="fk_attempts_job_id_trial_number_trials",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("token", name="pk_attempts"),
        sa.UniqueConstraint("job_id", "trial_number", "number", name="uq_attempts_job_id_trial_number_number"),
    )
    op.create_index("ix_attempts_job_id_state", "attempts", ["job_id", "state"], unique=False)
    op.create_table(
        "rank_measurements",
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("memory_by_tag", sa.JSON(), nullable=False),
        sa.Column("tag_peak_bytes", sa.JSON(), nullable=False),
        sa.Column("rss_peak_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cpu_seconds_per_step", sa.Double(), nullable=False),
        sa.Column("collectives", sa.JSON(), nullable=False),
        sa.Column("reserved_bytes", sa.BigInteger(), nullable=True),
        sa.Column("non_torch_bytes", sa.BigInteger(), nullable=True),
        sa.Column("allocation_retries", sa.Integer(), nullable=True),
        sa.Column("throttled", sa.Boolean(), nullable=True),
        sa.Column("sm_clock_mhz", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt"], ["attempts.token"], name="fk_rank_measurements_attempt_attempts", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt", "rank", name="pk_rank_measurements"),
    )
