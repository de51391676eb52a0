"""Exports the command line of torchtitan (checked against torchtitan 0.3.0)."""

from autotune.exports.checkpoints import Checkpoints
from autotune.exports.coverage import ExportTarget, marks_note, spelled, spelled_words, unplaced_notes, unstated_note
from autotune.exports.export import Export, header, remarks
from autotune.exports.fsdp2 import fsdp2_notes, replicas
from autotune.exports.launch import environment, torchrun_words
from autotune.exports.winner import Winner
from search_spaces.models.pipeline import split_layers

TARGET = ExportTarget(
    format="torchtitan",
    name="torchtitan's command line",
    expressed=frozenset({
        "zero_stage", "micro_batch_size", "precision", "reshard_after_forward", "hsdp_shard_size", "offload_param",
        "offload_optimizer", "tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "virtual_stages",
        "pipeline_schedule", "pipeline_split", "context_parallel_size", "expert_parallel_size", "activation_checkpointing",
        "reduce_dtype", "expandable_segments", "compile_blocks", "pipeline_layout",
        "environment",
        *spelled("torchtitan"), "async_tensor_parallel",
    }),
    elsewhere={
        "fused_kernels": "torchtitan has no option for them: --compile.enable fuses norms, rotations and gates",
        "context_parallel_method": "torchtitan gathers or rotates keys and values, and exchanges no heads",
        "rank_order": "torchtitan's mesh is pp, dp, cp, tp; put the pipeline outermost",
        "pack_sequences": "its loaders always join documents, cut them where a row ends, and mask attention between them",
        "router_bias_update_rate": "give it as load_balance_coeff of your model's MoE arguments",
        "optimizer": "name it in the param_groups of the OptimizersContainer.Config of your registry function",
    },
)  # fmt: skip
SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
REGISTRY = {"llama-3-8b": "llama3_8b", "llama-3-70b": "llama3_70b", "llama-3.1-405b": "llama3_405b"}
"""Model -> the function with its shape in torchtitan's llama3 registry."""
DEBUG = "llama3_debugmodel"


def export_torchtitan(winner: Winner) -> Export:
    """Return the command as a shell script."""
    notes = remarks(winner, _notes(winner), Checkpoints.DISTRIBUTED)
    program = ["-m torchtitan.train", "--module llama3", f"--config {_registry(winner)}"]
    # The activation checkpointing mode is a subcommand, so arguments that the user adds must precede it.
    last = ['"$@"', f"activation-checkpoint:{winner.config.activation_checkpointing}"]
    words = [*torchrun_words(winner), *program, *_pipeline(winner), *_overrides(winner), *last]
    start = f"#!/bin/bash\n{header(winner, 'torchtitan', notes)}{environment(winner)}"
    script = f"{start}exec " + " \\\n  ".join(words) + "\n"
    return Export(text=script, notes=notes)


def _registry(winner: Winner) -> str:
    return REGISTRY.get(winner.model.name, DEBUG)


def _overrides(winner: Winner) -> list[str]:
    config, workload = winner.config, winner.workload
    # In a pipeline the schedule splits the batch into micro-batches; else torchtitan accumulates to the global batch.
    local = config.micro_batch_size * (winner.gradient_accumulation_steps if config.pipeline_parallel_size > 1 else 1)
    reshards = config.zero_stage == 3 and config.reshard_after_forward
    values: dict[str, object] = {
        "training.local_batch_size": local,
        "training.global_batch_size": workload.global_batch_size,
        "training.seq_len": workload.sequence_length,
        **({} if winner.hyperparameters.clip is None else {"training.max_norm": winner.hyperparameters.clip}),
        "training.mixed_precision_param": "bfloat16" if config.precision in ("bf16", "fp8") else "float32",
        "parallelism.data_parallel_replicate_degree": _replicas(winner),
        "parallelism.data_parallel_shard_degree": winner.data_parallel_size // _replicas(winner),
        "parallelism.fsdp_reshard_after_forward": "always" if reshards else "never",
        "parallelism.tensor_parallel_degree": config.tensor_parallel_size,
        "parallelism.context_parallel_degree": config.context_parallel_size,
        "parallelism.pipeline_parallel_degree": config.pipeline_parallel_size,
        "parallelism.expert_parallel_degree": config.expert_parallel_size,
    }
    words = [f"--{name} {value}" for name, value in values.items()]
    words += spelled_words(config, "torchtitan")
    if config.compile_blocks:
        words += ["--compile.enable", "--compile.components model"]
        if config.async_tensor_parallel:
            words.append("--compile.enable_async_tensor_parallel")
    if config.offload_param == "cpu":
        words.append("--training.enable_cpu_offload")
    if config.tensor_parallel_size > 1 and not config.sequence_parallel:
        words.append("--parallelism.no-enable-sequence-parallel")
    return words


def _replicas(winner: Winner) -> int:
    """Number of copies of the states; without sharding, every data-parallel rank has one."""
    return winner.data_parallel_size if winner.config.zero_stage == 0 else replicas(winner, TARGET.format)


def _pipeline(winner: Winner) -> list[str]:
    """Options for pipelines. The last one takes every word up to the next option, so other options must follow."""
    config = winner.config
    if config.pipeline_parallel_size == 1:
        return []
    words = [
        "--training.disable_cuda_graphs",  # torchtitan refuses them in pipelines
        f"--parallelism.pipeline_parallel_schedule {SCHEDULES[config.pipeline_schedule]}",
        f"--parallelism.pipeline_parallel_microbatch_size {config.micro_batch_size}",
    ]
    if winner.shape is not None and _registry(winner) != DEBUG:
        stages = split_layers(winner.shape, config, winner.workload.sequence_length)
        words += ["--parallelism.module_fqns_per_model_part", *_modules(stages)]
    return words


def _modules(stages: tuple[range, ...]) -> list[str]:
    """The modules of each stage, as torchtitan's Llama names them."""
    parts = [[f"layers.{layer}" for layer in layers] for layers in stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return [",".join(part) for part in parts]


def _notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = fsdp2_notes(config, "reshard_after_forward never")
    if _registry(winner) == DEBUG:
        notes.append(
            f"{winner.model.name}: torchtitan has shapes by name alone; put your own registry function in the place of {DEBUG}"
        )
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: torchtitan computes every second matrix product again too")
    if config.async_tensor_parallel and not config.compile_blocks:
        notes.append(
            "async_tensor_parallel=True: torchtitan has it in compiled blocks alone (--compile.enable_async_tensor_parallel)"
        )
    if config.reduce_dtype != "fp32":
        notes.append(f"reduce_dtype={config.reduce_dtype}: torchtitan reduces in float32 alone")
    if config.precision == "fp8":
        notes.append("precision=fp8: give model_registry converters=[Float8LinearConverter.Config()] in your registry function")
    elif config.precision not in ("fp32", "bf16"):
        notes.append(f"precision={config.precision}: torchtitan trains in float32 and bfloat16 alone")
    if config.pipeline_parallel_size > 1 and _registry(winner) == DEBUG:
        notes.append("virtual_stages, pipeline_split: give parallelism.module_fqns_per_model_part your model's modules")
    groups = "state it in the param_groups of the OptimizersContainer.Config of your registry function"
    notes += unplaced_notes(winner, groups, "lr", "weight_decay", "optimizer")
    notes += unstated_note(winner, "left out, those of the registry hold", "lr", "weight_decay", "clip", "optimizer")
    notes += marks_note(config, "torchtitan")
    return notes + TARGET.unexpressed(config)
