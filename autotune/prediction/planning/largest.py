"""The largest sequence, micro-batch or model for which some configuration of a space fits."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import numpy as np

from autotune.errors import NothingFeasibleError, RequestError
from autotune.prediction.cases.grid_cases import GridCases, Products, placing_knobs
from autotune.prediction.equations.memory import memory
from autotune.prediction.planning.memory_fit import MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.scan import Bounds, require_within, uniform_parts, without_buckets
from autotune.question.assumption import Origin, Source
from search_spaces.errors import IllegalConfigError
from search_spaces.models.model import MOST_LAYERS, FactoryModel, ModelSpec, Position

SHORTEST, LONGEST = 128, 1 << 24
"""Range of sequence lengths that are tried, in tokens."""


class Dimension(StrEnum):
    """The quantity that is maximised."""

    SEQUENCE_LENGTH = "sequence_length"
    """Tokens per sample, eight sizes per doubling."""
    MICRO_BATCH_SIZE = "micro_batch_size"
    """Samples that a rank processes at once, a divisor of the global batch."""
    MODEL = "model"
    """The model with depth and width scaled equally; heads keep their size, and key-value heads their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits."""

    dimension: Dimension
    value: int
    """Tokens, samples, or parameters."""
    next: int | None
    """The smallest size found not to fit; None: all sizes tried fit."""
    question: Question
    """The question with this size."""


def largest(question: Question, dimension: str, probability: float, bounds: Bounds | None = None) -> Largest:
    """Return the largest size for which some configuration fits with the probability.

    Raises:
        NothingFeasibleError: not even the smallest fits.
        RequestError: the dimension is unknown.
    """
    if dimension not in list(Dimension):
        raise RequestError("max", f"{dimension!r} is not known", f"use one of {', '.join(Dimension)}")
    target_dimension = Dimension(dimension)
    sizes = _sizes(question, target_dimension)

    def fits(count: int) -> bool:
        require_within(bounds or Bounds(), 0)
        size = sizes[count - 1]
        return anything_fits(size, memory_limits_of(size, probability), bounds or Bounds())

    last = largest_count(fits, len(sizes)) - 1
    if last < 0:
        least = _value(sizes[0], target_dimension) if sizes else 0
        raise NothingFeasibleError(
            "max", f"not even a {target_dimension.value} of {least:,} fits", "plan for more devices, or pin fewer knobs"
        )
    answered = dataclasses.replace(
        sizes[last],
        assumed=tuple(item for item in question.assumed if item.name != target_dimension),
        origins={**question.origins, target_dimension.value: Origin(Source.DERIVED, "--max")},
    )
    above = _value(sizes[last + 1], target_dimension) if last + 1 < len(sizes) else None
    return Largest(dimension=target_dimension, value=_value(sizes[last], target_dimension), next=above, question=answered)


def anything_fits(question: Question, limits: MemoryLimits, bounds: Bounds) -> bool:
    """Whether any configuration of the question's space fits, with default buckets."""
    try:
        space = space_of(question)
    except IllegalConfigError:  # pins may only be compatible with other sizes
        return False
    count = 0
    for part in uniform_parts(without_buckets(space)):
        products = Products(part, placing_knobs(part))
        cases = GridCases(part, question.model, question.engine, products, question.arguments)
        for product in products.blocks():
            count += product.count
            require_within(bounds, count)
            needed = memory(cases.of(product), question.rates)
            if np.any(limits.holds(needed.needed, needed.host) & product.legal):
                return True
    return False


def largest_count(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest count that fits, by bisection: assumes that a larger one does not fit if a smaller one does not; 0: not even
    1."""
    low, high = 0, ceiling + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sizes(question: Question, dimension: Dimension) -> list[Question]:
    """The question at every size, smallest first."""
    model = question.model
    match dimension:
        case Dimension.SEQUENCE_LENGTH if isinstance(model, FactoryModel):
            raise _described_as_it_is(model)
        case Dimension.SEQUENCE_LENGTH if isinstance(model, ModelSpec):
            longest = max(question.document_lengths, default=0)
            lengths = [length for length in _lengths(model) if length >= longest]
            return [dataclasses.replace(question, sequence_length=length) for length in lengths]
        case Dimension.MICRO_BATCH_SIZE:
            pins = dict(question.pins)
            return [
                dataclasses.replace(question, pins=pins | {"micro_batch_size": (size,)})
                for size in _divisors(question.global_batch_size)
            ]
        case _:
            return sizes_of_models(question)


def sizes_of_models(question: Question) -> list[Question]:
    """The question with its model's depth and width times 1/16 to 16: parameters in steps of 9 %, smallest first.

    Raises:
        RequestError: the model is a user's module.
    """
    if isinstance(question.model, FactoryModel):
        raise _described_as_it_is(question.model)
    every = [scaled(question.model, 2.0 ** (step / 24)) for step in range(-96, 97)]
    models = {(model.num_layers, model.num_attention_heads): model for model in every}
    ordered = sorted(models.values(), key=lambda model: model.parameter_count)
    return [dataclasses.replace(question, model=model) for model in ordered]


def _described_as_it_is(model: FactoryModel) -> RequestError:
    problem = f"{model.name} is described as it is, with its own batches"
    return RequestError("max", problem, f"use {Dimension.MICRO_BATCH_SIZE}, or give a preset or a config.json")


def scaled(model: ModelSpec, scale: float) -> ModelSpec:
    """The model with `scale` times its layers and its width, in whole heads for each key-value head."""
    group = model.num_key_value_heads
    heads = max(round(model.num_attention_heads * scale / group), 1) * group
    hidden = heads * model.hidden_size // model.num_attention_heads
    ffn = max(round(model.ffn_hidden_size / model.hidden_size * hidden / 256), 1) * 256
    layers = min(max(round(model.num_layers * scale), 1), MOST_LAYERS)
    same = (layers, heads) == (model.num_layers, model.num_attention_heads)
    return model if same else dataclasses.replace(
        model, name=f"{model.name} x {scale:.3g}", num_layers=layers, num_attention_heads=heads, hidden_size=hidden,
        ffn_hidden_size=ffn,
    )  # fmt: skip


def _lengths(model: ModelSpec) -> list[int]:
    most = model.sequence_length if model.position is Position.LEARNED else LONGEST
    eighths = [
        2**power * part // 8 for power in range(SHORTEST.bit_length() - 1, LONGEST.bit_length()) for part in range(8, 16)
    ]
    return [length for length in eighths if length <= most] or [most]


def _divisors(number: int) -> list[int]:
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def _value(question: Question, dimension: Dimension) -> int:
    match dimension:
        case Dimension.SEQUENCE_LENGTH:
            return question.sequence_length
        case Dimension.MICRO_BATCH_SIZE:
            (size,) = cast(tuple[int], question.pins["micro_batch_size"])
            return size
        case Dimension.MODEL:
            return question.model.parameter_count
