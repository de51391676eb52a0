"""The contract of an engine, which builds and trains a model inside a rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from search_spaces.capability import Capability
from search_spaces.models.model import Model
from search_spaces.trial import REFERENCE_STEPS, CheckpointTimes, Workload
from search_spaces.trial_config import TrialConfig

TAGS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
"""The categories of device memory. `activations` is everything that an engine does not assign to another tag."""
HOST = "host"
"""Tag of tensors that offloading keeps in host memory. They are counted separately from device memory, even on a CPU device."""


def measured_config(config: TrialConfig) -> TrialConfig:
    """Return the configuration to build for a measurement: the optimizer's own warm-up ends within the untimed steps.

    For onebit_adam the steps after its warm-up are measured, because almost all steps of a training are such steps.
    """
    if config.optimizer != "onebit_adam":
        return config
    return config.replace({"onebit_warmup_steps": min(config.onebit_warmup_steps, REFERENCE_STEPS)})


GroupKey = tuple[str, tuple[tuple[int, ...], ...], int]
"""(mesh dimension, ranks of all groups along it, index among the groups for which both are equal)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The identity and the environment of a rank. The default process group is initialized for all ranks of a gang."""

    rank: int
    world_size: int
    device: torch.device
    control_group: dist.ProcessGroup | None = None
    """A gloo group for the measurement's own exchanges, separate from the engine's groups; None: one rank."""
    reusable_groups: MutableMapping[GroupKey, dist.ProcessGroup | None] | None = field(default=None, compare=False)
    """Process groups that a trial leaves to the next trial on the same ranks, which reuses those that it needs. A gang joins
    anew after a failure and starts with none. None: each trial destroys its own groups."""
    ranks_on_host: int = 1
    """Ranks of the gang on this host, including this one."""
    shares_device: bool = False
    """Whether another rank uses the same device. Its memory there cannot be separated from what the driver holds."""
    after_failure: ExitStack = field(default_factory=ExitStack, compare=False)
    """Clean-up of a failed trial, run after the failure has been reported because it may wait for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of an optimizer step."""

    loss: float | None
    """Mean loss over this rank's micro-batches, before the update; None if the rank does not hold the last pipeline stage."""
    gradient_norm: float | None
    """Global L2 norm of the mean gradient before clipping, the same on every rank; None without clipping."""
    skipped: bool = False
    """Whether gradients overflowed, so that nothing was updated; the same on every rank. A repetition on the same data uses a
    smaller loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePool:
    """Device memory reserved for replayed CUDA graphs, which keep it from step to step. Bytes."""

    by_tag: Mapping[str, int]
    """The whole pool, by tag of `TAGS`. `EngineSession.tagged_storages` does not include it."""
    allocated: int
    """The part that the device's allocator counts as allocated. The rest is in use only while graphs are replayed; it counts
    as free although no other tensor can use it."""


class EngineSession(ABC):
    """A model that is built on this rank and can be trained. Used from one thread. All ranks call the same methods in order.

    Between steps nothing is in flight: every collective that a step starts has finished when the step returns.
    """

    @abstractmethod
    def prepare(self, step: int, micro_batches: int | None = None) -> None:
        """Load the data of step `step` onto the device, so that a timed step does not wait for data.

        `micro_batches`: the next step uses only this many of its first micro-batches, as a step of that smaller batch would;
        None: all.
        """

    @abstractmethod
    def train_step(self) -> StepReport:
        """One optimizer step over the prepared data: every micro-batch, the reduction, clipping and the update."""

    def launches_steps(self) -> bool:
        """Whether `launch_step` can be called: no part of a step makes the host wait for a result of the device."""
        return False

    def launch_step(self) -> Callable[[], StepReport]:
        """Like `train_step` without waiting for the device. The returned function waits and reads the step's loss and norm."""
        raise NotImplementedError

    @abstractmethod
    def settled(self) -> bool:
        """Whether lazily created state (optimizer state, gather trace, buffers) exists, so that all further steps are alike."""

    @abstractmethod
    def tagged_storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor that is live between steps, with its tag of `TAGS` or `HOST`. A storage may occur more than once.

        A step releases none of these storages; it only releases what it has allocated itself.
        """

    @abstractmethod
    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """(operation, mesh dimension) -> (count, bytes of the full messages), over all steps since the session was built."""

    def waited_seconds(self) -> float | None:
        """Seconds that steps waited for other ranks since the session was built; None: this engine does not measure it."""
        return None

    def compile_seconds(self) -> float:
        """Seconds spent in torch.compile since the session was built, on this rank."""
        return 0.0

    def capture_seconds(self) -> float:
        """Seconds that `prepare` spent capturing graphs since the session was built, on this rank."""
        return 0.0

    def private_pool(self) -> PrivatePool | None:
        """The memory reserved for graphs; None: no graphs."""
        return None

    def time_checkpoint(self, folder: Path) -> CheckpointTimes | None:
        """Save all trained states in a new folder below `folder`, load them again and remove it; None: this engine, or this
        configuration, has no checkpoints.

        Raises:
            CheckpointError: the folder cannot be written or read.
        """
        del folder
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
            FactoryError: a user's factory raises or violates the Protocol.
            DataError: the training text cannot be read.
        """
