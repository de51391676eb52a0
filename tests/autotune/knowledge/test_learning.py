"""What predictions learn from measurements by others."""

import dataclasses

import numpy as np
import pytest
from known import REAL, measured, run_job

from autotune.knowledge.learning import learned_from
from autotune.knowledge.measurement import Measurement, local_measurements
from autotune.prediction.equations.coefficients import shipped_rates
from autotune.prediction.planning.calibrated import calibrated
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import question_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from storage.store import Store


def predicted(measurements: list[Measurement]) -> tuple[float, float]:
    """Step seconds of the defaults, predicted with measurements by others, and as they are."""
    asked = question_of(
        resolve_model("qwen2-0.5b"), resolve_cluster("dgx-a100:1"), global_batch_size=32, sequence_length=1024,
        pins={"precision": "bf16", "zero_stage": 1},
    )  # fmt: skip
    borrowed = learned_from(measurements, None, asked.cluster, "native")
    known = calibrated(None, asked.cluster, "native", shipped_rates(), borrowed=borrowed)
    informed = dataclasses.replace(asked, coefficients=known.rates, residuals=known.residuals, calibration_source=known.source)
    truth = dataclasses.replace(asked, coefficients=REAL)
    first, second = (estimates(each, [asked.config()])[0].step_seconds.mean for each in (informed, truth))
    return first, second


@pytest.mark.prove
def test_measurements_on_the_same_devices_correct_predictions() -> None:
    blind, truth = predicted([])
    informed, _ = predicted(measured("theirs", 24))
    assert abs(np.log(informed / truth)) < 0.5 * abs(np.log(blind / truth))
    assert abs(np.log(informed / truth)) < 0.06


def test_an_own_job_is_not_learned_from_twice(store: Store) -> None:
    run_job(store, measured("x", 6))
    own = local_measurements(store)
    assert len(own) == 6
    borrowed = learned_from(own, store, resolve_cluster("dgx-a100:1"), "native")
    assert (borrowed.runs, borrowed.text) == ((), "")


def test_measurements_of_what_is_not_alike_hardly_narrow_a_band() -> None:
    cluster, shipped = resolve_cluster("dgx-a100:1"), shipped_rates()

    def spread(model: str) -> float:
        borrowed = learned_from(measured("theirs", 24), None, cluster, "native", resolve_model(model))
        return calibrated(None, cluster, "native", shipped, borrowed=borrowed).rates.time_spread

    alike, unlike = spread("qwen2-0.5b"), spread("mixtral-8x22b")
    assert alike < 0.8 * shipped.time_spread < 0.95 * shipped.time_spread < unlike


def test_what_all_values_of_an_unlike_source_are_worth_is_bounded() -> None:
    (runs,) = learned_from(measured("theirs", 24), None, resolve_cluster("dgx-a100:1"), "deepspeed").runs
    assert runs.likeness == 0.5
    assert 24 * runs.worth == pytest.approx(0.96, rel=0.01)
    assert dataclasses.replace(runs, likeness=1.0).worth == 1.0
