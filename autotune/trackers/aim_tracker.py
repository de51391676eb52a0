"""Aim: a run for each trial, in the repository AIM_REPO (a folder, or aim://HOST:PORT), else in that of the current folder."""

import os
from collections.abc import Collection
from typing import Any

from aim import Repo, Run, Text

from autotune.trackers.tracker import JobSummary, TrackedJob, TrackedTrial, Tracker

KEY = "autotune"
"""Parameter of a run: its job, its trial (-1: the summary), and whether it was written to its end."""
SUMMARY = -1


class AimTracker(Tracker):
    """Aim has no variable for its repository, so AIM_REPO is read here."""

    def __init__(self, job: TrackedJob) -> None:
        self._job = job
        self._repo = Repo.from_path(os.environ.get("AIM_REPO", "."), init=True)

    def recorded_trials(self) -> Collection[int]:
        recorded = set()
        for name, trial, complete in self._own_runs():
            if complete:
                recorded.add(trial)
            else:
                self._repo.delete_run(name)  # its process was killed
        return recorded - {SUMMARY}

    def log_trial(self, trial: TrackedTrial) -> None:
        run = self._run(trial.number, trial.name)
        run["hparams"] = dict(trial.config)
        run["outcome"], run["message"], run["purpose"] = str(trial.outcome), trial.message, trial.purpose
        run["started"], run["finished"] = trial.started.isoformat(), trial.finished.isoformat()
        for tag in (str(trial.outcome), *self._job.tags):
            run.add_tag(tag)
        for name, value in trial.figures.items():
            run.track(value, name=name)
        for name, values in trial.curves.items():
            for step, value in enumerate(values):
                run.track(value, name=name, step=step)
        self._finish(run, trial.number)

    def log_summary(self, summary: JobSummary) -> None:
        for name, trial, _ in self._own_runs():
            if trial == SUMMARY:
                self._repo.delete_run(name)
        run = self._run(SUMMARY, "summary")
        run["state"], run["reason"], run["message"] = summary.state, summary.reason, summary.message
        for name, value in summary.figures.items():
            run.track(value, name=name)
        run.track(Text(summary.markdown()), name="trials")
        self._finish(run, SUMMARY)

    def close(self) -> None:
        self._repo.close()

    def _own_runs(self) -> list[tuple[str, int, bool]]:
        """The name of each run of the job, with its trial and whether it is complete."""
        found = []
        for run in self._repo.iter_runs():
            about = run.get(KEY) or {}
            if about.get("job") == self._job.id:
                found.append((run.hash, int(about["trial"]), bool(about.get("complete"))))
        return found

    def _run(self, trial: int, name: str) -> Any:
        run = Run(
            repo=self._repo,
            experiment=f"{self._job.name} {self._job.id}",
            # Of the process and the machine: the trial ran in other processes, and its output is in the database.
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        run[KEY] = {"job": self._job.id, "trial": trial, "complete": False}
        run["job"] = dict(self._job.config)
        run.name = name
        return run

    def _finish(self, run: Any, trial: int) -> None:
        run[KEY] = {"job": self._job.id, "trial": trial, "complete": True}
        run.close()
