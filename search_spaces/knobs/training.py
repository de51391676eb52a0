"""Knobs that change training results: optimizer, multi-token prediction, adapters, attention windows, data schedules.

They are searched only if the user names them.
"""

from dataclasses import dataclass
from typing import Any

from search_spaces.knob import (
    ADAPTED,
    BIASED_ROUTERS,
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
from search_spaces.models.model import attention_span
from search_spaces.optimizers import OPTIMIZERS


def _window(value: Value, _: Any, context: Any) -> Value:
    """A window as long as the sequence or the model's own window is equivalent to the default."""
    span = attention_span(context.model, context.workload.sequence_length)
    return 0 if value and int(value) >= span > 0 else value


@dataclass(frozen=True, kw_only=True)
class TrainingKnobs:
    """Knobs that change training results: optimizer, adapters, attention windows, data schedules."""

    __slots__ = ()

    optimizer: str = knob(
        "adamw",
        "Optimizer; adamw8bit is AdamW with 8-bit moments, onebit_adam is AdamW whose ranks communicate only the signs of "
        "momenta, adamw_bf16 is AdamW whose bf16 parameters are rounded stochastically, without fp32 masters.",
        number=36,
        unit="name",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=OPTIMIZERS,
        searched_after="accumulation_dtype",
        plain=("adamw",),
        remedy="choose it where the optimizer is made",
    )
    onebit_warmup_steps: int = knob(
        1000,
        "Warm-up steps in which onebit_adam is AdamW with uncompressed gradients; a trial measures the steps after them.",
        number=57,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        minimum=1,
        condition=Condition("optimizer is onebit_adam", ("optimizer",), lambda config, _: config.optimizer == "onebit_adam"),
        distance=Distance.DOUBLINGS,
        remedy="no framework that is exported to has 1-bit Adam today",
    )
    attention_window: int = knob(
        0,
        "Length of the sliding attention window, the token itself included; 0: no window, or the model's own.",
        number=45,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        searched_after="attention_backend",
        engines=TORCH_ENGINES,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="mask the model's attention, with flex_attention and a BlockMask of this window",
        canonical=Canonical((), _window),
    )
    attention_global_tokens: int = knob(
        0,
        "Number of first tokens of a sequence that every token attends to in addition to its window; 0: none.",
        number=46,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=Condition("attention_window > 0", ("attention_window",), lambda config, _: config.attention_window > 0),
        engines=TORCH_ENGINES,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="add them to the mask of the window",
    )
    mtp_layers: int = knob(
        0,
        "Number of modules for multi-token prediction after the model, each predicting one token further; 0: none.",
        number=62,
        unit="layers",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        searched_after="cuda_graphs",
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="add modules that predict further tokens to the model, and their losses to its loss",
        exports={"megatron": "--mtp-num-layers {value}"},
    )
    mtp_loss_weight: float = knob(
        0.3,
        "Weight of the mean loss of the modules for multi-token prediction, which is not part of the reported loss.",
        number=63,
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=Condition("mtp_layers > 0", ("mtp_layers",), lambda config, _: config.mtp_layers > 0),
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="multiply the mean loss of those modules by it",
    )
    router_bias_update_rate: float = knob(
        0.0,
        "How far the bias of the choice of experts moves after each step, towards even loads of experts; 0: it stays.",
        number=66,
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=BIASED_ROUTERS,
        searched_after="prompt_length",
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="after each step add it times the sign of the mean load minus the load to each expert's bias",
        exports={"megatron": "--moe-router-bias-update-rate {value}"},
    )
    lora_rank: int = knob(
        0,
        "Rank of low-rank adapters (LoRA); all other parameters are frozen; 0: no adapters, all parameters are trained.",
        number=37,
        unit="columns",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        searched_after="attention_global_tokens",
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="freeze the model and put adapters of that rank beside its matrices, alpha twice the rank",
    )
    adapter_size: int = knob(
        0,
        "Width of bottleneck adapters after attention and MLP of each layer; all other parameters are frozen; 0: none.",
        number=41,
        unit="columns",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy=("freeze the model and put bottlenecks of so many columns behind attention and MLP of each layer"),
    )
    prefix_length: int = knob(
        0,
        "Number of trained prefix keys and values in each layer; all other parameters are frozen; 0: none.",
        number=42,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy=("freeze the model and train so many keys and values before those of the tokens in each layer"),
    )
    prompt_length: int = knob(
        0,
        "Number of trained prompt embeddings before the tokens; all other parameters are frozen; 0: none.",
        number=43,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="freeze the model and train so many embeddings before those of the tokens",
    )
    lora_targets: str = knob(
        "attention",
        "Which matrices of each layer have a low-rank adapter.",
        number=38,
        unit="name",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("attention", "mlp", "both"),
        condition=Condition("lora_rank > 0", ("lora_rank",), lambda config, _: config.lora_rank > 0),
        planning=Planning.FIXED,
        distance=Distance.CHOICE,
        remedy="say it where the adapters are made",
    )
    frozen_dtype: str = knob(
        "same",
        "Storage type of the layers' frozen matrices: the precision, blocks of 8-bit integers or of 4-bit NormalFloats.",
        number=39,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("same", "int8", "nf4"),
        condition=ADAPTED,
        planning=Planning.FIXED,
        distance=Distance.CHOICE,
        remedy="quantise the frozen matrices where the model is loaded",
    )
    curriculum_start_length: int = knob(
        0,
        "Sample length in the first steps, which grows linearly to the full length; 0: always the full length.",
        number=51,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        remedy="cut samples to that length in the first steps, in the data loader",
    )
    curriculum_steps: int = knob(
        0,
        "Steps until samples have their full length.",
        number=52,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=Condition(
            "curriculum_start_length > 0", ("curriculum_start_length",), lambda config, _: config.curriculum_start_length > 0
        ),
        planning=Planning.FIXED,
        remedy="let the length of samples grow by 8 tokens at a time over so many steps",
    )
    random_ltd_start_tokens: int = knob(
        0,
        "Number of random tokens that all layers except the first and the last process in the first steps (random-LTD), "
        "which grows linearly to all; 0: all.",
        number=53,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        remedy=("let layers but the first and the last see so many tokens, chosen at random, in the first steps"),
    )
    random_ltd_steps: int = knob(
        0,
        "Steps until every layer processes every token.",
        number=54,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=Condition(
            "random_ltd_start_tokens > 0", ("random_ltd_start_tokens",), lambda config, _: config.random_ltd_start_tokens > 0
        ),
        planning=Planning.FIXED,
        remedy="let the tokens that layers see grow to all over so many steps",
    )
    pack_sequences: bool = knob(
        False,
        "Whether several documents share a row instead of padding; each has separate attention and positions.",
        number=59,
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=Condition("two of the workload's documents fit into a row", (), lambda _, context: context.workload.packs),
        engines=TORCH_ENGINES,
        planning=Planning.FIXED,
        remedy=(
            "lay documents into rows in the data loader, longest first, each in the first row with room; attention and "
            "positions begin anew with each, and losses are divided by the targets of the whole step"
        ),
    )
