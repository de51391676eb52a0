"""What every target that shards by torch's FSDP2 has to tell."""

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
    if config.offload_optimizer != "none" and config.offload_param != "cpu":
        told = f"offload_optimizer={config.offload_optimizer}"
        notes.append(f"{told}: FSDP2 offloads parameters with it or nothing; it is left out")
    return notes
