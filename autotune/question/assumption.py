"""Where the values of a question come from, and which of them nobody stated."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from search_spaces.knob import Value
from search_spaces.knob_values import value_text


class Source(StrEnum):
    """What a value rests on."""

    STATED = "stated"
    DERIVED = "derived"
    MEASURED = "measured"
    FRAMEWORK = "framework"
    """A framework's default."""
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from."""

    source: Source
    by: str
    """The option, or file, line and setting, that states it; what it is derived from; what measured it; the framework and its
    version; of an assumed value, the option or setting that would state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value that nobody stated."""

    name: str
    """A knob, a field of the question, or one of `LINK`, `VOCABULARY`."""
    value: Value
    stated_by: str
    """The option or setting that states it."""
    alternatives: tuple[Value, ...] = ()
    """Other plausible values, at which the answer is computed too."""
    text: str = ""
    """The value in words, where NAME=VALUE says too little."""

    def __str__(self) -> str:
        words = self.text or f"{self.name}={value_text(self.value)}"
        return f"{words} ({self.stated_by})" if self.stated_by else words


LINK = "link"
"""Bytes/s between the cards of a machine."""
VOCABULARY = "vocab_size"
"""Tokens of the model's vocabulary."""

PLAUSIBLE: Mapping[str, tuple[Value, ...]] = {
    "sequence_length": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    VOCABULARY: (32_000, 50_304, 128_256, 151_936, 256_000),
    "micro_batch_size": (1, 2, 4, 8),
    "activation_checkpointing": ("none", "selective", "full"),
    "precision": ("bf16", "fp32"),
    "accumulation_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("bf16", "fp32"),
    "optimizer": ("adamw", "adamw8bit", "sgd"),
    "zero_stage": (0, 3),
}
"""Name -> values that users' runs commonly have. Lengths are those of published fine-tuning and pre-training recipes."""


def assumption(name: str, value: Value, stated_by: str, *, most: int | None = None, text: str = "") -> Assumption:
    """An assumed value with its plausible alternatives; `most`: the largest possible number."""
    values = PLAUSIBLE.get(name, ())
    if name == "global_batch_size" and isinstance(value, int):
        values = tuple(value * factor for factor in (1, 4, 16, 64))
    possible = (other for other in values if other != value and (most is None or not isinstance(other, int) or other <= most))
    return Assumption(name=name, value=value, stated_by=stated_by, alternatives=tuple(possible), text=text)
