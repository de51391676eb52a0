"""A person's wish that a run ends."""

import threading


class StopSignal:
    """Raised from a signal handler or another thread, looked at by the loop. The first wish lets running trials end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._kill = threading.Event()

    def request(self) -> None:
        """Wish once more: first to start nothing further, then to kill what runs."""
        (self._kill if self._stop.is_set() else self._stop).set()

    @property
    def requested(self) -> bool:
        """Whether nothing further is to be started."""
        return self._stop.is_set()

    @property
    def kill_requested(self) -> bool:
        """Whether running trials are to be killed."""
        return self._kill.is_set()
