"""What the native engine honours and refuses. Does not import torch, since the search reads it."""

from executor.engines.shared_rules import (
    COMPILE_SELECTIVE,
    COMPILE_ZERO_BUBBLE,
    EXPERTS_ADAPTERS,
    EXPERTS_COMPILED,
    EXPERTS_COPIES,
    ONEBIT_DIMENSIONS,
    ONEBIT_STAGE,
    PROMPT_CONTEXT,
    VIRTUAL_TOKENS_MUON,
    splits_backward,
)
from search_spaces.capability import Capability, Combination, honoured_by
from search_spaces.kernels import FUSED_KERNELS, LIGER, NONE, OFF
from search_spaces.models.pipeline import marks_offloading, marks_recomputation, policies
from search_spaces.rules.computation import FLOAT8, GRAPHED
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig

_SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def _updates_another_on_host(config: TrialConfig, _: int) -> bool:
    return config.optimizer != "adamw" and (config.offload_optimizer != "none" or marks_offloading(config))


def _overlaps(config: TrialConfig) -> bool:
    return config.async_tensor_parallel and config.tensor_parallel_size > 1


def _has_selective_stage(config: TrialConfig) -> bool:
    return marks_recomputation(config) and "selective" in policies(config)


def _is_selective(config: TrialConfig) -> bool:
    return config.activation_checkpointing == "selective" or _has_selective_stage(config)


def _selects_of_divided_sequences(config: TrialConfig, _: int) -> bool:
    divided = config.context_parallel_size > 1 or config.sequence_parallel
    return divided and config.random_ltd_start_tokens > 0


NATIVE = Capability(
    engine="native",
    keeps_copy_beside_gradients=True,
    knobs=honoured_by("native"),
    combinations=(
        COMPILE_SELECTIVE,
        Combination(
            rule="compile-selective-stages",
            reads=("compile_blocks", "pipeline_layout"),
            problem="selective recomputation of a stage intercepts single operators, and torch.compile does not compile "
            "intercepted code",
            remedy="set compile_blocks=false, or mark stages with f instead of s",
            holds=lambda config, _: config.compile_blocks and _has_selective_stage(config),
        ),
        COMPILE_ZERO_BUBBLE,
        EXPERTS_COPIES,
        EXPERTS_ADAPTERS,
        EXPERTS_COMPILED,
        PROMPT_CONTEXT,
        VIRTUAL_TOKENS_MUON,
        Combination(
            rule="zero-bubble-reshard",
            reads=("zero_stage", "reshard_after_forward", "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules compute weight gradients after the backward that gathers the parameters, "
            "when stage 3 has already released them",
            remedy="set reshard_after_forward=false, or use another schedule or stage",
            holds=lambda config, _: splits_backward(config) and config.zero_stage == 3 and config.reshard_after_forward,
        ),
        Combination(
            rule="offload-selective",
            reads=("offload_activations", "activation_checkpointing", "pipeline_layout"),
            problem="selective checkpointing keeps its saved tensors on the device",
            remedy="set offload_activations=false, or activation_checkpointing to full or none",
            holds=lambda config, _: config.offload_activations and _is_selective(config),
        ),
        Combination(
            rule="offload-compiled",
            reads=("offload_activations", "compile_blocks"),
            problem="torch.compile traces the hooks that move saved tensors, and fails if a block is split into several graphs",
            remedy="set compile_blocks=false or offload_activations=false",
            holds=lambda config, _: config.offload_activations and config.compile_blocks,
        ),
        Combination(
            rule="optimizer-on-device",
            reads=("optimizer", "offload_optimizer", "pipeline_layout"),
            problem="only AdamW is updated on the host, where torch has a kernel for it; other updates run on the device",
            remedy="set offload_optimizer=none and mark no stage with o, or set optimizer=adamw",
            holds=_updates_another_on_host,
        ),
        Combination(
            rule="schedule-compiled",
            reads=("compile_blocks", *_SCHEDULES),
            problem="blocks are recompiled for each shape of a data schedule, to kernels other than those of the steps that a "
            "trial measures",
            remedy="set compile_blocks=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
            holds=lambda config, _: config.compile_blocks and is_scheduled(config),
        ),
        Combination(
            rule="random-ltd-curriculum",
            reads=_SCHEDULES,
            problem="random-LTD selects tokens of whole sequences, and those of a curriculum are shortened",
            remedy="set random_ltd_start_tokens=0 or curriculum_start_length=0",
            holds=lambda config, _: bool(config.curriculum_start_length and config.random_ltd_start_tokens),
        ),
        Combination(
            rule="random-ltd-divided",
            reads=("random_ltd_start_tokens", "context_parallel_size", "sequence_parallel"),
            problem="random-LTD selects tokens of whole sequences, but each rank has only a part of them",
            remedy="set context_parallel_size=1 and sequence_parallel=false, or random_ltd_start_tokens=0",
            holds=_selects_of_divided_sequences,
        ),
        ONEBIT_STAGE,
        ONEBIT_DIMENSIONS,
        Combination(
            rule="async-tensor-zero-bubble",
            reads=("async_tensor_parallel", "tensor_parallel_size", "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules compute gradients of inputs and of weights separately, and the overlapped backward, "
            "which computes both, would send the input gradients twice",
            remedy="set async_tensor_parallel=false, or use another schedule",
            holds=lambda config, _: _overlaps(config) and splits_backward(config),
        ),
        Combination(
            rule="async-tensor-quantised",
            reads=("async_tensor_parallel", "tensor_parallel_size", "frozen_dtype"),
            problem="quantised frozen matrices are dequantised inside each product, which is therefore not split",
            remedy="set async_tensor_parallel=false or frozen_dtype=same",
            holds=lambda config, _: _overlaps(config) and config.frozen_dtype != "same",
        ),
        Combination(
            rule="fused-kernels-zero-bubble",
            reads=(FUSED_KERNELS, "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules run backward once for inputs and once for weights, but the backward of these "
            "kernels can run only once",
            remedy=f"use another schedule, or {OFF}",
            holds=lambda config, _: config.fused_kernels != NONE and splits_backward(config),
        ),
        Combination(
            rule="fused-kernels-selective",
            reads=(FUSED_KERNELS, "activation_checkpointing", "pipeline_layout"),
            problem="Liger rotates queries and keys in place, so those that selective checkpointing saves would be rotated "
            "twice",
            remedy=f"use full or no recomputation (mark no stage with s), or {OFF}",
            holds=lambda config, _: config.fused_kernels == LIGER and _is_selective(config),
        ),
        *GRAPHED,
        Combination(
            rule="float8-async-tensor",
            reads=("precision", "async_tensor_parallel", "tensor_parallel_size"),
            problem="products that are split to overlap with communication are in bf16",
            remedy="set async_tensor_parallel=false, or use precision=bf16",
            holds=lambda config, _: config.precision == FLOAT8 and _overlaps(config),
        ),
        Combination(
            rule="float8-quantised",
            reads=("precision", "frozen_dtype"),
            problem="quantised frozen matrices are dequantised to bf16 for each product, so the product is in bf16 too",
            remedy="use precision=bf16, or set frozen_dtype=same",
            holds=lambda config, _: config.precision == FLOAT8 and config.frozen_dtype != "same",
        ),
        Combination(
            rule="mtp-zero-bubble",
            reads=("mtp_layers", "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules compute weight gradients path by path, and the paths of modules for multi-token "
            "prediction share parts of the graph, which the first of them frees",
            remedy="use another schedule, or set mtp_layers=0",
            holds=lambda config, _: config.mtp_layers > 0 and splits_backward(config),
        ),
    ),
)
