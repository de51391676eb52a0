"""Aim: a run for each trial, in the repository AIM_REPO (a folder, or aim://HOST:PORT), else in that of the current folder."""

import os
from collections.abc import Collection
from typing import Any

from aim import Repo, Run, Text

from autotune.trackers.tracker import JobSummary, TrackedJob, TrackedTrial, Tracker

SUMMARY = "summary"
PARTIAL = " (partial)"
"""The end of a run's name until it is complete. Names can be read at once; parameters only after Aim has indexed the run."""


class AimTracker(Tracker):
    """Aim has no variable for its repository, so AIM_REPO is read here."""

    def __init__(self, job: TrackedJob) -> None:
        self._job = job
        self._experiment = f"{job.name} {job.id}"
        self._repo = Repo.from_path(os.environ.get("AIM_REPO", "."), init=True)

    def recorded_trials(self) -> Collection[int]:
        recorded = set()
        for name, run in self._own_runs():
            if name.endswith(PARTIAL):
                self._repo.delete_run(run)  # its process was killed
            elif name != SUMMARY:
                recorded.add(int(name.rpartition(" ")[2]))
        return recorded

    def log_trial(self, trial: TrackedTrial) -> None:
        run = self._run(trial.name)
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
        self._finish(run, trial.name)

    def log_summary(self, summary: JobSummary) -> None:
        for name, earlier in self._own_runs():
            if name == SUMMARY:
                self._repo.delete_run(earlier)
        run = self._run(SUMMARY)
        run["state"], run["reason"], run["message"] = summary.state, summary.reason, summary.message
        for name, value in summary.figures.items():
            run.track(value, name=name)
        run.track(Text(summary.markdown()), name="trials")
        self._finish(run, SUMMARY)

    def close(self) -> None:
        self._repo.close()

    def _own_runs(self) -> list[tuple[str, str]]:
        """Name and identifier of each run of the job."""
        runs = [Run(found, repo=self._repo, read_only=True) for found in self._repo.list_all_runs()]
        # By the id: the job may have been renamed since, and continues in the experiment in which it began.
        own = [run for run in runs if (run.experiment or "").rpartition(" ")[2] == self._job.id]
        if own:
            self._experiment = own[0].experiment
        return [(run.name, run.hash) for run in own]

    def _run(self, name: str) -> Any:
        run = Run(
            repo=self._repo,
            experiment=self._experiment,
            # Of the process and the machine: the trial ran in other processes, and its output is in the database.
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        run.name = name + PARTIAL
        run["job"] = {"id": self._job.id, **self._job.config}
        return run

    def _finish(self, run: Any, name: str) -> None:
        run.name = name
        run.close()
