"""Rules of sharding and offloading states."""

from search_spaces.context import SpaceContext
from search_spaces.models.pipeline import marks_offloading
from search_spaces.rules.parallelism import DEGREES, LAYOUT, PP
from search_spaces.rules.rule import Rule
from search_spaces.trial_config import TrialConfig

ZERO = "zero_stage"
OFFLOADS = ("offload_optimizer", ZERO, PP, LAYOUT)


def _hsdp_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    size, ranks = config.hsdp_shard_size, config.zero_ranks(context.world_size)
    if size == 0:
        return None
    if config.zero_stage != 3:
        return f"hsdp_shard_size={size} needs sharded parameters, but zero_stage is {config.zero_stage}"
    return f"{size} does not divide the {ranks} ranks of data x context" if ranks % size or size > ranks else None


def _secondary_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    size, ranks = config.secondary_shard_size, config.shard_ranks(context.world_size)
    if size == 0 or config.zero_stage != 3 or (size <= ranks and ranks % size == 0):
        return None
    return f"{size} does not divide the {ranks} ranks that shard the parameters"


def _offload_optimizer_stage(config: TrialConfig, _: SpaceContext) -> str | None:
    if config.zero_stage >= 1:
        return None
    if config.pipeline_parallel_size > 1 and marks_offloading(config):
        return f"pipeline_layout={config.pipeline_layout} offloads the optimizer state of stages, but zero_stage is 0"
    if config.offload_optimizer == "none":
        return None
    return "the optimizer state is offloaded, but zero_stage is 0"


def _offload_param_stage(config: TrialConfig, _: SpaceContext) -> str | None:
    if config.offload_param == "none" or config.zero_stage == 3:
        return None
    return f"parameters are offloaded, but zero_stage is {config.zero_stage}"


def _nvme_path(config: TrialConfig, context: SpaceContext) -> str | None:
    if "nvme" not in (config.offload_optimizer, config.offload_param) or context.workload.nvme_path is not None:
        return None
    return "states are offloaded to files, but no folder is given for them"


ZERO_RULES: tuple[Rule, ...] = (
    Rule("hsdp-shards", (*DEGREES, ZERO, "hsdp_shard_size"), "use zero_stage=3 and a divisor of those ranks", _hsdp_divides),
    Rule(
        "secondary-shards",
        (*DEGREES, ZERO, "hsdp_shard_size", "secondary_shard_size"),
        "choose a divisor of them, or 0",
        _secondary_divides,
    ),
    Rule("offload-optimizer-stage", OFFLOADS, "use zero_stage 1, 2 or 3", _offload_optimizer_stage),
    Rule("offload-param-stage", ("offload_param", ZERO), "use zero_stage=3", _offload_param_stage),
    Rule("nvme-path", ("offload_optimizer", "offload_param"), "name a folder with --nvme-path, or use cpu", _nvme_path),
)
