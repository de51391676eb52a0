"""A best configuration on another engine: delivered against promised, and what that engine cannot run."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import table

from autotune.errors import RequestError
from autotune.frameworks.best_config import SCHEMA_PATH, best_config_text
from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.outcome.verification import target_session, translate, verified, verify
from autotune.request.engines import capability_of
from autotune.request.rows import request_to_row
from autotune.session.trial_requests import trial_request
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store

SHARDED = {"zero_stage": [2, 3], "micro_batch_size": [1, 2, 4]}
SAME_STAGE = "python train.py {micro_batch_size} {gradient_checkpointing}"


@pytest.fixture
def document(tmp_path: Path, store: Store) -> dict[str, Any]:
    session = table.session(tmp_path, pins=SHARDED, trials=6, baseline={"zero_stage": 3, "micro_batch_size": 1})
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner())
    return build_best_config(session, read_snapshot(store, job.id))


def test_delivered_is_told_against_promised_and_both_gains(document: dict[str, Any]) -> None:
    session, best = target_session(document, "fsdp2", "local")
    assert best.config.values()["zero_stage"] == document["best"]["config"]["zero_stage"] == 2

    def half(config: TrialConfig) -> TrialResult:
        rate = table.measured(config).samples_per_second
        assert rate is not None
        return table.ok(rate.mean / 2)

    found = verify(document, session, best, table.runner(half), rounds=3)
    assert found.delivered.mean == pytest.approx(found.promised.mean / 2, rel=1e-2)
    assert found.promised_gain is not None
    assert found.delivered_gain is not None
    assert found.delivered_gain.mean == pytest.approx(found.promised_gain.mean, rel=1e-2)
    assert found.holds
    entered = verified(document, found)
    assert entered["verified"] == "target"
    jsonschema.validate(json.loads(best_config_text(entered)), json.loads(SCHEMA_PATH.read_text(encoding="utf-8")))


def test_a_best_that_is_slower_there_is_not_verified_whatever_ran_before(document: dict[str, Any]) -> None:
    session, best = target_session(document, "fsdp2", "local")
    answer = lambda config: table.ok(50.0 if config == best.config else 100.0)  # noqa: E731
    found = verify(document, session, best, table.runner(answer), rounds=3)
    assert not found.holds
    assert found.delivered_gain is not None
    assert found.delivered_gain.mean == pytest.approx(0.5)
    assert verified(document | {"verified": "target"}, found)["verified"] == "native-only"


def test_a_baseline_that_does_not_run_there_leaves_the_gain_out_and_says_so(document: dict[str, Any]) -> None:
    session, best = target_session(document, "fsdp2", "local")
    failed = table.ended(Outcome.FAILED, "no such kernel")
    found = verify(document, session, best, table.runner(lambda c: table.ok(9.0) if c == best.config else failed), rounds=2)
    assert (found.delivered_gain, found.holds) == (None, True)
    assert found.message == "the baseline ends FAILED there: no such kernel"


def test_what_does_not_run_there_is_one_line(document: dict[str, Any]) -> None:
    session, best = target_session(document, "fsdp2", "local")
    gone = table.ended(Outcome.INFEASIBLE, "out of memory")
    with pytest.raises(RequestError, match="engine: the best configuration ends INFEASIBLE there: out of memory; sweep with"):
        verify(document, session, best, table.runner(lambda _: gone), rounds=1)


def test_a_script_of_the_users_own_is_told_the_configuration(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["python", "train.py", "--deepspeed", "{config}", "--checkpoint", "{gradient_checkpointing}"]
    session, best = target_session(document, "command", "local", {"arguments": words})
    assert isinstance(session.model, CommandModel)
    assert best.config == TrialConfig().replace(document["best"]["config"])
    found = verify(document, session, best, table.runner(), rounds=2)
    assert found.engine == "command"
    assert found.delivered_gain is not None
    ((name, text),) = trial_request(session, "a", best.config, ()).files
    assert (name, json.loads(text)["zero_optimization"]["stage"]) == ("config.json", 2)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("engine", "words", "line"),
    [
        ("command", None, "command: is missing; write it after --"),
        ("command", SAME_STAGE, "no placeholder of it carries zero_stage=2; write {zero_stage} or {config}"),
        ("fsdp2", SAME_STAGE, "engine: fsdp2 does not run a command"),
    ],
)
def test_a_script_that_cannot_be_told_it_is_one_line(
    document: dict[str, Any], engine: str, words: str | None, line: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(line)):
        target_session(document, engine, "local", None if words is None else {"arguments": words})


def test_a_knob_without_a_place_is_left_out_and_told() -> None:
    config = TrialConfig().replace({"zero_stage": 2, "reduce_bucket_size": 13_000, "overlap_comm": False})
    there = translate(config, capability_of("fsdp2"), 2)
    assert there.left_out == ("reduce_bucket_size=13000", "overlap_comm=False")
    assert there.config == TrialConfig().replace({"zero_stage": 2})


def test_a_layout_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(RequestError, match="engine: the ddp engine does not honour zero_stage=2; sweep with --engine"):
        translate(TrialConfig().replace({"zero_stage": 2}), capability_of("ddp"), 2)
