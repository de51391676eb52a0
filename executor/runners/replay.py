"""A runner that answers from a table of measurements."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from executor.runners.runner import Event, Handle, Runner
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig

Table = Mapping[str, TrialResult | Mapping[str, Any]]
"""Config hash -> the result, as an object or as plain data; its attempt is replaced."""


class ReplayRunner(Runner):
    """Returns recorded measurements, `slots` trials at a time, each after `seconds_per_trial`.

    `table` may also be a function of the configuration. A configuration that is not in the table is FAILED.
    """

    def __init__(
        self, table: Table | Callable[[TrialConfig], TrialResult], *, seconds_per_trial: float = 0.0, slots: int = 1
    ) -> None:
        self._table = table
        self._seconds = seconds_per_trial
        self._slots = slots
        self._waiting: collections.deque[TrialRequest] = collections.deque()
        self._running: dict[Handle, tuple[float, TrialRequest]] = {}
        self._cancelled: dict[Handle, str] = {}

    def submit(self, request: TrialRequest) -> Handle:
        """Queue the attempt; see `Runner`."""
        self._waiting.append(request)
        self._fill_slots()
        return request.attempt

    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        """Return the results that are due; see `Runner`."""
        until = time.monotonic() + timeout
        while True:
            events = [*self._end_cancelled(), *self._end_due()]
            self._fill_slots()
            remaining = until - time.monotonic()
            if events or remaining <= 0:
                return events
            next_due = min((due for due, _ in self._running.values()), default=until)
            time.sleep(max(0.0, min(remaining, 0.05, next_due - time.monotonic())))

    def cancel(self, handle: Handle, reason: str) -> None:
        """End an attempt; see `Runner`."""
        self._cancelled[handle] = reason

    def capacity(self) -> int:
        """Return the free slots that no queued attempt will take."""
        return max(0, self._slots - len(self._running) - len(self._waiting))

    def close(self) -> None:
        """Drop every attempt; see `Runner`."""
        self._waiting.clear()
        self._running.clear()

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            self._running[request.attempt] = (time.monotonic() + self._seconds, request)

    def _end_cancelled(self) -> list[tuple[Handle, Event]]:
        events: list[tuple[Handle, Event]] = []
        while self._cancelled:
            handle, reason = self._cancelled.popitem()
            queued = [request for request in self._waiting if request.attempt == handle]
            for request in queued:
                self._waiting.remove(request)
            if self._running.pop(handle, None) or queued:
                events.append((handle, TrialResult(attempt=handle, outcome=Outcome.CANCELLED, message=reason)))
        return events

    def _end_due(self) -> list[tuple[Handle, Event]]:
        now = time.monotonic()
        due = [request for when, request in self._running.values() if when <= now]
        for request in due:
            del self._running[request.attempt]
        return [(request.attempt, self._answer(request)) for request in due]

    def _answer(self, request: TrialRequest) -> TrialResult:
        row = self._table(request.config) if callable(self._table) else self._table.get(request.config.hash)
        if row is None:
            message = f"configuration {request.config.hash} is not in the table; add its measurement"
            return TrialResult(attempt=request.attempt, outcome=Outcome.FAILED, message=message)
        result = row if isinstance(row, TrialResult) else from_plain(TrialResult, {"attempt": "", **row})
        return dataclasses.replace(result, attempt=request.attempt)
