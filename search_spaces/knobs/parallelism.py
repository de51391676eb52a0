"""How the model, the sequence and the batch are divided over ranks."""

from dataclasses import dataclass
from typing import Any

from search_spaces.knob import (
    CONTEXT_PARALLEL,
    EVERY_ENGINE,
    PARALLEL_SIZES,
    PIPELINED,
    TENSOR_PARALLEL,
    Applies,
    Canonical,
    Condition,
    Distance,
    Numerics,
    Planning,
    Value,
    knob,
)
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.models.pipeline import is_split, layout_text, parse_layout, split_layers


def layers_of(context: Any) -> int:
    """Layers of the model; if they are unknown, the number of ranks."""
    return context.model.num_layers if isinstance(context.model, ModelSpec) else int(context.world_size)


def _split(value: Value, config: Any, context: Any) -> Value:
    """A split with the same stages as the default is equivalent to the default."""
    default, model = ParallelismKnobs.pipeline_split, context.model
    if value == default:
        return value
    if not isinstance(model, ModelSpec):
        # The costs of a module's blocks are unknown, so all count the same; a script decides its own split.
        return default if isinstance(model, FactoryModel) else value
    if config.pipeline_parallel_size * config.virtual_stages >= model.num_layers:
        return default  # at most one layer per stage: decided without building a list of arbitrarily many stages
    first, other = (config.replace({"pipeline_split": split}) for split in (default, value))
    length = context.workload.sequence_length
    return default if split_layers(model, first, length) == split_layers(model, other, length) else value


def _written_layout(value: Value, config: Any, context: Any) -> Value:
    """A layout without marks and with the stages of the default split is equivalent to no layout."""
    split = config.replace({"pipeline_split": ParallelismKnobs.pipeline_split, "pipeline_layout": ""})
    return "" if value and is_split(str(value), split, context.model, context.workload.sequence_length) else value


@dataclass(frozen=True, kw_only=True)
class ParallelismKnobs:
    """How the model, the sequence and the batch are divided over ranks."""

    __slots__ = ()

    tensor_parallel_size: int = knob(
        1,
        "Number of ranks that divide each weight matrix.",
        number=16,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        minimum=1,
        engines=("native", "fsdp2", "deepspeed"),
        spaces={"3d": "powers_of_two"},
        counts_to=lambda context, _: min(context.cluster.linked_devices, context.world_size),
    )
    pipeline_parallel_size: int = knob(
        1,
        "Number of ranks that divide the layers into pipeline stages.",
        number=18,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        minimum=1,
        engines=("native", "fsdp2", "deepspeed"),
        spaces={"3d": "powers_of_two"},
        counts_to=lambda context, _: min(context.world_size, layers_of(context)),
    )
    context_parallel_size: int = knob(
        1,
        "Number of ranks that divide each sequence.",
        number=22,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        minimum=1,
        engines=("native", "fsdp2"),
        spaces={"parallel": "powers_of_two", "full": "powers_of_two"},
        counts_to=lambda context, _: context.world_size,
    )
    micro_batch_size: int = knob(
        1,
        "Samples per rank and micro-batch; gradient accumulation follows from the global batch size.",
        number=1,
        unit="samples",
        numerics=Numerics.REORDERS,
        applies=Applies.STEP,
        minimum=1,
        engines=EVERY_ENGINE,
        spaces={"zero": "powers_of_two"},
        counts_to=lambda context, replicas: context.workload.global_batch_size // replicas,
    )
    pipeline_schedule: str = knob(
        "1f1b",
        "Pipeline schedule: the order in which a rank runs the micro-batches of its stages.",
        number=20,
        unit="name",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"),
        condition=PIPELINED,
        searched_after="cuda_graphs",
        engines=("native", "fsdp2"),
        spaces={"3d": "all"},
        plain=("1f1b", "interleaved_1f1b"),
    )
    virtual_stages: int = knob(
        1,
        "Number of pipeline stages per rank.",
        number=19,
        unit="stages a rank",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        minimum=1,
        condition=PIPELINED,
        engines=("native", "fsdp2"),
        spaces={"3d": "powers_of_two"},
        counts_to=lambda context, _: min(layers_of(context) // 2, 8),
    )
    pipeline_layout: str = knob(
        "",
        "Number of layers of each pipeline stage, such as 6-7f3-7s-4o; marks: the stage recomputes its first layers (f: "
        "fully, s: selectively) or offloads its optimizer state (o); empty: pipeline_split decides.",
        number=34,
        unit="layers a stage",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=PIPELINED,
        spaces={"full": "solved"},
        plain=("",),
        remedy="it lays no stages out layer by layer",
        normalise=lambda text: layout_text(parse_layout(text)),
        canonical=Canonical(("pipeline_parallel_size", "virtual_stages", "mtp_layers"), _written_layout),
    )
    pipeline_split: str = knob(
        "balanced",
        "How layers are divided over stages: equal numbers of layers, or equal FLOPs including the output projection.",
        number=21,
        unit="name",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=("even", "balanced"),
        condition=Condition(
            "pipeline_parallel_size > 1 and pipeline_layout is empty",
            ("pipeline_parallel_size", "pipeline_layout"),
            lambda config, _: config.pipeline_parallel_size > 1 and not config.pipeline_layout,
        ),
        engines=("native", "fsdp2", "deepspeed"),
        spaces={"full": "all"},
        canonical=Canonical(("pipeline_parallel_size", "virtual_stages", "mtp_layers"), _split),
    )
    sequence_parallel: bool = knob(
        False,
        "Whether tensor-parallel ranks also divide the sequence in the norms.",
        number=17,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=TENSOR_PARALLEL,
        engines=("native", "fsdp2"),
        spaces={"3d": "all"},
    )
    async_tensor_parallel: bool = knob(
        False,
        "Whether tensor-parallel reductions overlap with computation: in chunks with their matrix products, and for input "
        "gradients with the weight gradients.",
        number=58,
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        condition=TENSOR_PARALLEL,
        spaces={"full": "all"},
        planning=Planning.TUNED_LAST,
        tuned=7,
        acts_on=("tensor",),
        plain=(False,),
        remedy="it overlaps tensor-parallel communication in its own way, or not at all",
    )
    context_parallel_method: str = knob(
        "gather",
        "How context-parallel ranks compute attention over the whole sequence: gather all-gathers keys and values, ulysses "
        "exchanges tokens for heads with all-to-all and back.",
        number=44,
        unit="name",
        numerics=Numerics.REORDERS,
        applies=Applies.REBUILD,
        choices=("gather", "ulysses"),
        condition=CONTEXT_PARALLEL,
        engines=("native", "fsdp2"),
        spaces={"full": "all"},
        plain=("gather",),
        remedy="it divides sequences in its own way",
    )
    expert_parallel_size: int = knob(
        1,
        "Number of ranks that divide the experts: data-parallel and context-parallel ranks, and tensor-parallel ranks that do "
        "not divide each expert.",
        number=23,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        minimum=1,
        spaces={"parallel": "powers_of_two", "full": "powers_of_two"},
        counts_to=lambda context, _: min(context.world_size, getattr(context.model, "num_experts", 1)),
    )
    expert_tensor_parallel_size: int = knob(
        0,
        "Number of ranks of a tensor-parallel group that divide each expert; each such part of the group has other tokens; 0: "
        "all of its ranks.",
        number=64,
        unit="ranks",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS_GROUP,
        condition=Condition(
            "tensor_parallel_size > 1 and the model has experts",
            ("tensor_parallel_size",),
            lambda config, context: config.tensor_parallel_size > 1 and getattr(context.model, "num_experts", 0) > 0,
        ),
        spaces={"parallel": (0, 1), "full": (0, 1)},
        zero=True,
        counts_to=lambda context, _: min(context.cluster.linked_devices, context.world_size),
        canonical=Canonical(
            ("tensor_parallel_size",), lambda value, config, _: 0 if value == config.tensor_parallel_size else value
        ),
        remedy="it divides experts as the rest of the model",
        exports={"megatron": "--expert-tensor-parallel-size {value}"},
    )
    shared_expert_overlap: bool = knob(
        False,
        "Whether shared experts compute while tokens travel between the ranks that divide the experts.",
        number=65,
        numerics=Numerics.EXACT,
        applies=Applies.REBUILD,
        condition=Condition(
            "expert_parallel_size > 1 and the model has shared experts",
            ("expert_parallel_size",),
            lambda config, context: config.expert_parallel_size > 1 and getattr(context.model, "shared_expert_size", 0) > 0,
        ),
        spaces={"parallel": "all", "full": "all"},
        planning=Planning.TUNED_LAST,
        tuned=10,
        acts_on=("tensor",),
        remedy="it runs shared experts before or after the others, or overlaps them in its own way",
        exports={"megatron": "--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall"},
    )
    rank_order: str = knob(
        "tp-cp-dp-pp",
        "Order of the mesh dimensions over ranks, innermost (neighbouring ranks) first.",
        number=30,
        unit="mesh order",
        numerics=Numerics.REORDERS,
        applies=Applies.PROCESS,
        choices=("tp-cp-dp-pp", "tp-cp-pp-dp"),
        condition=Condition(
            "pipeline_parallel_size > 1 and data-parallel degree > 1",
            PARALLEL_SIZES,
            lambda config, context: config.pipeline_parallel_size > 1 and config.data_parallel_size(context.world_size) > 1,
        ),
        engines=("native", "fsdp2"),
        spaces={"full": "all"},
        planning=Planning.NOT_MODELLED,
        acts_on=("data", "tensor", "pipeline"),
        distance=Distance.CHOICE,
        remedy="give the mesh these axes",
    )
