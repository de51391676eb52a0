"""Where the values of a question come from, and which of them nobody stated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
    """A knob, a field of the question, or a figure of the cluster, or `VOCABULARY`."""
    value: Value
    stated_by: str
    """The option or setting that states it."""
    alternatives: tuple[Value, ...] = ()
    """Other plausible values, at which the answer is computed too."""
    text: str = ""
    """The value in words, where NAME=VALUE says too little."""

    def __str__(self) -> str:
        words = self.text or self.words(self.value)
        return f"{words} ({self.stated_by})" if self.stated_by else words

    def words(self, value: Value) -> str:
        """`NAME=VALUE`, for this value or an alternative."""
        shown = value_text(value)
        if self.name.endswith("bandwidth"):
            shown = f"{float(value) / 1e9:g} GB/s"
        elif self.name.endswith("bytes"):
            shown = f"{float(value) / 2**30:,.0f} GiB"
        return f"{self.name}={shown}"


LINKS = ("intra_node_bandwidth", "inter_node_bandwidth")
"""Bytes/s between the cards of a machine, and from a machine to the others."""
VOCABULARY = "vocab_size"
"""Tokens of the model's vocabulary."""

PLAUSIBLE: Mapping[str, tuple[Value, ...]] = {
    "sequence_length": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    VOCABULARY: (32_000, 50_304, 128_256, 151_936, 256_000),
    "micro_batch_size": (1, 2, 4, 8),
    "activation_checkpointing": ("none", "selective", "full"),
    "precision": ("bf16", "fp32", "fp16"),
    "accumulation_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("bf16", "fp32"),
    "optimizer": ("adamw", "adamw8bit", "sgd"),
    "zero_stage": (0, 3),
    "lora_rank": (8, 16, 64),
    "lora_targets": ("attention", "both"),
    "frozen_dtype": ("same", "nf4"),
}
"""Name -> values that users' runs commonly have. Lengths are those of published fine-tuning and pre-training recipes."""


def assumption(name: str, value: Value, stated_by: str, *, most: int | None = None, text: str = "") -> Assumption:
    """An assumed value with its plausible alternatives; `most`: the largest possible number."""
    values = PLAUSIBLE.get(name, ())
    if name == "global_batch_size" and isinstance(value, int):
        values = tuple(value * factor for factor in (1, 4, 16, 64))
    possible = (other for other in values if other != value and (most is None or not isinstance(other, int) or other <= most))
    return Assumption(name=name, value=value, stated_by=stated_by, alternatives=tuple(possible), text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAt:
    """What the answer is at an alternative of an assumption."""

    assumption: Assumption
    value: Value
    verdict: str
    """Whether the configuration fits."""
    peak_memory_bytes: float
    """That the fullest rank needs, without what its allocator only keeps."""
    tokens_per_second: float | None
    """None: only its factory knows the length of a module's samples."""
    samples_per_second: float
    changes_verdict: bool
    """Whether the verdict is another one."""
    changes_rate: bool
    """Whether the tokens/s (a module's samples/s) are outside the band of the answer."""
    choice: str = ""
    """Of a plan: the knobs of the configuration that is best there; empty: the first plan remains the best."""
    distance: float
    """From the answer: the sum of the logarithms of the ratios of tokens/s and of memory."""

    def __str__(self) -> str:
        """`with NAME=VALUE: VERDICT (34 GiB, 1,200 tokens/s)`."""
        known = self.tokens_per_second is not None
        rate = f"{self.tokens_per_second:,.0f} tokens/s" if known else f"{self.samples_per_second:.4g} samples/s"
        rate = f", {rate}" if self.changes_rate else ""
        choice = f", best: {self.choice}" if self.choice else ""
        gib = f"{self.peak_memory_bytes / 2**30:.3g} GiB"
        return f"with {self.assumption.words(self.value)}: {self.verdict} ({gib}{rate}){choice}"

    @property
    def changes_answer(self) -> bool:
        """Whether verdict, rate or choice hangs on the assumption."""
        return self.changes_verdict or self.changes_rate or bool(self.choice)

    @property
    def weight(self) -> float:
        """By how much the answer changes: of two the greater is listed first."""
        return 1000.0 * self.changes_verdict + 100.0 * (self.changes_rate or bool(self.choice)) + self.distance

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        rates = ("tokens_per_second", "samples_per_second")
        names = ("value", "verdict", "peak_memory_bytes", *rates, "changes_verdict", "changes_rate", "choice")
        return {name: getattr(self, name) for name in names}


def by_assumption(assumed: Sequence[Assumption], results: Sequence[AnswerAt]) -> list[tuple[Assumption, list[AnswerAt]]]:
    """Each assumption with the answers at its alternatives, in their order; most consequential first."""
    grouped = [
        (
            item,
            sorted(
                (result for result in results if result.assumption == item),
                key=lambda result: item.alternatives.index(result.value),
            ),
        )
        for item in assumed
    ]
    return sorted(grouped, key=lambda group: -max((result.weight for result in group[1]), default=-1.0))


def assumed_document(assumed: Sequence[Assumption], results: Sequence[AnswerAt] = ()) -> list[dict[str, Any]]:
    """The JSON representation of what was assumed; `results`: what follows from the alternatives, if that was computed."""
    return [
        {
            "name": item.name,
            "value": item.value,
            "stated_by": item.stated_by,
            "text": item.text or item.words(item.value),
            "alternatives": [result.document() for result in answers],
        }
        for item, answers in by_assumption(assumed, results)
    ]


def assumed_lines(assumed: Sequence[Assumption], results: Sequence[AnswerAt] = ()) -> list[str]:
    """The printed block: a title and a line for each assumption; empty: nothing was assumed.

    A line is `NAME=VALUE (OPTION)`, and what the answer would be at the alternatives at which it differs most.
    """
    lines = []
    for item, answers in by_assumption(assumed, results):
        clauses = "; ".join(str(result) for result in _most_telling(answers))
        lines.append(f"  {item}{f': {clauses}' if clauses else ''}")
    return ["assumed, because it was not stated:", *lines] if lines else []


def _most_telling(answers: Sequence[AnswerAt]) -> list[AnswerAt]:
    """The nearest alternatives with another verdict, then those with the lowest and the highest rate."""
    changing = [item for item in answers if item.changes_answer]
    nearest = sorted((item for item in changing if item.changes_verdict), key=lambda item: item.distance)
    by_rate = sorted(
        changing, key=lambda item: item.samples_per_second if item.tokens_per_second is None else item.tokens_per_second
    )
    # Alternatives that the line of an assumption names.
    values = list(dict.fromkeys(item.value for item in (*nearest[:1], *by_rate[:1], *by_rate[-1:])))[:3]
    return [item for item in changing if item.value in values]
