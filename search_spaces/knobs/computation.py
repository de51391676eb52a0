"""Computation in a rank and its process: checkpointing, data types, kernels, compilation, allocator, environment."""

from dataclasses import dataclass
from typing import Any

from search_spaces.environment import environment_text
from search_spaces.errors import KnobValueError
from search_spaces.kernels import ATTENTION_KERNELS, BEST, FUSED_KERNELS, KERNEL_CHOICES, LOSS, replaced
from search_spaces.knob import (
    CHECKPOINTS,
    EVERY_ENGINE,
    GROWS_SEGMENTS,
    ON_CUDA,
    TORCH_ENGINES,
    Applies,
    Canonical,
    Condition,
    Distance,
    Numerics,
    Planning,
    Value,
    knob,
)
from search_spaces.knobs.parallelism import layers_of
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import marks_recomputation
from search_spaces.optimizers import KERNELS

NORMS, ACTIVATIONS, EXPERT_ACTIVATIONS, ATTENTION, UP_PROJECTIONS = (
    "norms", "activations", "expert_activations", "attention", "up_projections",
)  # fmt: skip
MODULES = {
    NORMS: "layernorm",
    ACTIVATIONS: "",
    EXPERT_ACTIVATIONS: "moe_act",
    ATTENTION: "core_attn",
    UP_PROJECTIONS: "mla_up_proj",
}
"""Modules whose results can be recomputed -> Megatron's name; empty: Megatron recomputes it only with other modules.

Norms: those of a block's inputs. Activations: of dense MLPs and shared experts, with their gate. Attention: scores, softmax and
their product with the values. Up-projections: of latent attention, with the rotations.
"""

TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, MXFP8 = "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"
FP8_RECIPES = (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, MXFP8)

SEARCHED_MODULES = (
    "", NORMS, EXPERT_ACTIVATIONS, UP_PROJECTIONS, f"{NORMS}+{ACTIVATIONS}+{EXPERT_ACTIVATIONS}",
    f"{NORMS}+{ACTIVATIONS}+{EXPERT_ACTIVATIONS}+{UP_PROJECTIONS}", "+".join(MODULES),
)  # fmt: skip
"""Values of `recompute_modules` that spaces search, from cheap to dear. Those that a model does not distinguish are one."""


def modules_in(text: str) -> tuple[str, ...]:
    """The modules of a value of the knob, in the order of `MODULES`; none if it is empty.

    Raises:
        KnobValueError: a name is unknown.
    """
    names = text.split("+") if text else []
    if unknown := [name for name in names if name not in MODULES]:
        problem = f"{unknown[0]!r} in {text!r} is none of {', '.join(MODULES)}"
        raise KnobValueError("recompute_modules", problem, "write names such as norms+activations")
    return tuple(name for name in MODULES if name in names)


def _kernels(value: Value, config: Any, context: Any) -> Value:
    """Fused kernels that replace nothing in the model are equivalent to none."""
    model = context.model
    return value if not isinstance(model, ModelSpec) or replaced(str(value), model, config.tensor_parallel_size) else "none"


def _loss_chunk(value: Value, config: Any, context: Any) -> Value:
    """If a fused loss kernel determines the chunk size, all values are equivalent to the default."""
    model = context.model
    decided = isinstance(model, ModelSpec) and LOSS in replaced(config.fused_kernels, model, config.tensor_parallel_size)
    return 0 if decided else value


def _present_modules(value: Value, _: Any, context: Any) -> Value:
    """Modules that the model does not have are left out; of a user's module none is known."""
    model = context.model
    if not isinstance(model, ModelSpec):
        return ""
    absent = set() if model.num_experts else {EXPERT_ACTIVATIONS}
    if model.latent is None:
        absent.add(UP_PROJECTIONS)
    return "+".join(name for name in modules_in(str(value)) if name not in absent)


@dataclass(frozen=True, kw_only=True)
class ComputationKnobs:
    """Computation in a rank: activation checkpointing, data types, kernels, compilation."""

    __slots__ = ()

    compile_blocks: bool = knob(
        False,
        "Whether each block is compiled with torch.compile; compilation happens in the first step.",
        number=33,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        on_cuda=True,
        searched_after="micro_batch_size",
        engines=TORCH_ENGINES,
        spaces={"full": "all"},
        distance=Distance.CHOICE,
        remedy="compile each block in the program: block.compile()",
    )
    fused_kernels: str = knob(
        "none",
        "Package of fused kernels for norms and, with liger, also rotary embeddings, SiLU gates and the output projection "
        "with its loss; none: torch operators.",
        number=60,
        unit="name",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=KERNEL_CHOICES,
        spaces={"full": "all"},
        plain=("none",),
        distance=Distance.CHOICE,
        remedy=(
            "put them into the model: liger_kernel.transformers patches models of Transformers, and norms of "
            "transformer_engine.pytorch take the place of torch's"
        ),
        canonical=Canonical(("tensor_parallel_size",), _kernels),
    )
    cuda_graphs: bool = knob(
        False,
        "Whether each block's forward and backward are captured as CUDA graphs after two steps and then replayed.",
        number=61,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=ON_CUDA,
        spaces={"full": "all"},
        plain=(False,),
        distance=Distance.CHOICE,
        remedy=("wrap blocks that are on the device in torch.cuda.make_graphed_callables, before anything hooks them"),
    )
    recompute_modules: str = knob(
        "",
        f"Modules of our models whose results are recomputed in backward, such as norms+activations: {', '.join(MODULES)}.",
        number=67,
        unit="modules",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        condition=Condition(
            "activation_checkpointing is none, and pipeline_layout marks no recomputation",
            ("activation_checkpointing", "pipeline_layout"),
            lambda config, _: config.activation_checkpointing == "none" and not marks_recomputation(config),
        ),
        searched_after="checkpoint_every_k",
        spaces={"full": SEARCHED_MODULES},
        plain=("",),
        remedy="checkpoint these modules in the model",
        normalise=lambda text: "+".join(modules_in(text)),
        canonical=Canonical((), _present_modules),
    )
    activation_checkpointing: str = knob(
        "none",
        "Which activations are recomputed in backward instead of stored.",
        number=24,
        unit="policy",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        choices=("none", "selective", "full"),
        condition=Condition(
            "pipeline_layout marks no recomputation", ("pipeline_layout",), lambda config, _: not marks_recomputation(config)
        ),
        searched_after="allgather_bucket_size",
        engines=EVERY_ENGINE,
        spaces={"zero": ("none", "full"), "3d": "all"},
        remedy="switch it on in the model",
    )
    checkpoint_every_k: int = knob(
        1,
        "Activation checkpointing applies to every k-th layer.",
        number=25,
        unit="layers",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        minimum=1,
        condition=CHECKPOINTS,
        engines=EVERY_ENGINE,
        spaces={"parallel": "powers_of_two", "full": "powers_of_two"},
        remedy="set it in the model",
        counts_to=lambda context, _: min(layers_of(context) // 2, 8),
    )
    precision: str = knob(
        "fp32",
        "Data type of parameters and activations in forward and backward.",
        number=26,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("fp32", "bf16", "fp16", "fp64", "fp8"),
        on_cuda="bf16",
        searched_after="reduce_dtype",
        planning=Planning.FIXED,
        plain=("fp32", "bf16"),
    )
    fp8_recipe: str = knob(
        TENSORWISE,
        "Scales of the operands of products in 8 bits, by torchao's names: one for a matrix, one for each row (gw_hp: with "
        "gradients of weights in bf16), or one for each 32 numbers of a row.",
        number=68,
        unit="name",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=FP8_RECIPES,
        condition=Condition("precision is fp8", ("precision",), lambda config, _: config.precision == "fp8"),
        planning=Planning.FIXED,
        plain=(TENSORWISE,),
        distance=Distance.CHOICE,
        remedy="give it to torchao's conversion of the model",
    )
    attention_backend: str = knob(
        "best",
        "Kernel of scaled dot-product attention; best: torch chooses.",
        number=27,
        unit="name",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=(BEST, *ATTENTION_KERNELS["cuda"]),
        engines=TORCH_ENGINES,
        spaces={"full": "all"},
        planning=Planning.FIXED,
        plain=("best",),
        distance=Distance.CHOICE,
        remedy="choose it around the model, with torch.nn.attention.sdpa_kernel",
        canonical=Canonical(
            (), lambda value, _, context: "best" if (value, context.cluster.device.kind) == ("flash", "cpu") else value
        ),
    )
    loss_chunk_size: int = knob(
        0,
        "Number of tokens whose logits are in memory at the same time; 0: all.",
        number=28,
        unit="tokens",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        searched_after="pack_sequences",
        engines=EVERY_ENGINE,
        spaces={"full": (0, 1024, 4096)},
        planning=Planning.TUNED_LAST,
        tuned=8,
        acts_on=("compute",),
        remedy="compute the loss of so many tokens at a time in the model",
        counts_to=lambda context, _: context.workload.sequence_length,
        canonical=Canonical(("tensor_parallel_size", FUSED_KERNELS), _loss_chunk),
    )
    fused_optimizer: bool = knob(
        True,
        "Whether the optimizer update is one fused kernel instead of one kernel per operation.",
        number=29,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=Condition(
            f"optimizer is {' or '.join(KERNELS)}", ("optimizer",), lambda config, _: config.optimizer in KERNELS
        ),
        engines=EVERY_ENGINE,
        spaces={"full": "all"},
        planning=Planning.NOT_MODELLED,
        acts_on=("optimizer",),
        distance=Distance.DETAIL,
        remedy="choose it where the optimizer is made",
    )


@dataclass(frozen=True, kw_only=True)
class ProcessKnobs:
    """The process of a rank: allocator, environment variables, garbage collection, CPU cores."""

    __slots__ = ()

    expandable_segments: bool = knob(
        False,
        "Whether the CUDA allocator expands its segments instead of allocating new ones.",
        number=31,
        numerics=Numerics.EXACT,
        applies=Applies.PROCESS,
        on_cuda=True,
        condition=GROWS_SEGMENTS,
        searched_after="fused_optimizer",
        engines=EVERY_ENGINE,
        spaces={"full": "all"},
        planning=Planning.NOT_MODELLED,
        acts_on=("compute",),
        distance=Distance.DETAIL,
        remedy="set PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
    gc_interval: int = knob(
        0,
        "Steps between garbage collections, at the same step on every rank; 0: Python's automatic collection.",
        number=47,
        unit="steps",
        numerics=Numerics.EXACT,
        applies=Applies.STEP,
        engines=EVERY_ENGINE,
        spaces={"full": (0, 50)},
        planning=Planning.NOT_MODELLED,
        acts_on=("compute",),
        distance=Distance.DETAIL,
        remedy="call gc.disable() before the first step, and gc.collect(1) every so many steps",
        exports={"megatron": "--manual-gc --manual-gc-interval {value}", "torchtitan": "--training.gc_freq {value}"},
    )
    numa_binding: bool = knob(
        False,
        "Whether each rank is bound to the cores and memory of the NUMA node of its device.",
        number=50,
        numerics=Numerics.EXACT,
        applies=Applies.PROCESS,
        condition=Condition("a machine has several NUMA nodes", (), lambda _, context: context.cluster.numa_nodes != 1),
        engines=EVERY_ENGINE,
        spaces={"full": "all"},
        planning=Planning.NOT_MODELLED,
        acts_on=("compute", "data", "optimizer", "offload"),
        distance=Distance.DETAIL,
        remedy=("the launcher binds: torchrun --numa-binding=node on GPUs, else numactl --cpunodebind=N for each rank"),
    )
    script: str = knob(
        "",
        "Knobs of the user's own script, and its environment variables (only engine `command`).",
        number=32,
        unit="NAME=VALUE pairs",
        numerics=Numerics.CHANGES,
        applies=Applies.PROCESS,
        engines=(),
        remedy="give them to your script",
    )
    environment: str = knob(
        "",
        "Environment variables of the rank processes; measured only on the best layout (environment_settings).",
        number=40,
        unit="NAME=VALUE pairs",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS,
        engines=EVERY_ENGINE,
        remedy="set these variables before its processes start",
        normalise=environment_text,
    )
