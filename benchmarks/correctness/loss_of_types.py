"""Narrow types and other optimizer states on the example text: their final loss against float32's, seed by seed.

They compute different numbers, so that no two curves can be equal. The mean loss of the last steps is compared; a type that
loses gradients, or a step that is skipped for good, shows there.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common.gang import Gang
from benchmarks.correctness import loss_curves
from benchmarks.correctness.loss_curves import SPEC, Curve
from executor.parallel import quantised
from search_spaces.knob import Value
from search_spaces.knobs.computation import FP8_RECIPES
from search_spaces.models.model import ModelSpec

SEEDS = 5
LAST = 10
"""Steps at the end whose mean is compared."""
LEARNING_RATE = 1e-3
"""At 3e-3 training amplifies any rounding: float32 itself with gradients rounded to 11 bits ends up to 1.5% off, by chance,
which hides the loss of a type. At this rate it ends 0.1% off. Steps are also smaller, so that rounding swallows a larger part
of them."""
BOUND, MEAN_BOUND = 5e-3, 2.5e-3
"""Relative bounds of that mean: for every seed, and for the mean over the seeds, which varies less."""
MODEL = dataclasses.replace(SPEC, name="narrow-types", hidden_size=64, head_dim=16)
"""Its widths are multiples of the 32 numbers that share a scale in mxfp8."""
LAYOUT: Mapping[str, Value] = {"micro_batch_size": 2, "zero_stage": 2}
TYPES: Mapping[str, Mapping[str, Value]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16, sums in bf16": {"precision": "bf16", "accumulation_dtype": "bf16"},
    "bf16, reduced in bf16": {"precision": "bf16", "reduce_dtype": "bf16"},
    "fp32, reduced in fp16": {"reduce_dtype": "fp16"},
    "fp16, scaled losses": {"precision": "fp16"},
    "fp16, sums and reductions in fp16": {"precision": "fp16", "accumulation_dtype": "fp16", "reduce_dtype": "fp16"},
    "fp32, AdamW with 8-bit moments": {"optimizer": "adamw8bit"},
    **{f"fp8, {recipe}": {"precision": "fp8", "fp8_recipe": recipe} for recipe in FP8_RECIPES},
}
"""The first is the reference for the others."""
SLICED: Mapping[str, Mapping[str, Value]] = {
    f"fp8, {recipe}, 2 tensor ranks": {
        "precision": "fp8", "fp8_recipe": recipe, "tensor_parallel_size": 2, "sequence_parallel": True,
    }
    for recipe in FP8_RECIPES
}  # fmt: skip
"""Types whose scales cover slices of the matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The mean losses of the last steps of one type, by seed."""

    name: str
    losses: tuple[float, ...]

    def off(self, exact: "Ends") -> list[float]:
        """Relative differences from the exact run, by seed."""
        return [own / other - 1 for own, other in zip(self.losses, exact.losses, strict=True)]


@contextlib.contextmanager
def products_of_blocks() -> Iterator[None]:
    """Products of mxfp8 on CPUs, whose kernels lack them: of the numbers that the rounded operands represent, in fp32."""
    multiply = quantised._multiply

    def represented(operand: quantised.Scaled) -> Tensor:
        return operand.values.float() * operand.unit.float().repeat_interleave(quantised.MX_BLOCK, dim=1)

    def multiplied(left: quantised.Scaled, right: quantised.Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
        if left.unit.dtype != torch.float8_e8m0fnu:
            return multiply(left, right, dtype, fast)
        return (represented(left) @ represented(right).T).to(dtype)

    with mock.patch.object(quantised, "_multiply", multiplied):
        yield


def train(rank: int, curve: Curve) -> list[float]:
    """`loss_curves.train` of every type."""
    with products_of_blocks():
        return loss_curves.train(rank, curve)


def ends(
    gang: Gang, steps: int, types: Mapping[str, Mapping[str, Value]], learning_rate: float = LEARNING_RATE,
    model: ModelSpec = SPEC,
) -> list[Ends]:  # fmt: skip
    """Train every type with every seed.

    `gang` runs `train`, or that of `loss_curves`.
    """
    curves = {name: Curve(knobs=knobs, steps=steps, learning_rate=learning_rate, model=model) for name, knobs in types.items()}
    return [
        Ends(name=name, losses=tuple(_end(gang, dataclasses.replace(curve, seed=seed)) for seed in range(SEEDS)))
        for name, curve in curves.items()
    ]


def _end(gang: Gang, curve: Curve) -> float:
    losses: list[float] = gang.run(curve)[0]
    return statistics.fmean(losses[-LAST:])


def problems(found: Sequence[Ends], bound: float = BOUND, mean_bound: float = MEAN_BOUND) -> Iterator[str]:
    """Losses beyond the bounds."""
    exact, *others = found
    for other in others:
        off = other.off(exact)
        worst, mean = max(map(abs, off)), abs(statistics.fmean(off))
        if not (worst <= bound and mean <= mean_bound):
            yield f"{other.name} ends {worst:.1e} off {exact.name}, {mean:.1e} on the mean of its seeds"


def section(
    found: Sequence[Ends], title: str = "Loss", kind: str = "type", bound: float = BOUND, mean_bound: float = MEAN_BOUND
) -> str:
    """Markdown; `kind`: heading of the first column."""
    exact = found[0]
    spread = statistics.stdev(exact.losses) / statistics.fmean(exact.losses)
    about = (
        f"Mean loss of the last {LAST} steps for {SEEDS} seeds (weights and samples), and the relative difference from "
        f"{exact.name} of the same seed: bounds {bound:g} for each, {mean_bound:g} for their mean. Seeds of {exact.name} have "
        f"a standard deviation of {spread:.1%}."
    )
    lines = [
        "",
        f"## {title}",
        "",
        about,
        "",
        f"| {kind} | " + " | ".join(f"seed {seed}" for seed in range(SEEDS)) + f" | from {exact.name}, mean | worst |",
        "|---" * (SEEDS + 3) + "|",
    ]
    for one in found:
        off = one.off(exact)
        values = " | ".join(f"{loss:.4f}" for loss in one.losses)
        lines.append(f"| {one.name} | {values} | {statistics.fmean(off):+.1e} | {max(map(abs, off)):.1e} |")
    return "\n".join(lines) + "\n"
