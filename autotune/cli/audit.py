"""`autotune audit`: who did what, from where, and with which key."""

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.ops.output import require_writable, write_whole
from autotune.text.console import Console
from search_spaces.plain import to_plain
from search_spaces.shared_records import AuditEntry
from storage.address import default_database_url
from storage.store import Store, open_store

PAGE = 1000
COLUMNS = ("time", "actor", "key_id", "source", "action", "target", "detail")


class AuditFormat(StrEnum):
    """Output format of entries."""

    TABLE = "table"
    JSONL = "jsonl"
    """One JSON object per line."""
    CSV = "csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Parsed options of the command."""

    database: str | None
    limit: int | None
    """Maximum number of entries; None: all."""
    since: datetime | None
    actor: str | None
    action: str | None
    format: AuditFormat
    out: Path | None


def audit_command(options: AuditOptions) -> Status:
    """Print entries, newest first, or write them to a file."""
    if options.out is not None:
        require_writable(options.out)
    with open_store(options.database or default_database_url()) as store:
        entries = list(itertools.islice(_entries(store, options), options.limit))
    if options.format is AuditFormat.TABLE:
        Console().print(_table(entries), highlight=False)
        return Status.OK
    text = _csv(entries) if options.format is AuditFormat.CSV else "".join(json.dumps(_plain(item)) + "\n" for item in entries)
    if options.out is None:
        sys.stdout.write(text)
    else:
        write_whole(options.out, text, private=True)
    return Status.OK


def parsed_time(text: str | None) -> datetime | None:
    """Parse `--since`.

    Raises:
        RequestError: it is not a time, or has no time zone.
    """
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError("since", f"{text!r} is not a time", "write it like 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise RequestError("since", f"{text!r} has no zone", "end it with Z, or with +02:00")
    return moment


def parsed_format(text: str, out: Path | None) -> AuditFormat:
    """Parse `--format`.

    Raises:
        RequestError: the format does not exist, or is not for a file.
    """
    if text not in tuple(AuditFormat) or (text == AuditFormat.TABLE and out is not None):
        names = [name for name in AuditFormat if out is None or name is not AuditFormat.TABLE]
        raise RequestError("format", f"{text!r} is not {'for a file' if out else 'known'}", f"use one of {', '.join(names)}")
    return AuditFormat(text)


def _entries(store: Store, options: AuditOptions) -> Iterator[AuditEntry]:
    before = None
    while page := store.audit.newest(PAGE, before, options.since, options.actor, options.action):
        yield from page
        before = page[-1].id


def _plain(item: AuditEntry) -> dict[str, Any]:
    plain = to_plain(item) | {"time": item.time.isoformat()}
    return {"key_id" if name == "key" else name: value for name, value in plain.items()}


def _csv(entries: list[AuditEntry]) -> str:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in entries:
        plain = _plain(item) | {"detail": json.dumps(to_plain(item.detail))}
        writer.writerow([_cell(plain[name]) for name in COLUMNS])
    return sink.getvalue()


def _cell(value: object) -> str:
    """A value that spreadsheets read as text: users choose their names, and `=…` would be a formula."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _table(entries: list[AuditEntry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("time (UTC)", "actor", "key", "from", "action", "target", "detail"):
        table.add_column(name, overflow="fold")
    for item in entries:
        detail = ", ".join(f"{name} {value}" for name, value in item.detail.items())
        moment = f"{item.time:%Y-%m-%d %H:%M:%S}"
        table.add_row(moment, item.actor or "-", item.key or "-", item.source or "-", item.action, item.target, detail)
    return table
