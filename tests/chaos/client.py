"""A client that does not give up: requests that are sent again, and streams that are taken up where they broke."""

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

GIVE_UP_SECONDS = 240.0
"""No outage of the soak is as long."""


class Service:
    """All servers of the service as one. May be used from several threads."""

    def __init__(self, addresses: Sequence[str], chance: random.Random) -> None:
        self.addresses = tuple(addresses)
        self.repeated = 0
        """Requests that had to be sent again."""
        self._chance = chance
        self.http = httpx2.Client(timeout=60.0, trust_env=False, limits=httpx2.Limits(max_connections=None))

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The first answer that is not an outage."""
        until = time.monotonic() + GIVE_UP_SECONDS
        for tries in itertools.count():
            try:
                answer = self.http.request(method, self.any() + path, **options)
                if answer.status_code != httpx2.codes.SERVICE_UNAVAILABLE:
                    return answer
                problem = answer.text
            except httpx2.TransportError as error:
                problem = repr(error)
            if time.monotonic() > until:
                raise AssertionError(f"{method} {path} was not answered in {tries} tries: {problem}")
            self.repeated += 1
            time.sleep(0.2)
        raise AssertionError("unreachable")

    def any(self) -> str:
        """One of the servers."""
        return self._chance.choice(self.addresses)

    def close(self) -> None:
        """Close every connection."""
        self.http.close()


class Follower:
    """Collects the events of one job from its stream, through whatever breaks, to the end of the job."""

    def __init__(self, service: Service, job_id: str, chance: random.Random) -> None:
        self.job_id = job_id
        self.events: list[dict[str, Any]] = []
        self.connections = 0
        self.mistakes: list[str] = []
        self._service, self._chance = service, chance
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"follower {job_id}")
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the end; return whether the service told it."""
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        self._given_up.set()
        return ended

    def _follow(self) -> None:
        while not self._given_up.is_set():
            self.connections += 1
            try:
                if self._connected():
                    return
            except httpx2.TransportError:
                pass
            except Exception as error:
                self.mistakes.append(repr(error))
                return
            time.sleep(self._chance.uniform(0.05, 0.4))

    def _connected(self) -> bool:
        """Read one stream until it breaks, or until the client has had enough of it; return whether the job has ended."""
        url = f"{self._service.any()}/v1/jobs/{self.job_id}/events/stream"
        last = len(self.events)
        headers = {"Last-Event-ID": str(last)} if last else {}
        enough = self._chance.randint(1, 60)
        with self._service.http.stream("GET", url, headers=headers, timeout=httpx2.Timeout(60.0, read=25.0)) as answer:
            if answer.status_code == httpx2.codes.NO_CONTENT:
                return True
            if answer.status_code == httpx2.codes.OK:
                for event in itertools.islice(messages(answer.iter_lines()), enough):
                    self._take(event)
            elif answer.status_code != httpx2.codes.SERVICE_UNAVAILABLE:
                self.mistakes.append(f"the stream was answered {answer.status_code}")
        return False

    def _take(self, event: dict[str, str]) -> None:
        expected = len(self.events) + 1
        data = json.loads(event["data"])
        if not int(event["id"]) == data["sequence"] == expected or event["event"] != data["kind"]:
            self.mistakes.append(f"after event {expected - 1} came {event}")
        self.events.append(data)


def messages(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """The whole messages of an event stream; what breaks off in the midst of one is none."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif not line:
            if "id" in fields:
                yield fields
            fields = {}
