"""The roofline order: a baseline of a few lines that any user can write."""

from autotune.strategies.strategy import Candidates, Score
from benchmarks.search.baselines.expert import KNOBS, may_fit
from benchmarks.search.baselines.replay import Combinations, Procedure, ReplayStrategy, context_of
from search_spaces.capability import SpaceContext
from search_spaces.trial_config import TrialConfig


class RooflineStrategy(ReplayStrategy):
    """Configurations that fit by a count of bytes (`may_fit`), then the others, each in the order of `_seconds`.

    Without model and cluster, in the candidates' order. It learns nothing from trials.
    """

    def __init__(self, score: Score) -> None:
        super().__init__(score)
        self._orders: dict[str, list[TrialConfig]] = {}

    def procedure(self, candidates: Candidates) -> Procedure:
        if candidates.hash not in self._orders:
            configs, context = Combinations(candidates, KNOBS, self.listing).all(), context_of(candidates)
            if context is not None:
                configs = sorted(configs, key=lambda config: (not may_fit(config, context), _seconds(config, context)))
            self._orders[candidates.hash] = list(configs)
        for config in self._orders[candidates.hash]:  # noqa: UP028  answers are sent, which a list does not take
            yield config


def _seconds(config: TrialConfig, context: SpaceContext) -> float:
    """max(FLOPs / peak, bytes / bandwidth) of a step [Williams 2009], plus tensor communication, times the bubble; or
    the reduction of gradients, which backward hides, if it takes longer."""
    model, cluster, world = context.model, context.cluster, context.world_size
    tensor, stages, data = config.tensor_parallel_size, config.pipeline_parallel_size, config.zero_ranks(world)
    batch, sequence = context.workload.global_batch_size, context.workload.sequence_length
    steps, per_step = config.gradient_accumulation_steps(batch, world), config.micro_batch_size * sequence
    hidden, layers = getattr(model, "hidden_size", 0), getattr(model, "num_layers", 1)
    parameters, again = model.parameter_count / (tensor * stages), 4 / 3 if config.activation_checkpointing == "full" else 1.0
    peak = cluster.device.peak_flops.get("bf16") or max(cluster.device.peak_flops.values(), default=1e12)
    flops = 6 * parameters * per_step * again + 12 * hidden * sequence * per_step * layers / (tensor * stages) * again
    moved = 6 * parameters + 2 * 34 * hidden * per_step * layers / (tensor * stages)
    compute = max(flops / peak, moved / (cluster.device.memory_bandwidth or peak))
    device = cluster.inter_node_bandwidth / cluster.devices_per_node if cluster.nodes > 1 else cluster.intra_node_bandwidth
    link = cluster.intra_node_bandwidth if tensor <= cluster.linked_devices else device
    exchanged = 8 * 2 * hidden * per_step * (tensor - 1) / tensor * layers / stages * again / link
    reduced = 4 * parameters * (data - 1) / data / device
    return max((compute + exchanged) * (steps + stages - 1), reduced)
