"""What each tracker has recorded, read by its own library."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Read:
    """A run."""

    config: dict[str, Any] = field(default_factory=dict)
    """As texts, lower-cased: libraries change types."""
    outcome: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    failed: bool = False


@dataclass
class ReadJob:
    """A job: each run of a trial, and the summary's figures and table."""

    runs: list[tuple[int, Read]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    summaries: int = 0
    table: str = ""
    """As text that has every cell."""

    @property
    def numbers(self) -> list[int]:
        return sorted(number for number, _ in self.runs)

    def run(self, number: int) -> Read:
        return dict(self.runs)[number]


def texts(config: Any) -> dict[str, str]:
    """The values as texts that do not depend on what a library makes of their types."""
    return {name: _text(str(value)) for name, value in dict(config).items()}


def _text(value: str) -> str:
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return value.lower()


def of_tensorboard(folder: Path, job: str) -> ReadJob:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    read = ReadJob()
    for path in sorted((folder / "runs" / f"autotune-{job}").iterdir()):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        values = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

        def text(tag: str, events: Any = events) -> str:
            (only,) = events.Tensors(tag)
            return str(make_ndarray(only.tensor_proto)[0].decode())

        if path.name == "summary":
            read.summaries += 1
            read.figures, read.table = {name: value for name, (value,) in values.items()}, text("trials")
            continue
        start, end = (
            HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/session_{part}_info").plugin_data.content)
            for part in ("start", "end")
        )
        hparams = {
            name: getattr(value, str(value.WhichOneof("kind"))) for name, value in start.session_start_info.hparams.items()
        }
        run = Read(
            config=texts(hparams),
            outcome=text("outcome").split()[0],
            failed=end.session_end_info.status == 2,
        )
        _sort(values, run)
        read.runs.append((int(path.name.rpartition("-")[2]), run))
    return read


def _sort(values: dict[str, list[float]], run: Read) -> None:
    for name, row in values.items():
        if name in ("step_seconds", "loss", "gradient_norm") or name.startswith("rank_"):
            run.curves[name] = row
        else:
            (run.figures[name],) = row


def of_mlflow(uri: str, job: str) -> ReadJob:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autotune")
    assert experiment is not None
    read = ReadJob()
    own = ""
    for found in client.search_runs([experiment.experiment_id], f"tags.`autotune.job` = '{job}'"):
        tags, data = found.data.tags, found.data
        if "autotune.trial" not in tags:
            read.summaries += 1
            read.figures, own = dict(data.metrics), found.info.run_id
            read.table = client.load_table(experiment.experiment_id, "summary.json", [own]).to_csv()
            continue
        history = {
            name: [
                metric.value for metric in sorted(client.get_metric_history(found.info.run_id, name), key=lambda one: one.step)
            ]
            for name in data.metrics
        }
        run = Read(config=texts(data.params), outcome=tags["autotune.outcome"], failed=found.info.status == "FAILED")
        _sort(history, run)
        read.runs.append((int(tags["autotune.trial"]), run))
        assert found.info.status != "RUNNING"
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{own}'")
    assert len(children) == len(read.runs)
    return read


def of_wandb(folder: Path, job: str) -> ReadJob:
    """Of the files of offline mode, whose records are messages of wandb's own protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    read = ReadJob()
    for path in sorted(folder.glob(f"wandb/offline-run-*-{job}-*/*.wandb")):
        number = path.stem.rpartition("-")[2]
        run, summary = Read(), dict[str, Any]()
        for content in _records(path.read_bytes()):
            record = Record.FromString(content)
            for item in record.run.config.update if record.HasField("run") else record.config.update:
                run.config |= texts({item.key: json.loads(item.value_json)})
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_") and name not in ("rank", "trials"):
                    run.curves.setdefault(name, []).append(json.loads(item.value_json))
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("exit"):
                run.failed = record.exit.exit_code != 0
        figures = {
            name: value
            for name, value in summary.items()
            if isinstance(value, int | float) and not name.startswith("_") and name not in (*run.curves, "rank")
        }
        if number == "summary":
            read.summaries += 1
            (table,) = path.parent.glob("files/media/table/*.json")
            read.figures, read.table = figures, table.read_text("utf-8")
            continue
        run.outcome, run.figures = summary["outcome"], figures
        read.runs.append((int(number), run))
    return read


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: blocks of 32 KiB, with pieces of checksum, length and type (1: whole, 2:
    first, 3: middle, 4: last)."""
    place, record = 7, b""  # after wandb's own header
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0:
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
