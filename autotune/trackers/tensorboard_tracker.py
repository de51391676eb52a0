"""TensorBoard: a folder of event files for each job, in TENSORBOARD_LOGGING_DIR (default: runs)."""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.metadata import (
    NULL_TENSOR,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    create_summary_metadata,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker
from search_spaces.knob import Value


class TensorboardTracker(Tracker):
    """Writes event files by TensorBoard's own writer, without torch and TensorFlow. Its HParams view lists the trials."""

    def __init__(self, job: TrackedJob) -> None:
        self._job = job
        self._folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", "runs")) / f"autotune-{job.id}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def recorded_trials(self) -> Collection[int]:
        numbers = (path.name.removeprefix("trial-") for path in self._folder.glob("trial-*"))
        return {int(number) for number in numbers if number.isdigit()}

    def log_trial(self, trial: TrackedTrial) -> None:
        status = Status.STATUS_FAILURE if trial.is_error else Status.STATUS_SUCCESS
        end = SessionEndInfo(status=status, end_time_secs=trial.finished.timestamp())
        events = [
            _session_start({**self._job.config, **trial.config}, trial.started),
            *(_scalar(name, value, 0, trial.finished) for name, value in trial.figures.items()),
            *(
                _scalar(name, value, step, trial.finished)
                for name, values in trial.curves.items()
                for step, value in enumerate(values)
            ),
            _text("outcome", f"{trial.outcome} ({trial.purpose}) {trial.message}", trial.finished),
            _of_session(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end), trial.finished),
        ]
        self._write(f"trial-{trial.number:04d}", events)

    def log_summary(self, summary: TrackedSummary) -> None:
        now = datetime.now()
        events = [
            *(_scalar(name, value, 0, now) for name, value in summary.figures.items()),
            _text("state", f"{summary.state} {summary.reason}: {summary.message}", now),
            _text("trials", summary.markdown(), now),
        ]
        self._write("summary", events)

    def _write(self, name: str, events: Iterable[Any]) -> None:
        # The folder gets the run's name when it is complete.
        partial, folder = self._folder / ".partial", self._folder / name
        shutil.rmtree(partial, ignore_errors=True)
        writer = EventFileWriter(str(partial))
        for event in events:
            writer.add_event(event)
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _event(summary: Any, seconds: float, step: int = 0) -> Any:
    return Event(wall_time=seconds, step=step, summary=summary)


def _scalar(name: str, value: float, step: int, time: datetime) -> Any:
    return _event(Summary(value=[Summary.Value(tag=name, simple_value=value)]), time.timestamp(), step)


def _session_start(config: Mapping[str, Value], time: datetime) -> Any:
    """The knobs, for the view of hyperparameters. `tensorboard.plugins.hparams.summary` would need TensorFlow."""
    info = SessionStartInfo(start_time_secs=time.timestamp())
    for name, value in config.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(info.hparams[name], kind, value)
    return _of_session(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info), time)


def _of_session(tag: str, data: Any, time: datetime) -> Any:
    value = Summary.Value(tag=tag, tensor=NULL_TENSOR, metadata=create_summary_metadata(data))
    return _event(Summary(value=[value]), time.timestamp())


def _text(name: str, text: str, time: datetime) -> Any:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    value = Summary.Value(tag=name, tensor=tensor, metadata=text_metadata(name, ""))
    return _event(Summary(value=[value]), time.timestamp())
