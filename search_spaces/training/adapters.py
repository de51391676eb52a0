"""Parameter-efficient training of a frozen model by adapters or virtual tokens, and the model with a configuration."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from search_spaces.knob import METHODS, VIRTUAL_TOKENS
from search_spaces.models.command import CommandModel
from search_spaces.models.model import LORA_TARGETS, FactoryModel, Model, ModelSpec
from search_spaces.models.pipeline import predicting
from search_spaces.training.windows import windowed
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)

ALPHA_PER_RANK = 2
"""An adapter's output is multiplied by alpha / rank; alpha is always twice the rank, so that other knobs need not change with
it."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value", "output", "query_down", "key_value_down", "key_value"),
    "mlp": ("gate", "up", "down"),
    "both": LORA_TARGETS,
}
"""Value of `lora_targets` -> the matrices of a layer with an adapter, of those that the layer has."""
FROZEN_BITS: Mapping[str, int] = {"same": 16, "int8": 8, "nf4": 4}
"""Value of `frozen_dtype` -> `ModelSpec.frozen_bits`, where 16 stands for the precision."""
FROZEN_BLOCK = 64
"""Consecutive values of a row of a quantised frozen matrix that share one fp32 scale."""
ROWS, WHOLE = frozenset({"output", "down"}), frozenset({"query_down", "key_value_down"})
"""Matrices whose inputs tensor-parallel ranks divide, and those that each of them holds whole; of the others they divide the
outputs."""


def adapted(model: Trained, config: TrialConfig) -> Trained:
    """The model with the configuration's adapters and all else frozen; unchanged if it has none."""
    if not adapts(config) or not isinstance(model, ModelSpec):
        return model
    methods = {name: getattr(config, name) for name in METHODS}
    targets, bits = TARGETS[config.lora_targets], FROZEN_BITS[config.frozen_dtype]
    return dataclasses.replace(model, **methods, lora_targets=targets, frozen_bits=bits)


def adapts(config: TrialConfig) -> bool:
    """Whether the configuration freezes the model and trains adapters or virtual tokens."""
    return max(_sizes(config)) > 0


def together_problem(config: TrialConfig) -> str | None:
    """The problem of several methods at once, in a clause; None: there is at most one."""
    methods = [f"{name}={value}" for name, value in zip(METHODS, _sizes(config), strict=True) if value]
    return f"{' and '.join(methods)} are different methods to train a frozen model" if len(methods) > 1 else None


def tokens_problem(config: TrialConfig, sequence_length: int) -> str | None:
    """The problem of more virtual tokens than real ones, in a clause; None: there is no such problem."""
    for name in VIRTUAL_TOKENS:
        count = getattr(config, name)
        if count > sequence_length:
            return f"{name}={count} is longer than the samples of {sequence_length} tokens"
    return None


def adapters_problem(config: TrialConfig, model: Model) -> str | None:
    """Why the model cannot have the configuration's adapters, in a clause; None: it can, or needs none."""
    if not adapts(config) or isinstance(model, CommandModel):  # a script handles its own adapters
        return None
    if isinstance(model, FactoryModel):
        return f"adapters and virtual tokens are only supported for our own models, not for {model.name}"
    if model.adapts:
        rank = f" of rank {model.lora_rank}" if model.lora_rank else ""
        return f"{model.name} has adapters{rank} already"
    if config.adapter_size > model.hidden_size:
        return f"bottlenecks of {config.adapter_size} columns are wider than {model.name}, which has {model.hidden_size}"
    if config.prefix_length and model.latent is not None:
        return f"keys and values of a prefix are those of whole heads, and {model.name} has latent attention"
    if config.lora_rank and config.lora_targets != "attention" and (model.shared_expert_size or any(model.dense_layers)):
        kind = "shared experts or dense layers beside those with experts, which"
        return f"low-rank adapters of MLPs (lora_targets={config.lora_targets}) are not supported for {kind} {model.name} has"
    return _rank_problem(config, model) if config.lora_rank else None


def _rank_problem(config: TrialConfig, model: ModelSpec) -> str | None:
    rank = config.lora_rank
    sizes = {name: min(inputs, outputs) for name, inputs, outputs in adapted(model, config).adapted_matrices}
    name = min(sizes, key=lambda name: sizes[name])
    if sizes[name] >= rank:
        return None
    return f"adapters of rank {rank} are wider than a matrix: {name} of {model.name} has rank {sizes[name]} at most"


def layer_adapter_elements(model: ModelSpec) -> tuple[int, int]:
    """Trained elements of a layer that each tensor-parallel rank holds whole, and those that the ranks divide.

    `model` must be `adapted`. Low-rank adapters: the factor on the divided side is divided too, the other factor is whole; both
    are for a matrix that is whole. Bottlenecks are whole; prefixes are divided by heads; a prompt does not belong to a layer.
    """
    matrices = model.adapted_matrices
    divided = sum(inputs if name in ROWS else outputs for name, inputs, outputs in matrices if name not in WHOLE)
    whole = sum(inputs + outputs for _, inputs, outputs in matrices) - divided
    prefix = 2 * model.prefix_length * model.num_key_value_heads * model.head_dim
    return model.lora_rank * whole + model.bottleneck_parameters, model.lora_rank * divided + prefix


def _sizes(config: TrialConfig) -> tuple[int, ...]:
    return config.lora_rank, config.adapter_size, config.prefix_length, config.prompt_length


def configured(model: Trained, config: TrialConfig) -> Trained:
    """The model with the configuration's adapters, attention window and modules for multi-token prediction."""
    return predicting(windowed(adapted(model, config), config), config)
