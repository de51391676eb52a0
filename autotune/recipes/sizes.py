"""The settings of a recipe that state its ranks, its nodes and its batch, on another cluster."""

import math
from collections.abc import Callable, Mapping

from autotune.frameworks.accelerate import ACCELERATE_FORMAT
from autotune.frameworks.accelerate_checks import MACHINES, PROCESSES, mesh
from autotune.frameworks.check import BATCH
from autotune.frameworks.deepspeed import DEEPSPEED_FORMAT
from autotune.frameworks.framework import LintCase, Settings
from autotune.frameworks.megatron import BRIDGE, LM
from autotune.frameworks.shell import LAUNCHER
from autotune.frameworks.torchtitan import FORMAT, GLOBAL, LOCAL, REPLICATE, SHARD
from search_spaces.trial_config import TrialConfig

BEST_CONFIG = "best-config"
STEPS = "gradient_accumulation_steps"


def sized(case: LintCase, config: TrialConfig, batch: int) -> Settings:
    """The settings that give a case, whose layout is written already, its size and its batch; unchanged ones are left out.

    Args:
        case: in the surroundings of the new cluster.
        config: the layout that is meant.
        batch: samples per optimizer step, over all ranks.
    """
    cluster = case.around.cluster
    assert cluster is not None
    launcher = {
        f"{LAUNCHER}nnodes": cluster.nodes,
        **{f"{LAUNCHER}{name}": cluster.devices_per_node for name in ("nproc_per_node", "nproc-per-node")},
    }
    settings = {key: value for key, value in launcher.items() if key in case.imported.settings}
    settings |= _SIZED[case.framework.name](case, config, batch)
    return {key: value for key, value in settings.items() if case.get(key) != value}


def _torchtitan(case: LintCase, config: TrialConfig, batch: int) -> dict[str, object]:
    """Without a pipeline torchtitan accumulates local batches to the global one; a pipeline splits the local batch."""
    assert case.ranks is not None
    data_ranks, replicas = case.ranks // (config.tensor_parallel_size * config.pipeline_parallel_size), case.replicas or 1
    settings: dict[str, object] = {}
    stated_shards = case.get(SHARD, -1)
    if config.hsdp_shard_size and config.zero_stage == 3:
        shards = config.hsdp_shard_size // config.context_parallel_size
        settings |= {SHARD: shards, REPLICATE: max(replicas // max(shards, 1), 1)}
    elif config.zero_stage == 0 and stated_shards == 1:
        settings[REPLICATE] = replicas
    else:
        settings[SHARD] = -1 if stated_shards == -1 else data_ranks // config.context_parallel_size
        if case.get(REPLICATE, 1) != 1:
            settings[REPLICATE] = 1
    if config.pipeline_parallel_size > 1:
        settings[LOCAL] = max(batch // replicas, 1)
    local = config.micro_batch_size if config.pipeline_parallel_size == 1 else max(batch // replicas, 1)
    if case.get(GLOBAL) not in (None, -1) or local * replicas != batch:
        settings[GLOBAL] = batch
    return settings


def _megatron(case: LintCase, _: TrialConfig, batch: int) -> Settings:
    return {case.framework.keys[BATCH]: batch}


def _deepspeed(case: LintCase, config: TrialConfig, batch: int) -> dict[str, object]:
    """Beside AutoTP DeepSpeed refuses the global batch, because it counts every rank as a replica."""
    steps = max(batch // (config.micro_batch_size * (case.replicas or 1)), 1)
    if config.tensor_parallel_size > 1:
        return {"train_batch_size": None, STEPS: steps}
    stated_names = [name for name in ("train_batch_size", STEPS) if isinstance(case.get(name), int)]
    values = {"train_batch_size": batch, STEPS: steps}
    return {name: values[name] for name in stated_names or ["train_batch_size"]}


def _accelerate(case: LintCase, _: TrialConfig, __: int) -> dict[str, object]:
    cluster, ranks = case.around.cluster, case.ranks
    assert cluster is not None and ranks is not None
    settings: dict[str, object] = {PROCESSES: ranks, MACHINES: cluster.nodes}
    if any(mesh(name) in case.imported.settings for name in ("dp_shard", "tp", "cp")):
        copies = case.get(mesh("dp_replicate"), 1)
        copies = math.gcd(int(copies), case.replicas or 1)
        settings[mesh("dp_shard")] = max((case.replicas or 1) // copies, 1)
        if mesh("dp_replicate") in case.imported.settings:
            settings[mesh("dp_replicate")] = copies
    return settings


_SIZED: Mapping[str, Callable[[LintCase, TrialConfig, int], Settings]] = {
    FORMAT: _torchtitan,
    LM: _megatron,
    BRIDGE: _megatron,
    DEEPSPEED_FORMAT: _deepspeed,
    ACCELERATE_FORMAT: _accelerate,
    BEST_CONFIG: lambda _case, _config, batch: {BATCH: batch},
}
