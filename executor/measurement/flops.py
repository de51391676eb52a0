"""Model FLOPs and how much of the device they use."""

from search_spaces.model import Model
from search_spaces.trial import Workload

CONVENTION = "palm-appendix-b"
"""6 N + 12 L H Q T per token, recomputation and causality not discounted [Chowdhery et al. 2022, PaLM, appendix B]."""


def tflops_per_device(model: Model, workload: Workload, samples_per_second: float, devices: int) -> float:
    """10^12 model FLOPs that each device does a second, by `CONVENTION`."""
    per_sample = model.flops_per_token(workload.sequence_length) * workload.sequence_length
    return per_sample * samples_per_second / devices / 1e12


def model_flops_utilization(tflops: float, peak_flops: float | None) -> float | None:
    """MFU: the share of a device's dense peak FLOP/s at the trial's precision; None where no peak is stated."""
    return tflops * 1e12 / peak_flops if peak_flops else None
