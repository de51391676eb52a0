"""The engines against one process: a part of the matrix that `make parity` runs whole (docs/results/parity.md)."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.common.gang import Gang
from benchmarks.correctness.parity import run
from benchmarks.correctness.parity_cases import CAPABILITIES, Case
from benchmarks.correctness.parity_matrix import matrix, some, untested
from benchmarks.correctness.parity_rank import compare
from search_spaces.knob_values import KNOBS
from search_spaces.rules.table import check_config

SAMPLES = [
    pytest.param(2, 409, marks=pytest.mark.prove),
    *(pytest.param(*fine, marks=pytest.mark.nightly) for fine in ((2, 41), (4, 47))),
]
"""Ranks, and which part of the matrix is run: every so many-th case."""


cases = cache(matrix)


@pytest.fixture(scope="module")
def all_cases() -> dict[int, list[Case]]:
    return {ranks: cases(ranks) for ranks in (2, 4, 8)}


@pytest.mark.parametrize(("ranks", "every"), SAMPLES)
def test_losses_norms_and_weights_equal_one_process(
    ranks: int, every: int, record_property: Callable[[str, object], None]
) -> None:
    """Odd strides go through layouts, schedules, stages, checkpointing and settings in turn."""
    across = [case for case in cases(ranks) if case.config.places_experts_apart]
    with Gang(ranks, compare) as gang:
        rows = [*run(gang, list(dict.fromkeys([*some(cases(ranks), every), *across[:: every // 4]])))]
    record_property("parity", len(rows))  # for the page of torch's versions
    assert len(rows) >= 10
    assert [f"{row.case.label()}: {row.error or row.off}" for row in rows if not row.right] == []


@pytest.mark.prove
def test_every_claim_of_the_capability_tables_is_tested(all_cases: dict[int, list[Case]]) -> None:
    assert untested(case for mine in all_cases.values() for case in mine) == []


@pytest.mark.prove
def test_a_claim_without_a_case_is_told() -> None:
    without = [case for case in cases(2) if case.config.pipeline_schedule != "zbv" and case.config.micro_batch_size == 2]
    assert {"native: pipeline_schedule=zbv", "fsdp2: micro_batch_size at another value than {2}"} <= {*untested(without)}


@pytest.mark.prove
def test_each_schedule_meets_each_stage_that_it_may(all_cases: dict[int, list[Case]]) -> None:
    for ranks, mine in all_cases.items():
        schedules = {case.config.pipeline_schedule for case in mine if case.schedule}
        assert schedules == {*KNOBS["pipeline_schedule"].choices}
        for engine in ("native", "fsdp2") if ranks <= 4 else ("native",):
            met = {(case.schedule, case.config.zero_stage) for case in mine if case.engine == engine and case.schedule}
            stages = CAPABILITIES[engine].honoured("zero_stage") or KNOBS["zero_stage"].choices
            assert met == {(schedule, stage) for schedule, _ in met for stage in stages}, (ranks, engine)


@pytest.mark.prove
def test_every_case_is_legal(all_cases: dict[int, list[Case]]) -> None:
    for case in (case for mine in all_cases.values() for case in mine):
        assert check_config(case.config, case.context()) == []


@pytest.mark.nightly
def test_the_command_runs_and_writes_its_table(tmp_path: Path) -> None:
    table = tmp_path / "parity.md"
    command = [
        sys.executable,
        "-m",
        "benchmarks.correctness.parity",
        "--ranks",
        "2",
        "--every",
        "1000",
        "--only",
        "ddp",
        "--markdown",
        str(table),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(r"[1-9]\d* passed, 0 failed, 0 untested", done.stdout.splitlines()[-1])
    assert table.read_text().startswith("# Parity of the engines with one process")


def fail_on_rank_1(rank: int, task: str) -> int:
    if task == "raise" and rank == 1:
        raise ValueError("told to")
    return rank


def test_a_gang_survives_a_task_that_raises() -> None:
    with Gang(2, fail_on_rank_1) as gang:
        with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ValueError: told to"):
            gang.run("raise")
        assert gang.run("go on") == [0, 1]
        assert gang.starts == 2
