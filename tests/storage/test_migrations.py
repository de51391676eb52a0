"""The migrations and the models say the same."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable

from storage.migrations import HEAD, VERSION_TABLE
from storage.store import open_store
from storage.tables import Base, UtcDateTime


def test_a_migrated_database_has_the_tables_of_the_models(address: str) -> None:
    open_store(address).close()
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == HEAD
    engine.dispose()


def test_the_head_is_the_newest_revision() -> None:
    config = Config()
    config.set_main_option("script_location", "storage:migrations")
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


@pytest.mark.parametrize("table", Base.metadata.sorted_tables, ids=str)
def test_postgresql_has_all_types(table) -> None:
    text = str(CreateTable(table).compile(dialect=postgresql.dialect()))
    assert "TIMESTAMP WITHOUT TIME ZONE" not in text


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=lambda dialect: dialect.name)
def test_times_come_back_in_utc(dialect) -> None:
    column, moment = UtcDateTime(), datetime(2030, 6, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    stored = column.process_bind_param(moment, dialect)
    assert stored is not None
    read = column.process_result_value(stored, dialect)
    assert read == moment
    assert read is not None
    assert read.tzinfo is UTC
    with pytest.raises(ValueError, match="no time zone"):
        column.process_bind_param(datetime(2030, 6, 1), dialect)
