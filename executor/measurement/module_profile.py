"""What a profile tells of each module. Plain data: the command line reads it without torch."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """One figure of an optimizer step, split by when the work was done."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    """Forward once more, inside backward, because activations were not kept."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute


def summed(parts: Iterable[Phases]) -> Phases:
    """The sum, phase by phase."""
    every = list(parts)
    return Phases(
        forward=sum(part.forward for part in every),
        backward=sum(part.backward for part in every),
        recompute=sum(part.recompute for part in every),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """One module in one optimizer step. Every figure is its own: what the modules inside it do is theirs."""

    name: str
    """Dotted path from the model, which is the empty one."""
    kind: str
    """Name of its class."""
    calls: int
    """Times that it was called in forward; 0: it only holds others."""
    parameters: int
    """Elements; one that several modules share counts with the first of them."""
    flops: Phases
    seconds: Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """One optimizer step of a model on one rank, module by module."""

    modules: tuple[ModuleCost, ...]
    """The model first, each module before those inside it."""
    outside_flops: float
    outside_seconds: float
    """What no module does: the update of the parameters, the clipping, reductions that wait for the end of backward."""
    micro_batches: int
    """How often the step calls the model."""
    step_seconds: float
    """Median step without the profiler's hooks."""
    hooked_seconds: float
    """The sum of all seconds above, each of which is a median of its own over the steps with hooks. A stall that meets another
    module in each step is in none of them, so that on a busy machine this is below the median of the whole steps."""
    repeats: int
    """Steps that each median is over."""
    environment: dict[str, str]
    """Versions and hardware as the rank saw them."""

    @property
    def flops(self) -> float:
        """All FLOPs of the step."""
        return summed(module.flops for module in self.modules).total + self.outside_flops
