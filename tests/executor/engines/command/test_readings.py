"""What is made of reports and logs, of the ends of outputs, and of what ranks tell each other."""

import json
import math
import time
from pathlib import Path

import pytest

from executor.engines.command import readings as module
from executor.engines.command.launchers import RankPlacement, launcher_command, launcher_environment
from executor.engines.command.readings import Batch, Output, Readings, ReportFile
from executor.engines.command.result import read_failure
from executor.engines.command.trial import RankUpdate, ScriptEnd, conclude, devices_of_host
from executor.engines.command.watch import State
from executor.errors import failure_table
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

BATCH = Batch(samples=8, script_samples=4, micro_batch_samples=2, sequence_length=16, world_size=2)
PLACEMENT = RankPlacement(
    rank=3, world_size=4, local_rank=1, local_world_size=2, node=1, nodes=2, address="10.0.0.1", port=2345
)


def test_a_report_tells_the_seconds_of_a_step_from_the_second_on() -> None:
    told = Readings(BATCH)
    assert told.take({"samples": 8, "clock": 1.0, "waited": 9.0}) is None
    step = told.take({"samples": 8, "clock": 1.5, "waited": 0.1})
    assert step is not None
    assert (step.seconds, step.waited) == (0.5, 0.1)
    # A report of two steps is told as one of them.
    both = told.take({"samples": 16, "clock": 2.5, "waited": 0.4})
    assert both is not None
    assert (both.seconds, both.waited) == (0.5, 0.2)
    assert told.take({"loss": 2.0, "clock": 3.0}) is None
    # An evaluation that the script leaves out, and an earlier one.
    assert told.take({"paused": 3.0, "clock": 6.0}) is None
    paused = told.take({"samples": 8, "clock": 6.25})
    assert paused is not None
    assert paused.seconds == pytest.approx(0.75)
    told.count -= 1
    assert (told.count, told.losses) == (3, [2.0])


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ({"samples_per_second": "1,600"}, 0.005),
        ({"step_seconds": "0.25"}, 0.5),
        ({"micro_batch_seconds": "0.25"}, 1.0),
        ({"step_milliseconds": "12.5"}, 0.025),
        ({"steps_per_second": "2"}, 1.0),
        ({"step_seconds": "0.25", "samples": "16"}, 0.125),
        ({"step_seconds": "0.25", "tokens": "32"}, 1.0),
        ({"tokens_per_second": "256"}, 0.5),
        ({"tokens_per_second_per_device": "128"}, 0.5),
    ],
)
def test_a_log_tells_the_seconds_of_a_step_at_once(row: dict[str, str], seconds: float) -> None:
    """The job's step has 8 samples, the script's 4 unless its log says how many."""
    step = Readings(BATCH).take(row)
    assert step is not None
    assert step.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"samples": "x"}, "not a number"),
        ({"samples": 0, "clock": 1.0}, "not above 0"),
        ({"device_bytes": float("inf")}, "not 0 or above"),
        ({"step_seconds": 0.1, "waited": "nan"}, "not 0 or above"),
    ],
)
def test_what_cannot_be_read_is_told(row: dict[str, object], problem: str) -> None:
    told = Readings(BATCH)
    assert told.take(row) is None
    assert problem in told.problem


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    file = ReportFile(path)
    assert list(file.rows()) == []
    path.write_text('{"samples": 1}\nno json\n[1]\n{"samples"')
    assert [row["samples"] for row in file.rows()] == [1]
    with path.open("a") as more:
        more.write(": 2}\n")
    assert [{**row, "clock": 0} for row in file.rows()] == [{"samples": 2, "clock": 0}]


def test_no_pattern_and_no_line_hold_up_the_rank(tmp_path: Path) -> None:
    """Python's engine would search the line for longer than the trial may take."""
    (tmp_path / "output.log").write_text("loss=1 " + "x" * 5000 + "\n" + "1" * 10**6 + "\n")
    output = Output(tmp_path / "output.log", r"(?:(?:.|.)*)*\x01|loss=(?P<loss>\d)(?:(?:.|.)*)*$|(?P<step_seconds>1)")
    began = time.process_time()
    found = output.rows()
    assert time.process_time() - began < 10.0
    assert found[0] == {"loss": "1"}
    assert len(found) == 101  # of a line, the first hundred


def test_a_long_output_is_bounded_and_nothing_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_OUTPUT", 100)
    path = tmp_path / "output.log"
    output = Output(path, r"rate=(?P<samples_per_second>\d+)")
    found = []
    for number in range(50):
        with path.open("a") as more:
            more.write(f"step {number}\nrate={number}\rrate={number}5 samp")
        found += [int(row["samples_per_second"]) for row in output.rows()]
    assert found == [value for number in range(50) for value in (number, int(f"{number}5"))][:-1]
    assert path.stat().st_size < 200
    assert output.length > 1000
    assert output.tail.endswith("rate=495 samp")


MEGATRON = (
    " iteration       10/     100 | consumed samples:          160 | elapsed time per iteration (ms): 250.0 | "
    "learning rate: 1.5E-04 | global batch size:    16 | lm loss: 1.06E+01 | loss scale: 1.0 | grad norm: 2.1 |"
)
TORCHTITAN = (
    "[titan] 2026-11-21 10:00:00,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.5  "
    "\x1b[38;2;180;60;0mmemory:  1.20GiB(1.26%)  \x1b[34mtps: 1,024  \x1b[36mtflops: 0.10"
)


@pytest.mark.parametrize(
    ("line", "pattern", "seconds", "loss"),
    [
        (
            MEGATRON,
            r"elapsed time per iteration \(ms\): (?P<step_milliseconds>[\d.]+).*lm loss: (?P<loss>\S+)",
            0.5, 10.6,
        ),
        (
            "tokens per iteration will be: 64\niter 3: loss 2.5, time 125.00ms, mfu 1.00%",
            r"tokens per iteration will be: (?P<tokens>[\d,]+)|loss (?P<loss>[\d.]+), time (?P<step_milliseconds>[\d.]+)ms",
            0.25, 2.5,
        ),
        (
            TORCHTITAN,
            r"loss:\s+(?P<loss>\S+).*tps: (?P<tokens_per_second_per_device>[\d,]+)",
            0.0625, 7.5,
        ),
    ],
    ids=["megatron", "nanogpt", "torchtitan"],
)  # fmt: skip
def test_logs_of_others_are_read(tmp_path: Path, line: str, pattern: str, seconds: float, loss: float) -> None:
    path = tmp_path / "output.log"
    path.write_text(line + "\n")
    told = Readings(BATCH)
    *_, step = (told.take(row) for row in Output(path, pattern).rows())
    assert step is not None
    assert (step.seconds, told.losses) == (pytest.approx(seconds), [loss])


PROGRESS = (
    "  0%|  | 0/9 [00:00<?]\r 11%|  | 1/9 [00:01<?][rank0]: Traceback (most recent call last):\n[rank0]:   File 'x'\n"
    "[rank0]: AttributeError: no setter\n\n 11%|  | 1/9 [00:01<?]"
)
TORCH_LOG = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     main()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB
[rank1]:[W1121 22:00:00 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called
"""


@pytest.mark.parametrize(
    ("output", "line", "memory", "collective"),
    [
        (TORCH_LOG, "torch.OutOfMemoryError: CUDA out of memory.", True, False),
        ("Traceback (most recent call last):\n  File 'x'\nMemoryError\n", "MemoryError", True, False),
        (
            "Traceback (most recent call last):\n  File 'x'\nRuntimeError: [enforce fail] can't allocate memory: 8 bytes\n",
            "RuntimeError: [enforce", True, False,
        ),
        ("Traceback (most recent call last):\n  File 'x'\nRuntimeError: gloo/x: closed\n", "RuntimeError", False, True),
        (
            PROGRESS,
            "AttributeError: no setter", False, False,
        ),
        ("some words\nbash: train.py: command not found\n\n", "bash: train.py: command not found", False, False),
        ("", "", False, False),
    ],
)  # fmt: skip
def test_the_end_of_an_output_says_why(output: str, line: str, memory: bool, collective: bool) -> None:
    failure = read_failure(output)
    row, _ = failure_table().find(failure.evidence(1, killed_for_memory=False))
    assert (row.line_in(failure.line) or row.line_in(failure.text) or failure.line).startswith(line)
    assert (row.outcome is Outcome.INFEASIBLE, row.consequence) == (memory, collective)


def test_a_memory_error_that_was_survived_is_not_the_cause() -> None:
    survived = "Traceback (most recent call last):\n  File 'x'\nMemoryError\nwent on with a smaller cache\n"
    failure = read_failure(survived + "Traceback (most recent call last):\n  File 'y'\nKeyError: 'labels'\n")
    row, _ = failure_table().find(failure.evidence(1, killed_for_memory=False))
    assert (failure.line, row.name) == ("KeyError: 'labels'", "python-error")
    assert "MemoryError" not in failure.text


def row(
    state: State = State.RUNNING, reports: int = 0, elapsed: float = 1.0, busy: bool = False, observed: float = 0
) -> RankUpdate:
    return RankUpdate(state=state, reports=reports, elapsed=elapsed, busy=busy, phase=0, rate=0, observed=observed)


@pytest.mark.parametrize(
    ("rows", "waited", "end"),
    [
        ([row(), row()], 0.0, None),
        ([row(State.ENOUGH), row()], 0.0, ScriptEnd.MEASURED),
        ([row(State.ENOUGH, observed=30), row(observed=29)], 0.0, ScriptEnd.MEASURED),
        ([row(State.ENOUGH, observed=30), row(observed=2)], 4.0, None),  # they do not train in lockstep
        ([row(State.ENOUGH, observed=30), row(observed=2)], 6.0, ScriptEnd.MEASURED),
        ([row(State.ENOUGH, observed=30), row(State.ENDED, observed=2)], 0.0, ScriptEnd.MEASURED),
        ([row(State.ENOUGH, observed=30), row(observed=math.inf)], 0.0, ScriptEnd.MEASURED),
        ([row(State.ENDED), row()], 0.0, None),
        ([row(State.ENDED), row(State.ENDED)], 0.0, ScriptEnd.MEASURED),
        ([row(State.BROKEN), row()], 0.5, None),
        ([row(State.BROKEN), row()], 1.5, ScriptEnd.FAILED),
        ([row(State.BROKEN), row(State.BROKEN)], 0.0, ScriptEnd.FAILED),
        ([row(State.OVER), row()], 0.0, ScriptEnd.FAILED),
        ([row(elapsed=6.0, busy=True), row()], 0.0, ScriptEnd.SILENT),
        ([row(elapsed=6.0, busy=True), row(reports=1)], 0.0, None),
        ([row(elapsed=6.0), row()], 0.0, None),
        ([row(elapsed=11.0), row()], 0.0, ScriptEnd.HANGING),
    ],
)
def test_ranks_conclude_the_same(rows: list[RankUpdate], waited: float, end: ScriptEnd | None) -> None:
    assert conclude(rows, waited, first_report=5.0, limit=10.0) is end


def test_each_launcher_tells_its_own(tmp_path: Path) -> None:
    config, files = TrialConfig(zero_stage=2, precision="bf16"), {"config": tmp_path / "config.json"}

    def told(launcher: str, plugin: str = "") -> dict[str, str]:
        command = CommandModel(arguments=("t",), launcher=launcher, plugin=plugin)
        return launcher_environment(command, PLACEMENT, config, 4, files, on_cpu=True)

    torchrun = told("torchrun")
    assert torchrun.items() >= {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_PORT": "2345"}.items()
    assert torchrun["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    wanted = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_CPU": "true",
    }
    assert told("accelerate").items() >= wanted.items()
    file = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(files["config"])}
    assert told("accelerate", "deepspeed").items() >= (wanted | file).items()
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert told("accelerate", "fsdp").items() >= (wanted | sharded).items()
    words = ["python", "-u", "train.py", "--lr", "1"]
    assert launcher_command("torchrun", words, PLACEMENT) == words
    assert launcher_command("deepspeed", words, PLACEMENT) == ["python", "-u", "train.py", "--local_rank=1", "--lr", "1"]
    assert launcher_command("deepspeed", ["python", "-m", "my.train"], PLACEMENT) == [
        "python",
        "-m",
        "my.train",
        "--local_rank=1",
    ]
    assert launcher_command("deepspeed", ["train.py", "-m", "x.py"], PLACEMENT) == ["train.py", "--local_rank=1", "-m", "x.py"]


def test_a_host_whose_ranks_see_a_device_each_has_them_all() -> None:
    assert devices_of_host(["2", "3"]) == "2,3"
    assert devices_of_host(["0,1", "0,1"]) is None
    assert devices_of_host([None, None]) is None


def test_a_report_is_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import autotune

    class Scalar:
        def item(self) -> float:
            return 0.5

    autotune.report(samples=8)  # nobody asks
    monkeypatch.setenv("AUTOTUNE_REPORT", str(tmp_path / "report"))
    loader = autotune.batches([1, 2])
    assert (len(loader), list(loader), loader.index(2)) == (2, [1, 2], 1)
    autotune.report(loss=Scalar())
    autotune.report(samples=8)
    rows = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert rows[0]["loss"] == 0.5
    assert 0 < rows[0]["waited"] < 1
    assert (rows[1]["samples"], rows[1]["waited"]) == (8, 0.0)
    assert rows[1]["clock"] >= rows[0]["clock"]
