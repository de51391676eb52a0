"""Webhooks: who is told when a job ends, what is still to be told, and how it went.

What is to be told is written in the transaction in which the job ends, so that it is told whatever dies afterwards.
"""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from storage import audit, quotas
from storage.codec import clean
from storage.errors import UnknownWebhookError
from storage.records import ENDED
from storage.secret_box import SecretBox
from storage.service_records import Actor, Delivery, DeliveryState, DeliveryTry, Quota, Webhook
from storage.tables import DeliveryRow, JobRow, WebhookRow

SECRET_PREFIX = "whsec_"
"""What secrets of this kind begin with in https://www.standardwebhooks.com, so that scanners of leaked secrets find them."""


def create_webhook(session: Session, now: datetime, owner: str, url: str, box: SecretBox, by: Actor) -> Webhook:
    """See `Store.create_webhook`."""
    if by.limits is not None:
        quotas.lock(session, [owner])
        count = session.scalar(select(func.count()).where(WebhookRow.owner == owner)) or 0
        quotas.require(Quota.WEBHOOKS, count, 1, quotas.effective(session, [owner], by.limits)[owner].webhooks)
    secret = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(24)).decode()
    row = WebhookRow(
        id=secrets.token_hex(6), owner=owner, url=clean(url), secret="", sealed=box.seal(secret), created=now
    )  # fmt: skip
    session.add(row)
    audit.note(session, now, by, "webhook.create", row.id, {"owner": owner})
    return replace(_webhook(row), secret=secret)


def seal_all(session: Session, now: datetime, box: SecretBox) -> int:
    """Encrypt the secrets that a former version kept in plain text; return how many there were."""
    del now
    rows = session.scalars(select(WebhookRow).where(WebhookRow.secret != "").with_for_update()).all()
    for row in rows:
        row.sealed, row.secret = box.seal(row.secret), ""
    return len(rows)


def some_plain(session: Session) -> bool:
    """Whether a secret is kept in plain text."""
    return session.scalars(select(WebhookRow.id).where(WebhookRow.secret != "").limit(1)).first() is not None


def webhooks(session: Session, owner: str | None) -> list[Webhook]:
    """See `Store.webhooks`."""
    query = select(WebhookRow).order_by(WebhookRow.created, WebhookRow.id)
    return [_webhook(row) for row in session.scalars(query if owner is None else query.where(WebhookRow.owner == owner))]


def delete_webhook(session: Session, now: datetime, webhook_id: str, by: Actor) -> None:
    """See `Store.delete_webhook`."""
    found = session.scalars(delete(WebhookRow).where(WebhookRow.id == webhook_id).returning(WebhookRow.id)).all()
    if not found:
        raise UnknownWebhookError(f"there is no webhook {webhook_id!r}; list yours with GET /v1/webhooks")
    audit.note(session, now, by, "webhook.delete", webhook_id, {})


def announce(session: Session, now: datetime, job: JobRow) -> None:
    """Where the job has ended, note what its submitter's webhooks are to be told."""
    if job.state not in ENDED:
        return
    told = {"job": job.id, "state": job.state, "reason": job.reason, "message": job.message}
    payload = to_plain({"type": "job.ended", "timestamp": now.isoformat(), "data": told})
    for webhook_id in session.scalars(select(WebhookRow.id).where(WebhookRow.owner == job.submitter)):
        session.add(
            DeliveryRow(
                id=f"msg_{secrets.token_hex(12)}", webhook_id=webhook_id, job_id=job.id, created=now, due=now,
                state=DeliveryState.PENDING, payload=payload, tries=[],
            )
        )  # fmt: skip


def some_due(session: Session, now: datetime) -> bool:
    """Whether a delivery may be claimed."""
    due = select(DeliveryRow.id).where(DeliveryRow.state == DeliveryState.PENDING, DeliveryRow.due <= now)
    return session.scalars(due.limit(1)).first() is not None


def claim_deliveries(session: Session, now: datetime, limit: int, seconds: float) -> list[Delivery]:
    """See `Store.claim_deliveries`."""
    due = select(DeliveryRow, WebhookRow).join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
    due = due.where(DeliveryRow.state == DeliveryState.PENDING, DeliveryRow.due <= now).order_by(DeliveryRow.due)
    found = session.execute(due.limit(limit).with_for_update(skip_locked=True, of=DeliveryRow)).all()
    for row, _ in found:
        row.due = now + timedelta(seconds=seconds)
    return [_delivery(row, webhook) for row, webhook in found]


def finish_delivery(
    session: Session, now: datetime, delivery_id: str, tried: DeliveryTry, state: DeliveryState, wait: float
) -> None:
    """See `Store.finish_delivery`."""
    row = session.get(DeliveryRow, delivery_id, with_for_update=True)
    if row is None or row.state is not DeliveryState.PENDING:
        return  # its webhook was deleted, or another process has told it meanwhile
    plain = to_plain(tried) | {"time": tried.time.isoformat(), "error": clean(tried.error)}
    row.tries = [*row.tries, plain]
    row.state = state
    row.due = now + timedelta(seconds=wait)


def deliveries(session: Session, webhook_id: str, limit: int) -> list[Delivery]:
    """See `Store.deliveries`."""
    webhook = session.get(WebhookRow, webhook_id)
    if webhook is None:
        return []
    query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
    rows: Sequence[DeliveryRow] = session.scalars(query.order_by(DeliveryRow.created.desc(), DeliveryRow.id).limit(limit)).all()
    return [_delivery(row, webhook) for row in rows]


def _webhook(row: WebhookRow) -> Webhook:
    return Webhook(id=row.id, owner=row.owner, url=row.url, secret=row.sealed or row.secret, created=row.created)


def _delivery(row: DeliveryRow, webhook: WebhookRow) -> Delivery:
    tries = (DeliveryTry(**tried | {"time": datetime.fromisoformat(tried["time"])}) for tried in row.tries)
    return Delivery(
        id=row.id, webhook=_webhook(webhook), job_id=row.job_id, created=row.created, due=row.due, state=row.state,
        payload=row.payload, tries=tuple(tries),
    )  # fmt: skip
