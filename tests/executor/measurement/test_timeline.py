"""Profiled steps divided by part."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from executor.measurement.meter import trace_steps
from executor.measurement.timeline import PARTS, step_profile
from search_spaces.trial import StepProfile


def event(name: str, start: float, length: float, kind: str = "cpu_op", **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "args": arguments}


def profile_of(folder: Path, *events: dict[str, Any], steps: int = 1) -> StepProfile:
    path = folder / "trace.json"
    whole = event("PyTorch Profiler (0)", 0.0, 1e6, "Trace")
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, whole, *events]}), encoding="utf-8")
    return step_profile(path, steps)


def parts_of(folder: Path, *events: dict[str, Any], steps: int = 1) -> dict[str, float]:
    return profile_of(folder, *events, steps=steps).seconds


def test_moments_on_cpus_belong_to_the_first_part_that_applies(tmp_path: Path) -> None:
    found = parts_of(
        tmp_path,
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100_000, "user_annotation"),
        event("aten::stack", 50_000, 20_000),  # in the loader
        event("AddmmBackward0", 200_000, 700_000),  # of other operators
        event("aten::mm", 200_000, 300_000),
        event("gloo:all_reduce", 400_000, 300_000, "user_annotation"),  # overlapped for 0.1 s
        event("autotune::all_reduce_sum", 600_000, 200_000),  # waits
    )
    assert found == pytest.approx({"data": 0.1, "compute": 0.3, "communication": 0.2, "host": 0.4})


def test_with_a_device_only_its_kernels_compute(tmp_path: Path) -> None:
    found = parts_of(
        tmp_path,
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 300_000, "user_annotation"),
        event("aten::mm", 0, 1_000_000),
        event("gemm", 200_000, 300_000, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400_000, 400_000, "kernel"),
        event("Memcpy HtoD (Pinned -> Device)", 900_000, 100_000, "gpu_memcpy"),
        steps=2,
    )
    assert found == pytest.approx({"data": 0.1, "compute": 0.2, "communication": 0.15, "host": 0.05})


def test_calls_are_counted_without_the_calls_inside_of_them(tmp_path: Path) -> None:
    sizes = {"Input Dims": [[4, 8], [8, 8]]}
    found = profile_of(
        tmp_path,
        event("aten::matmul", 0, 400, **sizes),
        event("aten::mm", 100, 200, **sizes),
        event("aten::matmul", 400, 300, **sizes),
        event("aten::mm", 450, 200, **sizes),
        event("aten::mm", 700, 100, **{"Input Dims": [[2] * 50]}),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1000, 100, "user_annotation"),
        event("aten::stack", 1020, 50),
        event("gloo:all_reduce", 2000, 500, "user_annotation"),
        steps=2,
    ).calls
    (long,) = (name for name in found if name.startswith("compute aten::mm") and "[" not in name)
    assert len(long) < 30
    assert found.pop(long) == pytest.approx((0.5, 100e-6))
    assert {name: (count, round(1e6 * seconds)) for name, (count, seconds) in found.items()} == {
        "compute aten::matmul [[4, 8], [8, 8]]": (1.0, 150),
        "compute aten::mm [[4, 8], [8, 8]]": (1.0, 200),
        "data enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": (0.5, 50),
        "data aten::stack": (0.5, 50),
        "communication gloo:all_reduce": (0.5, 500),
    }


def test_calls_on_a_device_are_its_kernels(tmp_path: Path) -> None:
    found = profile_of(
        tmp_path,
        event("aten::mm", 0, 500, **{"Input Dims": [[4, 8]]}),
        event("gemm", 100, 300, "kernel", grid=[8, 1, 1]),
        event("ncclDevKernel_AllReduce", 200, 300, "kernel", **{"grid": [2, 1, 1], "In msg nelems": 64}),
    ).calls
    assert set(found) == {"compute gemm [8, 1, 1]", "communication ncclDevKernel_AllReduce 64"}


def test_a_real_trace_has_what_its_steps_did(tmp_path: Path) -> None:
    rows = iter(
        DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, collate_fn=lambda rows: (time.sleep(0.02), rows)[1])
    )
    matrix = torch.randn(400, 400)

    def step() -> None:
        next(rows)
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until:
            matrix @ matrix
        time.sleep(0.04)

    trace_steps(step, torch.device("cpu"), tmp_path / "trace.json", 2)
    profile = step_profile(tmp_path / "trace.json", 2)
    found = profile.seconds
    (products, seconds), *_ = (profile.calls[name] for name in profile.calls if name.startswith("compute aten::mm [[400, 400]"))
    assert 0.05 < products * seconds < 0.12
    assert profile.calls["data aten::select [[64, 8], [], []]"][0] == 4.0
    assert set(found) == set(PARTS)
    assert found["data"] >= 0.02
    assert found["host"] >= 0.04
    assert found["compute"] >= 0.05
    assert found["communication"] == 0.0
