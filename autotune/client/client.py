"""`autotune.Client`: the service from Python."""

import os
from types import TracebackType

from autotune.client.catalog import CatalogCalls
from autotune.client.events import LogCalls
from autotune.client.jobs import JobCalls, WebhookCalls
from autotune.client.results import ResultCalls
from autotune.client.transport import HttpTransport

OUTAGE_SECONDS = 60.0


class Client(JobCalls, ResultCalls, LogCalls, CatalogCalls, WebhookCalls):
    """Speaks to a service (`autotune serve`). May be used from several threads, and as a context manager.

    Reading, and whatever may be sent twice, is sent again where the connection breaks, where the service restarts or has too
    much to do: five times within about two seconds, later where the service says so. Every error is a `ServiceError`, or a
    `RequestError` where nothing was sent: one line with the remedy.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: the service's address; None: AUTOTUNE_URL, else http://127.0.0.1:8000.
            api_key: None: AUTOTUNE_API_KEY, else none is sent. It is in no message and no log.
            timeout: seconds that one answer may take.
            outage_seconds: how long `events` and `wait` wait for a service that is away.

        Raises:
            RequestError: address or key cannot be ones.
        """
        key = os.environ.get("AUTOTUNE_API_KEY") if api_key is None else api_key
        address = os.environ.get("AUTOTUNE_URL") or "http://127.0.0.1:8000" if url is None else url
        self._transport = HttpTransport(address, key or None, timeout)
        self._outage_seconds = outage_seconds

    @property
    def url(self) -> str:
        """The service's address."""
        return self._transport.url

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"
