"""A tracker: a line for each trial, in the file that EXAMPLE_TRACKER names."""

import os
from pathlib import Path

from autotune.loop.listener import LoopListener
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.session.session import Session
from storage.records import TrialRecord


class LineTracker(LoopListener):
    """Appends to the file."""

    def __init__(self, session: Session) -> None:
        self._file = Path(os.environ.get("EXAMPLE_TRACKER", os.devnull))
        self._model = session.model.name

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{self._model} {trial.number} {trial.outcome}\n")
