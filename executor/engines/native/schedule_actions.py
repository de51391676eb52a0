"""What the ranks of a pipeline compute in a step. Plain data: who draws it needs no torch for it."""

from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """What a stage does with a micro-batch. The values are exported: never rename one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and of weights in one."""
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank computes."""

    stage: int
    kind: ActionKind
    micro_batch: int
