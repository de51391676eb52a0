"""Weights & Biases: a group for each job. WANDB_PROJECT (default: autotune), WANDB_MODE, WANDB_DIR, … apply."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import wandb

from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker


class WandbTracker(Tracker):
    """The id of a run is that of its job and its number, so that a run that is written again is the same run."""

    _COMPLETE = "autotune-complete"
    """An empty file in the folder of a run that was written to its end."""

    def __init__(self, job: TrackedJob) -> None:
        self._job = job
        self._folder = Path(os.environ.get("WANDB_DIR", ".")) / "wandb"
        # Nothing is printed into the sweep's output, and a missing API key is an error and no question.
        wandb.setup(settings=wandb.Settings(silent=True))

    def recorded_trials(self) -> Collection[int]:
        files = self._folder.glob(f"*run-*-{self._job.id}-*/{self._COMPLETE}")
        numbers = (file.parent.name.rpartition("-")[2] for file in files)
        return {int(number) for number in numbers if number.isdigit()}

    def log_trial(self, trial: TrackedTrial) -> None:
        run = self._run(str(trial.number), trial.name, [*self._job.tags, trial.purpose, str(trial.outcome)])
        run.config.update({**self._job.config, **trial.config})
        run.define_metric("rank_*", step_metric="rank")
        by_step = {name: values for name, values in trial.curves.items() if not name.startswith("rank_")}
        for step in range(max(map(len, by_step.values()), default=0)):
            run.log({name: values[step] for name, values in by_step.items() if step < len(values)}, step=step)
        by_rank = {name: values for name, values in trial.curves.items() if name.startswith("rank_")}
        for rank in range(max(map(len, by_rank.values()), default=0)):
            run.log({"rank": rank, **{name: values[rank] for name, values in by_rank.items()}})
        run.summary.update(
            {
                **trial.figures,
                "outcome": str(trial.outcome),
                "message": trial.message,
                "started": trial.started.isoformat(),
                "finished": trial.finished.isoformat(),
            }
        )
        self._finish(run, failed=trial.is_error)

    def log_summary(self, summary: TrackedSummary) -> None:
        run = self._run("summary", "summary", list(self._job.tags))
        run.config.update(dict(self._job.config))
        run.log({"trials": wandb.Table(columns=list(summary.columns), data=[list(row) for row in summary.rows])})
        run.summary.update({**summary.figures, "state": summary.state, "reason": summary.reason, "message": summary.message})
        self._finish(run, failed=summary.state == "FAILED")

    def _run(self, number: str, name: str, tags: list[str]) -> Any:
        for earlier in self._folder.glob(f"offline-run-*-{self._job.id}-{number}"):
            shutil.rmtree(earlier)  # an earlier summary, or a run whose process was killed, which was not sent yet
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "autotune"),
            id=f"{self._job.id}-{number}",
            resume="allow",
            reinit="create_new",
            group=self._job.id,  # without its name, which can change while the job is paused
            name=name,
            job_type="summary" if number == "summary" else "trial",
            tags=tags,
            # Of the process and the machine: the trial ran in other processes, and its output is in the database.
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_code=True, disable_git=True
            ),
        )

    def _finish(self, run: Any, failed: bool) -> None:
        folder = Path(run.settings.sync_dir)
        run.finish(exit_code=int(failed))
        if folder.is_dir():  # there is none with WANDB_MODE=disabled
            (folder / self._COMPLETE).touch()
