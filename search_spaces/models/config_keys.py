"""Typed access to the keys of a config.json, with errors that name key and remedy; and the stretching of rotary positions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from search_spaces.errors import ModelFormatError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's name of an activation -> ours."""


class ConfigKeys:
    """Typed access to a config.json. As in Hugging Face, null is equivalent to an absent key.

    Methods accept several keys: old and new spellings of one setting, of which the first present one is used. A setting without
    a default is required, unless the configuration class has one.

    Args:
        config: the keys.
        of_class: key -> its default in the configuration class, of settings for which the methods get no default.

    Raises, from every method:
        ModelFormatError: the key is missing, or its value is of the wrong type.
    """

    def __init__(self, config: Mapping[str, Any], of_class: Mapping[str, int] | None = None) -> None:
        self._config = config
        self._of_class = of_class or {}
        self.defaults_taken: dict[str, int] = {}
        """Key -> its default in the configuration class, of the keys that were asked for and are absent."""

    def size(self, *keys: str, default: int | None = None) -> int:
        """A positive integer."""
        key, value = self._find(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFormatError(key, f"{value!r} is not a positive integer", "correct it in the config.json")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer of at least 0."""
        _, value = self._find((key,), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFormatError(key, f"{value!r} is not an integer of at least 0", "correct it in the config.json")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty if the key is absent."""
        value = self._config.get(key) or []
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise ModelFormatError(key, "is not a list of integers of at least 0", "correct it in the config.json")
        return tuple(value)

    def number(self, *keys: str, default: float | None = None) -> float:
        """A positive number."""
        key, value = self._find(keys, default)
        if not _is_positive(value):
            raise ModelFormatError(key, f"{value!r} is not a positive number", "correct it in the config.json")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        _, value = self._find((key,), None)
        if not isinstance(value, list) or not all(_is_positive(item) for item in value):
            raise ModelFormatError(key, "is not a list of positive numbers", "correct it in the config.json")
        return tuple(float(item) for item in value)

    def texts(self, key: str, most: int) -> tuple[str, ...] | None:
        """A list of `most` strings, or of more, whose rest is left out; None: the key is absent."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < most or not all(isinstance(item, str) for item in value):
            raise ModelFormatError(key, f"is not a list of {most} strings, one for each layer", "correct it in the config.json")
        return tuple(value[:most])

    def flags(self, key: str, most: int) -> tuple[bool, ...] | None:
        """A list of `most` values that are 0, 1, true or false, or of more, whose rest is left out; None: the key is absent."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < most or not all(item in (0, 1) for item in value):
            raise ModelFormatError(key, f"is not a list of {most} flags, one for each layer", "correct it in the config.json")
        return tuple(bool(item) for item in value[:most])

    def table(self, key: str) -> "ConfigKeys | None":
        """The keys of a nested table; None: it is absent."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelFormatError(key, f"{value!r} is not a table", "correct it in the config.json")
        return ConfigKeys(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        key, value = self._find((key,), default)
        if not isinstance(value, bool):
            raise ModelFormatError(key, f"{value!r} is neither true nor false", "correct it in the config.json")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        """A string."""
        key, value = self._find(keys, default)
        if not isinstance(value, str):
            raise ModelFormatError(key, f"{value!r} is not a string", "correct it in the config.json")
        return value

    def activation(self, key: str, default: str) -> str:
        """An activation, by our name."""
        name = self.text(key, default=default)
        if name not in ACTIVATIONS:
            raise ModelFormatError(key, f"{name!r} is not a known activation", f"use one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def rope(self, key: str, default: float, *old_spellings: str) -> float:
        """A setting of the rotary embedding: in `rope_parameters` since transformers 5, before at the top level."""
        nested = self._config.get("rope_parameters")
        if isinstance(nested, Mapping) and nested.get(key) is not None:
            return ConfigKeys(nested).number(key, default=default)
        return self.number(key, *old_spellings, default=default)

    def must_be(self, key: str, expected: bool, why: str) -> None:
        """Refuse a setting with which no ModelSpec describes the model."""
        if self.flag(key, expected) is not expected:
            raise ModelFormatError(key, why, "use a model without this setting, or module:factory")

    def has(self, key: str) -> bool:
        """Whether the key is present, even if it is null."""
        return key in self._config

    def given(self, key: str) -> bool:
        """Whether the key is present, neither null nor empty."""
        return bool(self._config.get(key))

    def is_null(self, key: str) -> bool:
        """Whether the key is absent or null."""
        return self._config.get(key) is None

    def _find(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self._config.get(key) is not None:
                return key, self._config[key]
        if default is not None:
            return keys[0], default
        of_class = next((key for key in keys if key in self._of_class), None)
        if of_class is not None and not any(map(self.has, keys)):
            return of_class, self.defaults_taken.setdefault(of_class, self._of_class[of_class])
        raise ModelFormatError(keys[0], "is missing", "add this key to the config.json")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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
        case "default" | "dynamic" | "mrope":  # dynamic: only beyond the longest sequence; mrope: only images differ
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
