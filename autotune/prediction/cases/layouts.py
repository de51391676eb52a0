"""The arrays of configurations that the equations read, whichever way the configurations are at hand."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from autotune.prediction.equations.cases import CONTEXT_METHODS, RECOMPUTE, SCHEDULES, Array, Layouts
from autotune.prediction.equations.float8 import rounding_bytes
from autotune.prediction.equations.optimizer import MOVED
from search_spaces.compression import INT8, INTEGER_BYTES, REDUCED_BYTES, SIGN_BYTES
from search_spaces.fused_kernels import KERNEL_CHOICES
from search_spaces.knob import Value
from search_spaces.optimizers import moment_bytes
from search_spaces.rules.float8 import FLOAT8
from search_spaces.training.states import PARAMETER_BYTES

MASTER = 4.0
"""Bytes of an element of the master copy."""


class Numbers(Protocol):
    """Returns the values of a knob as numbers."""

    def __call__(self, name: str, meaning: Callable[[Value], float] = float, /) -> Array:
        """Of the knob of that name; `meaning` converts a value."""
        ...


def layouts_from(numbers: Numbers, global_batch_size: int, world_size: int) -> Layouts:
    """The configurations on so many ranks, from the numbers of their knobs."""
    tensor, pipeline = numbers("tensor_parallel_size"), numbers("pipeline_parallel_size")
    context, micro_batch = numbers("context_parallel_size"), numbers("micro_batch_size")
    data = np.maximum(np.floor(world_size / (tensor * pipeline * context)), 1.0)
    stage, shard = numbers("zero_stage"), numbers("hsdp_shard_size")
    signs = numbers("optimizer", lambda value: value == "onebit_adam")
    unsaid = signs * MASTER / (data * context)  # of the part that is a rank's own
    return Layouts(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=numbers("expert_parallel_size"),
        shard=np.where((shard > 0) & (stage == 3), shard, data * context),
        zero_stage=stage,
        micro_batch_size=micro_batch,
        accumulation=np.floor(global_batch_size / (micro_batch * data)),
        sequence_parallel=numbers("sequence_parallel"),
        virtual_stages=np.where(pipeline > 1, numbers("virtual_stages"), 1.0),
        pipeline_schedule=numbers("pipeline_schedule", lambda value: SCHEDULES.index(str(value))),
        activation_checkpointing=numbers("activation_checkpointing", lambda value: RECOMPUTE.index(str(value))),
        checkpoint_every_k=numbers("checkpoint_every_k"),
        offload_optimizer=numbers("offload_ratio") * numbers("offload_optimizer", lambda value: value != "none"),
        offload_parameters=numbers("offload_param", lambda value: value != "none"),
        optimizer_in_files=numbers("offload_optimizer", lambda value: value == "nvme"),
        parameters_in_files=numbers("offload_param", lambda value: value == "nvme"),
        context_parallel_method=numbers("context_parallel_method", lambda value: CONTEXT_METHODS.index(str(value))),
        overlap_param_gather=numbers("overlap_param_gather"),
        offload_activations=numbers("offload_activations"),
        parameter_bytes=numbers("precision", lambda value: PARAMETER_BYTES[str(value)]),
        reduce_bytes=np.where(signs > 0, SIGN_BYTES, numbers("reduce_dtype", lambda value: REDUCED_BYTES[str(value)])),
        reduce_bucket_size=numbers("reduce_bucket_size"),
        allgather_bucket_size=numbers("allgather_bucket_size"),
        prefetch_bucket_size=numbers("prefetch_bucket_size"),
        param_persistence_threshold=numbers("param_persistence_threshold"),
        max_live_parameters=numbers("max_live_parameters"),
        overlap_comm=numbers("overlap_comm"),
        defer_gradient_reduction=numbers("defer_gradient_reduction"),
        reshard_after_forward=numbers("reshard_after_forward"),
        loss_chunk_size=numbers("loss_chunk_size"),
        balanced=numbers("pipeline_split", lambda value: value == "balanced"),
        accumulation_bytes=numbers("accumulation_dtype", lambda value: PARAMETER_BYTES[str(value)]),
        moment_bytes=numbers("optimizer", lambda value: moment_bytes(str(value), MASTER)[0]) + unsaid,
        other_moment_bytes=numbers("optimizer", lambda value: moment_bytes(str(value), MASTER)[1]) + unsaid,
        update_bytes=numbers("optimizer", lambda value: MOVED[str(value)]),
        orthogonalizes=numbers("optimizer", lambda value: value == "muon"),
        gather_bytes=numbers("gather_dtype", _gathered_bytes),
        async_tensor_parallel=numbers("async_tensor_parallel"),
        fused_kernels=numbers("fused_kernels", lambda value: KERNEL_CHOICES.index(str(value))),
        cuda_graphs=numbers("cuda_graphs"),
        rounding_bytes=numbers("precision", lambda value: value == FLOAT8) * numbers("compile_blocks", rounding_bytes),
        secondary_shard_size=numbers("secondary_shard_size") * numbers("reshard_after_forward"),
    )


def _gathered_bytes(value: Value) -> float:
    """Of a parameter in a gather of stage 3; inf: as many as it has."""
    return INTEGER_BYTES if value == INT8 else np.inf
