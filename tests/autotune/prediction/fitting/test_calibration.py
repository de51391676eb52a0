"""Coefficients from micro-benchmarks: a truth that is known is found again from its own noisy measurements."""

import dataclasses
import itertools
from datetime import UTC, datetime

import numpy as np
import pytest

from autotune.prediction.equations.coefficients import ON_A_PROCESSOR, Coefficients, names
from autotune.prediction.fitting.calibration import coefficients_from_benchmark, link_volume, predicted_rows
from autotune.prediction.planning.calibrated import calibrated, fingerprint
from search_spaces.clusters.microbenchmark import SINGLE_RANK, GroupShape, MeasuredRow, MicrobenchmarkResult, Operation
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.outcome import Outcome
from storage.records import CalibrationRecord
from storage.store import Store

GPUS = resolve_cluster("dgx-h100:2")
INTER = GPUS.inter_node_bandwidth
SHIPPED = Coefficients()
TRUTH = dataclasses.replace(
    SHIPPED, matrix_efficiency=0.7, rows_half=150.0, width_half=600.0, attention_efficiency=0.3, backward_ratio=2.3,
    traffic=2.0, kernel_seconds=5e-4, update_efficiency=0.8, host_update_efficiency=0.2, link_efficiency=0.5, link_seconds=4e-5,
    network_efficiency=0.4, network_seconds=1e-4, half_message=5e6, hop_seconds=1e-3,
)  # fmt: skip
INSIDE = GroupShape(ranks=8, in_node=8)
ACROSS = (GroupShape(ranks=2, in_node=1, sharing=8), GroupShape(ranks=16, in_node=8))
MESSAGES = tuple(4096 * 4**power for power in range(8))


def shapes() -> list[tuple[Operation, tuple[int, ...], GroupShape]]:
    """What a GPU's micro-benchmark measures."""
    found: list[tuple[Operation, tuple[int, ...], GroupShape]] = []
    widths = ((512, 512), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 8192))
    for rows, (inner, outer) in itertools.product((256, 1024, 4096, 16384), widths):
        found += [
            (operation, (rows, inner, outer), SINGLE_RANK) for operation in (Operation.PRODUCT, Operation.PRODUCT_BACKWARD)
        ]
    for shape in ((1, 1024, 16, 64), (4, 2048, 16, 64), (2, 2048, 32, 128)):
        found += [(operation, shape, SINGLE_RANK) for operation in (Operation.ATTENTION, Operation.ATTENTION_BACKWARD)]
    layers = (
        (1, 32, 128, 2, 256), (1, 512, 512, 8, 1376), (1, 2048, 1024, 16, 2816), (4, 2048, 1024, 16, 2816),
        (2, 2048, 4096, 32, 11008),
    )  # fmt: skip
    found += [(Operation.LAYER, shape, SINGLE_RANK) for shape in layers]
    found += [(Operation.HEAD, shape, SINGLE_RANK) for shape in ((1, 2048, 1024, 32000), (2, 2048, 2048, 32000))]
    for operation in (Operation.UPDATE, Operation.HOST_UPDATE):
        found += [(operation, (elements,), SINGLE_RANK) for elements in (2**20, 2**24, 2**27)]
    collectives = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
    for group, operation, size in itertools.product((INSIDE, *ACROSS), collectives, MESSAGES):
        found.append((operation, (size,), group))
    return found + [(Operation.SEND, (size,), INSIDE) for size in MESSAGES]


def measured(truth: Coefficients, noise: float, seed: int = 0) -> tuple[MeasuredRow, ...]:
    """Rows as a cluster with these coefficients would give them, with log-normal noise."""
    draw = np.random.default_rng(seed)
    rows = []
    for operation, shape, group in shapes():
        blank = MeasuredRow(
            operation=operation, precision="bf16" if group == SINGLE_RANK else "fp32", shape=shape, group=group, seconds=1.0,
            low=1.0, high=1.0, samples=9,
        )  # fmt: skip
        seconds = float(predicted_rows([blank], GPUS, "native")(truth)[0]) * float(np.exp(noise * draw.standard_normal()))
        rows.append(dataclasses.replace(blank, seconds=seconds, low=seconds * (1 - noise), high=seconds * (1 + noise)))
    return tuple(rows)


def record(rows: tuple[MeasuredRow, ...], **fields: int) -> CalibrationRecord:
    return CalibrationRecord(
        id="r", created=datetime(2030, 1, 1, tzinfo=UTC), fingerprint="", cluster=GPUS, environment={}, hosts=(), seconds=1.0,
        context_bytes=fields.get("context_bytes"), workspace_bytes=fields.get("workspace_bytes"), rows=rows,
    )  # fmt: skip


TOLD = tuple(name for name in names("time") if getattr(TRUTH, name) != getattr(SHIPPED, name))


def test_the_truth_is_found_again_from_rows_with_noise() -> None:
    found = coefficients_from_benchmark(record(measured(TRUTH, 0.03)), GPUS, "native", SHIPPED)
    assert len(TOLD) == 15
    for name in TOLD:
        # At which size a product is half as fast is told by how the fast ones differ: less sharply than all else.
        bound = 0.2 if name in ("rows_half", "width_half") else 0.1
        if name not in ("network_seconds", "half_message"):
            assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=bound), name
    # Between two nodes a latency and the delay of a message are one number.
    assert delay(found) == pytest.approx(delay(TRUTH), rel=0.1)


def delay(rates: Coefficients) -> float:
    """Seconds of the smallest message between two nodes."""
    return rates.network_seconds * float(np.log2(3)) + rates.half_message / (rates.network_efficiency * INTER)


def test_it_predicts_what_was_not_measured() -> None:
    found = coefficients_from_benchmark(record(measured(TRUTH, 0.03)), GPUS, "native", SHIPPED)
    unseen = [
        MeasuredRow(operation=Operation.LAYER, precision="bf16", shape=shape, seconds=1.0, low=1.0, high=1.0, samples=3)
        for shape in ((1, 4096, 2048, 16, 5632), (8, 1024, 768, 12, 3072), (1, 64, 256, 4, 512))
    ]
    at = predicted_rows(unseen, GPUS, "native")
    assert at(found) == pytest.approx(at(TRUTH), rel=0.08)
    assert np.max(np.abs(at(SHIPPED) / at(TRUTH) - 1)) > 0.2


def test_a_row_that_is_far_off_turns_little() -> None:
    rows = list(measured(TRUTH, 0.03))
    at = next(place for place, row in enumerate(rows) if row.operation is Operation.ALL_REDUCE and row.shape[0] == MESSAGES[-1])
    rows[at] = dataclasses.replace(rows[at], seconds=50 * rows[at].seconds)
    found = coefficients_from_benchmark(record(tuple(rows)), GPUS, "native", SHIPPED)
    assert found.link_efficiency == pytest.approx(TRUTH.link_efficiency, rel=0.15)


def test_what_no_row_tells_of_stays() -> None:
    inside = tuple(row for row in measured(TRUTH, 0.0) if row.group == INSIDE and row.operation is not Operation.SEND)
    found = coefficients_from_benchmark(record(inside), GPUS, "native", SHIPPED)
    moved = {name for name in dataclasses.asdict(found) if getattr(found, name) != getattr(SHIPPED, name)}
    assert moved == {"link_efficiency", "link_seconds", "chunk_seconds"}
    assert coefficients_from_benchmark(record(()), GPUS, "native", SHIPPED) == SHIPPED


def test_rows_of_another_precision_do_not_tell_of_computation() -> None:
    fp32 = tuple(
        dataclasses.replace(row, precision="fp32") for row in measured(TRUTH, 0.0) if row.operation is Operation.PRODUCT
    )
    assert coefficients_from_benchmark(record(fp32), GPUS, "native", SHIPPED) == SHIPPED
    assert coefficients_from_benchmark(record(fp32), GPUS, "native", SHIPPED, "fp32") != SHIPPED


def test_memory_is_counted() -> None:
    gpu = coefficients_from_benchmark(record((), context_bytes=3 * 10**9, workspace_bytes=7 * 10**7), GPUS, "native", SHIPPED)
    assert (gpu.context_bytes, gpu.workspace_bytes, gpu.fragmentation) == (3e9, 7e7, SHIPPED.fragmentation)
    cpu = coefficients_from_benchmark(record(()), local_cluster(2), "native", SHIPPED)
    assert {name: getattr(cpu, name) for name in ON_A_PROCESSOR} == ON_A_PROCESSOR


def test_volumes_are_what_passes_a_link() -> None:
    blank = MeasuredRow(
        operation=Operation.SEND, precision="fp32", shape=(1000,), group=INSIDE, seconds=1.0, low=1.0, high=1.0, samples=3
    )
    found = [
        link_volume(dataclasses.replace(blank, operation=operation))
        for operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.SEND)
    ]
    assert found == [1750, 875, 1000]


def test_fingerprints_tell_hardware_not_names() -> None:
    two = local_cluster(2)
    less = dataclasses.replace(two, name="mine", device=dataclasses.replace(two.device, memory_bytes=10**9))
    assert fingerprint(less) == fingerprint(two)
    assert len({fingerprint(cluster) for cluster in (two, local_cluster(1), GPUS, resolve_cluster("dgx-h100:4"))}) == 4
    assert len(fingerprint(two)) == 16


@pytest.mark.prove
def test_predictions_use_the_newest_of_the_same_hardware(store: Store) -> None:
    assert calibrated(store, GPUS, "native", SHIPPED).rates == SHIPPED
    assert "autotune calibrate" in calibrated(store, GPUS, "native", SHIPPED).source
    for truth in (SHIPPED, TRUTH):
        rows = measured(truth, 0.0)
        saved = store.calibrations.save(
            fingerprint(GPUS), GPUS, MicrobenchmarkResult(attempt="", outcome=Outcome.OK, rows=rows), 1.0
        )
    found = calibrated(store, GPUS, "native", SHIPPED)
    assert found.benchmark == saved
    assert found.rates == coefficients_from_benchmark(record(rows), GPUS, "native", SHIPPED)
    assert found.rates.link_efficiency == pytest.approx(TRUTH.link_efficiency, rel=0.12)
    assert found.source.startswith("a micro-benchmark of this cluster (")
    assert calibrated(store, resolve_cluster("dgx-h100:4"), "native", SHIPPED).benchmark is None
