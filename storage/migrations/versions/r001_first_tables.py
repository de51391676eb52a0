"""The first tables.

The types are written out, not taken from the models, because the models change and a released revision does not.
"""

import sqlalchemy as sa
from alembic import op

revision = "r001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    _create_job_tables()
    _create_service_tables()
    _refuse_audit_changes()
    _create_shared_tables()


def _create_job_tables() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False, server_default="{}"),
        sa.Column("reference_losses", sa.JSON(), nullable=True),
        sa.Column("answer", sa.JSON(), nullable=True),
        sa.Column("active_seconds", sa.Double(), nullable=False),
        sa.Column("trial_count", sa.Integer(), nullable=False),
        sa.Column("event_count", sa.Integer(), nullable=False),
        sa.Column("submitter", sa.String(64), nullable=False, server_default=""),
        sa.Column("priority", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("queued", sa.DateTime(timezone=True), nullable=True),
        sa.Column("devices", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("charged_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("events_removed", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("lease_host", sa.Text(), nullable=True),
        sa.Column("lease_pid", sa.Integer(), nullable=True),
        sa.Column("lease_started", sa.Double(), nullable=True),
        sa.Column("lease_expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_seen", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_submitter_state", "jobs", ["submitter", "state", "stored_bytes"])
    op.create_index("ix_jobs_created_id", "jobs", ["created", "id"])
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_submitter_created", "jobs", ["submitter", "created"])
    op.create_table(
        "trials",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_hash", sa.String(16), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("fidelity", sa.String(64), nullable=False),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=True),
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
    op.create_index("ix_trials_config_hash", "trials", ["config_hash"])
    op.create_index("ix_trials_job_id_outcome", "trials", ["job_id", "outcome"])
    op.create_table(
        "attempts",
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("progress_time", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"],
            ["trials.job_id", "trials.number"],
            name="fk_attempts_job_id_trial_number_trials",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("token", name="pk_attempts"),
        sa.UniqueConstraint("job_id", "trial_number", "number", name="uq_attempts_job_id_trial_number_number"),
    )
    op.create_index("ix_attempts_job_id_state", "attempts", ["job_id", "state"])
    op.create_table(
        "rank_measurements",
        sa.Column("attempt", sa.String(32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("memory_by_tag", sa.JSON(), nullable=False),
        sa.Column("tag_peak_bytes", sa.JSON(), nullable=False),
        sa.Column("rss_peak_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cpu_seconds_per_step", sa.Double(), nullable=False),
        sa.Column("collectives", sa.JSON(), nullable=False),
        sa.Column("host_memory_bytes", sa.BigInteger(), nullable=True),
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
    op.create_table(
        "trial_logs",
        sa.Column("job_id", sa.String(32), nullable=False),
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
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "sequence", name="pk_events"),
    )
    op.create_table(
        "priors",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("prior", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_priors_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_priors"),
    )


def _create_service_tables() -> None:
    op.create_table(
        "submissions",
        sa.Column("submitter", sa.String(64), nullable=False),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_submissions_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("submitter", "key", name="pk_submissions"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("quota", sa.String(16), nullable=False),
        sa.Column("most", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "quota", name="pk_quotas"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(16), nullable=True),
        sa.Column("source", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_table(
        "usage",
        sa.Column("submitter", sa.String(64), nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("device_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("submitter", "day", name="pk_usage"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=True),
        sa.Column("runner", sa.String(16), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("webhook_id", sa.String(16), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("tries", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_deliveries_webhook_id_webhooks", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deliveries_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_state_due", "deliveries", ["state", "due"])
    op.create_index("ix_deliveries_webhook_id_created", "deliveries", ["webhook_id", "created"])


def _refuse_audit_changes() -> None:
    """Create triggers that refuse to change or remove rows of the audit log."""
    refusal = "the audit log is append-only"
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION autotune_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{refusal}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION autotune_audit_refuse()"
        )
        return
    for statement in ("UPDATE", "DELETE"):
        name = f"audit_refuses_{statement.lower()}"
        op.execute(f"CREATE TRIGGER {name} BEFORE {statement} ON audit BEGIN SELECT RAISE(ABORT, '{refusal}'); END")


def _create_shared_tables() -> None:
    op.create_table(
        "calibrations",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fingerprint", sa.String(16), nullable=False),
        sa.Column("cluster", sa.JSON(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=False),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("context_bytes", sa.BigInteger(), nullable=True),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=True),
        sa.Column("rows", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_calibrations"),
    )
    op.create_index("ix_calibrations_fingerprint_created", "calibrations", ["fingerprint", "created"])
    op.create_table(
        "quarantine",
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("node", name="pk_quarantine"),
    )
    op.create_table(
        "commits",
        sa.Column("mark", sa.String(32), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("mark", name="pk_commits"),
    )
    op.create_index("ix_commits_time", "commits", ["time"])
