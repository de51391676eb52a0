"""FLOPs of a step, those that the model needs and those that the devices execute, and how much of the device they use."""

from collections.abc import Sequence

from search_spaces.command import CommandModel
from search_spaces.data_schedule import flops_per_sample
from search_spaces.model import FactoryModel, Model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

UNSCHEDULED = TrialConfig()
CONVENTION = "palm-appendix-b"
"""6 N + 12 L H Q T per token, recomputation and causality not discounted [Chowdhery et al. 2022, PaLM, appendix B]."""
COUNTED = "counted"
"""Matrix products, convolutions and attention of one forward and backward, counted on the user's own module."""


def convention_of(model: Model) -> str:
    """How the model FLOPs of `tflops_per_device` are counted."""
    return COUNTED if isinstance(model, FactoryModel) else CONVENTION


def tflops_per_device(
    model: Model, workload: Workload, samples_per_second: float, devices: int, config: TrialConfig = UNSCHEDULED
) -> float | None:
    """10^12 model FLOPs that each device does a second, by `convention_of(model)`; None where they are not known.

    `config`: whose schedules of the data count.
    """
    per_sample = _per_sample(model, workload, config)
    return None if per_sample is None else per_sample * samples_per_second / devices / 1e12


def _per_sample(model: Model, workload: Workload, config: TrialConfig) -> float | None:
    """FLOPs that the model needs for a sample. Only where samples are sequences do parameters give them."""
    if isinstance(model, FactoryModel):
        return model.flops_per_sample
    if isinstance(model, CommandModel):
        known = model.parameter_count > 0 and model.has_sequences
        return 6.0 * model.parameter_count * workload.sequence_length if known else None
    return flops_per_sample(model, config, workload)


def hardware_tflops_per_device(flops_of_ranks: Sequence[int | None], step_seconds: float) -> float | None:
    """10^12 FLOPs that each device executes a second, on the mean of the ranks; None where a rank's were not counted.

    `flops_of_ranks`: what each rank executed in one step, by `FlopCounter`.
    """
    counted = [flops for flops in flops_of_ranks if flops is not None]
    if not counted or len(counted) < len(flops_of_ranks):
        return None
    return sum(counted) / len(counted) / step_seconds / 1e12


def flops_utilization(tflops: float | None, peak_flops: float | None) -> float | None:
    """The share of a device's dense peak FLOP/s at the trial's precision: MFU of model FLOPs, HFU of executed ones.

    None where no peak is stated or the FLOPs were not counted.
    """
    return tflops * 1e12 / peak_flops if peak_flops and tflops is not None else None
