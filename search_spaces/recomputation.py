"""Recomputation by module: the names of `recompute_modules`, and their text."""

from search_spaces.errors import KnobValueError

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
