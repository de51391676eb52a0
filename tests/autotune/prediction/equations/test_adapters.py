"""What is predicted of low-rank adapters against closed forms: what a rank holds and what ranks exchange, at every stage."""

import dataclasses
from itertools import product

import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import StepPrediction, predict
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.adapters import adapted, layer_adapter_elements
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = dataclasses.replace(resolve_model("llama-2-7b"), num_layers=8)
WORKLOAD = Workload(global_batch_size=64, sequence_length=1024)
CLUSTER = resolve_cluster("dgx-a100:1")
BANDWIDTH_ALONE = Coefficients(data_exposed=1.0, overlap_slowdown=0.0, link_seconds=1e-12, chunk_seconds=0.0)
"""All communication is told, and its bytes alone."""
WIDTH = 2
"""Bytes of a bf16 parameter."""


def predicted(rates: Coefficients, **knobs: Value) -> StepPrediction:
    config = TrialConfig(precision="bf16", lora_rank=16, lora_targets="both", micro_batch_size=4).replace(knobs)
    return predict(cases_of(MODEL, CLUSTER, WORKLOAD, [config], "native"), rates)


def held(tensor: int, pipeline: int) -> tuple[float, float]:
    """Frozen parameters and adapters of the first rank of a pipeline: half of the layers and the input table, or all."""
    whole, divided = layer_adapter_elements(adapted(MODEL, TrialConfig(lora_rank=16, lora_targets="both")))
    layers = MODEL.num_layers // pipeline
    tables = MODEL.vocab_size * MODEL.hidden_size * (2 // pipeline)
    return (layers * MODEL.layer_parameters + tables) / tensor, layers * (whole + divided / tensor)


@pytest.mark.parametrize(("stage", "layout"), [*product(range(4), ((1, 1), (2, 1), (1, 2), (2, 2)))])
def test_what_a_rank_holds(stage: int, layout: tuple[int, int]) -> None:
    tensor, pipeline = layout
    frozen, adapters = held(tensor, pipeline)
    ranks = CLUSTER.world_size // (tensor * pipeline)
    tags = predicted(
        Coefficients(),
        zero_stage=stage, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, pipeline_split="even",
        micro_batch_size=1, param_persistence_threshold=0,
    ).memory.by_tag  # fmt: skip
    states, gradients, parameters = (ranks if stage >= least else 1 for least in (1, 2, 3))
    assert float(tags["optimizer_state"][0]) == pytest.approx(12 * adapters / states, rel=1e-6)
    assert float(tags["gradients"][0]) == pytest.approx(4 * adapters / gradients, rel=1e-6)
    assert float(tags["parameters"][0]) == pytest.approx(WIDTH * (frozen + adapters) / parameters, rel=1e-3)


@pytest.mark.parametrize(("stage", "tensor"), [*product(range(4), (1, 2))])
def test_what_data_parallel_ranks_send(stage: int, tensor: int) -> None:
    """Adapters alone are reduced; at stage 3 what is frozen is gathered with them, forward and backward."""
    frozen, adapters = held(tensor, 1)
    ranks = CLUSTER.world_size // tensor
    times = 64 // (4 * ranks)
    reduced = {0: adapters, 1: adapters}.get(stage, times * adapters) * 4
    gathered = {0: 4 * adapters, 3: 2 * times * WIDTH * (frozen + adapters)}.get(stage, WIDTH * adapters)
    rates = BANDWIDTH_ALONE
    knobs = {"zero_stage": stage, "tensor_parallel_size": tensor, "param_persistence_threshold": 0, "overlap_comm": False}
    seconds = float(predicted(rates, **knobs).parts["data"][0])
    speed = CLUSTER.intra_node_bandwidth * rates.link_efficiency
    assert seconds == pytest.approx((ranks - 1) / ranks * (reduced + gathered) / speed, rel=1e-3)


def test_what_is_frozen_and_small_is_not_gathered_again() -> None:
    knobs: dict[str, Value] = {"zero_stage": 3, "overlap_comm": False}
    kept, gathered = (
        predicted(BANDWIDTH_ALONE, param_persistence_threshold=size, **knobs) for size in (MODEL.parameter_count, 0)
    )
    assert kept.parts["data"][0] < 0.2 * gathered.parts["data"][0]
    assert kept.memory.by_tag["parameters"][0] > 4 * gathered.memory.by_tag["parameters"][0]


def test_zero_bubble_has_nothing_to_fill_its_idle_time_with() -> None:
    pipeline: dict[str, Value] = {"pipeline_parallel_size": 4, "virtual_stages": 2, "micro_batch_size": 1}

    def idle(schedule: str, **knobs: Value) -> float:
        return float(predicted(Coefficients(), **pipeline, pipeline_schedule=schedule, **knobs).parts["pipeline"][0])

    assert idle("interleaved_zero_bubble") == pytest.approx(idle("interleaved_1f1b"))
    assert idle("interleaved_zero_bubble", lora_rank=0) < 0.7 * idle("interleaved_1f1b", lora_rank=0)


BITS = {"int8": 1 + 4 / 64, "nf4": 1 / 2 + 4 / 64}
"""Bytes of a quantised element, its share of a scale included."""


def quantised_bytes(dtype: str, tensor: int) -> float:
    """Bytes of all frozen parameters of a rank."""
    tables = 2 * MODEL.vocab_size * MODEL.hidden_size
    return (MODEL.num_layers * MODEL.layer_parameters * BITS[dtype] + tables * WIDTH) / tensor


@pytest.mark.parametrize(("stage", "tensor", "dtype"), [*product(range(4), (1, 2), BITS)])
def test_what_quantised_matrices_take_and_cost(stage: int, tensor: int, dtype: str) -> None:
    ranks = CLUSTER.world_size // tensor
    knobs: dict[str, Value] = {
        "zero_stage": stage, "tensor_parallel_size": tensor, "param_persistence_threshold": 0, "overlap_comm": False,
        "micro_batch_size": 1,
    }  # fmt: skip
    _, adapters = held(tensor, 1)
    told = predicted(BANDWIDTH_ALONE, frozen_dtype=dtype, **knobs)
    frozen, whole = quantised_bytes(dtype, tensor), WIDTH * adapters
    shared = ranks if stage == 3 else 1
    assert float(told.memory.by_tag["parameters"][0]) == pytest.approx((frozen + whole) / shared, rel=1e-3)
    if stage == 3:
        times = 64 // ranks
        moved = times * (4 * adapters + 2 * (frozen + whole))
        speed = CLUSTER.intra_node_bandwidth * BANDWIDTH_ALONE.link_efficiency
        assert float(told.parts["data"][0]) == pytest.approx((ranks - 1) / ranks * moved / speed, rel=1e-3)
    in_precision = predicted(BANDWIDTH_ALONE, **knobs)
    assert told.parts["compute"][0] > in_precision.parts["compute"][0]
    assert float(told.memory.host[0]) == 0


def test_quantised_shares_in_host_memory() -> None:
    _, adapters = held(1, 1)
    told = predicted(Coefficients(), frozen_dtype="nf4", zero_stage=3, offload_param="cpu", param_persistence_threshold=0)
    expected = (quantised_bytes("nf4", 1) + WIDTH * adapters) / CLUSTER.world_size
    assert float(told.memory.host[0]) == pytest.approx(expected, rel=1e-3)
