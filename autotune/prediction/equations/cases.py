"""The input of predictions as arrays: one element per configuration; a value common to all is an array of one element.

All fields broadcast against each other, so that a million layouts of one model and a table of a thousand models need the same
call. Sizes are in elements, memory in bytes, rates per second.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.software import Megatron, Software, Transformers
from search_spaces.knob import Value
from search_spaces.knobs.computation import MODULES, modules_in
from search_spaces.models.module_profile import ModuleProfile, Trace

Array = NDArray[np.float64]
"""float64; shape (configurations,) or (1,)."""

Flags = NDArray[np.bool_]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
"""A schedule is encoded as its index here."""
CONTEXT_METHODS = ("ring", "gather", "ulysses")
"""context_parallel_method is encoded as its index here. In a ring (other methods contain one too) keys and values pass from
rank to rank, and no rank keeps more than its own."""
RECOMPUTE = ("none", "selective", "full")
"""activation_checkpointing is encoded as its index here."""


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
    """Matrices of an MLP: 3 if gated, else 2."""
    vocabulary: Array
    positions: Array
    """Rows of a learned position table; 0: rotary."""
    sequence: Array
    """Tokens per sample."""
    window: Array
    """Mean number of keys that attention reads per token if a window hides some: less than the sequence, keys hidden by
    causality excluded. Equals the sequence if no other keys are hidden."""
    tied: Array
    """1 if the output projection is the embedding table."""
    experts: Array
    """Experts per layer; 0: a dense MLP."""
    experts_per_token: Array
    """Experts to which each token is routed."""
    adapter: Array
    """Trained elements of a layer beside frozen parameters, replicated on the tensor-parallel ranks."""
    adapter_divided: Array
    """Such elements that tensor-parallel ranks divide."""
    frozen_bytes: Array
    """Bytes of a frozen parameter; 0: nothing is frozen, every parameter is trained."""
    dropout: Array
    """1 if dropout stores its masks."""
    expert_share: Array = field(default_factory=lambda: scalar(1.0))
    """Layers with experts, as a share of all layers, if there are experts."""
    biased_experts: Array = field(default_factory=lambda: np.zeros(1))
    """1 if experts have biases."""
    dense_ffn: Array = field(default_factory=lambda: np.zeros(1))
    """Width of the MLP of the other layers."""
    shared_ffn: Array = field(default_factory=lambda: np.zeros(1))
    """Width of the MLP that tokens pass through in addition to their experts."""
    query_rank: Array = field(default_factory=lambda: np.zeros(1))
    """Latent attention: width of what queries are projected from; 0: they are projected from the hidden state."""
    key_value_rank: Array = field(default_factory=lambda: np.zeros(1))
    """Width of what keys and values are projected from; 0: attention is not latent."""
    rotated: Array = field(default_factory=lambda: np.zeros(1))
    """Elements of a key that all heads of latent attention share."""
    value: Array = field(default_factory=lambda: np.zeros(1))
    """Width of all values of latent attention."""
    normed_heads: Array = field(default_factory=lambda: np.zeros(1))
    """Width of the queries and keys that are normed, as a mean over the layers."""
    whole_chunks: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the window is that of chunks, whose results are not put together from parts."""
    modules: Array = field(default_factory=lambda: np.zeros(1))
    """Modules for multi-token prediction, on the last stage: each has a mean layer, and the output projection again."""
    copied: Array = field(default_factory=lambda: np.zeros(1))
    """Keys copied for blocks of queries, per token: for a window with global tokens."""
    low_rank: Array = field(default_factory=lambda: scalar(1.0))
    """1 if the trained parameters beside frozen ones are low-rank adapters, which keep inputs of frozen matrices."""
    bottleneck: Array = field(default_factory=lambda: np.zeros(1))
    """Columns of the bottlenecks after attention and MLP."""
    prefix: Array = field(default_factory=lambda: np.zeros(1))
    """Trained keys and values that every token attends to in each layer."""
    prompt: Array = field(default_factory=lambda: np.zeros(1))
    """Virtual tokens that precede those of a sample."""
    document: Array = field(default_factory=lambda: np.zeros(1))
    """Mean number of tokens of its own document that a token of a packed row attends to; 0: rows are not packed."""
    useful: Array = field(default_factory=lambda: scalar(1.0))
    """Document tokens as a share of a row's."""
    rms_norm: Array = field(default_factory=lambda: np.zeros(1))
    """1 if norms are RMSNorms."""
    rotates_whole: Array = field(default_factory=lambda: np.zeros(1))
    """1 if rotary positions apply to whole heads."""
    silu_gated: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the MLP is gated by SiLU."""

    @property
    def inside(self) -> Array:
        """Tokens of a sample that pass through the layers."""
        return self.sequence + self.prompt

    @property
    def routed(self) -> Array:
        """Rows of experts for each token, as a mean over the layers; 1 if no model of the cases has experts."""
        return np.where(self.experts > 0, self.expert_share * self.experts_per_token, 1.0)

    @property
    def mlp_width(self) -> Array:
        """Width of the MLPs that a token passes through in a layer, as a mean over the layers."""
        experts = self.experts_per_token * self.ffn + self.shared_ffn
        mean = self.expert_share * experts + (1 - self.expert_share) * self.dense_ffn
        return np.where(self.experts > 0, mean, self.ffn)

    @property
    def expert_width(self) -> Array:
        """The part of `mlp_width` in routed experts."""
        return np.where(self.experts > 0, self.expert_share * self.experts_per_token * self.ffn, 0.0)

    @property
    def attended(self) -> Array:
        """Number of them that attention reads."""
        whole = np.where(self.window < self.sequence, np.minimum(self.window, self.inside), self.inside)
        return np.where(self.document > 0, self.document, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device and the links."""

    peak: Array
    """Dense FLOP/s at the precision of the computation, times the device's `product_efficiency`."""
    bandwidth: Array
    """Bytes/s of device memory."""
    capacity: Array
    """Bytes of device memory."""
    devices_per_node: Array
    """Devices that share a host: its memory, its link and its network."""
    linked_devices: Array
    """Devices that the fast link joins: a link domain, of one or several nodes."""
    intra: Array
    """Bytes/s that a device sends within its link domain, one direction."""
    inter: Array
    """Bytes/s that a node sends to other nodes, one direction."""
    host_link: Array
    """Bytes/s between a device and host memory, one direction."""
    host_bandwidth: Array
    """Bytes/s of a node's host memory."""
    scatter_volume: Array
    """Volume of a reduce-scatter, as a multiple of the minimum: (n - 1) / n of the message."""
    idle_cost: Array
    """Share of a rank's idle time that is lost; 0: other ranks compute on its core meanwhile."""
    sustained: Array = field(default_factory=lambda: scalar(1.0))
    """Speed of products under a lasting load, as a share of `peak`: below 1 where the power limit lowers the clock."""
    block_products: Array = field(default_factory=lambda: scalar(0.0))
    """1 if the device multiplies blocks of 32 numbers in 8 bits, as Blackwells of data centres do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The configuration."""

    data: Array
    tensor: Array
    pipeline: Array
    context: Array
    expert: Array
    expert_tensor: Array
    """Ranks of a tensor group that divide each expert."""
    shard: Array
    """Ranks that divide the states: data x context, or fewer with hybrid sharding."""
    zero_stage: Array
    micro_batch_size: Array
    accumulation: Array
    sequence_parallel: Array
    virtual_stages: Array
    """Stages per pipeline rank."""
    pipeline_schedule: Array
    activation_checkpointing: Array
    checkpoint_every_k: Array
    offload_optimizer: Array
    """Share of the optimizer state in host memory."""
    offload_parameters: Array
    """1 if the sharded parameters are in host memory."""
    parameter_bytes: Array
    """Bytes of a parameter in forward and backward, and of an activation."""
    reduce_bytes: Array
    """Bytes per reduced gradient element; less than one: signs of momenta, which the update sends."""
    reduce_bucket_size: Array
    prefetch_bucket_size: Array
    param_persistence_threshold: Array
    """Elements below which a parameter stays unsharded at stage 3."""
    max_live_parameters: Array
    overlap_comm: Array
    defer_gradient_reduction: Array
    """1 if stage 2 reduces once per step."""
    reshard_after_forward: Array
    """1 if stage 3 gathers again for backward."""
    loss_chunk_size: Array
    """Tokens whose logits are held at once; 0: all."""
    balanced: Array
    """1 if stages are balanced by FLOPs, output projection included; 0: by number of layers."""
    laid_out: Array = field(default_factory=lambda: np.zeros(1))
    """1 + the row of `Cases.ranks` if the layers of every stage are given explicitly; 0: according to `balanced`."""
    accumulation_bytes: Array = field(default_factory=lambda: scalar(np.inf))
    """Bytes per gradient element in which micro-batches are accumulated; inf: the software's own."""
    master_bytes: Array = field(default_factory=lambda: scalar(4.0))
    """Bytes per element of the master copy."""
    moment_bytes: Array = field(default_factory=lambda: scalar(8.0))
    """Bytes of optimizer state per element of a layer's matrix, without the master copy."""
    other_moment_bytes: Array = field(default_factory=lambda: scalar(8.0))
    """The same per element of the tables."""
    update_bytes: Array = field(default_factory=lambda: scalar(38.0))
    """Bytes that the update moves per parameter."""
    updates_pieces: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the update launches several kernels for each parameter, or one (8-bit AdamW)."""
    orthogonalizes: Array = field(default_factory=lambda: scalar(0.0))
    """1 if every matrix is gathered and orthogonalised (muon)."""
    optimizer_in_files: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the offloaded optimizer state is in files instead of host memory."""
    parameters_in_files: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the offloaded parameters are in files."""
    context_parallel_method: Array = field(default_factory=lambda: np.zeros(1))
    """How context ranks attend to all tokens: index in `CONTEXT_METHODS`."""
    overlap_param_gather: Array = field(default_factory=lambda: np.zeros(1))
    """1 if updated parameters are gathered during the next step's forward."""
    offload_activations: Array = field(default_factory=lambda: np.zeros(1))
    """1 if activations saved for backward are kept in host memory."""
    length: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens per sample at this point of the schedule; 0: whole samples."""
    kept_tokens: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens that all layers but the first and the last process at that point; 0: all."""
    drops: Array = field(default_factory=lambda: np.zeros(1))
    """1 if the schedule applies to the tokens per layer (random-LTD); 0: to the tokens per sample (curriculum)."""
    first_tokens: Array = field(default_factory=lambda: np.zeros(1))
    """Tokens at the start of the schedule."""
    first_weight: Array = field(default_factory=lambda: np.zeros(1))
    """Share of the job's steps that the start represents; 0: no schedule."""
    middle_tokens: Array = field(default_factory=lambda: np.zeros(1))
    middle_weight: Array = field(default_factory=lambda: np.zeros(1))
    """The same for its middle; whole sequences represent the rest."""
    allgather_bucket_size: Array = field(default_factory=lambda: scalar(5e8))
    """Elements per gather of updated parameters."""
    gather_bytes: Array = field(default_factory=lambda: scalar(np.inf))
    """Bytes per parameter gathered at stage 3; inf: as in computation."""
    secondary_shard_size: Array = field(default_factory=lambda: np.zeros(1))
    """Ranks that share a second copy of the parameters at stage 3; 0: no second copy."""
    async_tensor_parallel: Array = field(default_factory=lambda: np.zeros(1))
    """1 if tensor-parallel sums overlap with the products that they belong to."""
    shared_expert_overlap: Array = field(default_factory=lambda: np.zeros(1))
    """1 if shared experts compute while tokens travel to and from the others."""
    fused_kernels: Array = field(default_factory=lambda: np.zeros(1))
    """Provider of fused kernels: index in `search_spaces.kernels.KERNEL_CHOICES`."""
    compiled: Array = field(default_factory=lambda: np.zeros(1))
    recompute_modules: Array = field(default_factory=lambda: np.zeros(1))
    """The sum of 2 to the power of the indices in `MODULES` of the modules that are recomputed."""
    """1 if blocks are compiled, so that operators between products are fused."""
    cuda_graphs: Array = field(default_factory=lambda: np.zeros(1))
    """1 if blocks are replayed as CUDA graphs."""
    busiest_rows: Array = field(default_factory=lambda: scalar(1.0))
    """Rows of experts of a layer's busiest rank, relative to even ones, as a mean over the layers (`expert_loads.busiest`)."""
    busiest_kept: Array = field(default_factory=lambda: scalar(1.0))
    """The same of the rank that has the most in all layers."""
    fp8_recipe: Array = field(default_factory=lambda: np.zeros(1))
    """1 + the index in `FP8_RECIPES` of how our engine scales operands of products in 8 bits; 0: products use the precision."""
    rounding_bytes: Array = field(default_factory=lambda: np.zeros(1))
    """Temporary bytes per number while our engine rounds it to 8 bits for a product; 0: products use the precision itself."""

    @property
    def world(self) -> Array:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def apart(self) -> Flags:
        """Whether experts are divided over other ranks than the rest of the model."""
        apart: Flags = (self.expert > 1) | (self.expert_tensor < self.tensor)
        return apart

    @property
    def alike(self) -> Array:
        """Ranks that hold the same part of the same experts, and divide their states."""
        return np.maximum(self.shard * self.tensor / (self.expert * self.expert_tensor), 1.0)


def gathered_kept(layouts: Layouts, software: Software) -> Flags:
    """Whether sequence parallelism keeps its gathered inputs for backward."""
    without_pipeline = (software.keeps_gathered == 2) & (layouts.pipeline == 1)
    keeps_inputs: Flags = (layouts.sequence_parallel > 0) & ((software.keeps_gathered == 1) | without_pipeline)
    return keeps_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One of several kinds of layers of a model."""

    share: Array
    """Of the layers of the model, or of a rank."""
    experts: float
    """1 if these layers have experts."""
    keys: float | None
    """`Shapes.window` of such a layer; None: the same in all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The contents of one pipeline rank whose layers are given explicitly, in every case."""

    pipeline_rank: Array
    """Position in the pipeline."""
    layers: Array
    selective: Array
    """Those of `layers` with selective recomputation."""
    full: Array
    """Those of `layers` with full recomputation."""
    offloaded: Array
    """Share of the optimizer state in host memory."""
    first: Array
    """1 if it has the input table."""
    last: Array
    """1 if it has the output projection."""
    device: Array
    """Index of its device in `Cases.devices`; 0 if all devices are alike."""
    kinds: tuple[Array, ...] = ()
    """Those of `layers` that are of each of `Cases.kinds`; empty: as in the whole model."""
    alike: Array = field(default_factory=lambda: scalar(1.0))
    """Number of ranks with these contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """Contents of pipeline ranks whose layers are given explicitly."""

    shares: RankShare
    """Arrays of shape (layouts, ranks), zeros beyond a layout's last rank. Of ranks with the same contents, only the first;
    those that can be the fullest or the slowest come before the others."""
    contenders: int
    """Number of columns with ranks that can be the fullest or the slowest."""
    recomputes: Array
    """(layouts): 1 if the layout states what is recomputed; else the configuration does."""
    offloads: Array
    """(layouts): 1 if the layout states what is offloaded; else the configuration does."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DescribedModule:
    """A user's module, of which a profile takes the place of most of `Shapes`. Compared and hashed by identity."""

    profile: ModuleProfile
    precision: str
    """Of the trace in use."""
    copies: bool
    """Whether the communication backend copies messages, as gloo does."""

    @property
    def trace(self) -> Trace:
        """A micro-batch in that precision."""
        return self.profile.traces[self.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """All inputs of a prediction besides the coefficients."""

    shapes: Shapes
    hardware: Hardware
    layouts: Layouts
    software: Software
    megatron: Megatron = field(default_factory=Megatron)
    """What Megatron-LM is told, of cases that it trains."""
    transformers: Transformers = field(default_factory=Transformers)
    """The arguments of Transformers and its libraries, of cases that they train."""
    ranks: RankTable | None = None
    """None: no layers are given explicitly."""
    devices: tuple[Hardware, ...] = ()
    """Devices of pipeline ranks if a cluster's devices differ, arrays of one element each; `hardware` is their minimum."""
    module: DescribedModule | None = None
    """None: the model is a transformer of the given shapes."""
    kinds: tuple[LayerKind, ...] = ()
    """The kinds of layers, if they differ; `shapes` then has means."""

    def __len__(self) -> int:
        parts = [getattr(self, name) for name in ARRAYS]
        return max(len(getattr(part, field.name)) for part in parts for field in dataclasses.fields(part))

    @property
    def described(self) -> DescribedModule:
        """The module, of cases that have one."""
        assert self.module is not None
        return self.module

    def take(self, index: NDArray[Any]) -> "Cases":
        """The cases at an index or a mask; arrays of one element stay unchanged."""
        return dataclasses.replace(self, **{name: _taken(getattr(self, name), index) for name in ARRAYS})


ARRAYS = ("shapes", "hardware", "layouts", "software", "megatron", "transformers")
"""Fields of `Cases` whose own fields are arrays."""
Part = TypeVar("Part", Shapes, Hardware, Layouts, Software, Megatron, Transformers, Cases)


def stacked(parts: Sequence[Part]) -> Part:
    """Concatenate the parts (or cases), in order."""
    first = parts[0]
    if isinstance(first, Cases):
        return Cases(**{name: stacked([getattr(part, name) for part in parts]) for name in ARRAYS})
    names = tuple(field.name for field in dataclasses.fields(first))
    return type(first)(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def scalar(value: float) -> Array:
    """An array of one element."""
    return np.array([value], dtype=np.float64)


def _taken(part: Part, index: NDArray[Any]) -> Part:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return type(part)(**{name: value if len(value) == 1 else value[index] for name, value in values.items()})


def modules_code(text: Value) -> float:
    """The number by which `Layouts` holds a value of `recompute_modules`."""
    return float(sum(2 ** [*MODULES].index(name) for name in modules_in(str(text))))


def recomputes(layouts: Layouts, module: str) -> Array:
    """1 if the results of a module are recomputed."""
    chosen: Array = np.floor(layouts.recompute_modules / 2 ** [*MODULES].index(module)) % 2
    return chosen
