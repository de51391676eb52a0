"""What is predicted of bottlenecks, prefixes and prompts: what ranks hold and send, and what longer samples inside cost."""

import dataclasses
from itertools import product

import numpy as np
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
METHODS: dict[str, dict[str, Value]] = {
    "bottleneck": {"adapter_size": 64}, "prefix": {"prefix_length": 32}, "prompt": {"prompt_length": 256},
}  # fmt: skip
BF16 = TrialConfig(precision="bf16", param_persistence_threshold=0)


def predicted(*configs: TrialConfig, rates: Coefficients | None = None) -> StepPrediction:
    return predict(cases_of(MODEL, CLUSTER, WORKLOAD, configs, "native"), rates or Coefficients())


def held(method: str, tensor: int, pipeline: int) -> tuple[float, float]:
    """Frozen and trained parameters of the first rank of a pipeline."""
    model = adapted(MODEL, BF16.replace(METHODS[method]))
    whole, divided = layer_adapter_elements(model)
    layers, prompt = MODEL.num_layers // pipeline, model.prompt_length * MODEL.hidden_size
    tables = MODEL.vocab_size * MODEL.hidden_size * (2 // pipeline)
    return (layers * MODEL.layer_parameters + tables) / tensor, layers * (whole + divided / tensor) + prompt


@pytest.mark.parametrize(("method", "stage", "layout"), [*product(METHODS, range(4), ((1, 1), (2, 1), (1, 2)))])
def test_what_a_rank_holds_and_sends(method: str, stage: int, layout: tuple[int, int]) -> None:
    tensor, pipeline = layout
    frozen, trained = held(method, tensor, pipeline)
    ranks = CLUSTER.world_size // (tensor * pipeline)
    knobs: dict[str, Value] = {
        "zero_stage": stage, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "pipeline_split": "even",
        "micro_batch_size": 1, "overlap_comm": False,
    }  # fmt: skip
    told = predicted(BF16.replace({**knobs, **METHODS[method]}), rates=BANDWIDTH_ALONE)
    states, gradients, parameters = (ranks if stage >= least else 1 for least in (1, 2, 3))
    tags = told.memory.by_tag
    if pipeline == 1 or method != "prompt":  # of a pipeline with a prompt another rank than the first may be fuller
        assert float(tags["optimizer_state"][0]) == pytest.approx(12 * trained / states, rel=1e-6)
        assert float(tags["gradients"][0]) == pytest.approx(4 * trained / gradients, rel=1e-6)
        assert float(tags["parameters"][0]) == pytest.approx(2 * (frozen + trained) / parameters, rel=1e-3)
    times = 64 // ranks
    reduced = 4 * trained * (1 if stage < 2 else times)
    gathered = {0: 4 * trained, 3: 2 * times * 2 * (frozen + trained)}.get(stage, 2 * trained)
    speed = CLUSTER.intra_node_bandwidth * BANDWIDTH_ALONE.link_efficiency
    if pipeline == 1:
        assert float(told.parts["data"][0]) == pytest.approx((ranks - 1) / ranks * (reduced + gathered) / speed, rel=1e-3)


def test_a_prompt_passes_the_layers_and_a_prefix_is_looked_at() -> None:
    configs = [
        BF16.replace({"micro_batch_size": 4, **knobs}) for knobs in (
            {"prefix_length": 1}, {"prompt_length": 256}, {"prefix_length": 256}, {"prefix_length": 1024},
        )
    ]  # fmt: skip
    products, longer, *_ = predicted(*configs, rates=Coefficients(attention_efficiency=1e9)).parts["compute"]
    assert 1.15 < longer / products < 1.25  # a quarter more tokens in the layers, none in the output projection
    plain, prompt, prefix, most = predicted(*configs).parts["compute"]
    assert longer / products < prompt / plain < 1.26  # and each attends to more
    assert 1.0 < prefix / plain < 1.02 < most / plain < 1.1


def test_a_prompt_makes_more_of_everything_but_logits() -> None:
    short, prompt = (BF16.replace({"micro_batch_size": 4, "prompt_length": length}) for length in (1, 512))
    kept = predicted(short, prompt).memory.by_tag["activations"]
    chunked = predicted(short.replace({"loss_chunk_size": 64}), prompt.replace({"loss_chunk_size": 64})).memory
    logits = 4 * 1024 * MODEL.vocab_size
    assert logits < kept[1] - kept[0] < 0.5 * kept[0]
    assert chunked.by_tag["activations"][1] / chunked.by_tag["activations"][0] == pytest.approx(1.5, rel=0.02)


def test_tensor_ranks_and_hops_move_the_tokens_of_the_prompt() -> None:
    tensor, pipeline = {"tensor_parallel_size": 8}, {"pipeline_parallel_size": 8, "micro_batch_size": 1}
    for part, layout in (("tensor", tensor), ("pipeline", pipeline)):
        short, prompt = predicted(*(BF16.replace({**layout, "prompt_length": length}) for length in (8, 1024))).parts[part]
        assert 1.5 < prompt / short < 2.1, part


def test_wider_bottlenecks_take_longer_on_every_tensor_rank() -> None:
    wide = [BF16.replace({"adapter_size": size, "micro_batch_size": 4}) for size in (64, 1024, 2048)]
    compute = predicted(*wide).parts["compute"]
    assert compute[0] < compute[1] < compute[2]
    divided = [config.replace({"tensor_parallel_size": 2}) for config in wide[1:]]
    share = [config.replace({"sequence_parallel": True}) for config in divided]
    alone, whole, cut = (predicted(*configs).parts["compute"] for configs in (wide[1:], divided, share))
    # Half as many replicas run twice as many micro-batches.
    assert (whole[1] - whole[0]) == pytest.approx(2 * (alone[1] - alone[0]), rel=0.05)
    assert (cut[1] - cut[0]) < 0.7 * (whole[1] - whole[0])


def test_many_configurations_at_once_are_as_each_alone() -> None:
    configs = [BF16.replace({**knobs, "zero_stage": stage}) for knobs in ({}, *METHODS.values()) for stage in (0, 3)]
    together, alone = predicted(*configs), [predicted(config) for config in configs]
    assert np.array_equal(together.seconds, [float(one.seconds[0]) for one in alone])
    assert np.array_equal(together.memory.total, [float(one.memory.total[0]) for one in alone])
