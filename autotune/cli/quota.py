"""`autotune keys quota`: the quotas of owners and their usage."""

import math
from collections.abc import Sequence

from rich.table import Table

from autotune.cli.documents import write_document
from autotune.cli.options import parse_bytes
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.text.console import Console
from storage.address import default_database_url
from storage.service_records import Quota, Quotas, QuotaUseRecord
from storage.store import open_store

NO_LIMIT = "none"
DEFAULT = "default"


def parsed_quotas(texts: Sequence[str]) -> Quotas:
    """The default limits from `autotune serve --quota NAME=LIMIT`.

    Raises:
        RequestError: a text does not have this form.
    """
    limits = dict(map(_parsed, texts))
    return Quotas(**{str(quota): None if most is None or math.isinf(most) else most for quota, most in limits.items()})


def quota_command(database: str | None, owner: str | None, limits: Sequence[str], as_json: bool) -> Status:
    """Set the limits of an owner, and print limits and usage; without an owner, of all owners."""
    changes = [_parsed(text) for text in limits]
    with open_store(database or default_database_url()) as store:
        if owner is not None:
            for quota, most in changes:
                store.quotas.set_limit(owner, quota, most)
        owners = store.quotas.owners() if owner is None else [owner]
        uses_by_owner = {name: store.quotas.uses(name, Quotas()) for name in owners}
    if as_json:
        write_document({name: [_plain(use) for use in uses] for name, uses in uses_by_owner.items()})
        return Status.OK
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("owner", "quota", "used", "limit", ""):
        table.add_column(head)
    for name, uses in uses_by_owner.items():
        for use in uses:
            # Only the servers know the number of open streams.
            used = "-" if use.quota is Quota.STREAMS else f"{use.used:,.10g}"
            limit = NO_LIMIT if use.most is None else f"{use.most:,.10g}"
            table.add_row(name, use.quota, used, limit, "own" if use.own else DEFAULT)
    Console().print(table, highlight=False)
    return Status.OK


def _plain(use: QuotaUseRecord) -> dict[str, object]:
    used = None if use.quota is Quota.STREAMS else use.used
    return {"quota": str(use.quota), "used": used, "limit": use.most, "own": use.own}


def _parsed(text: str) -> tuple[Quota, float | None]:
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
