"""Combinations that older torch cannot run, with the first version that is known to work. Does not import torch.

If an engine has a workaround, it uses it, and there is no entry here. pyproject.toml states the oldest supported version.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.refusal import Refusal
from search_spaces.trial_config import TrialConfig

RULE = "torch-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRequirement:
    """A combination of values that needs a newer torch."""

    since: str
    """The first tested version that supports it."""
    what: str
    """The values, as a user sets them."""
    problem: str
    """What happens in older versions, in one clause."""
    remedy: str
    holds: Callable[[TrialConfig, str], bool]
    """Whether a configuration has these values, on a kind of device (cpu or cuda)."""


def _compiles_fp64(config: TrialConfig, device: str) -> bool:
    return config.compile_blocks and config.precision == "fp64" and device == "cpu"


def _parts_backward_of_float8(config: TrialConfig, _: str) -> bool:
    parts = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return parts and config.precision == "fp8"


NEWER: tuple[VersionRequirement, ...] = (
    VersionRequirement(
        since="2.13",
        what="compile_blocks=true, precision=fp64, on CPUs",
        problem="torch.compile treats the sums of fp64 attention as fp32, so that backward fails",
        remedy="set compile_blocks=false or another precision",
        holds=_compiles_fp64,
    ),
    VersionRequirement(
        since="2.13",
        what=f"precision=fp8, pipeline_schedule={', '.join(sorted(ZERO_BUBBLE_SCHEDULES))}",
        problem="schedules that defer weight gradients do not support custom autograd functions",
        remedy="use precision=bf16, or another pipeline_schedule",
        holds=_parts_backward_of_float8,
    ),
)


def version_refusals(torch_version: str, config: TrialConfig, device: str) -> list[Refusal]:
    """The refusals of a configuration with a version of torch (such as 2.11.0+cu130) on a kind of device."""
    found = [item for item in NEWER if release(torch_version) < release(item.since) and item.holds(config, device)]
    return [
        Refusal(RULE, f"{item.what}: {item.problem}; this needs torch {item.since}, here is {torch_version}", item.remedy)
        for item in found
    ]


def release(version: str) -> tuple[int, int]:
    """Major and minor number.

    Raises:
        ValueError: the text does not start with a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version of torch; give one such as 2.13.0")
    return int(match[1]), int(match[2])
