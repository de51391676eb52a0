"""The native engine: implements the engine contract with ZeRO 0-3 in every parallel dimension."""

from executor.engine import Engine, RankContext
from executor.engines.native.capability import NATIVE
from executor.engines.native.session import NativeSession
from executor.engines.native.zero import ShardedModel
from executor.engines.native.zero_experts import ShardedExperts
from executor.engines.session import refuse
from executor.parallel.graphs import Capture, CudaCapture, capture_of, refuse_graphs
from executor.parallel.groups import ParallelGroups
from executor.parallel.part import ModelPart
from executor.parallel.replica import Replica
from search_spaces.models.model import Model
from search_spaces.models.stage_layout import stage_config
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class NativeEngine(Engine):
    """ZeRO 0-3 over data x context ranks, with tensor, sequence, context and pipeline parallelism: every knob of `NATIVE`."""

    capability = NATIVE

    def __init__(self, capture: type[Capture] = CudaCapture) -> None:
        """`capture`: the class that captures graphs of blocks."""
        self._capture = capture

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> NativeSession:
        refuse(NATIVE, context, model, config, workload)
        refuse_graphs(context, model, config, workload, self._capture)

        def make_replica(part: ModelPart, groups: ParallelGroups) -> Replica:
            own = stage_config(config, part.stage)
            if part.experts:
                return ShardedExperts(part, own, workload, groups, context.device)
            return ShardedModel(part, own, workload, groups.common, context.device)

        return NativeSession(context, model, config, workload, make_replica, capture_of(config, self._capture))
