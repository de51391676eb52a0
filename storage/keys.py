"""API keys: created once, stored as a hash, looked up by their public part."""

import hashlib
import hmac
import secrets
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage import audit
from storage.codec import record_of
from storage.database import StorePart, reads, writes
from storage.errors import UnknownKeyError
from storage.records import ApiKey
from storage.tables import KeyRow


class KeyStore(StorePart):
    """API keys."""

    _USE_PRECISION = timedelta(minutes=1)

    _PREFIX = "at"
    """Prefix of every key, so that scanners of leaked secrets find it."""

    @writes
    def create(
        self, session: Session, now: datetime, owner: str, scopes: Collection[str], expires: datetime | None = None
    ) -> tuple[ApiKey, str]:
        """Create a key; return it and its text, which cannot be retrieved again."""
        public, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        row = KeyRow(id=public, secret_hash=_hash(secret), owner=owner, scopes=sorted(scopes), created=now, expires=expires)
        session.add(row)
        audit.record(session, now, self.actor, "key.create", public, {"owner": owner, "scopes": sorted(scopes)})
        return _key(row), f"{self._PREFIX}_{public}_{secret}"

    @reads
    def authenticate(self, session: Session, text: str) -> ApiKey | None:
        """Return the key with this text; None: it is invalid, revoked or expired. Does not wait for writers."""
        now = self.now(session)
        prefix, _, key_text = text.partition("_")
        public, _, secret = key_text.partition("_")
        if prefix != self._PREFIX or not 1 <= len(public) <= 16 or set(public) - set("0123456789abcdef"):
            return None
        row = session.get(KeyRow, public)
        # Compared even if there is no such key, so that the duration reveals nothing.
        same = hmac.compare_digest(_hash(secret), row.secret_hash if row is not None else _hash(""))
        if row is None or not same or row.revoked is not None or (row.expires is not None and row.expires <= now):
            return None
        return _key(row)

    def note_use(self, key: ApiKey) -> None:
        """Record the use of the key, to the minute: a write for every request would be too expensive."""
        now = datetime.now(UTC) if self.clock is None else self.clock()
        if key.last_used is None or now - key.last_used >= self._USE_PRECISION:
            self._set_last_use(key.id)

    @writes
    def _set_last_use(self, session: Session, now: datetime, key_id: str) -> None:
        row = session.get(KeyRow, key_id)
        if row is not None and (row.last_used is None or now - row.last_used >= self._USE_PRECISION):
            row.last_used = now

    @writes
    def revoke(self, session: Session, now: datetime, key_id: str) -> ApiKey:
        """Revoke a key.

        Raises:
            UnknownKeyError: the key does not exist.
        """
        row = session.get(KeyRow, key_id)
        if row is None:
            raise UnknownKeyError(f"there is no API key {key_id!r}; list them with `autotune keys`")
        row.revoked = row.revoked or now
        audit.record(session, now, self.actor, "key.revoke", key_id, {"owner": row.owner})
        return _key(row)

    @reads
    def all(self, session: Session) -> list[ApiKey]:
        """All keys, oldest first."""
        return [_key(row) for row in session.scalars(select(KeyRow).order_by(KeyRow.created, KeyRow.id))]


def _hash(secret: str) -> str:
    # A fast hash is sufficient: the secret has 256 random bits and cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


def _key(row: KeyRow) -> ApiKey:
    scopes = row.scopes if isinstance(row.scopes, list) else ()  # a damaged key has no permissions
    return record_of(ApiKey, row, scopes=frozenset(scope for scope in scopes if isinstance(scope, str)))
