"""torch's FSDP2: what its users share, and plain, runnable torch code: FSDP2, tensor parallelism and pipelines."""

import importlib.resources
from collections.abc import Mapping

from autotune.errors import ExportRefusedError
from autotune.frameworks.best_config import Winner
from autotune.frameworks.export import (
    Checkpoints,
    Export,
    ExportTarget,
    header,
    lacking,
    marks_note,
    python_text,
    remarks,
    unstated_note,
)
from autotune.frameworks.launch import torchrun_words
from search_spaces.communication import INT8
from search_spaces.mesh import ABBREVIATIONS
from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES, split_layers, stages_of_rank
from search_spaces.training.states import scales_losses
from search_spaces.trial_config import TrialConfig


def fsdp2_notes(config: TrialConfig, nearest: str) -> list[str]:
    """Notes about ZeRO stages and offloading that FSDP2 does not have.

    Args:
        config: the exported configuration.
        nearest: the target's setting that keeps parameters gathered until backward.
    """
    notes = []
    if config.zero_stage in (1, 2):
        notes.append(f"zero_stage={config.zero_stage}: FSDP2 shards parameters too; {nearest} is the nearest")
    return notes + offload_notes(config, "FSDP2")


def offload_notes(config: TrialConfig, name: str) -> list[str]:
    """Notes about offloading. FSDP has one switch: it offloads parameters, gradients and optimizer state together."""
    optimizer, parameters = config.offload_optimizer, config.offload_param
    if parameters == "cpu":
        if optimizer == "cpu":
            return []
        return [f"offload_optimizer={optimizer}: {name} offloads it to main memory with the parameters"]
    notes = []
    if parameters != "none":
        notes.append(f"offload_param={parameters}: {name} offloads to main memory alone; it is left out")
    if optimizer != "none":
        notes.append(f"offload_optimizer={optimizer}: {name} offloads parameters with it or nothing; it is left out")
    return notes


def reduction_note(config: TrialConfig, name: str, remedy: str) -> list[str]:
    """A note if the target always reduces in its compute dtype and another reduce_dtype is requested."""
    reduces, requested = config.precision, config.reduce_dtype
    if requested == reduces or (reduces, requested) == ("fp64", "fp32"):  # the reduction is at least as exact as requested
        return []
    return [f"reduce_dtype={requested}: {name} reduces in {reduces} where it computes in {reduces}; {remedy}"]


def replicas(winner: Winner, form: str) -> int:
    """Number of copies of the sharded states. Each copy is divided among equally many data-parallel ranks and their context
    ranks.

    Raises:
        ExportRefusedError: a copy is divided among fewer ranks than a sequence.
    """
    copies = winner.zero_ranks // winner.shard_size
    if winner.data_parallel_size % copies:
        problem = f"{form} shards over all context ranks of a sample, and hsdp_shard_size={winner.shard_size} is fewer"
        raise ExportRefusedError("format", problem, "use json, or a best configuration of another hsdp_shard_size")
    return copies


def state_copies(winner: Winner, form: str) -> int:
    """As `replicas`, for targets that shard nothing at stage 0: there every data-parallel rank has a copy."""
    return winner.data_parallel_size if winner.config.zero_stage == 0 else replicas(winner, form)


def bucket_megabytes(config: TrialConfig) -> int:
    """The reduction bucket size in the unit of `bucket_cap_mb` (MiB); at least 1."""
    # Bytes per element of a reduction, by dtype.
    element_bytes = {"fp32": 4, "bf16": 2, "fp16": 2}
    return max(config.reduce_bucket_size * element_bytes[sent_dtype(config)] // 2**20, 1)


def sent_dtype(config: TrialConfig) -> str:
    """The dtype in which torch reduces gradients; it does not send integers."""
    return "fp32" if config.reduce_dtype == INT8 else config.reduce_dtype


DECODER_LAYERS: Mapping[str, str] = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "gpt2": "GPT2Block",
    "opt": "OPTDecoderLayer",
    "gpt_neox": "GPTNeoXLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "olmo3": "Olmo3DecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "granite": "GraniteDecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
    "llama4_text": "Llama4TextDecoderLayer",
}
"""Family -> the class of its layers, the unit in which FSDP gathers parameters."""


TARGET = ExportTarget(
    format="torch",
    name="plain torch code",
    expressed=frozenset({
        "zero_stage", "micro_batch_size", "reduce_bucket_size", "reduce_dtype", "hsdp_shard_size", "reshard_after_forward",
        "offload_optimizer", "offload_param", "tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size",
        "virtual_stages", "pipeline_schedule", "pipeline_split", "activation_checkpointing", "checkpoint_every_k", "precision",
        "fused_optimizer", "rank_order", "compile_blocks", "pipeline_layout",
    }),
    elsewhere={"optimizer": "put it in the place of AdamW"},
    refused={"context_parallel_size": "torchtitan or megatron", "expert_parallel_size": "megatron"},
)  # fmt: skip
SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS", "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV",
}  # fmt: skip
SMALL = ModelSpec(
    name="small", family="llama", num_layers=8, hidden_size=128, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
    ffn_hidden_size=256, vocab_size=512, sequence_length=128,
)  # fmt: skip
"""The model of the script if the shape of the job's model is not known."""


def export_torch(winner: Winner) -> Export:
    """Return the script.

    Raises:
        ExportRefusedError: torch does not support the layout, or would train wrong weights.
    """
    TARGET.require(winner.config)
    _require_right(winner)
    torch_engines = ("fsdp2", "ddp")  # ours that run torch's own implementations
    notes = remarks(winner, _notes(winner), Checkpoints.DISTRIBUTED, torch_engines)
    template = (importlib.resources.files("autotune.frameworks") / "templates/torch_train.txt").read_text(encoding="utf-8")
    script = template.replace("{{command}}", _command(winner)).replace("{{constants}}", _constants(winner))
    return Export(text=header(winner, "torch", notes) + script, notes=notes)


def _require_right(winner: Winner) -> None:
    """Refuse FSDP2 with zero-bubble schedules: it runs, but trains wrong weights (torch 2.13)."""
    config = winner.config
    if config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES and config.zero_stage > 0:
        problem = f"torch's FSDP2 trains wrong weights under pipeline_schedule={config.pipeline_schedule}"
        raise ExportRefusedError("format", problem, "use json, or a best configuration with another schedule or zero_stage=0")


def _command(winner: Winner) -> str:
    rate = " --lr YOUR_LEARNING_RATE" if winner.hyperparameters.lr is None else ""
    return " ".join([*torchrun_words(winner), f"FILE --steps 10{rate}"])


def _constants(winner: Winner) -> str:
    config, workload, shape = winner.config, winner.workload, winner.shape or SMALL
    stages = split_layers(shape, config, workload.sequence_length)
    # Mesh dimensions, outermost first; data-parallel ranks that share one copy of the states are adjacent.
    dimensions = {"tensor": ("tensor",), "context": (), "data": ("replicate", "shard"), "pipeline": ("pipeline",)}
    order = [ABBREVIATIONS[short] for short in reversed(config.rank_order.split("-"))]
    names = tuple(name for dimension in order for name in dimensions[dimension])
    sizes = {
        "pipeline": config.pipeline_parallel_size, "replicate": state_copies(winner, TARGET.format),
        "shard": winner.data_parallel_size // state_copies(winner, TARGET.format), "tensor": config.tensor_parallel_size,
    }  # fmt: skip
    values: dict[str, object] = {
        "WORLD_SIZE": winner.world_size,
        "MESH_NAMES": names,
        "MESH_SIZES": tuple(sizes[name] for name in names),
        "STAGES": tuple(tuple(layers) for layers in stages),
        "STAGES_OF": tuple(stages_of_rank(config, rank) for rank in range(config.pipeline_parallel_size)),
        "SCHEDULE": SCHEDULES[config.pipeline_schedule],
        "ZERO_STAGE": config.zero_stage,
        "RESHARD_AFTER_FORWARD": config.zero_stage == 3 and config.reshard_after_forward,
        "SEQUENCE_PARALLEL": config.sequence_parallel,
        "ACTIVATION_CHECKPOINTING": config.activation_checkpointing,
        "CHECKPOINT_EVERY_K": config.checkpoint_every_k,
        "COMPILE_BLOCKS": config.compile_blocks,
        "PRECISION": "bf16" if config.precision == "fp8" else config.precision,
        "REDUCE_DTYPE": sent_dtype(config),
        "REDUCE_BUCKET_SIZE": config.reduce_bucket_size,
        "BUCKET_MEGABYTES": bucket_megabytes(config),
        "OFFLOAD": config.offload_param == "cpu",
        "FUSED_OPTIMIZER": config.fused_optimizer,
        "GLOBAL_BATCH_SIZE": workload.global_batch_size,
        "MICRO_BATCH_SIZE": config.micro_batch_size,
        "SEQUENCE_LENGTH": workload.sequence_length,
        "LEARNING_RATE": winner.hyperparameters.lr,
        "WEIGHT_DECAY": winner.hyperparameters.weight_decay,
        "GRADIENT_CLIPPING": winner.hyperparameters.clip,
        "MODEL": _model(shape),
    }
    return "\n".join(f"{name} = {python_text(value)}" for name, value in values.items())


def _model(shape: ModelSpec) -> dict[str, object]:
    return {
        "hidden": shape.hidden_size,
        "heads": shape.num_attention_heads,
        "kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "ffn": shape.ffn_hidden_size,
        "vocab": shape.vocab_size,
        "positions": shape.sequence_length,
        "learned_positions": shape.position is Position.LEARNED,
        "rotary_fraction": shape.rotary_fraction,
        "rope_theta": shape.rope_theta,
        "rms_norm": shape.norm is Norm.RMSNORM,
        "epsilon": shape.norm_epsilon,
        "activation": shape.activation,
        "gated": shape.gated_mlp,
        "qkv_bias": shape.qkv_bias,
        "output_bias": shape.attention_output_bias,
        "mlp_bias": shape.mlp_bias,
    }


def _notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = fsdp2_notes(config, "reshard_after_forward=False")
    notes += unstated_note(winner, "the script asks for it, as --lr", "lr")
    notes += unstated_note(winner, "torch's own default holds", "weight_decay")
    notes += unstated_note(winner, "nothing is clipped", "clip")
    notes += unstated_note(winner, "AdamW stands in its place: put yours there", "optimizer")
    if config.reduce_dtype == INT8:
        notes.append("reduce_dtype=int8: torch sends no integers; fp32 is written")
    if config.zero_stage > 0:
        notes.append(f"reduce_bucket_size={config.reduce_bucket_size}: FSDP2 reduces block by block")
    if config.precision == "fp8":
        notes.append(
            "precision=fp8: as bf16; convert the blocks with torchao.float8.convert_to_float8_training before they are cut"
        )
    if scales_losses(config):
        notes.append(f"precision={config.precision}: nothing scales the loss here; put a torch.amp.GradScaler around backward")
    return [*notes, *_model_notes(winner.shape), *marks_note(config, "this script"), *TARGET.unexpressed(config)]


def _model_notes(shape: ModelSpec | None) -> list[str]:
    """Notes about parts of the model's shape that the built-in model lacks."""
    if shape is None:
        return ["the model's shape is not known: a small Llama stands in its place; put your own there"]
    missing = lacking(shape, ())
    return [f"the model that is built in has no {', no '.join(missing)}: put your own there"] if missing else []
