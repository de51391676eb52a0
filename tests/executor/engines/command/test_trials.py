"""Trials of a user's script on two ranks: how each way to fare comes out, and that nothing is left of it."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from executor.engines.command.steps import FEWEST_STEPS
from executor.runners.local import LocalRunner
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, LogLines, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

SCRIPT = str(Path(__file__).with_name("script.py"))
BRIEF = Fidelity(min_steps=5, max_steps=10, max_warmup_steps=6)
Run = Callable[..., TrialResult]


@pytest.fixture
def run(runner: LocalRunner) -> Run:
    def measured(*words: object, command: dict[str, object] | None = None, **fields: object) -> TrialResult:
        model = CommandModel(arguments=("python", SCRIPT, *map(str, words)), **(command or {}))
        return runner.run(request(model, **fields))

    return measured


def request(model: CommandModel, **fields: object) -> TrialRequest:
    given: dict[str, object] = {
        "attempt": "a", "model": model, "config": TrialConfig(micro_batch_size=2), "world_size": 2, "engine": "command",
        "workload": Workload(global_batch_size=8, sequence_length=16), "fidelity": BRIEF, "timeout_seconds": 60.0,
    }  # fmt: skip
    return TrialRequest(**{**given, **fields})


def starting(how: str, folder: Path, report_seconds: float | None = None, **fields: object) -> TrialRequest:
    """A script that writes into the folder which processes it is and starts."""
    own = {"PIDS": [str(folder)]}
    model = CommandModel(arguments=("python", SCRIPT, how), environment_knobs=own, report_seconds=report_seconds)
    return request(model, config=TrialConfig(micro_batch_size=2, script=model.variants[0]), **fields)


def are_gone(folder: Path, count: int) -> bool:
    """Whether so many processes were there, and none is left within seconds."""
    processes = [int(number) for path in folder.iterdir() for number in path.name.split("-")]
    assert len(processes) == count
    until = time.monotonic() + 60.0
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(psutil.pid_exists, processes))


@pytest.mark.prove
def test_steps_are_timed_and_the_script_is_ended(run: Run) -> None:
    result = run("steps")
    assert result.outcome is Outcome.OK, result.traceback or result.message
    assert result.samples_per_second is not None
    assert 0 < result.samples_per_second.mean < 800  # 8 samples in 10 ms, and what a sleep takes longer
    assert 5 <= len(result.step_seconds) <= FEWEST_STEPS
    assert result.losses == (1.0, 0.5, 1 / 3)
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert 5_000_000 < (result.peak_memory_bytes or 0) < 200_000_000  # a Python with nothing but json
    # Of steps so short a busy machine may see no warm-up: ten looks a second find it over.
    assert set(result.phase_seconds) >= {"build", "measure", "close"}
    assert result.phase_seconds["close"] < 60.0
    assert "script.py steps" in result.environment["command"]
    assert result.tflops_per_device is None  # nobody stated the parameters


def test_one_rank_that_reports_is_enough(run: Run) -> None:
    result = run("on_rank_0", command={"parameter_count": 1_000_000})
    assert result.outcome is Outcome.OK
    assert result.tflops_per_device is None  # a sample of a script need not be a sequence


def test_a_script_that_saves_when_it_is_terminated_saves_nothing(run: Run, tmp_path: Path) -> None:
    result = run("saves_when_terminated", tmp_path / "last.pt")
    assert result.outcome is Outcome.OK, result.message
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("way", ["auto", "copy"])
def test_a_trial_in_its_own_folder_leaves_the_users_alone(run: Run, tmp_path: Path, way: str) -> None:
    """A script that would resume from the user's checkpoint and end at once runs once more without it."""
    contents = dict.fromkeys(("snapshot.pt", "state.json"), "of the user")
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    result = run("resumes", command={"folder": str(tmp_path), "trial_folder": way})
    assert result.outcome is Outcome.OK, result.message
    assert "ran without snapshot.pt of its folder, since with them the script ended at once" in result.message
    assert result.environment["written"] == "snapshot.pt, state.json"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == contents


@pytest.mark.parametrize(("reference", "differs"), [((), False), ((0.8,), False), ((2.0,), True)])
def test_a_first_loss_far_from_another_trials_is_named(run: Run, reference: tuple[float, ...], differs: bool) -> None:
    result = run("steps", reference_losses=reference)
    assert result.outcome is Outcome.OK, result.message
    assert ("its first loss is" in result.message) is differs, (result.losses, result.message)


def test_a_folder_that_does_not_exist_is_named(run: Run, tmp_path: Path) -> None:
    result = run("steps", command={"folder": str(tmp_path / "missing")})
    assert result.outcome is Outcome.FAILED
    assert str(tmp_path / "missing") in result.message, result.message
    assert "\n" not in result.message


def test_trials_do_not_meet_in_their_own_folders(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        result = run("resumes", command={"folder": str(tmp_path)})
        assert result.outcome is Outcome.OK, result.message
        assert "ran without" not in result.message
    assert not [*tmp_path.iterdir()]


def test_the_script_is_told_what_its_launcher_would_tell(run: Run, tmp_path: Path) -> None:
    words = ("show", tmp_path / "told", "{micro_batch_size}", "{gradient_accumulation_steps}", "{workers}", "{config}")
    own: dict[str, object] = {
        "launcher": "deepspeed", "folder": str(tmp_path), "trial_folder": "none",
        "script_knobs": {"workers": [0, 2]}, "environment_knobs": {"MY": [5, 6]},
    }  # fmt: skip
    config = TrialConfig(micro_batch_size=2, script="workers=2 MY=6")
    assert run(*words, command=own, config=config, files=(("config.json", "{}"),)).outcome is Outcome.OK
    told = [tmp_path.joinpath(f"told.{rank}").read_text().splitlines() for rank in range(2)]
    assert [lines[:5] for lines in told] == [[str(tmp_path), f"--local_rank={rank}", "2", "2", "2"] for rank in range(2)]
    assert told[0][5].endswith("/config.json")
    variables = [dict(line.split("=", 1) for line in lines[6:]) for lines in told]
    assert [found["RANK"] for found in variables] == [found["LOCAL_RANK"] for found in variables] == ["0", "1"]
    assert variables[0]["MASTER_PORT"] == variables[1]["MASTER_PORT"]
    alike = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "CROSS_SIZE": "1",
        "DS_ACCELERATOR": "cpu",
        "MY": "6",
    }
    assert all(found.items() >= alike.items() for found in variables)


def test_the_log_of_any_rank_is_read_by_a_pattern(run: Run) -> None:
    pattern = r"loss: (?P<loss>[\d.]+) samples_per_second=(?P<samples_per_second>[\d.,]+)"
    result = run("log", command={"pattern": pattern})
    assert result.outcome is Outcome.OK, result.traceback
    assert result.samples_per_second is not None
    assert result.samples_per_second.mean == pytest.approx(1600.0)
    assert result.losses == (2.5, 2.5, 2.5)


def test_the_error_of_the_rank_that_failed_is_told_once_with_its_traceback(run: Run) -> None:
    result = run("crash")
    assert result.outcome is Outcome.FAILED
    assert result.message == "rank 1: the script exited with code 1: RuntimeError: the layers are out of order"
    assert result.traceback is not None
    assert result.traceback.startswith("Traceback (most recent call last):")
    assert "ValueError: invalid literal" in result.traceback
    assert result.traceback.count("RuntimeError: the layers") == 1
    assert run("steps").warm  # the ranks have lost nothing by it


@pytest.mark.prove
def test_a_script_that_ends_without_a_measurement_fails_with_the_remedy(run: Run) -> None:
    result = run("few", 0)
    assert result.outcome is Outcome.FAILED
    assert "exited with code 0 without a measurement" in result.message
    assert "autotune.report(samples=…)" in result.message
    assert "--pattern" in result.message
    assert "too few to time" in run("few", 2).message
    again = run("few", 0, command_has_reported=True)
    assert (again.outcome, again.cause) == (Outcome.FAILED, "not-measured")
    assert "other trials of this command reported steps" in again.message
    assert "{trial_folder}" in again.message
    silent = run("few", 2, command={"pattern": r"rate=(?P<samples_per_second>\d+)"})
    assert "--pattern matches nothing in its output" in silent.message


def test_the_folder_of_a_trial_is_shared_by_its_ranks_and_removed(run: Run) -> None:
    result = run("folder", "{trial_folder}")
    assert result.outcome is Outcome.OK, result.traceback
    folder = Path(result.environment["command"].split()[-1])
    assert folder.name == "run"
    assert not folder.parent.exists()


def test_a_script_that_ends_early_is_measured_as_far_as_it_went(run: Run) -> None:
    result = run("few", 6)
    assert result.outcome is Outcome.OK
    assert result.unstable
    assert "ended before its steps settled" in result.message


@pytest.mark.prove
@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("silent", "autotune.report(samples=…)"),
        ("mute", "autotune.report(samples=…)"),
        ("compiling", "it still compiles extensions (cc1plus): give it time with --report-seconds and --trial-timeout"),
    ],
)
def test_a_silent_script_fails_with_the_remedy(run: Run, how: str, remedy: str) -> None:
    result = run(how, command={"report_seconds": 3.0 if how == "compiling" else 1.0})
    assert result.outcome is Outcome.FAILED
    assert "has reported no steps" in result.message
    assert remedy in result.message


@pytest.mark.prove
@pytest.mark.parametrize("how", sampled(["children", "wait_for_ever"], every=2))
def test_a_script_that_hangs_runs_out_of_time_and_tells_where(runner: LocalRunner, how: str, tmp_path: Path) -> None:
    for attempt in range(3):  # a stall of a second, in which stacks are printed, leaves the rest to the ranks' own limit
        folder = tmp_path / str(attempt)
        folder.mkdir()
        result = runner.run(starting(how, folder, timeout_seconds=10.0, report_seconds=4.0))
        if (result.traceback or "").count("in wait_for_ever") == 2:
            break
    assert result.outcome is Outcome.TIMEOUT
    assert result.traceback is not None
    assert result.traceback.count("in wait_for_ever") == 2  # on both ranks, by Python's fault handler
    assert not re.search("Fatal Python error|Extension modules|thread 0x", result.traceback)
    assert ("after 3 reports" if how == "children" else "no report was received") in result.message
    assert are_gone(folder, 4 if how == "children" else 0)


@pytest.mark.prove
def test_what_asks_for_far_more_than_the_limit_does_not_fit(run: Run) -> None:
    result = run("allocate", 64, memory_limit_bytes=200_000_000)
    assert result.outcome is Outcome.INFEASIBLE
    assert result.message == "MemoryError"


def test_what_holds_more_than_the_limit_does_not_fit(run: Run) -> None:
    result = run("allocate", 0.3, memory_limit_bytes=200_000_000)
    assert result.outcome is Outcome.INFEASIBLE
    assert "rank 0 holds" in result.message
    assert "the limit is 200,000,000" in result.message
    assert (result.peak_memory_bytes or 0) > 200_000_000


def test_a_device_that_is_full_is_read_from_the_output(run: Run) -> None:
    result = run("out_of_memory")
    assert result.outcome is Outcome.INFEASIBLE
    assert result.message.startswith("torch.OutOfMemoryError: CUDA out of memory")


def test_a_loss_that_is_no_number_is_wrong(run: Run) -> None:
    result = run("not_a_number")
    assert result.outcome is Outcome.WRONG
    assert result.message.startswith("loss is nan at report 3")


def test_a_report_that_cannot_be_read_is_told(run: Run) -> None:
    result = run("misused")
    assert result.outcome is Outcome.FAILED
    assert "samples is reported as 'many'" in result.message


@pytest.mark.prove
def test_waiting_for_data_is_a_finding_of_its_own(run: Run) -> None:
    result = run("waits")
    assert result.outcome is Outcome.OK
    # The trial ends with the rank that is timed first; the other's script may not have begun.
    waited = [rank.data_wait_seconds for rank in result.ranks if rank.data_wait_seconds is not None]
    assert waited
    assert min(waited) > 0.009
    assert "waits for data in" in result.message
    assert "num_workers" in result.message
    assert "waits" not in run("steps").message


def test_samples_of_one_rank_are_told_apart_from_a_step(run: Run) -> None:
    result = run("own_samples", "{micro_batch_size}")
    assert result.outcome is Outcome.OK
    assert "reports 4 samples at a time, and the global batch is 8: report those of all ranks" in result.message


def test_the_samples_of_an_unobserved_step_are_named(run: Run) -> None:
    result = run("log", "{micro_batch_size}", command={"pattern": r"loss: (?P<step_seconds>[\d.]+)"})
    assert "a step in the log counts 4 samples; if that is wrong, read them" in result.message
    assert "its work is not checked" in result.message


@pytest.mark.prove
def test_a_port_that_is_taken_in_between_is_chosen_anew(run: Run, tmp_path: Path) -> None:
    assert run("port_taken", tmp_path).outcome is Outcome.OK
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.prove
def test_a_script_that_is_killed_from_outside_is_lost(run: Run) -> None:
    assert run("killed").outcome is Outcome.LOST


def test_a_script_that_cannot_be_started_says_why(runner: LocalRunner) -> None:
    result = runner.run(request(CommandModel(arguments=("/no/such/program",))))
    assert result.outcome is Outcome.FAILED
    assert "/no/such/program cannot be started" in result.message


def test_a_script_that_cannot_win_is_ended(run: Run) -> None:
    slow = run("steps", rate_to_beat=1e9, race_spread=0.05)
    assert slow.outcome is Outcome.PRUNED
    assert "and the best has 1e+09" in slow.message
    assert run("steps", rate_to_beat=1.0, race_spread=0.05).outcome is Outcome.OK


def test_what_a_script_prints_is_told_of_its_rank(runner: LocalRunner) -> None:
    runner.submit(request(CommandModel(arguments=("python", SCRIPT, "crash"))))
    seen: list[object] = []
    while not any(isinstance(event, TrialResult) for event in seen):
        seen += [event for _, event in runner.events(0.5)]
    told = "".join(event.text for event in seen if isinstance(event, LogLines) and event.rank == 1)
    assert "Traceback (most recent call last)" in told
    assert "RuntimeError: the layers are out of order" in told


def test_nothing_that_a_script_started_outlives_its_ranks(runner: LocalRunner, tmp_path: Path) -> None:
    """The last test: it takes the ranks along."""
    handle = runner.submit(starting("children", tmp_path))
    outcome, cancelled = None, False
    while outcome is None:
        for _, event in runner.events(0.5):
            if isinstance(event, TrialResult):
                outcome = event.outcome
        if not cancelled and len([*tmp_path.iterdir()]) == 2:  # both ranks' children are there
            runner.cancel(handle, "a person")
            cancelled = True
    assert outcome is Outcome.CANCELLED
    assert are_gone(tmp_path, 4)
