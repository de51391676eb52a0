"""The contract of an engine: what runs inside a rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from search_spaces.capability import Capability
from search_spaces.model import Model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TAGS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
"""What a device's memory is split into. `activations` is everything that an engine does not claim for another tag."""
HOST = "host"
"""Tag of tensors that offloading keeps in host memory: counted apart from the device's, on a CPU device too."""

REFERENCE_STEPS = 3
"""First steps whose losses are held against the job's reference."""


def measured_config(config: TrialConfig) -> TrialConfig:
    """What is built to measure a configuration: a warm-up of the optimizer's own ends with the steps that are not timed.

    Of onebit_adam the steps after its warm-up are measured, which are all but the first of a training, however long that is.
    """
    if config.optimizer != "onebit_adam":
        return config
    return config.replace({"onebit_warmup_steps": min(config.onebit_warmup_steps, REFERENCE_STEPS)})


GroupKey = tuple[str, tuple[tuple[int, ...], ...], int]
"""The mesh dimension, the ranks of all groups along it, and how many there are before with the same of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where a rank stands. The default process group is up for all of a gang's ranks."""

    rank: int
    world_size: int
    device: torch.device
    control_group: dist.ProcessGroup | None = None
    """A gloo group for the measurement's own agreements, apart from the engine's; None: one rank."""
    groups_of_before: MutableMapping[GroupKey, dist.ProcessGroup | None] | None = field(default=None, compare=False)
    """Process groups that a trial leaves to the next one of the same ranks, which takes those that it would make too. A gang
    joins anew after a failure, and begins with none. None: each trial destroys its own."""
    ranks_on_host: int = 1
    """Of the gang, this one too."""
    shares_device: bool = False
    """Whether another rank has the same device: what it holds there cannot be separated from what the driver holds."""
    after_failure: ExitStack = field(default_factory=ExitStack, compare=False)
    """What a failed trial leaves to be done after its failure has been reported: it may wait for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimizer step tells."""

    loss: float | None
    """Mean loss over this rank's micro-batches, before the update; None where the rank holds no last stage of a pipeline."""
    gradient_norm: float | None
    """Global L2 norm of the mean gradient before clipping, the same on every rank; None where nothing is clipped."""
    skipped: bool = False
    """Whether gradients overflowed, so that nothing was updated; the same on every rank. Trained again on the same data, the
    step has a smaller loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePool:
    """Device memory that replayed graphs keep to themselves, from step to step. Bytes."""

    by_tag: Mapping[str, int]
    """All of it, by tag of `TAGS`. In none of `EngineSession.tagged_storages`."""
    allocated: int
    """Of it, what the device's allocator counts as allocated: the rest is in use only while graphs are replayed, and counts as
    free although nobody else can have it."""


class EngineSession(ABC):
    """A model that is built on this rank and can be trained. Used from one thread. Every rank calls the same methods in order.

    Between steps nothing is in flight: every collective that a step starts has ended when it returns.
    """

    @abstractmethod
    def prepare(self, step: int, micro_batches: int | None = None) -> None:
        """Make the data of step `step` ready on the device, so that a timed step does not wait for data.

        `micro_batches`: the next step has so many of its first ones alone, as a step of that smaller batch would; None: all.
        """

    @abstractmethod
    def train_step(self) -> StepReport:
        """One optimizer step over the prepared data: every micro-batch, the reduction, clipping and the update."""

    def launches_steps(self) -> bool:
        """Whether `launch_step` can be called: nothing of a step waits for what the device has computed in it."""
        return False

    def launch_step(self) -> Callable[[], StepReport]:
        """`train_step` without waiting for the device; what is returned waits, and reads the step's loss and norm."""
        raise NotImplementedError

    @abstractmethod
    def settled(self) -> bool:
        """Whether lazily made state (optimizer state, gather trace, buffers) exists, so that steps repeat exactly."""

    @abstractmethod
    def tagged_storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that is live between steps, with its tag of `TAGS`, or `HOST`. A storage may come more than once.

        No step releases one of these storages: what it releases, it has allocated itself.
        """

    @abstractmethod
    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """(operation, mesh dimension) -> (count, bytes of the full messages), of all steps since the session was built."""

    def waited_seconds(self) -> float | None:
        """Seconds that steps were held up by other ranks, since the session was built; None: this engine cannot tell."""
        return None

    def compile_seconds(self) -> float:
        """Seconds that went into torch.compile since the session was built, on this rank."""
        return 0.0

    def capture_seconds(self) -> float:
        """Seconds that `prepare` spent on capturing graphs since the session was built, on this rank."""
        return 0.0

    def private_pool(self) -> PrivatePool | None:
        """The memory of graphs; None: there are none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free every tensor and hook. The process group stays up. May be called twice."""


class Engine(ABC):
    """Builds sessions. Stateless: one instance serves every trial of a process."""

    capability: Capability

    @abstractmethod
    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> EngineSession:
        """Build the model for this rank.

        Raises:
            EngineRefusalError: the engine refuses the combination, with the rule's name.
            FactoryError: a user's factory raises or does not keep the Protocol.
            DataError: the text to train on cannot be read.
        """
