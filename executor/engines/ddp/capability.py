"""The knobs that the ddp engine honours. Does not import torch, since the search reads it."""

from executor.engines.shared_rules import COMPILE_SELECTIVE
from search_spaces.capability import Capability, honoured_by

DDP = Capability(
    engine="ddp",
    knobs=honoured_by(
        "ddp",
        {
            "precision": ("fp32", "bf16", "fp64"),
        },
    ),
    combinations=(COMPILE_SELECTIVE,),
)
