"""Alembic's environment: runs the migrations on the connection, and in the transaction, that it is given."""

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
