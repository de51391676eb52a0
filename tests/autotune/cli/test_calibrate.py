"""`autotune calibrate`: measured once and reused, told whole, bad input refused before a rank is started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called import Command

from autotune.cli.calibrate import COEFFICIENT_TEXTS
from autotune.prediction.equations.coefficients import names
from autotune.session import calibrate
from executor.errors import RunnerError
from search_spaces.clusters.microbenchmark import (
    SINGLE_RANK,
    GroupShape,
    MeasuredRow,
    MicrobenchmarkRequest,
    MicrobenchmarkResult,
    Operation,
)
from search_spaces.outcome import Outcome

TORCH = calibrate._release(calibrate.importlib.metadata.version("torch"))
PAIR = GroupShape(ranks=2, in_node=2)
SHAPES: tuple[tuple[Operation, tuple[int, ...], GroupShape], ...] = (
    (Operation.PRODUCT, (64, 128, 128), SINGLE_RANK),
    (Operation.PRODUCT, (256, 128, 128), SINGLE_RANK),
    (Operation.PRODUCT, (64, 512, 128), SINGLE_RANK),
    (Operation.LAYER, (1, 128, 128, 4, 344), SINGLE_RANK),
    (Operation.HEAD, (1, 128, 128, 512), SINGLE_RANK),
    (Operation.UPDATE, (2**20,), SINGLE_RANK),
    (Operation.COPY, (2**20,), SINGLE_RANK),
    (Operation.LAUNCH, (64,), SINGLE_RANK),
    (Operation.ALL_REDUCE, (4096,), PAIR),
    (Operation.ALL_REDUCE, (2**22,), PAIR),
    (Operation.SEND, (4096,), PAIR),
)


FILES = ((Operation.FILE_READ, (2**26,), SINGLE_RANK), (Operation.FILE_UPDATE, (2**26,), SINGLE_RANK))


class Ranks:
    """Stands for the ranks: counts how often they are started, and answers the same each time."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.asked: list[MicrobenchmarkRequest] = []
        self.torch = f"{TORCH}+cpu"
        self.fails: str | None = None

    def start(self, *words: Any, ray_address: str | None) -> "Ranks":
        self.started.append(words)
        return self

    def measure(self, request: MicrobenchmarkRequest) -> MicrobenchmarkResult:
        self.asked.append(request)
        if self.fails:
            raise RunnerError(self.fails)
        rows = tuple(
            MeasuredRow(
                operation=operation, precision="fp32", shape=shape, group=group, seconds=0.01, low=0.009, high=0.012, samples=5
            )
            for operation, shape, group in (*SHAPES, *(FILES if request.nvme_path else ()))
        )
        environment = {"torch": self.torch, "backend": "gloo"}
        environment |= {"nvme_path": request.nvme_path} if request.nvme_path else {}
        return MicrobenchmarkResult(attempt="", outcome=Outcome.OK, rows=rows, hosts=("a", "a"), environment=environment)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *words: object) -> None:
        pass


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    stand_in = Ranks()
    monkeypatch.setattr(calibrate, "start_ranks", stand_in.start)
    return stand_in


@pytest.fixture
def document(command: Command) -> Callable[..., dict[str, Any]]:
    def call(*words: object) -> dict[str, Any]:
        answer = command("calibrate", "--ranks", 2, "--json", *words)
        assert (answer.status, answer.err) == (0, "")
        return json.loads(answer.out)

    return call


@pytest.mark.prove
def test_it_is_measured_once_and_then_reused_until_forced(ranks: Ranks, document: Callable[..., dict[str, Any]]) -> None:
    first, second, third = document("--seconds", 5), document(), document("--force", "--runner", "local")
    assert [found["reused"] for found in (first, second, third)] == [False, True, False]
    assert second["id"] == first["id"] != third["id"]
    assert first["fingerprint"] == third["fingerprint"]
    assert ranks.started == [("ray", 2, "cpu"), ("local", 2, "cpu")]
    assert (ranks.asked[0].seconds, ranks.asked[0].timeout_seconds, ranks.asked[0].world_size) == (5.0, 300.0, 2)
    assert document()["id"] == third["id"]


@pytest.mark.prove
def test_other_ranks_and_another_torch_are_measured_anew(
    ranks: Ranks, document: Callable[..., dict[str, Any]], command
) -> None:
    document()
    assert command("calibrate", "--ranks", 1).status == 0
    assert len(ranks.started) == 2
    ranks.torch = "1.0.0"
    document("--force")
    found = document()
    assert (found["reused"], found["reason"]) == (False, f"it was measured with torch 1.0.0 before, and this is {TORCH}")


@pytest.mark.prove
def test_a_folder_that_was_not_measured_is_measured_beside_the_rest(
    ranks: Ranks, document: Callable[..., dict[str, Any]], command: Command, tmp_path: Path
) -> None:
    document()
    found = document("--nvme-path", tmp_path)
    assert (found["reused"], found["reason"]) == (False, f"the files of {tmp_path} were not measured before")
    assert ranks.asked[-1].nvme_path == str(tmp_path)
    bandwidths = found["coefficients"]["file_read_bandwidth"], found["coefficients"]["file_update_bandwidth"]
    assert [each["calibrated"] for each in bandwidths] == [2 * 2**26 / 0.01, 2 * 2 * 2**26 / 0.01]
    assert document("--nvme-path", tmp_path)["reused"]
    told = command("calibrate", "--ranks", 2, "--nvme-path", tmp_path).out
    assert "file read: 6.71 GB/s" in told
    assert "file update: 13.42 GB/s" in told


def test_the_document_has_rows_and_coefficients(ranks: Ranks, document: Callable[..., dict[str, Any]]) -> None:
    found = document()
    assert len(found["rows"]) == len(SHAPES)
    assert found["rows"][0]["shape"] == [64, 128, 128]
    assert set(found["coefficients"]) == {*names("time"), *names("memory"), *names("band"), *names("files")}
    assert found["coefficients"]["update_efficiency"]["calibrated"] != found["coefficients"]["update_efficiency"]["shipped"]
    assert (found["trials"], found["hosts"]) == (0, ["a", "a"])
    assert "micro-benchmark of this cluster" in found["source"]


@pytest.mark.prove
def test_the_tables_tell_everything_whole(ranks: Ranks, command: Command) -> None:
    answer = command("calibrate", "--ranks", 2)
    assert answer.status == 0
    for told in (
        "Matrix products, fp32, GFLOP/s per rank (% of 100)", "128 x 128", "0.2 (0%)", "1 x 128, 128, 4, 344", "9 - 12",
        "layer (samples x tokens, hidden, heads, ffn)", "copy: 0.84 GB/s", "4 MiB", "10  0.42", "update_efficiency",
        "Collectives, 2 ranks of a node: ms and GB/s through a rank's link", "now use calibration",
        "nothing was measured on this hardware before",
    ):  # fmt: skip
        assert told in answer.out, told
    assert "…" not in answer.out
    assert "reused: measured" in command("calibrate", "--ranks", 2).out


def test_every_coefficient_has_words() -> None:
    assert set(COEFFICIENT_TEXTS) == {*names("time"), *names("memory"), *names("band"), *names("files")}


@pytest.mark.prove(every=3)
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--cluster", "no-such"), "cluster preset"),
        (("--cluster", "dgx-h100:2"), "cluster: dgx-h100:2 has 16 GPUs, and this machine has none; use local"),
        (("--cluster", "ray", "--runner", "local"), "runner: local does not support a Ray cluster; use ray"),
        (("--runner", "slurm"), "runner: 'slurm' is not known; use one of ray, local"),
        (("--engine", "warp"), "engine"),
        (("--seconds", "0.5"), "seconds: 0.5 is not between 2 and 3600; give seconds such as 20"),
        (("--seconds", "nan"), "seconds: nan is not between"),
        (("--nvme-path", "/no-such-folder"), "nvme_path: /no-such-folder does not exist; name a folder on a fast local disk"),
        (("--timeout", "10"), "timeout: 10 is not more than the 20 seconds of the measurement"),
        (("--ranks", "0"), "ranks"),
        (("--db", "/proc/none/x.db"), "/proc/none: is not a folder that exists"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_starts_nothing(
    ranks: Ranks, command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr("autotune.ray_cluster.local_gpus", lambda: None)
    answer = command("calibrate", *words)
    assert (answer.status, answer.out) == (2, "")
    assert line in answer.err
    assert answer.err.count("\n") == 1
    assert ranks.started == []


def test_what_fails_on_the_ranks_is_told_and_keeps_nothing(ranks: Ranks, command: Command) -> None:
    ranks.fails = "the micro-benchmark ended TIMEOUT: no result within 300 s"
    answer = command("calibrate", "--ranks", 2)
    assert (answer.status, answer.out) == (1, "")
    assert answer.err.strip().endswith("autotune: the micro-benchmark ended TIMEOUT: no result within 300 s")
    ranks.fails = None
    assert json.loads(command("calibrate", "--ranks", 2, "--json").out)["reused"] is False
