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
)
from search_spaces.capability import Capability, Combination, honoured_by
from search_spaces.kernels import FUSED_KERNELS, LIGER, NONE, OFF
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES, marks_offloading, marks_recomputation, policies
from search_spaces.rules.computation import FLOAT8, GRAPHED
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig


def _multiplies_in_parts(config: TrialConfig, _: int) -> bool:
    return config.precision == FLOAT8 and config.async_tensor_parallel and config.tensor_parallel_size > 1


def _multiplies_integers(config: TrialConfig, _: int) -> bool:
    return config.precision == FLOAT8 and config.frozen_dtype != "same"


FLOAT8_COMBINATIONS = (
    Combination(
        rule="float8-async-tensor",
        reads=("precision", "async_tensor_parallel", "tensor_parallel_size"),
        problem="products that are split to overlap with communication are in bf16",
        remedy="set async_tensor_parallel=false, or use precision=bf16",
        holds=_multiplies_in_parts,
    ),
    Combination(
        rule="float8-quantised",
        reads=("precision", "frozen_dtype"),
        problem="quantised frozen matrices are dequantised to bf16 for each product, so the product is in bf16 too",
        remedy="use precision=bf16, or set frozen_dtype=same",
        holds=_multiplies_integers,
    ),
)


def _runs_backward_in_parts(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.fused_kernels != NONE and split


def _recalls_products(config: TrialConfig, _: int) -> bool:
    selective = config.activation_checkpointing == "selective"
    return config.fused_kernels == LIGER and (selective or (marks_recomputation(config) and "selective" in policies(config)))


def _predicts_in_parts(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.mtp_layers > 0 and split


MTP_ZERO_BUBBLE = Combination(
    rule="mtp-zero-bubble",
    reads=("mtp_layers", "pipeline_parallel_size", "pipeline_schedule"),
    problem="zero-bubble schedules compute weight gradients path by path, and the paths of modules for multi-token prediction "
    "share parts of the graph, which the first of them frees",
    remedy="use another schedule, or set mtp_layers=0",
    holds=_predicts_in_parts,
)
FUSED = (
    Combination(
        rule="fused-kernels-zero-bubble",
        reads=(FUSED_KERNELS, "pipeline_parallel_size", "pipeline_schedule"),
        problem="zero-bubble schedules run backward once for inputs and once for weights, but the backward of these kernels "
        "can run only once",
        remedy=f"use another schedule, or {OFF}",
        holds=_runs_backward_in_parts,
    ),
    Combination(
        rule="fused-kernels-selective",
        reads=(FUSED_KERNELS, "activation_checkpointing", "pipeline_layout"),
        problem="Liger rotates queries and keys in place, so those that selective checkpointing saves would be rotated twice",
        remedy=f"use full or no recomputation (mark no stage with s), or {OFF}",
        holds=_recalls_products,
    ),
)


_SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def _compiles_changing_shapes(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and is_scheduled(config)


def _has_both(config: TrialConfig, _: int) -> bool:
    return bool(config.curriculum_start_length and config.random_ltd_start_tokens)


def _drops_of_divided_sequences(config: TrialConfig, _: int) -> bool:
    divided = config.context_parallel_size > 1 or config.sequence_parallel
    return divided and config.random_ltd_start_tokens > 0


SCHEDULE_COMPILED = Combination(
    rule="schedule-compiled",
    reads=("compile_blocks", *_SCHEDULES),
    problem="blocks are recompiled for each shape of a data schedule, to kernels other than those of the steps that a trial "
    "measures",
    remedy="set compile_blocks=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
    holds=_compiles_changing_shapes,
)
RANDOM_LTD_CURRICULUM = Combination(
    rule="random-ltd-curriculum",
    reads=_SCHEDULES,
    problem="random-LTD selects tokens of whole sequences, and those of a curriculum are shortened",
    remedy="set random_ltd_start_tokens=0 or curriculum_start_length=0",
    holds=_has_both,
)
RANDOM_LTD_DIVIDED = Combination(
    rule="random-ltd-divided",
    reads=("random_ltd_start_tokens", "context_parallel_size", "sequence_parallel"),
    problem="random-LTD selects tokens of whole sequences, but each rank has only a part of them",
    remedy="set context_parallel_size=1 and sequence_parallel=false, or random_ltd_start_tokens=0",
    holds=_drops_of_divided_sequences,
)


def _splits_backward(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.async_tensor_parallel and config.tensor_parallel_size > 1 and split


def _multiplies_in_integers(config: TrialConfig, _: int) -> bool:
    return config.async_tensor_parallel and config.tensor_parallel_size > 1 and config.frozen_dtype != "same"


OVERLAPPED = (
    Combination(
        rule="async-tensor-zero-bubble",
        reads=("async_tensor_parallel", "tensor_parallel_size", "pipeline_parallel_size", "pipeline_schedule"),
        problem="zero-bubble schedules compute gradients of inputs and of weights separately, and the overlapped backward, "
        "which computes both, would send the input gradients twice",
        remedy="set async_tensor_parallel=false, or use another schedule",
        holds=_splits_backward,
    ),
    Combination(
        rule="async-tensor-quantised",
        reads=("async_tensor_parallel", "tensor_parallel_size", "frozen_dtype"),
        problem="quantised frozen matrices are dequantised inside each product, which is therefore not split",
        remedy="set async_tensor_parallel=false or frozen_dtype=same",
        holds=_multiplies_in_integers,
    ),
)


def _reshards_under_zero_bubble(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return split and config.zero_stage == 3 and config.reshard_after_forward


def _compiles_selective_stages(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and marks_recomputation(config) and "selective" in policies(config)


def _updates_another_on_host(config: TrialConfig, _: int) -> bool:
    return config.optimizer != "adamw" and (config.offload_optimizer != "none" or marks_offloading(config))


def _offloads_what_is_recalled(config: TrialConfig, _: int) -> bool:
    selective = config.activation_checkpointing == "selective"
    return config.offload_activations and (selective or (marks_recomputation(config) and "selective" in policies(config)))


def _offloads_what_is_compiled(config: TrialConfig, _: int) -> bool:
    return config.offload_activations and config.compile_blocks


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
            holds=_compiles_selective_stages,
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
            holds=_reshards_under_zero_bubble,
        ),
        Combination(
            rule="offload-selective",
            reads=("offload_activations", "activation_checkpointing", "pipeline_layout"),
            problem="selective checkpointing keeps its saved tensors on the device",
            remedy="set offload_activations=false, or activation_checkpointing to full or none",
            holds=_offloads_what_is_recalled,
        ),
        Combination(
            rule="offload-compiled",
            reads=("offload_activations", "compile_blocks"),
            problem="torch.compile traces the hooks that move saved tensors, and fails if a block is split into several graphs",
            remedy="set compile_blocks=false or offload_activations=false",
            holds=_offloads_what_is_compiled,
        ),
        Combination(
            rule="optimizer-on-device",
            reads=("optimizer", "offload_optimizer", "pipeline_layout"),
            problem="only AdamW is updated on the host, where torch has a kernel for it; other updates run on the device",
            remedy="set offload_optimizer=none and mark no stage with o, or set optimizer=adamw",
            holds=_updates_another_on_host,
        ),
        SCHEDULE_COMPILED,
        RANDOM_LTD_CURRICULUM,
        RANDOM_LTD_DIVIDED,
        ONEBIT_STAGE,
        ONEBIT_DIMENSIONS,
        *OVERLAPPED,
        *FUSED,
        *GRAPHED,
        *FLOAT8_COMBINATIONS,
        MTP_ZERO_BUBBLE,
    ),
)
