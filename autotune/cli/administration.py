"""Administration of a service's database: `autotune keys`, quotas of owners, `autotune audit`."""

import csv
import io
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.database import open_database
from autotune.cli.options import Database, Json, only_database, parse_bytes
from autotune.cli.status import Status, print_line, write_document
from autotune.errors import RequestError
from autotune.output import require_writable, write_whole
from search_spaces.plain import to_plain
from storage.service_records import Quota, Quotas

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.table import Table

    from search_spaces.shared_records import AuditEntry

NO_LIMIT = "none"
DEFAULT = "default"

keys_app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)


@keys_app.command("create")
def create_key(
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Owner of the key and of jobs submitted with it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", metavar="NAME", help="read, submit, observe, operate, admin. May be repeated. [default: read, submit]"
        ),
    ] = None,
    team: Annotated[
        list[str] | None, typer.Option("--team", metavar="NAME", help="A team whose jobs its owner sees. May be repeated.")
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=36500, metavar="N", help="Days until it expires. [default: never]")
    ] = None,
    db: Database = None,
) -> Status:
    """Create a key and print its text once, to standard output."""
    from storage.records import TEAM, Scope

    database = only_database("keys create", db)
    for name in scope or ():
        if name not in tuple(Scope):
            raise RequestError("scope", f"{name!r} is not known", f"use some of {', '.join(Scope)}")
    if not owner or len(owner) > 64 or not owner.isprintable():
        raise RequestError("owner", f"{owner!r} is not a name", "give up to 64 printable characters")
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with open_database(database) as store:
        scopes = (*(scope or (Scope.READ, Scope.SUBMIT)), *(f"{TEAM}{name}" for name in team or ()))
        key, text = store.keys.create(owner, scopes, expires)
    print_line(f"key {key.id} of {owner}; it is shown only once:")
    sys.stdout.write(text + "\n")
    return Status.OK


@keys_app.command("list")
def list_keys(db: Database = None, json: Json = False) -> Status:
    """Show all keys, without their secrets."""
    with open_database(only_database("keys list", db)) as store:
        keys = store.keys.all()
    if json:
        write_document([to_plain(key) | {"scopes": sorted(key.scopes)} for key in keys], default=str)
        return Status.OK
    table = _empty_table("key", "owner", "scopes", "created (UTC)", "expires", "last use", "revoked")
    for key in keys:
        moments = (key.created, key.expires, key.last_used, key.revoked)
        table.add_row(key.id, key.owner, " ".join(sorted(key.scopes)), *(f"{m:%Y-%m-%d %H:%M}" if m else "-" for m in moments))
    return _printed(table)


@keys_app.command("quota")
def quota(
    owner: Annotated[str | None, typer.Argument(metavar="OWNER", help="Owner. [default: show all owners]")] = None,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=LIMIT",
            help="Limits of this owner: queued_jobs, stored_bytes, streams, device_hours (per day), webhooks; "
            "`none`: no limit, `default`: the limit of other owners.",
        ),
    ] = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Show quotas and usage of owners, or set an owner's limits."""
    database = only_database("keys quota", db)
    changes = [_parsed_quota(text) for text in limits or ()]
    with open_database(database) as store:
        if owner is not None:
            for changed, most in changes:
                store.quotas.set_limit(owner, changed, most)
        owners = store.quotas.owners() if owner is None else [owner]
        uses_by_owner = {name: store.quotas.uses(name, Quotas()) for name in owners}
    # Only the servers know the number of open streams.
    if json:
        write_document(
            {
                name: [
                    {
                        "quota": str(use.quota),
                        "used": None if use.quota is Quota.STREAMS else use.used,
                        "limit": use.most,
                        "own": use.own,
                    }
                    for use in uses
                ]
                for name, uses in uses_by_owner.items()
            }
        )
        return Status.OK
    table = _empty_table("owner", "quota", "used", "limit", "")
    for name, uses in uses_by_owner.items():
        for use in uses:
            used = "-" if use.quota is Quota.STREAMS else f"{use.used:,.10g}"
            limit = NO_LIMIT if use.most is None else f"{use.most:,.10g}"
            table.add_row(name, use.quota, used, limit, "own" if use.own else DEFAULT)
    return _printed(table)


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as shown by `autotune keys list`.")],
    db: Database = None,
) -> Status:
    """Revoke a key."""
    with open_database(only_database("keys revoke", db)) as store:
        store.keys.revoke(key)
    print_line(f"key {key} is revoked")
    return Status.OK


def parsed_quotas(texts: Sequence[str]) -> Quotas:
    """The default limits from `autotune serve --quota NAME=LIMIT`.

    Raises:
        RequestError: a text does not have this form.
    """
    limits = dict(map(_parsed_quota, texts))
    return Quotas(**{str(quota): None if most is None or math.isinf(most) else most for quota, most in limits.items()})


def _parsed_quota(text: str) -> tuple[Quota, float | None]:
    """Quota and limit of NAME=LIMIT; infinity: no limit, None: the default."""
    name, _, value = text.partition("=")
    if name not in tuple(Quota):
        raise RequestError("quota", f"{name!r} is not known", f"use one of {', '.join(Quota)}")
    if value in (NO_LIMIT, DEFAULT):
        return Quota(name), math.inf if value == NO_LIMIT else None
    try:
        most = float(parse_bytes(value)) if name == Quota.STORED_BYTES else float(value)
    except ValueError:
        most = math.nan
    if not 0 <= most < math.inf:
        form = "bytes such as 2GB" if name == Quota.STORED_BYTES else "a number of 0 or more"
        raise RequestError("quota", f"{text!r} is not a limit", f"write {name}=LIMIT with {form}, {NO_LIMIT} or {DEFAULT}")
    return Quota(name), most


class AuditFormat(StrEnum):
    """Output format of entries."""

    TABLE = "table"
    JSONL = "jsonl"
    """One JSON object per line."""
    CSV = "csv"


def audit(
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of entries. [default: all]")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Earliest time: ISO 8601 with a time zone.")] = None,
    actor: Annotated[
        str | None, typer.Option(metavar="OWNER", help="Actions of this owner, or of this user of a machine.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(metavar="NAME", help="Action, such as key.create, job.submit or db.backup.")
    ] = None,
    format: Annotated[str, typer.Option(metavar="NAME", help="table, jsonl or csv.")] = "table",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output]")] = None,
    db: Database = None,
) -> Status:
    """Show the audit log, newest first: actor, action, source and key."""
    database, earliest, chosen = only_database("audit", db), _parsed_time(since), _parsed_format(format, out)
    if out is not None:
        require_writable(out)
    entries: list[AuditEntry] = []
    with open_database(database) as store:
        while limit is None or len(entries) < limit:
            page = store.audit.newest(1000, entries[-1].id if entries else None, earliest, actor, action)
            if not page:
                break
            entries += page
    entries = entries[:limit]
    if chosen is AuditFormat.TABLE:
        return _printed(_audit_table(entries))
    lines = (dumps(_plain_entry(item)) + "\n" for item in entries)
    text = _csv(entries) if chosen is AuditFormat.CSV else "".join(lines)
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text, private=True)
    return Status.OK


def _parsed_time(text: str | None) -> datetime | None:
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


def _parsed_format(text: str, out: Path | None) -> AuditFormat:
    """Parse `--format`.

    Raises:
        RequestError: the format does not exist, or is not for a file.
    """
    if text not in tuple(AuditFormat) or (text == AuditFormat.TABLE and out is not None):
        names = [name for name in AuditFormat if out is None or name is not AuditFormat.TABLE]
        raise RequestError("format", f"{text!r} is not {'for a file' if out else 'known'}", f"use one of {', '.join(names)}")
    return AuditFormat(text)


def _plain_entry(item: "AuditEntry") -> dict[str, Any]:
    plain = to_plain(item) | {"time": item.time.isoformat()}
    return {"key_id" if name == "key" else name: value for name, value in plain.items()}


def _csv(entries: list["AuditEntry"]) -> str:
    columns = ("time", "actor", "key_id", "source", "action", "target", "detail")
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(columns)
    for item in entries:
        plain = _plain_entry(item) | {"detail": dumps(to_plain(item.detail))}
        writer.writerow([_cell(plain[name]) for name in columns])
    return sink.getvalue()


def _cell(value: object) -> str:
    """A value that spreadsheets read as text: users choose their names, and `=…` would be a formula."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _audit_table(entries: list["AuditEntry"]) -> "Table":
    table = _empty_table("time (UTC)", "actor", "key", "from", "action", "target", "detail", overflow="fold")
    for item in entries:
        detail = ", ".join(f"{name} {value}" for name, value in item.detail.items())
        moment = f"{item.time:%Y-%m-%d %H:%M:%S}"
        table.add_row(moment, item.actor or "-", item.key or "-", item.source or "-", item.action, item.target, detail)
    return table


def _empty_table(*names: str, overflow: "OverflowMethod" = "ellipsis") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow=overflow)
    return table


def _printed(table: "Table") -> Status:
    from autotune.text.console import Console

    Console().print(table)
    return Status.OK
