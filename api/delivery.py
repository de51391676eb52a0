"""One request to a receiver, signed as https://www.standardwebhooks.com says."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from api.targets import Network, Target, checked_target
from autotune.errors import RequestError
from storage.errors import SecretError
from storage.service_records import Delivery, DeliveryTry, Webhook
from storage.webhooks import SECRET_PREFIX

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 10.0
"""Of each wait for the receiver."""
WHOLE_SECONDS = 20.0
"""Of a try: an answer that trickles in holds up the others no longer."""
MOST_BYTES = 10_000
"""Of an answer, which is read only so that the connection ends well."""


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """`v1,` and the base64 of HMAC-SHA256 over id, timestamp and body, joined by dots."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    content = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def deliver(delivery: Delivery, allowed: Sequence[Network], secret_of: Callable[[Webhook], str]) -> DeliveryTry:
    """Make one try; whatever goes wrong is in what is returned."""
    began, moment = time.monotonic(), datetime.now(UTC)
    status, error = None, ""
    try:
        secret = secret_of(delivery.webhook)
        status = _post(checked_target(delivery.webhook.url, allowed), delivery, int(moment.timestamp()), secret)
    except SecretError as locked:
        # The message names a file of the server, and the receiver's owner reads what is returned.
        log.error("webhook %s: %s", delivery.webhook.id, locked)
        error = "the server cannot decrypt this webhook's secret"
    except RequestError as refused:
        error = refused.problem
    except (OSError, http.client.HTTPException, ValueError) as failure:
        # Its kind alone: the words may hold what the receiver wrote.
        error = "timed out" if isinstance(failure, TimeoutError) else type(failure).__name__
    return DeliveryTry(time=moment, seconds=round(time.monotonic() - began, 3), status=status, error=error)


def _post(target: Target, delivery: Delivery, timestamp: int, secret: str) -> int:
    body = json.dumps(delivery.payload, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "autotune",
        "webhook-id": delivery.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, delivery.id, timestamp, body),
    }
    connection = _Pinned(target)
    limit = threading.Timer(WHOLE_SECONDS, connection.give_up)
    limit.start()
    try:
        # Redirects are not followed: they could lead where the target must not.
        connection.request("POST", target.path, body, headers)
        answer = connection.getresponse()
        answer.read(MOST_BYTES)
        return answer.status
    finally:
        limit.cancel()
        connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to the address that was checked, under the name that was asked for."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_SECONDS)
        self._target = target
        self._given_up = False
        self.default_port = 443 if target.scheme == "https" else 80  # what the Host header leaves out

    def connect(self) -> None:
        self.sock = socket.create_connection((self._target.address, self._target.port), TIMEOUT_SECONDS)
        if self._target.scheme == "https":
            # Its handshake comes when it is what `give_up` breaks.
            self.sock = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self._target.host, do_handshake_on_connect=False
            )
        if self._given_up:  # before there was anything to break
            raise TimeoutError
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def give_up(self) -> None:
        """Break the connection, from another thread, also one that is only being made."""
        self._given_up = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
