"""What context ranks send in attention, against the collectives of the real engine on tensors without data."""

import dataclasses

import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.compute import context_messages
from executor.dry.dry_run import dry_run
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import Latent, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

GROUPED = dataclasses.replace(resolve_model("llama-3-8b"), num_layers=2, hidden_size=1024, num_attention_heads=8)
LATENT = dataclasses.replace(
    GROUPED, num_key_value_heads=8, head_dim=192, latent=Latent(query_rank=0, key_value_rank=256, rotated=64, value_size=128)
)
CLUSTER, WORKLOAD = resolve_cluster("dgx-a100:1"), Workload(global_batch_size=8, sequence_length=512)


@pytest.mark.prove
@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_bytes_and_messages_are_those_of_the_engine(model: ModelSpec, method: str) -> None:
    config = TrialConfig(
        precision="bf16", context_parallel_size=4, tensor_parallel_size=2, context_parallel_method=method, micro_batch_size=4
    )
    sent, times = context_messages(cases_of(model, CLUSTER, WORKLOAD, [config], "native"))
    counts = dry_run(model, config, WORKLOAD, CLUSTER.world_size, backend="nccl").collectives
    measured = [item for item in counts if item.mesh_dimension == "context" and item.operation != "all_reduce"]
    layers_and_directions = model.num_layers * 2 * config.gradient_accumulation_steps(8, CLUSTER.world_size)
    assert sum(item.count for item in measured) == times[0] * layers_and_directions
    assert sum(item.bytes for item in measured) == sent[0] * layers_and_directions
