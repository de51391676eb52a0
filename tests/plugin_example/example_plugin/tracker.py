"""A tracker: a line for each trial, in the file that EXAMPLE_TRACKER names."""

import os
from collections.abc import Collection
from pathlib import Path

from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker


class LineTracker(Tracker):
    """Appends to the file."""

    def __init__(self, job: TrackedJob) -> None:
        self._file = Path(os.environ["EXAMPLE_TRACKER"])
        self._job = job

    def recorded_trials(self) -> Collection[int]:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(f"{self._job.id} ")]

    def log_trial(self, trial: TrackedTrial) -> None:
        self._write(f"{trial.number} {trial.outcome}")

    def log_summary(self, summary: TrackedSummary) -> None:
        self._write(f"-1 {len(summary.rows)} trials")

    def _write(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{self._job.id} {text}\n")
