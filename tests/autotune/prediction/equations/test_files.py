"""Optimizer state in files: less on the host, and a step at the pace of the file system."""

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import StepPrediction, predict
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.fitting.features import config_features
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.states import BUFFERS, CHUNK_ELEMENTS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from storage.records import CalibrationRecord

CLUSTER = resolve_cluster("dgx-h100")
MODEL = resolve_model("llama-3-8b")
WORKLOAD = Workload(global_batch_size=64, sequence_length=1024, nvme_path="/fast")
PLACES = ("none", "cpu", "nvme")


def predicted(rates: Coefficients, **knobs: object) -> StepPrediction:
    base = TrialConfig(zero_stage=2, precision="bf16").replace(knobs)  # type: ignore[arg-type]
    configs = [base.replace({"offload_optimizer": place}) for place in PLACES]
    return predict(cases_of(MODEL, CLUSTER, WORKLOAD, configs, "native"), rates)


def test_the_device_holds_as_much_as_with_host_memory_and_the_host_the_buffers_alone() -> None:
    memory = predicted(Coefficients()).memory
    none, cpu, nvme = memory.by_tag["optimizer_state"]
    assert none > cpu == nvme == 0
    assert memory.host[1] == pytest.approx(12 * MODEL.parameter_count / 8, rel=0.01)
    assert memory.host[2] == BUFFERS * CHUNK_ELEMENTS * 12


def test_a_step_takes_what_its_bytes_take_of_the_ranks_share_of_the_file_system() -> None:
    rates = dataclasses.replace(Coefficients(), file_update_bandwidth=4e9)
    slower = dataclasses.replace(rates, file_update_bandwidth=2e9)
    seconds, longer = predicted(rates).seconds, predicted(slower).seconds
    moved = 2 * 12 * MODEL.parameter_count
    assert longer[2] - seconds[2] == pytest.approx(moved / 2e9 - moved / 4e9, rel=0.01)
    assert np.array_equal(longer[:2], seconds[:2])


def test_files_faster_than_the_update_cost_nothing_more() -> None:
    _, cpu, nvme = predicted(dataclasses.replace(Coefficients(), file_update_bandwidth=1e15)).seconds
    assert nvme == cpu


def test_a_calibration_tells_what_the_ranks_of_a_node_move_together() -> None:
    def row(operation: Operation, size: int, seconds: float) -> MeasuredRow:
        return MeasuredRow(
            operation=operation, precision="fp32", shape=(size,), seconds=seconds, low=seconds, high=seconds, samples=5
        )

    rows = (
        row(Operation.FILE_READ, 2**26, 0.001),
        row(Operation.FILE_READ, 2**28, 0.25),
        row(Operation.FILE_UPDATE, 2**28, 0.5),
    )
    record = CalibrationRecord(
        id="c", fingerprint="f", created=datetime(2026, 1, 1, tzinfo=UTC), cluster=CLUSTER, rows=rows, hosts=("a",) * 8,
        context_bytes=None, workspace_bytes=None, environment={}, seconds=1.0,
    )  # fmt: skip
    found = coefficients_from_benchmark(record, CLUSTER, "native", Coefficients())
    assert found.file_read_bandwidth == 8 * 2**28 / 0.25
    assert found.file_update_bandwidth == 8 * 2 * 2**28 / 0.5


def test_parameters_in_files_wait_for_the_file_system_where_it_is_slower_than_computation() -> None:
    cluster, rates = CLUSTER, dataclasses.replace(Coefficients(), file_read_bandwidth=1e9)

    def step(place: str, known: Coefficients) -> tuple[float, float]:
        config = TrialConfig(zero_stage=3, precision="bf16", offload_param=place, micro_batch_size=8)
        found = predict(cases_of(MODEL, cluster, WORKLOAD, [config], "native"), known)
        return float(found.seconds[0]), float(found.memory.host[0])

    (cpu, host), (files, buffers) = step("cpu", rates), step("nvme", rates)
    fast, _ = step("nvme", dataclasses.replace(rates, file_read_bandwidth=1e15, file_update_bandwidth=1e15))
    assert fast == pytest.approx(cpu, rel=1e-3)
    moved = 2 * MODEL.parameter_count * (2 / rates.file_read_bandwidth + 1 / rates.file_update_bandwidth)
    assert 0.9 * moved < files - cpu <= moved
    assert host == pytest.approx(2 * MODEL.parameter_count / 8, rel=0.01)
    assert buffers < host / 2


def test_a_search_tells_files_from_host_memory() -> None:
    configs = [TrialConfig(zero_stage=3, offload_optimizer=place) for place in PLACES]
    described = config_features(cases_of(MODEL, CLUSTER, WORKLOAD, configs, "native"), configs)
    assert len({tuple(row) for row in described}) == 3
