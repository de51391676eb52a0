"""What is predicted of schedules of the data: at their points, over the run, and for many configurations at once."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.activations import kept_layer_bytes
from autotune.prediction.equations.cases import scalar
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.schedules import at_point
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import question_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.data_schedule import points_of, useful_share
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = dataclasses.replace(resolve_model("llama-2-7b"), num_layers=8)
CLUSTER = resolve_cluster("dgx-a100:1")
RUN = Workload(global_batch_size=64, sequence_length=2048, training_steps=1000)
RATES = Coefficients()
PLAIN = TrialConfig(precision="bf16", micro_batch_size=4, zero_stage=2)
CURRICULUM: dict[str, Value] = {"curriculum_start_length": 256, "curriculum_steps": 600}
RANDOM_LTD: dict[str, Value] = {"random_ltd_start_tokens": 512, "random_ltd_steps": 600}
LAYOUTS: tuple[dict[str, Value], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"tensor_parallel_size": 2, "zero_stage": 1},
    {"pipeline_parallel_size": 2, "zero_stage": 1, "pipeline_split": "even"},
)


def seconds(config: TrialConfig, workload: Workload = RUN) -> float:
    return float(seconds_of(cases_of(MODEL, CLUSTER, workload, [config], "native"), RATES)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout) or "plain")
def test_a_point_of_a_curriculum_is_a_step_of_samples_of_that_length(layout: dict[str, Value]) -> None:
    """In time and in memory; over the run, whole steps' worth of tokens."""
    config = PLAIN.replace({**layout, **CURRICULUM})
    cases = cases_of(MODEL, CLUSTER, RUN, [config], "native")
    told = 0.0
    for point in points_of(config, RUN):
        whole = point.length == RUN.sequence_length
        there = predict(at_point(cases, scalar(0 if whole else point.length)), RATES)
        workload = dataclasses.replace(RUN, sequence_length=point.length)
        alone = predict(cases_of(MODEL, CLUSTER, workload, [PLAIN.replace(layout)], "native"), RATES)
        assert float(there.seconds[0]) == pytest.approx(float(alone.seconds[0]))
        assert float(there.memory.total[0]) == pytest.approx(float(alone.memory.total[0]))
        told += point.weight * float(alone.seconds[0])
    assert seconds(config) == pytest.approx(told / useful_share(config, RUN))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout) or "plain")
def test_dropped_tokens_save_the_middle_layers_time_and_memory(layout: dict[str, Value]) -> None:
    config = PLAIN.replace({**layout, **RANDOM_LTD})
    cases = cases_of(MODEL, CLUSTER, RUN, [config], "native")
    times, peaks = [], []
    for kept in (512, 1024, 1536, 0):
        there = predict(at_point(cases, scalar(kept)), RATES)
        times.append(float(there.seconds[0]))
        peaks.append(float(there.memory.total[0]))
    assert times == sorted(times)
    assert peaks == sorted(peaks)
    assert times[0] < seconds(config) < times[-1] == pytest.approx(seconds(PLAIN.replace(layout)))


def test_kept_tokens_activations_have_a_closed_form() -> None:
    """Layers x kept bytes a token, of 2 layers on all tokens and 6 on the kept ones."""
    cases = cases_of(MODEL, CLUSTER, RUN, [PLAIN.replace(RANDOM_LTD)], "native")
    bare = Coefficients(working_layers=0.0, workspace_bytes=0.0, activation_scale=1.0)
    tags = [memory(at_point(cases, scalar(kept)), bare).by_tag["activations"] for kept in (512, 0)]
    a_token = float(kept_layer_bytes(cases)[0])
    assert float((tags[1] - tags[0])[0]) == pytest.approx(4 * 6 * a_token * (2048 - 512))


def test_the_peak_of_a_run_is_that_of_whole_sequences() -> None:
    for schedule in (CURRICULUM, RANDOM_LTD):
        (told, plain) = (
            memory(cases_of(MODEL, CLUSTER, RUN, [config], "native"), RATES).total
            for config in (PLAIN.replace(schedule), PLAIN)
        )
        assert float(told[0]) == float(plain[0])


def test_many_configurations_are_predicted_as_each_alone() -> None:
    configs = [PLAIN.replace({**layout, **more}) for layout in LAYOUTS for more in ({}, CURRICULUM, RANDOM_LTD)]
    together = seconds_of(cases_of(MODEL, CLUSTER, RUN, configs, "native"), RATES)
    assert together == pytest.approx(np.array([seconds(config) for config in configs]))


def test_an_estimate_tells_the_points() -> None:
    question = question_of(
        MODEL, CLUSTER, global_batch_size=64, sequence_length=2048, training_steps=1000,
        pins={"precision": "bf16", "zero_stage": 2, "micro_batch_size": 4, **CURRICULUM},
    )  # fmt: skip
    (told,) = estimates(question, [question.config()])
    assert [(point.length, point.kept) for point in told.schedule] == [(256, 256), (1152, 1152), (2048, 2048)]
    assert [point["length"] for point in told.document()["predicted"]["schedule"]] == [256, 1152, 2048]
    spent = sum(point.weight * point.step_seconds for point in told.schedule)
    tokens = sum(point.weight * point.length for point in told.schedule) * 64
    assert told.tokens_per_second == pytest.approx(tokens / spent)
    assert told.schedule[-1].peak_memory_bytes == pytest.approx(told.peak_memory_bytes.mean)
    assert told.samples_per_second.mean == pytest.approx(told.tokens_per_second / 2048)
