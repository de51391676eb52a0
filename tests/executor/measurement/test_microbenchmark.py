"""The micro-benchmark on two real ranks: every operation, sane figures, within its time; failures are one line."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from executor.engine import RankContext
from executor.errors import RunnerError
from executor.measurement import microbenchmark as microbenchmark_module
from executor.measurement.kernels import KernelCase, group_layouts
from executor.measurement.microbenchmark import LEAST_SAMPLES, MOST_SAMPLES, Stopwatch, _Bench, _free_bytes
from executor.runners.local import LocalRunner
from search_spaces.clusters.microbenchmark import (
    COLLECTIVES,
    GroupShape,
    MicrobenchmarkRequest,
    MicrobenchmarkResult,
    Operation,
)
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain

ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
SECONDS = 3.0


def request(**changes: object) -> MicrobenchmarkRequest:
    fields: dict[str, object] = {"attempt": "bench", "world_size": 2, "seconds": SECONDS, "largest_message_bytes": 2**20}
    return MicrobenchmarkRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runner(forked_ranks: None) -> Iterator[LocalRunner]:
    with LocalRunner(2, device="cpu") as started:
        yield started


@pytest.fixture(scope="module")
def result(runner: LocalRunner, tmp_path_factory: pytest.TempPathFactory) -> MicrobenchmarkResult:
    return runner.measure(request(nvme_path=str(tmp_path_factory.mktemp("fast"))))


@pytest.mark.prove
def test_every_operation_of_a_cpu_is_measured_at_each_precision(result: MicrobenchmarkResult) -> None:
    only_devices = {Operation.HOST_UPDATE, Operation.TO_HOST, Operation.TO_DEVICE}
    assert {row.operation for row in result.rows} == set(Operation) - only_devices
    products = {row.precision for row in result.rows if row.operation is Operation.PRODUCT}
    assert products == {"fp32", "bf16"}
    assert (result.outcome, len(result.hosts), result.context_bytes) == (Outcome.OK, 2, None)


@pytest.mark.prove
def test_figures_are_ordered_and_none_is_faster_than_any_machine(runner: LocalRunner, result: MicrobenchmarkResult) -> None:
    for row in result.rows:
        assert 0 < row.low <= row.seconds <= row.high
        assert LEAST_SAMPLES <= row.samples <= MOST_SAMPLES
        if row.operation is Operation.PRODUCT:
            rows, inner, outer = row.shape
            assert 2 * rows * inner * outer / row.seconds < 1e13
    # Work that grows a hundredfold takes longer, however busy the machine is.
    copies, seconds = seconds_of(result, Operation.COPY), SECONDS
    while len(copies) < 2 and seconds < 100:
        seconds *= 3
        copies = seconds_of(runner.measure(request(seconds=seconds, timeout_seconds=600.0)), Operation.COPY)
    assert copies[max(copies)] > copies[min(copies)]


@pytest.mark.prove
def test_collectives_are_of_both_ranks_and_whole_messages(runner: LocalRunner, result: MicrobenchmarkResult) -> None:
    for row in result.rows:
        both = row.operation in COLLECTIVES
        assert row.group == (GroupShape(ranks=2, in_node=2) if both else GroupShape())
        if both:
            assert row.shape[0] % 8 == 0
            assert row.shape[0] <= 2**20
    # From the smallest on; how many there is time for depends on who else uses the machine.
    sizes, seconds = sizes_of(result, Operation.ALL_REDUCE), SECONDS
    while len(sizes) < 2 and seconds < 100:
        seconds *= 3
        sizes = sizes_of(runner.measure(request(seconds=seconds, timeout_seconds=600.0)), Operation.ALL_REDUCE)
    assert sizes[:2] == [(4096,), (16384,)]


def seconds_of(result: MicrobenchmarkResult, operation: Operation) -> dict[int, float]:
    return {row.shape[0]: row.seconds for row in result.rows if row.operation is operation}


def sizes_of(result: MicrobenchmarkResult, operation: Operation) -> list[tuple[int, ...]]:
    return [row.shape for row in result.rows if row.operation is operation]


def test_its_rows_cross_the_border_as_plain_data(result: MicrobenchmarkResult) -> None:
    assert from_plain(MicrobenchmarkResult, to_plain(result)) == result


@pytest.mark.prove
def test_a_second_run_is_warm_and_as_asked_for(runner: LocalRunner, result: MicrobenchmarkResult) -> None:
    again = runner.measure(request(seconds=2.0, precisions=("fp32",), largest_message_bytes=4096))
    assert again.warm
    assert {row.precision for row in again.rows} == {"fp32"}
    assert {row.shape for row in again.rows if row.operation in COLLECTIVES} == {(4096,)}


def test_a_wrong_number_of_ranks_is_one_line(runner: LocalRunner) -> None:
    with pytest.raises(RunnerError, match="needs 3 ranks, but this runner has 2") as caught:
        runner.measure(request(world_size=3))
    assert "\n" not in str(caught.value)


@pytest.mark.prove
def test_too_slow_is_ended_by_force_and_told(runner: LocalRunner) -> None:
    with pytest.raises(RunnerError, match=r"TIMEOUT: no result within 0\.2 s") as caught:
        runner.measure(request(timeout_seconds=0.2))
    assert "\n" not in str(caught.value)


def test_groups_of_ranks_as_they_lie_on_nodes() -> None:
    assert group_layouts(["a", "a"]) == [(GroupShape(ranks=2, in_node=2), [(0, 1)])]
    assert group_layouts(["a", "b"]) == [(GroupShape(ranks=2, in_node=1), [(0, 1)])]
    assert group_layouts(["a", "a", "b", "b"]) == [
        (GroupShape(ranks=2, in_node=2), [(0, 1), (2, 3)]),
        (GroupShape(ranks=2, in_node=1, sharing=2), [(0, 2), (1, 3)]),
        (GroupShape(ranks=4, in_node=2), [(0, 1, 2, 3)]),
    ]
    assert group_layouts(["a", "b", "b"]) == [(GroupShape(ranks=3, in_node=1), [(0, 1, 2)])]
    assert group_layouts(["a"]) == []


@pytest.fixture
def nap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass on the stopwatch's clock: nobody else's load is in them."""
    now = [0.0]
    monkeypatch.setattr(microbenchmark_module, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_the_stopwatch_tells_the_median_of_what_ran(nap: Callable[[float], None]) -> None:
    calls = []

    def run() -> None:
        calls.append(None)
        nap(0.005 if len(calls) % 7 else 0.05)  # a neighbour now and then

    timing = Stopwatch(ALONE).measure(run, 0.1)
    assert (timing.low, timing.median) == (pytest.approx(0.005), pytest.approx(0.005))
    assert timing.samples == 20


def test_what_would_not_fit_in_time_or_memory_is_left_out(nap: Callable[[float], None]) -> None:
    made = []

    def case(cost: float, memory: float = 0.0, shape: int = 1) -> KernelCase:
        def make():
            made.append(cost)
            return lambda: nap(cost)

        return KernelCase(
            operation=Operation.COPY, precision="fp32", shape=(shape,), cost=cost, memory=memory, make=make
        )  # fmt: skip

    bench = _Bench(ALONE, request(world_size=1), Stopwatch(ALONE), lambda progress: None)
    rows = bench.run([case(0.002), case(0.004), case(10.0)], 0.3, "compute")
    assert made == [0.002, 0.004]
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert bench.run([case(0.001, memory=2 * _free_bytes(ALONE))], 0.3, "compute") == []
