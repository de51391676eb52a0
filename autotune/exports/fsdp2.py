"""What all targets based on torch's FSDP share: notes, replica counts, and class names of Transformers models."""

from collections.abc import Mapping

from autotune.errors import ExportRefusedError
from autotune.exports.winner import Winner
from search_spaces.communication import INT8
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


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of a reduction, by dtype."""


def bucket_megabytes(config: TrialConfig) -> int:
    """The reduction bucket size in the unit of `bucket_cap_mb` (MiB); at least 1."""
    return max(config.reduce_bucket_size * BYTES[sent_dtype(config)] // 2**20, 1)


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
