"""What is predicted of blocks as CUDA graphs: fewer launches, and memory that graphs keep to themselves."""

from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.compute import micro_batch
from autotune.prediction.equations.kernels import STATIC_MESSAGES, launches
from autotune.prediction.equations.step import StepPrediction, predict
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL, CLUSTER = resolve_model("llama-2-7b"), resolve_cluster("dgx-a100:1")
RATES = Coefficients()


def predicted(*knobs: dict[str, Any], length: int = 4096) -> StepPrediction:
    configs = [TrialConfig(precision="bf16").replace(own) for own in knobs]
    return predict(cases_of(MODEL, CLUSTER, Workload(global_batch_size=64, sequence_length=length), configs, "native"), RATES)


def test_what_the_host_launches_nearly_vanishes_and_copies_come_beside_it() -> None:
    both = [TrialConfig(precision="bf16", cuda_graphs=on) for on in (False, True)]
    small, large = (
        cases_of(resolve_model(name), CLUSTER, Workload(global_batch_size=64, sequence_length=length), both, "native")
        for name, length in (("gpt2", 64), ("llama-2-7b", 4096))
    )
    assert launches(small, 2.0) == pytest.approx([3.0, 0.6])
    few, many = (micro_batch(cases, RATES).layer for cases in (small, large))
    assert few[1] < 0.4 * few[0], "a few tokens are bound by launches"
    assert many[0] < many[1] < 1.03 * many[0], "many are bound by the device, and copies come beside it"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_graphs_keep_gradients_and_hidden_states_of_every_layer(stage: int) -> None:
    knobs = {"zero_stage": stage, "micro_batch_size": 2, "loss_chunk_size": 128}
    plain, graphed = (predicted({**knobs, "cuda_graphs": on}).memory for on in (False, True))
    layer = 4 * MODEL.hidden_size**2 + 3 * MODEL.hidden_size * MODEL.ffn_hidden_size
    gradients = graphed.by_tag["gradients"] - plain.by_tag["gradients"]
    assert gradients[0] == pytest.approx(2 * MODEL.num_layers * layer, rel=1e-3)
    messages = STATIC_MESSAGES * MODEL.num_layers * 2 * 4096 * MODEL.hidden_size * 2
    more = graphed.allocated[0] - plain.allocated[0] - gradients[0]
    # At stage 0 all gradients meet no activations any more without graphs; those of graphs stay to the end.
    assert more >= 0.99 * messages
    for tag in ("parameters", "optimizer_state"):
        assert graphed.by_tag[tag] == pytest.approx(plain.by_tag[tag])


def test_adapters_alone_have_static_gradients() -> None:
    adapted = [{"lora_rank": 16, "cuda_graphs": on} for on in (False, True)]
    plain, graphed = (predicted(own).memory.by_tag["gradients"][0] for own in adapted)
    assert 0 < graphed - plain < 0.01 * 2 * MODEL.parameter_count


def test_each_case_is_predicted_as_if_it_were_alone() -> None:
    knobs: list[dict[str, Any]] = [
        {"cuda_graphs": True}, {"zero_stage": 2, "cuda_graphs": True, "overlap_param_gather": True},
        {"zero_stage": 3}, {"cuda_graphs": True, "micro_batch_size": 4, "offload_optimizer": "cpu", "zero_stage": 1},
        {"tensor_parallel_size": 4, "activation_checkpointing": "full"},
    ]  # fmt: skip
    together, alone = predicted(*knobs), [predicted(own) for own in knobs]
    assert together.seconds == pytest.approx(np.concatenate([own.seconds for own in alone]))
    assert together.memory.total == pytest.approx(np.concatenate([own.memory.total for own in alone]))
