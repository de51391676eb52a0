"""The reference grid: its configurations, workload and network, and the fixed order of its measurements."""

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
"""Rate of every switch port, each direction: communication takes about as long as computation on two cores."""
FIDELITY = Fidelity(max_warmup_steps=10, min_steps=8, max_steps=60, max_seconds=2.0)
WORLDS = (2, 4)
REFERENCE_EVERY = 20
"""Points after which the reference is measured again."""
REPEAT_EVERY = 25
"""Interval of the points that are measured again at the end."""
TOP = 10
TOP_ROUNDS = 2
"""Rounds in which the best ten are measured again, interleaved."""
SMALL, BLOCK, WHOLE = 13_000, 110_000, 500_000_000
"""Elements: a 64th of the model (a matrix), an 8th of it (half a layer), all of it."""
ONE_BUCKET = TrialConfig().reduce_bucket_size
"""The whole model too: the canonical value of every bucket larger than the model."""
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
"""Ranks -> the varied knobs and their values."""
DATA_PARALLEL_KNOBS = (
    "zero_stage", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
    "overlap_comm", "defer_gradient_reduction",
)  # fmt: skip
"""Knobs without effect on one data-parallel rank, where nothing is divided or sent."""


@dataclass(frozen=True)
class Grid:
    """The grid on `ranks` ranks."""

    ranks: int

    @cached_property
    def cluster(self) -> ClusterSpec:
        """This machine's ranks on the switch, as described by a user who knows its rate."""
        here, rate = local_cluster(self.ranks), RATE_MBIT * 1e6 / 8
        return replace(here, name="switch", intra_node_bandwidth=rate, inter_node_bandwidth=rate)

    @cached_property
    def model(self) -> ModelSpec:
        model = resolve_model(MODEL)
        assert isinstance(model, ModelSpec)
        return model

    @cached_property
    def space(self) -> SearchSpace:
        """The space that strategies search."""
        return SearchSpace(
            model=self.model, cluster=self.cluster, workload=WORKLOAD, world_size=self.ranks, domains=DOMAINS[self.ranks],
            capability=capability_of("native"), name=f"reference-grid-{self.ranks}",
        )  # fmt: skip

    @cached_property
    def reference(self) -> TrialConfig:
        """The configuration that is measured repeatedly, to detect drift."""
        return self.space.admitted(TrialConfig(zero_stage=2, micro_batch_size=2))

    @cached_property
    def points(self) -> tuple[TrialConfig, ...]:
        """Every configuration of the space once, in an order independent of its knobs.

        With one data-parallel rank ZeRO has nothing to divide: of configurations that differ only in its knobs, one is measured
        for all (`representative`), and, to check that assumption, those that differ most from it (`twins`).
        """
        representatives = {self.representative(config) for config in self.space.enumerate()}
        return tuple(sorted({*representatives, *self.twins}, key=lambda config: config.hash))

    @cached_property
    def twins(self) -> tuple[TrialConfig, ...]:
        """Configurations of one data-parallel rank that should run like their representative."""
        sizes: dict[str, Value] = {"reduce_bucket_size": SMALL, "allgather_bucket_size": SMALL, "prefetch_bucket_size": 0}
        changes = {"overlap_comm": False, "param_persistence_threshold": 0, **sizes}
        single = [c for c in self.space.enumerate() if c == self.representative(c) and self._has_one_data_rank(c)]
        far = {self.space.canonical(config.replace({"zero_stage": stage, **changes})) for config in single for stage in (2, 3)}
        return tuple(sorted(far, key=lambda config: config.hash)[::2])

    def representative(self, config: TrialConfig) -> TrialConfig:
        """The configuration that is measured in place of this one."""
        if not self._has_one_data_rank(config):
            return config
        defaults = TrialConfig()
        return self.space.canonical(config.replace({name: getattr(defaults, name) for name in DATA_PARALLEL_KNOBS}))

    def matters(self, knob: str, config: TrialConfig) -> bool:
        """Whether the knob has an effect in the configuration."""
        condition = KNOBS[knob].condition
        if knob in DATA_PARALLEL_KNOBS and self._has_one_data_rank(config):
            return False
        return condition is None or condition.holds(config, self.space.context)

    def request(
        self, attempt: str, config: TrialConfig, workload: Workload = WORKLOAD, losses: tuple[float, ...] = ()
    ) -> TrialRequest:
        """The request of a trial of the grid."""
        return TrialRequest(
            attempt=attempt, model=self.model, config=config, workload=workload, world_size=self.ranks, fidelity=FIDELITY,
            timeout_seconds=120.0, reference_losses=losses,
        )  # fmt: skip

    def _has_one_data_rank(self, config: TrialConfig) -> bool:
        return config.zero_ranks(self.ranks) == 1
