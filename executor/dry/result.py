"""The results of a dry run. Plain data: the command line reads it without torch."""

from dataclasses import dataclass

from search_spaces.trial import CollectiveCount


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """The predicted optimizer step of one rank. Names and meanings are those of `RankMeasurement`."""

    rank: int
    coordinates: dict[str, int]
    """Its place along each mesh dimension."""
    stages: tuple[int, ...]
    """The pipeline stages that it holds."""
    micro_batches: int
    """Micro-batches of a step."""
    peak_memory_bytes: int
    memory_by_tag: dict[str, int]
    """The peak, split by tag; the sum is exactly the peak."""
    tag_peak_bytes: dict[str, int]
    """Each tag's own highest value in the step."""
    host_memory_bytes: int
    """Host memory that offloading uses."""
    flops_per_step: int | None
    """Executed by this rank, including recomputation; None: the formula of an operator failed."""
    collectives: tuple[CollectiveCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The prediction for a configuration: one rank for each pipeline position. All other ranks are copies of these."""

    ranks: tuple[DryRank, ...]
    backend: str
    """The backend whose own memory is counted: gloo or nccl."""
    seconds: float
    """Duration of the dry run."""

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak of any rank."""
        return max(rank.peak_memory_bytes for rank in self.ranks)
