"""What a job optimises: the model on the cluster under its workload, and the memory that a winner may use."""

import math
from dataclasses import dataclass

from autotune.objective.ranking import Ranking
from autotune.prediction.cases.module_cases import predictable, transformer_of
from autotune.prediction.equations.memory import USABLE
from autotune.prediction.planning.memory_fit import ranks_of_node
from autotune.request.request import Objective
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetting:
    """The setting of a job; constant while it runs."""

    model: ModelSpec | FactoryModel
    """A user's module has a profile."""
    space: SearchSpace
    engine: str
    ranking: Ranking
    fidelity: Fidelity

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster on which trials run."""
        return self.space.cluster

    @property
    def workload(self) -> Workload:
        """The workload of every trial."""
        return self.space.workload

    @property
    def memory_share(self) -> float:
        """Share of memory in the maximised value, (1 - share) log rate - share log peak: 1 if the smallest peak wins."""
        return 1.0 if self.ranking.objective is Objective.MEMORY else self.ranking.memory_share

    @property
    def host_room(self) -> float:
        """Bytes of a rank's share of its node's main memory."""
        return self.cluster.host_memory_bytes / ranks_of_node(self.cluster)

    @property
    def room(self) -> float:
        """Bytes that a rank may use to run and to be able to win."""
        usable = self.cluster.device.memory_bytes * (USABLE if self.cluster.device.kind == "cuda" else 1.0)
        return min(usable, self.ranking.capacity_bytes)


def setting_of(model: Model, space: SearchSpace, engine: str, ranking: Ranking, fidelity: Fidelity) -> JobSetting:
    """Return the setting of a job; a script, or a module without a profile, is predicted as a transformer of its size."""
    predicted_model = predictable(model, space)
    if predicted_model is None:
        assert not isinstance(model, ModelSpec)
        stages = 1
        if isinstance(model, CommandModel):  # each of the most stages in the space has at least one layer
            names = ("pipeline_parallel_size", "virtual_stages")
            stages = math.prod(max(map(int, space.domains.get(name, (1,)))) for name in names)
        predicted_model = transformer_of(model, space.workload.sequence_length, stages)
    return JobSetting(model=predicted_model, space=space, engine=engine, ranking=ranking, fidelity=fidelity)
