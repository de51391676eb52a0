"""A training script of the user's own: how it is called, and how it tells what it measured."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from search_spaces.errors import ModelFormatError, PatternError
from search_spaces.patterns import compiled

LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
"""Whose variables a rank's script finds."""
PLUGINS = ("", "deepspeed", "fsdp")
"""What accelerate is told to train with; empty: plain data parallelism."""
STARTERS = (*LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "mpirun", "mpiexec", "srun", "horovodrun")
"""Programs that start ranks themselves; here a process of each rank is started already."""
RATES = ("samples_per_second", "step_seconds", "step_milliseconds", "tokens_per_second", "tokens_per_second_per_device")
"""Groups of a pattern that tell how fast a step was; one of them is needed."""
READINGS = (*RATES, "loss", "waited")
"""All groups that a pattern may have."""
MOST_VARIANTS = 256
"""Combinations of the values of a script's own knobs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"[^\s\x00-\x1f]+")

Values = dict[str, tuple[str, ...]]
"""Name -> the values that are searched, as text; the first is the one to begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandModel:
    """A training script that is run as it is, once on every rank.

    Raises:
        ModelFormatError: a field cannot be used; the line names it, with the remedy.
    """

    arguments: tuple[str, ...]
    """The words of the command; `search_spaces.placeholders` tells what `{…}` in them stands for."""
    launcher: str = "torchrun"
    """One of `LAUNCHERS`."""
    plugin: str = ""
    """With the launcher accelerate, one of `PLUGINS`."""
    folder: str = ""
    """Where it runs, the same on every node; empty: where the ranks run."""
    parameter_count: int = 0
    """As the user states it; 0: not known. FLOPs are reported where it is known and `has_sequences`. The search begins with a
    model of this size in mind."""
    pattern: str | None = None
    """A regular expression that is looked for in each line of the output, with named groups of `READINGS`; None: the script
    reports (`autotune.report`)."""
    script_knobs: Values = field(default_factory=dict)
    """Placeholders of the script's own, such as `num_workers`, and their values."""
    environment_knobs: Values = field(default_factory=dict)
    """Environment variables and their values."""
    report_seconds: float | None = None
    """Seconds from start to the first report, after which a script that runs counts as silent; None: half a trial's limit."""

    def __post_init__(self) -> None:
        self._require_words()
        _require(
            self.launcher in LAUNCHERS, "launcher", f"{self.launcher!r} is not known", f"use one of {', '.join(LAUNCHERS)}"
        )
        plugged = self.plugin in PLUGINS and (not self.plugin or self.launcher == "accelerate")
        _require(plugged, "plugin", f"{self.plugin!r} is not accelerate's", "use deepspeed or fsdp with --launcher accelerate")
        known = isinstance(self.parameter_count, int) and self.parameter_count >= 0
        _require(known, "parameter_count", f"{self.parameter_count!r} is no number of parameters", "give 125M, or leave it out")
        seconds = self.report_seconds
        _require(
            seconds is None or (isinstance(seconds, int | float) and 0 < seconds < math.inf),
            "report_seconds", f"{seconds!r} is not a positive number", "give seconds above 0",
        )  # fmt: skip
        if self.pattern is not None:
            _require_pattern(self.pattern)
        for name in ("script_knobs", "environment_knobs"):
            object.__setattr__(self, name, _checked_values(name, getattr(self, name)))
        both = sorted(set(self.script_knobs) & set(self.environment_knobs))
        _require(not both, "environment_knobs", f"{', '.join(both)} is a script knob too", "give one of them another name")
        count = math.prod(map(len, self._own_knobs().values()))
        problem = f"their values make {count} combinations, more than {MOST_VARIANTS}"
        _require(count <= MOST_VARIANTS, "script_knobs", problem, "give fewer values")

    @property
    def name(self) -> str:
        """The script's file, or the module: what people call it."""
        return PurePath(self.arguments[program_at(self.arguments) or 0]).name

    @property
    def variants(self) -> tuple[str, ...]:
        """Every combination of the values of its own knobs, as the knob `script` holds them; empty: it has none."""
        own = self._own_knobs()
        if not own:
            return ()
        combinations = itertools.product(*own.values())
        return tuple(" ".join(f"{name}={value}" for name, value in zip(own, row, strict=True)) for row in combinations)

    @property
    def has_sequences(self) -> bool:
        """Whether a sample is known to be a sequence: the command names its length, or the pattern reads tokens."""
        return any("{sequence_length}" in word for word in self.arguments) or "?P<tokens_per_second" in (self.pattern or "")

    def _own_knobs(self) -> Values:
        return {**self.script_knobs, **self.environment_knobs}

    def _require_words(self) -> None:
        words = self.arguments
        good = bool(words) and all(isinstance(word, str) and "\0" not in word for word in words) and bool(words[0])
        _require(good, "arguments", f"{list(words)!r} is no command", "write it after --, as in -- python train.py")
        starts = sorted({PurePath(words[0]).name, words[program_at(words) or 0]} & set(STARTERS))
        remedy = "leave it and its options out (see --launcher), and begin with python and the script"
        _require(not starts, "arguments", f"{', '.join(starts)} would start ranks of its own on each rank", remedy)


def program_at(words: Sequence[str]) -> int | None:
    """Where the script's file stands among the words, or the module after `-m`: what comes later is the script's own. None:
    there is neither."""
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words):
            return at + 1
        if word.endswith((".py", ".sh")):
            return at
    return None


def variant_values(variant: str) -> dict[str, str]:
    """The values in one of `CommandModel.variants`."""
    return dict(pair.split("=", 1) for pair in variant.split())


def _require_pattern(pattern: str) -> None:
    try:
        groups = compiled(pattern).groups
    except PatternError as error:
        raise _wrong("pattern", error.problem, error.remedy) from None
    unknown = sorted(groups - set(READINGS))
    _require(not unknown, "pattern", f"the group {', '.join(unknown)} is not known", f"name groups of {', '.join(READINGS)}")
    example = r"write for example 'samples_per_second=(?P<samples_per_second>[\d.]+)'"
    _require(bool(groups & set(RATES)), "pattern", "has no group that tells how fast a step was", example)


def _checked_values(field_name: str, given: Mapping[str, object]) -> Values:
    """The values as text, each once."""
    checked: Values = {}
    for name, values in given.items():
        where = f"{field_name}.{name}"
        _require(bool(_NAME.fullmatch(name)), where, "is no name", "use letters, digits and _")
        listed = values if isinstance(values, list | tuple) else (values,)
        texts = tuple(dict.fromkeys(_text(value) for value in listed))
        good = bool(texts) and all(_VALUE.fullmatch(text) for text in texts)
        _require(good, where, f"{list(texts)} are no values", "give at least one, without spaces, as in num_workers=0,2,4")
        checked[name] = texts
    return checked


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require(holds: bool, field_name: str, problem: str, remedy: str) -> None:
    if not holds:
        raise _wrong(field_name, problem, remedy)


def _wrong(field_name: str, problem: str, remedy: str) -> ModelFormatError:
    return ModelFormatError(f"command.{field_name}", problem, remedy)
