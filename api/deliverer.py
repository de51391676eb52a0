"""Delivers webhooks for jobs that ended: claims, sends and records deliveries, and suspends receivers that fail."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import ipaddress
import json
import logging
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from autotune.errors import RequestError
from search_spaces.shared_records import DeliveryTry
from storage.errors import SecretError, StorageError
from storage.service_records import DeliveryRecord, DeliveryState, WebhookRecord
from storage.store import Store
from storage.webhooks import SECRET_PREFIX

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_METADATA = tuple(map(ipaddress.ip_network, (
    "169.254.0.0/16",  # link-local: AWS, Google, Azure, Oracle, DigitalOcean, OpenStack; AWS ECS at 169.254.170.2
    "fd00:ec2::/32",  # AWS by IPv6
    "fd20:ce::/32",  # Google by IPv6
    "100.100.100.200/32",  # Alibaba
    "192.0.0.192/32",  # Oracle, formerly
    "168.63.129.16/32",  # Azure's host, a public address
    "192.0.0.0/24", "192.88.99.0/24",  # protocol assignments, and the former relays of 6to4
)))  # fmt: skip
"""Cloud metadata services, which reveal secrets, and other special networks, some of which `ipaddress` counts as public."""
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10")))
"""IPv6 networks that gateways may translate to IPv4 addresses, even private ones; and the former site-local addresses."""


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A receiver with its checked address. The caller must connect to this address and not resolve the name again."""

    scheme: str
    host: str
    port: int
    path: str
    address: str


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parse networks.

    Raises:
        RequestError: a network is invalid.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise RequestError("webhook_network", str(error), "give a network such as 10.1.0.0/16") from error


def checked_target(url: str, allowed: Sequence[Network] = ()) -> CheckedTarget:
    """Resolve the URL of a receiver. Its addresses must be on the public internet or in an allowed network.

    Raises:
        RequestError: it is not an http or https URL, its name does not resolve, or one of its addresses is private.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refused(f"is not a URL ({error})") from error
    if len(url) > 2000 or any(character <= " " or character > "~" for character in url):
        raise _refused("holds characters that a URL cannot have, or is too long")
    ports = {"http": 80, "https": 443}
    if parts.scheme not in ports or not host or port == 0:
        raise _refused("is not an http or https URL")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise _refused("holds a user, a password or a fragment")
    port = port or ports[parts.scheme]
    addresses = _resolved(host, port)
    if not all(_may_be_called(address, allowed) for address in addresses):
        # Do not report the address: that would let clients map the network.
        raise _refused("is not on the public internet")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CheckedTarget(parts.scheme, host, port, path, str(addresses[0]))


def _resolved(host: str, port: int) -> list[Address]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A zone (fe80::1%eth0) has a meaning only on this machine.
        return [ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in addresses]
    except (OSError, ValueError) as error:
        raise _refused("has a host that does not resolve") from error


def _may_be_called(address: Address, allowed: Sequence[Network]) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in _METADATA):
        return any(address in network and network.prefixlen == network.max_prefixlen for network in allowed)
    if any(address in network for network in allowed):
        return True
    carried = any(address in network for network in _CARRIERS)
    return address.is_global and not (carried or address.is_multicast or address.is_reserved or address.is_unspecified)


def _refused(problem: str) -> RequestError:
    return RequestError("url", problem, "give https://HOST/PATH of a host on the public internet, or ask the operator")


POLL_SECONDS = 1.0
OF_AN_OWNER, AT_A_HOST = 3, 6
"""Most concurrent tries of one owner, and to one receiver's host."""
WAITS = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0)
"""Seconds between the tries, 31 hours in total: a receiver that is down for a day still gets its deliveries."""
log = logging.getLogger(__name__)


class Deliverer:
    """A delivery thread of the server. Several servers on one database share the work.

    Slow receivers of one owner do not delay those of others: owners and hosts are limited to a share of the tries, owners take
    turns, and a receiver that does not answer is suspended (`api.deliverer`).
    """

    _AT_ONCE = 16
    """Most concurrent tries."""

    def __init__(
        self, store: Store, deliver: Callable[[DeliveryRecord], DeliveryTry], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._store, self._deliver, self._poll_seconds = store, deliver, poll_seconds
        self._breaker = Breaker()
        self._running: dict[Future[DeliveryTry | None], DeliveryRecord] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Wait for the running tries, then end the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(self._AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._ended.is_set():
                try:
                    began = self._begin(pool)
                except StorageError as error:
                    log.error("webhooks: %s", error)
                    began = 0
                except Exception:
                    # Continue with other deliveries after any error.
                    log.exception("webhooks: failed")
                    began = 0
                if self._running:
                    wait(self._running, self._poll_seconds, FIRST_COMPLETED)
                    self._note_ended()
                elif not began:
                    self._ended.wait(self._poll_seconds)

    def _begin(self, pool: ThreadPoolExecutor) -> int:
        """Start the tries that are due and allowed now; return their number."""
        free = self._AT_ONCE - len(self._running)
        if not free:
            return 0
        owners = Counter(delivery.webhook.owner for delivery in self._running.values())
        began = 0
        # 120 seconds are longer than any try, even if its DNS look-up times out.
        for delivery in self._store.webhooks.claim_deliveries(free, 120.0, OF_AN_OWNER, owners):
            hosts = Counter(host_of(other.webhook) for other in self._running.values())
            suspended = self._breaker.seconds_left(place_of(delivery.webhook))
            if suspended or hosts[host_of(delivery.webhook)] >= AT_A_HOST:
                # The claimed delivery would be due only after its claim expires, so release it too.
                seconds = suspended or 5.0
                self._store.webhooks.finish_delivery(delivery.id, None, DeliveryState.PENDING, seconds)
                self._store.webhooks.postpone_deliveries(delivery.webhook.id, seconds)
            else:
                self._running[pool.submit(self._try, delivery)] = delivery
                began += 1
        return began

    def _note_ended(self) -> None:
        for future in [future for future in self._running if future.done()]:
            delivery, tried = self._running.pop(future), future.result()
            if tried is None:
                continue
            if seconds := self._breaker.note(place_of(delivery.webhook), tried):
                log.warning(
                    "webhook %s: %s does not answer, and is suspended for %.0f s",
                    delivery.webhook.id, host_of(delivery.webhook), seconds,
                )  # fmt: skip

    def _try(self, delivery: DeliveryRecord) -> DeliveryTry | None:
        """Make one try and record it; None: it could not be recorded."""
        try:
            tried = self._deliver(delivery)
            state, seconds = after(delivery, tried)
            self._store.webhooks.finish_delivery(delivery.id, tried, state, seconds)
            about = {"job": delivery.job_id}
            log.info("webhook %s: job %s: %s", delivery.webhook.id, delivery.job_id, tried.status or tried.error, extra=about)
        except StorageError as error:
            log.error("webhook %s: %s", delivery.webhook.id, error, extra={"job": delivery.job_id})
            return None
        except Exception:
            # It is due again when the claim expires; the others must not wait for it.
            log.exception("webhook %s: failed", delivery.webhook.id, extra={"job": delivery.job_id})
            return None
        return tried


def after(delivery: DeliveryRecord, tried: DeliveryTry) -> tuple[DeliveryState, float]:
    """The state of a delivery after a try, and the seconds until the next one."""
    if tried.status is not None and 200 <= tried.status < 300:
        return DeliveryState.DELIVERED, 0.0
    if len(delivery.tries) >= len(WAITS) or tried.status == http.HTTPStatus.GONE:
        return DeliveryState.GIVEN_UP, 0.0
    return DeliveryState.PENDING, WAITS[len(delivery.tries)] * random.uniform(0.9, 1.1)


TIMEOUT_SECONDS = 10.0
"""Time limit of each wait for the receiver."""
WHOLE_SECONDS = 20.0
"""Time limit of a whole try, so that a slow answer does not delay other deliveries."""


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """`v1,` and the base64 of HMAC-SHA256 over id, timestamp and body, which are joined by dots."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    content = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def deliver(delivery: DeliveryRecord, allowed: Sequence[Network], secret_of: Callable[[WebhookRecord], str]) -> DeliveryTry:
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


def _post(target: CheckedTarget, delivery: DeliveryRecord, timestamp: int, secret: str) -> int:
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
        # Most bytes that are read of an answer, so that the connection ends cleanly.
        answer.read(10_000)
        return answer.status
    finally:
        limit.cancel()
        connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to the checked address, with the requested host name."""

    def __init__(self, target: CheckedTarget) -> None:
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


FAILURES = 3
"""Consecutive tries without an answer until a receiver is suspended."""
LEAST_SECONDS, MOST_SECONDS = 30.0, 900.0
"""The first and the longest suspension; each one is twice as long as the previous."""
SLOW_SECONDS = 5.0
"""A slower answer counts as none: a slow receiver holds a connection as long as one that does not answer."""

Place = tuple[str, str]
"""An owner, and a receiver's scheme, host and port. Owners are separate: their addresses at one host may behave differently."""


@dataclass(slots=True)
class _Failing:
    failures: int = 0
    opened: int = 0
    until: float = 0.0


class Breaker:
    """Not thread-safe: used by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[Place, _Failing] = {}

    def seconds_left(self, receiver: Place) -> float:
        """Seconds until the receiver may be tried; 0: now."""
        failing = self._failing.get(receiver)
        return 0.0 if failing is None else max(0.0, failing.until - self._clock())

    def note(self, receiver: Place, tried: DeliveryTry) -> float:
        """Record a try; return the seconds for which this try suspends the receiver; 0: not suspended."""
        failing = self._failing.pop(receiver, None)
        if tried.status is not None and tried.seconds < SLOW_SECONDS:
            return 0.0
        failing = failing or _Failing()
        while len(self._failing) >= 10_000:  # the least recently failed one is forgotten
            del self._failing[next(iter(self._failing))]
        self._failing[receiver] = failing
        failing.failures += 1
        if failing.failures < FAILURES:
            return 0.0
        # One try follows the suspension; if it fails too, the next suspension is twice as long.
        wait = min(LEAST_SECONDS * 2.0**failing.opened, MOST_SECONDS)
        failing.failures, failing.opened, failing.until = FAILURES - 1, failing.opened + 1, self._clock() + wait
        return wait


def place_of(webhook: WebhookRecord) -> Place:
    """The owner and the host of a receiver."""
    return webhook.owner, host_of(webhook)


def host_of(webhook: WebhookRecord) -> str:
    """Scheme, host and port of the receiver; the whole URL if it cannot be parsed."""
    try:
        parts = urlsplit(webhook.url)
    except ValueError:
        return webhook.url
    return f"{parts.scheme}://{(parts.netloc.rpartition('@')[2]).lower()}"
