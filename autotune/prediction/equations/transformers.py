"""Bytes that torch's allocator hands out while Transformers, PEFT, TRL and Accelerate train a model, term by term from their
source and from that of bitsandbytes, GPTQ kernels and torch's FSDP.

transformers 4.45 to 4.57, peft 0.13, trl 0.13, accelerate 1.0, bitsandbytes 0.43, fms-acceleration 876e2ed, torch 2.4. No
number was fitted to a measurement, but what the allocator keeps if lengths vary. And bytes that operators between products
move: per token, what each operator that the source runs one by one reads and writes.
"""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.kernels import gates_fused, loss_fused, norms_fused, pieces
from autotune.prediction.equations.parameters import stage_parameters
from autotune.prediction.equations.software import (
    ADAPTED,
    AO4,
    AO8,
    BNB8,
    BNB32,
    CHUNKED_LOSS,
    COMPILED_LOSS,
    COPY,
    CUT_LOSS,
    EAGER,
    EAGER_ATTENTION,
    FSDP1,
    FSDP2,
    GPTQ,
    HALF_LOSS,
    INT8,
    KERNEL_LOSS,
    NF4,
    NO_BITS,
    PROJECTION_LOSS,
    SPLIT_LOSS,
    TORCH_MOMENTS,
    WHOLE_LOSS,
    ZERO,
)

CONTEXT_BYTES, LINKED_CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.5e9, 1.2e9, 0.45e9
"""Of a process outside of torch's allocator: on cards without a fast link, on those that have it, and what communicators add
there. From messages of torch ("this process has" less what is allocated and reserved), in GB: T4 0.2 to 0.7, 2080 Ti 0.2, A10G
0.3, 3090 0.3 to 0.6 (of two to eight no more), 4090 0.5, A6000, L40 and RTX 6000 Ada 0.4 to 0.5, 5090 0.6; A100 0.9, one of
eight H100 1.3, of four A100 1.6, of several H100 2.1 [issues of LLaMA-Factory, Axolotl, TRL, torchtune, llama-cookbook, PEFT,
flux-webui, MTVCrafter, Qwen3-VL and FramePack; a log of Axolotl's notebook]. One A100: nvidia-smi beside the predicted bytes of
runs of 2023."""
FAST_LINK = 1e11
"""Bytes/s of NVLink, of which no PCIe link has as many."""
FRAGMENTED = 1.07
"""What runs need to fit, relative to their bytes as activations exist: between the largest published runs of one device that
fit and the smallest that do not."""
VARYING = 2.0
"""Bytes that the allocator keeps beyond those of a step, relative to these, if lengths vary from step to step: blocks of one
length do not serve the next. A simulation of it gives 1 to 4.5, published runs 1 to 4."""


def context_bytes(cases: Cases) -> Array:
    """Bytes of a rank outside of torch's allocator."""
    linked = np.where(cases.layouts.world > 1, COMMUNICATOR_BYTES, 0.0) + LINKED_CONTEXT_BYTES
    return np.where(cases.hardware.intra >= FAST_LINK, linked, CONTEXT_BYTES)


def covers(cases: Cases) -> Flags:
    """Whether the cases are of Transformers and of a kind that the equations know."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(cases.transformers.states):
        return np.zeros(1, dtype=np.bool_)
    others = shapes.bottleneck + shapes.prefix + shapes.prompt + shapes.key_value_rank + shapes.modules
    covered: Flags = (cases.transformers.states > 0) & (others == 0) & (layouts.pipeline == 1) & (layouts.tensor == 1)
    return covered


def allocated_bytes(cases: Cases) -> dict[str, Array]:
    """Bytes by tag at the fullest moment of a step.

    1. As the loss is computed: what all layers keep, and the logits.
    2. As the last layer runs backward: the same without logits, with a layer recomputed and its gradients.
    3. As the first layer does: with the gradients of all others, and without their activations, but FSDP's hooks on inputs of
       frozen units keep the inputs of reentrant checkpoints and their gradients until the end.
       Where FSDP1's units mix frozen and trained parameters, as the second does: the first is gathered then.
    4. As the optimizer runs: with a copy of a moment of all parameters.
    5. Before all steps, if the whole model is loaded: that beside a rank's share of it.
    """
    rank = Replica(cases)
    kept, layers = rank.kept(), cases.shapes.layers
    keeps_inputs = (cases.transformers.sharding == FSDP1) & (cases.layouts.world > 1) & rank.frozen & (rank.recomputed > 0)
    keeps_inputs &= cases.transformers.reentrant > 0
    offloads = cases.layouts.offload_activations > 0
    on_host, kept = np.where(offloads, kept, 0.0), np.where(offloads, 0.0, kept)
    last = kept + rank.working() + rank.residual
    first = np.where(keeps_inputs, kept + layers * rank.residual, kept / layers + rank.residual) + rank.working()
    early, late, states = rank.waiting_gradients(), rank.gradients(), rank.states()
    # Of micro-batches before; DeepSpeed's partition of them is permanent at stage 3.
    permanent = rank.by_zero & (cases.layouts.zero_stage >= 3)
    summed = np.where((cases.layouts.accumulation > 1) | permanent, late, 0.0)
    # FSDP sums micro-batches before it reduces, if nobody asks it to reduce each (Accelerate, Fabric).
    unreduced = np.where(cases.layouts.accumulation > 1, rank.unreduced_gradients(), 0.0)
    summed = np.maximum(summed, unreduced)
    # Nothing is gathered ahead of the first layer.
    root, unit, ahead = rank.gathered_root(), *rank.gathered_units()
    cast, cast_layers = rank.cast_copies()
    # Those of recomputed layers are made again.
    cast_last = np.where(rank.recomputed > 0, cast_layers / layers, cast_layers)
    second = rank.tokens * (kept / layers + rank.residual + rank.working()) + root + unit + ahead
    moments = {
        # FSDP1 gathers the last layer as backward of the root begins.
        "loss": rank.tokens * (kept + rank.loss())
        + root
        + summed
        + cast
        + np.where(cases.transformers.sharding == FSDP1, unit, 0.0),
        "last": rank.tokens * last + root + unit + ahead + early + summed + cast_last,
        "first": rank.tokens * first
        + root
        + unit
        + np.maximum(late, unreduced)
        + np.where(rank.shard > 1, early, 0.0)
        + cast_layers / layers,
        # A mixed unit's gradients, zeros for what is frozen, are put together as its layer has run.
        "joined": rank.tokens * (kept * (1 - 1 / layers) + rank.residual)
        + root
        + unit
        + ahead
        + 2 * rank.mixed_gradients() / layers
        + summed,
        # As the second layer runs backward, the first is gathered, and the frozen matrices behind have reduced gradients.
        "second": np.where(rank.mixed_gradients() > 0, second + np.maximum(late * (1 - 2 / layers), summed), 0.0),
        "update": late + rank.update() - rank.released(),
    }
    loading = rank.loading() - states["optimizer_state"] - rank.buffers()
    highest = np.maximum.reduce(np.broadcast_arrays(*moments.values(), loading))
    always = sum((states[tag] for tag in ("parameters", "optimizer_state")), rank.buffers())
    # The update's many small tensors find room between those of the same sizes; large ones of activations do not.
    running = np.maximum.reduce(np.broadcast_arrays(*(moments[name] for name in ("loss", "last", "first", "joined", "second"))))
    needed = np.maximum(always + np.maximum(moments["update"], loading), FRAGMENTED * (always + running))
    # Blocks are given back where the device has no room.
    free = cases.hardware.capacity - context_bytes(cases) - always - highest
    blocks = summed + (1 + VARYING) * rank.tokens * (kept + np.maximum(rank.loss(), rank.working()))
    return {
        **states,
        "host": states["host"] + rank.tokens * on_host,
        "gradients": np.minimum(late, highest) + 0 * highest,
        "activations": highest - np.minimum(late, highest),
        "buffers": rank.buffers(),
        "fragments": needed - (always + highest),
        "reserved": np.where(cases.transformers.varying_lengths > 0, np.minimum(blocks - highest, free), 0.0),
    }


class Replica:
    """A data-parallel rank; bytes of activations are per token of a micro-batch."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.words, self.shapes, self.layouts = cases, cases.transformers, cases.shapes, cases.layouts
        self.frozen = self.shapes.frozen_bytes > 0
        # Of mixed units, gradients of all matrices are computed.
        self.saves_few = self.frozen & (self.words.mixed_units == 0)
        self.width = self.layouts.parameter_bytes
        samples = self.layouts.micro_batch_size * self.words.sequences
        self.tokens: Array = samples * self.shapes.sequence / self.layouts.context
        self.shard = np.where(self.layouts.zero_stage >= 3, self.layouts.shard, 1.0)
        # Stages of which nothing else is known are DeepSpeed's.
        self.by_zero = (self.words.sharding == ZERO) | ((self.words.sharding == 0) & (self.layouts.zero_stage > 0))
        # DeepSpeed turns all into 16 bits.
        self.adapter_width = np.where(self.by_zero, self.width, self.words.adapter_width)
        self.state_shard = np.where(self.layouts.zero_stage >= 1, self.layouts.shard, 1.0)
        # Models without gated MLPs have torch's LayerNorm, which is one kernel.
        one_kernel = (self.words.norms > 0) | (self.shapes.matrices < 3)
        self.fused_norms = one_kernel | norms_fused(cases) | (self.layouts.compiled > 0)
        self.gates = np.where((self.words.gates > 0) | gates_fused(cases) | (self.layouts.compiled > 0), 1.0, 0.0)
        self.loss_kind = np.where(loss_fused(cases), PROJECTION_LOSS, self.words.loss)
        # What passes between layers: fp32 if the norms are, since their weight multiplies it and bitsandbytes returns the type
        # that it is given. FSDP and DeepSpeed cast parameters.
        self.sharded = self.by_zero | ((self.words.sharding > 0) & (self.shard > 1))
        whole_norms = np.where(self.frozen, self.words.whole_norms > 0, (self.words.parameter_width >= 4) & ~self.sharded)
        self.wide = whole_norms | (self.width >= 4)
        self.state = np.where(self.wide, 4.0, self.width)
        self.residual: Array = self.state * self.shapes.hidden
        # Of what products return: 16 bits under autocast, else what they get, as bitsandbytes' of 4 bits always do.
        self.converts = self.wide & ((self.words.bits == NF4) | ((self.words.bits == INT8) & (self.words.autocast == 0)))
        self.inner = np.where((self.words.autocast > 0) & ~self.converts, self.width, self.state)
        self.casts_inputs = (self.words.autocast > 0) & (self.inner < self.state)
        # Adapters multiply what they get, without a copy in another type and without dropout.
        casts_adapted = (self.words.autocast > 0) & (self.width < self.state)
        self.takes_inputs = (self.adapter_width <= self.state) & ~casts_adapted & (self.words.adapter_dropout == 0)
        self.recomputed = np.where(self.layouts.activation_checkpointing > 0, 1.0, 0.0)
        self.counts = stage_parameters(cases, self.shapes.layers, np.ones(1), np.ones(1))
        self.table = self.shapes.vocabulary * self.shapes.hidden
        self.experts = np.where(self.shapes.experts > 0, self.shapes.experts_per_token, 1.0)

    def adapts(self, *names: str) -> Array:
        """How many of these matrices have adapters."""
        has = [np.floor(self.words.adapted / 2 ** ADAPTED.index(name)) % 2 for name in names]
        return np.where(self.frozen, np.sum(has, axis=0), 0.0)

    def states(self) -> dict[str, Array]:
        """Parameters and moments. Quantisation's constants are no parameters, which FSDP would divide."""
        words, layouts, counts = self.words, self.layouts, self.counts
        matrices = counts.frozen - counts.frozen_tables
        double = np.where(words.double_quantised > 0, 1 / 64 + 4 / (64 * 256), 4 / 64)
        kinds = [words.bits == kind for kind in (NO_BITS, NF4, GPTQ)]
        packed = np.select(kinds, [self.width, 0.5, 0.5 + 0.5 / words.group_size], default=1.0)
        constants = np.select(kinds, [0.0, double, 2 / words.group_size], default=0.0)
        trained, width = counts.trained - self.trained()[0], words.parameter_width
        table_width = np.where(words.whole_tables > 0, 4.0, self.width)
        head = np.where(self.frozen & (words.packed_head > 0), self.table, 0.0)
        tables = (counts.frozen_tables - head) * table_width + head * packed
        frozen = (matrices * packed + tables) / self.shard + (matrices + head) * constants
        # Tables trained beside frozen ones are copies of those, in their type.
        adapters, tables = self.trained()
        parameters = trained * width + adapters * words.adapter_width + tables * self.width
        # DeepSpeed trains 16 bits, beside fp32.
        count = trained + adapters + tables
        parameters = np.where(self.by_zero, count * self.width, parameters) / self.shard
        states = np.where(self.by_zero, count * (4 + layouts.moment_bytes) / self.state_shard, self.moments(parameters))
        on_host = np.where(words.paged > 0, 1.0, layouts.offload_optimizer)
        # DeepSpeed has gradients in fp32 there too, and a buffer in 16 bits.
        beside_states = np.where(self.by_zero, 6 * count / self.state_shard * layouts.offload_optimizer, 0.0)
        beside = self.width * (words.tower + np.where(words.reference == COPY, count + counts.frozen, 0.0)) / self.shard
        return {
            "parameters": (frozen + parameters) * (1 - layouts.offload_parameters) + beside,
            "optimizer_state": states * (1 - on_host),
            "host": states * on_host + beside_states + (frozen + parameters) * layouts.offload_parameters,
        }

    def moments(self, parameters: Array) -> Array:
        """Bytes of both moments of a rank's trained parameters, which have so many bytes.

        Torch's have the type of their parameter. bitsandbytes has 32 bits, or 8 and a scale in fp32 for 256 elements; the
        Trainer leaves embeddings, but not the output projection, in 32. torchao has 8 or 4 bits and the same scales.
        """
        _, tables = self.trained()
        count = (self.counts.trained + tables) / self.shard
        embeddings = np.where(self.frozen & (self.words.trained_tables == 0), 0.0, self.table) / self.shard
        blocks = 2 * (1 + 4 / 256)
        by_blocks = blocks * (count - embeddings) + 8 * embeddings
        by_knob = (self.words.moments == TORCH_MOMENTS) & (self.layouts.updates_pieces > 0)
        kinds = [self.words.moments == BNB32, (self.words.moments == BNB8) | by_knob]
        kinds += [self.words.moments == kind for kind in (AO8, AO4)]
        by_torch = parameters * self.layouts.moment_bytes / 8 * 2
        states: Array = np.select(kinds, [8 * count, by_blocks, blocks * count, (blocks - 1) * count], default=by_torch)
        return states

    def trained(self) -> tuple[Array, Array]:
        """Elements of adapters, and of tables trained beside them."""
        adapters = np.where(self.frozen, self.counts.trained, 0.0)
        return adapters, np.where(self.frozen & (self.words.trained_tables > 0), self.counts.frozen_tables, 0.0)

    def cast_copies(self) -> tuple[Array, Array]:
        """Bytes of the copies in 16 bits that autocast makes of parameters in fp32: all as forward ends, when its cache has
        them, and those of the layers, which backward still has or makes again. Embeddings are not cast; the copy of a frozen
        output projection is kept for backward."""
        words = self.words
        adapters, _ = self.trained()
        matrices = self.counts.trained - adapters - self.counts.trained_tables
        whole = np.where(~self.sharded & (words.parameter_width > self.width), 1.0, 0.0)
        cast = np.where((words.fused_adapters == 0) & (self.adapter_width > self.width), adapters, 0.0) / self.shard
        head = np.where(self.frozen, words.whole_tables, whole) * self.table
        casts = np.where(words.autocast > 0, self.width, 0.0)
        return casts * (whole * matrices + head + cast), casts * (whole * matrices + cast)

    def gradients(self) -> Array:
        """Bytes of all gradients. Where the host has the optimizer, DeepSpeed sends them there bucket by bucket; where it has
        the parameters, FSDP layer by layer."""
        adapters, tables = self.trained()
        others = self.counts.trained - adapters
        gradients = others * self.words.parameter_width + adapters * self.words.adapter_width + tables * self.width
        gradients = np.where(self.words.updates_in_backward > 0, self.width * self.table, gradients)
        in_half = self.width * (others + adapters + tables) / np.where(self.layouts.zero_stage >= 2, self.layouts.shard, 1.0)
        gradients = gradients + self.mixed_gradients()
        sharded = gradients / self.shard * np.where(self.shard > 1, 1 - self.layouts.offload_parameters, 1.0)
        return np.where(self.by_zero, in_half * (1 - self.layouts.offload_optimizer), sharded)

    def unreduced_gradients(self) -> Array:
        """Bytes of whole gradients of all that FSDP divides."""
        _, tables = self.trained()
        whole = self.width * (self.counts.trained + tables) + self.mixed_gradients()
        return np.where((self.shard > 1) & ~self.by_zero, whole, 0.0)

    def mixed_gradients(self) -> Array:
        """Bytes of the gradients that frozen matrices have in flat parameters with adapters [torch, FullyShardedDataParallel:
        "higher than expected gradient memory usage"]."""
        mixed = (self.words.mixed_units > 0) & self.frozen & (self.shard > 1) & ~self.by_zero
        return np.where(mixed, self.width * (self.counts.frozen - self.counts.frozen_tables), 0.0)

    def loading(self) -> Array:
        """Bytes of the whole model, which is loaded and then divided."""
        return np.where((self.words.loading > 0) & (self.shard > 1), self.shard * self.states()["parameters"], 0.0)

    def update(self) -> Array:
        """Bytes of the temporary copies of the update: of a moment; DeepSpeed's of gradients, put together and then in fp32, at
        stage 3 in groups of 1e9."""
        _, tables = self.trained()
        local = (self.counts.trained + tables) / self.state_shard
        at_once = np.where(self.layouts.zero_stage >= 3, np.minimum(local, 1e9), local)
        by_zero = (4 + self.width) * at_once * (1 - self.layouts.offload_optimizer)
        by_torch = np.where(self.words.update == EAGER, self.gradients() - self.mixed_gradients() / self.shard, 0.0)
        return np.where(self.by_zero, by_zero, by_torch)

    def waiting_gradients(self) -> Array:
        """Bytes of gradients that wait: that of the output projection for the embedding's, and that of the MLP's last matrix
        for those of its layer."""
        matrix = self.shapes.hidden * np.where(self.shapes.experts > 0, 0.0, self.shapes.ffn)
        return np.where(self.frozen, 0.0, self.width * (self.table + matrix))

    def buffers(self) -> Array:
        """Workspaces of cuBLAS for the threads of forward and backward; DeepSpeed's buckets, which exist before backward
        begins, and what it keeps gathered because it is used again soon."""
        buckets, live = self.zero_buffers()
        return 2 * self.words.stream_workspace + buckets + live

    def zero_buffers(self) -> tuple[Array, Array]:
        """Bytes of DeepSpeed's buckets and of the parameters that it keeps gathered."""
        layouts = self.layouts
        third = layouts.zero_stage >= 3
        everything = self.counts.trained + self.counts.frozen
        buckets = np.where(third, 1.0, 1 + layouts.overlap_comm) * layouts.reduce_bucket_size
        live = np.where(third, np.minimum(everything, np.maximum(layouts.max_live_parameters, self.table)), 0.0)
        return np.where(self.by_zero, self.width * buckets, 0.0), np.where(self.by_zero, self.width * live, 0.0)

    def released(self) -> Array:
        """Those of these bytes that DeepSpeed releases before the update: parameters, and buckets but at stage 3."""
        buckets, live = self.zero_buffers()
        return live + np.where(self.layouts.zero_stage >= 3, 0.0, buckets)

    def gathered_root(self) -> Array:
        """Bytes that FSDP gathers from forward to the end of backward: the tables."""
        tables = (2 - self.shapes.tied) * self.table * self.width
        return np.where((self.shard > 1) & ~self.by_zero, tables, 0.0)

    def gathered_units(self) -> tuple[Array, Array]:
        """Bytes of the layer that runs, and of the next one, which is gathered ahead unless reentrant checkpoints of FSDP1 run
        a layer's forward in backward, or adapters have units of their own there, which come before it. FSDP2 copies a layer's
        gradients together before it reduces them."""
        matrices = (self.counts.frozen - self.counts.frozen_tables) + (self.counts.trained - self.counts.trained_tables)
        packed = np.where((self.words.bits == NO_BITS) | ~self.frozen, self.width, np.where(self.words.bits < 3, 0.5, 1.0))
        unit = np.where((self.shard > 1) & ~self.by_zero, packed * matrices / self.shapes.layers, 0.0)
        again = (self.words.reentrant > 0) & (self.recomputed > 0)
        alone = (self.words.sharding == FSDP1) & (again | (self.frozen & (self.words.mixed_units == 0)))
        together = np.where(~self.frozen & (self.words.sharding == FSDP2), unit, 0.0)
        return unit + together, np.where(alone, 0.0, unit)

    def kept(self) -> Array:
        """Bytes that all layers keep for backward."""
        # The first layer's input is the embedding's result.
        inputs = self.shapes.layers * self.residual - (self.residual - self.width * self.shapes.hidden)
        return np.where(self.recomputed > 0, inputs, self.shapes.layers * self.layer())

    def layer(self) -> Array:
        """Bytes that a layer keeps besides its input if it is recomputed, with its input otherwise."""
        attention, mlp = self.norm() + self.attention(), self.norm() + self.mlp()
        # A fused norm keeps its own input: the layer's, and the sum after attention.
        second = np.where(self.fused_norms | self.wide, self.residual, 0.0)
        first = np.where(self.recomputed > 0, 0.0, second)
        matrices = (self.counts.frozen - self.counts.frozen_tables) / self.shapes.layers / self.tokens
        unpacked = np.where(self.words.torch_unpacking > 0, self.width * matrices, 0.0)
        return attention + mlp + first + second + self.product_inputs() + unpacked

    def norm(self) -> Array:
        """Bytes of a norm: eager RMSNorms keep a copy of their input in fp32; the normalised one if the weight is trained."""
        kept = np.where(self.wide, 0.0, 4.0) + np.where(self.saves_few, 0.0, self.state)
        return np.where(self.fused_norms, 0.0, self.shapes.hidden * kept)

    def product_inputs(self) -> Array:
        """The normalised states, of which trained matrices keep one for attention and one for the MLP, or one each if autocast
        casts it for each of them; so do adapters that are fused, or get them as they are."""
        words = self.words
        shared = self.takes_inputs | (words.fused_adapters > 0)
        adapted = [self.adapts(*names) > 0 for names in (("query", "key", "value"), ("gate", "up"))]
        trained = np.where(self.casts_inputs, 3 + self.shapes.matrices - 1, 2.0)
        count = np.where(self.saves_few, np.sum(adapted, axis=0) * shared, trained)
        # bitsandbytes' products of 8 bits keep what they get.
        by_int8 = np.where(self.frozen & (words.bits == INT8), 2 * self.state, 0.0)
        kept: Array = np.maximum(self.inner * count, by_int8) * self.shapes.hidden
        return kept

    def adapter_input(self, elements: Array) -> Array:
        """Bytes that an adapter keeps of its input: the mask of dropout, and what its first matrix multiplies, in 16 bits under
        autocast, else in the adapter's type. Without dropout and in the same type, a frozen matrix's input itself."""
        words = self.words
        mask = np.where(words.adapter_dropout > 0, 1.0, 0.0)
        cast = np.where(words.autocast > 0, self.width, np.maximum(self.adapter_width, self.width))
        factor = np.where(self.takes_inputs, 0.0, cast)
        fused = np.where(words.adapter_dropout > 0, self.width, 0.0)
        return elements * np.where(words.fused_adapters > 0, fused, mask + factor)

    def attention(self) -> Array:
        """Queries, keys and values as the kernel gets them, its result and the logarithms of its sums; what adapters keep."""
        shapes, words = self.shapes, self.words
        # Probabilities in fp32, and as the product gets them.
        pairs = (4 + np.where(self.inner < 4, self.inner, 0.0)) * shapes.heads * shapes.sequence
        scores = np.where(words.attention == EAGER_ATTENTION, pairs, 4 * shapes.heads)
        normed = (4 + np.where(self.frozen, 0.0, self.inner)) * shapes.normed_heads
        adapters = self.adapts("query", "key", "value") * self.adapter_input(shapes.hidden)
        adapters = adapters + self.adapts("output") * self.adapter_input(shapes.query)
        kept: Array = self.kernel_states() + scores + normed + adapters
        return kept

    def kernel_states(self) -> Array:
        """Bytes of queries, keys, values and results. Torch's kernel gets keys repeated for each head until release 4.50."""
        shapes, words = self.shapes, self.words
        repeats = (words.repeats_keys > 0) | (words.attention == EAGER_ATTENTION)
        repeats |= (words.attention > 0) & (words.release < 451)
        # flash-attn has 16 bits only, and autocast casts what torch's kernel gets.
        wide = (words.attention == EAGER_ATTENTION) | ((words.attention > 0) & (words.autocast == 0))
        width = np.where(wide, self.inner, self.width)
        states: Array = width * (2 * shapes.query + 2 * np.where(repeats, shapes.query, shapes.key_value))
        return states

    def mlp(self) -> Array:
        """The hidden layer of the MLP: the gate, the activated one and the other factor; the product, if a trained matrix or
        an adapter multiplies it. Each expert weighs its result."""
        shapes, w = self.shapes, self.inner
        gated = shapes.matrices == 3
        eager = np.where(gated, np.where(self.gates > 0, 2.0, 3.0), 1.0)
        hidden = w * eager * shapes.mlp_width + self.product_input()
        weighed = np.where(shapes.experts > 0, self.experts * self.width * shapes.hidden, 0.0)
        return hidden + weighed + self.adapts("gate", "up") * self.adapter_input(shapes.hidden)

    def product_input(self) -> Array:
        """Bytes of the input of the MLP's last matrix, which are freed before those of its factors."""
        adapter = self.adapts("down") * self.adapter_input(self.shapes.mlp_width)
        by_int8 = np.where(self.words.bits == INT8, self.inner * self.shapes.mlp_width, 0.0)
        return np.where(self.saves_few, adapter + by_int8, self.width * self.shapes.mlp_width)

    def working(self) -> Array:
        """Bytes as a layer runs backward, with its result, at the fuller of two moments.

        1. The MLP: the gradients of the product and of its factors, or of what an adapter casts; of one expert, with the sums
           of experts' gradients. Beside the first, or two of its factors, a quantised matrix in 16 bits; one of 8 bits has the
           type of its input, to which the gradient of its result is cast, too.
        2. Attention, without the MLP: the gradients of what its kernel gets and returns; eager attention has three or, of 16
           bits, two matrices in fp32 besides the probabilities.
        """
        shapes, words = self.shapes, self.words
        again = self.layer() + self.residual
        at_once = np.where(shapes.experts > 0, self.experts / np.maximum(shapes.experts, 1.0), 1.0) * shapes.ffn
        gated = np.where(shapes.matrices == 3, np.where(self.gates > 0, 1.0, 3.0), 2.0)
        casts = np.where((words.fused_adapters > 0) | (self.adapter_width <= self.width), 0.0, 4.0)
        casts = casts + np.where(words.adapter_dropout > 0, np.maximum(casts, self.inner), self.inner)
        down = np.where(self.adapts("down") > 0, casts * at_once, self.inner * at_once)
        factors = gated * self.inner * at_once - self.product_input() * np.where(shapes.experts > 0, 0.0, 1.0)
        summed = np.where(shapes.experts > 0, 4 * self.width * shapes.hidden, 0.0)
        is_packed = self.frozen & (words.bits > NO_BITS) & (words.torch_unpacking == 0)
        matrix = np.where(is_packed, shapes.hidden * shapes.ffn / self.tokens, 0.0)
        by_int8 = (words.bits == INT8) & (self.state > self.inner)
        unpacked = np.where(by_int8, self.state * (matrix + at_once), self.width * matrix)
        factors_later = factors - self.inner * at_once + unpacked
        largest = np.maximum(np.maximum(down + self.width * matrix, factors), factors_later)
        mlp = self.recomputed * again + largest + summed
        matrices = np.where(self.inner < 4, 8.0, 12.0) * shapes.heads * shapes.sequence
        attention = self.recomputed * (again - self.norm() - self.mlp()) + np.where(
            words.attention == EAGER_ATTENTION, matrices, 0.0
        )
        working: Array = np.maximum(mlp, attention + self.kernel_states())
        return working

    def loss(self) -> Array:
        """Bytes as the loss is computed: the last norm with its result, and logits.

        From release 4.46 on, logits in 16 bits stay beside their copy in fp32; until 4.48, a batch of several samples is copied
        again without the last tokens. The logarithms of probabilities, and in backward two gradients, are in fp32.
        """
        words = self.words
        # Of logits: fp32 if the table is and products are not cast.
        w = np.where((words.whole_tables > 0) & (words.autocast == 0), 4.0, self.width)
        stays = np.where((words.release >= 446) & (w < 4), w, 0.0)
        shifts = np.where((words.release < 449) & (self.layouts.micro_batch_size > 1), 4.0, 0.0)
        held = np.where(words.keeps_logits > 0, w, 0.0)
        whole = np.maximum(stays + 4 + shifts + 4, held + 12.0)
        half = np.where(words.autocast > 0, np.maximum(w + 8, 12.0), 4 * w)
        # Fabric returns fp32, in pieces of 128 tokens of each sample; of compiled pieces there are eight.
        split = 8.0 + (8 + w) * np.minimum(128 / self.shapes.sequence, 1.0)
        kinds = [self.loss_kind == kind for kind in (WHOLE_LOSS, KERNEL_LOSS, HALF_LOSS, SPLIT_LOSS, COMPILED_LOSS)]
        sizes = [whole, stays + 4 + shifts, half, split, w * 9 / 8]
        logits = np.select(kinds, sizes, default=0.0) * self.shapes.vocabulary
        last = np.where(self.fused_norms | self.wide, self.residual, 0.0) + np.where(self.fused_norms, 0.0, self.norm())
        normed = (self.state + np.where(self.casts_inputs, self.width, 0.0)) * self.shapes.hidden
        everything: Array = logits + self.loss_in_pieces() / self.tokens + last + normed
        return everything

    def loss_in_pieces(self) -> Array:
        """Bytes of losses that never have all logits.

        1. Liger's, in forward: a piece, gradients of the rows, and of the table, in its type, if it is trained [liger-kernel
           0.8.5, ops/fused_linear_cross_entropy.py, without `accum_dtype`].
        2. TRL's, in backward: a tile of at most 4,096 tokens and 32,768 words, the copy of the rows without labels that are
           ignored, and gradients of the rows and of the table, which are summed in fp32 and then cast.
        3. Cut cross-entropy, in backward: gradients of rows and table in 16 bits.
        """
        trained = np.where(self.frozen, 0.0, self.table)
        rows = self.shapes.hidden * self.tokens
        tile = np.minimum(self.tokens, CHUNKED_TOKENS) * self.width * CHUNKED_WORDS
        chunked = tile + rows * (self.state + 4 + self.width) + trained * (4 + self.width)
        piece = pieces(self.cases, self.tokens).rows * self.shapes.vocabulary * self.width
        liger = piece + self.width * rows + np.where(self.sharded, self.width, self.words.parameter_width) * trained
        kinds = [self.loss_kind == kind for kind in (PROJECTION_LOSS, CHUNKED_LOSS, CUT_LOSS)]
        bytes_at_peak: Array = np.select(kinds, [liger, chunked, self.width * (rows + trained)], default=0.0)
        return bytes_at_peak


CHUNKED_TOKENS, CHUNKED_WORDS = 4096.0, 32768.0
"""The tile of TRL's fused head [trl 1.16, kernels/chunked_logprob.py, trainer/utils.py]."""
OPERATORS = 30.0
"""Of a layer's forward whose launches take `Coefficients.kernel_seconds`."""
WITHOUT_TENSOR_CORES = 16.0
"""Peak of products in 16 bits, relative to those in fp32 without tensor cores: of an A100, and about that of others."""


def layer_traffic(cases: Cases) -> tuple[Array, Array]:
    """Bytes per token of a layer's forward and of its backward.

    - Residuals: two sums, and as many of gradients.
    - Norms: 4 bytes an element in one kernel, 6 in backward. Eager ones: a copy in fp32, its square, their mean, the product
      with its root, the copy back, and the product with the weight; in backward each of them again, in fp32.
    - Rotations: one pass in a kernel; else products with cosines and sines, halves that are negated and joined, and their sum.
    - The MLP: the activation and the product of its factors; the rows of experts are taken, weighed and added up.
    """
    shapes, layer = cases.shapes, Replica(cases)
    h, w, s = shapes.hidden, layer.inner, layer.state
    norm = np.where(layer.fused_norms, 2 * s, 4.0 * (4 + 3) + np.where(layer.wide, 4.0, 8.0))
    norm_backward = np.where(layer.fused_norms, 3 * s, 4.0 * 13 + np.where(layer.wide, 4.0, 8.0))
    rotation = np.where(layer.fused_norms, 2 * w, 10 * w) * (shapes.query + shapes.key_value)
    gated = shapes.matrices == 3
    fused = layer.gates > 0
    mlp = np.where(gated, np.where(fused, 3.0, 5.0), 2.0) * w * shapes.mlp_width
    mlp_backward = np.where(gated, np.where(fused, 5.0, 9.0), 3.0) * w * shapes.mlp_width
    rows = np.where(shapes.experts > 0, shapes.routed, 0.0) * h * layer.width
    forward = 6 * s * h + 2 * norm * h + rotation + mlp + 7 * rows
    backward = 6 * s * h + 2 * norm_backward * h + rotation + mlp_backward + 10 * rows
    inputs, outputs = _adapted_widths(layer)
    dropout = cases.transformers.adapter_dropout
    half = layer.adapter_width <= layer.width
    casts = cases.transformers.autocast > 0
    fused = cases.transformers.fused_adapters > 0
    # Of an adapter's input and of its result, which the matrix's is added to.
    by_input = np.select([fused | half, casts], [2 + 5 * dropout, 14 + 9 * dropout], default=10 + 9 * dropout)
    by_output = np.select([fused, casts | half], [8.0, 12.0], default=28.0)
    input_backward = np.select([fused, half, casts], [20.0, 10 + 5 * dropout, 22 + 9 * dropout], default=20 + 9 * dropout)
    output_backward = np.select([fused, casts | half], [6.0, 8.0], default=22.0)
    forward = forward + by_input * inputs + by_output * outputs
    backward = backward + input_backward * inputs + output_backward * outputs
    # bitsandbytes casts what it gets and returns the type of that.
    widths = 4 * h + 2 * shapes.query + 2 * shapes.key_value + 3 * shapes.mlp_width
    converted = np.where(layer.converts, 6.0, 0.0) * widths
    return forward + converted, backward + converted


def _adapted_widths(layer: Replica) -> tuple[Array, Array]:
    """Elements of the inputs, and of the results, of the matrices of a layer that have adapters."""
    shapes, adapts = layer.shapes, layer.adapts
    h, ffn = shapes.hidden, shapes.mlp_width
    inputs = adapts("query", "key", "value", "gate", "up") * h + adapts("output") * shapes.query + adapts("down") * ffn
    keys = adapts("key", "value") * shapes.key_value
    return inputs, adapts("query") * shapes.query + keys + adapts("output", "down") * h + adapts("gate", "up") * ffn


def added_seconds(cases: Cases) -> Array:
    """Seconds of a layer and micro-batch in which quantised matrices are dequantised, for each product with them, and in which
    adapters in fp32 are multiplied outside of autocast, without tensor cores."""
    layer = Replica(cases)
    passes = 2 + layer.recomputed
    matrices = np.where(layer.words.bits > NO_BITS, layer.counts.frozen - layer.counts.frozen_tables, 0.0)
    # Operators of torch: 32 bits for each value, which are cast to 8, masked, shifted by the zeros and scaled.
    element = np.where(layer.words.torch_unpacking > 0, 4 + 4 + 1 + 2 + 2 + 1 + layer.width, 0.5 + layer.width)
    unpacked = passes * matrices / cases.shapes.layers * element / cases.hardware.bandwidth
    inputs, outputs = _adapted_widths(layer)
    rank = layer.counts.trained / cases.shapes.layers / np.maximum(inputs + outputs, 1.0)
    whole = layer.frozen & (layer.words.autocast == 0) & (layer.adapter_width >= 4) & (layer.words.fused_adapters == 0)
    products = np.where(whole, 2 * (2 + passes) * layer.tokens * rank * (inputs + outputs), 0.0)
    return unpacked + products / (cases.hardware.peak / WITHOUT_TENSOR_CORES)


def added_launches(cases: Cases) -> Array:
    """Operators that a layer's forward has beyond those of one with fused norms and rotations, as a multiple of its: eager
    norms have six more each, rotations eight, an adapter seven, with its casts."""
    layer = Replica(cases)
    count = layer.adapts("query", "key", "value", "output", "gate", "up", "down")
    adapters = np.where(layer.words.fused_adapters > 0, 2.0, np.where(layer.adapter_width <= layer.width, 4.0, 7.0)) * count
    return (np.where(layer.fused_norms, 0.0, 20.0) + adapters) / OPERATORS
