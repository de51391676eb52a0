"""A normal client in a process of its own: it reads at a steady pace, and reports how long its answers took.

Run as `python people.py HOST PORT JOB KEY`; it ends when its input ends, and prints one line of JSON. The pace does not wait
for answers: a request that could not be sent in time counts from when it was due, or a service that stops once would look well.
Standard library only, so that it starts at once and takes little of the processor.
"""

import http.client
import json
import math
import sys
import threading
import time

PER_SECOND = 10.0
"""Requests of each kind."""
TIMEOUT_SECONDS = 60.0


def main(host: str, port: int, job: str, key: str) -> None:
    """Ask for the list, one job and /livez until the input ends."""
    paths = {"list": "/v1/jobs?limit=20", "job": f"/v1/jobs/{job}", "livez": "/livez"}
    ended: list[float] = []
    """When it was, once it is."""
    readings: dict[str, dict[str, float]] = {}
    threads = [
        threading.Thread(target=_ask, args=(host, port, name, path, key, ended, readings)) for name, path in paths.items()
    ]
    for thread in threads:
        thread.start()
    print("asking", flush=True)  # noqa: T201  the ground waits for it
    sys.stdin.read()
    ended.append(time.monotonic())
    for thread in threads:
        thread.join()
    print(json.dumps(readings))  # noqa: T201


def _ask(
    host: str, port: int, name: str, path: str, key: str, ended: list[float], readings: dict[str, dict[str, float]]
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    seconds: list[float] = []
    failed = refused = 0
    due = time.monotonic()
    while not ended or due < ended[0]:
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            refused += answer.status != http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            failed += 1
            connection.close()
        seconds.append(time.monotonic() - due)
        due += 1 / PER_SECOND
    connection.close()
    seconds.sort()
    last = len(seconds) - 1
    readings[name] = {
        "count": len(seconds),
        "failed": failed,
        "refused": refused,
        "median": seconds[last // 2] if seconds else 0.0,
        "p99": seconds[math.ceil(0.99 * last)] if seconds else 0.0,
        "worst": seconds[last] if seconds else 0.0,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
