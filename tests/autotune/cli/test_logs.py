"""What trials print: kept, bounded, followed while they run, from a database and from a service."""

import io
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import served
import table
import talking
from called import Command
from ranks import ranks_are_gone
from rich.console import Console

from autotune.cli.backend import JobBackend
from autotune.cli.open_backend import open_backend
from autotune.cli.watch import JobWatch
from autotune.loop.loop import run_job
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from executor.runners.runner import Runner
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.shared_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES, AttemptProgress, LogPart
from search_spaces.trial import LogLines, Progress, TrialResult
from storage.leases import current_owner
from storage.store import Store

pytestmark = pytest.mark.usefixtures("forked_ranks")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks look for what they are to do."""
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="module")
def ranks(stage: Path, forked_ranks: None) -> Iterator[Runner]:
    with talking.ranks(stage) as runner:
        yield runner


@pytest.fixture
def job_id(folder: Path, store: Store) -> str:
    """A job of one trial on two ranks."""
    session = table.session(folder, trials=1, confirm_repeats=0, ranks=2, trial_timeout=120.0)
    return store.jobs.create(request_to_row(session.request)).id


@contextmanager
def running(store: Store, job_id: str, runner: Runner, stage: Path, talk: str) -> Iterator[Callable[[], None]]:
    """The job runs beside the test; what is given lets its trial end."""
    (stage / "talk").write_text(talk)
    (stage / "go").unlink(missing_ok=True)
    session = session_of(store.jobs.get(job_id))
    thread = threading.Thread(target=run_job, args=(session, store, job_id, runner))
    thread.start()
    try:
        yield (stage / "go").touch
    finally:
        (stage / "go").touch()
        thread.join(60)


@pytest.mark.prove
@pytest.mark.parametrize("on_service", [False, True], ids=["database", "service"])
def test_lines_and_progress_are_seen_before_the_trial_ends(
    on_service: bool, folder: Path, store: Store, job_id: str, ranks: Runner, stage: Path
) -> None:
    database = str(folder / "jobs.db")
    with (
        running(store, job_id, ranks, stage, "little") as let_go,
        served.service(database) if on_service else nullcontext() as url,
        open_backend(url, None if on_service else database) as desk,
    ):
        served.until(lambda: store.logs.progress([job_id])[job_id], 180)
        seen = _followed(desk, job_id, let_go)
    text = {rank: "".join(part.text for part in seen if part.rank == rank) for rank in (0, 1)}
    assert text == {0: "rank 0 of 1 begins\nrank 0 was let go\n", 1: "rank 1 of 1 begins\n"}
    assert store.trials.of(job_id)[0].outcome is Outcome.OK


def _followed(desk: JobBackend, job_id: str, let_go: Callable[[], None]) -> list[LogPart]:
    """Follow the trial; it does not end before what it printed, and what it does, was seen."""
    (sign,) = desk.progress(job_id)
    assert (sign.trial, sign.attempt, sign.phase, sign.step, sign.samples_per_second) == (0, 1, "measure", 5, 80.0)
    assert next(sign for sign in desk.live(job_id) if isinstance(sign, AttemptProgress)) == sign
    seen = []
    for part in desk.follow_logs(job_id, 0, 0):
        seen.append(part)
        if "rank 0 of 1 begins" in "".join(part.text for part in seen):
            let_go()
    return seen


@pytest.mark.prove
def test_a_flood_is_kept_at_both_ends(command: Command, store: Store, job_id: str, ranks: Runner, stage: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with running(store, job_id, ranks, stage, "flood") as let_go:
        let_go()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB
    parts = store.logs.of(job_id, 0)
    kept = sum(part.size for part in parts)
    end = parts[-1].start + parts[-1].size
    assert end == talking.FLOOD + len("rank 0 of 1 begins\nrank 1 of 1 begins\nrank 0 was let go\n")
    assert LOG_HEAD_BYTES <= kept <= LOG_HEAD_BYTES + LOG_TAIL_BYTES + 4 * 16_384
    lines = command("logs", job_id, 0).out.splitlines()
    assert sum(int(line.split()[1].replace(",", "")) for line in lines if line.endswith("bytes left out ---")) == end - kept
    assert [line for line in lines if line.startswith("[rank 0]")][-1] == "[rank 0] rank 0 was let go"
    assert command("logs", job_id, 0, "--rank", 0, "--tail", 1).out == "rank 0 was let go\n"


@pytest.mark.nightly
def test_a_killed_and_resumed_job_has_what_both_attempts_printed(
    command: Command, folder: Path, store: Store, job_id: str, ranks: Runner, stage: Path
) -> None:
    (folder / "talk").write_text("little")
    program = [sys.executable, str(ROOT / "tests" / "autotune" / "talking.py"), str(folder)]
    with subprocess.Popen(program, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder) as process:
        served.until(lambda: any("rank 0 of" in part.text for part in store.logs.of(job_id, 0)), 180)
        process.kill()
    assert ranks_are_gone(folder)
    with running(store, job_id, ranks, stage, "little") as let_go:
        let_go()
    assert store.trials.of(job_id)[0].attempts == 2
    assert [sum(part.attempt == number for part in store.logs.of(job_id, 0)) > 0 for number in (1, 2)] == [True, True]
    shown = command("logs", job_id, 0, "--rank", 0)
    assert shown.out.splitlines() == ["rank 0 of 1 begins", "--- attempt 2 ---", "rank 0 of 1 begins", "rank 0 was let go"]
    assert command("logs", job_id, 0, "--rank", 0, "--attempt", 1).out == "rank 0 of 1 begins\n"


@pytest.fixture
def told(store: Store, job_id: str) -> str:
    """A job that is held by nobody any more, whose first trial was attempted twice, the second time without an end."""
    lease = store.jobs.acquire(job_id, current_owner())
    session = session_of(store.jobs.get(job_id))
    trial = store.trials.add(lease, session.baselines[0], Purpose.SEARCH)
    first = store.attempts.start(lease, trial.number).token
    lines = [
        LogLines(attempt=first, rank=0, text="half"),
        LogLines(attempt=first, rank=1, text="10 %\r20 %\r"),
        LogLines(attempt=first, rank=0, text=" a line\r\n\nlast\n"),
        LogLines(attempt=first, rank=1, text="done\n", left_out=1234),
    ]  # fmt: skip
    store.logs.add(lease, lines, [Progress(attempt=first, phase="build", step=0)])
    store.attempts.finish(lease, TrialResult(attempt=first, outcome=Outcome.TIMEOUT), retry=True)
    second = store.attempts.start(lease, trial.number).token
    store.logs.add(lease, [LogLines(attempt=second, rank=1, text="no end")])
    store.jobs.release(lease, JobState.FAILED, "RunnerError", "gone")
    return job_id


def test_lines_are_whole_and_say_whose_they_are(told: str, command: Command) -> None:
    shown = command("logs", told[:-1], 0)
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.splitlines() == [
        "[rank 1] 10 %", "[rank 0] half a line", "[rank 0] ", "[rank 0] last", "[rank 1] 20 %",
        "--- 1,234 bytes left out ---", "[rank 1] done", "--- attempt 2 ---", "[rank 1] no end",
    ]  # fmt: skip
    assert command("logs", told, 0, "--tail", 1).out == "[rank 1] no end\n"
    assert command("logs", told, 0, "--tail", 0).out == ""
    assert command("logs", told, 0, "--rank", 1, "--attempt", 1).out == "10 %\n20 %\ndone\n"


def test_following_what_has_ended_ends_and_says_so(told: str, command: Command, folder: Path) -> None:
    with served.service(str(folder / "jobs.db")) as url:
        for where in ((), ("--url", url)):
            shown = command("logs", told, 0, "--follow", "--tail", 0, *where)
            assert (shown.status, shown.out) == (1, "[rank 1] no end\n")
            assert shown.err == f"job {told}: failed (RunnerError), and trial 0 has no outcome\n"


def test_what_is_not_there_is_one_line(told: str, command: Command, folder: Path) -> None:
    with served.service(str(folder / "jobs.db")) as url:
        for where in ((), ("--url", url)):
            for words, says in (
                (
                    ("logs", told, 7),
                    f"autotune: job {told} has no trial 7; `autotune show {told}` lists the existing",
                ),
                (("logs", "20300101-000000-aaaa", 0), "there is no job"),
                (("logs", told, 0, "--attempt", 9), "autotune: attempt: trial 0 has 2 so far; give 1 to 2\n"),
            ):
                answer = command(*words, *where)
                assert (answer.status, answer.out) == (2, "")
                assert says in answer.err
                assert answer.err.count("\n") == 1
    assert command("logs", told, "one").status == 2
    assert command("logs", told, 0, "--attempt", 2, "--rank", 0).err == "no output of trial 0 is stored\n"


@pytest.mark.prove
@pytest.mark.parametrize("on_service", [False, True], ids=["database", "service"])
def test_show_and_watch_tell_what_runs(on_service: bool, job_id: str, command: Command, folder: Path, store: Store) -> None:
    lease = store.jobs.acquire(job_id, current_owner())
    trial = store.trials.add(lease, session_of(store.jobs.get(job_id)).baselines[0], Purpose.SEARCH)
    token = store.attempts.start(lease, trial.number).token
    store.logs.add(lease, [], [Progress(attempt=token, phase="measure", step=7, samples_per_second=12.5)])
    database = str(folder / "jobs.db")
    with (
        served.service(database) if on_service else nullcontext() as url,
        open_backend(url, None if on_service else database) as desk,
    ):
        assert "measure 7, 12.5/s" in command("show", job_id, *(("--url", url) if url else ())).out
        line = EndingLine(lambda: store.jobs.release(lease, JobState.CANCELLED, "cancelled", ""))
        JobWatch(desk, desk.job(job_id), Console(file=io.StringIO())).follow(line)  # type: ignore[arg-type]
    assert "0 of 1 trials, trial 0: measure 7, 12.5/s" in line.texts


class EndingLine:
    """The line at the bottom of a terminal; ends the job when it has told what runs."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.texts: list[str] = []
        self._end = end

    def update(self, text: str) -> None:
        if "measure" in text and not any("measure" in former for former in self.texts):
            self._end()
        self.texts.append(text)
