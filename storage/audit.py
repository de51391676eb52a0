"""The audit log: who did what, from where, with which key. Entries are written in the transaction of the action, append-only.

Database triggers refuse changes (`r001_first_tables`): users of the service or of this program cannot hide an action.
"""

import getpass
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from storage.codec import clean
from storage.service_records import Actor, AuditRecord
from storage.tables import AuditRow

SOURCE_LENGTH = 255
TARGET_LENGTH = 255
_MOMENT = "%Y%m%d%H%M%S%f"


@cache
def local_actor() -> Actor:
    """The user of this process, who has direct access to the database and therefore no limits."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # for example in a container whose user has no name
        name = f"uid {os.getuid()}"
    return Actor(name=clean(name)[:64], source=clean(socket.gethostname())[:SOURCE_LENGTH])


def record(session: Session, now: datetime, actor: Actor, action: str, target: str, detail: Mapping[str, Any]) -> None:
    """Record the action of this transaction."""
    session.add(
        AuditRow(
            id=f"{now.astimezone(UTC):{_MOMENT}}-{secrets.token_hex(4)}", time=now, actor=actor.name, key_id=actor.key_id,
            source=clean(actor.source)[:SOURCE_LENGTH], action=action, target=clean(target)[:TARGET_LENGTH],
            detail=to_plain(detail),
        )
    )  # fmt: skip


def entries(
    session: Session, limit: int, before: str | None, since: datetime | None, actor: str | None, action: str | None
) -> list[AuditRecord]:
    """See `Store.audit`. Ids begin with their time, so they sort by it."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditRow.id < before)
    if since is not None:
        query = query.where(AuditRow.id >= f"{since.astimezone(UTC):{_MOMENT}}")
    if actor is not None:
        query = query.where(AuditRow.actor == actor)
    if action is not None:
        query = query.where(AuditRow.action == action)
    return [
        AuditRecord(
            id=row.id, time=row.time, actor=row.actor, key_id=row.key_id, source=row.source, action=row.action,
            target=row.target, detail=row.detail,
        )
        for row in session.scalars(query)
    ]  # fmt: skip
