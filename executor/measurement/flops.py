"""FLOPs of a step, required and executed, the device utilization, and the costs of each module. Plain data, without torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.training.data_schedule import flops_per_sample
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

UNSCHEDULED = TrialConfig()
CONVENTION = "palm-appendix-b"
"""6 N + 12 L H Q T per token, recomputation and causality not discounted [Chowdhery et al. 2022, PaLM, appendix B]."""
COUNTED = "counted"
"""Matrix products, convolutions and attention of one forward and backward, counted on the user's own module."""


def convention_of(model: Model) -> str:
    """Return how the model FLOPs of `tflops_per_device` are counted."""
    return COUNTED if isinstance(model, FactoryModel) else CONVENTION


def tflops_per_device(
    model: Model, workload: Workload, samples_per_second: float, devices: int, config: TrialConfig = UNSCHEDULED
) -> float | None:
    """Return the 10^12 model FLOP/s of each device, by `convention_of(model)`; None: unknown.

    `config`: the configuration whose data schedules are taken into account.
    """
    per_sample = _per_sample(model, workload, config)
    return None if per_sample is None else per_sample * samples_per_second / devices / 1e12


def _per_sample(model: Model, workload: Workload, config: TrialConfig) -> float | None:
    """Return the model FLOPs of a sample. They follow from the parameters only if samples are sequences."""
    if isinstance(model, FactoryModel):
        return model.flops_per_sample
    if isinstance(model, CommandModel):
        has_token_flops = model.parameter_count > 0 and model.has_sequences
        return 6.0 * model.parameter_count * workload.sequence_length if has_token_flops else None
    return flops_per_sample(model, config, workload)


def hardware_tflops_per_device(flops_of_ranks: Sequence[int | None], step_seconds: float) -> float | None:
    """Return the 10^12 FLOP/s that a device executes, as the mean over the ranks; None if a rank's were not counted.

    `flops_of_ranks`: the FLOPs that each rank executed in one step, by `FlopCounter`.
    """
    counted = [flops for flops in flops_of_ranks if flops is not None]
    if not counted or len(counted) < len(flops_of_ranks):
        return None
    return sum(counted) / len(counted) / step_seconds / 1e12


def flops_utilization(tflops: float | None, peak_flops: float | None) -> float | None:
    """Return the share of a device's dense peak FLOP/s at the trial's precision: MFU from model FLOPs, HFU from executed FLOPs.

    None if no peak is given or the FLOPs were not counted.
    """
    return tflops * 1e12 / peak_flops if peak_flops and tflops is not None else None


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
