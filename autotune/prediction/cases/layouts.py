"""The arrays of configurations that the equations read, whichever way the configurations are at hand."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from autotune.prediction.equations.cases import CONTEXT_METHODS, RECOMPUTE, SCHEDULES, Array, Layouts
from autotune.prediction.equations.float8 import rounding_bytes
from autotune.prediction.equations.optimizer import MOVED
from search_spaces.communication import INT8, INTEGER_BYTES, REDUCED_BYTES, SIGN_BYTES
from search_spaces.kernels import KERNEL_CHOICES
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.optimizers import moment_bytes
from search_spaces.rules.computation import FLOAT8
from search_spaces.training.states import PARAMETER_BYTES

MASTER = 4.0
"""Bytes of an element of the master copy."""
VALUES = tuple(field.name for field in dataclasses.fields(Layouts) if field.name in KNOBS)
"""The fields that have the name of a knob; unless they are derived, they hold its values."""


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
    slices = numbers("expert_tensor_parallel_size")
    unsaid = signs * MASTER / (data * context)  # of the part that is a rank's own
    derived: dict[str, Array] = {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": numbers("expert_parallel_size"),
        "expert_tensor": np.where(slices > 0, slices, tensor),
        "shard": np.where((shard > 0) & (stage == 3), shard, data * context),
        "accumulation": np.floor(global_batch_size / (micro_batch * data)),
        "virtual_stages": np.where(pipeline > 1, numbers("virtual_stages"), 1.0),
        "pipeline_schedule": numbers("pipeline_schedule", lambda value: SCHEDULES.index(str(value))),
        "activation_checkpointing": numbers("activation_checkpointing", lambda value: RECOMPUTE.index(str(value))),
        "offload_optimizer": numbers("offload_ratio") * numbers("offload_optimizer", lambda value: value != "none"),
        "offload_parameters": numbers("offload_param", lambda value: value != "none"),
        "optimizer_in_files": numbers("offload_optimizer", lambda value: value == "nvme"),
        "parameters_in_files": numbers("offload_param", lambda value: value == "nvme"),
        "context_parallel_method": numbers("context_parallel_method", lambda value: CONTEXT_METHODS.index(str(value))),
        "parameter_bytes": numbers("precision", lambda value: PARAMETER_BYTES[str(value)]),
        "reduce_bytes": np.where(signs > 0, SIGN_BYTES, numbers("reduce_dtype", lambda value: REDUCED_BYTES[str(value)])),
        "balanced": numbers("pipeline_split", lambda value: value == "balanced"),
        "accumulation_bytes": numbers("accumulation_dtype", lambda value: PARAMETER_BYTES[str(value)]),
        "moment_bytes": numbers("optimizer", lambda value: moment_bytes(str(value), MASTER)[0]) + unsaid,
        "other_moment_bytes": numbers("optimizer", lambda value: moment_bytes(str(value), MASTER)[1]) + unsaid,
        "update_bytes": numbers("optimizer", lambda value: MOVED[str(value)]),
        "updates_pieces": numbers("optimizer", lambda value: value == "adamw8bit"),
        "orthogonalizes": numbers("optimizer", lambda value: value == "muon"),
        "gather_bytes": numbers("gather_dtype", _gathered_bytes),
        "fused_kernels": numbers("fused_kernels", lambda value: KERNEL_CHOICES.index(str(value))),
        "compiled": numbers("compile_blocks"),
        "rounding_bytes": numbers("precision", lambda value: value == FLOAT8) * numbers("compile_blocks", rounding_bytes),
        "secondary_shard_size": numbers("secondary_shard_size") * numbers("reshard_after_forward"),
    }
    return Layouts(**derived, **{name: numbers(name) for name in VALUES if name not in derived})


def _gathered_bytes(value: Value) -> float:
    """Of a parameter in a gather of stage 3; inf: as many as it has."""
    return INTEGER_BYTES if value == INT8 else np.inf
