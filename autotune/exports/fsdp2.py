"""What every target that shards by torch's FSDP has to tell, and how it divides the data-parallel ranks."""

from autotune.errors import ExportRefusedError
from autotune.exports.winner import Winner
from search_spaces.trial_config import TrialConfig


def fsdp2_notes(config: TrialConfig, nearest: str) -> list[str]:
    """Stages and offloading that FSDP2 has not.

    Args:
        config: what is exported.
        nearest: how the target says that parameters stay gathered until backward.
    """
    notes = []
    if config.zero_stage in (1, 2):
        notes.append(f"zero_stage={config.zero_stage}: FSDP2 shards parameters too; {nearest} is the nearest")
    return notes + offload_notes(config, "FSDP2")


def offload_notes(config: TrialConfig, name: str) -> list[str]:
    """FSDP has one switch: parameters, gradients and optimizer state go to main memory together."""
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
    """Where the target reduces in the type that it computes in, whatever is asked for."""
    reduces, asked = config.precision, config.reduce_dtype
    if asked == reduces or (reduces, asked) == ("fp64", "fp32"):  # of which no reduction is less exact than was asked for
        return []
    return [f"reduce_dtype={asked}: {name} reduces in {reduces} where it computes in {reduces}; {remedy}"]


def replicas(winner: Winner, form: str) -> int:
    """Copies of the sharded states; each is shared by as many data-parallel ranks, with their context ranks.

    Raises:
        ExportRefusedError: a copy is shared by fewer ranks than a sequence is divided among.
    """
    copies = winner.zero_ranks // winner.shard_size
    if winner.data_parallel_size % copies:
        problem = f"{form} shards over all context ranks of a sample, and hsdp_shard_size={winner.shard_size} is fewer"
        raise ExportRefusedError("format", problem, "use json, or a best configuration of another hsdp_shard_size")
    return copies
