"""How rotary positions are stretched beyond the length that a model was first trained on."""

import math
from dataclasses import dataclass
from enum import StrEnum

from search_spaces.errors import ModelFormatError
from search_spaces.models.config_keys import ConfigKeys


class RopeKind(StrEnum):
    """`rope_type` of Hugging Face."""

    LINEAR = "linear"
    """All frequencies are divided by the factor."""
    LLAMA3 = "llama3"
    """Low frequencies are divided by the factor, high ones are kept, those between are blended [Grattafiori et al. 2024]."""
    YARN = "yarn"
    """The same with a ramp over the dimensions, and a factor of cosines and sines [Peng et al. 2023, YaRN, 3]."""
    LONGROPE = "longrope"
    """Each dimension has its own factor [Ding et al. 2024, LongRoPE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """A scaling of the rotations; fields that its kind does not use keep their defaults."""

    kind: RopeKind
    factor: float = 1.0
    original_length: int = 0
    """Tokens of the longest sequence before scaling."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of YaRN's ramp are whole dimensions."""
    attention_factor: float = 1.0
    """Factor of cosines and sines."""
    short_factors: tuple[float, ...] = ()
    """LongRoPE's factors of sequences of up to `original_length` tokens, one for each pair of dimensions."""
    long_factors: tuple[float, ...] = ()
    """Those of longer sequences."""


def read_rope_scaling(keys: ConfigKeys, longest: int) -> RopeScaling | None:
    """The scaling in `rope_parameters` or `rope_scaling` of a config.json; None: there is none.

    `longest`: `max_position_embeddings`.

    Raises:
        ModelFormatError: the kind is unknown, or one of its keys is missing or of the wrong type.
    """
    table = keys.table("rope_parameters") or keys.table("rope_scaling")
    first = keys.size("original_max_position_embeddings", default=longest)
    return None if table is None else rope_scaling_of(table, longest, first)


def rope_scaling_of(table: ConfigKeys, longest: int, first: int = 0) -> RopeScaling | None:
    """The scaling in a table of settings of rotations.

    `first`: default of the length before scaling; 0: `longest`. Raises what `read_rope_scaling` raises.
    """
    original = table.size("original_max_position_embeddings", default=first or longest)
    kind = table.text("rope_type", "type", default="default")
    match kind:
        case "default" | "dynamic":  # dynamic: only beyond the longest sequence
            return None
        case RopeKind.LINEAR:
            return RopeScaling(kind=RopeKind.LINEAR, factor=table.number("factor"))
        case RopeKind.LLAMA3:
            return RopeScaling(
                kind=RopeKind.LLAMA3,
                factor=table.number("factor"),
                original_length=original,
                low_frequency_factor=table.number("low_freq_factor"),
                high_frequency_factor=table.number("high_freq_factor"),
            )
        case RopeKind.YARN:
            return _yarn(table, longest, original)
        case RopeKind.LONGROPE | "su":
            return _longrope(table, longest, original)
    raise ModelFormatError("rope_type", f"{kind!r} is not supported", f"use one of default, {', '.join(RopeKind)}")


def _yarn(table: ConfigKeys, longest: int, original: int) -> RopeScaling:
    factor = table.number("factor", default=longest / original)
    default = yarn_magnitude(factor, 1.0)
    if table.given("mscale") and table.given("mscale_all_dim"):
        default = yarn_magnitude(factor, table.number("mscale")) / yarn_magnitude(factor, table.number("mscale_all_dim"))
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_length=original,
        beta_fast=table.number("beta_fast", default=32.0),
        beta_slow=table.number("beta_slow", default=1.0),
        truncate=table.flag("truncate", True),
        attention_factor=table.number("attention_factor", default=default),
    )


def yarn_magnitude(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys [Peng et al. 2023, 3.4], weighted as in DeepSeek's configurations."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(table: ConfigKeys, longest: int, original: int) -> RopeScaling:
    factor = table.number("factor", default=longest / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind=RopeKind.LONGROPE,
        factor=factor,
        original_length=original,
        attention_factor=table.number("attention_factor", default=default),
        short_factors=table.numbers("short_factor"),
        long_factors=table.numbers("long_factor"),
    )
