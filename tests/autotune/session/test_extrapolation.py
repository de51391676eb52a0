"""Tune on few devices, answer for many: what is refused, who wins, and that nothing of it is told as measured."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import table
from played import run
from rich.console import Console

from autotune.errors import RequestError
from autotune.frameworks.best_config import SCHEMA_PATH
from autotune.objective.ranking import rate
from autotune.outcome.best_config import build_best_config
from autotune.prediction.fitting.residuals import REPEATED, projected
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from autotune.request.rows import request_from_row, request_to_row
from autotune.session.extrapolation import Extrapolation
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.text.result import print_result
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store


def session(folder: Path, **changes: Any) -> Session:
    return table.session(folder, **{"tune_on": "1x2", "answer_for": "4x2", **changes})


def of(session: Session) -> Extrapolation:
    assert session.extrapolation is not None
    return session.extrapolation


def test_the_batch_grows_with_the_replicas_and_the_layout_stays(tmp_path: Path) -> None:
    beyond = of(session(tmp_path))
    assert (beyond.small.world_size, beyond.large.world_size, beyond.growth) == (2, 8, 4)
    assert beyond.large.workload.global_batch_size == 4 * beyond.small.workload.global_batch_size
    assert beyond.large.domains == beyond.small.domains


@pytest.mark.prove
def test_the_rate_there_is_the_measured_one_times_the_predicted_ratio(tmp_path: Path, store: Store) -> None:
    tuned = session(tmp_path)
    document = build_best_config(tuned, run(tuned, store))
    jsonschema.validate(document, json.loads(SCHEMA_PATH.read_text()))
    config = TrialConfig().replace(document["best"]["config"])
    asked = Question(model=tuned.request.resolved_model, cluster=tuned.cluster, global_batch_size=8, sequence_length=64)  # type: ignore[arg-type]
    there = dataclasses.replace(asked, cluster=of(tuned).large.cluster, global_batch_size=32)
    small, large = (estimates(question, [config])[0].breakdown_seconds for question in (asked, there))
    measured, beyond = document["best"]["measured"]["samples_per_second"], document["extrapolated"]
    seconds, deviation = projected(8 / measured["mean"], small, large)
    assert beyond["samples_per_second"]["mean"] == pytest.approx(32 / seconds)
    assert (beyond["verified"], beyond["world_size"], beyond["global_batch_size"]) == (False, 8, 32)
    wide = math.log(beyond["samples_per_second"]["high"] / beyond["samples_per_second"]["low"])
    assert wide >= 2 * 1.96 * deviation
    assert document["launch"]["world_size"] == 2


def test_the_band_holds_measurement_and_prediction(tmp_path: Path) -> None:
    beyond, config = of(session(tmp_path)), TrialConfig()
    exact = beyond.rate(config, Interval(mean=100.0, low=100.0, high=100.0))
    vague = beyond.rate(config, Interval(mean=100.0, low=50.0, high=200.0))
    reach = math.log(exact.mean / exact.low)
    assert reach >= 1.96 * REPEATED
    assert math.log(vague.high / vague.mean) == pytest.approx(math.hypot(math.log(2), reach))
    assert beyond.rate(config, Interval(mean=1.0, low=0.0, high=2.0)).low == 0.0


@pytest.mark.prove
def test_the_best_there_wins_not_the_fastest_here(tmp_path: Path, store: Store) -> None:
    tuned = session(tmp_path, trials=24)

    def answer(config: TrialConfig) -> TrialResult:
        there, here = 101.0 if config.zero_stage == 1 else 100.0, 100.0
        for _ in range(50):
            here = there / of(tuned).efficiency(config, here)
        return table.ok(here)

    snapshot = run(tuned, store, table.runner(answer))
    document = build_best_config(tuned, snapshot)
    assert document["best"]["config"]["zero_stage"] == 1
    assert max(snapshot.searched, key=rate).config.zero_stage != 1


def test_no_trial_races_since_a_slower_one_may_be_faster_there(tmp_path: Path, store: Store) -> None:
    class Recorded(ReplayRunner):
        requests: list[TrialRequest] = []  # noqa: RUF012

        def submit(self, request: TrialRequest) -> str:
            self.requests.append(request)
            return super().submit(request)

    runner = Recorded(table.measured)
    run(session(tmp_path), store, runner)
    assert len(runner.requests) > 1
    assert all(request.rate_to_beat is None and request.world_size == 2 for request in runner.requests)


@pytest.mark.prove
def test_what_is_illegal_there_is_refused_before_a_trial(tmp_path: Path, store: Store) -> None:
    tuned = session(tmp_path, space="3d", answer_for="8x1", trials=8)
    snapshot = run(tuned, store)
    refused = [trial for trial in snapshot.searched if trial.config.tensor_parallel_size > 1]
    assert refused
    for trial in refused:
        assert (trial.outcome, trial.attempts) == (Outcome.INVALID, 0)
        assert trial.result is not None
        assert "at 8x1 2 tensor-parallel ranks do not fit" in trial.result.message
    with pytest.raises(RequestError, match="baseline: is refused by tensor-in-node: at 8x1"):
        session(tmp_path, space="3d", answer_for="8x1", baseline={"tensor_parallel_size": 2})


def test_what_is_predicted_not_to_fit_there_is_refused_and_what_fits_nowhere_is_left_to_its_trial(tmp_path: Path) -> None:
    beyond, config = of(session(tmp_path)), TrialConfig()
    assert beyond.refusal(config) is None
    scarce = dataclasses.replace(beyond.large.cluster, host_memory_bytes=4096)
    tight = dataclasses.replace(beyond, large=dataclasses.replace(beyond.large, cluster=scarce), _predictions={})
    told = tight.refusal(config.replace({"offload_optimizer": "cpu", "zero_stage": 1}))
    assert told is not None
    assert "predicted to fit with a probability of 0.0%" in told.message
    small = dataclasses.replace(beyond.small, cluster=dataclasses.replace(beyond.small.cluster, host_memory_bytes=4096))
    assert dataclasses.replace(tight, small=small, _predictions={}).refusal(told_config(config)) is None


def told_config(config: TrialConfig) -> TrialConfig:
    return config.replace({"offload_optimizer": "cpu", "zero_stage": 1})


def test_a_resume_asks_the_same(tmp_path: Path) -> None:
    tuned = session(tmp_path, answer_for="3x4")
    again = prepare(request_from_row(json.loads(json.dumps(request_to_row(tuned.request)))))
    assert of(again).large.hash == of(tuned).large.hash
    assert again.space.hash == tuned.space.hash


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"answer_for": "64"}, "answer_for: '64' is not NODESxDEVICES; write 2x8"),
        ({"tune_on": "0x2"}, "tune_on: '0x2' is not NODESxDEVICES"),
        ({"answer_for": 8}, "answer_for: 8 is not NODESxDEVICES"),
        ({"answer_for": None}, "answer_for: is missing; say what the answer is for"),
        ({"answer_for": "1x3"}, "answer_for: 1x3 is not a multiple of the 2 devices"),
        ({"answer_for": "1x2"}, "answer_for: 1x2 is not a multiple of the 2 devices"),
        ({"tune_on": "2x1"}, "tune_on: 2x1 has 2 nodes, and local is one"),
        ({"ranks": 2}, "ranks: is already given by tune_on"),
    ],
)
def test_bad_shapes_are_told_in_one_line(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError) as caught:
        session(tmp_path, **changes)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_report_labels_it(tmp_path: Path, store: Store) -> None:
    tuned = session(tmp_path, tune_on=None, ranks=2)
    document = build_best_config(tuned, run(tuned, store))
    console = Console(record=True, width=200, file=(tmp_path / "told.txt").open("w"))
    print_result(document, console)
    console.file.close()
    text = console.export_text()
    assert "extrapolated to 8 devices, not measured:" in text
    assert "global batch of 32" in text
