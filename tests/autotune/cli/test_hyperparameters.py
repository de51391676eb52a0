"""Hyperparameters of a request: the same fields everywhere, and what trials make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import table
from called import Command

from autotune.cli.imported import with_imported
from autotune.errors import RequestError
from autotune.request.request import JobRequest
from autotune.request.rows import read_config_file, request_from_fields, request_from_row, request_to_row
from autotune.session.resolve import prepare, resolve
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.tuning import tune
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

STATED: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.05, "clip": 0.5, "optimizer": "sgd"}
PRESENT: dict[str, Any] = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.01}},
}  # fmt: skip


def test_trials_train_with_them(tmp_path: Path) -> None:
    session = table.session(tmp_path, **STATED)
    workload = trial_request(session, "a", session.baselines[0], ()).workload
    assert (workload.learning_rate, workload.weight_decay, workload.gradient_clipping) == (3e-4, 0.05, 0.5)
    assert {config.optimizer for config in session.space.enumerate()} == {"sgd"}
    assert {config.optimizer for config in session.baselines} == {"sgd"}


def test_without_them_trials_are_as_before(tmp_path: Path) -> None:
    """Losses of reference of a job that was opened before hold for its trials afterwards."""
    session = table.session(tmp_path)
    row = request_to_row(session.request)
    older = {name: value for name, value in row.items() if name not in STATED}
    assert request_from_row(older) == session.request
    assert session.request.workload == Workload(global_batch_size=8, sequence_length=64)
    assert "optimizer" not in (session.request.resolved_domains or {})
    assert (session.request.resolved_base or TrialConfig(optimizer="sgd")).optimizer == "adamw"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lr": 0}, "lr: 0.0 is not a positive number; give a positive number"),
        ({"lr": "fast"}, "lr: 'fast' is not a positive number"),
        ({"weight_decay": -0.1}, "weight_decay: -0.1 is not a number of 0 or more"),
        ({"clip": float("inf")}, "clip: inf is not a number of 0 or more"),
        ({"clip": True}, "clip: True is not a number"),
        ({"optimizer": "adam"}, "optimizer: 'adam' is not known; use one of adamw, sgd"),
    ],
)
def test_what_is_none_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as found:
        request_from_fields({"model": "llama-tiny", **fields})
    assert "\n" not in str(found.value)


def test_two_optimizers_or_one_that_the_engine_has_not() -> None:
    fields = {"model": "llama-tiny", "ranks": 2, "strategy": "random", "optimizer": "sgd"}
    with pytest.raises(RequestError, match="optimizer: is sgd, and pins name lamb; leave one of them out"):
        resolve(request_from_fields({**fields, "pins": {"optimizer": "lamb"}}))
    with pytest.raises(RequestError, match="the ddp engine does not honour optimizer=sgd"):
        resolve(request_from_fields({**fields, "engine": "ddp"}))


def test_a_file_of_fields_and_the_command_line(folder: Path, command: Command) -> None:
    (folder / "job.toml").write_text('model = "llama-tiny"\nlr = 3e-4\nweight_decay = 0.5\nclip = 1\n')
    assert request_from_fields(read_config_file(folder / "job.toml")).lr == 3e-4
    answer = command(
        "submit", "--config", "job.toml", "--weight-decay", "0.05", "--clip", "0.5", "--optimizer", "sgd", "--db", "jobs.db"
    )
    assert answer.status == 0, answer.err
    with open_store("jobs.db") as store:
        row = store.jobs.get(answer.out.strip()).request
    assert {name: row[name] for name in STATED} == STATED


def test_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[JobRequest] = []

    def seen(request: JobRequest) -> Session:
        asked.append(request)
        raise InterruptedError

    monkeypatch.setattr("autotune.tuning.prepare", seen)
    with pytest.raises(InterruptedError):
        tune("llama-tiny", **STATED)
    assert stated(asked[0]) == (3e-4, 0.05, 0.5, "sgd")


def imported(folder: Path, content: dict[str, Any], **fields: Any) -> tuple[Session, list[str]]:
    (folder / "ds.json").write_text(json.dumps(content))
    notes: list[str] = []
    given = {"model": "llama-tiny", "ranks": 2, "strategy": "random", **fields}
    return prepare(request_from_fields(with_imported(given, folder / "ds.json", (), (2,), notes.append))), notes


def stated(request: JobRequest) -> tuple[Any, ...]:
    return request.lr, request.weight_decay, request.clip, request.optimizer


def test_a_file_that_people_have_states_them(tmp_path: Path) -> None:
    session, notes = imported(tmp_path, PRESENT)
    assert stated(session.request) == (3e-5, 0.01, 0.5, "adamw")
    assert "ds.json: trials and exported files take lr=3e-05 weight_decay=0.01 clip=0.5 optimizer=adamw" in notes
    session, _ = imported(tmp_path, PRESENT, lr=1e-4, optimizer="sgd")
    assert stated(session.request) == (1e-4, 0.01, 0.5, "sgd")
    bare = {name: value for name, value in PRESENT.items() if name not in ("optimizer", "gradient_clipping")}
    session, notes = imported(tmp_path, bare)
    assert stated(session.request) == (None, None, None, None)
    assert not [note for note in notes if "exported files" in note]


def test_an_optimizer_that_no_trial_can_make_is_told(tmp_path: Path) -> None:
    session, notes = imported(tmp_path, PRESENT | {"zero_optimization": {"stage": 0}}, engine="ddp")
    assert session.request.optimizer == "adamw"
    lion = PRESENT | {"optimizer": {"type": "Lion", "params": {"lr": 3e-5}}}
    session, notes = imported(tmp_path, lion)
    assert (session.request.lr, session.request.optimizer) == (3e-5, None)
    assert any(note.startswith("ds.json: optimizer.type=Lion: not among adamw, lamb, muon, sgd; ") for note in notes)
    lamb = PRESENT | {"optimizer": {"type": "Lamb", "params": {"lr": 3e-5}}, "zero_optimization": {"stage": 0}}
    session, notes = imported(tmp_path, lamb, engine="ddp")
    assert session.request.optimizer is None
    assert "ds.json: optimizer=lamb: the ddp engine has no such knob; trials train with its own" in notes
