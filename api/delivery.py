"""Sends one signed request to a receiver, as specified by https://www.standardwebhooks.com."""

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
"""Time limit of each wait for the receiver."""
WHOLE_SECONDS = 20.0
"""Time limit of a whole try, so that a slow answer does not delay other deliveries."""
MOST_BYTES = 10_000
"""Most bytes that are read of an answer, so that the connection ends cleanly."""


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """`v1,` and the base64 of HMAC-SHA256 over id, timestamp and body, which are joined by dots."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    content = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def deliver(delivery: Delivery, allowed: Sequence[Network], secret_of: Callable[[Webhook], str]) -> DeliveryTry:
    """Make one try; the result contains any error."""
    began, moment = time.monotonic(), datetime.now(UTC)
    status, error = None, ""
    try:
        secret = secret_of(delivery.webhook)
        status = _post(checked_target(delivery.webhook.url, allowed), delivery, int(moment.timestamp()), secret)
    except SecretError as locked:
        # The message contains a server path, and the receiver's owner can read the result.
        log.error("webhook %s: %s", delivery.webhook.id, locked)
        error = "the server cannot decrypt this webhook's secret"
    except RequestError as refused:
        error = refused.problem
    except (OSError, http.client.HTTPException, ValueError) as failure:
        # Only the class name: the message may contain text from the receiver.
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
        # Redirects are not followed: they could lead to a forbidden target.
        connection.request("POST", target.path, body, headers)
        answer = connection.getresponse()
        answer.read(MOST_BYTES)
        return answer.status
    finally:
        limit.cancel()
        connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to the checked address, with the requested host name."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_SECONDS)
        self._target = target
        self._given_up = False
        self.default_port = 443 if target.scheme == "https" else 80  # the port that the Host header omits

    def connect(self) -> None:
        self.sock = socket.create_connection((self._target.address, self._target.port), TIMEOUT_SECONDS)
        if self._target.scheme == "https":
            # The handshake follows when `self.sock` is set, so that `give_up` can break it.
            self.sock = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self._target.host, do_handshake_on_connect=False
            )
        if self._given_up:  # `give_up` was called before the socket existed
            raise TimeoutError
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def give_up(self) -> None:
        """Break the connection from another thread, even while it is being established."""
        self._given_up = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
