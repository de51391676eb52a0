"""The process of a rank: allocator, environment variables, garbage collection, CPU cores."""

from dataclasses import dataclass

from search_spaces.environment import environment_text
from search_spaces.knob import EVERY_ENGINE, Applies, Distance, Numerics, Planning, knob
from search_spaces.knobs import conditions


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
        condition=conditions.GROWS_SEGMENTS,
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
        condition=conditions.HAS_NUMA_NODES,
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
