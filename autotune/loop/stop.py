"""A request to stop a run."""

import threading


class StopSignal:
    """Set by a signal handler or another thread, polled by the loop. The first request lets running trials end."""

    def __init__(self, worker: "StopSignal | None" = None) -> None:
        """`worker`: the signal of the worker that runs the job. Its requests also apply to the job, which then goes back to the
        queue instead of being paused.
        """
        self._worker = worker
        self._stop = threading.Event()
        self._kill = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a stop request; return whether there is one."""
        return self._stop.wait(seconds)

    def request(self) -> None:
        """Request a stop. The first call starts no further trials; the second kills the running ones."""
        (self._kill if self._stop.is_set() else self._stop).set()

    @property
    def requested(self) -> bool:
        """Whether no further trial is to be started."""
        return self._stop.is_set() or (self._worker is not None and self._worker.requested)

    @property
    def kill_requested(self) -> bool:
        """Whether running trials are to be killed."""
        return self._kill.is_set() or (self._worker is not None and self._worker.kill_requested)

    @property
    def hands_back(self) -> bool:
        """Whether a stopped job goes back to the queue for the next worker."""
        return self._worker is not None
