"""What a step of a user's module does, derived from one micro-batch without computing it, and traits of its loss. Plain data.

The executor records it (`executor.dry.module_profile`); the equations for modules read it (`autotune.prediction.equations`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Affine = tuple[float, float]
"""(constant, per sample of a micro-batch): the value for a micro-batch of b samples is constant + b x per sample."""

OUTER = -1
"""Index that stands for everything outside of the blocks."""


class MomentKind(StrEnum):
    """Points of a micro-batch at which an engine may act."""

    FORWARD = "forward"
    """A block begins its forward; `OUTER`: the module does."""
    LEFT = "left"
    """A block has ended its forward."""
    LOSS = "loss"
    """The loss is computed, and backward begins."""
    BACKWARD = "backward"
    """The gradient of a block's output is about to enter the block."""
    GRADIENT = "gradient"
    """A parameter's gradient is complete."""
    END = "end"
    """Backward has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory of activations at one point of a micro-batch: everything but parameters, buffers and finished gradients."""

    mark: MomentKind
    index: int = OUTER
    """Index of the block, or (`GRADIENT`) of the trained parameter."""
    peak: Affine
    """Most bytes since the previous moment."""
    level: Affine
    """Bytes at this point. A finished gradient counts in `peak`, not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """Matrix products of one shape, convolutions included: 2 x rows x inner x outer FLOPs each."""

    rows: Affine
    inner: Affine
    outer: Affine
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The computation of a part of a micro-batch."""

    products: tuple[MatrixProduct, ...] = ()
    flops: Affine = (0.0, 0.0)
    """FLOPs of products, convolutions and attention."""
    attention_flops: Affine = (0.0, 0.0)
    """The part of `flops` in fused attention kernels."""
    moved_bytes: Affine = (0.0, 0.0)
    """Bytes that the other operators read and write."""
    operators: int = 0
    """Operators that are launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """The computation of one block, or of everything outside of the blocks."""

    forward: Work
    backward: Work
    """Without recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A micro-batch in one precision. Compared and hashed by identity."""

    moments: Mapping[str, tuple[Moment, ...]]
    """Value of `activation_checkpointing`, applied to every block -> the moments of a micro-batch, in order."""
    outer: BlockWork
    blocks: tuple[BlockWork, ...]
    again: Mapping[str, tuple[Affine, ...]] = field(default_factory=dict)
    """Value of `activation_checkpointing` -> FLOPs that each block computes again in backward."""
    batch_bytes: Affine = (0.0, 0.0)
    """Of a micro-batch's inputs."""
    buffer_bytes: int = 0
    """Of the module's buffers."""
    frozen_bytes: int = 0
    """Of the parameters that are not trained."""
    hidden_bytes: Affine = (0.0, 0.0)
    """Of what a block passes to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameter:
    """A trained parameter; tied ones occur once."""

    elements: int
    block: int
    """Index of the first block that holds it; `OUTER`: none does."""
    first: bool = False
    """Whether the first stage of a pipeline holds it without a block of its own; tied tables are at both ends."""
    last: bool = False
    """Whether the last stage does."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleProfile:
    """A user's module: its parameters, and a micro-batch of it. Compared and hashed by identity."""

    trained: tuple[TrainedParameter, ...]
    """In the order of `named_parameters`."""
    frozen: int
    """Elements of parameters that are not trained."""
    block_names: tuple[str, ...]
    """Names of the blocks, in order; the units of checkpointing and of gathering at stage 3."""
    traces: Mapping[str, Trace]
    """Precision -> the trace: `fp32`, `bf16` (as wide as fp16), `fp64`."""
    frozen_parts: tuple[int, ...] = ()
    """Of them, those of each block, then those of the first and of the last pipeline stage outside of the blocks."""
    starts: tuple[int, ...] = ()
    """Blocks before which a pipeline stage may begin, the first one included; empty: the module cannot be cut."""
    sequence_length: int = 0
    """Tokens per sample of the traces if the module's batches follow the workload (`hf:`); 0: they are the factory's own."""
    uncounted: tuple[str, ...] = ()
    """Operators whose FLOPs are unknown; times count the bytes that they move."""
    is_recurrent: bool = False
    """Whether recurrent layers keep a workspace of oneDNN; cuDNN keeps another."""

    @property
    def trained_elements(self) -> int:
        """Elements of all trained parameters."""
        return sum(parameter.elements for parameter in self.trained)

    @property
    def block_elements(self) -> int:
        """Elements of the trained parameters of all blocks."""
        return sum(parameter.elements for parameter in self.trained if parameter.block != OUTER)

    def flops_per_sample(self, samples: int) -> float | None:
        """FLOPs of a sample, forward and backward without recomputation, in micro-batches of so many samples; None: unknown."""
        if self.uncounted:
            return None
        trace = next(iter(self.traces.values()))
        works = [work for part in (trace.outer, *trace.blocks) for work in (part.forward, part.backward)]
        return sum(at(work.flops, samples) for work in works) / samples or None


def at(value: Affine, samples: float) -> float:
    """The value for a micro-batch of so many samples."""
    return value[0] + value[1] * samples


def traced_precision(precision: str) -> str:
    """The precision whose trace serves a configuration: element widths are what matters."""
    return "bf16" if precision == "fp16" else precision


class LossTrait(StrEnum):
    """A property of a loss that decides what can be compared. The values are stored: never rename one."""

    PADDED = "padded"
    """A mean over targets, of which samples have different numbers."""
    SUM = "sum"
    """A sum over samples."""
    TOGETHER = "together"
    """Samples are computed together: in-batch negatives, or statistics of a batch."""
    RANDOM = "random"
    """Random numbers are drawn in forward, in evaluation mode too."""
    UNDIVIDED = "undivided"
    """The first dimension of the batch's entries is not the samples, so nothing is known of its divisions."""
    UNCHECKED = "unchecked"
    """The module does not run on the CPU in a few seconds, so nothing is known."""
    IRREPRODUCIBLE = "irreproducible"
    """The same seeds give different samples or losses."""
    DROPOUT = "dropout"
    """Random numbers are drawn in training mode only."""
    STATE = "state"
    """Parameters or buffers change in forward, in evaluation mode too, such as a teacher that follows the trained part."""
    BUFFERS = "buffers"
    """Buffers change in training mode, such as the statistics of BatchNorm."""
    TRAINS_ONLY = "trains_only"
    """There is no loss, or no gradient of a second micro-batch, in evaluation mode."""

    @property
    def varies_with_size(self) -> bool:
        """Whether the loss of a step depends on its division into micro-batches."""
        return self in (LossTrait.PADDED, LossTrait.SUM, LossTrait.TOGETHER, LossTrait.RANDOM)

    @property
    def depends_on_layout(self) -> bool:
        """Whether losses of layouts that divide the module are not those of the module, though both are right."""
        return self in (LossTrait.RANDOM, LossTrait.TRAINS_ONLY, LossTrait.STATE)

    @property
    def note(self) -> str:
        """What a user should know before the first trial, in one line."""
        if self.varies_with_size:
            within = "configurations are compared within each micro_batch_size"
            return f"loss: depends on micro_batch_size ({_CAUSES[self]}); {within}; if it is meant so, --loss-depends-on-batch"
        return f"loss: {_NOTES[self]}"


_CAUSES = {
    LossTrait.PADDED: "a mean over targets, of which samples have different numbers: divide the sum by a fixed number "
    "of targets, or pin micro_batch_size",
    LossTrait.SUM: "a sum over samples: divide it by their number, or pin micro_batch_size",
    LossTrait.TOGETHER: "samples are computed together, such as in-batch negatives or a mean over a mask: pin "
    "micro_batch_size to the number that you train with",
    LossTrait.RANDOM: "random numbers in forward, which the first steps draw from the number of the micro-batch: draw them in "
    "`batch` from its generator",
}
_NOTES = {
    LossTrait.UNDIVIDED: "whether it depends on micro_batch_size is unknown, as the first dimension of the batch is not the "
    "samples; configurations are compared within each micro_batch_size, and pipelines are not possible",
    LossTrait.UNCHECKED: "whether it depends on micro_batch_size is unknown, as the module does not run on the CPU in a few "
    "seconds; configurations are compared within each micro_batch_size",
    LossTrait.IRREPRODUCIBLE: "the same seeds give different samples or losses, so that losses of configurations are not "
    "compared; use only the generator that `batch` gets, and no generator of your own in forward",
    LossTrait.DROPOUT: "dropout and other randomness of training is off in the first three steps, whose losses are compared",
    LossTrait.STATE: "parameters or buffers change in forward (such as a teacher that follows), on each rank by its own "
    "micro-batches: layouts with another number of data-parallel ranks train differently",
    LossTrait.BUFFERS: "buffers change in training (such as BatchNorm's statistics, which each rank takes of its own "
    "micro-batch): training depends on micro_batch_size, and the compared steps use the first buffers",
    LossTrait.TRAINS_ONLY: "it cannot be trained on in evaluation mode, so the compared steps run in training mode, with "
    "fixed seeds",
}
