"""Configurations of a model, or of a user's module, on a cluster as cases: the arrays that the equations read."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from autotune.errors import RequestError
from autotune.prediction.equations.cases import (
    CONTEXT_METHODS,
    RECOMPUTE,
    SCHEDULES,
    Array,
    Cases,
    DescribedModule,
    Layouts,
    Shapes,
    modules_code,
    scalar,
)
from autotune.prediction.equations.hardware import devices_of, hardware_of
from autotune.prediction.equations.kernels import rounding_bytes
from autotune.prediction.equations.layer_shapes import documented, layer_kinds, loaded, mean_keys_read, trained_shapes
from autotune.prediction.equations.schedules import scheduled
from autotune.prediction.equations.software import (
    Megatron,
    Software,
    Transformers,
    megatron_of,
    software_of,
    transformers_of,
)
from autotune.prediction.equations.state_traffic import MOVED
from autotune.prediction.equations.uneven import layout_key, tabled
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.communication import INT8, INTEGER_BYTES, REDUCED_BYTES, SIGN_BYTES
from search_spaces.kernels import (
    ATTENTION_KERNELS,
    ENGINE_ATTENTION,
    GATE,
    KERNEL_CHOICES,
    LIGER,
    MATH,
    NORM,
    ROTATION,
    replaced,
)
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.knobs.computation import FP8_RECIPES
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, HeadNorm, Model, ModelSpec, Position
from search_spaces.models.module_profile import ModuleProfile, traced_precision
from search_spaces.optimizers import master_bytes, moment_bytes
from search_spaces.rules.computation import FLOAT8
from search_spaces.space import SearchSpace
from search_spaces.training.adapters import adapted
from search_spaces.training.states import PARAMETER_BYTES
from search_spaces.training.windows import window_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def transformer_of(model: FactoryModel | CommandModel, sequence_length: int, least_layers: int = 1) -> ModelSpec:
    """A transformer with about as many parameters: the only fact known of a script, and sometimes not even that.

    Trials correct what it predicts.
    """
    count = model.parameter_count / 12  # a layer of width h has 12 h² [Kaplan 2020, 2.1]
    stages = _blocks(model)
    if stages > 1:
        layers = stages
        width = max(round(math.sqrt(count / layers) / 64), 1) * 64
    else:
        # In transformers of all sizes, width is roughly 64 times the number of layers.
        width = max(round((count * 64) ** (1 / 3) / 64), 1) * 64
        layers = max(round(count / width**2), least_layers)
    return ModelSpec(
        name=model.name, family="factory", num_layers=layers, hidden_size=width, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, head_dim=64, ffn_hidden_size=4 * width, vocab_size=max(math.isqrt(width), 2),
        sequence_length=sequence_length, tied_embeddings=True, gated_mlp=False,
    )  # fmt: skip


def _blocks(model: FactoryModel | CommandModel) -> int:
    if isinstance(model, CommandModel):
        return 1
    return model.pipeline_stages if model.profile is None else len(model.profile.block_names)


def predictable(model: Model, space: SearchSpace) -> ModelSpec | FactoryModel | None:
    """The model if the equations know it: by its shape, or by its profile in all precisions of the space; else None."""
    if isinstance(model, ModelSpec):
        return model
    if not isinstance(model, FactoryModel) or model.profile is None:
        return None
    precisions = map(str, space.domains.get("precision", (space.base.precision,)))
    return model if all(traced_precision(precision) in model.profile.traces for precision in precisions) else None


def described(model: Model, precision: str, device_kind: str) -> DescribedModule | None:
    """The module in the precision; None: the model is not a module with a profile.

    Raises:
        RequestError: its profile has no trace in the precision.
    """
    if not isinstance(model, FactoryModel) or model.profile is None:
        return None
    traced = traced_precision(precision)
    if traced not in model.profile.traces:
        precisions = ", ".join(model.profile.traces)
        raise RequestError(
            "precision", f"{model.name} is described in {precisions}, not in {precision}", f"use one of {precisions}"
        )
    return _described(model.profile, traced, device_kind == "cpu")


@lru_cache(maxsize=64)
def _described(profile: ModuleProfile, precision: str, copies: bool) -> DescribedModule:
    return DescribedModule(profile=profile, precision=precision, copies=copies)


def cases_of(
    model: ModelSpec | FactoryModel,
    cluster: ClusterSpec,
    workload: Workload,
    configs: Sequence[TrialConfig],
    engine: str,
    arguments: Mapping[str, str] | None = None,
) -> Cases:
    """The cases of `configs`, in their order. `engine` names the profile of the software (`software_of`); `arguments`: as
    `memory_arguments`.

    A user's module needs a profile in the configurations' precision.
    """
    precision = configs[0].precision
    if isinstance(model, FactoryModel):
        return Cases(
            shapes=shapes_of(model, workload.sequence_length),
            hardware=hardware_of(cluster, precision),
            layouts=layouts_of(configs, workload.global_batch_size, cluster.world_size),
            software=engine_software(model, engine, set(), cluster.device.kind),
            devices=devices_of(cluster, precision),
            module=described(model, precision, cluster.device.kind),
        )
    length, windows = workload.sequence_length, not any(config.attention_window for config in configs)
    laid_out, ranks = tabled([layout_key(config, model, cluster, length, windows) for config in configs])
    shapes = trained_shapes(shapes_of(model, length), model, length, configs)
    layouts = scheduled(layouts_of(configs, workload.global_batch_size, cluster.world_size), configs, workload)
    layouts = loaded(layouts, model)
    return Cases(
        shapes=documented(shapes, model, workload, configs),
        hardware=hardware_of(cluster, precision),
        layouts=dataclasses.replace(layouts, laid_out=laid_out) if ranks else layouts,
        software=engine_software(model, engine, {config.attention_backend for config in configs}, cluster.device.kind),
        megatron=memory_arguments(model, cluster, configs[0].attention_backend, arguments),
        transformers=library_arguments(model, cluster, configs[0], arguments),
        ranks=ranks,
        devices=devices_of(cluster, precision),
        kinds=layer_kinds(model, length, windows),
    )


def memory_arguments(model: ModelSpec, cluster: ClusterSpec, attention: str, arguments: Mapping[str, str] | None) -> Megatron:
    """What Megatron-LM is told, if it trains the model: the words of `arguments`, else as this product writes its scripts.
    None: it does not.
    """
    if arguments is None or "states" in arguments or cluster.device.kind == "cpu":
        return Megatron()
    written = {
        "attention_dropout": "0", "hidden_dropout": "0", "attention_backend": ENGINE_ATTENTION.get(attention, ""),
        "bias_linear": str(model.mlp_bias or model.attention_output_bias),
        "qk_layernorm": str(model.head_norm is not HeadNorm.NONE),
    }  # fmt: skip
    return megatron_of({**written, **arguments}, cluster.device.name)


def library_arguments(
    model: ModelSpec, cluster: ClusterSpec, config: TrialConfig, arguments: Mapping[str, str] | None
) -> Transformers:
    """The arguments of Transformers and its libraries, if they train the model: as a configuration's knobs and `arguments` say,
    which have the word `states`."""
    if arguments is None or "states" not in arguments or cluster.device.kind == "cpu":
        return Transformers()
    trained = adapted(model, config)
    attention = {MATH: "eager", "flash": "flash"}.get(config.attention_backend, "sdpa")
    words = {
        "adapted": " ".join(trained.lora_targets), "bits": {4: "nf4", 8: "int8"}.get(trained.frozen_bits, "none"),
        "attention": attention, "autocast": str(config.precision != "fp32"),
    }  # fmt: skip
    return transformers_of({**words, **arguments}, cluster.device.name)


def engine_software(model: ModelSpec | FactoryModel, engine: str, attention: set[str], device_kind: str) -> Software:
    """The profile of an engine with the attention kernel of all configurations. On CPUs no fused kernel changes scores."""
    score_bytes = 0.0
    if isinstance(model, ModelSpec):  # the trace of a user's module counts what it keeps
        names = {MATH} if model.changes_scores and device_kind == "cpu" else attention
        kernels = ATTENTION_KERNELS[device_kind]
        score_bytes = min(kernels[name].score_bytes if name in kernels else 0.0 for name in names)
    return software_of(engine, device_kind, score_bytes)


def shapes_of(model: ModelSpec | FactoryModel, sequence_length: int) -> Shapes:
    """The shape of a model that is trained on samples of so many tokens."""
    if isinstance(model, FactoryModel):
        # With as many layers as the module has blocks; what is frozen is in the profile.
        shapes = shapes_of(transformer_of(model, sequence_length), sequence_length)
        blocks = max(_blocks(model), 1)
        return dataclasses.replace(shapes, layers=scalar(blocks), frozen_bytes=scalar(0.0), vocabulary=scalar(0.0))
    by_liger = replaced(LIGER, model, tensor_parallel_size=1)
    # Rows that go to experts for each token: its choices, or every place of experts with a capacity, empty ones too.
    rows_per_token: float = model.experts_per_token
    if model.capacity_factor:
        rows_per_token = model.num_experts * model.expert_capacity(sequence_length) / sequence_length
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
        window=scalar(mean_keys_read(model, sequence_length)),
        tied=scalar(float(model.tied_embeddings)),
        experts=scalar(model.num_experts),
        experts_per_token=scalar(rows_per_token),
        expert_share=scalar(model.expert_layers / model.num_layers if model.num_experts else 1.0),
        biased_experts=scalar(model.mlp_bias and model.num_experts > 0),
        dense_ffn=scalar(model.dense_ffn_size),
        shared_ffn=scalar(model.shared_expert_size),
        **_latent_shapes(model),
        normed_heads=scalar(_normed_heads(model)),
        whole_chunks=scalar(window_of(model).has_whole_chunks(0, sequence_length)),
        adapter=scalar(model.adapter_parameters / model.num_layers),
        adapter_divided=scalar(0.0),
        frozen_bytes=scalar(model.frozen_bytes),
        dropout=scalar(0.0),
        rms_norm=scalar(NORM in by_liger),
        rotates_whole=scalar(ROTATION in by_liger),
        silu_gated=scalar(GATE in by_liger),
    )


def _latent_shapes(model: ModelSpec) -> dict[str, Array]:
    latent = model.latent
    if latent is None:
        return {}
    return {
        "query_rank": scalar(latent.query_rank),
        "key_value_rank": scalar(latent.key_value_rank),
        "rotated": scalar(latent.rotated),
        "value": scalar(model.num_attention_heads * latent.value_size),
    }


def _normed_heads(model: ModelSpec) -> float:
    """The value of `Shapes.normed_heads`."""
    if model.head_norm is HeadNorm.NONE:
        return 0.0
    rotated = sum(model.is_rotated(layer) for layer in range(model.num_layers)) / model.num_layers
    width = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    return width * (rotated if model.head_norm is HeadNorm.ROTATED else 1.0)


def layouts_of(configs: Sequence[TrialConfig], global_batch_size: int, world_size: int) -> Layouts:
    """The configurations on so many ranks."""

    def numbers(name: str, meaning: Callable[[Value], float] = float, /) -> Array:
        return np.array([meaning(getattr(config, name)) for config in configs], dtype=np.float64)

    return layouts_from(numbers, global_batch_size, world_size)


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
    # Bytes of an element of the master copy.
    master = 4.0
    # Bytes per parameter: a rank keeps the error of the part that it reduces.
    error_feedback = signs * master / (data * context)
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
        "master_bytes": numbers("optimizer", lambda value: master_bytes(str(value), master)),
        "moment_bytes": numbers("optimizer", lambda value: moment_bytes(str(value), master)[0]) + error_feedback,
        "other_moment_bytes": numbers("optimizer", lambda value: moment_bytes(str(value), master)[1]) + error_feedback,
        "update_bytes": numbers("optimizer", lambda value: MOVED[str(value)]),
        "updates_pieces": numbers("optimizer", lambda value: value == "adamw8bit"),
        "orthogonalizes": numbers("optimizer", lambda value: value == "muon"),
        "gather_bytes": numbers("gather_dtype", _gathered_bytes),
        "fused_kernels": numbers("fused_kernels", lambda value: KERNEL_CHOICES.index(str(value))),
        "compiled": numbers("compile_blocks"),
        "recompute_modules": numbers("recompute_modules", modules_code),
        "fp8_recipe": numbers("precision", lambda value: value == FLOAT8)
        * numbers("fp8_recipe", lambda value: 1 + FP8_RECIPES.index(str(value))),
        "rounding_bytes": numbers("precision", lambda value: value == FLOAT8) * numbers("compile_blocks", rounding_bytes),
        "secondary_shard_size": numbers("secondary_shard_size") * numbers("reshard_after_forward"),
    }
    return Layouts(**derived, **{name: numbers(name) for name in VALUES if name not in derived})


def _gathered_bytes(value: Value) -> float:
    """Of a parameter in a gather of stage 3; inf: as many as it has."""
    return INTEGER_BYTES if value == INT8 else np.inf
