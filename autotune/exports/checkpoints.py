"""Whether checkpoints of the baseline's layout load under the best layout, and which tool converts them if not."""

from enum import StrEnum

from autotune.exports.winner import Winner
from search_spaces.trial_config import TrialConfig


class Checkpoints(StrEnum):
    """The library that writes and reads the checkpoints."""

    DEEPSPEED = "deepspeed"
    """`engine.save_checkpoint`: a file for each rank's share of the optimizer state."""
    DISTRIBUTED = "distributed"
    """torch.distributed.checkpoint: shards by parameter name, resharded on loading."""
    TRAINER = "trainer"
    """Transformers' Trainer: the weights separately, the optimizer state as DeepSpeed or torch writes it."""
    MEGATRON = "megatron"
    """Megatron-LM's formats, `torch_dist` by default."""


LAYOUT = (
    "zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "virtual_stages", "pipeline_schedule", "pipeline_split",
    "expert_parallel_size", "expert_tensor_parallel_size", "hsdp_shard_size", "pipeline_layout",
)  # fmt: skip
"""Knobs that decide which rank holds which part of the model states."""


def checkpoint_note(winner: Winner, kind: Checkpoints) -> str:
    """One line: whether the checkpoints load unchanged, or which tool converts them."""
    before, after = winner.baseline, winner.config
    if before is None:
        return "checkpoints: no baseline was measured, so that it is not known whether its checkpoints load"
    changes = layout_changes(before, after, winner.world_size)
    if not changes:
        return "checkpoints: those of the baseline load unchanged, every rank holds what it held"
    return f"checkpoints: {', '.join(changes)}: {_HOW[kind](before, after)}"


def layout_changes(before: TrialConfig, after: TrialConfig, world_size: int) -> list[str]:
    """`zero_stage 0 -> 3` for each changed property that decides what a rank holds."""
    changes = [f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in LAYOUT if _differs(name, before, after)]
    ranks = before.zero_ranks(world_size), after.zero_ranks(world_size)
    sharded = max(before.zero_stage, after.zero_stage) > 0
    if sharded and ranks[0] != ranks[1]:
        changes.append(f"ranks that divide the states {ranks[0]} -> {ranks[1]}")
    return changes


def _differs(name: str, before: TrialConfig, after: TrialConfig) -> bool:
    """Whether a knob's two values place parts differently. Of schedules, only the assignment of stages to ranks matters."""
    if name == "pipeline_schedule":
        return _folded(before) != _folded(after)
    return bool(getattr(before, name) != getattr(after, name))


def _folded(config: TrialConfig) -> bool:
    return config.pipeline_parallel_size > 1 and config.pipeline_schedule in ("zbv", "dualpipev")


def _distributed(before: TrialConfig, _: TrialConfig) -> str:
    loads = "torch.distributed.checkpoint loads them unchanged, it divides them anew by the names of the parameters"
    converts = "`python -m torch.distributed.checkpoint.format_utils torch_to_dcp FROM TO`"
    return f"{loads}; what torch.save wrote is converted by {converts}" if before.zero_stage == 0 else loads


def _deepspeed(before: TrialConfig, after: TrialConfig) -> str:
    if before.zero_stage == 0:
        return (
            "stage 0 keeps the optimizer state in one piece that no tool divides; load the weights of "
            "mp_rank_00_model_states.pt into the module before deepspeed.initialize, and begin with a new optimizer state"
        )
    if after.zero_stage == 0:
        return "`zero_to_fp32.py CHECKPOINT WEIGHTS` puts the weights together; the optimizer state begins anew"
    return (
        "convert them by `ds_to_universal.py --input_folder CHECKPOINT --output_folder UNIVERSAL` (deepspeed/checkpoint), "
        'and load them with "checkpoint": {"load_universal": true}'
    )


def _trainer(before: TrialConfig, after: TrialConfig) -> str:
    weights = "the weights (model.safetensors) load under any layout"
    if before.zero_stage == 0 or after.zero_stage == 0:
        return f"{weights}; the optimizer state begins anew"
    return f"{weights}; for the optimizer state {_deepspeed(before, after)}"


def _megatron(before: TrialConfig, after: TrialConfig) -> str:
    tp, pp = after.tensor_parallel_size, after.pipeline_parallel_size
    if (before.zero_stage >= 2) != (after.zero_stage >= 2):
        return "Megatron-FSDP has a format of its own, fsdp_dtensor: convert them by tools/checkpoint/checkpoint_inspector.py"
    return (
        "--ckpt-format torch_dist loads them unchanged, the optimizer state where --dist-ckpt-optim-fully-reshardable saved "
        "it; those of --ckpt-format torch are converted by `tools/checkpoint/convert.py --model-type GPT --loader core "
        f"--saver core --target-tensor-parallel-size {tp} --target-pipeline-parallel-size {pp}`"
    )


_HOW = {
    Checkpoints.DISTRIBUTED: _distributed,
    Checkpoints.DEEPSPEED: _deepspeed,
    Checkpoints.TRAINER: _trainer,
    Checkpoints.MEGATRON: _megatron,
}
