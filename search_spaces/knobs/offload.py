"""Offloading to host memory or files."""

from dataclasses import dataclass

from search_spaces.knob import Applies, Numerics, knob
from search_spaces.knobs import conditions


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
        condition=conditions.UNIFORM_OFFLOADING,
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
        condition=conditions.OFFLOADS,
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
