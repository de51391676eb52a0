"""Measurements as plain data: what is read is what was written, and damaged data is refused in one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from known import measured, run_job
from measurements import row, write_table

from autotune.errors import KnowledgeError
from autotune.knowledge.content import content_of, read_content
from autotune.knowledge.measurement import (
    Measurement,
    TrialMeasurement,
    job_measurements,
    local_measurements,
    measurements_of_rows,
)
from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from autotune.knowledge.table import read_table
from storage.store import Store


def rows(folder: Path, **cells: Any) -> list[Measurement]:
    """Measurements of a small table."""
    written = [
        row("a", samples_per_s=80.0, peak_mem_gb=20.5, **cells),
        row("b", micro_batch=2, samples_per_s=95.0, notes="kernel=flash v2; grad_acc=4", **cells),
        row("c", micro_batch=8, outcome="oom", oom="true", **cells),
    ]
    return list(measurements_of_rows(read_table(write_table(folder / "table.csv", written)).rows).measurements)


def sent(measurements: list[Measurement]) -> Any:
    """The content as a service receives it."""
    return json.loads(json.dumps(content_of(measurements)))


def figures(measurement: Measurement) -> tuple[float, float]:
    measured = measurement.measured
    if isinstance(measured, TrialMeasurement):
        return measured.samples_per_second or 0.0, measured.peak_memory_bytes or 0.0
    return step_seconds(measured) or 0.0, peak_bytes(measured) or 0.0


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    everything = [*rows(tmp_path, framework="DeepSpeed 0.15"), *measured("trials", 5)]
    content = sent(everything)
    assert sent([*reversed(everything), *everything]) == content
    found = read_content(content)
    assert sent(list(found)) == content
    assert len(found) == len(everything) == 8
    assert len({each.source for each in found}) == 2
    for one, other in zip(sorted(everything, key=figures), sorted(found, key=figures), strict=True):
        assert figures(other) == pytest.approx(figures(one), rel=1e-5)
        if isinstance(one.measured, TableRow):
            for name in ("notes", "framework", "outcome", "gpu_type"):
                assert getattr(other.measured, name) == getattr(one.measured, name)
        else:
            assert isinstance(other.measured, TrialMeasurement) and other.measured.setting.key == one.measured.setting.key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"samples_per_second": -2.0},
            r"knowledge.measurements\[0\].samples_per_second: -2.0 is not a positive number; send",
        ),
        ({"samples_per_second": True}, "samples_per_second: True is not a positive number"),
        ({"peak_memory_bytes": "much"}, "peak_memory_bytes: 'much' is not a positive number"),
        ({"repeats": 0}, "repeats: 0 is not a positive whole number"),
        ({"outcome": "oom"}, "outcome: 'oom' is neither ok with a rate nor oom without"),
        ({"setting": 4}, "setting: 4 is not the place of a setting"),
        ({"config": {"tensor_parallel_size": 3}}, "does not divide 8 devices and a batch of 32"),
        ({"config": {"micro_batch_size": 64}}, "does not divide 8 devices and a batch of 32"),
        ({"config": {"zero_stage": "many"}}, "config: "),
        ({"source": ""}, "source: '' is not the name of a source"),
        ({"host": "node7"}, "host: is unknown or missing"),
    ],
)
def test_damaged_measurements(change: dict[str, Any], says: str) -> None:
    content = sent(measured("trials", 1))
    content["measurements"][0] |= change
    with pytest.raises(KnowledgeError, match=says) as caught:
        read_content(content)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("model", "hidden_size", "wide", r"settings\[0\]"),
        ("model", "num_layers", -1, r"settings\[0\]: cannot be read"),
        ("model", "rope_theta", None, r"settings\[0\].model.rope_theta: has a value of another type"),
        ("cluster", "nodes", 1.5, r"settings\[0\].cluster.nodes: has a value of another type"),
        ("cluster", "device", {}, r"settings\[0\]: cannot be read"),
    ],
)
def test_damaged_settings(part: str, name: str, value: Any, says: str) -> None:
    content = sent(measured("trials", 1))
    content["settings"][0][part][name] = value
    with pytest.raises(KnowledgeError, match=says):
        read_content(content)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("samples_per_s", -80, "columns: samples_per_s '-80' is not positive"),
        ("dp", 3, "columns: tp 1 x pp 1 x dp 3 x cp 1 is 3, not the 8 devices"),
        ("row_id", "mine", "columns.row_id: is not a column that predictions read"),
        ("notes", "x" * 3000, "columns.notes: is not a column that predictions read, or not its value"),
    ],
)
def test_damaged_rows(tmp_path: Path, column: str, value: Any, says: str) -> None:
    content = sent(rows(tmp_path))
    content["measurements"][0]["columns"][column] = value
    with pytest.raises(KnowledgeError, match=says):
        read_content(content)


def test_rows_from_which_nothing_can_be_learned_are_left_out(tmp_path: Path) -> None:
    written = [
        row("a", samples_per_s=80.0, inter_bw="a network that is not known"),
        row("b", samples_per_s=80.0, notes="x" * 3000),
        row("c", samples_per_s=80.0, gpu_type="Cray-1"),
        row("d", outcome="ok"),
    ]
    found = measurements_of_rows(read_table(write_table(tmp_path / "table.csv", written)).rows)
    assert found.left_out == {
        "a cell has more than 2,000 characters": 1, "device 'Cray-1' is not known": 1, "nothing was measured": 1,
    }  # fmt: skip
    (kept,) = read_content(sent(list(found.measurements)))
    assert isinstance(kept.measured, TableRow) and kept.measured.inter_bw is None  # which counts as the device's usual network


def test_a_job_has_a_measurement_for_each_configuration(store: Store) -> None:
    job = run_job(store, measured("x", 3))
    found = job_measurements(store, job)
    assert (len(found.measurements), found.left_out) == (3, {})
    rates = [each.measured.samples_per_second for each in found.measurements if isinstance(each.measured, TrialMeasurement)]
    assert [rate is None for rate in rates] == [False, False, True]
    assert {each.source for each in found.measurements} == {each.source for each in local_measurements(store)}


def test_trials_with_environment_variables_are_left_out(store: Store) -> None:
    first, *others = measured("x", 3)
    assert isinstance(first.measured, TrialMeasurement)
    config = first.measured.config.replace({"environment": "MALLOC_ARENA_MAX=1"})
    changed = dataclasses.replace(first, measured=dataclasses.replace(first.measured, config=config))
    found = job_measurements(store, run_job(store, [changed, *others]))
    assert len(found.measurements) == 2
    assert found.left_out == {"it ran with environment variables, whose effect is not predicted": 1}
