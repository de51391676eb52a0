"""A person's wish that a run ends."""

import threading


class StopSignal:
    """Raised from a signal handler or another thread, looked at by the loop. The first wish lets running trials end."""

    def __init__(self, worker: "StopSignal | None" = None) -> None:
        """`worker`: the signal of a worker that runs the job, whose wishes are the job's too; the job then goes back to the
        queue, instead of waiting for a person.
        """
        self._worker = worker
        self._stop = threading.Event()
        self._kill = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait until it is wished that nothing further starts; return whether it is."""
        return self._stop.wait(seconds)

    def request(self) -> None:
        """Wish once more: first to start nothing further, then to kill what runs."""
        (self._kill if self._stop.is_set() else self._stop).set()

    @property
    def requested(self) -> bool:
        """Whether nothing further is to be started."""
        return self._stop.is_set() or (self._worker is not None and self._worker.requested)

    @property
    def kill_requested(self) -> bool:
        """Whether running trials are to be killed."""
        return self._kill.is_set() or (self._worker is not None and self._worker.kill_requested)

    @property
    def hands_back(self) -> bool:
        """Whether a job that is left now goes to the next worker."""
        return self._worker is not None
