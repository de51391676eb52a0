"""The commands about jobs, on a service and on a database."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import served
import table
from called import Answer, Command

from autotune.loop.listener import StopSignal
from autotune.loop.worker import Worker
from executor.runners.replay import ReplayRunner
from executor.runners.runner import Event, Handle, Runner
from search_spaces.outcome import JobState, Outcome
from search_spaces.quantities import ratio_text
from storage.leases import current_owner
from storage.store import Store, open_store
from tests.ports import free_port

SUBMIT = (
    "submit",
    "config.json",
    "--ranks",
    2,
    "--trials",
    3,
    "--global-batch-size",
    8,
    "--sequence-length",
    64,
    "--confirm-repeats",
    0,
)


@pytest.fixture
def kept(folder: Path) -> Iterator[Store]:
    """The store of the database that the commands use, or that the service they use is on."""
    with open_store(str(folder / "jobs.db")) as store:
        yield store


@pytest.fixture(params=["database", "service"])
def place(request: pytest.FixtureRequest, folder: Path, kept: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the commands find jobs."""
    if request.param == "database":
        yield "database"
        return
    with served.service(str(folder / "jobs.db")) as url:
        monkeypatch.setenv("AUTOTUNE_URL", url)
        monkeypatch.setenv("AUTOTUNE_DB", str(folder / "other.db"))
        yield "service"
    assert not (folder / "other.db").exists()


class HeldRunner(ReplayRunner):
    """Answers two trials from the table, and the others when it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        super().__init__(table.measured)
        self._let_go, self._answered = let_go, 0

    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        if self._answered >= 2 and not self._let_go.wait(timeout):
            return []
        events = super().events(timeout)
        self._answered += len(events)
        return events


@contextmanager
def working(store: Store, make_runner: Callable[[], Runner] = table.runner) -> Iterator[None]:
    """A worker in a thread, which answers trials from a table."""
    stop = StopSignal()
    worker = Worker(store, lambda _session: make_runner(), poll_seconds=0.02)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.request()
        stop.request()
        thread.join(20)


def good(answer: Answer) -> Answer:
    assert answer.status == 0, answer.err
    return answer


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_from_submission_to_export(command: Command, folder: Path, kept: Store) -> None:
    submitted = good(command(*SUBMIT, "--priority", 5, "--pin", "zero_stage=0,1"))
    (job,) = submitted.out.split()
    assert submitted.err == f"job {job}: queued, waits for a worker\n"
    (listed,) = json.loads(good(command("jobs", "--json")).out)
    assert (listed["id"], listed["state"], listed["priority"], listed["trials"]) == (job, "QUEUED", 5, 3)
    with working(kept):
        watched = good(command("watch", job[:-1]))
    lines = watched.err.splitlines()
    assert lines[0].startswith(f"job {job}: ")
    assert " on local with 2 ranks, 3 trials by guided, " in lines[0]
    assert lines[1] == "running"
    assert [line.split(":")[0] for line in lines[2:5]] == ["trial 0", "trial 1", "trial 2"]
    assert "zero_stage=0 micro_batch_size=1" in lines[2]
    assert lines[-1] == "succeeded: 3 of 3 trials are spent"
    assert "Best configuration of 3 trials" in watched.out
    shown = good(command("show")).out
    assert f"job {job}: succeeded (BUDGET)" in shown
    assert re.search(r"★ \d", shown)
    document = json.loads(good(command("show", job, "--json")).out)
    assert [trial["number"] for trial in document["trials"]] == [0, 1, 2]
    best = json.loads(good(command("export")).out)
    assert document["best_config"]["best"] == best["best"]
    good(command("export", job[:-1], "--format", "deepspeed", "--out", "ds.json"))
    assert json.loads((folder / "ds.json").read_text())["zero_optimization"]["stage"] == best["best"]["config"]["zero_stage"]
    assert good(command("watch", job)).err.splitlines()[-1] == lines[-1], "a job that has ended is told too"


@pytest.mark.usefixtures("place", "kept")
def test_what_nobody_stated_is_printed_with_a_job(command: Command) -> None:
    words = [*SUBMIT]
    at = words.index("--sequence-length")
    submitted = good(command(*words[:at], *words[at + 2 :]))
    block = ["assumed, because it was not stated:", "  sequence_length=128 (--sequence-length)"]
    assert submitted.err.splitlines()[:2] == block
    shown = [line[2:] for line in good(command("show")).out.splitlines()]
    assert shown[shown.index(block[0]) :][:2] == block
    (assumed,) = json.loads(good(command("show", "--json")).out)["job"]["assumed"]
    assert (assumed["name"], assumed["value"]) == ("sequence_length", 128)


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_failures_are_told_with_what_to_do_about_them(command: Command, folder: Path, kept: Store) -> None:
    row = "[licence]\noutput = ['no licence left']\noutcome = 'LOST'\nremedy = 'ask for more licences'\n"
    (folder / "mine.toml").write_text(row)
    (job,) = good(command(*SUBMIT, "--failures", "mine.toml")).out.split()
    lost = dataclasses.replace(table.ended(Outcome.LOST, "rank 0 exited with code 1"), cause="licence", node="n1")
    answers = [table.ok(100.0), lost]
    with working(kept, lambda: table.runner(lambda config: answers.pop(0) if answers else table.measured(config))):
        good(command("watch", job))
    assert "  licence (trial 1): ask for more licences\n" in good(command("show", job)).out
    (trial,) = [trial for trial in json.loads(good(command("show", job, "--json")).out)["trials"] if trial["number"] == 1]
    assert (trial["outcome"], trial["result"]["cause"], trial["result"]["node"]) == ("LOST", "licence", "n1")


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_steering(command: Command) -> None:
    (job,) = good(command(*SUBMIT)).out.split()
    assert good(command("pause", job)).err == f"job {job}: paused (paused)\n"
    assert good(command("extend", job, "--trials", 9, "--max-seconds", 90)).err == (
        f"job {job}: paused (paused); its budget is 9 trials, 90 s\n"
    )
    assert good(command("resume", job[:-1])).err.startswith(f"job {job}: queued, waits for a worker\n")
    assert json.loads(good(command("stop", job, "--json")).out)["reason"] == "STOPPED"
    (clone,) = good(command("clone", job)).out.split()
    assert good(command("cancel", clone)).err == f"job {clone}: cancelled (cancelled)\n"
    table = good(command("jobs", "--state", "cancelled", "--state", "paused")).out
    assert table.splitlines()[1].split()[:2] == [clone, "cancelled"]
    assert "  0/9" in table.splitlines()[1]
    assert job not in table
    assert job not in good(command("jobs", "--limit", 1)).out
    assert [one["id"] for one in json.loads(good(command("jobs", "--text", f"STOPPED {job[4:]}", "--json")).out)] == [job]
    watched = command("watch", clone)
    assert (watched.status, watched.out) == (1, "")
    assert watched.err.splitlines()[-1] == "cancelled"


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_a_file_gives_the_options(command: Command, folder: Path, kept: Store) -> None:
    (folder / "job.toml").write_text('model = "config.json"\ntrials = 9\nsequence-length = 32\n[pins]\nzero_stage = [1, 2]\n')
    (folder / "baseline.json").write_text('{"zero_stage": 2}')
    good(command("submit", "--config", "job.toml", "--trials", 4, "--baseline", "baseline.json", "--memory-limit", "2GB"))
    request = kept.jobs.get().request
    assert (request["trials"], request["sequence_length"], request["memory_limit"]) == (4, 32, 2 * 10**9)
    assert request["resolved_domains"]["zero_stage"] == [1, 2]
    assert request["baseline"] == {"zero_stage": 2}


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_nothing_may_win(command: Command, kept: Store) -> None:
    (job,) = good(command(*SUBMIT)).out.split()
    answer = command("export", job)
    assert (answer.status, answer.out) == (1, "")
    assert "has no configuration that may win; raise the memory limit" in answer.err
    assert json.loads(good(command("show", "--json")).out)["best_config"] is None


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_a_job_with_nothing_feasible(command: Command, kept: Store) -> None:
    good(command(*SUBMIT))
    lease = kept.jobs.acquire(kept.jobs.get().id, current_owner())
    kept.jobs.release(lease, JobState.SUCCEEDED, "NOTHING_FEASIBLE", "no configuration fits after 3 of 3 trials")
    watched = command("watch")
    assert watched.status == 3
    assert watched.err.splitlines()[-1] == "nothing fits: no configuration fits after 3 of 3 trials"
    for text in (command("show").out, command("jobs").out, command("report", "--format", "md").out):
        assert "nothing fits" in text and "succeeded" not in text.lower()


BAD: dict[str, tuple[str, ...]] = {
    "submit": ("model: is missing; give a preset",),
    "submit llama-9b": ("llama-9b: no model preset has this name; did you mean",),
    "submit none.json": ("none.json", "; give ", "config.json"),
    "submit llama-tiny --trials 0": ("trials: ", "1"),
    "submit llama-tiny --strategy genetic": ("strategy: 'genetic' is not known; use one of guided",),
    "submit llama-tiny --pin zero_stage=7": ("zero_stage: 7", "give 0, 1, 2 or 3"),
    "submit llama-tiny --priority 101": ("priority: '101' is not at most 100", "see `autotune submit --help`"),
    "submit llama-tiny --config none.toml": ("config: none.toml cannot be read", "give the path"),
    "submit llama-tiny --watch --json": ("json: prints one document, but --watch prints events; leave one",),
    "jobs --state asleep": ("state: 'asleep' is not a state of a job; use some of queued",),
    "jobs --limit 0": ("limit: '0' is not at least 1", "see `autotune jobs --help`"),
    "jobs --url http://127.0.0.1:1 --db x": ("url: and --db are both given; give",),
    "jobs --url 127.0.0.1": ("url: '127.0.0.1' is no address of a service; give one such as",),
    "jobs --db none/jobs.db": ("none: is not a folder that exists; make it",),
    "watch": ("there is no job yet", "; "),
    "show nobody": ("there is no job 'nobody'", "; "),
    "export nobody": ("there is no job 'nobody'", "; "),
    "pause": ("missing argument 'JOB'", "see `autotune pause --help`"),
    "pause nobody": ("there is no job 'nobody'", "; "),
    "cancel 20300101-000000-aaaa": ("there is no job '20300101-000000-aaaa'", "; "),
    "clone nobody": ("there is no job 'nobody'", "; "),
    "extend nobody": ("trials: and --max-seconds are missing; give one of them",),
    "extend nobody --max-seconds 0": ("max_seconds: 0.0 is not a positive number of seconds; give",),
    "extend nobody --trials 0": ("trials: '0' is not at least 1", "see `autotune extend --help`"),
}


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_bad_input(command: Command, kept: Store) -> None:
    """One line with field and remedy, and nothing was opened; in one test, since each start of a service takes a second."""
    for words, says in BAD.items():
        answer = command(*words.split())
        assert (answer.status, answer.err.count("\n")) == (2, 1), answer.err
        assert answer.out == "" or "--json" in words.split()
        assert answer.err.startswith("autotune: ")
        for part in says:
            assert part in answer.err
    assert kept.jobs.newest() == []


@pytest.mark.prove
def test_a_service_that_does_not_answer(command: Command) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for words in (("jobs",), ("watch",), ("submit", "llama-tiny")):
        answer = command(*words, "--url", url)
        assert (answer.status, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert f"autotune: url: {url} gives no answer (" in answer.err
        assert "; start `autotune serve`, or check AUTOTUNE_URL or --url" in answer.err


def test_keys(command: Command, folder: Path, kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader = kept.keys.create("anna", {"read"})
    _, writer = kept.keys.create("anna", {"read", "submit"})
    _, other = kept.keys.create("ben", {"read", "submit"})
    with served.service(str(folder / "jobs.db"), require_keys=True) as url:
        monkeypatch.setenv("AUTOTUNE_URL", url)
        answer = command("jobs")
        assert (answer.status, answer.out) == (2, "")
        assert answer.err.startswith(f"autotune: api_key: {url} asks for an API key; set AUTOTUNE_API_KEY, or make one with")
        monkeypatch.setenv("AUTOTUNE_API_KEY", reader[:-1])
        answer = command("jobs")
        assert answer.err.startswith(f"autotune: api_key: {url} does not take it (unknown, revoked or expired); make one")
        monkeypatch.setenv("AUTOTUNE_API_KEY", reader)
        assert good(command("jobs", "--json")).out == "[]\n"
        answer = command(*SUBMIT)
        assert (answer.status, answer.out) == (2, "")
        assert answer.err == "autotune: Authorization: lacks the scope submit; use a key that has it, or ask for the role\n"
        monkeypatch.setenv("AUTOTUNE_API_KEY", writer)
        (job,) = good(command(*SUBMIT)).out.split()
        monkeypatch.setenv("AUTOTUNE_API_KEY", other)
        answer = command("cancel", job)
        assert answer.status == 2
        assert f"there is no job '{job}'" in answer.err


INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from autotune.cli import main; main()"
"""As on a terminal: where these tests are run as a job in the background, what they start ignores Ctrl-C from birth."""


@pytest.mark.usefixtures("place")
@pytest.mark.nightly
def test_ctrl_c_detaches(folder: Path, command: Command, kept: Store, place: str) -> None:
    (job,) = good(command(*SUBMIT, "--trials", 9)).out.split()
    named = ("--db", "jobs.db") if place == "database" else ("--url", os.environ["AUTOTUNE_URL"])
    let_go = threading.Event()
    with working(kept, lambda: HeldRunner(let_go)):  # however slow this machine is, the job has not ended when it is left
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "watch", job, *named],
            env={**os.environ, "PYTHONPATH": str(served.ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                assert process.stderr is not None
                seen = ""
                while "trial 1: OK" not in seen:
                    line = process.stderr.readline()
                    assert line, seen
                    seen += line
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=120)
            finally:
                process.kill()  # leaving the block waits for its end
        assert (process.returncode, out) == (130, "")
        assert err.splitlines()[-2:] == [
            f"detached; job {job} continues; watch it again with:", f"  autotune watch {job} {' '.join(named)}"
        ]  # fmt: skip
        assert "Traceback" not in err
        assert len([trial for trial in kept.trials.of(job) if trial.outcome]) == 2
        let_go.set()
        again = good(command("watch", job, *named))
    assert "succeeded: 9 of 9 trials are spent" in again.err
    assert [trial.outcome for trial in kept.trials.of(job)] == ["OK"] * 9


@pytest.mark.prove
def test_a_service_is_used_without_what_a_database_needs(folder: Path) -> None:
    """A laptop has neither torch nor SQLAlchemy, or does not wish to wait for them."""
    script = (
        "import atexit, sys\n"
        "heavy = ('torch', 'ray', 'sqlalchemy', 'optuna', 'fastapi')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules]))\n"
        "from autotune.cli import main\n"
        "main()\n"
    )
    with served.service(str(folder / "jobs.db")) as url:
        for words in ("submit llama-tiny --ranks 2", "show", "report --format md"):
            answer = subprocess.run(
                [sys.executable, "-c", script, *words.split(), "--url", url],
                env={**os.environ, "PYTHONPATH": str(served.ROOT)}, capture_output=True, text=True,
            )  # fmt: skip
            assert answer.returncode == 0, answer.stderr
            assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.prove
def test_a_list_has_model_and_gain_in_80_columns(command: Command, kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (job,) = good(
        command(*SUBMIT, "--pin", "zero_stage=0,1", "--name", "nightly run", "--tag", "smoke", "--tag", "a100")
    ).out.split()
    with working(kept):
        good(command("watch", job))
    (clone,) = good(command("clone", job)).out.split()
    lines = good(command("jobs")).out.splitlines()
    assert max(map(len, lines)) <= 80
    gain = json.loads(good(command("show", job, "--json")).out)["best_config"]["baseline"]["gain"]["mean"]
    headings = lines[0].split()
    assert headings[:4] == ["job", "(UTC)", "state", "model"] and "gain" in headings
    row = next(line for line in lines if line.startswith(job))
    assert row.startswith(f"{job}  succeeded  test_a_")  # the folder of config.json
    assert ratio_text(gain) in row.split()
    monkeypatch.setenv("COLUMNS", "160")
    wide = next(line for line in good(command("jobs")).out.splitlines() if line.startswith(job))
    assert wide.split()[3:] == ["3/3", ratio_text(gain), "nightly", "run", "smoke", "a100"]
    listed = {item["id"]: item for item in json.loads(good(command("jobs", "--tag", "smoke", "--json")).out)}
    assert listed[job]["gain"]["mean"] == gain
    assert (listed[clone]["gain"], listed[clone]["searched"]) == (None, 0)
    assert json.loads(good(command("jobs", "--tag", "smoke", "--tag", "other", "--json")).out) == []


@pytest.mark.prove
@pytest.mark.usefixtures("place")
def test_labels_may_change_in_every_state(command: Command) -> None:
    (job,) = good(command(*SUBMIT, "--note", "first")).out.split()
    good(command("cancel", "latest"))
    told = good(command("label", "latest", "--name", "nightly", "--tag", "smoke")).err
    assert told == f"job {job}: name nightly; tags smoke; note first\n"
    assert "  name nightly; tags smoke; note first\n" in good(command("show")).out
    assert good(command("label", job, "--name", "", "--tag", "", "--note", "")).err == f"job {job}: no name, no tags, no note\n"
    assert command("label", job).status == 2
    refused = command("label", job, "--tag", "two words")
    assert refused.status == 2
    assert "tags" in refused.err


@pytest.mark.usefixtures("place")
@pytest.mark.nightly
def test_a_job_that_has_succeeded_goes_on_with_more_trials(command: Command, kept: Store) -> None:
    (job,) = good(command(*SUBMIT)).out.split()
    with working(kept):
        good(command("watch", "latest"))
        refused = command("resume", "latest")
        assert (refused.status, "give it a larger budget (trials above 3)" in refused.err) == (2, True)
        told = good(command("resume", "latest", "--trials", 5)).err
        assert told.startswith(f"job {job}: queued, waits for a worker\n")
        watched = good(command("watch", "latest")).err
    assert watched.splitlines()[-1] == "succeeded: 5 of 5 trials are spent"
    assert len(json.loads(good(command("show", "--json")).out)["trials"]) == 5


@pytest.mark.prove
def test_show_has_the_best_trials_or_sorts_them(command: Command, kept: Store) -> None:
    (job,) = good(command(*SUBMIT, "--pin", "zero_stage=0,1")).out.split()
    with working(kept):
        good(command("watch", job))
    document = json.loads(good(command("show", "--top", 2, "--json")).out)
    numbers = [trial["number"] for trial in document["trials"]]
    estimates = {standing["trial"]: standing["rate"] for standing in document["best_config"]["decision"]["standings"]}
    assert [(item["trial"], item["rate"]) for item in document["configurations"]] == [*estimates.items()][:2]
    every = json.loads(good(command("show", "--sort", "micro_batch_size", "--json")).out)["trials"]
    assert numbers == [*estimates][:2]
    sizes = [trial["config"]["micro_batch_size"] for trial in every]
    assert sizes == sorted(sizes)
    shown = good(command("show", "--top", 2)).out
    assert "  2 of 3 measured configurations; --top N for more\n" in shown
    assert f"  2 of {len(every)} trials\n" in good(command("show", "--all", "--top", 2)).out
    refused = command("show", "--sort", "rate")
    assert refused.status == 2
    fields = "number, samples_per_second, peak_memory_bytes, seconds"
    assert refused.err == f"autotune: sort: 'rate' is not a field; use {fields}, or the name of a knob\n"
