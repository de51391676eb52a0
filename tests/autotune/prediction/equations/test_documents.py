"""Documents in predictions: padding costs what tokens cost, packed attention what documents look at."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.compute import attention_forward
from autotune.prediction.equations.kernels import attention_slowdown
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import question_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.data_schedule import attended_tokens
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL, CLUSTER = resolve_model("llama-3-8b"), resolve_cluster("dgx-a100:2")
LENGTHS = (4096, 2048, 1024, 1024, 512, 256, 700, 3000)
WORK = Workload(global_batch_size=64, sequence_length=4096, document_lengths=LENGTHS)
WHOLE = dataclasses.replace(WORK, document_lengths=())
RATES = Coefficients()
PADDED = TrialConfig(precision="bf16", zero_stage=3, micro_batch_size=2)
PACKED = PADDED.replace({"pack_sequences": True})
LAYOUTS = (
    {},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2, "zero_stage": 1},
    {"activation_checkpointing": "full"},
)


def cases(*configs: TrialConfig, workload: Workload = WORK) -> Cases:
    return cases_of(MODEL, CLUSTER, workload, configs, "native")


def seconds(config: TrialConfig, workload: Workload = WORK) -> float:
    return float(seconds_of(cases(config, workload=workload), RATES)[0])


def test_a_padded_row_takes_as_long_as_a_whole_sample() -> None:
    share = sum(LENGTHS) / len(LENGTHS) / 4096
    assert seconds(PADDED) == pytest.approx(seconds(PADDED, WHOLE) / share)


def slowdown(tokens: float) -> float:
    return float(attention_slowdown(np.full(1, tokens), np.full(1, float(MODEL.head_dim)))[0])


def test_attention_of_packed_rows_is_of_documents() -> None:
    padded, packed = attention_forward(cases(PADDED, PACKED), RATES)
    seen = attended_tokens(LENGTHS, 4096)
    assert packed / padded == pytest.approx(seen * slowdown(seen) / (4096 * slowdown(4096)))
    assert padded == pytest.approx(float(attention_forward(cases(PADDED, workload=WHOLE), RATES)[0]))


def test_attention_within_chunks_of_packed_rows_is_of_pieces_of_documents() -> None:
    chunked = dataclasses.replace(MODEL, sliding_window=1000, chunked_attention=True, whole_layers=(False, False, False, True))
    packed = cases_of(chunked, CLUSTER, WORK, [PACKED], "native")
    seen = 0.75 * attended_tokens(LENGTHS, 4096, 1000) + 0.25 * attended_tokens(LENGTHS, 4096)
    assert attention_forward(packed, RATES) / attention_forward(cases(PADDED), RATES) == pytest.approx(
        seen * slowdown(seen) / (4096 * slowdown(4096))
    )


def test_packing_is_faster_by_more_than_its_rows_are_fewer() -> None:
    rows = len(LENGTHS) / 4  # 4096; 3000 + 1024; 2048 + 1024 + 700 + 256; 512
    assert seconds(PADDED) / seconds(PACKED) > rows
    full = dataclasses.replace(WORK, document_lengths=(4096,))
    assert seconds(PACKED.replace({"pack_sequences": False}), full) == pytest.approx(seconds(PADDED, WHOLE))


def test_documents_put_together_keep_their_results_twice() -> None:
    padded, packed, whole = (
        predict(made, RATES).memory.by_tag["activations"]
        for made in (cases(PADDED), cases(PACKED), cases(PADDED, workload=WHOLE))
    )
    assert float(padded[0]) == float(whole[0]) < float(packed[0])


def test_many_configurations_are_predicted_as_each_alone() -> None:
    configs = [base.replace(layout) for layout in LAYOUTS for base in (PADDED, PACKED)]
    together = seconds_of(cases(*configs), RATES)
    assert together == pytest.approx(np.array([seconds(config) for config in configs]))


def test_an_estimate_is_of_useful_tokens() -> None:
    pins = {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 2, "pack_sequences": True}
    question = question_of(MODEL, CLUSTER, global_batch_size=64, sequence_length=4096, document_lengths=LENGTHS, pins=pins)
    config = question.config()
    assert config.pack_sequences
    (told,) = estimates(question, [config])
    assert told.samples_per_second.mean == pytest.approx(64 / float(seconds_of(cases(config), question.rates)[0]))
    assert told.tokens_per_second == pytest.approx(told.samples_per_second.mean * 4096)
    per_token = sum(MODEL.flops_per_token(one) * one for one in LENGTHS) / sum(LENGTHS)
    assert told.tflops_per_device * 16e12 == pytest.approx(told.tokens_per_second * per_token)


def test_a_plan_packs_where_it_may_and_samples_are_no_shorter_than_documents() -> None:
    pins = {"pack_sequences": (False, True), "micro_batch_size": (1, 2), "precision": "bf16"}
    question = question_of(
        MODEL, CLUSTER, global_batch_size=64, sequence_length=4096, document_lengths=LENGTHS, space="zero", pins=pins
    )
    assert plan(question, PlanOptions(top=1)).plans[0].estimate.config.pack_sequences
    grown = largest(question, Dimension.SEQUENCE_LENGTH, PROBABILITY)
    assert grown.value >= max(LENGTHS)
