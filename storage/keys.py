"""API keys: created once, stored as a hash, looked up by their public part."""

import hashlib
import hmac
import secrets
from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage import audit
from storage.errors import UnknownKeyError
from storage.records import ApiKey
from storage.service_records import Actor
from storage.tables import KeyRow

PREFIX = "at"
"""Prefix of every key, so that scanners of leaked secrets find it."""
_USE_PRECISION = timedelta(minutes=1)
"""Precision of the stored last use: a write for every request would be too expensive."""


def create_key(
    session: Session, now: datetime, owner: str, scopes: Collection[str], expires: datetime | None, by: Actor
) -> tuple[ApiKey, str]:
    """See `Store.create_key`."""
    public, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    row = KeyRow(
        id=public, secret_hash=_hash(secret), owner=owner, scopes=sorted(scopes), created=now, expires=expires
    )  # fmt: skip
    session.add(row)
    audit.record(session, now, by, "key.create", public, {"owner": owner, "scopes": sorted(scopes)})
    return _key(row), f"{PREFIX}_{public}_{secret}"


def authenticate(session: Session, now: datetime, text: str) -> ApiKey | None:
    """See `Store.authenticate`."""
    prefix, _, key_text = text.partition("_")
    public, _, secret = key_text.partition("_")
    if prefix != PREFIX or not 1 <= len(public) <= 16 or set(public) - set("0123456789abcdef"):
        return None
    row = session.get(KeyRow, public)
    # Compared even if there is no such key, so that the duration reveals nothing.
    same = hmac.compare_digest(_hash(secret), row.secret_hash if row is not None else _hash(""))
    if row is None or not same or row.revoked is not None or (row.expires is not None and row.expires <= now):
        return None
    return _key(row)


def note_use(session: Session, now: datetime, key_id: str) -> None:
    """Record the use of a key, with the precision `_USE_PRECISION`."""
    row = session.get(KeyRow, key_id)
    if row is not None and (row.last_used is None or now - row.last_used >= _USE_PRECISION):
        row.last_used = now


def needs_use_update(key: ApiKey, now: datetime) -> bool:
    """Whether the stored last use is old enough to be updated."""
    return key.last_used is None or now - key.last_used >= _USE_PRECISION


def revoke_key(session: Session, now: datetime, key_id: str, by: Actor) -> ApiKey:
    """See `Store.revoke_key`."""
    row = session.get(KeyRow, key_id)
    if row is None:
        raise UnknownKeyError(f"there is no API key {key_id!r}; list them with `autotune keys`")
    row.revoked = row.revoked or now
    audit.record(session, now, by, "key.revoke", key_id, {"owner": row.owner})
    return _key(row)


def keys(session: Session) -> list[ApiKey]:
    """See `Store.keys`."""
    return [_key(row) for row in session.scalars(select(KeyRow).order_by(KeyRow.created, KeyRow.id))]


def _hash(secret: str) -> str:
    # A fast hash is sufficient: the secret has 256 random bits and cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


def _key(row: KeyRow) -> ApiKey:
    return ApiKey(
        id=row.id,
        owner=row.owner,
        scopes=frozenset(scope for scope in row.scopes if isinstance(scope, str))
        if isinstance(row.scopes, list)
        else frozenset(),
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
        last_used=row.last_used,
    )
