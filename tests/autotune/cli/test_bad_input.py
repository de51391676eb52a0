"""Bad input: one clear line with the remedy on standard error, exit code 2, no process started, nothing left behind."""

import json
import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import table
from called import Command

from autotune.cli import foreground, serve
from autotune.errors import OutputError
from executor.runners import rank_process
from storage.errors import DatabaseUnavailableError
from storage.store import open_store

CONFIG: dict[str, Any] = json.loads(table.MODEL_CONFIG)
SWEEP = ("sweep", "--runner", "local", "--out", "best.json")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank process was started")

    monkeypatch.setattr(rank_process.RankProcess, "__init__", started)


@pytest.fixture
def left(folder: Path) -> Iterator[None]:
    """Nothing is left behind: no output, no job."""
    yield
    assert not (folder / "best.json").exists()
    assert list(folder.glob(".best*")) == []
    if (folder / "jobs.db").exists():
        with open_store(str(folder / "jobs.db")) as store:
            assert store.jobs.newest() == []


def refused(command: Command, *words: object, says: tuple[str, ...], status: int = 2) -> None:
    answer = command(*words)
    lines = answer.err.splitlines()
    assert (answer.status, answer.out, len(lines)) == (status, "", 1), answer.err
    assert lines[0].startswith("autotune: ")
    for part in says:
        assert part in lines[0]


MODELS = {
    "key-missing": ({k: v for k, v in CONFIG.items() if k != "model_type"}, ("model_type: is missing; add",)),
    "other-family": (CONFIG | {"model_type": "bert"}, ("model_type: 'bert'", "give hf:config.json")),
    "wrong-kind": (CONFIG | {"hidden_size": "wide"}, ("hidden_size:", "; ")),
    "too-large": (
        CONFIG | {"num_hidden_layers": 96, "hidden_size": 65536},
        ("model:", "the host has", "choose a smaller model"),
    ),
}


@pytest.mark.prove
@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("case", MODELS)
def test_models(command: Command, folder: Path, case: str) -> None:
    config, says = MODELS[case]
    (folder / "config.json").write_text(json.dumps(config))
    refused(command, *SWEEP, "config.json", says=says)


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[1]", b""])
def test_what_is_no_json_object(command: Command, folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    refused(command, *SWEEP, "config.json", says=("config.json: ", "JSON", "give a Hugging Face config.json"))


OPTIONS: dict[str, tuple[str, ...]] = {
    "none.json": ("none.json: no such file", "give the path"),
    "llama-9b": ("llama-9b: no model preset", "did you mean"),
    "llama-3.1-405b": ("model: the states of llama-3.1-405b", "the host has", "choose a smaller model"),
    "": ("model: is missing; give a preset",),
    "config.json --pin tensor_parallel_size=3": ("tensor_parallel_size=3", "3 ranks do not divide", "; "),
    "config.json --ranks 3 --global-batch-size 9 --space 3d --pin tensor_parallel_size=3": (
        "tensor_parallel_size=3", "3 ranks do not divide attention heads (4)", "; ",
    ),
    "config.json --pin reduce_bucket_size=-1": ("reduce_bucket_size: -1", "a whole number of elements, at least 1"),
    "config.json --pin reduce_bucket_size=1.5": ("reduce_bucket_size: 1.5", "a whole number of elements, at least 1"),
    "config.json --pin bogus=1": ("bogus: no knob has this name; use one of",),
    "config.json --pin zero_stage": ("zero_stage: is not KNOB=VALUE; write",),
    "config.json --pin pipeline_layout=6x-7": ("pipeline_layout: '6x' in '6x-7' is not a stage; write a count of layers",),
    "config.json --pin pipeline_layout=6f7-1": ("pipeline_layout: '6f7' in '6f7-1' recomputes 7 layers and has 6; give",),
    "config.json --pin zero_stage=solved": ("zero_stage: is not solved for", "; "),
    "config.json --pin zero_stage=7": ("zero_stage: 7", "give 0, 1, 2 or 3"),
    "config.json --pin micro_batch_size=3 --global-batch-size 8": (
        "micro_batch_size=3", "a global batch of 8", "change micro_batch_size",
    ),
    "config.json --cluster nowhere": ("nowhere: no cluster preset", "`autotune clusters` lists them"),
    "config.json --cluster dgx-a100:x": ("dgx-a100:x: 'x' is not a number of nodes; write",),
    "config.json --cluster dgx-a100:2 --global-batch-size 16 --sequence-length 64": (
        "cluster: dgx-a100:2 has 16 GPUs", "use local",
    ),
    "llama-3-8b --cluster dgx-a100:2": (
        "sequence_length, global_batch_size: not stated", "--sequence-length (tokens per sample, up to 8,192 for llama-3-8b)",
        "--global-batch-size (samples per optimizer step",
    ),
    "llama-3-8b --cluster dgx-a100:2 --sequence-length 4096": ("global_batch_size: not stated", "give --global-batch-size ("),
    "config.json --space nowhere": ("nowhere: no space preset", "use one of zero"),
    "config.json --strategy genetic": ("strategy: 'genetic'", "use one of guided, tpe, random, grid"),
    "config.json --objective speed": ("objective: 'speed'", "use one of throughput, memory"),
    "config.json --engine megatron": ("engine: 'megatron' is not known; use one of native, ddp, fsdp2, deepspeed",),
    "config.json --engine ddp --pin zero_stage=3": ("engine-honours: with zero_stage=3, the ddp engine does not honour", "; "),
    "config.json --engine fsdp2 --ranks 4 --space 3d --pin pipeline_schedule=zbv --pin pipeline_parallel_size=2 "
    "--pin virtual_stages=2 --pin zero_stage=2 --pin tensor_parallel_size=1": ("zero-bubble", "; "),
    "config.json --runner slurm": ("runner: 'slurm'", "use one of ray, local"),
    "config.json --trials 0": ("trials: 0", "give at least 1"),
    "config.json --trials many": (
        "trials: 'many' is not a whole number (maximum number of search trials); see `autotune sweep --help`",
    ),
    "config.json --ranks 999": ("ranks: 999 is not between 1 and", "use at most"),
    "config.json --ranks 0": ("ranks: 0", "give at least 1"),
    "config.json --global-batch-size 7": ("global_batch_size: zero has no", "a global batch of 7", "change micro_batch_size"),
    "config.json --sequence-length 0": ("sequence_length: '0' is not a length; write a number of tokens",),
    "gpt2 --sequence-length 1025": ("sequence_length: 1025 tokens are beyond the 1024 learned positions of gpt2; ",),
    "config.json --data-path none": ("data_path: ", "does not exist; give"),
    "config.json --data-path empty.txt": ("data_path: ", "holds 0 bytes", "give more text"),
    "config.json --data-path empty": ("data_path: ", "holds 0 bytes", "give more text"),
    "config.json --nvme-path none": ("nvme_path: ", "does not exist; name a folder on a fast local disk (--nvme-path)"),
    "config.json --nvme-path empty.txt": ("nvme_path: ", "is not a folder; name a folder"),
    "config.json --pin offload_optimizer=nvme --pin zero_stage=1": ("nvme-path: ", "name a folder with --nvme-path"),
    "config.json --memory-limit 0": ("memory_limit: '0' is out of range; give",),
    "config.json --memory-limit much": ("memory_limit: 'much' is not a size; write",),
    "config.json --headroom 1": ("headroom: 1.0", "give a share"),
    "config.json --trial-seconds 0": ("fidelity.max_seconds: 0.0", "(--trial-seconds)"),
    "config.json --max-seconds -1": ("max_seconds: -1.0", "give seconds above 0"),
    "config.json --trial-timeout 0": ("trial_timeout: 0.0", "give seconds above 0"),
    "config.json --out none/best.json": ("out: none/best.json cannot be written", "give a path"),
    "config.json --out empty": ("out: empty is a folder; give the path of a file",),
    "config.json --db empty": ("empty: is a folder; give a file in it",),
    "config.json --db none/jobs.db": ("none: is not a folder that exists; make it",),
    "config.json --db config.json": ("config.json: is not an SQLite database; name another",),
    "config.json --db mysql://host/name": ("mysql databases are not supported; give",),
    "config.json --resume latest": ("resume: a job is resumed with its own request; leave out MODEL",),
    "--config unknown.toml": ("trails: is not a field", "did you mean trials?"),
    "--config kind.toml": ("trials: 'x'", "give at least 1"),
    "--config words.toml": ("config: words.toml is not TOML", "correct the file"),
    "--config none.toml": ("config: none.toml cannot be read", "give the path"),
    "config.json --baseline none.json": ("baseline: none.json cannot be read", "give a JSON object {knob: value}"),
    "config.json --baseline illegal.json": ("baseline: is refused by batch-divides", "change micro_batch_size"),
    "config.json --bogus": ("no such option: --bogus", "see `autotune sweep --help`"),
}  # fmt: skip


@pytest.mark.prove(every=14)
@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("words", OPTIONS)
def test_options(command: Command, folder: Path, words: str) -> None:
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "unknown.toml").write_text("trails = 3\n")
    (folder / "kind.toml").write_text('model = "llama-tiny"\ntrials = "x"\n')
    (folder / "words.toml").write_text("some words\n")
    (folder / "illegal.json").write_text('{"micro_batch_size": 3}')
    refused(command, *SWEEP, *words.split(), says=OPTIONS[words])


OTHERS: dict[str, tuple[str, ...]] = {
    "swep": ("no such command 'swep'", "see `autotune --help`"),
    "sweep --resume latest": ("there is no job yet; start one",),
    "sweep --resume 20200101-000000-aaaa": ("there is no job '20200101-000000-aaaa'; check the id",),
    "show nobody": ("there is no job 'nobody'; check the id",),
    "show": ("there is no job yet; start one",),
    "export": ("there is no job yet; start one",),
    "export --format nemo": ("format: 'nemo' is not known; use one of json, deepspeed",),
    "export --out none/x.json": ("out: none/x.json cannot be written", "give a path"),
    "clean": ("there is no job yet",),
    "mcp --http 127.0.0.2:8765": ("http: 127.0.0.2 can be reached", "use 127.0.0.1 or localhost or ::1"),
    "reproduce": ("missing argument 'FILE'", "see `autotune reproduce --help`"),
    "reproduce none.json": ("none.json: cannot be read", "give a best-config.json"),
    "reproduce config.json": (
        "config.json: is a Hugging Face config.json, not a best-config.json; give a best-config.json",
        "autotune export",
    ),
    "reproduce config.json --repeats 0": ("repeats: '0' is not at least 1; see `autotune reproduce --help`",),
    "space": ("model: is missing; give",),
    "space module:factory": ("model: a factory has no known shape", "use `autotune sweep`"),
    "space config.json --engine none": ("engine: 'none' is not known; use one of native",),
    "space config.json --ranks 0": ("ranks: '0' is not at least 1; see `autotune space --help`",),
    "space config.json --sequence-length 0": ("sequence_length: '0' is not a length; write a number of tokens",),
    "plan gpt2 --cluster dgx-h100:1 --price much": (
        "price: 'much' is not a number (price of a device per hour); see `autotune plan --help`",
    ),
    "plan gpt2 --global-batch-size 1M": ("global_batch_size: '1M' is not a whole number (samples per optimizer step);",),
    "plan llama-3-8b --cluster gb200-nvl72:18 --global-batch-size 1024": (
        "global_batch_size: parallel has no legal",
        "nearest is 1008",
    ),
    "space gpt2 --sequence-length 1025": ("sequence_length: 1025", "give at most 1024"),
}


@pytest.mark.prove(every=7)
@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("words", OTHERS)
def test_other_commands(command: Command, words: str) -> None:
    refused(command, *words.split(), says=OTHERS[words])


@pytest.mark.usefixtures("left")
def test_a_limit_below_the_smallest_possible_is_nothing_feasible(command: Command) -> None:
    refused(
        command,
        *SWEEP,
        "config.json",
        "--memory-limit",
        "1000",
        status=3,
        says=("memory_limit: every", "raise the limit"),
    )


def test_rotary_positions_have_no_end(command: Command) -> None:
    assert command("space", "config.json", "--sequence-length", 1000).status == 0


def test_a_locked_database(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "open_store", partial(open_store, busy_seconds=0.2))  # in place of 5 s
    with open_store(str(folder / "jobs.db")) as store:
        assert store.jobs.newest() == []
    with closing(sqlite3.connect(folder / "jobs.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        words = (*SWEEP, "config.json", "--global-batch-size", 8, "--sequence-length", 64)
        refused(command, *words, says=("jobs.db: is locked by another process; end that process",))
    with open_store(str(folder / "jobs.db")) as store:
        assert store.jobs.newest() == []
    assert not (folder / "best.json").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DatabaseUnavailableError("jobs.db: is locked by another process; end it"), "continue with `autotune sweep --resume "),
        (OutputError("out", "best.json cannot be written (No space left on device)", "free some"), "`autotune export "),
    ],
)
def test_a_job_that_is_cut_short_says_how_it_goes_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    """It is no bad input: trials were run, and are kept."""

    def finish(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(foreground, "finish", finish)
    monkeypatch.setattr(foreground, "make_runner", lambda _: nullcontext())
    answer = command(*SWEEP, "config.json", "--db", "other.db")
    assert answer.status == 1
    last = answer.err.splitlines()[-1]
    assert last.startswith("autotune: ") and "kept" in last and says in last and "--db other.db" in last


@pytest.mark.prove
@pytest.mark.parametrize("words", [(*SWEEP, "config.json"), ("show",), ("clean", "--all", "--yes")])
def test_a_read_only_database(command: Command, folder: Path, words: tuple[str, ...]) -> None:
    """For root too, whom permission bits do not stop."""
    with open_store(str(folder / "jobs.db")):
        pass
    (folder / "jobs.db").chmod(0o444)
    refused(command, *words, says=("jobs.db: is read-only; chmod u+w",))


def test_the_default_database_is_in_the_users_data_folder(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOTUNE_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    assert command("jobs").status == 0
    assert (folder / "data" / "autotune" / "autotune.db").exists()
    assert not os.path.lexists(folder / "jobs.db")


@pytest.mark.parametrize(("option", "name", "known"), [("--runner", "slurm", "ray, local"), ("--device", "gpu", "cpu, cuda")])
def test_a_worker_for_jobs_that_nobody_has(command: Command, option: str, name: str, known: str) -> None:
    refused(command, "worker", option, name, says=(f"{option[2:]}: '{name}' is not known; use some of {known}",))


def test_a_service_on_a_port_that_is_in_use_is_refused_before_it_says_that_it_listens(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "set_up_logs", lambda _: None)  # of this process
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(
            command,
            "serve",
            "--port",
            port,
            says=(f"port: {port} of 127.0.0.1 is in use; stop the process that listens there",),
        )
