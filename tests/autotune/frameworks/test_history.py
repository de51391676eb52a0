"""Earlier trials: which count, which do not, and that a sweep begins where they end."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
import table

from autotune.cli.sweep import with_history
from autotune.errors import RequestError
from autotune.frameworks.history import read_history
from autotune.frameworks.optuna import write_study
from autotune.loop.loop import run_job
from autotune.request.rows import request_from_row, request_to_row
from autotune.session.knowledge import admit
from autotune.session.session import Session
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.store import Store

HEAD = "zero_stage,micro_batch_size,samples_per_second,state,note\n"


def csv(folder: Path, *rows: str, head: str = HEAD) -> str:
    path = folder / "earlier.csv"
    path.write_text(head + "".join(f"{row}\n" for row in rows))
    return str(path)


def test_rows_that_count_and_rows_that_do_not(tmp_path: Path) -> None:
    session = table.session(tmp_path)
    source = csv(
        tmp_path,
        "0,1,100.0,COMPLETE,first",
        "3,4,150.5,ok,",
        "1,3,90.0,,",
        "7,1,90.0,,",
        "2,2,,FAIL,",
        "2,2,80.0,PRUNED,",
        ",,5,,",
    )
    found = admit(read_history(source), session)
    assert [(one.config.zero_stage, one.config.micro_batch_size, one.samples_per_second) for one in found.trials] == [
        (0, 1, 100.0), (3, 4, 150.5),
    ]  # fmt: skip
    assert {one.noise for one in found.trials} == {session.prior.relative}
    reasons = {reason.partition(":")[0]: numbers for reason, numbers in found.refused.items()}
    assert reasons == {
        "is refused by batch-divides": [2], "zero_stage": [3], "no rate was measured (FAIL)": [4],
        "no rate was measured (PRUNED)": [5], "names no knob": [6],
    }  # fmt: skip


def test_a_data_frame_of_optunas(tmp_path: Path) -> None:
    source = csv(
        tmp_path, "5,120.0,1,2,COMPLETE,100,140,64000", "6,120.0,1,2,COMPLETE,,,", head="number,value,params_zero_stage,"
        "params_micro_batch_size,state,user_attrs_low,user_attrs_high,user_attrs_peak_memory_bytes\n",
    )  # fmt: skip
    first, second = admit(read_history(source), table.session(tmp_path)).trials
    assert (
        first.config
        == second.config
        == TrialConfig(zero_stage=1, micro_batch_size=2).replace(
            {name: getattr(first.config, name) for name in ("reduce_bucket_size", "allgather_bucket_size")}
        )
    )
    assert (first.peak_memory_bytes, second.peak_memory_bytes) == (64_000, None)
    assert first.noise > 0.08


def test_a_parameter_that_is_no_knob_is_told(tmp_path: Path) -> None:
    source = csv(tmp_path, "1,2,100.0,,", head="zero_stage,params_lr,value,state,note\n")
    (reason,) = admit(read_history(source), table.session(tmp_path)).refused
    assert reason.startswith("lr: no knob has this name")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("none.csv", "knowledge: none.csv cannot be read"),
        ("norate.csv", "knowledge: norate.csv has no column of rates; name one of its columns samples_per_second"),
        ("sqlite:///none.db", "knowledge: none.db does not exist; give a CSV file"),
        ("none.db#name", "knowledge: .*none.db does not exist"),
    ],
)
def test_a_history_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "norate.csv").write_text("zero_stage\n1\n")
    with pytest.raises(RequestError, match=says) as found:
        read_history(source)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "none.db").exists()


def swept(session: Session, store: Store, answer: Any = table.measured) -> str:
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    return job.id


@pytest.mark.prove
def test_a_job_as_a_study_and_back(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> Any:
        if config.micro_batch_size == 4 and config.zero_stage < 2:
            return table.ended(Outcome.INFEASIBLE, "out of memory")
        return table.measured(config)

    job = store.jobs.get(swept(table.session(tmp_path, trials=12, confirm_repeats=0), store, answer))
    storage = f"sqlite:///{tmp_path}/studies.db"
    trials = store.trials.of(job.id)
    assert write_study(storage, "mine", job, trials) == "mine"

    study = optuna.load_study(study_name="mine", storage=storage)
    assert study.user_attrs["job"] == job.id
    kept = study.get_trials()
    assert len(kept) == len(trials)
    for trial, frozen in zip(trials, kept, strict=True):
        assert frozen.user_attrs["outcome"] == trial.outcome
        assert frozen.params == {name: getattr(trial.config, name) for name in frozen.params}
        assert frozen.datetime_start is not None
        ok = trial.outcome is Outcome.OK
        assert frozen.state.name == ("COMPLETE" if ok else "FAIL")
        assert frozen.constraints == {"fits": 0.0 if ok else 1.0}
    assert {"zero_stage", "micro_batch_size", "activation_checkpointing"} <= kept[0].params.keys()
    assert study.best_value == max(t.result.samples_per_second.mean for t in trials if t.outcome is Outcome.OK)  # type: ignore[union-attr]
    assert kept[0].user_attrs["baseline"] is True
    assert abs((kept[0].datetime_start.astimezone(UTC) - datetime.now(UTC)).total_seconds()) < 600  # type: ignore[union-attr]

    rows = read_history(f"{storage}#mine")
    found = admit(rows, table.session(tmp_path))
    assert {trial.config.hash for trial in found.trials} == {
        trial.config_hash for trial in trials if trial.outcome is Outcome.OK
    }
    with pytest.raises(RequestError, match=r"name: .* already has a study 'mine'; give another --name"):
        write_study(storage, "mine", job, trials)
    with pytest.raises(RequestError, match=r"has no study 'other' \(it has mine\); write STORAGE#NAME"):
        read_history(f"{storage}#other")


def test_a_storage_that_cannot_be_used(tmp_path: Path, store: Store) -> None:
    job = store.jobs.create(request_to_row(table.session(tmp_path).request))
    with pytest.raises(RequestError, match=r"storage: .* cannot be used .*; give a URL such as") as found:
        write_study(f"sqlite:///{tmp_path}/none/studies.db", "mine", job, [])
    assert "\n" not in str(found.value)


def test_a_study_that_minimizes_is_refused(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/studies.db"
    optuna.create_study(storage=storage, study_name="loss")
    with pytest.raises(RequestError, match="knowledge: the study 'loss' minimizes"):
        read_history(storage)


@pytest.mark.prove
def test_guided_begins_where_the_history_ends(tmp_path: Path, store: Store) -> None:
    """Of a machine whose rates are the other way round than predicted, so that nothing but the history tells of the best."""

    def answer(config: TrialConfig) -> Any:
        return table.ok(300.0 / config.micro_batch_size * (1.0 + 0.3 * config.zero_stage))

    session = table.session(tmp_path, strategy="guided", trials=3, confirm_repeats=0, racing=False)
    configs = [config for config in session.space.enumerate() if config.activation_checkpointing == "none"]
    rows = [f"{config.zero_stage},{config.micro_batch_size},{answer(config).samples_per_second.mean},," for config in configs]
    told: list[str] = []
    learned = with_history(session, csv(tmp_path, *rows), told.append)
    assert told == [f"knowledge: {len(rows)} of {len(rows)} trials count"]
    assert request_from_row(request_to_row(learned.request)).resolved_history == learned.request.resolved_history

    def second(session: Session) -> TrialConfig:
        job = swept(session, store, answer)
        if store.jobs.prior(job) is None:
            raise AssertionError("no prior was kept")
        return store.trials.of(job)[1].config

    with_it = second(learned)
    assert (with_it.zero_stage, with_it.micro_batch_size) == (3, 1)


def test_a_history_that_nothing_learns_from_is_refused(tmp_path: Path) -> None:
    source = csv(tmp_path, "0,1,100.0,,")
    with pytest.raises(RequestError, match="knowledge: random does not use earlier trials; use --strategy guided"):
        with_history(table.session(tmp_path), source, print)
    with pytest.raises(RequestError, match=r"knowledge: no trial of .* counts"):
        with_history(table.session(tmp_path, strategy="guided"), csv(tmp_path, "9,1,100.0,,"), lambda _: None)
