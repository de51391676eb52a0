"""A user's training script: how it is launched, and how it reports its measurements."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from search_spaces.errors import ModelFormatError, PatternError
from search_spaces.patterns import compiled

LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
"""Launchers whose environment variables are set for a rank's script."""
PLUGINS = ("", "deepspeed", "fsdp")
"""Accelerate's plugin; empty: plain data parallelism."""
TRIAL_FOLDERS = ("auto", "none", "link", "copy")
"""Where a trial runs: in the user's folder (none), in a folder of links to it, or in a copy of it. `auto`: link on one host."""
STEP_TIMES = ("step_seconds", "step_milliseconds", "steps_per_second")
"""Pattern groups that report the time of a step, whatever samples it trains."""
RATES = ("samples_per_second", "micro_batch_seconds", *STEP_TIMES, "tokens_per_second", "tokens_per_second_per_device")
"""Pattern groups that report the speed of a step; at least one is required."""
READINGS = (*RATES, "samples", "tokens", "loss", "waited")
"""All allowed pattern groups."""
MOST_VARIANTS = 256
"""Maximum combinations of the values of the script's own knobs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Values = dict[str, tuple[str, ...]]
"""Name -> the values that are searched, as text; the first is the starting value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandModel:
    """A training script that runs unmodified, once on every rank.

    Raises:
        ModelFormatError: a field is invalid; the message names it, with the remedy.
    """

    arguments: tuple[str, ...]
    """The words of the command; `search_spaces.placeholders` describes what `{…}` in them stands for."""
    launcher: str = "torchrun"
    """One of `LAUNCHERS`."""
    plugin: str = ""
    """One of `PLUGINS`; only with the launcher accelerate."""
    folder: str = ""
    """Working directory, the same on every node; empty: that of the ranks."""
    trial_folder: str = "auto"
    """One of `TRIAL_FOLDERS`."""
    parameter_count: int = 0
    """Stated by the user; 0: unknown. FLOPs are reported if it is known and `has_sequences`. The search starts with
    configurations for a model of this size."""
    pattern: str | None = None
    """A regular expression that is searched in each output line, with named groups from `READINGS`; None: the script reports
    by itself (`autotune.report`)."""
    template: str = ""
    """Text of a configuration file with placeholders, which is filled in for each trial; empty: there is none."""
    template_name: str = ""
    """Name of the filled file, such as config.json."""
    script_knobs: Values = field(default_factory=dict)
    """The script's own placeholders, such as `num_workers`, and their values."""
    environment_knobs: Values = field(default_factory=dict)
    """Environment variables and their values."""
    report_seconds: float | None = None
    """Maximum seconds from start to the first report, after which the script counts as silent; None: half a trial's limit."""

    def __post_init__(self) -> None:
        self._require_words()
        _require(
            self.launcher in LAUNCHERS, "launcher", f"{self.launcher!r} is not known", f"use one of {', '.join(LAUNCHERS)}"
        )
        plugged = self.plugin in PLUGINS and (not self.plugin or self.launcher == "accelerate")
        _require(plugged, "plugin", f"{self.plugin!r} is not accelerate's", "use deepspeed or fsdp with --launcher accelerate")
        way = self.trial_folder
        _require(way in TRIAL_FOLDERS, "trial_folder", f"{way!r} is not known", f"use one of {', '.join(TRIAL_FOLDERS)}")
        is_count = isinstance(self.parameter_count, int) and self.parameter_count >= 0
        _require(
            is_count, "parameter_count", f"{self.parameter_count!r} is not a number of parameters", "give 125M, or leave it out"
        )
        seconds = self.report_seconds
        _require(
            seconds is None or (isinstance(seconds, int | float) and 0 < seconds < math.inf),
            "report_seconds", f"{seconds!r} is not a positive number", "give seconds above 0",
        )  # fmt: skip
        if self.pattern is not None:
            _require_pattern(self.pattern)
        file_name = self.template_name
        named = bool(file_name) == bool(self.template) and file_name == PurePath(file_name or "x").name * bool(file_name)
        _require(named, "template_name", f"{file_name!r} is not the name of a file", "give for example config.json")
        for name in ("script_knobs", "environment_knobs"):
            object.__setattr__(self, name, _checked_values(name, getattr(self, name)))
        shared_names = sorted(set(self.script_knobs) & set(self.environment_knobs))
        _require(
            not shared_names,
            "environment_knobs",
            f"{', '.join(shared_names)} is a script knob too",
            "give one of them another name",
        )
        count = math.prod(map(len, self._own_knobs().values()))
        problem = f"their values make {count} combinations, more than {MOST_VARIANTS}"
        _require(count <= MOST_VARIANTS, "script_knobs", problem, "give fewer values")

    @property
    def name(self) -> str:
        """File name of the script, or the module."""
        return PurePath(self.arguments[program_at(self.arguments) or 0]).name

    @property
    def variants(self) -> tuple[str, ...]:
        """All combinations of the values of its own knobs, as values of the knob `script`; empty: it has none."""
        own_knobs = self._own_knobs()
        if not own_knobs:
            return ()
        combinations = itertools.product(*own_knobs.values())
        return tuple(" ".join(f"{name}={value}" for name, value in zip(own_knobs, row, strict=True)) for row in combinations)

    @property
    def has_sequences(self) -> bool:
        """Whether a sample is known to be a sequence: the command uses its length, or the pattern reads tokens."""
        words = (*self.arguments, self.template)
        return any("{sequence_length}" in word for word in words) or "?P<tokens_per_second" in (self.pattern or "")

    def _own_knobs(self) -> Values:
        return {**self.script_knobs, **self.environment_knobs}

    def _require_words(self) -> None:
        words = self.arguments
        good = bool(words) and all(isinstance(word, str) and "\0" not in word for word in words) and bool(words[0])
        _require(good, "arguments", f"{list(words)!r} is not a command", "write it after --, as in -- python train.py")
        # Programs that start ranks themselves are refused, because the command already runs once per rank.
        starters = {
            *LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "mpirun", "mpiexec", "srun", "horovodrun",
        }  # fmt: skip
        starts = sorted({PurePath(words[0]).name, words[program_at(words) or 0]} & starters)
        remedy = "leave it and its options out (see --launcher), and begin with python and the script"
        _require(not starts, "arguments", f"{', '.join(starts)} would start its own ranks on each rank", remedy)


def program_at(words: Sequence[str]) -> int | None:
    """Index of the script's file or of the module after `-m` in the words: later words are the script's arguments. None: there
    is neither."""
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
    _require(bool(groups & set(RATES)), "pattern", "has no group for the speed of a step", example)


def _checked_values(field_name: str, declared: Mapping[str, object]) -> Values:
    """The distinct values as text."""
    checked: Values = {}
    for name, values in declared.items():
        value_field = f"{field_name}.{name}"
        _require(bool(_NAME.fullmatch(name)), value_field, "is not a name", "use letters, digits and _")
        listed = values if isinstance(values, list | tuple) else (values,)
        texts = tuple(dict.fromkeys(_text(value) for value in listed))
        good = bool(texts) and all(re.fullmatch(r"[^\s\x00-\x1f]+", text) for text in texts)
        _require(
            good,
            value_field,
            f"{list(texts)} are not valid values",
            "give at least one, without spaces, as in num_workers=0,2,4",
        )
        checked[name] = texts
    return checked


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require(holds: bool, field_name: str, problem: str, remedy: str) -> None:
    if not holds:
        raise _wrong(field_name, problem, remedy)


def _wrong(field_name: str, problem: str, remedy: str) -> ModelFormatError:
    return ModelFormatError(f"command.{field_name}", problem, remedy)
