"""The objective goodput: the measured configuration that keeps most tokens wins, and the answer says how to run it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import played
import pytest
import table

from autotune.errors import RequestError
from autotune.frameworks.best_config import SCHEMA_PATH
from autotune.goodput.choice import choices, rates_of
from autotune.goodput.terms import parse_terms
from autotune.outcome.best_config import build_best_config
from autotune.outcome.verdict import decide
from autotune.prediction.planning.goodput_ranking import layout_of, saved_bytes
from autotune.request.job_fields import Objective
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_fields
from autotune.session.extrapolation import goodput_of
from autotune.session.resolve import resolve
from search_spaces.outcome import Outcome
from search_spaces.trial import CheckpointTimes, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store

TERMS = ("failures=rsc1", "checkpoint=synchronous", "restart_seconds=900", "write_bandwidth=2e10", "node_bandwidth=2e9")


def large(**changes: Any) -> Any:
    """A session for a 70B model on 2,048 nodes."""
    fields: dict[str, Any] = {
        "model": "llama-3-70b", "cluster": "dgx-h100:2048", "space": "zero", "global_batch_size": 16384,
        "sequence_length": 8192, "objective": "goodput", "goodput": TERMS, "pins": {"tensor_parallel_size": 8},
    }  # fmt: skip
    return resolve(request_from_fields(fields | changes), most_steps=100_000)


def of(config: TrialConfig, checkpoint: CheckpointTimes | None = None) -> TrialRecord:
    """A search trial of the configuration, as far as goodput reads it."""
    result = TrialResult(attempt="", outcome=Outcome.OK, checkpoint=checkpoint)
    return cast("TrialRecord", SimpleNamespace(config=config, result=result))


def test_the_efficiency_is_the_closed_form_on_the_measured_rate() -> None:
    session = large()
    config, rate = session.space.base.replace({"zero_stage": 3, "tensor_parallel_size": 8}), 900.0
    kept = goodput_of(session.request, session.space, session.model, None)
    question = kept.question
    layout = layout_of(question, config, 16384 / rate, saved_bytes(question, [config])[0])
    terms = parse_terms(TERMS)
    best = choices(layout, terms, rates_of(terms, 2048))[0]
    ways = session.ranking.choices_of(of(config), rate)
    assert ways[0].document() == best.document()
    tokens = rate * 8192 * 3600 / 16384
    assert session.ranking.efficiency(of(config), rate) == pytest.approx(best.tokens_kept_per_device_hour / tokens)
    assert 0.2 < session.ranking.efficiency(of(config), rate) < 0.98


def test_a_slower_layout_that_survives_failures_wins() -> None:
    """Stage 3 over all ranks has one copy of every state; in groups of 256, a failed node's exist elsewhere."""
    session = large()
    alone = session.space.base.replace({"zero_stage": 3, "tensor_parallel_size": 8})
    grouped = alone.replace({"hsdp_shard_size": 256})
    efficiency = session.ranking.efficiency
    assert efficiency(of(grouped), 900.0) > efficiency(of(alone), 900.0) * 1.02
    assert session.ranking.choices_of(of(grouped), 900.0)[0].run.recovery != "restart"
    assert [way.run.recovery for way in session.ranking.choices_of(of(alone), 900.0)] != []


def test_a_job_decides_by_goodput_and_its_document_says_how(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, objective="goodput", goodput=("tokens=1e9", "failures=rsc1"), racing=False)
    snapshot = played.run(session, store)
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None and verdict.rate(verdict.best) is not None
    document = build_best_config(session, snapshot)
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(document)), schema)
    goodput = document["decision"]["goodput"]
    way = goodput["ways"][0]
    assert document["objective"]["name"] == "goodput" and way["tokens"] == 1e9
    assert document["decision"]["gain"]["of"] == "goodput"
    rate = document["best"]["measured"]["samples_per_second"]["mean"]
    assert way["tokens_kept_per_second"] == pytest.approx(rate * 64, rel=0.05)
    assert way["hours"] == pytest.approx(1e9 / way["tokens_kept_per_second"] / 3600)
    assert set(way["hours_quantiles"]) == {"0.05", "0.5", "0.95"}


def test_a_measured_checkpoint_replaces_the_computed_one() -> None:
    session = large()
    config = session.space.base.replace({"zero_stage": 3, "tensor_parallel_size": 8})
    computed = session.ranking.choices_of(of(config), 900.0)[0].run.checkpoint
    timed = CheckpointTimes(bytes=10**12, save_seconds=20.0, load_seconds=10.0)
    measured = session.ranking.choices_of(of(config, timed), 900.0)[0].run.checkpoint
    assert measured.blocking_seconds == pytest.approx(20.0) and measured.load_seconds == pytest.approx(10.0)
    assert computed.blocking_seconds != pytest.approx(20.0)


def test_terms_that_nobody_stated_are_assumed() -> None:
    texts = {str(item) for item in large().request.resolved_assumed}
    assert "read_bandwidth=100 GB/s (--goodput read_bandwidth=VALUE)" in texts
    assert "tokens of 30 days of training (--goodput tokens=VALUE)" in texts
    assert not {name.partition("=")[0] for name in TERMS} & {item.name for item in large().request.resolved_assumed}
    assert large(objective="throughput", goodput=()).request.resolved_assumed == ()


def test_the_answer_for_a_larger_cluster_uses_its_failures(tmp_path: Path) -> None:
    small = {"cluster": "dgx-h100:1", "model": "llama-3-8b", "global_batch_size": 64, "space": "zero"}
    session = large(**small, answer_for="1024x8", pins={"tensor_parallel_size": 1})
    config = session.baselines[0]
    way = session.ranking.choices_of(of(config), 10.0)[0]
    assert way.devices >= 8192
    assert session.extrapolation is not None
    rate_there = 10.0 * session.extrapolation.efficiency(config, 10.0) * 1024
    assert way.tokens_kept_per_second < rate_there * 8192
    assert session.ranking.efficiency(of(config), 10.0) < session.extrapolation.efficiency(config, 10.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"goodput": ("failures=llama3",)}, "goodput: belongs to the objective goodput"),
        ({"objective": "goodput", "goodput": ("speed=1",)}, "goodput: 'speed' is not known"),
        ({"objective": "goodput", "goodput": ("spares=-1",)}, "spares: -1 is out of range"),
        ({"checkpoint_path": "/tmp"}, "checkpoint_path: belongs to the objective goodput"),
        ({"objective": "goodput", "run_device_hours": 10.0}, "which the objective goodput does not rank by"),
    ],
)
def test_bad_terms_are_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        JobRequest(model="llama-tiny", **fields)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_failures_and_scripts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^failures: 'none' is not known; use one of "):
        large(goodput=("failures=none",))
    command = {"command": ["python", "train.py"], "ranks": 2, "strategy": "random", "objective": Objective.GOODPUT}
    with pytest.raises(RequestError, match=r"^objective: goodput needs the bytes of a checkpoint"):
        resolve(request_from_fields(command))


def test_a_configuration_without_a_recovery_never_wins() -> None:
    session = large(goodput=(*TERMS, "recovery=drop"))
    config = session.space.base.replace({"zero_stage": 3, "tensor_parallel_size": 8})
    assert isinstance(config, TrialConfig)
    assert session.ranking.choices_of(of(config), 900.0) == () and session.ranking.efficiency(of(config), 900.0) < 1e-6
