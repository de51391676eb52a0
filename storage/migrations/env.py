"""Alembic's environment: runs the migrations on the given connection, in its transaction."""

from alembic import context

from storage.migrations import VERSION_TABLE
from storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
context.run_migrations()
