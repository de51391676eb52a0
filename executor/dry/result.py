"""What a dry run tells. Plain data: the command line reads it without torch."""

from dataclasses import dataclass

from search_spaces.trial import CollectiveCount


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """One optimizer step of one rank, foretold. Names and meanings are those of `RankMeasurement`."""

    rank: int
    coordinates: dict[str, int]
    """Its place along each mesh dimension."""
    stages: tuple[int, ...]
    """The pipeline stages that it holds."""
    micro_batches: int
    """Micro-batches of a step."""
    peak_memory_bytes: int
    memory_by_tag: dict[str, int]
    """The peak split; sums to it exactly."""
    tag_peak_bytes: dict[str, int]
    """Each tag's own highest value in the step."""
    host_memory_bytes: int
    """What offloading keeps in host memory."""
    flops_per_step: int | None
    """Executed by this rank, what runs again included; None: an operator came whose formula could not tell."""
    collectives: tuple[CollectiveCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A configuration, foretold: one rank for each place along the pipeline, of which all others are copies."""

    ranks: tuple[DryRank, ...]
    backend: str
    """Whose own memory is counted: gloo or nccl."""
    seconds: float
    """What the dry run took."""

    @property
    def peak_memory_bytes(self) -> int:
        """The highest rank's."""
        return max(rank.peak_memory_bytes for rank in self.ranks)
