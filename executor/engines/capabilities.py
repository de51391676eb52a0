"""What each of our engines honours and refuses. Imports no torch, since the search reads it.

If an engine has a workaround, it uses it, and there is no entry here. pyproject.toml states the oldest supported version.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.capability import Capability, Combination, honoured_by
from search_spaces.errors import Refusal
from search_spaces.kernels import FUSED_KERNELS, LIGER, NONE, OFF
from search_spaces.knob import METHODS, VIRTUAL_TOKENS
from search_spaces.knobs.computation import ATTENTION, modules_in
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES, marks_offloading, marks_recomputation, policies
from search_spaces.optimizers import BF16_MASTERS
from search_spaces.rules.computation import FLOAT8, GRAPHED
from search_spaces.training.adapters import adapts
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig


def splits_backward(config: TrialConfig) -> bool:
    """Whether a zero-bubble schedule runs backward in two parts: for inputs, then for weights."""
    return config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES


COMPILE_ZERO_BUBBLE = Combination(
    rule="compile-zero-bubble",
    reads=("compile_blocks", "pipeline_parallel_size", "pipeline_schedule"),
    problem="zero-bubble schedules run backward in two parts, and a compiled block has one",
    remedy="set compile_blocks=false, or use another schedule",
    holds=lambda config, _: config.compile_blocks and splits_backward(config),
)


RULE = "torch-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRequirement:
    """A combination of values that needs a newer torch."""

    since: str
    """The first tested version that supports it."""
    settings: str
    """The values, as a user sets them."""
    problem: str
    """What happens in older versions, in one clause."""
    remedy: str
    holds: Callable[[TrialConfig, str], bool]
    """Whether a configuration has these values, on a kind of device (cpu or cuda)."""


NEWER: tuple[VersionRequirement, ...] = (
    VersionRequirement(
        since="2.13",
        settings="compile_blocks=true, precision=fp64, on CPUs",
        problem="torch.compile treats the sums of fp64 attention as fp32, so that backward fails",
        remedy="set compile_blocks=false or another precision",
        holds=lambda config, device: config.compile_blocks and config.precision == "fp64" and device == "cpu",
    ),
    VersionRequirement(
        since="2.13",
        settings=f"precision=fp8, pipeline_schedule={', '.join(sorted(ZERO_BUBBLE_SCHEDULES))}",
        problem="schedules that defer weight gradients do not support custom autograd functions",
        remedy="use precision=bf16, or another pipeline_schedule",
        holds=lambda config, _: config.precision == "fp8" and splits_backward(config),
    ),
)


def version_refusals(torch_version: str, config: TrialConfig, device: str) -> list[Refusal]:
    """The refusals of a configuration with a version of torch (such as 2.11.0+cu130) on a kind of device."""
    unmet = [item for item in NEWER if release(torch_version) < release(item.since) and item.holds(config, device)]
    return [
        Refusal(RULE, f"{item.settings}: {item.problem}; this needs torch {item.since}, here is {torch_version}", item.remedy)
        for item in unmet
    ]


def release(version: str) -> tuple[int, int]:
    """Major and minor number.

    Raises:
        ValueError: the text does not start with a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version of torch; give one such as 2.13.0")
    return int(match[1]), int(match[2])


DDP = Capability(engine="ddp", knobs=honoured_by("ddp", {"precision": ("fp32", "bf16", "fp64")}))


FSDP2 = Capability(
    engine="fsdp2",
    knobs=honoured_by(
        "fsdp2",
        {
            # 2: parameters stay gathered until their last use in the step. 3: they are released after every use.
            "zero_stage": (2, 3),
            "reduce_dtype": ("fp32", "bf16"),
            "offload_optimizer": ("none", "cpu"),
            "offload_param": ("none", "cpu"),
            "precision": ("fp32", "bf16", "fp64"),
        },
    ),
    specific=frozenset({"micro_batch_size"}),
    combinations=(
        COMPILE_ZERO_BUBBLE,
        Combination(
            rule="fsdp2-zero-bubble",
            reads=("pipeline_parallel_size", "pipeline_schedule", "tensor_parallel_size", "context_parallel_size"),
            problem="FSDP2 over more than one data x context rank runs under zero-bubble schedules and computes wrong weights",
            remedy="use gpipe, 1f1b, interleaved_1f1b or looped_bfs, or the native engine",
            holds=lambda config, world_size: splits_backward(config) and config.zero_ranks(world_size) > 1,
        ),
        Combination(
            rule="fsdp2-offloads-both",
            reads=("offload_optimizer", "offload_param"),
            problem="CPUOffloadPolicy moves parameters, gradients and optimizer state together, not one without the other",
            remedy="set offload_optimizer and offload_param to the same value, or use the native engine",
            holds=lambda config, _: config.offload_optimizer != config.offload_param,
        ),
        Combination(
            rule="fsdp2-copies-alone",
            reads=("hsdp_shard_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="shards over one rank are whole copies, which fully_shard does not support",
            remedy="set hsdp_shard_size to at least 2, or use the ddp or the native engine",
            holds=lambda config, world_size: config.hsdp_shard_size == 1 and config.zero_ranks(world_size) > 1,
        ),
        Combination(
            rule="fsdp2-bf16-alone",
            reads=("precision", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="only fully_shard casts to bf16, and with one data x context rank there is nothing to shard",
            remedy="use precision=fp32, more data or context ranks, or the native engine",
            holds=lambda config, world_size: config.precision == "bf16" and config.zero_ranks(world_size) == 1,
        ),
    ),
)


COMMAND = "command"
"""Name of the engine that runs a user's own script."""


_SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")
_APART = ("tensor_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size")
"""The knobs that decide whether experts are divided over other ranks than the rest of the model."""
_TOGETHER = "set expert_parallel_size=1 and expert_tensor_parallel_size=0"
_DIMENSIONS = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")


def _overlaps(config: TrialConfig) -> bool:
    return config.async_tensor_parallel and config.tensor_parallel_size > 1


def _has_selective_stage(config: TrialConfig) -> bool:
    return marks_recomputation(config) and "selective" in policies(config)


def _is_selective(config: TrialConfig) -> bool:
    return config.activation_checkpointing == "selective" or _has_selective_stage(config)


NATIVE = Capability(
    engine="native",
    keeps_copy_beside_gradients=True,
    knobs=honoured_by("native"),
    combinations=(
        COMPILE_ZERO_BUBBLE,
        Combination(
            rule="recompute-modules-hooks",
            reads=("recompute_modules", "compile_blocks", "offload_activations", "cuda_graphs", FUSED_KERNELS),
            problem="modules are recomputed by hooks on the tensors that torch's operators save, which compiled and captured "
            "blocks, offloading and fused kernels replace",
            remedy="leave recompute_modules empty, or set compile_blocks, offload_activations and cuda_graphs to false and "
            "fused_kernels=none",
            holds=lambda config, _: (
                config.recompute_modules != ""
                and (config.compile_blocks or config.offload_activations or config.cuda_graphs or config.fused_kernels != NONE)
            ),
        ),
        Combination(
            rule="recompute-attention-context",
            reads=("recompute_modules", "context_parallel_size"),
            problem="attention between context ranks communicates, and would do so again in backward",
            remedy="set context_parallel_size=1, or leave attention out of recompute_modules",
            holds=lambda config, _: ATTENTION in modules_in(config.recompute_modules) and config.context_parallel_size > 1,
        ),
        Combination(
            rule="experts-copies",
            reads=(*_APART, "zero_stage", "hsdp_shard_size"),
            problem="HSDP copies need the same parameters on every data-parallel rank, but expert ranks hold different experts",
            remedy=f"leave hsdp_shard_size at 0, or {_TOGETHER}",
            holds=lambda config, _: config.places_experts_apart and config.zero_stage == 3 and config.hsdp_shard_size > 0,
        ),
        Combination(
            rule="experts-adapters",
            reads=(*_APART, *METHODS),
            problem="frozen parameters are sharded twice: over all data-parallel ranks, and over those with the same experts",
            remedy=f"leave adapters and virtual tokens at 0, or {_TOGETHER}",
            holds=lambda config, _: config.places_experts_apart and adapts(config),
        ),
        Combination(
            rule="experts-compiled",
            reads=("expert_parallel_size", "compile_blocks", "shared_expert_overlap", "precision"),
            problem="what overlaps with messages of tokens, and experts' products in 8 bits, read the number of tokens, which "
            "changes from step to step: blocks are recompiled for each number",
            remedy="set compile_blocks=false, or expert_parallel_size=1, or shared_expert_overlap=false with another precision",
            holds=lambda config, _: (
                config.expert_parallel_size > 1
                and config.compile_blocks
                and (config.shared_expert_overlap or config.precision == FLOAT8)
            ),
        ),
        Combination(
            rule="prompt-context",
            reads=("prompt_length", "context_parallel_size"),
            problem="context ranks that divide a prompt with its sample would have different numbers of tokens with a loss",
            remedy="set context_parallel_size=1, or train a prefix instead (prefix_length)",
            holds=lambda config, _: config.prompt_length > 0 and config.context_parallel_size > 1,
        ),
        Combination(
            rule="virtual-tokens-muon",
            reads=("optimizer", *VIRTUAL_TOKENS),
            problem="muon orthogonalizes the updates of matrices, and virtual tokens are not matrices: all updates would be "
            "AdamW's",
            remedy="use optimizer=adamw, or leave virtual tokens at 0",
            holds=lambda config, _: config.optimizer == "muon" and max(config.prefix_length, config.prompt_length) > 0,
        ),
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
            holds=lambda config, _: (
                config.optimizer != "adamw" and (config.offload_optimizer != "none" or marks_offloading(config))
            ),
        ),
        Combination(
            rule="bf16-masters",
            reads=("optimizer", "precision"),
            problem=f"the masters of {BF16_MASTERS} are the bf16 parameters",
            remedy="set precision=bf16, or use optimizer=adamw",
            holds=lambda config, _: config.optimizer == BF16_MASTERS and config.precision != "bf16",
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
            holds=lambda config, _: (
                config.random_ltd_start_tokens > 0 and (config.context_parallel_size > 1 or config.sequence_parallel)
            ),
        ),
        Combination(
            rule="onebit-stage",
            reads=("optimizer", "zero_stage"),
            problem="every rank of 1-bit Adam needs the whole momentum and its own whole error: there is no state to shard",
            remedy="set zero_stage=0, or use optimizer=adamw with reduce_dtype=int8",
            holds=lambda config, _: config.optimizer == "onebit_adam" and config.zero_stage > 0,
        ),
        Combination(
            rule="onebit-dimensions",
            reads=("optimizer", *_DIMENSIONS),
            problem="copies of a parameter on tensor, pipeline or expert ranks would be in different blocks of signs and drift "
            "apart",
            remedy="use only data and context ranks, or optimizer=adamw with reduce_dtype=int8",
            holds=lambda config, _: (
                config.optimizer == "onebit_adam" and any(getattr(config, name) > 1 for name in _DIMENSIONS)
            ),
        ),
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
