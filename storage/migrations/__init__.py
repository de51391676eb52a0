"""Bringing a database's tables forward to what this version knows."""

from sqlalchemy import Connection, inspect, text

from storage.errors import DatabaseUnavailableError
from storage.tables import Base

HEAD = "0012"
"""The newest revision in `versions/`."""
VERSION_TABLE = "autotune_version"
"""Holds the revision that the database is at; our own name, so that a server's database may be shared with others."""

_LOCK = 4_281_703_164
"""PostgreSQL's advisory lock of whoever migrates: any number that nobody else uses."""


def migrate(connection: Connection, place: str) -> None:
    """Bring the tables to HEAD inside the connection's write transaction, and prove that it can write.

    Nobody else migrates at the same time: on SQLite the transaction itself is the lock, on PostgreSQL an advisory lock is.

    Raises:
        DatabaseUnavailableError: the schema is newer than this version knows, or the tables are not ours.
    """
    if connection.dialect.name == "postgresql":
        # Another process may take minutes to migrate a large database: it is waited for, as nothing else is.
        usual = connection.execute(text("SHOW lock_timeout")).scalar_one()
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        connection.execute(text("SELECT set_config('lock_timeout', :usual, true)"), {"usual": usual})
    revision = _revision(connection, place)
    if revision != HEAD:
        _upgrade(connection, place, revision)
    # SQLite begins a write transaction on a read-only file without complaint: only a write tells.
    connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = version_num"))


def stored_revision(connection: Connection) -> str | None:
    """The revision that a database with our tables is at."""
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def _revision(connection: Connection, place: str) -> str | None:
    """The revision that the database is at; None for an empty one."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        return stored_revision(connection)
    if taken := sorted(tables & Base.metadata.tables.keys()):
        raise DatabaseUnavailableError(
            f"{place}: has tables of another program ({', '.join(taken)}); name another database with --db"
        )
    return None


def _upgrade(connection: Connection, place: str, revision: str | None) -> None:
    # Alembic takes long to import, and is not needed where the database is up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "storage:migrations")
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise DatabaseUnavailableError(
            f"{place}: was written by a newer version of autotune (schema {revision}, this one knows {HEAD}); "
            "upgrade autotune, or name another database with --db"
        )
    command.upgrade(config, "head")
