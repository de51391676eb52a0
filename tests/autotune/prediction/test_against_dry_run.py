"""The equations of memory against the real engine on tensors without data: they share no code."""

import dataclasses

import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import predict
from executor.dry.dry_run import dry_run
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

MODEL = dataclasses.replace(resolve_model("llama-2-7b"), num_layers=4)
WORKLOAD = Workload(global_batch_size=64, sequence_length=1024)
QUANTISED: dict[str, Value] = {"lora_rank": 16, "lora_targets": "both", "micro_batch_size": 2}
TENSOR: dict[str, Value] = {"tensor_parallel_size": 4, "sequence_parallel": True, "zero_stage": 1, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("knobs", "within"),
    sampled(
        [
            ({"zero_stage": 0, "micro_batch_size": 2}, 0.05),
            ({"zero_stage": 1}, 0.05),
            ({"zero_stage": 2}, 0.06),
            ({"zero_stage": 3}, 0.15),
            ({"zero_stage": 1, "activation_checkpointing": "full", "micro_batch_size": 2}, 0.10),
            ({"zero_stage": 1, "pipeline_parallel_size": 2}, 0.15),
            ({"zero_stage": 1, "recompute_modules": "norms", "micro_batch_size": 2}, 0.06),
            ({"recompute_modules": "norms+activations+attention", "micro_batch_size": 2}, 0.06),
            ({**TENSOR, "recompute_modules": "norms+activations"}, 0.06),
            ({**TENSOR, "async_tensor_parallel": True}, 0.05),
            ({**TENSOR, "async_tensor_parallel": True, "activation_checkpointing": "selective"}, 0.06),
            ({"zero_stage": 0, "optimizer": "muon"}, 0.05),
            ({"zero_stage": 1, "optimizer": "adamw8bit"}, 0.05),
            ({"zero_stage": 0, "accumulation_dtype": "bf16"}, 0.05),
            ({"zero_stage": 1, "accumulation_dtype": "bf16"}, 0.12),
            ({"zero_stage": 2, "accumulation_dtype": "bf16"}, 0.06),
            ({"zero_stage": 1, "reduce_dtype": "bf16"}, 0.06),
            ({"context_parallel_size": 4, "context_parallel_method": "gather", "micro_batch_size": 4}, 0.05),
            ({"context_parallel_size": 4, "context_parallel_method": "ulysses", "micro_batch_size": 4}, 0.05),
            ({"attention_window": 256, "micro_batch_size": 2}, 0.05),
            ({"attention_window": 256, "attention_global_tokens": 32, "micro_batch_size": 2}, 0.05),
            ({"zero_stage": 1, "overlap_param_gather": True}, 0.05),
            ({"zero_stage": 2, "overlap_param_gather": True, "loss_chunk_size": 128}, 0.06),
            ({"zero_stage": 1, "overlap_param_gather": True, "offload_optimizer": "cpu"}, 0.06),
            ({"zero_stage": 1, "offload_activations": True, "micro_batch_size": 2, "loss_chunk_size": 128}, 0.10),
            ({"zero_stage": 1, "offload_activations": True, "micro_batch_size": 2, "activation_checkpointing": "full"}, 0.10),
            ({"zero_stage": 3, "gather_dtype": "int8"}, 0.18),
            ({"zero_stage": 3, "secondary_shard_size": 8}, 0.15),
            ({"zero_stage": 2, "reduce_dtype": "int8"}, 0.06),
            ({"zero_stage": 0, "reduce_dtype": "int8"}, 0.06),
            ({"zero_stage": 0, "optimizer": "onebit_adam"}, 0.06),
            ({"mtp_layers": 1, "micro_batch_size": 2}, 0.05),
            ({"mtp_layers": 2, "zero_stage": 1, "loss_chunk_size": 128}, 0.10),
            ({"mtp_layers": 1, "zero_stage": 1, "activation_checkpointing": "full"}, 0.10),
            ({"lora_rank": 16}, 0.10),
            ({"lora_rank": 16, "lora_targets": "both", "zero_stage": 1, "micro_batch_size": 2}, 0.05),
            ({"adapter_size": 64, "zero_stage": 1, "micro_batch_size": 2}, 0.12),
            ({"prefix_length": 32}, 0.10),
            ({"prompt_length": 64}, 0.10),
            ({**QUANTISED, "frozen_dtype": "nf4", "zero_stage": 1}, 0.06),
            ({**QUANTISED, "frozen_dtype": "int8", "zero_stage": 3}, 0.15),
        ],
        every=40,
    ),
    ids=str,
)
def test_allocated_memory(knobs: dict[str, Value], within: float) -> None:
    config = TrialConfig(precision="bf16").replace(knobs)
    cluster = resolve_cluster("dgx-a100:4")
    cases = cases_of(MODEL, cluster, WORKLOAD, [config], "native")
    predicted = float(predict(cases, Coefficients()).memory.allocated[0])
    real = dry_run(MODEL, config, WORKLOAD, cluster.world_size, backend="nccl").peak_memory_bytes
    assert predicted == pytest.approx(real, rel=within)
