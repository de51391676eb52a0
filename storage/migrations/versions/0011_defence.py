"""Who did what, what each owner may take, bytes of each job, and secrets of webhooks that are encrypted."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

REFUSED = "the audit log is append-only"


def upgrade() -> None:
    """Make the tables, add the columns, count the bytes of the jobs that are there."""
    op.create_table(
        "audit",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=True),
        sa.Column("source", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    _refuse_changes()
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("quota", sa.String(length=16), nullable=False),
        sa.Column("most", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "quota", name="pk_quotas"),
    )
    op.add_column("webhooks", sa.Column("sealed", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("stored_bytes", sa.BigInteger(), server_default="0", nullable=False))
    on_server = op.get_bind().dialect.name == "postgresql"
    size = "octet_length(request::text)" if on_server else "length(CAST(request AS BLOB))"
    printed = "(SELECT coalesce(sum(size), 0) FROM trial_logs WHERE trial_logs.job_id = jobs.id)"
    op.execute(f"UPDATE jobs SET stored_bytes = {size} + {printed}")
    # Has all that a quota is compared with: the rows, which may have a megabyte each, are not read.
    op.create_index("ix_jobs_submitter_state", "jobs", ["submitter", "state", "stored_bytes"])


def downgrade() -> None:
    """Drop them again. Secrets that are encrypted are lost."""
    op.drop_index("ix_jobs_submitter_state", "jobs")
    op.drop_column("jobs", "stored_bytes")
    op.drop_column("webhooks", "sealed")
    op.drop_table("quotas")
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION autotune_audit_refuse()")


def _refuse_changes() -> None:
    """Let the database itself refuse to change or remove what was written down."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION autotune_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{REFUSED}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION autotune_audit_refuse()"
        )
        return
    for act in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_refuses_{act.lower()} BEFORE {act} ON audit BEGIN SELECT RAISE(ABORT, '{REFUSED}'); END"
        )
