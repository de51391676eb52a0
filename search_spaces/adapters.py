"""Low-rank adapters as a configuration asks for them [Hu et al. 2021, LoRA]."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from search_spaces.command import CommandModel
from search_spaces.model import LORA_TARGETS, FactoryModel, Model, ModelSpec
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)

ALPHA_PER_RANK = 2
"""An adapter's result is multiplied by alpha / rank; alpha is twice the rank, whatever that is, so that no other knob hangs on
it."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value", "output"),
    "mlp": ("gate", "up", "down"),
    "both": LORA_TARGETS,
}
"""Value of `lora_targets` -> the matrices of a layer that have an adapter; "gate" where the MLP has one."""
FROZEN_BITS: Mapping[str, int] = {"same": 16, "int8": 8, "nf4": 4}
"""Value of `frozen_dtype` -> `ModelSpec.frozen_bits`, of which 16 stands for the precision's own."""
QUANTISED_BLOCK = 64
"""Neighbouring values of a row that share a scale, an fp32 number, where frozen matrices are quantised."""
ROWS = frozenset({"output", "down"})
"""Matrices of which tensor-parallel ranks divide the inputs; of the others they divide the outputs."""
ADAPTERS_REMEDY = "give our own model a smaller lora_rank, or leave it at 0 for a module that brings its own (as PEFT's)"


def adapted(model: Trained, config: TrialConfig) -> Trained:
    """The model as the configuration trains it: with adapters and all else frozen where it says so."""
    if not config.lora_rank or not isinstance(model, ModelSpec):
        return model
    targets, bits = TARGETS[config.lora_targets], FROZEN_BITS[config.frozen_dtype]
    return dataclasses.replace(model, lora_rank=config.lora_rank, lora_targets=targets, frozen_bits=bits)


def adapters_problem(config: TrialConfig, model: Model) -> str | None:
    """Why the model cannot have the adapters that the configuration asks for, in a clause; None: it can, or needs none."""
    rank = config.lora_rank
    if not rank or isinstance(model, CommandModel):  # a script's adapters are its own affair
        return None
    if isinstance(model, FactoryModel):
        return f"adapters stand beside matrices of our own, not those of {model.name}"
    if model.lora_rank:
        return f"{model.name} has adapters of rank {model.lora_rank} already"
    sizes = {name: min(inputs, outputs) for name, inputs, outputs in adapted(model, config).adapted_matrices}
    name = min(sizes, key=lambda name: sizes[name])
    if sizes[name] >= rank:
        return None
    return f"adapters of rank {rank} are wider than a matrix: {name} of {model.name} has rank {sizes[name]} at most"


def layer_adapter_elements(model: ModelSpec) -> tuple[int, int]:
    """Adapter parameters of a layer that are whole on each tensor-parallel rank, and those that the ranks divide.

    Of an `adapted` model: the factor on the side that ranks divide is divided with it, rank x (the other side) is whole.
    """
    matrices = model.adapted_matrices
    whole = sum(outputs if name in ROWS else inputs for name, inputs, outputs in matrices)
    divided = sum(inputs if name in ROWS else outputs for name, inputs, outputs in matrices)
    return model.lora_rank * whole, model.lora_rank * divided
