"""Combinations of knobs that several engines refuse, always or on older torch. Imports no torch: the search reads it.

If an engine has a workaround, it uses it, and there is no entry here. pyproject.toml states the oldest supported version.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.capability import Combination
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.refusal import Refusal
from search_spaces.trial_config import TrialConfig


def splits_backward(config: TrialConfig) -> bool:
    """Whether a zero-bubble schedule runs backward in two parts: for inputs, then for weights."""
    return config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES


COMPILE_SELECTIVE = Combination(
    rule="compile-selective",
    reads=("compile_blocks", "activation_checkpointing"),
    problem="selective checkpointing intercepts single operators, and torch.compile does not compile intercepted code",
    remedy="set compile_blocks=false, or activation_checkpointing to none or full",
    holds=lambda config, _: config.compile_blocks and config.activation_checkpointing == "selective",
)
COMPILE_ZERO_BUBBLE = Combination(
    rule="compile-zero-bubble",
    reads=("compile_blocks", "pipeline_parallel_size", "pipeline_schedule"),
    problem="zero-bubble schedules run backward in two parts, and a compiled block has one",
    remedy="set compile_blocks=false, or use another schedule",
    holds=lambda config, _: config.compile_blocks and splits_backward(config),
)


RULE = "torch-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRequirement:
    """A combination of values that needs a newer torch."""

    since: str
    """The first tested version that supports it."""
    settings: str
    """The values, as a user sets them."""
    problem: str
    """What happens in older versions, in one clause."""
    remedy: str
    holds: Callable[[TrialConfig, str], bool]
    """Whether a configuration has these values, on a kind of device (cpu or cuda)."""


NEWER: tuple[VersionRequirement, ...] = (
    VersionRequirement(
        since="2.13",
        settings="compile_blocks=true, precision=fp64, on CPUs",
        problem="torch.compile treats the sums of fp64 attention as fp32, so that backward fails",
        remedy="set compile_blocks=false or another precision",
        holds=lambda config, device: config.compile_blocks and config.precision == "fp64" and device == "cpu",
    ),
    VersionRequirement(
        since="2.13",
        settings=f"precision=fp8, pipeline_schedule={', '.join(sorted(ZERO_BUBBLE_SCHEDULES))}",
        problem="schedules that defer weight gradients do not support custom autograd functions",
        remedy="use precision=bf16, or another pipeline_schedule",
        holds=lambda config, _: config.precision == "fp8" and splits_backward(config),
    ),
)


def version_refusals(torch_version: str, config: TrialConfig, device: str) -> list[Refusal]:
    """The refusals of a configuration with a version of torch (such as 2.11.0+cu130) on a kind of device."""
    unmet = [item for item in NEWER if release(torch_version) < release(item.since) and item.holds(config, device)]
    return [
        Refusal(RULE, f"{item.settings}: {item.problem}; this needs torch {item.since}, here is {torch_version}", item.remedy)
        for item in unmet
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
