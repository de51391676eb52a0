"""Addresses as messages show them: no password in any of them."""

import pytest

from storage.address import describe, parse_address, without_password
from storage.errors import DatabaseUnavailableError
from storage.store import open_store

SECRET = "hunter2"


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://ann:{SECRET}@host:54x2/db", f"postgresql://ann:{SECRET}@host:99999999/db",
        f"postgresql://ann:{SECRET}@[host/db", f"mysql://ann:{SECRET}@host/db", f"postgresql://ann:{SECRET}/db",
        f"nonsense://ann:{SECRET}@host", f"postgresql://ann:a/{SECRET}@host:x/db", f"postgresql://ann:a?{SECRET}@host:x/db",
        f"postgresql://ann@host:x/db?password={SECRET}", f"postgresql://ann@host:x/db?password={SECRET}@rest",
        f"postgresql://ann@host:x/db?sslmode=on&sslpassword={SECRET}",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db", f"postgresql://ann@127.0.0.1:1/db?password={SECRET}",
    ],
)  # fmt: skip
def test_no_message_has_the_password(address: str) -> None:
    with pytest.raises(DatabaseUnavailableError) as refused:
        open_store(address)
    error: BaseException | None = refused.value
    assert str(error)
    assert SECRET not in str(error)
    if "127.0.0.1" not in address:
        while error is not None:  # a traceback shows the causes too
            assert SECRET not in str(error)
            error = error.__cause__


def test_what_is_no_secret_is_shown() -> None:
    assert describe(parse_address("postgresql://ann@host:5432/jobs?sslmode=require")).endswith(
        "ann@host:5432/jobs?sslmode=require"
    )
    assert without_password("postgresql://[::1]:5432/jobs") == "postgresql://[::1]:5432/jobs"
    assert without_password(f"postgresql://ann:{SECRET}@host/jobs?password={SECRET}&sslmode=on") == (
        "postgresql://ann:***@host/jobs?password=***&sslmode=on"
    )
