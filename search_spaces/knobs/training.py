"""Knobs that change the results of training: optimizer, adapters, attention windows, schedules of the data.

They are only searched where the user names them.
"""

from dataclasses import dataclass
from typing import Any

from search_spaces.knob import TORCH_ENGINES, Applies, Canonical, Distance, Numerics, Planning, Value, knob
from search_spaces.knobs import conditions
from search_spaces.models.model import tokens_seen
from search_spaces.optimizers import OPTIMIZERS


def _window(value: Value, _: Any, context: Any) -> Value:
    """A window of the whole sequence, or as long as the model's own: the default."""
    seen = tokens_seen(context.model, context.workload.sequence_length)
    return 0 if value and int(value) >= seen > 0 else value


@dataclass(frozen=True, kw_only=True)
class TrainingKnobs:
    """What is trained: optimizer, adapters, attention windows, schedules of the data."""

    __slots__ = ()

    optimizer: str = knob(
        "adamw",
        "What turns gradients into updates, and keeps state for it; adamw8bit is AdamW with its moments in 8 bits, "
        "onebit_adam AdamW whose ranks send signs of momenta.",
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
        "First steps of onebit_adam, in which it is AdamW and sends whole gradients; a trial measures the steps after them.",
        number=57,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        minimum=1,
        condition=conditions.ONEBIT,
        distance=Distance.DOUBLINGS,
        remedy="no framework that is exported to has 1-bit Adam today",
    )
    attention_window: int = knob(
        0,
        "Tokens that a token sees back, itself included; 0: all, or as many as the model's own window.",
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
        "First tokens of a sequence that every token sees besides its window; 0: none.",
        number=46,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=conditions.WINDOWED,
        engines=TORCH_ENGINES,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="add them to the mask of the window",
    )
    lora_rank: int = knob(
        0,
        "Rank of low-rank adapters beside frozen matrices, all that is trained then; 0: every parameter is trained.",
        number=37,
        unit="columns",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        distance=Distance.DOUBLINGS,
        remedy="freeze the model and put adapters of that rank beside its matrices, alpha twice the rank",
    )
    adapter_size: int = knob(
        0,
        "Columns of the bottlenecks behind attention and MLP of each layer, all that is trained then; 0: none.",
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
        "Trained keys and values before those of the tokens in each layer, all that is trained then; 0: none.",
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
        "Trained embeddings before those of the tokens, all that is trained then; 0: none.",
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
        "Which matrices of each layer have an adapter.",
        number=38,
        unit="name",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("attention", "mlp", "both"),
        condition=conditions.LOW_RANK,
        planning=Planning.FIXED,
        distance=Distance.CHOICE,
        remedy="say it where the adapters are made",
    )
    frozen_dtype: str = knob(
        "same",
        "What frozen matrices of layers are kept in: the precision, blocks of 8-bit integers or of 4-bit NormalFloats.",
        number=39,
        unit="dtype",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        choices=("same", "int8", "nf4"),
        condition=conditions.ADAPTED,
        planning=Planning.FIXED,
        distance=Distance.CHOICE,
        remedy="quantise the frozen matrices where the model is loaded",
    )
    curriculum_start_length: int = knob(
        0,
        "Length of the first steps' samples, which grows linearly to whole ones; 0: all samples are whole.",
        number=51,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        remedy="cut samples to that length in the first steps, in the data loader",
    )
    curriculum_steps: int = knob(
        0,
        "Steps of the run until samples are whole.",
        number=52,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=conditions.LENGTHENS,
        planning=Planning.FIXED,
        remedy="let the length of samples grow by 8 tokens at a time over so many steps",
    )
    random_ltd_start_tokens: int = knob(
        0,
        "Tokens, chosen at random, that layers but the first and the last see in the first steps (random-LTD), which grow "
        "linearly to all; 0: all.",
        number=53,
        unit="tokens",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        planning=Planning.FIXED,
        remedy=("let layers but the first and the last see so many tokens, chosen at random, in the first steps"),
    )
    random_ltd_steps: int = knob(
        0,
        "Steps of the run until every layer sees every token.",
        number=54,
        unit="steps",
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=conditions.DROPS_TOKENS,
        planning=Planning.FIXED,
        remedy="let the tokens that layers see grow to all over so many steps",
    )
    pack_sequences: bool = knob(
        False,
        "Whether several documents share a row, each with attention and positions of its own, instead of padding.",
        number=59,
        numerics=Numerics.CHANGES,
        applies=Applies.REBUILD,
        condition=conditions.PACKS,
        engines=TORCH_ENGINES,
        planning=Planning.FIXED,
        remedy=(
            "lay documents into rows in the data loader, longest first, each in the first row with room; attention and "
            "positions begin anew with each, and losses are divided by the targets of the whole step"
        ),
    )
