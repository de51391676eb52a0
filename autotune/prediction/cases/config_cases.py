"""Configurations of a model on a cluster as cases: what `TrialConfig`, `ModelSpec` and `ClusterSpec` say, in arrays."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autotune.prediction.cases.layouts import layouts_from
from autotune.prediction.cases.module_cases import described, module_shapes, transformer_of
from autotune.prediction.equations.cases import (
    Array,
    Cases,
    Layouts,
    Shapes,
    Software,
    scalar,
)
from autotune.prediction.equations.layer_kinds import layer_kinds
from autotune.prediction.equations.mixed import devices_of, hardware_of
from autotune.prediction.equations.schedules import scheduled
from autotune.prediction.equations.software import software_named
from autotune.prediction.equations.trained_shapes import documented, loaded, mean_keys_read, trained_shapes
from autotune.prediction.equations.uneven import layout_key, tabled
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.kernels import GATE, LIGER, NORM, ROTATION, replaced
from search_spaces.knob import Value
from search_spaces.models.model import FactoryModel, HeadNorm, ModelSpec, Position
from search_spaces.training.windows import window_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def cases_of(
    model: ModelSpec | FactoryModel, cluster: ClusterSpec, workload: Workload, configs: Sequence[TrialConfig], engine: str
) -> Cases:
    """The cases of `configs`, in their order. `engine` names the profile of `software.toml` that keeps the memory.

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
        ranks=ranks,
        devices=devices_of(cluster, precision),
        kinds=layer_kinds(model, length, windows),
    )


def engine_software(model: ModelSpec | FactoryModel, engine: str, attention: set[str], device_kind: str) -> Software:
    """The profile of an engine; `math` attention keeps the attention matrix, and on CPUs attention that changes scores."""
    if isinstance(model, FactoryModel):  # its trace counts what it keeps
        return software_named(f"engine={engine}", gated=False)[0]
    kept = attention == {"math"} or (model.changes_scores and device_kind == "cpu")
    kernel = "; kernel=torch" if kept else ""
    return software_named(f"engine={engine}; device={device_kind}{kernel}", gated=model.gated_mlp)[0]


def shapes_of(model: ModelSpec | FactoryModel, sequence_length: int) -> Shapes:
    """The shape of a model that is trained on samples of so many tokens."""
    if isinstance(model, FactoryModel):
        return module_shapes(shapes_of(transformer_of(model, sequence_length), sequence_length), model)
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
        window=scalar(mean_keys_read(model, sequence_length)),
        tied=scalar(float(model.tied_embeddings)),
        experts=scalar(model.num_experts),
        experts_per_token=scalar(_rows_per_token(model, sequence_length)),
        expert_share=scalar(model.expert_layers / model.num_layers if model.num_experts else 1.0),
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


def _rows_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Rows that go to experts for each token: its choices, or every place of experts with a capacity, empty ones too."""
    if not model.capacity_factor:
        return model.experts_per_token
    return model.num_experts * model.expert_capacity(sequence_length) / sequence_length
