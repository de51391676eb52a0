"""`--from`, `--knowledge` and `study export` on the command line."""

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
import table
from called import Command

from autotune.cli.imported import with_found, with_imported
from autotune.errors import BestConfigError, RequestError
from autotune.frameworks.best_config import best_config_text
from autotune.frameworks.imported import Imported
from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import prepare, resolve
from autotune.session.session import Session
from storage.store import open_store
from tests.autotune.cli.test_bad_input import refused

PRESENT: dict[str, Any] = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
}  # fmt: skip

ASSUMED = "assumed, because the file leaves it to the program that trains"
BASELINE = (
    "ds.json: the baseline is zero_stage=2 micro_batch_size=4 reduce_bucket_size=500000000 overlap_comm=false "
    "reduce_dtype=bf16 precision=bf16"
)


def imported(folder: Path, content: dict[str, Any], ranks: tuple[int, ...] = (2,), **fields: Any) -> tuple[Session, list[str]]:
    """The session of a sweep that begins with the file, and what it told."""
    (folder / "ds.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(table.MODEL_CONFIG)
    told: list[str] = []
    given = {"model": str(folder / "config.json"), "ranks": 2, "sequence_length": 64, "strategy": "random", **fields}
    return prepare(request_from_fields(with_imported(given, folder / "ds.json", (), ranks, told.append))), told


def test_what_people_have_is_trial_0(tmp_path: Path) -> None:
    session, told = imported(tmp_path, PRESENT | {"zero_allow_untested_optimizer": True})
    baseline = session.baselines[0]
    assert (baseline.zero_stage, baseline.micro_batch_size, baseline.precision) == (2, 4, "bf16")
    assert session.request.global_batch_size == 16
    # Every trial computes in their precision: a gain is of the layout alone.
    assert {(config.precision, config.reduce_dtype) for config in session.space.enumerate()} == {("bf16", "bf16")}
    assert told == [
        "ds.json: zero_allow_untested_optimizer=true: is not a knob; trials run without it",
        f"ds.json: activation_checkpointing=none: {ASSUMED} (--pin activation_checkpointing=VALUE)",
        BASELINE,
    ]


def test_of_another_engines_best_only_what_is_its_own_is_tuned(tmp_path: Path) -> None:
    sweep = table.session(tmp_path, pins={"zero_stage": [2], "micro_batch_size": [2, 4]}, trials=3)
    with open_store(str(tmp_path / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(sweep.request))
        run_job(sweep, store, job.id, table.runner())
        best = build_best_config(sweep, read_snapshot(store, job.id))
    (tmp_path / "best-config.json").write_text(best_config_text(best))
    given: dict[str, Any] = {
        "model": str(tmp_path / "config.json"), "ranks": 2, "sequence_length": 64, "strategy": "random", "engine": "fsdp2",
    }  # fmt: skip
    told: list[str] = []
    found = prepare(request_from_fields(with_imported(given, tmp_path / "best-config.json", (), (2,), told.append)))
    kept = "measured on native: values that carry over to fsdp2 are kept, and micro_batch_size tuned"
    assert told[0] == f"{kept} (docs/results/transfer.md)"
    assert found.baselines[0].zero_stage == 2
    assert found.request.global_batch_size == sweep.request.global_batch_size
    varied = {name for config in found.space.enumerate() for name in config.differences(found.baselines[0])}
    assert varied == {"micro_batch_size"}

    again = with_imported({**given, "engine": "native"}, tmp_path / "best-config.json", (), (2,), told.append)
    assert "zero_stage" not in again["pins"]


def test_a_best_config_that_lacks_a_part_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "best-config.json").write_text(json.dumps({"schema_version": 1, "best": {}}))
    with pytest.raises(RequestError, match=r"from: best-config\.json lacks 'config'; write it again with"):
        with_imported({"model": "llama-tiny"}, tmp_path / "best-config.json", (), (), lambda _: None)


def test_a_best_config_of_another_schema_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "best-config.json").write_text(json.dumps({"schema_version": 2, "best": {}}))
    with pytest.raises(BestConfigError, match=r"best-config\.json: has schema version 2, not 1; write it again with"):
        with_imported({"model": "llama-tiny"}, tmp_path / "best-config.json", (), (), lambda _: None)


def test_what_is_given_besides_wins(tmp_path: Path) -> None:
    session, _ = imported(
        tmp_path,
        PRESENT,
        global_batch_size=32,
        baseline={"micro_batch_size": 8},
        pins={"precision": "fp32", "zero_stage": (1, 2)},
    )
    assert session.request.global_batch_size == 32
    assert (session.baselines[0].zero_stage, session.baselines[0].micro_batch_size) == (2, 8)
    assert {(config.precision, config.reduce_dtype) for config in session.space.enumerate()} == {("fp32", "fp32")}


def test_a_knob_that_the_engine_has_not_is_left_out_of_the_baseline(tmp_path: Path) -> None:
    content = PRESENT | {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000, "stage3_max_reuse_distance": 0}}
    session, told = imported(tmp_path, content, engine="fsdp2")
    assert (session.baselines[0].zero_stage, session.baselines[0].reduce_bucket_size) == (3, 40_000_000)
    assert "ds.json: reduce_bucket_size=1000: the fsdp2 engine has no such knob; the baseline is without it" in told
    with pytest.raises(RequestError, match=r"baseline: is refused by .*zero_stage=3"):
        imported(tmp_path, content, engine="ddp")


def test_a_script_begins_with_the_file_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(PRESENT))
    told: list[str] = []
    words = ["python", "train.py", "--deepspeed_config", "{config}"]
    fields = {"command": words, "ranks": 2, "strategy": "random"}
    session = resolve(request_from_fields(with_imported(fields, tmp_path / "ds.json", (), (2,), told.append)))
    assert told == [BASELINE]
    assert (session.baselines[0].zero_stage, session.baselines[0].overlap_comm) == (2, False)
    trainer = fields | {"command": ["python", "train.py", "--batch", "{micro_batch_size}"]}
    told.clear()
    session = resolve(request_from_fields(with_imported(trainer, tmp_path / "ds.json", (), (2,), told.append)))
    left = ["zero_stage", "reduce_bucket_size", "overlap_comm", "reduce_dtype", "precision", "the baseline is micro_batch_size"]
    assert [line.split("=")[0] for line in told] == [f"ds.json: {name}" for name in left]
    assert session.baselines[0].micro_batch_size == 4


def test_the_batch_follows_from_the_ranks(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}}
    assert imported(tmp_path, content)[0].request.global_batch_size == 12
    told = imported(tmp_path, content, ranks=())[1]
    assert told[-1].startswith("global_batch_size: the file does not state it; give --global-batch-size")


def test_the_length_of_samples_is_the_file_s_unless_it_is_stated() -> None:
    recipe = Imported(knobs={}, global_batch_size=16, sequence_length=2048)
    for stated, length in (({}, 2048), ({"sequence_length": 64}, 64)):
        notes: list[str] = []
        fields = with_found({"model": "llama-tiny", **stated}, recipe, "run.yaml", (2,), notes.append)
        assert (fields["sequence_length"], fields["global_batch_size"]) == (length, 16)
        assert ("run.yaml: samples have its 2,048 tokens" in notes) is (not stated)


@pytest.mark.parametrize("command_name", ["sweep", "submit"])
def test_bad_files(command: Command, folder: Path, command_name: str) -> None:
    (folder / "stage.json").write_text('{"zero_optimization": {"stage": 7}}')
    words = (command_name, "config.json", "--ranks", "2", "--from")
    refused(command, *words, "none.json", says=("from: none.json cannot be read", "give a DeepSpeed configuration"))
    refused(command, *words, "stage.json", says=("zero_optimization.stage: 7 in stage.json", "give 0, 1, 2 or 3"))


def test_bad_histories(command: Command, folder: Path) -> None:
    (folder / "earlier.csv").write_text("zero_stage,samples_per_second\n1,10\n")
    sweep = ("sweep", "config.json", "--ranks", "2", "--knowledge")
    refused(command, *sweep, "none.csv", says=("knowledge: none.csv does not exist", "give a table, an MLPerf log"))
    refused(command, *sweep, "none.db#mine", says=("knowledge: ", "none.db does not exist", "give a CSV file"))
    refused(command, *sweep, "earlier.csv", "--strategy", "tpe", says=("knowledge: tpe does not use", "use --strategy guided"))
    words = ("--objective", "devices", "--rate", "1")
    refused(command, *sweep, "earlier.csv", *words, says=("knowledge: applies to one job", "leave it out"))


@pytest.mark.prove
def test_a_job_as_a_study(command: Command, folder: Path) -> None:
    session = table.session(folder, trials=4, confirm_repeats=0)
    with open_store(str(folder / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(session.request)).id
        run_job(session, store, job, table.runner())
    answer = command("study", "export", job[:-1], "--storage", "sqlite:///studies.db", "--name", "mine")
    assert (answer.status, answer.out, answer.err) == (0, "mine\n", "")
    study = optuna.load_study(study_name="mine", storage="sqlite:///studies.db")
    assert len(study.trials) == 4
    assert command("study", "export", "--storage", "sqlite:///studies.db").out == f"{job}\n"
    words = ("study", "export", job, "--storage", "sqlite:///studies.db", "--name", "mine")
    refused(command, *words, says=("name: ", "another --name"))
