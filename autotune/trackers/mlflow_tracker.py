"""MLflow: a run for each job, and below it one for each trial. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, … apply."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker

JOB, TRIAL = "autotune.job", "autotune.trial"
"""Tags of runs. The job's own run has no `TRIAL`."""


class MlflowTracker(Tracker):
    """Uses the client of MLflow, without its process-wide active run."""

    _TABLE = "summary.json"

    def __init__(self, job: TrackedJob) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._job = job
        self._client = MlflowClient()
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
        if not self._experiment:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "autotune")
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
            self._experiment = str(experiment_id)
        runs = self._runs(f"tags.`{JOB}` = '{job.id}'")
        job_runs = [run.info.run_id for run in runs if TRIAL not in run.data.tags]
        self._recorded = set()
        for run in runs:
            if TRIAL in run.data.tags:
                if run.info.status == "RUNNING":
                    self._client.delete_run(run.info.run_id)  # its process was killed
                else:
                    self._recorded.add(int(run.data.tags[TRIAL]))
        tags = {JOB: job.id, **{f"autotune.tag.{tag}": "" for tag in job.tags}}
        self._own = job_runs[0] if job_runs else self._new_run(f"{job.name} {job.id}", tags, None)
        self._client.update_run(self._own, status="RUNNING")
        self._log(self._own, params=job.config)

    def recorded_trials(self) -> Collection[int]:
        return self._recorded

    def log_trial(self, trial: TrackedTrial) -> None:
        tags = {
            JOB: self._job.id,
            TRIAL: str(trial.number),
            "autotune.purpose": trial.purpose,
            "autotune.outcome": str(trial.outcome),
            "autotune.message": trial.message,
            "mlflow.parentRunId": self._own,
        }
        run = self._new_run(trial.name, tags, trial.started)
        at = _milliseconds(trial.started)
        curves = [Metric(name, value, at, step) for name, values in trial.curves.items() for step, value in enumerate(values)]
        figures = [Metric(name, value, at, 0) for name, value in trial.figures.items()]
        self._log(run, [*figures, *curves], {**self._job.config, **trial.config})
        self._end(run, trial.is_error, trial.finished)

    def log_summary(self, summary: TrackedSummary) -> None:
        table = {"columns": summary.columns, "data": summary.rows}
        self._client.log_text(self._own, json.dumps(table), self._TABLE)
        self._client.log_text(self._own, summary.markdown(), "summary.md")
        # With this tag MLflow shows the file as a table, and `load_table` reads it.
        self._client.set_tag(self._own, "mlflow.loggedArtifacts", json.dumps([{"path": self._TABLE, "type": "table"}]))
        for name in ("state", "reason", "message"):
            self._client.set_tag(self._own, f"autotune.{name}", getattr(summary, name))
        now = _milliseconds(datetime.now().astimezone())
        self._log(self._own, [Metric(name, value, now, 0) for name, value in summary.figures.items()])
        self._end(self._own, summary.state == "FAILED", None)

    def _runs(self, query: str) -> list[Any]:
        runs: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, page_token=token)
            runs += page
            token = page.token
            if not token:
                return runs

    def _new_run(self, name: str, tags: Mapping[str, str], started: datetime | None) -> str:
        at = None if started is None else _milliseconds(started)
        return str(self._client.create_run(self._experiment, at, dict(tags), name).info.run_id)

    def _log(self, run: str, metrics: Sequence[Metric] = (), params: Mapping[str, object] | None = None) -> None:
        texts = [Param(name, str(value)) for name, value in (params or {}).items()]
        # Values in a request; MLflow's limit for parameters and tags.
        most = 100
        for first in range(0, max(len(metrics), len(texts)), most):
            some = slice(first, first + most)
            self._client.log_batch(run, metrics=metrics[some], params=texts[some])

    def _end(self, run: str, failed: bool, finished: datetime | None) -> None:
        at = None if finished is None else _milliseconds(finished)
        self._client.set_terminated(run, "FAILED" if failed else "FINISHED", at)


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
