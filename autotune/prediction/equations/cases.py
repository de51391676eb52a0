"""What is predicted, as arrays: one element a configuration; what all have in common is an array of one element.

Every field broadcasts against every other, so that a million layouts of one model and a table of a thousand models are the
same call. Sizes are in elements, memory in bytes, rates in a second.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""float64; shape (configurations,) or (1,)."""

Flags = NDArray[np.bool_]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
"""A schedule stands in an array as its place here."""
CONTEXT_METHODS = ("ring", "gather", "ulysses")
"""context_parallel_method stands in an array as its place here; in a ring, which others have, keys and values pass from rank to
rank and none keeps more than its own."""
RECOMPUTE = ("none", "selective", "full")
"""activation_checkpointing stands in an array as its place here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The model."""

    layers: Array
    hidden: Array
    heads: Array
    query: Array
    """Width of all queries: heads x head dimension."""
    key_value: Array
    """Width of all keys (and of all values)."""
    ffn: Array
    matrices: Array
    """Matrices of an MLP: 3 where it is gated, else 2."""
    vocabulary: Array
    positions: Array
    """Rows of a learned position table; 0: rotary."""
    sequence: Array
    """Tokens in a sample."""
    window: Array
    """Keys that attention reads for a token, on the mean of a sequence, where a window hides some: less than the sequence, and
    what causality hides left out. The sequence where nothing else is hidden."""
    tied: Array
    """1 where the output projection is the embedding table."""
    experts: Array
    """Experts a layer; 0: a dense MLP."""
    experts_per_token: Array
    """Rows that go to experts for each token."""
    adapter: Array
    """What is trained in a layer beside frozen parameters and is whole on each tensor-parallel rank."""
    adapter_divided: Array
    """The same that tensor-parallel ranks divide."""
    frozen_bytes: Array
    """Bytes of a frozen parameter; 0: nothing is frozen, every parameter is trained."""
    dropout: Array
    """1 where dropout keeps its masks."""
    copied: Array = field(default_factory=lambda: np.zeros(1))
    """Keys that are copied for blocks of queries, a token: where a window has global tokens."""
    low_rank: Array = field(default_factory=lambda: scalar(1.0))
    """1 where what is trained beside frozen parameters are low-rank adapters, which keep inputs of frozen matrices."""
    bottleneck: Array = field(default_factory=lambda: np.zeros(1))
    """Columns of the bottlenecks behind attention and MLP."""
    prefix: Array = field(default_factory=lambda: np.zeros(1))
    """Trained keys and values that every token looks at in each layer."""
    prompt: Array = field(default_factory=lambda: np.zeros(1))
    """Virtual tokens that stand before those of a sample."""
    document: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens of its own document that attention looks at for a token of a packed row, on the mean; 0: rows are not packed."""
    useful: Array = field(default_factory=lambda: scalar(1.0))
    """Tokens of documents as a share of a row's."""
    rms_norm: Array = field(default_factory=lambda: np.zeros(1))
    """1 where norms are RMSNorms."""
    rotates_whole: Array = field(default_factory=lambda: np.zeros(1))
    """1 where positions rotate whole heads."""
    silu_gated: Array = field(default_factory=lambda: np.zeros(1))
    """1 where the MLP is gated by SiLU."""

    @property
    def inside(self) -> Array:
        """Tokens of a sample that pass the layers."""
        return self.sequence + self.prompt

    @property
    def looked(self) -> Array:
        """Of those, as many as attention looks back at."""
        whole = np.where(self.window < self.sequence, np.minimum(self.window, self.inside), self.inside)
        return np.where(self.document > 0, self.document, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device and the links."""

    peak: Array
    """Dense FLOP/s at the precision that is computed in."""
    bandwidth: Array
    """Bytes/s of device memory."""
    capacity: Array
    """Bytes of device memory."""
    devices_per_node: Array
    intra: Array
    """Bytes/s that a device sends inside its node, one direction."""
    inter: Array
    """Bytes/s that a node sends to others, one direction."""
    host_link: Array
    """Bytes/s between a device and host memory, one direction."""
    host_bandwidth: Array
    """Bytes/s of a node's host memory."""
    scatter_volume: Array
    """What a reduce-scatter moves, as a multiple of the least: (n - 1) / n of the message."""
    idle_cost: Array
    """Share of the time that a rank idles which is lost; 0: other ranks compute on its core meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The configuration."""

    data: Array
    tensor: Array
    pipeline: Array
    context: Array
    expert: Array
    shard: Array
    """Ranks that divide the states: data x context, or fewer with hybrid sharding."""
    zero_stage: Array
    micro_batch: Array
    accumulation: Array
    sequence_parallel: Array
    virtual: Array
    """Stages a pipeline rank."""
    schedule: Array
    recompute: Array
    recompute_every: Array
    offload_optimizer: Array
    """Share of the optimizer state in host memory."""
    offload_parameters: Array
    """1 where the sharded parameters are in host memory."""
    parameter_bytes: Array
    """Bytes of a parameter in forward and backward, and of an activation."""
    reduce_bytes: Array
    """Bytes of a gradient element that is reduced; less than one: signs of momenta, which the update sends."""
    reduce_bucket: Array
    prefetch_bucket: Array
    persistence: Array
    """Elements below which a parameter stays whole at stage 3."""
    max_live: Array
    overlap: Array
    defer: Array
    """1 where stage 2 reduces once a step."""
    reshard: Array
    """1 where stage 3 gathers again for backward."""
    loss_chunk: Array
    """Tokens whose logits are held at once; 0: all."""
    balanced: Array
    """1 where stages are equal in FLOPs, the output projection counted in; 0: equal in layers."""
    laid_out: Array = field(default_factory=lambda: np.zeros(1))
    """1 + the row of `Cases.ranks` where the layers of every stage are written out; 0: as `balanced` says."""
    accumulation_bytes: Array = field(default_factory=lambda: scalar(np.inf))
    """Bytes of a gradient element that several micro-batches are summed in; inf: the software's own."""
    moment_bytes: Array = field(default_factory=lambda: scalar(8.0))
    """Bytes of optimizer state beside the master copy, of an element of a layer's matrix."""
    other_moment_bytes: Array = field(default_factory=lambda: scalar(8.0))
    """The same of an element of the tables."""
    update_bytes: Array = field(default_factory=lambda: scalar(38.0))
    """Bytes that the update moves for a parameter."""
    orthogonalizes: Array = field(default_factory=lambda: scalar(0.0))
    """1 where every matrix is made whole and orthogonal (muon)."""
    optimizer_in_files: Array = field(default_factory=lambda: np.zeros(1))
    """1 where the offloaded optimizer state is in files instead of host memory."""
    parameters_in_files: Array = field(default_factory=lambda: np.zeros(1))
    """1 where the offloaded parameters are."""
    context_method: Array = field(default_factory=lambda: np.zeros(1))
    """How context ranks attend to all tokens: their place in `CONTEXT_METHODS`."""
    late_gather: Array = field(default_factory=lambda: np.zeros(1))
    """1 where updated parameters are gathered beside the next step's forward."""
    offload_activations: Array = field(default_factory=lambda: np.zeros(1))
    """1 where what blocks save for backward waits in host memory."""
    length: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens of a sample at the point of the schedule that is looked at; 0: whole samples."""
    kept: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens that layers but the first and the last see at that point; 0: all."""
    drops: Array = field(default_factory=lambda: np.zeros(1))
    """1 where the schedule is of tokens that layers see (random-LTD); 0: of tokens of samples (curriculum)."""
    first_tokens: Array = field(default_factory=lambda: np.zeros(1))
    """Where the schedule starts."""
    first_weight: Array = field(default_factory=lambda: np.zeros(1))
    """Share of the job's steps that this point stands for; 0: nothing is scheduled."""
    middle_tokens: Array = field(default_factory=lambda: np.zeros(1))
    middle_weight: Array = field(default_factory=lambda: np.zeros(1))
    """The same of its middle; whole sequences stand for the rest."""
    allgather_bucket: Array = field(default_factory=lambda: scalar(5e8))
    """Elements of one gather of updated parameters."""
    gather_bytes: Array = field(default_factory=lambda: scalar(np.inf))
    """Bytes of a parameter that stage 3 gathers; inf: as it is computed with."""
    near: Array = field(default_factory=lambda: np.zeros(1))
    """Ranks that share a second copy of the parameters at stage 3; 0: there is none."""
    async_tensor: Array = field(default_factory=lambda: np.zeros(1))
    """1 where tensor-parallel sums travel beside the products that they belong to."""
    kernels: Array = field(default_factory=lambda: np.zeros(1))
    """Whose fused kernels: their place in `search_spaces.fused_kernels.KERNEL_CHOICES`."""
    graphs: Array = field(default_factory=lambda: np.zeros(1))
    """1 where blocks are replayed as CUDA graphs."""
    rounding_bytes: Array = field(default_factory=lambda: np.zeros(1))
    """Bytes that a number takes while our engine rounds it to 8 bits for a product; 0: products are in the precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How the software that trains keeps memory and computes."""

    gradient_bytes: Array
    """Bytes of a gradient that is held: 2 in the model's type, 4 where micro-batches are summed in fp32."""
    holds_gradients: Array
    """1 where gradients have a place of their own throughout; 0: they come as activations go, but for accumulation."""
    buckets: Array
    """Reduce buckets that are there at once."""
    waits_for_bucket: Array
    """1 where a reduction begins when a bucket of `Layouts.reduce_bucket` is ready, so that the last one is never hidden; 0:
    in pieces of which nothing is known."""
    state_bytes: Array
    """Bytes of optimizer state a parameter: 12 for fp32 master and two moments."""
    kept_logit_bytes: Array
    """Bytes for one logit that outlive a micro-batch, where there are several."""
    fragments: Array
    """What the allocator must have, as a multiple of what is used, before memory runs out."""
    scores: Array
    """Bytes kept for one element of the attention matrix; 0: a kernel that does not keep it."""
    norm_extra: Array
    """Bytes kept for an element beyond the inputs of a norm: what a norm that is not one kernel saves."""
    input_share: Array
    """Bytes kept of what products read, as a share of the type that is computed in."""
    mlp_bytes: Array
    """Bytes kept for an element of the MLP's hidden layer."""
    frozen_outputs: Array
    """1 where what frozen matrices give out is kept, since it is scaled by what is trained."""
    quantised_extra: Array
    """Bytes of a frozen parameter beyond its bits and their scales."""
    gathers_whole: Array
    """1 where frozen parameters are whole on every rank at some time, whatever the stage."""
    unpacks: Array
    """1 where quantised matrices are made whole in the precision, each time that they are multiplied, by operators of torch."""
    logit_bytes: Array
    """Bytes at the peak for one logit."""
    whole_logits: Array
    """1 where tensor parallelism does not divide the logits."""
    keeps_gathered: Array
    """1 where sequence parallelism keeps its gathered inputs for backward, else it gathers them again; 2: without pipelines."""
    scatters: Array
    """1 where tensor-parallel ranks send a part each over a pipeline's boundary and gather it there."""
    tensor_hidden: Array
    """Share of tensor-parallel communication that runs under the products."""
    attention_speed: Array
    """Speed of the attention kernel as a multiple of the standard kernel's."""
    elementwise: Array
    """Traffic of norms, residuals and activations as a multiple of what fused kernels need."""
    first_heavy: Array
    """1 where stages that hold a layer more come first; 0: last."""
    first_rank: Array
    """1 where memory is that of the first pipeline stage; 0: of the fullest."""


def gathered_kept(layouts: Layouts, software: Software) -> Flags:
    """Whether gathered inputs of sequence parallelism are kept for backward."""
    alone = (software.keeps_gathered == 2) & (layouts.pipeline == 1)
    kept: Flags = (layouts.sequence_parallel > 0) & ((software.keeps_gathered == 1) | alone)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """What the ranks of pipelines hold whose layers are written out. Shape (layouts, ranks), zeros beyond a layout's last rank;
    (layouts,) where it says nothing of ranks."""

    layers: Array
    selective: Array
    """Of `layers`, those that are computed again selectively."""
    full: Array
    """The same, in full."""
    offloaded: Array
    """Share of the optimizer state in host memory."""
    first: Array
    """1 for the rank with the input table."""
    last: Array
    """1 for the rank with the output projection."""
    device: Array
    """Place in `Cases.devices` of what the rank runs on; 0 where all devices are alike."""
    recomputes: Array
    """1 where the layout says what is computed again; else the configuration does."""
    offloads: Array
    """1 where the layout says what is offloaded; else the configuration does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """All that a prediction depends on beside the coefficients."""

    shapes: Shapes
    hardware: Hardware
    layouts: Layouts
    software: Software
    ranks: RankTable | None = None
    """None: no layers are written out."""
    devices: tuple[Hardware, ...] = ()
    """What pipeline ranks run on where a cluster's devices differ, of one element each; `hardware` is the least of them."""

    def __len__(self) -> int:
        return max(len(value) for part in self._parts() for value in _arrays(part))

    def take(self, index: NDArray[Any]) -> "Cases":
        """The cases of an index or a mask; arrays of one element stay."""
        return Cases(
            shapes=_taken(self.shapes, index),
            hardware=_taken(self.hardware, index),
            layouts=_taken(self.layouts, index),
            software=_taken(self.software, index),
            ranks=self.ranks,
            devices=self.devices,
        )

    def _parts(self) -> tuple[Any, ...]:
        return (self.shapes, self.hardware, self.layouts, self.software)


Part = TypeVar("Part", Shapes, Hardware, Layouts, Software, Cases)


def stacked(parts: Sequence[Part]) -> Part:
    """One part (or the cases) of all, in their order."""
    first = parts[0]
    if isinstance(first, Cases):
        names = ("shapes", "hardware", "layouts", "software")
        return Cases(**{name: stacked([getattr(part, name) for part in parts]) for name in names})
    names = tuple(field.name for field in dataclasses.fields(first))
    return type(first)(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def scalar(value: float) -> Array:
    """An array of one element."""
    return np.array([value], dtype=np.float64)


def _arrays(part: Any) -> list[Array]:
    return [getattr(part, field.name) for field in dataclasses.fields(part)]


def _taken(part: Part, index: NDArray[Any]) -> Part:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return type(part)(**{name: value if len(value) == 1 else value[index] for name, value in values.items()})
