"""Webhooks: addresses that are notified when a job ends, with pending and finished deliveries.

Deliveries are written in the transaction in which the job ends, so that a later crash does not lose them.
"""

import base64
import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import case, delete, func, literal, select, update
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from search_spaces.shared_records import DeliveryTry
from storage import audit, quotas
from storage.codec import clean, reading, record_of
from storage.database import StorePart, reads, writes
from storage.errors import DamagedRowError, UnknownWebhookError
from storage.records import ENDED
from storage.service_records import DeliveryRecord, DeliveryState, Quota, WebhookRecord
from storage.tables import DeliveryRow, JobRow, WebhookRow

SECRET_PREFIX = "whsec_"
"""Prefix of secrets in https://www.standardwebhooks.com, so that scanners of leaked secrets find them."""


class WebhookStore(StorePart):
    """Webhooks and their deliveries."""

    @writes
    def create(self, session: Session, now: datetime, owner: str, url: str) -> WebhookRecord:
        """Notify `url` when jobs of `owner` end. The caller must check that the address is allowed.

        Raises:
            QuotaExceededError: the owner has used up their webhooks.
            SecretError: its secret cannot be encrypted.
        """
        if self.actor.limits is not None:
            quotas.lock(session, [owner])
            count = session.scalar(select(func.count()).where(WebhookRow.owner == owner)) or 0
            quotas.require(Quota.WEBHOOKS, count, 1, quotas.effective(session, [owner], self.actor.limits)[owner].webhooks)
        secret = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(24)).decode()
        row = WebhookRow(id=secrets.token_hex(6), owner=owner, url=clean(url), secret=self.secret_box.seal(secret), created=now)
        session.add(row)
        audit.record(session, now, self.actor, "webhook.create", row.id, {"owner": owner})
        return replace(record_of(WebhookRecord, row), secret=secret)

    def signing_secret(self, webhook: WebhookRecord) -> str:
        """Return the secret that signs the deliveries of a webhook.

        Raises:
            SecretError: no key decrypts it.
        """
        return self.secret_box.open(webhook.secret)

    @reads
    def of(self, session: Session, owner: str | None = None) -> list[WebhookRecord]:
        """Return the webhooks of an owner, oldest first; None: of all owners."""
        query = select(WebhookRow).order_by(WebhookRow.created, WebhookRow.id)
        return [
            record_of(WebhookRecord, row)
            for row in session.scalars(query if owner is None else query.where(WebhookRow.owner == owner))
        ]

    @writes
    def delete(self, session: Session, now: datetime, webhook_id: str) -> None:
        """Remove a webhook and its log.

        Raises:
            UnknownWebhookError: the webhook does not exist.
        """
        deleted_ids = session.scalars(delete(WebhookRow).where(WebhookRow.id == webhook_id).returning(WebhookRow.id)).all()
        if not deleted_ids:
            raise UnknownWebhookError(f"there is no webhook {webhook_id!r}; list yours with GET /v1/webhooks")
        audit.record(session, now, self.actor, "webhook.delete", webhook_id, {})

    def claim_deliveries(
        self, limit: int = 10, seconds: float = 60.0, most: int | None = None, running: Mapping[str, int] | None = None
    ) -> list[DeliveryRecord]:
        """Claim due deliveries for this caller for `seconds`. A delivery that is not finished by then is due again.

        Owners take turns. With `most`, an owner has at most that many at a time, including the `running` ones.
        """
        # Called every second: checking first avoids a write transaction.
        return self._claim_due(limit, seconds, most, running or {}) if self._some_due() else []

    @reads
    def _some_due(self, session: Session) -> bool:
        """Whether a delivery can be claimed."""
        now = self.now(session)
        due = select(DeliveryRow.id).where(DeliveryRow.state == DeliveryState.PENDING, DeliveryRow.due <= now)
        return session.scalars(due.limit(1)).first() is not None

    @writes
    def _claim_due(
        self, session: Session, now: datetime, limit: int, seconds: float, most: int | None, running: Mapping[str, int]
    ) -> list[DeliveryRecord]:
        """Claim deliveries that are due. See `claim_deliveries`.

        1. Number the deliveries of each owner in the order in which they are due, starting after the owner's running ones.
        2. Claim the lowest numbers first, so that owners with few deliveries do not wait for owners with many.
        """
        before = case(dict(running), value=WebhookRow.owner, else_=0) if running else literal(0)
        turn = func.row_number().over(partition_by=WebhookRow.owner, order_by=(DeliveryRow.due, DeliveryRow.id)) + before
        due = select(DeliveryRow.id, turn.label("turn"), DeliveryRow.due).join(
            WebhookRow, WebhookRow.id == DeliveryRow.webhook_id
        )
        due = due.where(DeliveryRow.state == DeliveryState.PENDING, DeliveryRow.due <= now)
        turns = due.subquery()
        chosen = select(turns.c.id).order_by(turns.c.turn, turns.c.due).limit(limit)
        if most is not None:
            chosen = chosen.where(turns.c.turn <= most)
        rows = select(DeliveryRow, WebhookRow).join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
        # Check again, because another process may have claimed them before they were locked.
        mine = rows.where(DeliveryRow.id.in_(chosen), DeliveryRow.state == DeliveryState.PENDING, DeliveryRow.due <= now)
        locked_rows = session.execute(mine.order_by(DeliveryRow.due).with_for_update(skip_locked=True, of=DeliveryRow)).all()
        claimed: list[DeliveryRecord] = []
        for row, delivery in _readable(locked_rows):
            row.due = now + timedelta(seconds=seconds)
            if delivery is None:
                row.state = DeliveryState.GIVEN_UP  # a damaged delivery can never be sent
            else:
                claimed.append(delivery)
        return claimed

    @writes
    def postpone_deliveries(self, session: Session, now: datetime, webhook_id: str, wait: float) -> int:
        """Postpone the deliveries of a webhook by at least `wait` seconds; return how many were postponed."""
        until = now + timedelta(seconds=wait)
        pending = update(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id, DeliveryRow.state == DeliveryState.PENDING)
        return int(getattr(session.execute(pending.where(DeliveryRow.due < until).values(due=until)), "rowcount", 0))

    @writes
    def finish_delivery(
        self,
        session: Session,
        now: datetime,
        delivery_id: str,
        tried: DeliveryTry | None,
        state: DeliveryState,
        wait: float = 0.0,
    ) -> None:
        """Record a try (None: there was no try) and the state; a delivery that stays PENDING is due after `wait` seconds."""
        row = session.get(DeliveryRow, delivery_id, with_for_update=True)
        if row is None or row.state is not DeliveryState.PENDING:
            return  # its webhook was deleted, or another process has finished it meanwhile
        if tried is not None:
            plain = to_plain(tried) | {"time": tried.time.isoformat(), "error": clean(tried.error)}
            row.tries = [*(row.tries if isinstance(row.tries, list) else ()), plain]
        row.state = state
        row.due = now + timedelta(seconds=wait)

    @reads
    def deliveries(self, session: Session, webhook_id: str, limit: int = 50) -> list[DeliveryRecord]:
        """Return the deliveries of a webhook, newest first."""
        webhook = session.get(WebhookRow, webhook_id)
        if webhook is None:
            return []
        query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
        rows = session.scalars(query.order_by(DeliveryRow.created.desc(), DeliveryRow.id).limit(limit)).all()
        return [delivery for _, delivery in _readable([(row, webhook) for row in rows]) if delivery is not None]


def announce(session: Session, now: datetime, job: JobRow) -> None:
    """If the job has ended, create deliveries to its submitter's webhooks."""
    if job.state not in ENDED:
        return
    data = {"job": job.id, "state": job.state, "reason": job.reason, "message": job.message}
    payload = to_plain({"type": "job.ended", "timestamp": now.isoformat(), "data": data})
    # Locked, else a webhook that is deleted at the same time would make the end of the job fail.
    mine = select(WebhookRow.id).where(WebhookRow.owner == job.submitter).order_by(WebhookRow.id)
    for webhook_id in session.scalars(mine.with_for_update(read=True, key_share=True)):
        session.add(
            DeliveryRow(
                id=f"msg_{secrets.token_hex(12)}", webhook_id=webhook_id, job_id=job.id, created=now, due=now,
                state=DeliveryState.PENDING, payload=payload, tries=[],
            )
        )  # fmt: skip


def tries_of(plain: Sequence[Mapping[str, Any]]) -> tuple[DeliveryTry, ...]:
    """Return stored tries as values."""
    return tuple(DeliveryTry(**{**tried, "time": datetime.fromisoformat(tried["time"])}) for tried in plain)


def _readable(delivery_rows: Iterable[Any]) -> Iterator[tuple[DeliveryRow, DeliveryRecord | None]]:
    """Yield the deliveries; None for a damaged one."""
    for row, webhook in delivery_rows:
        delivery = None
        with contextlib.suppress(DamagedRowError), reading(f"delivery {row.id}"):
            if type(row.payload) is not dict:
                raise ValueError("its payload is not a JSON object")
            delivery = record_of(DeliveryRecord, row, webhook=record_of(WebhookRecord, webhook), tries=tries_of(row.tries))
        yield row, delivery
