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
from search_spaces.shared_records import AuditEntry
from storage.codec import clean, record_of
from storage.database import StorePart, reads, writes
from storage.service_records import Actor
from storage.tables import AuditRow

STORED_LENGTH = 255
"""Characters of a source or target that are stored."""
_MOMENT = "%Y%m%d%H%M%S%f"


@cache
def local_actor() -> Actor:
    """The user of this process, who has direct access to the database and therefore no limits."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # for example in a container whose user has no name
        name = f"uid {os.getuid()}"
    return Actor(name=clean(name)[:64], source=clean(socket.gethostname())[:STORED_LENGTH])


def record(session: Session, now: datetime, actor: Actor, action: str, target: str, detail: Mapping[str, Any]) -> None:
    """Record the action of this transaction."""
    session.add(
        AuditRow(
            id=f"{now.astimezone(UTC):{_MOMENT}}-{secrets.token_hex(4)}", time=now, actor=actor.name, key_id=actor.key_id,
            source=clean(actor.source)[:STORED_LENGTH], action=action, target=clean(target)[:STORED_LENGTH],
            detail=to_plain(detail),
        )
    )  # fmt: skip


class AuditStore(StorePart):
    """The audit log."""

    @writes
    def record(self, session: Session, now: datetime, action: str, target: str, detail: Mapping[str, Any]) -> None:
        """Record an action that has no write transaction of its own."""
        record(session, now, self.actor, action, target, detail)

    @reads
    def newest(
        self,
        session: Session,
        limit: int = 1000,
        before: str | None = None,
        since: datetime | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> list[AuditEntry]:
        """Return audit entries, newest first: before the entry with id `before`, since `since`, of one actor, of one action."""
        # Ids begin with their time, so they sort by it.
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.id < before)
        if since is not None:
            query = query.where(AuditRow.id >= f"{since.astimezone(UTC):{_MOMENT}}")
        if actor is not None:
            query = query.where(AuditRow.actor == actor)
        if action is not None:
            query = query.where(AuditRow.action == action)
        return [record_of(AuditEntry, row, key=row.key_id) for row in session.scalars(query)]
