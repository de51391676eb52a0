"""Migrate a database's tables to the schema of this version."""

from sqlalchemy import Connection, inspect, text

from storage.errors import DatabaseUnavailableError
from storage.tables import Base

HEAD = "r002"
"""The newest revision in `versions/`."""
VERSION_TABLE = "autotune_version"
"""Table with the database's revision. It has its own name, so that other programs can use the same database."""

SCRIPT_LOCATION = "storage:migrations"
"""Where Alembic finds `env.py` and `versions/`."""


def migrate(connection: Connection, database: str) -> None:
    """Migrate the tables to HEAD inside the connection's write transaction, and check that it can write.

    Only one process migrates at a time: the lock is the transaction itself on SQLite, and an advisory lock on PostgreSQL.

    Raises:
        DatabaseUnavailableError: this version does not know the schema, or the tables belong to another program.
    """
    if connection.dialect.name == "postgresql":
        # Another process may take minutes to migrate a large database: only this wait has no timeout.
        usual = connection.execute(text("SHOW lock_timeout")).scalar_one()
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        # PostgreSQL advisory lock for migrations: an arbitrary number without other users.
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": 4_281_703_164})
        connection.execute(text("SELECT set_config('lock_timeout', :usual, true)"), {"usual": usual})
    revision = _revision(connection, database)
    if revision != HEAD:
        _upgrade(connection, database, revision)
    # SQLite begins a write transaction on a read-only file without an error: only a write fails.
    connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = version_num"))


def stored_revision(connection: Connection) -> str | None:
    """The revision of a database with our tables."""
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def _revision(connection: Connection, database: str) -> str | None:
    """The revision of the database; None if it is empty."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        return stored_revision(connection)
    if foreign_tables := sorted(tables & Base.metadata.tables.keys()):
        raise DatabaseUnavailableError(
            f"{database}: has tables of another program ({', '.join(foreign_tables)}); name another database with --db"
        )
    return None


def _upgrade(connection: Connection, database: str, revision: str | None) -> None:
    # Alembic is slow to import, and not needed if the database is up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", SCRIPT_LOCATION)
    config.set_main_option("path_separator", "os")
    revisions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in revisions:
        raise DatabaseUnavailableError(
            f"{database}: was written by another version of autotune (schema {revision}, this one knows {HEAD}); "
            "use that version, or name another database with --db"
        )
    command.upgrade(config, "head")
