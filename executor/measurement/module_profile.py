"""The results of a profile for each module. Plain data: the command line reads it without torch."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """A figure of an optimizer step, split by phase."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    """Forward repeated inside backward, because activations were not kept."""

    @property
    def total(self) -> float:
        """The sum of all phases."""
        return self.forward + self.backward + self.recompute


def summed(parts: Iterable[Phases]) -> Phases:
    """Return the sum, phase by phase."""
    every = list(parts)
    return Phases(
        forward=sum(part.forward for part in every),
        backward=sum(part.backward for part in every),
        recompute=sum(part.recompute for part in every),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """One module in one optimizer step. Figures exclude the modules inside it."""

    name: str
    """Dotted path from the model; the model's own path is empty."""
    kind: str
    """Name of its class."""
    calls: int
    """Number of forward calls; 0: a mere container of other modules."""
    parameters: int
    """Elements. A shared parameter counts for the first module that has it."""
    flops: Phases
    seconds: Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """One optimizer step of a model on one rank, module by module."""

    modules: tuple[ModuleCost, ...]
    """The model first, each module before those inside it."""
    outside_flops: float
    outside_seconds: float
    """Work of no module: the parameter update, gradient clipping, and reductions that wait for the end of backward."""
    micro_batches: int
    """How often the step calls the model."""
    step_seconds: float
    """Median step without the profiler's hooks."""
    hooked_seconds: float
    """The sum of all seconds above, each of which is a separate median over the steps with hooks. A stall that affects a
    different module in each step is in none of them, so on a busy machine this sum is below the median of whole steps."""
    repeats: int
    """Number of steps behind each median."""
    environment: dict[str, str]
    """Versions and hardware as the rank saw them."""

    @property
    def flops(self) -> float:
        """All FLOPs of the step."""
        return summed(module.flops for module in self.modules).total + self.outside_flops
