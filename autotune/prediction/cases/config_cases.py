"""Configurations of a model on a cluster as cases: what `TrialConfig`, `ModelSpec` and `ClusterSpec` say, in arrays."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.adapters import adapted_shapes
from autotune.prediction.equations.cases import (
    CONTEXT_METHODS,
    RECOMPUTE,
    SCHEDULES,
    Array,
    Cases,
    Layouts,
    Shapes,
    Software,
    scalar,
)
from autotune.prediction.equations.documents import documented
from autotune.prediction.equations.float8 import rounding_bytes
from autotune.prediction.equations.mixed import devices_of, hardware_of
from autotune.prediction.equations.optimizer import MOVED
from autotune.prediction.equations.schedules import scheduled
from autotune.prediction.equations.software import software_named
from autotune.prediction.equations.uneven import layout_key, tabled
from autotune.prediction.equations.windows import keys_read, windowed_shapes
from search_spaces.cluster import ClusterSpec
from search_spaces.compression import INT8, INTEGER_BYTES, REDUCED_BYTES, SIGN_BYTES
from search_spaces.fused_kernels import GATE, KERNEL_CHOICES, LIGER, NORM, ROTATION, replaced
from search_spaces.model import ModelSpec, Position
from search_spaces.optimizers import moment_bytes
from search_spaces.states import PARAMETER_BYTES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from search_spaces.windows import window_of

MASTER = 4.0
"""Bytes of an element of the master copy."""


def cases_of(model: ModelSpec, cluster: ClusterSpec, workload: Workload, configs: Sequence[TrialConfig], engine: str) -> Cases:
    """The cases of `configs`, in their order. `engine` names the profile of `software.toml` that keeps the memory."""
    precision = configs[0].precision
    laid_out, ranks = tabled([layout_key(config, model, cluster, workload.sequence_length) for config in configs])
    shapes = adapted_shapes(shapes_of(model, workload.sequence_length), model, configs)
    layouts = scheduled(layouts_of(configs, workload.global_batch_size, cluster.world_size), configs, workload)
    return Cases(
        shapes=documented(windowed_shapes(shapes, model, workload.sequence_length, configs), workload, configs),
        hardware=hardware_of(cluster, precision),
        layouts=dataclasses.replace(layouts, laid_out=laid_out) if ranks else layouts,
        software=engine_software(model, engine, {config.attention_backend for config in configs}),
        ranks=ranks,
        devices=devices_of(cluster, precision),
    )


def engine_software(model: ModelSpec, engine: str, attention: set[str]) -> Software:
    """The profile of an engine; `math` attention keeps the attention matrix."""
    kernel = " kernel=torch" if attention == {"math"} else ""
    return software_named(f"engine={engine}{kernel}", gated=model.gated_mlp)[0]


def shapes_of(model: ModelSpec, sequence_length: int) -> Shapes:
    """The shape of a model that is trained on samples of so many tokens."""
    by_liger = replaced(LIGER, model, tensor_parallel_size=1)
    return Shapes(
        layers=scalar(model.num_layers),
        hidden=scalar(model.hidden_size),
        heads=scalar(model.num_attention_heads),
        query=scalar(model.num_attention_heads * model.head_dim),
        key_value=scalar(model.num_key_value_heads * model.head_dim),
        ffn=scalar(model.ffn_hidden_size),
        matrices=scalar(3 if model.gated_mlp else 2),
        vocabulary=scalar(model.vocab_size),
        positions=scalar(sequence_length if model.position is Position.LEARNED else 0),
        sequence=scalar(sequence_length),
        window=scalar(keys_read(window_of(model), sequence_length)),
        tied=scalar(float(model.tied_embeddings)),
        experts=scalar(model.num_experts),
        experts_per_token=scalar(_rows_per_token(model, sequence_length)),
        adapter=scalar(model.adapter_parameters / model.num_layers),
        adapter_divided=scalar(0.0),
        frozen_bytes=scalar(model.frozen_bytes),
        dropout=scalar(0.0),
        rms_norm=scalar(NORM in by_liger),
        rotates_whole=scalar(ROTATION in by_liger),
        silu_gated=scalar(GATE in by_liger),
    )


def layouts_of(configs: Sequence[TrialConfig], global_batch_size: int, world_size: int) -> Layouts:
    """The configurations on so many ranks."""

    def column(values: list[float]) -> Array:
        return np.array(values, dtype=np.float64)

    shard = [config.hsdp_shard_size if config.zero_stage == 3 else 0 for config in configs]
    return Layouts(
        data=column([config.data_parallel_size(world_size) for config in configs]),
        tensor=column([config.tensor_parallel_size for config in configs]),
        pipeline=column([config.pipeline_parallel_size for config in configs]),
        context=column([config.context_parallel_size for config in configs]),
        expert=column([config.expert_parallel_size for config in configs]),
        shard=column([size or config.zero_ranks(world_size) for size, config in zip(shard, configs, strict=True)]),
        zero_stage=column([config.zero_stage for config in configs]),
        micro_batch=column([config.micro_batch_size for config in configs]),
        accumulation=column([config.gradient_accumulation_steps(global_batch_size, world_size) for config in configs]),
        sequence_parallel=column([config.sequence_parallel for config in configs]),
        virtual=column([config.virtual_stages if config.pipeline_parallel_size > 1 else 1 for config in configs]),
        schedule=column([SCHEDULES.index(config.pipeline_schedule) for config in configs]),
        recompute=column([RECOMPUTE.index(config.activation_checkpointing) for config in configs]),
        recompute_every=column([config.checkpoint_every_k for config in configs]),
        offload_optimizer=column([config.offload_ratio * (config.offload_optimizer != "none") for config in configs]),
        offload_parameters=column([config.offload_param != "none" for config in configs]),
        parameter_bytes=column([PARAMETER_BYTES[config.precision] for config in configs]),
        reduce_bytes=column([sent_bytes(config.optimizer, config.reduce_dtype) for config in configs]),
        reduce_bucket=column([config.reduce_bucket_size for config in configs]),
        allgather_bucket=column([config.allgather_bucket_size for config in configs]),
        prefetch_bucket=column([config.prefetch_bucket_size for config in configs]),
        persistence=column([config.param_persistence_threshold for config in configs]),
        max_live=column([config.max_live_parameters for config in configs]),
        overlap=column([config.overlap_comm for config in configs]),
        defer=column([config.defer_gradient_reduction for config in configs]),
        reshard=column([config.reshard_after_forward for config in configs]),
        loss_chunk=column([config.loss_chunk_size for config in configs]),
        balanced=column([config.pipeline_split == "balanced" for config in configs]),
        accumulation_bytes=column([PARAMETER_BYTES[config.accumulation_dtype] for config in configs]),
        moment_bytes=column([moment_bytes(config.optimizer, MASTER, config.zero_ranks(world_size))[0] for config in configs]),
        other_moment_bytes=column(
            [moment_bytes(config.optimizer, MASTER, config.zero_ranks(world_size))[1] for config in configs]
        ),
        update_bytes=column([MOVED[config.optimizer] for config in configs]),
        orthogonalizes=column([config.optimizer == "muon" for config in configs]),
        optimizer_in_files=column([config.offload_optimizer == "nvme" for config in configs]),
        parameters_in_files=column([config.offload_param == "nvme" for config in configs]),
        context_method=column([CONTEXT_METHODS.index(config.context_parallel_method) for config in configs]),
        late_gather=column([config.overlap_param_gather for config in configs]),
        offload_activations=column([config.offload_activations for config in configs]),
        gather_bytes=column([gathered_bytes(config.gather_dtype) for config in configs]),
        async_tensor=column([config.async_tensor_parallel for config in configs]),
        kernels=column([KERNEL_CHOICES.index(config.fused_kernels) for config in configs]),
        graphs=column([config.cuda_graphs for config in configs]),
        rounding_bytes=column([rounding_bytes(config) for config in configs]),
        near=column([config.secondary_shard_size * config.reshard_after_forward for config in configs]),
    )


def sent_bytes(optimizer: str, reduce_dtype: str) -> float:
    """Of an element whose gradient ranks sum, or the sign of whose momentum they send."""
    return SIGN_BYTES if optimizer == "onebit_adam" else REDUCED_BYTES[reduce_dtype]


def gathered_bytes(gather_dtype: str) -> float:
    """Of a parameter in a gather of stage 3; inf: as many as it has."""
    return INTEGER_BYTES if gather_dtype == INT8 else np.inf


def _rows_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Rows that go to experts for each token: its choices, or every place of experts with a capacity, empty ones too."""
    if not model.capacity_factor:
        return model.experts_per_token
    return model.num_experts * model.expert_capacity(sequence_length) / sequence_length
