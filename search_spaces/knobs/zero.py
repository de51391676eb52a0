"""ZeRO and hybrid sharding: what is sharded over data-parallel ranks, how they communicate, and what is offloaded."""

from dataclasses import dataclass

from search_spaces.communication import INT8
from search_spaces.knob import (
    ACCUMULATES,
    DEFERS,
    OFFLOADS,
    PARALLEL_SIZES,
    STAGE_3,
    Applies,
    Canonical,
    Condition,
    Distance,
    Numerics,
    Planning,
    knob,
)
from search_spaces.models.pipeline import marks_offloading


@dataclass(frozen=True, kw_only=True)
class ZeroKnobs:
    """ZeRO and hybrid sharding: what is sharded over data-parallel ranks, and how they communicate."""

    __slots__ = ()

    zero_stage: int = knob(
        0,
        "What is sharded over data-parallel ranks: 1: optimizer state, 2: also gradients, 3: also parameters.",
        number=0,
        unit="stage",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=(0, 1, 2, 3),
        searched_after="rank_order",
        engines=("native", "deepspeed"),
        spaces={"zero": (0, 1, 2, 3)},
    )
    reshard_after_forward: bool = knob(
        True,
        "Whether gathered parameters are freed after forward and gathered again for backward.",
        number=12,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        condition=STAGE_3,
        engines=("native", "fsdp2", "deepspeed"),
        spaces={"full": "all"},
    )
    defer_gradient_reduction: bool = knob(
        False,
        "Whether gradients are reduced once per step instead of once per micro-batch; whole gradients are then stored.",
        number=9,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=DEFERS,
        spaces={"zero-buckets": "all"},
        remedy="it decides by itself when gradients are reduced",
    )
    accumulation_dtype: str = knob(
        "fp32",
        "Data type in which gradients of micro-batches are accumulated: fp32, or the precision.",
        number=35,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("fp32", "bf16", "fp16"),
        condition=ACCUMULATES,
        remedy="it decides by itself in which type gradients are summed",
    )
    hsdp_shard_size: int = knob(
        0,
        "Number of ranks over which states are sharded; all-reduce synchronises the replicas; 0: all data-parallel ranks.",
        number=11,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        searched_after="onebit_warmup_steps",
        engines=("native", "fsdp2", "deepspeed"),
        spaces={"full": "powers_of_two"},
        zero=True,
        counts_to=lambda context, _: context.world_size // 2,
        canonical=Canonical(
            PARALLEL_SIZES, lambda value, config, context: 0 if value == config.zero_ranks(context.world_size) else value
        ),
    )
    secondary_shard_size: int = knob(
        0,
        "Number of neighbouring ranks that shard a second copy of the parameters, from which backward gathers (hpZ of "
        "ZeRO++); 0: no second copy.",
        number=56,
        unit="ranks",
        numerics=Numerics.EXACT,
        applies=Applies.PROCESS_GROUP,
        condition=Condition(
            "zero_stage is 3 and reshard_after_forward",
            ("zero_stage", "reshard_after_forward"),
            lambda config, _: config.zero_stage == 3 and config.reshard_after_forward,
        ),
        spaces={"full": "powers_of_two"},
        plain=(0,),
        remedy="it keeps no second copy of sharded parameters",
        zero=True,
        counts_to=lambda context, _: context.world_size // 2,
        canonical=Canonical(
            (*PARALLEL_SIZES, "hsdp_shard_size"),
            lambda value, config, context: 0 if value == config.shard_ranks(context.world_size) else value,
        ),
    )
    gather_dtype: str = knob(
        "same",
        "Data type of parameter all-gathers: the precision, or blocks of 8-bit integers (qwZ of ZeRO++).",
        number=55,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("same", "int8"),
        condition=STAGE_3,
        plain=("same",),
        remedy="it gathers parameters in the type that they are computed with",
        canonical=Canonical(
            (*PARALLEL_SIZES, "hsdp_shard_size"),
            lambda value, config, context: "same" if config.shard_ranks(context.world_size) == 1 else value,
        ),
    )
    prefetch_bucket_size: int = knob(
        50_000_000,
        "Maximum parameters that are prefetched; 0: no prefetching.",
        number=4,
        unit="elements",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        condition=STAGE_3,
        searched_after="offload_param",
        engines=("native", "deepspeed"),
        spaces={"zero-buckets": "element_sizes"},
        planning=Planning.TUNED_LAST,
        tuned=2,
        acts_on=("data",),
        remedy="it prefetches whole modules",
        zero=True,
    )
    param_persistence_threshold: int = knob(
        100_000,
        "Parameters smaller than this are not sharded.",
        number=5,
        unit="elements",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=STAGE_3,
        engines=("native", "deepspeed"),
        spaces={"zero-buckets": (0, 10_000, 100_000, 1_000_000)},
        planning=Planning.TUNED_LAST,
        tuned=3,
        acts_on=("data",),
        remedy="it shards every parameter",
    )
    max_live_parameters: int = knob(
        1_000_000_000,
        "Maximum gathered parameters in memory at the same time.",
        number=6,
        unit="elements",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        minimum=1,
        condition=STAGE_3,
        engines=("native", "deepspeed"),
        spaces={"zero-buckets": "element_sizes"},
        planning=Planning.TUNED_LAST,
        tuned=4,
        acts_on=("data",),
        remedy="it frees each module after its use",
    )
    allgather_bucket_size: int = knob(
        500_000_000,
        "Number of updated parameters per all-gather.",
        number=3,
        unit="elements",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        minimum=1,
        condition=Condition("zero_stage is 1 or 2", ("zero_stage",), lambda config, _: config.zero_stage in (1, 2)),
        spaces={"zero-buckets": "element_sizes"},
        planning=Planning.TUNED_LAST,
        tuned=9,
        acts_on=("data",),
        remedy="it gathers parameter by parameter, or module by module",
    )
    reduce_bucket_size: int = knob(
        40_000_000,
        "Number of gradients per reduction. The default is Megatron-LM's: models of 100 million parameters have several "
        "buckets, so that all except the last overlap with backward.",
        number=2,
        unit="elements",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        minimum=1,
        searched_after="offload_activations",
        engines=("native", "ddp", "deepspeed"),
        spaces={"zero-buckets": "element_sizes"},
        planning=Planning.TUNED_LAST,
        tuned=1,
        acts_on=("data",),
        remedy="it has no bucket of so many elements",
    )
    overlap_comm: bool = knob(
        True,
        "Whether communication overlaps with computation.",
        number=7,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        engines=("native", "deepspeed"),
        spaces={"zero-buckets": "all"},
        planning=Planning.TUNED_LAST,
        tuned=5,
        acts_on=("data",),
        remedy="it always overlaps",
    )
    overlap_param_gather: bool = knob(
        False,
        "Whether gathering updated parameters overlaps with the next step's forward instead of ending the step.",
        number=48,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        condition=Condition(
            "zero_stage is 1 or 2 and data x context ranks > 1",
            ("zero_stage", *PARALLEL_SIZES),
            lambda config, context: config.zero_stage in (1, 2) and config.zero_ranks(context.world_size) > 1,
        ),
        spaces={"full": "all"},
        planning=Planning.TUNED_LAST,
        tuned=6,
        acts_on=("data",),
        remedy="it gathers updated parameters where it always does",
    )
    contiguous_gradients: bool = knob(
        True,
        "Whether gradients are copied into one contiguous buffer as they are computed.",
        number=8,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        engines=("native", "deepspeed"),
        spaces={"zero-buckets": "all"},
        planning=Planning.NOT_MODELLED,
        acts_on=("data",),
        distance=Distance.DETAIL,
        remedy="it lays gradients out itself",
    )
    reduce_dtype: str = knob(
        "fp32",
        "Data type in which gradients are communicated; int8: blocks of integers, summed in fp32 (qgZ of ZeRO++).",
        number=10,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("fp32", "bf16", "fp16", "int8"),
        plain=("fp32", "bf16"),
        # On one rank int8 is equivalent to fp32: nothing is sent.
        canonical=Canonical(
            PARALLEL_SIZES,
            lambda value, config, context: "fp32" if value == INT8 and config.zero_ranks(context.world_size) == 1 else value,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class OffloadKnobs:
    """Offloading to host memory or files."""

    __slots__ = ()

    offload_optimizer: str = knob(
        "none",
        "Where optimizer state is stored and updated.",
        number=13,
        unit="place",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=("none", "cpu", "nvme"),
        condition=Condition(
            "pipeline_layout marks no offloading", ("pipeline_layout",), lambda config, _: not marks_offloading(config)
        ),
        searched_after="gather_dtype",
        spaces={"parallel": ("none", "cpu"), "full": ("none", "cpu", "nvme")},
        plain=("none",),
    )
    offload_ratio: float = knob(
        1.0,
        "Fraction of the optimizer state that is offloaded.",
        number=15,
        unit="share",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        maximum=1,
        condition=OFFLOADS,
        spaces={"full": (0.5, 1.0)},
        remedy="it offloads all or nothing",
    )
    offload_param: str = knob(
        "none",
        "Where sharded parameters are stored.",
        number=14,
        unit="place",
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        choices=("none", "cpu", "nvme"),
        spaces={"parallel": ("none", "cpu"), "full": ("none", "cpu", "nvme")},
        plain=("none",),
    )
    offload_activations: bool = knob(
        False,
        "Whether activations that blocks save for backward are offloaded to host memory.",
        number=49,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        searched_after="checkpoint_every_k",
        spaces={"full": "all"},
        plain=(False,),
        remedy="run the model's forward inside of torch.autograd.graph.save_on_cpu(pin_memory=True)",
    )
