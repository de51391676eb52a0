"""The reference grid: which configurations are measured, on what, and in which order. The same ones always."""

from dataclasses import dataclass, replace
from functools import cached_property

from autotune.request.engines import capability_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

MODEL = "llama-tiny"
WORKLOAD = Workload(global_batch_size=8, sequence_length=128)
RATE_MBIT = 500
"""Of every port of the switch, each direction: communication takes about as long as computing does on two cores."""
FIDELITY = Fidelity(max_warmup_steps=10, min_steps=8, max_steps=60, max_seconds=2.0)
WORLDS = (2, 4)
REFERENCE_EVERY = 20
"""Points after which the reference is measured again."""
REPEAT_EVERY = 25
"""Every which point is measured a second time, after all."""
TOP = 10
TOP_ROUNDS = 2
"""Rounds in which the best ten are measured again, interleaved."""
SMALL, BLOCK, WHOLE = 13_000, 110_000, 500_000_000
"""Elements: a 64th of the model (a matrix), an 8th of it (half a layer), all of it."""
ONE_BUCKET = TrialConfig().reduce_bucket_size
"""All of it as well: the canonical form of every bucket that is larger than the model."""
DOMAINS: dict[int, dict[str, tuple[Value, ...]]] = {
    2: {
        "zero_stage": (0, 1, 2, 3),
        "micro_batch_size": (1, 2, 4, 8),
        "reduce_bucket_size": (SMALL, BLOCK, ONE_BUCKET),
        "allgather_bucket_size": (SMALL, BLOCK, WHOLE),
        "prefetch_bucket_size": (0, SMALL, BLOCK),
        "param_persistence_threshold": (0, 1_000, 100_000),
        "overlap_comm": (False, True),
        "defer_gradient_reduction": (False, True),
        "tensor_parallel_size": (1, 2),
        "sequence_parallel": (False, True),
        "pipeline_parallel_size": (1, 2),
        "pipeline_schedule": ("1f1b", "gpipe"),
    },
    4: {
        "zero_stage": (0, 1, 2, 3),
        "micro_batch_size": (1, 2, 4),
        "reduce_bucket_size": (SMALL, ONE_BUCKET),
        "allgather_bucket_size": (SMALL, WHOLE),
        "prefetch_bucket_size": (0, BLOCK),
        "param_persistence_threshold": (0, 100_000),
        "overlap_comm": (False, True),
        "tensor_parallel_size": (1, 2),
        "sequence_parallel": (False, True),
        "pipeline_parallel_size": (1, 2, 4),
    },
}
"""Ranks -> what is varied."""
DATA_PARALLEL_KNOBS = (
    "zero_stage", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
    "overlap_comm", "defer_gradient_reduction",
)  # fmt: skip
"""What divides or sends nothing where there is one data-parallel rank."""


@dataclass(frozen=True)
class Grid:
    """The grid on so many ranks."""

    ranks: int

    @cached_property
    def cluster(self) -> ClusterSpec:
        """This machine's ranks on the switch, as a user who knows its rate would describe it."""
        here, rate = local_cluster(self.ranks), RATE_MBIT * 1e6 / 8
        return replace(here, name="switch", intra_node_bandwidth=rate, inter_node_bandwidth=rate)

    @cached_property
    def model(self) -> ModelSpec:
        model = resolve_model(MODEL)
        assert isinstance(model, ModelSpec)
        return model

    @cached_property
    def space(self) -> SearchSpace:
        """What strategies choose from."""
        return SearchSpace(
            model=self.model, cluster=self.cluster, workload=WORKLOAD, world_size=self.ranks, domains=DOMAINS[self.ranks],
            capability=capability_of("native"), name=f"reference-grid-{self.ranks}",
        )  # fmt: skip

    @cached_property
    def reference(self) -> TrialConfig:
        """What is measured again and again, so that drift is seen."""
        return self.space.admitted(TrialConfig(zero_stage=2, micro_batch_size=2))

    @cached_property
    def points(self) -> tuple[TrialConfig, ...]:
        """Every configuration of the space once, in an order that has nothing to do with its knobs.

        With one data-parallel rank ZeRO has nothing to divide: of the configurations that differ in its knobs alone one is
        measured for all (`standing_for`), and, so that this is seen to hold, what differs from it most (`twins`).
        """
        standing = {self.standing_for(config) for config in self.space.enumerate()}
        return tuple(sorted({*standing, *self.twins}, key=lambda config: config.hash))

    @cached_property
    def twins(self) -> tuple[TrialConfig, ...]:
        """Configurations of one data-parallel rank that should run as the one that stands for them does."""
        sizes: dict[str, Value] = {"reduce_bucket_size": SMALL, "allgather_bucket_size": SMALL, "prefetch_bucket_size": 0}
        changes = {"overlap_comm": False, "param_persistence_threshold": 0, **sizes}
        alone = [config for config in self.space.enumerate() if config == self.standing_for(config) and self._is_alone(config)]
        far = {self.space.canonical(config.replace({"zero_stage": stage, **changes})) for config in alone for stage in (2, 3)}
        return tuple(sorted(far, key=lambda config: config.hash)[::2])

    def standing_for(self, config: TrialConfig) -> TrialConfig:
        """The configuration that was measured for this one."""
        if not self._is_alone(config):
            return config
        defaults = TrialConfig()
        return self.space.canonical(config.replace({name: getattr(defaults, name) for name in DATA_PARALLEL_KNOBS}))

    def matters(self, knob: str, config: TrialConfig) -> bool:
        """Whether the knob changes anything there."""
        condition = KNOBS[knob].condition
        if knob in DATA_PARALLEL_KNOBS and self._is_alone(config):
            return False
        return condition is None or condition.holds(config, self.space.context)

    def request(
        self, attempt: str, config: TrialConfig, workload: Workload = WORKLOAD, losses: tuple[float, ...] = ()
    ) -> TrialRequest:
        """A trial as the grid measures it, wherever one is measured."""
        return TrialRequest(
            attempt=attempt, model=self.model, config=config, workload=workload, world_size=self.ranks, fidelity=FIDELITY,
            timeout_seconds=120.0, reference_losses=losses,
        )  # fmt: skip

    def _is_alone(self, config: TrialConfig) -> bool:
        return config.zero_ranks(self.ranks) == 1
